"""The matrix: strategies and compositions that must equal one process."""

from __future__ import annotations

from cases import CHEAP, CORE, FULL, NORMS, Case, split

from costmodel.layout import Axis, Strategy

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
)  # fmt: skip
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
