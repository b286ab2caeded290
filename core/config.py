"""Settings of a run: window, draft limit, storage precision and kernel backend, and where they come from.

Every entry point (command line, adapters, scripts) reads its settings here, so a name and its rules
exist once. It knows nothing of models, engines or kernels.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from replayssm.core.formats import FORMATS
from replayssm.core.policy import capacity
from replayssm.core.precision import Precision
from replayssm.core.skipping import check_tolerance

ENV_PREFIX = "REPLAYSSM_"
ENV_PATH = "REPLAYSSM_CONFIG"
SWITCHES = ("REPLAYSSM_SGLANG",)
"""Variables that adapters read before there is a run to configure; no settings."""
DEFAULT_MAX_DRAFT = 8


class ConfigError(ValueError):
    """Settings that cannot be used: says what was expected, what came and what to do."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the known name closest to `name`, or nothing when none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def parse_precision(value: object) -> Precision:
    """A `Precision` from itself, from its short form, or from a mapping of its fields.

    In a mapping the recurrence format may carry the marks of the short form: `recurrence: fp16+sr`.

    Raises:
        ValueError: no such format, rounding or field, or formats that do not go together.
    """
    if isinstance(value, Precision):
        return value
    if isinstance(value, str):
        return Precision.parse(value)
    if isinstance(value, Mapping):
        names = [field.name for field in fields(Precision)]
        for key in value:
            if key not in names:
                raise ValueError(
                    f"unknown key {key!r}{nearest(str(key), names)}: expected {', '.join(names)}"
                )
        return Precision(**_unmarked(dict(value)))
    raise ValueError(
        "expected a format such as 'fp32', two as in 'nvfp4/fp16+sr', or a mapping with read, recurrence, "
        "rounding and force"
    )


def _unmarked(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of a precision with the marks of its recurrence format as fields of their own."""
    recurrence = given.get("recurrence")
    if not isinstance(recurrence, str) or "+" not in recurrence:
        return given
    twice = {"rounding", "force"} & set(given)
    if twice:
        raise ValueError(f"{min(twice)} and the marks of {recurrence!r} say the same: give one of them")
    marked = Precision.parse(recurrence)
    return {**given, "recurrence": marked.recurrence, "rounding": marked.rounding, "force": marked.force}


def plain_format(precision: Precision, engine: str) -> str:
    """The format of an engine's own state pool, for adapters that keep the checkpoints there.

    Raises:
        ConfigError: the precision asks for more than one plain copy rounded to nearest.
    """
    if not precision.plain:
        raise ConfigError(
            f"precision {str(precision)!r}: under {engine} the states are one copy in {', '.join(FORMATS)}, "
            "rounded to nearest: packed formats, read copies and stochastic rounding are not served there "
            "yet; expected one of these formats"
        )
    return precision.recurrence


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a whole number")
    return value


Count = Annotated[int, BeforeValidator(_refuse_bool)]


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _tolerance(value: float) -> float:
    check_tolerance(value)
    return value


Tolerance = Annotated[float, BeforeValidator(_number), AfterValidator(_tolerance)]


class ReplayConfig(BaseModel):
    """Settings of replay decoding; immutable. A subclass has settings of one entry point alone.

    Attributes:
        window: L, the most records a step may see as history plus draft before it must flush.
        max_draft: T_max, the most tokens a step may bring for a sequence; `None` means the smaller of
            8 and the window, see `resolved_max_draft`.
        precision: storage of the state: a mapping with `read`, `recurrence`, `rounding` and `force`, or the
            short form, see `Precision.parse`; a format name stands for one copy in that format.
        backend: kernels to use, `torch`, `triton`, `cuda` or `flashinfer`; `auto` takes the fastest that
            works here.
        skip_tolerance: steps leave out reads of checkpoint rows that decay has made no larger than this, see
            `replayssm.core.skipping`; 0: none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: Count = 16
    max_draft: Count | None = None
    precision: Annotated[Precision, BeforeValidator(parse_precision)] = Precision()
    backend: Literal["auto", "torch", "triton", "cuda", "flashinfer"] = "auto"
    skip_tolerance: Tolerance = 0.0

    def __init__(self, **settings: Any) -> None:
        """Check the settings.

        Raises:
            ConfigError: an unknown name, a value of the wrong kind, or `T_max > L`.
        """
        _refuse_unknown(settings, "keyword", type(self).model_fields)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    @model_validator(mode="after")
    def _check_capacity(self) -> ReplayConfig:
        capacity(self.window, self.resolved_max_draft)
        return self

    @property
    def resolved_max_draft(self) -> int:
        """T_max as a number."""
        if self.max_draft is None:
            return min(DEFAULT_MAX_DRAFT, self.window)
        return self.max_draft

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        *,
        env: Mapping[str, str] = os.environ,
        **overrides: Any,
    ) -> Self:
        """Settings by precedence: keywords, then the environment, then the YAML file, then defaults.

        Args:
            path: YAML file; when `None`, the one that `REPLAYSSM_CONFIG` names, if any.
            env: environment to read `REPLAYSSM_WINDOW`, `REPLAYSSM_MAX_DRAFT`, `REPLAYSSM_PRECISION`,
                `REPLAYSSM_BACKEND`, `REPLAYSSM_SKIP_TOLERANCE` and `REPLAYSSM_CONFIG` from; an empty variable
                counts as not set.
            **overrides: settings by name; `None` counts as not given.

        Raises:
            ConfigError: an unknown name anywhere, a missing or malformed file, or unusable values.
        """
        _refuse_unknown(overrides, "keyword", cls.model_fields)
        variables = _read_env(env, cls.model_fields)
        file = path if path is not None else variables.pop(ENV_PATH, None)
        variables.pop(ENV_PATH, None)
        layers = [
            _read_file(Path(file), cls.model_fields) if file is not None else {},
            {
                name: _Setting(value, _variable(name))
                for name, value in ((_field(v), variables[v]) for v in variables)
            },
            {
                name: _Setting(value, f"keyword {name!r}")
                for name, value in overrides.items()
                if value is not None
            },
        ]
        merged = {name: setting for layer in layers for name, setting in layer.items()}
        try:
            return cls(**{name: setting.value for name, setting in merged.items()})
        except ConfigError as error:
            origins = [f"{n} from {s.source}" for n, s in merged.items() if n in str(error)]
            raise ConfigError(f"{error} ({', '.join(origins)})") from None


