"""Train the small byte-level hybrid models under `examples/models/`, or larger ones like them.

One model per recurrence rule, each in a stock Transformers format: Mamba-2 as `nemotron_h`, the
gated delta rule (GDN) as `qwen3_5_text`, and Kimi delta attention (KDA) as `kimi_linear`. A token
is a byte, so a model's vocabulary is the 256 byte values and its loss is in bits per byte.

The text is what every Python installation carries: its library's sources and documentation, and where they
are named other folders of text, such as that of the installed packages.

    python examples/train.py --rule gdn --seconds 600 --out examples/models/gdn-qwen3-5
    python examples/train.py --rule gdn --size large --steps 20000 --autocast --out gdn-large
    python examples/train.py --pack corpus.zip      # the text alone, to train elsewhere with --corpus
    python examples/train.py --held-out held.txt    # what is not trained on, to be decoded
    python examples/train.py --table                # the table in examples/README.md
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import importlib.util
import json
import math
import platform
import re
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    KimiLinearConfig,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)

MODELS = Path(__file__).resolve().parent / "models"
VOCABULARY = 256
PROMPT_FILE = "textwrap.py"
PROMPT_END = b"def _split("
PROMPT_BYTES = 500
SAMPLE_BYTES = 400
CURVE_POINTS = 160

# Text that is not prose or code, or that names the machine it was built on.
SKIPPED_FOLDERS = re.compile(
    r"(^|/)(site-packages|dist-packages|__pycache__|encodings|cjkencodings|config-[^/]*)/"
)
SKIPPED_FILES = re.compile(r"(^|/)_sysconfigdata[^/]*$")
TEXT_SHARE = 0.65  # at least this share of a file is ASCII letters, underscores and white space
TOPICS = "pydoc_data/topics.py"
SUFFIXES = (".py", ".txt")
MORE_SUFFIXES = (*SUFFIXES, ".md", ".rst")
"""Of files in other folders than the library's."""

# Files that are never trained on, besides the twentieth or so that the hash of its name picks.
HELD_OUT_FILES = ("heapq.py", "textwrap.py")
HELD_OUT_BELOW = 13  # of 256
SPLIT_RULE = (
    f"whole files: held out when the first byte of sha256(relative path) is below {HELD_OUT_BELOW}"
    f" of 256, and always {' and '.join(HELD_OUT_FILES)}"
)


# ---- the text


@dataclass(frozen=True)
class Corpus:
    """Texts by their path within the standard library or a further folder, and where they are from."""

    python: str
    texts: dict[str, bytes]
    folders: tuple[str, ...] = ()

    def digest(self) -> str:
        total = hashlib.sha256()
        for name, text in sorted(self.texts.items()):
            total.update(f"{name}\0{len(text)}\0".encode())
            total.update(text)
        return total.hexdigest()

    def split(self) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """The texts to train on and the held-out texts."""
        held = {name: text for name, text in self.texts.items() if is_held_out(name)}
        return {name: text for name, text in self.texts.items() if name not in held}, held


def is_held_out(name: str) -> bool:
    first = hashlib.sha256(name.encode()).digest()[0]
    return name in HELD_OUT_FILES or first < HELD_OUT_BELOW


def is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return len(re.findall(rb"[A-Za-z_\s]", data)) >= TEXT_SHARE * max(len(data), 1)


def help_topics(source: bytes) -> dict[str, bytes]:
    """The language reference's topics, which `pydoc_data/topics.py` holds as string literals."""
    assignments = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    topics: dict[str, str] = ast.literal_eval(assignments[-1].value)
    return {f"{TOPICS}:{name}": text.encode() for name, text in topics.items()}


def read_library(folder: Path, suffixes: tuple[str, ...] = SUFFIXES) -> Corpus:
    texts: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        skipped = SKIPPED_FOLDERS.search(name) or SKIPPED_FILES.search(name)
        if skipped or path.suffix not in suffixes or not path.is_file():
            continue
        data = path.read_bytes()
        if name == TOPICS:
            texts |= help_topics(data)
        elif data and is_text(data):
            texts[name] = data
    return Corpus(platform.python_version(), texts)


