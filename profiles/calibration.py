"""Calibration: the efficiencies of a device and a software stack, as data.

Three levels of knowledge: *datasheet* (peak numbers and default efficiencies), *calibrated*
(efficiencies of a device and software stack), *measured* (this model's layers and links).
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Calibration", "Efficiencies", "KernelEfficiency", "Seen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEfficiency:
    """Part of the device's sustained rate that an attention kernel reaches, by pass."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Dimensionless unless the name says otherwise; 1 would be the datasheet's rate.

    Compute: ``gemm`` for large matrices; ``gemm_half_k`` the inner size at which a GEMM reaches
    half of it; ``misaligned`` what GEMMs keep of ``gemm`` whose sizes are no multiples of 8 (a
    vocabulary of 50,257; 1 where the software pads it); ``quantised`` what fp8 and fp4 GEMMs keep
    of that after scaling and conversion; ``stream`` of memory bandwidth; ``kernel_launch_s`` the
    host's time to launch one kernel, which counts where a layer's kernels take less;
    ``micro_batch_s`` and ``step_s`` host time per pass and per step.

    Communication: ``gpu_link`` and ``nic`` parts of the link rates; ``*_overlap`` the part of
    compute time behind which an axis' communication can hide (0 = none); ``overlap_slowdown``
    the part of hidden communication that comes back as slower compute; ``hand_over_s`` what
    handing a micro-batch to the next stage costs beside the transfer; ``straggler`` the growth
    of the step per doubling of the number of nodes (jitter).

    Memory: ``context_bytes`` outside the allocator (CUDA context, libraries);
    ``communicator_bytes`` for each process group that a rank takes part in; ``reserve`` the
    allocator's overhead as a part of what comes and goes (all but states).

    Uncertainty: ``step_time_90`` are the 5 % and 95 % quantiles of measurement / estimate of a
    usual run; ``step_time_varies`` the part of the variance behind them that is a run's own, and
    goes with what is uncertain about it (``costmodel.intervals``; the rest is what all runs of a
    stack share); ``memory_sigma`` is the standard deviation of the logarithm of that ratio for
    memory.
    """

    gemm: float
    gemm_half_k: float
    misaligned: float = 0.6
    quantised: float
    attention: dict[str, KernelEfficiency] = field(hash=False)
    stream: float
    kernel_launch_s: float
    micro_batch_s: float
    step_s: float
    gpu_link: float
    nic: float
    tp_overlap: float
    cp_overlap: float
    ep_overlap: float
    dp_overlap: float
    p2p_overlap: float
    hand_over_s: float
    overlap_slowdown: float
    straggler: float
    moe_imbalance: float
    context_bytes: int
    communicator_bytes: int
    reserve: float
    step_time_90: tuple[float, float]
    step_time_varies: float = 0.0
    memory_sigma: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the runs behind a calibration span: least and most parameters of their models, and
    tokens of their sequences.
    """

    params: tuple[int, int]
    seq_len: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Efficiencies with their provenance. ``device`` and ``stack`` "any" = the default."""

    name: str
    knowledge: str
    device: str
    stack: str
    source: str
    efficiencies: Efficiencies
    seen: Seen | None = None
