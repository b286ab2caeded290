"""Kernels of ReplaySSM: step functions for each rule, and the operations on a slot's history."""

from replayssm.core.formats import PackedState
from replayssm.kernels.api import (
    commit,
    compact,
    gdn_step,
    kda_step,
    load_states,
    mamba2_step,
    materialize,
    renew,
    store_states,
)
from replayssm.kernels.layer_table import LayerTable
from replayssm.kernels.registry import BackendUnavailable, StepCall
from replayssm.kernels.step_index import StepIndex

__all__ = [
    "BackendUnavailable",
    "LayerTable",
    "PackedState",
    "StepCall",
    "StepIndex",
    "commit",
    "compact",
    "gdn_step",
    "kda_step",
    "load_states",
    "mamba2_step",
    "materialize",
    "renew",
    "store_states",
]
