"""The trained models under `examples/models/` load with stock classes and write text."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDERS = {"mamba2": "mamba2-nemotron-h", "gdn": "gdn-qwen3-5", "kda": "kda-kimi-linear"}
MODEL_TYPES = {"mamba2": "nemotron_h", "gdn": "qwen3_5_text", "kda": "kimi_linear"}
RECURRENT = {
    "mamba2": "NemotronHMamba2Mixer",
    "gdn": "Qwen3_5GatedDeltaNet",
    "kda": "KimiLinearDeltaAttention",
}
LARGEST = 4_000_000
BITS_BOUND = 2.6

rules = pytest.mark.parametrize("rule", list(FOLDERS))


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_train", EXAMPLES / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass of the module looks its module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script()


def folder(rule: str) -> Path:
    return EXAMPLES / "models" / FOLDERS[rule]


def record(rule: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder(rule) / "training.json").read_text("utf-8"))
    return loaded


def library_text() -> bytes:
    """The start of two of this Python's own files, which no model was trained on."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ["textwrap.py", "heapq.py"]
    return b"".join((library / name).read_bytes()[:2048] for name in names)


def model_bits(model: Any, text: bytes, window: int = 1024) -> float:
    rows = torch.tensor(list(text)).unfold(0, window, window)
    with torch.inference_mode():
        logits = model(input_ids=rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
    return loss.item() / math.log(2)


def unigram_bits(text: bytes) -> float:
    """Bits per byte under the text's own byte frequencies: no unigram model does better."""
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares)


@rules
def test_the_folder_is_small(rule: str) -> None:
    assert sum(path.stat().st_size for path in folder(rule).iterdir()) <= LARGEST


@rules
def test_stock_classes_load_a_hybrid(rule: str) -> None:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder(rule), output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == torch.bfloat16
    assert model.config.model_type == MODEL_TYPES[rule]
    assert model.config.vocab_size == 256
    assert model.config.eos_token_id is None
    assert model.generation_config.eos_token_id is None
    kinds = Counter(type(module).__name__ for module in model.modules())
    attention = [name for name in kinds if re.fullmatch(r"(NemotronH|Qwen3_5|KimiLinear)Attention", name)]
    assert kinds[RECURRENT[rule]] > kinds[attention[0]] >= 1
    assert not [name for name in kinds if "MoE" in name]


@rules
def test_the_shapes_are_not_all_alike(rule: str) -> None:
    config = transformers.AutoConfig.from_pretrained(folder(rule))
    if rule == "mamba2":
        assert config.n_groups == 2
        assert config.mamba_head_dim != config.ssm_state_size
    elif rule == "gdn":
        assert config.linear_num_value_heads > config.linear_num_key_heads > 1
    else:
        assert config.linear_num_heads > 1
        assert set(config.mlp_layer_types) == {"dense"}


@rules
@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn x\n", "naïve café — ☃ 漢字 \U0001f40d", " a  b\r\n\0", ""]
)
def test_the_tokenizer_maps_text_to_its_bytes(rule: str, text: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder(rule))
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@rules
def test_the_tokenizer_decodes_any_bytes(rule: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder(rule))
    assert len(tokenizer) == 256
    for byte in range(256):
        assert tokenizer.decode([byte]) == bytes([byte]).decode(errors="replace")
    torn = "é☃".encode()[1:-1]
    assert tokenizer.decode(list(torn)) == torn.decode(errors="replace")


@rules
def test_held_out_text_is_predicted(rule: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(rule), dtype=torch.float32)
    text = library_text()
    bits = model_bits(model.eval(), text)
    assert bits < BITS_BOUND
    assert bits < unigram_bits(text)


