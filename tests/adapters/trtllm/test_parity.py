"""The same tokens through this adapter and the one for transformers: outputs, states and rings to the bit.

Both get what their models' convolutions give; gates are raw here, and finished there, by the expressions of
transformers' own mixers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from replayssm import kernels
from replayssm.core import LayerBuffers, ReplayCache
from tests.adapters.scans import delta_call, mamba2_call
from tests.adapters.trtllm.engine import KINDS, RULES, G, H, N, P, Server
from tests.adapters.trtllm.test_own import WINDOW, serve

pytestmark = pytest.mark.usefixtures("double")


def call(rule: str, layer: Any, mixed: torch.Tensor, hidden: torch.Tensor) -> Any:
    """The translation by the transformers adapter; `mixed` `[n, T, conv_dim]` is behind the convolution."""
    if rule == "mamba2":
        x, B, C = mixed.split([H * P, G * N, G * N], -1)
        return mamba2_call(
            x.unflatten(-1, (H, P)), hidden[..., -H:], layer.A, B.unflatten(-1, (G, N)),
            C.unflatten(-1, (G, N)), layer.D, layer.dt_bias,
        )  # fmt: skip
    q, k, v = mixed.split([G * N, G * N, H * P], -1)
    b, a = (x.contiguous() for x in hidden[..., -2 * H :].split([H, H], -1))
    g = -layer.A_log.exp() * F.softplus(a + layer.dt_bias)
    heads = (x.unflatten(-1, (-1, dim)) for x, dim in ((q, N), (k, N), (v, P)))
    return delta_call(*heads, g, b.sigmoid())


def watch(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each layer got, and what its convolution gave, of the last step: `[n T, ...]`."""
    from tensorrt_llm._torch.modules.mamba import gdn_mixer, mamba2_mixer

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    mixed: list[torch.Tensor] = []
    for module in (gdn_mixer, mamba2_mixer):
        for name in ("causal_conv1d_update", "causal_conv1d_update_triton"):
            engines = getattr(module, name)

            def convolve(x: torch.Tensor, *args: Any, engines: Any = engines, **given: Any) -> torch.Tensor:
                out = engines(x, *args, **given)
                mixed.append(out.transpose(1, 2).flatten(0, 1) if out.dim() == 3 else out)
                return out

            monkeypatch.setattr(module, name, convolve)
    for layer in server.layers:
        forward = layer.forward

        def run(hidden: torch.Tensor, *args: Any, forward: Any = forward) -> Any:
            mixed.clear()
            out = forward(hidden, *args)
            if mixed:
                seen.append((hidden, mixed[0]))
            return out

        layer.forward = run
    return seen


@pytest.mark.parametrize("max_draft", [None, 2], ids=["standard", "drafts"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_as_with_transformers(
    kind: str, rule: str, max_draft: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    server, rings = serve(kind, rule, max_draft)
    requests = [server.start() for _ in range(3)]
    server.step([(request, 4) for request in requests])
    slots = torch.tensor([server.slot(request) for request in requests])
    layout = rings.layout
    buffers = [
        LayerBuffers(layout, states[slots].clone(), layout.allocate(3, "cpu"), getattr(layer, "A", None))
        for layer, states in zip(server.layers, server.states(), strict=True)
    ]
    cache = ReplayCache(buffers, kernels.materialize)
    seen = watch(server, monkeypatch)
    generator = torch.Generator().manual_seed(5)
    for _ in range(2 * WINDOW + 3):
        tokens = 1 if max_draft is None else int(torch.randint(1, max_draft + 2, (), generator=generator))
        accepted = torch.randint(1, tokens + 1, (3,), generator=generator).int()
        seen.clear()
        outputs = server.step(decodes=requests, tokens=tokens, accepted=accepted.tolist())
        for number, (hidden, mixed) in enumerate(seen):
            there = call(
                rule, server.layers[number], mixed.unflatten(0, (3, tokens)), hidden.unflatten(0, (3, tokens))
            )
            expected = there.tail(0, 0, buffers[number], cache, "torch")
            assert torch.equal(outputs[number], expected.flatten(0, 1).flatten(1))
        cursors = cache.cursors
        kernels.commit(
            cursors.start, cursors.history, torch.arange(3), tokens, accepted, window=cursors.window,
            rows=cursors.rows, backend="torch",
        )  # fmt: skip
        at = torch.tensor([rings._ring_of[request.llm.py_request_id] for request in requests])
        assert torch.equal(rings.cursors.start[at], cursors.start)
        assert torch.equal(rings.cursors.history[at], cursors.history)
        for number, buffer in enumerate(buffers):
            assert torch.equal(server.states()[number][slots], buffer.state)
            for name, ring in buffer.rings.items():
                live = rings.rings[number][name][at]
                assert torch.equal(live[~live.isnan()], ring[~live.isnan()]), name
    assert cache.cursors.start.any(), "states were flushed"
