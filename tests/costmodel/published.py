"""A row of the published runs -> what an estimate needs: model, cluster, training, layout.

Small on purpose: it reads the families that the tests ask for, and says nothing about others.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from costmodel.context import CostContext
from costmodel.estimate import Estimate, estimate
from costmodel.layout import (
    NO_RECOMPUTE,
    Chunk,
    LayerSpan,
    Layout,
    Mesh,
    Recompute,
    RecomputeKind,
    Strategy,
)
from profiles import load_calibration, load_cluster
from profiles.layers import (
    Attention,
    Block,
    Embedding,
    ExpertFeedForward,
    FeedForward,
    Head,
    LatentAttention,
    Norm,
)
from profiles.model import LayerRun, ModelSpec
from profiles.training import AttentionKernel, GradDtype, Precision, TrainingSpec

RUNS = Path(__file__).parents[2].parent / "shared" / "runs"
RECOMPUTES = {
    "none": NO_RECOMPUTE,
    "selective": Recompute(RecomputeKind.SELECTIVE, ("core_attn",)),
    "full": Recompute(RecomputeKind.FULL),
}
# DeepSeek-V2's config.json; the runs state heads and widths only.
DEEPSEEK_V2 = LatentAttention(query_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128)


def read_csv(name: str) -> list[dict[str, str]]:
    """Rows of a file of published figures; the test is skipped where it is not at hand."""
    path = RUNS / name
    if not path.is_file():
        pytest.skip(f"{name} is not beside this project")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class Run:
    """One published run."""

    row: dict[str, str]
    context: CostContext
    layout: Layout

    def estimate(self) -> Estimate:
        return estimate(self.context, self.layout)


def runs(source: str, stack: str | None = None) -> list[Run]:
    """All runs of one source that state a step time on a device of the catalogue, under the
    calibration of a software stack (None: the datasheet's).
    """
    rows = [row for row in read_csv("measured_runs.csv") if row["file"] == source]
    return [
        run_of(row, stack) for row in rows if row["gpu"] in ("A100", "B200") and row["step_time_s"]
    ]


def run_of(row: dict[str, str], stack: str | None = None) -> Run:
    model, training = model_of(row), training_of(row)
    nodes = number(row, "n_gpus") // number(row, "gpus_per_node")
    device = f"{row['gpu'].lower()}-{row['gpu_mem_gb']}g"
    cluster = load_cluster(f"{nodes}x{row['gpus_per_node']}x{device}")
    calibration, _ = load_calibration(stack, cluster)
    context = CostContext(model, cluster, training, calibration)
    return Run(row, context, layout_of(row, model, training))


def number(row: dict[str, str], key: str, default: int = 0) -> int:
    return int(row[key] or default)


def model_of(row: dict[str, str]) -> ModelSpec:
    """Llama-like where the feed-forward is gated, else as GPT-2, with dropout."""
    hidden, gated = number(row, "hidden"), row["gated_mlp"] == "1"
    vocab, layers = number(row, "vocab"), number(row, "layers")
    norm = Norm.RMS if gated else Norm.LAYER
    shape = {"hidden": hidden, "norm": norm, "attention": attention_of(row), "dropout": not gated}
    wide = FeedForward(ffn_hidden=number(row, "ffn_hidden"), gated=gated, bias=not gated)
    dense = number(row, "dense_layers") if row["num_experts"] else layers
    blocks = [LayerRun(Block(feed_forward=wide, **shape), dense)]
    if row["num_experts"]:
        experts = ExpertFeedForward(
            num_experts=number(row, "num_experts"),
            top_k=number(row, "topk"),
            expert_hidden=number(row, "moe_ffn_hidden"),
            shared_hidden=number(row, "shared_ffn_hidden"),
        )
        blocks.append(LayerRun(Block(feed_forward=experts, **shape), layers - dense))
    positions = 0 if gated else number(row, "seq_len")
    embedding = Embedding(vocab=vocab, hidden=hidden, positions=positions, dropout=not gated)
    head = Head(vocab=vocab, hidden=hidden, norm=norm, tied=row["tied_embeddings"] == "1")
    return ModelSpec(
        name=row["model"],
        family="generic",
        runs=(LayerRun(embedding, 1), *blocks, LayerRun(head, 1)),
    )


def attention_of(row: dict[str, str]) -> Attention:
    heads, gated = number(row, "heads"), row["gated_mlp"] == "1"
    size = number(row, "head_dim", number(row, "hidden") // heads)
    if row["model"].startswith("deepseek_v2"):
        key = DEEPSEEK_V2.rope_dim + DEEPSEEK_V2.nope_dim
        return Attention(
            heads=heads, kv_heads=heads, head_dim=key, value_head_dim=size, latent=DEEPSEEK_V2
        )
    return Attention(
        heads=heads,
        kv_heads=number(row, "kv_heads"),
        head_dim=size,
        value_head_dim=size,
        qkv_bias=not gated,
        output_bias=not gated,
        rope=gated,
    )


def training_of(row: dict[str, str]) -> TrainingSpec:
    """Megatron-LM accumulates gradients in fp32."""
    unfused = row["attn_kernel"].startswith("unfused")
    return TrainingSpec(
        global_batch=number(row, "global_batch"),
        seq_len=number(row, "seq_len"),
        precision=Precision(row["precision"]),
        grad_dtype=GradDtype.FP32,
        attention=AttentionKernel.UNFUSED if unfused else AttentionKernel.FUSED,
    )


def layout_of(row: dict[str, str], model: ModelSpec, training: TrainingSpec) -> Layout:
    degrees = {name: number(row, name, 1) for name in ("tp", "cp", "ep", "dp")}
    mesh = Mesh(pp=number(row, "pp", 1), **degrees)
    zero = number(row, "zero_stage")
    strategy = Strategy(
        **degrees,
        zero=zero,
        shard_group=mesh.dp * mesh.cp if zero else 1,
        sequence_parallel=row["sequence_parallel"] == "1",
        recompute=RECOMPUTES[row["recompute"]],
    )
    chunks, micro_batch = number(row, "vpp", 1), number(row, "micro_batch")
    return Layout(
        mesh=mesh,
        schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
        num_chunks=chunks,
        micro_batch=micro_batch,
        num_microbatches=training.global_batch // (mesh.dp * micro_batch),
        chunks=even_chunks(model.num_layers, mesh.pp, chunks, strategy),
    )


def even_chunks(num_layers: int, stages: int, chunks: int, strategy: Strategy) -> tuple[Chunk, ...]:
    """Blocks divided evenly, the embedding on the first chunk and the head on the last."""
    places = stages * chunks
    blocks = num_layers - 2
    cuts = [0, *(1 + blocks * place // places for place in range(1, places)), num_layers]
    return tuple(
        Chunk(place % stages, place // stages, (LayerSpan(first, stop, strategy),))
        for place, (first, stop) in enumerate(pairwise(cuts))
    )
