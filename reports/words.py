"""Numbers and choices as people say them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from costmodel.layout import ContextComm
from costmodel.schedules import SCHEDULES
from profiles.units import GB, GIB

if TYPE_CHECKING:
    from collections.abc import Iterable

    from costmodel.layout import Layout
    from planner.plan import Plan
    from planner.sensitivity import Shift
    from planner.spend import Spend

__all__ = [
    "CAUSES",
    "KINDS",
    "duration",
    "energy",
    "executed_words",
    "fit_words",
    "gib",
    "layout_words",
    "money",
    "per_cent",
    "rate",
    "recompute_words",
    "seconds",
    "shift_words",
    "spend_words",
    "training_words",
    "verdict",
]

CAUSES: Final = {
    "compute_s": "compute",
    "recompute_s": "recomputation",
    "tp_s": "tensor-parallel traffic",
    "cp_s": "context-parallel traffic",
    "ep_s": "expert traffic",
    "zero_s": "ZeRO traffic",
    "p2p_s": "hand-over between stages",
    "bubble_s": "waiting for other stages",
    "gradient_s": "gradient reduction",
    "optimizer_s": "optimizer",
    "overhead_s": "host time and jitter",
}
KINDS: Final = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "working": "working memory",
    "buffers": "buffers",
    "reserved": "allocator",
    "context": "context",
}
MILLI: Final = 1e-3
HOUR_S: Final = 3600
DAY_S: Final = 24 * HOUR_S


def seconds(value: float) -> str:
    """``58.4 s``, ``850 ms``, ``1,204 s``."""
    if abs(value) >= 1000:  # noqa: PLR2004 - from here on, whole seconds
        return f"{value:,.0f} s"
    if abs(value) >= 1 or value == 0:
        return f"{value:.3g} s"
    return f"{value / MILLI:.3g} ms"


def duration(value: float) -> str:
    """Seconds that may be days: ``3.2 days``, ``5.1 hours``, ``58.4 s``."""
    for unit, size in (("days", DAY_S), ("hours", HOUR_S)):
        if value >= 2 * size:
            return f"{value / size:,.3g} {unit}"
    return seconds(value)


def gib(size: float) -> str:
    """``71.3 GiB``."""
    return f"{size / GIB:.1f} GiB"


def rate(bytes_per_s: float) -> str:
    """``450 GB/s``."""
    return f"{bytes_per_s / GB:.4g} GB/s"


def per_cent(part: float) -> str:
    """``49.1 %``."""
    return f"{100 * part:.1f} %"


def money(price: float) -> str:
    """``1,204``, ``3.62``, ``0.00181``: whatever the currency of the cluster file."""
    return f"{price:,.0f}" if price >= 1000 else f"{price:#.3g}"  # noqa: PLR2004 - as for seconds


def energy(kwh: float) -> str:
    """``1.24 kWh``, ``3.1 Wh``."""
    return f"{kwh:,.3g} kWh" if kwh >= 1 else f"{kwh / MILLI:,.3g} Wh"


def spend_words(spend: Spend) -> str:
    """Price and energy of a step and of a million tokens, as far as they are known."""
    parts = []
    if spend.price_per_step is not None and spend.price_per_million_tokens is not None:
        per_step, per_million = spend.price_per_step, spend.price_per_million_tokens
        parts.append(f"price {money(per_step)} a step, {money(per_million)} a million tokens")
    if spend.kwh_per_step is not None and spend.kwh_per_million_tokens is not None:
        per_step, per_million = spend.kwh_per_step, spend.kwh_per_million_tokens
        parts.append(f"energy {energy(per_step)} a step, {energy(per_million)} a million tokens")
    return "; ".join(parts)


def shift_words(shift: Shift) -> str:
    """``10 % less bandwidth``."""
    more = "more" if shift.factor > 1 else "less"
    return f"{100 * abs(shift.factor - 1):.0f} % {more} {shift.what}"


def layout_words(layout: Layout) -> str:
    """``tp 8 x cp 1 x dp 4 x pp 4, 1f1b, micro-batch 1, ZeRO-1``."""
    mesh, strategies = layout.mesh, layout.strategies
    tp, dp = (_by_layer(getattr(each, name) for each in strategies) for name in ("tp", "dp"))
    gathered = mesh.cp > 1 and strategies[0].cp_comm is ContextComm.GATHER
    cp = f"cp {mesh.cp} (gather)" if gathered else f"cp {mesh.cp}"
    words = [f"tp {tp} x {cp} x dp {dp} x pp {mesh.pp}"]
    if mesh.ep > 1 or mesh.expert_tp > 1:
        words.append(f"experts ep {mesh.ep} x tp {mesh.expert_tp}")
    if mesh.pp > 1:
        chunks = f" in {layout.num_chunks} chunks a stage" if layout.num_chunks > 1 else ""
        words.append(layout.schedule + chunks)
        if not SCHEDULES[layout.schedule].drains:
            words.append("NOT gradient-equivalent: weights are stale")
    words.append(f"micro-batch {layout.micro_batch}")
    zero = _by_layer(each.zero for each in strategies)
    if zero != "0":
        first, replicas = strategies[0], mesh.dp * mesh.cp
        inside = f" inside {first.shard_group}" if first.shard_group < replicas else ""
        words.append(f"ZeRO-{zero}{inside}")
    if any(each.sequence_parallel for each in strategies):
        words.append("sequence parallel")
    return ", ".join(words)


def _by_layer(values: Iterable[int]) -> str:
    """``2``, or ``2/4`` where layers differ."""
    return "/".join(str(value) for value in dict.fromkeys(values))


def verdict(plan: Plan) -> str:
    """The answer in one line."""
    own = plan.estimate
    low, high = own.interval_s
    return (
        f"{layout_words(plan.layout)}: {seconds(own.step_s)} a step ({seconds(low)} to "
        f"{seconds(high)}), {own.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU "
        f"{per_cent(own.mfu)}, {fit_words(plan)}"
    )


def fit_words(plan: Plan) -> str:
    """The memory of the fullest device, and whether it suffices."""
    own, usable = plan.estimate, plan.inputs.context.usable_bytes
    fits = "fits with" if own.fits else "DOES NOT FIT,"
    return (
        f"{gib(own.peak_mem_bytes)} of {gib(usable)}, {fits} probability {own.fit_probability:.2f}"
    )


def executed_words(plan: Plan) -> str:
    """A plan for ``parplan launch``, whose estimate is that of its own kernels."""
    step = seconds(plan.estimate.step_s)
    return f"with the kernels of parplan launch {step} a step, {fit_words(plan)}"


def recompute_words(layout: Layout, stage: int) -> str:
    """How many layers of a stage recompute what: ``4 layernorm+mlp, 1 full``."""
    counts: Counter[str] = Counter()
    for chunk in layout.stage_chunks(stage):
        for span in chunk.spans:
            option = span.strategy.recompute
            if option.kind != "none":
                counts["+".join(option.modules) or option.kind] += span.stop - span.first
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def training_words(plan: Plan) -> str:
    """What is trained, every default stated."""
    training = plan.inputs.training
    fused = "fused kernels" if training.fused_kernels else "no fused kernels"
    return (
        f"{training.global_batch} sequences of {training.seq_len} tokens a step, "
        f"{training.precision}, {training.optimizer}, gradients in {training.grad_dtype} "
        f"({training.state_bytes} bytes of states a parameter), "
        f"attention {training.attention}, {fused}"
    )
