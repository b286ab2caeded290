"""`Session`: the replay state behind one transformers cache, and the plan of each forward pass.

transformers keeps all sequences of a batch in step: a forward brings the same number of tokens to
each, and `crop` takes the same number back. So the session knows on the host how long the history is,
and decides per forward how many tokens go through transformers' own scan and how many are replayed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from replayssm import kernels
from replayssm.adapters.transformers.account import Account
from replayssm.adapters.transformers.scan_call import ScanCall
from replayssm.core import ConvWindow, LayerBuffers, ReplayCache, RingLayout, Rounding, must_flush
from replayssm.core.config import ReplayConfig
from replayssm.core.formats import select_states

logger = logging.getLogger(__name__)


@dataclass
class Forward:
    """The last forward pass, as long as the cursors have not moved past it.

    Attributes:
        tokens: tokens of each row.
        head: of these, how many go through transformers' scan.
        prompt: how many of the replayed ones belong to a prompt.
        flush: whether the replayed ones make the rows flush.
        kept: replayed tokens that have not been taken back.
        settled: whether a `crop` has followed.
        convolved: layers that have begun it.
        scanned: layers that have finished it.
    """

    tokens: int
    head: int
    prompt: int
    flush: bool
    kept: int
    settled: bool = False
    convolved: set[int] = field(default_factory=set)
    scanned: set[int] = field(default_factory=set)

    @property
    def tail(self) -> int:
        """Replayed tokens."""
        return self.tokens - self.head


@dataclass(frozen=True)
class StockState:
    """A cache layer's content in transformers' own layout: `conv [B, C, K]` and the scan's state."""

    conv: torch.Tensor
    recurrent: torch.Tensor


