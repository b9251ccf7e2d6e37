"""The optimizer, its learning rate over the run, and what decays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from profiles.training import Optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from executor.job import Recipe

__all__ = ["learning_rate", "make_optimizer", "set_steps", "states_of"]

MATRIX = 2  # dims of a parameter that decays


def learning_rate(recipe: Recipe, step: int, num_steps: int) -> float:
    """The rate of a step, counted from 0."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    whole = max(1, num_steps - recipe.warmup)
    done = min(1.0, (step - recipe.warmup) / whole)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return recipe.lr * (recipe.least + (1 - recipe.least) * cosine)


def make_optimizer(
    kind: Optimizer, parameters: Iterable[nn.Parameter], recipe: Recipe
) -> torch.optim.Optimizer:
    """AdamW, Adam or SGD with momentum. Matrices decay; norms and biases do not.

    Parameters of one group lie on one mesh, as torch's multi-tensor kernels ask for.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.dim() >= MATRIX, mesh), []).append(parameter)
    options = [
        {"params": own, "weight_decay": recipe.weight_decay if decays else 0.0}
        for (decays, _), own in groups.items()
    ]
    if kind is Optimizer.SGD:
        return torch.optim.SGD(options, lr=recipe.lr, momentum=recipe.momentum)
    if kind is Optimizer.ADAM:
        return torch.optim.Adam(options, lr=recipe.lr, betas=recipe.betas, fused=True)
    assert kind is Optimizer.ADAMW
    return torch.optim.AdamW(options, lr=recipe.lr, betas=recipe.betas, fused=True)


def states_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """What an optimizer keeps of a parameter beside the number of steps; zeros before the first."""
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    names = ("momentum_buffer",) if is_sgd else ("exp_avg", "exp_avg_sq")
    own = optimizer.state[parameter]
    for name in names:
        if name not in own:
            own[name] = torch.zeros_like(parameter)
    return {name: own[name] for name in names}


def set_steps(optimizer: torch.optim.Optimizer, done: int) -> None:
    """Let an optimizer go on as after so many steps."""
    for parameter, own in optimizer.state.items():
        if not isinstance(optimizer, torch.optim.SGD):
            own["step"] = torch.tensor(float(done), device=parameter.device)
