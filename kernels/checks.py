"""Argument checks of the public functions: shapes, dtypes, strides; never values."""

from __future__ import annotations

import torch

from replayssm.core.formats import FORMATS, PackedState, StateCopy, state_format
from replayssm.core.precision import STOCHASTIC_FORMATS
from replayssm.core.skipping import Skipping, blocks
from replayssm.kernels.step_index import StepIndex

ACTIVATIONS = tuple(FORMATS.values())


def expect(
    name: str,
    tensor: torch.Tensor | None,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | None = None,
) -> None:
    """Check one tensor; `None` in `shape` is any size, a `None` tensor is an absent option.

    Raises:
        ValueError: names the tensor, what was expected and what came.
    """
    if tensor is None:
        return
    fits = tensor.dim() == len(shape) and all(
        want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"{name}: expected a floating-point tensor, got {tensor.dtype}")


def check_state(name: str, state: StateCopy | None, shape: tuple[int | None, ...]) -> None:
    """Check a pool of states as `expect` does; a packed one has checked its own tensors.

    Raises:
        ValueError: as `expect`.
    """
    if not isinstance(state, PackedState):
        expect(name, state, shape)
        if state is not None and state.dtype not in ACTIVATIONS:
            raise ValueError(f"{name}: expected fp32, bf16, fp16 or a PackedState, got {state.dtype}")
    elif any(want not in (None, size) for want, size in zip(shape, state.shape, strict=True)):
        raise ValueError(f"{name}: expected states of shape {list(shape)}, got {list(state.shape)}")


def check_read_state(state: StateCopy, read_state: StateCopy | None) -> None:
    """A read copy has the shape and device of the recurrence copy, and another format.

    Raises:
        ValueError: as `expect`.
    """
    if read_state is None:
        return
    check_state("read_state", read_state, tuple(state.shape))
    if read_state.device != state.device:
        raise ValueError(f"read_state: expected a pool on {state.device}, got one on {read_state.device}")
    if state_format(read_state) == state_format(state):
        raise ValueError(
            f"read_state: state and read_state are both {state_format(state)}; leave read_state out, steps "
            "then read the state itself"
        )


def copies_of(state: StateCopy, read_state: StateCopy | None) -> str | None:
    """`StepCall.copies`."""
    if read_state is not None:
        return f"{state_format(read_state)}/{state_format(state)}"
    return state.format if isinstance(state, PackedState) else None


