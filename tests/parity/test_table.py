"""The table of the parity tests: every cell that is not equal bits is to be seen in it."""

from __future__ import annotations

from tests.parity.table import ABSENT, DIFFERS, FAILED, REFERENCE, noted, table, text


def test_the_worst_of_a_cell_is_shown() -> None:
    rows = table(
        [
            noted("one", "gdn", {"flush": 3, "prefill": 2}),
            noted("one", "gdn", {"prefill": 5, "flush": DIFFERS}),
            noted("one", "kda", {"prefill": FAILED}),
            noted("other", "gdn", {"prefill": f"{ABSENT}not here"}),
            noted(REFERENCE, "gdn", {"prefill": "reference", "flush": "reference"}),
        ]
    )
    assert rows == [
        ["rule", "event", REFERENCE, "one", "other"],
        ["gdn", "prefill", "reference", "bits equal (7)", "absent: not here"],
        ["gdn", "flush", "reference", DIFFERS, "not run"],
        ["kda", "prefill", "not run", FAILED, "not run"],
    ]


def test_columns_are_as_wide_as_their_cells() -> None:
    assert text([["rule", "x"], ["a", "long cell"]]) == ["rule  x", "a     long cell"]
