"""What happens to a request, in any mode: the functions that wrap TensorRT-LLM's where requests come and go.

Each hook takes the original first. What a mode does with a request is its `Records`'.
"""

from __future__ import annotations

from typing import Any

from replayssm.adapters.trtllm.managers import Original, scheduled, slots_of
from replayssm.adapters.trtllm.served import RECORDS, rings_of


def prepare(original: Original, self: Any, scheduled_batch: Any) -> Any:
    """A batch was scheduled: requests that come to a slot with their state find no history there."""
    result = original(self, scheduled_batch)
    records = rings_of(self)
    if records is not None:
        records.begin(*scheduled(scheduled_batch), slots_of(self))
    return result


def free(original: Original, self: Any, request: Any, *args: Any, **given: Any) -> Any:
    """A request has ended."""
    records = rings_of(self)
    if records is not None:
        records.leave(request.py_request_id)
    return original(self, request, *args, **given)


def suspend(original: Original, self: Any, req: Any) -> Any:
    """A state that goes to the host is current; the request comes back without a history."""
    records = rings_of(self)
    slot = None if records is None else slots_of(self).get(req.py_request_id)
    if records is not None and slot is not None:
        records.wait()
        records.retire({req.py_request_id: slot})
        records.wait()
    return original(self, req)


def shut_down(original: Original, self: Any) -> Any:
    """Records go before the memory that they are views of."""
    self.__dict__.pop(RECORDS, None)
    return original(self)