@rules
def test_the_record_is_complete(rule: str) -> None:
    kept = record(rule)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(rule))
    assert kept["rule"] == rule
    assert kept["parameters"] == model.num_parameters()
    data = kept["data"]
    assert re.fullmatch(r"[0-9a-f]{64}", data["sha256"])
    assert data["files"] == data["training_files"] + data["held_out_files"]
    assert data["bytes"] == data["training_bytes"] + data["held_out_bytes"]
    assert data["split"]
    assert re.fullmatch(r"3\.\d+\.\d+", data["python"])
    training, settings = kept["training"], kept["settings"]
    assert training["bytes_seen"] == training["steps"] * settings["batch"] * settings["length"]
    curve = training["loss_curve"]
    assert 10 < len(curve) <= 200
    assert curve[-1]["step"] == training["steps"]
    assert curve[-1]["bits_per_byte"] < curve[0]["bits_per_byte"]
    held = kept["held_out"]
    assert held["bf16_rounded"] == pytest.approx(held["fp32"], abs=0.01)
    assert held["fp32"] < BITS_BOUND
    assert set(kept["sample"]) == {"file", "prompt", "greedy", "temperature_0.7"}
    assert len(kept["sample"]["greedy"]) > 100
    assert set(kept["machine"]) == {"device", "torch", "transformers"}


def test_one_corpus_for_all_models() -> None:
    assert len({json.dumps(record(rule)["data"], sort_keys=True) for rule in FOLDERS}) == 1


def test_the_readme_holds_the_table(script: ModuleType) -> None:
    assert script.table() in (EXAMPLES / "README.md").read_text("utf-8")


def test_the_script_knows_the_folders(script: ModuleType) -> None:
    assert {rule: made.folder for rule, made in script.RULES.items()} == FOLDERS


@rules
def test_the_script_makes_the_kept_configuration(rule: str, script: ModuleType) -> None:
    made = script.RULES[rule].config().to_dict()
    kept = transformers.AutoConfig.from_pretrained(folder(rule)).to_dict()
    written = {"architectures", "dtype", "transformers_version", "_name_or_path"}
    for key in made.keys() - written:
        assert kept[key] == made[key], key


def test_the_library_is_read_as_text(script: ModuleType, tmp_path: Path) -> None:
    files = {
        "a.py": b"import os\n" * 9,
        "site-packages/b.py": b"import os\n",
        "encodings/c.py": b"import os\n",
        "_sysconfigdata__linux.py": b"import os\n",
        "d.txt": b"\xff\xfe not text",
        "e.txt": b"0.1 0.2 0.3 0.4\n" * 9,
        "f.bin": b"import os\n",
        "pydoc_data/topics.py": b"# made\ntopics = {'with': 'The with statement.\\n'}\n",
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    corpus = script.read_library(tmp_path)
    assert corpus.texts == {
        "a.py": files["a.py"],
        "pydoc_data/topics.py:with": b"The with statement.\n",
    }
    script.pack(corpus, tmp_path / "corpus.zip")
    again = script.unpack(tmp_path / "corpus.zip")
    assert again == corpus
    assert again.digest() == corpus.digest()


def test_the_split_holds_whole_files_out(script: ModuleType) -> None:
    names = [f"folder/file{number}.py" for number in range(2000)] + ["heapq.py", "textwrap.py"]
    training, held = script.Corpus("3.11.7", {name: b"x" for name in names}).split()
    assert {"heapq.py", "textwrap.py"} <= held.keys()
    assert training.keys() | held.keys() == set(names)
    assert not training.keys() & held.keys()
    assert 0.03 < len(held) / len(names) < 0.07


@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_quick_scans_are_the_stock_rules(rule: str, script: ModuleType) -> None:
    """Outputs and gradients; GDN's query and key heads serve two value heads each."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    scan = chunk_kimi_delta_attention if rule == "kda" else torch_chunk_gated_delta_rule
    generator = torch.Generator().manual_seed(0)
    heads, wide = (2, 128, 2 if rule == "kda" else 1, 16), (2, 128, 2, 16)
    shapes = [heads, heads, wide, wide if rule == "kda" else wide[:3], wide[:3]]
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]

    def outcome(rule: Any, **options: Any) -> list[torch.Tensor]:
        query, key, value, gate, beta = inputs
        decay = -torch.nn.functional.softplus(gate)
        output, _ = rule(query, key, value, g=decay, beta=beta.sigmoid(), **options)
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        return [output, *torch.autograd.grad((output * weights).sum(), inputs)]

    stock = outcome(scan, use_qk_l2norm_in_kernel=True)
    for ours, theirs in zip(outcome(script.chunked_delta), stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def token_by_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
) -> torch.Tensor:
    """Linear attention `[B, T, H, ...]` in fp64 from an empty state, with `beta` by the delta rule."""
    query, key, value, decay = (x.double() for x in (query, key, value, decay))
    assert decay.shape == key.shape
    state = value.new_zeros(*key.shape[:1], *key.shape[2:], value.shape[-1])
    outputs = []
    for t in range(key.shape[1]):
        state = state * decay[:, t, :, :, None].exp()
        new = value[:, t]
        if beta is not None:
            new = (new - torch.einsum("bhk,bhkv->bhv", key[:, t], state)) * beta[:, t, :, None]
        state = state + key[:, t, :, :, None] * new[..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state))
    return torch.stack(outputs, dim=1)


def install_as_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the signatures of flash-linear-attention's, computed token by token."""

    def delta(q: Any, k: Any, v: Any, *, g: Any, beta: Any, use_qk_l2norm_in_kernel: bool) -> Any:
        assert use_qk_l2norm_in_kernel
        assert g.dtype == beta.dtype == torch.float32
        assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
        q, k = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (q, k))
        return token_by_token(q * q.shape[-1] ** -0.5, k, v, g, beta).bfloat16(), None

    def gla(q: Any, k: Any, v: Any, *, g: Any, scale: float) -> Any:
        assert g.dtype == torch.float32
        assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
        return token_by_token(q * scale, k, v, g, None).bfloat16(), None

    names = {"kda": {"chunk_kda": delta}, "gla": {"chunk_gla": gla}}
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, functions in names.items():
        module = ModuleType(f"fla.ops.{name}")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@rules
