"""Checkpoints of a run: saved behind its back, loaded under whatever layout it has now.

A parameter is called by its name in the model and stands there as the shards that ranks hold, so
``torch.distributed.checkpoint`` gives every rank of another layout its part. No rank ever holds
more than it trains.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from executor.checkpointfiles import Damaged, Manifest
from executor.checkpointwriter import CheckpointWriter
from executor.gradients import local_tensor
from executor.models.parameters import SplitModule
from executor.optimizer import set_steps, states_of
from executor.resuming import check_same_run
from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor, nn
    from torch.distributed.checkpoint.metadata import Metadata

    from executor.checkpointfiles import Shelf
    from executor.trainer import Trainer

__all__ = ["Checkpoints"]


class Checkpoints:
    """Of one run. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        shelf: Shelf,
        trainer: Trainer,
        run: dict[str, Any],
        *,
        keep: int,
        tell: Callable[[str], None],
    ) -> None:
        """``run``: what makes it this run; ``tell``: called on rank 0 with what users must know."""
        self.shelf, self.trainer, self.run = shelf, trainer, run
        self.keep, self.tell = keep, tell
        # A group of its own, since saves talk while the next step does; on CPUs, since they can.
        self.group = dist.new_group(backend="gloo")
        self.is_first = dist.get_rank() == 0
        self.saving: tuple[int, Future[Any]] | None = None
        self.last_step: int | None = None  # of the last whole checkpoint
        self.lost: str | None = None  # why the last save has failed

    def save(self) -> None:
        """Begin to save the steps done so far, when the save before has ended. Values are copied
        before this returns, files are written while training goes on.
        """
        self.wait()
        step = self.trainer.done
        values, _ = _values(self.trainer)
        writer = CheckpointWriter(
            self.shelf, Manifest(step=step, run=self.run, files={}), keep=self.keep
        )
        future = async_save(
            values,
            storage_writer=writer,
            planner=DefaultSavePlanner(flatten_state_dict=False),
            process_group=self.group,
        )
        assert isinstance(future, Future)  # the writer has staged the values by now
        self.saving = (step, future)

    def look(self) -> None:
        """Tell what became of a save, if it has ended."""
        if self.saving is not None and self.saving[1].done():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being saved. A save that the disk refuses costs that checkpoint only."""
        if self.saving is None:
            return
        (step, future), self.saving = self.saving, None
        try:
            future.result()
        except CheckpointException as error:
            self.lost = _reason(error)
            if self.is_first:
                self.shelf.discard(step)
                last = "none" if self.last_step is None else f"that of step {self.last_step}"
                self.tell(
                    f"checkpoint of step {step} not written: {self.lost}; the last one is {last}"
                )
        else:
            self.last_step, self.lost = step, None

    def load(self) -> Manifest | None:
        """Take up the latest checkpoint that is whole, None where there is none yet.

        Raises ``InputError`` where it is another run's, or where all are damaged.
        """
        damage: dict[int, str] = {}
        for step in self._of_first(self._swept):
            found = self._of_first(partial(self._opened, step))
            if isinstance(found, Manifest):
                check_same_run(found.run, self.run, self.shelf.path(step))
                found = self._damage(found) or found
            if isinstance(found, Manifest):
                self._take(found)
                self._set_aside(damage, step)
                return found
            damage[step] = found
        if damage:
            hint = "no checkpoint is whole; another --out begins anew"
            raise InputError(
                [
                    Problem(where=str(self.shelf.path(step)), message=text, hint=hint)
                    for step, text in damage.items()
                ]
            )
        return None

    def _of_first(self, ask: Callable[[], Any]) -> Any:
        """What rank 0 finds, on all ranks, so that they agree; its ``InputError`` too."""
        answer: list[tuple[Any, list[Problem]]] = [(None, [])]
        if self.is_first:
            try:
                answer = [(ask(), [])]
            except InputError as error:
                answer = [(None, error.problems)]
        dist.broadcast_object_list(answer, src=0, group=self.group)
        found, problems = answer[0]
        if problems:
            raise InputError(problems)
        return found

    def _swept(self) -> list[int]:
        self.shelf.sweep()
        return self.shelf.steps

    def _opened(self, step: int) -> Manifest | str:
        """The manifest, or what is wrong with it."""
        try:
            return self.shelf.manifest(step)
        except Damaged as damage:
            return str(damage)

    def _damage(self, manifest: Manifest) -> str | None:
        """What is wrong with the files of a checkpoint, if something is; each rank reads some."""
        own = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
        told: list[str | None] = [None] * dist.get_world_size()
        text = None
        try:
            for name in own:
                manifest.files[name].verify(self.shelf.path(manifest.step) / name)
        except Damaged as damage:
            text = str(damage)
        dist.all_gather_object(told, text, group=self.group)
        return next((each for each in told if each is not None), None)

    def _take(self, manifest: Manifest) -> None:
        path = self.shelf.path(manifest.step)
        values, copies = _values(self.trainer)
        reader = FileSystemReader(path)
        _check_names(reader.read_metadata(), values, path)
        load(
            values,
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            process_group=self.group,
        )
        for copy, source in copies:
            local_tensor(copy).copy_(local_tensor(source))
        self.trainer.done = self.last_step = manifest.step
        set_steps(self.trainer.optimizer, manifest.step)

    def _set_aside(self, damage: dict[int, str], taken: int) -> None:
        for step, text in damage.items() if self.is_first else ():
            aside = self.shelf.set_aside(step)
            self.tell(
                f"checkpoint of step {step} is damaged: {text}; going on from step {taken}, "
                f"the damaged one is now {aside}"
            )


def _values(trainer: Trainer) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Parameters and optimizer states of this rank by name; and what it holds twice: a tied matrix
    in two chunks, of which the second is a copy.
    """
    values: dict[str, Tensor] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for name, parameter in _named(trainer):
        states = states_of(trainer.optimizer, parameter)
        own = {f"model.{name}": parameter.detach()}
        own |= {f"optimizer.{name}.{state}": value for state, value in states.items()}
        if f"model.{name}" in values:
            copies += [(value, values[key]) for key, value in own.items()]
        else:
            values |= own
    return values, copies


def _named(trainer: Trainer) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once, by its name in the model; that of a tied matrix is the embedding's,
    wherever it stands.
    """
    seen: set[int] = set()
    for part in trainer.parts:
        for path, module in part.chain.named_modules():
            for name, traits in module.traits.items() if isinstance(module, SplitModule) else ():
                parameter = module.get_parameter(name)
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield traits.like or f"{path}.{name}", parameter


def _check_names(metadata: Metadata, values: dict[str, Tensor], path: Path) -> None:
    """Raise ``InputError`` where a checkpoint lacks what is wanted, or has it in another shape."""
    found = {
        name: tuple(own.size)
        for name, own in metadata.state_dict_metadata.items()
        if isinstance(own, TensorStorageMetadata)
    }
    for name, value in values.items():
        if found.get(name) != tuple(value.shape):
            message = f"has {name} as {found.get(name, 'nothing')}, the plan as {(*value.shape,)}"
            hint = "a checkpoint of this model and optimizer, or another --out"
            raise InputError(Problem(where=str(path), message=message, hint=hint))


def _reason(error: CheckpointException) -> str:
    """What the disk said to which rank. Raises the error where it was not the disk."""
    for rank, (cause, _) in sorted(error.failures.items()):
        if isinstance(cause, OSError):
            return f"rank {rank}: {cause.strerror or cause}"
    raise error
