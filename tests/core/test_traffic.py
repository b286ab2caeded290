"""The traffic model: the flush cycle, each term, and the published figures for Nemotron-3-Super.

Published: 0.58 of the conventional traffic at L = 16, and a best window near 13. They come out when each
head is counted by itself; with every byte counted once, as the ring holds it, replay moves less.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm.core import traffic
from replayssm.core.geometry import LayerGeometry, Rule
from replayssm.core.layout import RingLayout
from replayssm.core.policy import must_flush, steps_per_flush
from replayssm.core.precision import Precision
from replayssm.core.traffic import EVERY_BYTE, PER_HEAD, Accounting

SUPER = LayerGeometry.mamba2(heads=128, head_dim=64, d_state=128, groups=8)
GDN = LayerGeometry(Rule.GDN, value_heads=64, key_heads=16, value_dim=128, key_dim=128)
KDA = LayerGeometry(Rule.KDA, value_heads=32, key_heads=32, value_dim=128, key_dim=128)
STATE = 4 * 2**20


def ratio(window: int, accounting: Accounting) -> float:
    step = traffic.replay(RingLayout(SUPER, window, 1), accounting=accounting)
    return step.total / traffic.conventional(SUPER, accounting=accounting).total


def test_published_figures_come_out_per_head() -> None:
    assert round(ratio(16, PER_HEAD), 2) == 0.58
    assert traffic.best_window(SUPER, accounting=PER_HEAD) == 13


def test_the_per_head_accounting_has_a_closed_form() -> None:
    d, n = 64, 128
    optimum = math.sqrt(4 * d * n / (d + n))
    assert optimum == pytest.approx(13.06, abs=0.01)
    for window in (4, 13, 16, 32):
        closed = (4 * d * n * (1 + 1 / window) + window * (d + n)) / (8 * d * n)
        # The form leaves out dt (4 bytes a record) and half a record of the mean history (L + 1) / 2.
        assert ratio(window, PER_HEAD) == pytest.approx(closed, abs=0.004)


def test_our_layout_moves_less_since_a_group_shares_its_key() -> None:
    assert round(ratio(16, EVERY_BYTE), 3) == 0.555
    assert traffic.best_window(SUPER) == 21
    # It is the shared key that makes the difference, not what else is counted.
    shared = Accounting(keys_per_value_head=False, record_write=False, token_io=False)
    assert round(ratio(16, shared), 2) == 0.55
    assert round(ratio(16, Accounting(keys_per_value_head=True, token_io=False)), 2) == 0.58


def test_state_alone_is_half_and_one_flush() -> None:
    step = traffic.replay(RingLayout(SUPER, 16, 1))
    assert (step.state_read, step.state_write) == (STATE, STATE / 16)


def test_terms_of_a_standard_step() -> None:
    layout = RingLayout(SUPER, 16, 1)
    step = traffic.replay(layout)
    record = 128 * 64 * 2 + 8 * 128 * 2 + 128 * 4
    assert step.ring_read == pytest.approx(8.5 * record)
    assert step.ring_write == record
    assert step.token_io == 2 * (2 * 128 * 64 + 2 * 8 * 128 + 128)
    assert step.total == pytest.approx(sum((step.state_read, step.state_write, 9.5 * record, step.token_io)))
    assert step.seconds(2e12) == pytest.approx(step.total / 2e12)


def test_terms_of_a_delta_rules_records() -> None:
    """An fp32 `u`, the bf16 key and the fp32 log-decay of every live record, by every step."""
    record = 32 * 128 * 4 + 16 * 128 * 2 + 32 * 4
    step = traffic.replay(RingLayout(LayerGeometry(Rule.GDN, 32, 16, 128, 128), 16, 1))
    assert step.ring_read == pytest.approx(8.5 * record)
    assert step.ring_write == record


def test_conventional_verification_writes_a_snapshot_per_token() -> None:
    step = traffic.conventional(GDN, draft=4)
    assert (step.state_read, step.state_write) == (STATE, 4 * STATE)
    assert step.token_io == 4 * traffic.conventional(GDN).token_io


def test_low_precision_scales_the_state_only() -> None:
    half = traffic.replay(RingLayout(SUPER, 16, 1), precision=Precision("fp16", "fp16"))
    full = traffic.replay(RingLayout(SUPER, 16, 1))
    assert half.state_read * 2 == full.state_read
    assert half.ring_read == full.ring_read


def test_a_read_copy_is_read_and_both_are_written() -> None:
    """NVFP4 beside fp16: 2.56 bytes a value; a step reads the former, a fold of Mamba-2 the latter."""
    precision, values = Precision.parse("nvfp4/fp16+sr"), SUPER.state_elements
    read = values // 2 + values // 16 + 4 * 128
    step = traffic.replay(RingLayout(SUPER, 16, 1, split=True), precision=precision)
    assert step.state_read == read + 1 / 16 * 2 * values
    assert step.state_write == 1 / 16 * (read + 2 * values)
    assert step.ring_read == traffic.replay(RingLayout(SUPER, 16, 1)).ring_read
    assert round(traffic.copies_bytes(SUPER, precision) / values, 2) == 2.56
    assert traffic.conventional(SUPER, precision=precision).state_read == 2 * values
    memory = traffic.sequence_memory(RingLayout(SUPER, 16, 4, split=True), 4, precision=precision)
    assert (memory.state, memory.snapshots) == (read + 2 * values, 4 * 2 * values)
    assert memory.conventional == 2 * values + memory.conv + memory.snapshots


@pytest.mark.parametrize("geometry", [GDN, KDA])
def test_a_delta_rules_fold_reads_both_copies_and_records_beta(geometry: LayerGeometry) -> None:
    precision, values = Precision.parse("fp8/fp32"), geometry.state_elements
    layout = RingLayout(geometry, 16, 1, split=True)
    read = values + 4 * geometry.value_heads * geometry.value_dim
    step = traffic.replay(layout, precision=precision)
    assert step.state_read == read + 1 / 16 * (read + 4 * values)
    assert layout.record_bytes == RingLayout(geometry, 16, 1).record_bytes + 4 * geometry.value_heads
    assert layout.fields[-1].name == "beta_cache"


@pytest.mark.parametrize("name", ["fp8+sr", "int8+sr", "nvfp4+sr", "mxfp4+sr"])
def test_one_packed_copy(name: str) -> None:
    precision = Precision.parse(name)
    step = traffic.replay(RingLayout(SUPER, 16, 1), precision=precision)
    stored = traffic.state_bytes(SUPER, precision)
    assert (step.state_read, step.state_write) == (17 / 16 * stored, 1 / 16 * stored)
    assert 0.5 < stored / SUPER.state_elements < 1.1


def test_a_layout_for_other_copies_is_refused() -> None:
    with pytest.raises(ValueError, match=r"precision nvfp4/fp32 and a layout with split=False"):
        traffic.replay(RingLayout(SUPER, 16, 1), precision=Precision.parse("nvfp4/fp32"))


def test_wider_activations_make_larger_records() -> None:
    layout = RingLayout(SUPER, 16, 1, torch.float32)
    assert traffic.replay(layout).ring_read > 1.9 * traffic.replay(RingLayout(SUPER, 16, 1)).ring_read


@pytest.mark.parametrize("geometry", [SUPER, GDN, KDA])
@pytest.mark.parametrize(("draft", "accepted"), [(1, 1), (4, 4), (4, 2.5), (8, 3)])
def test_no_window_beats_the_best(geometry: LayerGeometry, draft: int, accepted: float) -> None:
    best = traffic.best_window(geometry, draft, accepted)

    def total(window: int) -> float:
        return traffic.replay(RingLayout(geometry, window, draft), draft, accepted).total

    assert total(best) == min(total(window) for window in range(draft, 129))


@given(st.integers(1, 32), st.data())
def test_a_cycle_of_whole_commits_is_the_rules_own(window: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, window))
    cycle = traffic.flush_cycle(window, tokens)
    steps = steps_per_flush(window, tokens)
    histories = [tokens * step for step in range(1, steps + 1)]
    assert cycle.flush_share == pytest.approx(1 / steps)
    assert cycle.records == pytest.approx(sum(histories) / steps)


@pytest.mark.parametrize(("draft", "accepted"), [(4, 2.5), (4, 0.25), (8, 7.75), (3, 3.0)])
def test_a_cycle_of_mixed_commits_matches_a_walk(draft: int, accepted: float) -> None:
    window, steps, flushes, records, history = 16, 40_000, 0, 0, 0
    generator = torch.Generator().manual_seed(0)
    extra = torch.rand(steps, generator=generator) < accepted - math.floor(accepted)
    for more in extra.tolist():
        flush = must_flush(history, draft, window)
        flushes, records = flushes + flush, records + history
        history = (0 if flush else history) + math.floor(accepted) + more
    cycle = traffic.flush_cycle(window, draft, accepted)
    assert flushes / steps == pytest.approx(cycle.flush_share, rel=0.03)
    assert records / steps == pytest.approx(cycle.records, rel=0.03)


@pytest.mark.parametrize("accepted", [0, -1, 4.5])
def test_refused_acceptance(accepted: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most the draft T=4"):
        traffic.flush_cycle(16, 4, accepted)


def test_refused_drafts() -> None:
    with pytest.raises(ValueError, match=r"20 tokens .* L=16"):
        traffic.flush_cycle(16, 20)
    with pytest.raises(ValueError, match="max_draft=2, got 3"):
        traffic.replay(RingLayout(SUPER, 16, 2), 3)


def test_memory_of_a_sequence() -> None:
    memory = traffic.sequence_memory(RingLayout(SUPER, 16, 4), 4)
    assert (memory.state, memory.snapshots) == (STATE, 4 * STATE)
    assert memory.conv == 3 * (128 * 64 + 2 * 8 * 128) * 2
    assert memory.ring == 20 * 18944
    assert memory.replay == memory.state + memory.conv + memory.ring
    assert memory.conventional == memory.state + memory.conv + memory.snapshots


def test_standard_decoding_needs_no_snapshots() -> None:
    assert traffic.sequence_memory(RingLayout(SUPER, 16, 1)).snapshots == 0


def test_sequences_that_fit() -> None:
    assert traffic.sequences_that_fit(10, 3) == 3
    assert traffic.sequences_that_fit(2, 3) == 0


def test_traffic_adds_and_scales_by_term() -> None:
    step = traffic.conventional(SUPER)
    assert step + step == step.scaled(2)
    assert (step + step).total == 2 * step.total


def test_norms_are_counted() -> None:
    """A norm for 16 value rows of each head, in memory, and read by every step; none without a tolerance."""
    geometry = LayerGeometry(Rule.GDN, 32, 16, 128, 128)
    plain, skips = (RingLayout(geometry, 16, 1, skip_tolerance=tolerance) for tolerance in (0.0, 0.01))
    norms = 32 * 8 * 4
    assert (plain.norm_bytes, skips.norm_bytes) == (0, norms)
    assert traffic.sequence_memory(skips).ring - traffic.sequence_memory(plain).ring == norms
    found = skips.allocate_norms(3, "cpu")
    assert found is not None
    assert found.norms.nbytes == 3 * norms
    assert plain.allocate_norms(3, "cpu") is None
    before, after = traffic.replay(plain), traffic.replay(skips)
    assert after.ring_read - before.ring_read == norms
    assert after.ring_write - before.ring_write == norms * traffic.flush_cycle(16).flush_share
