"""Calibrations of many stacks from one set of measured runs, with what is known of each other.

A run's stack on its device is a leaf; above it stand the family of its releases on the device
(``Megatron-Bridge`` above ``Megatron-Bridge 26.04``), all stacks of the device, and at the root
the datasheet. Every fit takes its parent as prior, so a leaf of few runs stays near its family.

Cross-validation leaves out a part of the runs and predicts it by fits of all the others. A run
belongs to two parts: a fold, which keeps a source's model and device together, and its source.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from costmodel.context import Memo
from costmodel.fitting import LEAST_RUNS, Fit, fit, middle, refit
from costmodel.intervals import Ends, of_known_stack, of_unseen_source
from costmodel.localmodel import local_model, log_measured, log_steps
from costmodel.memoryfit import LEAST_EVIDENCE, Evidence, fit_memory
from costmodel.parameters import distance, usual
from costmodel.replay import seen_in
from profiles.calibrations import ANY, stack_family

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from costmodel.replay import Replay
    from profiles.calibration import Calibration

__all__ = ["Leaf", "Library", "Part", "held_out", "leaf_of"]

Part = int | str  # a fold, or a source

FOLDS: Final = 10
MOST_RUNS: Final = 160  # of one fit: more of the same say little more
MOST_OF_A_DEVICE: Final = 120  # in the fit of all its stacks
LEAF_TIGHTNESS: Final = 0.6  # releases of one family differ less than families
FAMILY_TIGHTNESS: Final = 0.8
MIDDLE_TIGHTNESS: Final = 0.7  # a device's usual stack is nearer to the datasheet than any one
MIDDLE_ROUNDS: Final = 2


class Leaf(NamedTuple):
    """A device and a software stack; ``stack`` "any" for all of the device's."""

    device: str
    stack: str


def leaf_of(each: Replay) -> Leaf:
    """The leaf that a run belongs to."""
    return Leaf(each.device, each.run.release)


def parents(leaf: Leaf) -> tuple[Leaf, ...]:
    """What stands above a leaf, nearest first."""
    if leaf.stack == ANY:
        return ()
    everything = Leaf(leaf.device, ANY)
    if leaf.stack.endswith(f" {ANY}"):
        return (everything,)
    return Leaf(leaf.device, stack_family(leaf.stack)), everything


def held_out(each: Replay) -> int:
    """The fold of a run: one for each source's model on a device."""
    run = each.run
    return zlib.crc32(f"{run.file}|{run.model}|{run.gpu}".encode()) % FOLDS


def parts(each: Replay) -> tuple[Part, Part]:
    """The parts of a run: with either of them it is left out."""
    return held_out(each), each.run.file


@dataclass(slots=True)
class _Node:
    """A leaf or a parent with its runs, its fit, and its fits without each part."""

    replays: list[Replay]
    fit: Fit
    without: dict[Part, Calibration] = field(default_factory=dict)
    residuals: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    scales: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def saw(self, part: Part | None) -> bool:
        """Whether some of its runs belong to the part."""
        return part is not None and any(part in parts(each) for each in self.replays)


