"""RankMesh: the plan's mesh as DeviceMeshes, one for each way in which layers divide the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from costmodel.layout import Axis
from executor.models.tensorgroup import ALONE, TensorGroup

if TYPE_CHECKING:
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
    """The meshes of a layout. Every rank makes all of them, in the same order, since each makes
    process groups.
    """

    def __init__(self, layout: Layout, device_type: str) -> None:
        """Over the ranks of the default process group, numbered as the layout says."""
        self.layout = layout
        divisions = dict.fromkeys(_division(strategy) for strategy in layout.strategies)
        self._meshes = {own: _mesh(layout, own, device_type) for own in divisions}
        self._first = next(iter(self._meshes.values()))

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

    @property
    def replica(self) -> int:
        """Which share of the batch this rank trains on."""
        mesh = self._first
        outer, inner = mesh.get_local_rank(REPLICAS), mesh.get_local_rank(SHARDS)
        return outer * mesh[SHARDS].size() + inner

    @property
    def axes(self) -> dict[frozenset[int], str]:
        """The groups of this rank and the axes that they are."""
        found = {frozenset(range(self.layout.mesh.num_ranks)): WORLD}
        for mesh in self._meshes.values():
            for name in (PIPELINE, REPLICAS, SHARDS, TENSOR):
                found[frozenset(dist.get_process_group_ranks(mesh.get_group(name)))] = name
        return found

    @property
    def whole_axis(self) -> str:
        """The axis that all ranks are on, if there is one."""
        return self.axes[frozenset(range(self.layout.mesh.num_ranks))]

    @property
    def tensor_rank(self) -> int:
        """Place of this rank among those that split a layer."""
        return self._first.get_local_rank(TENSOR)


def _mesh(layout: Layout, division: Division, device_type: str) -> DeviceMesh:
    tp, dp, sharded = division
    sizes = {PIPELINE: layout.mesh.pp, REPLICAS: dp // sharded, SHARDS: sharded, TENSOR: tp}
    names = [name for axis in reversed(layout.mesh.order) for name in NAMES.get(axis, ())]
    ranks = torch.arange(layout.mesh.num_ranks).view([sizes[name] for name in names])
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(names))
