"""`replayssm bench accuracy`: its options, and the run over models and studies.

transformers is imported when a run begins, not with the command.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replayssm.cli.bench import table
from replayssm.cli.bench.accuracy import tables
from replayssm.cli.bench.compared import DTYPES, PRECISIONS, check_precisions, check_step
from replayssm.cli.bench.kernels import words
from replayssm.cli.bench.study import Study, add_options
from replayssm.cli.errors import CommandError, require
from replayssm.core.formats import FORMATS

if TYPE_CHECKING:
    from replayssm.cli.bench.accuracy.studies import Plan

PROGRAM, TOPIC = "replayssm bench accuracy", "accuracy"
STUDIES = ("trained", *tables.BY_MODEL, *(name for name in tables.OVER_MODELS if name != "trained"))


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        PROGRAM,
        description="What a state's precision costs in accuracy: models decode a text with replay in each "
        "precision and are compared with themselves in fp32.",
    )
    options.add_argument(
        "--models", type=Path, default=Path("examples/models"), help="folder of models, or of one"
    )
    options.add_argument("--studies", type=words, default=STUDIES, help=f"of {', '.join(STUDIES)}; all")
    options.add_argument("--precisions", type=words, default=PRECISIONS, help="of the states")
    options.add_argument(
        "--text", type=Path, metavar="FILE", help="to decode; by default modules of the running Python"
    )
    options.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="of weights and activations; the kernels that "
        "serve packed states on a GPU take bf16",
    )  # fmt: skip
    options.add_argument("--sequences", type=int, default=2, help="pieces of the text, decoded together")
    options.add_argument("--prompt", type=int, default=256, help="tokens before decoding starts")
    options.add_argument("--tokens", type=int, default=2048, help="teacher-forced")
    options.add_argument("--long-prompt", type=int, default=4096, help="tokens of a long prompt")
    options.add_argument("--answer", type=int, default=32, help="tokens of the short answer to it")
    options.add_argument("--generate", type=int, default=256, help="tokens that a model writes by itself")
    options.add_argument("--temperature", type=float, default=0.8, help="of what it writes; 0 is greedy")
    options.add_argument("--read", type=int, default=1024, help="tokens, for the studies of reads")
    add_options(options)
    return options


def main(arguments: Sequence[str], say: Callable[[str], None] = print) -> None:
    """Run the command.

    Raises:
        CommandError: options that cannot work, a model or text that cannot be read.
    """
    given = parser().parse_args(arguments)
    _check(given)
    study = Study(TOPIC, arguments, given.device, given.json)
    from replayssm.cli.bench.accuracy import texts
    from replayssm.cli.comparison import find_models

    text = texts.read_text(given.text)
    for folder in find_models(given.models):
        _measure(folder, text, given, study, say)
    for name, lines in tables.every(study.rows).items():
        say("")
        say(name)
        say(table.text(lines))


def _measure(
    folder: Path, text: str, given: argparse.Namespace, study: Study, say: Callable[[str], None]
) -> None:
    """All studies of one model."""
    from replayssm.adapters.transformers.patch_points import find_mixers
    from replayssm.cli import decode
    from replayssm.cli.bench.accuracy import studies, texts

    model = decode.load(folder, given.device, FORMATS[given.dtype])
    tokens, plan = texts.Text.of(model, text), _plan(given)
    about = {
        "model": model.name,
        "rule": find_mixers(model.model)[0].scan.rule.value,
        "parameters": model.model.num_parameters(),
        "text": sha256(text.encode()).hexdigest(),
        "sequences": given.sequences,
        "window": given.window,
        "dtype": given.dtype,
        "backend": given.backend,
    }
    for name in given.studies:
        for row in studies.STUDIES[name](model, tokens, plan):
            study.add({"study": name, **about, **row})
            say(f"{model.name}, {name}: {_short(row)}")


def _plan(given: argparse.Namespace) -> Plan:
    from replayssm.cli.bench.accuracy.decoding import Ring, Sampling
    from replayssm.cli.bench.accuracy.studies import Plan

    return Plan(
        precisions=tuple(given.precisions),
        ring=Ring(given.window, given.step, given.backend),
        sequences=given.sequences,
        prompt=given.prompt,
        tokens=given.tokens,
        long_prompt=given.long_prompt,
        answer=given.answer,
        generate=given.generate,
        sampling=Sampling(given.temperature, given.seed),
        read=given.read,
    )


def _check(given: argparse.Namespace) -> None:
    require("transformers", "transformers")
    for name in given.studies:
        if name not in STUDIES:
            raise CommandError(f"unknown study {name!r}: expected some of {', '.join(STUDIES)}")
    check_precisions(given.precisions)
    check_step(given.step, given.window)
    least = {"sequences": 1, "prompt": 1, "tokens": 2, "long_prompt": 1, "answer": 2, "generate": 1}
    for name, number in least.items():
        if (value := getattr(given, name)) < number:
            raise CommandError(f"--{name.replace('_', '-')}: expected at least {number}, got {value}")
    if given.read < 2 * given.window:
        raise CommandError(f"--read: expected at least two windows, {2 * given.window}, got {given.read}")
    if given.temperature < 0:
        raise CommandError(f"--temperature: expected 0 or more, got {given.temperature:g}")


def _short(row: dict[str, Any]) -> str:
    shown = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values())
    return ", ".join(f"{name} {value}" for name, value in zip(row, shown, strict=True))
