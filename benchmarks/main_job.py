"""CPU seconds and memory of the main job, beside a fixed numpy loop of the same run.

    python -m benchmarks.main_job [--runs 3] [--job NAME] [--format text|json]

Machines differ and are shared, so the figure to track is the ratio of a job's CPU seconds to the
reference loop's. ``candidates`` is the size of the unpruned space, before cuts and recomputation of
single layers. The limits are those that the project has set itself on two cores of a server.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LONG = "--seq-len 8192 --global-batch"
JOBS: dict[str, tuple[str, float | None]] = {
    "llama3-70b on 128 H100": (
        f"--model llama3-70b --cluster 16x8xh100-80g {LONG} 1024",
        2.5,
    ),
    "llama3-405b on 16,384 H100": (
        f"--model llama3-405b --cluster 2048x8xh100-80g {LONG} 2048",
        6.0,
    ),
    "llama3-405b on 512 H100": (
        f"--model llama3-405b --cluster 64x8xh100-80g {LONG} 2048",
        None,
    ),
    "gpt3-175b on 1,024 A100": (
        "--model gpt3-175b --cluster 128x8xa100-80g --seq-len 2048 --global-batch 1536",
        3.0,
    ),
    "gemma3-27b on 64 H100": (
        f"--model gemma3-27b --cluster 8x8xh100-80g {LONG} 512",
        None,
    ),
    "gpt-oss-120b on 128 H100": (
        f"--model gpt-oss-120b --cluster 16x8xh100-80g {LONG} 1024",
        None,
    ),
    "deepseek-v3 on 2,048 H800": (
        "--model deepseek-v3 --cluster 256x8xh800-80g --seq-len 4096 --global-batch 15360",
        10.0,
    ),
}
LIMIT_MB = 300


def reference_s() -> float:
    """CPU seconds of a fixed loop: 100 products of 256 x 256 matrices, 20,000 small sums."""
    import numpy as np  # noqa: PLC0415 - the jobs are started without it

    generator = np.random.default_rng(0)
    matrix = generator.standard_normal((256, 256))
    start = time.process_time()
    total = 0.0
    for _ in range(100):
        matrix = matrix @ matrix
        matrix /= np.abs(matrix).max()
    for step in range(20_000):
        total += float(matrix[step % 256].sum())
    assert total == total  # noqa: PLR0124 - not a number would mean that nothing was computed
    return time.process_time() - start


def measure(arguments: list[str], answer: str = os.devnull) -> tuple[float, float]:
    """(CPU seconds, peak MB) of one process of its own, which writes to the file ``answer``."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(answer, os.O_WRONLY | os.O_TRUNC), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606
    _, status, usage = os.wait4(child, 0)
    if status != 0:
        raise SystemExit(f"{arguments} ended with status {status}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


def parplan(*arguments: str) -> list[str]:
    return ["-c", "import sys, cli; sys.argv[0] = 'parplan'; cli.main()", *arguments]


def row_of(
    name: str, what: str, limit_s: float | None, runs: int, reference: float
) -> dict[str, Any]:
    """One line of the table: the least CPU time of some runs, and what they showed."""
    arguments = parplan("plan", *what.split(), "--format", "json")
    with tempfile.NamedTemporaryFile() as answer:
        measured = [measure(arguments, answer.name) for _ in range(runs)]
        search = json.loads(Path(answer.name).read_text())["search"]
    cpu = min(run[0] for run in measured)
    return {
        "job": name,
        "cpu_s": round(cpu, 3),
        "limit_s": limit_s,
        "ratio": round(cpu / reference, 2),
        "peak_mb": round(max(run[1] for run in measured)),
        "limit_mb": LIMIT_MB,
        "candidates": search["candidates"],
        "gap": search["gap"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="runs of each job; the least counts")
    parser.add_argument("--job", default="", help="only jobs whose name holds this")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    options = parser.parse_args()
    reference = min(reference_s() for _ in range(options.runs))
    rows = [
        row_of(name, *job, options.runs, reference)
        for name, job in JOBS.items()
        if options.job in name
    ]
    click = min(measure(["-c", "import click"])[0] for _ in range(options.runs))
    own = min(measure(parplan("--help"))[0] for _ in range(options.runs))
    help_row = {"job": "parplan --help / import click", "ratio": round(own / click, 2)}
    if options.format == "json":
        print(json.dumps({"reference_s": reference, "jobs": rows, "help": help_row}, indent=2))
        return
    print(f"reference loop: {reference:.3f} CPU s")
    print(
        f"{'job':28} {'CPU s':>6} {'limit':>6} {'ratio':>6} {'MB':>5} {'candidates':>11} {'gap':>7}"
    )
    for row in rows:
        limit = "" if row["limit_s"] is None else row["limit_s"]
        print(
            f"{row['job']:28} {row['cpu_s']:6.2f} {limit:>6} {row['ratio']:6.1f} "
            f"{row['peak_mb']:5} {row['candidates']:11,} {100 * row['gap']:5.2f} %"
        )
    print(f"{help_row['job']}: {help_row['ratio']:.2f} (limit 3)")


if __name__ == "__main__":
    main()
