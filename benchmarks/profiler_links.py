"""Profiles of layers and links against real steps of two processes on this CPU:
python -m benchmarks.profiler_links [--width 256] [--quick]

A small Llama on two ranks with dp 2, tp 2, pp 2 and ZeRO-3. Layers, links and steps are taken in
turns by the same two processes, in the same minutes; of each the least counts. Layers are measured
in both processes at once, as they compute in a step: on one machine ranks share its memory. Of
layers and steps alike, time does not count in which a rank is ready to run and another process has
its core (of a step, that of the rank which lost more); on an idle machine there is none.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmarks.profiler import llama
from executor.job import Recipe
from executor.launch import Nodes, run_ranks
from executor.profiler.linkpoints import link_points
from executor.profiler.linksession import METHOD, LinkSession, figures_of, measured_links
from executor.profiler.points import Request
from executor.profiler.session import Session
from executor.profiler.tasks import SessionPlan
from executor.profiler.timing import undisturbed
from executor.rank import run_rank
from executor.trainer import Trainer
from planner.inputs import Inputs
from planner.manual import ManualLayout, layout_from_degrees
from planner.plan import plan_of
from planner.profiled import with_profiles
from profiles import load_calibration, load_cluster, save_text
from profiles.measured import ClusterFacts, Profile
from profiles.measuredfile import profile_text
from profiles.training import Precision, TrainingSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

CLUSTER = "2xcpu"
WIDTHS = (256, 512)
LAYOUTS = {
    "dp 2": ManualLayout(dp=2, micro_batch=2),
    "tp 2": ManualLayout(tp=2, micro_batch=2),
    "pp 2": ManualLayout(pp=2, micro_batch=2),
    "zero-3": ManualLayout(dp=2, zero=3, micro_batch=2),
}
BATCH, LENGTH = 8, 256
LARGEST = 2**24  # bytes of a message
TURNS = 4
STEPS = 6  # of each layout in a turn
CLEAR = 0.15  # by which two measured steps must differ for their order to count


def inputs_of(hidden: int) -> Inputs:
    cluster = load_cluster(CLUSTER)
    return Inputs(
        model=llama(hidden),
        cluster=cluster,
        training=TrainingSpec(global_batch=BATCH, seq_len=LENGTH, precision=Precision.FP32),
        calibration=load_calibration(None, cluster)[0],
    )


def layers_session(hidden: int, turns: int) -> Session:
    inputs = inputs_of(hidden)
    request = Request(
        model=inputs.model, training=inputs.training, tp=(1, 2), batches=(2,), seq_lens=(LENGTH,)
    )
    plan = SessionPlan(
        request=request, device="cpu", device_name="cpu", rounds=turns, operators=False
    )
    return Session(plan, None)


def links_session(folder: Path, turn: int) -> LinkSession:
    return LinkSession(
        device="cpu",
        backend="gloo",
        points=tuple(link_points(load_cluster(CLUSTER), largest=LARGEST)),
        rounds=turn,
        budget_s=None,
        out=folder,
        journal_path=folder / "links.journal",
        header={},
    )


class Rank:
    """Both ranks do the same; rank 0 writes."""

    def __init__(self, folder: Path, hidden: int, turns: int) -> None:
        self.folder, self.hidden, self.turns = folder, hidden, turns
        self.layers = layers_session(hidden, turns)
        self.least = dict.fromkeys(LAYOUTS, float("inf"))

    def run(self) -> None:
        for turn in range(self.turns):
            upto = iter(range(len(self.layers.tasks) // self.turns))
            self.layers.run(
                tell=lambda *_: None, should_stop=lambda upto=upto: next(upto, None) is None
            )
            with joined(f"links {turn}"):
                self._links(turn + 1)
            with joined(f"steps {turn}"):
                self._steps()
            if os.environ["RANK"] == "0":
                print(f"turn {turn + 1} of {self.turns}", file=sys.stderr, flush=True)
        if os.environ["RANK"] == "0":
            save_text(profile_text(self.layers.profile("layers")), self.folder / "layers.yaml")
            lines = [f"{name}: {seconds}" for name, seconds in self.least.items()]
            save_text("\n".join(lines), self.folder / "steps.txt")

    def _links(self, turn: int) -> None:
        from executor.profiler.linkrank import LinkRank  # noqa: PLC0415

        LinkRank(links_session(self.folder, turn)).run()

    def _steps(self) -> None:
        inputs = inputs_of(self.hidden)
        counter = undisturbed()
        for name, manual in LAYOUTS.items():
            layout = layout_from_degrees(inputs, manual)
            trainer = Trainer(
                inputs.model, layout, inputs.training, Recipe(),
                device=torch.device("cpu"), num_steps=1000,
            )  # fmt: skip
            share = BATCH // layout.mesh.dp
            tokens = torch.arange(share * LENGTH).view(share, LENGTH) % 4096
            for step in range(STEPS + 1):
                dist.barrier()
                began_s = counter()
                trainer.step(tokens, tokens)
                seconds = torch.tensor(counter() - began_s)
                dist.all_reduce(seconds, dist.ReduceOp.MIN)
                if step:
                    self.least[name] = min(self.least[name], float(seconds))


@contextmanager
def joined(part: str) -> Iterator[None]:
    """Both ranks in a process group; what the one before left in the store is not taken for its."""
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(part, dist.TCPStore(*place, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


def links_profile(folder: Path, turns: int) -> Profile:
    session = links_session(folder, turns)
    times, overlaps = measured_links(CLUSTER, figures_of(session, session.journal()))
    facts = ClusterFacts(
        cluster=CLUSTER, device="cpu", gpus_per_node=2, backend="gloo", method=METHOD
    )
    return Profile(
        name="links", source="benchmark", clusters=(facts,), collective_times=times,
        overlaps=overlaps,
    )  # fmt: skip


def compared(folder: Path, hidden: int, turns: int) -> dict[str, tuple[float, float]]:
    """Predicted and measured seconds of each layout."""
    save_text(profile_text(links_profile(folder, turns)), folder / "links.yaml")
    lines = (folder / "steps.txt").read_text().splitlines()
    measured = {name: float(own) for name, _, own in (line.partition(": ") for line in lines)}
    inputs = inputs_of(hidden)
    inputs = with_profiles(inputs, [str(folder / "layers.yaml"), str(folder / "links.yaml")])
    found = {}
    for name, manual in LAYOUTS.items():
        own = plan_of(inputs, layout_from_degrees(inputs, manual)).estimate
        inside = "yes" if own.interval_s[0] <= measured[name] <= own.interval_s[1] else "no"
        error = own.step_s / measured[name] - 1
        print(
            f"llama-{hidden:<4} {name:7} {own.step_s:10.4f} {measured[name]:10.4f} {error:7.1%}  "
            f"{inside}",
            flush=True,
        )
        found[name] = own.step_s, measured[name]
    return found


def ranked_alike(found: dict[str, tuple[float, float]]) -> tuple[int, int]:
    """Pairs of layouts that are clearly apart, and how many of them are predicted in that order."""
    clear = right = 0
    for (mine, measured), (other, theirs) in combinations(found.values(), 2):
        if max(measured, theirs) > (1 + CLEAR) * min(measured, theirs):
            clear += 1
            right += (mine < other) == (measured < theirs)
    return clear, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smaller model, two turns")
    parser.add_argument("--width", type=int, choices=WIDTHS, help="one of the models")
    parser.add_argument("--rank", nargs=3, metavar=("FOLDER", "HIDDEN", "TURNS"))
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="keep profiles there")
    own = parser.parse_args()
    if own.rank:
        folder, hidden, turns = own.rank
        run_rank(lambda: Rank(Path(folder), int(hidden), int(turns)).run(), Path(folder))
        return
    turns = 2 if own.quick else TURNS
    widths = (own.width,) if own.width else WIDTHS[: 1 if own.quick else None]
    os.environ["OMP_NUM_THREADS"] = "1"
    errors, pairs = [], []
    print(f"{'model':10} {'layout':7} {'predicted':>10} {'measured':>10} {'error':>7}  in interval")
    for hidden in widths:
        with tempfile.TemporaryDirectory() as place:
            folder = (own.keep or Path(place)) / str(hidden)
            worker = ["-m", "benchmarks.profiler_links", "--rank", str(folder)]
            run_ranks(Nodes(ranks=2), [*worker, str(hidden), str(turns)], folder)
            found = compared(folder, hidden, turns)
        errors += [abs(predicted / measured - 1) for predicted, measured in found.values()]
        pairs.append(ranked_alike(found))
    clear, right = (sum(part) for part in zip(*pairs, strict=True))
    print(f"median {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    print(f"{right} of {clear} pairs that differ by more than {CLEAR:.0%} are ranked right")


if __name__ == "__main__":
    main()
