"""RankMesh: the plan's mesh as DeviceMeshes, one for each way in which layers divide the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from costmodel.layout import Axis
from executor.models.tensorgroup import ALONE, TensorGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from costmodel.layout import Layout, Strategy

__all__ = ["RankMesh", "shards"]

PIPELINE, REPLICAS, SHARDS, TENSOR = "pp", "dp_replicate", "dp_shard", "tp"
WORLD: Final = "world"
NAMES: Final = {Axis.PP: (PIPELINE,), Axis.DP: (REPLICAS, SHARDS), Axis.TP: (TENSOR,)}
Division = tuple[int, int, int]  # tp, dp, ranks over which states are sharded


def shards(strategy: Strategy) -> int:
    """Ranks over which a layer's states are sharded."""
    return strategy.shard_group if strategy.zero else 1


def _division(strategy: Strategy) -> Division:
    return strategy.tp, strategy.dp, shards(strategy)


class RankMesh:
    """The meshes of a layout. Every rank makes its groups in the same order, axis by axis; a group
    that several meshes have along the same axis is made once.
    """

    def __init__(self, layout: Layout, device_type: str) -> None:
        """Over the ranks of the default process group, numbered as the layout says."""
        self.layout = layout
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        divisions = dict.fromkeys(_division(strategy) for strategy in layout.strategies)
        self._meshes = {own: self._mesh(own, device_type) for own in divisions}
        self._first = next(iter(self._meshes.values()))

    def _mesh(self, division: Division, device_type: str) -> DeviceMesh:
        tp, dp, sharded = division
        mesh = self.layout.mesh
        sizes = {PIPELINE: mesh.pp, REPLICAS: dp // sharded, SHARDS: sharded, TENSOR: tp}
        names = tuple(name for axis in reversed(mesh.order) for name in NAMES.get(axis, ()))
        ranks = torch.arange(mesh.num_ranks).view([sizes[name] for name in names])
        groups = [self._group(name, own) for name, own in zip(names, _own_lines(ranks), strict=True)]
        return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)

    def _group(self, name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        key = (name if len(ranks) > 1 else "", ranks)
        if key not in self._groups:
            self._groups[key] = dist.new_group([*ranks], use_local_synchronization=True)
        return self._groups[key]

    def tensor_group(self, strategy: Strategy) -> TensorGroup:
        """The ranks that split a layer, with this one among them."""
        if strategy.tp == 1:
            return ALONE
        mesh = self._meshes[_division(strategy)][TENSOR]
        return TensorGroup(mesh, strategy.sequence_parallel)

    def replicas(self, strategy: Strategy) -> DeviceMesh:
        """The data-parallel ranks of a layer: one axis, or with shard groups smaller than the
        replicas (HSDP) two, the shards faster.
        """
        mesh, count = self._meshes[_division(strategy)], shards(strategy)
        if count == 1:
            return mesh[REPLICAS]
        return mesh[SHARDS] if count == strategy.dp else mesh[REPLICAS, SHARDS]

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank."""
        return self._first.get_local_rank(PIPELINE)

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """The ranks of this pipeline, in the order of stages."""
        return self._first.get_group(PIPELINE)

    def sequences(self, strategy: Strategy) -> list[range]:
        """Those of a step that this rank has of a layer, for each micro-batch. Neighbouring
        replicas have neighbouring ones, so that one of a layer with fewer has those of several.
        """
        mesh, count = self._meshes[_division(strategy)], self.layout.micro_batch_of(strategy)
        replica = mesh.get_local_rank(REPLICAS) * mesh[SHARDS].size() + mesh.get_local_rank(SHARDS)
        every = count * strategy.dp
        starts = range(replica * count, self.layout.num_microbatches * every, every)
        return [range(start, start + count) for start in starts]

    def axis(self, name: str, size: int) -> str:
        """What the groups of ``size`` ranks along an axis are called: by its name alone, where
        layers divide it alike.
        """
        sizes = {len(ranks) for own, ranks in self._groups if own == name}
        return name if sizes == {size} else f"{name} {size}"

    @property
    def axes(self) -> dict[str, str]:
        """What the groups of this rank are called, by torch's names of them."""
        assert dist.group.WORLD is not None
        found = {dist.group.WORLD.group_name: WORLD}
        for (name, ranks), group in self._groups.items():
            found[group.group_name] = self.axis(name, len(ranks))
        return found


def _own_lines(ranks: torch.Tensor) -> Iterator[tuple[int, ...]]:
    """The ranks along each dim on whose lines this rank stands."""
    place = [int(at) for at in (ranks == dist.get_rank()).nonzero()[0]]
    for dim in range(ranks.dim()):
        index = [slice(None) if other == dim else at for other, at in enumerate(place)]
        yield tuple(ranks[tuple(index)].tolist())
