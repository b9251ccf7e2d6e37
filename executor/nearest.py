"""The nearest plan that a launcher can express: each choice that it cannot is changed least."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from costmodel.layout import NO_RECOMPUTE, RecomputeKind
from costmodel.placing import even_cut
from costmodel.schedules import SCHEDULES, Shape
from executor.launchers.job import FULL, first_of_chunks, most_of_a_chunk
from executor.launchers.setup import ORDER, Setup, layout_of, of_blocks, setup_of
from planner.choices import Degrees
from planner.expressible import inexpressible
from planner.launchers import LAUNCHERS, Mixing
from planner.rules import broken_rules, num_microbatches
from planner.space import SearchSpace

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from costmodel.layout import Layout
    from planner.inputs import Inputs
    from planner.launchers import LauncherRules

    Repair: TypeAlias = Callable[[Setup, LauncherRules, Inputs], Setup | None]

__all__ = ["nearest_layout"]

REPAIRS: Final = 12


def nearest_layout(launcher: str, inputs: Inputs, layout: Layout) -> Layout | None:
    """A layout that ``launcher`` can express, with as few other choices as need be; None where
    such changes do not lead to one.
    """
    rules = LAUNCHERS[launcher]
    setup = setup_of(inputs.model, layout)
    for _ in range(REPAIRS):
        broken = inexpressible(launcher, inputs, layout)
        if not broken:
            return layout if _is_legal(inputs, setup) else None
        repair = _REPAIRS.get(broken[0].choice)
        changed = None if repair is None else repair(setup, rules, inputs)
        if changed is None or changed == setup:
            return None
        setup = _settled(changed, inputs)
        layout = layout_of(inputs.model, setup)
    return None


def _is_legal(inputs: Inputs, setup: Setup) -> bool:
    degrees = Degrees(**{name: getattr(setup, name) for name in Degrees._fields})
    space = SearchSpace(inputs.model, inputs.cluster, inputs.training)
    return not broken_rules(space, degrees, shard_group=setup.shard_group)


def _settled(setup: Setup, inputs: Inputs) -> Setup:
    """The setup with what follows from its degrees: micro-batches, shard group, experts."""
    batch, micro = inputs.training.global_batch, setup.micro_batch
    while micro > 1 and batch % (setup.dp * micro):
        micro -= 1
    replicas = setup.dp * setup.cp
    group = setup.shard_group if replicas % setup.shard_group == 0 else replicas
    return replace(
        setup,
        micro_batch=micro,
        num_microbatches=num_microbatches(inputs.training, dp=setup.dp, micro_batch=micro),
        shard_group=group,
        sequence_parallel=setup.sequence_parallel and setup.tp > 1,
        expert_tp=min(setup.expert_tp, setup.tp),
        zero=setup.zero if replicas > 1 else (0,) * len(setup.zero),
    )


def _schedule(setup: Setup, rules: LauncherRules, inputs: Inputs) -> Setup | None:
    if setup.chunks > 1 and "interleaved-1f1b" in rules.schedules:
        shape = Shape(setup.pp, setup.chunks, setup.num_microbatches)
        if SCHEDULES["interleaved-1f1b"].problem(shape) is None:
            return replace(setup, schedule="interleaved-1f1b")
    blocks = tuple(even_cut(inputs.model.num_blocks, setup.pp))
    return replace(setup, schedule="1f1b", chunks=1, blocks=blocks)


def _recompute(setup: Setup, rules: LauncherRules, inputs: Inputs) -> Setup | None:
    """At least what is recomputed now: a whole block for a part of it."""
    if rules.recompute_needs_zero and setup.one_zero == 0:
        return replace(setup, zero=(2,) * len(setup.zero))
    kinds = {option.kind for option in setup.recompute} - {RecomputeKind.NONE}
    if kinds == {RecomputeKind.SELECTIVE} and rules.selective:
        options = sorted({o for o in setup.recompute if o.modules}, key=lambda o: o.modules)
        every = (options[-1],) * inputs.model.num_blocks
        return replace(setup, recompute=of_blocks(inputs.model, every))
    if rules.mixing is Mixing.PER_LAYER:
        whole = (option if option == NO_RECOMPUTE else FULL for option in setup.recompute)
        return replace(setup, recompute=tuple(whole))
    most = max(setup.blocks)
    if rules.mixing is Mixing.FIRST_OF_CHUNK:
        names = inputs.model.layer_names
        blocks = (o for o, name in zip(setup.recompute, names, strict=True) if name.isdigit())
        most = most_of_a_chunk(setup.blocks, (option != NO_RECOMPUTE for option in blocks))
    every = first_of_chunks(setup.blocks, most)
    return replace(setup, recompute=of_blocks(inputs.model, every))


def _cut(setup: Setup, rules: LauncherRules, inputs: Inputs) -> Setup | None:
    blocks = inputs.model.num_blocks
    if rules.uneven_stages or blocks % setup.pp == 0:
        count = setup.pp * setup.chunks
        return replace(setup, blocks=tuple(even_cut(blocks, count)))
    return _fewer(setup, "pp", inputs, lambda pp: blocks % pp == 0)


def _zero(setup: Setup, rules: LauncherRules, inputs: Inputs) -> Setup | None:
    del inputs
    allowed = set(rules.zero)
    for holds, stages in (
        (setup.pp > 1, rules.zero_in_pipeline),
        (setup.cp > 1, rules.zero_in_context),
        (setup.tp > 1 and setup.dp > 1, rules.zero_in_tensor),
    ):
        allowed &= set(stages) if holds else allowed
    if not allowed:
        return None
    wanted = max(setup.zero)
    above = [stage for stage in allowed if stage >= wanted]
    return replace(setup, zero=(min(above) if above else max(allowed),) * len(setup.zero))


def _shard_group(setup: Setup, rules: LauncherRules, inputs: Inputs) -> Setup | None:
    del rules, inputs
    return replace(setup, shard_group=setup.dp * setup.cp)


def _order(setup: Setup, rules: LauncherRules, inputs: Inputs) -> Setup | None:
    del rules, inputs
    return replace(setup, order=ORDER)


def _sequence(setup: Setup, rules: LauncherRules, inputs: Inputs) -> Setup | None:
    if setup.sequence_parallel in rules.sequence_parallel:
        return None
    flipped = not setup.sequence_parallel
    tokens = -(-inputs.training.seq_len // setup.cp)
    if (flipped and tokens % setup.tp) or (not flipped and setup.expert_tp * setup.ep > 1):
        return _fewer(setup, "tp", inputs, lambda tp: tp == 1)
    return replace(setup, sequence_parallel=flipped)


def _context(setup: Setup, rules: LauncherRules, inputs: Inputs) -> Setup | None:
    del inputs
    return replace(setup, cp_comm=rules.cp_comm[0])


def _degree(name: str) -> Repair:
    def repair(setup: Setup, rules: LauncherRules, inputs: Inputs) -> Setup | None:
        space = SearchSpace(inputs.model, inputs.cluster, inputs.training, launcher=rules.name)
        own = space.degree_rules
        problem = {"tp": own.tp_problem, "cp": own.cp_problem, "pp": own.pp_problem}[name]
        alone = name == "tp" and setup.pp > 1 and not rules.tensor_in_pipeline
        return _fewer(
            setup, name, inputs, lambda size: problem(size) is None and (size == 1 or not alone)
        )

    return repair


def _fewer(setup: Setup, name: str, inputs: Inputs, legal: Callable[[int], bool]) -> Setup | None:
    """A smaller degree, the ranks that it frees as replicas."""
    old = getattr(setup, name)
    for size in range(old - 1, 0, -1):
        dp = setup.dp * old // size
        if old % size or not legal(size) or inputs.training.global_batch % dp:
            continue
        sizes: dict[str, Any] = {name: size}
        changed = replace(setup, dp=dp, shard_group=dp * setup.cp, **sizes)
        if name == "pp":
            blocks = tuple(even_cut(inputs.model.num_blocks, size))
            changed = replace(changed, blocks=blocks, chunks=1, schedule="1f1b")
        return changed
    return None


def _experts(setup: Setup, rules: LauncherRules, inputs: Inputs) -> Setup | None:
    del inputs
    if not rules.experts or (setup.pp > 1 and not rules.experts_in_pipeline):
        return replace(setup, ep=1)
    inside = setup.tp * (setup.shard_group if setup.one_zero else 1)
    fits = [ep for ep in range(1, setup.ep) if setup.ep % ep == 0 and inside % ep == 0]
    return replace(setup, ep=fits[-1]) if fits else None


def _expert_tp(setup: Setup, rules: LauncherRules, inputs: Inputs) -> Setup | None:
    del rules, inputs
    return replace(setup, expert_tp=1)


_REPAIRS: Final[dict[str, Repair]] = {
    "schedule": _schedule,
    "recompute": _recompute,
    "stage_layers": _cut,
    "zero": _zero,
    "shard_group": _shard_group,
    "rank_order": _order,
    "sequence_parallel": _sequence,
    "cp_comm": _context,
    "tp": _degree("tp"),
    "cp": _degree("cp"),
    "pp": _degree("pp"),
    "ep": _experts,
    "expert_tp": _expert_tp,
}
