"""A model whose attention is filled up with zeros is the same model."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from tests.adapters.sglang.latent import widen
from tests.adapters.sglang.test_engine import FOLDERS, MODELS


def test_a_wider_latent_changes_nothing(tmp_path: Path) -> None:
    """But for the norm's epsilon."""
    from transformers import AutoModelForCausalLM

    plain = MODELS / FOLDERS["kda"]
    wide = widen(Path(shutil.copytree(plain, tmp_path / "wide")))
    tokens = torch.tensor([list(b"def _split(self, text):\n    return text.split()\n")])
    with torch.no_grad():
        expected, found = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens, use_cache=False).logits
            for folder in (plain, wide)
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
