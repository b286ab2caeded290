"""Layout of the ring: which tensors a record consists of, their shapes, dtypes and bytes.

A ring tensor is head-major, `[slots, heads, R]` or `[slots, heads, R, dim]`. The names are the keyword
arguments of the step functions in `replayssm.kernels`, so a layer's rings can be passed by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.core.geometry import LayerGeometry, Rule
from replayssm.core.policy import capacity
from replayssm.core.skipping import Skipping, blocks, check_tolerance


@dataclass(frozen=True)
class RingField:
    """One tensor of the ring.

    Attributes:
        name: keyword in the step functions, e.g. `"x_cache"`.
        heads: HV for what belongs to a value head, H (groups) for what belongs to a key head.
        dim: values per record and head; `None` for a scalar.
        dtype: storage dtype.
    """

    name: str
    heads: int
    dim: int | None
    dtype: torch.dtype

    def shape(self, slots: int, rows: int) -> tuple[int, ...]:
        """`[slots, heads, rows]`, with `dim` behind where the field has one."""
        head = (slots, self.heads, rows)
        return head if self.dim is None else (*head, self.dim)

    @property
    def record_bytes(self) -> int:
        """Bytes that one record takes in this tensor, over all heads."""
        return self.heads * (self.dim or 1) * self.dtype.itemsize


@dataclass(frozen=True)
class RingLayout:
    """The ring of one layer.

    Attributes:
        geometry: the layer.
        window: L, the most records a step may see as history plus draft before it must flush.
        max_draft: T_max, the most tokens (tree nodes) one step may bring for a sequence.
        max_path: the most tokens one step may accept; `None` means `max_draft`, as for chains.
        activation_dtype: dtype of the recorded activations. Inputs are recorded in the dtype they
            arrive in, so recording them loses nothing; gates, log-decays and the delta rules' `u` are
            always fp32.
        split: whether steps read another copy of the state than flushes start from.
        skip_tolerance: what a step may leave out of its reads, see `skipping`; 0: nothing, and no norms.
    """

    geometry: LayerGeometry
    window: int
    max_draft: int
    activation_dtype: torch.dtype = torch.bfloat16
    max_path: int | None = None
    split: bool = False
    skip_tolerance: float = 0.0

    def __post_init__(self) -> None:
        check_tolerance(self.skip_tolerance)
        capacity(self.window, self.max_draft, self.max_path)

    @property
    def rows(self) -> int:
        """R, rows of the ring."""
        return capacity(self.window, self.max_draft, self.max_path)

    @property
    def fields(self) -> tuple[RingField, ...]:
        """The ring's tensors, in the order of the step function's arguments.

        Mamba-2 records `(x, B, dt)`. The delta rules record `u`, the key and the log-decay. `u` is
        kept in fp32 as the step computed it, so outputs and flushes take it with no error of its own.
        Where steps read a copy of their own, `u` has that copy's error, which a flush takes out again:
        what it takes besides the difference of the copies is beta, not the value. Keys are recorded as
        they arrive, before normalisation.
        """
        g, act, f32 = self.geometry, self.activation_dtype, torch.float32
        if g.rule is Rule.MAMBA2:
            return (
                RingField("x_cache", g.value_heads, g.value_dim, act),
                RingField("B_cache", g.key_heads, g.key_dim, act),
                RingField("dt_cache", g.value_heads, None, f32),
            )
        decay = g.key_dim if g.rule is Rule.KDA else None
        fields = (
            RingField("u_cache", g.value_heads, g.value_dim, f32),
            RingField("k_cache", g.key_heads, g.key_dim, act),
            RingField("g_cache", g.value_heads, decay, f32),
        )
        return (*fields, RingField("beta_cache", g.value_heads, None, f32)) if self.split else fields

    @property
    def record_bytes(self) -> int:
        """Bytes that one token leaves in the ring; a step reads them for every live record."""
        return sum(field.record_bytes for field in self.fields)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's ring in this layer, and of its norms."""
        return self.rows * self.record_bytes + self.norm_bytes

    @property
    def norm_bytes(self) -> int:
        """Bytes of the norms of one sequence's checkpoint; a step reads them."""
        norms = self.geometry.value_heads * blocks(self.geometry.value_dim)
        return norms * torch.float32.itemsize if self.skip_tolerance else 0

    def allocate(self, slots: int, device: torch.device | str) -> dict[str, torch.Tensor]:
        """The ring's tensors for `slots` sequences, zeros: FlashInfer's kernel does not mask dead rows."""
        return {
            field.name: torch.zeros(field.shape(slots, self.rows), dtype=field.dtype, device=device)
            for field in self.fields
        }

    def allocate_norms(
        self, slots: int, device: torch.device | str, layers: int | None = None
    ) -> Skipping | None:
        """Norms for `slots` sequences, of one layer or of several; `None` without a tolerance."""
        if not self.skip_tolerance:
            return None
        shape = (slots, self.geometry.value_heads, blocks(self.geometry.value_dim))
        several = () if layers is None else (layers,)
        return Skipping(self.skip_tolerance, torch.full((*several, *shape), float("inf"), device=device))

    def check(self, rings: dict[str, torch.Tensor], slots: int) -> None:
        """Check ring tensors that an engine brings; any strides are accepted as long as `dim` is dense.

        Raises:
            ValueError: a tensor is missing, unknown, or has another shape, dtype or inner stride.
        """
        expected = {field.name: field for field in self.fields}
        if set(rings) != set(expected):
            raise ValueError(
                f"ring of a {self.geometry.rule} layer: expected tensors {sorted(expected)}, "
                f"got {sorted(rings)}"
            )
        for name, field in expected.items():
            tensor, shape = rings[name], field.shape(slots, self.rows)
            if tuple(tensor.shape) != shape or tensor.dtype != field.dtype:
                raise ValueError(
                    f"{name}: expected {list(shape)} {field.dtype}, got {list(tensor.shape)} {tensor.dtype}"
                )
            if field.dim is not None and tensor.stride(-1) != 1:
                raise ValueError(
                    f"{name}: the last dimension must be contiguous, got strides {tensor.stride()}"
                )
