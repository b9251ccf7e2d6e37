"""What a layer of each class holds, and what it adds once a step, from its cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodel.context import CostContext
    from costmodel.layerstep import LayerStep

__all__ = ["held_bytes", "once_ns"]

NANO = 10**9


def once_ns(
    steps: Sequence[Sequence[LayerStep]], main: int, microbatches: int, hidden_part: float
) -> tuple[int, ...]:
    """What a layer of each class adds at least once a step, divided over the micro-batches; below
    zero where others' traffic hides behind its passes, by no more than those take.
    ``steps[class][strategy]``; h = ``hidden_part`` of traffic beside passes costs nothing.

    Of a stage with traffic R, behind passes W of all its layers, R - h min(R, W) is exposed: no
    less than R - h R, and no less than R - h W. Both are sums over layers. That one counts, for all
    layers, which says more of class ``main``.
    """
    states = [row[0].states for row in steps]
    reduced = _exposed_s(
        [own.reduce_s for own in states],
        [max(step.backward.total_s for step in row) for row in steps],
        main,
        hidden_part,
    )
    gathered = _exposed_s(
        [own.gather_s for own in states],
        [max(step.forward.total_s for step in row) for row in steps],
        main,
        hidden_part,
    )
    return tuple(
        math.floor((own.optimizer_s + there + back) * NANO / microbatches)
        for own, there, back in zip(states, reduced, gathered, strict=True)
    )


def _exposed_s(
    traffic: list[float], passes: list[float], main: int, hidden_part: float
) -> list[float]:
    hidden = traffic if traffic[main] < passes[main] else passes
    return [whole - hidden_part * own for whole, own in zip(traffic, hidden, strict=True)]


def held_bytes(
    context: CostContext,
    steps: Sequence[Sequence[LayerStep]],
    flights: set[float],
    *,
    copies: int,
    once: int,
) -> dict[float, tuple[tuple[int, ...], ...]]:
    """Bytes that a layer of each class holds under each strategy, by the micro-batches in flight;
    those of class ``once`` are there for one. ``copies`` of its states are held, in the unit of
    ``CostContext.beside_activations``.
    """
    held = [
        [
            (
                math.ceil(context.beside_activations(step.states.resident_bytes * copies)),
                step.saved_bytes,
            )
            for step in row
        ]
        for row in steps
    ]
    return {
        flight: tuple(
            tuple(states + math.ceil(saved * (1 if c == once else flight)) for states, saved in row)
            for c, row in enumerate(held)
        )
        for flight in flights
    }
