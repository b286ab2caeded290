"""Backends by name: what `auto` takes and says, and that a name is an order (L19)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from replayssm.kernels import BackendUnavailable, StepIndex, registry, torch_backend
from tests.support import Walk, draw, geometry, make_layer, run_step

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No choice made before, none left behind."""
    registry._resolve.cache_clear()
    yield
    registry._resolve.cache_clear()


def test_unknown_name() -> None:
    with pytest.raises(
        ValueError, match="unknown backend 'cuda': expected one of auto, torch, triton, flashinfer"
    ):
        registry.resolve("cuda", CPU)


def test_by_name() -> None:
    assert registry.resolve("torch", CPU) is torch_backend


def test_a_backend_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """L19: asked for by name it fails with the reason, at every call; nothing falls back in silence."""
    monkeypatch.setattr(registry, "BACKENDS", {"torch": registry.BACKENDS["torch"]})
    for _ in range(2):
        with pytest.raises(
            BackendUnavailable,
            match="backend 'flashinfer' cannot run on cpu: this release does not include it; "
            "use backend='torch' or 'auto'",
        ):
            registry.resolve("flashinfer", CPU)


def test_a_backend_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reason is the message; `auto` passes over it."""
    monkeypatch.setattr(torch_backend, "unavailable", lambda device: "no such device today")
    with pytest.raises(BackendUnavailable, match="backend 'torch' cannot run on cpu: no such device today"):
        registry.resolve("torch", CPU)
    monkeypatch.setattr(registry, "PREFERENCE", {"cpu": ("torch",)})
    with pytest.raises(BackendUnavailable, match="no backend can run on cpu"):
        registry.resolve("auto", CPU)


def test_auto_says_once_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="replayssm"):
        taken = {registry.resolve("auto", CPU) for _ in range(3)}
    assert taken == {torch_backend}
    assert [record.getMessage() for record in caplog.records] == [
        "replayssm: backend auto chose torch on cpu"
    ]


def test_auto_takes_the_first_that_can_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cannot, can = ModuleType("cannot"), ModuleType("can")
    cannot.unavailable, can.unavailable = (lambda device: "needs a GPU"), (lambda device: None)
    monkeypatch.setitem(sys.modules, "cannot", cannot)
    monkeypatch.setitem(sys.modules, "can", can)
    monkeypatch.setattr(registry, "BACKENDS", {"triton": "cannot", "torch": "can"})
    monkeypatch.setattr(registry, "PREFERENCE", {"cpu": ("flashinfer", "triton", "torch")})
    with caplog.at_level(logging.INFO, logger="replayssm"):
        assert registry.resolve("auto", CPU) is can
    assert "chose torch on cpu" in caplog.text


def test_a_step_passes_its_backend_on() -> None:
    """A step resolves the name it was given."""
    layer = make_layer(geometry("gdn"))
    walk = Walk.of(layer)
    walk.hand_out(0, 1)
    inputs = draw(layer, 2, 1, walk.generator)
    assert run_step(layer, walk.cache, inputs, StepIndex(), backend="torch").isfinite().all()
    with pytest.raises(ValueError, match="unknown backend 'nothing'"):
        run_step(layer, walk.cache, inputs, StepIndex(), backend="nothing")
