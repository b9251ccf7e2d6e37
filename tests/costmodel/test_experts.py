"""How experts run: CUDA graphs, ways of tokens to experts, micro-batches that are interleaved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_estimate import cluster, context_of, layout_of, model

from costmodel.context import CostContext
from costmodel.estimate import estimate
from costmodel.layers import layer_operators
from costmodel.layout import Mesh, Strategy
from costmodel.work import Collective, Stream
from profiles.training import CudaGraphs, Dispatch

SPEC = model("qwen3-30b-a3b", 8)
BLOCK = SPEC.runs[1].layer
MESH = Mesh(dp=8, ep=8)
LAYOUT = layout_of(SPEC, MESH, 8)


def split(launch_s: float = 1e-6, **training):
    """The step by cause, with a host that takes so long to launch a kernel."""
    context = context_of(SPEC, cluster("1x8xb200"), 64, 4096, **training)
    own = replace(context.own, kernel_launch_s=launch_s, ep_overlap=0.0, micro_batch_s=1e-9)
    calibration = replace(context.calibration, efficiencies=own)
    slow = CostContext(context.model, context.cluster, context.training, calibration)
    return estimate(slow, LAYOUT).split


def operators(**training):
    chosen = context_of(SPEC, cluster("1x8xb200"), 64, 4096, **training).training
    return layer_operators(BLOCK, Strategy(dp=8, ep=8), chosen, 1)


def test_each_wider_graph_leaves_less_to_the_host():
    waits = [split(1e-4, graphs=graphs).overhead_s for graphs in CudaGraphs]
    assert waits == sorted(waits, reverse=True)
    assert len(set(waits)) == len(waits)


def test_a_graph_of_the_whole_step_has_no_launches():
    slow, fast = (split(each, graphs=CudaGraphs.STEP) for each in (1e-3, 1e-9))
    assert slow == fast


def test_layers_without_experts_are_one_launch_in_a_graph():
    dense = model("llama3-8b", 4)
    steps = []
    for graphs in (CudaGraphs.OUTSIDE_EXPERTS, CudaGraphs.LAYERS):
        context = context_of(dense, cluster("1x8xb200"), 64, 4096, graphs=graphs)
        steps.append(estimate(context, layout_of(dense, Mesh(dp=8), 8)).step_s)
    assert steps[0] == pytest.approx(steps[1], rel=1e-3)


def test_interleaved_micro_batches_hide_traffic_behind_compute():
    apart, beside = (split(overlaps_experts=overlaps) for overlaps in (False, True))
    assert beside.ep_s < 0.3 * apart.ep_s
    assert beside.compute_s == pytest.approx(apart.compute_s)


def test_calibrations_may_hide_traffic_too():
    context = context_of(SPEC, cluster("1x8xb200"), 64, 4096)
    own = replace(context.own, ep_overlap=0.5, overlap_slowdown=0.0)
    hidden = CostContext(
        context.model,
        context.cluster,
        context.training,
        replace(context.calibration, efficiencies=own),
    )
    before, after = (estimate(each, LAYOUT).split for each in (context, hidden))
    assert after.ep_s == pytest.approx(before.ep_s / 2)


def test_a_copy_for_each_expert_travels_and_is_sorted_on_arrival():
    once, each = (operators(dispatch=dispatch) for dispatch in Dispatch)

    def copies(chosen):
        found = [w for o in chosen for w in o.forward if isinstance(w, Collective)]
        return {work.copies for work in found}

    def moved(chosen):
        return sum(w.bytes for o in chosen for w in o.forward if isinstance(w, Stream))

    assert copies(once) == {8}
    assert copies(each) == {1}
    routed = 4096 * 8 * 2048 * 2  # tokens of a rank to eight experts, in two bytes
    assert moved(each) - moved(once) == 2 * 2 * routed  # read and written, there and back


def test_one_expert_a_rank_needs_no_sorting():
    chosen = context_of(SPEC, cluster("1x8xb200"), 64, 4096, dispatch=Dispatch.EACH).training
    names = [o.name for o in layer_operators(BLOCK, Strategy(dp=128, ep=128), chosen, 1)]
    assert "sort" not in names
