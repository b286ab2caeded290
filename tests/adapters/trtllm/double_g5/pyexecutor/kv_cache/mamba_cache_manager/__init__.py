"""What was one module; its names are looked up where they are now when they are first asked for."""

from importlib import import_module

_WHERE = {
    "common": (
        "BaseMambaCacheManager",
        "MIN_REPLAY_HISTORY_SIZE",
        "MambaHybridCacheManager",
        "MambaLayerCache",
        "ReplayStateUpdateMetadata",
        "_advance_replay_state",
        "_promote_mamba_state_triton",
    ),
    "legacy": (
        "CppMambaHybridCacheManager",
        "MambaCacheManager",
        "MixedMambaHybridCacheManager",
        "PythonMambaCacheManager",
    ),
    "mamba_cache_manager_v2": ("MambaHybridCacheManagerV2",),
}


def __getattr__(name):
    for module, names in _WHERE.items():
        if name in names:
            globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
