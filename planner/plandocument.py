"""A plan as text: the document, the YAML, and how it reaches the disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from costmodel.layout import describe_ranks
from planner.plan import layer_ranges
from profiles.fingerprint import fingerprint
from profiles.outputfile import save_text
from profiles.reference import kept_ref

if TYPE_CHECKING:
    from costmodel.layout import Chunk, Layout, Mesh, Recompute, Strategy
    from planner.choices import Restrictions
    from planner.inputs import Inputs
    from planner.plan import Plan, SearchFacts
    from profiles.model import ModelSpec

__all__ = [
    "KIND",
    "SCHEMA_VERSION",
    "compact_ranks",
    "layout_text",
    "plan_document",
    "plan_text",
    "restrictions_document",
    "rounded",
    "save_plan",
]

KIND: Final = "parallel-plan"
SCHEMA_VERSION: Final = 1
DIGITS: Final = 6
MOST_RANGES: Final = 4


def plan_document(plan: Plan, *, folder: str | Path = ".") -> dict[str, Any]:
    """The plan as plain data, in the order of the file. ``folder`` is where the file will stand:
    paths of inputs are said relative to it.
    """
    document = _choices(plan.inputs, plan.layout, plan.launcher, folder)
    document["estimate"] = _estimate(plan)
    if plan.search is not None:
        document["search"] = _search(plan.search, plan.min_fit)
    return document


def _choices(inputs: Inputs, layout: Layout, launcher: str, folder: str | Path) -> dict[str, Any]:
    """What a plan file says of inputs and layout."""
    names = {strategy: _letters(n) for n, strategy in enumerate(layout.strategies)}
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "model": {
            "name": inputs.model.name,
            "ref": kept_ref(inputs.model_ref or inputs.model.name, folder),
            "layers": inputs.model.num_blocks,
            "sha256": fingerprint(inputs.model),
        },
        "cluster": {
            "name": inputs.cluster.name,
            "ref": kept_ref(inputs.cluster_ref or inputs.cluster.name, folder),
            "num_gpus": inputs.cluster.num_gpus,
            "used_gpus": layout.mesh.num_ranks,
            "sha256": fingerprint(inputs.cluster),
        },
        "training": _training(inputs, layout),
        "calibration": _calibration(inputs, folder),
        **_profile(inputs, folder),
        "launcher": launcher,
        "rank_order": [axis.value for axis in layout.mesh.order],
        "pipeline": {
            "num_stages": layout.num_stages,
            "num_chunks": layout.num_chunks,
            "schedule": layout.schedule,
            "num_microbatches": layout.num_microbatches,
        },
        "chunks": [_chunk(inputs.model, layout.mesh, each, names) for each in layout.chunks],
        "strategies": {name: _strategy(strategy) for strategy, name in names.items()},
    }


def plan_text(plan: Plan, *, folder: str | Path = ".") -> str:
    """The plan file. The same plan gives the same bytes."""
    return _text(plan_document(plan, folder=folder))


def layout_text(
    inputs: Inputs, layout: Layout, *, launcher: str = "any", folder: str | Path = "."
) -> str:
    """The plan file of a layout that nobody has estimated yet."""
    return _text(_choices(inputs, layout, launcher, folder))


def _text(document: dict[str, Any]) -> str:
    lines = []
    for key, value in document.items():
        if key == "chunks":
            lines += [f"{key}:", *(f"  - {_flow(each)}" for each in value)]
        elif key in ("strategies", "search"):
            lines += [f"{key}:", *(f"  {name}: {_flow(own)}" for name, own in value.items())]
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def save_plan(plan: Plan, path: str | Path, *, force: bool = False) -> None:
    """Write the plan file, whole or not at all. Raises ``InputError`` where it cannot."""
    text = plan_text(plan, folder=Path(path).parent)
    save_text(text, path, force=force)


def rounded(value: Any) -> Any:
    """Floats with six significant digits, in whatever they stand."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


def compact_ranks(mesh: Mesh, stage: int) -> str:
    """Ranks of a stage: ``0-31``, ``0-7,32-39``, or ``0-7,128-135,...,896-903``."""
    ranges = mesh.stage_ranks(stage)
    if len(ranges) <= MOST_RANGES:
        return describe_ranks(ranges)
    return f"{describe_ranks(ranges[:2])},...,{describe_ranks(ranges[-1:])}"


def _letters(number: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("A") + rest) + text
    return text


