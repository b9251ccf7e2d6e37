"""Job: what an exporter is given, and what importers find.

``Job`` binds the choices of a layout to model, cluster and training run. ``Heard`` is what a
launcher was told, in the same terms; ``arranged`` makes the layout of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from costmodel.layout import NO_RECOMPUTE, ContextComm, Recompute, RecomputeKind
from executor.launchers.setup import ORDER, Setup, layout_of, of_blocks
from planner.choices import ORDERS, Degrees
from planner.rules import broken_rules, num_microbatches
from planner.space import SearchSpace
from profiles.errors import InputError, Problem
from profiles.layers import Block, Embedding, Head

if TYPE_CHECKING:
    from collections.abc import Iterable

    from costmodel.layout import Layout
    from executor.launchers.told import Told
    from planner.inputs import Inputs
    from profiles.model import ModelSpec

__all__ = ["FULL", "Heard", "Job", "arranged", "first_of_chunks", "most_of_a_chunk"]

FULL: Final = Recompute(RecomputeKind.FULL)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan as a launcher is told it. ``name`` is that of the plan file."""

    inputs: Inputs
    setup: Setup
    name: str = "plan"

    @property
    def model(self) -> ModelSpec:
        """Its model."""
        return self.inputs.model

    @property
    def blocks(self) -> list[Recompute]:
        """What each block recomputes."""
        layers = self.model.layers
        return [
            option
            for layer, option in zip(layers, self.setup.recompute, strict=True)
            if isinstance(layer, Block)
        ]

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node that it uses."""
        return min(self.inputs.cluster.gpus_per_node, self.setup.num_ranks)

    @property
    def num_nodes(self) -> int:
        """Nodes that it uses."""
        return -(-self.setup.num_ranks // self.gpus_per_node)

    @property
    def is_even(self) -> bool:
        """Whether all chunks hold equally many blocks."""
        return len(set(self.setup.blocks)) == 1

    @property
    def full_per_chunk(self) -> int:
        """Blocks that the chunk which recomputes most does in full."""
        full = (option.kind is RecomputeKind.FULL for option in self.blocks)
        return most_of_a_chunk(self.setup.blocks, full)


@dataclass(kw_only=True)
class Heard:
    """What a launcher was told, in the terms of ``Setup``; None where it did not say.

    ``blocks`` of each chunk, None for an even cut. ``recompute`` and ``zero`` are one value for
    all blocks, or one for each; ``full_first`` is how many blocks of every chunk recompute.
    ``training`` are fields of the training run, ``model_facts`` describe the model.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    pp: int = 1
    dp: int | None = None
    chunks: int = 1
    schedule: str | None = None
    micro_batch: int | None = None
    zero: int | tuple[int, ...] = 0
    end_zero: int | None = None
    shard_group: int | None = None
    sequence_parallel: bool = False
    cp_comm: ContextComm = ContextComm.RING
    stages_between: bool = False
    blocks: tuple[int, ...] | None = None
    recompute: Recompute | tuple[Recompute, ...] = NO_RECOMPUTE
    full_first: int | None = None
    training: dict[str, Any] = field(default_factory=dict)
    model_facts: dict[str, Any] = field(default_factory=dict)


