"""The plug-in: importing this module patches TensorRT-LLM, in the launcher and in each worker process.

The engine hands a model's class, or the module that registered its architecture, to the processes that it
spawns. Each architecture with recurrent layers is registered again here as a class of this module, so whoever
looks the class up imports the adapter before the model and its caches are made.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from replayssm.adapters.trtllm.activation import install
from replayssm.adapters.trtllm.contract import PACKAGE
from replayssm.adapters.trtllm.refusals import Incompatible
from replayssm.adapters.trtllm.settings import load
from replayssm.adapters.trtllm.targets import MODEL_MODULES


def _register() -> dict[str, type]:
    """Each architecture of the engine's recurrent models, as a class of this module."""
    models = f"{PACKAGE}._torch.models"
    import_module(models)
    for name in MODEL_MODULES:
        # Newer releases import a model's module no earlier than its architecture is looked up.
        if find_spec(f"{models}.{name}") is not None:
            import_module(f"{models}.{name}")
    utils: Any = import_module(f"{models}.modeling_utils")
    found = {
        name: cls
        for name, cls in utils.MODEL_CLASS_MAPPING.items()
        if cls.__module__.rpartition(".")[2] in MODEL_MODULES
    }
    if not found:
        raise Incompatible(
            f"replayssm: expected models of {' or '.join(MODEL_MODULES)} in MODEL_CLASS_MAPPING, got none of "
            f"{len(utils.MODEL_CLASS_MAPPING)}; worker processes would decode without the adapter"
        )
    ours = {}
    for name, cls in found.items():
        fields = {"__module__": __name__, "__qualname__": name}
        ours[name] = type(cls)(name, (cls,), fields)
        utils.register_auto_model(name)(ours[name])
        _keep_inputs(cls, ours[name])
    return ours


def _keep_inputs(engines: type, ours: type) -> None:
    """The engine finds what prepares images and other inputs of a model by the model's class: ours too."""
    if find_spec(f"{PACKAGE}.inputs") is None or find_spec(f"{PACKAGE}.inputs.registry") is None:
        return
    registry: Any = import_module(f"{PACKAGE}.inputs.registry").INPUT_PROCESSOR_REGISTRY
    processors = getattr(registry, "_input_processors_cls_by_model_type", {})
    if engines in processors:
        processors[ours] = processors[engines]


# The launcher sets it for its own spawned processes; whoever imports this asked for the adapter.
install(load(os.environ))
globals().update(_register())
