"""Times of one layer on one rank: forward, backward, and what an optimizer step adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from executor.gradients import scale_gradients, squared_norm, sum_partial
from executor.profiler.probe import Probe
from executor.profiler.timing import Sample, sampled

if TYPE_CHECKING:
    import torch

    from executor.clock import Clock
    from executor.profiler.points import Point
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = ["BACKWARD", "FORWARD", "STEP", "layer_samples"]

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
STEP: Final = "step"
FIRST: Final = "first backward"


def layer_samples(
    model: ModelSpec, training: TrainingSpec, point: Point, device: torch.device
) -> tuple[list[Sample], int]:
    """Samples of a step of two micro-batches, by pass and of one layer, and the elements that it
    updates. The first backward pass of a step makes gradients, the others add to them: a pass is
    the mean of both. Raises torch's error where memory is short.
    """
    probe = Probe(model, training, point, device)

    def step(clock: Clock) -> None:
        probe.data_parallel.set_last_backward(last=False)
        for what in (FIRST, BACKWARD):
            with clock.busy(f"{FORWARD} of {what}"):
                y = probe.forward()
            if what == BACKWARD:
                probe.data_parallel.set_last_backward(last=True)
            with clock.busy(what):
                probe.backward(y)
            del y
        with clock.busy(STEP):
            update(probe)

    samples = sampled(step, device)
    return [_of_one(sample, probe.copies) for sample in samples], probe.num_parameters


def update(probe: Probe) -> None:
    """The optimizer step, as the trainer does it where gradients are clipped."""
    own = probe.parameters()
    sum_partial(own)
    norm = float(squared_norm(own, []).double()) ** 0.5
    scale_gradients(own, 1 / max(norm, 1.0))
    probe.optimizer.step()
    probe.optimizer.zero_grad()


def _of_one(sample: Sample, copies: int) -> Sample:
    """The sample of one of several layers, and of one pass of two."""
    own = sample.seconds
    parts = {
        FORWARD: sum(own[f"{FORWARD} of {what}"] for what in (FIRST, BACKWARD)) / 2,
        BACKWARD: (own[FIRST] + own[BACKWARD]) / 2,
        STEP: own[STEP],
    }
    return Sample({what: s / copies for what, s in parts.items()}, sample.disturbed)
