"""Tensor parallelism of modules that were written without it: a model's own table says how each of
them is split, and its forward pass runs on the part of this rank.

Weights are DTensors, activations plain tensors, which cross as in native layers (``TensorGroup``).
Styles are called as ``transformers`` calls them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call
from torch.nn import functional

from executor.models.parameters import local_part
from executor.models.tensorgroup import applied
from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from executor.models.tensorgroup import TensorGroup

__all__ = ["Styles", "split_tensor", "style_problems"]

COLUMNS, COLUMNS_GATHERED, ROWS = "colwise", "colwise_gather_output", "rowwise"
VOCABULARY: Final = "embedding_rowwise"
SUMMED, WHOLE = "replicated_with_grad_allreduce", "replicate"
OTHER_NAMES: Final = {"colwise_rep": COLUMNS_GATHERED}
MODULES: Final[dict[str, type[nn.Module]]] = {
    COLUMNS: nn.Linear,
    COLUMNS_GATHERED: nn.Linear,
    ROWS: nn.Linear,
    VOCABULARY: nn.Embedding,
    SUMMED: nn.Module,
    WHOLE: nn.Module,
}
SPLIT_DIMS: Final = {
    COLUMNS: {"weight": 0, "bias": 0},
    COLUMNS_GATHERED: {"weight": 0, "bias": 0},
    ROWS: {"weight": 1},  # a bias is added once
    VOCABULARY: {"weight": 0},
}


@dataclass(frozen=True, slots=True)
class Styles:
    """The style of every module of ``model`` that has parameters of its own; ``table``: by the
    names of modules, in which ``*`` stands for a number.
    """

    model: nn.Module
    table: Mapping[str, str]

    def of(self, name: str) -> str:
        """Of one module; what the table does not name is whole on every rank."""
        style = self.table.get(name) or self.table.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        return OTHER_NAMES.get(style or "", style or WHOLE)

    def split_dims(self, name: str) -> dict[str, int]:
        """The dims along which the parameters of a module are split; others are whole."""
        return SPLIT_DIMS.get(self.of(name), {})

    def owners(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that have parameters of their own."""
        for name, module in self.model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                yield name, module

    def entrances(self) -> Iterator[str]:
        """Modules whose first input enters what is split: those right around columns, so that the
        gradients of all that read it are summed at once; the head is its own.
        """
        columns = [n for n, _ in self.owners() if self.of(n) in (COLUMNS, COLUMNS_GATHERED)]
        yield from dict.fromkeys(name.rpartition(".")[0] or name for name in columns)

    def apply(self, tp: TensorGroup, stream: list[nn.Module]) -> None:
        """Let every module run on the parts of weights that it has by then. ``stream``: modules
        on the residual stream, of which ranks have parts of the sequences with sequence
        parallelism: the gradients of their whole weights are sums.
        """
        residual = {part for each in stream for part in each.modules()} if tp.sequence else set()
        for name, module in self.owners():
            _run_split(module, self.of(name), tp, sums=module in residual)
        for name in self.entrances():
            _enter(self.model.get_submodule(name), tp)
        if tp.sequence:
            _share(stream[0], tp)


def style_problems(styles: Styles) -> Iterator[str]:
    """What of a table cannot be run."""
    named = [(name, styles.of(name), module) for name, module in styles.owners()]
    for name, style, module in named:
        if style not in MODULES:
            yield f"{name} has the style {style}; expected one of {', '.join(MODULES)}"
        elif MODULES[style] is not nn.Module and type(module) is not MODULES[style]:
            kind = MODULES[style].__name__
            yield f"{name} is of {type(module).__name__}; expected {kind} for the style {style}"
    tied: dict[nn.Parameter, tuple[str, int | None]] = {}
    for name, _, module in named:
        for own, parameter in module.named_parameters(recurse=False):
            dim = styles.split_dims(name).get(own)
            first, other = tied.setdefault(parameter, (name, dim))
            if other != dim:
                yield f"{first} and {name} share {own}, and the plan table splits it in two ways"
    for entrance in styles.entrances():
        inside = [each for each in named if each[0].startswith(entrance + ".")]
        yield from (
            f"{name} is not in the model's plan table, though what it reads is split"
            for name, style, _ in inside
            if style == WHOLE
        )


