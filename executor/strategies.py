"""A chunk of a model under its strategies. The order of what is done is the whole story."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

from executor.mesh import shards
from executor.models.chain import Chain
from executor.models.ends import NativeHead, are_gathered_twice
from executor.models.experts import NativeExperts
from executor.models.parameters import initialise, split_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from costmodel.layout import Chunk, Strategy
    from executor.mesh import RankMesh
    from executor.precision import Numbers
    from profiles.model import ModelSpec

__all__ = ["DataParallel", "build_chunk"]

WEIGHTS_WHOLE, WEIGHTS_SHARDED = 2, 3  # stages of ZeRO


def build_chunk(
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
        mesh.groups,
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
    layer's weights for each pass, those of the ends once for both (``are_gathered_twice``). That is
    what the cost model prices, inside pipelines too.
    Gradients are summed, never averaged: the loss is divided by the tokens of the step.
    """

    def __init__(self, chain: Chain, mesh: RankMesh, numbers: Numbers) -> None:
        """Wrap each layer of ``chain``; a matrix that two layers share makes them one unit. Experts
        are replicated over fewer ranks than the rest of their layer.
        """
        self.chain, self.mesh, self.numbers = chain, mesh, numbers
        self.units: list[tuple[FSDPModule, Strategy]] = []
        self._unwrapped: set[nn.Parameter] = set()
        for layers, strategy in _units(chain):
            experts = [
                part
                for each in layers
                for part in each.modules()
                if isinstance(part, NativeExperts)
            ]
            if not self._wraps(mesh.expert_replicas):
                self._leave(experts)
                experts = []
            if shards(strategy) > 1:
                self._shard(layers, strategy, experts)
                continue
            for own in experts:
                self._replicate([own], strategy, mesh.expert_replicas)
            self._replicate(layers, strategy, mesh.replicas(strategy))
        if self.units:  # a root, whose layers share streams and prefetch one another
            fully_shard(
                chain,
                mesh=mesh.replicas(self.units[0][1]),
                reshard_after_forward=False,
                ignored_params=self._unwrapped,
            )
            self._prefetch()

    def _wraps(self, over: DeviceMesh) -> bool:
        """Whether there is anything to do for weights that these ranks hold."""
        return over.size() > 1 or self.numbers.is_mixed

    def _leave(self, modules: Iterable[nn.Module]) -> None:
        """Without a wrapper."""
        self._unwrapped |= {p for module in modules for p in module.parameters()}

    def _replicate(self, modules: list[nn.Module], strategy: Strategy, over: DeviceMesh) -> None:
        if not self._wraps(over):
            self._leave(modules)
            return
        replicate(modules, mesh=over, mp_policy=self._policy, ignored_params=self._unwrapped)
        self._add(modules, strategy)

    def _shard(
        self, layers: list[nn.Module], strategy: Strategy, experts: list[NativeExperts]
    ) -> None:
        """One unit: its experts are gathered and reduced with it, over their own ranks."""
        apart = {parameter for own in experts for parameter in own.parameters()}
        info = FSDPMeshInfo(self.mesh.expert_replicas, shard_mesh_dim=0)

        def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
            return ShardPlacementResult(None, info) if parameter in apart else None

        has_head = isinstance(layers[-1], NativeHead)
        fully_shard(
            layers,
            mesh=self.mesh.replicas(strategy),
            reshard_after_forward=strategy.zero == WEIGHTS_SHARDED and not has_head,
            shard_placement_fn=place if apart else None,
            ignored_params=self._unwrapped,
            mp_policy=self._policy,
        )
        unit = self._add(layers, strategy)
        if not has_head:
            unit.set_unshard_in_backward(are_gathered_twice(layers))

    @property
    def _policy(self) -> MixedPrecisionPolicy:
        """Routing weights stay wide, so inputs are not cast."""
        return MixedPrecisionPolicy(
            param_dtype=self.numbers.compute,
            reduce_dtype=self.numbers.reduce,
            cast_forward_inputs=False,
        )

    def _add(self, modules: list[nn.Module], strategy: Strategy) -> FSDPModule:
        """A unit, known by its first module."""
        first = modules[0]
        assert isinstance(first, FSDPModule)
        self.units.append((first, strategy))
        first.set_gradient_divide_factor(1.0)
        first.set_force_sum_reduction_for_comms(True)
        return first

    def _prefetch(self) -> None:
        """Backward, each unit gathers the one before it. Left alone, FSDP follows the order of
        forward passes, in which the first layer of one micro-batch comes behind the last of
        another: it would gather that once more than needed.
        """
        units = [unit for unit, _ in self.units]
        for number, unit in enumerate(units):
            before = units[max(0, number - 1)]
            unit.set_modules_to_backward_prefetch([before])
        if self.chain.is_tied and isinstance(self.chain.embedding, FSDPModule):
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
