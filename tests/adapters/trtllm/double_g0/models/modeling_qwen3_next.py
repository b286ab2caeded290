"""A model with Gated DeltaNet layers, and the layer; `hidden_states` is `[q k v | b | a]`."""

import torch
from tensorrt_llm._torch.models.modeling_utils import register_auto_model
from tensorrt_llm._torch.modules.fla.chunk import chunk_gated_delta_rule
from tensorrt_llm._torch.modules.fla.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update,
    gates,
    unit,
)
from tensorrt_llm._torch.modules.mamba.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from torch import nn


class Qwen3NextGatedDeltaNet(nn.Module):
    def __init__(self, model_config, layer_idx=None):
        super().__init__()
        config, tp_size = model_config.pretrained_config, model_config.mapping.tp_size
        self.layer_idx = layer_idx
        self.attn_tp_size = tp_size
        self.head_k_dim, self.head_v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_dim = self.head_k_dim * config.linear_num_key_heads
        self.value_dim = self.head_v_dim * config.linear_num_value_heads
        self.activation = "silu"
        self.heads = config.linear_num_value_heads // tp_size
        self.conv_dim = (2 * self.key_dim + self.value_dim) // tp_size
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(
            torch.empty(self.conv_dim, config.linear_conv_kernel_dim, dtype=config.torch_dtype),
            requires_grad=False,
        )
        self.conv1d.bias = None
        self.dt_bias = nn.Parameter(torch.ones(self.heads), requires_grad=False)
        self.A_log = nn.Parameter(torch.empty(self.heads), requires_grad=False)

    def forward(self, hidden_states, attn_metadata, mamba_metadata, all_reduce_params=None):
        num_prefills = attn_metadata.num_contexts
        num_decodes = attn_metadata.seq_lens.shape[0] - num_prefills
        state_indices = attn_metadata.kv_cache_manager.get_state_indices()[: num_prefills + num_decodes]
        state_indices_p, state_indices_d = torch.split(state_indices, [num_prefills, num_decodes])
        conv_states = attn_metadata.kv_cache_manager.get_conv_states(self.layer_idx)
        ssm_states = attn_metadata.kv_cache_manager.get_ssm_states(self.layer_idx)
        if num_prefills > 0:
            ssm_states[state_indices_p.long()] = 0
        mixed_qkv, b, a = torch.split(hidden_states, [self.conv_dim, self.heads, self.heads], dim=-1)
        kwargs = {
            "mixed_qkv": mixed_qkv,
            "a": a,
            "b": b,
            "has_initial_states": mamba_metadata.has_initial_states,
            "cache_indices": state_indices,
            "query_start_loc": mamba_metadata.cu_seqlens,
            "num_prefill_tokens": attn_metadata.num_ctx_tokens,
            "state_indices_p": state_indices_p,
            "state_indices_d": state_indices_d,
            "num_prefill": num_prefills,
            "num_decode": num_decodes,
        }
        if num_prefills > 0:
            out = self.forward_extend(conv_states, ssm_states, **kwargs)
        else:
            out = self.forward_decode(
                conv_states, ssm_states, num_decodes, mamba_metadata.cu_seqlens, **kwargs
            )
        return out.reshape(len(hidden_states), -1)

    def _split(self, mixed_qkv):
        key_dim, value_dim = self.key_dim // self.attn_tp_size, self.value_dim // self.attn_tp_size
        query, key, value = torch.split(mixed_qkv, [key_dim, key_dim, value_dim], dim=-1)
        return (
            query.unflatten(-1, (-1, self.head_k_dim))[None],
            key.unflatten(-1, (-1, self.head_k_dim))[None],
            value.unflatten(-1, (-1, self.head_v_dim))[None],
        )

    def forward_decode(self, conv_states, ssm_states, num_decodes, cu_seqlens, **kwargs):
        mixed_qkv = causal_conv1d_update(
            kwargs["mixed_qkv"],
            conv_states,
            self.conv1d.weight,
            self.conv1d.bias,
            self.activation,
            conv_state_indices=kwargs["cache_indices"],
        )
        query, key, value = self._split(mixed_qkv)
        return fused_sigmoid_gating_delta_rule_update(
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            q=query,
            k=key,
            v=value,
            a=kwargs["a"],
            b=kwargs["b"],
            initial_state_source=ssm_states,
            initial_state_indices=kwargs["cache_indices"],
            cu_seqlens=torch.arange(num_decodes + 1),
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
        )

    def forward_extend(self, conv_states, ssm_states, **kwargs):
        mixed_qkv, tokens_p, num_prefill = (
            kwargs[name] for name in ("mixed_qkv", "num_prefill_tokens", "num_prefill")
        )
        mixed = causal_conv1d_fn(
            mixed_qkv[:tokens_p].t(),
            self.conv1d.weight,
            self.conv1d.bias,
            activation=self.activation,
            conv_states=conv_states,
            has_initial_state=kwargs["has_initial_states"][:num_prefill],
            cache_indices=kwargs["state_indices_p"],
            query_start_loc=kwargs["query_start_loc"][: num_prefill + 1],
        ).t()
        if kwargs["num_decode"] > 0:
            mixed_d = causal_conv1d_update(
                mixed_qkv[tokens_p:],
                conv_states,
                self.conv1d.weight,
                self.conv1d.bias,
                activation=self.activation,
                conv_state_indices=kwargs["state_indices_d"],
            )
            mixed = torch.cat([mixed, mixed_d])
        query, key, value = self._split(mixed)
        g, beta = gates(self.A_log, kwargs["a"], self.dt_bias, kwargs["b"])
        slots = kwargs["cache_indices"].long()
        # The trap: decode rows go through the prefill kernel, on their states out of the pool.
        out, states = chunk_gated_delta_rule(
            q=unit(query),
            k=unit(key),
            v=value,
            g=g[None],
            beta=beta[None],
            initial_state=ssm_states[slots],
            output_final_state=True,
            cu_seqlens=kwargs["query_start_loc"].long(),
            head_first=False,
        )
        ssm_states[slots] = states.to(ssm_states.dtype)
        return out


@register_auto_model("Qwen3NextForCausalLM")
class Qwen3NextForCausalLM:
    pass
