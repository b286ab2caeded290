"""Requests through the interface double of TensorRT-LLM, each output compared with the fp64 oracle.

`Server` does what the executor, the model and the speculative worker do around the recurrent layers:
schedule, prepare resources and metadata, run the layers in order, accept drafts. Pools hold NaN where nobody
has written.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from tests import oracle
from tests.adapters.trtllm.generations import engines
from tests.support import NoReadBack

MASK = [True, False, True, True]
"""Which of the model's layers are recurrent."""
H, G, P, N, WIDTH = 4, 2, 5, 8, 4
KINDS = ("python", "cpp", "v2")
CLASSES = {
    "python": "MixedMambaHybridCacheManager",
    "cpp": "CppMambaHybridCacheManager",
    "v2": "MambaHybridCacheManagerV2",
    "flat": "MambaHybridCacheManager",
}
OF_MODELS = {
    "mamba2": ("_torch.modules.mamba.cache_manager", "NemotronHybridCacheManagerV2"),
    "gdn": ("_torch.modules.fla.cache_manager", "Qwen35HybridCacheManagerV2"),
}
"""What V2 is, by rule, in a generation with managers of models."""
RULES = ("mamba2", "gdn")


def per_model() -> bool:
    """Whether the double's generation has managers of models."""
    return find_spec(f"tensorrt_llm.{OF_MODELS['mamba2'][0]}") is not None


@dataclass
class Truth:
    """One request in one layer: the oracle's state, and the convolution's last raw inputs."""

    S: torch.Tensor
    window: torch.Tensor


@dataclass
class Request:
    """A request of the test, and the engine's."""

    llm: Any
    truths: list[Truth]
    tokens: int = 0


@dataclass(frozen=True)
class Tree:
    """Drafts of a request: each node's parent, which stands before it, and the last that is accepted."""

    parents: tuple[int, ...]
    leaf: int

    @property
    def path(self) -> list[int]:
        """The accepted nodes, last first."""
        nodes = [self.leaf]
        while nodes[-1]:
            nodes.append(self.parents[nodes[-1]])
        return nodes


