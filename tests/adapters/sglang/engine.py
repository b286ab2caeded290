"""A small part of a real SGLang on a CPU: its server arguments, pools, allocator, radix cache and backends.

Nothing of SGLang is replaced but the short convolution's update, a kernel for GPUs, which `conftest` makes
the identity: inputs are what a convolution would have given. The model is its configuration and, for Mamba-2,
SGLang's mixers without projections and norm; `ModelRunner` is SGLang's, with no more than its `_forward_raw`
reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from replayssm.adapters.sglang import hooks
from tests import oracle

Inputs = dict[str, torch.Tensor]

RULES = ("gdn", "kda", "mamba2")
LAYERS = 2

_COMMON = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 512, "torch_dtype": "float32",
    "eos_token_id": 1, "bos_token_id": 0, "rms_norm_eps": 1e-6,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "gdn": {
        **_COMMON, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "num_hidden_layers": 3, "full_attention_interval": 3, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "attn_output_gate": True, "mamba_ssm_dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "kda": {
        **_COMMON, "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
        "num_hidden_layers": 3, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_nope": True,
        "linear_attn_config": {
            "kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 4, "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    "mamba2": {
        **_COMMON, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
        "hybrid_override_pattern": "MM*", "mamba_num_heads": 4, "mamba_head_dim": 8,
        "ssm_state_size": 16, "n_groups": 2, "mamba_n_groups": 2, "conv_kernel": 4, "mamba_d_conv": 4,
        "mamba_ssm_cache_dtype": "float32",
    },
}  # fmt: skip


def write_model(rule: str, folder: Path, **changes: Any) -> Path:
    """A model directory that has a configuration and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[rule] | changes))
    return folder


