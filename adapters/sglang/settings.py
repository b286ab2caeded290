"""The adapter's settings: options of SGLang's command line, and how they and SGLang's own become one.

`Options` is what was typed, `Settings` is what a server runs with. Both travel with SGLang's server
arguments to every process that it spawns, so they hold plain values only.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field

from replayssm.core.config import ConfigError, Count, ReplayConfig
from replayssm.core.precision import Precision
from replayssm.kernels.registry import NAMES

ENV_SWITCH = "REPLAYSSM_SGLANG"
"""Variable that switches the plugin off."""
OPTIONS = "_replayssm_options"
"""Attribute of SGLang's server arguments that holds `Options`."""
SETTINGS = "_replayssm"
"""Attribute of SGLang's server arguments that holds `Settings`, where decoding with replay is on."""

DEFAULT_CACHE_LEN = 16
"""SGLang's own default of `--linear-replayssm-cache-len`, which counts as not given."""

SSM_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""SGLang's name of each format that its own pool of states can have."""


class EngineConfig(ReplayConfig):
    """Settings of replay decoding beside kernels of the engine's own; immutable.

    Attributes:
        small_batch: decode steps of at most that many rows are left to the engine's kernels; 0: none.
    """

    small_batch: Annotated[Count, Field(ge=0)] = 0


def switched_on(env: Mapping[str, str]) -> bool:
    """Whether the plugin does anything: on unless `ENV_SWITCH` says off.

    Raises:
        ConfigError: it says neither on nor off.
    """
    value = env.get(ENV_SWITCH) or "on"
    if value not in ("on", "off"):
        raise ConfigError(f"{ENV_SWITCH}: expected 'on' or 'off', got {value!r}; correct it or unset it")
    return value == "on"


@dataclass(frozen=True)
class Options:
    """Options as given on the command line; `None` where not.

    Attributes:
        config: YAML file of `ReplayConfig`.
        backend: kernel backend.
        window: L.
        precision: formats of the states, short.
        small_batch: of `EngineConfig`.
    """

    config: str | None = None
    backend: str | None = None
    window: int | None = None
    precision: str | None = None
    small_batch: int | None = None

    @property
    def given(self) -> list[str]:
        """The options that were given, as they are typed."""
        names = [name.replace("_", "-") for name, value in asdict(self).items() if value is not None]
        return [f"--replayssm-{name}" for name in names]


@dataclass(frozen=True)
class Settings:
    """What a server decodes with.

    Attributes:
        window: L.
        backend: kernel backend.
        precision: formats of the states, short; `None`: one copy, in the format that SGLang decides on.
        speculation: serve verification steps too.
        max_draft: the most tokens (tree nodes) of a request in one step.
        max_path: the most of them that one step may accept; `None`: all.
        skip_tolerance: of `ReplayConfig`.
        small_batch: of `EngineConfig`.
    """

    window: int
    backend: str
    precision: str | None
    speculation: bool = False
    max_draft: int = 1
    max_path: int | None = None
    skip_tolerance: float = 0.0
    small_batch: int = 0

    @property
    def ssm_dtype(self) -> str | None:
        """SGLang's name of its own pool's format; `None` leaves it to SGLang."""
        return None if self.precision is None else SSM_DTYPES[Precision.parse(self.precision).recurrence]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the adapter's options to SGLang's parser."""
    group = parser.add_argument_group("replayssm", "decoding with replay, with --enable-linear-replayssm")
    group.add_argument("--replayssm-config", metavar="FILE", help="YAML file with settings of replayssm.")
    group.add_argument(
        "--replayssm-backend", choices=NAMES, help="Kernels; auto takes the fastest that serve the model."
    )
    group.add_argument(
        "--replayssm-window",
        type=int,
        metavar="L",
        help="Records of a sequence before they are folded into its state; stands for "
        "--linear-replayssm-cache-len.",
    )
    group.add_argument(
        "--replayssm-precision",
        metavar="FORMATS",
        help="Format of states, or of a copy to read and the one that recurs, as in nvfp4/fp16+sr; the "
        "latter stands for --mamba-ssm-dtype.",
    )
    group.add_argument(
        "--replayssm-small-batch",
        type=int,
        metavar="ROWS",
        help="Decode steps of at most so many rows are left to SGLang's own kernels; 0, the default: none.",
    )


def read_options(arguments: argparse.Namespace) -> Options:
    """The adapter's options among parsed arguments."""
    names = Options.__dataclass_fields__
    return Options(**{name: getattr(arguments, f"replayssm_{name}", None) for name in names})


def settle(options: Options, cache_len: int, ssm_dtype: str | None) -> Settings:
    """One set of settings from the command line, SGLang's own options, the environment and the file.

    Args:
        options: the adapter's options.
        cache_len: SGLang's `--linear-replayssm-cache-len`.
        ssm_dtype: SGLang's `--mamba-ssm-dtype`, `None` where not given.

    Raises:
        ConfigError: a setting is wrong, or two ways of giving it disagree.
    """
    window = options.window
    if cache_len != DEFAULT_CACHE_LEN:
        if window not in (None, cache_len):
            raise ConfigError(
                f"--replayssm-window {window} and --linear-replayssm-cache-len {cache_len} are the same "
                "setting: expected one of them, or the same number"
            )
        window = cache_len
    overrides: dict[str, Any] = {
        "window": window,
        "backend": options.backend,
        "precision": options.precision,
        "small_batch": options.small_batch,
    }
    config = EngineConfig.load(options.config, **overrides)
    precision = _served(config.precision) if "precision" in config.model_fields_set else None
    if config.small_batch and not config.precision.plain:
        raise ConfigError(
            f"small_batch {config.small_batch} with precision {str(config.precision)!r}: small batches are "
            "left to SGLang's kernels, which know one copy of the states and round it to nearest; expected "
            f"{', '.join(SSM_DTYPES)}, or no small_batch"
        )
    settings = Settings(
        config.window, config.backend, precision, skip_tolerance=config.skip_tolerance,
        small_batch=config.small_batch,
    )  # fmt: skip
    if precision is None:
        return settings
    if ssm_dtype not in (None, settings.ssm_dtype):
        raise ConfigError(
            f"--mamba-ssm-dtype {ssm_dtype} and the recurrence copy of replayssm's precision "
            f"{settings.precision} are the same setting: expected one of them, or the same format"
        )
    return settings


def _served(precision: Precision) -> str:
    if precision.recurrence not in SSM_DTYPES:
        raise ConfigError(
            f"precision {str(precision)!r}: the copy that recurs lies in SGLang's own pool, and its prefill "
            f"kernels write states in {', '.join(SSM_DTYPES)}: expected one of these, fp16+sr, or a copy to "
            "read beside one of them, as in 'nvfp4/fp16+sr'"
        )
    return str(precision)
