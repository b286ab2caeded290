"""Backends by name and call: what `auto` takes and says, and that a name is an order (L19)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from replayssm import kernels
from replayssm.core import Rule
from replayssm.kernels import BackendUnavailable, StepCall, StepIndex, registry, torch_backend
from tests import support
from tests.support import RULES, Walk, draw, geometry, ints, make_layer, run_step

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No choice made before, none left behind."""

    def forget() -> None:
        registry._resolve.cache_clear()
        registry._resolve_operation.cache_clear()
        registry._said.clear()

    forget()
    yield
    forget()


def step_call(**changed: Any) -> StepCall:
    """A plain GDN decode step."""
    call = StepCall(
        Rule.GDN, 4, 2, 5, 8, 10, 6, 1, False, False, False, False, False, False, torch.float32,
        torch.bfloat16, 3,
    )  # fmt: skip
    return replace(call, **changed)


Fake = Callable[..., ModuleType]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Makes a backend of this name, first choice of `auto` on the CPU before those made earlier."""
    monkeypatch.setattr(registry, "BACKENDS", {})
    monkeypatch.setattr(registry, "PREFERENCE", {"cpu": ()})

    def make(
        name: str,
        missing: str | None = None,
        refuses: Callable[[StepCall], str | None] | None = None,
        **has: Any,
    ) -> ModuleType:
        module = ModuleType(f"fake_{name}")
        module.unavailable = lambda device: missing  # type: ignore[attr-defined]
        module.refuses = refuses or (lambda call: None)  # type: ignore[attr-defined]
        for key, value in has.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        registry.BACKENDS[name] = module.__name__
        registry.PREFERENCE["cpu"] = (name, *registry.PREFERENCE["cpu"])
        return module

    return make


def no_trees(call: StepCall) -> str | None:
    return "takes no draft trees" if call.tree else None


def test_unknown_name() -> None:
    with pytest.raises(
        ValueError, match="unknown backend 'tpu': expected one of auto, torch, triton, cuda, flashinfer"
    ):
        registry.resolve("tpu", CPU)
    with pytest.raises(ValueError, match="unknown backend 'tpu'"):
        registry.resolve_operation("tpu", CPU, "commit")


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


def test_auto_takes_the_first_that_can_run(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    can = fake("torch")
    fake("triton", missing="needs a GPU")
    with caplog.at_level(logging.INFO, logger="replayssm"):
        assert registry.resolve("auto", CPU) is can
    assert "chose torch on cpu (triton: needs a GPU)" in caplog.text


def test_a_backend_that_refuses_the_call(fake: Fake) -> None:
    """By name it fails with the reason; for another call, and for none, it serves."""
    cuda = fake("cuda", refuses=no_trees)
    assert registry.resolve("cuda", CPU, step_call()) is cuda
    assert registry.resolve("cuda", CPU) is cuda
    with pytest.raises(
        BackendUnavailable, match="backend 'cuda' cannot serve this gdn step on cpu: takes no draft trees"
    ):
        registry.resolve("cuda", CPU, step_call(tree=True))


def test_auto_passes_over_a_refusal_and_says_so_once(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    """One line for each rule and backend, whatever else differs between the calls."""
    torch_like, cuda = fake("torch"), fake("cuda", refuses=no_trees)
    with caplog.at_level(logging.INFO, logger="replayssm"):
        for batch in (1, 2, 3):
            assert registry.resolve("auto", CPU, step_call(batch=batch)) is cuda
            assert registry.resolve("auto", CPU, step_call(batch=batch, tree=True)) is torch_like
        assert registry.resolve("auto", CPU, step_call(rule=Rule.KDA)) is cuda
    assert [record.getMessage() for record in caplog.records] == [
        "replayssm: backend auto chose cuda for gdn on cpu",
        "replayssm: backend auto chose torch for gdn on cpu (cuda: takes no draft trees)",
        "replayssm: backend auto chose cuda for kda on cpu",
    ]


def test_a_gpu_is_not_left_to_torch(fake: Fake) -> None:
    """With `auto` an engine learns at its start that only torch would serve; named, or unasked, torch may."""
    torch_like, cuda = fake("torch"), fake("cuda", refuses=no_trees)
    assert registry.resolve_serving("auto", CPU, step_call()) is cuda
    tree = step_call(tree=True)
    assert registry.resolve("auto", CPU, tree) is torch_like
    with pytest.raises(
        BackendUnavailable,
        match=r"no kernels on cpu serve this gdn step, and the torch backend is many times slower "
        r"\(cuda: takes no draft trees\): change precision or skip_tolerance, or name backend 'torch'",
    ):
        registry.resolve_serving("auto", CPU, tree)
    assert registry.resolve_serving("torch", CPU, tree) is torch_like
    assert registry.resolve_serving("auto", CPU) is cuda


def test_where_there_are_no_kernels_torch_serves() -> None:
    assert registry.resolve_serving("auto", CPU, step_call(tree=True)) is torch_backend


def test_no_backend_serves_the_call(fake: Fake) -> None:
    fake("cuda", refuses=no_trees)
    with pytest.raises(BackendUnavailable, match="no backend can run on cpu: cuda: takes no draft trees"):
        registry.resolve("auto", CPU, step_call(tree=True))


def test_a_call_is_decided_once(fake: Fake) -> None:
    asked: list[StepCall] = []
    fake("cuda", refuses=asked.append)
    for _ in range(3):
        registry.resolve("auto", CPU, step_call())
    assert asked == [step_call()]


def test_operations_of_backends_that_have_steps_only(fake: Fake) -> None:
    """`auto` passes them over; named, they leave the operation to Triton's, which must run there too."""
    fake("torch", commit=print, compact=print)
    triton = fake("triton", commit=print)
    cuda = fake("cuda")
    assert registry.resolve("auto", CPU) is cuda
    assert registry.resolve_operation("auto", CPU, "commit") is triton
    assert registry.resolve_operation("cuda", CPU, "commit") is triton
    assert registry.resolve_operation("auto", CPU, "compact").__name__ == "fake_torch"
    with pytest.raises(BackendUnavailable, match="no backend can run fly on cpu: cuda: has no fly; triton"):
        registry.resolve_operation("auto", CPU, "fly")


