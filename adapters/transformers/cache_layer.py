"""Caches of a replayed model, their layers, and what a mixer sees of them.

A cache of transformers consists of layers of many classes. The cache and its recurrent layers get our
classes in front of their own, so that everything that transformers does to a cache (crop, reorder,
reset, copy) reaches the session once, while attention keeps working as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, StaticCache

from replayssm.adapters.transformers.session import Session, StockState

if TYPE_CHECKING:
    from replayssm.adapters.transformers.scan_call import ScanCall


class ReplayedCache(Cache):
    """Mixed in front of a cache's class: events go to the session and to the attention layers."""

    session: Session

    def crop(self, tokens_to_remove: int) -> None:
        """Take back `-tokens_to_remove` tokens.

        Raises:
            ValueError: positive counts, and tokens that are no longer in the ring; nothing is changed.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes a negative number of tokens to remove, got {tokens_to_remove}: a "
                "recurrent layer can't be cut to a length"
            )
        self.session.check_crop(-tokens_to_remove)
        super().crop(tokens_to_remove)
        self.session.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Forget the sequences."""
        self.session.reset()
        super().reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Give row `i` the sequence of row `beam_idx[i]`."""
        self.session.select(beam_idx)
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        self.session.select(indices)
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.session.repeat(repeats)
        super().batch_repeat_interleave(repeats)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the cache holds; also without attention layers, where stock caches can't say."""
        if any(isinstance(layer, CacheLayerMixin) for layer in self.layers):
            return super().get_seq_length(layer_idx)
        return self.session.length


class ReplayLayer(LinearAttentionCacheLayerMixin):
    """Mixed in front of a linear-attention layer's class: only an attention part holds data here."""

    session: Session
    has_previous_state: dict[int, bool]

    is_compileable = False
    is_croppable = True

    @property
    def record_past(self) -> bool:
        """Whether a `crop` follows each round of tokens."""
        return self.session.recording

    @record_past.setter
    def record_past(self, recording: bool) -> None:
        self.session.record(recording)

    def crop(self, tokens_to_remove: int) -> None:
        self._attention("crop", tokens_to_remove)

    def reset(self) -> None:
        self.has_previous_state[0] = False
        self._attention("reset")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._attention("reorder_cache", beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._attention("batch_select_indices", indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._attention("batch_repeat_interleave", repeats)

    def _attention(self, method: str, *arguments: Any) -> None:
        """Call a method of the attention part, where the layer holds one besides."""
        for kind in type(self).__mro__:
            if issubclass(kind, CacheLayerMixin) and not issubclass(kind, LinearAttentionCacheLayerMixin):
                getattr(kind, method)(self, *arguments)
                return


class MixerCache:
    """What a mixer sees of its cache layer: none of its own past, since the session keeps it.

    Without a past a mixer always calls its convolution and its scan for whole chunks, so one way
    through its code serves prompts, decoding and verification.
    """

    def __init__(self, layer: Any, layer_idx: int) -> None:
        self._layer = layer
        self._session: Session = layer.session
        self._layer_idx = layer_idx

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        return None

    def update_conv_state(
        self, conv_states: torch.Tensor, *_: Any, conv_kernel_size: int, **__: Any
    ) -> torch.Tensor:
        return self._session.convolve(self._layer_idx, conv_states, conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return recurrent_states

    def scan(self, call: ScanCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the mixer's recurrence."""
        result = self._session.scan(self._layer_idx, call)
        self._layer.has_previous_state[0] = True
        return result


def stock_states(cache: Cache, layers: list[int]) -> dict[int, StockState]:
    """What an unpatched model left in a cache's recurrent layers.

    Raises:
        ValueError: the cache is static, or a layer can't hold a recurrent state.
    """
    if isinstance(cache, StaticCache):
        raise ValueError(
            "replay decoding doesn't work with a static cache, whose forward transformers compiles: "
            "leave cache_implementation out, or use 'dynamic'"
        )
    found = {}
    for index in layers:
        layer: Any = cache.layers[index] if index < len(cache.layers) else None
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            raise ValueError(
                f"{type(cache).__name__}, layer {index}: expected a linear-attention layer, got "
                f"{type(layer).__name__}; make the cache with DynamicCache(config=model.config)"
            )
        if layer.has_previous_state[0]:
            conv, recurrent = layer.conv_states[0], layer.recurrent_states[0]
            assert conv is not None
            assert recurrent is not None
            found[index] = StockState(conv, recurrent)
    return found


def attach(cache: Cache, session: Session) -> None:
    """Put a cache and its recurrent layers in a session's care.

    Linear-attention layers that no mixer owns are empty (transformers 5.19 has them in place of MLPs);
    they become replay layers too, since stock ones can't be cropped.
    """
    session.hold(cache)
    cache.session = session  # type: ignore[attr-defined]
    cache.__class__ = _in_front(ReplayedCache, type(cache))
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            if vars(layer).pop("record_past"):
                session.record(True)
            layer.session = session  # type: ignore[attr-defined]
            layer.__class__ = _in_front(ReplayLayer, type(layer))
            layer.conv_states[0] = layer.recurrent_states[0] = None
            layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = False


def detach(session: Session) -> None:
    """Give a session's cache and its layers their own classes back, and their contents in stock form."""
    stock = session.cache()
    if stock is None:
        return
    contents, recording = session.release(), session.recording
    for index, layer in enumerate(stock.layers):
        if isinstance(layer, ReplayLayer):
            _restore(layer)
            layer.record_past = recording
            layer.has_previous_state[0] = index in contents
            if index in contents:
                _load(layer, contents[index])
    _restore(stock)


def _load(layer: Any, state: StockState) -> None:
    layer.lazy_initialization(conv_states=state.conv, conv_kernel_size=state.conv.shape[-1])
    layer.lazy_initialization(recurrent_states=state.recurrent)
    layer.conv_states[0].copy_(state.conv)
    layer.recurrent_states[0].copy_(state.recurrent)


def _restore(target: Any) -> None:
    # The class made by `_in_front`, its mixin, then the class that was there before.
    target.__class__ = type(target).__mro__[2]
    del target.session


def _in_front(mixin: type, kind: type) -> type:
    if (mixin, kind) not in _CLASSES:
        _CLASSES[mixin, kind] = type(f"Replay{kind.__name__}", (mixin, kind), {})
    return _CLASSES[mixin, kind]


_CLASSES: dict[tuple[type, type], type] = {}
