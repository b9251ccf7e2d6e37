"""``validate`` and ``calibrate``: by which calibration a run is judged, and how one is fitted."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from costmodel.accuracy import TOTAL, judge, summaries
from costmodel.context import Memo
from costmodel.fitting import LEAST_RUNS, fit
from costmodel.intervals import Scale, known_stack
from costmodel.library import Leaf, Library, held_out, leaf_of
from costmodel.parameters import usual
from costmodel.replay import replay, seen_in
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
    "judge_unseen",
    "slug",
    "usable",
    "validate",
]

LEAST_SPREAD: Final = 0.03  # in the logarithm
MEDIAN_TO_90: Final = 2.5  # from the median error in the fit to 90 % of the errors outside it
PRIOR_RUNS: Final = 12  # that the usual interval stands for
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


def judge_unseen(library: Library, replays: Sequence[Replay], *, few: int = 0) -> list[Judged]:
    """Judge every run by a calibration that has not seen its source, as a user of another stack
    meets it. With ``few``, each of the source's stacks on a device is first calibrated on so many
    of its runs, evenly spaced in their order; these are not judged, nor are stacks of no more.
    """
    groups: dict[tuple[Leaf, str], list[Replay]] = defaultdict(list)
    for each in replays:
        if each.run.step_time_s is not None:
            groups[leaf_of(each), each.run.file].append(each)
    judged: list[Judged] = []
    for (leaf, source), own in groups.items():
        calibration, _ = library.find(leaf, source)
        shown = {len(own) * (2 * i + 1) // (2 * few) for i in range(few)}
        if few and len(own) > few:
            learnt = [own[i] for i in sorted(shown)]
            calibration = _refined(fit(learnt, calibration), calibration, learnt)
        rest = [each.run for i, each in enumerate(own) if i not in shown]
        judged += judge(rest, lambda _, found=calibration: found)  # type: ignore[misc]
    return judged


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
    found = fit(replays, usual(prior) if prior.knowledge == "datasheet" else prior)
    calibration = replace(
        _refined(found, prior, replays),
        name=name,
        knowledge="calibrated",
        device=leaf.device,
        stack=leaf.stack,
        source=f"fitted to {len(replays)} runs of {shown}",
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


def _refined(found: Fit, prior: Calibration, replays: Sequence[Replay]) -> Calibration:
    """A fit to some runs with an interval between what is usual after so many runs of a stack that
    the prior's interval was made for, and what its residuals say.
    """
    memo, fitted = Memo(), replace(found.calibration, seen=None)
    scales = [each.scale(fitted, memo) for each in replays]
    errors = [abs(error) / scale for error, scale in zip(found.residuals, scales, strict=True)]
    fast, slow = prior.efficiencies.step_time_90
    usual = known_stack(len(errors), Scale.reaching(math.log(slow / fast) / 2))
    own = max(LEAST_SPREAD, MEDIAN_TO_90 * statistics.median(errors))
    share = len(errors) / (len(errors) + PRIOR_RUNS)
    end = math.exp(usual.reach * (1 - share) + own * share)
    efficiencies = replace(
        found.calibration.efficiencies,
        step_time_90=(1 / end, end),
        step_time_varies=share + (1 - share) * usual.varies,
    )
    return replace(found.calibration, efficiencies=efficiencies, seen=seen_in(replays))


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
