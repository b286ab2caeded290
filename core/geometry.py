"""Shapes of one recurrent layer, for the three rules.

Everything that depends on a model's dimensions is derived from `LayerGeometry`; it knows nothing of
rings, engines or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Rule(StrEnum):
    """The recurrences that ReplaySSM serves."""

    MAMBA2 = "mamba2"
    GDN = "gdn"
    KDA = "kda"


@dataclass(frozen=True)
class LayerGeometry:
    """Dimensions of one recurrent layer as one device holds it.

    The state of a sequence is `[value_heads, value_dim, key_dim]`. For Mamba-2 the value heads are
    the heads, the key heads the groups, `value_dim` is `head_dim` (P) and `key_dim` is `d_state`
    (N). Each key head serves `value_heads // key_heads` consecutive value heads.

    Attributes:
        rule: which recurrence the layer runs.
        value_heads: HV (Mamba-2: H).
        key_heads: H (Mamba-2: groups G).
        value_dim: V (Mamba-2: P).
        key_dim: K (Mamba-2: N).
        conv_kernel: taps of the short convolution in front of the recurrence; 0 where there is none.
    """

    rule: Rule
    value_heads: int
    key_heads: int
    value_dim: int
    key_dim: int
    conv_kernel: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", Rule(self.rule))
        for name in ("value_heads", "key_heads", "value_dim", "key_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.conv_kernel < 0:
            raise ValueError(f"conv_kernel must not be negative, got {self.conv_kernel}")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads must be a multiple of key_heads, got {self.value_heads} value heads "
                f"and {self.key_heads} key heads"
            )

    @classmethod
    def mamba2(
        cls, heads: int, head_dim: int, d_state: int, groups: int, conv_kernel: int = 4
    ) -> LayerGeometry:
        """Geometry of a Mamba-2 layer in that rule's own words."""
        return cls(Rule.MAMBA2, heads, groups, head_dim, d_state, conv_kernel)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one sequence's state, `(HV, V, K)`."""
        return (self.value_heads, self.value_dim, self.key_dim)

    @property
    def state_elements(self) -> int:
        """Values in one sequence's state."""
        return self.value_heads * self.value_dim * self.key_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: values, and two key-sized inputs (B and C, or q and k)."""
        return self.value_heads * self.value_dim + 2 * self.key_heads * self.key_dim

    @property
    def heads_per_key(self) -> int:
        """Value heads served by one key head."""
        return self.value_heads // self.key_heads

    def shard(self, tp: int) -> LayerGeometry:
        """Geometry on one of `tp` tensor-parallel ranks; key heads are replicated when fewer than `tp`.

        Raises:
            ValueError: the heads do not divide over the ranks.
        """
        if tp < 1 or self.value_heads % tp:
            raise ValueError(
                f"tensor parallelism must divide the {self.value_heads} value heads, got tp={tp}"
            )
        if self.key_heads % tp == 0:
            key_heads = self.key_heads // tp
        elif tp % self.key_heads == 0:
            key_heads = 1
        else:
            raise ValueError(
                f"{self.key_heads} key heads (groups) can neither be split nor replicated evenly over "
                f"tp={tp}; use a tp that divides {self.key_heads} or is a multiple of it"
            )
        return replace(self, value_heads=self.value_heads // tp, key_heads=key_heads)
