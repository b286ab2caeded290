"""Backend-agnostic core of ReplaySSM: geometry, ring layout, flush policy, precision, cursors, slots."""

from replayssm.core.cache import LayerBuffers, ReplayCache
from replayssm.core.conv import ConvWindow
from replayssm.core.cursors import Cursors
from replayssm.core.geometry import LayerGeometry, Rule
from replayssm.core.layout import RingField, RingLayout
from replayssm.core.policy import capacity, must_flush, steps_per_flush
from replayssm.core.precision import Precision, Rounding
from replayssm.core.skipping import Skipping

__all__ = [
    "ConvWindow",
    "Cursors",
    "LayerBuffers",
    "LayerGeometry",
    "Precision",
    "ReplayCache",
    "RingField",
    "RingLayout",
    "Rounding",
    "Rule",
    "Skipping",
    "capacity",
    "must_flush",
    "steps_per_flush",
]
