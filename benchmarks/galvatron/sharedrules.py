"""Rules that both engines share. Source: Hetu-Galvatron's cost model, main of 2026-06 and v2.4.0.

Times in ms, memory in MiB. Known oddities are part of the rules: backward is twice forward, states
are four times the fp32 parameters, and a pipeline's last stage alone sets its steady rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from profiles.measured import Position
from profiles.units import MIB

if TYPE_CHECKING:
    from benchmarks.galvatron.cases import Case
    from benchmarks.galvatron.strategy import Strategy, Vocab

Stages: TypeAlias = NDArray[np.float64]

BACKWARD: Final = 2.0  # of a forward pass; recomputing adds one more
CONTEXT_MIB: Final = 1024.0
STATES: Final = 4.0  # fp32 parameter, gradient and two Adam states, in parameters
SHARD_SLACK: Final = 0.003


class Rules(Protocol):
    """What an engine's rules say of layers, embedding and head. Times in ms, memory in MiB."""

    @property
    def chunks(self) -> int:
        """Micro-batches."""

    def layer_ms(self, kind: int, strategy: Strategy) -> tuple[float, float]:
        """One micro-batch of a layer with and without its gradient reduction."""

    def layer_mib(self, kind: int, strategy: Strategy, stage: int) -> float:
        """States and activations of a layer on a stage."""

    def ends_ms(self, vocab: Vocab) -> list[float]:
        """Embedding and head by stage, for one micro-batch without gradient reduction."""

    def ends_mib(self, vocab: Vocab) -> list[float]:
        """Embedding and head with the context, by stage."""

    def buffer_mib(self, pp: int, /, most: int, *, ulysses_only: bool) -> int:
        """What every stage sets aside for sequence parallelism."""


def element_bytes(case: Case) -> int:
    """Bytes of an activation."""
    return 2 if case.half else 4


def overlapped_ms(message_mb: float, ms_per_mb: float, backward: float, slowdown: float) -> float:
    """Backward pass and gradient reduction together: both are slowed while they overlap, and
    what is left of the longer one runs alone.
    """
    communication, computation = message_mb * ms_per_mb, backward
    if communication > computation:
        return computation * slowdown + communication - computation
    return communication * slowdown + computation - communication


def states_part(case: Case, chunks: int, ranks: int, *, zero3: bool) -> float:
    """What of a layer's states each of the ranks holds under ZeRO-3, or under ZeRO-2.

    Of eight parts of the states under mixed precision (of four in fp32) ZeRO-2 shards seven,
    ZeRO-3 all; with several micro-batches an asynchronous reduction keeps one more whole, and a
    synchronous one adds an fp32 gradient (a quarter).
    """
    shard = 1 / ranks + SHARD_SLACK
    parts = 8 if case.half else 4
    whole = 0 if zero3 else 1
    if chunks == 1:
        return (parts - whole) / parts * shard + whole / parts
    if case.options["async_grad_reduce"]:
        whole += 1
        return (parts - whole) / parts * shard + whole / parts
    part = (parts - whole) / parts * shard + whole / parts
    return part * 5 / 4 if case.half or zero3 else part


def states_factor(case: Case, chunks: int, ranks: int, *, zero3: bool) -> float:
    """``states_part``, or 1 where plain data parallelism is the default."""
    if not zero3 and case.options["default_dp_type"] != "zero2":
        return 1.0
    return states_part(case, chunks, ranks, zero3=zero3)


def ends_pass_ms(
    forward: float, gather: float, reduce: float, slowdown: float, collectives: float
) -> float:
    """Embedding and head for one micro-batch: each pass hides behind its own communication,
    computation alone being slowed.
    """
    total = collectives
    for computation, communication in ((forward, gather), (forward * BACKWARD, reduce)):
        left = computation * slowdown - communication
        total += communication + max(0.0, left) / slowdown
    return total


def positions(pp: int) -> list[Position]:
    """Where embedding and head lie."""
    return [Position.ONLY] if pp == 1 else [Position.FIRST, Position.LAST]


def between(ends: list[float], pp: int) -> list[float]:
    """Figures of the ends by stage: nothing on the stages between."""
    return ends if pp == 1 else [ends[0], *[0.0] * (pp - 2), ends[1]]


def buffer_mib(case: Case, samples: float) -> float:
    """Activations of so many samples in two bytes, whatever the precision."""
    longest = max(kind.seq_len for kind in case.kinds)
    return samples * case.kinds[0].hidden_size * longest * 2 / MIB


def iteration(steady: Stages, excess: Stages, chunks: int) -> Stages:
    """Time of an iteration of ``chunks`` micro-batches, in the unit of its arguments, which have
    the stages on their last axis.

    ``steady``: one micro-batch on stage i without gradient reduction, C_i; ``excess``: what the
    reductions add to its layers, less embedding and head, so that stage i ends D_i after the
    stages up to it have had one micro-batch, D_i = excess_i - sum_{j<i} C_j:

        max(sum C + (c - 1) C_last,
            max(min(p - 1, c - 1) C_0, sum_{i>0} C_i) + max(0, c + 1 - p) C_0) + max(0, max_i D_i)
    """
    stages, total = steady.shape[-1], steady.sum(-1)
    first, last = steady[..., 0], steady[..., -1]
    filled = np.maximum(min(stages - 1, chunks - 1) * first, total - first)
    filled = filled + max(0, chunks + 1 - stages) * first
    late = (excess + steady - steady.cumsum(-1)).max(-1)
    steadily: Stages = np.maximum(total + (chunks - 1) * last, filled) + np.maximum(0, late)
    return steadily
