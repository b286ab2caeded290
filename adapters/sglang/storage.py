"""How one layer's states are stored: their precision, what lies beside SGLang's pool, and its bytes.

SGLang's pool keeps the copies that recur, in a plain format, so that whatever of SGLang writes, copies or
moves states works on them as without the adapter. Rings and read copies are the adapter's. It knows nothing
of what becomes of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from replayssm.adapters.sglang.settings import Settings
from replayssm.core.formats import FORMATS, StateCopy, allocate_states, state_bytes
from replayssm.core.geometry import LayerGeometry, Rule
from replayssm.core.layout import RingLayout
from replayssm.core.precision import Precision, Rounding, parse_format


@dataclass(frozen=True)
class Storage:
    """Of one layer.

    Attributes:
        layout: its rings.
        precision: of its states; `recurrence` is a plain format.
    """

    layout: RingLayout
    precision: Precision

    @classmethod
    def of(cls, settings: Settings, rule: Rule, params: Any, activations: torch.dtype) -> Storage:
        """What a server stores.

        Args:
            settings: the server's.
            rule: of its layers.
            params: SGLang's `mamba2_cache_params` of the model.
            activations: dtype of what layers record.
        """
        HV, V, K = params.shape.temporal
        if settings.precision is None:
            stored = parse_format(params.dtype.temporal)
            precision = Precision(stored, stored)
        else:
            precision = Precision.parse(settings.precision)
        layout = RingLayout(
            LayerGeometry(rule, HV, params.shape.num_k_heads_per_tp, V, K), settings.window,
            settings.max_draft, activations, settings.max_path, precision.split, settings.skip_tolerance,
        )  # fmt: skip
        return cls(layout, precision)

    @property
    def dtype(self) -> torch.dtype:
        """Of SGLang's pool."""
        return FORMATS[self.precision.recurrence]

    @property
    def stochastic(self) -> bool:
        """Whether SGLang's states are rounded stochastically."""
        return self.precision.rounding is Rounding.STOCHASTIC

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a slot's ring, norms and read copy.

        Raises:
            ValueError: the read copy's format does not fit the key dimension.
        """
        shape = self.layout.geometry.state_shape
        read = state_bytes(self.precision.read, shape) if self.precision.split else 0
        return self.layout.bytes_per_slot + read

    def allocate(
        self, layers: int, slots: int, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], list[StateCopy] | None]:
        """Zeros for all slots.

        Returns:
            The ring tensors of all layers by name, `[layers, slots, heads, R, ...]`, and per layer the read
            copies, `[slots, HV, V, K]`, where there are any.

        Raises:
            ValueError: as `bytes_per_slot`.
        """
        layout, read = self.layout, self.precision.read
        rings = {
            field.name: torch.zeros(
                layers, *field.shape(slots, layout.rows), dtype=field.dtype, device=device
            )
            for field in layout.fields
        }
        if not layout.split:
            return rings, None
        shape = (slots, *layout.geometry.state_shape)
        return rings, [allocate_states(read, shape, device) for _ in range(layers)]
