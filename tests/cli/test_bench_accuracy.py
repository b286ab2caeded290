"""`replayssm bench accuracy`: scores by hand, decoding in steps of several tokens, runs on tiny models."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from replayssm.cli.bench.accuracy import command, tables
from replayssm.cli.bench.accuracy.scores import common_prefix, diverge, repeats
from replayssm.cli.bench.positions import Bucket, buckets
from replayssm.cli.errors import CommandError
from replayssm.cli.main import app
from tests import oracle
from tests.adapters.transformers import zoo
from tests.cli.conftest import TOKENS as TINY

transformers = pytest.importorskip("transformers")

from replayssm.cli import decode  # noqa: E402
from replayssm.cli.bench.accuracy import decoding, layers, scales, skipping, stepping  # noqa: E402
from replayssm.cli.bench.accuracy.decoding import Ring, Sampling  # noqa: E402
from replayssm.cli.bench.accuracy.layers import Reads  # noqa: E402
from replayssm.cli.bench.accuracy.texts import Text  # noqa: E402

TOKENS = zoo.tokens(2, 48)
MIXERS = {"gdn": "OlmoHybridForCausalLM", "mamba2": "Mamba2ForCausalLM", "kda": "KimiLinearForCausalLM"}


def ring(step: int = 1) -> Ring:
    return Ring(8, step, "auto")


def test_buckets_cover_every_position() -> None:
    found = list(buckets(1000))
    assert found == [Bucket(1, 16), Bucket(17, 64), Bucket(65, 256), Bucket(257, 1000)]
    assert torch.arange(1, 1001)[found[1].slice].tolist() == list(range(17, 65))


def test_divergence_by_hand() -> None:
    """One position alike, one with halves for a certainty, one where both rule the same token out."""
    half, inf = math.log(0.5), math.inf
    reference = torch.tensor([[[half, half], [0.0, -inf], [half, half]]])
    found = torch.tensor([[[half, half], [half, half], [math.log(0.25), math.log(0.75)]]])
    divergence = diverge(reference, found, torch.tensor([[0, 1, 1]]))
    expected = [0.0, math.log(2), 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)]
    assert divergence.kl[0].tolist() == pytest.approx(expected, abs=1e-7)
    assert divergence.bits[0].tolist() == pytest.approx([1.0, 1.0, -math.log2(0.75)])
    row = divergence.row(Bucket(2, 3), bytes_per_token=2.0)
    assert row["kl_max"] == pytest.approx(math.log(2))
    assert row["agreement"] == 0.5
    assert row["bits_per_byte"] == pytest.approx((1 - math.log2(0.75)) / 4)


def test_repetition_and_common_beginnings() -> None:
    assert repeats([1, 2, 3, 1, 2, 3, 1, 2], 3) == [False] * 5 + [True] * 3
    assert repeats([1, 1, 1], 3) == [False] * 3
    left, right = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 2, 0], [0, 5, 6]])
    assert common_prefix(left, right).tolist() == [2, 0]


@pytest.mark.parametrize("rule", MIXERS)
def test_steps_of_several_tokens_flush_where_single_ones_do(rule: str) -> None:
    """A copy in int8 beside fp32 is far from fp32, and no further from itself than fp32's own rounding."""
    model = zoo.BY_NAME[MIXERS[rule]].build()
    given = TOKENS[:, :28]
    exact = decoding.forced(model, given, 8, ring(4), "fp32")
    one, four, eight = (decoding.forced(model, given, 8, ring(step), "int8/fp32") for step in (1, 4, 8))
    assert one.shape[:2] == (2, 20)
    off = (one - exact).abs().max()
    assert off > 1e-4
    for several in (four, eight):
        assert (several - one).abs().max() < 0.02 * off
    scan = decoding.scanned(model, given, 8)
    assert (scan - exact).abs().max() < 0.02 * off


def by_the_adapter(model: Any, given: torch.Tensor, prompt: int, ring: Ring, precision: str) -> torch.Tensor:
    """As `decoding.forced`, with the whole model called for each step."""
    with torch.inference_mode(), decode.replaying(model, ring.config(precision)):
        cache = transformers.DynamicCache(config=model.config)
        decoding._forward(model, cache, given[:, :prompt])
        cache.activate_past_recording()
        outputs = []
        for piece in given[:, prompt:].split(ring.step, 1):
            outputs.append(decoding._forward(model, cache, piece))
            cache.crop(0)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("precision", ["int8+sr", "int8/fp16+sr"])
