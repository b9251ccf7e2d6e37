"""Compiled blocks compute what they did, by the same collectives."""

from __future__ import annotations

import os
import shutil
import warnings

import pytest
import torch
from cases import CHEAP, FULL, Case, alone, outcome, training_of
from ranks import run_ranks

from costmodel.layout import ContextComm
from executor.precision import Numbers

CASES = (
    Case(name="interleaved", pp=2, chunks=2, schedule="interleaved-1f1b", micro_batch=2),
    Case(name="TP", tp=2, model="qwen", micro_batch=8),
    Case(name="full recomputation, ZeRO-3", dp=2, zero=3, recompute=FULL, micro_batch=4),
    Case(name="full recomputation, SP", tp=2, sequence=True, recompute=FULL, micro_batch=8),
    Case(name="CP, ring", cp=2, cp_comm=ContextComm.RING, model="qwen", micro_batch=8),
    Case(name="selective, SP", tp=2, sequence=True, recompute=CHEAP, model="gpt", micro_batch=8),
)


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler, which CPUs need"
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiled_blocks_give_the_losses_of_one_process(case):
    layout, training = case.layout, training_of()

    def rank(_):
        import torch._dynamo.utils as dynamo  # noqa: PLC0415 - slow to load
        import torch._inductor.config as inductor  # noqa: PLC0415

        inductor.compile_threads = 1  # no processes of a process that will be killed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's of its own
            found = outcome(case.spec, layout, Numbers(torch.float32), training, compiles=True)
        return found, dynamo.counters["stats"]["unique_graphs"]

    reference = alone(case.model)[torch.float32]
    for found, graphs in run_ranks(layout.mesh.num_ranks, rank):
        assert 1 <= graphs <= 6  # of alike blocks, one
        assert found.losses == pytest.approx(reference.losses, rel=1e-5)
        assert found.norms == pytest.approx(reference.norms, rel=1e-4)
        assert found.ran == found.planned
