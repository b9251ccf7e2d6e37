"""Where a run begins: at step 0, or behind the last whole checkpoint under its ``--out``.

A run is the same one under any layout: model, optimizer, batch, data and seed make it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from profiles.errors import InputError, Problem
from profiles.fingerprint import fingerprint

if TYPE_CHECKING:
    from pathlib import Path

    from executor.job import Job
    from planner.plan import Plan

__all__ = ["CHECKPOINTS", "changes", "check_not_done", "check_same_run", "facts_of_run"]

CHECKPOINTS: Final = "checkpoints"  # folder of an ``--out``
ANEW: Final = "or another --out, which begins anew"
CURES: Final = {
    "model": "a plan of the checkpoint's model",
    "optimizer": "a plan with that optimizer",
    "global_batch": "a plan with that batch",
    "seq_len": "a plan with that length",
    "seed": "--seed as it was",
    "data": "--data as it was",
}
MAY_CHANGE: Final = ("steps", "lr", "warmup", "weight_decay", "clip")


def facts_of_run(plan: Plan, job: Job, data: str) -> dict[str, Any]:
    """What a checkpoint keeps of its run. ``data``: which data, in words."""
    training, model = plan.inputs.training, plan.inputs.model
    return {
        "model": f"{model.name} ({fingerprint(model)[:12]})",
        "optimizer": training.optimizer.value,
        "global_batch": training.global_batch,
        "seq_len": training.seq_len,
        "seed": job.recipe.seed,
        "data": data,
        "steps": job.steps,
        **{name: getattr(job.recipe, name) for name in MAY_CHANGE[1:]},
    }


def check_same_run(found: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    """Raise ``InputError`` with all that makes a checkpoint one of another run."""
    problems = [
        Problem(
            where=str(where),
            message=f"is a checkpoint with {_words(name)} {found.get(name)}, not {wanted[name]}",
            hint=f"{cure}, {ANEW}",
        )
        for name, cure in CURES.items()
        if found.get(name) != wanted[name]
    ]
    if problems:
        raise InputError(problems)


def check_not_done(done: int, job: Job) -> None:
    """Raise ``InputError`` where there is nothing left to do."""
    if done < job.last:
        return
    message = f"has a checkpoint of step {done}, all of the {job.last} that are asked for"
    longer = "--steps" if job.stop_at is None else "--steps or --stop-at"
    hint = f"a greater {longer} goes on from it, another --out begins anew"
    raise InputError(Problem(where=str(job.out / CHECKPOINTS), message=message, hint=hint))


def changes(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What of the recipe is another now, which is allowed; in words."""
    return ", ".join(
        f"{_words(name)} {found[name]} -> {wanted[name]}"
        for name in MAY_CHANGE
        if name in found and found[name] != wanted[name]
    )


def _words(name: str) -> str:
    return name.replace("_", " ")
