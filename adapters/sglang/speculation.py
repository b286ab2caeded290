"""Verification of drafts: the functions that wrap SGLang's speculative steps and what ends them.

SGLang keeps a state for each draft token and copies one of them back; here a step leaves its tokens in the
rings, and what was accepted is a number added to a cursor. The convolution's windows stay SGLang's. Drafters
make no difference, since all of SGLang's end in `update_mamba_state_after_mtp_verify`; only drafts of n-grams
are made what layers take them for, see `chain_drafts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from replayssm.adapters.sglang import decode
from replayssm.adapters.sglang.patch_points import Incompatible
from replayssm.adapters.sglang.replay_pool import Accepted, ReplayPool
from replayssm.adapters.sglang.served import layer_of, pool_of
from replayssm.adapters.sglang.settings import SETTINGS, Settings

Original = Callable[..., Any]

# Pools and memory.


def pool_without_snapshots(original: Original, self: Any, *, cache_params: Any, **given: Any) -> None:
    """SGLang's state pool with the convolution's windows of each draft token and no states.

    It is the pool of SGLang's own replay for speculation, with rings of no records, which then go.
    """
    from sglang.srt.runtime_context import get_server_args

    settings: Settings | None = getattr(get_server_args(), SETTINGS, None)
    drafts = given.get("speculative_num_draft_tokens")
    if settings is None or not settings.speculation or drafts is None:
        original(self, cache_params=cache_params, **given)
        return
    if drafts > settings.max_draft:
        raise Incompatible(
            f"replayssm: expected drafts of at most {settings.max_draft} tokens, as when SGLang's arguments "
            f"were resolved, got {drafts}"
        )
    # Of KDA's pool SGLang expects rings of a certain length; its windows differ by their shape alone.
    params = SimpleNamespace(shape=cache_params.shape, dtype=cache_params.dtype, is_kda=False)
    if cache_params.is_kda:
        params.shape = replace(cache_params.shape, disable_conv_window_dedup=True)
    changed = {"enable_linear_replayssm_spec": True, "linear_replayssm_cache_len": 0}
    original(self, cache_params=params, **{**given, **changed})
    self.enable_linear_replayssm_spec = False
    self.replayssm_spec_write_pos = self.replayssm_cache_base = self.replayssm_is_flush = None
    cache = self.mamba_cache
    rings = {name: None for name in vars(cache) if name.startswith("replayssm_")}
    nothing = cache.temporal.new_empty(len(cache.temporal), 0)
    self.mamba_cache = replace(cache, **rings, intermediate_ssm=nothing)


def window_bytes(configurator: Any, params: Any, drafts: int) -> int:
    """Bytes of the convolution's windows of each draft token, for the most requests that may run."""
    from sglang.srt.mem_cache import kv_cache_configurator, memory_pool
    from sglang.srt.runtime_context import get_schedule, get_spec

    if kv_cache_configurator._pd_prefill_skips_mamba_spec_state():
        return 0
    shared = not params.shape.disable_conv_window_dedup and memory_pool.conv_window_dedup_enabled(
        memory_pool._is_npu, memory_pool._is_cpu, get_spec().speculative_eagle_topk, params.is_kda
    )
    taps = params.shape.conv_kernel - 1
    values = sum(channels * width for channels, width in params.shape.conv)
    columns = drafts + taps - 1 if shared else drafts * taps
    requests = max(1, get_schedule().max_running_requests // configurator.attn_dp_size) + 1
    return requests * len(params.layers) * values // taps * columns * params.dtype.conv.itemsize


# A verification step.


def chain_drafts(original: Original, self: Any, *args: Any, **given: Any) -> tuple[np.ndarray, np.ndarray]:
    """N-grams of breadth 1, without the branches that SGLang's corpus gives them all the same.

    Each suffix of a text that the corpus knows has a path of its own from the root, and what fills a draft up
    hangs there as well. SGLang tells recurrent layers of branches only where the breadth is above 1: else
    they take a node for the successor of the one before it, and what is predicted behind it is wrong.
    """
    from sglang.srt.runtime_context import get_spec

    drafts, mask = original(self, *args, **given)
    return as_chains(drafts, mask) if get_spec().speculative_eagle_topk == 1 else (drafts, mask)


def as_chains(drafts: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The longest path of each draft tree, of equals the first, filled up with token 0.

    Args:
        drafts: tokens `[B * nodes]` of the trees, parents first.
        mask: `[B * nodes * nodes]`, of each node which nodes are on its path, itself included.

    Returns:
        The same of the chains, in the same dtypes.
    """
    nodes = mask.size // drafts.size
    tokens, paths = drafts.reshape(-1, nodes), mask.reshape(-1, nodes, nodes) != 0
    deepest = paths.sum(-1).argmax(-1)
    path = np.take_along_axis(paths, deepest[:, None, None], axis=1)[:, 0]
    order = np.argsort(~path, axis=-1, kind="stable")
    chains = np.take_along_axis(tokens, order, axis=-1)
    chains[np.arange(nodes) >= path.sum(-1, keepdims=True)] = 0
    chain = np.tril(np.ones((nodes, nodes), dtype=mask.dtype))
    return chains.ravel(), np.broadcast_to(chain, paths.shape).ravel()


def gdn_verify(original: Original, self: Any, **given: Any) -> Any:
    """A Gated DeltaNet layer."""
    return _delta_verify(original, self, given)


def kda_verify(original: Original, self: Any, **given: Any) -> Any:
    """A Kimi Delta Attention layer."""
    return _delta_verify(original, self, given)


def _delta_verify(original: Original, self: Any, given: dict[str, Any]) -> Any:
    served = layer_of(given["ssm_states"])
    if served is None:
        return original(self, **given)
    pool, layer = served
    return decode.verify_delta(
        pool, layer, given["q"], given["k"], given["v"], given["a"], given["b"], given["A_log"],
        given["dt_bias"], given["cache_indices"], given["cache_steps"], given["retrieve_parent_token"],
        given.get("lower_bound"),
    )  # fmt: skip


# Its end.


def keep_accepted_path(
    original: Original,
    target_worker: Any,
    batch: Any,
    accept_lens: torch.Tensor,
    accept_index: torch.Tensor,
    draft_token_num: int,
    *args: Any,
    **given: Any,
) -> Any:
    """Keep which tokens of each draft were accepted, and how many; SGLang passes on the last alone."""
    pool = pool_of(target_worker.model_runner.req_to_token_pool)
    if pool is None:
        return original(target_worker, batch, accept_lens, accept_index, draft_token_num, *args, **given)
    pool.accepted = Accepted(accept_index, accept_lens)
    try:
        return original(target_worker, batch, accept_lens, accept_index, draft_token_num, *args, **given)
    finally:
        pool.accepted = None


def end_of_verification(
    original: Original,
    self: Any,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    *args: Any,
    **given: Any,
) -> None:
    """Move the cursors by what was accepted; make the states that the prefix cache tracks current.

    The step is the last that the recurrent backend has prepared: its slots are those that the layers saw, in
    a CUDA graph too.
    """
    last, steps = last_correct_step_indices, mamba_steps_to_track
    original(self, last, mamba_track_indices, steps, *args, **given)
    linear = self.linear_attn_backend
    pool = pool_of(linear.req_to_token_pool)
    if pool is None:
        return
    metadata = linear.forward_metadata
    slots = metadata.mamba_cache_indices[: len(last)]
    if metadata.retrieve_parent_token is None:
        accepted = last + 1 if pool.accepted is None else pool.accepted.lens
    else:
        path, accepted = _tree_path(pool)
        pool.compact(slots, path, accepted)
        last = accepted - 1
        if steps is not None:
            steps = torch.where(steps < 0, -1, (path == steps[:, None]).int().argmax(-1))
    pool.commit(slots, pool.drafts, accepted)
    if mamba_track_indices is not None and steps is not None:
        pool.track(slots, mamba_track_indices, steps, last)


def _tree_path(pool: ReplayPool) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted nodes of each tree, `[B, A]`, numbered within it, and how many, `[B]`."""
    if pool.accepted is None:
        raise Incompatible(
            "replayssm: expected the accepted nodes of draft trees, by commit_mamba_states_after_verify, got "
            "the last nodes alone; use --speculative-eagle-topk 1"
        )
    path, lens = pool.accepted
    first = torch.arange(0, len(path) * pool.drafts, pool.drafts, dtype=path.dtype, device=path.device)
    return path - first[:, None], lens


def roll_back_convolution(original: Original, mamba_caches: Any, *args: Any, **given: Any) -> None:
    """Copy the convolution's windows back, and no states, which never were ahead."""
    if layer_of(mamba_caches.temporal) is not None:
        mamba_caches = replace(mamba_caches, temporal=mamba_caches.temporal[:0])
    original(mamba_caches, *args, **given)
