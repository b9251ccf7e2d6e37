"""From a solver's answer to a layout: which layers each chunk holds, and what they recompute."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from costmodel.layout import NO_RECOMPUTE, Chunk, LayerSpan, Layout, RecomputeKind
from planner.launchers import Mixing
from profiles.layers import Block

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from costmodel.layout import Recompute
    from planner.build import CandidateProblem
    from planner.problem import Solution

__all__ = ["build_layout", "growing_chunks"]

# Recomputed layers stand first in their chunk, as Megatron's "block" method has it.
ORDER_OF_KINDS = {RecomputeKind.FULL: 0, RecomputeKind.SELECTIVE: 1, RecomputeKind.NONE: 2}


def build_layout(problem: CandidateProblem, solution: Solution, mixing: Mixing) -> Layout:
    """The layout of a solver's answer."""
    candidate = problem.candidate
    degrees = candidate.degrees
    chunks = _contiguous(problem, solution) if degrees.chunks == 1 else _spread(problem, solution)
    if mixing is Mixing.FIRST_OF_CHUNK:
        chunks = _alike(problem, chunks)
    strategies = dict(zip(candidate.recomputes, problem.strategies, strict=True))
    strategies.setdefault(NO_RECOMPUTE, candidate.strategy())
    placed, first = [], 0
    for place, options in zip(problem.places, chunks, strict=True):
        spans = []
        for option, group in groupby(options):
            stop = first + len(list(group))
            spans.append(LayerSpan(first, stop, strategies[option]))
            first = stop
        placed.append(Chunk(*place, tuple(spans)))
    return Layout(
        mesh=candidate.mesh,
        schedule=degrees.schedule,
        num_chunks=degrees.chunks,
        micro_batch=degrees.micro_batch,
        num_microbatches=problem.microbatches,
        chunks=tuple(placed),
    )


def _contiguous(problem: CandidateProblem, solution: Solution) -> list[list[Recompute]]:
    """One chunk a stage: recomputation of each layer, sorted among equal neighbours."""
    stops = (*solution.starts[1:], len(problem.chain))
    options = [
        problem.option(c, j) for c, j in zip(problem.chain, solution.strategies, strict=True)
    ]
    chunks = []
    for first, stop in zip(solution.starts, stops, strict=True):
        chunk: list[Recompute] = []
        for _, run in groupby(range(first, stop), key=lambda i: problem.chain[i]):
            chunk += sorted((options[i] for i in run), key=_kind)
        chunks.append(chunk)
    return chunks


def _spread(problem: CandidateProblem, solution: Solution) -> list[list[Recompute]]:
    """Several chunks a stage: its blocks go to the chunk that has least to do, its recomputed
    blocks evenly over the chunks. Layers before the first and behind the last block stay at the
    ends of the chain.
    """
    chain = problem.context.chain
    is_block = [isinstance(problem.classes[c], Block) for c in problem.chain]
    in_order = [isinstance(problem.classes[c], Block) for c in chain]
    head, tail = in_order.index(True), in_order[::-1].index(True)
    places = problem.places
    stops = (*solution.starts[1:], len(problem.chain))
    chunks: list[list[Recompute]] = [[] for _ in places]
    for stage, (first, stop) in enumerate(zip(solution.starts, stops, strict=True)):
        virtuals = [v for v, place in enumerate(places) if place[0] == stage]
        blocks = [i for i in range(first, stop) if is_block[i]]
        sizes = _chunk_sizes(problem, stage, [problem.chain[i] for i in blocks])
        options = sorted(
            (problem.candidate.recomputes[solution.strategies[i]] for i in blocks), key=_kind
        )
        for virtual, own in zip(virtuals, _dealt(options, sizes), strict=True):
            chunks[virtual] = own
    chunks[0] = [NO_RECOMPUTE] * head + chunks[0]
    chunks[-1] = chunks[-1] + [NO_RECOMPUTE] * tail
    return chunks


def _chunk_sizes(problem: CandidateProblem, stage: int, blocks: Sequence[int]) -> list[int]:
    """How many blocks each chunk of a stage gets, from the classes of its blocks."""
    times = [problem.time_ns[c][0] for c in blocks]
    return list(growing_chunks(problem.ends_ns(stage), times))[-1]


def growing_chunks(ends_ns: Sequence[int], times_ns: Sequence[int]) -> Iterator[list[int]]:
    """How many blocks each chunk of a stage has before the first and after each of some blocks:
    each goes to the chunk with least to do, later ones first; the model's ends have layers of
    their own, of ``ends_ns`` in each chunk.
    """
    load, sizes = list(ends_ns), [0] * len(ends_ns)
    yield sizes.copy()
    for time in times_ns:
        target = min(range(len(load)), key=lambda each: (load[each], sizes[each], -each))
        load[target] += time
        sizes[target] += 1
        yield sizes.copy()


def _dealt(options: list[Recompute], sizes: list[int]) -> list[list[Recompute]]:
    """Deal sorted options to chunks of these sizes so that each kind is spread evenly."""
    places = [((k + 0.5) / size, chunk) for chunk, size in enumerate(sizes) for k in range(size)]
    hands: list[list[Recompute]] = [[] for _ in sizes]
    for option, (_, chunk) in zip(options, sorted(places), strict=True):
        hands[chunk].append(option)
    return hands


def _alike(problem: CandidateProblem, chunks: list[list[Recompute]]) -> list[list[Recompute]]:
    """The same number of fully recomputed blocks in every chunk, as one launcher flag says it."""
    full = [option for option in problem.candidate.recomputes if option.kind is RecomputeKind.FULL]
    most = max(sum(option in full for option in chunk) for chunk in chunks)
    if not full or not most:
        return chunks
    position, alike = 0, []
    for chunk in chunks:
        own: list[Recompute] = []
        for _ in chunk:
            block = isinstance(problem.classes[problem.context.chain[position]], Block)
            taken = sum(option in full for option in own)
            own.append(full[0] if block and taken < most else NO_RECOMPUTE)
            position += 1
        alike.append(own)
    return alike


def _kind(option: Recompute) -> tuple[int, tuple[str, ...]]:
    return ORDER_OF_KINDS[option.kind], option.modules
