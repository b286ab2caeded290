"""ReplayConfig: precedence of its sources, and one clear error for whatever cannot be used."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from replayssm.core.config import ConfigError, ReplayConfig, plain_format
from replayssm.core.formats import PACKED
from replayssm.core.precision import Precision, Rounding
from replayssm.kernels import registry

FP16 = Precision("fp16", "fp16")
SPLIT = Precision("nvfp4", "fp16", Rounding.STOCHASTIC)


def load(path: Path | None = None, env: dict[str, str] | None = None, **overrides: Any) -> ReplayConfig:
    return ReplayConfig.load(path, env=env or {}, **overrides)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "replay.yaml"
    path.write_text("window: 32\nmax_draft: 6\nbackend: torch\n", encoding="utf-8")
    return path


def test_defaults() -> None:
    config = load()
    assert (config.window, config.max_draft, config.backend) == (16, None, "auto")
    assert config.precision == Precision("fp32", "fp32")


@pytest.mark.parametrize(("window", "limit"), [(16, 8), (8, 8), (4, 4), (1, 1)])
def test_the_default_draft_limit_follows_the_window(window: int, limit: int) -> None:
    assert load(window=window).resolved_max_draft == limit


def test_an_explicit_draft_limit_stands() -> None:
    assert load(max_draft=12).resolved_max_draft == 12


def test_keywords_over_environment_over_file_over_defaults(file: Path) -> None:
    env = {"REPLAYSSM_CONFIG": str(file), "REPLAYSSM_MAX_DRAFT": "5", "REPLAYSSM_BACKEND": "triton"}
    config = load(env=env, backend="flashinfer")
    assert (config.window, config.max_draft, config.backend) == (32, 5, "flashinfer")


def test_a_path_given_by_keyword_wins_over_the_environment(file: Path) -> None:
    assert load(file, env={"REPLAYSSM_CONFIG": "absent.yaml"}).window == 32


def test_none_and_empty_count_as_not_given(file: Path) -> None:
    assert load(file, env={"REPLAYSSM_WINDOW": ""}, window=None).window == 32


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.touch()
    assert load(path) == load()


@pytest.mark.parametrize("value", ["fp16", "torch.float16", FP16, {"read": "fp16", "recurrence": "fp16"}])
def test_spellings_of_a_precision(value: object) -> None:
    assert load(precision=value).precision == FP16


def test_a_precision_from_environment_and_file(tmp_path: Path) -> None:
    path = tmp_path / "replay.yaml"
    path.write_text("precision: {read: fp16, recurrence: fp16, rounding: nearest}\n", encoding="utf-8")
    assert load(path).precision == FP16
    assert load(path, env={"REPLAYSSM_PRECISION": "bf16"}).precision == Precision("bf16", "bf16")


@pytest.mark.parametrize(
    "value",
    [
        "nvfp4/fp16+sr",
        {"read": "nvfp4", "recurrence": "fp16+sr"},
        {"read": "nvfp4", "recurrence": "fp16", "rounding": "stochastic"},
    ],
)
def test_spellings_of_a_split_precision(value: object, tmp_path: Path) -> None:
    assert load(precision=value).precision == SPLIT
    path = tmp_path / "replay.yaml"
    path.write_text(yaml.safe_dump({"precision": value}), encoding="utf-8")
    assert load(path).precision == SPLIT


def test_a_split_precision_from_the_environment() -> None:
    assert load(env={"REPLAYSSM_PRECISION": "nvfp4/fp16+sr"}).precision == SPLIT
    assert load(env={"REPLAYSSM_PRECISION": "fp8+sr"}).precision == Precision("fp8", "fp8", "stochastic")


@pytest.mark.parametrize("text", ["fp32", "fp16+sr", "nvfp4/fp32", "nvfp4/fp16+sr", "fp8+sr", "int8+force"])
def test_the_short_form_is_read_as_it_is_written(text: str) -> None:
    assert str(Precision.parse(text)) == text


def test_a_precision_with_a_read_copy_alone_recurs_in_fp32() -> None:
    assert load(precision={"read": "nvfp4"}).precision == Precision.parse("nvfp4/fp32")


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("copies", ["{}", "nvfp4/{}"])
def test_round_to_nearest_again_and_again_is_refused(name: str, copies: str) -> None:
    """L25: of a packed state that is read, updated and stored; forced it is had all the same."""
    text = copies.format(name)
    if text in ("nvfp4/nvfp4", "nvfp4/mxfp4"):
        return
    with pytest.raises(ConfigError, match=rf"an {name} state .* drifts away .*'{name}\+sr'.*'{name}\+force'"):
        load(precision=text)
    assert load(precision=f"{text}+force").precision.rounding is Rounding.NEAREST
    assert load(precision=f"{text}+sr").precision.rounding is Rounding.STOCHASTIC


@pytest.mark.parametrize("text", ["nvfp4/fp16+sr", "fp8+sr", "fp16+sr", "bf16/fp32"])
def test_what_an_engine_with_one_plain_copy_refuses(text: str) -> None:
    message = (
        f"precision '{re.escape(text)}': under TensorRT-LLM .*one copy in fp32, bf16, fp16, "
        "rounded to nearest"
    )
    with pytest.raises(ConfigError, match=message):
        plain_format(Precision.parse(text), "TensorRT-LLM")
    assert plain_format(FP16, "TensorRT-LLM") == "fp16"


def test_every_backend_can_be_named() -> None:
    assert {name: load(backend=name).backend for name in registry.NAMES} == {n: n for n in registry.NAMES}


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().window = 8


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"windw": 8}, ["'windw'", "did you mean 'window'", "max_draft"]),
        ({"window": 4, "max_draft": 5}, ["5", "L=4", "raise the window"]),
        ({"window": 0}, ["at least 1", "got 0"]),
        ({"window": True}, ["window", "whole number", "True"]),
        ({"window": "wide"}, ["window", "integer", "'wide'"]),
        ({"precision": "fp31"}, ["precision", "'fp31'", "fp32, bf16, fp16"]),
        ({"precision": 16}, ["precision", "a format such as 'fp32'", "'nvfp4/fp16+sr'", "16"]),
        ({"precision": {"reed": "fp16"}}, ["precision", "'reed'", "did you mean 'read'"]),
        ({"precision": {"rounding": "upwards"}}, ["precision", "'upwards'"]),
        ({"precision": "fp32+sr"}, ["precision", "fp16, fp8, int8, nvfp4, mxfp4, got fp32"]),
        ({"precision": "fp16+rs"}, ["precision", "'+rs'", "+sr (stochastic", "+force", "'fp16+rs'"]),
        ({"precision": "/fp9"}, ["precision", "'fp9'", "nvfp4"]),
        ({"precision": {"recurrence": "fp16"}}, ["precision", "read format fp32", "both the same format"]),
        ({"precision": "int8/fp8+sr"}, ["precision", "read format int8 takes no fewer bits", "fp8"]),
        (
            {"precision": {"recurrence": "fp16+sr", "rounding": "stochastic"}},
            ["precision", "rounding and the marks of 'fp16+sr' say the same"],
        ),
        ({"precision": {"read": "fp16", "force": "yes"}}, ["precision", "force", "true or false", "'yes'"]),
        ({"backend": "tpu"}, ["backend", "'auto', 'torch', 'triton', 'cuda' or 'flashinfer'", "'tpu'"]),
    ],
)
def test_refused_values(overrides: dict[str, Any], words: list[str]) -> None:
    for build in (load, ReplayConfig):
        with pytest.raises(ConfigError) as caught:
            build(**overrides)
        assert not [word for word in words if word not in str(caught.value)]


def test_an_error_names_where_the_value_came_from(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 'wide' \(window from REPLAYSSM_WINDOW\)"):
        load(env={"REPLAYSSM_WINDOW": "wide", "REPLAYSSM_BACKEND": "torch"})
    with pytest.raises(ConfigError, match=r"max_draft from .*replay\.yaml"):
        load(file, window=4)


class _Wider(ReplayConfig):
    more: int = 0


def test_settings_of_one_entry_point_are_unknown_to_the_others(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("more: 1\n")
    assert _Wider(more=3).more == 3
    assert _Wider.load(file, env={}).more == 1
    assert _Wider.load(file, env={"REPLAYSSM_MORE": "2"}).more == 2
    assert _Wider.load(file, env={"REPLAYSSM_MORE": "2"}, more=3).more == 3
    for given in ({"path": file, "env": {}}, {"env": {"REPLAYSSM_MORE": "2"}}, {"env": {}, "more": 3}):
        with pytest.raises(ConfigError, match=r"(?i)unknown .*more"):
            ReplayConfig.load(**given)


def test_unknown_variables_with_our_prefix_are_refused_others_ignored() -> None:
    assert load(env={"REPLAY_WINDOW": "4"}).window == 16
    with pytest.raises(ConfigError, match=r"REPLAYSSM_WINDOWS .did you mean 'REPLAYSSM_WINDOW'"):
        load(env={"REPLAYSSM_WINDOWS": "4"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("- window\n", ["expected a mapping", "got a list"]),
        ("window\n", ["expected a mapping", "got a str"]),
        ("window: [\n", ["not valid YAML"]),
        ("windows: 8\n", ["'windows'", "did you mean 'window'"]),
    ],
)
def test_refused_files(tmp_path: Path, content: str, words: list[str]) -> None:
    path = tmp_path / "replay.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert not [word for word in [*words, str(path)] if word not in str(caught.value)]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.yaml"):
        load(env={"REPLAYSSM_CONFIG": str(tmp_path / "absent.yaml")})


def test_skip_tolerance() -> None:
    assert ReplayConfig().skip_tolerance == 0
    assert ReplayConfig.load(env={"REPLAYSSM_SKIP_TOLERANCE": "1e-3"}).skip_tolerance == 1e-3


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan"), True, "much"])
def test_refused_skip_tolerances(value: object) -> None:
    with pytest.raises(ConfigError, match=r"skip_tolerance: .*number"):
        ReplayConfig(skip_tolerance=value)
