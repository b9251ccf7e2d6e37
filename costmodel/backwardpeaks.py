"""The worst moment of a device of the native executor, over the backward passes of a step.

Gradients come into being in the first backward pass of a step, layer by layer, while it gives up
activations, and weights where that pass is the only one; so the peak is that of the worst moment:

    held micro-batches x what each keeps - what later layers have given up
    + gradients of later layers (all of them, once the first backward pass is over)
    + what the layer at work needs on top (``costmodel.fsdpmemory.Moments``)
    + the buffer of gradients that were reduced last, and weights gathered ahead
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from costmodel.fsdpmemory import Moments
from costmodel.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from costmodel.simulate import SHORT_RUN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodel.layerstep import LayerStep
    from costmodel.schedules import Order, Schedule, Shape

__all__ = ["Peak", "backward_peaks"]


class Peak(NamedTuple):
    """Bytes on a device at its worst moment, by kind; ``working`` is what the layer at work needs
    on top, gradients that it makes first included; ``released`` weights are gone already.
    """

    activations: float
    gradients: int
    working: int
    released: int = 0

    @property
    def total(self) -> float:
        """All of them."""
        return self.activations + self.gradients + self.working - self.released


class _Backward(NamedTuple):
    """The worst moments of a chunk's backward passes, ``activations`` less those of all
    micro-batches in flight: of the first pass of a step, of the last, and of the others.
    ``put_off``: gradients that a split pass leaves for that of the weights.
    """

    first: Peak
    later: Peak
    last: Peak
    gradients: int
    put_off: int


def backward_peaks(
    schedule: Schedule,
    shape: Shape,
    held: Sequence[Sequence[float]],
    stages: Sequence[Sequence[Sequence[tuple[LayerStep, int]]]],
) -> list[Peak]:
    """The worst moment of each device. ``held[device][chunk]``: bytes that one micro-batch keeps;
    ``stages[device][chunk]``: layers and how often each stands there, in the order of the model.
    """
    passes = [[_backward(chunk) for chunk in chunks] for chunks in stages]
    known = schedule.held(shape)
    if known is not None and shape.chunks == 1 and not schedule.splits:
        return [
            _of_one_chunk(flight, shape.microbatches, sizes[0], own[0])
            for flight, sizes, own in zip(known, held, passes, strict=True)
        ]
    if schedule.steady:
        shape = replace(shape, microbatches=min(shape.microbatches, SHORT_RUN * shape.stages))
    orders = schedule.orders(shape)
    return [_of_order(*each) for each in zip(orders, held, passes, strict=True)]


def _of_one_chunk(flight: float, microbatches: int, size: float, own: _Backward) -> Peak:
    """Of ``flight`` micro-batches; where there are no more, one less is there with gradients, and
    in the last pass one.
    """
    moments = [own.first._replace(activations=own.first.activations + flight * size)]
    rest = flight if microbatches > flight else flight - 1
    if rest > 0:
        moments.append(own.last._replace(activations=own.last.activations + size))
    if rest > 0 and microbatches > 2:  # noqa: PLR2004 - neither first nor last
        moments.append(own.later._replace(activations=own.later.activations + rest * size))
    return max(moments, key=lambda each: each.total)


def _of_order(order: Order, sizes: Sequence[float], passes: Sequence[_Backward]) -> Peak:
    """Of passes in their order. Split ones make gradients of weights in passes of their own: there
    all count from the start, and each micro-batch keeps what those need until then.
    """
    now, worst = 0.0, Peak(0.0, 0, 0)
    made: set[int] = set()
    due = Counter(chunk for kind, chunk, _ in order if kind in (BACKWARD, INPUT))
    for kind, chunk, _ in order:
        if kind == FORWARD:
            now += sizes[chunk]
        elif kind in (BACKWARD, INPUT):
            if kind == INPUT:
                made = {*range(len(passes))}
            own = passes[chunk].later if chunk in made else passes[chunk].first
            if kind == INPUT:
                now += passes[chunk].put_off
            due[chunk] -= 1
            if kind == BACKWARD and chunk in made and not due[chunk]:
                own = passes[chunk].last
            others = sum(passes[each].gradients for each in made if each != chunk)
            moment = own._replace(
                activations=now + own.activations, gradients=others + own.gradients
            )
            worst = max(worst, moment, key=lambda each: each.total)
            made.add(chunk)
        if kind in (BACKWARD, WEIGHT):
            now -= sizes[chunk] + (passes[chunk].put_off if kind == WEIGHT else 0)
    return worst


class _Past(NamedTuple):
    """What layers that have run backward gave up and made in this pass."""

    activations: int = 0
    gradients: int = 0
    change: int = 0  # of gradients, by the last pass
    released: int = 0

    def after(self, step: LayerStep, count: int) -> _Past:
        """With ``count`` layers more."""
        own = step.moments
        return _Past(
            self.activations + count * step.saved_bytes,
            self.gradients + count * own.gradients,
            self.change + count * (own.kept - own.gradients),
            self.released + count * own.released,
        )


def _backward(chunk: Sequence[tuple[LayerStep, int]]) -> _Backward:
    """Of equal layers, the first two or the last two to run backward have the worst moment."""
    whole = sum(step.moments.gradients * count for step, count in chunk)
    found: tuple[list[Peak], list[Peak], list[Peak]] = ([], [], [])
    past, behind, tied = _Past(), Moments(), Moments()
    for place in reversed(range(len(chunk))):
        step, count = chunk[place]
        before = chunk[place - 1][0].moments if place else Moments()
        for done in sorted({0, 1, count - 2, count - 1} & {*range(count)}):
            ahead = step.moments.ahead if done < count - 1 else before.ahead
            now = past.after(step, done)
            own = _moments_of(step, now, step.moments if done else behind, whole, ahead, tied)
            for moments, more in zip(found, own, strict=True):
                moments.extend(more)
        past, behind = past.after(step, count), step.moments
        tied = step.moments if step.moments.tied_gradient else tied
    first, later, last = (max(each, key=lambda moment: moment.total) for each in found)
    put_off = sum(step.moments.put_off * count for step, count in chunk)
    return _Backward(first, later, last, whole, put_off)


def _moments_of(
    step: LayerStep, past: _Past, behind: Moments, whole: int, ahead: int, tied: Moments
) -> tuple[list[Peak], list[Peak], list[Peak]]:
    """Of a layer's first, other and last passes, while it runs and when it is over."""
    own, gone = step.moments, past.activations + step.saved_bytes
    buffer = behind.buffer if behind.every else 0
    released = past.released if own.once else 0
    ahead += tied.tied_weights + tied.tied_gradient
    first = [
        Peak(-past.activations, past.gradients, own.making + buffer + ahead, released),
        Peak(-gone, past.gradients, own.made + ahead, released),
        Peak(-past.activations, 0, own.forward),
    ]
    later = [
        Peak(-past.activations, whole, own.adding + buffer + ahead),
        Peak(-gone, whole, own.added + ahead),
        Peak(-past.activations, whole, own.forward_again),
    ]
    left = whole + past.change
    last = [
        Peak(-past.activations, left, own.adding + behind.buffer + ahead, past.released),
        Peak(-gone, left, own.reduced + ahead, past.released),
        Peak(-past.activations, whole, own.forward_again),
    ]
    return first, later, last
