"""The functions that wrap SGLang's: each takes the original first, and leaves all others' work to it.

`patch_points` says which function wraps what and why. A pool of states has rings only where the server was
started for it; without them every hook here is the original and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from replayssm.adapters.sglang import decode, speculation
from replayssm.adapters.sglang.patch_points import (
    RELIED_ON,
    SCHEDULER,
    SPECULATION,
    Incompatible,
    PatchPoint,
    check,
    installed_version,
    prove_live,
)
from replayssm.adapters.sglang.replay_pool import ReplayPool
from replayssm.adapters.sglang.served import POOL, layer_of, pool_of, serve, settings_of
from replayssm.adapters.sglang.settings import (
    OPTIONS,
    SETTINGS,
    Settings,
    add_arguments,
    read_options,
)
from replayssm.adapters.sglang.storage import Storage
from replayssm.core.geometry import Rule
from replayssm.kernels.registry import StepCall, resolve_serving

logger = logging.getLogger(__name__)

Original = Callable[..., Any]

_TRACKED = "_replayssm_tracked"
"""Attribute of a decode batch: the rows whose states SGLang keeps for its prefix cache after this step."""
_ARRIVED = "_replayssm_arrived"
"""Attribute of a batch: the rows whose states another server has sent since the last one."""

# Server arguments and processes.


def add_options(original: Original, parser: Any) -> Any:
    """Add the adapter's options to SGLang's parser."""
    result = original(parser)
    add_arguments(parser)
    return result


def keep_options(original: Original, cls: Any, args: Any) -> Any:
    """Keep the adapter's options with the server arguments."""
    server_args = original(cls, args)
    setattr(server_args, OPTIONS, read_options(args))
    return server_args


def report_settings(original: Original, self: Any) -> Any:
    """Show the settings among the resolved server arguments."""
    result = original(self)
    settings: Settings | None = getattr(self, SETTINGS, None)
    if settings is not None:
        result["replayssm"] = {
            "window": settings.window,
            "backend": settings.backend,
            "precision": settings.precision,
            "speculation": settings.speculation,
            "skip_tolerance": settings.skip_tolerance,
            "small_batch": settings.small_batch,
        }
    return result