def test_scans_by_fla_are_the_stock_rules(
    rule: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's logits, with the operands of its recurrences rounded to bf16."""
    script.import_formats()
    torch.manual_seed(0)
    model = script.build(rule).eval()
    tokens = torch.randint(256, (2, 128), generator=torch.Generator().manual_seed(1))
    masks = {"full_attention": None, "linear_attention": None}

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, attention_mask=masks, use_cache=False).logits

    stock = logits()
    install_as_fla(monkeypatch)
    with script.quick_scans(fla=True):
        error = (logits() - stock).norm() / stock.norm()
    assert 0 < error < 2**-7  # a few operands' roundings of up to 2^-9


@pytest.mark.parametrize(("call", "bound"), [("", True), ("train.import_formats()", False)])
def test_the_formats_do_not_bind_fla(call: str, bound: bool, script: ModuleType) -> None:
    """In an interpreter of its own: here the formats have been imported before."""
    code = f"""
import sys, types
sys.path.insert(0, sys.argv[1])
fla = sys.modules["fla"] = types.ModuleType("fla")
fla.chunk_gated_delta_rule = lambda *args, **options: sys.exit(9)
import torch, train
{call}
assert sys.modules["fla"] is fla
train.build("gdn").eval()(torch.arange(64)[None], use_cache=False)
"""
    folder = Path(str(script.__file__)).parent
    ended = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, check=False)
    assert ended.returncode == (9 if bound else 0), ended.stderr