class Session:
    """States, rings and convolution windows of one cache.

    Attributes:
        cache: the cache whose layers hold this session, as long as it is in use.
        recording: whether a `crop` follows each round, as in assisted generation. Until it comes, no
            token is folded into a checkpoint.
        history: committed records of every row.
        window: L; grows when a draft needs more.
    """

    def __init__(
        self,
        config: ReplayConfig,
        layers: Iterable[int],
        account: Callable[[], Account],
        inherited: Mapping[int, StockState],
        register: Callable[[Session], None],
    ) -> None:
        """A session for a cache.

        Args:
            config: window, draft limit, precision, backend.
            layers: the recurrent layers, which all take part in a forward.
            account: gives the account in which a step is to be counted.
            inherited: by layer, what an unpatched model left in the cache.
            register: told of this session and of its copies.
        """
        self.config = config
        self._layers = frozenset(layers)
        self._account = account
        self.cache: Callable[[], Any] = lambda: None
        self.recording = False
        self.window, self._max_draft = config.window, config.resolved_max_draft
        self._register = register
        register(self)
        self._clear(inherited)

    def _clear(self, inherited: Mapping[int, StockState]) -> None:
        self.history = 0
        self._length = 0
        self._inherited = dict(inherited)
        self._started = self._took_over = bool(inherited)
        self._expected: int | None = None
        self._unsettled = 0
        self._forward: Forward | None = None
        self._replay: ReplayCache | None = None
        self._conv: ConvWindow | None = None
        self._replay_number: dict[int, int] = {}
        self._conv_number: dict[int, int] = {}
        self._calls: dict[int, type[ScanCall]] = {}

    # The two calls of a mixer, in this order.

    def convolve(self, layer: int, inputs: torch.Tensor, kernel_size: int) -> torch.Tensor:
        """Record raw convolution inputs `[B, C, T]`; returns them behind the window they follow."""
        self._check_batch(inputs)
        if self._forward is None or layer in self._forward.convolved:
            self._commit()
            self._forward = self._plan(inputs.shape[2], inputs.shape[0])
        self._forward.convolved.add(layer)
        window = self._conv_layer(layer, inputs, kernel_size)
        number = self._conv_number[layer]
        before = window.window(number, self._rows(inputs)).transpose(1, 2)
        window.append(number, self._rows(inputs), inputs.detach().transpose(1, 2))
        return torch.cat([before, inputs], 2) if self._started else inputs

    def scan(self, layer: int, call: ScanCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a layer's recurrence over this forward's tokens.

        Returns:
            The outputs `[B, T, HV, V]`, and an empty tensor where transformers expects the state.
        """
        forward = self._forward
        assert forward is not None
        buffers = self._replay_layer(layer, call)
        assert self._replay is not None
        outputs = []
        if forward.head:
            out, state = call.head(forward.head, kernels.load_states(buffers.state))
            self._store(layer, state.detach())
            outputs.append(out)
        if forward.tail:
            backend = self.config.backend
            with torch.no_grad():
                number = self._replay_number[layer]
                out = call.tail(forward.head, forward.prompt, self._replay, number, backend)
            outputs.append(_WithoutGradient.apply(out, call.activation))
            self._account().add_layer_step(
                buffers.layout, self.config.precision, len(out), self.history, forward.tail, forward.flush
            )
        forward.scanned.add(layer)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        return out, out.new_empty(0)

    # What transformers asks of a cache, and does to it.

    def hold(self, cache: Any) -> None:
        """Serve `cache`, without keeping it alive."""
        self.cache = weakref.ref(cache)

    @property
    def length(self) -> int:
        """Tokens that the cache holds, where it has no attention layers to count them.

        Raises:
            ValueError: some of them were there before the session.
        """
        if self._took_over:
            raise ValueError(
                "this cache was filled before replay decoding was enabled, and without attention layers its "
                "length is not known: begin with a new cache"
            )
        forward = self._forward
        return self._length + (0 if forward is None else forward.head + forward.kept)

    @property
    def started(self) -> bool:
        """Whether it holds tokens."""
        return self._started or self._forward is not None

    def record(self, recording: bool) -> None:
        """Say whether a `crop` will follow each round of tokens."""
        self.recording = recording
        if not recording:
            self._unsettled = 0

    def expect(self, prompt: int) -> None:
        """While recording: the next forward brings `prompt` tokens of a prompt, and drafts behind them."""
        self._expected = prompt

    def check_crop(self, tokens: int) -> None:
        """Check that `crop(tokens)` is possible.

        Raises:
            ValueError: the tokens are not all in the ring any more.
        """
        forward = self._forward
        kept = 0 if forward is None else forward.kept
        left = kept + (0 if forward is not None and forward.flush else self.history)
        if tokens > left:
            raise ValueError(
                f"can't take back {tokens} tokens: the recurrent state already includes them; only "
                f"the newest {left} are still in the ring (window {self.window})"
            )

    def crop(self, tokens: int) -> None:
        """Take back the newest `tokens` of every row; what is left is settled."""
        forward = self._forward
        kept = 0 if forward is None else min(tokens, forward.kept)
        if forward is not None:
            forward.kept -= kept
            forward.settled = True
        self._unsettled = 0
        self._count_kept(-tokens)
        if tokens > kept:
            self._commit()
            self._roll_back(tokens - kept)

    def select(self, index: torch.Tensor) -> None:
        """Replace the rows of the batch by `index` (`[B']` int64): reordered, repeated, dropped."""
        self._commit()
        if self._replay is not None:
            index = index.to(self._replay.cursors.start.device)
            cursors, seed = self._replay.cursors, self._replay.seed
            self._replay = self._new_replay([_select(layer, index) for layer in self._replay.layers])
            self._replay.cursors.start.copy_(cursors.start[index])
            self._replay.cursors.history.copy_(cursors.history[index])
            self._replay.seed.copy_(seed)
        if self._conv is not None:
            self._conv.end = self._conv.end[index]
            self._conv.inputs = [inputs[index] for inputs in self._conv.inputs]

    def repeat(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self._replay is not None:
            rows = torch.arange(self._replay.slots, device=self._replay.cursors.start.device)
            self.select(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget all sequences."""
        self._clear({})

    def release(self) -> dict[int, StockState]:
        """By layer, the content of the cache as an unpatched model would have left it.

        Nothing, where the last forward stopped half-way.
        """
        if self._forward is not None and self._forward.scanned != self._layers:
            return {}
        self._commit()
        if self._replay is None or self._conv is None:
            return self._inherited
        rows = torch.arange(self._replay.slots, device=self._replay.cursors.start.device)
        self._replay.flush(rows)
        self.history = 0
        found = {}
        for layer, number in self._replay_number.items():
            window = self._conv.window(self._conv_number[layer], rows).transpose(1, 2)
            state = kernels.load_states(self._replay.layers[number].state)
            found[layer] = StockState(window.contiguous(), self._calls[layer].to_scan(state))
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """A session for a copied cache; configuration and account stay shared."""
        copy = Session(self.config, self._layers, self._account, {}, self._register)
        memo[id(self)] = copy
        for name, value in vars(self).items():
            if name not in ("config", "cache", "_account", "_register"):
                setattr(copy, name, deepcopy(value, memo))
        cache = memo.get(id(self.cache()))
        if cache is not None:
            copy.hold(cache)
        return copy

    # One forward pass.

    def _plan(self, tokens: int, rows: int) -> Forward:
        """Decide the way of a forward's tokens and make room for it.

        A prompt goes through transformers' scan and decoded tokens are replayed. While recording, so is
        a prompt's last token, which an assistant takes back when its first draft is refused.
        """
        expected, self._expected = self._expected, None
        longest = self._max_draft if self.recording else 1
        prompt = tokens if not self._started or tokens > longest else 0
        prompt = prompt if expected is None else expected
        head = max(prompt - 1, 0) if self.recording else prompt
        tail = tokens - head
        if head:
            self._fold(self.history)
            self._unsettled = 0
        flush = False
        if tail:
            self._make_room(tail)
            flush = must_flush(self.history, tail, self.window)
            account = self._account()
            account.steps += 1
            account.drafted += rows * tail
            account.kept += rows * tail
            account.flushes += rows * flush
        return Forward(tokens, head, prompt - head, flush, tail)

    def _commit(self) -> None:
        """Move the cursors past the last forward, with what has been kept of it.

        Raises:
            RuntimeError: it stopped half-way, so that layers differ in what they have seen.
        """
        forward = self._forward
        if forward is None:
            return
        if forward.scanned != self._layers:
            raise RuntimeError(
                "the last forward over this cache was interrupted: its layers differ in what they have "
                "seen. reset() it or make a new one"
            )
        self._forward = None
        assert self._replay is not None
        assert self._conv is not None
        rows = torch.arange(self._replay.slots, device=self._replay.cursors.start.device)
        if forward.tail:
            draft, kept = torch.full_like(rows, forward.tail), torch.full_like(rows, forward.kept)
            self._replay.commit(rows, draft, kept)
            self.history = (0 if forward.flush else self.history) + forward.kept
        self._conv.commit(rows, torch.full_like(rows, forward.head + forward.kept))
        self._length += forward.head + forward.kept
        self._started = True
        if self.recording and not forward.settled:
            self._unsettled += forward.kept

    def _make_room(self, draft: int) -> None:
        """Grow the ring where a draft needs it, and keep unsettled records out of a flush."""
        if self._unsettled and must_flush(self.history, draft, self.window):
            self._fold(self.history - self._unsettled)
        window = draft if not self._unsettled else self.history + draft
        if window <= self.window and draft <= self._max_draft:
            return
        while self.window < window:
            self.window *= 2
        self._max_draft = max(self._max_draft, draft)
        logger.info(
            "replayssm: a draft of %d tokens needs a larger ring: window %d, draft limit %d",
            draft, self.window, self._max_draft,
        )  # fmt: skip
        if self._replay is not None:
            self._replay.resize(self.window, self._max_draft)
        if self._conv is not None:
            self._conv.resize(self.window + self._max_draft)

    def _fold(self, records: int) -> None:
        """Fold the oldest `records` of every row into the checkpoints."""
        if records < 1 or self._replay is None:
            return
        rows = torch.arange(self._replay.slots, device=self._replay.cursors.start.device)
        self._replay.materialize(rows, torch.full_like(rows, records), rows)
        self.history -= records
        self._account().flushes += len(rows)
        for layer in self._replay.layers:
            self._account().add_layer_fold(layer.layout, self.config.precision, len(rows), records)

    def _roll_back(self, tokens: int) -> None:
        assert self._replay is not None
        assert self._conv is not None
        rows = torch.arange(self._replay.slots, device=self._replay.cursors.start.device)
        dropped = torch.full_like(rows, tokens)
        self._replay.rollback(rows, dropped)
        self._conv.rollback(rows, dropped)
        self.history -= tokens
        self._length -= tokens

    def _count_kept(self, tokens: int) -> None:
        if self._replay is not None:
            self._account().kept += self._replay.slots * tokens
            for layer in self._replay.layers:
                geometry, rows = layer.layout.geometry, self._replay.slots
                self._account().add_layer_kept(geometry, self.config.precision, rows, tokens)

    # Buffers.

    def _rows(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(like.shape[0], device=like.device)

    def _check_batch(self, inputs: torch.Tensor) -> None:
        held = {state.conv.shape[0] for state in self._inherited.values()}
        held |= {self._replay.slots} if self._replay is not None else set()
        if held - {inputs.shape[0]}:
            raise ValueError(
                f"the cache holds {held.pop()} sequences, the model was called with {inputs.shape[0]}: use "
                "one cache per batch"
            )

    def _conv_layer(self, layer: int, inputs: torch.Tensor, kernel_size: int) -> ConvWindow:
        """The window, with `layer` allocated."""
        if self._conv is None:
            reach = self.window + self._max_draft
            self._conv = ConvWindow(inputs.shape[0], kernel_size, reach, inputs.device)
        if layer not in self._conv_number:
            number = self._conv.add_layer(inputs.shape[1], inputs.dtype)
            self._conv_number[layer] = number
            if layer in self._inherited:
                taken = self._inherited[layer].conv.transpose(1, 2)[:, -self._conv.width :]
                self._conv.load(number, taken)
        return self._conv

    def _replay_layer(self, layer: int, call: ScanCall) -> LayerBuffers:
        """The buffers of `layer`, allocated at its first call, when its shapes are known."""
        if layer not in self._replay_number:
            tensor = call.activation
            precision = self.config.precision
            layout = RingLayout(
                call.geometry, self.window, self._max_draft, tensor.dtype, split=precision.split,
                skip_tolerance=self.config.skip_tolerance,
            )  # fmt: skip
            buffers = LayerBuffers.allocate(layout, tensor.shape[0], precision, tensor.device, call.rates)
            self._replay_number[layer] = len(self._replay_number)
            self._calls[layer] = type(call)
            if self._replay is None:
                self._replay = self._new_replay([buffers])
            else:
                self._replay.add_layer(buffers)
            if layer in self._inherited:
                self._store(layer, call.from_scan(self._inherited.pop(layer).recurrent).float())
        assert self._replay is not None
        return self._replay.layers[self._replay_number[layer]]

    def _store(self, layer: int, states: torch.Tensor) -> None:
        """Write a layer's fp32 states, which came from elsewhere than a step, into all copies."""
        assert self._replay is not None
        number = self._replay_number[layer]
        buffers = self._replay.layers[number]
        kernels.store_states(
            buffers.state,
            states,
            buffers.read_state,
            rand_seed=self._replay.seed if buffers.rounding is Rounding.STOCHASTIC else None,
            layer=number,
        )
        if buffers.skipping is not None:
            buffers.skipping.forget(self._rows(states))

    def _new_replay(self, layers: list[LayerBuffers]) -> ReplayCache:
        return ReplayCache(layers, partial(kernels.materialize, backend=self.config.backend))


class _WithoutGradient(torch.autograd.Function):
    """Outputs of a replay step: going backward through them is an error, not a wrong gradient."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(
            "replayed tokens have no gradient: train with use_cache=False, or disable() replay decoding"
        )


def _select(layer: LayerBuffers, index: torch.Tensor) -> LayerBuffers:
    rings = {name: ring[index] for name, ring in layer.rings.items()}
    read_state = None if layer.read_state is None else select_states(layer.read_state, index)
    skipping = None if layer.skipping is None else layer.skipping.select(index)
    state = select_states(layer.state, index)
    return replace(layer, state=state, rings=rings, read_state=read_state, skipping=skipping)