def is_dense(tensor: torch.Tensor, inner: int) -> bool:
    """Whether the last `inner` dimensions of a tensor lie dense in memory."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for size, stride in zip(tensor.shape[: -inner - 1 : -1], tensor.stride()[::-1], strict=False):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def is_aligned(tensor: torch.Tensor, boundary: int = 16) -> bool:
    """Whether a tensor and each entry of its first two dimensions begin on a boundary of so many bytes."""
    size = tensor.element_size()
    steps = [stride * size for stride, n in zip(tensor.stride()[:2], tensor.shape[:2], strict=True) if n > 1]
    return not any(step % boundary for step in (tensor.data_ptr(), *steps))


def check_heads(value_heads: int, key_heads: int) -> None:
    """Each key head (group) serves the same number of value heads.

    Raises:
        ValueError: it does not.
    """
    if value_heads % key_heads:
        raise ValueError(
            f"state has {value_heads} value heads, which must be a multiple of the {key_heads} key heads "
            "(groups) of the ring"
        )


def check_step(
    state: StateCopy,
    read_state: StateCopy | None,
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    lead: torch.Size,
    out: torch.Tensor,
    out_shape: torch.Size,
    window: int,
    rows: int,
    rings: int,
    index: StepIndex,
) -> None:
    """What the step functions of all rules check alike.

    Raises:
        ValueError: as `expect`.
    """
    check_read_state(state, read_state)
    expect("out", out, tuple(out_shape))
    for name, cursor in (("ring_start", ring_start), ("hist_len", hist_len)):
        if cursor.shape != (rings,) or cursor.dtype != torch.int32:
            raise ValueError(
                f"{name}: expected [{rings}] torch.int32, got {list(cursor.shape)} {cursor.dtype}"
            )
    _check_index(index, lead, state.shape[0], rings)
    tokens = index.rows_and_tokens((lead[0], lead[1]))[1]
    if window < 1 or window + tokens > rows:
        raise ValueError(
            f"a ring of R={rows} rows with window L={window} takes at most {max(rows - window, 0)} "
            f"tokens a step, got T={tokens}: raise max_draft of the ring's layout"
        )


def check_seed(rand_seed: torch.Tensor | None, state: StateCopy) -> None:
    """A seed of stochastic rounding goes with an fp16 or packed state.

    Raises:
        ValueError: as `expect`.
    """
    if rand_seed is None:
        return
    if state_format(state) not in STOCHASTIC_FORMATS:
        raise ValueError(
            f"rand_seed: stochastic rounding is for states in {', '.join(STOCHASTIC_FORMATS)}, got a state "
            f"of {state.dtype}; leave rand_seed out to round to nearest"
        )
    if rand_seed.shape != (1,) or rand_seed.dtype != torch.int64 or rand_seed.device != state.device:
        raise ValueError(
            f"rand_seed: expected [1] torch.int64 on {state.device}, got {list(rand_seed.shape)} "
            f"{rand_seed.dtype} on {rand_seed.device}"
        )


def check_skipping(skipping: Skipping | None, rings: int, heads: int, value_dim: int) -> None:
    """Norms are there for every ring, dense.

    Raises:
        ValueError: as `expect`.
    """
    if skipping is None:
        return
    expect("skipping.norms", skipping.norms, (rings, heads, blocks(value_dim)), torch.float32)
    if not skipping.norms.is_contiguous():
        raise ValueError(f"skipping.norms: expected a dense tensor, got strides {skipping.norms.stride()}")


def check_indices(**indices: torch.Tensor) -> None:
    """Index tensors of one call: `[B]` int32 or int64, as long as the first.

    Raises:
        ValueError: as `expect`.
    """
    first, *_ = indices.values()
    for name, tensor in indices.items():
        if tensor.dim() != 1 or len(tensor) != len(first) or tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name}: expected [{len(first) if first.dim() == 1 else 'B'}] int32 or int64, "
                f"got {list(tensor.shape)} {tensor.dtype}"
            )


def check_commit(
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    slots: torch.Tensor,
    draft_lens: torch.Tensor | int,
    accepted: torch.Tensor | int | None,
    window: int,
    rows: int,
) -> None:
    """What `commit` checks.

    Raises:
        ValueError: as `expect`.
    """
    for name, cursor in (("ring_start", ring_start), ("hist_len", hist_len)):
        if cursor.dim() != 1 or cursor.shape != ring_start.shape or cursor.dtype != torch.int32:
            raise ValueError(
                f"{name}: expected [rings] torch.int32, the same for both cursors, "
                f"got {list(cursor.shape)} {cursor.dtype}"
            )
    if not 1 <= window < rows:
        raise ValueError(f"expected 1 <= window < rows, got window L={window} and R={rows} rows")
    batch = slots.shape[:1]
    most = draft_lens if isinstance(draft_lens, int) else rows - window
    for name, values, limit in (
        ("slots", slots, 0),
        ("draft_lens", draft_lens, rows - window),
        ("accepted", accepted, most),
    ):
        if isinstance(values, torch.Tensor):
            if values.dim() != 1 or values.shape != batch or values.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"{name}: expected [{', '.join(map(str, batch)) or 'B'}] int32 or int64, "
                    f"got {list(values.shape)} {values.dtype}"
                )
        elif values is not None and not 0 <= values <= limit:
            raise ValueError(f"{name}: expected 0 to {limit}, got {values}")


def _check_index(index: StepIndex, lead: torch.Size, slots: int, rings: int) -> None:
    if (index.cu_seqlens is None) != (index.max_seqlen is None):
        raise ValueError("cu_seqlens and max_seqlen come together: pass both or neither")
    if index.cu_seqlens is not None:
        if index.cu_seqlens.dim() != 1 or index.cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "cu_seqlens: expected [B + 1] int32 or int64, "
                f"got {list(index.cu_seqlens.shape)} {index.cu_seqlens.dtype}"
            )
        if lead[0] != 1:
            raise ValueError(f"with cu_seqlens the inputs are [1, total, ...], got batch {lead[0]}")
        if index.draft_lens is not None:
            raise ValueError("draft_lens and cu_seqlens both say how long rows are: pass one")
    batch, tokens = index.rows_and_tokens((lead[0], lead[1]))
    expected = {
        "state_indices": (index.state_indices, (batch,)),
        "ring_indices": (index.ring_indices, (batch,)),
        "draft_lens": (index.draft_lens, (batch,)),
        "parents": (index.parents, (batch, tokens)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name}: expected {list(shape)} int32 or int64, got {list(tensor.shape)} {tensor.dtype}"
            )
    if index.state_indices is None and batch > slots:
        raise ValueError(f"{batch} rows but {slots} slots: pass state_indices")
    if index.state_indices is None and index.ring_indices is None and batch > rings:
        raise ValueError(f"{batch} rows but {rings} rings: pass ring_indices")
