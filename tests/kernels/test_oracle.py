"""The oracle itself, against numbers worked out by hand: one head, states of one or two entries."""

from __future__ import annotations

from math import exp, log, sqrt

import pytest
import torch

from tests import oracle


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.double)


def test_mamba2_by_hand() -> None:
    """`S = e^{A dt} S + dt x B`, `y = S C + D x`, with a halving decay."""
    token = {"A": column(-log(2.0)), "dt": column(1.0), "D": column(10.0)}
    token |= {"x": column(3.0)[None], "B": column(1.0, 2.0)[None], "C": column(1.0, -1.0)[None]}
    S, y = oracle.mamba2_token(column(4.0, 8.0).view(1, 1, 2), token)
    assert S.flatten().tolist() == pytest.approx([4 / 2 + 3, 8 / 2 + 6])
    assert y.item() == pytest.approx(5 - 10 + 30)
    S, y = oracle.mamba2_token(S, token | {"dt": column(2.0)})
    assert S.flatten().tolist() == pytest.approx([5 / 4 + 6, 10 / 4 + 12])
    assert y.item() == pytest.approx(7.25 - 14.5 + 30)


def test_gdn_by_hand() -> None:
    """`u = beta (v - e^g S k)`, `S = e^g S + u k^T`, `o = S q`, keys of length one."""
    token = {"q": column(0.0, 2.0)[None], "k": column(3.0, 4.0)[None], "v": column(5.0)[None]}
    token |= {"g": column(-log(2.0)), "beta": column(0.5)}
    S, o = oracle.delta_token(column(2.0, 1.0).view(1, 1, 2), token)
    u = 0.5 * (5 - (1.0 * 0.6 + 0.5 * 0.8))
    assert S.flatten().tolist() == pytest.approx([1.0 + 0.6 * u, 0.5 + 0.8 * u], rel=1e-6)
    assert o.item() == pytest.approx((0.5 + 0.8 * u) / sqrt(2), rel=1e-6)


def test_kda_by_hand() -> None:
    """As GDN, with a decay for each key channel."""
    token = {"q": column(1.0, 0.0)[None], "k": column(0.0, 1.0)[None], "v": column(2.0)[None]}
    token |= {"g": column(-1.0, -2.0)[None], "beta": column(1.0)}
    S, o = oracle.delta_token(column(3.0, 7.0).view(1, 1, 2), token)
    assert S.flatten().tolist() == pytest.approx([3 * exp(-1), 2.0], rel=1e-5)
    assert o.item() == pytest.approx(3 * exp(-1) / sqrt(2), rel=1e-6)


def test_beta_one_stores_the_value_under_its_key() -> None:
    """With `beta = 1` a delta rule recalls exactly what it has just written; Mamba-2 adds."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(1, 8, generator=generator)
    token = {
        "q": k,
        "k": k,
        "v": torch.randn(1, 4, generator=generator),
        "g": -torch.rand(1),
        "beta": column(1),
    }
    _, o = oracle.delta_token(torch.randn(1, 4, 8, generator=generator).double(), token)
    torch.testing.assert_close(o * sqrt(8), token["v"].double(), rtol=1e-5, atol=1e-5)


def test_heads_share_the_key_of_their_group() -> None:
    """Value head `h` uses key head `h // (HV / H)`, consecutive heads together."""
    B = torch.tensor([[1.0], [10.0]])
    token = {
        "A": -torch.ones(4),
        "dt": torch.ones(4),
        "D": torch.zeros(4),
        "x": torch.ones(4, 1),
        "B": B,
        "C": B,
    }
    S, y = oracle.mamba2_token(torch.zeros(4, 1, 1, dtype=torch.double), token)
    assert S.flatten().tolist() == [1, 1, 10, 10]
    assert y.flatten().tolist() == [1, 1, 100, 100]


def test_softplus() -> None:
    values = column(-800.0, -1.0, 0.0, 1.0, 800.0)
    want = [0.0, log(1 + exp(-1)), log(2), log(1 + exp(1)), 800.0]
    assert oracle.softplus(values).tolist() == pytest.approx(want)


def test_a_run_is_its_tokens() -> None:
    token = {"q": column(1.0)[None], "k": column(1.0)[None], "v": column(2.0)[None]}
    token |= {"g": column(0.0), "beta": column(1.0)}
    S, outputs = oracle.run("gdn", torch.zeros(1, 1, 1, dtype=torch.double), [token, token])
    assert len(outputs) == 2
    assert S.item() == pytest.approx(2.0, rel=1e-5)
