"""A measured run -> its layout, and the estimate of it under a calibration.

What a run leaves open takes the usual value of software of its kind: ZeRO-1, no recomputation,
experts whole on a rank, stages cut evenly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from costmodel.context import CostContext
from costmodel.estimate import scale_of, step_seconds
from costmodel.layout import MODULES, NO_RECOMPUTE, Layout, Mesh, Recompute, RecomputeKind, Strategy
from costmodel.placing import even_cut, placed_chunks
from costmodel.schedules import SCHEDULES, Shape
from profiles.calibration import Seen
from profiles.errors import InputError, Problem
from profiles.runspecs import run_cluster, run_device, run_model, run_training, stated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodel.context import Memo
    from costmodel.layout import Chunk
    from profiles.calibration import Calibration
    from profiles.cluster import ClusterSpec
    from profiles.model import ModelSpec
    from profiles.runs import MeasuredRun
    from profiles.training import TrainingSpec

__all__ = ["Replay", "replay", "run_layout", "seen_in"]

FULL: Final = Recompute(RecomputeKind.FULL)
CORE: Final = Recompute(RecomputeKind.SELECTIVE, ("core_attn",))
OPERATORS: Final = Recompute(RecomputeKind.SELECTIVE, ("operators",))
STATED: Final = {*MODULES, "mla_up_proj"}  # modules
_SOME_OPERATORS: Final = re.compile(r"(0\.\d+) of ops")
OPERATORS_OF_A_BLOCK: Final = 13  # as Aceso counts them
_RECOMPUTE: Final = re.compile(r"(none|selective|full)(?:\((.*)\))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A run with the four inputs of an estimate, all but the calibration, and its layout."""

    run: MeasuredRun
    device: str
    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    layout: Layout
    microbatches: float

    def context(self, calibration: Calibration, memo: Memo | None = None) -> CostContext:
        """The inputs under a calibration."""
        return CostContext(self.model, self.cluster, self.training, calibration, memo=memo)

    def step_s(self, calibration: Calibration, memo: Memo | None = None) -> float:
        """The estimated step. A smaller last micro-batch counts by its part."""
        context, count = self.context(calibration, memo), self.layout.num_microbatches
        whole = step_seconds(context, self.layout)
        if count in (self.microbatches, 1):
            return whole
        fewer = step_seconds(context, replace(self.layout, num_microbatches=count - 1))
        return fewer + (self.microbatches - count + 1) * (whole - fewer)

    def scale(self, calibration: Calibration, memo: Memo | None = None) -> float:
        """How far its measurement may lie from the estimate, against a usual run's."""
        return scale_of(self.context(calibration, memo), self.layout)


def seen_in(replays: Sequence[Replay]) -> Seen:
    """What some runs span."""
    params = [each.model.params_total for each in replays]
    tokens = [each.training.seq_len for each in replays]
    return Seen(params=(min(params), max(params)), seq_len=(min(tokens), max(tokens)))


def replay(run: MeasuredRun) -> Replay:
    """What an estimate of a run needs. Raises ``InputError`` with the columns that stand in its
    way.
    """
    model, training, cluster = run_model(run), run_training(run), run_cluster(run)
    layout, microbatches = run_layout(run, model, training)
    problems = layout.problems(model.num_layers)
    if problems:
        raise InputError([Problem(where=run.where, message=problem) for problem in problems])
    missing = [
        rate
        for rate in (training.precision.gemm, training.precision.other)
        if rate not in cluster.slowest_device.peak_flop_per_s
    ]
    if missing:
        message = f"{cluster.slowest_device.name} has no rate for {missing[0]}"
        raise InputError(Problem(where=f"{run.where}:precision", message=message))
    return Replay(
        run=run,
        device=run_device(run),
        model=model,
        cluster=cluster,
        training=training,
        layout=layout,
        microbatches=microbatches,
    )