def patch_scheduler(original: Original, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Patch the rest of SGLang in a scheduler process that decodes with replay."""
    context = original(server_args, *args, **kwargs)
    settings: Settings | None = getattr(server_args, SETTINGS, None)
    if settings is not None and kwargs.get("role") == "scheduler":
        install(settings)
    return context


def install(settings: Settings) -> None:
    """Apply the patches of scheduler processes.

    Raises:
        Incompatible: SGLang is not what they were written for, or one did not take hold.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    points = _points(settings)
    check((*points, *RELIED_ON))
    for point in points:
        if point.target not in _registered:
            HookRegistry.register(point.target, by_name()[point.hook], HookType.AROUND)
            _registered.add(point.target)
    HookRegistry.apply_hooks()
    prove_live(points, by_name())


def by_name() -> dict[str, Any]:
    """All hooks by name."""
    return vars(speculation) | globals()


def _points(settings: Settings) -> tuple[PatchPoint, ...]:
    return (*SCHEDULER, *SPECULATION) if settings.speculation else SCHEDULER


_registered: set[str] = set()


# Rings.


def gdn_backend(original: Original, self: Any, model_runner: Any) -> None:
    """Rings for a model whose recurrent layers are Gated DeltaNet."""
    original(self, model_runner)
    _require_triton(self, model_runner)
    _give_rings(model_runner, Rule.GDN)


def kda_backend(original: Original, self: Any, model_runner: Any) -> None:
    """Rings for a model whose recurrent layers are Kimi Delta Attention."""
    original(self, model_runner)
    _require_triton(self, model_runner)
    pool = _give_rings(model_runner, Rule.KDA)
    if pool is not None:
        # SGLang sends layers with the bounded gate past `packed_decode`, which has it here.
        self.kernel_dispatcher.supports_packed_decode_safe_gate = True
        # Convolution and recurrence of a verification in one kernel, past `target_verify`.
        self._fused_chain_verify_fn = None


def mamba2_backend(original: Original, self: Any, model_runner: Any) -> None:
    """Rings for a model whose recurrent layers are Mamba-2."""
    original(self, model_runner)
    _give_rings(model_runner, Rule.MAMBA2)


def require_rings(original: Original, runner: Any, full_attn_backend: Any) -> Any:
    """A server that was started with replay decodes with it, or does not start."""
    backend = original(runner, full_attn_backend)
    if settings_of(runner) is not None and pool_of(runner.req_to_token_pool) is None:
        linear = getattr(backend, "linear_attn_backend", backend)
        raise Incompatible(
            "replayssm: expected a model with Gated DeltaNet, Kimi Delta Attention or "
            f"Mamba-2 layers, got one that SGLang serves by {type(linear).__name__}; leave the flag out"
        )
    return backend


def budget_rings(original: Original, self: Any, total_rest_memory: float) -> float:
    """Count each slot's ring and read copy in SGLang's memory budget, and with speculation no snapshots.

    SGLang reserves room for whole states, convolution and all, for each draft token of each request. Here
    only the windows of the convolution are left of that, so it is told that nothing is drafted.
    """
    settings = settings_of(self)
    params = getattr(self.mambaish_config, "mamba2_cache_params", None)
    if settings is None or params is None or 0 in params.shape.temporal:
        return float(original(self, total_rest_memory))
    gdn = self.hybrid_gdn_config is not None
    rule = Rule.KDA if params.is_kda else Rule.GDN if gdn else Rule.MAMBA2
    storage = Storage.of(settings, rule, params, self.model_dtype)
    before, algorithm = self.extra_mamba_cache_bytes_per_req, self.spec_algorithm
    self.extra_mamba_cache_bytes_per_req = before + storage.bytes_per_slot * len(params.layers)
    if settings.speculation:
        total_rest_memory -= speculation.window_bytes(self, params, settings.max_draft) / (1 << 30)
        self.spec_algorithm = type(algorithm).from_string(None)
    try:
        return float(original(self, total_rest_memory))
    finally:
        self.extra_mamba_cache_bytes_per_req, self.spec_algorithm = before, algorithm


def _give_rings(model_runner: Any, rule: Rule) -> ReplayPool | None:
    """The rings of a model's state pool, made where there are none; `None` without replay."""
    settings = settings_of(model_runner)
    if settings is None:
        return None
    slots = model_runner.req_to_token_pool
    mamba_pool = slots.mamba_pool
    pool: ReplayPool | None = getattr(mamba_pool, POOL, None)
    if pool is not None:
        return pool
    prove_live(_points(settings), by_name())
    storage = Storage.of(settings, rule, _cache_params(model_runner.model_config), model_runner.dtype)
    states = mamba_pool.mamba_cache.temporal
    if states.dtype is not storage.dtype:
        raise Incompatible(f"expected SGLang's states in {storage.dtype}, as asked, got {states.dtype}")
    plain = storage.precision.plain and not settings.skip_tolerance
    call = None if plain else StepCall.of_decoding(storage.layout, storage.precision)
    backend = resolve_serving(settings.backend, states.device, call).__name__.rsplit(".", 1)[-1]
    rates = _rates(model_runner.model, len(states)) if rule is Rule.MAMBA2 else None
    with mamba_pool.memory_saver_adapter.region(_memory_type()):
        rings, read_states = storage.allocate(len(states), states.shape[1], states.device)
    seed = _first_seed() if storage.stochastic else None
    pool = ReplayPool(
        storage.layout, states, rings, settings.backend, rates, read_states, seed, settings.small_batch
    )
    # Compiles the kernel that makes states current, for indices as hooks and steps have them: slot 0 is
    # skipped by it.
    for dtype in (torch.int64, torch.int32):
        pool.flush(torch.zeros(1, dtype=dtype, device=states.device))
    serve(mamba_pool, pool)
    setattr(slots.mamba_allocator, POOL, pool)
    mamba_pool.register_slot_state(pool)
    mamba_pool.mem_usage += pool.bytes / (1 << 30)
    if rule is Rule.KDA:
        # SGLang's sign that a ring exists, at which it leaves its fused KDA step alone.
        mamba_pool.mamba_cache = replace(mamba_pool.mamba_cache, replayssm_d=pool.stacked["u_cache"])
    drafts = f"drafts of up to {settings.max_draft} tokens" if settings.speculation else "no drafts"
    if settings.skip_tolerance:
        drafts += f", reads under {settings.skip_tolerance:g} left out"
    if settings.small_batch:
        drafts += f", decode steps of up to {settings.small_batch} rows left to SGLang"
    logger.info(
        "replayssm: %d %s layers of SGLang %s; %s; window %d, %s; state %s; %s %.2f GB in %d slots",
        len(states), rule, installed_version(), backend, settings.window, drafts, storage.precision,
        "rings and read copies" if read_states else "rings", pool.bytes / (1 << 30), states.shape[1],
    )  # fmt: skip
    return pool


def _first_seed() -> int:
    """Of stochastic rounding, the same in each run: its low half counts steps, its high half is the rank."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.pp_rank * parallel.tp_size + parallel.tp_rank) << 32


def _cache_params(model_config: Any) -> Any:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config).mamba2_cache_params


def _memory_type() -> str:
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    return str(GPU_MEMORY_TYPE_KV_CACHE)


def _rates(model: Any, layers: int) -> list[torch.Tensor]:
    """`A` `[H]` fp32 of each Mamba-2 layer on this rank, in model order."""
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

    mixers = [module for module in model.modules() if isinstance(module, MambaMixer2)]
    if len(mixers) != layers:
        found = sorted({type(module).__name__ for module in model.modules() if hasattr(module, "A")})
        raise Incompatible(
            f"--enable-linear-replayssm: expected {layers} MambaMixer2 layers, found {len(mixers)}; layers "
            f"with a decay rate: {', '.join(found) or 'none'}. Start the model without the flag"
        )
    return [mixer.A.detach().float() for mixer in mixers]


def _require_triton(backend: Any, model_runner: Any) -> None:
    """Delta-rule layers are served where SGLang calls its Triton kernel."""
    settings = settings_of(model_runner)
    if settings is None:
        return
    dispatcher = backend.kernel_dispatcher
    kernels = {"decode": dispatcher.decode_kernel}
    if settings.speculation:
        kernels["verify"] = dispatcher.verify_kernel
    for phase, kernel in kernels.items():
        if not dispatcher.supports_packed_decode or "Triton" not in type(kernel).__name__:
            raise Incompatible(
                f"replayssm: expected SGLang to {phase} by a Triton kernel with packed inputs, got "
                f"{type(kernel).__name__}; leave --linear-attn-{phase}-backend out or set it to triton"
            )


# A decode step.


def gdn_decode(
    original: Original, self: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **given: Any
) -> Any:
    """A Gated DeltaNet layer."""
    return _delta_decode(original, self, mixed_qkv, a, b, given)


def kda_decode(
    original: Original, self: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **given: Any
) -> Any:
    """A Kimi Delta Attention layer."""
    return _delta_decode(original, self, mixed_qkv, a, b, given)


def _delta_decode(
    original: Original, self: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, given: Any
) -> Any:
    served = layer_of(given["ssm_states"])
    if served is None or _left_to_sglang(*served, given["cache_indices"]):
        return original(self, mixed_qkv, a, b, **given)
    pool, layer = served
    return decode.delta(
        pool, layer, mixed_qkv, a, b, given["A_log"], given["dt_bias"], given["scale"],
        given["cache_indices"], given.get("lower_bound"),
    )  # fmt: skip


def mamba2_decode(
    original: Original,
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    **given: Any,
) -> None:
    """A Mamba-2 layer, in decode and in verification."""
    served = layer_of(state)
    one_token = x.dim() == 3
    if served is None or (one_token and _left_to_sglang(*served, given["state_batch_indices"])):
        original(state, x, dt, A, B, C, D, **given)
        return
    pool, layer = served
    decode.mamba2(
        pool, layer, x, dt, A, B, C, D, given.get("z"), given.get("dt_bias"),
        given.get("dt_softplus", False), given["state_batch_indices"], given["out"],
        given.get("retrieve_parent_token"),
    )  # fmt: skip


def _left_to_sglang(pool: ReplayPool, layer: int, slots: torch.Tensor) -> bool:
    """Whether SGLang's own kernel takes a decode step; before the first layer all states are made current."""
    left = pool.leaves(slots)
    if left and layer == 0:
        pool.fold(slots)
    return left


def end_of_delta_layer(
    original: Original,
    self: Any,
    forward_batch: Any,
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    layer_id: int | None = None,
) -> None:
    """Move the cursors after the last layer of a step."""
    original(self, forward_batch, conv_states, ssm_states, cache_indices, layer_id)
    served = layer_of(ssm_states)
    if served is not None:
        pool, layer = served
        if layer == len(pool.rings) - 1 and not pool.leaves(cache_indices):
            pool.commit(cache_indices)


def end_of_mamba2_layer(
    original: Original,
    self: Any,
    mixer: Any,
    hidden_states: torch.Tensor,
    output: torch.Tensor | None,
    layer_id: int,
    forward_batch: Any,
    **given: Any,
) -> Any:
    """Move the cursors of a step's decode rows after the last layer."""
    result = original(self, mixer, hidden_states, output, layer_id, forward_batch, **given)
    pool = pool_of(self.req_to_token_pool)
    metadata = self.forward_metadata
    last = self.req_to_token_pool.mamba_pool.mamba_layer_ids[-1]
    if pool is not None and metadata.num_decodes and not metadata.is_target_verify and layer_id == last:
        first = metadata.num_prefills
        slots = metadata.mamba_cache_indices[first : first + metadata.num_decodes]
        if not pool.leaves(slots):
            pool.commit(slots)
    return result


# States that others read.


def keep_rows(original: Original, cls: Any, batch: Any, model_runner: Any, **given: Any) -> Any:
    """Keep which rows of a batch SGLang's prefix cache wants or have just arrived: nothing is read back."""
    forward_batch = original(cls, batch, model_runner, **given)
    mask = getattr(batch, "mamba_track_mask_cpu", None)
    if mask is not None and forward_batch.forward_mode.is_decode():
        setattr(forward_batch, _TRACKED, [row for row, tracked in enumerate(mask) if tracked])
    pool = None if model_runner.is_draft_worker else pool_of(model_runner.req_to_token_pool)
    if pool is not None and pool.arrived:
        rows = [row for row, req in enumerate(batch.reqs) if req.kv.req_pool_idx in pool.arrived]
        pool.arrived -= {batch.reqs[row].kv.req_pool_idx for row in rows}
        setattr(forward_batch, _ARRIVED, rows)
    return forward_batch


def forward(original: Original, self: Any, forward_batch: Any, *args: Any, **given: Any) -> Any:
    """Make states current before a prefill reads them, and after a step those that it tracks.

    Read copies are made anew behind a prefill, and before the first step of requests from another server.
    """
    pool = None if self.is_draft_worker else pool_of(self.req_to_token_pool)
    if pool is None:
        return original(self, forward_batch, *args, **given)
    pool.settle()
    arrived: list[int] = getattr(forward_batch, _ARRIVED, [])
    if arrived:
        requests = forward_batch.req_pool_indices
        pool.renew(_slots(self, requests[_on_device(arrived, requests.device)]))
    mode = forward_batch.logical_forward_mode
    prefilled = None
    if mode.is_target_verify():
        pool.drafts = forward_batch.spec_info.draft_token_num
    elif mode.is_extend():
        prefilled = _slots(self, forward_batch.req_pool_indices)
        pool.flush(prefilled)
    tracked = _tracked(self, forward_batch) if mode.is_decode() else None
    result = original(self, forward_batch, *args, **given)
    if prefilled is not None:
        pool.renew(prefilled)
    if tracked is not None:
        pool.snapshot(*tracked)
    return result


def _slots(model_runner: Any, requests: torch.Tensor) -> torch.Tensor:
    slots = model_runner.req_to_token_pool
    found: torch.Tensor = slots.translate_mamba_indices(slots.get_mamba_indices(requests))
    return found


def _tracked(model_runner: Any, forward_batch: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Slots of the rows that a decode batch tracks, and the slots that keep their states.

    SGLang copies a tracked state by itself, during the step and without its history.
    """
    if forward_batch.mamba_track_mask is None:
        return None
    requests, targets = forward_batch.req_pool_indices, forward_batch.mamba_track_indices
    rows: list[int] | None = getattr(forward_batch, _TRACKED, None)
    if rows is None:
        targets = torch.where(forward_batch.mamba_track_mask, targets, -1)
    elif not rows:
        return None
    else:
        chosen = _on_device(rows, requests.device)
        requests, targets = requests[chosen], targets[chosen]
    return _slots(model_runner, requests).long(), targets


def _on_device(rows: list[int], device: torch.device) -> torch.Tensor:
    """`rows` as a tensor, without a wait."""
    return torch.tensor(rows, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def copy_to_host(original: Original, self: Any, indices: torch.Tensor) -> Any:
    """States that go to the host, when a request is retracted, are current."""
    pool: ReplayPool | None = getattr(self, POOL, None)
    if pool is not None:
        if indices.is_cuda:
            torch.cuda.synchronize(indices.device)
        pool.flush(indices)
    return original(self, indices)


def donate_state(original: Original, self: Any, req: Any, *args: Any, **given: Any) -> Any:
    """A request's own state is current when the prefix cache takes or copies it, so its key stays whole.

    With an extra buffer the cache takes tracked states, which `forward` has made current.
    """
    slots = self.cache.req_to_token_pool
    pool = pool_of(slots)
    if pool is not None and not self.cache.enable_mamba_extra_buffer:
        pool.flush(slots.translate_mamba_indices(req.kv.mamba_pool_idx.unsqueeze(0)))
    return original(self, req, *args, **given)


# Slots that change hands.


def allocate_slots(original: Original, self: Any, need_size: int) -> Any:
    """Slots that are handed out have empty rings, whatever their previous owner left."""
    allocated = original(self, need_size)
    pool: ReplayPool | None = getattr(self, POOL, None)
    if pool is not None and allocated is not None:
        pool.hand_out(allocated)
    return allocated


def load_checkpoint(
    original: Original, self: Any, active_mamba_pool: Any, ckpt_slots: Any, active_slots: torch.Tensor
) -> Any:
    """A slot that a quantised checkpoint was loaded into has an empty ring and a new read copy."""
    result = original(self, active_mamba_pool, ckpt_slots, active_slots)
    pool: ReplayPool | None = getattr(active_mamba_pool, POOL, None)
    if pool is not None:
        pool.adopt(active_slots)
    return result


def adopt_state(original: Original, self: Any, req: Any) -> Any:
    """A slot that a state is loaded into has an empty ring; a prefill will go on from the state."""
    slots = self.cache.req_to_token_pool
    pool = pool_of(slots)
    if pool is not None:
        pool.hand_out(slots.translate_mamba_indices(req.kv.mamba_pool_idx.unsqueeze(0)))
    return original(self, req)


def receive_states(original: Original, self: Any, future_map: Any) -> Any:
    """Note requests whose states another server has sent; their first step makes the read copies.

    Not here: a request may end before that step, and its slot be where the next state is on its way to.
    """
    pool = pool_of(self.req_to_token_pool)
    if pool is not None and pool.read_states is not None:
        pool.arrived.update(req.kv.req_pool_idx for req in self.reqs)
    return original(self, future_map)
