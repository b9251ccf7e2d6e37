"""What each device holds over the time of a timeline: activations by micro-batch, gathered
parameters, gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from costmodel.schedules import BACKWARD, FORWARD, GATHER, INPUT, REDUCE, WEIGHT
from costmodel.timeline import COMPUTE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from costmodel.timeline import Event, Timeline

__all__ = ["KINDS", "Held", "Sizes", "held_over_time"]

KINDS: Final = ("activations", "for_weights", "gathered", "gradients")
Amount = float | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is held of each chunk, ``[device][chunk]``, in any one unit (bytes, micro-batches):
    activations of a micro-batch, its parameters when they are gathered, its gradients.
    """

    activations: Sequence[Sequence[Amount]]
    gathered: Sequence[Sequence[Amount]] = ()
    gradients: Sequence[Sequence[Amount]] = ()


class Held(NamedTuple):
    """What a device holds from ``time_s`` on. ``activations`` until the (input gradient of the)
    backward pass is done, ``for_weights`` from there to the weight gradient.
    """

    time_s: float
    activations: Amount
    for_weights: Amount
    gathered: Amount
    gradients: Amount

    @property
    def total(self) -> Amount:
        """All kinds."""
        return self.activations + self.for_weights + self.gathered + self.gradients


def held_over_time(timeline: Timeline, sizes: Sizes) -> tuple[list[Held], ...]:
    """For each device, what it holds after every change; nothing before the first and after the
    last. Frees come before allocations of the same moment. Gradients that no reduction takes away
    stay until the end of the step.
    """
    found = []
    for device in range(len(timeline.idle_s)):
        now = dict.fromkeys(KINDS, 0.0)
        points: list[Held] = []
        for time, amount, kind in sorted(_changes(timeline, sizes, device)):
            now[kind] += amount
            points.append(Held(time, *now.values()))
        found.append(points)
    return tuple(found)


def _changes(timeline: Timeline, sizes: Sizes, device: int) -> Iterator[tuple[float, Amount, str]]:
    """(time, change, kind) of a device."""
    own = [(n, event) for n, event in enumerate(timeline.events) if event.device == device]
    yield from _activations([e for _, e in own if e.stream == COMPUTE], sizes.activations[device])
    if sizes.gathered:
        last_use = _last_uses(timeline)
        for number, event in own:
            if event.kind == GATHER:
                size = sizes.gathered[device][event.chunk]
                yield event.start_s, size, "gathered"
                yield last_use.get(number, event.end_s), -size, "gathered"
    if sizes.gradients:
        yield from _gradients(
            [e for _, e in own], sizes.gradients[device], until=timeline.makespan_s
        )


def _activations(
    events: list[Event], sizes: Sequence[Amount]
) -> Iterator[tuple[float, Amount, str]]:
    for event in events:
        size = sizes[event.chunk]
        if event.kind == FORWARD:
            yield event.start_s, size, "activations"
        elif event.kind in (BACKWARD, INPUT):
            yield event.end_s, -size, "activations"
        if event.kind == INPUT:
            yield event.end_s, size, "for_weights"
        elif event.kind == WEIGHT:
            yield event.end_s, -size, "for_weights"


def _gradients(
    events: list[Event], sizes: Sequence[Amount], *, until: float
) -> Iterator[tuple[float, Amount, str]]:
    accumulating: set[int] = set()
    for event in events:
        chunk = event.chunk
        makes = event.stream == COMPUTE and event.kind in (BACKWARD, WEIGHT)
        if makes and chunk not in accumulating:
            accumulating.add(chunk)
            yield event.start_s, sizes[chunk], "gradients"
        elif event.kind == REDUCE and chunk in accumulating:
            accumulating.discard(chunk)
            yield event.end_s, -sizes[chunk], "gradients"
    for chunk in accumulating:
        yield until, -sizes[chunk], "gradients"


def _last_uses(timeline: Timeline) -> dict[int, float]:
    """End of the last event that waits for each gather."""
    found: dict[int, float] = {}
    for event, waits in zip(timeline.events, timeline.waits, strict=True):
        for i in waits:
            if timeline.events[i].kind == GATHER:
                found[i] = max(found.get(i, 0.0), event.end_s)
    return found
