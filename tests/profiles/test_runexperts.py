"""What the notes of a run say of graphs, dispatch and overlap."""

from __future__ import annotations

import pytest

from profiles.runexperts import run_dispatch, run_graphs, run_overlaps_experts
from profiles.runs import MeasuredRun
from profiles.training import CudaGraphs, Dispatch


def run(notes: str = "", **changes) -> MeasuredRun:
    given = {"stack": "Megatron-Bridge 26.02", "num_experts": 128, **changes}
    return MeasuredRun(
        where="a.csv:2", id="a", gpu="GB200", n_gpus=8, outcome="ok", notes=notes, **given
    )


@pytest.mark.parametrize(
    ("notes", "graphs"),
    [
        ("cuda graph none", CudaGraphs.NONE),
        ("preset A; dispatcher hybridep", CudaGraphs.NONE),
        ("cuda graph full_iteration", CudaGraphs.STEP),
        ("cuda graph transformer_engine; forced-balanced", CudaGraphs.OUTSIDE_EXPERTS),
        ("TE scoped cuda graphs", CudaGraphs.OUTSIDE_EXPERTS),
        ("cuda graph transformer_engine; token drop (capacity) MoE", CudaGraphs.LAYERS),
    ],
)
def test_words_of_graphs(notes, graphs):
    assert run_graphs(run(notes)) is graphs


def test_dense_layers_are_captured_whole():
    assert run_graphs(run("cuda graph local", num_experts=None)) is CudaGraphs.LAYERS


def test_words_of_dispatch_and_overlap():
    assert run_dispatch(run("HybridEP, no EP overlap")) is Dispatch.ONCE
    assert run_dispatch(run("preset A")) is Dispatch.EACH
    assert run_dispatch(run(stack="torchtitan")) is Dispatch.EACH
    assert run_overlaps_experts(run("alltoall + EP overlap"))
    assert run_overlaps_experts(run("DeepEP, 1F1B overlap"))
    assert not run_overlaps_experts(run("HybridEP, no EP overlap"))


@pytest.mark.parametrize(
    ("stack", "graphs"),
    [
        ("Megatron-Bridge 26.04.01", CudaGraphs.OUTSIDE_EXPERTS),
        ("Megatron-Bridge 26.06", CudaGraphs.STEP),
        ("Megatron-Bridge 26.08", CudaGraphs.STEP),
        ("Megatron-Bridge", CudaGraphs.NONE),
    ],
)
def test_what_bridge_leaves_open_in_racks_is_its_playbook(stack, graphs):
    rack = run("MTP on", stack=stack, intra_bw="NVL72")
    assert run_graphs(rack) is graphs
    assert run_overlaps_experts(rack) is (graphs is CudaGraphs.STEP)
    assert run_graphs(run("MTP on", stack=stack)) is CudaGraphs.NONE
    assert run_graphs(run("MTP on", stack=stack, intra_bw="NVL72", num_experts=None)) is (
        CudaGraphs.NONE
    )
