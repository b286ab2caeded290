"""A Mamba-2 layer; its projections and norm pass through, so `hidden_states` is what in_proj would give."""

import torch
import torch.nn.functional as F
from tensorrt_llm._torch.modules.mamba.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from tensorrt_llm._torch.modules.mamba.selective_state_update import scan, selective_state_update
from tensorrt_llm.mapping import Mapping
from torch import nn


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
    ):
        super().__init__()
        tp_size = (config.mapping if config else Mapping()).tp_size
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

    def forward(self, hidden_states, attn_metadata, mamba_metadata):
        num_prefills = attn_metadata.num_contexts
        num_decodes = attn_metadata.seq_lens.shape[0] - num_prefills
        split = [attn_metadata.num_ctx_tokens, attn_metadata.num_tokens - attn_metadata.num_ctx_tokens]
        state_indices = attn_metadata.kv_cache_manager.get_state_indices()[: num_prefills + num_decodes]
        state_indices_p, state_indices_d = torch.split(state_indices, [num_prefills, num_decodes])
        conv_states = attn_metadata.kv_cache_manager.get_conv_states(self.layer_idx)
        ssm_states = attn_metadata.kv_cache_manager.get_ssm_states(self.layer_idx)
        z, xbc, dt = torch.split(hidden_states, [self.tp_d_inner, self.tp_conv_dim, self.tp_nheads], dim=-1)
        (z_p, z_d), (xbc_p, xbc_d), (dt_p, dt_d) = (torch.split(x, split) for x in (z, xbc, dt))
        out = []
        if num_prefills > 0:
            xbc_p = causal_conv1d_fn(
                xbc_p.t(),
                self.conv1d.weight,
                self.conv1d.bias,
                activation="silu",
                conv_states=conv_states,
                has_initial_state=mamba_metadata.has_initial_states[:num_prefills],
                query_start_loc=mamba_metadata.cu_seqlens[: num_prefills + 1],
                cache_indices=state_indices_p,
            ).t()
            y = self._prefill(xbc_p, dt_p, ssm_states, state_indices_p, mamba_metadata)
            out.append(y.to(z.dtype) * F.silu(z_p))
        if num_decodes > 0:
            xbc_d = causal_conv1d_update(
                xbc_d,
                conv_states,
                self.conv1d.weight,
                self.conv1d.bias,
                activation="silu",
                conv_state_indices=state_indices_d,
            )
            x_d, B_d, C_d = self._split(xbc_d)
            H, P, N = self.tp_nheads, self.head_dim, self.d_state
            y = selective_state_update(
                ssm_states,
                x_d,
                dt_d[:, :, None].expand(-1, -1, P),
                self.A[:, None, None].expand(H, P, N),
                B_d,
                C_d,
                self.D[:, None].expand(H, P),
                z=z_d.unflatten(-1, (H, P)),
                dt_bias=self.dt_bias[:, None].expand(H, P),
                dt_softplus=self.delta_softplus,
                state_batch_indices=state_indices_d,
            )
            out.append(y.flatten(1))
        return torch.cat(out)

    def _split(self, xbc):
        sizes = [self.tp_d_inner, self.tp_ngroups * self.d_state, self.tp_ngroups * self.d_state]
        x, B, C = torch.split(xbc, sizes, dim=-1)
        return (
            x.unflatten(-1, (self.tp_nheads, self.head_dim)),
            B.unflatten(-1, (self.tp_ngroups, self.d_state)),
            C.unflatten(-1, (self.tp_ngroups, self.d_state)),
        )

    def _prefill(self, xbc, dt, ssm_states, slots, mamba_metadata):
        x, B, C = self._split(xbc)
        dt = F.softplus(dt.float() + self.dt_bias)
        outputs = []
        for row, slot in enumerate(slots.tolist()):
            chunk = slice(*mamba_metadata.cu_seqlens[row : row + 2].tolist())
            known = mamba_metadata.has_initial_states[row]
            state = ssm_states[slot].float() if known else torch.zeros_like(ssm_states[slot]).float()
            state, y = scan(state, x[chunk], dt[chunk], self.A, B[chunk], C[chunk], self.D)
            ssm_states[slot] = state.to(ssm_states.dtype)
            outputs.append(y.flatten(1))
        return torch.cat(outputs)
