"""Times of one layer on one rank: forward, backward, what an optimizer step adds, and what the
wrapper of data parallelism does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from costmodel.layout import Strategy
from executor.gradients import scale_gradients, squared_norm, sum_partial
from executor.profiler.points import Point
from executor.profiler.probe import Probe
from executor.profiler.timing import Sample, sampled

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from executor.clock import Clock
    from executor.profiler.points import WrappingPoint
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = [
    "BACKWARD",
    "FIRST_BACKWARD",
    "FIRST_FORWARD",
    "FORWARD",
    "REPLICAS",
    "STEP",
    "added",
    "layer_samples",
    "wrapping_samples",
]

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
STEP: Final = "step"
FIRST_FORWARD: Final = "first forward"
FIRST_BACKWARD: Final = "first backward"
PASSES: Final = ((FIRST_FORWARD, FIRST_BACKWARD), (FORWARD, BACKWARD))
FEW_TOKENS: Final = 16  # so that a layer's own time does not drown what its wrapper does
REPLICAS: Final = 2
REDUCES_EACH, GATHERS_EACH = 2, 3  # stages of ZeRO from which each pass communicates


def layer_samples(
    model: ModelSpec, training: TrainingSpec, point: Point, device: torch.device
) -> tuple[list[Sample], int]:
    """Samples of a step of two micro-batches, by pass and of one layer, and the elements that it
    updates. The first backward pass of a step makes gradients, the others add to them: a pass is
    the mean of both. Raises torch's error where memory is short.
    """
    probe = Probe(model, training, point, device)
    return [_mean_passes(sample) for sample in _steps(probe, device)], probe.num_parameters


def _mean_passes(sample: Sample) -> Sample:
    own = sample.seconds
    passes = {
        FORWARD: (own[FIRST_FORWARD] + own[FORWARD]) / 2,
        BACKWARD: (own[FIRST_BACKWARD] + own[BACKWARD]) / 2,
        STEP: own[STEP],
    }
    return Sample(passes, sample.disturbed)


def wrapping_samples(
    model: ModelSpec, training: TrainingSpec, own: WrappingPoint, device: torch.device
) -> list[Sample]:
    """Samples of such a step with few tokens, first and second micro-batch apart. Needs a process
    group of both replicas, or of one.
    """
    point = Point(layer=own.layer, tp=own.tp, sequence_parallel=False, batch=1, seq_len=FEW_TOKENS)
    strategy = Strategy(tp=own.tp)
    if own.zero is not None:
        strategy = Strategy(tp=own.tp, dp=REPLICAS, zero=own.zero)
    return _steps(Probe(model, training, point, device, strategy=strategy), device)


def added(alone: Mapping[str, float], wrapped: Mapping[str, float], zero: int) -> dict[str, float]:
    """What a wrapper adds to each pass, and once a step. What only the first forward pass or the
    last backward pass of a step does, as the stage has it, counts once. Two replicas share an
    update from stage 1 on.
    """
    more = {what: wrapped[what] - alone[what] for what in alone}
    forward = more[FORWARD]
    if zero >= GATHERS_EACH:
        forward = (more[FIRST_FORWARD] + more[FORWARD]) / 2
    backward = more[FIRST_BACKWARD]
    if zero >= REDUCES_EACH:
        backward = (more[FIRST_BACKWARD] + more[BACKWARD]) / 2
    once = sum(more[what] for both in PASSES for what in both) - 2 * (forward + backward)
    once += wrapped[STEP] - alone[STEP] / (REPLICAS if zero else 1)
    return {FORWARD: max(0.0, forward), BACKWARD: max(0.0, backward), STEP: max(0.0, once)}


def _steps(probe: Probe, device: torch.device) -> list[Sample]:
    """Samples of a step of two micro-batches, of one layer."""

    def step(clock: Clock) -> None:
        probe.data_parallel.set_last_backward(last=False)
        for number, (ahead, back) in enumerate(PASSES, 1):
            with clock.busy(ahead):
                y = probe.forward()
            if number == len(PASSES):
                probe.data_parallel.set_last_backward(last=True)
            with clock.busy(back):
                probe.backward(y)
            del y
        with clock.busy(STEP):
            update(probe)

    return [
        Sample({what: s / probe.copies for what, s in own.seconds.items()}, own.disturbed)
        for own in sampled(step, device)
    ]


def update(probe: Probe) -> None:
    """The optimizer step, as the trainer does it where gradients are clipped."""
    own = probe.parameters()
    sum_partial(own)
    norm = float(squared_norm(own, []).double()) ** 0.5
    scale_gradients(own, 1 / max(norm, 1.0))
    probe.optimizer.step()
    probe.optimizer.zero_grad()
