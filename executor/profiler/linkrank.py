"""One rank of a session that measures links.

All ranks take the same points in the same order; rank 0 decides what comes next, keeps the journal
and looks at the clock.

A collective is timed as layers use it: between calls every rank reads and writes more than its
caches hold, and makes anew what it sends. So it finds memory cold and the others not quite ready,
on a CPU its threads asleep as well, and takes up to three times what calls in a row would. A step
has many, so a sample is the mean of some, over the ranks too, since what one waits the other is
late. On a CPU, time does not count in which a rank is ready and another process has its core. Of
p2p, whose receiver waits for the sender anyway, and of overlap, calls in a row are timed, and the
slowest rank counts.
"""

from __future__ import annotations

import os
import socket
import time
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from executor.clock import Clock
from executor.profiler.linkcalls import call_of, start_of
from executor.profiler.linksession import (
    ALONE,
    BOTH,
    COMPUTE,
    FEW,
    FEWEST,
    LONG_S,
    MOST,
    USED,
    task_key,
)
from executor.profiler.timing import undisturbed
from profiles.measured import Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from executor.profiler.journal import Journal
    from executor.profiler.linkcalls import LinkCall
    from executor.profiler.linkpoints import LinkPoint, RankGroups
    from executor.profiler.linksession import LinkSession

__all__ = ["LinkRank"]

WARM_UP: Final = 2
ENOUGH_S: Final = 0.25  # of sampling calls in a row
ENOUGH_USED_S: Final = 0.5  # of sampling them between work
SAMPLE_USED_S: Final = 0.04
SWEPT: Final = {"cpu": 2**24, "cuda": 2**28}  # bytes that ranks go through between calls
SAMPLE_S: Final = 3e-3  # what a sample lasts at least: short messages go several times
MOST_REPEATS: Final = 50
MATRIX: Final = {"cpu": 256, "cuda": 4096}  # of the compute beside which a collective runs
COPIES: Final = 4  # of a message that a rank may hold meanwhile
SHARE: Final = 0.5  # of free memory
STOP: Final = -1
KIB: Final = 1024


