"""Model classes by architecture, each in its place when it has been looked up."""

from importlib import import_module

MODELS = "tensorrt_llm._torch.models."
MODEL_ARCH_TO_MODULE = {
    "NemotronHForCausalLM": "modeling_nemotron_h",
    "Qwen3NextForCausalLM": "modeling_qwen3_next",
}
MODEL_CLASS_MAPPING = {}
_declared = {}


def _is_builtin_model_class(cls):
    return cls.__module__.startswith(MODELS)


def register_auto_model(name):
    def decorator(cls):
        # A class from outside may be there before the engine's own module is imported, and stays.
        if name not in MODEL_CLASS_MAPPING or not _is_builtin_model_class(cls):
            MODEL_CLASS_MAPPING[name] = cls
        return cls

    return decorator


def export_external_model_modules():
    return {
        name: cls.__module__ for name, cls in MODEL_CLASS_MAPPING.items() if not _is_builtin_model_class(cls)
    }


def register_external_model_modules(arch_to_module):
    _declared.update(arch_to_module)
    for name in arch_to_module:
        MODEL_CLASS_MAPPING.pop(name, None)


def get_registered_model_class(model_arch):
    if model_arch not in MODEL_CLASS_MAPPING:
        import_module(_declared.get(model_arch) or MODELS + MODEL_ARCH_TO_MODULE[model_arch])
    return MODEL_CLASS_MAPPING.get(model_arch)
