"""`replayssm generate`: streamed text, the account beside it, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")

from replayssm.cli import decode
from replayssm.cli.main import app
from replayssm.core.config import ReplayConfig

PROMPT = "def main():\n    return main()\n" * 2
TOKENS = 24

runner = CliRunner()


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT, encoding="utf-8")
    return path


def generate(model: Path, prompt: Path | str, *options: str, **invoke: Any) -> Any:
    arguments = ["generate", "--model", str(model), "--prompt-file", str(prompt)]
    arguments += ["--max-new-tokens", str(TOKENS), *options]
    return runner.invoke(app, arguments, env={"COLUMNS": "100"}, **invoke)


def text_of(model: Path, **settings: Any) -> str:
    """Conventional decoding's text, not streamed."""
    loaded = decode.load(model)
    run = decode.decode(loaded.model, loaded.encode(PROMPT), decode.Settings(TOKENS, **settings))
    return loaded.text(run.tokens) + "\n"


@pytest.mark.parametrize("name", ["gdn", "mamba2"])
@pytest.mark.parametrize(
    "options", [[], ["--conventional"], ["--draft", "prompt-lookup", "--draft-tokens", "3"]]
)
def test_streamed_text_is_the_text(tiny: Path, prompt: Path, name: str, options: list[str]) -> None:
    result = generate(tiny / name, prompt, "--quiet", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == text_of(tiny / name)
    assert result.stderr == ""


def test_sampling_is_reproducible_with_and_without_replay(tiny: Path, prompt: Path) -> None:
    options = ("--temperature", "0.8", "--seed", "3", "-q")
    expected = text_of(tiny / "gdn", temperature=0.8, seed=3)
    assert generate(tiny / "gdn", prompt, *options).stdout == expected
    assert generate(tiny / "gdn", prompt, "--conventional", *options).stdout == expected
    assert expected != text_of(tiny / "gdn", temperature=0.8, seed=4)


def test_the_prompt_may_come_from_standard_input(tiny: Path) -> None:
    assert generate(tiny / "gdn", "-", "-q", input=PROMPT).stdout == text_of(tiny / "gdn")


def test_the_account_goes_to_standard_error(tiny: Path, prompt: Path) -> None:
    result = generate(tiny / "gdn", prompt, "--draft", "prompt-lookup", "--window", "6", "--max-draft", "4")
    words = ["conventional", "replay + speculation", "prompt lookup, T 4", "drafts accepted per round"]
    assert not [word for word in words if word not in result.stderr]
    assert result.stdout == text_of(tiny / "gdn")
    plain = generate(tiny / "gdn", prompt, "--conventional").stderr
    assert "conventional" in plain
    assert "replay" not in plain


def test_characters_are_written_whole(tiny: Path) -> None:
    written: list[str] = []
    loaded = decode.load(tiny / "gdn")
    stream = decode.TextStream(loaded.text, written.append)
    text = "naïve ☕ 🎈 日本\n"
    tokens = list(text.encode())
    stream.put(torch.tensor([[1, 2, 3]]))
    for token in tokens:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(written) == text
    assert {len(piece) for piece in written} <= {0, 1}


@pytest.mark.parametrize("data", [b"a\xe2\x98", b"\xff\xfea\xc3", b"\x80" * 5, "\ufffd!\ufffd".encode()])
def test_bytes_that_are_no_text_are_written_as_the_tokenizer_does(tiny: Path, data: bytes) -> None:
    written: list[str] = []
    loaded = decode.load(tiny / "gdn")
    stream = decode.TextStream(loaded.text, written.append)
    stream.put(torch.tensor([[1]]))
    for token in data:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(written) == loaded.text(list(data))


def refusals(tiny: Path, folder: Path) -> Iterator[tuple[Any, str]]:
    gdn, good = tiny / "gdn", folder / "prompt.txt"
    yield generate(folder / "none", good), "there is no folder"
    yield generate(folder, good), "holds no config.json"
    yield generate(tiny / "llama", good), "LlamaForCausalLM has no layer that replay decoding can serve"
    yield generate(gdn, folder / "none.txt"), "can't read the prompt file"
    (folder / "empty.txt").touch()
    yield generate(gdn, folder / "empty.txt"), "is empty"
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    yield generate(gdn, folder / "latin.txt"), "is not UTF-8"
    yield generate(gdn, good, "--draft", "prompt-lookup", "--conventional"), "transformers refuses"
    yield generate(gdn, good, "--draft-tokens", "4"), "--draft-tokens needs --draft"
    yield generate(gdn, good, "--window", "4", "--max-draft", "5"), "up to 5 tokens but the window is L=4"
    drafting = ("--draft", "prompt-lookup", "--draft-tokens", "16", "--window", "16")
    yield generate(gdn, good, *drafting), "up to 17 tokens but the window is L=16"
    drafting = ("--draft", "prompt-lookup", "--draft-tokens", "4", "--max-draft", "4")
    yield generate(gdn, good, *drafting), "raise --max-draft"
    yield generate(gdn, good, "--precision", "fp5"), "unknown format 'fp5'"
    yield generate(gdn, good, "--backend", "trition"), "backend"
    yield generate(gdn, good, "--backend", "flashinfer"), "backend 'flashinfer' cannot run on"


def test_refusals_are_one_line(tiny: Path, tmp_path: Path, prompt: Path) -> None:
    for result, words in refusals(tiny, tmp_path):
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert words in line


def test_folders_that_hold_no_usable_model(tiny: Path, tmp_path: Path, prompt: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((tiny / "gdn" / "config.json").read_text("utf-8"), encoding="utf-8")
    assert "holds no tokenizer" in generate(broken, prompt).stderr
    (broken / "tokenizer.json").write_bytes((tiny / "gdn" / "tokenizer.json").read_bytes())
    settings = (tiny / "gdn" / "tokenizer_config.json").read_bytes()
    (broken / "tokenizer_config.json").write_bytes(settings)
    result = generate(broken, prompt)
    assert "can't be loaded by transformers" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    (broken / "model.safetensors").write_bytes(b"nonsense")
    result = generate(broken, prompt)
    assert result.exit_code == 2, result.output
    assert "can't be loaded by transformers" in result.stderr


def test_the_model_is_stock_again_afterwards(tiny: Path) -> None:
    loaded = decode.load(tiny / "gdn")
    ids = loaded.encode(PROMPT)
    with decode.replaying(loaded.model, ReplayConfig()):
        assert decode.speculation_refusal(loaded.model, ids) is None
    assert "stateful" in str(decode.speculation_refusal(loaded.model, ids))


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("replayssm 0.")
