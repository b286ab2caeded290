"""What the adapter relies on in SGLang, as data: what it wraps, what it calls, and how they are checked.

Targets are resolved only when they are checked, so that reading this module imports nothing of SGLang.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# The release with which the tests have run.
CHECKED_VERSION = "0.5.23"


@dataclass(frozen=True)
class PatchPoint:
    """A function of SGLang.

    Attributes:
        target: its dotted name.
        parameters: the parameters that the adapter passes or reads.
        why: what the adapter needs it for.
        hook: the function of `hooks` that wraps it; empty where it is only called.
    """

    target: str
    parameters: tuple[str, ...]
    why: str
    hook: str = ""


_POOL = "sglang.srt.mem_cache.memory_pool"
_HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
_LINEAR = "sglang.srt.layers.attention.linear"
_RADIX = "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent"
_PREBUILT = "sglang.srt.disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin"

# In every process that loads plugins: options, their resolution, and the start of the others.
EVERYWHERE = (
    PatchPoint(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        ("parser",),
        "the adapter's options on the command line",
        "add_options",
    ),
    PatchPoint(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        ("cls", "args"),
        "the options' values, kept with the server arguments",
        "keep_options",
    ),
    PatchPoint(
        "sglang.srt.server_args.ServerArgs.resolved_dict",
        ("self",),
        "the settings in /get_server_info",
        "report_settings",
    ),
    PatchPoint(
        "sglang.srt.runtime_context.publish",
        ("server_args", "role"),
        "a scheduler process that serves with replay gets the other patches",
        "patch_scheduler",
    ),
)

# In scheduler processes of a server that decodes with replay.
SCHEDULER = (
    PatchPoint(
        f"{_LINEAR}.gdn_backend.GDNAttnBackend.__init__",
        ("self", "model_runner"),
        "rings for a model with Gated DeltaNet layers",
        "gdn_backend",
    ),
    PatchPoint(
        f"{_LINEAR}.kda_backend.KDAAttnBackend.__init__",
        ("self", "model_runner"),
        "rings for a model with Kimi Delta Attention layers",
        "kda_backend",
    ),
    PatchPoint(
        f"{_HYBRID}.Mamba2AttnBackend.__init__",
        ("self", "model_runner"),
        "rings for a model with Mamba-2 layers",
        "mamba2_backend",
    ),
    PatchPoint(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        ("runner", "full_attn_backend"),
        "a model that got no rings is refused",
        "require_rings",
    ),
    PatchPoint(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
        ("self", "total_rest_memory"),
        "rings and read copies in the memory budget",
        "budget_rings",
    ),
    PatchPoint(
        f"{_LINEAR}.kernels.gdn_triton.TritonGDNKernel.packed_decode",
        (
            "self", "mixed_qkv", "a", "b", "A_log", "dt_bias", "scale", "ssm_states", "cache_indices",
            "num_v_heads", "head_v_dim",
        ),
        "decode of a Gated DeltaNet layer",
        "gdn_decode",
    ),
    PatchPoint(
        f"{_LINEAR}.kernels.kda_triton.TritonKDAKernel.packed_decode",
        (
            "self", "mixed_qkv", "a", "b", "A_log", "dt_bias", "scale", "ssm_states", "cache_indices",
            "num_v_heads", "head_v_dim", "lower_bound",
        ),
        "decode of a Kimi Delta Attention layer",
        "kda_decode",
    ),
    PatchPoint(
        "sglang.kernels.ops.mamba.triton_ops.ssu_dispatch.selective_state_update",
        (
            "state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus", "state_batch_indices",
            "out", "disable_state_update",
        ),
        "decode of a Mamba-2 layer",
        "mamba2_decode",
    ),
    PatchPoint(
        f"{_HYBRID}.MambaAttnBackendBase._track_mamba_state_decode",
        ("self", "forward_batch", "conv_states", "ssm_states", "cache_indices", "layer_id"),
        "cursors move after the last delta-rule layer",
        "end_of_delta_layer",
    ),
    PatchPoint(
        f"{_HYBRID}.Mamba2AttnBackend.forward",
        ("self", "mixer", "hidden_states", "output", "layer_id", "forward_batch"),
        "cursors move after the last Mamba-2 layer",
        "end_of_mamba2_layer",
    ),
    PatchPoint(
        "sglang.srt.model_executor.model_runner.ModelRunner._forward_raw",
        ("self", "forward_batch"),
        "states are current before a prefill reads them, and in the slots a decode step tracks; read copies "
        "are made anew behind a prefill",
        "forward",
    ),
    PatchPoint(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        ("cls", "batch", "model_runner"),
        "which rows a decode step tracks, and which have come from another server, known on the host",
        "keep_rows",
    ),
    PatchPoint(
        "sglang.srt.mem_cache.allocator.mamba.MambaSlotAllocator._do_alloc",
        ("self", "need_size"),
        "slots that are handed out have empty rings",
        "allocate_slots",
    ),
    PatchPoint(
        f"{_POOL}.MambaPool.get_cpu_copy",
        ("self", "indices"),
        "states are current before they go to the host",
        "copy_to_host",
    ),
    PatchPoint(
        "sglang.srt.mem_cache.mamba_checkpoint_pool.MambaCheckpointPool.load_to_active",
        ("self", "active_mamba_pool", "ckpt_slots", "active_slots"),
        "rings are empty and read copies new after a quantised checkpoint is loaded",
        "load_checkpoint",
    ),
    PatchPoint(
        f"{_RADIX}.prepare_for_caching_req",
        ("self", "req", "insert_params", "token_ids_len", "is_finished"),
        "states are current before the prefix cache takes them",
        "donate_state",
    ),
    PatchPoint(
        f"{_RADIX}._adopt_loaded_state",
        ("self", "req"),
        "rings are empty after a state is loaded",
        "adopt_state",
    ),
    PatchPoint(
        f"{_PREBUILT}.process_prebuilt",
        ("self", "future_map"),
        "read copies of states that another server has sent",
        "receive_states",
    ),
)  # fmt: skip

# In addition, where it verifies drafts.
SPECULATION = (
    PatchPoint(
        f"{_POOL}.MambaPool.__init__",
        (
            "self", "cache_params", "speculative_num_draft_tokens", "linear_replayssm_cache_len",
            "enable_linear_replayssm_spec",
        ),
        "no state is kept for each draft token",
        "pool_without_snapshots",
    ),
    PatchPoint(
        f"{_LINEAR}.kernels.gdn_triton.TritonGDNKernel.target_verify",
        (
            "self", "A_log", "dt_bias", "q", "k", "v", "a", "b", "ssm_states", "cache_indices", "cache_steps",
            "retrieve_parent_token",
        ),
        "verification by a Gated DeltaNet layer",
        "gdn_verify",
    ),
    PatchPoint(
        f"{_LINEAR}.kernels.kda_triton.TritonKDAKernel.target_verify",
        (
            "self", "A_log", "dt_bias", "q", "k", "v", "a", "b", "ssm_states", "cache_indices", "cache_steps",
            "retrieve_parent_token", "lower_bound",
        ),
        "verification by a Kimi Delta Attention layer",
        "kda_verify",
    ),
    PatchPoint(
        "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get",
        ("self", "req_ids", "batch_tokens", "total_lens"),
        "n-grams that are verified as chains are chains",
        "chain_drafts",
    ),
    PatchPoint(
        "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify",
        ("target_worker", "batch", "accept_lens", "accept_index", "draft_token_num"),
        "the accepted path of a draft tree",
        "keep_accepted_path",
    ),
    PatchPoint(
        f"{_HYBRID}.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        ("self", "last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track", "model"),
        "cursors move by what was accepted, and states that are tracked are made current",
        "end_of_verification",
    ),
    PatchPoint(
        "sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify",
        ("mamba_caches", "state_indices_tensor", "last_correct_step_indices"),
        "only the convolution's states are rolled back by copies",
        "roll_back_convolution",
    ),
)  # fmt: skip

# Called, never wrapped.
RELIED_ON = (
    PatchPoint(f"{_POOL}.MambaPool.register_slot_state", ("self", "state"), "rings follow their slots"),
    PatchPoint(
        f"{_POOL}.HybridReqToTokenPool.get_mamba_indices",
        ("self", "req_indices"),
        "the slots of a batch's requests",
    ),
    PatchPoint(
        f"{_POOL}.HybridReqToTokenPool.translate_mamba_indices",
        ("self", "mamba_indices"),
        "the slots of a batch's requests",
    ),
    PatchPoint(
        "sglang.srt.arg_groups.overrides.declare_resolution",
        ("server_args", "source"),
        "decisions on server arguments",
    ),
    PatchPoint(
        "sglang.srt.arg_groups.overrides.max_speculative_num_draft_tokens",
        ("server_args",),
        "the longest draft",
    ),
    PatchPoint("sglang.srt.speculative.ragged_verify.read_ragged_verify_mode", (), "drafts of equal length"),
    PatchPoint("sglang.srt.runtime_context.get_server_args", (), "the settings, where a pool is made"),
    PatchPoint("sglang.srt.runtime_context.get_parallel", (), "each rank rounds by numbers of its own"),
    PatchPoint(
        "sglang.srt.mem_cache.kv_cache_configurator._pd_prefill_skips_mamba_spec_state",
        (),
        "servers that never verify",
    ),
    PatchPoint(
        f"{_POOL}.conv_window_dedup_enabled",
        ("is_npu", "is_cpu", "speculative_eagle_topk", "is_kda"),
        "bytes of the convolution's windows",
    ),
)


class Incompatible(RuntimeError):
    """SGLang is not what the adapter was written for, or a patch did not take hold."""


def installed_version() -> str:
    """The version of SGLang that is installed."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def check(points: Iterable[PatchPoint]) -> None:
    """Compare the installed SGLang with what the adapter expects of it.

    Raises:
        Incompatible: names each function that is missing or lacks a parameter, and says what to do.
    """
    problems = [problem for point in points if (problem := _mismatch(point))]
    if problems:
        raise Incompatible(
            f"replayssm does not fit SGLang {installed_version()}: {'; '.join(problems)}. It was checked "
            f"with SGLang {CHECKED_VERSION}: install that, or start without --enable-linear-replayssm"
        )


