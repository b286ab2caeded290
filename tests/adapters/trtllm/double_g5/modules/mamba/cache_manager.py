"""The recurrent states of Nemotron's models."""

import os

from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.common import (
    IntermediateState,
    _mamba_effective_tp_size,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.mamba_cache_manager_v2 import (
    MambaHybridCacheManagerV2,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.replay import ReplayHistory
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.seeds import (
    _reset_mamba_seed_buffer,
    allocate_mamba_seed_buffer,
)
from tensorrt_llm._utils import get_sm_version


class Mamba2State(IntermediateState):
    uses_replay = False

    def __init__(self):
        super().__init__()
        self.rand_seed = None
        self._seed_request_counter = 0
        self._seed_rank_offset = 0

    def bind(self, context, ssm_states, conv_states):
        super().bind(context, ssm_states, conv_states)
        self._seed_rank_offset = context.seed_rank_offset
        if context.stochastic_rounding and ssm_states:
            self.rand_seed = allocate_mamba_seed_buffer(
                len(ssm_states[0]), context.seed_rank_offset, ssm_states[0].device
            )

    def reset_slots(self, slots, host_slots):
        if self.rand_seed is None:
            return
        self._seed_request_counter += 1
        _reset_mamba_seed_buffer(
            self.rand_seed,
            slots,
            host_slots,
            counter=self._seed_request_counter,
            rank_offset=self._seed_rank_offset,
        )

    def _layer_cache_fields(self, layer_offset):
        kept = super()._layer_cache_fields(layer_offset)
        return kept if self.rand_seed is None else {**kept, "mamba_ssm_rand_seed": self.rand_seed}


def create_mamba2_state(*, spec_config, use_replay):
    if not use_replay:
        return Mamba2State()
    if spec_config is None:
        raise ValueError("Mamba replay requires speculative decoding")
    return ReplayHistory(spec_config.tokens_per_gen_step)


def select_mamba2_state(*, spec_config, ssm_cache_dtype, stochastic_rounding):
    trees = getattr(spec_config, "use_dynamic_tree", False)
    use_replay = spec_config is not None and get_sm_version() >= 80 and not trees
    use_replay = use_replay and os.environ.get("TRTLLM_USE_MAMBA_REPLAY", "1") != "0"
    if stochastic_rounding and ssm_cache_dtype.itemsize == 2 and get_sm_version() < 100:
        use_replay = False
    return create_mamba2_state(spec_config=spec_config, use_replay=use_replay)


class NemotronHybridCacheManagerV2(MambaHybridCacheManagerV2):
    def __init__(self, *args, use_replay_state_update=None, **kwargs):
        self._requested_replay = use_replay_state_update
        kwargs.setdefault("conv_state_layout", "x_b_c")
        super().__init__(*args, **kwargs)

    def _initialize_model_state(self):
        if self._requested_replay is not None:
            state = create_mamba2_state(spec_config=self.spec_config, use_replay=self._requested_replay)
        else:
            state = select_mamba2_state(
                spec_config=self.spec_config,
                ssm_cache_dtype=self.ssm_state_dtype,
                stochastic_rounding=self._mamba_ssm_stochastic_rounding,
            )
        if isinstance(state, ReplayHistory):
            if self.local_num_mamba_layers and self._global_n_groups % _mamba_effective_tp_size(
                self._state_layout.mapping
            ):
                raise ValueError("groups must be divisible by the effective TP size")
            state.validate(self._state_layout)
        return state

    def get_mamba_ssm_rand_seed(self):
        return self._speculative_state.rand_seed
