"""Cross-validated accuracy on measured runs: python -m benchmarks.accuracy [--write] [FILE.csv]

Every run is predicted three times: by calibrations that have not seen its source's model on its
device (ten folds); by calibrations that have not seen its source; and by those, calibrated on five
other runs of its source's stack. Prints the tables by source; --write also writes the shipped
calibrations, fitted to all runs, and records the figures that the tests compare with. Devices are
fitted in parallel.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from costmodel.accuracy import Judged, summaries
from costmodel.library import Leaf, Library
from costmodel.validation import fit_section, judge_by, judge_unseen, slug, usable, validate
from profiles.calibrations import datasheet
from profiles.calibrationwriter import calibration_text
from profiles.runs import published_runs, read_runs
from reports import accuracy_report, print_report

ROOT = Path(__file__).parents[1]
FULL = ROOT.parent / "shared" / "runs" / "measured_runs.csv"
SHELF = ROOT / "profiles" / "data" / "calibrations"
RECORD = ROOT / "benchmarks" / "accuracy.json"
BY_HAND = "datasheet"
HEADINGS = ("runs", "median", "P90", "bias", "in the interval", "peak memory", "OOM labels")
HEADINGS += ("tau", "regret")
FEW = 5

Figures = dict[str, dict[str, float | int | None]]


class Part(NamedTuple):
    """The runs of one device, judged three times, and the files of its calibrations."""

    folds: list[Judged]
    unseen: list[Judged]
    few: list[Judged]
    files: list[tuple[str, str]]


def judged_device(path: str, device: str) -> Part:
    replays = [each for each in usable(read_runs(path).runs) if each.device == device]
    library = Library(replays, datasheet())
    runs = [each.run for each in replays]
    return Part(
        folds=judge_by(library, runs, seen={run.id for run in runs}),
        unseen=judge_unseen(library, replays),
        few=judge_unseen(library, replays, few=FEW),
        files=[file_of(library, leaf) for leaf in library.nodes],
    )


def figures(judged: list[Judged]) -> Figures:
    return {source: asdict(own) for source, own in summaries(judged).items()}


def shipped(path: str) -> Figures:
    """Figures with the shipped calibrations, in a process that has not read older ones."""
    return figures(validate(read_runs(path).runs))


def file_of(library: Library, leaf: Leaf) -> tuple[str, str]:
    """Name and text of the calibration of a leaf."""
    node = library.nodes[leaf]
    calibration, _ = library.find(leaf)
    models = sorted({each.run.model for each in node.replays})
    sources = sorted({each.run.source.split(" ")[0] for each in node.replays if each.run.source})
    what = (
        f"{len(models)} models: {', '.join(models)}" if len(models) < 9 else f"{len(models)} models"
    )
    above = library.above(leaf)
    prior = "datasheet" if above is None else slug(*above)
    errors = sorted(abs(float(r)) for r in node.residuals)
    named = replace(
        calibration,
        name=slug(*leaf),
        knowledge="calibrated",
        device=leaf.device,
        stack=leaf.stack,
        source=(
            f"fitted to {len(node.replays)} published runs of {what}"
            f" ({'; '.join(sources[:4])}{'; ...' if len(sources) > 4 else ''}), 2026-11;"
            f" median error {100 * errors[len(errors) // 2]:.1f} % on models left out of the fit"
        ),
    )
    return named.name, calibration_text(named, fit_section(node.fit, prior))


def unseen_markdown(unseen: Figures, few: Figures) -> str:
    """The table of the error budget on stacks that no calibration has seen."""
    head = "| source | runs | median | P90 | bias | in the interval"
    head += f" | after {FEW} runs: median | P90 | in the interval |"
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for source, own in unseen.items():
        if own["n"] < FEW:
            continue
        after = few.get(source, {})
        cells = [own[name] for name in ("median", "p90", "bias", "coverage")]
        cells += [after.get(name) for name in ("median", "p90", "coverage")]
        words = ["" if cell is None else f"{100 * cell:.1f} %" for cell in cells]
        lines.append(f"| {' | '.join([source, str(own['n']), *words])} |")
    return "\n".join(lines)


def markdown(found: Figures) -> str:
    """The table of the README: one line a source with at least five timed runs."""
    lines = [
        f"| source | {' | '.join(HEADINGS)} |",
        f"| {' | '.join(['---'] * (1 + len(HEADINGS)))} |",
    ]
    for source, own in found.items():
        if own["n"] < 5:
            continue
        columns = ("median", "p90", "bias", "coverage", "memory_median", "oom_accuracy")
        cells = [own[column] for column in columns]
        words = ["" if cell is None else f"{100 * cell:.1f} %" for cell in cells]
        tau = "" if own["tau"] is None else f"{own['tau']:.2f}"
        regret = "" if own["regret_mean"] is None else f"{100 * own['regret_mean']:.1f} %"
        lines.append(f"| {' | '.join([source, str(own['n']), *words, tau, regret])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", default=str(FULL))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    runs = read_runs(asked.file).runs
    counts: dict[str, int] = {}
    for each in usable(runs):
        counts[each.device] = counts.get(each.device, 0) + 1
    devices = sorted(counts, key=lambda device: -counts[device])
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(judged_device, [asked.file] * len(devices), devices))
    judged = [each for part in parts for each in part.folds]
    unseen = figures([each for part in parts for each in part.unseen])
    few = figures([each for part in parts for each in part.few])
    print_report(accuracy_report(judged, runs=asked.file))
    print(markdown(figures(judged)))
    print(unseen_markdown(unseen, few))
    if asked.write:
        for old in SHELF.glob("*.yaml"):
            if old.stem != BY_HAND:
                old.unlink()
        for name, text in (file for part in parts for file in part.files):
            (SHELF / f"{name}.yaml").write_text(text, encoding="utf-8")
        with ProcessPoolExecutor(1) as pool:
            record = {
                "cross-validated": figures(judged),
                "unseen stack": unseen,
                f"after {FEW} runs": few,
                "full": pool.submit(shipped, asked.file).result(),
                "shipped table": pool.submit(shipped, str(published_runs())).result(),
            }
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