def test_operations_of_a_backend_that_cannot_run(fake: Fake) -> None:
    fake("triton", missing="needs a GPU", commit=print)
    fake("flashinfer", missing="flashinfer is not installed")
    fake("cuda")
    with pytest.raises(BackendUnavailable, match="backend 'flashinfer' cannot run on cpu: flashinfer is not"):
        registry.resolve_operation("flashinfer", CPU, "commit")
    with pytest.raises(BackendUnavailable, match="backend 'triton' cannot run on cpu: needs a GPU"):
        registry.resolve_operation("cuda", CPU, "commit")


@pytest.fixture
def seen(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> list[StepCall]:
    """The calls that a step describes; the torch backend serves them."""
    calls: list[StepCall] = []
    steps = {name: getattr(torch_backend, name) for name in ("mamba2_step", "gdn_step", "kda_step")}
    fake("torch", refuses=calls.append, **steps)
    return calls


@pytest.mark.parametrize("rule", RULES)
def test_what_a_step_says_of_itself(rule: str, seen: list[StepCall]) -> None:
    layer = make_layer(geometry(rule), act=torch.bfloat16, state=torch.float16)
    walk = Walk.of(layer)
    walk.hand_out(0, 1)
    inputs = draw(layer, 2, 3, walk.generator)
    run_step(layer, walk.cache, inputs, StepIndex())
    per_head = torch.zeros(4)
    options: dict[str, Any] = {"A_log": per_head}
    if rule == "mamba2":
        options = {"dt_softplus": True, "z": inputs["x"]}
    elif rule == "kda":
        options["lower_bound"] = -5.0
    parents = torch.tensor([[-1, 0, 0]] * 2)
    index = StepIndex(draft_lens=ints([1, 3]), parents=parents)
    out = torch.empty(2, 3, 4, 5)
    run_step(layer, walk.cache, inputs, index, out=out, **options)
    packed = support.pack(inputs, [3, 1])
    run_step(layer, walk.cache, packed, StepIndex(cu_seqlens=ints([0, 3, 4]), max_seqlen=3))
    wide = torch.empty(2, 3, 4, 6, dtype=torch.bfloat16)[..., 1:]
    run_step(layer, walk.cache, inputs, StepIndex(), out=wide)
    run_step(layer, walk.cache, inputs, StepIndex(), rand_seed=torch.tensor([1]), layer=2)
    plain = StepCall(
        Rule(rule), 4, 2, 5, 8, 10, 6, 3, False, False, False, False, False, False, torch.float16,
        torch.bfloat16, 2, aligned=False, use_qk_l2norm=rule != "mamba2",
    )  # fmt: skip
    assert seen == [
        plain,
        replace(
            plain, tree=True, draft_lens=True, raw_gates=True, lower_bound=rule == "kda", z=rule == "mamba2",
            activation_dtype=None,
        ),
        replace(plain, varlen=True),
        replace(plain, dense=False),
        replace(plain, stochastic=True),
    ]  # fmt: skip


@pytest.mark.parametrize("off", [None, "state", "k_cache", "out"])
def test_what_is_off_a_boundary_is_said(off: str | None, seen: list[StepCall]) -> None:
    """Pools and outputs that begin between two vectors: for a backend that reads by vectors to refuse."""

    def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name != off:
            return tensor
        return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)

    layer = make_layer(geometry("gdn", V=8))
    layer = replace(
        layer,
        state=moved("state", layer.state),
        rings={name: moved(name, ring) for name, ring in layer.rings.items()},
    )
    walk = Walk.of(layer)
    walk.hand_out(0)
    inputs = draw(layer, 1, 1, walk.generator)
    run_step(layer, walk.cache, inputs, StepIndex(ints([0])), out=moved("out", torch.empty(1, 1, 4, 8)))
    assert [call.aligned for call in seen] == [off is None]