def server_args(model: Path, **options: Any) -> Any:
    """Server arguments, not yet resolved; SGLang's CPU platform has no extra buffer and no overlap."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        **{
            "model_path": str(model),
            "device": "cpu",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "mamba_radix_cache_strategy": "no_buffer",
            "disable_overlap_schedule": True,
            "dtype": "float32",
            **options,
        }
    )


@dataclass
class Engine:
    """Pools and the recurrent backend of one model.

    Attributes:
        rule: the recurrence.
        args: the published server arguments.
        runner: the stand-in for SGLang's `ModelRunner`.
        backend: SGLang's backend for the recurrent layers.
        weights: the recurrence's parameters of each layer.
        lower_bound: KDA's bounded gate.
    """

    rule: str
    args: Any
    runner: Any
    backend: Any
    weights: list[Inputs]
    lower_bound: float | None = None

    @classmethod
    def start(cls, rule: str, model: Path, slots: int = 6, requests: int = 4, **options: Any) -> Engine:
        """Publish server arguments, build the pools, and let SGLang choose and build its backend."""
        from sglang.srt import runtime_context
        from sglang.srt.configs.hybrid_arch import mambaish_config
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

        args = server_args(model, **options)
        ranks = runtime_context.SpawnRanks(world_rank=0)
        runtime_context.publish(args, role="scheduler", ranks=ranks)
        config = ModelConfig.from_server_args(args)
        params = mambaish_config(config).mamba2_cache_params
        assert len(params.layers) == LAYERS
        pool = HybridReqToTokenPool(
            size=requests,
            mamba_size=slots,
            mamba_spec_state_size=requests,
            max_context_len=512,
            device="cpu",
            enable_memory_saver=False,
            cache_params=params,
            mamba_layer_ids=params.layers,
            enable_mamba_extra_buffer=False,
            enable_overlap_schedule=False,
            speculative_num_draft_tokens=runtime_context.max_speculative_num_draft_tokens(),
            speculative_eagle_topk=runtime_context.get_spec().speculative_eagle_topk,
        )
        weights = _weights(rule, params.shape.temporal)
        runner = _runner(
            req_to_token_pool=pool,
            server_args=args,
            model_config=config,
            model=_model(rule, weights, params.shape.temporal),
            use_mla_backend=rule == "kda",
            dtype=config.dtype,
        )
        engine = cls(rule, args, runner, None, weights)
        engine.use(engine.another_backend())
        return engine

    def another_backend(self) -> Any:
        """SGLang's choice of backends for the model, built anew."""
        from sglang.srt.layers.attention.attention_registry import attn_backend_wrapper

        full = SimpleNamespace(
            token_to_kv_pool=None, req_to_token_pool=self.slots, kv_index_translator=None,
            needs_cpu_seq_lens=False, use_captured_forward_metadata_for_breakable_cuda_graph=False,
        )  # fmt: skip
        return attn_backend_wrapper(self.runner, full)

    def use(self, attn_backend: Any) -> None:
        """Take the next steps by `attn_backend`."""
        self.runner.attn_backend = attn_backend
        self.backend = attn_backend.linear_attn_backend

    @property
    def slots(self) -> Any:
        """SGLang's pool of requests and slots."""
        return self.runner.req_to_token_pool

    @property
    def states(self) -> torch.Tensor:
        """SGLang's states, `[layers, slots, HV, V, K]`."""
        states: torch.Tensor = self.slots.mamba_pool.mamba_cache.temporal
        return states

    def forward(self, batch: Any, run: Callable[[], Any]) -> Any:
        """SGLang's `ModelRunner._forward_raw` of a batch; `run` stands for the model."""
        self.runner.eager_runner.execute = lambda forward_batch, pp_proxy_tensors=None: run()
        return self.runner._forward_raw(batch, None).logits_output

    def decode(
        self,
        rows: Sequence[int],
        tokens: list[Inputs],
        tracked: Sequence[bool] | None = None,
        requests: Sequence[Any] = (),
        **batch: Any,
    ) -> list[torch.Tensor]:
        """One decode step of the requests in `rows` (0: a padded row), through all layers.

        Args:
            rows: rows of the request pool.
            tokens: for each layer the inputs of each row behind the convolution, see `draw`.
            tracked: which rows the prefix cache keeps, where the scheduler's batch has said it.
            requests: SGLang's requests, where the scheduler's batch has them.
            **batch: further attributes of the batch.

        Returns:
            Per layer the outputs, `[B, HV, V]`.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        forward_batch = make_batch(ForwardMode.DECODE, rows, **batch)
        scheduled = SimpleNamespace(mamba_track_mask_cpu=tracked, reqs=requests)
        forward_batch = hooks.keep_rows(lambda *args: forward_batch, None, scheduled, self.runner)

        def run() -> list[torch.Tensor]:
            self.backend.init_forward_metadata(forward_batch)
            return [self._layer(forward_batch, layer, inputs) for layer, inputs in enumerate(tokens)]

        outputs: list[torch.Tensor] = self.forward(forward_batch, run)
        return outputs

    def verify(
        self,
        rows: Sequence[int],
        tokens: list[Inputs],
        drafts: int,
        parents: Sequence[Sequence[int]] = (),
        graph: bool = False,
    ) -> list[torch.Tensor]:
        """One verification step of the requests in `rows` (0: a padded row), through all layers.

        Args:
            rows: rows of the request pool, the padded ones last.
            tokens: for each layer the inputs of each row's tokens, row by row.
            drafts: tokens of each row.
            parents: of draft trees, for each row the parent of each token, -1 for the first.
            graph: SGLang prepares the step as it does before it replays a CUDA graph, in fixed buffers.

        Returns:
            Per layer the outputs, `[B, drafts, HV, V]`.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        padded = list(rows).count(0) if graph else 0
        links = [_links(row) for row in parents[: len(rows) - padded]]
        spec_info = SimpleNamespace(
            draft_token_num=drafts,
            ragged_verify_layout=None,
            retrieve_next_token=torch.tensor([children for children, _ in links]) if links else None,
            retrieve_next_sibling=torch.tensor([siblings for _, siblings in links]) if links else None,
        )
        forward_batch = make_batch(ForwardMode.TARGET_VERIFY, rows, drafts, spec_info=spec_info)
        forward_batch.num_padding = padded

        def run() -> list[torch.Tensor]:
            if graph:
                self._make_buffers(drafts)
                self.backend.init_forward_metadata_out_graph(forward_batch)
            else:
                self.backend.init_forward_metadata(forward_batch)
            return [self._layer(forward_batch, layer, inputs) for layer, inputs in enumerate(tokens)]

        outputs: list[torch.Tensor] = self.forward(forward_batch, run)
        return [out.unflatten(0, (len(rows), drafts)) for out in outputs]

    def _make_buffers(self, drafts: int) -> None:
        """SGLang's fixed buffers, those of a server with drafts of this length."""
        self.backend.state_indices_list.clear()
        self.backend.query_start_loc_list.clear()
        for name in ("next", "parent"):
            getattr(self.backend, f"retrieve_{name}_token_list").clear()
        self.backend.retrieve_next_sibling_list.clear()
        self.backend.init_cuda_graph_state(8, 8 * drafts)

    def _layer(self, forward_batch: Any, layer: int, inputs: Inputs) -> torch.Tensor:
        layer_id = self.slots.mamba_pool.mamba_layer_ids[layer]
        _, _, HV, V, K = self.states.shape
        if self.rule == "mamba2":
            mixer = self.runner.model.layers[layer]
            x, B, C, dt = (inputs[name] for name in ("x", "B", "C", "dt"))
            gate = torch.zeros_like(x).flatten(1)
            hidden = torch.cat([gate, x.flatten(1), B.flatten(1), C.flatten(1), dt], dim=-1)
            out = self.backend.forward(
                mixer, hidden, None, layer_id, forward_batch, use_triton_causal_conv=True
            )
            return out.view(len(hidden), HV, V)
        weights = self.weights[layer]
        H = inputs["q"].shape[1]
        served = SimpleNamespace(
            layer_id=layer_id, num_q_heads=H, num_k_heads=H, num_v_heads=HV, head_q_dim=K, head_k_dim=K,
            head_v_dim=V, q_dim=H * K, k_dim=H * K, v_dim=HV * V, conv_weights=None, bias=None,
            activation="silu", A_log=weights["A_log"], dt_bias=weights["dt_bias"],
            lower_bound=self.lower_bound,
        )  # fmt: skip
        mixed = torch.cat([inputs[name].flatten(1) for name in "qkv"], dim=-1)
        a, b = inputs["a"].flatten(1), inputs["b"]
        if self.rule == "kda":
            a, b = a[None], b[None]
        verify = forward_batch.forward_mode.is_target_verify()
        run = self.backend.forward_extend if verify else self.backend.forward_decode
        out = run(served, forward_batch, mixed, a, b)
        assert out.shape == (1, len(mixed), HV, V)
        return out[0]

    def draw(self, rows: int, generator: torch.Generator) -> list[Inputs]:
        """Random inputs of a decode step, for each layer; gates are raw."""

        def normal(*dims: int) -> torch.Tensor:
            return torch.randn(rows, *dims, generator=generator)

        _, _, HV, V, K = self.states.shape
        if self.rule == "mamba2":
            return [
                {"x": normal(HV, V), "B": normal(2, K), "C": normal(2, K), "dt": normal(HV)}
                for _ in range(LAYERS)
            ]
        H = 2 if self.rule == "gdn" else HV
        gate = (HV, K) if self.rule == "kda" else (HV,)
        return [
            {"q": normal(H, K), "k": normal(H, K), "v": normal(HV, V), "a": normal(*gate), "b": normal(HV)}
            for _ in range(LAYERS)
        ]

    def oracle_token(self, layer: int, inputs: Inputs, row: int) -> Inputs:
        """One row's inputs as the oracle takes them, with finished gates in fp64."""
        token = {name: value[row].double() for name, value in inputs.items()}
        weights = {name: value.double() for name, value in self.weights[layer].items()}
        if self.rule == "mamba2":
            dt = oracle.softplus(token["dt"] + weights["dt_bias"])
            return {"x": token["x"], "B": token["B"], "C": token["C"], "dt": dt, "A": weights["A"],
                    "D": weights["D"]}  # fmt: skip
        a, bias = token.pop("a"), weights["dt_bias"]
        rate = torch.exp(weights["A_log"])
        if self.rule == "kda":
            bias, rate = bias.view_as(a), rate[:, None]
        if self.lower_bound is None:
            g = -rate * oracle.softplus(a + bias)
        else:
            g = self.lower_bound * torch.sigmoid(rate * (a + bias))
        return {**token, "g": g, "beta": torch.sigmoid(token.pop("b"))}


