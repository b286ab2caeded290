"""`enable` and `Handle`: replay decoding for one model, switched on and off again."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode

from replayssm.adapters.transformers.account import Account
from replayssm.adapters.transformers.cache_layer import (
    MixerCache,
    ReplayedCache,
    attach,
    detach,
    stock_states,
)
from replayssm.adapters.transformers.patch_points import (
    CACHE_PARAMETERS,
    PACKED_PARAMETERS,
    Mixer,
    ScanFunction,
    UnsupportedModel,
    assistance_refused,
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
        UnsupportedModel: the model can't be served, or transformers is not as expected.
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
        self._assisted_prompt: int | None = None
        self._replaced: list[tuple[Any, str, Any]] = []
        for mixer in self.mixers:
            _SCANS.patch(mixer)
            self._replace(mixer.module, "_replay_handle", self)
            self._replace(mixer.module, "forward", self._forward(mixer))
        if hasattr(model, "generate"):
            self._patch_generate(model)
        logger.info("replayssm: %s", self.describe())

    def describe(self) -> str:
        """One line: rules, backend, window, precision."""
        rules = Counter(mixer.scan.rule.value for mixer in self.mixers)
        found = ", ".join(f"{count} {rule} layers" for rule, count in sorted(rules.items()))
        backend = resolve(self.config.backend, self.model.device).__name__.rsplit(".", 1)[-1]
        return (
            f"{type(self.model).__name__}: {found}; {backend}; window {self.config.window}, drafts up "
            f"to {self.config.resolved_max_draft}; state {self.config.precision}"
            + (f"; reads under {self.config.skip_tolerance:g} left out" if self.config.skip_tolerance else "")
        )

    def disable(self) -> None:
        """Restore the model, and give caches that are still in use their stock contents back."""
        for session in list(self._sessions):
            detach(session)
        for target, name, before in reversed(self._replaced):
            delattr(target, name)
            if before is not None:
                setattr(target, name, before)
        for mixer in self.mixers:
            _SCANS.restore(mixer)
        self._replaced, self.mixers = [], []

    def __reduce__(self) -> NoReturn:
        """Copies of an enabled model would go on calling the original's layers."""
        raise RuntimeError(
            "a model can't be copied or pickled while replay decoding is enabled: disable() it first"
        )

    def _replace(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute of an object, to be restored by `disable`."""
        self._replaced.append((target, name, vars(target).get(name)))
        setattr(target, name, value)

    # The mixers.

    def _forward(self, mixer: Mixer) -> Callable[..., Any]:
        original = mixer.module.forward
        position = list(inspect.signature(original).parameters).index(mixer.cache_parameter)

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(mixer, original, position, args, kwargs)

        # Sessions plan on the host, which a compiled graph would freeze: mixers stay out of it.
        return torch.compiler.disable(forward)

    def _run(
        self,
        mixer: Mixer,
        original: Callable[..., Any],
        position: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A mixer's `forward`, with the cache replaced by what the mixer is to see of it.

        In training mode a mixer stays as it is, unless it is to continue under replay.
        """
        name = _cache_name(kwargs)
        cache = kwargs[name] if name else (args[position] if len(args) > position else None)
        if cache is None or (mixer.module.training and not isinstance(cache, ReplayedCache)):
            return original(*args, **kwargs)
        if any(kwargs.get(packed) is not None for packed in PACKED_PARAMETERS):
            raise ValueError(
                f"packed sequences ({', '.join(PACKED_PARAMETERS)}) can't be decoded with replay: pass one "
                "sequence per row, padded on the left, or use_cache=False"
            )
        self._session(cache)
        seen = MixerCache(cache.layers[mixer.layer_idx], mixer.layer_idx)
        if name:
            kwargs = kwargs | {name: seen}
        else:
            args = (*args[:position], seen, *args[position + 1 :])
        token = _ACTIVE.set((mixer, seen))
        try:
            return original(*args, **kwargs)
        finally:
            _ACTIVE.reset(token)

    def _session(self, cache: Cache) -> Session:
        """The session of a cache, which begins one where it has none."""
        if isinstance(cache, ReplayedCache):
            return cache.session
        inherited = stock_states(cache, self._layers)
        session = Session(self.config, self._layers, lambda: self.account, inherited, self._sessions.add)
        attach(cache, session)
        return session

    # Generation.

    def _patch_generate(self, model: Any) -> None:
        self._replace(model, "prepare_inputs_for_generation", self._prepared(model))
        refusal = assistance_refused(model)
        if refusal is None:
            self._replace(model, "_get_candidate_generator", self._noted(model._get_candidate_generator))
            self._replace(model, "_is_stateful", False)
        else:
            self._replace(model, "_validate_generation_mode", _refusing(model, refusal))

    def _noted(self, get_generator: Callable[..., Any]) -> Callable[..., Any]:
        """`_get_candidate_generator`, which is where assisted generation of this model begins."""

        @wraps(get_generator)
        def get_candidate_generator(
            *, generation_config: GenerationConfig, input_ids: torch.Tensor, **kwargs: Any
        ) -> Any:
            if generation_config.assistant_early_exit is not None:
                raise UnsupportedModel(
                    "assistant_early_exit runs a part of the recurrent layers, which replay decoding can't "
                    "do: use prompt_lookup_num_tokens or assistant_model"
                )
            generator = get_generator(generation_config=generation_config, input_ids=input_ids, **kwargs)
            self._assisted_prompt = input_ids.shape[1]
            return generator

        return get_candidate_generator

    def _prepared(self, model: Any) -> Callable[..., dict[str, Any]]:
        """`prepare_inputs_for_generation`, which tells the session what comes."""
        prepare = model.prepare_inputs_for_generation

        @wraps(prepare)
        def prepare_inputs(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
            name = _cache_name(kwargs)
            if name is not None:
                kwargs["next_sequence_length"] = self._new_tokens(kwargs[name], input_ids.shape[1], kwargs)
            result: dict[str, Any] = prepare(input_ids, *args, **kwargs)
            return result

        return prepare_inputs

    def _new_tokens(self, cache: Cache, given: int, options: dict[str, Any]) -> int | None:
        """How many of the `given` tokens the cache has not seen; their prompt is told to the session.

        transformers leaves this open for assisted generation over a cache that holds tokens already, and
        for an assistant without attention layers.
        """
        session, first = self._session(cache), options.get("is_first_iteration")
        new: int | None = options.get("next_sequence_length")
        prompt = self._assisted_prompt if first else None
        if first:
            self._assisted_prompt = None
            if prompt is None:
                session.record(False)
        if not session.recording or options.get("inputs_embeds") is not None:
            return new
        if new is None:
            seen = cache.get_seq_length()
            new = given - seen
            if new < 1 and first:
                raise ValueError(
                    f"assisted generation over a cache that holds {seen} tokens: expected the whole "
                    f"sequence, got input_ids of length {given}"
                )
            if new < 1:
                # A piece of an assistant's prompt (prefill_chunk_size), which comes without the rest.
                new = prompt = given
        if prompt is None:
            session.expect(0 if session.started else new)
        else:
            session.expect(new - (given - prompt))
        return new


def _refusing(model: Any, refusal: UnsupportedModel) -> Callable[..., None]:
    """`_validate_generation_mode` of a model that can't be assisted, nor be an assistant."""
    validate = model._validate_generation_mode

    @wraps(validate)
    def validated(mode: GenerationMode, config: GenerationConfig, *args: Any) -> None:
        if mode is GenerationMode.ASSISTED_GENERATION or config.is_assistant:
            raise refusal
        validate(mode, config, *args)

    return validated


def _cache_name(kwargs: dict[str, Any]) -> str | None:
    """The keyword under which a call brings a cache, if it does."""
    return next((name for name in CACHE_PARAMETERS if kwargs.get(name) is not None), None)


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

    @wraps(original, updated=())
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        active = _ACTIVE.get()
        if active is None:
            return original(*args, **kwargs)
        mixer, seen = active
        return seen.scan(CALLS[scan.rule](original, mixer.module, *args, **kwargs))

    return dispatch
