"""Launch a job: torchrun lines, a Slurm script, or the run itself with torchrun underneath."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from executor.checkpointfiles import Shelf
from executor.failures import TOLD_HERE, Failure, JobError, cause, forget
from executor.job import check_plan, check_torch
from executor.outfolder import check_free, make
from executor.resuming import CHECKPOINTS, check_not_done, check_same_run, facts_of_run
from executor.stopping import SHUTDOWN_S, StoppedError
from profiles.errors import ExitCode, InputError, Problem

if TYPE_CHECKING:
    from pathlib import Path

    from executor.job import Job
    from planner.plan import Plan

__all__ = [
    "Nodes",
    "check_meeting",
    "environment",
    "launch",
    "nodes_of",
    "run_ranks",
    "slurm_script",
    "torchrun_lines",
]

PORT: Final = 29500
LOGS: Final = "logs"
NOTICE_S: Final = 300  # in which a step and a checkpoint must end, before Slurm's time limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """On how many nodes, with how many ranks each, and where they meet (as torchrun has it)."""

    count: int = 1
    ranks: int = 1
    endpoint: str | None = None
    id: str | None = None

    def arguments(self) -> list[str]:
        """As torchrun's arguments."""
        own = ["--nnodes", str(self.count), "--nproc-per-node", str(self.ranks)]
        own += ["--shutdown-timeout", str(SHUTDOWN_S)]
        if self.count == 1 and self.endpoint is None:
            return [*own, "--standalone"]
        own += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint or f"HEAD:{PORT}"]
        return [*own, "--rdzv-id", self.id or "parplan"]


def nodes_of(
    plan: Plan, *, count: int | None = None, endpoint: str | None = None, rdzv_id: str | None = None
) -> Nodes:
    """The nodes of a plan: its cluster's, unless ``count`` says how many. Raises ``InputError``."""
    ranks, per_node = plan.layout.mesh.num_ranks, plan.inputs.cluster.gpus_per_node
    nodes = count or -(-ranks // per_node)
    if ranks % nodes:
        message = f"{ranks} ranks of the plan do not divide by {nodes} nodes"
        raise InputError(Problem(where="--nnodes", message=message))
    return Nodes(count=nodes, ranks=ranks // nodes, endpoint=endpoint, id=rdzv_id)


def environment(plan: Plan) -> dict[str, tuple[str, str]]:
    """Variables that a plan relies on: value and reason."""
    found = {
        "OMP_NUM_THREADS": ("1", "one thread a rank; ranks of a node share its cores"),
    }
    if plan.inputs.cluster.slowest_device.name == "cpu":
        return found
    sharded = any(strategy.zero >= 1 for strategy in plan.layout.strategies)
    if any(strategy.tp > 1 for strategy in plan.layout.strategies) and not sharded:
        reason = "tensor-parallel traffic starts in the order of its GEMMs (pre-Blackwell GPUs)"
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = ("1", reason)
    else:
        reason = "gathers and reductions of shards run beside compute; 1 would serialise them"
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = ("32", reason)
    reason = "gathered weights come and go in many sizes; segments grow instead of fragmenting"
    found["PYTORCH_ALLOC_CONF"] = ("expandable_segments:True", reason)
    found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = ("1", "a rank that dies ends the job, not a timeout")
    if plan.inputs.cluster.num_gpus > plan.inputs.cluster.gpus_per_node:
        found["NCCL_IB_DISABLE"] = ("0", "the plan counts on the network cards between nodes")
    return found


def torchrun_lines(plan: Plan, job: Job, nodes: Nodes) -> str:
    """What to type on every node, with the environment and its reasons."""
    lines = [f"# {reason}\nexport {name}={value}" for name, (value, reason) in
             environment(plan).items()]  # fmt: skip
    command = shlex.join(["torchrun", *nodes.arguments(), *_worker(job)])
    if nodes.count > 1:
        lines.append(f"# on each of {nodes.count} nodes; HEAD is the name of one of them")
    return "\n".join([*lines, command])


def slurm_script(plan: Plan, job: Job, nodes: Nodes) -> str:
    """An sbatch file: one torchrun a node."""
    gpus = [] if plan.inputs.cluster.slowest_device.name == "cpu" else [
        f"#SBATCH --gpus-per-node={nodes.ranks}"
    ]  # fmt: skip
    exports = [f"export {name}={value}  # {reason}" for name, (value, reason) in
               environment(plan).items()]  # fmt: skip
    meeting = Nodes(
        count=nodes.count, ranks=nodes.ranks, endpoint=f"$HEAD:{PORT}", id="$SLURM_JOB_ID"
    )
    command = " ".join(
        each if each.startswith("$") else shlex.quote(each)
        for each in ("srun", "torchrun", *meeting.arguments(), *_worker(job))
    )
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name={plan.inputs.model.name}",
            f"#SBATCH --nodes={nodes.count}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --signal=TERM@{NOTICE_S}",
            *gpus,
            "#SBATCH --exclusive",
            "",
            "HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)",
            *exports,
            "",
            command,
        ]
    )


def _worker(job: Job) -> list[str]:
    return ["-m", "executor.worker", *job.arguments()]


def launch(plan: Plan, job: Job, nodes: Nodes) -> Path:
    """Run this node's part of the job here, and wait for it. The path of its record.

    Raises ``InputError`` where it cannot start, ``JobError`` with the cause where it fails.
    """
    check_torch("parplan launch")
    check_plan(plan, str(job.plan), compiles=job.compiles)
    check_free(job.out)
    _check_start(plan, job, nodes)
    check_meeting(nodes)
    for name, (value, _) in environment(plan).items():
        os.environ.setdefault(name, value)
    run_ranks(nodes, _worker(job), job.out)
    return job.out / "run.json"


