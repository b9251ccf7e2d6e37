"""Training as one rank does it: set up, steps, record."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from costmodel.layout import ContextComm
from executor.checkpoint import Checkpoints
from executor.checkpointfiles import Shelf
from executor.data import data_of
from executor.failures import JobError
from executor.job import check_plan
from executor.outfolder import claim
from executor.planned import planned_traffic
from executor.progress import Progress, logged_steps
from executor.resuming import CHECKPOINTS, changes, check_not_done, facts_of_run
from executor.runrecord import RankFacts, StepFacts, run_document
from executor.stopping import StoppedError, StopRequest
from executor.traffic import Traffic, TrafficLog
from executor.trainer import Trainer
from planner.planreader import load_plan
from profiles.errors import InputError, Problem
from profiles.outputfile import save_text
from profiles.training import Precision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from executor.job import Job
    from planner.plan import Plan

__all__ = ["train"]

KIB = 1024
LOG = "log.jsonl"
COUNTED = 1  # step whose collectives are counted; in the first, stages also agree on shapes


def train(job: Job) -> None:
    """Train as the job says; rank 0 writes ``log.jsonl`` and ``run.json``.

    Raises ``InputError`` where the job does not fit the plan or the data.
    """
    plan = load_plan(job.plan)
    check_plan(plan, str(job.plan), compiles=job.compiles)
    _check_world(plan, job)
    device = _device(job.device)
    _check_ring(plan, job, device)
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        with _claimed(job):
            _Run(job, plan, device).run()
    finally:
        dist.destroy_process_group()


@contextmanager
def _claimed(job: Job) -> Iterator[None]:
    """The output folder is this job's, or every rank says whose it is."""
    answer: list[Any] = [None]
    held = None
    if dist.get_rank() == 0:
        try:
            held = claim(job.out)
        except InputError as error:
            answer = [error.problems]
    dist.broadcast_object_list(answer)
    if answer[0] is not None:
        raise InputError(answer[0])
    try:
        yield
    finally:
        if held is not None:
            held.close()


def _check_world(plan: Plan, job: Job) -> None:
    world, ranks = int(os.environ["WORLD_SIZE"]), plan.layout.mesh.num_ranks
    if world != ranks:
        message = f"is for {ranks} ranks, torchrun started {world}"
        hint = f"nodes x --nproc-per-node must be {ranks}"
        raise InputError(Problem(where=str(job.plan), message=message, hint=hint))


def _check_ring(plan: Plan, job: Job, device: torch.device) -> None:
    is_ring = any(s.cp > 1 and s.cp_comm is ContextComm.RING for s in plan.layout.strategies)
    if is_ring and device.type == "cuda" and plan.inputs.training.precision is Precision.FP32:
        message = "cp_comm ring in fp32, which flash attention of GPUs does not know"
        expected = "cp_comm gather, or bf16"
        raise InputError(Problem(where=str(job.plan), message=message, expected=expected))


