"""A Mamba-2 layer; its projections and norm pass through, so `hidden_states` is what in_proj would give."""

import os

import torch
import torch.nn.functional as F
from tensorrt_llm._torch.modules.mamba.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from tensorrt_llm._torch.modules.mamba.causal_conv1d_triton import (
    causal_conv1d_update as causal_conv1d_update_triton,
)
from tensorrt_llm._torch.modules.mamba.replay_selective_state_update import replay_selective_state_update
from tensorrt_llm._torch.modules.mamba.selective_state_update import scan
from tensorrt_llm._torch.modules.mamba.selective_state_update import (
    selective_state_update as selective_state_update_native,
)
from tensorrt_llm.mapping import Mapping
from torch import nn

selective_state_update_fi = selective_state_update_native


class Mamba2Mixer(nn.Module):
    def __init__(
        self,
        *,
        d_model,
        d_state,
        d_conv,
        nheads,
        n_groups,
        head_dim,
        chunk_size,
        layer_idx,
        bias=False,
        conv_bias=True,
        delta_rank=0,
        delta_softplus=True,
        remove_padding=True,
        apply_silu=True,
        rms_norm_eps=1e-5,
        dtype=None,
        config=None,
        use_custom_cublas_mm=False,
    ):
        super().__init__()
        mapping = config.mapping if config else Mapping()
        tp_size = 1 if mapping.enable_attention_dp else mapping.tp_size
        self.tp_nheads, self.tp_ngroups = nheads // tp_size, n_groups // tp_size
        self.tp_d_inner = head_dim * nheads // tp_size
        self.tp_conv_dim = self.tp_d_inner + 2 * self.tp_ngroups * d_state
        self.layer_idx = layer_idx
        self.d_state = d_state
        self.head_dim = head_dim
        self.delta_softplus = delta_softplus
        self.A = nn.Parameter(torch.empty(self.tp_nheads), requires_grad=False)
        self.D = nn.Parameter(torch.empty(self.tp_nheads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(self.tp_nheads), requires_grad=False)
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(
            torch.empty(self.tp_conv_dim, d_conv, dtype=dtype), requires_grad=False
        )
        self.conv1d.bias = None
        self._use_mtp_custom_op = os.environ.get("TRTLLM_MAMBA2_MTP_USE_CUSTOM_OP", "0") == "1"
        self.selective_state_update_func = selective_state_update_native
        quant_config = getattr(config, "quant_config", None)
        self._stochastic_rounding_for_flashinfer = (
            quant_config is not None
            and quant_config.mamba_ssm_stochastic_rounding
            and quant_config.mamba_ssm_cache_dtype is torch.float16
        )

    def post_load_weights(self):
        H, P, N = self.tp_nheads, self.head_dim, self.d_state
        self._A_expanded = self.A[:, None, None].expand(H, P, N)
        self._dt_bias_expanded = self.dt_bias[:, None].expand(H, P)
        self._D_expanded = self.D[:, None].expand(H, P)

    def forward(
        self, hidden_states, attn_metadata, mamba_metadata, spec_metadata=None, lora_params=None, **kwargs
    ):
        num_prefills = attn_metadata.num_contexts
        num_decodes = attn_metadata.seq_lens.shape[0] - num_prefills
        num_prefill_tokens = attn_metadata.num_ctx_tokens
        num_decode_tokens = attn_metadata.num_tokens - num_prefill_tokens
        state_indices = mamba_metadata.state_indices[: num_prefills + num_decodes]
        layer_cache = attn_metadata.kv_cache_manager.mamba_layer_cache(self.layer_idx)
        conv_states, ssm_states = layer_cache.conv, layer_cache.temporal
        state_indices_p, state_indices_d = torch.split(state_indices, [num_prefills, num_decodes])
        xbc = hidden_states[:, self.tp_d_inner : self.tp_d_inner + self.tp_conv_dim]
        dt_p, dt_d = torch.split(
            hidden_states[:, self.tp_d_inner + self.tp_conv_dim :], [num_prefill_tokens, num_decode_tokens]
        )
        out = hidden_states.new_empty(len(hidden_states), self.tp_d_inner)
        out_p, out_d = torch.split(out, [num_prefill_tokens, num_decode_tokens])
        if num_prefills > 0:
            xbc_p = causal_conv1d_fn(
                xbc[:num_prefill_tokens].t(),
                self.conv1d.weight,
                self.conv1d.bias,
                activation="silu",
                conv_states=conv_states,
                has_initial_state=mamba_metadata.has_initial_states[:num_prefills],
                query_start_loc=mamba_metadata.cu_seqlens[: num_prefills + 1],
                cache_indices=state_indices_p,
            ).t()
            self._prefill(xbc_p, dt_p, ssm_states, state_indices_p, mamba_metadata, out_p)
        if num_decodes > 0:
            xbc_d = xbc[num_prefill_tokens:]
            is_target_verify = attn_metadata.kv_cache_manager.is_speculative() and spec_metadata is not None
            rows = torch.arange(num_decodes, dtype=torch.int32)
            if is_target_verify:
                use_replay = getattr(attn_metadata.kv_cache_manager, "use_replay_state_update", False)
                draft_token_num = spec_metadata.runtime_draft_len + 1
                if use_replay:
                    metadata = attn_metadata.kv_cache_manager.get_replay_state_update_metadata()
                    assert draft_token_num == metadata.replay_step_width, "no dynamic draft length yet"
                is_dyn_tree = spec_metadata.is_spec_dec_dynamic_tree
                retrieve_next_token = retrieve_next_sibling = retrieve_parent_token = None
                if is_dyn_tree:
                    if use_replay:
                        raise NotImplementedError("no trees with replay")
                    retrieve_next_token = spec_metadata.retrieve_next_token[:num_decodes]
                    retrieve_next_sibling = spec_metadata.retrieve_next_sibling[:num_decodes]
                    # Filled by the convolution.
                    retrieve_parent_token = torch.empty(num_decodes, draft_token_num, dtype=torch.int32)
                xbc_d = causal_conv1d_update_triton(
                    xbc_d.reshape(num_decodes, draft_token_num, -1).transpose(1, 2),
                    conv_states,
                    self.conv1d.weight,
                    self.conv1d.bias,
                    activation="silu",
                    conv_state_indices=state_indices_d,
                    intermediate_conv_window=layer_cache.intermediate_conv_window,
                    intermediate_state_indices=rows,
                    retrieve_next_token=retrieve_next_token,
                    retrieve_next_sibling=retrieve_next_sibling,
                    retrieve_parent_token=retrieve_parent_token,
                )
                xbc_d = xbc_d.transpose(1, 2).reshape(num_decodes * draft_token_num, -1)
            else:
                xbc_d = causal_conv1d_update(
                    xbc_d,
                    conv_states,
                    self.conv1d.weight,
                    self.conv1d.bias,
                    activation="silu",
                    conv_state_indices=state_indices_d,
                )
            x_d, B_d, C_d = self._split(xbc_d)
            # The replay kernel takes dt as it comes.
            dt_d = dt_d if is_target_verify and use_replay else dt_d.float()
            dt_d = dt_d[:, :, None].expand(-1, -1, self.head_dim)
            philox_kwargs = {}
            if self._stochastic_rounding_for_flashinfer and not (is_target_verify and use_replay):
                rand_seed = attn_metadata.kv_cache_manager.get_mamba_ssm_rand_seed()
                assert rand_seed is not None, "the seeds were not allocated"
                rand_seed.add_(1)
                philox_kwargs = {"rand_seed": rand_seed[:1], "philox_rounds": 10}
            A, dt_bias, D = self._A_expanded, self._dt_bias_expanded, self._D_expanded
            if is_target_verify:
                lead = (num_decodes, draft_token_num)
                x_d, dt_d, B_d, C_d = (value.unflatten(0, lead) for value in (x_d, dt_d, B_d, C_d))
            if is_target_verify and use_replay:
                replay_selective_state_update(
                    ssm_states,
                    layer_cache.old_x,
                    layer_cache.old_B,
                    layer_cache.old_dt,
                    layer_cache.old_dA_cumsum,
                    layer_cache.cache_buf_idx,
                    layer_cache.prev_num_accepted_tokens,
                    x_d,
                    dt_d,
                    A,
                    B_d,
                    C_d,
                    D=D,
                    dt_bias=dt_bias,
                    dt_softplus=self.delta_softplus,
                    state_batch_indices=state_indices_d,
                    out=out_d.view(*lead, self.tp_nheads, self.head_dim),
                    n_writes=mamba_metadata.replay_n_writes,
                    replay_work_items=mamba_metadata.replay_work_items[:num_decodes],
                    launch_with_pdl=True,
                )
            elif is_target_verify:
                x_d, B_d, C_d = (value.contiguous() for value in (x_d, B_d, C_d))
                ssu_func, ssu_extra = self.selective_state_update_func, {}
                if is_dyn_tree:
                    ssu_func = selective_state_update_native
                    ssu_extra = dict(retrieve_parent_token=retrieve_parent_token)
                ssu_func(
                    ssm_states,
                    x_d,
                    dt_d,
                    A,
                    B_d,
                    C_d,
                    D,
                    z=None,
                    dt_bias=dt_bias,
                    dt_softplus=True,
                    state_batch_indices=state_indices_d,
                    out=out_d.view(*lead, self.tp_nheads, self.head_dim),
                    disable_state_update=True,
                    intermediate_states_buffer=layer_cache.intermediate_ssm,
                    cache_steps=draft_token_num,
                    intermediate_state_indices=rows,
                    **ssu_extra,
                    **philox_kwargs,
                )
            else:
                ssu_kwargs = dict(
                    z=None,
                    dt_bias=dt_bias,
                    dt_softplus=self.delta_softplus,
                    state_batch_indices=state_indices_d,
                    out=out_d.view(num_decodes, -1, self.head_dim),
                )
                self.selective_state_update_func(
                    ssm_states,
                    x_d.contiguous(),
                    dt_d,
                    A,
                    B_d.contiguous(),
                    C_d.contiguous(),
                    D,
                    **ssu_kwargs,
                    **philox_kwargs,
                )
        return out

    def _split(self, xbc):
        sizes = [self.tp_d_inner, self.tp_ngroups * self.d_state, self.tp_ngroups * self.d_state]
        x, B, C = torch.split(xbc, sizes, dim=-1)
        return (
            x.unflatten(-1, (self.tp_nheads, self.head_dim)),
            B.unflatten(-1, (self.tp_ngroups, self.d_state)),
            C.unflatten(-1, (self.tp_ngroups, self.d_state)),
        )

    def _prefill(self, xbc, dt, ssm_states, slots, mamba_metadata, out):
        x, B, C = self._split(xbc)
        dt = F.softplus(dt.float() + self.dt_bias)
        for row, slot in enumerate(slots.tolist()):
            first, last = mamba_metadata.cu_seqlens[row : row + 2].tolist()
            chunk = slice(first, last)
            known = mamba_metadata.has_initial_states[row]
            state = ssm_states[slot].float() if known else torch.zeros_like(ssm_states[slot]).float()
            state, y = scan(state, x[chunk], dt[chunk], self.A, B[chunk], C[chunk], self.D)
            ssm_states[slot] = state.to(ssm_states.dtype)
            out[chunk] = y.flatten(1).to(out.dtype)