def with_folders(corpus: Corpus, folders: list[Path]) -> Corpus:
    """The corpus and the texts of further folders, each text once."""
    texts = dict(corpus.texts)
    known = set(texts.values())
    for folder in folders:
        for name, text in read_library(folder, MORE_SUFFIXES).texts.items():
            if text not in known:
                known.add(text)
                texts[f"{folder.name}/{name}"] = text
    return replace(corpus, texts=texts, folders=tuple(folder.name for folder in folders))


def pack(corpus: Corpus, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.comment = "\n".join([corpus.python, *corpus.folders]).encode()
        for name, text in corpus.texts.items():
            archive.writestr(name, text)


def unpack(path: Path) -> Corpus:
    with zipfile.ZipFile(path) as archive:
        texts = {name: archive.read(name) for name in archive.namelist()}
        python, *folders = archive.comment.decode().split("\n")
        return Corpus(python, texts, tuple(folders))


# ---- the models


def mamba2_config() -> NemotronHConfig:
    """Twelve blocks: six Mamba-2, two attention, four dense feed-forward."""
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    return NemotronHConfig(
        vocab_size=VOCABULARY,
        hidden_size=160,
        layers_block_type=[names[letter] for letter in "MM-M*-MM-M*-"],
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=64,
        n_groups=2,
        chunk_size=64,
        max_position_embeddings=8192,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def gdn_config() -> Qwen3_5TextConfig:
    """Eight layers, each with a feed-forward part: six gated delta rule, two attention."""
    return Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=160,
        intermediate_size=320,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def kda_config() -> KimiLinearConfig:
    """Eight layers, each with a feed-forward part: six KDA, two latent attention."""
    return KimiLinearConfig(
        vocab_size=VOCABULARY,
        hidden_size=160,
        intermediate_size=280,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        mlp_layer_types=["dense"] * 8,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        linear_num_heads=4,
        linear_head_dim=32,
        max_position_embeddings=8192,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


LARGE_CONTEXT = 2**18


def large_mamba2_config() -> NemotronHConfig:
    """Twenty-four blocks, with the head and state dimensions of the models that are served."""
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    return NemotronHConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        layers_block_type=[names[letter] for letter in "MM-M*-MM-M*-" * 2],
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        mamba_num_heads=16,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=2,
        chunk_size=64,
        max_position_embeddings=LARGE_CONTEXT,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def large_gdn_config() -> Qwen3_5TextConfig:
    """Sixteen layers, with the head dimensions of the models that are served."""
    return Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=16,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=LARGE_CONTEXT,
        tie_word_embeddings=True,
    )


def large_kda_config() -> KimiLinearConfig:
    """Sixteen layers, with the head dimensions of the models that are served."""
    return KimiLinearConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=16,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 4,
        mlp_layer_types=["dense"] * 16,
        num_attention_heads=8,
        num_key_value_heads=8,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        linear_num_heads=4,
        linear_head_dim=128,
        max_position_embeddings=LARGE_CONTEXT,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


@dataclass(frozen=True)
class Rule:
    """A rule's model in two sizes; only the small ones are kept, in `folder`."""

    title: str
    folder: str
    config: Callable[[], PreTrainedConfig]
    large: Callable[[], PreTrainedConfig]


RULES = {
    "mamba2": Rule("Mamba-2", "mamba2-nemotron-h", mamba2_config, large_mamba2_config),
    "gdn": Rule("GDN", "gdn-qwen3-5", gdn_config, large_gdn_config),
    "kda": Rule("KDA", "kda-kimi-linear", kda_config, large_kda_config),
}


def build(rule: str, large: bool = False) -> PreTrainedModel:
    config = (RULES[rule].large if large else RULES[rule].config)()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if rule == "gdn":
        slow_decays(model)
    return model


@torch.no_grad()
def slow_decays(model: nn.Module) -> None:
    """Start the step sizes in [0.001, 0.1], as the other two formats do: the format's own start
    forgets the state within a few bytes."""
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            step = torch.exp(torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)))
            parameter.copy_(step + torch.log(-torch.expm1(-step)))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A stock tokenizer in which a token's id is its byte's value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    vocabulary = {letters[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


# ---- the delta rules, in a form that trains quickly


def chunked_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """What the formats' own scans of GDN and KDA compute from an empty state, keys normalised.

    The stock functions take their time launching thousands of small operations: KDA's backward pass is
    quadratic in the length, since it indexes the pairwise decays chunk by chunk, and GDN's goes row by row
    through the system of each chunk. Here all that does not need the state is done for every chunk at once.
    The length is a multiple of 64. `g` has a key dimension for KDA alone; its chunks are shorter, since their
    pairwise decays have that dimension too.
    """
    chunk_size = 32 if g.dim() == 4 else 64
    repeats = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
    g = g if g.dim() == 4 else g[..., None]
    query, key, value, g, beta = (
        x.transpose(1, 2).float().unflatten(2, (-1, chunk_size)) for x in (query, key, value, g, beta)
    )
    query = unit(query) * query.shape[-1] ** -0.5
    key = unit(key)
    g = g.cumsum(-2)
    by_key, by_query = decayed_products(query, key, g)
    system = by_key * beta.unsqueeze(-1)
    right = torch.cat([value, key * g.exp()], dim=-1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_value, new_key = solved.split([value.shape[-1], key.shape[-1]], dim=-1)

    last = g[..., -1:, :]
    parts = [query * g.exp(), (key * (last - g).exp()).mT, last.exp().mT, by_query, new_value, new_key]
    state = query.new_zeros(*query.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for q, k, d, pairs, u, w in zip(*(part.unbind(2) for part in parts), strict=True):
        written = u - w @ state
        outputs.append(q @ state + pairs @ written)
        state = state * d + k @ written
    return torch.stack(outputs, dim=2).flatten(2, 3).transpose(1, 2), None


def decayed_products(query: Tensor, key: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Of keys and queries `[.., C, K]` with the keys before them, decayed since: `[.., C, C]` each."""
    size = g.shape[-2]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    if g.shape[-1] == 1:
        decay = (g - g.mT).masked_fill(~lower, -math.inf).exp()
        return (key @ key.mT) * decay, (query @ key.mT) * decay
    decay = (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill_(~lower[..., None], -math.inf).exp_()
    by_key, by_query = (decay * key.unsqueeze(-3) @ torch.stack([key, query], dim=-1)).unbind(-1)
    return by_key, by_query


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def fla_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """As `chunked_delta`, by flash-linear-attention's kernels: bf16 operands, fp32 decays and states.

    GDN is KDA with one decay for all channels. Fla's own kernels of GDN refuse Hopper GPUs with Triton below
    3.7.1, for which their gradients came out wrong.
    """
    from fla.ops.kda import chunk_kda

    repeats, dtype = value.shape[2] // key.shape[2], value.dtype
    query, key = (x.repeat_interleave(repeats, dim=2).bfloat16() for x in (query, key))
    g = by_channel(g.float(), key) if g.dim() == 3 else g.float()
    output, _ = chunk_kda(query, key, value.bfloat16(), g=g, beta=beta.float(), use_qk_l2norm_in_kernel=True)
    return output.to(dtype), None


def fla_mamba2(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    **_: Any,
) -> Tensor:
    """What the format's own scan of Mamba-2 computes from an empty state, by fla's kernels: gated linear
    attention of queries `C`, keys `B` and values `dt x`, all channels of a head decayed by `exp(dt A)`."""
    from fla.ops.gla import chunk_gla

    dt = F.softplus(dt.float() + dt_bias).clamp(*dt_limit)
    query, key = (x.repeat_interleave(dt.shape[2] // x.shape[2], dim=2).bfloat16() for x in (C, B))
    value = (hidden_states * dt[..., None]).bfloat16()
    output, _ = chunk_gla(query, key, value, g=by_channel(A.float() * dt, key), scale=1.0)
    return output + D[:, None] * hidden_states


def by_channel(decay: Tensor, key: Tensor) -> Tensor:
    """A head's decay `[B, T, H]` for each of its channels: `[B, T, H, K]`."""
    return decay[..., None].expand(key.shape).contiguous()


def import_formats() -> None:
    """The formats' modules, each of which binds what it finds when it is imported: not fla, whose kernels
    take too much shared memory for the fp32 operands of an evaluation."""
    modules: dict[str, Any] = sys.modules
    before = modules.pop("fla", None)
    modules["fla"] = None  # not to be found
    try:
        for name in ("kimi_linear", "nemotron_h", "qwen3_5"):
            importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    finally:
        del modules["fla"]
        if before is not None:
            modules["fla"] = before


@contextlib.contextmanager
def quick_scans(fla: bool = False) -> Iterator[None]:
    from transformers.models.kimi_linear import modeling_kimi_linear
    from transformers.models.nemotron_h import modeling_nemotron_h
    from transformers.models.qwen3_5 import modeling_qwen3_5

    delta = fla_delta if fla else chunked_delta
    with contextlib.ExitStack() as patches:
        patch = mock.patch.object
        patches.enter_context(patch(modeling_kimi_linear, "chunk_kimi_delta_attention", delta))
        patches.enter_context(patch(modeling_qwen3_5, "torch_chunk_gated_delta_rule", delta))
        if fla:
            patches.enter_context(patch(modeling_nemotron_h, "mamba2_chunk_scan", fla_mamba2))
        yield


SCANS = ("mamba2_chunk_scan", "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")


@contextlib.contextmanager
def full_precision_scans(model: PreTrainedModel) -> Iterator[None]:
    """The recurrences of a model in fp32, whatever autocast makes of the rest."""
    module, kind = sys.modules[type(model).__module__], model.device.type

    def outside(scan: Callable[..., Any]) -> Callable[..., Any]:
        def scanned(*given: Any, **named: Any) -> Any:
            with torch.autocast(kind, enabled=False):
                return scan(*map(_as_fp32, given), **{name: _as_fp32(x) for name, x in named.items()})

        return scanned

    with contextlib.ExitStack() as patches:
        for name in set(SCANS) & vars(module).keys():
            patches.enter_context(mock.patch.object(module, name, outside(getattr(module, name))))
        yield


def _as_fp32(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype is torch.bfloat16 else x


# ---- training


@dataclass(frozen=True)
class Settings:
    batch: int
    length: int
    peak_rate: float
    seed: int
    steps: int | None = None  # the schedule is over these, or over the time
    autocast: bool = False  # to bfloat16, but for the recurrences unless fla computes them
    scans: str = "own"  # what computes the recurrences
    final_rate: float = 0.01  # of the peak
    warm_up: float = 0.04  # of the time
    weight_decay: float = 0.1
    clip: float = 1.0

    def rate(self, done: float) -> float:
        """The learning rate once a fraction `done` of the training has passed."""
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(done, 1.0))
        scale = self.final_rate + (1 - self.final_rate) * cosine
        return self.peak_rate * min(1.0, done / self.warm_up + 1e-3) * scale


class Step:
    """A training step on inputs of one shape, replayed as a CUDA graph where there is a GPU.

    The scans launch thousands of small kernels in a step, so that launching them one by one would
    take most of the time.
    """

    def __init__(self, model: PreTrainedModel, settings: Settings) -> None:
        self.model, self.settings = model, settings
        device = model.device
        self.rate = torch.zeros((), device=device)
        self.batch = torch.zeros(settings.batch, settings.length + 1, dtype=torch.long, device=device)
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.groups(), lr=self.rate, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss = torch.zeros((), device=device)

    def groups(self) -> list[dict[str, Any]]:
        """Matrices decay; norms, decay rates, convolutions and embeddings do not."""
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            plain = parameter.ndim == 2 and "embed" not in name
            (matrices if plain else others).append(parameter)
        return [
            {"params": matrices, "weight_decay": self.settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]

    def eager(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        # Without its cache, whose casts a captured graph would not repeat.
        with torch.autocast(
            self.model.device.type, torch.bfloat16, enabled=self.settings.autocast, cache_enabled=False
        ):
            loss = bits(self.model, self.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.loss = loss.detach()

    def capture(self) -> None:
        """Called once a few eager steps have been taken on a side stream."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.eager()
        except RuntimeError as error:
            torch.cuda.synchronize()
            print(f"no CUDA graph, so steps are launched kernel by kernel: {error}", flush=True)
        else:
            self.graph = graph

    def __call__(self, batch: Tensor, rate: float) -> float:
        self.batch.copy_(batch)
        self.rate.fill_(rate)
        if self.graph is None:
            self.eager()
        else:
            self.graph.replay()
        return self.loss.item()


def bits(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Mean bits per byte of each row's bytes after its first."""
    masks = {"full_attention": None, "linear_attention": None}
    logits = model(input_ids=batch[:, :-1], attention_mask=masks, use_cache=False).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    return loss / math.log(2)


def joined(texts: dict[str, bytes], device: torch.device) -> Tensor:
    data = bytearray(b"".join(text for _, text in sorted(texts.items())))
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def draws(data: Tensor, settings: Settings) -> Iterator[Tensor]:
    """Batches of windows at random places."""
    generator = torch.Generator(data.device).manual_seed(settings.seed)
    window = torch.arange(settings.length + 1, device=data.device)
    while True:
        starts = torch.randint(
            data.numel() - settings.length,
            (settings.batch, 1),
            device=data.device,
            generator=generator,
        )
        yield data[starts + window].long()


def warm_up(step: Step, batches: Iterator[Tensor]) -> None:
    """A few eager steps at a tiny rate, then the capture where there is a GPU."""
    if step.model.device.type != "cuda":
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step.batch.copy_(next(batches))
            step.rate.fill_(1e-5)
            step.eager()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    step.capture()


def train(model: PreTrainedModel, data: Tensor, settings: Settings, deadline: float) -> dict[str, Any]:
    """Train until the deadline, or before it for so many steps; return the record of the steps."""
    model.train()
    step, batches = Step(model, settings), draws(data, settings)
    warm_up(step, batches)
    start = time.monotonic()
    span = max(deadline - start, 1e-6)
    curve: list[dict[str, float]] = []
    steps, total, count = 0, 0.0, 0

    def done() -> float:
        passed = (time.monotonic() - start) / span
        return passed if settings.steps is None else steps / settings.steps

    while (now := done()) < 1.0 or not steps:
        total += step(next(batches), settings.rate(now))
        steps, count = steps + 1, count + 1
        passed = time.monotonic() - start
        if done() >= (len(curve) + 1) / CURVE_POINTS or done() >= 1.0 or passed >= span:
            curve.append(
                {"step": steps, "seconds": round(passed, 1), "bits_per_byte": round(total / count, 4)}
            )
            total, count = 0.0, 0
            print(json.dumps(curve[-1]), flush=True)
        if passed >= span:
            break
    return {
        "steps": steps,
        "bytes_seen": steps * settings.batch * settings.length,
        "seconds": round(time.monotonic() - start, 1),
        "cuda_graph": step.graph is not None,
        "loss_curve": curve,
    }


# ---- what is kept


@torch.no_grad()
def held_out_bits(model: PreTrainedModel, data: Tensor, length: int, batch: int) -> float:
    """Bits per byte over consecutive windows, the first byte of each left out."""
    model.eval()
    usable = (data.numel() - 1) // length * length
    windows = data[: usable + 1].unfold(0, length + 1, length).long()
    pieces = windows.split(batch)
    total = sum(bits(model, piece).double().item() * piece.shape[0] for piece in pieces)
    return total / windows.shape[0]


def find_prompt(held: dict[str, bytes]) -> tuple[str, bytes]:
    """A held-out file, and a piece of it that ends where a function is about to be written."""
    name = PROMPT_FILE if PROMPT_FILE in held else min(held)
    before, found, _ = held[name].partition(PROMPT_END)
    return name, (before + found)[-PROMPT_BYTES:]


@torch.no_grad()
def continuation(model: PreTrainedModel, prompt: bytes, **options: Any) -> str:
    torch.manual_seed(0)
    ids = torch.tensor([list(prompt)], device=model.device)
    settings = GenerationConfig(max_new_tokens=SAMPLE_BYTES, **options)
    output = model.eval().generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return bytes(output[0, len(prompt) :].tolist()).decode(errors="replace")


def sample_record(model: PreTrainedModel, held: dict[str, bytes]) -> dict[str, str]:
    name, prompt = find_prompt(held)
    return {
        "file": name,
        "prompt": prompt.decode(errors="replace"),
        "greedy": continuation(model, prompt, do_sample=False),
        "temperature_0.7": continuation(model, prompt, do_sample=True, temperature=0.7, top_k=0),
    }


def save(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Write the stock folder with weights rounded to bfloat16; return it loaded, as float32."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
    byte_tokenizer().save_pretrained(folder)
    GenerationConfig(do_sample=False).save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded.to(model.device)  # type: ignore[arg-type]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def data_record(corpus: Corpus) -> dict[str, Any]:
    training, held = corpus.split()
    more = "".join(f", texts in {folder}" for folder in corpus.folders)
    return {
        "text": f"sources and documentation of the Python standard library{more}",
        "python": corpus.python,
        "files": len(corpus.texts),
        "bytes": sum(map(len, corpus.texts.values())),
        "sha256": corpus.digest(),
        "split": SPLIT_RULE,
        "training_files": len(training),
        "training_bytes": sum(map(len, training.values())),
        "held_out_files": len(held),
        "held_out_bytes": sum(map(len, held.values())),
    }


def read_corpus(arguments: argparse.Namespace) -> Corpus:
    if arguments.corpus:
        return unpack(arguments.corpus)
    return with_folders(read_library(arguments.stdlib), arguments.more or [])


def run(arguments: argparse.Namespace, started: float) -> None:
    rule: str = arguments.rule
    device = torch.device(arguments.device)
    folder: Path = arguments.out or MODELS / RULES[rule].folder
    settings = Settings(
        batch=arguments.batch,
        length=arguments.length,
        peak_rate=arguments.rate,
        seed=arguments.seed,
        steps=arguments.steps,
        autocast=arguments.autocast,
        scans=arguments.scans,
    )
    corpus = read_corpus(arguments)
    training, held = corpus.split()
    import_formats()
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    model = build(rule, arguments.size == "large").to(device)  # type: ignore[arg-type]
    print(f"{rule}: {model.num_parameters():,} parameters, {len(corpus.texts)} files", flush=True)
    fla = settings.scans == "fla"
    with quick_scans(fla), contextlib.nullcontext() if fla else full_precision_scans(model):
        steps = train(model, joined(training, device), settings, started + arguments.seconds)

    torch.set_float32_matmul_precision("highest")
    test = joined(held, device)[: arguments.held_out_bytes]
    scores = {"fp32": held_out_bits(model, test, settings.length, settings.batch)}
    rounded = save(model, folder)
    over = "wall-clock time" if settings.steps is None else "steps"
    scores["bf16_rounded"] = held_out_bits(rounded, test, settings.length, settings.batch)
    record = {
        "rule": rule,
        "parameters": model.num_parameters(),
        "data": data_record(corpus),
        "settings": vars(settings) | {"optimizer": "AdamW", "schedule": f"cosine over {over}"},
        "training": steps,
        "held_out": {name: round(score, 4) for name, score in scores.items()}
        | {"bytes": test.numel(), "window": settings.length},
        "sample": sample_record(rounded, held),
        "machine": {
            "device": device_name(device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (folder / "training.json").write_text(dump(record), encoding="utf-8")
    print(json.dumps(record["held_out"]), record["sample"]["greedy"], sep="\n", flush=True)


def dump(record: dict[str, Any]) -> str:
    """JSON with the points of the loss curve one to a line."""
    text = json.dumps(record, indent=1, ensure_ascii=False)
    return re.sub(r"\{\s+(\"step\"[^{}]*?)\s+\}", lambda m: "{" + " ".join(m[1].split()) + "}", text) + "\n"


def table() -> str:
    """The Markdown table of the models, from their records."""
    lines = [
        "| rule | folder | parameters | bytes on disk | held-out bits per byte | rounded to bf16 |"
        " training bytes seen | steps |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for rule in RULES.values():
        folder = MODELS / rule.folder
        record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        size = sum(path.stat().st_size for path in folder.iterdir())
        held, steps = record["held_out"], record["training"]
        lines.append(
            f"| {rule.title} | `{rule.folder}` | {record['parameters']:,} | {size:,}"
            f" | {held['fp32']:.3f} | {held['bf16_rounded']:.3f}"
            f" | {steps['bytes_seen'] / 1e6:.0f} M | {steps['steps']:,} |"
        )
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    gpu = torch.cuda.is_available()
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rule", choices=list(RULES))
    p.add_argument(
        "--size", choices=("small", "large"), default="small", help="2 or 40 to 60 million parameters"
    )
    p.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    p.add_argument("--more", type=Path, action="append", metavar="FOLDER", help="of text besides; repeatable")
    p.add_argument("--corpus", type=Path, help="a file that --pack wrote, in place of --stdlib")
    p.add_argument("--seconds", type=float, default=600.0, help="from the start to the last step")
    p.add_argument("--steps", type=int, help="end after so many, on any machine, if there is time for them")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--autocast", action="store_true", help="to bfloat16, but for the recurrences")
    p.add_argument(
        "--scans",
        choices=("own", "fla"),
        default="own",
        help="what computes the recurrences: plain torch in fp32, or the kernels of flash-linear-attention,"
        " which need that package and a GPU",
    )
    p.add_argument("--out", type=Path, help="the model's folder; by default under examples/models")
    p.add_argument("--device", default="cuda" if gpu else "cpu")
    p.add_argument("--batch", type=int, default=24)
    p.add_argument("--length", type=int, default=1024, help="bytes; a multiple of 64")
    p.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    p.add_argument("--held-out-bytes", type=int, default=2_000_000, help="at most so many scored")
    p.add_argument("--pack", type=Path, help="write the text to this file and stop")
    p.add_argument("--held-out", type=Path, help="write the held-out text to this file and stop")
    p.add_argument("--table", action="store_true", help="print the table of the models and stop")
    return p


def main() -> None:
    started = time.monotonic()
    options = parser()
    arguments = options.parse_args()
    if arguments.table:
        print(table(), end="")
    elif arguments.pack:
        pack(read_corpus(arguments), arguments.pack)
    elif arguments.held_out:
        _, held = read_corpus(arguments).split()
        arguments.held_out.write_bytes(b"".join(text for _, text in sorted(held.items())))
    elif arguments.rule and arguments.size == "large" and not arguments.out:
        options.error("--size large needs --out: these models are too large to be kept in examples/models")
    elif arguments.rule and arguments.scans == "fla" and not importlib.util.find_spec("fla"):
        options.error("--scans fla needs the package flash-linear-attention, which is not installed")
    elif arguments.rule and arguments.scans == "fla" and torch.device(arguments.device).type == "cpu":
        options.error("--scans fla needs a GPU: name another --device, or leave --scans out")
    elif arguments.rule:
        run(arguments, started)
    else:
        options.error("one of --rule, --pack, --held-out and --table is needed")


if __name__ == "__main__":
    main()
