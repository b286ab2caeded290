"""What the adapter relies on in each generation of TensorRT-LLM: what it wraps, what it reads, the calls.

Generations are told apart by what is there, never by version strings: release candidates move weekly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from replayssm.adapters.trtllm.contract import Attributes, Call, Function, Generation, Name, Target

_MANAGERS = ("_torch.pyexecutor.kv_cache.mamba_cache_manager", "_torch.pyexecutor.mamba_cache_manager")
_V2 = ("_torch.pyexecutor.kv_cache.kv_cache_manager_v2", "_torch.pyexecutor.kv_cache_manager_v2")
_MAMBA2 = ("_torch.modules.mamba.mamba2_mixer",)
_GDN = ("_torch.modules.mamba.gdn_mixer",)
_METADATA = ("_torch.modules.mamba.mamba2_metadata",)
_ATTENTION = ("_torch.attention.backends.interface", "_torch.attention_backend.interface")
_MODELS = ("_torch.models.modeling_utils",)
_OLD_GDN = ("_torch.models.modeling_qwen3_next",)
_UTIL = ("_torch.pyexecutor._util",)
_CONFIG = ("_torch.pyexecutor.config_utils",)
_SELECTIVE = ("_torch.modules.mamba.selective_state_update",)

_CPP, _PAGED, _PYTHON = "CppMambaHybridCacheManager", "MambaHybridCacheManagerV2", "PythonMambaCacheManager"
_LAYER = "Qwen3NextGatedDeltaNet"

_STATE_SHAPE = (
    "mamba_d_state", "mamba_d_conv", "mamba_num_heads", "mamba_n_groups", "mamba_head_dim",
    "mamba_num_layers", "mamba_layer_mask", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "kv_cache_config",
    "kv_cache_type",
)  # fmt: skip
_SIZES = (
    "num_layers", "num_kv_heads", "head_dim", "tokens_per_block", "max_seq_len", "max_batch_size", "mapping",
    "dtype", "spec_config", "layer_mask", "is_estimating_kv_cache", "is_draft", "use_replay_state_update",
    "mamba_ssm_stochastic_rounding",
)  # fmt: skip
_MIXED_SIZES = (
    "num_layers", "layer_mask", "num_kv_heads", "head_dim", "tokens_per_block", "max_seq_len",
    "max_batch_size", "mapping", "dtype", "spec_config", "is_estimating_kv_cache", "execution_stream",
    "model_type", "is_draft", "use_replay_state_update", "mamba_ssm_stochastic_rounding",
    "pool_configurations",
)  # fmt: skip
_READ_AT_START = (
    "mamba_n_groups", "mamba_cache_dtype", "max_batch_size", "mapping", "spec_config", "is_draft",
    "use_replay_state_update", "mamba_ssm_stochastic_rounding",
)  # fmt: skip
_COMMITTED = ("self", "attn_metadata", "num_accepted_tokens", "state_indices")
_UPDATE = (*_COMMITTED, "accepted_leaf_positions")
_PYTHON_INIT = (
    "self", "d_state", "d_conv", "num_heads", "n_groups", "head_dim", "num_layers", "max_batch_size",
    "spec_state_size", "mapping", "dtype", "ssm_cache_dtype", "layer_mask", "speculative_num_draft_tokens",
    "model_type", "use_replay_state_update", "mamba_ssm_stochastic_rounding",
)  # fmt: skip
_DECODED = (
    "A_log", "a", "dt_bias", "q", "k", "v", "b", "initial_state_source", "initial_state_indices",
    "cu_seqlens", "use_qk_l2norm_in_kernel", "softplus_beta", "softplus_threshold",
)  # fmt: skip
_VERIFY = (
    "A_log", "a", "dt_bias", "q", "k", "v", "b", "initial_state_source", "initial_state_indices",
    "use_qk_l2norm_in_kernel", "output",
)  # fmt: skip

_SLOTS, _RELEASED, _ROWS = (
    "running requests get rings",
    "a request's ring is given back",
    "rings of a batch's rows",
)
_COMMIT = "cursors move by what was accepted"
_GONE = "rings go before the pool that their states are in"
_STATES = "the states, their layers and their slots"
_BUFFERS = "rings in the buffers of the engine's replay"


@dataclass(frozen=True)
class _Managers:
    """The managers of a generation, where generations differ.

    Attributes:
        owners: those there are.
        update: parameters of `update_mamba_states`.
        mixed: parameters by name of the one that holds the Python manager.
        python: parameters of the Python manager's constructor.
        paged: the last parameters by name of V2's constructor.
        promotion: parameters of the function that copies states and windows back.
        paged_promotes: the method of V2 that calls it.
    """

    owners: tuple[str, ...]
    update: tuple[str, ...]
    mixed: tuple[str, ...] = _MIXED_SIZES
    python: tuple[str, ...] = _PYTHON_INIT
    paged: tuple[str, ...] = ("conv_state_layout",)
    promotion: tuple[str, ...] = (
        "dst", "intermediate", "src_state_indices", "accepted_draft", "dst_state_indices", "BLOCK",
    )  # fmt: skip
    paged_promotes: str = "update_mamba_states"

    @property
    def pools(self) -> list[str]:
        """Those with requests' slots in a pool that the engine owns."""
        return [owner for owner in self.owners if owner != _PYTHON]

    def init(self, owner: str) -> tuple[str, ...]:
        """Parameters of a pool's constructor."""
        last = self.paged if owner == _PAGED else ("model_type",)
        return ("self", *_STATE_SHAPE, *_SIZES, *last, "**kwargs")


