"""Cases of the matrix: a layout of a small model, run on processes, and what each rank saw."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from ranks import run_ranks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from costmodel.layout import (
    NO_RECOMPUTE,
    Axis,
    Chunk,
    ContextComm,
    LayerSpan,
    Layout,
    Mesh,
    Recompute,
    RecomputeKind,
    Strategy,
)
from costmodel.placing import even_cut, placed_chunks
from costmodel.schedules import SCHEDULES, Shape
from executor.job import Recipe
from executor.planned import planned_traffic
from executor.precision import Numbers
from executor.traffic import TrafficLog
from executor.trainer import Trainer
from profiles.layers import (
    Attention,
    Block,
    Embedding,
    ExpertFeedForward,
    FeedForward,
    Head,
    Norm,
    QKNorm,
    Split,
)
from profiles.model import LayerRun, ModelSpec
from profiles.training import Optimizer, Precision, TrainingSpec

BATCH, SEQ, VOCAB, HIDDEN, STEPS = 8, 16, 70, 32, 5
TYPES = {torch.float64: 1e-9, torch.float32: 1e-5}  # and how far losses may differ, relatively
RECIPE = Recipe(lr=0.3, warmup=2, clip=0.5, weight_decay=0.01)
FULL = Recompute(RecomputeKind.FULL)
CORE = Recompute(RecomputeKind.SELECTIVE, ("core_attn",))
CHEAP = Recompute(RecomputeKind.SELECTIVE, ("core_attn", "layernorm", "mlp"))
NORMS = Recompute(RecomputeKind.SELECTIVE, ("layernorm",))


def model_of(
    *,
    tied: bool = False,
    kv_heads: int = 2,
    qk_norm: QKNorm = QKNorm.NONE,
    norm: Norm = Norm.RMS,
    gated: bool = True,
    positions: int = 0,
    biases: bool = False,
    **block: Any,
) -> ModelSpec:
    """Four blocks of width 32 with 4 heads."""
    attention = Attention(
        heads=4,
        kv_heads=kv_heads,
        head_dim=8,
        value_head_dim=8,
        qk_norm=qk_norm,
        rope=not positions,
        qkv_bias=biases,
        output_bias=biases,
        window=block.pop("window", None),
    )
    one = Block(
        hidden=HIDDEN,
        attention=attention,
        feed_forward=FeedForward(ffn_hidden=48, gated=gated, bias=biases),
        norm=norm,
        **block,
    )
    first = Embedding(vocab=VOCAB, hidden=HIDDEN, positions=positions)
    last = Head(vocab=VOCAB, hidden=HIDDEN, norm=norm, tied=tied)
    runs = (LayerRun(first, 1), LayerRun(one, 4), LayerRun(last, 1))
    return ModelSpec(name="small", family="generic", runs=runs)


def with_experts(spec: ModelSpec, *, num_dense: int = 0, **experts: Any) -> ModelSpec:
    """``spec`` with a mixture of experts in all blocks but the first ``num_dense``."""
    first, dense, last = spec.runs
    assert isinstance(dense.layer, Block)
    sparse = replace(dense.layer, feed_forward=ExpertFeedForward(**experts))
    blocks = [LayerRun(dense.layer, num_dense), LayerRun(sparse, 4 - num_dense)]
    return replace(spec, runs=(first, *[run for run in blocks if run.count], last))


LLAMA = model_of()
QWEN = model_of(qk_norm=QKNorm.PER_HEAD, tied=True)
OLMO = model_of(qk_norm=QKNorm.FULL)
GPT = model_of(norm=Norm.LAYER, gated=False, positions=SEQ, biases=True, tied=True)
GEMMA = model_of(num_norms=4, window=5)
NEOX = model_of(norm=Norm.LAYER, gated=False, biases=True, parallel=True)
PHI = model_of(kv_heads=4, norm=Norm.LAYER, positions=SEQ, biases=True)
MIXTRAL = with_experts(model_of(window=5), num_experts=8, top_k=2, expert_hidden=24)
QWEN_MOE = with_experts(
    model_of(qk_norm=QKNorm.PER_HEAD), num_dense=1, num_experts=4, top_k=3, expert_hidden=20,
    shared_hidden=40, shared_gate=True,
)  # fmt: skip
SWITCH = with_experts(GPT, num_experts=4, top_k=1, expert_hidden=48, gated=False)
MODELS = {
    "llama": LLAMA, "qwen": QWEN, "olmo": OLMO, "gpt": GPT, "gemma": GEMMA, "neox": NEOX,
    "phi": PHI, "mixtral": MIXTRAL, "qwen-moe": QWEN_MOE, "switch": SWITCH,
}  # fmt: skip


def split(
    tp: int,
    dp: int,
    zero: int = 0,
    *,
    sequence: bool = True,
    recompute: Recompute = NO_RECOMPUTE,
    shard_group: int | None = None,
) -> Strategy:
    """Of one layer."""
    return Strategy(
        tp=tp,
        dp=dp,
        zero=zero,
        shard_group=shard_group or dp,
        sequence_parallel=sequence and tp > 1,
        recompute=recompute,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of a model. ``cut``: blocks of each chunk. ``layers``: the strategies of embedding,
    four blocks and head, where they differ; the first has the degrees of the case.
    """

    name: str
    model: str = "llama"
    tp: int = 1
    dp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    zero: int = 0
    shard_group: int | None = None
    sequence: bool = False
    cp_comm: ContextComm = ContextComm.GATHER
    schedule: str = "1f1b"
    chunks: int = 1
    cut: tuple[int, ...] | None = None
    micro_batch: int = 1
    recompute: Recompute = NO_RECOMPUTE
    layers: tuple[Strategy, ...] = ()
    order: tuple[Axis, ...] = (Axis.TP, Axis.CP, Axis.EP, Axis.DP, Axis.PP)

    @property
    def spec(self) -> ModelSpec:
        return MODELS[self.model]

    @property
    def layout(self) -> Layout:
        degrees = {name: getattr(self, name) for name in ("tp", "dp", "cp", "ep", "expert_tp")}
        mesh = Mesh(pp=self.pp, order=self.order, **degrees)
        strategy = Strategy(
            **degrees,
            zero=self.zero,
            shard_group=self.shard_group or self.dp * self.cp,
            sequence_parallel=self.sequence,
            cp_comm=self.cp_comm,
        )
        count = BATCH // self.dp // self.micro_batch
        path, *_ = SCHEDULES[self.schedule].paths(Shape(self.pp, self.chunks, count))
        sizes = list(self.cut or even_cut(4, self.pp * self.chunks))
        chunks = placed_chunks(self.spec, sizes, path, strategy, (self.recompute, None))
        return Layout(
            mesh=mesh,
            schedule=self.schedule,
            num_chunks=self.chunks,
            micro_batch=self.micro_batch,
            num_microbatches=count,
            chunks=tuple(self._mixed(chunk) for chunk in chunks),
        )

    def _mixed(self, chunk: Chunk) -> Chunk:
        """Each layer under its own strategy."""
        if not self.layers:
            return chunk
        spans = [LayerSpan(at, at + 1, self.layers[at]) for at in range(chunk.first, chunk.stop)]
        return replace(chunk, spans=tuple(spans))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank saw in one type."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, tuple[tuple[int, ...], torch.Tensor]]
    held: int
    ran: list[dict[str, Any]]
    planned: list[dict[str, Any]]