class LinkRank:
    """One rank of the session, in a process group of all ranks."""

    def __init__(self, session: LinkSession) -> None:
        """Join the groups that are measured."""
        self.session = session
        if session.device == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
            torch.set_num_threads(1)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.counter = undisturbed()
        self.control = dist.new_group(backend="gloo")  # beside what is measured
        self.own = {
            kind: self._group_of(kind)
            for kind in dict.fromkeys(point.groups for point in session.points)
        }

    def _group_of(self, kind: RankGroups) -> tuple[dist.ProcessGroup, list[int]]:
        """The group of this rank; every rank makes all, in the same order."""
        mine: tuple[dist.ProcessGroup, list[int]] | None = None
        for ranks in kind.rows(self.world):
            group = dist.new_group(ranks)
            if self.rank in ranks:
                mine = group, ranks
        assert mine is not None
        return mine

    def run(self) -> None:
        """Every point that rank 0 asks for."""
        journal = self.session.journal() if self.rank == 0 else None
        if journal is not None:
            self.session.writer.write_text(socket.gethostname(), encoding="utf-8")
        wanted = self.wanted(journal) if journal else iter(())
        free = self._least(_free_bytes(self.device))
        while (number := self._agreed(next(wanted, STOP))) != STOP:
            task = self.session.tasks[number]
            samples = None
            if COPIES * task.point.num_bytes < SHARE * free:
                samples = self._samples(task.point)
            if journal is not None:
                journal.add(task_key(task), self.session.figure(task, samples))

    def wanted(self, journal: Journal) -> Iterator[int]:
        """Numbers of the session's tasks; those that would not end in time are left out."""
        until_s = time.monotonic() + (self.session.budget_s or float("inf"))
        lasted: dict[object, tuple[int, float]] = {}  # the largest message so far, its seconds
        for number, task in enumerate(self.session.tasks):
            if task_key(task) in journal.found:
                continue
            point = task.point
            kind = (point.operation, point.groups, point.overlap)
            size, seconds = lasted.get(kind, (point.num_bytes, 0.0))
            now_s = time.monotonic()
            if now_s + seconds * max(1.0, point.num_bytes / size) > until_s:
                continue
            yield number
            if point.num_bytes >= size:
                lasted[kind] = point.num_bytes, time.monotonic() - now_s

    def _agreed(self, number: int) -> int:
        """What rank 0 says."""
        said = torch.tensor([number])
        dist.broadcast(said, 0, group=self.control)
        return int(said)

    def _least(self, value: float) -> float:
        own = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(own, dist.ReduceOp.MIN, group=self.control)
        return float(own)

    def _slowest(self, seconds: list[float]) -> list[float]:
        """Each sample as the slowest rank saw it."""
        own = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(own, dist.ReduceOp.MAX, group=self.control)
        found: list[float] = own.tolist()
        return found

    def _mean(self, seconds: list[float]) -> list[float]:
        """Each sample, the mean of the ranks."""
        own = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(own, group=self.control)
        found: list[float] = (own / self.world).tolist()
        return found

    def _samples(self, point: LinkPoint) -> dict[str, list[float]]:
        """Samples in seconds, by what ran."""
        group, ranks = self.own[point.groups]
        call = call_of(point, group, ranks, self.device)
        if point.operation is not Operation.P2P and not point.overlap:
            return {USED: self._used(call)}
        made = call.make()
        alone = self._timed(lambda: call.run(*made))
        if not point.overlap:
            return {ALONE: alone}
        compute = self._compute(min(alone))
        start = start_of(point, group, self.device)

        def both() -> None:
            work = start()
            compute()
            work.wait()

        return {
            ALONE: alone,
            COMPUTE: self._timed(compute),
            BOTH: self._timed(both),
        }

    def _compute(self, wanted_s: float) -> Callable[[], None]:
        """Products of matrices that take about ``wanted_s``."""
        size = MATRIX[self.device.type]
        x, y = (torch.ones(size, size, device=self.device) for _ in range(2))
        out = torch.empty_like(x)
        once_s = min(self._timed(lambda: torch.matmul(x, y, out=out)))
        times = max(1, round(wanted_s / once_s))

        def compute() -> None:
            for _ in range(times):
                torch.matmul(x, y, out=out)

        return compute

    def _used(self, call: LinkCall) -> list[float]:
        """Samples of a call between ranks at work."""
        swept = torch.zeros(SWEPT[self.device.type] // 4, device=self.device)

        def spent_s(repeats: int) -> float:
            clock = Clock(self.device, counter=self.counter)
            for _ in range(repeats):
                swept.add_(1)
                made = call.make()
                with clock.busy(USED):
                    call.run(*made)
            return clock.take()[USED] / repeats

        return self._mean(
            self._sampled(
                lambda: spent_s(1), spent_s, sample_s=SAMPLE_USED_S, enough_s=ENOUGH_USED_S
            )
        )

    def _timed(self, call: Callable[[], object]) -> list[float]:
        """Samples of calls in a row."""
        return self._slowest(
            self._sampled(
                call,
                lambda repeats: self._elapsed(call, repeats) / repeats,
                sample_s=SAMPLE_S,
                enough_s=ENOUGH_S,
            )
        )

    def _sampled(
        self,
        once: Callable[[], object],
        spent_s: Callable[[int], float],
        *,
        sample_s: float,
        enough_s: float,
    ) -> list[float]:
        """Samples of ``spent_s``, the seconds of one of so many calls, all ranks starting together.
        How many calls make a sample of ``sample_s``, and how many samples ``enough_s``, is told by
        how long the slowest rank takes for ``once``.
        """
        for _ in range(WARM_UP):
            (once_s,) = self._slowest([self._elapsed(once, 1)])
        repeats = min(MOST_REPEATS, ceil(sample_s / once_s))
        count = min(MOST, max(FEWEST, int(enough_s / (repeats * once_s))))
        own = []
        for _ in range(FEW if once_s > LONG_S else count):
            dist.barrier(group=self.control)
            own.append(spent_s(repeats))
        return own

    def _elapsed(self, call: Callable[[], object], repeats: int) -> float:
        """Seconds of ``repeats`` calls, behind what the device was given before."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        clock = Clock(self.device)
        with clock.busy(ALONE):
            for _ in range(repeats):
                call()
        return clock.take()[ALONE]


def _free_bytes(device: torch.device) -> float:
    """Memory that is free for this rank: of its GPU, or its share of the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    return _available_bytes() / int(os.environ["LOCAL_WORLD_SIZE"])


def _available_bytes() -> float:
    """What Linux says it can give; elsewhere all of the machine's memory."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("MemAvail")) * KIB
    except (OSError, StopIteration):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