def _own_managers(managers: _Managers) -> tuple[Target, ...]:
    """Managers with rings beside their states."""
    owners, update, pools = managers.owners, managers.update, managers.pools
    shared = _CPP if _PAGED not in owners else "MambaHybridCacheManager"
    kind = {_CPP: ("model_type", "C++"), _PAGED: ("conv_state_layout", "V2")}
    promotes = {_CPP: "update_mamba_states", _PAGED: managers.paged_promotes}
    return (
        *(
            Function(_MANAGERS, f"{owner}.__init__", managers.init(owner),
                     (*_READ_AT_START, kind[owner][0]), f"rings beside the {kind[owner][1]} pool",
                     "own.hybrid_manager")
            for owner in pools
        ),
        Function(_MANAGERS, "MixedMambaHybridCacheManager.__init__",
                 ("self", *_STATE_SHAPE, *managers.mixed),
                 ("mamba_n_groups", "mapping", "spec_config", "is_draft", "mamba_ssm_stochastic_rounding"),
                 "what cannot work is refused", "own.mixed_manager"),
        Function(_MANAGERS, f"{_PYTHON}.__init__", managers.python,
                 ("n_groups", "mapping", "dtype", "speculative_num_draft_tokens", "model_type",
                  "use_replay_state_update", "mamba_ssm_stochastic_rounding"),
                 "rings beside the Python manager's states", "own.python_manager"),
        Function(_MANAGERS, f"{shared}._setup_mtp_intermediate_states",
                 ("self", "spec_config", "max_batch_size"), ("self", "spec_config", "max_batch_size"),
                 "no state is kept for each draft token", "own.without_snapshots"),
        Function(_MANAGERS, "_promote_mamba_state_triton", managers.promotion, ("dst", "intermediate"),
                 "only the convolution's states are rolled back by copies", "own.promote"),
        *(
            target
            for owner in owners
            for target in (
                _prepare(owner),
                _free(owner),
                Function(_MANAGERS, f"{owner}.get_state_indices", ("self", "request_ids", "is_padding"),
                         ("self", "request_ids", "is_padding"), _ROWS, "own.place"),
                Function(_MANAGERS, f"{owner}.update_mamba_states", update, update, _COMMIT,
                         "own.update_python_states" if owner == _PYTHON else "own.update_states"),
                Function(_MANAGERS, f"{owner}.shutdown", ("self",), ("self",), _GONE, "lifecycle.shut_down"),
            )
        ),
        *((_SUSPEND,) if _PAGED in owners else ()),
        *(
            Attributes(_MANAGERS, owner,
                       ("all_ssm_states", "intermediate_conv_states", "intermediate_ssm_states",
                        "local_num_mamba_layers", "mamba_layer_offsets", "cuda_state_indices",
                        "ssm_state_shape", "_request_id_to_state_index", "_request_id_to_is_dummy",
                        "_use_replay_state_update"), _STATES)
            for owner in pools
        ),
        Attributes(_MANAGERS, _PYTHON,
                   ("mamba_cache", "mamba_cache_index", "mamba_layer_offsets", "intermediate_state_indices",
                    "_dummy_request_ids", "_max_resource_count"), _STATES),
        Attributes(_MANAGERS, f"{_PYTHON}.SpeculativeState", ("intermediate_ssm", "intermediate_conv_window"),
                   "the convolution's windows of each draft token"),
        *(
            target
            for owner in pools
            for target in (
                Call(_MANAGERS, f"{owner}.{promotes[owner]}", "_promote_mamba_state_triton", 5, (),
                     "only the convolution's states are rolled back by copies"),
                Call(_MANAGERS, f"{owner}.__init__", "self._setup_mtp_intermediate_states", 2, (),
                     "no state is kept for each draft token"),
            )
        ),
    )  # fmt: skip


def _prepare(owner: str) -> Function:
    used = ("self", "scheduled_batch")
    return Function(_MANAGERS, f"{owner}.prepare_resources", used, used, _SLOTS, "lifecycle.prepare")


def _free(owner: str) -> Function:
    parameters = ("self", "request") if owner == _PYTHON else ("self", "request", "pin_on_release")
    used = ("self", "request")
    return Function(_MANAGERS, f"{owner}.free_resources", parameters, used, _RELEASED, "lifecycle.free")


