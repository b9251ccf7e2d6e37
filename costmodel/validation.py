"""``validate`` and ``calibrate``: by which calibration a run is judged, and how one is fitted."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from costmodel.accuracy import TOTAL, judge, summaries
from costmodel.fitting import LEAST_RUNS, fit
from costmodel.library import Library, held_out, leaf_of
from costmodel.replay import replay
from profiles.calibrations import datasheet, nearest_calibration
from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from costmodel.accuracy import Judged
    from costmodel.fitting import Fit
    from costmodel.replay import Replay
    from profiles.calibration import Calibration
    from profiles.runs import MeasuredRun

__all__ = [
    "Calibrated",
    "accepted",
    "calibrate",
    "fit_section",
    "judge_by",
    "slug",
    "usable",
    "validate",
]

MOST_SKIPPED: Final = 0.02  # of the runs that must be predicted


def validate(
    runs: Sequence[MeasuredRun],
    *,
    calibration: Calibration | None = None,
    calibrate_on: Sequence[MeasuredRun] | None = None,
    tell: Callable[[str], None] | None = None,
) -> list[Judged]:
    """Judge the runs: by one calibration, by those fitted to ``calibrate_on`` (a run that is among
    them by a fit that has not seen its source's model on its device), or by those shipped.
    ``tell`` hears which fits are made, or which stacks have no calibration of their own.
    """
    if calibration is not None:
        return judge(runs, lambda _: calibration)
    if calibrate_on is None:
        return judge(runs, _shipped(tell))
    library = Library(usable(calibrate_on), datasheet(), on_progress=tell)
    return judge_by(library, runs, seen={run.id for run in calibrate_on})


def _shipped(tell: Callable[[str], None] | None) -> Callable[[Replay], Calibration]:
    """The nearest shipped calibration of a run; what it lacks is told once."""
    found: dict[object, Calibration] = {}

    def of(each: Replay) -> Calibration:
        leaf = leaf_of(each)
        if leaf not in found:
            found[leaf], note = nearest_calibration(leaf.device, leaf.stack)
            if note is not None and tell is not None:
                tell(note)
        return found[leaf]

    return of


def judge_by(library: Library, runs: Sequence[MeasuredRun], *, seen: set[str]) -> list[Judged]:
    """Judge the runs by a library; those ``seen`` by its fits without their fold."""
    found: dict[object, Calibration] = {}

    def of(each: Replay) -> Calibration:
        fold = held_out(each) if each.run.id in seen else None
        key = (leaf_of(each), fold)
        if key not in found:
            found[key] = library.find(leaf_of(each), fold)[0]
        return found[key]

    return judge(runs, of)


def usable(runs: Sequence[MeasuredRun]) -> list[Replay]:
    """The runs that a fit may learn from: fully stated, to be trusted."""
    found = []
    for run in runs:
        if not _teaches(run):
            continue
        try:
            found.append(replay(run))
        except InputError:
            continue
    return found


def _teaches(run: MeasuredRun) -> bool:
    """Whether a run says enough. What a user's own file leaves out counts as stated."""
    return (
        run.full_config is not False and run.trust != "low" and run.mode in ("", "pretrain", "sft")
    )


def accepted(judged: Sequence[Judged], tolerance: float | None) -> bool:
    """Whether the median error of step times is within ``tolerance`` (None: whatever it is), and
    at most 2 % of the runs that must be predicted were skipped.
    """
    must = [each for each in judged if each.run.always_predicted]
    if sum(each.skipped is not None for each in must) > MOST_SKIPPED * len(must):
        return False
    median = summaries(judged)[TOTAL].median
    return tolerance is None or median is None or median <= tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A fitted calibration, the runs it was fitted to, and how it came about."""

    calibration: Calibration
    replays: tuple[Replay, ...]
    fit: Fit
    prior: str
    notes: tuple[str, ...]


def calibrate(
    runs: Sequence[MeasuredRun], *, device: str | None, stack: str | None, name: str, shown: str
) -> Calibrated:
    """Fit the efficiencies of one device and stack. Raises ``InputError`` where the runs do not
    belong to one, or are fewer than three.
    """
    replays, notes = [], []
    for run in runs:
        try:
            each = replay(run)
        except InputError as error:
            notes += [f"left out: {problem}" for problem in error.problems]
            continue
        of_stack = stack is None or stack.casefold() == run.release.casefold()
        if run.step_time_s is not None and device in (None, each.device) and of_stack:
            replays.append(each)
    leaf = _only_leaf(replays, shown)
    prior, note = nearest_calibration(leaf.device, leaf.stack)
    found = fit(replays, prior)
    errors = sorted(abs(error) for error in found.residuals)
    spread = max(0.03, 1.65 * errors[len(errors) // 2] * 1.5)
    calibration = replace(
        found.calibration,
        name=name,
        knowledge="calibrated",
        device=leaf.device,
        stack=leaf.stack,
        source=f"fitted to {len(replays)} runs of {shown}",
        efficiencies=replace(
            found.calibration.efficiencies, step_time_90=_interval(found, prior, spread)
        ),
    )
    if note is not None:
        notes.append(f"prior: {note}")
    notes += [
        f"{each} is not determined by these runs: as in the prior" for each in found.undetermined
    ]
    return Calibrated(
        calibration=calibration,
        replays=tuple(replays),
        fit=found,
        prior=prior.name,
        notes=tuple(notes),
    )


def _interval(found: Fit, prior: Calibration, spread: float) -> tuple[float, float]:
    """Between the prior's interval and what the residuals say, by the number of runs."""
    share = len(found.residuals) / (len(found.residuals) + 12)
    fast, slow = prior.efficiencies.step_time_90
    own = 2.718281828 ** (-spread), 2.718281828**spread
    return min(0.99, fast ** (1 - share) * own[0] ** share), max(
        1.01, slow ** (1 - share) * own[1] ** share
    )


def _only_leaf(replays: Sequence[Replay], shown: str) -> Any:
    counts: dict[Any, int] = defaultdict(int)
    for each in replays:
        counts[leaf_of(each)] += 1
    if len(counts) == 1 and len(replays) >= LEAST_RUNS:
        return next(iter(counts))
    have = ", ".join(f"{n} of {leaf.stack} on {leaf.device}" for leaf, n in sorted(counts.items()))
    expected = f"at least {LEAST_RUNS} timed runs of one device and one stack"
    hint = "choose with --device and --stack" if len(counts) > 1 else ""
    raise InputError(
        Problem(where=shown, message=f"has {have or 'no timed run'}", expected=expected, hint=hint)
    )


def fit_section(found: Fit, prior: str) -> dict[str, Any]:
    """What the calibration's file says of its fit."""
    errors = sorted(abs(error) for error in found.residuals)
    return {
        "prior": prior,
        "num_runs": len(errors),
        "median_error": float(f"{errors[len(errors) // 2]:.3g}"),
        "p90_error": float(f"{errors[max(0, -(-9 * len(errors) // 10) - 1)]:.3g}"),
        "undetermined": list(found.undetermined),
    }


def slug(device: str, stack: str) -> str:
    """The name of a calibration: device and stack in lower case, with hyphens."""
    return re.sub(r"[^a-z0-9.]+", "-", f"{device}-{stack}".lower()).strip("-")
