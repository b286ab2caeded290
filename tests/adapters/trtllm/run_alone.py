"""What generation g4b adds to the double of g4.

A Mamba-2 layer computes in a function that graphs may leave out, rows of Gated DeltaNet layers have more ways
to be decoded, also beside prompts, and managers promote states in more ways.
"""

from __future__ import annotations

from pathlib import Path

_FORWARD = """\
    def forward(
        self, zxbcdt, attn_metadata, mamba_metadata, spec_metadata=None, lora_params=None, **kwargs
    ):
"""
_CORE = """\
    def forward(
        self, hidden_states, attn_metadata, mamba_metadata, spec_metadata=None, lora_params=None, **kwargs
    ):
        out = hidden_states.new_empty(len(hidden_states), self.tp_d_inner)
        self.forward_core(hidden_states, attn_metadata, mamba_metadata, spec_metadata, out)
        return out

    def forward_core(self, zxbcdt, attn_metadata, mamba_metadata, spec_metadata, preallocated_ssm_out):
"""
_SHORTCUTS = """\
    can_use_gdn_decode_pdl_pair,
    flashinfer_gdn_decode_direct_available,
    flashinfer_gdn_decode_t1,
    gdn_decode_pdl_update,
"""
_FASTER = """

def can_use_gdn_decode_pdl_pair(ssm_states, num_tokens, num_seqs, head_k_dim, head_v_dim, activation):
    return num_tokens == num_seqs


def gdn_decode_pdl_update(*, mixed_qkv, num_k_heads, num_v_heads, head_k_dim, head_v_dim, **given):
    q, k, v = torch.split(
        mixed_qkv, [num_k_heads * head_k_dim, num_k_heads * head_k_dim, num_v_heads * head_v_dim], -1
    )
    q, k = (value.unflatten(-1, (num_k_heads, head_k_dim))[None] for value in (q, k))
    v = v.unflatten(-1, (num_v_heads, head_v_dim))[None]
    return fused_sigmoid_gating_delta_rule_update(q=q, k=k, v=v, **given)


def flashinfer_gdn_decode_direct_available(state_dtype, head_k_dim, head_v_dim):
    return state_dtype is torch.bfloat16


def flashinfer_gdn_decode_t1(A_log, dt_bias, q, k, v, a, b, state_pool, slots, output, scale):
    q, k, v, out = (value.transpose(0, 1) for value in (q, k, v, output))
    fused_sigmoid_gating_delta_rule_update(
        A_log, a[:, 0], dt_bias, 1.0, 20.0, q, k, v, b[:, 0], state_pool, slots, scale, True, None, out
    )
"""
_DECODES = """\
        query, key, value = (x[None] for x in self._split(mixed_qkv))
        return fused_sigmoid_gating_delta_rule_update(
"""
_PAIR = """\
        if can_use_gdn_decode_pdl_pair(
            ssm_states, len(mixed_qkv), num_decodes, self.head_k_dim, self.head_v_dim, self.activation
        ):
            return gdn_decode_pdl_update(
                A_log=self.A_log,
                a=a,
                dt_bias=self.dt_bias,
                softplus_beta=1.0,
                softplus_threshold=20.0,
                mixed_qkv=mixed_qkv,
                b=b,
                initial_state_source=ssm_states,
                initial_state_indices=cache_indices,
                num_k_heads=self.num_k_heads_per_tp,
                num_v_heads=self.num_v_heads_per_tp,
                head_k_dim=self.head_k_dim,
                head_v_dim=self.head_v_dim,
                use_qk_l2norm_in_kernel=True,
                output=output,
            )
"""
_BESIDE = """\
            beside = self._mixed_decode_recurrent(
                mixed_d,
                a[tokens_p:],
                b[tokens_p:],
                ssm_states,
                slots_d,
                torch.arange(num_decodes + 1),
                mixed_d.new_empty(1, num_decodes, self.num_v_heads_per_tp, self.head_v_dim),
            )
            a, b = a[:tokens_p], b[:tokens_p]
            kwargs["cache_indices"] = slots_p
            kwargs["query_start_loc_long"] = kwargs["query_start_loc_long"][: num_prefill + 1]
"""
_ROWS = """\
    def _mixed_decode_recurrent(
        self, mixed_qkv_d, a_d, b_d, ssm_states, state_indices_d, cu_seqlens_long, output_d
    ):
        query, key, value = self._split(mixed_qkv_d)
        if flashinfer_gdn_decode_direct_available(ssm_states.dtype, self.head_k_dim, self.head_v_dim):
            flashinfer_gdn_decode_t1(
                self.A_log,
                self.dt_bias,
                query[:, None],
                key[:, None],
                value[:, None],
                a_d[:, None],
                b_d[:, None],
                ssm_states,
                state_indices_d,
                output_d.transpose(0, 1),
                self.head_k_dim**-0.5,
            )
            return output_d
        return fused_sigmoid_gating_delta_rule_update(
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            q=query[None],
            k=key[None],
            v=value[None],
            a=a_d,
            b=b_d,
            initial_state_source=ssm_states,
            initial_state_indices=state_indices_d,
            cu_seqlens=cu_seqlens_long,
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            output=output_d,
        )

"""
_PROMOTION = """\
def _promote_mamba_state_triton(
    dst,
    intermediate,
    src_state_indices,
    accepted_position_source,
    dst_state_indices,
    num_accepted_tokens=None,
    position_source_is_token_count=False,
    replay_pnat=None,
    replay_cache_buf_idx=None,
    dummy_request_mask=None,
    replay_step_width=0,
    replay_history_size=0,
    BLOCK=2048,
):
    rows = src_state_indices.long()
    accepted = accepted_position_source.long() - int(position_source_is_token_count)
"""
_COUNTING = "self.all_ssm_states, self.intermediate_ssm_states, rows, accepted, slots"
_COUNTED = "accepted + 1, slots, position_source_is_token_count=True"
_STACKED = """\
            self._promote_state(
                self.all_ssm_states, None, self.intermediate_ssm_states, rows, accepted, slots
            )
        self._promote_state(self.all_conv_states, None, self.intermediate_conv_states, rows, accepted, slots)

    @staticmethod
    def _promote_state(
        per_layer, stacked, intermediate, src_state_indices, accepted_positions, state_indices_d
    ):
        for layer, dst in enumerate(per_layer):
            _promote_mamba_state_triton(
                dst.unsqueeze(0),
                intermediate[layer : layer + 1],
                src_state_indices,
                accepted_positions,
                state_indices_d,
            )
"""
_KDA = "        kda_replay_num_spec=None,\n"
_COMMITS = """\
        gdn = conv_state_layout == "q_k_v"
        self._use_gdn_cached_replay_all_layer_commit = use_replay_state_update and gdn
"""
_MIXED = "        mapping,\n        dtype=None,\n        spec_config=None,\n        is_est"
_MIXED_ROWS = "        if num_decodes > 0:\n            mixed_d = causal"
_ADVANCE = "            self._advance("
_COMMITTED = """\
            self._commit_gdn_cached_replay_history_layers(attn_metadata, last - first)
"""


