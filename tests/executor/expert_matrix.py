"""The matrix of experts and of context parallelism, and with that the whole matrix."""

from __future__ import annotations

from cases import CHEAP, CORE, FULL, Case
from matrix import BY_REPLICA, CASES, VEE, of_two

from costmodel.layout import Axis, ContextComm, Recompute, RecomputeKind

__all__ = ["ALL_CASES"]

SPARE = Recompute(RecomputeKind.SELECTIVE, ("core_attn", "layernorm", "mlp", "moe_act"))
CONTEXT_LAST = (Axis.DP, Axis.TP, Axis.EP, Axis.CP, Axis.PP)
SEQUENCE = {"sequence": True, "micro_batch": 4}
EXPERTS = (
    Case(name="experts: DDP", dp=2, model="mixtral", micro_batch=2),
    Case(name="experts: EP = DP 2, ZeRO-1", dp=2, ep=2, zero=1, model="switch", micro_batch=2),
    Case(name="experts: EP = DP 4", dp=4, ep=4, model="mixtral"),
    Case(name="experts: EP 2 x DP 4, ZeRO-3", dp=4, ep=2, zero=3, model="mixtral"),
    Case(name="experts: EP 2 x DP 4, ZeRO-2 in pairs", dp=4, ep=2, zero=2, shard_group=2,
         model="qwen-moe"),
    Case(name="experts: TP", tp=2, model="mixtral", **SEQUENCE),
    Case(name="experts: EP over TP", tp=2, ep=2, model="qwen-moe", **SEQUENCE),
    Case(name="experts: split over TP", tp=2, expert_tp=2, model="mixtral", **SEQUENCE),
    Case(name="experts: EP 2 x TP 2, ZeRO-3", tp=2, dp=2, ep=2, zero=3, recompute=FULL,
         model="qwen-moe", **SEQUENCE),
    Case(name="experts: EP 2 x TP 2, split over TP, ZeRO-1", tp=2, dp=2, ep=2, expert_tp=2, zero=1,
         model="qwen-moe", recompute=SPARE, **SEQUENCE),
    Case(name="experts: EP 4 over TP 2 x DP 2", tp=2, dp=2, ep=4, zero=2, model="switch",
         recompute=SPARE, **SEQUENCE),
    Case(name="experts: TP 2 / TP 1", tp=2, micro_batch=4, model="mixtral",
         layers=of_two("tp 2", "zero 3", "tp 2", "zero 2", "zero 3, full", "tp 2")),
    Case(name="experts: 1F1B x EP, ZeRO-2", pp=2, dp=2, ep=2, zero=2, model="switch"),
    Case(name="experts: ZBV x EP, ZeRO-1", **VEE, dp=2, ep=2, zero=1, model="qwen-moe"),
)  # fmt: skip
CONTEXTS = (
    Case(name="CP 2", cp=2, micro_batch=2),
    Case(name="CP 4, window, four norms", cp=4, model="gemma", micro_batch=4, recompute=CHEAP),
    Case(name="CP 2 x TP 2, learned positions", cp=2, tp=2, model="gpt", **SEQUENCE),
    Case(name="CP 2 x TP 2, q/k norm over all heads", cp=2, tp=2, model="olmo", recompute=FULL,
         **SEQUENCE),
    Case(name="CP 2 x DP 2, ZeRO-3", cp=2, dp=2, zero=3, model="qwen", recompute=CORE),
    Case(name="CP 2 x DP 2, ZeRO-2 in pairs", cp=2, dp=2, zero=2, shard_group=2),
    Case(name="CP 2 x DP 2 x TP 2, CP slowest", cp=2, dp=2, tp=2, zero=1, order=CONTEXT_LAST,
         **SEQUENCE),
    Case(name="1F1B x CP, ZeRO-1", cp=2, pp=2, zero=1, model="gpt", micro_batch=2),
    Case(name="ZBV x CP", **VEE, cp=2, micro_batch=2),
    Case(name="CP 2 x EP 2, ZeRO-3", cp=2, ep=2, zero=3, model="mixtral", micro_batch=4),
    Case(name="CP 2 x DP 2 x EP 4 x 1F1B, ZeRO-2", cp=2, dp=2, ep=4, pp=2, zero=2,
         model="qwen-moe", order=BY_REPLICA),
)  # fmt: skip
RING = {"cp_comm": ContextComm.RING}
RINGS = (
    Case(name="ring: CP 2", cp=2, micro_batch=2, **RING),
    Case(name="ring: CP 4, grouped heads", cp=4, model="qwen", micro_batch=4, **RING),
    Case(name="ring: CP 4, full recomputation", cp=4, model="olmo", micro_batch=4, recompute=FULL,
         **RING),
    Case(name="ring: CP 8", cp=8, model="gpt", micro_batch=8, **RING),
    Case(name="ring: CP 2 x TP 2", cp=2, tp=2, model="gpt", **SEQUENCE, **RING),
    Case(name="ring: CP 2 x DP 2, ZeRO-3, attention recomputed", cp=2, dp=2, zero=3, model="qwen",
         micro_batch=2, recompute=CORE, **RING),
    Case(name="ring: CP 2 x DP 2 x TP 2, CP slowest", cp=2, dp=2, tp=2, zero=1, order=CONTEXT_LAST,
         **SEQUENCE, **RING),
    Case(name="ring: 1F1B x CP 2, ZeRO-1", cp=2, pp=2, zero=1, model="gpt", micro_batch=2, **RING),
    Case(name="ring: ZBV x CP 2", **VEE, cp=2, micro_batch=2, **RING),
    Case(name="ring: CP 2 x EP 2, ZeRO-3", cp=2, ep=2, zero=3, model="switch", micro_batch=4,
         **RING),
    Case(name="ring: CP 2 x DP 2 x EP 4 x 1F1B, ZeRO-2", cp=2, dp=2, ep=4, pp=2, zero=2,
         micro_batch=2, model="qwen-moe", recompute=CHEAP, order=BY_REPLICA, **RING),
)  # fmt: skip
ALL_CASES = (*CASES, *EXPERTS, *CONTEXTS, *RINGS)