def _links(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of each node, as SGLang describes a draft tree; -1 for none."""
    children, siblings = [-1] * len(parents), [-1] * len(parents)
    for node in reversed(range(1, len(parents))):
        siblings[node] = children[parents[node]]
        children[parents[node]] = node
    return children, siblings


def make_batch(mode: Any, rows: Sequence[int], tokens: int = 1, **given: Any) -> Any:
    """A `ForwardBatch` with the attributes that SGLang's recurrent backends read; `tokens` in each row."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    batch = len(rows)
    lens = torch.ones(batch, dtype=torch.int64)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=batch,
        input_ids=torch.zeros(batch * tokens, dtype=torch.int64),
        req_pool_indices=torch.tensor(rows, dtype=torch.int64),
        seq_lens=lens,
        out_cache_loc=lens,
        seq_lens_sum=batch,
        seq_lens_cpu=lens,
        **given,
    )


def _runner(**attributes: Any) -> Any:
    """SGLang's `ModelRunner` without what it loads: the attributes that `_forward_raw` reads."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    runner = ModelRunner.__new__(ModelRunner)
    nothing = dict.fromkeys(
        (
            "token_to_kv_pool", "hisparse_coordinator", "decode_cuda_graph_runner",
            "prefill_cuda_graph_runner", "lora_manager", "device_timer",
        )
    )  # fmt: skip
    vars(runner).update(nothing, is_draft_worker=False, device="cpu")
    vars(runner).update(attributes, eager_runner=SimpleNamespace(), attn_backend=None)
    return runner


def _weights(rule: str, shape: tuple[int, int, int]) -> list[Inputs]:
    """The recurrence's parameters of each layer."""
    generator = torch.Generator().manual_seed(3)
    HV, _, K = shape
    if rule == "mamba2":
        return [
            {
                "A": -torch.rand(HV, generator=generator) - 0.2,
                "D": torch.randn(HV, generator=generator),
                "dt_bias": torch.randn(HV, generator=generator),
            }
            for _ in range(LAYERS)
        ]
    gates = HV * (K if rule == "kda" else 1)
    return [
        {
            "A_log": torch.randn(HV, generator=generator) * 0.3,
            "dt_bias": torch.randn(gates, generator=generator),
        }
        for _ in range(LAYERS)
    ]


