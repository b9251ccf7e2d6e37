"""Every strategy and composition equals one process, by the collectives that the plan means."""

from __future__ import annotations

import pytest
import torch
from cases import BATCH, SEQ, TYPES, alone, expected_elements, run_case
from matrix import CASES
from table import PAGE, row


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layout_equals_one_process(case):
    found = run_case(case)
    for dtype, tolerance in TYPES.items():
        reference, outcomes = alone(case.model)[dtype], found[dtype]
        assert_equal(outcomes, reference, tolerance)
        assert_gradients(outcomes, reference, 10 * tolerance)
        assert sum(outcome.held for outcome in outcomes) == expected_elements(case)
        for outcome in outcomes:
            assert outcome.ran == outcome.planned
    assert row(case, found) in PAGE.read_text(encoding="utf-8"), "run tests/executor/table.py"


@pytest.mark.parametrize("model", sorted({case.model for case in CASES}))
def test_one_process_learns(model):
    reference = alone(model)[torch.float64]
    assert len(set(reference.losses)) == len(reference.losses)
    assert max(reference.norms) > 0.5  # so that gradients are clipped
    assert BATCH * SEQ > 100
