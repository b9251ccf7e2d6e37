"""Dry run: what a rank of a plan holds and moves, found without its memory and without its peers.

The native executor runs two steps of shorter jobs (``shortened``) on tensors without values
(``fakerank``); the second step is what counts, since the first makes the optimizer's states.
Beside it stands the account of the cost model with the executor's kernels and states
(``planner.native.as_executed``) and, for collectives, what the plan means (``planned``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from executor.fakerank import fake_rank
from executor.gradients import local_tensor
from executor.job import Recipe, check_plan
from executor.memorylog import MemoryLog
from executor.mesh import shards
from executor.planned import planned_traffic
from executor.shortened import short_jobs, whole
from executor.traffic import Traffic, TrafficLog
from executor.trainer import Trainer
from planner.native import as_executed
from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from executor.models.chain import Chain
    from executor.pipeline import Part
    from executor.shortened import Short
    from planner.plan import Plan
    from profiles.training import TrainingSpec

__all__ = ["TOLERANCES", "DryRun", "dry_run", "run_short"]

WEIGHTS_SHARDED: Final = 3  # stage of ZeRO
STEPS: Final = 2
PEAK: Final = "peak"
BETWEEN: Final = "between"
# Part by which the account may be off.
TOLERANCES: Final = {
    "parameters": 0.002,  # a weight with fewer rows than shards, a router's, is padded
    "gradients": 0.002,
    "optimizer": 0.002,
    "saved": 0.02,
    "peak": 0.03,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Bytes of one rank by kind, and its collectives of a step by (kind, axis).

    ``parameters``: weights that passes read; ``gradients``: what is added up from micro-batch to
    micro-batch; ``optimizer``: its states and fp32 weights behind 16-bit ones; ``saved``: what one
    micro-batch keeps from its forward to its backward pass, in all chunks; ``peak``: all that
    lives at the worst moment of a step. ``memory`` is the dry run's, ``account`` the cost model's.
    ``estimate_bytes``: what the plan says of this stage, with the kernels that it assumes.
    """

    rank: int
    stage: int
    num_ranks: int
    memory: Mapping[str, int]
    account: Mapping[str, int]
    estimate_bytes: int
    ran: Traffic
    planned: Traffic

    @property
    def passes(self) -> bool:
        """Whether all differences are within their tolerances."""
        near = all(abs(self.difference(kind)) <= part for kind, part in TOLERANCES.items())
        return near and self.ran == self.planned

    def difference(self, kind: str) -> float:
        """By which part the account is above the dry run."""
        run, own = self.memory[kind], self.account[kind]
        return own / run - 1 if run else float(own > 0)

    def document(self) -> dict[str, Any]:
        """As plain data."""
        moved = sorted(self.ran.counts.keys() | self.planned.counts.keys())
        return {
            "rank": self.rank,
            "stage": self.stage,
            "num_ranks": self.num_ranks,
            "memory": [
                {
                    "kind": kind,
                    "dry_run_bytes": self.memory[kind],
                    "estimate_bytes": self.account[kind],
                    "difference": self.difference(kind),
                    "tolerance": tolerance,
                }
                for kind, tolerance in TOLERANCES.items()
            ],
            "plan_allocated_bytes": self.estimate_bytes,
            "collectives": [
                {
                    "kind": key[0],
                    "axis": key[1],
                    "count": self.ran.counts.get(key, 0),
                    "planned_count": self.planned.counts.get(key, 0),
                    "bytes": self.ran.bytes.get(key, 0),
                    "planned_bytes": self.planned.bytes.get(key, 0),
                }
                for key in moved
            ],
            "passes": self.passes,
        }


