"""A chunk of a model under its strategies. The order of what is done is the whole story."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from executor.mesh import shards
from executor.models.chain import Chain
from executor.models.parameters import initialise, split_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from costmodel.layout import Chunk, Strategy
    from executor.mesh import RankMesh
    from executor.precision import Numbers
    from profiles.model import ModelSpec

__all__ = ["DataParallel", "parallelize"]

WEIGHTS_WHOLE, WEIGHTS_SHARDED = 2, 3  # stages of ZeRO


def parallelize(
    model: ModelSpec,
    chunk: Chunk,
    mesh: RankMesh,
    numbers: Numbers,
    *,
    num_tokens: int,
    seed: int,
    device: torch.device,
) -> tuple[Chain, DataParallel]:
    """The chunk on this rank: built on the meta device, split over tp, wrapped for its ZeRO stage,
    then filled, so that no rank ever holds more than its part.
    """
    chain = Chain(
        model,
        chunk,
        mesh.tensor_group,
        num_tokens=num_tokens,
        before=mesh.layout.strategy_before(chunk),
    )
    chain.to(numbers.master)
    split_parameters(chain)
    data_parallel = DataParallel(chain, mesh, numbers)
    chain.to_empty(device=device)
    chain.tie()
    initialise(chain, seed)
    return chain, data_parallel


class DataParallel:
    """The data-parallel wrappers of a chain, and when they communicate.

    ZeRO-0 sums gradients once a step (all-reduce), ZeRO-1 does so to shards (reduce-scatter) and
    gathers weights once a step; ZeRO-2 reduce-scatters in every micro-batch; ZeRO-3 also gathers a
    layer's weights for each pass. That is what the cost model prices, inside pipelines too.
    Gradients are summed, never averaged: the loss is divided by the tokens of the step.
    """

    def __init__(self, chain: Chain, mesh: RankMesh, numbers: Numbers) -> None:
        """Wrap each layer of ``chain``; a matrix that two layers share makes them one unit."""
        self.chain = chain
        self.units: list[tuple[FSDPModule, Strategy]] = []
        unwrapped: set[nn.Parameter] = set()
        for layers, strategy in _units(chain):
            if strategy.dp == 1 and not numbers.is_mixed:
                unwrapped |= {p for layer in layers for p in layer.parameters()}
                continue
            how: dict[str, Any] = {
                "mesh": mesh.replicas(strategy),
                "mp_policy": MixedPrecisionPolicy(
                    param_dtype=numbers.compute, reduce_dtype=numbers.reduce
                ),
            }
            if shards(strategy) == 1:
                replicate(layers, **how)
            else:
                fully_shard(layers, reshard_after_forward=strategy.zero == WEIGHTS_SHARDED, **how)
            for layer in layers[:1]:
                assert isinstance(layer, FSDPModule)
                self.units.append((layer, strategy))
                layer.set_gradient_divide_factor(1.0)
                layer.set_force_sum_reduction_for_comms(True)
        if self.units:  # a root, whose layers share streams and prefetch one another
            fully_shard(
                chain,
                mesh=mesh.replicas(self.units[0][1]),
                reshard_after_forward=False,
                ignored_params=unwrapped,
            )
            self._prefetch()

    def _prefetch(self) -> None:
        """Backward, each unit gathers the one before it. Left alone, FSDP follows the order of
        forward passes, in which the first layer of one micro-batch comes behind the last of
        another: it would gather that once more than needed.
        """
        units = [unit for unit, _ in self.units]
        for number, unit in enumerate(units):
            before = units[max(0, number - 1)]
            unit.set_modules_to_backward_prefetch([before])
        if self.chain.is_tied:
            units[0].set_modules_to_backward_prefetch([units[-1]])

    def set_last_backward(self, *, last: bool) -> None:
        """Before the backward pass of a micro-batch: whether it is the step's last."""
        for layer, strategy in self.units:
            every = strategy.zero >= WEIGHTS_WHOLE
            layer.set_requires_gradient_sync(last or every, recurse=False)
            layer.set_requires_all_reduce(last, recurse=False)
            keeps = strategy.zero < WEIGHTS_SHARDED
            layer.set_reshard_after_backward(last or not keeps, recurse=False)


def _units(chain: Chain) -> Iterator[tuple[list[nn.Module], Strategy]]:
    """Layers that are wrapped together, and their strategy."""
    layers = dict(chain.layers.items())
    if chain.is_tied:
        head = layers.pop("head")
        yield [layers.pop("embedding"), head], chain.strategies["embedding"]
    for name, layer in layers.items():
        yield [layer], chain.strategies[name]