def split_tensor(whole: Tensor, dim: int | None, tp: TensorGroup, device: torch.device) -> Tensor:
    """The part of this rank, as a DTensor with memory of its own; of one rank alone all."""
    if tp.mesh is None:
        return whole.to(device)
    placements = [Replicate() if dim is None else Shard(dim)]
    shape, offset = local_part(tuple(whole.shape), tp.mesh, placements)
    own = whole[tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))]
    local = own.to(device, copy=True, memory_format=torch.contiguous_format)
    found: DTensor = DTensor.from_local(
        local, tp.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return found


def _own(parameter: Tensor, tp: TensorGroup, *, sums: bool = False) -> Tensor:
    """The part of this rank; ``sums``: its gradient is one part of a sum over the ranks."""
    if not isinstance(parameter, DTensor):
        return parameter
    local: Tensor = parameter.to_local()
    return replace(tp, sequence=False).enter(local) if sums else local


class _Unhooked(nn.Module):
    """A module's forward pass as it was written, without the hooks around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.run = inner.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _run_split(module: Any, style: str, tp: TensorGroup, *, sums: bool) -> None:
    """Replace the forward pass of one module."""
    plain = _Unhooked(module)

    def as_written(*args: Any, **kwargs: Any) -> Any:
        parameters = dict(module.named_parameters(recurse=False))
        every = style == SUMMED or (sums and style == WHOLE)
        own = {f"inner.{name}": _own(p, tp, sums=every) for name, p in parameters.items()}
        return functional_call(plain, own, args, kwargs)

    def gathered(x: Tensor) -> Tensor:
        return applied(_GatherColumns, as_written(x), module.weight.shape[0], tp)

    def rows(x: Tensor) -> Tensor:
        y = tp.leave(functional.linear(x, _own(module.weight, tp)))
        return y if module.bias is None else y + _own(module.bias, tp, sums=sums)

    def looked_up(tokens: Tensor) -> Tensor:
        return _looked_up(tokens, module, tp)

    own_ways = {COLUMNS_GATHERED: gathered, ROWS: rows, VOCABULARY: looked_up}
    module.forward = own_ways.get(style, as_written)


class _GatherColumns(Function):
    """(..., own part of ``width``) -> (..., width), with which every rank does the same; backward
    each takes its part of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, width: int, tp: TensorGroup) -> Tensor:
        assert tp.mesh is not None
        shape = torch.Size((*y.shape[:-1], width))
        (ctx.width, *_), (ctx.first, *_) = local_part((width,), tp.mesh, [Shard(0)])
        stride = torch.empty(shape, device="meta").stride()
        parts = DTensor.from_local(
            y, tp.mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride
        )
        whole: Tensor = parts.redistribute(placements=[Replicate()]).to_local()
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].narrow(-1, ctx.first, ctx.width), None, None


def _looked_up(tokens: Tensor, module: nn.Embedding, tp: TensorGroup) -> Tensor:
    """Rows of a matrix of which each rank has some: the others add zeros."""
    assert tp.mesh is not None
    _, (first, _) = local_part(tuple(module.weight.shape), tp.mesh, [Shard(0)])
    own = _own(module.weight, tp)
    inside = (tokens >= first) & (tokens < first + len(own))
    padding = module.padding_idx
    if padding is not None:
        padding = padding - first if first <= padding < first + len(own) else None
    rows = functional.embedding((tokens - first).clamp(0, len(own) - 1), own, padding)
    return replace(tp, sequence=False).leave(rows * inside[..., None])


def _enter(module: nn.Module, tp: TensorGroup) -> None:
    """Let the first input of a module enter what is split."""
    _change_input(module, tp.enter)


def _share(module: nn.Module, tp: TensorGroup) -> None:
    """Let a module have this rank's part of the sequences that are its first input; backward their
    gradients are gathered.
    """
    assert tp.mesh is not None
    mesh = tp.mesh

    def share(x: Tensor) -> Tensor:
        if x.shape[1] % tp.size:
            message = f"sequences of {x.shape[1]} tokens do not divide by tp {tp.size}"
            raise InputError(Problem(where="model input", message=message))
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        part: Tensor = whole.redistribute(placements=[Shard(1)]).to_local()
        return part

    _change_input(module, share)


def _change_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """What the first input of a module goes through."""
    name = next(iter(signature(module.forward).parameters))

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {name: change(kwargs[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True)
