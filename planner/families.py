"""Which recomputations the layers of one job may mix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodel.layout import NO_RECOMPUTE, Recompute, RecomputeKind
from planner.launchers import Mixing

if TYPE_CHECKING:
    from planner.choices import Restrictions
    from planner.launchers import LauncherRules

__all__ = ["mixed_recomputes", "selective_sets"]


def mixed_recomputes(
    rules: LauncherRules, restrictions: Restrictions, selective: list[Recompute], *, splits: bool
) -> list[tuple[Recompute, ...]]:
    """Sets of recomputations that blocks may mix, ``selective`` among them where the launcher
    knows them. None beside split backward passes (``splits``), which would compute again for each
    half.
    """
    full = Recompute(RecomputeKind.FULL)
    known = [] if splits else [*(selective if rules.selective else []), full]
    options = [
        option
        for option in (NO_RECOMPUTE, *known)
        if restrictions.allows("recompute", option.kind.value)
    ]
    if not options:
        return []
    if rules.mixing is Mixing.PER_LAYER:
        return [tuple(options)]
    if rules.mixing is Mixing.WHOLE_MODEL:
        return [(option,) for option in options]
    blocks = [option for option in (NO_RECOMPUTE, full) if option in options]
    families = [tuple(blocks)] if blocks else []
    return families + [(option,) for option in options if option.kind is RecomputeKind.SELECTIVE]


def selective_sets(*, experts: bool, stores_scores: bool) -> list[Recompute]:
    """Module sets worth trying, from cheap to thorough."""
    inner = "moe_act" if experts else "mlp"
    sets = [("layernorm",), (inner,), ("layernorm", inner)]
    if stores_scores:
        core = [tuple(sorted((*modules, "core_attn"))) for modules in sets]
        sets = [("core_attn",), *core]
    return [Recompute(RecomputeKind.SELECTIVE, tuple(sorted(modules))) for modules in sets]