def arranged(heard: Heard, inputs: Inputs, told: Told) -> Layout:
    """The layout that a launcher was told. Raises ``InputError`` with every rule that it breaks."""
    model, training = inputs.model, inputs.training
    micro_batch = heard.micro_batch or training.micro_batch
    inner = heard.tp * heard.cp * heard.pp
    dp = heard.dp or max(1, told.num_gpus // inner)
    problems = []
    if micro_batch is None:
        hint = "--micro-batch says it"
        where = told.where("micro_batch")
        problems.append(Problem(where=where, message="no micro-batch is stated", hint=hint))
    if told.num_gpus % inner:
        message = (
            f"{told.num_gpus} GPUs for tp {heard.tp} x cp {heard.cp} x pp {heard.pp} = {inner}"
        )
        where = told.where("tp")
        hint = "--num-gpus says how many it uses"
        expected = f"a multiple of {inner}"
        problems.append(Problem(where=where, message=message, expected=expected, hint=hint))
    if problems:
        raise InputError(problems)
    assert micro_batch is not None
    expert_tp = heard.expert_tp or (heard.tp if model.has_experts else 1)
    schedule = heard.schedule or ("1f1b" if heard.chunks == 1 else "interleaved-1f1b")
    degrees = Degrees(
        heard.tp, heard.cp, heard.ep, expert_tp, heard.pp, dp, micro_batch, heard.chunks,
        schedule, heard.sequence_parallel and heard.tp > 1, heard.cp_comm,
    )  # fmt: skip
    group = heard.shard_group or dp * heard.cp
    space = SearchSpace(model, inputs.cluster, training)
    for broken in broken_rules(space, degrees, shard_group=group):
        where = told.where(broken.choice)
        problems.append(Problem(where=where, message=broken.message, expected=broken.valid))
    blocks = _blocks(heard, model, told, problems)
    if problems:
        raise InputError(problems)
    setup = Setup(
        **degrees._asdict(),
        num_microbatches=num_microbatches(training, dp=dp, micro_batch=micro_batch),
        shard_group=group,
        order=ORDERS["tp-cp-ep-pp-dp"] if heard.stages_between else ORDER,
        blocks=blocks,
        zero=_zero(heard, model),
        recompute=_recompute(heard, model, blocks),
    )
    return layout_of(model, setup)


def _blocks(heard: Heard, model: ModelSpec, told: Told, problems: list[Problem]) -> tuple[int, ...]:
    count = heard.pp * heard.chunks
    if heard.blocks is None:
        share, rest = divmod(model.num_blocks, count)
        if rest:
            message = f"{model.num_blocks} layers on {heard.pp} stages x {heard.chunks} chunks"
            expected = "a number of chunks that divides the layers, or the layers of each"
            problems.append(Problem(where=told.where("pp"), message=message, expected=expected))
        return (share,) * count
    if len(heard.blocks) != count or sum(heard.blocks) != model.num_blocks:
        message = f"{sum(heard.blocks)} layers in {len(heard.blocks)} chunks"
        expected = f"{model.num_blocks} layers, as {model.name} has, in {count} chunks"
        where = told.where("stage_layout")
        problems.append(Problem(where=where, message=message, expected=expected))
    return heard.blocks


def _zero(heard: Heard, model: ModelSpec) -> tuple[int, ...]:
    if isinstance(heard.zero, int):
        return (heard.zero,) * model.num_layers
    following = iter(heard.zero)
    ends = heard.zero[0] if heard.end_zero is None else heard.end_zero
    return tuple(
        ends if isinstance(layer, Embedding | Head) else next(following, ends)
        for layer in model.layers
    )


def _recompute(heard: Heard, model: ModelSpec, blocks: tuple[int, ...]) -> tuple[Recompute, ...]:
    if heard.full_first is not None:
        return of_blocks(model, first_of_chunks(blocks, heard.full_first))
    if isinstance(heard.recompute, Recompute):
        return of_blocks(model, (heard.recompute,) * model.num_blocks)
    return of_blocks(model, heard.recompute)


def most_of_a_chunk(blocks: tuple[int, ...], marked: Iterable[bool]) -> int:
    """The most blocks of one chunk that are marked; ``marked`` has one entry a block."""
    rest = iter(marked)
    return max(sum(islice(rest, size)) for size in blocks)


def first_of_chunks(blocks: tuple[int, ...], count: int) -> tuple[Recompute, ...]:
    """The first ``count`` blocks of every chunk in full, the others kept."""
    return tuple(
        FULL if position < count else NO_RECOMPUTE for size in blocks for position in range(size)
    )
