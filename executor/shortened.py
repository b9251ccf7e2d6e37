"""Shorter jobs that stand for a long one: few layers of each kind, few micro-batches.

What a rank holds and moves grows by the same amount with each further layer of a kind from the
third on, which is the first one between two of its own, and with each further micro-batch once the
pipeline has been full. So one short job and one for every such step say all of the long one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Final

from costmodel.layout import LayerSpan
from costmodel.schedules import SCHEDULES
from profiles.model import LayerRun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from costmodel.layout import Layout, Strategy
    from profiles.layers import Layer
    from profiles.model import ModelSpec

__all__ = ["Short", "short_jobs", "whole"]

FEW: Final = 3  # layers: first, last, and one in between, whose neighbours are like it
Run = tuple[int, int, int]  # chunk, span, run of equal layers


@dataclass(frozen=True, slots=True)
class Short:
    """A job of few layers, and how often what it has counts for the long one."""

    model: ModelSpec
    layout: Layout
    weight: int


def short_jobs(model: ModelSpec, layout: Layout, stage: int) -> list[Short]:
    """The shortest job, then one with a layer more of each kind that ``stage`` has many of; all of
    them again with more micro-batches.

    A value that is linear in the layers of each kind and in micro-batches is the sum of what the
    short jobs have, each times its weight.
    """
    few, more = _microbatches(layout)
    further = 0 if more == few else (layout.num_microbatches - few) // (more - few)
    kinds = _kinds(model, layout, stage)
    weights = {frozenset[Run](): 1 - sum(kinds.values()), **kinds}
    jobs = []
    for microbatches, share in ((few, 1 - further), (more, further)):
        short = replace(layout, num_microbatches=microbatches)
        if share:
            jobs += [
                Short(*_with(model, short, stage, longer), weight * share)
                for longer, weight in weights.items()
            ]
    return jobs


def whole(values: Sequence[Mapping[str, int]], jobs: Sequence[Short]) -> dict[str, int]:
    """What the long job has, from what the short ones have."""
    names = dict.fromkeys(name for each in values for name in each)
    return {
        name: sum(job.weight * each.get(name, 0) for job, each in zip(jobs, values, strict=True))
        for name in names
    }


def _microbatches(layout: Layout) -> tuple[int, int]:
    """Two numbers of micro-batches on the line that the layout's is on, or twice its own: with one
    that is neither first nor last. A pipeline is full, with gradients to add to, after one more
    than it has chunks.
    """
    own, schedule = layout.num_microbatches, SCHEDULES[layout.schedule]
    least = 3 if layout.num_stages == 1 else layout.num_stages * layout.num_chunks + 1
    legal = [
        number
        for number in range(least, own)
        if schedule.problem(replace(layout.shape, microbatches=number)) is None
    ]
    for few, more in combinations(legal[:4], 2):
        if (own - few) % (more - few) == 0:
            return few, more
    return own, own


def _kinds(model: ModelSpec, layout: Layout, stage: int) -> dict[frozenset[Run], int]:
    """Runs that grow together, equal layers of all chunks, and by how many layers. One after the
    other, each would grow in the moment that is worst for it alone.
    """
    found: dict[tuple[Layer, Strategy, int], set[Run]] = {}
    for number, chunk in enumerate(layout.chunks):
        if chunk.stage != stage:
            continue
        for at, span in enumerate(chunk.spans):
            for part, run in enumerate(model.runs_between(span.first, span.stop)):
                if run.count > FEW:
                    kind = (run.layer, span.strategy, run.count - FEW)
                    found.setdefault(kind, set()).add((number, at, part))
    return {frozenset(runs): further for (_, _, further), runs in found.items()}


def _with(
    model: ModelSpec, layout: Layout, stage: int, longer: frozenset[Run]
) -> tuple[ModelSpec, Layout]:
    """Few layers of each kind, one more of ``longer``."""
    runs: list[LayerRun] = []
    chunks = []
    for number, chunk in enumerate(layout.chunks):
        spans = []
        for at, span in enumerate(chunk.spans):
            first = sum(run.count for run in runs)
            for part, run in enumerate(model.runs_between(span.first, span.stop)):
                few = min(run.count, FEW if chunk.stage == stage else 1)
                runs.append(LayerRun(run.layer, few + ((number, at, part) in longer)))
            spans.append(LayerSpan(first, sum(run.count for run in runs), span.strategy))
        chunks.append(replace(chunk, spans=tuple(spans)))
    return replace(model, runs=tuple(runs)), replace(layout, chunks=tuple(chunks))