def _model(rule: str, weights: list[Inputs], shape: tuple[int, int, int]) -> nn.Module:
    """A model with SGLang's Mamba-2 mixers, of which the adapter reads `A`."""
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

    model = nn.Module()
    model.shared_experts_config = None
    if rule != "mamba2":
        return model
    (HV, V, K), G = shape, 2
    mixers = []
    for values in weights:
        mixer = MambaMixer2.__new__(MambaMixer2)
        nn.Module.__init__(mixer)
        for name, value in values.items():
            setattr(mixer, name, nn.Parameter(value, requires_grad=False))
        vars(mixer).update(
            tp_size=1, num_heads=HV, head_dim=V, ssm_state_size=K, n_groups=G, intermediate_size=HV * V,
            conv_dim=HV * V + 2 * G * K, groups_ssm_state_size=G * K, activation="silu",
        )  # fmt: skip
        mixer.in_proj = _Same()
        mixer.out_proj = _Same()
        mixer.norm = _Ungated()
        mixer.conv1d = nn.Conv1d(HV * V + 2 * G * K, HV * V + 2 * G * K, 4, groups=HV * V + 2 * G * K)
        mixers.append(mixer)
    model.layers = nn.ModuleList(mixers)
    return model


class _Same(nn.Module):
    """A projection that projects nothing."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None


class _Ungated(nn.Module):
    """A gated norm that passes its input on."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x
