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

    from costmodel.timeline import Timeline

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


def _changes(
    timeline: Timeline, sizes: Sizes, device: int
) -> Iterator[tuple[float, Amount, str]]:
    """(time, change, kind) of a device."""
    last_use = _last_uses(timeline)
    accumulating: set[int] = set()
    for number, event in enumerate(timeline.events):
        if event.device != device:
            continue
        kind, chunk = event.kind, event.chunk
        own = sizes.activations[device][chunk]
        if event.stream == COMPUTE and kind == FORWARD:
            yield event.start_s, own, "activations"
        elif event.stream == COMPUTE and kind in (BACKWARD, INPUT):
            yield event.end_s, -own, "activations"
            if kind == INPUT:
                yield event.end_s, own, "for_weights"
        elif event.stream == COMPUTE and kind == WEIGHT:
            yield event.end_s, -own, "for_weights"
        elif kind == GATHER and sizes.gathered:
            yield event.start_s, sizes.gathered[device][chunk], "gathered"
            freed = last_use.get(number, event.end_s)
            yield freed, -sizes.gathered[device][chunk], "gathered"
        if not sizes.gradients:
            continue
        if event.stream == COMPUTE and kind in (BACKWARD, WEIGHT) and chunk not in accumulating:
            accumulating.add(chunk)
            yield event.start_s, sizes.gradients[device][chunk], "gradients"
        elif kind == REDUCE and chunk in accumulating:
            accumulating.discard(chunk)
            yield event.end_s, -sizes.gradients[device][chunk], "gradients"
    for chunk in accumulating:
        yield timeline.makespan_s, -sizes.gradients[device][chunk], "gradients"


def _last_uses(timeline: Timeline) -> dict[int, float]:
    """End of the last event that waits for each gather."""
    found: dict[int, float] = {}
    for event, waits in zip(timeline.events, timeline.waits, strict=True):
        for i in waits:
            if timeline.events[i].kind == GATHER:
                found[i] = max(found.get(i, 0.0), event.end_s)
    return found
