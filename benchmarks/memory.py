"""Memory of each rank against measurements: python -m benchmarks.memory [FILE.csv] [--write]

Galvatron profiles models of one to four blocks on eight GPUs, all states sharded over the GPUs:
what is there after building (model states), what a forward pass leaves (activation), and the most
beyond the states at any time (activation peak). A line states family, width, layers, tp, dp, pp and
flags: ``sp`` sequence parallel, ``c`` recomputed, ``vtp`` embedding and head split over tp too.
Nothing is fitted: each figure is the account of the cost model.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.figures import Figures, figures, table
from costmodel.context import CostContext
from costmodel.layout import NO_RECOMPUTE, Mesh, Recompute, RecomputeKind, Strategy
from profiles import load_calibration, load_cluster
from profiles.layers import Attention, Block, Embedding, FeedForward, Head, Norm
from profiles.model import LayerRun, ModelSpec
from profiles.training import AttentionKernel, GradDtype, LossKernel, TrainingSpec
from profiles.units import MIB

ROOT = Path(__file__).parents[1]
FULL = ROOT.parent / "shared" / "runs" / "memory_galvatron.csv"
RECORD = ROOT / "benchmarks" / "memory.json"
QUANTITIES = ("model_states_mib", "activation_mib", "activation_peak_mib")
FULL_AGAIN = Recompute(RecomputeKind.FULL)
LLAMA_FFN = 11008
VOCAB = {"gpt": 50257, "bert": 30522, "llama": 32000}


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a family of Galvatron's models runs: its architecture, and what its code is."""

    model: str
    attention: AttentionKernel = AttentionKernel.FLASH2
    loss: LossKernel = LossKernel.HALF
    fused_norms: bool = True


def software_of(family: str, flags: str) -> Software:
    """Models of Hugging Face's code (``_hf``) and of flash-attn's (``_fa``), and since the release
    with sequence parallelism Megatron's loss in fp32 and norms of PyTorch's own under Llama.
    """
    if family.startswith("bert"):
        return Software(model="bert", attention=AttentionKernel.UNFUSED)
    newer = family == "gpt" or (family == "llama_hf" and "sp" in flags)
    if newer:
        return Software(model="llama", loss=LossKernel.FUSED, fused_norms=False)
    return Software(model=family.split("_", maxsplit=1)[0])


@cache
def model_of(kind: str, hidden: int, heads: int, seq_len: int) -> ModelSpec:
    llama = kind == "llama"
    size = hidden // heads
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=size,
        value_head_dim=size,
        qkv_bias=not llama,
        output_bias=not llama,
        rope=llama,
        causal=kind != "bert",
    )
    wide = FeedForward(ffn_hidden=LLAMA_FFN if llama else 4 * hidden, gated=llama, bias=not llama)
    norm = Norm.RMS if llama else Norm.LAYER
    dropout = not llama
    block = Block(hidden=hidden, attention=attention, feed_forward=wide, norm=norm, dropout=dropout)
    vocab, positions = VOCAB[kind], 0 if llama else seq_len
    first = Embedding(vocab=vocab, hidden=hidden, positions=positions, dropout=dropout)
    last = Head(vocab=vocab, hidden=hidden, norm=norm, tied=False)
    runs = (LayerRun(first, 1), LayerRun(block, 1), LayerRun(last, 1))
    return ModelSpec(name=kind, family="generic", runs=runs)


def predicted(cells: dict[str, str]) -> tuple[float, float, float]:
    """The three quantities of a line in MiB."""
    flags = cells["flags"].split("_")
    tp, dp, pp = (int(cells[name]) for name in ("tp", "dp", "pp"))
    software = software_of(cells["family"], cells["flags"])
    seq_len = int(cells["seq_len"])
    model = model_of(software.model, int(cells["hidden"]), int(cells["heads"]), seq_len)
    training = TrainingSpec(
        global_batch=int(cells["global_batch"]),
        seq_len=seq_len,
        grad_dtype=GradDtype.BF16,
        attention=software.attention,
        fused_kernels=software.model != "llama",
        fused_norms=software.fused_norms,
        loss=software.loss,
        prefetches=False,
    )
    cluster = load_cluster("8xa100-80g")
    context = CostContext(model, cluster, training, load_calibration(None, cluster)[0])
    plain = Strategy(
        tp=tp, dp=dp, zero=3, shard_group=dp, sequence_parallel="sp" in flags and tp > 1
    )
    again = replace(plain, recompute=FULL_AGAIN if "c" in flags else NO_RECOMPUTE)
    ends_tp = tp if "vtp" in flags else 1
    ends_dp = tp * dp // ends_tp
    ends = replace(
        plain,
        tp=ends_tp,
        dp=ends_dp,
        shard_group=ends_dp,
        sequence_parallel=plain.sequence_parallel and ends_tp > 1,
    )
    embedding, block, head = (run.layer for run in model.runs)
    layers = [(block, again)] * (int(cells["layers"]) // pp)
    if cells["rank"] == "0" or pp == 1:
        layers = [(embedding, ends), *layers]
    if cells["rank"] != "0" or pp == 1:
        layers = [*layers, (head, ends)]
    states = held = most = freed = 0
    for layer, strategy in reversed(layers):  # in the order of the backward pass
        mesh = Mesh(tp=strategy.tp, dp=strategy.dp, pp=pp)
        micro_batch = training.global_batch // strategy.dp
        cost = context.compute(layer, strategy, micro_batch, mesh)
        own = context.states(cost, mesh, strategy.zero, strategy.shard_group)
        states += own.resident_bytes
        held += cost.saved_bytes
        most = max(most, cost.transient_bytes + own.working_bytes - freed)
        freed += cost.saved_bytes
    return states / MIB, held / MIB, (held + most) / MIB


def measure(path: Path) -> dict[str, Figures]:
    """Figures of each quantity of each family, and of each quantity."""
    errors: dict[str, list[float]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            for name, ours in zip(QUANTITIES, predicted(cells), strict=True):
                error = ours / float(cells[name]) - 1
                what = name.removesuffix("_mib").replace("_", " ")
                errors[f"{cells['family']}: {what}"].append(error)
                errors[f"all: {what}"].append(error)
                errors["total"].append(error)
    return {name: figures(own) for name, own in sorted(errors.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=FULL)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    found = measure(asked.file)
    print(table("quantity", found))
    if asked.write:
        record = {name: asdict(own) for name, own in found.items()}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
