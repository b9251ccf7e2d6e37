"""The worst moment of a block's backward pass, by hand."""

from __future__ import annotations

from costmodel.backwardwalk import worst_moment
from costmodel.layout import NO_RECOMPUTE, Recompute, RecomputeKind
from costmodel.operators import Operator, Saved, gemm

ROWS, WIDTH, INNER, BYTES = 3, 9, 20, 2
STREAM = ROWS * WIDTH * BYTES
WEIGHT, KEPT = WIDTH * INNER * BYTES, ROWS * INNER * BYTES
OPERATORS = (
    Operator(name="norm", saved=(Saved("input", STREAM),)),
    gemm("up", (ROWS, INNER, WIDTH), module="mlp", saved=(Saved("x", STREAM, "layernorm"),)),
    Operator(name="gelu", module="mlp", saved=(Saved("up", KEPT, "mlp"),), transient_bytes=KEPT),
    gemm("down", (ROWS, WIDTH, INNER), module="mlp", saved=(Saved("activated", KEPT, "mlp"),)),
)


def worst(*, recompute=NO_RECOMPUTE, collects=True, operators=OPERATORS):
    how = {"stream": STREAM, "element": BYTES, "collects": collects}
    return worst_moment(operators, recompute, **how)


def test_saved_tensors_go_while_gradients_of_weights_come():
    """At the first product: the stream's gradient, what lies before it, both weights, and the
    gradients of what comes out of it and goes in.
    """
    first_product = STREAM + 2 * STREAM + 2 * WEIGHT + KEPT + STREAM
    last_product = STREAM + 2 * STREAM + 2 * KEPT + WEIGHT + STREAM + KEPT
    assert first_product > last_product
    assert worst() == first_product


def test_gradients_that_are_added_up_at_once_do_not_stay():
    assert worst(collects=False) == 3 * STREAM + 2 * KEPT + WEIGHT + STREAM + KEPT


def test_full_recomputation_needs_at_its_worst_what_none_does():
    assert worst(recompute=Recompute(RecomputeKind.FULL)) == worst()


def test_what_is_computed_again_is_there_for_its_own_operator_alone():
    layernorm = Recompute(RecomputeKind.SELECTIVE, ("layernorm",))
    last = worst(recompute=layernorm, collects=False)
    assert last == worst(collects=False) - STREAM


def test_a_feed_forward_is_computed_again_in_one_go():
    mlp = Recompute(RecomputeKind.SELECTIVE, ("layernorm", "mlp"))
    assert worst(recompute=mlp, collects=False) == worst(collects=False)
