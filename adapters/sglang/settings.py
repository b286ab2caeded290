"""The adapter's settings: options of SGLang's command line, and how they and SGLang's own become one.

`Options` is what was typed, `Settings` is what a server runs with. Both travel with SGLang's server
arguments to every process that it spawns, so they hold plain values only.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from replayssm.core.config import ConfigError, ReplayConfig, plain_format
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
"""SGLang's name of each state format."""


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
        precision: format of the state.
    """

    config: str | None = None
    backend: str | None = None
    window: int | None = None
    precision: str | None = None

    @property
    def given(self) -> list[str]:
        """The options that were given, as they are typed."""
        return [f"--replayssm-{name}" for name, value in asdict(self).items() if value is not None]


@dataclass(frozen=True)
class Settings:
    """What a server decodes with.

    Attributes:
        window: L.
        backend: kernel backend.
        ssm_dtype: SGLang's name of the state's format; `None` leaves it to SGLang.
        speculation: serve verification steps too.
        max_draft: the most tokens (tree nodes) of a request in one step.
        max_path: the most of them that one step may accept; `None`: all.
    """

    window: int
    backend: str
    ssm_dtype: str | None
    speculation: bool = False
    max_draft: int = 1
    max_path: int | None = None


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
        "--replayssm-precision", choices=tuple(SSM_DTYPES), help="Format of states; stands for "
        "--mamba-ssm-dtype.",
    )  # fmt: skip


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
    }
    config = ReplayConfig.load(options.config, **overrides)
    stored = plain_format(config.precision, "SGLang")
    wanted = SSM_DTYPES[stored] if "precision" in config.model_fields_set else None
    if wanted is not None and ssm_dtype not in (None, wanted):
        raise ConfigError(
            f"--mamba-ssm-dtype {ssm_dtype} and replayssm's precision {config.precision.recurrence} are the "
            "same setting: expected one of them, or the same format"
        )
    return Settings(config.window, config.backend, wanted)
