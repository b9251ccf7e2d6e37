"""The worst moment of backward passes, by hand arithmetic and against every moment there is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.backwardpeaks import Peak, _backward, _of_order, backward_peaks
from costmodel.fsdpmemory import Moments
from costmodel.schedules import FORWARD, INPUT, SCHEDULES, WEIGHT, Shape


def layer(saved, gradients, working, *, released=0, **more):
    own = {"adding": working, "making": working + gradients, "gradients": gradients}
    own |= {"kept": gradients, "released": released, "once": True}
    return SimpleNamespace(saved_bytes=saved, moments=Moments(**own | more))


def peak(chunk, *, microbatches=1, held=None, schedule="1f1b"):
    saved = sum(step.saved_bytes * count for step, count in chunk)
    (found,) = backward_peaks(
        SCHEDULES[schedule],
        Shape(1, 1, microbatches),
        [[saved if held is None else held]],
        [[chunk]],
    )
    return found


SMALL, LARGE = layer(10, 1, 5), layer(1, 10, 5)


def test_with_one_micro_batch_no_gradients_are_there_when_the_last_layer_runs_backward():
    assert peak([(SMALL, 4)]) == Peak(40, 0, 6)


def test_gradients_that_outgrow_activations_are_worst_at_the_first_layer():
    assert peak([(LARGE, 4)]) == Peak(4 - 3, 30, 15)


def test_with_more_micro_batches_all_gradients_are_there():
    assert peak([(SMALL, 4)], microbatches=2) == Peak(40, 4, 5)


def test_weights_that_one_pass_gives_up_are_gone_behind_it():
    chunk = [(layer(1, 10, 5, released=8), 4)]
    assert peak(chunk) == Peak(4 - 3, 30, 15, 24)
    assert peak(chunk).total == 1 + 30 + 15 - 24


def test_what_later_layers_have_given_up_is_gone():
    head, block = layer(100, 2, 1), layer(10, 2, 50)
    assert peak([(block, 3), (head, 1)], microbatches=2) == Peak(130, 8, 1)
    assert peak([(layer(10, 2, 150), 3), (head, 1)], microbatches=2) == Peak(30, 8, 150)


def test_where_all_micro_batches_are_in_flight_one_is_gone_when_all_gradients_are_there():
    two = [[[(LARGE, 2)]]] * 2
    flood = backward_peaks(SCHEDULES["gpipe"], Shape(2, 1, 3), [[2.0], [2.0]], two)
    assert flood == [Peak(3 * 2 - 1, 10, 15)] * 2  # 30; of the two others 2 x 2 + 20 + 5
    steady = backward_peaks(SCHEDULES["1f1b"], Shape(2, 1, 3), [[2.0], [2.0]], two)
    assert steady == [Peak(2 * 2, 20, 5), Peak(2, 20, 5)]


def test_what_was_reduced_last_is_there_while_the_next_layer_runs():
    head, block = layer(1, 0, 5, buffer=100, every=True), layer(1, 0, 5, buffer=7, every=True)
    assert peak([(block, 3), (head, 1)]) == Peak(3, 0, 5 + 100)
    assert peak([(block, 3)]) == Peak(2, 0, 5 + 7)


def test_weights_are_gathered_while_the_layer_behind_them_runs():
    block = layer(10, 0, 5, ahead=50)
    assert peak([(block, 2)]) == Peak(20, 0, 5 + 50)
    assert peak([(block, 1)]) == Peak(10, 0, 5)


def test_a_layer_is_worst_when_its_pass_is_over_if_its_gradients_outgrow_what_it_kept():
    assert peak([(layer(10, 0, 5, made=40), 2)]) == Peak(10, 0, 40)


def test_the_gradient_of_a_tied_matrix_stays_until_the_embedding_has_run():
    head, block = layer(1, 0, 5, tied_gradient=100, tied_weights=30), layer(10, 0, 5)
    assert peak([(block, 3), (head, 1)]) == Peak(30, 0, 5 + 100 + 30)
    assert peak([(block, 3), (head, 1)], microbatches=2).working == 5 + 100 + 30


def test_split_passes_keep_the_gradients_behind_weights():
    order = [(kind, 0, batch) for kind in (FORWARD, INPUT, WEIGHT) for batch in (0, 1)]
    kept, chunk = 7, [(layer(10, 0, 5, put_off=7), 1)]
    assert _of_order(order, [10], [_backward(chunk)]).activations == 2 * 10 + 2 * kept


@given(
    st.lists(
        st.tuples(
            st.builds(layer, *(st.integers(0, 50) for _ in range(3)), released=st.integers(0, 9)),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_it_is_the_greatest_of_all_moments_of_one_pass(chunk):
    layers = [step for step, count in chunk for _ in range(count)]
    moments = [
        sum(each.saved_bytes for each in layers[: at + 1])
        + sum(each.moments.gradients - each.moments.released for each in layers[at + 1 :])
        + layers[at].moments.making
        for at in range(len(layers))
    ]
    assert peak(chunk).total == max(moments)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [2, 3, 4, 9])
def test_the_closed_form_is_what_the_order_says(schedule, microbatches):
    own, shape = SCHEDULES[schedule], Shape(2, 1, microbatches)
    chunk = [(SMALL, 3), (LARGE, 2)]
    stages = [[chunk], [chunk]]
    sizes = [[32.0], [32.0]]
    by_order = [_of_order(order, sizes[0], [_backward(chunk)]) for order in own.orders(shape)]
    found = backward_peaks(own, shape, sizes, stages)
    assert [each.total for each in found] == [each.total for each in by_order]
