"""A given text through the recurrent layers step by step, one layer after the other.

Where the tokens are known, no step waits for the layers above it: a layer takes the steps of a whole piece of
text before the next layer begins, and all else in the model sees whole pieces. What a layer computes is what
it computes when the model decodes in such steps: by the step functions, over the same ring, cursors and
random seeds. On a GPU its steps are captured once and replayed, since they take less time than their launch.

It knows no model but by its scan calls, and neither texts nor scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from replayssm import kernels
from replayssm.adapters.transformers.patch_points import ScanFunction, find_mixers, modeling_module
from replayssm.adapters.transformers.scan_call import CALLS, ScanCall
from replayssm.cli.bench.accuracy.layers import cut
from replayssm.core import LayerBuffers, ReplayCache, RingLayout, Rounding
from replayssm.core.config import ReplayConfig

CAPTURED_STEPS = 64
"""Steps of a captured graph."""


class Stepping:
    """The states, rings and cursors of a model's recurrent layers while they take a text in steps.

    Attributes:
        decoding: whether scan calls are decoded; until then transformers' own scan takes them.
    """

    def __init__(self, config: ReplayConfig) -> None:
        self.decoding = False
        self._config = config
        self._cache: ReplayCache | None = None
        self._before: list[torch.Tensor] = []
        self._graphs: dict[int, _Graph] = {}
        self._warm: set[int] = set()

    @torch.no_grad()
    def scan(self, number: int, call: ScanCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the tokens of layer `number`'s call.

        Returns:
            The outputs `[B, T, HV, V]`, and the state that the call came with: the present one stays here.
        """
        if self._cache is None or number == len(self._cache.layers):
            self._add_layer(number, call)
        self._rewind(first=number == 0)
        out = torch.empty_like(call.activation, memory_format=torch.contiguous_format)
        size = CAPTURED_STEPS * self._step
        for first in range(0, call.tokens, size):
            part = cut(call, first, min(size, call.tokens - first))
            out[:, first : first + part.tokens] = self._run(number, part)
        return out, call.arguments[call.state_in]

    @property
    def _step(self) -> int:
        return self._config.resolved_max_draft

    def _add_layer(self, number: int, call: ScanCall) -> None:
        """Buffers for a layer, its state the one that its first decoded call comes with."""
        precision, like = self._config.precision, call.activation
        layout = RingLayout(call.geometry, self._config.window, self._step, like.dtype, split=precision.split)
        layer = LayerBuffers.allocate(layout, len(like), precision, like.device, call.rates)
        if self._cache is None:
            self._cache = ReplayCache([layer], partial(kernels.materialize, backend=self._config.backend))
        else:
            self._cache.add_layer(layer)
        seed = self._cache.seed * 0 if layer.rounding is Rounding.STOCHASTIC else None
        states = call.from_scan(call.arguments[call.state_in]).float()
        kernels.store_states(layer.state, states, layer.read_state, rand_seed=seed, layer=number)

    def _rewind(self, first: bool) -> None:
        """Take cursors and seed, which all layers share, back to where the piece begins."""
        assert self._cache is not None
        moved = [self._cache.cursors.start, self._cache.cursors.history, self._cache.seed]
        if first:
            self._before = [tensor.clone() for tensor in moved]
        for tensor, before in zip(moved, self._before, strict=True):
            tensor.copy_(before)

    def _run(self, number: int, call: ScanCall) -> torch.Tensor:
        """The outputs of a part. The first, which compiles kernels, and short ones are not captured."""
        whole = call.tokens == CAPTURED_STEPS * self._step
        if not (call.activation.is_cuda and whole and number in self._warm):
            self._warm.add(number)
            return self._steps(number, call)
        if number not in self._graphs:
            self._graphs[number] = _Graph(call, partial(self._steps, number))
        return self._graphs[number].replay(call)

    def _steps(self, number: int, call: ScanCall) -> torch.Tensor:
        assert self._cache is not None
        cache, backend = self._cache, self._config.backend
        rows = torch.arange(cache.slots, device=cache.seed.device)
        outputs = []
        for first in range(0, call.tokens, self._step):
            step = cut(call, first, min(self._step, call.tokens - first))
            outputs.append(step.tail(0, 0, cache, number, backend))
            kernels.commit(
                cache.cursors.start, cache.cursors.history, rows, step.tokens,
                window=cache.window, rows=cache.cursors.rows, backend=backend,
            )  # fmt: skip
            if cache.layers[number].rounding is Rounding.STOCHASTIC:
                cache.seed += 1
        return torch.cat(outputs, 1)


class _Graph:
    """Captured steps of one layer, over inputs of their own."""

    def __init__(self, call: ScanCall, steps: Callable[[ScanCall], torch.Tensor]) -> None:
        self._inputs = {
            name: call.arguments[name].clone(memory_format=torch.contiguous_format) for name in call.tokenwise
        }
        # Kept: the graph reads the other arguments where they are now.
        self._call = type(call)(call.scan, call.mixer, **(call.arguments | self._inputs))
        self._graph = torch.cuda.CUDAGraph()
        # By hand, since `torch.cuda.graph` first collects garbage, which takes longer than a capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._graph.capture_begin()
            try:
                self._outputs = steps(self._call)
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self, call: ScanCall) -> torch.Tensor:
        """Outputs for a call like the captured one; the next replay overwrites them."""
        for name, inputs in self._inputs.items():
            inputs.copy_(call.arguments[name])
        self._graph.replay()
        return self._outputs


@contextmanager
def stepping(model: PreTrainedModel, config: ReplayConfig) -> Iterator[Stepping]:
    """A model whose recurrent layers take text in steps of `config.max_draft` tokens.

    Within it replay decoding is to be enabled in fp32, for the short convolutions and the prompt.
    """
    mixers, steps, calls = find_mixers(model), Stepping(config), 0

    def replaced(original: Any, function: ScanFunction) -> Any:
        @wraps(original)
        def scan(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            number, calls = calls % len(mixers), calls + 1
            if not steps.decoding:
                return original(*args, **kwargs)
            return steps.scan(number, CALLS[function.rule](original, mixers[number].module, *args, **kwargs))

        return scan

    with ExitStack() as patches:
        for function, module in {(mixer.scan, modeling_module(mixer.module)) for mixer in mixers}:
            replacement = replaced(getattr(module, function.name), function)
            patches.enter_context(mock.patch.object(module, function.name, replacement))
        yield steps