_SUSPEND = Function(
    _V2, "KVCacheManagerV2.suspend_request", ("self", "req"), ("self", "req"),
    "a state is current before it goes to the host", "lifecycle.suspend",
)  # fmt: skip


_STEP = ("attn_metadata", "mamba_metadata", "spec_metadata")
_FORWARD = ("Mamba2Mixer.forward", ("self", "hidden_states", *_STEP, "lora_params", "**kwargs"))
_CORE = ("Mamba2Mixer.forward_core", ("self", "zxbcdt", *_STEP, "preallocated_ssm_out"))
"""Where a Mamba-2 layer computes a step, and its parameters: newer releases run a part alone in graphs."""


def _mamba2_forward(mode: str, why: str, inside: tuple[str, tuple[str, ...]]) -> Function:
    name, parameters = inside
    return Function(_MAMBA2, name, parameters, parameters[:5], why, f"{mode}.mamba2_forward")


def _gdn_forward(mode: str, why: str) -> Function:
    parameters = (
        "self", "mixed_qkv", "a", "b", "attn_metadata", "mamba_metadata", "spec_metadata", "output",
    )  # fmt: skip
    return Function(_GDN, f"{_LAYER}.forward_core", parameters, parameters[:7], why, f"{mode}.gdn_forward")


def _own_mamba2(inside: tuple[str, tuple[str, ...]]) -> tuple[Target, ...]:
    return (
        Function(_MAMBA2, "Mamba2Mixer.__init__",
                 ("self", "d_model", "d_state", "d_conv", "nheads", "n_groups", "head_dim", "chunk_size",
                  "layer_idx", "bias", "conv_bias", "delta_rank", "delta_softplus", "remove_padding",
                  "apply_silu", "rms_norm_eps", "dtype", "config", "use_custom_cublas_mm"),
                 (), "decode and verification by a Mamba-2 layer", "own.mamba2_mixer"),
        _mamba2_forward("own", "which layer decodes, and the end of a step", inside),
        Attributes(_MAMBA2, "Mamba2Mixer",
                   ("selective_state_update_func", "layer_idx", "A", "_use_mtp_custom_op"),
                   "decode and verification by a Mamba-2 layer"),
        Call(_MAMBA2, inside[0], "self.selective_state_update_func", 7,
             ("state_batch_indices", "out", "dt_bias", "dt_softplus"),
             "decode and verification by a Mamba-2 layer"),
    )  # fmt: skip


_OWN_GDN: tuple[Target, ...] = (
    Function(_GDN, f"{_LAYER}.__init__", ("self", "model_config", "aux_stream", "layer_idx"), (),
             "the rule of the layers", "own.gdn_mixer"),
    _gdn_forward("own", "which layer decodes, mixed batches, and the end of a step"),
    Name(_GDN, "fused_sigmoid_gating_delta_rule_update", "decode by a Gated DeltaNet layer",
         "own.gdn_decode"),
    Name(_GDN, "can_use_gdn_decode_pdl_pair", "decode goes by the function above", "own.gdn_no_shortcut",
         optional=True),
    Name(_GDN, "_can_use_flashinfer_gdn_verify", "verification goes by the next function",
         "own.gdn_can_verify"),
    Name(_GDN, "_flashinfer_gdn_verify", "verification by a Gated DeltaNet layer", "own.gdn_verify"),
    Attributes(_GDN, _LAYER, ("layer_idx",), "which layer decodes"),
    Call(_GDN, f"{_LAYER}.forward_decode", "fused_sigmoid_gating_delta_rule_update", 0, _VERIFY,
         "decode by a Gated DeltaNet layer"),
    *(
        target
        for inside in (f"{_LAYER}.forward_decode", f"{_LAYER}.forward_extend")
        for target in (
            Call(_GDN, inside, "_can_use_flashinfer_gdn_verify", 4, (), "verification goes by our function"),
            Call(_GDN, inside, "_flashinfer_gdn_verify", 0, _VERIFY,
                 "verification by a Gated DeltaNet layer"),
        )
    ),
)  # fmt: skip

_BATCHES: tuple[Target, ...] = (
    Attributes(_METADATA, "Mamba2Metadata", ("state_indices",), "the slots of a batch's rows"),
    Attributes(_ATTENTION, "AttentionMetadata", ("kv_cache_manager", "num_contexts", "num_seqs"),
               "which rows of a batch decode"),
)  # fmt: skip
_RANK = Attributes(("mapping",), "Mapping", ("rank",), "each rank's first seed of stochastic rounding")
_PLACED = Call(_METADATA, "Mamba2Metadata.prepare", "kv_cache_manager.get_state_indices", 2, (),
               "rings of a batch's rows, before each step")  # fmt: skip
