"""The recurrent states of Qwen's models with Gated DeltaNet layers."""

from tensorrt_llm._torch.modules.fla.cached_replay import (
    CACHED_REPLAY_PARTITION_MIN_BATCH_SIZE,
    commit_gdn_cached_replay_history_layers,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.common import (
    IntermediateState,
    _mamba_effective_tp_size,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.mamba_cache_manager_v2 import (
    MambaHybridCacheManagerV2,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.replay import ReplayHistory
from tensorrt_llm._torch.utils import is_gdn_replay_enabled
from tensorrt_llm._utils import get_sm_version


class GDNReplayState(ReplayHistory):
    @property
    def has_bound_states(self):
        return bool(self._ssm_states)

    def update(self, batch):
        if batch.num_generations >= CACHED_REPLAY_PARTITION_MIN_BATCH_SIZE:
            self.commit_all_layers(batch.attention_metadata, batch.num_generations)
        super().update(batch)

    def commit_all_layers(self, attention_metadata, num_decodes):
        mamba_metadata = attention_metadata.mamba_metadata
        assert mamba_metadata.replay_num_decodes == num_decodes
        commit_gdn_cached_replay_history_layers(
            ssm_states=self._ssm_states,
            old_u=self.old_x,
            old_k=self.old_B,
            old_G=self.old_dt,
            replay_work_items=mamba_metadata.replay_work_items[:num_decodes],
            n_writes=mamba_metadata.replay_n_writes,
            history_size=self.replay_history_size,
        )


def select_gdn_replay_state(*, spec_config, ssm_cache_dtype, manager_cls):
    trees = getattr(spec_config, "use_dynamic_tree", False)
    use_replay = spec_config is not None and get_sm_version() >= 80 and not trees
    use_replay = use_replay and spec_config.tokens_per_gen_step <= 8 and is_gdn_replay_enabled()
    return GDNReplayState(spec_config.tokens_per_gen_step) if use_replay else None


def create_gdn_state(manager, use_replay):
    if use_replay is False:
        return IntermediateState()
    if use_replay is True:
        if manager.spec_config is None:
            raise ValueError("GDN replay requires speculative decoding")
        return GDNReplayState(manager.spec_config.tokens_per_gen_step)
    state = select_gdn_replay_state(
        spec_config=manager.spec_config,
        ssm_cache_dtype=manager.ssm_state_dtype,
        manager_cls=type(manager),
    )
    return state or IntermediateState()


def validate_gdn_layout(manager, state):
    if isinstance(state, GDNReplayState):
        if manager.local_num_mamba_layers and manager._global_n_groups % _mamba_effective_tp_size(
            manager._state_layout.mapping
        ):
            raise ValueError("groups must be divisible by the effective TP size")
        state.validate(manager._state_layout)


class Qwen35HybridCacheManagerV2(MambaHybridCacheManagerV2):
    def __init__(self, *args, use_replay_state_update=None, **kwargs):
        self._requested_replay = use_replay_state_update
        kwargs.setdefault("conv_state_layout", "q_k_v")
        super().__init__(*args, **kwargs)

    def _initialize_model_state(self):
        state = create_gdn_state(self, self._requested_replay)
        validate_gdn_layout(self, state)
        return state

    @property
    def use_gdn_cached_replay_all_layer_commit(self):
        state = self._speculative_state
        return isinstance(state, GDNReplayState) and state.has_bound_states
