"""A session of the profiler: points one after another, in rounds, within a budget of time.

Each point is measured in every round and its least figures count, so that a slow minute of the
machine does not stay in the profile. A point that the device has no memory for is noted as such.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from executor.profiler.device import device_facts, open_device
from executor.profiler.journal import NO_ROOM, Journal
from executor.profiler.layertimes import (
    BACKWARD,
    FORWARD,
    REPLICAS,
    STEP,
    added,
    layer_samples,
    wrapping_samples,
)
from executor.profiler.memory import held_bytes
from executor.profiler.operatortimes import DTYPES, OperatorPoint, operator_samples
from executor.profiler.points import Point, WrappingPoint, model_facts
from executor.profiler.probe import pretended_group
from executor.profiler.tasks import HeldPoint, Task, tasks_of
from executor.profiler.timing import METHOD, Figure, figure_of, merged, told
from profiles.fingerprint import fingerprint
from profiles.measured import (
    LayerHeld,
    LayerTime,
    LayerWrapping,
    NoRoom,
    OperatorTime,
    Profile,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from executor.profiler.tasks import SessionPlan
    from profiles.measured import DeviceFacts

__all__ = ["Session"]

STREAMS: Final = 3  # two tensors are read, one is written


class Session:
    """Measures and remembers; ``profile`` is what it comes to."""

    def __init__(self, plan: SessionPlan, journal: Path | None = None) -> None:
        """Open the device. Raises ``InputError`` where it, or the request, is not possible."""
        self.plan = plan
        self.tasks, self.notes = tasks_of(plan)
        self.device = open_device(plan.device)
        self.facts = device_facts(self.device, plan.device_name, method=METHOD, date=plan.date)
        self.precision = plan.request.training.precision.value
        self.journal = Journal(journal, self._header())

    def _header(self) -> dict[str, Any]:
        """What must be equal for figures to belong together."""
        request, facts = self.plan.request, self.facts
        training = replace(request.training, global_batch=1, micro_batch=None)
        return {
            "model": fingerprint(request.model),
            "training": fingerprint(training),
            "device": [facts.device, facts.hardware, facts.torch, facts.threads],
        }

    def run(
        self, *, tell: Callable[[int, int, str], None], should_stop: Callable[[], bool]
    ) -> None:
        """Measure what the journal does not have yet, until the budget is spent. ``tell`` is given
        what is done, the whole, and what comes next.
        """
        until_s = None
        if self.plan.budget_s is not None:
            until_s = time.monotonic() + self.plan.budget_s
        todo = [task for task in self.tasks if task.key not in self.journal.found]
        for number, task in enumerate(todo):
            if until_s is not None and time.monotonic() >= until_s:
                left = len({t.point for t in todo[number:] if t.round == 0})
                self.notes.append(
                    f"the budget is spent: {left} points are left out, "
                    f"{len(todo) - number} of {len(self.tasks)} samplings"
                )
                return
            if should_stop():
                return
            tell(len(self.tasks) - len(todo) + number, len(self.tasks), str(task.point))
            self._measure(task)

    def _measure(self, task: Task) -> None:
        try:
            if isinstance(task.point, Point):
                self._measure_layer(task)
            elif isinstance(task.point, HeldPoint):
                self._measure_held(task.key, task.point)
            elif isinstance(task.point, WrappingPoint):
                self._measure_wrapping(task.key, task.point)
            else:
                samples = operator_samples(task.point, self.precision, self.device)
                self.journal.add(task.key, figure_of(samples))
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_shortage(error):
                raise
            self.journal.add(task.key, None)
        finally:
            _give_back(self.device)

    def _measure_layer(self, task: Task) -> None:
        point, request = task.point, self.plan.request
        assert isinstance(point, Point)
        with pretended_group(point.tp):
            samples, count = layer_samples(request.model, request.training, point, self.device)
        self.journal.add(task.key, figure_of(samples), parameters=count)

    def _measure_wrapping(self, key: str, own: WrappingPoint) -> None:
        request = self.plan.request
        with pretended_group(own.tp * (1 if own.zero is None else REPLICAS)):
            samples = wrapping_samples(request.model, request.training, own, self.device)
        self.journal.add(key, figure_of(samples))

    def _measure_held(self, key: str, own: HeldPoint) -> None:
        request = self.plan.request
        with pretended_group(own.point.tp):
            found = held_bytes(
                request.model, request.training, own.point, own.recompute, self.device
            )
        self.journal.add_bytes(key, asdict(found))

    def profile(self, name: str) -> Profile:
        """Everything measured so far."""
        times, no_room, operators, held = [], [], [], []
        for point in dict.fromkeys(task.point for task in self.tasks):
            keys = self._keys(point)
            found = [figure for key in keys if (figure := self.journal.figure(key))]
            if isinstance(point, WrappingPoint):
                continue
            if isinstance(point, HeldPoint):
                if (own := self.journal.found.get(keys[0])) and own != NO_ROOM:
                    held.append(self._layer_held(point, own["bytes"]))
            elif isinstance(point, OperatorPoint):
                if found:
                    operators.append(self._operator_time(point, merged(found)))
            elif found:
                key = next(key for key in keys if self.journal.figure(key))
                count = self.journal.parameters(key)
                times.append(self._layer_time(point, merged(found), count))
            elif any(self.journal.found.get(key) == NO_ROOM for key in keys):
                no_room.append(NoRoom(device=self.facts.device, **self._place(point)))
        return Profile(
            name=name,
            source="parplan profile layers",
            devices=(_with_rates(self.facts, operators),),
            models=(model_facts(self.plan.request.model),),
            layer_times=tuple(times),
            layer_wrapping=tuple(self._wrappings()),
            layer_held=tuple(held),
            no_room=tuple(no_room),
            operator_times=tuple(operators),
        )

    def _keys(self, point: Point | OperatorPoint | HeldPoint | WrappingPoint) -> list[str]:
        """A point's tasks in the journal."""
        return [Task(point, number).key for number in range(self.plan.rounds)]

    def _wrappings(self) -> Iterator[LayerWrapping]:
        """What wrappers add, where a layer was measured both alone and wrapped."""
        figures = {
            point: merged(found)
            for point in dict.fromkeys(task.point for task in self.tasks)
            if isinstance(point, WrappingPoint)
            if (found := [own for key in self._keys(point) if (own := self.journal.figure(key))])
        }
        for point, wrapped in figures.items():
            alone = figures.get(replace(point, zero=None))
            if point.zero is None or alone is None:
                continue
            more = added(alone.seconds, wrapped.seconds, point.zero)
            yield LayerWrapping(
                device=self.facts.device,
                model=self.plan.request.model.name,
                layer=point.layer,
                tp=point.tp,
                precision=self.precision,
                zero=point.zero,
                forward_s=told(more[FORWARD]),
                backward_s=told(more[BACKWARD]),
                step_s=told(more[STEP]),
                doubtful=alone.doubtful or wrapped.doubtful,
            )

    def _place(self, point: Point) -> dict[str, Any]:
        place = asdict(point)
        place["seq_len"] = (point.seq_len,)
        return {**place, "model": self.plan.request.model.name, "precision": self.precision}

    def _layer_time(self, point: Point, figure: Figure, parameters: int) -> LayerTime:
        return LayerTime(
            **self._place(point),
            device=self.facts.device,
            forward_s=told(figure.seconds[FORWARD]),
            backward_s=told(figure.seconds[BACKWARD]),
            step_s=told(figure.seconds[STEP]),
            parameters=parameters,
            optimizer=self.plan.request.training.optimizer.value,
            spread=told(figure.spread, 2),
            doubtful=figure.doubtful,
        )

    def _layer_held(self, own: HeldPoint, found: dict[str, int]) -> LayerHeld:
        return LayerHeld(
            **self._place(own.point),
            device=self.facts.device,
            recompute=str(own.recompute),
            saved_bytes=found["saved"],
            transient_bytes=found["transient"],
            state_bytes=found["state"],
        )

    def _operator_time(self, point: OperatorPoint, figure: Figure) -> OperatorTime:
        return OperatorTime(
            device=self.facts.device,
            precision=self.precision,
            operator=point.operator,
            shape=point.shape,
            forward_s=told(figure.seconds[FORWARD]),
            backward_s=told(backward) if (backward := figure.seconds.get(BACKWARD)) else None,
            spread=told(figure.spread, 2),
            doubtful=figure.doubtful,
        )


def _with_rates(facts: DeviceFacts, operators: list[OperatorTime]) -> DeviceFacts:
    """The device with the best rates that its operators reached."""
    flop: dict[str, float] = {}
    moved = []
    for own in operators:
        point = OperatorPoint(own.operator, own.shape)
        if own.operator == "gemm":
            rate = point.flop / own.forward_s
            flop[own.precision] = max(flop.get(own.precision, 0.0), rate)
        elif own.operator == "stream":
            size = STREAMS * own.shape[0] * DTYPES[own.precision].itemsize
            moved.append((own.shape[0], size / own.forward_s))
    largest = max(moved)[1] if moved else None  # what is larger than caches
    return replace(
        facts,
        flop_per_s={precision: told(rate) for precision, rate in flop.items()},
        memory_bytes_per_s=None if largest is None else told(largest),
    )


def _is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory is short; the CPU's allocator raises a RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "can't allocate memory" in str(error) or "not enough memory" in str(error)


def _give_back(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
