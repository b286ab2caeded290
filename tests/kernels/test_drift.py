"""Drift over 4,096 tokens: of an fp32 checkpoint and of a bf16 one, for every rule (L4)."""

from __future__ import annotations

import pytest
import torch

from replayssm.kernels import StepIndex
from tests import oracle, support
from tests.support import RULES, Walk, draw, geometry, ints, make_layer, run_step

TOKENS, STEP, WINDOW = 4096, 8, 16


def conventional(rule: str, S: torch.Tensor, token: dict[str, torch.Tensor]):
    """The recurrence as engines run it: every operation in fp32, the state rewritten at every token.

    Written apart from the oracle, which computes in fp64 whatever it is given.
    """
    repeat = S.shape[0] // (token["B"] if rule == "mamba2" else token["k"]).shape[0]
    if rule == "mamba2":
        B, C = (token[name].repeat_interleave(repeat, 0) for name in "BC")
        S = torch.exp(token["A"] * token["dt"])[:, None, None] * S
        S = S + (token["dt"][:, None] * token["x"])[:, :, None] * B[:, None, :]
        return S, (S * C[:, None, :]).sum(-1) + token["D"][:, None] * token["x"]
    q, k = (
        (token[name] * torch.rsqrt(token[name].square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
            repeat, 0
        )
        for name in "qk"
    )
    g = token["g"] if token["g"].dim() == 2 else token["g"][:, None]
    S = S * torch.exp(g)[:, None, :]
    u = token["beta"][:, None] * (token["v"] - (S * k[:, None, :]).sum(-1))
    S = S + u[:, :, None] * k[:, None, :]
    return S, (S * (q * S.shape[-1] ** -0.5)[:, None, :]).sum(-1)


def rms(errors: torch.Tensor) -> torch.Tensor:
    """Root mean square over all but the heads, `[..., HV, dim]` to the two halves of the heads."""
    heads = errors.double().square().transpose(-2, 0).flatten(1).mean(1)
    return heads.view(2, -1).mean(1).sqrt()


def draw_slow(layer: support.LayerBuffers, generator: torch.Generator) -> support.Inputs:
    """Inputs whose first half of heads forgets slowly; in the second half a seventh forgets everything."""
    inputs = draw(layer, 1, STEP, generator, strong=-100.0)
    mild = draw(layer, 1, STEP, generator)
    name = "g" if layer.A is None else "dt"
    slow, reset = mild[name] * 0.1, inputs[name].abs() > 2
    reset[:, :, : reset.shape[2] // 2] = False
    inputs[name] = torch.where(reset, inputs[name], slow)
    return inputs


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@torch.inference_mode()
def test_drift_over_4096_tokens(rule: str) -> None:
    """fp32: at most 1.5 times the conventional recurrence's own error; bf16: the sum of its roundings.

    Half of the heads forget slowly, so that errors have time to add up; the other half also forgets
    everything now and then, after which sums counted from the checkpoint would have lost their last
    digits. Each half is judged by itself, over all outputs, and over the states at every 1,024 tokens.

    A bf16 checkpoint is rounded once at a flush, by at most `u |S|`, and a token shrinks what is wrong by
    its weakest decay.
    """
    geo = geometry(rule, 8, 4, 8, 16)
    layer, low = (
        make_layer(geo, slots=1, window=WINDOW, max_draft=STEP, state=state)
        for state in (torch.float32, torch.bfloat16)
    )
    walk, low_walk = Walk.of(layer), Walk.of(low)
    for each in (walk, low_walk):
        each.hand_out(0)
    slot, all_tokens = ints([0]), ints([STEP])
    exact = torch.zeros(layer.state.shape[1:], dtype=torch.double)
    plain, allowed = exact.float(), torch.zeros(geo.value_heads, dtype=torch.double)
    ours, theirs, ratios = [], [], []
    for done in range(STEP, TOKENS + 1, STEP):
        inputs = draw_slow(layer, walk.generator)
        if walk.cache.cursors.history[0] + STEP > WINDOW:
            allowed += support.unit_roundoff(torch.bfloat16) * exact.norm(dim=-1).amax(-1)
        out = run_step(layer, walk.cache, inputs, StepIndex())
        run_step(low, low_walk.cache, inputs, StepIndex())
        for t in range(STEP):
            token = support.oracle_token(layer, inputs, 0, t)
            exact, y = oracle.TOKEN[rule](exact, token)
            plain, y_plain = conventional(rule, plain, token)
            ours.append(out[0, t] - y)
            theirs.append(y_plain - y)
            g = token["g"].view(geo.value_heads, -1) if layer.A is None else (layer.A * token["dt"])[:, None]
            allowed *= g.double().amax(-1).exp()
        for each in (walk, low_walk):
            each.cache.commit(slot, all_tokens, all_tokens)
        if done % 1024 == 0:
            walk.cache.flush(slot)
            low_walk.cache.flush(slot)
            ratios.append(rms(layer.state[0] - exact) / rms(plain - exact))
            allowed += support.unit_roundoff(torch.bfloat16) * exact.norm(dim=-1).amax(-1)
            error = (low.state[0].double() - exact).norm(dim=-1).amax(-1)
            assert (error <= allowed + 1e-5 * exact.norm(dim=-1).amax(-1)).all(), (error, allowed)
    ratios.append(rms(torch.stack(ours)) / rms(torch.stack(theirs)))
    assert torch.stack(ratios).max().item() <= 1.5, ratios
