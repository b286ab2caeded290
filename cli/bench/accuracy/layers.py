"""What a model's recurrent layers read of their checkpoints while they decode a text, captured from one pass.

A layer's inputs come from transformers' own forward of the whole text in fp32; its states follow from them,
window by window, by transformers' own scan. Nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from replayssm.adapters.transformers.patch_points import ScanFunction, find_mixers, modeling_module
from replayssm.adapters.transformers.scan_call import CALLS, Mamba2Call, ScanCall

NORM_EPS = 1e-6


@dataclass(frozen=True)
class Reads:
    """The steps of one layer that read one checkpoint: L tokens of each sequence, all in fp32.

    Attributes:
        state: `[B, HV, V, K]`, the checkpoint.
        queries: `[B, L, HV, K]`, what outputs read it with, decays since the checkpoint included.
        outputs: `[B, L, HV, V]`, the layer's outputs.
        keys: `[B, L, HV, K]`, what a delta rule reads it with besides, likewise; `None` for Mamba-2.
        values: `[B, L, HV, V]`, from which a delta rule subtracts what it has read with its keys.
    """

    state: torch.Tensor
    queries: torch.Tensor
    outputs: torch.Tensor
    keys: torch.Tensor | None
    values: torch.Tensor


@torch.inference_mode()
def captured(model: PreTrainedModel, tokens: torch.Tensor) -> list[ScanCall]:
    """The scan calls of a stock model's forward over `tokens [B, N]`, layer by layer."""
    mixers, calls = find_mixers(model), list[ScanCall]()

    def noting(original: Any, scan: ScanFunction) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append(CALLS[scan.rule](original, mixers[len(calls)].module, *args, **kwargs))
            return original(*args, **kwargs)

        return noted

    with ExitStack() as patches:
        for scan, module in {(mixer.scan, modeling_module(mixer.module)) for mixer in mixers}:
            replacement = noting(getattr(module, scan.name), scan)
            patches.enter_context(mock.patch.object(module, scan.name, replacement))
        model(tokens, use_cache=False)
    return calls


@torch.inference_mode()
def reads(call: ScanCall, window: int) -> Iterator[Reads]:
    """A layer's reads, checkpoint by checkpoint; the first one, which is zero, is left out."""
    shape = (len(call.activation), *call.geometry.state_shape)
    state = torch.zeros(shape, device=call.activation.device)
    for first in range(0, call.tokens - window + 1, window):
        piece = cut(call, first, window)
        outputs, after = piece.head(window, state)
        if first:
            yield _reads(piece, state, outputs.float())
        state = after.float()


def cut(call: ScanCall, first: int, count: int) -> ScanCall:
    """The call for `count` of its tokens, from `first` on."""
    tokens = {name: call.arguments[name][:, first : first + count] for name in call.tokenwise}
    return type(call)(call.scan, call.mixer, **(call.arguments | tokens))


def _reads(call: ScanCall, state: torch.Tensor, outputs: torch.Tensor) -> Reads:
    heads, given = state.shape[1], call.arguments
    if isinstance(call, Mamba2Call):
        decay = (call.rates * call.time_step(0, call.tokens)).cumsum(1).exp()[..., None]
        queries = decay * _to_heads(given["C"].float(), heads)
        return Reads(state, queries, outputs, None, given["hidden_states"].float())
    g = given["g"].float()
    decay = (g if g.dim() == 4 else g[..., None]).cumsum(1).exp()
    query, key = (given[name].float() for name in ("query", "key"))
    if given["use_qk_l2norm_in_kernel"]:
        query, key = _unit(query), _unit(key)
    queries = decay * _to_heads(query * query.shape[-1] ** -0.5, heads)
    return Reads(state, queries, outputs, decay * _to_heads(key, heads), given["value"].float())


def _to_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
