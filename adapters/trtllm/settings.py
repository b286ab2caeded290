"""The adapter's settings: a YAML file of its own, named by `TRTLLM_REPLAYSSM_CONFIG`.

The engine refuses unknown keys in its own file. Of the environment it hands only variables that begin with
TRTLLM or TLLM to the processes it spawns, so every setting is in the file and the path has such a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from replayssm.core.config import ENV_PREFIX, ConfigError, ReplayConfig, nearest, plain_format
from replayssm.core.formats import FORMATS
from replayssm.core.precision import Precision

ENV_CONFIG = "TRTLLM_REPLAYSSM_CONFIG"
"""Variable with the path of the adapter's file."""

MODES = ("own", "borrow")

TEMPLATE = """\
# replayssm in TensorRT-LLM; {variable} names this file.

# own: rings and cursors of replayssm, for standard decoding and for MTP.
# borrow: MTP in the buffers of the engine's own replay, which must be on; only the kernels are exchanged.
mode: own

# Records of a sequence before they are folded into its state.
window: 16

# Kernels: auto, torch, triton, cuda or flashinfer; auto takes the fastest that serve the model.
backend: auto

# Format of states: fp32, bf16, fp16, or fp16+sr, which is fp16 rounded stochastically. Left out, it is the
# engine's kv_cache_config.mamba_ssm_cache_dtype; given, it must be the same. In mode own steps may read a
# copy of fewer bits beside it, in fp8, int8, nvfp4 or mxfp4: {{read: nvfp4, recurrence: fp16+sr}}
# precision: fp32

# The most tokens of a sequence in one step, the draft's and one more. Left out, it is the engine's own.
# max_draft: 4

# What steps may leave out of their reads, an error of outputs; 0 leaves nothing out. In mode own only.
# skip_tolerance: 0
"""


@dataclass(frozen=True)
class Settings:
    """What the adapter decodes with.

    Attributes:
        window: L.
        backend: kernel backend.
        precision: formats of the states, and of copies that steps read; `None`: one copy, the engine's.
        max_draft: the most tokens of a sequence in one step; `None`: the engine's.
        mode: of `MODES`: whose buffers and cursors.
        skip_tolerance: of `ReplayConfig`, in mode `own`.
    """

    window: int
    backend: str
    precision: Precision | None
    max_draft: int | None
    mode: str = "own"
    skip_tolerance: float = 0.0

    @property
    def copies(self) -> bool:
        """Whether steps read copies of the states."""
        return self.precision is not None and self.precision.split


def load(env: Mapping[str, str]) -> Settings:
    """The settings from the file that the environment names.

    Raises:
        ConfigError: no file is named, it can't be read, or a key or value is wrong.
    """
    path = env.get(ENV_CONFIG)
    if not path:
        raise ConfigError(
            f"{ENV_CONFIG} is not set: expected the path of an adapter.yaml; `replayssm trtllm init MODEL` "
            "writes one. In processes that the engine did not spawn itself (mpirun, Ray) set it there too"
        )
    for field in ReplayConfig.model_fields:
        variable = ENV_PREFIX + field.upper()
        if env.get(variable):
            raise ConfigError(
                f"{variable} does not reach the engine's worker processes: write '{field}: "
                f"{env[variable]}' into {path} and unset it"
            )
    return read(Path(path))


def read(path: Path) -> Settings:
    """The settings in a file.

    Raises:
        ConfigError: as `load`.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {ENV_CONFIG} must name a file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}; correct the file") from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected lines 'name: value', got a {type(content).__name__}")
    known = ("mode", *ReplayConfig.model_fields)
    for key in content:
        if key not in known:
            raise ConfigError(
                f"unknown key {key!r} in {path}{nearest(str(key), known)}: expected one of "
                f"{', '.join(known)}; correct or remove it. The engine's own settings belong in its own file"
            )
    mode = content.pop("mode", "own")
    if mode not in MODES:
        raise ConfigError(f"{path}: mode: expected {' or '.join(MODES)}, got {mode!r}")
    try:
        config = ReplayConfig(**content)
        _check_precision(config.precision, mode)
        if config.skip_tolerance and mode == "borrow":
            raise ConfigError(
                f"skip_tolerance {config.skip_tolerance:g}: in mode borrow the engine empties rings itself, "
                "and norms of states would not follow: expected mode own, or no skip_tolerance"
            )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    given = config.model_fields_set
    return Settings(
        config.window,
        config.backend,
        config.precision if "precision" in given else None,
        config.max_draft,
        mode,
        config.skip_tolerance,
    )


def _check_precision(precision: Precision, mode: str) -> None:
    """States are in the engine's pool: one plain copy, and in mode `own` another to read beside the rings."""
    if mode == "borrow":
        plain_format(precision, "mode borrow of TensorRT-LLM")
    elif precision.recurrence not in FORMATS:
        raise ConfigError(
            f"precision {str(precision)!r}: the states stay in TensorRT-LLM's own pool, where packed formats "
            f"have no room: expected {', '.join(FORMATS)} or fp16+sr, alone or behind a copy to read as in "
            "'nvfp4/fp16+sr'"
        )