def _check_start(plan: Plan, job: Job, nodes: Nodes) -> None:
    """What would fail on every rank is told once, before anything starts."""
    import torch  # noqa: PLC0415

    from executor.data import data_of  # noqa: PLC0415

    _check_checkpoint(job, facts_of_run(plan, job, data_of(plan, job).identity))
    on_gpus = job.device == "cuda" or (job.device == "auto" and torch.cuda.is_available())
    if job.compiles and not on_gpus:
        _check_compiler()
    if on_gpus and torch.cuda.device_count() < nodes.ranks:
        message = f"needs {nodes.ranks} GPUs on this node, it has {torch.cuda.device_count()}"
        hint = "--device cpu runs it slowly anywhere"
        raise InputError(Problem(where=str(job.plan), message=message, hint=hint))


def _check_compiler() -> None:
    """What is compiled for CPUs goes through C++."""
    wanted = os.environ.get("CXX", "g++")
    if shutil.which(wanted) is None:
        message = f"needs a C++ compiler on CPUs, there is no {wanted}"
        hint = "install it, or name another in CXX"
        raise InputError(Problem(where="--compile", message=message, hint=hint))


def _check_checkpoint(job: Job, run: dict[str, Any]) -> None:
    """The ranks go on from the last checkpoint: it is this run's, and there is more to do."""
    shelf = Shelf(job.out / CHECKPOINTS)
    found = shelf.latest()
    if found is not None:
        check_same_run(found.run, run, shelf.path(found.step))
        check_not_done(found.step, job)


def check_meeting(nodes: Nodes) -> None:
    """Several nodes need a place to meet; a port of one that somebody else answers would keep
    torchrun waiting.
    """
    if nodes.count > 1 and nodes.endpoint is None:
        message, expected = f"is missing for {nodes.count} nodes", "HOST:PORT of one of them"
        hint = "--nnodes 1 where all ranks are on this machine"
        raise InputError(
            Problem(where="--rdzv-endpoint", message=message, expected=expected, hint=hint)
        )
    if nodes.count > 1 or nodes.endpoint is None:
        return  # another node of ours may serve it
    host, _, port = nodes.endpoint.rpartition(":")
    try:
        socket.create_server((host or "localhost", int(port or PORT))).close()
    except (OSError, ValueError, OverflowError) as error:
        message = f"ranks cannot meet at {nodes.endpoint}: {error}"
        hint = "another port, or none: one is chosen on a single node"
        raise InputError(Problem(where="--rdzv-endpoint", message=message, hint=hint)) from None


def _logs(out: Path, nodes: Nodes) -> list[str]:
    """Every rank but the node's first writes to files; that one speaks."""
    quiet = ",".join(f"{rank}:3" for rank in range(1, nodes.ranks))
    where = ["--log-dir", str(out / LOGS)]
    return [*where, "--redirects", quiet] if quiet else where


def run_ranks(nodes: Nodes, worker: list[str], out: Path) -> None:
    """Run the ranks of this node under torchrun, which is called in this process, so that its
    verdict on each rank is at hand. Raises ``InputError`` or ``JobError`` with the cause.
    """
    import logging  # noqa: PLC0415

    from torch.distributed import run  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    make(out / LOGS)
    forget(out)
    os.environ[TOLD_HERE] = "1"
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run.run(run.parse_args([*nodes.arguments(), *_logs(out, nodes), *worker]))
    except ChildFailedError as error:
        raise _job_error(error.failures, cause(out), out) from None
    except SignalException as error:
        if error.sigval == signal.SIGTERM:
            raise _stopped(cause(out)) from None
        raise KeyboardInterrupt from None
    except (OSError, RuntimeError) as error:  # the store of the rendezvous
        message = f"ranks cannot meet: {error}".splitlines()[0]
        hint = "is the port of --rdzv-endpoint in use?"
        raise InputError(Problem(where="torchrun", message=message, hint=hint)) from None


def _stopped(noted: Failure | None) -> Exception:
    """How a job ended that SIGTERM was to end."""
    if noted is not None and noted.exit_code == ExitCode.STOPPED:
        return StoppedError(noted.message)
    hint = "the same command goes on behind the last checkpoint, if there is one"
    return StoppedError(f"stopped by SIGTERM before a step could end; {hint}")


def _job_error(failures: dict[int, Any], noted: Failure | None, out: Path) -> Exception:
    """The cause: a rank's own error, else a rank that was killed, else whatever came first."""
    killed = [
        (rank, each)
        for rank, each in failures.items()
        if each.exitcode < 0 and each.exitcode != -signal.SIGTERM  # which torchrun sends to peers
    ]
    if noted is not None and noted.exit_code == ExitCode.STOPPED:
        return StoppedError(noted.message)
    if noted is not None and not noted.of_peer:
        text = f"rank {noted.rank}: {noted.message}"
        if noted.exit_code == ExitCode.ASKED_WRONGLY:
            where, _, message = noted.message.partition(": ")
            return InputError(Problem(where=where, message=message))
        return JobError(f"{text}\ntraceback: {out / 'errors' / f'rank-{noted.rank}.txt'}")
    if killed:
        rank, failure = min(killed, key=lambda pair: pair[1].timestamp)
        return JobError(f"rank {rank}: killed by {failure.signal_name()}; the job has ended")
    if noted is not None:
        return JobError(f"rank {noted.rank}: {noted.message}")
    rank, failure = min(failures.items(), key=lambda pair: pair[1].timestamp)
    return JobError(f"rank {rank}: ended with exit code {failure.exitcode}; see {out / LOGS}")
