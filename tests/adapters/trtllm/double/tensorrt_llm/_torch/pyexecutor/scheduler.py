"""Requests, and a batch as the scheduler hands it to the resource managers."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class LlmRequest:
    py_request_id: int
    prompt_len: int = 1
    is_dummy: bool = False
    expect_snapshot_points: list[int] = field(default_factory=list)


@dataclass
class ScheduledRequests:
    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)
