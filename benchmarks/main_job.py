"""CPU seconds and memory of the main job, beside a fixed numpy loop of the same run.

    python -m benchmarks.main_job [--runs 3] [--format text|json]

Machines differ and are shared, so the figure to track is the ratio of a job's CPU seconds to the
reference loop's. The limits are those that the project has set itself on two cores of a server.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

JOBS = {
    "llama3-70b on 128 H100": (
        ["--model", "llama3-70b", "--cluster", "16x8xh100-80g"],
        ["--global-batch", "1024", "--seq-len", "8192"],
        2.5,
    ),
    "llama3-405b on 16,384 H100": (
        ["--model", "llama3-405b", "--cluster", "2048x8xh100-80g"],
        ["--global-batch", "2048", "--seq-len", "8192"],
        6.0,
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


def measure(arguments: list[str]) -> tuple[float, float]:
    """(CPU seconds, peak MB) of one process of its own."""
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606
    _, status, usage = os.wait4(child, 0)
    if status != 0:
        raise SystemExit(f"{arguments} ended with status {status}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


def parplan(*arguments: str) -> list[str]:
    return ["-c", "import sys, cli; sys.argv[0] = 'parplan'; cli.main()", *arguments]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="runs of each job; the least counts")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    options = parser.parse_args()
    reference = min(reference_s() for _ in range(options.runs))
    rows = []
    for name, (what, training, limit) in JOBS.items():
        runs = [measure(parplan("plan", *what, *training)) for _ in range(options.runs)]
        cpu, memory = min(run[0] for run in runs), max(run[1] for run in runs)
        rows.append(
            {
                "job": name,
                "cpu_s": round(cpu, 3),
                "limit_s": limit,
                "ratio": round(cpu / reference, 2),
                "peak_mb": round(memory),
                "limit_mb": LIMIT_MB,
            }
        )
    click = min(measure(["-c", "import click"])[0] for _ in range(options.runs))
    own = min(measure(parplan("--help"))[0] for _ in range(options.runs))
    help_row = {"job": "parplan --help / import click", "ratio": round(own / click, 2)}
    if options.format == "json":
        print(json.dumps({"reference_s": reference, "jobs": rows, "help": help_row}, indent=2))
        return
    print(f"reference loop: {reference:.3f} CPU s")
    for row in rows:
        print(
            f"{row['job']}: {row['cpu_s']:.2f} CPU s (limit {row['limit_s']}), "
            f"{row['ratio']:.1f} times the loop, {row['peak_mb']} MB (limit {LIMIT_MB})"
        )
    print(f"{help_row['job']}: {help_row['ratio']:.2f} (limit 3)")


if __name__ == "__main__":
    main()
