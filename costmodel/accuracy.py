"""Measured runs against estimates: every run's error, and summaries by source.

error = estimate / measurement - 1. Memory is compared on the measurement's own basis.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Final

from costmodel.context import Memo
from costmodel.estimate import LayoutCost
from costmodel.replay import replay
from profiles.errors import InputError
from profiles.units import GB, GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from costmodel.estimate import Estimate
    from costmodel.replay import Replay
    from profiles.calibration import Calibration
    from profiles.runs import MeasuredRun

__all__ = ["TOTAL", "Judged", "Summary", "judge", "summaries"]

TOTAL: Final = "total"
FITS: Final = 1 / 3  # a run is said not to fit where that is twice as likely as not
LEAST_SWEEP: Final = 5  # timed layouts from which a sweep says something about a choice
TOO_SLOW: Final = -0.6  # error from which fp32 by mistake is likelier than anything else
CLOSE: Final = 0.02  # layouts whose times differ by less are not told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One run and its estimate; all None where it was skipped, with the reason."""

    run: MeasuredRun
    predicted_step_s: float | None = None
    interval_s: tuple[float, float] | None = None
    predicted_peak_mem_gib: float | None = None
    peak_mem_interval_gib: tuple[float, float] | None = None
    predicted_fits: bool | None = None
    fit_probability: float | None = None
    calibration: str | None = None
    skipped: str | None = None

    @property
    def error(self) -> float | None:
        """Of the step time."""
        if self.predicted_step_s is None or self.run.step_time_s is None:
            return None
        return self.predicted_step_s / self.run.step_time_s - 1

    @property
    def hint(self) -> str | None:
        """What to look at where a run is far too slow for the precision that it states."""
        if self.error is None or self.error > TOO_SLOW or self.run.precision == "fp32":
            return None
        times = 1 / (1 + self.error)
        stated = self.run.precision or "bf16"
        return f"{times:.1f} times as long as estimated: does it run in {stated}, not in fp32?"

    @property
    def covered(self) -> bool | None:
        """Whether the interval holds the measurement."""
        if self.interval_s is None or self.run.step_time_s is None:
            return None
        return self.interval_s[0] <= self.run.step_time_s <= self.interval_s[1]

    @property
    def measured_peak_mem_gib(self) -> float | None:
        """The measurement in GiB, also where its source prints GB."""
        gib = self.run.peak_mem_gib
        basis = self.run.memory_basis
        if gib is not None and ("GB" in basis or basis == "device"):
            return gib * GB / GIB
        return gib

    @property
    def memory_error(self) -> float | None:
        """Of the peak memory."""
        if self.predicted_peak_mem_gib is None or self.measured_peak_mem_gib is None:
            return None
        return self.predicted_peak_mem_gib / self.measured_peak_mem_gib - 1


def judge(
    runs: Iterable[MeasuredRun], calibration_of: Callable[[Replay], Calibration]
) -> list[Judged]:
    """Every run with its estimate under the calibration that ``calibration_of`` gives it."""
    memos: dict[int, tuple[Calibration, Memo]] = {}
    judged = []
    for run in runs:
        try:
            each = replay(run)
        except InputError as error:
            reasons = "; ".join(str(problem) for problem in error.problems)
            judged.append(Judged(run=run, skipped=reasons))
            continue
        calibration = calibration_of(each)
        _, memo = memos.setdefault(id(calibration), (calibration, Memo()))
        judged.append(_judged(each, calibration, memo))
    return judged


def _judged(each: Replay, calibration: Calibration, memo: Memo) -> Judged:
    cost = LayoutCost(each.context(calibration, memo), each.layout)
    estimate = cost.estimate(min_fit=FITS)
    step_s = each.step_s(calibration, memo)
    fast, slow = (end / estimate.step_s for end in estimate.interval_s)
    basis = _basis(estimate, each.run.memory_basis)
    spread = [end / estimate.peak_mem_bytes for end in estimate.peak_mem_interval_bytes]
    return Judged(
        run=each.run,
        predicted_step_s=step_s,
        interval_s=(step_s * fast, step_s * slow),
        predicted_peak_mem_gib=basis,
        peak_mem_interval_gib=(basis * spread[0], basis * spread[1]),
        predicted_fits=estimate.fits,
        fit_probability=estimate.fit_probability,
        calibration=calibration.name,
    )


