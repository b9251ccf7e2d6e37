"""The published joint problems: cut and strategies of unequal layers, beside the checkout."""

from __future__ import annotations

import json
from pathlib import Path

from planner.problem import SearchProblem

INSTANCES = Path(__file__).resolve().parents[3] / "shared" / "peers" / "joint_cut"


def joint_problem(path: Path) -> SearchProblem:
    """The problem of an instance file."""
    data = json.loads(path.read_text())
    layers, strategies, stages = data["layers"], data["strategies"], data["stages"]
    return SearchProblem(
        chain=tuple(range(layers)),
        num_stages=stages,
        repeats=data["microbatches"],
        time_ns=tuple(map(tuple, data["time_us"])),
        memory=(tuple(map(tuple, data["mem_mib"])),) * stages,
        working=((0,) * strategies,) * layers,
        limit=(data["limit_mib"],) * stages,
        allowed=(tuple(range(strategies)),) * layers,
        stage_ns=(0,) * stages,
        reshard_ns=tuple(map(tuple, data["reshard_us"])),
    )
