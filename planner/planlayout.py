"""The layout in a plan file: strategies, mesh, pipeline and chunks held against one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costmodel.layout import (
    Axis,
    Chunk,
    LayerSpan,
    Layout,
    Mesh,
    Recompute,
    RecomputeKind,
    Strategy,
    mixing_problems,
)
from costmodel.schedules import SCHEDULES, Shape
from planner.choices import Degrees
from planner.plan import layer_ranges
from planner.plandocument import compact_ranks
from planner.rules import SPLIT_RULE, broken_rules, num_microbatches
from planner.space import SearchSpace
from profiles.fileschema import problem_at
from profiles.nearest import nearest

if TYPE_CHECKING:
    from planner.inputs import Inputs
    from planner.planfile import ChunkPart, PlanFile, StrategyPart
    from profiles.errors import Problem
    from profiles.model import ModelSpec
    from profiles.yamlfile import Document, Mark, Place

__all__ = ["read_layout"]

DEGREES = ("tp", "cp", "ep", "expert_tp", "dp")
ALIKE = ("cp", "cp_comm", "ep", "expert_tp")  # in all strategies of a job


def read_layout(
    document: Document,
    file: PlanFile,
    inputs: Inputs | None,
    problems: list[tuple[Mark, Problem]],
) -> Layout | None:
    """The layout of a file; adds what is wrong to ``problems``. What needs the inputs is only
    looked at where there are any.
    """
    reader = _Reader(document, file, problems)
    reader.check_strategies()
    reader.check_pipeline()
    reader.check_places()
    if inputs is None:
        return None
    reader.check_inputs(inputs)
    chunks = reader.chunks(inputs.model)
    if problems:
        return None
    return Layout(
        mesh=reader.mesh,
        schedule=file.pipeline.schedule,
        num_chunks=file.pipeline.num_chunks,
        micro_batch=file.training.micro_batch,
        num_microbatches=file.pipeline.num_microbatches,
        chunks=chunks,
    )


class _Reader:
    def __init__(
        self, document: Document, file: PlanFile, problems: list[tuple[Mark, Problem]]
    ) -> None:
        self.document, self.file, self.problems = document, file, problems
        first = next(iter(file.strategies.values()))
        self.mesh = Mesh(
            **{name: getattr(first, name) for name in DEGREES},
            pp=file.pipeline.num_stages,
            order=tuple(Axis(name) for name in file.rank_order),
        )

    def tell(self, place: Place, message: str, expected: str = "", hint: str = "") -> None:
        self.problems.append(
            problem_at(self.document, place, message, expected=expected, hint=hint)
        )

    def check_strategies(self) -> None:
        """All strategies divide the ranks of a stage, and each is used."""
        file = self.file
        leader = next(iter(file.strategies))
        used = {span.strategy for chunk in file.chunks for span in chunk.layers}
        others = [_strategy(each) for each in file.strategies.values()]
        for name, strategy in file.strategies.items():
            place: Place = ("strategies", name)
            for degree in ALIKE:
                got, wanted = getattr(strategy, degree), getattr(file.strategies[leader], degree)
                if got != wanted:
                    expected = f"{wanted}, as strategy {leader} has it"
                    self.tell((*place, degree), f"{degree} is {got}", expected)
            micro_batch = file.training.micro_batch
            ranks = self.mesh.tp * self.mesh.dp
            for problem in mixing_problems(_strategy(strategy), self.mesh, micro_batch, others):
                product = f"tp x dp = {ranks}, as strategy {leader} has it"
                expected = product if strategy.tp * strategy.dp != ranks else ""
                self.tell((*place, "tp"), problem, expected)
            if name not in used:
                self.tell(place, f"no layer has the strategy {name}", "a strategy in use")
            if strategy.recompute.kind != "none" and self.splits:
                message = f"recompute with {file.pipeline.schedule}: {SPLIT_RULE}"
                self.tell((*place, "recompute"), message, "kind none")
            if strategy.recompute.modules and strategy.recompute.kind != "selective":
                where: Place = (*place, "recompute", "modules")
                message = f"modules with kind {strategy.recompute.kind}"
                self.tell(where, message, "modules only with kind selective")
            if strategy.recompute.kind == "selective" and not strategy.recompute.modules:
                where = (*place, "recompute")
                self.tell(where, "kind selective without modules", "modules: [core_attn, ...]")
        used_gpus, ranks = file.cluster.used_gpus, self.mesh.num_ranks
        if used_gpus != ranks:
            m = self.mesh
            product = f"tp {m.tp} x cp {m.cp} x dp {m.dp} x {m.pp} stages = {ranks}"
            self.tell(("cluster", "used_gpus"), f"used_gpus is {used_gpus}", product)

    @property
    def splits(self) -> bool:
        """Whether the schedule, if there is one, puts weight gradients off."""
        schedule = SCHEDULES.get(self.file.pipeline.schedule)
        return schedule is not None and schedule.splits

    def check_pipeline(self) -> None:
        """The rank order names each axis once, the schedule exists, micro-batches add up."""
        file = self.file
        if len(set(file.rank_order)) < len(file.rank_order):
            self.tell(("rank_order",), "an axis stands twice", "tp, cp, ep, dp and pp once each")
        name = file.pipeline.schedule
        if name not in SCHEDULES:
            expected, hint = f"one of {', '.join(SCHEDULES)}", nearest(name, SCHEDULES)
            self.tell(("pipeline", "schedule"), f"there is no schedule {name!r}", expected, hint)
        training = file.training
        wanted = num_microbatches(training, dp=self.mesh.dp, micro_batch=training.micro_batch)
        got = file.pipeline.num_microbatches
        if got != wanted:
            expected = (
                f"{wanted}: global_batch {training.global_batch} / (dp {self.mesh.dp} x "
                f"micro_batch {training.micro_batch})"
            )
            place = ("pipeline", "num_microbatches")
            self.tell(place, f"num_microbatches is {got}", expected)

    def check_places(self) -> None:
        """Chunks stand in model order and on the ranks of their stage."""
        pipeline = self.file.pipeline
        stages, chunks = pipeline.num_stages, pipeline.num_chunks
        if len(self.file.chunks) != stages * chunks:
            message = f"{len(self.file.chunks)} chunks"
            self.tell(("chunks",), message, f"{stages} stages x {chunks} = {stages * chunks}")
            return
        if pipeline.schedule not in SCHEDULES:
            return
        shape = Shape(stages, chunks, pipeline.num_microbatches)
        path, *_ = SCHEDULES[pipeline.schedule].paths(shape)
        sound = len(set(self.file.rank_order)) == len(self.file.rank_order)
        for position, part in enumerate(self.file.chunks):
            place: Place = ("chunks", position)
            stage, chunk = path[position]
            if (part.stage, part.chunk) != (stage, chunk):
                message = f"stage {part.stage}, chunk {part.chunk}"
                self.tell(place, message, f"stage {stage}, chunk {chunk} here, in model order")
            elif sound and part.ranks.replace(" ", "") != (
                ranks := compact_ranks(self.mesh, stage)
            ):
                message = f"ranks of stage {stage} are {part.ranks}"
                self.tell((*place, "ranks"), message, f"{ranks}, by rank_order and degrees")

    def check_inputs(self, inputs: Inputs) -> None:
        """The counts that the file repeats, and the rules of the model and the cluster."""
        file = self.file
        for place, got, wanted in (
            (("model", "layers"), file.model.layers, inputs.model.num_blocks),
            (("cluster", "num_gpus"), file.cluster.num_gpus, inputs.cluster.num_gpus),
        ):
            if got != wanted:
                self.tell(place, f"{place[1]} is {got}", f"{wanted}")
        if file.pipeline.schedule not in SCHEDULES:
            return
        mesh, leader = self.mesh, next(iter(file.strategies))
        sequences = file.training.micro_batch * mesh.dp
        for name, strategy in file.strategies.items():
            degrees = Degrees(
                tp=strategy.tp,
                cp=mesh.cp,
                ep=mesh.ep,
                expert_tp=mesh.expert_tp,
                pp=mesh.pp,
                dp=strategy.dp,
                micro_batch=max(1, sequences // strategy.dp),
                chunks=file.pipeline.num_chunks,
                schedule=file.pipeline.schedule,
                sequence_parallel=strategy.sequence_parallel,
                cp_comm=strategy.cp_comm,
            )
            space = SearchSpace(inputs.model, inputs.cluster, inputs.training)
            for broken in broken_rules(space, degrees, shard_group=strategy.shard_group):
                own: Place = ("strategies", name, broken.choice)
                if name == leader or broken.choice in OWN:
                    self.tell(PLACES.get(broken.choice, own), broken.message, broken.valid)

    def chunks(self, model: ModelSpec) -> tuple[Chunk, ...]:
        """The chunks with their layers, each layer of the model once and in order."""
        following: int | None = 0
        placed = []
        for position, part in enumerate(self.file.chunks):
            spans, following = self._spans(model, part, position, following)
            placed.append(Chunk(part.stage, part.chunk, spans))
        if following is not None and following < model.num_layers:
            missing = ",".join(layer_ranges(model, following, model.num_layers))
            self.tell(("chunks",), f"no chunk has the layers {missing}", "each layer once")
        return tuple(placed)

    def _spans(
        self, model: ModelSpec, part: ChunkPart, position: int, following: int | None
    ) -> tuple[tuple[LayerSpan, ...], int | None]:
        """The spans of a chunk, equal neighbours joined, and the layer that comes next (None
        after one that could not be read).
        """
        spans: list[LayerSpan] = []
        for number, own in enumerate(part.layers):
            place: Place = ("chunks", position, "layers", number)
            bounds = _positions(model, own.layers)
            if bounds is None:
                last = model.layer_names[-1]
                expected = f"embedding, head or numbers up to {model.num_blocks - 1}"
                hint = nearest(own.layers, ("embedding", last))
                message = f"layers is {own.layers!r}"
                self.tell((*place, "layers"), message, expected, hint)
                following = None
                continue
            first, stop = bounds
            if following is not None and first != following:
                wanted = model.layer_names[following] if following < model.num_layers else "none"
                message = f"layers {own.layers}"
                self.tell((*place, "layers"), message, f"{wanted} to come next, each layer once")
            following = stop
            strategy = self.file.strategies.get(own.strategy)
            if strategy is None:
                known = self.file.strategies
                hint = nearest(own.strategy, known)
                message = f"there is no strategy {own.strategy!r}"
                self.tell((*place, "strategy"), message, f"one of {', '.join(known)}", hint)
                continue
            value = _strategy(strategy)
            if spans and spans[-1].strategy == value and spans[-1].stop == first:
                spans[-1] = LayerSpan(spans[-1].first, stop, value)
            else:
                spans.append(LayerSpan(first, stop, value))
        return tuple(spans), following


OWN = ("tp", "shard_group", "sequence_parallel")  # what each strategy answers for
PLACES: dict[str, Place] = {
    "micro_batch": ("training", "micro_batch"),
    "pp": ("pipeline", "num_stages"),
    "chunks": ("pipeline", "num_chunks"),
    "schedule": ("pipeline", "schedule"),
}


def _positions(model: ModelSpec, text: str) -> tuple[int, int] | None:
    """First position and the one after the last of ``embedding``, ``7`` or ``0-9``."""
    first, dash, last = (part.strip() for part in text.partition("-"))
    names: dict[str, Any] = {name: n for n, name in enumerate(model.layer_names)}
    if first not in names or (dash and last not in names):
        return None
    start, end = names[first], names[last if dash else first]
    if start > end or (dash and not (first.isdigit() and last.isdigit())):
        return None
    return start, end + 1


def _strategy(part: StrategyPart) -> Strategy:
    recompute = Recompute(RecomputeKind(part.recompute.kind), tuple(sorted(part.recompute.modules)))
    return Strategy(**{**part.model_dump(), "recompute": recompute})