_MODEL_CLASSES: tuple[Target, ...] = (
    Name(_MODELS, "MODEL_CLASS_MAPPING", "worker processes import the adapter with a model's class"),
    Function(_MODELS, "register_auto_model", ("name",), ("name",),
             "worker processes import the adapter with a model's class"),
)  # fmt: skip


def _borrow_managers(managers: _Managers) -> tuple[Target, ...]:
    """Managers whose replay buffers hold our rings; the Python manager's are Mamba-2's only."""
    owners, update, pools = managers.owners, managers.update, managers.pools
    kind = {_CPP: "model_type", _PAGED: "conv_state_layout"}
    used = ("mamba_n_groups", "mamba_cache_dtype", "mapping", "spec_config", "is_draft",
            "mamba_ssm_stochastic_rounding")  # fmt: skip
    return (
        *(
            Function(_MANAGERS, f"{owner}.__init__", managers.init(owner), (*used, kind[owner]), _BUFFERS,
                     "borrow.hybrid_manager")
            for owner in pools
        ),
        Function(_MANAGERS, f"{_PYTHON}.__init__", managers.python,
                 ("n_groups", "mapping", "dtype", "speculative_num_draft_tokens", "model_type",
                  "mamba_ssm_stochastic_rounding"), _BUFFERS, "borrow.python_manager"),
        Name(_MANAGERS, "MIN_REPLAY_HISTORY_SIZE", "the window is what the buffers have room for"),
        Attributes(_MANAGERS, "ReplayStateUpdateMetadata",
                   ("prev_num_accepted_tokens", "cache_buf_idx", "replay_step_width"), _BUFFERS),
        Attributes(_MANAGERS, f"{_PYTHON}.State", ("temporal",), _STATES),
        Attributes(_MANAGERS, f"{_PYTHON}.SpeculativeState", ("old_x", "old_B", "old_dt"), _BUFFERS),
        *(
            target
            for owner in owners
            for target in (
                _prepare(owner),
                _free(owner),
                Function(_MANAGERS, f"{owner}.update_mamba_states", update, _COMMITTED, _COMMIT,
                         "borrow.update_states"),
                Function(_MANAGERS, f"{owner}.get_replay_state_update_metadata", ("self",), ("self",),
                         _BUFFERS),
                Function(_MANAGERS, f"{owner}.mamba_layer_cache", ("self", "layer_idx"),
                         ("self", "layer_idx"), _BUFFERS),
                Function(_MANAGERS, f"{owner}.shutdown", ("self",), ("self",), _GONE, "lifecycle.shut_down"),
                Attributes(_MANAGERS, owner, ("mamba_layer_offsets", "replay_history_size"), _BUFFERS),
            )
        ),
        *(
            Attributes(_MANAGERS, owner, ("local_num_mamba_layers", "_request_id_to_state_index"), _STATES)
            for owner in pools
        ),
        Attributes(_MANAGERS, _PYTHON, ("mamba_cache_index",), _STATES),
        *((_SUSPEND,) if _PAGED in owners else ()),
    )  # fmt: skip


def _borrow_mamba2(inside: tuple[str, tuple[str, ...]]) -> tuple[Target, ...]:
    return (
        _mamba2_forward("borrow", "which layer verifies", inside),
        Attributes(_MAMBA2, "Mamba2Mixer", ("layer_idx", "A"), "which layer verifies"),
        Name(_MAMBA2, "replay_selective_state_update", "verification by a Mamba-2 layer",
             "borrow.mamba2_verify"),
        Call(_MAMBA2, inside[0], "replay_selective_state_update", 12,
             ("D", "state_batch_indices", "out", "dt_bias", "dt_softplus"),
             "verification by a Mamba-2 layer"),
    )  # fmt: skip


_REPLAYED = (
    "self", "query", "key", "value", "a", "b", "ssm_states", "state_indices_d", "num_decodes",
    "draft_token_num", "replay_metadata", "layer_cache", "replay_work_items", "replay_n_writes", "output_d",
    "packed_qkv", "use_all_layer_commit",
)  # fmt: skip
_BORROW_GDN_LAYERS: tuple[Target, ...] = (
    _gdn_forward("borrow", "which layer verifies"),
    Attributes(_GDN, _LAYER, ("layer_idx", "A_log", "dt_bias"), "verification by a Gated DeltaNet layer"),
    Function(_GDN, f"{_LAYER}._replay_verify_recurrent", _REPLAYED, _REPLAYED[:15],
             "verification by a Gated DeltaNet layer", "borrow.gdn_verify"),
    *(
        Call(_GDN, f"{_LAYER}.{inside}", "self._replay_verify_recurrent", 14, (),
             "verification by a Gated DeltaNet layer")
        for inside in ("forward_decode", "forward_extend")
    ),
)  # fmt: skip
_BORROW_GDN: tuple[Target, ...] = (
    *_BORROW_GDN_LAYERS,
    *(
        Function(_MANAGERS, f"{owner}._commit_gdn_cached_replay_history_layers",
                 ("self", "attn_metadata", "num_decodes"), ("self",),
                 "no kernel of the engine's reads our records", "borrow.commit_layers",
                 optional=owner == _PAGED)
        for owner in (_CPP, _PAGED)
    ),
)  # fmt: skip