class Library:
    """Calibrations by leaf, fitted to runs."""

    def __init__(
        self,
        replays: Sequence[Replay],
        datasheet: Calibration,
        *,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        """Fit everything, root first."""
        self.datasheet = datasheet
        self._root = usual(datasheet)
        self.nodes: dict[Leaf, _Node] = {}
        self.memory: dict[tuple[Leaf, Part | None], tuple[float, float]] = {}
        groups: dict[Leaf, list[Replay]] = defaultdict(list)
        for each in replays:
            if each.run.step_time_s is None:
                continue
            leaf = leaf_of(each)
            for place in (leaf, *parents(leaf)):
                groups[place].append(each)
        self._sizes = {place: len(own) for place, own in groups.items()}
        for place in sorted(groups, key=lambda place: (_depth(place), place)):
            if len(groups[place]) >= LEAST_RUNS and not self._same_as_parent(place, groups):
                if on_progress is not None:
                    on_progress(f"{place.stack} on {place.device}: {len(groups[place])} runs")
                self.nodes[place] = self._node(place, groups[place])

        self._remember(replays)

    def _remember(self, replays: Sequence[Replay]) -> None:
        """Fit the memory of every leaf, with all runs and without each fold."""
        found: dict[Leaf, list[tuple[int, Evidence]]] = defaultdict(list)
        memo = Memo()
        for each in replays:
            evidence = Evidence.of(each, self.datasheet, memo)
            if evidence is not None:
                found[leaf_of(each)].append((held_out(each), evidence))
        for leaf, own in found.items():
            for fold in (None, *sorted({fold for fold, _ in own})):
                seen = [evidence for of, evidence in own if of != fold]
                if len(seen) >= LEAST_EVIDENCE:
                    self.memory[leaf, fold] = fit_memory(seen)

    def _same_as_parent(self, place: Leaf, groups: dict[Leaf, list[Replay]]) -> bool:
        """Whether a family or a device consists of one leaf only, which then stands for it."""
        children = [leaf for leaf in groups if place in parents(leaf)]
        return bool(children) and any(len(groups[c]) == len(groups[place]) for c in children)

    def above(self, place: Leaf) -> Leaf | None:
        """The nearest parent that was fitted; a family only where other stacks than this one have
        at least half of its runs, else what it says was learnt from this one.
        """
        for parent in parents(place):
            others = self._sizes.get(parent, 0) - self._sizes[place]
            if parent in self.nodes and (parent.stack == ANY or others >= self._sizes[place]):
                return parent
        return None

    def _prior(self, place: Leaf, part: Part | None = None) -> Calibration:
        above = self.above(place)
        if above is None:
            return self._root
        node = self.nodes[above]
        if part is None or not node.saw(part):
            return node.fit.calibration
        return node.without.get(part, self._prior(above, part))

    def _node(self, place: Leaf, own: list[Replay]) -> _Node:
        everything = place.stack == ANY
        chosen = _chosen(own, alike=everything)
        tightness = (1.0, FAMILY_TIGHTNESS, LEAF_TIGHTNESS)[
            _depth(place) if self.above(place) else 0
        ]
        found = fit(chosen, self._prior(place), tightness=tightness)
        measured = log_measured(chosen)
        sources = [each.run.file for each in chosen]
        if everything:
            found = self._between(found, chosen, measured, sources)
        found = replace(found, calibration=replace(found.calibration, seen=seen_in(own)))
        node = _Node(own, found)
        model = found.model
        for part in dict.fromkeys(part for each in own for part in parts(each)):
            seen = np.array([part not in parts(each) for each in chosen])
            if seen.sum() < LEAST_RUNS:
                continue
            centre = distance(model.parameters, found.calibration, self._prior(place, part))
            left, known = model.of(seen), measured[seen]
            if everything or isinstance(part, str):  # what other sources of it do not say alone
                groups = [source for source, keep in zip(sources, seen, strict=True) if keep]
                near = MIDDLE_TIGHTNESS if everything else tightness
                node.without[part] = middle(left, known, groups, centre, near)
            else:
                node.without[part] = refit(left, known, centre, tightness)
            rest = seen_in([each for each in own if part not in parts(each)])
            node.without[part] = replace(node.without[part], seen=rest)
        self._predict(place, node)
        return node

    def _between(
        self, found: Fit, chosen: list[Replay], measured: NDArray[np.float64], sources: list[str]
    ) -> Fit:
        """A fit moved to the middle of its sources, each of which may have efficiencies of its
        own.
        """
        for _ in range(MIDDLE_ROUNDS):
            model = found.model
            centre = distance(model.parameters, model.calibration, self._root)
            calibration = middle(model, measured, sources, centre, MIDDLE_TIGHTNESS)
            model = local_model(chosen, calibration, model.parameters, like=model)
            residuals = tuple((model.log_s - measured).tolist())
            found = replace(found, calibration=calibration, residuals=residuals, model=model)
        return found

    def _predict(self, place: Leaf, node: _Node) -> None:
        """log(measurement / estimate) of the node's runs and their scales, each estimated without
        its fold; for all of a device without its source, since what falls back on it is a stack
        never seen.
        """
        node.residuals, node.scales = np.zeros((2, len(node.replays)))
        own = [parts(each)[place.stack == ANY] for each in node.replays]
        for part in dict.fromkeys(own):
            rows = [i for i, mine in enumerate(own) if mine == part]
            calibration = node.without.get(part, self._prior(place, part))
            replays, memo = [node.replays[i] for i in rows], Memo()
            node.residuals[rows] = log_measured(replays) - log_steps(replays, calibration)
            node.scales[rows] = [each.scale(calibration, memo) for each in replays]

    def find(self, leaf: Leaf, part: Part | None = None) -> tuple[Calibration, Leaf | None]:
        """The nearest calibration, and where it was fitted (None: the datasheet). With ``part``
        one that has not seen the runs of that part.
        """
        calibration, place = self._find(leaf, part)
        memory = self.memory.get((leaf, part))
        if memory is None:
            return calibration, place
        reserve, sigma = memory
        own = replace(calibration.efficiencies, reserve=reserve, memory_sigma=sigma)
        return replace(calibration, efficiencies=own), place

    def _find(self, leaf: Leaf, part: Part | None) -> tuple[Calibration, Leaf | None]:
        for place in (leaf, *parents(leaf)):
            node = self.nodes.get(place)
            if node is None:
                continue
            if not node.saw(part):
                return self._with_interval(place, node.fit.calibration, part), place
            if part in node.without:
                return self._with_interval(place, node.without[part], part), place
        return self.datasheet, None

    def _with_interval(
        self, place: Leaf, calibration: Calibration, part: Part | None
    ) -> Calibration:
        """The calibration with the interval that covers 90 % of runs it has not seen."""
        ends = self._ends(place, part)
        own = replace(
            calibration.efficiencies,
            step_time_90=(min(math.exp(ends.fast), 0.99), max(math.exp(ends.slow), 1.01)),
            step_time_varies=ends.varies,
        )
        return replace(calibration, efficiencies=own)

    def _ends(self, place: Leaf, part: Part | None) -> Ends:
        """The ends of a node's interval. A source that is left out counts as never
        seen, also by a stack of the same name; and so does what falls back on all of a device.
        """
        others = self._residuals_of(Leaf(place.device, ANY), part).values()
        source = of_unseen_source([own for (own,) in others])
        if isinstance(part, str) or place.stack == ANY:
            return source.ends
        return of_known_stack(list(self._residuals_of(place, part).values()), source)

    def _residuals_of(self, place: Leaf, part: Part | None) -> dict[str, list[NDArray[np.float64]]]:
        """Residuals of a node without a part, by source: of a device together, of a stack by model
        and over their scales.
        """
        groups: dict[tuple[str, str | None], list[float]] = defaultdict(list)
        if place in self.nodes:
            node, everything = self.nodes[place], place.stack == ANY
            found = node.residuals if everything else node.residuals / node.scales
            for each, residual in zip(node.replays, found.tolist(), strict=True):
                if part not in parts(each):
                    model = None if everything else each.run.model
                    groups[each.run.file, model].append(residual)
        by_source: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
        for (source, _), own in groups.items():
            by_source[source].append(np.array(own))
        return by_source


def _depth(place: Leaf) -> int:
    if place.stack == ANY:
        return 0
    return 1 if place.stack.endswith(f" {ANY}") else 2


def _chosen(replays: list[Replay], *, alike: bool) -> list[Replay]:
    """At most so many runs, from each model by the root of its number, so that one that was run
    often counts more but does not silence the others; of a whole device from each stack alike.
    """
    most = MOST_OF_A_DEVICE if alike else MOST_RUNS
    if len(replays) <= most:
        return replays
    groups: dict[object, list[Replay]] = defaultdict(list)
    for each in replays:
        groups[each.run.release if alike else each.run.model].append(each)
    roots = sum(len(own) ** 0.5 for own in groups.values())
    shares = {key: most / roots * len(own) ** 0.5 for key, own in groups.items()}
    return [each for key, own in groups.items() for each in _every(own, round(shares[key]) or 1)]


def _every(replays: list[Replay], most: int) -> list[Replay]:
    return replays[:: -(-len(replays) // most)]
