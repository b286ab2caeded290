"""`enable` and `Handle`: replay decoding for one model, switched on and off again."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from replayssm.adapters.transformers.account import Account
from replayssm.adapters.transformers.cache_layer import (
    MixerCache,
    ReplayLayer,
    attach,
    detach,
    stock_states,
)
from replayssm.adapters.transformers.patch_points import (
    CACHE_PARAMETERS,
    Mixer,
    ScanFunction,
    find_mixers,
    modeling_module,
)
from replayssm.adapters.transformers.scan_call import CALLS
from replayssm.adapters.transformers.session import Session
from replayssm.core.config import ReplayConfig
from replayssm.kernels.registry import resolve

logger = logging.getLogger(__name__)


def enable(model: PreTrainedModel, config: ReplayConfig | None = None, **settings: Any) -> Handle:
    """Decode `model` with replay: its `generate` and `forward` give the same tokens with less traffic.

    Prompts keep going through transformers' own code. Assisted generation, which transformers refuses
    for these models, works.

    Args:
        model: a stock model with Mamba-2, Gated DeltaNet or Kimi Delta Attention layers.
        config: window, draft limit, precision, backend; by default read from the environment.
        **settings: fields of `ReplayConfig`, e.g. `window=16`; not together with `config`.

    Returns:
        A handle whose `disable()` restores the model.

    Raises:
        UnsupportedModel: no layer can be served, or transformers is not as expected.
        ConfigError: the configuration is wrong.
        BackendUnavailable: a kernel backend was named that cannot run here.
        RuntimeError: replay decoding is already enabled for this model.
    """
    if config is not None and settings:
        raise ValueError(f"pass a config or settings, not both: got a config and {sorted(settings)}")
    return Handle(model, ReplayConfig.load(**settings) if config is None else config)


class Handle:
    """Replay decoding of one model.

    Attributes:
        model: the model.
        config: the configuration.
        account: what steps have done since `enable` or since it was last replaced.
        mixers: the layers served.
    """

    def __init__(self, model: PreTrainedModel, config: ReplayConfig) -> None:
        self.mixers = find_mixers(model)
        if any("_replay_handle" in vars(mixer.module) for mixer in self.mixers):
            raise RuntimeError("replay decoding is already enabled for this model: disable() it first")
        resolve(config.backend, model.device)
        self.model = model
        self.config = config
        self.account = Account()
        self._layers = sorted(mixer.layer_idx for mixer in self.mixers)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._wanted_logits: int | None = None
        for mixer in self.mixers:
            _SCANS.patch(mixer)
            self._patch(mixer)
        self._hook = model.register_forward_pre_hook(self._note_logits, with_kwargs=True)
        model.prepare_inputs_for_generation = self._only_new_tokens(model.prepare_inputs_for_generation)
        model._is_stateful = False
        logger.info("replayssm: %s", self.describe())

    def describe(self) -> str:
        """One line: rules, backend, window, precision."""
        rules = Counter(mixer.scan.rule.value for mixer in self.mixers)
        found = ", ".join(f"{count} {rule} layers" for rule, count in sorted(rules.items()))
        backend = resolve(self.config.backend, self.model.device).__name__.rsplit(".", 1)[-1]
        precision = self.config.precision
        return (
            f"{type(self.model).__name__}: {found}; {backend}; window {self.config.window}, drafts up "
            f"to {self.config.resolved_max_draft}; state {precision.recurrence}"
        )

    def disable(self) -> None:
        """Restore the model, and give caches that are still in use their stock contents back."""
        if not self.mixers:
            return
        for session in list(self._sessions):
            detach(session)
        for mixer in self.mixers:
            del mixer.module.forward, mixer.module._replay_handle
            _SCANS.restore(mixer)
        self._hook.remove()
        del self.model._is_stateful, self.model.prepare_inputs_for_generation
        self.mixers = []

    def _patch(self, mixer: Mixer) -> None:
        original = mixer.module.forward
        position = list(inspect.signature(inspect.unwrap(original)).parameters).index(mixer.cache_parameter)

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(mixer, original, position, args, kwargs)

        mixer.module.forward = forward
        mixer.module._replay_handle = self

    def _run(
        self,
        mixer: Mixer,
        original: Callable[..., Any],
        position: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A mixer's `forward`, with the cache replaced by what the mixer is to see of it."""
        name = next((name for name in CACHE_PARAMETERS if kwargs.get(name) is not None), None)
        cache = kwargs.get(name) if name else (args[position] if len(args) > position else None)
        if cache is None:
            return original(*args, **kwargs)
        layer = self._replay_layer(cache, mixer.layer_idx)
        seen = MixerCache(layer, mixer.layer_idx)
        if name:
            kwargs = kwargs | {name: seen}
        else:
            args = (*args[:position], seen, *args[position + 1 :])
        token = _ACTIVE.set((mixer, seen))
        try:
            return original(*args, **kwargs)
        finally:
            _ACTIVE.reset(token)

    def _replay_layer(self, cache: Cache, layer_idx: int) -> Any:
        """The cache's layer, made a replay layer where it is not one yet."""
        if layer_idx >= len(cache.layers) or not isinstance(cache.layers[layer_idx], ReplayLayer):
            inherited = stock_states(cache, self._layers)
            session = Session(
                self.config, self.account, lambda: self._wanted_logits, inherited, self._sessions.add
            )
            attach(cache, self._layers, session)
        return cache.layers[layer_idx]

    def _only_new_tokens(self, prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """`prepare_inputs_for_generation` for an assistant that is called again with its cache.

        transformers cuts the tokens that the cache has seen off the input only where the cache holds
        attention layers.
        """

        @wraps(prepare)
        def prepare_inputs(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
            layers = getattr(kwargs.get("cache"), "layers", None) or [None]
            if isinstance(layers[0], ReplayLayer) and kwargs.get("next_sequence_length") is None:
                session = layers[0].session
                if session.recording and session.length():
                    kwargs["next_sequence_length"] = input_ids.shape[1] - session.length()
            return prepare(input_ids, *args, **kwargs)

        return prepare_inputs

    def _note_logits(self, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward: how many positions' logits it is asked for."""
        wanted = kwargs.get("logits_to_keep")
        self._wanted_logits = wanted if isinstance(wanted, int) and wanted > 0 else None


_ACTIVE: ContextVar[tuple[Mixer, MixerCache] | None] = ContextVar("replayssm_mixer", default=None)


class _Scans:
    """Scan functions of modeling modules, replaced as long as some handle needs them."""

    def __init__(self) -> None:
        self._original: dict[tuple[str, str], Callable[..., Any]] = {}
        self._users: Counter[tuple[str, str]] = Counter()

    def patch(self, mixer: Mixer) -> None:
        module, key = modeling_module(mixer.module), self._key(mixer)
        if not self._users[key]:
            self._original[key] = getattr(module, mixer.scan.name)
            setattr(module, mixer.scan.name, _dispatch(self._original[key], mixer.scan))
        self._users[key] += 1

    def restore(self, mixer: Mixer) -> None:
        key = self._key(mixer)
        self._users[key] -= 1
        if not self._users[key]:
            setattr(modeling_module(mixer.module), mixer.scan.name, self._original.pop(key))

    def _key(self, mixer: Mixer) -> tuple[str, str]:
        return modeling_module(mixer.module).__name__, mixer.scan.name


_SCANS = _Scans()


def _dispatch(original: Callable[..., Any], scan: ScanFunction) -> Callable[..., Any]:
    """The scan function for mixers under replay, the original one for all others."""

    @wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        active = _ACTIVE.get()
        if active is None:
            return original(*args, **kwargs)
        mixer, seen = active
        return seen.scan(CALLS[scan.rule](original, mixer.module, *args, **kwargs))

    return dispatch
