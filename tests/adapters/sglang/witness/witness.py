"""A plugin for tests: what a scheduler process holds of rows, slots and tokens, in `/get_server_info`.

It changes nothing, and runs on any device.
"""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Add `held` to a scheduler's internal state."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler_components.internal_state"
    target += ".SchedulerInternalStateController.get_internal_state"
    HookRegistry.register(target, tell, HookType.AROUND)


def tell(original: Any, self: Any, recv_req: Any) -> Any:
    answer = original(self, recv_req)
    answer.internal_state["held"] = held(self.scheduler)
    return answer


def held(scheduler: Any) -> dict[str, int]:
    """Free rows, slots and tokens; values that are not finite; of the rings the longest history."""
    slots = scheduler.req_to_token_pool
    found = {
        "free_rows": slots.available_size(),
        "free_slots": slots.mamba_allocator.available_size(),
        "free_tokens": scheduler.token_to_kv_pool_allocator.available_size(),
    }
    states = slots.mamba_pool.mamba_cache.temporal
    found["not_finite"] = int((~torch.isfinite(states)).sum())
    pool = getattr(slots.mamba_pool, "_replayssm", None)
    if pool is not None:
        found["longest_history"] = int(pool.cursors.history.max())
        found["history_of_padding"] = int(pool.cursors.history[0])
        found["state_of_padding"] = int((states[:, 0] != 0).sum())
    return found
