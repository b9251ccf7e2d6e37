"""A layer on one rank, alone: built and wrapped as the executor does it, its group pretended.

The group is torch's fake one: every other rank answers with this rank's own data, at the cost of a
copy. What runs is the code of a real run without waiting for anybody. A layer that fits into caches
is there several times, one after another, so that each finds its weights as cold as in a model.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor

from costmodel.layers import rank_parameters
from costmodel.layout import Chunk, LayerSpan, Layout, Mesh, Strategy
from executor.job import Recipe
from executor.mesh import RankMesh
from executor.models.block import forget_tables
from executor.optimizer import make_optimizer
from executor.precision import numbers_of
from executor.profiler.points import layer_labels
from executor.strategies import build_chunk
from profiles.layers import Block, Embedding, Head
from profiles.model import LayerRun, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from executor.precision import Numbers
    from executor.profiler.points import Point
    from profiles.training import TrainingSpec

__all__ = ["Probe", "num_copies", "pretended_group", "pretended_tensors"]

CACHES: Final = 64 * 2**20  # bytes; what equal layers must exceed together
MOST_COPIES: Final = 8


@contextmanager
def pretended_group(size: int) -> Iterator[None]:
    """A process group of ``size`` ranks of which only this one exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def pretended_tensors() -> Iterator[None]:
    """Tensors that have sizes but no memory, and operators that take no time."""
    forget_tables()
    try:
        with FakeTensorMode():
            yield
    finally:
        forget_tables()


class Probe:
    """The layers of a point with an optimizer and inputs. Needs a process group of its size."""

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        point: Point,
        device: torch.device,
        *,
        copies: int | None = None,
        strategy: Strategy | None = None,
        numbers: Numbers | None = None,
    ) -> None:
        """``copies`` of the layer, as many as exceed the caches if None. ``strategy``: another
        than the point's plain one; ``numbers``: other types than the training run's.
        """
        layer = layer_labels(model)[point.layer]
        strategy = strategy or point.strategy
        self.copies = copies or num_copies(model, layer, strategy, training)
        own, first = _around(model, layer, self.copies)
        chunk = Chunk(0, 0, (LayerSpan(first, first + self.copies, strategy),))
        mesh = Mesh(tp=strategy.tp, dp=strategy.dp)
        layout = Layout(
            mesh=mesh, schedule="1f1b", num_chunks=1,
            micro_batch=point.batch, num_microbatches=1, chunks=(chunk,),
        )  # fmt: skip
        numbers = numbers or numbers_of(training)
        with unset_fake_temporarily() as fake:
            self.chain, self.data_parallel = build_chunk(
                own, chunk, RankMesh(layout, device.type), numbers,
                num_tokens=point.batch * point.seq_len, seed=0,
                device=torch.device("meta") if fake else device,
            )  # fmt: skip
        if fake:
            _pretend(self.chain, device)
        self.optimizer = make_optimizer(training.optimizer, self.parameters(), Recipe())
        self.num_parameters = rank_parameters(layer, strategy)[0]
        self.targets = self.gradient = None
        tokens = torch.arange(point.batch * point.seq_len, device=device)
        tokens = tokens.view(point.batch, point.seq_len)
        length = point.seq_len // (strategy.tp if strategy.sequence_parallel else 1)
        width = own.hidden
        assert width is not None
        shape = (point.batch, length, width)
        generator = torch.Generator(device).manual_seed(0)
        stream: dict[str, Any] = {
            "generator": generator,
            "device": device,
            "dtype": numbers.activations,
        }
        if isinstance(layer, Embedding):
            self.x = tokens % layer.vocab
        else:
            self.x = torch.randn(shape, **stream)
        if isinstance(layer, Head):
            self.targets = tokens % layer.vocab
        else:
            self.gradient = torch.randn(shape, **stream)

    def parameters(self) -> list[nn.Parameter]:
        """Of all copies."""
        return list(self.chain.parameters())

    def forward(self) -> Tensor:
        """One pass; the input takes a gradient as it does behind another layer."""
        x = self.x.detach()
        if x.is_floating_point():
            x.requires_grad_()
        y: Tensor = self.chain(x, self.targets)
        return y

    def backward(self, y: Tensor) -> None:
        """The pass back."""
        y.backward(self.gradient)


def _pretend(chain: nn.Module, device: torch.device) -> None:
    """Give a chain on the meta device fake parameters on ``device``; a tied one stays one. Neither
    chain nor groups can be built of fake tensors, and parameters cannot be moved to them.
    """
    done: dict[nn.Parameter, nn.Parameter] = {}
    for part in chain.modules():
        for name, whole in list(part.named_parameters(recurse=False)):
            if whole not in done:
                local = getattr(whole, "_local_tensor", whole)
                fake = torch.empty(local.shape, dtype=local.dtype, device=device)
                if isinstance(whole, DTensor):
                    fake = DTensor.from_local(
                        fake, whole.device_mesh, whole.placements,
                        run_check=False, shape=whole.shape, stride=whole.stride(),
                    )  # fmt: skip
                done[whole] = torch.nn.Parameter(fake)
            part.register_parameter(name, done[whole])


def num_copies(model: ModelSpec, layer: object, strategy: Strategy, training: TrainingSpec) -> int:
    """Copies of a layer: enough to exceed caches with weights and gradients, at most those that
    the model has.
    """
    if not isinstance(layer, Block):
        return 1
    there = sum(run.count for run in model.runs if run.layer == layer)
    one = rank_parameters(layer, strategy)[0] * 2 * training.param_bytes
    return max(1, min(there, MOST_COPIES, -(-CACHES // one)))


def _around(model: ModelSpec, layer: object, copies: int) -> tuple[ModelSpec, int]:
    """A model with ``copies`` of the layer, and the position of the first. A block has the ends
    around it, of which none is built, so that it is called as in the whole model.
    """
    embedding, head = (
        next(run for run in model.runs if isinstance(run.layer, kind)) for kind in (Embedding, Head)
    )
    if isinstance(layer, Block):
        runs = (embedding, LayerRun(layer, copies), head)
        return ModelSpec(name=model.name, family=model.family, runs=runs), 1
    block = next(run.layer for run in model.runs if isinstance(run.layer, Block))
    runs = (embedding, LayerRun(block, 1), head)
    where = 0 if isinstance(layer, Embedding) else 2
    return ModelSpec(name=model.name, family=model.family, runs=runs), where
