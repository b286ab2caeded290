"""Cache layers of a replayed model, and what a mixer sees of them.

A cache of transformers consists of layers of many classes. A layer that belongs to a replayed mixer
gets `ReplayLayer` in front of its own class, so that everything that transformers does to the cache
(crop, reorder, reset, copy) reaches the session, while an attention part of the same layer keeps
working as it is.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from replayssm.adapters.transformers.session import Session, StockState

if TYPE_CHECKING:
    from replayssm.adapters.transformers.scan_call import ScanCall


class ReplayLayer(LinearAttentionCacheLayerMixin):
    """Mixed in front of a linear-attention cache layer's class.

    Events reach every layer of a cache; the layer with `leads` set passes them to the session, once
    for all.
    """

    session: Session
    leads: bool
    stock_class: type
    has_previous_state: dict[int, bool]

    is_compileable = False
    is_croppable = True

    @property
    def record_past(self) -> bool:
        """Whether a `crop` follows each round of tokens."""
        return self.session.recording

    @record_past.setter
    def record_past(self, recording: bool) -> None:
        self.session.recording = recording

    def crop(self, tokens_to_remove: int) -> None:
        """Take back `-tokens_to_remove` tokens.

        Raises:
            ValueError: positive counts, and tokens that are no longer in the ring.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes a negative number of tokens to remove, got {tokens_to_remove}: a "
                "recurrent layer can't be cut to a length"
            )
        if self.leads:
            self.session.crop(-tokens_to_remove)
        self._attention("crop", tokens_to_remove)

    def reset(self) -> None:
        """Forget the sequences."""
        if self.leads:
            self.session.reset()
        self.has_previous_state[0] = False
        self._attention("reset")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give row `i` the sequence of row `beam_idx[i]`."""
        if self.leads:
            self.session.select(beam_idx)
        self._attention("reorder_cache", beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        if self.leads:
            self.session.select(indices)
        self._attention("batch_select_indices", indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.leads:
            self.session.repeat(repeats)
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

    def has_previous_state(self, *_: Any) -> bool:
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
        ValueError: a layer of the cache can't hold a recurrent state, or holds several.
    """
    found = {}
    for index in layers:
        layer: Any = cache.layers[index] if index < len(cache.layers) else None
        if not isinstance(layer, LinearAttentionCacheLayerMixin) or layer.number_of_states != 1:
            raise ValueError(
                f"cache layer {index}: expected a linear-attention layer with one state, got "
                f"{type(layer).__name__}; make the cache with DynamicCache(config=model.config)"
            )
        if layer.has_previous_state[0]:
            conv, recurrent = layer.conv_states[0], layer.recurrent_states[0]
            assert conv is not None
            assert recurrent is not None
            found[index] = StockState(conv, recurrent)
    return found


def attach(cache: Cache, layers: list[int], session: Session) -> None:
    """Turn a cache's recurrent layers into replay layers of a session."""
    for number, index in enumerate(layers):
        layer: Any = cache.layers[index]
        session.recording |= vars(layer).pop("record_past")
        layer.stock_class, layer.session, layer.leads = type(layer), session, number == 0
        layer.__class__ = _replay_class(type(layer))
        layer.conv_states[0] = layer.recurrent_states[0] = None
        layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = False
        session.cache_layers[index] = layer
    if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        # Without attention layers stock caches have no length, which assisted generation asks for.
        cache.get_seq_length = session.length  # type: ignore[method-assign]


def detach(session: Session) -> None:
    """Give a session's cache layers their own classes back, and their contents in stock form.

    A cache without attention layers keeps the session for its length.
    """
    contents = session.release()
    for index, layer in session.cache_layers.items():
        recording = session.recording
        layer.__class__ = layer.stock_class
        for name in ("stock_class", "session", "leads"):
            delattr(layer, name)
        layer.record_past = recording
        if index in contents:
            state = contents[index]
            layer.lazy_initialization(conv_states=state.conv, conv_kernel_size=state.conv.shape[-1])
            layer.lazy_initialization(recurrent_states=state.recurrent)
            layer.conv_states[0].copy_(state.conv)
            layer.recurrent_states[0].copy_(state.recurrent)
    session.cache_layers = {}


@cache
def _replay_class(kind: type) -> type:
    return type(f"Replay{kind.__name__}", (ReplayLayer, kind), {})
