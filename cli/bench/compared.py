"""The precisions that are compared with fp32 states, and the check of those a user names."""

from __future__ import annotations

from collections.abc import Sequence

from replayssm.cli.errors import CommandError
from replayssm.core.precision import Precision

REFERENCE = "fp32"
PRECISIONS = (
    REFERENCE,
    "bf16",
    "int8/fp16+sr",
    "fp8/fp16+sr",
    "nvfp4/fp32",
    "nvfp4/fp16+sr",
    "nvfp4/fp8+sr",
    "fp8+sr",
    "nvfp4+sr",
    "nvfp4+force",
)
"""fp32 again, which must not differ; what engines offer; read copies beside another; one packed copy."""

DTYPES = ("fp32", "bf16")
"""Of activations; the kernels that serve packed states on a GPU take bf16."""


def check_precisions(names: Sequence[str]) -> None:
    """Refuse what is no precision.

    Raises:
        CommandError: says which, and why.
    """
    for name in names:
        try:
            Precision.parse(name)
        except ValueError as error:
            raise CommandError(f"precision {name!r}: {error}") from None


def check_step(step: int, window: int) -> None:
    """Refuse steps that would make flushes fall elsewhere than those of single tokens.

    Raises:
        CommandError: a step is no divisor of the window.
    """
    if step < 1 or window % step:
        raise CommandError(
            f"--step {step}: expected a divisor of the window {window}, so that flushes fall where single "
            "tokens would have them"
        )