def test_scans_by_fla_need_it(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--rule", "gdn", "--scans", "fla"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        script.main()
    assert "--scans fla needs the package flash-linear-attention" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--device", "cpu"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(SystemExit):
        script.main()
    assert "--scans fla needs a GPU" in capsys.readouterr().err


def write_library(folder: Path) -> Path:
    """A folder of text, some of which is held out."""
    folder.mkdir()
    for number in range(40):
        (folder / f"module{number}.py").write_text(f"def function_{number}(value):\n    return value\n" * 20)
    for name in ("textwrap.py", "heapq.py"):
        (folder / name).write_text("def _split(text):\n    return text.split()\n" * 40)
    return folder


def tiny(script: ModuleType, rule: str) -> Any:
    """The large configuration's shape with few numbers in it."""
    config = script.RULES[rule].large()
    small: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 16,
    }  # fmt: skip
    if rule == "mamba2":
        kinds = ["linear_attention", "full_attention", "mlp"]
        small |= {"layers_block_type": kinds, "mamba_num_heads": 4, "mamba_head_dim": 16}
        small |= {"ssm_state_size": 16}
    else:
        small |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    if rule == "gdn":
        small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        small |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    if rule == "kda":
        small |= {"mlp_layer_types": ["dense"] * 2, "linear_num_heads": 2, "linear_head_dim": 16}
    kept = {key: value for key, value in config.to_dict().items() if key not in {"num_hidden_layers", *small}}
    return type(config)(**kept, **small)


@rules
def test_a_few_steps_of_training(
    rule: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger models are trained by steps and in bf16: on any machine, the same ones from the same seed."""
    config = tiny(script, rule)
    replaced = script.replace(script.RULES[rule], large=lambda: config)
    monkeypatch.setitem(script.RULES, rule, replaced)
    library = write_library(tmp_path / "library")
    losses = []
    for name in ("first", "second") if rule == "gdn" else ("first",):
        given = ["--rule", rule, "--size", "large", "--steps", "3", "--autocast", "--device", "cpu"]
        given += ["--stdlib", str(library), "--batch", "2", "--length", "64", "--out", str(tmp_path / name)]
        monkeypatch.setattr(script, "SAMPLE_BYTES", 2)
        script.run(script.parser().parse_args(given), script.time.monotonic())
        kept = json.loads((tmp_path / name / "training.json").read_text("utf-8"))
        losses.append([point["bits_per_byte"] for point in kept["training"]["loss_curve"]])
    assert kept["training"]["steps"] == 3
    assert kept["settings"]["schedule"] == "cosine over steps"
    assert losses[0] == losses[-1]
    assert losses[0][-1] < losses[0][0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert model.num_parameters() == kept["parameters"]


@rules
def test_scans_stay_in_fp32(rule: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast rounds a model's products, not its recurrences'."""
    config = tiny(script, rule)
    model = transformers.AutoModelForCausalLM.from_config(config)
    module = sys.modules[type(model).__module__]
    [name] = set(script.SCANS) & vars(module).keys()
    seen: set[tuple[torch.dtype, bool]] = set()
    original = getattr(module, name)

    def noted(*given: Any, **named: Any) -> Any:
        tensors = [x for x in (*given, *named.values()) if isinstance(x, torch.Tensor)]
        seen.update((x.dtype, torch.is_autocast_enabled("cpu")) for x in tensors)
        return original(*given, **named)

    monkeypatch.setattr(module, name, noted)
    with script.full_precision_scans(model), torch.autocast("cpu", torch.bfloat16):
        model(torch.arange(64)[None])
    assert seen == {(torch.float32, False)}


@rules
def test_the_large_models_have_20_to_60_million_parameters(rule: str, script: ModuleType) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(script.RULES[rule].large())
    assert 20e6 < model.num_parameters() < 60e6


def test_further_folders_of_text(script: ModuleType, tmp_path: Path) -> None:
    """Each text once, packed and unpacked with where it is from; what is held out can be had by itself."""
    library, more = write_library(tmp_path / "library"), tmp_path / "more"
    more.mkdir()
    (more / "again.py").write_bytes((library / "module0.py").read_bytes())
    (more / "guide.md").write_text("How to read a guide.\n" * 20)
    corpus = script.with_folders(script.read_library(library), [more])
    assert set(corpus.texts) - set(script.read_library(library).texts) == {"more/guide.md"}
    script.pack(corpus, tmp_path / "corpus.zip")
    assert script.unpack(tmp_path / "corpus.zip") == corpus
    assert script.data_record(corpus)["text"].endswith("library, texts in more")
