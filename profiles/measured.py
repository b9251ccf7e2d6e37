"""Profile: what was measured on a user's own devices: layers, their memory, links, overlap.

Every entry says which ``model`` or ``cluster`` it was measured on, so that one file can hold
several. A measurement that was not taken is absent; nothing is filled in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "ENDS",
    "Bandwidth",
    "ClusterFacts",
    "CollectiveTime",
    "DeviceFacts",
    "EndsMemory",
    "LayerHeld",
    "LayerMemory",
    "LayerTime",
    "LayerWrapping",
    "ModelFacts",
    "NoRoom",
    "Operation",
    "OperatorTime",
    "Overlap",
    "Position",
    "Profile",
]

ENDS = "ends"  # embedding and head together, as a layer's name


class Operation(StrEnum):
    """What a link was measured with."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    P2P = "p2p"


class Position(StrEnum):
    """Where embedding and head lie: on one stage, or apart on the first and the last."""

    ONLY = "only"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """A device as it was found, and what it was measured with.

    ``device`` is what clusters call it, ``hardware`` what it calls itself; ``threads`` of a CPU.
    Rates are the best that any operator reached. ``context_bytes`` are taken before the first
    tensor. ``clocks`` is a note on what could be read of them; ``date`` is the user's to give.
    The kernels are in ``TrainingSpec``'s words.
    """

    device: str
    hardware: str
    torch: str
    method: str
    driver: str | None = None
    threads: int | None = None
    clocks: str | None = None
    date: str | None = None
    memory_bytes: int
    context_bytes: int
    memory_bytes_per_s: float | None = None
    flop_per_s: dict[str, float] = field(default_factory=dict, hash=False)
    fused_kernels: bool
    fused_norms: bool
    loss: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model whose layers were measured: the fingerprint of each, by its name."""

    model: str
    layers: dict[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """A cluster whose links were measured: ``num_nodes`` times ``gpus_per_node`` of ``device``, as
    clusters call it; ``hardware``: what it calls itself. ``backend``: nccl, gloo ...
    """

    cluster: str
    device: str
    num_nodes: int = 1
    gpus_per_node: int
    backend: str
    hardware: str | None = None
    torch: str | None = None
    method: str | None = None
    date: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds of one layer on one rank over ``batch`` samples.

    ``layer`` names the kind of layer: ``block-0`` (kinds of a model count from 0), ``embedding``,
    ``head`` with its loss, or ``ENDS``. ``seq_len`` has one length, or that of every kind where the
    model has several. ``forward_s`` and ``backward_s`` are of one pass, ``step_s`` is what an
    optimizer step adds (norm, clipping, update), of ``parameters`` elements. Collectives are not
    in them. ``spread`` is how far the median sample lies above them, as a part; ``doubtful``:
    too far, or disturbed.
    """

    model: str
    layer: str
    tp: int = 1
    batch: int
    seq_len: tuple[int, ...]
    forward_s: float
    backward_s: float | None = None
    step_s: float | None = None
    parameters: int | None = None
    device: str | None = None
    precision: str | None = None
    optimizer: str | None = None
    sequence_parallel: bool = False
    spread: float | None = None
    doubtful: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShard:
    """One layer's shard on one rank of a device, over ``batch`` samples."""

    device: str
    model: str
    layer: str
    tp: int = 1
    batch: int
    seq_len: tuple[int, ...]
    precision: str
    sequence_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom(LayerShard):
    """A layer that a device had no memory for: a fact as good as a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWrapping:
    """Seconds that the wrapper of data parallelism adds to one layer on one rank, collectives left
    out: hooks, and copies of weights and gradients into the buffers of collectives and back.
    ``forward_s`` and ``backward_s`` are of each pass, ``step_s`` of each step. ``zero``: the stage,
    0 for whole replicas. It depends on the layer's weights, not on tokens.
    """

    device: str
    model: str
    layer: str
    tp: int = 1
    precision: str
    zero: int
    forward_s: float
    backward_s: float
    step_s: float
    doubtful: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """Seconds of one operator. ``operator`` is ``gemm`` of ``shape`` (m, n, k), ``attention`` of
    (batch, heads, sequence, head size), causal, or ``stream`` of (elements,): an element-wise sum
    that reads two tensors and writes one. ``backward_s``: of attention.
    """

    device: str
    precision: str
    operator: str
    shape: tuple[int, ...]
    forward_s: float
    backward_s: float | None = None
    spread: float = 0.0
    doubtful: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHeld(LayerShard):
    """Bytes that one layer holds on one rank: ``saved_bytes`` from forward to backward,
    ``transient_bytes`` more at its peak, ``state_bytes`` of parameters, gradients and optimizer.
    """

    recompute: str = "none"
    saved_bytes: int
    transient_bytes: int
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Bytes of one layer: its parameters, and what one sample's activations hold by TP degree.

    ``recomputed_bytes`` is what one sample holds where the layer is recomputed (None: unknown).
    ``sequence_parallel``: whether activations outside the matrices were split as well.
    """

    model: str
    layer: str
    seq_len: tuple[int, ...]
    sequence_parallel: bool
    parameter_bytes: float
    activation_bytes: dict[int, float] = field(hash=False)
    recomputed_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsMemory:
    """Bytes of embedding and head at a position, by the TP degree of the vocabulary:
    parameters with their gradients and optimizer states, and activations of one sample.
    """

    model: str
    position: Position
    seq_len: tuple[int, ...]
    sequence_parallel: bool
    state_bytes: dict[int, float] = field(hash=False)
    activation_bytes: dict[int, float] = field(hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bus bandwidth of an operation among ``group`` ranks (p2p: of a pipeline of so many stages).

    ``neighbours``: whether the ranks follow one another or stand apart (None: does not apply).
    """

    cluster: str
    operation: Operation
    group: int
    neighbours: bool | None = None
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Seconds of an operation on ``num_bytes`` among ``group`` ranks, each ``stride`` behind the
    one before it, while all such groups of the cluster do the same. ``num_bytes`` as in
    ``costmodel.work.Collective``; p2p: what one rank of each pair sends to the other.

    ``spread`` is how far the median sample lies above the least, as a part; ``doubtful``: too far.
    """

    cluster: str
    operation: Operation
    group: int
    stride: int = 1
    num_bytes: int
    seconds: float
    spread: float | None = None
    doubtful: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How much longer compute and communication take while they overlap; 1 = no longer, 2 = as
    long as one after the other. Of an ``operation`` in groups, where that is known.
    """

    cluster: str
    slowdown: float
    operation: Operation | None = None
    group: int | None = None
    stride: int = 1
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything measured, in the order in which it was read."""

    name: str
    source: str
    devices: tuple[DeviceFacts, ...] = ()
    models: tuple[ModelFacts, ...] = ()
    clusters: tuple[ClusterFacts, ...] = ()
    layer_times: tuple[LayerTime, ...] = ()
    layer_wrapping: tuple[LayerWrapping, ...] = ()
    layer_held: tuple[LayerHeld, ...] = ()
    no_room: tuple[NoRoom, ...] = ()
    operator_times: tuple[OperatorTime, ...] = ()
    layer_memory: tuple[LayerMemory, ...] = ()
    ends_memory: tuple[EndsMemory, ...] = ()
    bandwidths: tuple[Bandwidth, ...] = ()
    collective_times: tuple[CollectiveTime, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
