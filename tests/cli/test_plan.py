"""`replayssm plan` and the configs it ships: every model plans, and what cannot be planned is refused."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replayssm.cli.main import app
from replayssm.cli.model_config import load_model_config, model_names, read_model_config
from replayssm.core.config import ConfigError
from replayssm.core.geometry import LayerGeometry, Rule

MIB = 2**20
# Recurrent layers, attention layers, rule, MiB of fp32 state in a layer, KV bytes a token.
MODELS = {
    "GLM-5.3-Flash": (34, 11, Rule.KDA, 4, 11 * (512 + 128) * 2),
    "Kimi-K3": (69, 24, Rule.KDA, 6, 24 * 576 * 2),
    "Kimi-Linear-48B-A3B": (20, 7, Rule.KDA, 2, 7 * 576 * 2),
    "Nemotron-3-Nano-30B-A3B": (23, 6, Rule.MAMBA2, 2, 6 * 1024),
    "Nemotron-3-Nano-4B": (21, 4, Rule.MAMBA2, 3.75, 4 * 4096),
    "Nemotron-3-Super-120B-A12B": (40, 8, Rule.MAMBA2, 4, 8 * 1024),
    "Nemotron-3-Ultra-550B-A55B": (48, 12, Rule.MAMBA2, 8, 12 * 1024),
    "Qwen3-Next-80B-A3B": (36, 12, Rule.GDN, 2, 12 * 2048),
    "Qwen3.5-122B-A10B": (36, 12, Rule.GDN, 4, 12 * 2048),
    "Qwen3.5-4B": (24, 8, Rule.GDN, 2, 8 * 4096),
}
SUPER = "Nemotron-3-Super-120B-A12B"

runner = CliRunner()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WINDOW", "MAX_DRAFT", "PRECISION", "BACKEND", "CONFIG"):
        monkeypatch.delenv(f"REPLAYSSM_{name}", raising=False)


def plan(*options: str) -> dict[str, Any]:
    result = runner.invoke(app, ["plan", "--json", *options])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def refusal(*options: str) -> str:
    result = runner.invoke(app, ["plan", *options], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    return " ".join(result.output.replace("│", " ").split())


def raw(name: str) -> dict[str, Any]:
    text = (resources.files("replayssm.cli") / "model_configs" / f"{name}.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def test_ten_models_ship() -> None:
    assert model_names() == sorted(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_shipped_geometry(name: str) -> None:
    model = load_model_config(name)
    recurrent, attention, rule, state, kv = MODELS[name]
    assert (len(model.recurrent), model.kv.layers, model.kv.bytes_per_token()) == (recurrent, attention, kv)
    for geometry in model.recurrent:
        assert (geometry.rule, geometry.state_elements * 4 / MIB) == (rule, state)


@pytest.mark.parametrize("name", MODELS)
def test_unconfirmed_values_are_fields_of_the_config(name: str) -> None:
    for path in load_model_config(name).unconfirmed:
        value: Any = raw(name)
        for key in path.split("."):
            value = value[key]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "Kimi-K3"])
def test_shipped_configs_agree_with_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config, model = raw(name), load_model_config(name)
    fields = {key: value for key, value in config.get("text_config", config).items() if key[0] != "_"}
    layers = transformers.AutoConfig.for_model(**fields).layer_types
    assert layers.count("linear_attention") == len(model.recurrent)
    assert sum(layer in ("full_attention", "indexed_attention") for layer in layers) == model.kv.layers


@pytest.mark.parametrize("name", MODELS)
def test_every_model_plans_both_ways(name: str) -> None:
    standard, speculative = plan("--model", name), plan("--model", name, "--draft", "4", "--accept", "3")
    assert standard["model"] == name
    assert 1 < standard["predicted_gain"] < 2 < speculative["predicted_gain"]
    assert standard["memory_per_sequence"]["snapshots"] == 0
    for report in (standard, speculative):
        assert report["best_window_ratio"] <= report["traffic_per_step"]["ratio"] + 1e-12
        assert report["predicted_gain"] == pytest.approx(1 / report["traffic_per_step"]["ratio"])


def test_super_reproduces_the_published_ratio_and_window() -> None:
    report = plan("--model", SUPER, "--window", "16")
    assert round(report["per_head_accounting"]["ratio"], 2) == 0.58
    assert report["per_head_accounting"]["best_window"] == 13
    assert round(report["traffic_per_step"]["ratio"], 2) == 0.55


def test_batch_and_bandwidth_scale_the_time() -> None:
    one = plan("--model", SUPER, "--hbm-tbps", "2")["seconds_per_step"]["replay"]
    many = plan("--model", SUPER, "--hbm-tbps", "4", "--batch", "64")["seconds_per_step"]["replay"]
    assert many == pytest.approx(32 * one)


def test_tensor_parallelism_divides_state_and_replicates_scarce_heads() -> None:
    whole, rank = plan("--model", SUPER), plan("--model", SUPER, "--tp", "4")
    assert rank["state_shape"] == [32, 64, 128]
    assert rank["memory_per_sequence"]["state"] * 4 == whole["memory_per_sequence"]["state"]
    assert rank["memory_per_sequence"]["kv_per_token"] * 2 == whole["memory_per_sequence"]["kv_per_token"]


def test_more_sequences_fit_without_snapshots() -> None:
    options = ("--model", SUPER, "--draft", "4", "--context", "1024", "--hbm-gib", "40")
    report = plan(*options)
    memory = report["memory_per_sequence"]
    fitting, budget = report["sequences_that_fit"], 40 * 2**30
    assert fitting["replay"] == budget // (memory["state"] + memory["ring"] + memory["kv"])
    assert fitting["conventional"] == budget // (memory["state"] + memory["snapshots"] + memory["kv"])
    assert fitting["replay"] > 3 * fitting["conventional"]
    assert plan("--model", SUPER)["sequences_that_fit"] is None


def test_slots_that_a_prefix_cache_keeps_have_rings_and_no_snapshots() -> None:
    report = plan("--model", SUPER, "--draft", "4", "--context", "0", "--hbm-gib", "40", "--slots", "5")
    memory = report["memory_per_sequence"]
    fitting, budget = report["sequences_that_fit"], 40 * 2**30
    assert fitting["replay"] == budget // (5 * (memory["state"] + memory["ring"]))
    assert fitting["conventional"] == budget // (5 * memory["state"] + memory["snapshots"])


def test_two_copies() -> None:
    """Both copies are in memory; conventional decoding keeps the one that recurs."""
    full, split = plan("--model", SUPER), plan("--model", SUPER, "--precision", "nvfp4/fp16+sr")
    assert split["workload"]["precision"] == "nvfp4/fp16+sr"
    assert (round(split["bytes_per_value"], 2), full["bytes_per_value"]) == (2.56, 4)
    state = {way: split["memory_per_sequence"][way] for way in ("state", "conventional_state")}
    conv = full["memory_per_sequence"]["state"] - 40 * 4 * MIB
    assert state["conventional_state"] == 40 * 2 * MIB + conv
    assert state["state"] == pytest.approx(40 * 2.563 * MIB + conv, rel=1e-3)
    assert split["traffic_per_step"]["replay"]["total"] < 0.46 * full["traffic_per_step"]["replay"]["total"]
    fitting = plan("--model", SUPER, "--precision", "nvfp4/fp16+sr", "--hbm-gib", "80")["sequences_that_fit"]
    assert fitting["conventional"] > fitting["replay"]
    text = runner.invoke(
        app, ["plan", "--model", SUPER, "--precision", "nvfp4/fp16+sr"], env={"COLUMNS": "200"}
    )
    assert "States in nvfp4/fp16+sr: 2.56 bytes a value, where an fp32 state has 4." in text.output


def test_precision_halves_the_state() -> None:
    full, half = plan("--model", SUPER), plan("--model", SUPER, "--precision", "fp16")
    traffic = (full["traffic_per_step"]["replay"], half["traffic_per_step"]["replay"])
    assert traffic[0]["state_read"] == 2 * traffic[1]["state_read"]


def test_the_environment_sets_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSSM_WINDOW", "8")
    assert plan("--model", SUPER)["workload"]["window"] == 8
    assert plan("--model", SUPER, "--window", "12")["workload"]["window"] == 12


def test_names_in_any_case_and_paths(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw(SUPER)), encoding="utf-8")
    by_path, by_name = plan("--model", str(path)), plan("--model", SUPER.lower())
    assert by_path.pop("model") == str(path)
    assert by_name.pop("model") == SUPER
    assert by_path == by_name


def test_tables_name_every_figure() -> None:
    options = ["--model", SUPER, "--draft", "4", "--hbm-gib", "40"]
    result = runner.invoke(app, ["plan", *options], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    words = ["ring", "snapshots for 4 draft tokens", "KV cache", "sequences that fit in 40 GiB", "state read"]
    words += ["Predicted gain", "Best window L", "Not confirmed in this model's config: num_attention_heads"]
    assert not [word for word in words if word not in result.output]


def test_help_says_where_the_bandwidth_comes_from() -> None:
    result = runner.invoke(app, ["plan", "--help"], env={"COLUMNS": "200"})
    assert "measured on one H200" in " ".join(result.output.replace("│", " ").split())


def test_refused_inputs() -> None:
    text = refusal("--model", SUPER, "--window", "4", "--draft", "5")
    assert "5 tokens but the window is L=4" in text
    text = refusal("--model", "Nemotron-3-Super")
    assert not [name for name in [*MODELS, f"did you mean '{SUPER}'"] if name not in text]
    assert "above 0 and at most the draft T=2" in refusal("--model", SUPER, "--draft", "2", "--accept", "3")
    assert "must divide the 128 value heads, got tp=3" in refusal("--model", SUPER, "--tp", "3")
    assert "unknown format 'fp5'" in refusal("--model", SUPER, "--precision", "fp5")
    assert "drifts away over long outputs" in refusal("--model", SUPER, "--precision", "fp8")


def test_refused_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected a JSON object, got list"):
        load_model_config(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_model_config(path)


def test_refused_models() -> None:
    with pytest.raises(ConfigError, match=r"'llama' is not supported.*nemotron_h.*zamba2"):
        read_model_config({"model_type": "llama"}, "llama")
    with pytest.raises(ConfigError, match=r"'qwen3_nxt' is not supported .did you mean 'qwen3_next'"):
        read_model_config({"model_type": "qwen3_nxt"}, "qwen")
    with pytest.raises(ConfigError, match="no 'ssm_state_size'"):
        read_model_config({k: v for k, v in raw(SUPER).items() if k != "ssm_state_size"}, SUPER)
    with pytest.raises(ConfigError, match="unknown kind of layer 'Q'"):
        read_model_config({**raw(SUPER), "hybrid_override_pattern": "MQ"}, SUPER)
    with pytest.raises(ConfigError, match="no recurrent layer"):
        read_model_config({**raw(SUPER), "hybrid_override_pattern": "*-"}, SUPER)


def test_nemotron_h_spellings_of_its_layers_agree() -> None:
    config = raw(SUPER)
    names = {"M": "linear_attention", "*": "full_attention", "E": "moe"}
    blocks = [names[symbol] for symbol in config.pop("hybrid_override_pattern")]
    assert read_model_config({**config, "layers_block_type": blocks}, SUPER) == load_model_config(SUPER)


def test_kimi_spellings_of_its_layers_agree() -> None:
    config = raw("Kimi-Linear-48B-A3B")
    nested = config.pop("linear_attn_config")
    layers = ["linear_attention"] * 27
    for number in nested["full_attn_layers"]:
        layers[number - 1] = "full_attention"
    flat = {"layer_types": layers, "linear_num_heads": 32, "linear_head_dim": 128}
    flat |= {"linear_conv_kernel_dim": 4}
    assert read_model_config({**config, **flat}, "Kimi-Linear-48B-A3B") == (
        load_model_config("Kimi-Linear-48B-A3B")
    )


@pytest.mark.parametrize(
    ("model_type", "class_name", "geometry", "layers", "kv"),
    [
        ("mamba2", "Mamba2Config", LayerGeometry.mamba2(128, 64, 128, 8), (64, 0), 0),
        ("bamba", "BambaConfig", LayerGeometry.mamba2(128, 64, 256, 1), (32, 0), 0),
        ("falcon_h1", "FalconH1Config", LayerGeometry.mamba2(128, 8, 256, 1), (32, 32), 32 * 4096),
        ("granitemoehybrid", "GraniteMoeHybridConfig", LayerGeometry.mamba2(128, 64, 256, 1), (32, 0), 0),
        ("zamba2", "Zamba2Config", LayerGeometry.mamba2(8, 640, 64, 1), (54, 9), 9 * 32 * 2 * 160 * 2),
    ],
)
def test_other_families_as_transformers_saves_them(
    model_type: str, class_name: str, geometry: LayerGeometry, layers: tuple[int, int], kv: int
) -> None:
    transformers = pytest.importorskip("transformers")
    model = read_model_config(getattr(transformers, class_name)().to_dict(), model_type)
    assert set(model.recurrent) == {geometry}
    assert (len(model.recurrent), model.kv.layers) == layers
    assert model.kv.bytes_per_token() == kv


def test_bamba_attention_by_index() -> None:
    config = {
        "model_type": "bamba",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "attn_layer_indices": [1],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mamba_n_heads": 4,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    }
    model = read_model_config(config, "bamba")
    assert (len(model.recurrent), model.kv.layers) == (3, 1)
    assert model.recurrent[0].value_dim == 32
    assert model.kv.bytes_per_token() == 2 * 2 * 16 * 2
