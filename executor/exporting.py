"""A plan as files of a launcher; or which of its decisions the launcher cannot express."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from executor.launchers.job import Job
from executor.launchers.modelfacts import unsaid
from executor.launchers.registry import launcher
from executor.launchers.setup import setup_of
from planner.expressible import inexpressible
from planner.planreader import load_layout
from profiles.errors import ExitCode, InputError, ParplanError, Problem
from profiles.outputfile import save_text

if TYPE_CHECKING:
    from costmodel.layout import Layout
    from planner.inputs import Inputs
    from planner.rules import BrokenRule

__all__ = ["Exported", "InexpressibleError", "export_layout", "export_plan", "save_files"]


class InexpressibleError(ParplanError):
    """The launcher cannot express some decisions of the plan; ``nearest`` is how to plan one that
    it can, and ``broken`` are the decisions.
    """

    exit_code = ExitCode.NO

    def __init__(self, name: str, broken: list[BrokenRule], nearest: str) -> None:
        """Name the decisions, each with what would do."""
        self.broken, self.nearest = broken, nearest
        lines = [f"{name} cannot express this plan:"]
        for each in broken:
            cure = f"; it can have {each.valid}" if each.valid else ""
            lines.append(f"  {each.choice}: {each.message}{cure}")
        super().__init__("\n".join([*lines, f"nearest plan that it can: {nearest}"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Files by name, and what the user should know of them."""

    files: dict[str, str]
    notes: tuple[str, ...]


def export_plan(path: str | Path, to: str, *, version: str | None = None) -> Exported:
    """A plan file for a launcher. Raises ``InputError`` for what cannot be read, and
    ``InexpressibleError`` for what the launcher cannot express.
    """
    inputs, layout = load_layout(path)
    return export_layout(inputs, layout, to, version=version, name=Path(path).stem)


def export_layout(
    inputs: Inputs, layout: Layout, to: str, *, version: str | None = None, name: str = "plan"
) -> Exported:
    """A layout for a launcher, as ``export_plan``."""
    found, own_version = launcher(to, version)
    broken = inexpressible(to, inputs, layout)
    if broken:
        raise InexpressibleError(to, broken, _nearest(to, inputs, layout))
    job = Job(inputs=inputs, setup=setup_of(inputs.model, layout), name=name)
    files = found.write(job, own_version)
    return Exported(files=files, notes=tuple(_notes(job, to)))


def _notes(job: Job, to: str) -> list[str]:
    """What the launcher's files do not say of the model, and which GPUs they leave unused."""
    notes = []
    missing = unsaid(job.model)
    if missing and to == "megatron":
        notes.append(f"the arguments do not say of the model: {'; '.join(missing)}")
    used, total = job.setup.num_ranks, job.inputs.cluster.num_gpus
    if used < total:
        notes.append(f"for {used} of the cluster's {total} GPUs")
    return notes


def _nearest(to: str, inputs: Inputs, layout: Layout) -> str:
    """The nearest layout that the launcher can express, with its cost beside this one's, and the
    command that plans the best of all.
    """
    from executor.nearest import nearest_layout  # noqa: PLC0415 - where it is refused only
    from planner.plan import layout_choices, plan_of  # noqa: PLC0415 - as above

    run = inputs.training
    command = (
        f"parplan plan --model {inputs.model_ref} --cluster {inputs.cluster_ref} "
        f"--global-batch {run.global_batch} --seq-len {run.seq_len} --launcher {to}"
    )
    near = nearest_layout(to, inputs, layout)
    if near is None:
        return f"changing these choices one by one leads to none; the best of all: {command}"
    before, after = (layout_choices(inputs.model, each) for each in (layout, near))
    changes = "".join(
        f"\n  {name}: {before[name]} -> {after[name]}"
        for name in before
        if before[name] != after[name]
    )
    ours, theirs = (plan_of(inputs, each).estimate for each in (layout, near))
    fits = "fits" if theirs.fits else "does not fit"
    cost = f"{theirs.step_s:.3g} s a step instead of {ours.step_s:.3g} s, {fits}"
    return f"{cost}{changes}\nbest of all that it can: {command}"


def save_files(files: dict[str, str], folder: str | Path, *, force: bool = False) -> list[str]:
    """Write the files into a folder, which is made where its parent exists: all or none. Raises
    ``InputError`` where one is in the way or nothing can be written.
    """
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise InputError(Problem(where=str(target), message="is a file", expected="a folder"))
    parent = target if target.exists() else target.parent
    if not parent.is_dir():
        message = f"cannot be made: there is no folder {parent}"
        raise InputError(Problem(where=str(target), message=message))
    if not os.access(parent, os.W_OK):
        message = f"cannot be written: the folder {parent} is read-only"
        raise InputError(Problem(where=str(target), message=message))
    there = [name for name in files if (target / name).exists()]
    if there and not force:
        hint = "--force overwrites them"
        message = f"has {', '.join(there)} already"
        raise InputError(Problem(where=str(target), message=message, hint=hint))
    target.mkdir(exist_ok=True)
    for name, text in files.items():
        save_text(text, target / name, force=True)
    return [str(target / name) for name in files]
