"""``parplan profile links``: flags -> ranks under torchrun -> the text of a profile."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from executor.launch import Nodes, check_meeting, run_ranks
from executor.profiler.measuring import device_kind, device_name
from profiles.catalog import load_cluster
from profiles.errors import InputError, Problem
from profiles.measured import ClusterFacts, Profile
from profiles.measuredfile import profile_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from executor.profiler.linksession import LinkSession
    from profiles.cluster import ClusterSpec

__all__ = ["MeasuredLinks", "measure_links"]

HEADER: Final = "# Made by parplan profile links.\n"
BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}
LOOK_S: Final = 0.5  # between looks at the journal


class MeasuredLinks(NamedTuple):
    """A profile, its file, and notes on what is not in it."""

    profile: Profile
    text: str
    notes: list[str]


def measure_links(
    cluster: str | None,
    output: str,
    flags: Mapping[str, Any],
    *,
    tell: Callable[[int, int, str], None],
) -> MeasuredLinks | None:
    """The profile of a cluster's links, None on a node without rank 0, which has it. Raises
    ``InputError`` or ``JobError``, and ``KeyboardInterrupt`` where it was stopped.
    """
    from executor.profiler.linksession import (  # noqa: PLC0415 - torch
        METHOD,
        figures_of,
        measured_links,
        without_room,
    )

    kind = device_kind(flags["device"])
    own, nodes = _where(cluster, kind, flags)
    _check_devices(kind, nodes)
    check_meeting(nodes)
    facts = _facts(own, kind, method=METHOD, date=flags["date"])
    session = _session(own, facts, kind, output, flags)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    session.out.mkdir(parents=True, exist_ok=True)
    session.writer.unlink(missing_ok=True)
    session.write(session.out / "session.json")
    with _watched(session, tell):
        run_ranks(nodes, ["-m", "executor.profiler.linkworker", str(session.out / "session.json")],
                  session.out)  # fmt: skip
    host = session.writer.read_text(encoding="utf-8") if session.writer.is_file() else ""
    if host != socket.gethostname():
        return None
    shutil.rmtree(session.out)
    journal = session.journal()
    figures = figures_of(session, journal)
    times, overlaps = measured_links(own.name, figures)
    profile = Profile(
        name=Path(output).stem,
        source="parplan profile links",
        clusters=(facts,),
        collective_times=times,
        overlaps=overlaps,
    )
    roomless = without_room(session, journal)
    notes = [f"no memory for {point}" for point in roomless]
    if left := len(session.points) - len(figures) - len(roomless):
        notes.append(f"the budget is spent: {left} of {len(session.points)} points are left out")
    if doubtful := sum(entry.doubtful for entry in times):
        told = f"{doubtful} of {len(times)} points are doubtful"
        notes.append(f"{told}: is something else running there?")
    return MeasuredLinks(profile, HEADER + profile_text(profile), notes)


def _where(cluster: str | None, kind: str, flags: Mapping[str, Any]) -> tuple[ClusterSpec, Nodes]:
    """The cluster, and what runs on this node. Raises ``InputError`` where they do not agree."""
    count, ranks = flags["nnodes"], flags["nproc"]
    if cluster is None:
        count, ranks = count or 1, ranks or _local_devices(kind)
        cluster = f"{count}x{ranks}x{device_name(flags['device_name'], kind)}"
    own = load_cluster(cluster, where="parplan profile links")
    if not own.is_uniform:
        message = f"{own.name} has nodes of several kinds"
        hint = "profile one kind at a time"
        raise InputError(Problem(where="parplan profile links", message=message, hint=hint))
    count = count or own.num_nodes
    ranks = ranks or own.num_gpus // count
    if count * ranks != own.num_gpus:
        message = f"{count} nodes x {ranks} ranks are not the {own.num_gpus} devices of {own.name}"
        raise InputError(Problem(where="--nproc", message=message))
    if own.num_gpus == 1:
        message = "one rank has no links"
        raise InputError(Problem(where="--nproc", message=message, expected="at least 2 ranks"))
    endpoint, job = flags["rdzv_endpoint"], flags["rdzv_id"]
    return own, Nodes(count=count, ranks=ranks, endpoint=endpoint, id=job)


def _local_devices(kind: str) -> int:
    import torch  # noqa: PLC0415 - slowly

    return torch.cuda.device_count() if kind == "cuda" else os.cpu_count() or 1


def _check_devices(kind: str, nodes: Nodes) -> None:
    found = _local_devices(kind)
    if kind == "cuda" and found < nodes.ranks:
        message = f"needs {nodes.ranks} GPUs on this node, it has {found}"
        raise InputError(Problem(where="--nproc", message=message))


def _facts(cluster: ClusterSpec, kind: str, *, method: str, date: str | None) -> ClusterFacts:
    import torch  # noqa: PLC0415 - slowly

    from executor.profiler.device import processor  # noqa: PLC0415 - torch

    return ClusterFacts(
        cluster=cluster.name,
        device=cluster.slowest_device.name,
        num_nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node,
        backend=BACKENDS[kind],
        hardware=torch.cuda.get_device_name(0) if kind == "cuda" else processor(),
        torch=str(torch.__version__),
        method=method,
        date=date,
    )


def _session(
    cluster: ClusterSpec, facts: ClusterFacts, kind: str, output: str, flags: Mapping[str, Any]
) -> LinkSession:
    from executor.profiler.linkpoints import link_points  # noqa: PLC0415 - numpy
    from executor.profiler.linksession import LinkSession  # noqa: PLC0415 - torch

    return LinkSession(
        device=kind,
        backend=facts.backend,
        points=tuple(link_points(cluster, largest=flags["largest"])),
        rounds=flags["rounds"],
        budget_s=flags["budget"],
        out=Path(f"{output}.ranks"),
        journal_path=Path(f"{output}.journal"),
        header={
            "links": cluster.name,
            "device": [facts.device, facts.hardware, facts.torch],
            "ranks": [facts.num_nodes, facts.gpus_per_node, facts.backend],
        },
    )


@contextmanager
def _watched(session: LinkSession, tell: Callable[[int, int, str], None]) -> Iterator[None]:
    """Tell what rank 0 notes while its launcher waits."""
    ended = threading.Event()
    total = len(session.tasks)

    def look() -> None:
        while not ended.wait(LOOK_S):
            lines = []
            if session.journal_path.is_file():
                lines = session.journal_path.read_text(encoding="utf-8").splitlines()[1:]
            last = lines[-1].split('"')[1].partition(": ")[2] if lines else "starting"
            tell(min(len(lines), total), total, last)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
