"""Launch lines: torchrun on every node, and the Slurm job that starts it.

A placeholder is ``${NAME:?what it is}``: the shell refuses to start while it is not set, and says
why.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from executor.launchers.job import Job

__all__ = ["array", "header", "launch_script", "placeholder", "quoted", "slurm_script"]

FOLDER = 'cd "$(dirname "${BASH_SOURCE[0]}")"'


def placeholder(name: str, what: str) -> str:
    """A variable that the user has to set."""
    return f'"${{{name}:?{what}}}"'


def quoted(value: object) -> str:
    """A value as one word of a shell, placeholders as they are."""
    text = str(value)
    return text if text.startswith('"${') else shlex.quote(text)


def header(job: Job, notes: Iterable[str]) -> list[str]:
    """The first lines of a script: what it is, and what the user should know."""
    s = job.setup
    degrees = (("tp", s.tp), ("cp", s.cp), ("ep", s.ep), ("dp", s.dp), ("pp", s.pp))
    shown = " x ".join(f"{name} {size}" for name, size in degrees if size > 1 or name == "dp")
    lines = [f"# {job.model.name} on {s.num_ranks} GPUs: {shown}. Written by parplan export."]
    lines += [f"# {note}" for note in notes]
    return lines


def array(name: str, lines: Iterable[str]) -> list[str]:
    """A shell array, one group of words a line."""
    return [f"{name}=(", *(f"  {line}" for line in lines), ")"]


def launch_script(
    job: Job,
    command: Iterable[str],
    *,
    environment: Mapping[str, str | None],
    notes: Iterable[str] = (),
    before: Iterable[str] = (),
    program: Iterable[str] | None = None,
) -> str:
    """The script that starts the processes of one node; ``command`` is what each of them runs.

    ``environment``: variables to set, None for those to unset. ``program``: what starts the
    processes instead of torchrun.
    """
    variables = [
        f"unset {name}" if value is None else f"export {name}={value}"
        for name, value in environment.items()
    ]
    start = list(program) if program is not None else torchrun(job)
    lines = [*start, *command]
    text = " \\\n  ".join(lines)
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *header(job, notes),
            "set -euo pipefail",
            FOLDER,
            *before,
            *variables,
            f'exec {text} "$@"',
            "",
        ]
    )


def torchrun(job: Job) -> list[str]:
    """Torchrun for one node of the job."""
    nodes, gpus = job.num_nodes, job.gpus_per_node
    if nodes == 1:
        return [f"torchrun --standalone --nproc-per-node {gpus}"]
    head = placeholder("HEAD", "first node of the job, as host name")
    rest = job.setup.num_ranks - (nodes - 1) * gpus
    processes = str(gpus)
    if rest != gpus:  # the last node runs fewer
        processes = (
            f'"$(( ${{SLURM_NODEID:?number of this node}} < {nodes - 1} ? {gpus} : {rest} ))"'
        )
    return [
        f"torchrun --nnodes {nodes} --nproc-per-node {processes}",
        f'--rdzv-backend c10d --rdzv-endpoint {head[:-1]}:29500"',
        '--rdzv-id "${SLURM_JOB_ID:-parplan}"',
    ]


def slurm_script(job: Job) -> str:
    """The Slurm job: one task a node, each running ``launch.sh``."""
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"#SBATCH --job-name={_plain(job.model.name)}",
            f"#SBATCH --nodes={job.num_nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={job.gpus_per_node}",
            "#SBATCH --exclusive",
            *header(job, ["Submit from this folder: sbatch job.sbatch"]),
            "set -euo pipefail",
            'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export HEAD",
            'srun bash ./launch.sh "$@"',
            "",
        ]
    )


def _plain(name: str) -> str:
    return "".join(char if char.isalnum() or char in "._-" else "-" for char in name)