def run_layout(run: MeasuredRun, model: ModelSpec, training: TrainingSpec) -> tuple[Layout, float]:
    """The layout, and its micro-batches: not a whole number where the last one is smaller."""
    tp, pp, micro_batch = stated(run, "tp", "pp", "micro_batch")
    mesh = _mesh(run, tp, pp)
    microbatches = training.global_batch / (mesh.dp * micro_batch)
    chunks = run.vpp or _usual_chunks(model.num_blocks, pp)
    schedule = "interleaved-1f1b" if chunks > 1 else "1f1b"
    whole = max(1, -int(-microbatches // 1))
    problem = SCHEDULES[schedule].problem(Shape(pp, chunks, whole))
    if problem or model.num_blocks < pp * chunks:
        schedule, chunks = "1f1b", 1
    if model.num_blocks < pp:
        message = f"{pp} stages of {model.num_blocks} blocks"
        raise InputError(Problem(where=f"{run.where}:pp", message=message))
    strategy = _strategy(run, mesh)
    if _SOME_OPERATORS.search(run.recompute):
        strategy = replace(strategy, recompute=CORE)  # of blocks that are not recomputed whole
    layout = Layout(
        mesh=mesh,
        schedule=schedule,
        num_chunks=chunks,
        micro_batch=micro_batch,
        num_microbatches=whole,
        chunks=_chunks(model, pp, chunks, strategy, _recompute(run)),
    )
    return layout, microbatches


def _usual_chunks(blocks: int, stages: int) -> int:
    """Chunks a stage where the run does not state them: one block a chunk where that divides."""
    return blocks // stages if stages > 1 and blocks % stages == 0 else 1


@lru_cache(maxsize=1024)
def _chunks(
    model: ModelSpec, pp: int, chunks: int, plain: Strategy, recompute: tuple[Recompute, float]
) -> tuple[Chunk, ...]:
    sizes = even_cut(model.num_blocks, pp * chunks)
    option, part = recompute
    most = None if part >= 1 else round(part * sizes[0])
    if part > 1:
        most = -(-int(part) // chunks)
    path = tuple((stage, chunk) for chunk in range(chunks) for stage in range(pp))
    return placed_chunks(model, sizes, path, plain, (option, most))


def _mesh(run: MeasuredRun, tp: int, pp: int) -> Mesh:
    cp, ep = run.cp or 1, run.ep or 1
    inner = tp * pp * cp
    dp = run.n_gpus // inner
    if dp * inner != run.n_gpus or run.dp not in (None, dp):
        message = f"tp {tp} x cp {cp} x pp {pp} x dp {run.dp or dp} are not {run.n_gpus} GPUs"
        raise InputError(Problem(where=f"{run.where}:n_gpus", message=message))
    expert_tp = tp if run.num_experts and (tp * cp * dp) % (ep * tp) == 0 and ep == 1 else 1
    return Mesh(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, expert_tp=expert_tp)


def _strategy(run: MeasuredRun, mesh: Mesh) -> Strategy:
    text = run.zero_stage or "1"
    stage, group = (3, run.gpus_per_node or 8) if text == "hsdp" else (0, mesh.dp * mesh.cp)
    if found := re.fullmatch(r"([0-3])(?:\.0)?(?: \(shard over (\d+)\))?", text):
        stage, group = int(found[1]), int(found[2] or group)
    elif text != "hsdp":
        message = f"is {text!r}"
        expected = "0, 1, 2, 3, 1 (shard over N) or hsdp"
        raise InputError(
            Problem(where=f"{run.where}:zero_stage", message=message, expected=expected)
        )
    return Strategy(
        tp=mesh.tp,
        cp=mesh.cp,
        ep=mesh.ep,
        expert_tp=mesh.expert_tp,
        dp=mesh.dp,
        zero=stage,
        shard_group=min(group, mesh.dp * mesh.cp) if stage else 1,
        sequence_parallel=bool(run.sequence_parallel) and mesh.tp > 1,
    )


def _recompute(run: MeasuredRun) -> tuple[Recompute, float]:
    """How blocks are recomputed, and the part of them that is (above 1: their number a stage)."""
    text = run.recompute.lower() or "none"
    found = _RECOMPUTE.match(text)
    if found is None:
        message = f"is {run.recompute!r}"
        expected = "none, selective(what) or full(how many layers)"
        raise InputError(
            Problem(where=f"{run.where}:recompute", message=message, expected=expected)
        )
    kind, what = found[1], found[2] or ""
    if kind == "none":
        return NO_RECOMPUTE, 1.0
    if kind == "full":
        return FULL, _part(what)
    return _selective(text, what)


def _part(what: str) -> float:
    """Of the blocks that are recomputed whole: "3 of 32 layers", or "5 layers" of each stage."""
    if found := re.match(r"(\d+) of (\d+) layers", what):
        return int(found[1]) / int(found[2])
    found = re.match(r"(\d+) layers", what)
    return float(found[1]) if found else 1.0


def _selective(text: str, what: str) -> tuple[Recompute, float]:
    """A part of all operators begins with those that free most, the cores of attention: one of each
    block. The others are taken as full recomputation of a part of the blocks. Of two kinds that
    are stated, full needs less memory.
    """
    if "full" in text:
        return FULL, 1.0
    if part := _SOME_OPERATORS.match(what):
        return FULL, max(0.0, float(part[1]) - 1 / OPERATORS_OF_A_BLOCK)
    if "every 2nd layer" in what:
        return FULL, 0.5
    if what in ("op", "graph"):
        return OPERATORS, 1.0
    modules = tuple(sorted(STATED & set(what.split("+"))))
    return (Recompute(RecomputeKind.SELECTIVE, modules), 1.0) if modules else (CORE, 1.0)