def training_of(optimizer: Optimizer = Optimizer.SGD) -> TrainingSpec:
    return TrainingSpec(
        global_batch=BATCH, seq_len=SEQ, precision=Precision.FP32, optimizer=optimizer
    )


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)


def own_rows(trainer: Trainer, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, last = ([n for own in each for n in own] for each in trainer.sequences)
    rows = batch(step)
    return rows[first, :-1].contiguous(), rows[last, 1:].contiguous()


def outcome(
    spec: ModelSpec,
    layout: Layout,
    numbers: Numbers,
    training: TrainingSpec,
    *,
    compiles: bool = False,
) -> Outcome:
    """First gradients, then five steps, on this rank."""
    trainer = Trainer(
        spec, layout, training, RECIPE,
        device=torch.device("cpu"), num_steps=STEPS, numbers=numbers, compiles=compiles,
    )  # fmt: skip
    trainer.gradients(*own_rows(trainer, 0))
    gradients = {name: _shard(p.grad) for name, p in trainer.named_parameters().items()}
    trainer.optimizer.zero_grad()
    held, results = trainer.num_held, []
    with TrafficLog(trainer.mesh.axes) as log:
        results.append(trainer.step(*own_rows(trainer, 0)))
    results += [trainer.step(*own_rows(trainer, step)) for step in range(1, STEPS)]
    planned = planned_traffic(trainer.parts, trainer.mesh, training, trainer.numbers, model=spec)
    return Outcome(
        [each.loss for each in results],
        [each.grad_norm for each in results],
        gradients,
        held,
        log.traffic.document(),
        planned.document(),
    )


def _shard(gradient: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """Where a rank's part begins in the whole, and the part."""
    if not isinstance(gradient, DTensor):
        return (0,) * gradient.dim(), gradient
    _, offset = compute_local_shape_and_global_offset(
        gradient.shape, gradient.device_mesh, gradient.placements
    )
    return tuple(offset), gradient.to_local()


def run_case(case: Case) -> dict[torch.dtype, list[Outcome]]:
    """Every rank's outcome in every type."""
    layout = case.layout
    answers = run_ranks(
        layout.mesh.num_ranks,
        lambda _: {
            dtype: outcome(case.spec, layout, Numbers(dtype), training_of()) for dtype in TYPES
        },
    )
    return {dtype: [answer[dtype] for answer in answers] for dtype in TYPES}


@cache
def alone(model: str) -> dict[torch.dtype, Outcome]:
    """One process, the whole batch in one pass."""
    found = run_case(Case(name="alone", model=model, micro_batch=BATCH))
    return {dtype: outcomes[0] for dtype, outcomes in found.items()}


def expected_elements(case: Case) -> int:
    """Parameter elements that all ranks of all stages hold together, from the ModelSpec: what tp
    does not split stands on each of its ranks, what ZeRO does not shard on each replica.
    """
    total, layout = 0, case.layout
    for chunk in layout.chunks:
        for span in chunk.spans:
            own = span.strategy
            copies = own.dp * own.cp // (own.shard_group if own.zero else 1)
            for layer in case.spec.layers[span.first : span.stop]:
                for parameter in layer.parameters():
                    in_one = layer is case.spec.layers[-1] and len(layout.chunks) == 1
                    if case.spec.tied and in_one and parameter.name == "projection":
                        continue
                    if parameter.split is Split.EXPERT:
                        total += parameter.count * (1 if own.zero else layout.mesh.expert_dp)
                        continue
                    replicated = parameter.split is Split.REPLICATED
                    total += parameter.count * copies * (own.tp if replicated else 1)
    return total