_MEASURED = Function(
    _UTIL, "KvCacheCreator.try_prepare_estimation", ("self",), ("self",),
    "rings are in the memory that the engine measures", "own.estimation",
)  # fmt: skip
_POOLED = _Managers((_CPP, _PAGED, _PYTHON), _UPDATE)
_NEWER = replace(
    _POOLED,
    mixed=(
        "num_layers", "layer_mask", "num_kv_heads", "head_dim", "tokens_per_block", "max_seq_len",
        "max_batch_size", "mapping", "max_num_tokens", "dtype", "spec_config", "is_estimating_kv_cache",
        "execution_stream", "model_type", "is_draft", "use_replay_state_update",
        "mamba_ssm_stochastic_rounding", "kda_replay_num_spec", "pool_configurations",
    ),
    python=(*_PYTHON_INIT, "kda_replay_num_spec"),
    paged=("conv_state_layout", "kda_replay_num_spec", "qwen4_exp_ple_cache_params"),
    promotion=(
        "dst", "intermediate", "src_state_indices", "accepted_position_source", "dst_state_indices",
        "num_accepted_tokens", "position_source_is_token_count", "replay_pnat", "replay_cache_buf_idx",
        "dummy_request_mask", "replay_step_width", "replay_history_size", "BLOCK",
    ),
    paged_promotes="_promote_state",
)  # fmt: skip


def _modes(managers: _Managers, inside: tuple[str, tuple[str, ...]]) -> dict[str, tuple[Target, ...]]:
    """Both modes, with a Mamba-2 layer's step computed `inside`."""
    return {
        "own": (
            *_own_managers(managers), *_own_mamba2(inside), *_OWN_GDN, *_BATCHES, _RANK, _PLACED, _MEASURED,
            *_MODEL_CLASSES,
        ),
        "borrow": (
            *_borrow_managers(managers), *_borrow_mamba2(inside), *_BORROW_GDN, *_BATCHES, *_MODEL_CLASSES,
        ),
    }  # fmt: skip


_OLDER_GDN: tuple[Target, ...] = (
    Function(_GDN, f"{_LAYER}.__init__", ("self", "model_config", "aux_stream", "layer_idx"), (),
             "which way round its states are", "older.gdn_made"),
    Function(_GDN, f"{_LAYER}.forward",
             ("self", "hidden_states", "attn_metadata", "mamba_metadata", "spec_metadata",
              "all_reduce_params"),
             ("self", "hidden_states", "attn_metadata", "mamba_metadata", "spec_metadata"),
             "which layer decodes, mixed batches, and the end of a step", "older.gdn_forward"),
    Function(_GDN, f"{_LAYER}.forward_decode",
             ("self", "conv_states", "ssm_states", "query_start_loc_long", "spec_metadata",
              "intermediate_conv_states", "intermediate_ssm_states", "is_target_verify", "**kwargs"),
             ("self",), "slots and gates of drafts", "older.gdn_inputs"),
    Function(_GDN, f"{_LAYER}.forward_extend",
             ("self", "conv_states", "ssm_states", "spec_metadata", "intermediate_conv_states",
              "intermediate_ssm_states", "is_target_verify", "**kwargs"),
             ("self",), "slots and gates of drafts", "older.gdn_inputs"),
    Name(_GDN, "fused_sigmoid_gating_delta_rule_update", "decode by a Gated DeltaNet layer",
         "own.gdn_decode"),
    Name(_GDN, "fused_recurrent_gated_delta_rule_update", "verification by a Gated DeltaNet layer",
         "older.gdn_verify"),
    Attributes(_GDN, _LAYER, ("layer_idx", "A_log", "dt_bias"), "which layer decodes"),
    Call(_GDN, f"{_LAYER}.forward_decode", "fused_sigmoid_gating_delta_rule_update", 0, _DECODED,
         "decode by a Gated DeltaNet layer"),
    *(
        Call(_GDN, f"{_LAYER}.{inside}", "fused_recurrent_gated_delta_rule_update", 0, ("q", "k", "v"),
             "verification by a Gated DeltaNet layer")
        for inside in ("forward_decode", "forward_extend")
    ),
)  # fmt: skip

_BEFORE_V2 = _Managers((_CPP, _PYTHON), _COMMITTED)
_G2 = {
    "own": (
        *_own_managers(_BEFORE_V2), *_own_mamba2(_FORWARD), *_OLDER_GDN, *_BATCHES, _RANK, _PLACED, _MEASURED,
        *_MODEL_CLASSES,
    ),
    "borrow": (
        *_borrow_managers(_BEFORE_V2), *_borrow_mamba2(_FORWARD), *_BATCHES, *_MODEL_CLASSES,
    ),
}  # fmt: skip

