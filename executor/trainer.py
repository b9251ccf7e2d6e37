"""Trainer: the part of a plan that one rank runs, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from executor.clock import Clock
from executor.compiling import compile_blocks
from executor.gradients import TiedEnds, scale_gradients, squared_norm, sum_partial
from executor.mesh import RankMesh
from executor.optimizer import learning_rate, make_optimizer
from executor.pipeline import Accumulation, Part, Passes, Pipeline
from executor.precision import Numbers, numbers_of
from executor.strategies import build_chunk

if TYPE_CHECKING:
    from torch import Tensor, nn

    from costmodel.layout import Layout
    from executor.job import Recipe
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = ["StepResult", "Trainer"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of one step: mean loss of a token, norm of the gradients before clipping, learning rate;
    whether any rank wants to stop after it.
    """

    loss: float
    grad_norm: float
    lr: float
    stops: bool = False


class Trainer:
    """Model, optimizer and passes of this rank; the same values on every rank of the job."""

    def __init__(
        self,
        model: ModelSpec,
        layout: Layout,
        training: TrainingSpec,
        recipe: Recipe,
        *,
        device: torch.device,
        num_steps: int,
        numbers: Numbers | None = None,
        compiles: bool = False,
    ) -> None:
        """``numbers``: other types than the training run's; ``compiles``: its blocks."""
        self.layout, self.recipe, self.num_steps = layout, recipe, num_steps
        self.device = device
        self.numbers = numbers or numbers_of(training)
        self.mesh = RankMesh(layout, device.type)
        self.clock = Clock(device)
        self.parts = [
            Part(
                number,
                *build_chunk(
                    model,
                    chunk,
                    self.mesh,
                    self.numbers,
                    num_tokens=training.tokens,
                    seed=recipe.seed,
                    device=device,
                ),
            )
            for number, chunk in enumerate(layout.chunks)
            if chunk.stage == self.mesh.stage
        ]
        for part in self.parts if compiles else ():
            compile_blocks(part.chain)
        self.tied = TiedEnds(model, layout, self.parts)
        self.passes = self._passes(model, training)
        self.optimizer = make_optimizer(training.optimizer, self.parameters(), recipe)
        self.done = 0
        self.wants_stop = False  # on this rank
        self.stops = False  # on any rank, as of the last step

    def _passes(self, model: ModelSpec, training: TrainingSpec) -> Passes:
        if self.layout.num_stages == 1:
            return Accumulation(self.layout, self.parts[0], self.clock)
        assert model.hidden is not None
        return Pipeline(
            self.layout,
            self.parts,
            self.mesh.pipeline,
            self.clock,
            seq_len=training.seq_len // self.layout.mesh.cp,
            hidden=model.hidden,
            dtype=self.numbers.activations,
            device=self.device,
        )

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What this rank holds, by its name in the model."""
        return {name: p for part in self.parts for name, p in part.chain.named_parameters()}

    def parameters(self) -> list[nn.Parameter]:
        """What this rank holds."""
        return [p for part in self.parts for p in part.chain.parameters()]

    @property
    def num_held(self) -> int:
        """Parameter elements that this rank holds between steps."""
        return sum(getattr(p, "_local_tensor", p).numel() for p in self.parameters())

    @property
    def sequences(self) -> tuple[list[range], list[range]]:
        """Those of a step's batch whose tokens and whose targets this rank takes."""
        first, last = (self.mesh.sequences(end) for end in self.layout.ends)
        return first, last

    def gradients(self, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
        """Run the passes on this rank's ``sequences``; loss and norm, the same on all ranks."""
        total, square, stops = self.totals(tokens, targets).tolist()
        self.stops = stops > 0
        return float(total), float(square) ** 0.5

    def totals(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The same on the device, the norm squared; and how many ranks want to stop."""
        own = (self.mesh.context.own(each, 1).contiguous() for each in (tokens, targets))
        loss = self.passes.run(*own)
        parameters = self.parameters()
        sum_partial(parameters)
        self.tied.sum()
        squares = squared_norm(parameters, self.tied.copies)
        is_first = self.mesh.tensor_group(self.layout.ends[1]).rank == 0
        counted = loss if is_first else torch.zeros_like(loss)
        stops = torch.full_like(squares, float(self.wants_stop), dtype=torch.float64)
        sums = torch.stack((counted.double(), squares.double(), stops))
        dist.all_reduce(sums)
        return sums

    def step(self, tokens: Tensor, targets: Tensor) -> StepResult:
        """One optimizer step on the global batch, of which these are this rank's ``sequences``."""
        loss, norm = self.gradients(tokens, targets)
        clip = self.recipe.clip
        if clip and norm > clip:
            scale_gradients(self.parameters(), clip / norm)
        return StepResult(loss, norm, self.update(), self.stops)

    def update(self) -> float:
        """Change the weights by their gradients, which are then gone; the learning rate."""
        lr = learning_rate(self.recipe, self.done, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return lr
