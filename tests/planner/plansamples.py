"""Plans for tests of files and reports: one with numbers by hand, and any sound layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise

from hypothesis import strategies as st

from costmodel.estimate import Estimate, MemoryBytes, StageEstimate
from costmodel.layout import (
    Axis,
    Chunk,
    LayerSpan,
    Layout,
    Mesh,
    Recompute,
    RecomputeKind,
    Strategy,
)
from costmodel.stagecost import StepSplit
from planner import Plan, Restrictions, load_inputs
from planner.plan import SearchFacts

RECOMPUTES = (
    Recompute(RecomputeKind.NONE),
    Recompute(RecomputeKind.SELECTIVE, ("layernorm", "mlp")),
    Recompute(RecomputeKind.FULL),
)
GIB = 2**30


def sample_inputs():
    sizes = {"global_batch": 64, "seq_len": 1024}
    inputs = load_inputs("gpt2", "2x4xh100-80g", overrides=sizes)
    return replace(inputs, notes=("a note on the calibration",))


def split(**seconds):
    return StepSplit(**{**dict.fromkeys(StepSplit.__dataclass_fields__, 0.0), **seconds})


def memory(gib):
    return MemoryBytes(
        parameters=2 * gib * GIB,
        gradients=4 * gib * GIB,
        optimizer=gib * GIB,
        activations=3 * gib * GIB,
        working=GIB,
        buffers=0,
        reserved=GIB // 2,
        context=GIB,
    )


def sample_layout(*, tp=2, first=7):
    """Two stages cut after ``first`` blocks, the first two blocks recomputed in full."""
    mesh = Mesh(tp=tp, dp=4 // tp, pp=2)
    plain = Strategy(tp=tp, dp=4 // tp, zero=1, shard_group=4 // tp, sequence_parallel=tp > 1)
    full = Strategy(
        tp=tp,
        dp=4 // tp,
        zero=1,
        shard_group=4 // tp,
        sequence_parallel=tp > 1,
        recompute=RECOMPUTES[2],
    )
    spans = (LayerSpan(0, 1, plain), LayerSpan(1, 3, full), LayerSpan(3, first + 1, plain))
    return Layout(
        mesh=mesh,
        schedule="1f1b",
        num_chunks=1,
        micro_batch=2,
        num_microbatches=64 // (4 // tp * 2),
        chunks=(Chunk(0, 0, spans), Chunk(1, 0, (LayerSpan(first + 1, 14, plain),))),
    )


def sample_estimate(*, compute_s=6.0, tp_s=1.5, gib=6):
    stages = (
        StageEstimate(
            stage=0,
            num_layers=8,
            split=split(compute_s=compute_s - 0.5, tp_s=tp_s, recompute_s=0.25, bubble_s=0.75),
            memory=memory(gib),
        ),
        StageEstimate(
            stage=1,
            num_layers=6,
            split=split(compute_s=compute_s, tp_s=tp_s, bubble_s=0.5),
            memory=memory(gib - 1),
        ),
    )
    step_s = compute_s + tp_s + 0.5
    device = stages[0].memory.device_bytes
    return Estimate(
        step_s=step_s,
        interval_s=(step_s / 1.25, step_s * 1.25),
        tokens_per_s_per_gpu=64 * 1024 / step_s / 8,
        mfu=0.412345678,
        peak_mem_bytes=device,
        allocated_bytes=stages[0].memory.allocated_bytes,
        reserved_bytes=stages[0].memory.reserved_bytes,
        peak_mem_interval_bytes=(device * 9 // 10, device * 11 // 10),
        fit_probability=0.987654321,
        fits=True,
        split=stages[1].split,
        stages=stages,
        knowledge="datasheet",
        calibration="datasheet",
        bubble=0.5 / step_s,
    )


def sample_plan(*, layout=None, estimate=None, search=True):
    facts = SearchFacts(
        restrictions=Restrictions(fixed={"zero": frozenset({"1", "2"})}, at_most={"tp": 4}),
        candidates=1234,
        pruned={"memory": 200, "bound": 1000},
        refused={"global batch does not divide": 7},
        bound_s=7.777777777,
        gap=0.0277777,
        proven=False,
    )
    return Plan(
        inputs=sample_inputs().with_training(micro_batch=2),
        layout=layout or sample_layout(),
        estimate=estimate or sample_estimate(),
        search=facts if search else None,
    )


@st.composite
def sound_layouts(draw, inputs, num_gpus=8):
    """Any layout of a model of blocks between embedding and head that obeys the plan's rules."""
    blocks, layers = inputs.model.num_blocks, inputs.model.num_layers
    pp = draw(st.sampled_from([1, 2, 4]))
    tp = draw(st.sampled_from([d for d in (1, 2, 4) if d * pp <= num_gpus]))
    cp = draw(st.sampled_from([d for d in (1, 2) if d * tp * pp <= num_gpus]))
    dp = draw(st.sampled_from([d for d in (1, 2, 4, 8) if d * cp * tp * pp <= num_gpus]))
    chunks = draw(st.sampled_from([1, 2, 3])) if pp > 1 else 1
    schedule = "interleaved-1f1b" if chunks > 1 else draw(st.sampled_from(["1f1b", "gpipe"]))
    cuts = draw(
        st.lists(
            st.integers(1, blocks - 1),
            min_size=pp * chunks - 1,
            max_size=pp * chunks - 1,
            unique=True,
        )
    )
    bounds = [0, *(cut + 1 for cut in sorted(cuts)), layers]
    zero = draw(st.integers(0, 3))
    group = draw(st.sampled_from([g for g in (1, 2, 4, 8, 16) if dp * cp % g == 0]))
    options = draw(st.lists(st.sampled_from(RECOMPUTES), min_size=layers, max_size=layers))
    sequence_parallel = tp > 1 and draw(st.booleans())

    def strategy(position):
        return Strategy(
            tp=tp,
            cp=cp,
            dp=dp,
            zero=zero,
            shard_group=group,
            sequence_parallel=sequence_parallel,
            recompute=options[position],
        )

    placed = []
    for virtual, (first, stop) in enumerate(pairwise(bounds)):
        spans, start = [], first
        for own, run in groupby(range(first, stop), key=strategy):
            end = start + len(list(run))
            spans.append(LayerSpan(start, end, own))
            start = end
        placed.append(Chunk(virtual % pp, virtual // pp, tuple(spans)))
    return Layout(
        mesh=Mesh(tp=tp, cp=cp, dp=dp, pp=pp, order=tuple(draw(st.permutations(list(Axis))))),
        schedule=schedule,
        num_chunks=chunks,
        micro_batch=1,
        num_microbatches=inputs.training.global_batch // dp,
        chunks=tuple(placed),
    )
