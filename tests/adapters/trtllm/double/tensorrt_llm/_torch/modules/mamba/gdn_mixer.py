"""A Gated DeltaNet layer; its projections and norm pass through, so `hidden_states` is `[q k v | b | a]`."""

import torch
from tensorrt_llm._torch.modules.fla.cached_replay import (
    CACHED_REPLAY_PARTITION_MIN_BATCH_SIZE,
    fused_recurrent_gated_delta_rule_cached_replay_update,
)
from tensorrt_llm._torch.modules.fla.chunk import chunk_gated_delta_rule
from tensorrt_llm._torch.modules.fla.fused_recurrent import fused_recurrent_gated_delta_rule_update
from tensorrt_llm._torch.modules.fla.fused_sigmoid_gating_recurrent import (
    _can_use_flashinfer_gdn_verify,
    _flashinfer_gdn_verify,
    fused_sigmoid_gating_delta_rule_update,
    gates,
    unit,
)
from tensorrt_llm._torch.modules.mamba.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from tensorrt_llm._torch.modules.mamba.causal_conv1d_triton import (
    causal_conv1d_update as causal_conv1d_update_triton,
)
from torch import nn


class Qwen3NextGatedDeltaNet(nn.Module):
    def __init__(self, model_config, aux_stream, layer_idx=None):
        super().__init__()
        config, mapping = model_config.pretrained_config, model_config.mapping
        tp_size = 1 if mapping.enable_attention_dp else mapping.tp_size
        self.layer_idx = layer_idx
        self.num_k_heads_per_tp = config.linear_num_key_heads // tp_size
        self.num_v_heads_per_tp = config.linear_num_value_heads // tp_size
        self.head_k_dim, self.head_v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_dim_per_tp = self.head_k_dim * self.num_k_heads_per_tp
        self.value_dim_per_tp = self.head_v_dim * self.num_v_heads_per_tp
        self.conv_dim_per_tp = 2 * self.key_dim_per_tp + self.value_dim_per_tp
        self.activation = "silu"
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(
            torch.empty(self.conv_dim_per_tp, config.linear_conv_kernel_dim, dtype=config.torch_dtype),
            requires_grad=False,
        )
        self.conv1d.bias = None
        self.dt_bias = nn.Parameter(torch.ones(self.num_v_heads_per_tp), requires_grad=False)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads_per_tp), requires_grad=False)

    def forward(
        self, hidden_states, attn_metadata, mamba_metadata, spec_metadata=None, all_reduce_params=None
    ):
        heads = self.num_v_heads_per_tp
        mixed_qkv, b, a = torch.split(hidden_states, [self.conv_dim_per_tp, heads, heads], dim=-1)
        out = self.forward_core(mixed_qkv, a, b, attn_metadata, mamba_metadata, spec_metadata=spec_metadata)
        return out.reshape(-1, self.value_dim_per_tp)

    def forward_core(self, mixed_qkv, a, b, attn_metadata, mamba_metadata, spec_metadata=None, output=None):
        num_prefills = attn_metadata.num_contexts
        num_decodes = attn_metadata.seq_lens.shape[0] - num_prefills
        state_indices = mamba_metadata.state_indices[: num_prefills + num_decodes]
        layer_cache = attn_metadata.kv_cache_manager.mamba_layer_cache(self.layer_idx)
        conv_states, ssm_states = layer_cache.conv, layer_cache.temporal
        state_indices_p, state_indices_d = torch.split(state_indices, [num_prefills, num_decodes])
        has_initial_states = mamba_metadata.has_initial_states
        if num_prefills > 0:
            fresh = state_indices_p[~has_initial_states[:num_prefills]].long()
            ssm_states[fresh] = 0.0
            conv_states[fresh] = 0.0
        is_target_verify = (
            num_decodes > 0 and spec_metadata is not None and attn_metadata.kv_cache_manager.is_speculative()
        )
        manager = attn_metadata.kv_cache_manager
        use_replay = is_target_verify and getattr(manager, "use_replay_state_update", False)
        partitioned = use_replay and num_decodes >= CACHED_REPLAY_PARTITION_MIN_BATCH_SIZE
        kwargs = {
            "mixed_qkv": mixed_qkv,
            "a": a,
            "b": b,
            "has_initial_states": has_initial_states,
            "cache_indices": state_indices,
            "query_start_loc": mamba_metadata.query_start_loc,
            "query_start_loc_long": mamba_metadata.query_start_loc_long,
            "batch_size": attn_metadata.seq_lens.shape[0],
            "num_prefill_tokens": attn_metadata.num_ctx_tokens,
            "num_decode_tokens": attn_metadata.num_tokens - attn_metadata.num_ctx_tokens,
            "state_indices_p": state_indices_p,
            "state_indices_d": state_indices_d,
            "num_prefill": num_prefills,
            "num_decodes": num_decodes,
            "use_replay": use_replay,
            "replay_metadata": manager.get_replay_state_update_metadata() if use_replay else None,
            "layer_cache": layer_cache,
            "replay_work_items": mamba_metadata.replay_work_items[:num_decodes] if partitioned else None,
            "replay_n_writes": mamba_metadata.replay_n_writes if partitioned else None,
            "use_cached_replay_all_layer_commit": num_decodes >= CACHED_REPLAY_PARTITION_MIN_BATCH_SIZE
            and getattr(manager, "use_gdn_cached_replay_all_layer_commit", False),
        }
        return (self.forward_extend if num_prefills > 0 else self.forward_decode)(
            conv_states,
            ssm_states,
            spec_metadata=spec_metadata,
            intermediate_conv_states=layer_cache.intermediate_conv_window if is_target_verify else None,
            intermediate_ssm_states=layer_cache.intermediate_ssm if is_target_verify else None,
            is_target_verify=is_target_verify,
            output=output,
            **kwargs,
        )

    def _split(self, mixed_qkv):
        sizes = [self.key_dim_per_tp, self.key_dim_per_tp, self.value_dim_per_tp]
        query, key, value = torch.split(mixed_qkv, sizes, dim=-1)
        return (
            query.unflatten(-1, (-1, self.head_k_dim)),
            key.unflatten(-1, (-1, self.head_k_dim)),
            value.unflatten(-1, (-1, self.head_v_dim)),
        )

    def _convolve_drafts(self, mixed_qkv, conv_states, slots, windows, draft_token_num):
        mixed_qkv = causal_conv1d_update_triton(
            mixed_qkv.reshape(len(slots), draft_token_num, -1).transpose(1, 2),
            conv_states,
            self.conv1d.weight,
            self.conv1d.bias,
            self.activation,
            conv_state_indices=slots,
            intermediate_conv_window=windows,
            intermediate_state_indices=torch.arange(len(slots), dtype=torch.int32),
        )
        return mixed_qkv.transpose(1, 2).reshape(len(slots), draft_token_num, -1)

    def _replay_verify_recurrent(
        self,
        query,
        key,
        value,
        a,
        b,
        ssm_states,
        state_indices_d,
        num_decodes,
        draft_token_num,
        replay_metadata,
        layer_cache,
        replay_work_items,
        replay_n_writes,
        output_d=None,
        packed_qkv=None,
        use_all_layer_commit=False,
    ):
        assert draft_token_num == replay_metadata.replay_step_width, "no dynamic draft length yet"
        return fused_recurrent_gated_delta_rule_cached_replay_update(
            q=query,
            k=key,
            v=value,
            g=a,
            beta=b,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            launch_with_pdl=True,
            ssm_states=ssm_states,
            state_indices=state_indices_d[:num_decodes],
            old_u=layer_cache.old_x,
            old_k=layer_cache.old_B,
            old_G=layer_cache.old_dt,
            old_beta=layer_cache.old_dA_cumsum,
            cache_buf_idx=layer_cache.cache_buf_idx,
            prev_num_accepted_tokens=layer_cache.prev_num_accepted_tokens,
            history_size=replay_metadata.replay_history_size,
            replay_work_items=replay_work_items,
            n_writes=replay_n_writes,
            use_qk_l2norm_in_kernel=True,
            packed_qkv=packed_qkv,
            use_all_layer_commit=use_all_layer_commit,
            output=output_d,
        )

    def _snapshot_verify(self, query, key, value, a, b, ssm_states, slots, intermediate_ssm_states):
        g, beta = gates(self.A_log, a, self.dt_bias, b)
        return fused_recurrent_gated_delta_rule_update(
            q=query,
            k=key,
            v=value,
            g=g,
            beta=beta,
            initial_state_source=ssm_states[slots.long()],
            initial_state_indices=torch.arange(len(slots), dtype=torch.int32),
            use_qk_l2norm_in_kernel=True,
            disable_state_update=True,
            intermediate_states_buffer=intermediate_ssm_states,
            cache_steps=query.shape[1],
        )

    def forward_decode(
        self,
        conv_states,
        ssm_states,
        query_start_loc_long,
        spec_metadata=None,
        intermediate_conv_states=None,
        intermediate_ssm_states=None,
        is_target_verify=False,
        output=None,
        **kwargs,
    ):
        mixed_qkv, a, b = kwargs["mixed_qkv"], kwargs["a"], kwargs["b"]
        cache_indices, num_decodes = kwargs["cache_indices"], kwargs["num_decodes"]
        if is_target_verify:
            draft_token_num = spec_metadata.runtime_draft_len + 1
            assert mixed_qkv.shape[0] == num_decodes * draft_token_num
            assert kwargs.get("use_replay", False) or intermediate_ssm_states is not None
            mixed_qkv = self._convolve_drafts(
                mixed_qkv, conv_states, cache_indices, intermediate_conv_states, draft_token_num
            )
            query, key, value = self._split(mixed_qkv)
            a, b = (x.reshape(num_decodes, draft_token_num, -1) for x in (a, b))
            output_d = None if output is None else output.view(query.shape[:2] + value.shape[2:])
            if kwargs.get("use_replay", False):
                out = self._replay_verify_recurrent(
                    query,
                    key,
                    value,
                    a,
                    b,
                    ssm_states,
                    cache_indices,
                    num_decodes,
                    draft_token_num,
                    kwargs.get("replay_metadata"),
                    kwargs.get("layer_cache"),
                    kwargs.get("replay_work_items"),
                    kwargs.get("replay_n_writes"),
                    output_d,
                    packed_qkv=mixed_qkv,
                    use_all_layer_commit=kwargs.get("use_cached_replay_all_layer_commit", False),
                )
            elif _can_use_flashinfer_gdn_verify(
                ssm_states, self.head_k_dim, self.head_v_dim, draft_token_num
            ):
                out = _flashinfer_gdn_verify(
                    A_log=self.A_log,
                    a=a,
                    dt_bias=self.dt_bias,
                    softplus_beta=1.0,
                    softplus_threshold=20.0,
                    q=query,
                    k=key,
                    v=value,
                    b=b,
                    initial_state_source=ssm_states,
                    initial_state_indices=cache_indices[:num_decodes],
                    intermediate_states_buffer=intermediate_ssm_states[:num_decodes],
                    scale=self.head_k_dim**-0.5,
                    use_qk_l2norm_in_kernel=True,
                    output=output_d,
                )
            else:
                out = self._snapshot_verify(
                    query, key, value, a, b, ssm_states, cache_indices, intermediate_ssm_states
                )
            return out.view(1, num_decodes * draft_token_num, -1, self.head_v_dim)
        mixed_qkv = causal_conv1d_update(
            mixed_qkv,
            conv_states,
            self.conv1d.weight,
            self.conv1d.bias,
            self.activation,
            conv_state_indices=cache_indices,
        )
        query, key, value = (x[None] for x in self._split(mixed_qkv))
        return fused_sigmoid_gating_delta_rule_update(
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            q=query,
            k=key,
            v=value,
            a=a,
            b=b,
            initial_state_source=ssm_states,
            initial_state_indices=cache_indices,
            cu_seqlens=query_start_loc_long,
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            output=output,
        )

    def forward_extend(
        self,
        conv_states,
        ssm_states,
        spec_metadata=None,
        intermediate_conv_states=None,
        intermediate_ssm_states=None,
        is_target_verify=False,
        output=None,
        **kwargs,
    ):
        mixed_qkv, a, b = kwargs["mixed_qkv"], kwargs["a"], kwargs["b"]
        tokens_p, num_prefill = kwargs["num_prefill_tokens"], kwargs["num_prefill"]
        slots_p, slots_d = kwargs["state_indices_p"], kwargs["state_indices_d"]
        num_decodes = kwargs["num_decodes"]
        mixed_p = causal_conv1d_fn(
            mixed_qkv[:tokens_p].t(),
            self.conv1d.weight,
            self.conv1d.bias,
            activation=self.activation,
            conv_states=conv_states,
            has_initial_state=kwargs["has_initial_states"][:num_prefill],
            cache_indices=slots_p,
            query_start_loc=kwargs["query_start_loc"][: num_prefill + 1],
        ).t()
        if is_target_verify:
            draft_token_num = spec_metadata.runtime_draft_len + 1
            query, key, value = (x[None] for x in self._split(mixed_p))
            g, beta = gates(self.A_log, a[:tokens_p], self.dt_bias, b[:tokens_p])
            out_p, states = chunk_gated_delta_rule(
                q=unit(query),
                k=unit(key),
                v=value,
                g=g[None],
                beta=beta[None],
                initial_state=ssm_states[slots_p.long()],
                output_final_state=True,
                cu_seqlens=kwargs["query_start_loc_long"][: num_prefill + 1],
                head_first=False,
                use_qk_l2norm_in_kernel=False,
                output=None if output is None else output[:, :tokens_p],
            )
            ssm_states[slots_p.long()] = states.to(ssm_states.dtype)
            mixed_d = self._convolve_drafts(
                mixed_qkv[tokens_p:], conv_states, slots_d, intermediate_conv_states, draft_token_num
            )
            query_d, key_d, value_d = self._split(mixed_d)
            a_d, b_d = (x[tokens_p:].reshape(num_decodes, draft_token_num, -1) for x in (a, b))
            output_d = None if output is None else output[:, tokens_p:].view(value_d.shape)
            if kwargs.get("use_replay", False):
                out_d = self._replay_verify_recurrent(
                    query_d,
                    key_d,
                    value_d,
                    a_d,
                    b_d,
                    ssm_states,
                    slots_d,
                    num_decodes,
                    draft_token_num,
                    kwargs.get("replay_metadata"),
                    kwargs.get("layer_cache"),
                    kwargs.get("replay_work_items"),
                    kwargs.get("replay_n_writes"),
                    output_d,
                    use_all_layer_commit=kwargs.get("use_cached_replay_all_layer_commit", False),
                )
            elif _can_use_flashinfer_gdn_verify(
                ssm_states, self.head_k_dim, self.head_v_dim, draft_token_num
            ):
                out_d = _flashinfer_gdn_verify(
                    A_log=self.A_log,
                    a=a_d,
                    dt_bias=self.dt_bias,
                    softplus_beta=1.0,
                    softplus_threshold=20.0,
                    q=query_d,
                    k=key_d,
                    v=value_d,
                    b=b_d,
                    initial_state_source=ssm_states,
                    initial_state_indices=slots_d,
                    intermediate_states_buffer=intermediate_ssm_states[:num_decodes],
                    scale=self.head_k_dim**-0.5,
                    use_qk_l2norm_in_kernel=True,
                    output=output_d,
                )
            else:
                out_d = self._snapshot_verify(
                    query_d, key_d, value_d, a_d, b_d, ssm_states, slots_d, intermediate_ssm_states
                )
            if output is not None:
                return output
            return torch.cat([out_p, out_d.flatten(0, 1)[None]], dim=1)
        if num_decodes > 0:
            mixed_d = causal_conv1d_update(
                mixed_qkv[tokens_p:],
                conv_states,
                self.conv1d.weight,
                self.conv1d.bias,
                activation=self.activation,
                conv_state_indices=slots_d,
            )
            mixed_p = torch.cat([mixed_p, mixed_d])
        query, key, value = (x[None] for x in self._split(mixed_p))
        g, beta = gates(self.A_log, a, self.dt_bias, b)
        # The trap: decode rows go through the prefill kernel, on the states of the pool.
        out, _ = chunk_gated_delta_rule(
            q=unit(query),
            k=unit(key),
            v=value,
            g=g[None],
            beta=beta[None],
            initial_state=ssm_states,
            initial_state_indices=kwargs["cache_indices"],
            inplace_indexed_state_update=True,
            output_final_state=False,
            cu_seqlens=kwargs["query_start_loc_long"],
            head_first=False,
            use_qk_l2norm_in_kernel=False,
            output=output,
        )
        return out