@pytest.mark.parametrize(
    "strided",
    ["state", "k_cache", "g_cache", "hist_len", "A_log", "state_indices", "parents"],
)
def test_what_is_not_dense_is_said(strided: str, seen: list[StepCall]) -> None:
    """Kernels that step through memory row by row can refuse what does not lie so."""
    layer = make_layer(geometry("gdn"))
    walk = Walk.of(layer)
    walk.hand_out(0, 1)

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[..., None].repeat_interleave(2, -1)[..., 0] if name == strided else tensor

    index = StepIndex(
        cut("state_indices", ints([0, 1])), parents=cut("parents", torch.tensor([[-1, 0, 0]] * 2))
    )
    kernels.gdn_step(
        cut("state", layer.state),
        **{name: cut(name, ring) for name, ring in layer.rings.items()},
        ring_start=walk.cache.cursors.start,
        hist_len=cut("hist_len", walk.cache.cursors.history),
        **draw(layer, 2, 3, walk.generator),
        out=torch.empty(2, 3, 4, 5),
        A_log=cut("A_log", torch.zeros(4)),
        window=6,
        index=index,
    )
    assert [call.dense for call in seen] == [False]


def test_a_step_passes_its_backend_on() -> None:
    """A step resolves the name it was given."""
    layer = make_layer(geometry("gdn"))
    walk = Walk.of(layer)
    walk.hand_out(0, 1)
    inputs = draw(layer, 2, 1, walk.generator)
    assert run_step(layer, walk.cache, inputs, StepIndex(), backend="torch").isfinite().all()
    with pytest.raises(ValueError, match="unknown backend 'nothing'"):
        run_step(layer, walk.cache, inputs, StepIndex(), backend="nothing")