def _device(wanted: str) -> torch.device:
    """The device of this rank, made the current one."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


class _Run:
    """The steps of one rank."""

    def __init__(self, job: Job, plan: Plan, device: torch.device) -> None:
        self.job, self.plan, self.device = job, plan, device
        training = plan.inputs.training
        self.data = data_of(plan, job)
        self.trainer = Trainer(
            plan.inputs.model,
            plan.layout,
            training,
            job.recipe,
            device=device,
            num_steps=job.steps,
            compiles=job.compiles,
        )
        self.progress = self._progress()
        self.checkpoints = Checkpoints(
            Shelf(job.out / CHECKPOINTS),
            self.trainer,
            facts_of_run(plan, job, self.data.identity),
            keep=job.keep,
            tell=self.progress.say,
        )
        self.stop = StopRequest()
        self.first = 0  # step of this start of the run
        self.passes: list[dict[str, float]] = []
        self.steps: list[StepFacts] = []
        self.ran = Traffic({}, {})
        self.started = time.strftime("%Y%m%dT%H%M%S", time.gmtime())

    def _progress(self) -> Progress:
        training, used = self.plan.inputs.training, self.plan.layout.mesh.num_ranks
        rate = self.plan.inputs.cluster.slowest_device.peak_flop_per_s[training.precision.gemm]
        flop = self.plan.inputs.context.model_flop_per_sequence * training.global_batch
        return Progress(
            self.job.out / LOG,
            plan=str(self.job.plan),
            num_steps=self.job.last,
            flop_of_a_step=flop,
            peak=rate * used,
        )

    def run(self) -> None:
        """The steps that are not done yet, then the record."""
        self._resume()
        every, last = self.job.checkpoint_every, self.job.last
        is_first = dist.get_rank() == 0
        with self.progress if is_first else nullcontext():
            for step in range(self.first, last):
                facts = self._step(step)
                if is_first:
                    self.progress.tell(facts, self._memory()[2])
                self.checkpoints.look()
                stops = self.trainer.stops and step + 1 < last
                if every and ((step + 1) % every == 0 or step + 1 == last or stops):
                    self.checkpoints.save()
                if stops:
                    break
            self.checkpoints.wait()
        self._record()
        if self.checkpoints.lost is not None:
            raise JobError(f"the last checkpoint could not be written: {self.checkpoints.lost}")
        if self.trainer.done < last:
            kept = (
                "with a checkpoint; the same command goes on" if every else "without a checkpoint"
            )
            raise StoppedError(f"stopped by SIGTERM after step {self.trainer.done}, {kept}")

    def _resume(self) -> None:
        """Go on behind the last whole checkpoint, if there is one."""
        found = self.checkpoints.load()
        if found is None:
            return
        check_not_done(found.step, self.job)
        self.first = self.progress.first = found.step
        if dist.get_rank() == 0:
            changed = changes(found.run, self.checkpoints.run)
            self.progress.say(
                f"going on from step {found.step}" + (f", with {changed}" if changed else "")
            )

    def _step(self, step: int) -> StepFacts:
        tokens, targets = self._batch(step)
        began_s = time.perf_counter()
        self.trainer.wants_stop = self.stop.is_made
        if step == min(self.first + COUNTED, self.job.last - 1):  # once: later steps run the same
            with TrafficLog(self.trainer.mesh.axes) as log:
                result = self.trainer.step(tokens, targets)
            self.ran = log.traffic
        else:
            result = self.trainer.step(tokens, targets)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        step_s = time.perf_counter() - began_s
        self.stop.step_done(stops=self.trainer.stops or step + 1 == self.job.last)
        self.passes.append(self.trainer.clock.take())
        facts = StepFacts(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            step_s=step_s,
            tokens_per_s=self.plan.inputs.training.tokens / step_s,
        )
        self.steps.append(facts)
        return facts

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens and targets of this rank of a step."""
        first, last = self.trainer.sequences
        tokens = self._rows(step, first)
        targets = tokens if first == last else self._rows(step, last)
        return tokens[:, :-1].contiguous(), targets[:, 1:].contiguous()

    def _rows(self, step: int, sequences: list[range]) -> torch.Tensor:
        begin = step * self.plan.inputs.training.global_batch
        rows = torch.cat([self.data.rows(begin + own.start, len(own)) for own in sequences])
        return rows.to(self.device, non_blocking=True)

    def _memory(self) -> tuple[int | None, int | None, int]:
        """Peak bytes: allocated, reserved, and of the device (on a CPU, of the process)."""
        if self.device.type == "cpu":
            factor = 1 if sys.platform == "darwin" else KIB
            return None, None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * factor
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.max_memory_reserved()
        outside = total - free - torch.cuda.memory_reserved()
        return torch.cuda.max_memory_allocated(), reserved, reserved + outside

    def _facts(self) -> RankFacts:
        allocated, reserved, whole = self._memory()
        trainer, model = self.trainer, self.plan.inputs.model
        planned = planned_traffic(
            trainer.parts,
            trainer.mesh,
            self.plan.inputs.training,
            trainer.numbers,
            model=model,
        )
        late = self.passes[1:] or self.passes
        return RankFacts(
            rank=dist.get_rank(),
            stage=trainer.mesh.stage,
            parameters=trainer.num_held,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            device_bytes=whole,
            forward_s=median(each.get("forward", 0.0) for each in late),
            backward_s=median(each.get("backward", 0.0) for each in late),
            ran=self.ran.document(),
            planned=planned.document(),
        )

    def _record(self) -> None:
        facts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(facts, asdict(self._facts()))
        if dist.get_rank() != 0:
            return
        software = {
            "torch": torch.__version__,
            "device": self.device.type,
            "mode": "compiled" if self.job.compiles else "eager",
            "started": self.started,
        }
        ranks = [RankFacts(**each) for each in facts]
        earlier = logged_steps(self.job.out / LOG, self.first)
        document = run_document(
            self.plan,
            self.steps,
            ranks,
            software=software,
            earlier=earlier,
            name=str(self.job.plan),
        )
        save_text(json.dumps(document, indent=2) + "\n", self.job.out / "run.json", force=True)
