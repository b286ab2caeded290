"""Errors beside those of conventional kernels: of outputs on the same inputs, of states over 4,096 tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from replayssm import kernels
from replayssm.core import LayerGeometry, Rule
from tests import oracle
from tests.kernels.device.walk import BatchWalk, Layer, geometry
from tests.kernels.test_drift import conventional

MODEL = {Rule.MAMBA2: "nemotron-3-super", Rule.GDN: "qwen3.5-122b", Rule.KDA: "kimi-linear"}
SHARD = {Rule.MAMBA2: "nemotron-3-super/8", Rule.GDN: "qwen3.5-122b/8", Rule.KDA: "kimi-linear/8"}
FUSED = "sglang.kernels.ops.attention.fla.fused_recurrent"
PEER = {
    Rule.MAMBA2: ("sglang.kernels.ops.mamba.triton_ops.mamba_ssm", "selective_state_update"),
    Rule.GDN: (FUSED, "fused_recurrent_gated_delta_rule_packed_decode"),
    Rule.KDA: (FUSED, "fused_recurrent_kda_packed_decode"),
}
WINDOW = 16


def peer(rule: Rule) -> Callable[..., Any]:
    """SGLang's conventional decode kernel; the test is skipped where SGLang is not."""
    module, name = PEER[rule]
    try:
        kernel: Callable[..., Any] = getattr(import_module(module), name)
    except Exception as error:  # an import of an engine can fail in many ways
        pytest.skip(f"SGLang's {name} can't be imported: {error!r}")
    return kernel


