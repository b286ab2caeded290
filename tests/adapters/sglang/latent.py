"""The example model of KDA in sizes that SGLang's Triton kernels take on a GPU.

They serve latent attention only where a latent and its rotary part have 512 and 64 or 256 and 32 elements.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

LATENT, ROPE, NOPE = 256, 32, 160


def widen(folder: Path) -> Path:
    """Fill the attention of the model in `folder` up with zeros; what it computes stays the same.

    Norms over more elements come out larger and scores of longer queries smaller, by factors that are powers
    of two, which the weights make up for exactly. Only a norm's epsilon counts four times as much.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text())
    latent, rope, nope = (config[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    value, heads = config["v_head_dim"], config["num_attention_heads"]
    weights = load_file(folder / "model.safetensors")
    for up in [name for name in weights if name.endswith("kv_b_proj.weight")]:
        query, down, norm = (
            up.replace("kv_b_proj", name) for name in ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm")
        )
        longer = ((NOPE + ROPE) / (nope + rope)) ** 0.5
        rows = weights[query].unflatten(0, (heads, -1)) * longer
        weights[query] = filled(rows, (nope, NOPE), (rope, ROPE)).flatten(0, 1)
        weights[down] = filled(weights[down], (latent, LATENT), (rope, ROPE))
        weights[norm] = pad(weights[norm] * (latent / LATENT) ** 0.5, (0, LATENT - latent))
        rows = weights[up].unflatten(0, (heads, -1))
        wide = filled(rows, (nope, NOPE), (value, value)).flatten(0, 1)
        weights[up] = pad(wide, (0, LATENT - latent))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE}
    config |= {"qk_head_dim": NOPE + ROPE, "head_dim": ROPE}
    file.write_text(json.dumps(config))
    return folder


def filled(weight: Tensor, *sizes: tuple[int, int]) -> Tensor:
    """Parts of the rows of `weight [..., rows, columns]`, each of so many, filled up to so many."""
    parts = weight.split([size for size, _ in sizes], dim=-2)
    return torch.cat(
        [pad(part, (0, 0, 0, full - size)) for part, (size, full) in zip(parts, sizes, strict=True)], dim=-2
    )