_COPIES: tuple[Target, ...] = (
    Function(_CONFIG, "MambaKVCacheParams.get_states_bytes_per_layer", ("self", "mapping"),
             ("self", "mapping"), "read copies are in the engine's budget of its pool",
             "own.budget_of_states"),
    Attributes(_CONFIG, "MambaKVCacheParams", ("num_heads", "head_dim", "state_size"),
               "read copies are in the engine's budget of its pool"),
)  # fmt: skip
_LINKS = ("retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token")


def _trees(inside: tuple[str, tuple[str, ...]]) -> tuple[Target, ...]:
    return (
        Name(_MAMBA2, "selective_state_update_native", "verification of draft trees by a Mamba-2 layer",
             "own.mamba2_tree"),
        Function(_SELECTIVE, "selective_state_update",
                 ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus",
                  "state_batch_indices", "pad_slot_id", "out", "disable_state_update",
                  "intermediate_states_buffer", "cache_steps", "retrieve_parent_token",
                  "intermediate_state_indices", "rand_seed", "philox_rounds"),
                 ("state", "x", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "state_batch_indices",
                  "out", "retrieve_parent_token"), "verification of draft trees by a Mamba-2 layer"),
        Call(_MAMBA2, inside[0], "causal_conv1d_update_triton", 4, _LINKS,
             "the parents of a draft tree's nodes"),
    )  # fmt: skip


_FLAT = "MambaCacheManager"
_G0: dict[str, tuple[Target, ...]] = {
    "own": (
        Function(_MANAGERS, f"{_FLAT}.__init__",
                 ("self", "d_state", "d_conv", "num_heads", "n_groups", "head_dim", "num_layers",
                  "max_batch_size", "mapping", "dtype", "ssm_cache_dtype", "layer_mask"),
                 ("n_groups", "max_batch_size", "mapping", "dtype"), "rings beside the states",
                 "flat.manager"),
        Function(_MANAGERS, f"{_FLAT}.prepare_resources", ("self", "scheduled_batch"),
                 ("self", "scheduled_batch"), f"{_SLOTS}; {_ROWS}", "flat.prepare"),
        Function(_MANAGERS, f"{_FLAT}.free_resources", ("self", "request"), ("self", "request"), _RELEASED,
                 "lifecycle.free"),
        Function(_MANAGERS, f"{_FLAT}.get_state_indices", ("self",), ("self",), "slots of a batch's rows"),
        Function(_MANAGERS, f"{_FLAT}.shutdown", ("self",), ("self",), _GONE, "lifecycle.shut_down"),
        Attributes(_MANAGERS, _FLAT,
                   ("ssm_states", "state_indices", "mamba_cache_index", "mamba_layer_offsets"), _STATES),
        Function(_MAMBA2, "Mamba2Mixer.__init__",
                 ("self", "d_model", "d_state", "d_conv", "nheads", "n_groups", "head_dim", "chunk_size",
                  "layer_idx", "bias", "conv_bias", "delta_rank", "delta_softplus", "remove_padding",
                  "apply_silu", "rms_norm_eps", "dtype", "config"), (), "the rule of the layers",
                 "flat.mamba2_made"),
        Function(_MAMBA2, "Mamba2Mixer.forward",
                 ("self", "hidden_states", "attn_metadata", "mamba_metadata"),
                 ("self", "hidden_states", "attn_metadata"), "which layer decodes, and the end of a step",
                 "flat.mamba2_forward"),
        Attributes(_MAMBA2, "Mamba2Mixer", ("layer_idx", "A"), "which layer decodes"),
        Name(_MAMBA2, "selective_state_update", "decode by a Mamba-2 layer", "flat.mamba2_decode"),
        Call(_MAMBA2, "Mamba2Mixer.forward", "selective_state_update", 7,
             ("z", "state_batch_indices", "dt_bias", "dt_softplus"), "decode by a Mamba-2 layer"),
        Function(_OLD_GDN, f"{_LAYER}.__init__", ("self", "model_config", "layer_idx"), (),
                 "the rule of the layers, and which way round their states are", "older.gdn_made"),
        Function(_OLD_GDN, f"{_LAYER}.forward",
                 ("self", "hidden_states", "attn_metadata", "mamba_metadata", "all_reduce_params"),
                 ("self", "hidden_states", "attn_metadata"),
                 "which layer decodes, mixed batches, and the end of a step", "flat.gdn_forward"),
        Attributes(_OLD_GDN, _LAYER, ("layer_idx",), "which layer decodes"),
        Name(_OLD_GDN, "fused_sigmoid_gating_delta_rule_update", "decode by a Gated DeltaNet layer",
             "own.gdn_decode"),
        Call(_OLD_GDN, f"{_LAYER}.forward_decode", "fused_sigmoid_gating_delta_rule_update", 0, _DECODED,
             "decode by a Gated DeltaNet layer"),
        _BATCHES[1], _RANK, _MEASURED, *_MODEL_CLASSES,
    ),
}  # fmt: skip

