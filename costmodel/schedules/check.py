"""What holds for every schedule: each micro-batch runs once, in an order without cycles."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from costmodel.schedules.core import (
    BACKWARD,
    FORWARD,
    GATHER,
    INPUT,
    LETTERS,
    PASSES,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    WEIGHT,
    Action,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from costmodel.schedules.core import Order, Path, Schedule, Shape

__all__ = ["Node", "describe", "inputs", "problems", "staleness", "with_transfers"]

Node = tuple[int, Action]  # device, action


def describe(device: int, action: Action) -> str:
    """``F3 of chunk 0 on device 1``."""
    kind, chunk, batch = action
    return f"{LETTERS[kind]}{batch} of chunk {chunk} on device {device}"


def problems(schedule: Schedule, shape: Shape, orders: list[Order] | None = None) -> list[str]:
    """What is wrong with a schedule's orders; empty if they are sound.

    Every pass stands once, a backward behind its forward, a weight gradient behind its input
    gradient, activations and gradients return to nothing, and no pass waits for itself (a cycle
    is named). ``orders`` None: those of the schedule.
    """
    orders = orders if orders is not None else schedule.orders(shape)
    paths = schedule.paths(shape)
    found = [*_passes(schedule, shape, paths, orders), *_turns(orders)]
    if found:
        return found
    cycle = _cycle(paths, orders)
    return [f"passes wait for one another: {' <- '.join(cycle)}"] if cycle else []


def _passes(
    schedule: Schedule, shape: Shape, paths: tuple[Path, ...], orders: list[Order]
) -> Iterator[str]:
    """Every pass of every micro-batch on its path, and nothing else."""
    counts = Counter(
        (device, (INPUT if kind == BACKWARD else kind, chunk, batch))
        for device, order in enumerate(orders)
        for kind, chunk, batch in order
        if kind in PASSES
    )
    whole = {
        (device, chunk, batch)
        for device, order in enumerate(orders)
        for kind, chunk, batch in order
        if kind == BACKWARD
    }
    wanted: set[Node] = set()
    for batch, path in enumerate(schedule.microbatch_paths(shape)):
        for device, chunk in paths[path]:
            wanted |= {(device, (kind, chunk, batch)) for kind in (FORWARD, INPUT)}
            if (device, chunk, batch) not in whole:
                wanted.add((device, (WEIGHT, chunk, batch)))
    for node in sorted(wanted | counts.keys()):
        if counts[node] != int(node in wanted):
            yield f"{describe(*node)} stands {counts[node]} times, not {int(node in wanted)}"


def _turns(orders: list[Order]) -> Iterator[str]:
    """On each device: forward, then backward or input gradient, then weight gradient."""
    for device, order in enumerate(orders):
        begun: set[tuple[int, int]] = set()
        waiting: set[tuple[int, int]] = set()
        for action in order:
            kind, own = action[0], action[1:]
            if kind == FORWARD:
                begun.add(own)
            elif kind in (INPUT, BACKWARD):
                if own not in begun:
                    yield f"{describe(device, action)} stands before its forward"
                begun.discard(own)
                if kind == INPUT:
                    waiting.add(own)
            elif kind == WEIGHT:
                if own not in waiting:
                    yield f"{describe(device, action)} stands before its input gradient"
                waiting.discard(own)
        if begun or waiting:
            yield f"device {device} still holds {len(begun | waiting)} micro-batches at the end"


def inputs(paths: tuple[Path, ...], orders: list[Order]) -> dict[Node, Node | None]:
    """The pass that each pass gets its input from, None for the first forward; in the order of
    each device's list.
    """
    backward = {
        (device, chunk, batch): kind
        for device, order in enumerate(orders)
        for kind, chunk, batch in order
        if kind in (INPUT, BACKWARD)
    }
    at = {place: (path, i) for path in paths for i, place in enumerate(path)}
    found: dict[Node, Node | None] = {}
    for device, order in enumerate(orders):
        for action in order:
            kind, chunk, batch = action
            if kind not in PASSES:
                continue
            path, i = at[device, chunk]
            source: Node | None = None
            if kind == FORWARD and i:
                source = path[i - 1][0], (FORWARD, path[i - 1][1], batch)
            elif kind == WEIGHT:
                source = device, (INPUT, chunk, batch)
            elif kind != FORWARD and i + 1 == len(path):
                source = device, (FORWARD, chunk, batch)
            elif kind != FORWARD:
                place = path[i + 1]
                source = place[0], (backward[(*place, batch)], place[1], batch)
            found[device, action] = source
    return found


def _waits(paths: tuple[Path, ...], orders: list[Order]) -> dict[Node, list[Node]]:
    """What each pass waits for: the pass before it on its device, and its input."""
    waits: dict[Node, list[Node]] = {}
    previous: Node | None = None
    for node, source in inputs(paths, orders).items():
        same = previous is not None and previous[0] == node[0]
        waits[node] = [each for each in (previous if same else None, source) if each]
        previous = node
    return waits


def _cycle(paths: tuple[Path, ...], orders: list[Order]) -> list[str]:
    """The passes of a cycle in words, each waiting for the next; empty if there is none."""
    waits = _waits(paths, orders)
    followers: dict[Node, list[Node]] = {}
    left = {node: len(own) for node, own in waits.items()}
    for node, own in waits.items():
        for before in own:
            followers.setdefault(before, []).append(node)
    free = [node for node, count in left.items() if not count]
    while free:
        for node in followers.get(free.pop(), []):
            left[node] -= 1
            if not left[node]:
                free.append(node)
    stuck = {node for node, count in left.items() if count}
    if not stuck:
        return []
    walk = [min(stuck)]
    while walk[-1] not in walk[:-1]:
        walk.append(next(before for before in waits[walk[-1]] if before in stuck))
    return [describe(*node) for node in walk[walk.index(walk[-1]) :]]


def staleness(order: Order) -> int:
    """Weight updates that come between a micro-batch's forward and its backward on a device which
    updates after every backward: the most of all micro-batches.
    """
    updates, seen, most = 0, dict[tuple[int, int], int](), 0
    for kind, chunk, batch in order:
        if kind == FORWARD:
            seen[chunk, batch] = updates
        elif kind in (BACKWARD, INPUT):
            most = max(most, updates - seen[chunk, batch])
            updates += 1
    return most


def with_transfers(schedule: Schedule, shape: Shape) -> list[Order]:
    """The orders with what devices hand over: a receive before each pass whose input comes from
    another device, a send behind each whose result goes to one.
    """
    at = {p: (path, i) for path in schedule.paths(shape) for i, p in enumerate(path)}
    found: list[Order] = []
    for device, order in enumerate(schedule.orders(shape)):
        own: Order = []
        for action in order:
            kind, chunk, batch = action
            if kind in (WEIGHT, GATHER) or kind not in PASSES:
                own.append(action)
                continue
            path, i = at[device, chunk]
            ahead = 1 if kind == FORWARD else -1
            pair = (
                (RECEIVE_FORWARD, SEND_FORWARD)
                if kind == FORWARD
                else (RECEIVE_BACKWARD, SEND_BACKWARD)
            )
            before, after = i - ahead, i + ahead
            if 0 <= before < len(path) and path[before][0] != device:
                own.append((pair[0], chunk, batch))
            own.append(action)
            if 0 <= after < len(path) and path[after][0] != device:
                own.append((pair[1], chunk, batch))
        found.append(own)
    return found