def decode_by_peer(walk: BatchWalk, kernel: Callable[..., Any], state: torch.Tensor, t: Any) -> torch.Tensor:
    """One token by SGLang's kernel: `state` moves on, returns `[B, HV, V]`."""
    batch, geo, o = state.shape[0], walk.geo, walk.options
    rows = torch.arange(batch, dtype=torch.int32, device=state.device)
    if walk.rule is Rule.MAMBA2:
        H, P, N = geo.state_shape
        out = torch.empty_like(t["x"])
        wide = {name: o[name][:, None].expand(H, P) for name in ("D", "dt_bias")}
        kernel(
            state,
            t["x"],
            t["dt"][..., None].expand(batch, H, P),
            o["A"][:, None, None].expand(H, P, N),
            t["B"],
            t["C"],
            dt_softplus=True,
            state_batch_indices=rows,
            out=out,
            **wide,
        )
        return out
    packed = torch.cat([t[name].flatten(1) for name in "qkv"], 1)
    out = torch.empty(batch, 1, geo.value_heads, geo.value_dim, dtype=packed.dtype, device=state.device)
    gate, bias = t["g"].flatten(1).contiguous(), o["dt_bias"].flatten()
    kernel(packed, gate, t["beta"], o["A_log"], bias, geo.key_dim**-0.5, state, out, rows, True)
    return out[:, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("act", ["bf16", "fp32"])
@pytest.mark.parametrize("rule", list(Rule))
def test_no_less_accurate_than_sglang(
    rule: Rule, act: str, backend: str, record_property: Callable[[str, object], None]
) -> None:
    """64 tokens from the same states, gates computed inside: root mean square errors against fp64.

    A hundredth is left to chance, as both round outputs alike.
    """
    kernel = peer(rule)
    gates = "softplus" if rule is Rule.MAMBA2 else "bias"
    walk = BatchWalk(Layer(geometry(MODEL[rule]), WINDOW, 1, act=act, gates=gates), backend, slots=8)
    theirs = walk.state[walk.slot_of].clone()
    index = walk.index(range(8), [1] * 8, "full", None, 1)
    assert index.state_indices is not None
    errors = torch.zeros(2, dtype=torch.double, device="cuda")
    for _ in range(64):
        inputs = walk.draw(8, 1)
        exact = {name: value[:, 0] for name, value in walk.tokens64(inputs).items()}
        walk.truth, y, _, _ = walk.advance(walk.truth, exact)
        out = torch.empty_like(inputs["x" if "x" in inputs else "v"])
        walk.call(inputs, index, out)
        kernels.commit(
            walk.start, walk.hist, index.state_indices, 1,
            window=WINDOW, rows=walk.layout.rows, backend=backend,
        )  # fmt: skip
        other = decode_by_peer(walk, kernel, theirs, {name: value[:, 0] for name, value in inputs.items()})
        errors += torch.stack([(each.double() - y).square().mean() for each in (out[:, 0], other)])
    ours, conventional_error = errors.sqrt().tolist()
    record_property("error_to_sglang", round(ours / conventional_error, 4))
    assert 0 < ours <= 1.01 * conventional_error, f"{ours / conventional_error} times SGLang's error"


def realistic(walk: BatchWalk, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs with decays as trained models start from: rates from 1 to 16, time steps 0.001 to 0.1."""
    name = "dt" if walk.A is not None else "g"
    value = inputs[name]
    step = 10 ** (-3 + 2 * walk.uniform(*value.shape))
    if walk.A is not None:
        return inputs | {name: step}
    rate = torch.logspace(0, 4, value.shape[2], base=2, device=value.device)
    return inputs | {name: -rate.view(-1, *(1,) * (value.dim() - 3)) * step}


def by_rate(errors: torch.Tensor, heads: int) -> torch.Tensor:
    """Root mean squares of `[B * HV, V, K]` over the half of the heads that forgets slowly, and the other."""
    each = errors.double().view(-1, heads, errors[0].numel()).square().mean((0, 2))
    return each.view(2, -1).mean(1).sqrt()


def drift(
    rule: Rule, geo: LayerGeometry, tokens: int, accept: str, backend: str, device: str, total: int
) -> float:
    """The largest ratio of state errors, ours to the conventional recurrence's, along `total` tokens."""
    walk = BatchWalk(Layer(geo, WINDOW, tokens), backend, device, slots=2, seed=tokens)
    if walk.A is not None:
        walk.A = walk.options["A"] = -torch.logspace(0, 4, geo.value_heads, base=2, device=device)
    exact = walk.truth.S.flatten(0, 1)
    plain = exact.float()
    index = walk.index([0, 1], [tokens] * 2, "full", None, tokens)
    rows = index.state_indices
    assert rows is not None
    spare = rows + 1
    ratios = []
    steps = total // tokens if accept == "all" else 2 * total // tokens
    for number in range(1, steps + 1):
        inputs = realistic(walk, walk.draw(2, tokens))
        wide = torch.full((2,), tokens, dtype=torch.int32, device=device)
        if accept == "random":
            wide = (walk.uniform(2) * (tokens + 1)).int()
        walk.call(inputs, index, torch.empty_like(inputs["x" if "x" in inputs else "v"]))
        for t in range(tokens):
            token = {name: value[:, t].flatten(0, 1).float() for name, value in inputs.items()}
            if walk.A is not None:
                token |= {"A": walk.A.repeat(2), "D": torch.zeros_like(walk.A).repeat(2)}
            keep = (wide > t).repeat_interleave(geo.value_heads)[:, None, None]
            exact = torch.where(keep, oracle.TOKEN[rule](exact, token)[0], exact)
            plain = torch.where(keep, conventional(rule, plain, token)[0], plain)
        kernels.commit(
            walk.start, walk.hist, rows, tokens, wide, window=WINDOW, rows=walk.layout.rows, backend=backend
        )
        if number % (steps // 4) == 0:
            kernels.materialize(
                rule, [walk.state], [walk.rings], walk.start, walk.hist[rows.long()], rows, spare,
                window=WINDOW, A=None if walk.A is None else [walk.A], backend=backend,
            )  # fmt: skip
            ours = walk.state[spare.long()].flatten(0, 1)
            errors = [by_rate(each - exact, geo.value_heads) for each in (ours, plain)]
            ratios.append((errors[0] / errors[1]).max().item())
    assert len(ratios) == 4
    return max(ratios)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "accept"), [(1, "all"), (4, "all"), (4, "random")])
@pytest.mark.parametrize("rule", list(Rule))
def test_drift_over_4096_tokens(
    rule: Rule, tokens: int, accept: str, backend: str, record_property: Callable[[str, object], None]
) -> None:
    """L4: fp32 checkpoints, bf16 activations, realistic decays: at most 1.5 times the conventional error."""
    worst = drift(rule, geometry(SHARD[rule]), tokens, accept, backend, "cuda", 4096)
    record_property("drift_to_conventional", round(worst, 4))
    assert 0 < worst <= 1.5


@pytest.mark.parametrize(("tokens", "accept"), [(1, "all"), (4, "random")])
@pytest.mark.parametrize("rule", list(Rule))
def test_drift_on_a_cpu(rule: Rule, tokens: int, accept: str) -> None:
    """The same measure, short, small, by the torch backend."""
    heads = 4 if rule is Rule.KDA else 2
    small = replace(geometry(SHARD[rule]), value_heads=4, key_heads=heads, value_dim=8, key_dim=16)
    assert 0 < drift(rule, small, tokens, accept, "torch", "cpu", 256) <= 1.5
