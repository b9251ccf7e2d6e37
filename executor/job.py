"""Job: what is run: a plan with its data, length and recipe. Read and checked without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from costmodel.schedules import SCHEDULES
from planner.native import layout_problems, model_problems, training_problems
from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from pathlib import Path

    from planner.plan import Plan

__all__ = [
    "CHECKPOINT_EVERY",
    "DEVICES",
    "KEEP",
    "OPTIONS",
    "RECIPE",
    "SYNTHETIC",
    "Job",
    "Recipe",
    "check_plan",
    "check_torch",
]

SYNTHETIC: Final = "synthetic"
DEVICES: Final = ("auto", "cpu", "cuda")
CHECKPOINT_EVERY: Final = 500
KEEP: Final = 2  # so that there is another if the last one is damaged
OPTIONS: Final = ("device", "checkpoint_every", "keep", "stop_at")
RECIPE: Final = ("lr", "warmup", "weight_decay", "clip", "seed")  # of a recipe, that flags say


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How weights are updated. The rate rises over ``warmup`` steps to ``lr``, then falls along a
    cosine to ``least`` of it at the end of the run. ``clip``: greatest norm of the gradients, 0
    for none. ``seed``: of the weights and the data.
    """

    lr: float = 3e-4
    warmup: int = 0
    least: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.9
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A plan file with everything that a run of it needs. ``data``: synthetic, or a folder.

    ``steps``: of the whole run, by which the learning rate goes; ``stop_at``: the last one for now.
    ``checkpoint_every``: steps, 0 for no checkpoints; the last ``keep`` of them stay.
    """

    plan: Path
    steps: int
    data: str
    out: Path
    device: str = "auto"
    recipe: Recipe = field(default_factory=Recipe)
    checkpoint_every: int = CHECKPOINT_EVERY
    keep: int = KEEP
    stop_at: int | None = None
    compiles: bool = False

    @property
    def last(self) -> int:
        """Steps done when it ends."""
        return self.steps if self.stop_at is None else min(self.stop_at, self.steps)

    def arguments(self) -> list[str]:
        """The job as arguments of the worker; those that are usual are left out."""
        usual = Recipe()
        own = [str(self.plan), "--steps", str(self.steps), "--data", self.data]
        own += ["--out", str(self.out)]
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in OPTIONS and value != each.default:
                own += ["--" + each.name.replace("_", "-"), str(value)]
        own += ["--compile"] if self.compiles else []
        for name in RECIPE:
            value = getattr(self.recipe, name)
            if value != getattr(usual, name):
                own += ["--" + name.replace("_", "-"), f"{value:g}"]
        return own


def check_torch(where: str) -> None:
    """Raise ``InputError`` where PyTorch is not installed."""
    if find_spec("torch") is None:
        hint = "pip install 'parplan[torch]'"
        raise InputError(Problem(where=where, message="needs PyTorch", hint=hint))


def check_plan(plan: Plan, where: str, *, compiles: bool = False) -> None:
    """Raise ``InputError`` with every rule of the executor that a plan breaks; ``compiles``: with
    blocks compiled.
    """
    model, training = plan.inputs.model, plan.inputs.training
    problems = [
        *model_problems(model, training),
        *training_problems(training),
        *layout_problems(model, training, plan.layout),
    ]
    if compiles and SCHEDULES[plan.layout.schedule].splits:
        problems.append(
            f"--compile with {plan.layout.schedule}, which runs a backward pass in two parts; that "
            "of a compiled block is one"
        )
    if problems:
        raise InputError(
            [Problem(where=where, message=f"cannot be executed: {each}") for each in problems]
        )