def _basis(estimate: Estimate, basis: str) -> float:
    """Peak memory in GiB as the measurement means it; the device's total where it says nothing."""
    if basis == "reserved":
        return estimate.reserved_bytes / GIB
    if basis in ("", "device"):
        return estimate.peak_mem_bytes / GIB
    return estimate.allocated_bytes / GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one source; None where it has nothing to say.

    ``n`` timed and estimated runs; ``bias`` the median of errors; ``coverage`` of the 90 %
    interval. ``false_rejections``: part of the runs that worked which are said not to fit;
    ``missed_ooms``: part of those out of memory which are said to fit. ``tau``: median of Kendall's
    over sweeps of at least five timed layouts, pairs within 2 % left out; ``regret``: how much
    slower the layout is that would have been chosen than the best measured one.
    """

    n: int
    skipped: int
    must_skipped: int
    median: float | None
    p90: float | None
    mape: float | None
    bias: float | None
    coverage: float | None
    half_width: float | None
    oom_labels: int
    oom_accuracy: float | None
    false_rejections: float | None
    missed_ooms: float | None
    memory_n: int
    memory_median: float | None
    sweeps: int
    tau: float | None
    regret_mean: float | None
    regret_worst: float | None


def summaries(judged: Sequence[Judged]) -> dict[str, Summary]:
    """The summary of each source (the column ``file``), and of all runs as ``total``."""
    sources: dict[str, list[Judged]] = defaultdict(list)
    for each in judged:
        sources[each.run.file or "unnamed"].append(each)
    found = {source: _summary(own) for source, own in sorted(sources.items())}
    return {**found, TOTAL: _summary(judged)}


def _summary(judged: Sequence[Judged]) -> Summary:
    skipped = [each for each in judged if each.skipped is not None]
    errors = [each.error for each in judged if each.error is not None]
    sizes = sorted(abs(error) for error in errors)
    memory = [abs(each.memory_error) for each in judged if each.memory_error is not None]
    covered = [each.covered for each in judged if each.covered is not None]
    widths = [
        (each.interval_s[1] - each.interval_s[0]) / (2 * each.predicted_step_s)
        for each in judged
        if each.error is not None and each.interval_s and each.predicted_step_s
    ]
    worked = [each.predicted_fits for each in judged if _says(each, "ok")]
    failed = [each.predicted_fits for each in judged if _says(each, "oom")]
    right = worked.count(True) + failed.count(False)
    labels = len(worked) + len(failed) if failed else 0
    taus, regrets = _sweeps(judged)
    return Summary(
        n=len(errors),
        skipped=len(skipped),
        must_skipped=sum(each.run.always_predicted for each in skipped),
        median=_median(sizes),
        p90=sizes[math.ceil(0.9 * len(sizes)) - 1] if sizes else None,
        mape=statistics.fmean(sizes) if sizes else None,
        bias=_median(errors),
        coverage=statistics.fmean(covered) if covered else None,
        half_width=_median(widths),
        oom_labels=labels,
        oom_accuracy=right / labels if labels else None,
        false_rejections=worked.count(False) / len(worked) if labels and worked else None,
        missed_ooms=failed.count(True) / len(failed) if failed else None,
        memory_n=len(memory),
        memory_median=_median(memory),
        sweeps=len(regrets),
        tau=_median(taus),
        regret_mean=statistics.fmean(regrets) if regrets else None,
        regret_worst=max(regrets, default=None),
    )


def _says(each: Judged, outcome: str) -> bool:
    return each.predicted_fits is not None and each.run.outcome == outcome


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _sweeps(judged: Sequence[Judged]) -> tuple[list[float], list[float]]:
    """Kendall's tau and regret of each sweep."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in judged:
        if each.error is not None and each.run.rank_group:
            assert each.run.step_time_s is not None
            assert each.predicted_step_s is not None
            groups[each.run.rank_group].append((each.run.step_time_s, each.predicted_step_s))
    taus, regrets = [], []
    for pairs in groups.values():
        if len(pairs) < LEAST_SWEEP:
            continue
        chosen, _ = min(pairs, key=lambda pair: pair[1])
        regrets.append(chosen / min(measured for measured, _ in pairs) - 1)
        tau = kendall_tau(pairs)
        if tau is not None:
            taus.append(tau)
    return taus, regrets


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """(concordant - discordant) / all pairs of (measured, estimated); pairs whose measurements
    are within 2 % of one another are left out. None if no pair is left.
    """
    signs = [
        1 if (a[0] - b[0]) * (a[1] - b[1]) > 0 else -1
        for a, b in combinations(pairs, 2)
        if max(a[0], b[0]) > (1 + CLOSE) * min(a[0], b[0])
    ]
    return statistics.fmean(signs) if signs else None
