"""A profile against real steps on this CPU: python -m benchmarks.profiler [--width 256] [--quick]

Small Llamas are profiled, then steps of sizes that were not profiled are predicted and run, one
process, one thread. Profile and steps are taken in turns, in the same minutes, and of each the
least counts, so the table compares like with like on a busy machine. Memory is the peak of all
tensors that are alive in a step, counted by their storages. Two profiles of the same model, one
after the other, are compared at the end.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from costmodel.layout import NO_RECOMPUTE, Layout, Mesh, Strategy
from costmodel.placing import even_cut, placed_chunks
from executor.job import Recipe
from executor.profiler.held import Held
from executor.profiler.points import Request
from executor.profiler.probe import pretended_group
from executor.profiler.session import Session
from executor.profiler.tasks import SessionPlan
from executor.trainer import Trainer
from planner.inputs import Inputs
from planner.native import as_executed
from planner.plan import plan_of
from planner.profiled import with_profiles
from profiles import load_calibration, load_cluster, save_text
from profiles.layers import Attention, Block, Embedding, FeedForward, Head, Norm
from profiles.measuredfile import profile_text
from profiles.model import LayerRun, ModelSpec
from profiles.training import Precision, TrainingSpec
from profiles.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.plan import Plan

VOCAB, BLOCKS, HEAD = 4096, 8, 64
WIDTHS = (256, 512)
BATCHES, LENGTHS = (1, 4), (128, 512)  # what is profiled
ASKED = ((1, 256, 2), (2, 128, 4), (2, 256, 2), (3, 384, 1), (4, 256, 1), (2, 512, 2))
TURNS = 2
STEPS = 2  # in a turn


def llama(hidden: int) -> ModelSpec:
    heads = hidden // HEAD
    attention = Attention(heads=heads, kv_heads=heads // 2, head_dim=HEAD, value_head_dim=HEAD)
    wide = FeedForward(ffn_hidden=hidden * 11 // 4 // HEAD * HEAD, gated=True)
    block = Block(hidden=hidden, attention=attention, feed_forward=wide, norm=Norm.RMS)
    runs = (
        LayerRun(Embedding(vocab=VOCAB, hidden=hidden), 1),
        LayerRun(block, BLOCKS),
        LayerRun(Head(vocab=VOCAB, hidden=hidden, norm=Norm.RMS, tied=False), 1),
    )
    return ModelSpec(name=f"llama-{hidden}", family="generic", runs=runs)


@dataclass(frozen=True, slots=True)
class Asked:
    """A step: micro-batch, sequence length, micro-batches."""

    batch: int
    seq_len: int
    count: int

    @property
    def training(self) -> TrainingSpec:
        return TrainingSpec(
            global_batch=self.batch * self.count, seq_len=self.seq_len, precision=Precision.FP32
        )

    def layout(self, model: ModelSpec) -> Layout:
        cut = even_cut(model.num_blocks, 1)
        return Layout(
            mesh=Mesh(),
            schedule="1f1b",
            num_chunks=1,
            micro_batch=self.batch,
            num_microbatches=self.count,
            chunks=placed_chunks(model, cut, ((0, 0),), Strategy(), (NO_RECOMPUTE, None)),
        )


def steps(model: ModelSpec, asked: Asked) -> Iterator[float]:
    """Seconds on the processor of one step after another."""
    trainer = Trainer(
        model, asked.layout(model), asked.training, Recipe(),
        device=torch.device("cpu"), num_steps=1000,
    )  # fmt: skip
    tokens = torch.arange(asked.training.tokens).view(-1, asked.seq_len) % VOCAB
    while True:
        began_s = time.process_time()
        trainer.step(tokens, tokens)
        yield time.process_time() - began_s
        trainer.clock.take()


def peak_bytes(model: ModelSpec, asked: Asked) -> int:
    """The most that tensors take in a step, once the optimizer has its states."""
    trainer = Trainer(
        model, asked.layout(model), asked.training, Recipe(),
        device=torch.device("cpu"), num_steps=10,
    )  # fmt: skip
    tokens = torch.arange(asked.training.tokens).view(-1, asked.seq_len) % VOCAB
    trainer.step(tokens, tokens)
    held = Held()
    held.know(trainer.parameters())
    states = (own for part in trainer.optimizer.state.values() for own in part.values())
    held.know(states)
    with held:
        trainer.step(tokens, tokens)
    return held.most


def predicted(model: ModelSpec, asked: Asked, profile: Path) -> Plan:
    cluster, layout = load_cluster("1xcpu"), asked.layout(model)
    inputs = Inputs(
        model=model,
        cluster=cluster,
        training=asked.training,
        calibration=load_calibration(None, cluster)[0],
    )
    return plan_of(with_profiles(as_executed(inputs, layout), [str(profile)]), layout)


def session_of(model: ModelSpec, journal: Path | None, rounds: int) -> Session:
    request = Request(
        model=model,
        training=Asked(1, max(LENGTHS), 1).training,
        tp=(1,),
        batches=BATCHES,
        seq_lens=LENGTHS,
    )
    plan = SessionPlan(
        request=request,
        device="cpu",
        device_name="cpu",
        rounds=rounds,
        operators=False,
        wrapping=False,
    )
    return Session(plan, journal)


def differences(model: ModelSpec, rounds: int) -> list[float]:
    """By which part the times of two profiles of a model differ, one made after the other."""
    found = []
    for _ in range(2):
        session = session_of(model, None, rounds)
        session.run(tell=lambda *_: None, should_stop=lambda: False)
        rows = session.profile("here").layer_times
        found.append([seconds for row in rows for seconds in (row.forward_s, row.backward_s)])
    return [abs(a / b - 1) for a, b in zip(*found, strict=True) if a and b]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smaller model")
    parser.add_argument("--width", type=int, choices=WIDTHS, help="one of the models")
    asked = parser.parse_args()
    widths = (asked.width,) if asked.width else WIDTHS[: 1 if asked.quick else None]
    errors = []
    print(
        f"{'model':10} {'step':>14} {'predicted':>10} {'measured':>10} {'error':>7}  in interval"
        f" {'MiB':>7} {'measured':>8} {'error':>7}"
    )
    for hidden in widths:
        model = llama(hidden)
        cases = [Asked(*own) for own in ASKED]
        least = dict.fromkeys(cases, float("inf"))
        session = session_of(model, None, TURNS)
        each = len(session.tasks) // TURNS
        for turn in range(TURNS):
            upto = iter(range(each))
            session.run(
                tell=lambda *_: None, should_stop=lambda upto=upto: next(upto, None) is None
            )
            for case in cases:
                with pretended_group(1):
                    run = steps(model, case)
                    times = [next(run) for _ in range(STEPS + 1)]
                    least[case] = min(least[case], *times[1:])
            print(f"turn {turn + 1} of {TURNS}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.yaml"
            save_text(profile_text(session.profile("here")), path)
            for case in cases:
                own = predicted(model, case, path).estimate
                error = own.step_s / least[case] - 1
                errors.append(error)
                inside = own.interval_s[0] <= least[case] <= own.interval_s[1]
                with pretended_group(1):
                    peak = peak_bytes(model, case)
                beside = own.allocated_bytes / peak - 1
                step = f"{case.batch} x {case.seq_len} x {case.count}"
                print(
                    f"{model.name:10} {step:>14} {own.step_s:10.4f} {least[case]:10.4f} "
                    f"{error:7.1%}  {'yes' if inside else 'no':11}"
                    f" {own.allocated_bytes / MIB:7.1f} {peak / MIB:8.1f} {beside:7.1%}",
                    flush=True,
                )
    sizes = sorted(abs(error) for error in errors)
    print(f"median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}")
    apart = differences(llama(widths[0]), TURNS)
    print(f"two profiles: median {statistics.median(apart):.1%} apart, worst {max(apart):.1%}")


if __name__ == "__main__":
    main()