def prove_live(points: Iterable[PatchPoint], hooks: Mapping[str, Any]) -> None:
    """Check that every patch is in place: SGLang logs the errors of plugins and goes on without them.

    Args:
        points: patch points with hooks.
        hooks: the hooks by name.

    Raises:
        Incompatible: names the functions that run unpatched.
    """
    missing = [point.target for point in points if not _is_live(point, hooks[point.hook])]
    if missing:
        raise Incompatible(
            f"replayssm was asked for and these functions of SGLang {installed_version()} are not patched: "
            f"{', '.join(missing)}. The server's log has the reason; SGLANG_PLUGINS, if it is set, must "
            "name replayssm"
        )


def _resolve(target: str) -> Any:
    """The function of a dotted name, the plain function where it is a static or class method."""
    parent, name = target.rsplit(".", 1)
    owner = pkgutil.resolve_name(parent)
    raw = vars(owner).get(name) if isinstance(owner, type) else None
    return getattr(raw, "__func__", None) or getattr(owner, name)


def _mismatch(point: PatchPoint) -> str | None:
    try:
        function = _resolve(point.target)
    except (ImportError, AttributeError) as error:
        return f"{point.target}: expected for {point.why}, not found ({error})"
    found = list(inspect.signature(function).parameters)
    missing = [name for name in point.parameters if name not in found]
    if not missing:
        return None
    return (
        f"{point.target} ({point.why}): expected parameters {', '.join(point.parameters)}; missing "
        f"{', '.join(missing)}, found {', '.join(found)}"
    )


def _is_live(point: PatchPoint, hook: Any) -> bool:
    """Whether a hook is among the wrappers of its target, other plugins' wrappers aside."""
    function = _resolve(point.target)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
