"""Passes of one step: micro-batches through the chunks of this rank, alone or in a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from costmodel.schedules import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from costmodel.layout import Layout, Strategy
    from executor.clock import Clock
    from executor.models.chain import Chain
    from executor.strategies import DataParallel

__all__ = ["Accumulation", "Part", "Passes", "Pipeline"]

OF_ONE_CHUNK: Final[dict[str, Any]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
OF_CHUNKS: Final[dict[str, Any]] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk of this rank: its number in the order of the model, its layers, its wrappers."""

    number: int
    chain: Chain
    data_parallel: DataParallel


class Passes(Protocol):
    """Runs all passes of a step."""

    def run(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Gradients of this replica's share, (sequences, sequence length); its loss, or zero
        where another rank has the head.
        """


class _Counted(nn.Module):
    """A chain that tells its data-parallel wrappers which backward pass is the last.

    It is no FSDP module itself, so torch's stage runtime leaves the wrappers alone; of its own it
    would make ZeRO-1 of every stage of ZeRO.
    """

    def __init__(self, part: Part, num_passes: int) -> None:
        super().__init__()
        self.chain, self.num_passes = part.chain, num_passes
        self.data_parallel = part.data_parallel
        self.begun = 0

    def start(self) -> None:
        """Before the first pass of a step."""
        self.begun = 0
        self.data_parallel.set_last_backward(last=self.num_passes == 1)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        y: Tensor = self.chain(x, targets)
        if y.requires_grad:
            y.register_hook(self._before_backward)
        return y

    def _before_backward(self, _gradient: Tensor) -> None:
        self.begun += 1
        if self.begun == self.num_passes:
            self.data_parallel.set_last_backward(last=True)


class Accumulation:
    """No pipeline: each micro-batch forward, then backward."""

    def __init__(self, layout: Layout, part: Part, clock: Clock) -> None:
        """``part``: the whole model."""
        self.layout, self.clock = layout, clock
        self.module = _Counted(part, layout.num_microbatches)

    def run(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """See ``Passes``."""
        self.module.start()
        sizes = [self.layout.micro_batch_of(end) for end in self.layout.ends]
        total = torch.zeros((), device=tokens.device)
        for own, wanted in zip(tokens.split(sizes[0]), targets.split(sizes[1]), strict=True):
            with self.clock.busy("forward"):
                loss = self.module(own, wanted)
            with self.clock.busy("backward"):
                loss.backward()
            total = total + loss.detach()
        return total


class Pipeline:
    """A schedule of ``torch.distributed.pipelining`` over the chunks of this rank."""

    def __init__(
        self,
        layout: Layout,
        parts: Sequence[Part],
        group: dist.ProcessGroup,
        clock: Clock,
        *,
        seq_len: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``group``: the ranks of this pipeline."""
        count = layout.num_microbatches
        splits = SCHEDULES[layout.schedule].splits
        self.modules = [] if splits else [_Counted(part, count) for part in parts]
        shapes = _Shapes(layout, seq_len, hidden, dtype)
        stages = [
            _TimedStage(
                part.chain if splits else self.modules[index],
                part.number,
                len(layout.chunks),
                device,
                input_args=shapes.into(part.number),
                output_args=shapes.out_of(part.number),
                group=group,
            )
            for index, part in enumerate(parts)
        ]
        for stage in stages:
            stage.clock = clock
        how = {"n_microbatches": count, "loss_fn": _own_loss, "scale_grads": False}
        if layout.schedule in OF_ONE_CHUNK:
            self.schedule = OF_ONE_CHUNK[layout.schedule](stages[0], **how)
        else:
            self.schedule = OF_CHUNKS[layout.schedule](stages, **how)
        self.is_first = any(stage.is_first for stage in stages)
        self.is_last = any(stage.is_last for stage in stages)

    def run(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """See ``Passes``."""
        for module in self.modules:
            module.start()
        losses: list[Tensor] = []
        own = (tokens,) if self.is_first else ()
        wanted = {"target": targets, "targets": targets} if self.is_last else {}
        self.schedule.step(*own, **wanted, losses=losses, return_outputs=False)
        zero = torch.zeros((), device=tokens.device)
        return zero + sum((loss.detach() for loss in losses), start=zero)


def _own_loss(output: Tensor, _target: Tensor) -> Tensor:
    """The head's output is the loss."""
    return output


class _TimedStage(PipelineStage):
    """A stage that says when it computes."""

    clock: Clock

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.busy("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.busy("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.busy("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Shapes:
    """What chunks hand to one another: tensors without data."""

    layout: Layout
    seq_len: int
    hidden: int
    dtype: torch.dtype

    def _stream(self, strategy: Strategy) -> Tensor:
        """What a layer of ``strategy`` hands on."""
        length = self.seq_len // (strategy.tp if strategy.sequence_parallel else 1)
        shape = (self.layout.micro_batch_of(strategy), length, self.hidden)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    def into(self, number: int) -> Tensor:
        """The input of one micro-batch of a chunk, as the layer before it hands it on."""
        before = self.layout.strategy_before(self.layout.chunks[number])
        if before is None:
            shape = (self.layout.micro_batch_of(self.layout.ends[0]), self.seq_len)
            return torch.empty(shape, dtype=torch.int64, device="meta")
        return self._stream(before)

    def out_of(self, number: int) -> Tensor:
        """The output of one micro-batch of a chunk."""
        if number == len(self.layout.chunks) - 1:
            wide = torch.promote_types(self.dtype, torch.float32)
            return torch.empty((), dtype=wide, device="meta", requires_grad=True)
        return self._stream(self.layout.chunks[number].spans[-1].strategy)
