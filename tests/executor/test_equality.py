"""Every strategy and composition equals one process, by the collectives that the plan means."""

from __future__ import annotations

import pytest
import torch
from cases import BATCH, SEQ, TYPES, alone, expected_elements, run_case
from expert_matrix import ALL_CASES
from table import PAGE, row

UNEVEN = ("ep", "expert_tp")


def assert_equal(outcomes, reference, tolerance):
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(reference.losses, rel=tolerance, abs=0)
        assert outcome.norms == pytest.approx(reference.norms, rel=10 * tolerance, abs=0)


def assert_gradients(outcomes, reference, tolerance):
    """Each rank's part is that of the whole, and together the parts are the whole."""
    # Some gradients are zero but for rounding: softmax does not see a bias of the keys.
    floor = 1e-3 * max(float(whole.abs().max()) for _, whole in reference.gradients.values())
    seen = {name: torch.zeros(whole.shape) for name, (_, whole) in reference.gradients.items()}
    for outcome in outcomes:
        for name, (offset, part) in outcome.gradients.items():
            whole_name = name
            if name not in reference.gradients:  # a copy of the tied matrix
                whole_name = "layers.embedding.tokens"
            whole = reference.gradients[whole_name][1]
            place = tuple(slice(at, at + n) for at, n in zip(offset, part.shape, strict=True))
            if not part.numel():
                continue
            scale = max(floor, float(whole.abs().max()))
            assert float((part - whole[place]).abs().max()) <= tolerance * scale, name
            seen[whole_name][place] += 1
    assert all(bool((count > 0).all()) for count in seen.values())


def assert_traffic(outcomes):
    """Every rank ran what was planned. How many tokens go from whom to whom depends on the data:
    there counts are exact, and bytes of all-to-alls in the sum over ranks.
    """
    for outcome in outcomes:
        assert [even(each) for each in outcome.ran] == [even(each) for each in outcome.planned]
    for each in outcomes[0].planned:
        if each["kind"] == "all-to-all":
            key = (each["kind"], each["axis"])
            ran, planned = (
                sum(row["bytes"] for row in rows if (row["kind"], row["axis"]) == key)
                for rows in (
                    [row for outcome in outcomes for row in outcome.ran],
                    [row for outcome in outcomes for row in outcome.planned],
                )
            )
            assert ran == planned


def even(row):
    """What does not depend on the data."""
    return row | {"bytes": None} if row["axis"] in UNEVEN else row


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_a_layout_equals_one_process(case):
    found = run_case(case)
    for dtype, tolerance in TYPES.items():
        reference, outcomes = alone(case.model)[dtype], found[dtype]
        assert_equal(outcomes, reference, tolerance)
        assert_gradients(outcomes, reference, 10 * tolerance)
        assert sum(outcome.held for outcome in outcomes) == expected_elements(case)
        assert_traffic(outcomes)
    assert row(case, found) in PAGE.read_text(encoding="utf-8"), "run tests/executor/table.py"


@pytest.mark.parametrize("model", sorted({case.model for case in ALL_CASES}))
def test_one_process_learns(model):
    reference = alone(model)[torch.float64]
    assert len(set(reference.losses)) == len(reference.losses)
    assert max(reference.norms) > 0.5  # so that gradients are clipped
    assert BATCH * SEQ > 100