_NEMOTRON = (("_torch.modules.mamba.cache_manager",), "NemotronHybridCacheManagerV2")
_QWEN = (("_torch.modules.fla.cache_manager",), "Qwen35HybridCacheManagerV2")
_COMMON = ("_torch.pyexecutor.kv_cache.mamba_cache_manager.common",)
_LEGACY = ("_torch.pyexecutor.kv_cache.mamba_cache_manager.legacy",)
_PAGES = ("_torch.pyexecutor.kv_cache.mamba_cache_manager.mamba_cache_manager_v2",)
_REPLAY_STATE = ("_torch.pyexecutor.kv_cache.mamba_cache_manager.replay",)
_OBJECT = "a model's state object"
_PAGED_SIZES = tuple(name for name in _SIZES if name != "use_replay_state_update")
_ACCEPTED = ("num_contexts", "num_generations", "num_accepted_tokens", "accepted_positions",
             "source_state_indices", "destination_state_indices")  # fmt: skip


def _plugged_managers(prefix: str, used: tuple[str, ...]) -> tuple[Target, ...]:
    """Managers of models: the common one, and the object that each makes beside its states."""
    return (
        Function(_PAGES, f"{_PAGED}.__init__",
                 ("self", *_STATE_SHAPE, *_PAGED_SIZES, "conv_state_layout", "**kwargs"), used, _OBJECT,
                 f"plugged.{prefix}manager"),
        *(
            Function(_LEGACY, f"{owner}.__init__", ("self", *_STATE_SHAPE, *parameters), ("is_draft",),
                     "managers before V2 are refused", "plugged.older_manager")
            for owner, parameters in (
                ("MixedMambaHybridCacheManager", _NEWER.mixed), (_CPP, (*_SIZES, "model_type", "**kwargs")),
            )
        ),
        *(
            target
            for modules, owner in (_NEMOTRON, _QWEN)
            for target in (
                Function(modules, f"{owner}._initialize_model_state", ("self",), ("self",), _OBJECT,
                         f"plugged.{prefix or 'model_'}state"),
                Attributes(modules, owner, ("_requested_replay",), "the engine's own replay on or off"),
            )
        ),
        Function(_PAGES, f"{_PAGED}.prepare_resources", ("self", "scheduled_batch"),
                 ("self", "scheduled_batch"), _SLOTS, "lifecycle.prepare"),
        Function(_PAGES, f"{_PAGED}.free_resources", ("self", "request", "pin_on_release"),
                 ("self", "request"), _RELEASED, "lifecycle.free"),
        Function(_PAGES, f"{_PAGED}.shutdown", ("self",), ("self",), _GONE, "lifecycle.shut_down"),
        Attributes(_PAGES, _PAGED,
                   ("local_num_mamba_layers", "mamba_layer_offsets", "_request_id_to_state_index",
                    "_speculative_state"), _STATES),
        _SUSPEND,
    )  # fmt: skip


