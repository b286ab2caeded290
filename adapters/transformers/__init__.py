"""Replay decoding for stock Hugging Face transformers: `enable(model)` and `handle.disable()`."""

from replayssm.adapters.transformers.account import Account
from replayssm.adapters.transformers.handle import Handle, enable
from replayssm.adapters.transformers.patch_points import UnsupportedModel

__all__ = ["Account", "Handle", "UnsupportedModel", "enable"]