def dry_run(plan: Plan, where: str, *, rank: int = 0) -> DryRun:
    """Run ``rank`` of ``plan`` dry. ``where``: the plan's file, for messages.

    Raises ``InputError`` for a plan that the executor refuses and for a rank that it has not.
    """
    check_plan(plan, where)
    layout = plan.layout
    if not 0 <= rank < layout.mesh.num_ranks:
        message = f"{rank} is not a rank of {where}"
        expected = f"0 to {layout.mesh.num_ranks - 1}"
        raise InputError(Problem(where="--rank", message=message, expected=expected))
    stage = next(
        stage
        for stage in range(layout.num_stages)
        if any(rank in ranks for ranks in layout.mesh.stage_ranks(stage))
    )
    jobs = short_jobs(plan.inputs.model, layout, stage)
    on_gpu = plan.inputs.cluster.slowest_device.name != "cpu"
    found = []
    for job in jobs:
        with fake_rank(rank, layout.mesh.num_ranks, on_gpu=on_gpu):
            found.append(run_short(job, plan.inputs.training))
    memory, ran, planned = (whole([each[part] for each in found], jobs) for part in range(3))
    peaks = [memory.pop(name) for name in [*memory] if name.startswith(PEAK)]
    memory[PEAK] = max(peaks)
    return DryRun(
        rank=rank,
        stage=stage,
        num_ranks=layout.mesh.num_ranks,
        memory=memory,
        account=_account(plan, stage),
        estimate_bytes=plan.estimate.stages[stage].memory.allocated_bytes,
        ran=_traffic(ran),
        planned=_traffic(planned),
    )


def _account(plan: Plan, stage: int) -> dict[str, int]:
    """The cost model's."""
    from costmodel.estimate import LayoutCost  # noqa: PLC0415 - imports numpy, slowly
    from costmodel.stagecost import held_bytes  # noqa: PLC0415 - as above

    own = as_executed(plan.inputs, plan.layout)
    cost = LayoutCost(own.context, plan.layout)
    memory = cost.memory[stage]
    held = held_bytes(own.context, plan.layout, cost.stages)[stage]
    return {
        "parameters": cost.stages[stage].parameter_bytes,
        "gradients": cost.stages[stage].gradient_bytes,
        "optimizer": memory.optimizer,
        "saved": sum(held),
        "peak": memory.allocated_bytes,
    }


Figures = dict[str, int]


def run_short(job: Short, training: TrainingSpec) -> tuple[Figures, Figures, Figures]:
    """Memory, collectives that ran, collectives that were meant, of a step of a short job. Memory
    has the peak of each part of the step (``PEAK`` and its name): their greatest is not linear.
    """
    layout = job.layout
    share = layout.micro_batch * layout.num_microbatches
    short = replace(training, global_batch=share * layout.mesh.dp)
    with MemoryLog() as memory:
        trainer = Trainer(
            job.model, layout, short, Recipe(), device=torch.device("cpu"), num_steps=STEPS
        )
        rows = [
            torch.empty((sum(map(len, each)), short.seq_len), dtype=torch.int64)
            for each in trainer.sequences
        ]
        watch = _Watch(trainer, memory)
        for _ in range(STEPS):
            watch.begin_step()
            with TrafficLog(trainer.mesh.axes) as log:
                trainer.totals(*rows)
            watch.after_passes()
            trainer.update()
        planned = planned_traffic(
            trainer.parts, trainer.mesh, short, trainer.numbers, model=job.model
        )
    return watch.figures(), _figures(log.traffic), _figures(planned)


