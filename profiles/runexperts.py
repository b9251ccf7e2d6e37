"""How a measured run launches its layers and moves its tokens, by the words of its notes.

What Megatron-Bridge's tables leave open for experts is filled with its own playbook ("MoE hardware
configuration reference", release notes of v0.5.1): DeepEP or HybridEP everywhere, and in NVL72
racks CUDA graphs of what lies outside the experts; from container 26.06 on of the whole step, in
which micro-batches are interleaved.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from profiles.training import CudaGraphs, Dispatch

if TYPE_CHECKING:
    from profiles.runs import MeasuredRun

__all__ = ["run_dispatch", "run_graphs", "run_overlaps_experts"]

GRAPHS: Final = re.compile(r"cuda graphs?(?: (none|full_iteration))?", re.IGNORECASE)
FIXED_CAPACITY: Final = re.compile(r"token drop", re.IGNORECASE)
ONCE: Final = re.compile(r"deepep|hybridep", re.IGNORECASE)
OVERLAP: Final = re.compile(r"(?<!no )(EP a2a|EP|1F1B) overlap", re.IGNORECASE)
STATED: Final = re.compile(r"preset|dispatch|alltoall|deepep|hybridep|cuda graph", re.IGNORECASE)
BRIDGE: Final = re.compile(r"megatron-bridge (\d+\.\d+)", re.IGNORECASE)
WHOLE_STEPS_SINCE: Final = 26.06


def run_graphs(run: MeasuredRun) -> CudaGraphs:
    """CUDA graphs: "full_iteration" is the whole step, every other kind the layers, of which routed
    experts stay outside unless each of them computes a fixed number of tokens (Megatron-Core,
    ``cuda_graph_scope``).
    """
    found = GRAPHS.search(run.notes)
    if found is None:
        return _usual_graphs(run)
    if found[1] == "none":
        return CudaGraphs.NONE
    if found[1] == "full_iteration":
        return CudaGraphs.STEP
    if run.num_experts and not FIXED_CAPACITY.search(run.notes):
        return CudaGraphs.OUTSIDE_EXPERTS
    return CudaGraphs.LAYERS


def _usual_graphs(run: MeasuredRun) -> CudaGraphs:
    release = _unstated_release(run)
    if release is None or run.intra_bw.upper() != "NVL72":
        return CudaGraphs.NONE
    return CudaGraphs.STEP if release >= WHOLE_STEPS_SINCE else CudaGraphs.OUTSIDE_EXPERTS


def run_dispatch(run: MeasuredRun) -> Dispatch:
    """How tokens reach their experts."""
    once = ONCE.search(run.notes) or _unstated_release(run) is not None
    return Dispatch.ONCE if once else Dispatch.EACH


def run_overlaps_experts(run: MeasuredRun) -> bool:
    """Whether tokens of one micro-batch travel while another one's are computed."""
    return bool(OVERLAP.search(run.notes)) or (
        _unstated_release(run) is not None and run_graphs(run) is CudaGraphs.STEP
    )


def _unstated_release(run: MeasuredRun) -> float | None:
    """The container of a run of Megatron-Bridge with experts that does not say how they run."""
    found = BRIDGE.match(run.stack)
    if found is None or not run.num_experts or STATED.search(run.notes):
        return None
    return float(found[1])
