"""The matrix: strategies and compositions that must equal one process, on a small model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    experts: ExpertFeedForward | None = None,
    num_dense: int = 0,
    **block: Any,
) -> ModelSpec:
    """Four blocks of width 32 with 4 heads. ``experts``: of those after the first ``num_dense``."""
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
    blocks = [LayerRun(one, 4)]
    if experts is not None:
        blocks = [LayerRun(replace(one, feed_forward=experts), 4 - num_dense)]
        blocks[:0] = [LayerRun(one, num_dense)] if num_dense else []
    runs = (LayerRun(first, 1), *blocks, LayerRun(last, 1))
    return ModelSpec(name="small", family="generic", runs=runs)


LLAMA = model_of()
QWEN = model_of(qk_norm=QKNorm.PER_HEAD, tied=True)
OLMO = model_of(qk_norm=QKNorm.FULL)
GPT = model_of(norm=Norm.LAYER, gated=False, positions=SEQ, biases=True, tied=True)
GEMMA = model_of(num_norms=4, window=5)
NEOX = model_of(norm=Norm.LAYER, gated=False, biases=True, parallel=True)
PHI = model_of(kv_heads=4, norm=Norm.LAYER, positions=SEQ, biases=True)
MODELS = {"phi": PHI, "llama": LLAMA, "qwen": QWEN, "olmo": OLMO, "gpt": GPT, "gemma": GEMMA, "neox": NEOX}


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


BY_REPLICA = (Axis.TP, Axis.CP, Axis.EP, Axis.PP, Axis.DP)
VEE = {"schedule": "zbv", "chunks": 2, "pp": 2}
STAGES_FIRST = (Axis.PP, Axis.TP, Axis.CP, Axis.EP, Axis.DP)
OF_TWO = {"tp 2": split(2, 1), "whole": split(2, 1, sequence=False)}
OF_TWO |= {f"zero {stage}": split(1, 2, stage) for stage in range(4)}
OF_TWO |= {
    "tp 2, full": split(2, 1, recompute=FULL),
    "zero 2, all": split(1, 2, 2, recompute=CHEAP),
    "zero 3, full": split(1, 2, 3, recompute=FULL),
}


def of_two(*names: str) -> tuple[Strategy, ...]:
    """Strategies of six layers on two ranks."""
    return tuple(OF_TWO[name] for name in names)


MIXES = (
    Case(
        name="ZeRO 0, 1, 2, 3", dp=2, model="gpt",
        layers=of_two("zero 2", "zero 0", "zero 1", "zero 2", "zero 3", "zero 2"),
    ),
    Case(
        name="TP 2 / TP 1, ZeRO-3", tp=2, micro_batch=4, model="qwen",
        layers=of_two("tp 2", "zero 3", "zero 3", "tp 2", "tp 2", "tp 2"),
    ),
    Case(
        name="TP 1, ZeRO-2 / TP 2 without SP", dp=2, model="gpt",
        layers=of_two("zero 2", "zero 2", "zero 2", "whole", "whole", "zero 2"),
    ),
    Case(
        name="TP 2 with SP / without", tp=2, micro_batch=4,
        layers=of_two("tp 2", "tp 2", "tp 2", "whole", "whole", "whole"),
    ),
    Case(
        name="TP 2 / TP 1, each recomputed otherwise", dp=2, model="olmo",
        layers=of_two("zero 1", "tp 2, full", "zero 2, all", "tp 2", "zero 3, full", "tp 2"),
    ),
    Case(
        name="TP 4 / 2 / 1, ZeRO 0 / 0 / 3", tp=4, micro_batch=4, model="phi",
        layers=(split(4, 1), split(4, 1), split(2, 2), split(2, 2), split(1, 4, 3), split(1, 4, 3)),
    ),
    Case(
        name="TP 1 / 4 / 2, HSDP", dp=4, micro_batch=2, model="phi",
        layers=(
            split(1, 4, 3, shard_group=2), split(4, 1), split(2, 2, 1), split(1, 4, 2),
            split(4, 1, sequence=False), split(2, 2, sequence=False),
        ),
    ),
    Case(
        name="1F1B, TP 2 / TP 1", pp=2, tp=2, cut=(1, 3), model="qwen", micro_batch=2,
        layers=of_two("tp 2", "zero 3", "tp 2", "zero 1", "tp 2", "tp 2"),
    ),
    Case(
        name="GPipe, TP 1 / TP 2, stages first", pp=2, dp=2, schedule="gpipe", order=STAGES_FIRST,
        layers=of_two("zero 2", "tp 2, full", "tp 2", "zero 3", "zero 3, full", "whole"),
    ),
    Case(
        name="interleaved 1F1B, TP 2 / TP 1", pp=2, tp=2, chunks=2, micro_batch=2,
        schedule="interleaved-1f1b",
        layers=of_two("tp 2", "zero 3", "tp 2", "zero 3, full", "zero 2", "tp 2"),
    ),
    Case(
        name="ZBV, TP 2 / TP 1", **VEE, tp=2, micro_batch=2,
        layers=of_two("tp 2", "zero 1", "zero 0", "tp 2", "tp 2", "zero 1"),
    ),
    Case(
        name="1F1B, TP 2 / 1 / 4, full and none", pp=2, tp=2, dp=2, cut=(3, 1), model="phi",
        micro_batch=2,
        layers=(
            split(2, 2, 2), split(2, 2, 3), split(1, 4, 3, recompute=FULL), split(4, 1),
            split(2, 2, 2, recompute=FULL), split(4, 1),
        ),
    ),
    Case(
        name="TP 1 / 2 / 4 on eight, ZeRO-3, 2, 1", dp=8, model="phi",
        layers=(
            split(1, 8, 3), split(1, 8, 3, recompute=FULL), split(2, 4, 2), split(4, 2, 1),
            split(4, 2), split(1, 8, 2),
        ),
    ),
    Case(
        name="interleaved zero bubble, TP 4 / 2 / 1", pp=2, tp=4, chunks=2, micro_batch=4,
        schedule="interleaved-zb", model="phi",
        layers=(
            split(4, 1), split(2, 2, 1), split(4, 1), split(2, 2), split(1, 4), split(1, 4, 1),
        ),
    ),
)
CASES = (
    Case(name="DDP", dp=2),
    Case(name="ZeRO-1", dp=2, zero=1, model="qwen"),
    Case(name="ZeRO-2", dp=2, zero=2, micro_batch=2),
    Case(name="ZeRO-3, tied", dp=2, zero=3, model="gpt"),
    Case(name="ZeRO-3, uneven shards", dp=4, zero=3, micro_batch=2, model="olmo"),
    Case(name="HSDP, ZeRO-2 in pairs", dp=4, zero=2, shard_group=2),
    Case(name="HSDP, ZeRO-3 in pairs", dp=4, zero=3, shard_group=2, micro_batch=2, model="qwen"),
    Case(name="TP", tp=2, model="gpt", micro_batch=4),
    Case(name="TP, q/k norm over all heads", tp=2, model="olmo", micro_batch=4),
    Case(name="TP, sequence parallel", tp=2, sequence=True, model="qwen", micro_batch=4),
    Case(name="TP, sequence parallel, biases", tp=2, sequence=True, model="gpt", micro_batch=8),
    Case(name="TP, parallel block", tp=2, sequence=True, model="neox", micro_batch=8),
    Case(name="TP, four norms, window", tp=2, sequence=True, model="gemma", micro_batch=8),
    Case(name="full recomputation", tp=2, recompute=FULL, micro_batch=4),
    Case(name="full recomputation, SP", tp=2, sequence=True, recompute=FULL, micro_batch=4),
    Case(name="selective: attention", dp=2, zero=3, recompute=CORE, micro_batch=4),
    Case(name="selective: all modules", tp=2, sequence=True, recompute=CHEAP, micro_batch=4),
    Case(name="selective: norms", tp=2, sequence=True, recompute=NORMS, micro_batch=8),
    Case(
        name="layers differ", dp=2, micro_batch=2,
        layers=(*[split(1, 2, 3)] * 3, *[split(1, 2, 1, recompute=FULL)] * 2, split(1, 2, 3)),
    ),
    Case(name="GPipe", pp=2, schedule="gpipe", cut=(3, 1), model="gpt", micro_batch=2),
    Case(name="1F1B, four stages", pp=4, micro_batch=2, model="qwen"),
    Case(name="interleaved 1F1B", pp=2, chunks=2, schedule="interleaved-1f1b", micro_batch=2),
    Case(name="interleaved zero bubble", pp=2, chunks=2, schedule="interleaved-zb", micro_batch=2),
    Case(name="ZBV, tied", **VEE, model="qwen", micro_batch=2),
    Case(name="DualPipeV", **{**VEE, "schedule": "dualpipe-v"}, micro_batch=2),
    Case(name="1F1B x ZeRO-1", pp=2, dp=2, zero=1, cut=(1, 3), model="gpt"),
    Case(name="1F1B x ZeRO-2", pp=2, dp=2, zero=2, order=BY_REPLICA),
    Case(name="1F1B x ZeRO-3", pp=2, dp=2, zero=3, recompute=FULL),
    Case(name="interleaved x ZeRO-3", pp=2, dp=2, zero=3, chunks=2, schedule="interleaved-1f1b"),
    Case(name="ZBV x DDP", **VEE, dp=2, micro_batch=2),
    Case(name="ZBV x ZeRO-1", **VEE, dp=2, zero=1, model="gpt"),
    Case(name="ZBV x TP", **VEE, tp=2, sequence=True, micro_batch=2),
    Case(name="TP x ZeRO-3", tp=2, dp=2, zero=3, sequence=True, model="qwen", micro_batch=2),
    Case(name="TP x ZeRO-1", tp=2, dp=2, zero=1, model="olmo", micro_batch=4),
    Case(name="PP x TP", pp=2, tp=2, micro_batch=2, model="gpt"),
    Case(
        name="PP x DP x TP: 1F1B, ZeRO-1", pp=2, dp=2, tp=2, zero=1, sequence=True, model="qwen"
    ),
    Case(
        name="PP x DP x TP: interleaved, ZeRO-3", pp=2, dp=2, tp=2, zero=3, sequence=True,
        chunks=2, schedule="interleaved-1f1b", recompute=FULL, micro_batch=2,
    ),
    Case(name="PP x DP x TP: ZBV, ZeRO-1", **VEE, dp=2, tp=2, zero=1, micro_batch=2),
    *MIXES,
)  # fmt: skip


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


def outcome(spec: ModelSpec, layout: Layout, numbers: Numbers, training: TrainingSpec) -> Outcome:
    """First gradients, then five steps, on this rank."""
    trainer = Trainer(
        spec, layout, training, RECIPE,
        device=torch.device("cpu"), num_steps=STEPS, numbers=numbers,
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
