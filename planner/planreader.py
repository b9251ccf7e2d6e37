"""Plan file -> Plan: read strictly, held against its inputs, its costs computed again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from planner.inputs import Inputs, checked_inputs
from planner.launchers import LAUNCHERS
from planner.plan import MIN_FIT, Certificate, SearchFacts, plan_of
from planner.plandocument import KIND, SCHEMA_VERSION, rounded
from planner.planfile import PlanFile
from planner.planlayout import read_layout
from planner.profiled import with_profiles
from planner.restrictions import parse_restrictions
from profiles import yamlfile
from profiles.catalog import load_calibration, load_cluster, load_model
from profiles.errors import InputError, Problem
from profiles.fileschema import problem_at, validate
from profiles.fingerprint import fingerprint
from profiles.nearest import nearest
from profiles.reference import resolved_ref
from profiles.training import TrainingSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.layout import Layout
    from planner.plan import Plan
    from planner.planfile import SearchPart
    from profiles.yamlfile import Document, Mark, Place

__all__ = ["load_layout", "load_plan", "plan_in"]

ROUNDING: Final = 2e-5


def load_plan(path: str | Path, *, min_fit: float | None = None) -> Plan:
    """The plan of a file. Raises ``InputError`` with every problem of the file and its inputs.

    ``min_fit`` stands in for the file's own.
    """
    return plan_in(yamlfile.read(path), folder=Path(path).parent, min_fit=min_fit)


def load_layout(path: str | Path) -> tuple[Inputs, Layout]:
    """The inputs and the layout of a plan file, without its costs. Raises as ``load_plan``."""
    _, inputs, layout, _ = _read(yamlfile.read(path), Path(path).parent)
    return inputs.with_training(micro_batch=layout.micro_batch), layout


def plan_in(document: Document, *, folder: str | Path = ".", min_fit: float | None = None) -> Plan:
    """The plan in a document whose references are relative to ``folder``."""
    file, inputs, layout, facts = _read(document, folder)
    if min_fit is None:
        min_fit = MIN_FIT if file.search is None else file.search.space.min_fit
    plan = plan_of(inputs, layout, launcher=file.launcher, min_fit=min_fit)
    return replace(plan, search=facts, remarks=_remarks(file, plan))


def _read(
    document: Document, folder: str | Path
) -> tuple[PlanFile, Inputs, Layout, SearchFacts | None]:
    """What stands in a document, checked. Raises ``InputError`` with every problem."""
    _refuse_other_kinds(document)
    file = validate(document, PlanFile)
    problems: list[tuple[Mark, Problem]] = []
    inputs = _inputs(document, file, folder, problems)
    if file.launcher not in LAUNCHERS:
        problems.append(
            problem_at(
                document,
                ("launcher",),
                f"launcher is {file.launcher!r}",
                expected=f"one of {', '.join(LAUNCHERS)}",
                hint=nearest(file.launcher, LAUNCHERS),
            )
        )
    facts = None if file.search is None else _facts(document, file.search, problems)
    layout = read_layout(document, file, inputs, problems)
    document.raise_problems(problems)
    assert inputs is not None
    assert layout is not None
    return file, inputs, layout, facts


def _refuse_other_kinds(document: Document) -> None:
    """One line for a file that is no plan, or a plan of a later version."""
    version, kind = document.data.get("schema_version"), document.data.get("kind")
    if isinstance(kind, str) and kind != KIND:
        message = f"kind is {kind!r}"
        raise InputError(problem_at(document, ("kind",), message, expected=KIND)[1])
    if isinstance(version, int) and version > SCHEMA_VERSION:
        message = f"schema_version is {version}"
        hint = "a newer parplan wrote this file"
        expected = f"at most {SCHEMA_VERSION}"
        place = ("schema_version",)
        raise InputError(problem_at(document, place, message, expected=expected, hint=hint)[1])


class _Attempts:
    """Reads what the file refers to, keeping the problems of each."""

    def __init__(self, document: Document, problems: list[tuple[Mark, Problem]]) -> None:
        self._document, self._problems = document, problems

    def read(self, place: Place, read: Callable[[str], Any]) -> Any:
        """What ``read`` gives for what stands at ``place``, None where it cannot."""
        try:
            return read(self._document.where(place))
        except InputError as error:
            mark = self._document.mark(place)
            self._problems.extend((mark, problem) for problem in error.problems)
            return None


def _inputs(
    document: Document, file: PlanFile, folder: str | Path, problems: list[tuple[Mark, Problem]]
) -> Inputs | None:
    """The inputs that the file refers to, unless something is wrong with them."""
    attempts, own = _Attempts(document, problems), file.calibration
    model_ref, cluster_ref = (resolved_ref(part.ref, folder) for part in (file.model, file.cluster))
    file_ref = None if own.ref is None else resolved_ref(own.ref, folder)
    model = attempts.read(("model", "ref"), lambda at: load_model(model_ref, where=at))
    cluster = attempts.read(("cluster", "ref"), lambda at: load_cluster(cluster_ref, where=at))
    changed = [
        problem
        for name, value in (("model", model), ("cluster", cluster))
        if value is not None
        for problem in _changed(document, name, value, file)
    ]
    problems += changed
    if model is None or cluster is None or changed:
        return None  # what follows from another model would only confuse
    found = attempts.read(
        ("calibration",), lambda _: load_calibration(own.stack, cluster, file_ref)
    )
    if found is None:
        return None
    inputs = Inputs(
        model=model,
        cluster=cluster,
        training=TrainingSpec(**file.training.model_dump()),
        calibration=found[0],
        model_ref=model_ref,
        cluster_ref=cluster_ref,
        calibration_ref=file_ref,
        stack=own.stack,
        notes=() if found[1] is None else (found[1],),
    )
    if file.profile is not None:
        refs = [resolved_ref(ref, folder) for ref in file.profile.refs]
        inputs = attempts.read(
            ("profile", "refs"), lambda at: with_profiles(inputs, refs, where=at)
        )
        if inputs is None:
            return None
    seq_len_at = document.where(("training", "seq_len"))
    checked: Inputs | None = attempts.read(
        ("training", "precision"),
        lambda at: checked_inputs(inputs, precision_at=at, seq_len_at=seq_len_at),
    )
    return checked


def _changed(
    document: Document, name: str, value: Any, file: PlanFile
) -> list[tuple[Mark, Problem]]:
    """Whether an input is not what it was when the plan was made."""
    part, now = getattr(file, name), fingerprint(value)
    if part.sha256 == now:
        return []
    message = f"{name} {part.ref} is not what this plan was made for"
    expected = f"sha256 {part.sha256[:12]}..., it is now {now[:12]}..."
    hint = "plan again, or restore the input"
    return [problem_at(document, (name, "sha256"), message, expected=expected, hint=hint)]


def _facts(
    document: Document, part: SearchPart, problems: list[tuple[Mark, Problem]]
) -> SearchFacts | None:
    """What the search found out, with its restrictions checked like flags."""
    space = part.space

    def texts(values: dict[str, list[str]]) -> list[str]:
        return [f"{name}={','.join(own)}" for name, own in values.items()]

    try:
        restrictions = parse_restrictions(
            texts(space.fix),
            [f"{name}={most}" for name, most in space.max.items()],
            texts(space.exclude),
            tp_across_nodes=space.tp_across_nodes,
        )
    except InputError as error:
        for problem in error.problems:
            place = ("search", "space", problem.where.removeprefix("--"))
            told = replace(problem, where=document.where(place))
            problems.append((document.mark(place), told))
        return None
    return SearchFacts(
        restrictions=restrictions,
        candidates=part.candidates,
        pruned=part.pruned,
        refused=part.refused,
        bound_s=part.bound_s,
        gap=part.gap,
        proven=part.proven,
        complete=part.complete,
        objective=part.objective,
        equal_degrees_s=part.equal_degrees_s,
        certificate=None if part.certificate is None else Certificate(**vars(part.certificate)),
    )


def _remarks(file: PlanFile, plan: Plan) -> tuple[str, ...]:
    """Where the costs of the file are not those of today."""
    remarks = []
    profile = plan.inputs.profile
    if profile is not None and file.profile and file.profile.sha256 != fingerprint(profile):
        remarks.append(f"the profile {file.profile.name} has changed since this plan was made")
    elif file.calibration.sha256 != fingerprint(plan.inputs.calibration):
        remarks.append(
            f"the calibration {file.calibration.name} has changed since this plan was made"
        )
    if file.estimate is not None:
        for name, unit in (("step_s", "s"), ("peak_mem_bytes", "bytes")):
            stored, now = getattr(file.estimate, name), rounded(getattr(plan.estimate, name))
            if not math.isclose(stored, now, rel_tol=ROUNDING):
                remarks.append(f"{name} is {stored} {unit} in the file and {now} {unit} today")
    return tuple(remarks)