class _Setting(NamedTuple):
    value: object
    source: str


def _variable(field: str) -> str:
    return ENV_PREFIX + field.upper()


def _field(variable: str) -> str:
    return variable.removeprefix(ENV_PREFIX).lower()


def _refuse_unknown(names: Iterable[object], what: str, known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"unknown {what} {name!r}{nearest(str(name), known)}: expected one of "
                f"{', '.join(known)}; correct or remove it"
            )


def _read_env(env: Mapping[str, str], settings: Iterable[str]) -> dict[str, str]:
    known = [*map(_variable, settings), ENV_PATH, *SWITCHES]
    ours = {name: value for name, value in env.items() if name.startswith(ENV_PREFIX) and value}
    for name in ours:
        if name not in known:
            raise ConfigError(
                f"unknown environment variable {name}{nearest(name, known)}: expected one of "
                f"{', '.join(known)}; correct it or unset it"
            )
    return {name: value for name, value in ours.items() if name not in SWITCHES}


def _read_file(path: Path, known: Collection[str]) -> dict[str, _Setting]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {path}: {error.strerror}; pass an existing YAML file"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}; correct the file") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: expected a mapping such as 'window: 16', got a {type(content).__name__}; "
            "write one 'name: value' per line"
        )
    _refuse_unknown(content, f"key in {path}:", known)
    return {name: _Setting(value, str(path)) for name, value in content.items()}


def _explain(error: ValidationError) -> str:
    """One sentence per problem: the setting, what was expected and what came."""
    problems = []
    for problem in error.errors(include_url=False):
        message = problem["msg"].removeprefix("Value error, ")
        if problem["loc"]:
            message = f"{problem['loc'][0]}: {message}, got {problem['input']!r}"
        problems.append(message)
    return "; ".join(problems)