def links(trees: list[Tree]) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of each node, -1 where there is none."""
    first, sibling = (
        torch.full((len(trees), len(trees[0].parents)), -1, dtype=torch.int32) for _ in range(2)
    )
    for row, tree in enumerate(trees):
        youngest: dict[int, int] = {}
        for node, parent in enumerate(tree.parents[1:], 1):
            if parent in youngest:
                sibling[row, youngest[parent]] = node
            else:
                first[row, parent] = node
            youngest[parent] = node
    return first, sibling


@dataclass
class Server:
    """A model with recurrent layers, their cache and the requests.

    Attributes:
        kind: which manager.
        rule: of the layers.
        max_draft: drafts of a step at most; `None`: no speculation.
        batch: requests at most.
        state: dtype of the states.
        act: dtype of activations.
        d_state: K of the states.
    """

    kind: str
    rule: str
    max_draft: int | None = None
    batch: int = 4
    state: torch.dtype = torch.float32
    act: torch.dtype = torch.float32
    tolerance: float = 2e-4
    d_state: int = N
    options: dict[str, Any] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        from tensorrt_llm.mapping import Mapping

        self.generator = torch.Generator().manual_seed(7)
        self.mapping = self.options.pop("mapping", Mapping())
        self.spec = self.options.pop("spec_config", None)
        if self.kind != "flat":
            from tensorrt_llm._torch.speculative import mtp

            if self.max_draft is not None and self.spec is None:
                self.spec = mtp.MTPDecodingConfig(self.max_draft)
            trees = self.spec is not None and self.spec.use_dynamic_tree
            self.worker = mtp.MTPEagleDynamicTreeWorker() if trees else mtp.MTPEagleWorker()
        self.layers = [self._layer(index) for index, recurrent in enumerate(MASK) if recurrent]
        self.manager = self._manager()
        self.next_id = 10
        self.metadata: Any = None

    def _manager(self) -> Any:
        managers, name = engines("_torch.pyexecutor.mamba_cache_manager"), CLASSES[self.kind]
        if self.kind == "v2" and per_model():
            of_model, name = OF_MODELS[self.rule]
            managers = engines(of_model)
        cls = getattr(managers, name)
        model = {"mamba2": "nemotron_hybrid", "gdn": "qwen3_next"}[self.rule]
        kind = {"model_type": model}
        if self.kind == "v2":
            kind = {"conv_state_layout": {"mamba2": "x_b_c", "gdn": "q_k_v"}[self.rule]}
        elif self.kind == "flat":
            kind = {}
        sizes = {
            "num_layers": 1, "layer_mask": [not recurrent for recurrent in MASK], "num_kv_heads": 1,
            "head_dim": 8, "tokens_per_block": 32, "max_seq_len": 512, "max_batch_size": self.batch,
            "mapping": self.mapping, "spec_config": self.spec,
        }  # fmt: skip
        if self.kind != "flat":
            sizes["use_replay_state_update"] = self.spec is not None
        return cls(
            self.d_state, WIDTH, H, G, P, sum(MASK), MASK, self.act, self.state, None, None,
            **{**sizes, **kind, **self.options},
        )  # fmt: skip

    def _layer(self, index: int) -> Any:
        from tensorrt_llm._torch.modules.mamba.mamba2_mixer import Mamba2Mixer

        where = "models.modeling_qwen3_next" if self.kind == "flat" else "modules.mamba.gdn_mixer"

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=self.generator)

        if self.rule == "mamba2":
            rounding = SimpleNamespace(
                mamba_ssm_stochastic_rounding=self.options.get("mamba_ssm_stochastic_rounding", False),
                mamba_ssm_cache_dtype=self.state,
            )
            layer = Mamba2Mixer(
                d_model=8, d_state=self.d_state, d_conv=WIDTH, nheads=H, n_groups=G, head_dim=P,
                chunk_size=16, layer_idx=index, dtype=self.act,
                config=SimpleNamespace(mapping=self.mapping, quant_config=rounding),
            )  # fmt: skip
            values = {"A": -torch.linspace(0.2, 2.0, H), "D": random(H), "dt_bias": random(H)}
        else:
            config = SimpleNamespace(
                linear_num_key_heads=G, linear_num_value_heads=H, linear_key_head_dim=self.d_state,
                linear_value_head_dim=P, linear_conv_kernel_dim=WIDTH, torch_dtype=self.act,
            )  # fmt: skip
            model = SimpleNamespace(pretrained_config=config, mapping=self.mapping)
            stream = () if self.kind == "flat" else (None,)
            layer = engines(f"_torch.{where}").Qwen3NextGatedDeltaNet(model, *stream, index)
            values = {"A_log": torch.linspace(-1.0, 1.0, H), "dt_bias": random(H)}
        for name, value in values.items():
            getattr(layer, name).data = value
        layer.conv1d.weight.data = random(*layer.conv1d.weight.shape).to(self.act)
        if self.rule == "mamba2" and self.kind != "flat":
            layer.post_load_weights()
        return layer

    # Oracle.

    @property
    def conv_dim(self) -> int:
        return H * P + 2 * G * self.d_state

    @property
    def width(self) -> int:
        return H * P + self.conv_dim + H if self.rule == "mamba2" else self.conv_dim + 2 * H

    def truth(self, number: int, before: Truth, row: torch.Tensor) -> tuple[Truth, torch.Tensor]:
        """State and output after one token with the projections `row`."""
        layer, row = self.layers[number], row.double()
        raw = row[H * P : H * P + self.conv_dim] if self.rule == "mamba2" else row[: self.conv_dim]
        window = torch.cat([before.window, raw[:, None]], 1)
        mixed = F.silu((window * layer.conv1d.weight.double()).sum(1)).to(self.act).double()
        if self.rule == "mamba2":
            x, B, C = mixed.split([H * P, G * self.d_state, G * self.d_state])
            dt = oracle.softplus(row[-H:] + layer.dt_bias.double())
            token = {
                "x": x.view(H, P), "dt": dt, "B": B.view(G, -1), "C": C.view(G, -1), "A": layer.A,
                "D": layer.D,
            }  # fmt: skip
        else:
            q, k, v = mixed.split([G * self.d_state, G * self.d_state, H * P])
            b, a = row[self.conv_dim :].split([H, H])
            g = -layer.A_log.double().exp() * oracle.softplus(a + layer.dt_bias.double())
            token = {
                "q": q.view(G, -1), "k": k.view(G, -1), "v": v.view(H, P), "g": g, "beta": b.sigmoid()
            }  # fmt: skip
        S, y = oracle.TOKEN[self.rule](before.S, token)
        if self.rule == "mamba2" and self.kind == "flat":
            y = y * F.silu(row[: H * P].view(H, P))
        return Truth(S, window[:, 1:]), y.flatten()

    # Requests.

    def start(self) -> Request:
        """A request that has seen nothing."""
        from tensorrt_llm._torch.pyexecutor.scheduler import LlmRequest

        truths = [
            Truth(torch.zeros(H, P, self.d_state).double(), torch.zeros(self.conv_dim, WIDTH - 1).double())
            for _ in self.layers
        ]
        request = Request(LlmRequest(self.next_id), truths)
        self.requests[self.next_id] = request
        self.next_id += 1
        return request

    def finish(self, request: Request) -> None:
        self.manager.free_resources(request.llm)
        del self.requests[request.llm.py_request_id]

    def slot(self, request: Request) -> int:
        manager = getattr(self.manager, "_impl", self.manager)
        slots = getattr(manager, "_request_id_to_state_index", None) or manager.mamba_cache_index
        return int(slots[request.llm.py_request_id])

    def states(self) -> list[torch.Tensor]:
        if self.kind == "python":
            return list(self.manager._impl.mamba_cache.temporal)
        if self.kind == "flat":
            return list(self.manager.ssm_states)
        return list(self.manager.all_ssm_states)

    def windows(self) -> list[torch.Tensor]:
        if self.kind == "python":
            return list(self.manager._impl.mamba_cache.conv)
        return list(self.manager.all_conv_states)

    # Steps.

    def step(
        self,
        prompts: list[tuple[Request, int]] | None = None,
        decodes: list[Request] | None = None,
        tokens: int = 1,
        accepted: list[int] | None = None,
        pads: int = 0,
        trees: list[Tree] | None = None,
    ) -> list[torch.Tensor]:
        """One forward pass; outputs of each layer.

        Args:
            prompts: requests with the number of their prompt's tokens in this chunk.
            decodes: requests that decode.
            tokens: T of each of them, with speculation.
            accepted: how many of them each accepts; all by default.
            pads: rows of padding up to a CUDA graph's batch.
            trees: in place of `accepted`, the drafts of each of them as a tree.
        """
        from tensorrt_llm._torch.pyexecutor.cuda_graph_runner import CUDA_GRAPH_DUMMY_REQUEST_ID
        from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests

        flat = self.kind == "flat"
        prompts, decodes = prompts or [], decodes or []
        rows = [(request, count) for request, count in prompts] + [(request, tokens) for request in decodes]
        self.manager.prepare_resources(
            ScheduledRequests([request.llm for request, _ in prompts], [request.llm for request in decodes])
        )
        ids = [request.llm.py_request_id for request, _ in rows]
        if pads:
            padding = CUDA_GRAPH_DUMMY_REQUEST_ID - (tokens - 1)
            if not flat:
                self.manager.add_dummy_requests([padding])
            ids += [padding] * pads
        lens = [count for _, count in rows] + [tokens] * pads
        cached = [request.tokens for request, _ in rows] + [1] * pads
        batch = engines("_torch.attention_backend.interface").AttentionMetadata(
            kv_cache_manager=self.manager,
            request_ids=ids,
            seq_lens=torch.tensor(lens, dtype=torch.int64),
            num_contexts=len(prompts),
            kv_cache_params=SimpleNamespace(num_cached_tokens_per_seq=cached),
            max_num_requests=self.batch + 4,
            **({} if flat else {"mamba_metadata": self.metadata}),
        )
        batch.prepare()
        if flat:
            self.metadata = engines("_torch.modules.mamba.mamba2_metadata").Mamba2Metadata(self.batch, 128)
            self.metadata.prepare(batch)
        else:
            self.metadata = batch.mamba_metadata
        spec = None
        if self.spec is not None:
            spec = engines("_torch.speculative.mtp").SpecMetadata(tokens - 1, self.spec.max_draft_len)
        chain = Tree(tuple(range(-1, tokens - 1)), 0)
        drafts = trees or [replace(chain, leaf=kept - 1) for kept in accepted or [tokens] * len(decodes)]
        leaves: dict[str, Any] = {}
        if trees is not None:
            shown = [*trees, *[chain] * pads]
            spec.is_spec_dec_dynamic_tree = True
            spec.retrieve_next_token, spec.retrieve_next_sibling = links(shown)
            leaves["accepted_leaf_positions"] = torch.tensor([tree.leaf for tree in shown])
        after: list[list[Truth]] = [[] for _ in rows]
        self.outputs = [
            self._run(number, batch, spec, rows, drafts, after) for number in range(len(self.layers))
        ]
        if spec is not None:
            kept = [len(tree.path) for tree in drafts]
            everyone = torch.tensor(kept + [1] * pads, dtype=torch.int32)
            self.worker.forward(everyone, batch, spec, **leaves)
        for row, (request, count) in enumerate(rows):
            request.truths = after[row]
            request.tokens += count if row < len(prompts) else len(drafts[row - len(prompts)].path)
        return self.outputs

    def _run(
        self,
        number: int,
        batch: Any,
        spec: Any,
        rows: list[tuple[Request, int]],
        drafts: list[Tree],
        after: list[list[Truth]],
    ) -> torch.Tensor:
        hidden = torch.randn(batch.num_tokens, self.width, generator=self.generator).to(self.act)
        real = sum(count for _, count in rows)
        hidden[real:] = float("nan")
        given = () if self.kind == "flat" else (spec,)
        out = self.layers[number](hidden, batch, self.metadata, *given)
        first = 0
        for row, (request, count) in enumerate(rows):
            tree = Tree(tuple(range(-1, count - 1)), count - 1)
            tree = tree if row < batch.num_contexts else drafts[row - batch.num_contexts]
            now: list[Truth] = []
            for token in range(count):
                before = now[tree.parents[token]] if token else request.truths[number]
                truth, y = self.truth(number, before, hidden[first + token])
                now.append(truth)
                error = (out[first + token].double() - y).abs().max()
                bound = self.tolerance * (1 + y.abs().max())
                assert error <= bound, f"layer {number}, row {row}, token {token}: {error:.2e} > {bound:.2e}"
            after[row].append(now[tree.leaf])
            first += count
        return out


def quietly(function: Any) -> Any:
    """`function`, which fails where it asks the device for a value, as inside a CUDA graph."""

    def call(*args: Any) -> Any:
        with NoReadBack():
            return function(*args)

    return call


def forbid_reading_back(server: Server) -> None:
    """From now on layers and commits run `quietly`."""
    for part in (*server.layers, server.worker):
        part.forward = quietly(part.forward)
