"""What the adapter relies on in TensorRT-LLM, as data: what it wraps, what it reads, how the engine calls it.

Generations are told apart by what is there, never by version strings: release candidates move weekly. Modules
are named below `tensorrt_llm`; where a module has moved, its names stand newest first. Nothing here imports
the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = "tensorrt_llm"

Modules = tuple[str, ...]
"""Where a module may be, newest first; the first that exists is meant."""


@dataclass(frozen=True)
class Function:
    """A function, or a method as `Class.method`.

    Attributes:
        modules: where it is.
        name: it.
        parameters: all of them in order, `*args` and `**kwargs` with their stars.
        uses: those that the adapter passes or reads; the others may change.
        why: what the adapter needs it for.
        hook: the function of `hooks` that wraps it; empty where it is only relied on.
    """

    modules: Modules
    name: str
    parameters: tuple[str, ...]
    uses: tuple[str, ...]
    why: str
    hook: str = ""


@dataclass(frozen=True)
class Name:
    """A name in a module's namespace, defined or imported there.

    Attributes:
        modules: where.
        name: it.
        why: what the adapter needs it for.
        hook: as in `Function`; the name is replaced in that namespace only.
    """

    modules: Modules
    name: str
    why: str
    hook: str = ""


@dataclass(frozen=True)
class Attributes:
    """Attributes of a class's instances.

    Attributes:
        modules: where the class is.
        owner: the class.
        names: the attributes, whether assigned, declared, or properties.
        why: what the adapter reads them for.
    """

    modules: Modules
    owner: str
    names: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Call:
    """How the engine itself calls something that the adapter stands in for; every call there must fit.

    Attributes:
        modules: where the caller is.
        inside: the calling function or `Class.method`.
        callee: what is called, as it is written.
        positional: arguments by position.
        keywords: arguments that must come by name, unless `**kwargs` may hold them.
        why: what the adapter needs the call for.
    """

    modules: Modules
    inside: str
    callee: str
    positional: int
    keywords: tuple[str, ...]
    why: str


Target = Function | Name | Attributes | Call


@dataclass(frozen=True)
class Generation:
    """A state of the engine's interface.

    Attributes:
        name: what this project calls it.
        releases: where it was seen.
        has: module and name of what tells it from older ones.
        lacks: and from newer ones.
        targets: the contract.
        refused: why the adapter does not decode with it; empty where it does.
    """

    name: str
    releases: str
    has: tuple[tuple[Modules, str], ...]
    lacks: tuple[tuple[Modules, str], ...]
    targets: tuple[Target, ...]
    refused: str = ""


_MANAGERS = ("_torch.pyexecutor.kv_cache.mamba_cache_manager", "_torch.pyexecutor.mamba_cache_manager")
_V2 = ("_torch.pyexecutor.kv_cache.kv_cache_manager_v2", "_torch.pyexecutor.kv_cache_manager_v2")
_MAMBA2 = ("_torch.modules.mamba.mamba2_mixer",)
_GDN = ("_torch.modules.mamba.gdn_mixer",)
_METADATA = ("_torch.modules.mamba.mamba2_metadata",)
_ATTENTION = ("_torch.attention.backends.interface", "_torch.attention_backend.interface")
_MODELS = ("_torch.models.modeling_utils",)
_OLD_GDN = ("_torch.models.modeling_qwen3_next",)
_UTIL = ("_torch.pyexecutor._util",)

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
_UPDATE = ("self", "attn_metadata", "num_accepted_tokens", "state_indices", "accepted_leaf_positions")
_PYTHON_INIT = (
    "self", "d_state", "d_conv", "num_heads", "n_groups", "head_dim", "num_layers", "max_batch_size",
    "spec_state_size", "mapping", "dtype", "ssm_cache_dtype", "layer_mask", "speculative_num_draft_tokens",
    "model_type", "use_replay_state_update", "mamba_ssm_stochastic_rounding",
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

_MANAGER_TARGETS: tuple[Target, ...] = (
    Function(_MANAGERS, f"{_CPP}.__init__", ("self", *_STATE_SHAPE, *_SIZES, "model_type", "**kwargs"),
             (*_READ_AT_START, "model_type"), "rings beside the C++ pool", "hybrid_manager"),
    Function(_MANAGERS, f"{_PAGED}.__init__",
             ("self", *_STATE_SHAPE, *_SIZES, "conv_state_layout", "**kwargs"),
             (*_READ_AT_START, "conv_state_layout"), "rings beside the V2 pool", "hybrid_manager"),
    Function(_MANAGERS, "MixedMambaHybridCacheManager.__init__",
             ("self", *_STATE_SHAPE, *_MIXED_SIZES),
             ("mamba_n_groups", "mapping", "spec_config", "is_draft", "mamba_ssm_stochastic_rounding"),
             "what cannot work is refused", "mixed_manager"),
    Function(_MANAGERS, f"{_PYTHON}.__init__", _PYTHON_INIT,
             ("n_groups", "mapping", "dtype", "speculative_num_draft_tokens", "model_type",
              "use_replay_state_update", "mamba_ssm_stochastic_rounding"),
             "rings beside the Python manager's states", "python_manager"),
    Function(_MANAGERS, "MambaHybridCacheManager._setup_mtp_intermediate_states",
             ("self", "spec_config", "max_batch_size"), ("self", "spec_config", "max_batch_size"),
             "no state is kept for each draft token", "without_snapshots"),
    Function(_MANAGERS, "_promote_mamba_state_triton",
             ("dst", "intermediate", "src_state_indices", "accepted_draft", "dst_state_indices", "BLOCK"),
             ("dst", "intermediate"), "only the convolution's states are rolled back by copies", "promote"),
    *(
        target
        for owner in (_CPP, _PAGED, _PYTHON)
        for target in (
            Function(_MANAGERS, f"{owner}.prepare_resources", ("self", "scheduled_batch"),
                     ("self", "scheduled_batch"), _SLOTS, "prepare"),
            Function(_MANAGERS, f"{owner}.free_resources",
                     ("self", "request") if owner == _PYTHON else ("self", "request", "pin_on_release"),
                     ("self", "request"), _RELEASED, "free"),
            Function(_MANAGERS, f"{owner}.get_state_indices", ("self", "request_ids", "is_padding"),
                     ("self", "request_ids", "is_padding"), _ROWS, "place"),
            Function(_MANAGERS, f"{owner}.update_mamba_states", _UPDATE, _UPDATE, _COMMIT,
                     "update_python_states" if owner == _PYTHON else "update_states"),
            Function(_MANAGERS, f"{owner}.shutdown", ("self",), ("self",), _GONE, "shut_down"),
        )
    ),
    Function(_V2, "KVCacheManagerV2.suspend_request", ("self", "req"), ("self", "req"),
             "a state is current before it goes to the host", "suspend"),
    *(
        Attributes(_MANAGERS, owner,
                   ("all_ssm_states", "intermediate_conv_states", "intermediate_ssm_states",
                    "local_num_mamba_layers", "mamba_layer_offsets", "cuda_state_indices", "ssm_state_shape",
                    "_request_id_to_state_index", "_request_id_to_is_dummy", "_use_replay_state_update"),
                   "the states, their layers and their slots")
        for owner in (_CPP, _PAGED)
    ),
    Attributes(_MANAGERS, _PYTHON,
               ("mamba_cache", "mamba_cache_index", "mamba_layer_offsets", "intermediate_state_indices",
                "_dummy_request_ids", "_max_resource_count"), "the states, their layers and their slots"),
    Attributes(_MANAGERS, f"{_PYTHON}.SpeculativeState", ("intermediate_ssm", "intermediate_conv_window"),
               "the convolution's windows of each draft token"),
    *(
        Call(_MANAGERS, f"{owner}.update_mamba_states", "_promote_mamba_state_triton", 5, (),
             "only the convolution's states are rolled back by copies")
        for owner in (_CPP, _PAGED)
    ),
    *(
        Call(_MANAGERS, f"{owner}.__init__", "self._setup_mtp_intermediate_states", 2, (),
             "no state is kept for each draft token")
        for owner in (_CPP, _PAGED)
    ),
)  # fmt: skip

_MIXER_TARGETS: tuple[Target, ...] = (
    Function(_MAMBA2, "Mamba2Mixer.__init__",
             ("self", "d_model", "d_state", "d_conv", "nheads", "n_groups", "head_dim", "chunk_size",
              "layer_idx", "bias", "conv_bias", "delta_rank", "delta_softplus", "remove_padding",
              "apply_silu",
              "rms_norm_eps", "dtype", "config", "use_custom_cublas_mm"),
             (), "decode and verification by a Mamba-2 layer", "mamba2_mixer"),
    Function(_MAMBA2, "Mamba2Mixer.forward",
             ("self", "hidden_states", "attn_metadata", "mamba_metadata", "spec_metadata", "lora_params",
              "**kwargs"),
             ("self", "hidden_states", "attn_metadata", "mamba_metadata", "spec_metadata"),
             "which layer decodes, and the end of a step", "mamba2_forward"),
    Attributes(_MAMBA2, "Mamba2Mixer",
               ("selective_state_update_func", "layer_idx", "A", "_use_mtp_custom_op"),
               "decode and verification by a Mamba-2 layer"),
    Call(_MAMBA2, "Mamba2Mixer.forward", "self.selective_state_update_func", 7,
         ("state_batch_indices", "out", "dt_bias", "dt_softplus"),
         "decode and verification by a Mamba-2 layer"),
    Function(_GDN, f"{_LAYER}.forward_core",
             ("self", "mixed_qkv", "a", "b", "attn_metadata", "mamba_metadata", "spec_metadata", "output"),
             ("self", "mixed_qkv", "a", "b", "attn_metadata", "mamba_metadata", "spec_metadata"),
             "which layer decodes, mixed batches, and the end of a step", "gdn_forward"),
    Name(_GDN, "fused_sigmoid_gating_delta_rule_update", "decode by a Gated DeltaNet layer", "gdn_decode"),
    Name(_GDN, "_can_use_flashinfer_gdn_verify", "verification goes by the next function", "gdn_can_verify"),
    Name(_GDN, "_flashinfer_gdn_verify", "verification by a Gated DeltaNet layer", "gdn_verify"),
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

_OTHER_TARGETS: tuple[Target, ...] = (
    Attributes(_METADATA, "Mamba2Metadata", ("state_indices",), "the slots of a batch's rows"),
    Call(_METADATA, "Mamba2Metadata.prepare", "kv_cache_manager.get_state_indices", 2, (),
         "rings of a batch's rows, before each step"),
    Attributes(_ATTENTION, "AttentionMetadata", ("kv_cache_manager", "num_contexts", "num_seqs"),
               "which rows of a batch decode"),
    Name(_MODELS, "MODEL_CLASS_MAPPING", "worker processes import the adapter with a model's class"),
    Function(_MODELS, "register_auto_model", ("name",), ("name",),
             "worker processes import the adapter with a model's class"),
)  # fmt: skip

OWN: tuple[Target, ...] = (*_MANAGER_TARGETS, *_MIXER_TARGETS, *_OTHER_TARGETS)
"""Mode `own`: rings and cursors of the adapter, standard decoding and verification."""

_G2_UPDATE = ("self", "attn_metadata", "num_accepted_tokens", "state_indices")
_G2: tuple[Target, ...] = (
    Function(_MANAGERS, f"{_CPP}.__init__", ("self", *_STATE_SHAPE, *_SIZES, "model_type", "**kwargs"),
             _READ_AT_START, "the C++ pool"),
    Function(_MANAGERS, f"{_PYTHON}.__init__", _PYTHON_INIT, ("mapping", "dtype"), "the Python manager"),
    Function(_MANAGERS, f"{_PYTHON}.update_mamba_states", _G2_UPDATE, _G2_UPDATE, _COMMIT),
    Name(_MAMBA2, "replay_selective_state_update", "the engine's own replay"),
    Function(_MAMBA2, "Mamba2Mixer.forward",
             ("self", "hidden_states", "attn_metadata", "mamba_metadata", "spec_metadata", "lora_params",
              "**kwargs"),
             ("self", "hidden_states", "attn_metadata", "mamba_metadata", "spec_metadata"),
             "a Mamba-2 layer"),
)  # fmt: skip
_G0: tuple[Target, ...] = (
    Function(_MANAGERS, "MambaCacheManager.__init__",
             ("self", "d_state", "d_conv", "num_heads", "n_groups", "head_dim", "num_layers",
              "max_batch_size", "mapping", "dtype", "ssm_cache_dtype", "layer_mask"),
             ("max_batch_size", "mapping", "dtype", "ssm_cache_dtype"), "the states"),
    Function(_MANAGERS, "MambaCacheManager.get_state_indices", ("self",), ("self",),
             "slots of a batch's rows"),
    Attributes(_MANAGERS, "MambaCacheManager", ("conv_states", "ssm_states", "state_indices"), "the states"),
    Name(_MAMBA2, "selective_state_update", "a Mamba-2 layer"),
    Function(_MAMBA2, "Mamba2Mixer.forward", ("self", "hidden_states", "attn_metadata", "mamba_metadata"),
             ("self", "hidden_states", "attn_metadata", "mamba_metadata"), "a Mamba-2 layer"),
    Name(_OLD_GDN, "fused_sigmoid_gating_delta_rule_update", "a Gated DeltaNet layer"),
    Function(_UTIL, "get_kv_cache_manager_cls", ("model_config",), ("model_config",), "the manager's class"),
)  # fmt: skip

_NOT_YET = "its interface is known, and this release does not decode with it"
_PER_MODEL = ("_torch.modules.mamba.cache_manager",)
_MOVED = ("_torch.pyexecutor.kv_cache.mamba_cache_manager",)
_REPLAY = (_MANAGERS, "ReplayStateUpdateMetadata")
_POOLS = (_MANAGERS, _PAGED)

GENERATIONS: tuple[Generation, ...] = (
    Generation(
        "g5", "after 1.4.0rc4", ((_PER_MODEL, "NemotronHybridCacheManagerV2"),), (), (),
        "each model brings its own state object, and this release does not know that interface",
    ),
    Generation("g4", "1.4.0 release candidates", ((_MOVED, _PAGED), _REPLAY), (), OWN),
    Generation("g3", "1.3.0rc20 to rc27", (_POOLS, _REPLAY), (), OWN),
    Generation("g2", "1.3.0rc of June 2026", (_REPLAY,), (_POOLS,), _G2, _NOT_YET),
    Generation(
        "g1", "1.3.0rc of April and May 2026", ((_MANAGERS, "PythonMambaCacheManager"),), (_REPLAY,), (),
        "its interface changed from week to week; install a later release candidate",
    ),
    Generation("g0", "1.2", ((_MANAGERS, "MambaCacheManager"),), (_REPLAY,), _G0, _NOT_YET),
)  # fmt: skip
"""Newest first: the first whose signs are there is meant."""

MODEL_MODULES = ("modeling_nemotron_h", "modeling_qwen3_next", "modeling_qwen3_5")
"""Modules of the engine with models whose recurrent layers are served, where they exist."""
