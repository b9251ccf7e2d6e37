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
    "CollectiveTime",
    "EndsMemory",
    "LayerMemory",
    "LayerTime",
    "Operation",
    "Overlap",
    "Position",
    "Profile",
]

ENDS = "ends"  # embedding and head together, as a layer's name


class Operation(StrEnum):
    """What a link was measured with."""

    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    P2P = "p2p"


class Position(StrEnum):
    """Where embedding and head lie: on one stage, or apart on the first and the last."""

    ONLY = "only"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds of one forward pass of one layer over ``batch`` samples.

    ``layer`` names the kind of layer: ``block-0`` (kinds of a model count from 0), or ``ENDS``.
    ``seq_len`` has one length, or that of every kind where the model has several.
    """

    model: str
    layer: str
    tp: int = 1
    batch: int
    seq_len: tuple[int, ...]
    forward_s: float


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
    """Seconds of an operation on ``num_bytes`` among ``group`` neighbouring ranks."""

    cluster: str
    operation: Operation
    group: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How much longer compute and communication take while they overlap; 1 = no longer."""

    cluster: str
    slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything measured, in the order in which it was read."""

    name: str
    source: str
    layer_times: tuple[LayerTime, ...] = ()
    layer_memory: tuple[LayerMemory, ...] = ()
    ends_memory: tuple[EndsMemory, ...] = ()
    bandwidths: tuple[Bandwidth, ...] = ()
    collective_times: tuple[CollectiveTime, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
