"""Which way round the engine has a Gated DeltaNet state, `[HV, V, K]` or `[HV, K, V]`: shapes don't tell.

Older kernels address the latter in a buffer with the shape of the former, and both are the same where K and V
are. So one token is given to the engine's own kernel, before any request, and its state is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from replayssm.adapters.trtllm.refusals import Incompatible
from replayssm.core.layout import RingLayout


def states_are_turned(update: Callable[..., Any], layout: RingLayout, pool: torch.Tensor) -> bool:
    """Whether `update`, the engine's decode of one token, has a state as `[HV, K, V]`.

    Args:
        update: `fused_sigmoid_gating_delta_rule_update` of the engine.
        layout: of the layer's rings, for its shape and the dtype of its activations.
        pool: states of the layer, for their dtype and device; left alone.

    Raises:
        Incompatible: it is neither way round.
    """
    shape, activations = layout.geometry, layout.activation_dtype
    HV, V, K = shape.state_shape
    state = pool.new_zeros(1, HV, V, K)
    k = pool.new_zeros(1, 1, shape.key_heads, K, dtype=activations)
    v = pool.new_zeros(1, 1, HV, V, dtype=activations)
    k[..., 0], v[..., 1] = 1, 1
    gate, weight = pool.new_zeros(1, HV, dtype=activations), pool.new_zeros(HV, dtype=torch.float32)
    update(
        A_log=weight, dt_bias=weight, q=k, k=k, v=v, a=gate, b=gate, initial_state_source=state,
        initial_state_indices=torch.zeros(1, dtype=torch.int32, device=pool.device),
        cu_seqlens=torch.tensor([0, 1], device=pool.device), use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0, softplus_threshold=20.0,
    )  # fmt: skip
    written = state[0, 0].flatten().nonzero().flatten().tolist()
    # Value row 1 and key column 0, as [V, K] and as [K, V].
    if written not in ([K], [1]):
        raise Incompatible(
            f"replayssm: the engine's decode of a Gated DeltaNet layer wrote a token to {written} of a state "
            f"of {V} x {K}: expected [{K}] or [1]; start without the adapter and report this"
        )
    return written == [1]
