"""Parameters of native layers: made on the meta device, split, then given values in place.

Values come from a counter: element i of parameter p is a function of (seed, p, i), so each rank
fills its own shard and every layout starts from the same model, though none ever holds it whole.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from executor.models.exchange import ExpertGroup
    from executor.models.tensorgroup import TensorGroup

__all__ = [
    "SplitModule",
    "Traits",
    "counted_words",
    "initialise",
    "local_part",
    "split_parameters",
]

ROWS_AT_ONCE: Final = 1 << 20  # elements whose random words live at a time


@dataclass(frozen=True, slots=True)
class Traits:
    """Of a parameter: the dim that tensor parallelism splits, how it starts (a standard
    deviation, or a constant), and whether its gradient on one rank is a part of the sum.
    ``like``: the parameter whose values it has, where it is not its own.
    """

    split: int | None = None
    std: float = 0.0
    constant: float = 0.0
    partial: bool = False
    like: str = ""


class SplitModule(nn.Module):
    """A module whose parameters know how a ``TensorGroup`` splits them."""

    def __init__(self, tp: TensorGroup) -> None:
        """Without parameters yet."""
        super().__init__()
        self.tp = tp
        self.traits: dict[str, Traits] = {}

    @property
    def ranks(self) -> TensorGroup | ExpertGroup:
        """The ranks over which parameters are split."""
        return self.tp

    def add(self, name: str, shape: tuple[int, ...], traits: Traits) -> None:
        """Register a parameter of ``shape``, whole, on the meta device."""
        self.traits[name] = traits
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))

    def own(self, name: str) -> Tensor | None:
        """The part that this rank has of a parameter, None where there is none of that name."""
        weight: Tensor | None = getattr(self, name, None)
        if not isinstance(weight, DTensor):
            return weight
        partial = [Partial()] if self.traits[name].partial else None
        local: Tensor = weight.to_local(grad_placements=partial)
        return local

    def part(self, name: str) -> Tensor:
        """As ``own``, of a parameter that there is."""
        weight = self.own(name)
        assert weight is not None
        return weight


def local_part(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the part of this rank, and where it begins; numbers also where tensors are fake."""
    with unset_fake_temporarily():
        return compute_local_shape_and_global_offset(shape, mesh, placements)


def split_parameters(module: nn.Module) -> None:
    """Replace the parameters of every split module by DTensors over its group."""
    done: dict[nn.Parameter, nn.Parameter] = {}  # a tied matrix stays one
    for part in module.modules():
        if not isinstance(part, SplitModule) or part.ranks.mesh is None:
            continue
        for name, traits in part.traits.items():
            whole = getattr(part, name)
            if whole not in done:
                done[whole] = nn.Parameter(_split(whole, traits, part.ranks))
            part.register_parameter(name, done[whole])


def _split(whole: Tensor, traits: Traits, ranks: TensorGroup | ExpertGroup) -> DTensor:
    placements = ranks.placements(traits.split)
    assert ranks.mesh is not None
    shape, _ = local_part(whole.shape, ranks.mesh, placements)
    local = torch.empty(shape, device="meta", dtype=whole.dtype)
    found: DTensor = DTensor.from_local(
        local, ranks.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return found


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Give every parameter its value, by its name, which is the same in any stage."""
    for path, part in module.named_modules():
        if not isinstance(part, SplitModule):
            continue
        for name, traits in part.traits.items():
            parameter = getattr(part, name)
            local, offset = parameter, (0,) * parameter.dim()
            if isinstance(parameter, DTensor):
                local = parameter.to_local()
                _, offset = local_part(parameter.shape, parameter.device_mesh, parameter.placements)
            if not local.numel():
                continue
            if traits.std:
                known_as = traits.like or f"{path}.{name}"
                key = zlib.crc32(f"{seed}:{known_as}".encode())
                _fill_normal(local, traits.std, key, tuple(parameter.shape), offset)
            else:
                local.fill_(traits.constant)


def _fill_normal(
    local: Tensor, std: float, key: int, shape: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    """Normal values of the elements from ``offset`` on, some rows (of the first dim) at a time."""
    inside = torch.zeros((), dtype=torch.int64, device=local.device)  # index within a row
    for size, count, first in zip(shape[1:], local.shape[1:], offset[1:], strict=True):
        inside = inside[..., None] * size + torch.arange(count, device=local.device) + first
    step = max(1, ROWS_AT_ONCE // max(1, inside.numel()))
    for first in range(0, local.shape[0], step):
        rows = torch.arange(first, min(first + step, local.shape[0]), device=local.device)
        index = (rows + offset[0]).view(-1, *[1] * inside.dim()) * math.prod(shape[1:]) + inside
        uniform = [_uniform(counted_words(index, 2 * key + part)) for part in (0, 1)]
        radius = torch.sqrt(-2 * torch.log(uniform[0]))
        local[rows] = (std * radius * torch.cos(2 * math.pi * uniform[1])).to(local.dtype)


def _uniform(words: Tensor) -> Tensor:
    """Random words -> float64 in (0, 1)."""
    return ((words & ((1 << 52) - 1)).double() + 0.5) / float(1 << 52)


def counted_words(index: Tensor, key: int) -> Tensor:
    """A random 64-bit word for each index: the finaliser of SplitMix64 (Steele et al. 2014)."""
    word = index * _signed(0x9E3779B97F4A7C15) + _signed(key * 0xD1342543DE82EF95)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ _shifted(word, shift)) * _signed(factor)
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of signed words."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
