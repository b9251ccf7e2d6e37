"""What is measured: every distinct layer for the shards, micro-batches and lengths that are asked
for, the most valuable points first. Without torch.

A point is a layer on one rank: its shard under ``tp``, alone, without the group. Points at the ends
of each axis come first, since between them times are interpolated and beyond them only scaled;
among these blocks come before head and embedding, and cheap points before dear ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from costmodel.layout import Strategy
from planner.native import model_problems, training_problems
from profiles.errors import InputError, Problem
from profiles.fingerprint import fingerprint
from profiles.layers import Block, Embedding, Head
from profiles.measured import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from profiles.layers import Layer
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = [
    "Point",
    "Request",
    "WrappingPoint",
    "layer_labels",
    "layer_points",
    "model_facts",
    "wrapping_points",
]

SHORT: Final = 16  # digits of a fingerprint in a profile
STAGES: Final = (None, 0, 1, 2, 3)  # of ZeRO; None: no other rank has the same weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A model's layers under a training run, and the values of each axis."""

    model: ModelSpec
    training: TrainingSpec
    tp: tuple[int, ...]
    batches: tuple[int, ...]
    seq_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One layer on one rank."""

    layer: str
    tp: int
    sequence_parallel: bool
    batch: int
    seq_len: int

    @property
    def strategy(self) -> Strategy:
        """Its shard, nothing recomputed."""
        return Strategy(tp=self.tp, sequence_parallel=self.sequence_parallel)

    def __str__(self) -> str:
        shard = f", tp {self.tp}" if self.tp > 1 else ""
        shard += " with sequence parallelism" if self.sequence_parallel else ""
        return f"{self.layer}{shard}, micro-batch {self.batch} x {self.seq_len} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappingPoint:
    """One layer on one rank of two with the same weights under a stage of ZeRO, or alone."""

    layer: str
    tp: int
    zero: int | None

    def __str__(self) -> str:
        shard = f", tp {self.tp}" if self.tp > 1 else ""
        stage = "alone" if self.zero is None else f"zero {self.zero}"
        return f"wrapping of {self.layer}{shard}, {stage}"


def layer_labels(model: ModelSpec) -> dict[str, Layer]:
    """The distinct layers of a model by the names that profiles give them."""
    blocks = list(dict.fromkeys(run.layer for run in model.runs if isinstance(run.layer, Block)))
    found: dict[str, Layer] = {f"block-{n}": block for n, block in enumerate(blocks)}
    for run in model.runs:
        if isinstance(run.layer, Embedding | Head):
            found["head" if isinstance(run.layer, Head) else "embedding"] = run.layer
    return found


def model_facts(model: ModelSpec) -> ModelFacts:
    """By what the layers of a model are known again."""
    labels = layer_labels(model).items()
    return ModelFacts(
        model=model.name, layers={name: fingerprint(layer)[:SHORT] for name, layer in labels}
    )


def layer_points(request: Request) -> tuple[list[Point], list[str]]:
    """The points in the order in which they are measured, and why others are left out. Raises
    ``InputError`` where the executor has no such layers, or no point is left.
    """
    problems = dict.fromkeys(
        (
            *model_problems(request.model, request.training),
            *training_problems(request.training),
        )
    )
    if problems:
        where = request.model.name
        found = (f"cannot be measured: {each}" for each in problems)
        raise InputError([Problem(where=where, message=each) for each in found])
    points: list[Point] = []
    notes: list[str] = []
    for tp in request.tp:
        reason = _undivided(request.model, tp)
        if reason:
            notes.append(f"tp {tp} is left out: {reason}")
            continue
        points += _of_degree(request, tp)
    if not points:
        raise InputError(Problem(where="--tp", message="; ".join(notes)))
    return sorted(points, key=lambda point: _order(point, request)), notes


def wrapping_points(points: list[Point]) -> list[WrappingPoint]:
    """Of each layer and shard what wrappers add, whatever the micro-batch."""
    shards = dict.fromkeys((point.layer, point.tp) for point in points)
    return [WrappingPoint(layer=layer, tp=tp, zero=zero) for layer, tp in shards for zero in STAGES]


def _of_degree(request: Request, tp: int) -> Iterator[Point]:
    for label in layer_labels(request.model):
        for seq_len in request.seq_lens:
            for batch in request.batches:
                point = Point(
                    layer=label, tp=tp, sequence_parallel=False, batch=batch, seq_len=seq_len
                )
                yield point
                if tp > 1 and seq_len % tp == 0:
                    yield replace(point, sequence_parallel=True)


def _order(point: Point, request: Request) -> tuple[int, int, int, int, bool, str]:
    inner = sum(
        value not in (min(values), max(values))
        for value, values in (
            (point.batch, request.batches),
            (point.seq_len, request.seq_lens),
            (point.tp, request.tp),
        )
    )
    kind = 0 if point.layer.startswith("block") else 1 if point.layer == "head" else 2
    tokens = point.batch * point.seq_len
    return inner, kind, tokens, point.tp, not point.sequence_parallel, point.layer


def _undivided(model: ModelSpec, tp: int) -> str:
    """Why the layers of a model cannot be split so; empty where they can."""
    sizes: dict[str, int] = {}
    for layer in layer_labels(model).values():
        if isinstance(layer, Block):
            own = layer.attention
            sizes |= {"heads": own.heads, "key/value heads": own.kv_heads}
            sizes["inner features"] = getattr(layer.feed_forward, "ffn_hidden", tp)
    return ", ".join(f"{size} {what} do not divide" for what, size in sizes.items() if size % tp)