def _training(inputs: Inputs, layout: Layout) -> dict[str, Any]:
    training = inputs.training
    return {
        "global_batch": training.global_batch,
        "seq_len": training.seq_len,
        "micro_batch": layout.micro_batch,
        "precision": training.precision.value,
        "optimizer": training.optimizer.value,
        "grad_dtype": training.grad_dtype.value,
        "attention": training.attention.value,
        "fused_kernels": training.fused_kernels,
    }


def _calibration(inputs: Inputs, folder: str | Path) -> dict[str, Any]:
    part: dict[str, Any] = {"name": inputs.calibration.name}
    if inputs.calibration_ref is not None:
        part["ref"] = kept_ref(inputs.calibration_ref, folder)
    elif inputs.stack is not None:
        part["stack"] = inputs.stack
    return {**part, "sha256": fingerprint(inputs.calibration)}


def _profile(inputs: Inputs, folder: str | Path) -> dict[str, Any]:
    if inputs.profile is None:
        return {}
    refs = [kept_ref(ref, folder) for ref in inputs.profile_refs]
    own = {"name": inputs.profile.name, "refs": refs, "sha256": fingerprint(inputs.profile)}
    return {"profile": own}


def _chunk(
    model: ModelSpec, mesh: Mesh, chunk: Chunk, names: dict[Strategy, str]
) -> dict[str, Any]:
    return {
        "stage": chunk.stage,
        "chunk": chunk.chunk,
        "ranks": _plain(compact_ranks(mesh, chunk.stage)),
        "layers": [
            {"layers": _plain(layers), "strategy": names[span.strategy]}
            for span in chunk.spans
            for layers in layer_ranges(model, span.first, span.stop)
        ],
    }


def _plain(text: str) -> str | int:
    """A single number as a number, so that it stands without quotes."""
    return int(text) if text.isdigit() else text


def _strategy(strategy: Strategy) -> dict[str, Any]:
    degrees = ("tp", "cp", "ep", "expert_tp", "dp", "zero", "shard_group", "sequence_parallel")
    own = {name: getattr(strategy, name) for name in degrees}
    own["recompute"] = _recompute(strategy.recompute)
    return {**own, "cp_comm": strategy.cp_comm.value} if strategy.cp > 1 else own


def _recompute(recompute: Recompute) -> dict[str, Any]:
    kind = {"kind": recompute.kind.value}
    return {**kind, "modules": list(recompute.modules)} if recompute.modules else kind


def _estimate(plan: Plan) -> dict[str, Any]:
    own = plan.estimate
    names = (
        "step_s",
        "interval_s",
        "tokens_per_s_per_gpu",
        "mfu",
        "peak_mem_bytes",
        "fit_probability",
        "knowledge",
        "calibration",
    )
    values: dict[str, Any] = rounded({name: getattr(own, name) for name in names})
    return values


def _search(facts: SearchFacts, min_fit: float) -> dict[str, Any]:
    part = {
        "objective": facts.objective,
        "space": {**restrictions_document(facts.restrictions), "min_fit": rounded(min_fit)},
        "candidates": facts.candidates,
        "pruned": dict(sorted(facts.pruned.items())),
        "refused": dict(sorted(facts.refused.items())),
        "bound_s": rounded(facts.bound_s),
        "gap": rounded(facts.gap),
        "proven": facts.proven,
        "complete": facts.complete,
    }
    if facts.equal_degrees_s is not None:
        part["equal_degrees_s"] = rounded(facts.equal_degrees_s)
    if facts.certificate is not None:
        own = facts.certificate
        seconds = rounded({"objective_s": own.objective_s, "bound_s": own.bound_s})
        part["certificate"] = {"solver": own.solver, **seconds}
        if own.note:
            part["certificate"]["note"] = own.note
    return part


def restrictions_document(restrictions: Restrictions) -> dict[str, Any]:
    """What a search was restricted to; empty parts are left out."""
    parts = {
        "fix": {name: _ordered(own) for name, own in sorted(restrictions.fixed.items())},
        "max": dict(sorted(restrictions.at_most.items())),
        "exclude": {name: _ordered(own) for name, own in sorted(restrictions.excluded.items())},
    }
    kept: dict[str, Any] = {name: part for name, part in parts.items() if part}
    return {**kept, "tp_across_nodes": restrictions.tp_across_nodes}


def _ordered(values: frozenset[str]) -> list[str | int]:
    return [_plain(value) for value in sorted(values, key=lambda v: (len(v), v))]


def _flow(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump([value], default_flow_style=True, width=10**9, sort_keys=False)
    return text.strip().removeprefix("[").removesuffix("]")
