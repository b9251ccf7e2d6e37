"""RankMesh: the plan's mesh as DeviceMeshes, one for each way in which layers divide the ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from costmodel.layout import Axis, ContextComm
from executor.models.context import WHOLE, ContextGroup
from executor.models.exchange import ALL_EXPERTS, ExpertGroup
from executor.models.groups import LayerGroups
from executor.models.tensorgroup import ALONE, TensorGroup

if TYPE_CHECKING:
    from costmodel.layout import Layout, Mesh, Strategy

__all__ = ["RankMesh", "replicas", "sequences", "shards"]

PIPELINE, REPLICAS, SHARDS, TENSOR = "pp", "dp_replicate", "dp_shard", "tp"
CONTEXT, EXPERTS, EXPERT_TENSOR, EXPERT_REPLICAS = "cp", "ep", "expert_tp", "expert_dp"
WORLD: Final = "world"
NAMES: Final = (PIPELINE, REPLICAS, SHARDS, TENSOR)
EXPERT_NAMES: Final = (PIPELINE, EXPERT_REPLICAS, EXPERTS, EXPERT_TENSOR)
Division = tuple[int, int, int]  # tp, replicas, ranks over which states are sharded


def replicas(strategy: Strategy) -> int:
    """Ranks that hold the same weights: those of data and of context parallelism."""
    return strategy.dp * strategy.cp


def shards(strategy: Strategy) -> int:
    """Ranks over which a layer's states are sharded."""
    return strategy.shard_group if strategy.zero else 1


def _division(strategy: Strategy) -> Division:
    return strategy.tp, replicas(strategy), shards(strategy)


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
        self._experts = self._expert_mesh(device_type)
        self.context = self._context_group()

    def _mesh(self, division: Division, device_type: str) -> DeviceMesh:
        tp, copies, sharded = division
        whole = self.layout.mesh
        mesh = replace(whole, tp=tp, dp=copies // whole.cp)
        ranks = _numbered(mesh, (Axis.PP,), (Axis.CP, Axis.DP), (Axis.TP,))
        return self._named(ranks.unflatten(1, (-1, sharded)), NAMES, device_type)

    def _expert_mesh(self, device_type: str) -> DeviceMesh:
        mesh = self.layout.mesh
        ranks = _numbered(mesh, (Axis.PP,), (Axis.TP, Axis.CP, Axis.DP))
        return self._named(
            ranks.unflatten(1, (-1, mesh.ep, mesh.expert_tp)), EXPERT_NAMES, device_type
        )

    def _named(self, ranks: torch.Tensor, names: tuple[str, ...], device_type: str) -> DeviceMesh:
        groups = [
            self._group(name, ranks.movedim(dim, -1).flatten(0, -2).tolist())
            for dim, name in enumerate(names)
        ]
        return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)

    def _context_group(self) -> ContextGroup:
        mesh = self.layout.mesh
        if mesh.cp == 1:
            return WHOLE
        ranks = _numbered(mesh, (Axis.PP, Axis.DP, Axis.TP), (Axis.CP,))
        return ContextGroup(self._group(CONTEXT, ranks.tolist()))

    def _group(self, name: str, lines: list[list[int]]) -> dist.ProcessGroup:
        """The one of this rank along an axis; ``lines``: the ranks of all that there are."""
        own = next(tuple(line) for line in lines if dist.get_rank() in line)
        key = (name if len(own) > 1 else "", own)
        if key not in self._groups:
            self._groups[key] = (
                dist.new_subgroups_by_enumeration(lines)[0]
                if len(own) > 1
                else dist.new_group([*own], use_local_synchronization=True)
            )
        return self._groups[key]

    def groups(self, strategy: Strategy) -> LayerGroups:
        """The ranks with which this one computes a layer."""
        experts = ALL_EXPERTS
        if strategy.ep * strategy.expert_tp > 1:
            experts = ExpertGroup(self._experts[EXPERTS, EXPERT_TENSOR])
        ring = strategy.cp > 1 and strategy.cp_comm is ContextComm.RING
        context = replace(self.context, ring=ring)
        return LayerGroups(self.tensor_group(strategy), context, experts)

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
        return mesh[SHARDS] if count == replicas(strategy) else mesh[REPLICAS, SHARDS]

    @property
    def expert_replicas(self) -> DeviceMesh:
        """The ranks that hold the same experts, over all of which ZeRO shards them."""
        return self._experts[EXPERT_REPLICAS]

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank."""
        return self._first.get_local_rank(PIPELINE)

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """The ranks of this pipeline, in the order of stages."""
        return self._first.get_group(PIPELINE)

    def sequences(self, strategy: Strategy) -> list[range]:
        """Those of a step that this rank has of a layer, for each micro-batch."""
        return sequences(self.layout, strategy)

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
        found: dict[str, str] = {dist.group.WORLD.group_name: WORLD}
        for (name, ranks), group in self._groups.items():
            found[group.group_name] = self.axis(name, len(ranks))
        return found


def sequences(layout: Layout, strategy: Strategy) -> list[range]:
    """Those of a step that this rank has of a layer, for each micro-batch. Neighbouring replicas
    have neighbouring ones, so that one of a layer with fewer has those of several.
    """
    count = layout.micro_batch_of(strategy)
    replica = _place(layout.mesh_of(strategy), Axis.DP)
    every = count * strategy.dp
    starts = range(replica * count, layout.num_microbatches * every, every)
    return [range(start, start + count) for start in starts]


def _numbered(mesh: Mesh, *dims: tuple[Axis, ...]) -> torch.Tensor:
    """All ranks of ``mesh``, with one dim for the axes of each of ``dims`` together, along which
    those go fastest that do so in the numbering of ranks.
    """
    slowest_first = [axis for axis in reversed(mesh.order) if axis is not Axis.EP]
    sizes: dict[Axis, int] = {axis: getattr(mesh, axis) for axis in slowest_first}
    ranks = torch.arange(mesh.num_ranks).view([*sizes.values()])
    wanted = [axis for dim in dims for axis in slowest_first if axis in dim]
    moved = ranks.permute([slowest_first.index(axis) for axis in wanted])
    return moved.reshape([math.prod(sizes[axis] for axis in dim) for dim in dims])


def _place(mesh: Mesh, axis: Axis) -> int:
    """Where this rank stands along an axis."""
    return sum(dist.get_rank() // stride % size for size, stride in mesh.dims(axis))
