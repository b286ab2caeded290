"""Replay decoding for stock SGLang, through its plugin entry point `sglang.srt.plugins`."""

from replayssm.adapters.sglang.plugin import register

__all__ = ["register"]