_OWN_PLUGGED: tuple[Target, ...] = (
    *_plugged_managers(
        "", ("mamba_n_groups", "mapping", "spec_config", "is_draft", "conv_state_layout")
    ),
    Function(_PAGES, f"{_PAGED}.get_state_indices", ("self", "request_ids", "is_padding"),
             ("self", "request_ids", "is_padding"), _ROWS, "own.place"),
    Function(_PAGES, f"{_PAGED}.update_mamba_states", _UPDATE, _UPDATE, _COMMIT, "plugged.update_states"),
    Attributes(_PAGES, _PAGED, ("_request_id_to_is_dummy",), "rows of dummies have no rings"),
    Call(_PAGES, f"{_PAGED}.update_mamba_states", "MambaAcceptanceBatch", 0, _ACCEPTED, _COMMIT),
    Call(_PAGES, f"{_PAGED}.update_mamba_states", "self._update_speculative_state", 1, (), _COMMIT),
    *(
        Function(_COMMON, f"MambaState.{name}", parameters, parameters, _OBJECT)
        for name, parameters in (
            ("bind", ("self", "context", "ssm_states", "conv_states")),
            ("reset_slots", ("self", "slots", "host_slots")),
            ("update", ("self", "batch")),
            ("shutdown", ("self",)),
            ("make_layer_cache", ("self", "layer_offset", "conv", "temporal")),
        )
    ),
    Attributes(_COMMON, "MambaState", ("intermediate_indices", "intermediate_ssm", "intermediate_conv"),
               _OBJECT),
    Attributes(_COMMON, "MambaStateLayout",
               ("mapping", "ssm_state_shape", "conv_state_dtype", "n_groups_per_rank", "max_batch_size",
                "state_index_capacity", "spec_config", "stochastic_rounding", "conv_state_layout"),
               "rings beside the states"),
    Attributes(_COMMON, "MambaAcceptanceBatch",
               ("num_contexts", "num_accepted_tokens", "accepted_positions"), _COMMIT),
    Function(_COMMON, "_stack_state_views", ("states",), ("states",), "the convolution is rolled back"),
    Function(_COMMON, "_promote_intermediate_states",
             ("destination_states", "intermediate_states", "batch", "stacked"),
             ("destination_states", "intermediate_states", "batch", "stacked"),
             "the convolution is rolled back"),
)  # fmt: skip
_BORROW_PLUGGED: tuple[Target, ...] = (
    *_plugged_managers(
        "lent_",
        ("mamba_n_groups", "mamba_cache_dtype", "mapping", "spec_config", "is_draft",
         "mamba_ssm_stochastic_rounding", "conv_state_layout"),
    ),
    Function(_PAGES, f"{_PAGED}.update_mamba_states", _UPDATE, _COMMITTED, _COMMIT, "borrow.update_states"),
    *(
        Function(_PAGES, f"{_PAGED}.{name}", parameters, parameters, _BUFFERS)
        for name, parameters in (
            ("get_replay_state_update_metadata", ("self",)), ("mamba_layer_cache", ("self", "layer_idx")),
        )
    ),
    Attributes(_COMMON, "ReplayStateUpdateMetadata",
               ("prev_num_accepted_tokens", "cache_buf_idx", "replay_step_width"), _BUFFERS),
    Attributes(_COMMON, "MambaLayerCache", ("temporal",), _STATES),
    Attributes(_REPLAY_STATE, "ReplayLayerCache", ("old_x", "old_B", "old_dt"), _BUFFERS),
    Attributes(_REPLAY_STATE, "ReplayHistory", ("replay_history_size",), _BUFFERS),
    Function(_QWEN[0], "GDNReplayState.commit_all_layers", ("self", "attention_metadata", "num_decodes"),
             ("self",), "no kernel of the engine's reads our records", "plugged.commit_layers"),
)  # fmt: skip

_MOVED = ("_torch.pyexecutor.kv_cache.mamba_cache_manager",)
_REPLAY = (_MANAGERS, "ReplayStateUpdateMetadata")
_RUN_ALONE = (_MAMBA2, "mamba2_custom_op_inplace")
_POOLS = (_MANAGERS, _PAGED)
_STRATEGY = (_COMMON, "MambaStateUpdateStrategy")
_PLUGGED = {
    "own": (
        *_OWN_PLUGGED, *_own_mamba2(_CORE), *_OWN_GDN, *_BATCHES, _RANK, _PLACED, _MEASURED, *_MODEL_CLASSES,
    ),
    "borrow": (*_BORROW_PLUGGED, *_borrow_mamba2(_CORE), *_BORROW_GDN_LAYERS, *_BATCHES, *_MODEL_CLASSES),
}  # fmt: skip

GENERATIONS: tuple[Generation, ...] = (
    Generation(
        "g5", "the open pull request #18843 at 3f4f8081", (_NEMOTRON,), (_STRATEGY,), _PLUGGED,
        copies=_COPIES, trees=_trees(_CORE),
    ),
    Generation(
        "g5a", "early commits of #18843", (_STRATEGY,), (), {},
        "its managers are given a MambaStateUpdateStrategy: expected those of its later commits, which make "
        "a MambaState",
    ),
    Generation(
        "g4b", "1.4.0 release candidates after #18888", ((_MOVED, _PAGED), _REPLAY, _RUN_ALONE), (),
        _modes(_NEWER, _CORE), copies=_COPIES, trees=_trees(_CORE),
    ),
    Generation(
        "g4", "1.4.0 release candidates before #18888", ((_MOVED, _PAGED), _REPLAY), (),
        _modes(_POOLED, _FORWARD), copies=_COPIES, trees=_trees(_FORWARD),
    ),
    Generation(
        "g3", "1.3.0rc20 to rc27", (_POOLS, _REPLAY), (), _modes(_POOLED, _FORWARD), copies=_COPIES,
        trees=_trees(_FORWARD),
    ),
    Generation("g2", "1.3.0rc of June 2026", (_REPLAY,), (_POOLS,), _G2, copies=_COPIES),
    Generation(
        "g1", "1.3.0rc of April and May 2026", ((_MANAGERS, "PythonMambaCacheManager"),), (_REPLAY,), {},
        "its interface changed from week to week; install a later release candidate",
    ),
    Generation("g0", "1.2", ((_MANAGERS, _FLAT),), (_REPLAY,), _G0),
)  # fmt: skip
"""Newest first: the first whose signs are there is meant."""

MODEL_MODULES = ("modeling_nemotron_h", "modeling_qwen3_next", "modeling_qwen3_5")
"""Modules of the engine with models whose recurrent layers are served, where they exist."""