class _Watch:
    """Takes down what a trainer holds, by kind, at the moments when that can be told apart; and the
    peak in each part of a step, since only that of one part grows evenly with the layers.
    """

    def __init__(self, trainer: Trainer, memory: MemoryLog) -> None:
        self.trainer, self.memory = trainer, memory
        self.weights = 0
        self.gradients: Counter[int] = Counter()
        self.saved: Counter[int] = Counter()
        self.peaks: Counter[str] = Counter()
        self._before = 0
        self._now: list[str] = []  # parts of the step
        self._begun: Counter[str] = Counter()  # backward passes of a step
        for part in trainer.parts:
            part.chain.register_forward_pre_hook(self._begin)
            part.chain.register_forward_hook(self._end(part.number))
            for name, places in _places(part.chain).items():
                layer = part.chain.layers[name]
                layer.register_forward_hook(self._layer([f"{part.number} {at}" for at in places]))

    def begin_step(self) -> None:
        """Before the passes of a step; only the last one counts."""
        self.peaks.clear()
        self._begun.clear()
        self.memory.peak = self.memory.live
        self._now = ["forward"]

    def enter(self, *parts: str) -> None:
        """Another part of the step begins, which may be several at once."""
        for part in self._now:
            self.peaks[part] = max(self.peaks[part], self.memory.peak)
        self.memory.peak, self._now = self.memory.live, [*parts]

    def _begin(self, _chain: nn.Module, _inputs: Any) -> None:
        self.enter("forward")
        self._before = self.memory.live - self._gathered()

    def _end(self, number: int) -> Any:
        def backward(_gradient: torch.Tensor) -> None:
            self._add_up()

        def note(_chain: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            self.saved[number] = self.memory.live - self._gathered() - self._before
            self.weights = self._read()
            if output.requires_grad:
                output.register_hook(backward)

        return note

    def _layer(self, places: list[str]) -> Any:
        """When a layer begins to run backward."""

        def backward(_gradient: torch.Tensor) -> None:
            self._begun.update(places)
            begun = self._begun[places[0]]
            is_last = begun == self.trainer.layout.num_microbatches
            turn = "last" if is_last else min(begun, 2)  # which frees weights too
            self.enter(*(f"{place} {turn}" for place in places))

        def note(_layer: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(backward)

        return note

    def after_passes(self) -> None:
        """Gradients of a step of one pass."""
        self._add_up()
        self.enter("update")  # which needs nothing on top

    def figures(self) -> Figures:
        """Bytes by kind, as ``DryRun`` has them."""
        states = sum(
            local_tensor(each).nbytes
            for own in self.trainer.optimizer.state.values()
            for each in own.values()
            if each.dim()
        )
        shards = _nbytes(self.trainer.parameters())
        masters = shards if self.trainer.numbers.is_mixed else 0
        return {
            "parameters": self.weights + shards - masters,
            "gradients": sum(self.gradients.values()),
            "optimizer": states + masters,
            "saved": sum(self.saved.values()),
            **{f"{PEAK} {part}": most for part, most in self.peaks.items() if BETWEEN not in part},
        }

    def _units(self) -> Iterator[tuple[Any, int]]:
        """FSDP's parameters and their stage of ZeRO."""
        for part in self.trainer.parts:
            yield from _units(part)

    def _gathered(self) -> int:
        return sum(_storage(p.all_gather_outputs) for p, _ in self._units())

    def _read(self) -> int:
        """Weights that stay gathered from pass to pass."""
        return sum(_storage(p.all_gather_outputs) for p, z in self._units() if z < WEIGHTS_SHARDED)

    def _add_up(self) -> None:
        """What each chunk has added up so far."""
        for part in self.trainer.parts:
            wide = (p.unsharded_accumulated_grad for p, _ in _units(part))
            sums = [each for each in wide if each is not None]
            own = [p.grad for p in part.chain.parameters() if p.grad is not None]
            self.gradients[part.number] = max(
                self.gradients[part.number], _nbytes(sums) + _nbytes(own)
            )


def _units(part: Part) -> Iterator[tuple[Any, int]]:
    """FSDP's parameters of a chunk and their stage of ZeRO."""
    for unit, strategy in part.data_parallel.units:
        groups = unit._get_fsdp_state()._fsdp_param_groups  # noqa: SLF001 - torch tells nobody
        zero = strategy.zero if shards(strategy) > 1 else 0
        yield from ((each, zero) for own in groups for each in own.fsdp_params)


def _places(chain: Chain) -> dict[str, list[str]]:
    """Of equal layers the two at either end. Between the inner two, whose neighbours are like them,
    each needs less than one of them, and counts for nothing.
    """
    found: dict[str, list[str]] = {}
    alike = groupby(chain.layers.items(), lambda each: (each[1].spec, chain.strategies[each[0]]))
    for number, (_, run) in enumerate(alike):
        names = [name for name, _ in run]
        ends = {"last": names[-1:], "before": names[1:-1][-1:], "second": names[1:-1][:1]}
        ends[BETWEEN] = names[2:-2]
        for place, own in {**ends, "first": names[:1]}.items():
            for name in own:
                found.setdefault(name, []).append(f"{number} {place}")
    return found


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_tensor(each).nbytes for each in tensors)


def _storage(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.untyped_storage().nbytes() for each in tensors)


def _figures(traffic: Traffic) -> Figures:
    """Traffic as numbers by name."""
    return {
        f"{part} {kind} {axis}": value
        for part, values in (("count", traffic.counts), ("bytes", traffic.bytes))
        for (kind, axis), value in values.items()
    }


def _traffic(figures: Figures) -> Traffic:
    parts: dict[str, dict[tuple[str, str], int]] = {"count": {}, "bytes": {}}
    for name, value in figures.items():
        part, kind, axis = name.split(maxsplit=2)
        parts[part][kind, axis] = value
    return Traffic(parts["count"], parts["bytes"])