@pytest.mark.parametrize("rule", MIXERS)
def test_layers_take_a_text_as_they_do_step_by_step(
    rule: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same flushes and same random bits: from the adapter only by rounding, which may flip a code of int8."""
    model = zoo.BY_NAME[MIXERS[rule]].build()
    given = TOKENS[:, :37]
    monkeypatch.setattr(decoding, "PIECE", 14)
    monkeypatch.setattr(stepping, "CAPTURED_STEPS", 2)
    exact = decoding.forced(model, given, 8, ring(), "fp32")
    for step in (1, 4):
        found = decoding.forced(model, given, 8, ring(step), precision)
        expected = by_the_adapter(model, given, 8, ring(step), precision)
        assert (found - expected).abs().mean() < 0.02 * (found - exact).abs().mean()


def test_a_text_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece is one token, which the adapter would decode, and steps are not cut."""
    model = zoo.BY_NAME[MIXERS["gdn"]].build()
    whole = decoding.forced(model, TOKENS[:, :27], 17, ring(4), "fp32")
    monkeypatch.setattr(decoding, "PIECE", 8)
    sizes: list[int] = []
    forward = decoding._forward

    def noted(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
        sizes.append(tokens.shape[1])
        return forward(model, cache, tokens)

    monkeypatch.setattr(decoding, "_forward", noted)
    torch.testing.assert_close(decoding.forced(model, TOKENS[:, :27], 17, ring(4), "fp32"), whole)
    assert sizes == [8, 9, 8, 2]


def served(rule: str) -> Any:
    """A model of random numbers with heads that the CUDA kernels serve."""
    from transformers import KimiLinearConfig, NemotronHConfig, Qwen3_5TextConfig

    common = {**TINY, "head_dim": 16}
    types = ["linear_attention", "linear_attention", "full_attention"]
    configs: dict[str, Callable[[], Any]] = {
        "gdn": lambda: Qwen3_5TextConfig(
            **common, num_hidden_layers=3, layer_types=types, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=64,
        ),
        "mamba2": lambda: NemotronHConfig(
            **common, layers_block_type=types, mamba_num_heads=4, mamba_head_dim=64, ssm_state_size=128,
            n_groups=2,
        ),
        "kda": lambda: KimiLinearConfig(
            **{**TINY, "num_key_value_heads": 2}, num_hidden_layers=3, layer_types=types,
            mlp_layer_types=["dense"] * 3, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16,
            v_head_dim=16, linear_num_heads=2, linear_head_dim=128,
        ),
    }  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(configs[rule](), dtype=torch.bfloat16).eval()


def in_graphs_and_without(
    model: Any, step: int, precision: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    given, order = zoo.tokens(2, 72).to(model.device), Ring(16, step, backend)
    found = []
    for steps in (4, 1000):
        monkeypatch.setattr(stepping, "CAPTURED_STEPS", steps)
        found.append(decoding.forced(model, given, 8, order, precision))
    return found


@pytest.mark.parametrize("rule", MIXERS)
def test_parts_of_a_piece(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps taken a few at a time are those of the whole piece."""
    few, all_at_once = in_graphs_and_without(served(rule), 2, "nvfp4/fp16+sr", "torch", monkeypatch)
    assert torch.equal(few, all_at_once)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8/fp16+sr", "nvfp4/fp8+sr", "nvfp4+sr"])
@pytest.mark.parametrize("rule", MIXERS)
def test_captured_steps(rule: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed graphs give the bits of launches one by one, and were replayed."""
    replays = 0
    replay = stepping._Graph.replay

    def counted(graph: Any, call: Any) -> torch.Tensor:
        nonlocal replays
        replays += 1
        return replay(graph, call)

    monkeypatch.setattr(stepping._Graph, "replay", counted)
    model = served(rule).to("cuda")
    captured, launched = in_graphs_and_without(model, 4, precision, "cuda", monkeypatch)
    assert replays == 2 * 3
    assert torch.equal(captured, launched)


def test_what_a_model_writes() -> None:
    """Greedy text is transformers' own; sampled text depends on the seed, and on nothing else."""
    model = zoo.BY_NAME[MIXERS["gdn"]].build()
    greedy = decoding.continued(model, TOKENS[:1], 12, ring(), "fp32", Sampling(0.0, 0))
    expected = decode.decode(model, TOKENS[:1], decode.Settings(12)).tokens
    assert greedy[0].tolist() == expected
    sampled = [
        decoding.continued(model, TOKENS, 12, ring(), "fp32", Sampling(1.0, seed)) for seed in (1, 1, 2)
    ]
    assert torch.equal(sampled[0], sampled[1])
    assert not torch.equal(sampled[0], sampled[2])


def test_sampling_takes_tokens_by_their_probability() -> None:
    probabilities = torch.tensor([[0.2, 0.0, 0.5, 0.3]])
    numbers = torch.tensor([0.0, 0.19, 0.2, 0.69, 0.71, 0.999])
    picked = Sampling(1.0, 0).pick(probabilities.log().expand(6, 4), numbers)
    assert picked[:, 0].tolist() == [0, 0, 2, 2, 3, 3]
    assert Sampling(0.0, 0).pick(probabilities.log(), numbers[:1]).item() == 2


@pytest.mark.parametrize("rule", MIXERS)
def test_reads_of_checkpoints(rule: str) -> None:
    """Checkpoints are the recurrence's states, and what a window's last token reads is in its output."""
    model = zoo.BY_NAME[MIXERS[rule]].build()
    call = layers.captured(model, TOKENS)[0]
    window, given = 8, call.arguments
    found = list(layers.reads(call, window))
    assert len(found) == TOKENS.shape[1] // window - 1
    state = torch.zeros(call.geometry.state_shape, dtype=torch.double)
    for at in range(2 * window):
        if at == window:
            torch.testing.assert_close(found[0].state[0].double(), state, rtol=1e-4, atol=1e-5)
            start = state
        state, out = oracle.TOKEN[rule](state, token(rule, call, at))
    torch.testing.assert_close(found[0].outputs[0, -1].double(), out, rtol=1e-4, atol=1e-5)
    # Without the window's own writes, its last query reads the checkpoint as it has decayed.
    for at in range(window, 2 * window):
        silent = "x" if rule == "mamba2" else "beta"
        quiet = {name: 0 * x if name == silent else x for name, x in token(rule, call, at).items()}
        start, out = oracle.TOKEN[rule](start, quiet)
    read = torch.einsum("hvk,hk->hv", found[0].state[0], found[0].queries[0, -1])
    torch.testing.assert_close(read.double(), out, rtol=1e-4, atol=1e-6)
    assert (found[0].keys is None) == (rule == "mamba2")
    assert found[0].values.shape == given[call.tokenwise[0 if rule == "mamba2" else 2]][:, :window].shape


def token(rule: str, call: Any, at: int) -> dict[str, torch.Tensor]:
    """A token of the first sequence, as the oracle takes it."""
    given = call.arguments
    if rule == "mamba2":
        dt = call.time_step(0, call.tokens)[0, at]
        values = {"x": given["hidden_states"][0, at], "dt": dt, "A": call.rates}
        return values | {"B": given["B"][0, at], "C": given["C"][0, at], "D": given["D"]}
    names = {"q": "query", "k": "key", "v": "value", "g": "g", "beta": "beta"}
    return {name: given[theirs][0, at] for name, theirs in names.items()}


def window(state: torch.Tensor, queries: torch.Tensor, outputs: torch.Tensor, **keys: Any) -> Reads:
    return Reads(state, queries, outputs, keys.get("keys"), keys.get("values", outputs))


def test_skipped_reads_by_hand() -> None:
    """Two heads: one read adds little to its output; the other's is orthogonal, so its norm is no use."""
    state = torch.zeros(1, 2, 2, 4)
    state[0, :, 0, 0] = 1.0
    queries = torch.zeros(1, 1, 2, 4)
    queries[0, 0, 0, 0], queries[0, 0, 1, 1] = 5e-4, 5e-2
    outputs = torch.ones(1, 1, 2, 1)
    shares = skipping.skipped_shares([window(state, queries, outputs)])
    assert [row["tolerance"] for row in shares] == [1e-2, 1e-3, 1e-4]
    assert [row["by_norm"] for row in shares] == [0.5, 0.5, 0.0]
    assert [row["at_best"] for row in shares] == [1.0, 1.0, 0.5]
    keyed = window(state, queries, outputs, keys=1e3 * queries)
    assert skipping.skipped_shares([keyed])[0] == {"tolerance": 1e-2, "by_norm": 0.0, "at_best": 0.5}


def test_scales_along_either_dimension() -> None:
    """A scale for each channel pays where channels differ, one along the other dimension where rows do."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 2, 16, 32, generator=generator)
    spread = torch.exp2(torch.linspace(-12, 0, 32))
    queries = torch.randn(2, 3, 2, 32, generator=generator) / spread
    outputs = torch.ones(2, 3, 2, 16)
    rows = scales.scale_errors([window(states * spread, queries, outputs)])
    errors = {(row["format"], row["scales"]): row["read_error"] for row in rows}
    assert len(rows) == 9
    for name in ("nvfp4", "int8"):  # fp8's elements have exponents of their own
        assert errors[name, scales.CHANNELS] < 0.5 * errors[name, scales.ALONG_K]
        assert errors[name, scales.ALONG_V] < 0.5 * errors[name, scales.ALONG_K]
    transposed = scales.packed(states.mT.contiguous(), "fp8", scales.ALONG_K).mT
    assert torch.equal(scales.packed(states, "fp8", scales.ALONG_V), transposed)


def run(tiny: Path, *arguments: str) -> list[str]:
    said: list[str] = []
    command.main(["--models", str(tiny), *arguments], said.append)
    return said


SMALL = [
    "--precisions", "fp32,nvfp4+force", "--tokens", "32", "--prompt", "8", "--long-prompt", "40",
    "--answer", "4", "--generate", "8", "--read", "32", "--step", "4", "--device", "cpu",
]  # fmt: skip


def test_a_whole_run(hybrids: Path, tmp_path: Path) -> None:
    """fp32 against itself is zero everywhere, other precisions are not; the record has every study."""
    file = tmp_path / "accuracy-cpu-2026-01-02.json"
    said = run(hybrids, *SMALL, "--json", str(file))
    record = json.loads(file.read_text())
    assert record["topic"] == "accuracy"
    assert record["command"].startswith("replayssm bench accuracy --models hybrids0 --precisions fp32,")
    assert {"torch", "transformers", "python"} <= record["versions"].keys()
    rows = record["rows"]
    assert {row["study"] for row in rows} == set(command.STUDIES) - {"trained"}
    assert {row["rule"] for row in rows} == {"gdn", "mamba2"}
    diverging = [row for row in rows if row["study"] in ("teacher-forced", "long-prompt")]
    for row in diverging:
        if row["precision"] == "fp32":
            assert (row["kl_mean"], row["kl_max"], row["agreement"]) == (0.0, 0.0, 1.0)
        elif row["precision"] == "transformers' scan":
            assert 0 <= row["kl_mean"] < 1e-12
        else:
            assert row["kl_mean"] > (1e-12 if row["model"] == "gdn" else 0)
    [written] = [
        row
        for row in rows
        if row["study"] == "generated" and (row["model"], row["precision"]) == ("gdn", "fp32")
    ]
    assert written["same_tokens"] == 8.0
    assert written["bits_per_byte"] > 0
    titles = ["gdn, teacher-forced", "mamba2, generated", "long-prompt", "skipped-reads", "read-scales"]
    assert set(titles) <= set(said)
    assert next(iter(tables.every(rows))) == "gdn, teacher-forced"


def test_how_a_model_came_about(hybrids: Path, tmp_path: Path) -> None:
    """From the record of its training, with a digest of the weights that were decoded."""
    folder = tmp_path / "gdn"
    shutil.copytree(hybrids / "gdn", folder)
    training = {
        "data": {"sha256": "c0ffee", "training_bytes": 1000},
        "settings": {
            "seed": 3, "batch": 2, "length": 64, "peak_rate": 0.002, "autocast": True, "schedule": "cosine",
        },
        "training": {"steps": 7, "bytes_seen": 896, "seconds": 1.5, "loss_curve": [{"bits_per_byte": 2.5}]},
        "held_out": {"fp32": 2.25, "bf16_rounded": 2.26},
        "machine": {"device": "CPU"},
    }  # fmt: skip
    (folder / "training.json").write_text(json.dumps(training), encoding="utf-8")
    file = tmp_path / "trained.json"
    run(folder, "--studies", "trained", "--device", "cpu", "--json", str(file))
    [row] = json.loads(file.read_text())["rows"]
    assert (row["model"], row["corpus"], row["steps"], row["loss"]) == ("gdn", "c0ffee", 7, 2.5)
    assert row["weights"] == sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_models_in_bf16(hybrids: Path, tmp_path: Path) -> None:
    """States are in fp32 where a precision says so, as in the reference, and differ where it does not."""
    file = tmp_path / "bf16.json"
    run(hybrids, *SMALL, "--studies", "teacher-forced", "--dtype", "bf16", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert {row["dtype"] for row in rows} == {"bf16"}
    largest = {
        precision: max(row["kl_max"] for row in rows if row["precision"] == precision)
        for precision in ("fp32", "nvfp4+force")
    }
    assert largest["fp32"] == 0.0
    assert largest["nvfp4+force"] > 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--studies", "speed"], "unknown study 'speed'"),
        (["--precisions", "fp9"], "precision 'fp9': unknown format"),
        (["--precisions", "nvfp4"], "drifts away over long outputs"),
        (["--step", "3"], "a divisor of the window 16"),
        (["--answer", "1"], "--answer: expected at least 2, got 1"),
        (["--read", "16"], "at least two windows, 32"),
        (["--temperature", "-1"], "expected 0 or more"),
        (["--json", "nowhere/x.json"], "no folder nowhere"),
        (["--text", "nowhere.txt"], "nowhere.txt can't be read as UTF-8"),
        (["--tokens", "200000"], "give a longer one with --text"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, hybrids: Path) -> None:
    with pytest.raises(CommandError, match=message):
        run(hybrids, "--device", "cpu", *arguments)


def test_the_command_reaches_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "accuracy", "--models", str(tmp_path)])
    assert result.exit_code == 2
    assert "no model in" in result.output


def test_pieces_of_a_text() -> None:
    text = Text(torch.arange(10), 1.0)
    assert text.sequences(3, 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
