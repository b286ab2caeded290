"""Greedy tokens of TensorRT-LLM's engine with the adapter and without, each in a process of its own.

Weights and activations are in 16 bits, where two tokens of nearly the same probability may change places. How
often that happens without the adapter is seen by sending the same prompts through the same engine in other
batches; with it there may not be many more.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import yaml

from replayssm.adapters.trtllm.contract import PACKAGE
from replayssm.adapters.trtllm.settings import ENV_CONFIG
from replayssm.cli.bench.e2e import KINDS, Engine, EngineFailed, Process

REQUESTS = 64
OUTPUT = 64
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys of a model's configuration that say how many layers it has for MTP."""

Tokens = list[list[int]]
Start = Callable[[Sequence[str], Mapping[str, str]], Engine]


class NotServed(Exception):
    """The engine does not serve the model without the adapter either; says how it ended."""


@dataclass(frozen=True)
class Compared:
    """Requests whose tokens part.

    Attributes:
        requests: how many there are.
        again: that part between two runs without the adapter.
        on: that part between the first of them and the one with it.
        iterations_off: of the engine without the adapter, over all requests.
        iterations_on: with it; where fewer drafts are accepted there are more.
    """

    requests: int
    again: int
    on: int
    iterations_off: int
    iterations_on: int

    @property
    def allowed(self) -> int:
        """Requests that may part with the adapter."""
        return self.again + max(2, self.again // 2)


def parted(here: Tokens, there: Tokens) -> int:
    """Requests whose tokens are not equal."""
    return sum(one != other for one, other in zip(here, there, strict=True))


def prompts(vocabulary: int, count: int = REQUESTS) -> Tokens:
    """Prompts of many lengths."""
    chance = random.Random(5)
    lengths = [chance.randrange(4, 300) for _ in range(count)]
    return [[chance.randrange(10, vocabulary) for _ in range(length)] for length in lengths]


def start(arguments: Sequence[str], environment: Mapping[str, str]) -> Engine:
    """The engine's process."""
    return Process(arguments, environment, KINDS["trtllm"].module)


def compare(model: str, config: Path, start: Start = start) -> Compared:
    """Tokens of an engine with these settings, with the adapter and without.

    Raises:
        NotServed: the engine ended with an error without the adapter.
        EngineFailed: it did with the adapter.
    """
    given = ["--config", str(config)]
    try:
        off, again = _tokens(model, "off", given, start, batches=(1, 2))
    except EngineFailed as error:
        raise NotServed(str(error)) from error
    [on] = _tokens(model, "on", given, start, batches=(1,))
    return Compared(
        len(off.tokens),
        parted(off.tokens, again.tokens),
        parted(off.tokens, on.tokens),
        off.iterations,
        on.iterations,
    )


class _Answer(NamedTuple):
    tokens: Tokens
    iterations: int


def _tokens(model: str, way: str, given: list[str], start: Start, batches: Sequence[int]) -> list[_Answer]:
    """What one engine gives for the prompts, sent in so many batches."""
    launch = KINDS["trtllm"].launch(model, way, given)
    engine = start(launch.arguments, launch.environment)
    found = []
    try:
        asked = prompts(engine.ask(order="facts")["vocabulary"])
        for count in batches:
            size = len(asked) // count
            parts = [
                engine.ask(order="tokens", prompts=asked[begin : begin + size], output=OUTPUT)
                for begin in range(0, len(asked), size)
            ]
            tokens = [tokens for part in parts for tokens in part["tokens"]]
            found.append(_Answer(tokens, sum(part["iterations"] for part in parts)))
    finally:
        engine.end()
    return found


def has_mtp(model: Path) -> bool:
    """Whether the model's configuration has layers for MTP."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return any(each.get(key) for each in (config, config.get("text_config", {})) for key in MTP_LAYERS)


def write_settings(config: Path | None, drafts: int, target: Path) -> Path:
    """A copy of the engine's settings in `target`, with MTP of so many drafts; 0: without speculation."""
    given = {} if config is None else yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    given.pop("speculative_config", None)
    if drafts:
        given["speculative_config"] = {"decoding_type": "MTP", "max_draft_len": drafts}
    target.write_text(yaml.safe_dump(given), encoding="utf-8")
    return target


def absent(environment: Mapping[str, str]) -> str | None:
    """Why the engine cannot be compared here."""
    if find_spec(PACKAGE) is None:
        return f"{PACKAGE} is not installed: run ci/gpu_trtllm.sh in a container that has it"
    if not environment.get(ENV_CONFIG):
        return f"{ENV_CONFIG} names no adapter.yaml: run ci/gpu_trtllm.sh"
    return None