def rewrite(root: Path) -> None:
    """Make a double of generation g4 one of g4b."""
    modules, managers = root / "_torch/modules", root / "_torch/pyexecutor/kv_cache"
    _rewrite(
        modules / "mamba/mamba2_mixer.py",
        ("hidden_states", "zxbcdt"),
        (
            "class Mamba2Mixer(nn.Module):",
            "mamba2_custom_op_inplace = None\n\n\nclass Mamba2Mixer(nn.Module):",
        ),
        (_FORWARD, _CORE),
        ("zxbcdt.new_empty(len(zxbcdt), self.tp_d_inner)", "preallocated_ssm_out"),
        ("        return out\n\n    def _split", "\n    def _split"),
    )
    _rewrite(
        modules / "mamba/gdn_mixer.py",
        ("    _flashinfer_gdn_verify,\n", f"    _flashinfer_gdn_verify,\n{_SHORTCUTS}"),
        (_DECODES, _PAIR + _DECODES),
        ("    def _snapshot_verify", f"{_ROWS}    def _snapshot_verify"),
        (_MIXED_ROWS, f"        beside = None\n{_MIXED_ROWS}"),
        ("            mixed_p = torch.cat([mixed_p, mixed_d])\n", _BESIDE),
        ("        return out\n", "        return out if beside is None else torch.cat([out, beside], 1)\n"),
    )
    with (modules / "fla/fused_sigmoid_gating_recurrent.py").open("a") as file:
        file.write(_FASTER)
    source = managers / "mamba_cache_manager.py"
    text = source.read_text()
    promotion = text[
        text.index("def _promote_mamba_state_triton") : text.index("    dst[:, dst_state_indices")
    ]
    copies = text[text.index("            for layer, dst in enumerate(self.all_ssm_states)") :]
    commit = text[
        text.index("    @property\n    def use_gdn_cached") : text.index("    def _setup_states(self)")
    ]
    advance = "        if self._use_replay_state_update:\n" + _ADVANCE
    layout = '        conv_state_layout="x_b_c",\n'
    _rewrite(
        source,
        (promotion, _PROMOTION),
        (_COUNTING, _COUNTING.replace("accepted, slots", _COUNTED)),
        (copies, _STACKED),
        (
            "    def shutdown(self):\n        self.all_ssm_states = []",
            commit + "    def shutdown(self):\n        self.all_ssm_states = []",
        ),
        (advance, advance.replace(_ADVANCE, _COMMITTED + _ADVANCE)),
        ("        # One for the padding", _COMMITS + "        # One for the padding"),
        (layout, f"{layout}{_KDA}        qwen4_exp_ple_cache_params=None,\n"),
        (_MIXED, _MIXED.replace("mapping,\n", "mapping,\n        max_num_tokens=None,\n")),
        ("        pool_configurations=None,\n", f"{_KDA}        pool_configurations=None,\n"),
        (
            "    ):\n        self.speculative_num_draft_tokens",
            f"{_KDA}    ):\n        self.speculative_num_draft_tokens",
        ),
    )


def _rewrite(file: Path, *changes: tuple[str, str]) -> None:
    text = file.read_text()
    for old, new in changes:
        assert old in text, f"{file.name}: {old}"
        text = text.replace(old, new)
    file.write_text(text)
