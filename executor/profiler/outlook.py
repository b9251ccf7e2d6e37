"""What a session will take on a device: priced by the cost model, so without the device.

Layers are those of the native executor under the efficiencies of a datasheet, without what their
group would exchange; each is run as often as ``timing.sampled`` does. Building them is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from costmodel.layout import Chunk, LayerSpan, Layout, Mesh, Strategy
from executor.profiler.layertimes import FEW_TOKENS, PASSES, REPLICAS
from executor.profiler.operatortimes import OperatorPoint
from executor.profiler.points import Point, WrappingPoint, layer_labels
from executor.profiler.probe import num_copies
from executor.profiler.tasks import HeldPoint, tasks_of
from executor.profiler.timing import sampling_s
from planner.inputs import Inputs, checked_inputs
from planner.native import as_executed
from profiles.catalog import load_calibration, load_cluster

if TYPE_CHECKING:
    from costmodel.context import CostContext
    from costmodel.layerstep import LayerStep
    from executor.profiler.tasks import SessionPlan, Task

__all__ = ["Outlook", "outlook_of"]

HELD_PASSES: Final = 3  # of both directions, where memory is measured on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Points, how often they are sampled, and the seconds that takes. ``needs``: the bytes of each
    layer's point, ``memory_bytes``: those that the device has for them.
    """

    device: str
    num_points: int
    num_samplings: int
    seconds: float
    needs: dict[Point, int]
    memory_bytes: int

    @property
    def largest(self) -> Point:
        """The point that needs most."""
        return max(self.needs, key=self.needs.__getitem__)

    @property
    def largest_bytes(self) -> int:
        """What that needs."""
        return self.needs[self.largest]

    @property
    def too_large(self) -> list[Point]:
        """Points that need more than there is, the least first."""
        found = [point for point, need in self.needs.items() if need > self.memory_bytes]
        return sorted(found, key=self.needs.__getitem__)

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "device": self.device,
            "num_points": self.num_points,
            "num_samplings": self.num_samplings,
            "seconds": self.seconds,
            "largest": str(self.largest),
            "largest_bytes": self.largest_bytes,
            "memory_bytes": self.memory_bytes,
            "too_large": [str(point) for point in self.too_large],
        }


def outlook_of(plan: SessionPlan) -> Outlook:
    """Of the whole session, no budget set. Raises ``InputError`` where the catalogue has no such
    device, it has no such precision, or the executor no such layers.
    """
    tasks, _ = tasks_of(plan)
    prices = _Prices(plan)
    points = dict.fromkeys(task.point for task in tasks)
    return Outlook(
        device=plan.device_name,
        num_points=len(points),
        num_samplings=len(tasks),
        seconds=sum(map(prices.seconds, tasks)),
        needs={own: prices.held_bytes(own) for own in points if isinstance(own, Point)},
        memory_bytes=prices.usable_bytes,
    )


class _Prices:
    """Seconds of tasks and bytes of points, on the device of a plan."""

    def __init__(self, plan: SessionPlan) -> None:
        self.plan = plan
        self.layers = layer_labels(plan.request.model)
        self.cluster = load_cluster(f"{REPLICAS * max(plan.request.tp)}x{plan.device_name}")
        self.calibration, _ = load_calibration(None, self.cluster)
        self.context = cache(self._context)
        self.context(1, plan.request.seq_lens[0])  # says now what the device cannot do

    @property
    def usable_bytes(self) -> int:
        """Of one device, what its process itself takes left out."""
        return self.cluster.least_memory_bytes - self.calibration.efficiencies.context_bytes

    def seconds(self, task: Task) -> float:
        """Of one task."""
        own = task.point
        if isinstance(own, OperatorPoint):
            peak = self.context(1, self.plan.request.seq_lens[0]).peak_flop_per_s
            return sampling_s(own.flop / peak)
        if isinstance(own, HeldPoint):
            if self.plan.device == "cpu":
                return 0.0  # fake tensors
            return HELD_PASSES * _passes_s(self._step(own.point))
        if isinstance(own, WrappingPoint):
            few = Point(
                layer=own.layer, tp=own.tp, sequence_parallel=False, batch=1, seq_len=FEW_TOKENS
            )
            return self._sampling_s(few)
        return self._sampling_s(own)

    def _sampling_s(self, point: Point) -> float:
        step = self._step(point)
        seconds = len(PASSES) * _passes_s(step) + step.states.optimizer_s
        request = self.plan.request
        copies = num_copies(
            request.model, self.layers[point.layer], point.strategy, request.training
        )
        return sampling_s(copies * seconds)

    def held_bytes(self, point: Point) -> int:
        """The most that a point needs: states, what one micro-batch keeps, and its worst moment."""
        step = self._step(point)
        return step.states.resident_bytes + step.saved_bytes + step.transient_bytes

    def _step(self, point: Point) -> LayerStep:
        context = self.context(point.tp, point.seq_len)
        layer, mesh = self.layers[point.layer], Mesh(tp=point.tp)
        return context.layer(layer, point.strategy, point.batch, mesh)

    def _context(self, tp: int, seq_len: int) -> CostContext:
        request = self.plan.request
        training = replace(request.training, seq_len=seq_len)
        inputs = Inputs(
            model=request.model,
            cluster=self.cluster,
            training=training,
            calibration=self.calibration,
        )
        num_layers = len(request.model.layers)
        chunk = Chunk(0, 0, (LayerSpan(0, num_layers, Strategy(tp=tp)),))
        layout = Layout(
            mesh=Mesh(tp=tp), schedule="1f1b", num_chunks=1,
            micro_batch=1, num_microbatches=1, chunks=(chunk,),
        )  # fmt: skip
        return as_executed(checked_inputs(inputs), layout).context


def _passes_s(step: LayerStep) -> float:
    """Both directions, without what a group exchanges."""
    return sum(own.compute_s + own.host_s for own in (step.forward, step.backward))
