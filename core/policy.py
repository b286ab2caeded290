"""The flush rule, in its one place.

A step of `T` drafts over `h` records of history flushes exactly when `h + T > L`. The rule takes ints
and int tensors alike, so the host, the torch backend and the tests share this text.
"""

from __future__ import annotations

from typing import overload

import torch


@overload
def must_flush(history: int, draft: int, window: int) -> bool: ...
@overload
def must_flush(history: torch.Tensor, draft: torch.Tensor | int, window: int) -> torch.Tensor: ...
def must_flush(history: int | torch.Tensor, draft: int | torch.Tensor, window: int) -> bool | torch.Tensor:
    """Whether a step folds its history into the checkpoint: `h + T > L`.

    Args:
        history: committed records `h`, an int or an int tensor.
        draft: tokens `T` of this step for the same rows, an int or an int tensor.
        window: `L`.

    Returns:
        A bool, or a bool tensor of the broadcast shape.
    """
    return history + draft > window


def capacity(window: int, max_draft: int, max_path: int | None = None) -> int:
    """Rows `R = L + T_max` of a ring: a full window of history and a step's drafts never overlap.

    Args:
        window: `L`.
        max_draft: `T_max`, the most tokens (tree nodes) of one step.
        max_path: the most tokens a step may accept; by default `max_draft`, as for a chain. The
            accepted path of a draft tree is shorter than the tree.

    Raises:
        ValueError: the accepted tokens of a step could exceed the window.
    """
    path = max_draft if max_path is None else max_path
    if window < 1:
        raise ValueError(f"window L must be at least 1, got {window}")
    if not 1 <= path <= max_draft:
        raise ValueError(f"max_path must be between 1 and max_draft={max_draft}, got {path}")
    if path > window:
        raise ValueError(
            f"a step may accept up to {path} tokens but the window is L={window}: they could never "
            "fit; raise the window, or lower max_draft (for draft trees: max_path)"
        )
    return window + max_draft


def steps_per_flush(window: int, tokens_per_step: int) -> int:
    """Steps from one flush to the next when every step commits `tokens_per_step` tokens.

    Counted by the rule itself: history grows by the committed tokens until the next step must flush.
    """
    if not 1 <= tokens_per_step <= window:
        raise ValueError(f"tokens_per_step must be between 1 and the window {window}, got {tokens_per_step}")
    history, steps = tokens_per_step, 1
    while not must_flush(history, tokens_per_step, window):
        history, steps = history + tokens_per_step, steps + 1
    return steps
