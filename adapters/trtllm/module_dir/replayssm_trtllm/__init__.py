"""What `--custom_module_dirs` names: importing it activates the adapter."""

from replayssm.adapters.trtllm import served_models

__all__ = ["served_models"]
