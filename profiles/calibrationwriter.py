"""A calibration -> the YAML that ``calibrationfile`` reads, in stable order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from profiles.units import GIB, MIB

if TYPE_CHECKING:
    from profiles.calibration import Calibration, Efficiencies

__all__ = ["calibration_document", "calibration_text"]

DIGITS = 4


def calibration_text(calibration: Calibration, fit: dict[str, Any] | None = None) -> str:
    """The file's text; ``fit`` is its section of that name."""
    document = calibration_document(calibration, fit)
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


def calibration_document(calibration: Calibration, fit: dict[str, Any] | None) -> dict[str, Any]:
    """The file as plain data, numbers with four digits."""
    head = {
        "schema_version": 1,
        "kind": "calibration",
        "name": calibration.name,
        "knowledge": calibration.knowledge,
        "device": calibration.device,
        "stack": calibration.stack,
        "source": calibration.source,
    }
    told = {} if fit is None else {"fit": fit}
    if calibration.seen is not None:
        told["seen"] = {
            "params_billion": [_short(count / 1e9) for count in calibration.seen.params],
            "seq_len": list(calibration.seen.seq_len),
        }
    return {**head, **told, "efficiencies": _efficiencies(calibration.efficiencies)}


def _efficiencies(own: Efficiencies) -> dict[str, Any]:
    attention = {
        kernel: {"forward": _short(part.forward), "backward": _short(part.backward)}
        for kernel, part in own.attention.items()
    }
    return {
        "gemm": _short(own.gemm),
        "gemm_half_k": _short(own.gemm_half_k),
        "misaligned": _short(own.misaligned),
        "quantised": _short(own.quantised),
        "attention": attention,
        "stream": _short(own.stream),
        "kernel_launch_us": _short(own.kernel_launch_s * 1e6),
        "micro_batch_ms": _short(own.micro_batch_s * 1e3),
        "step_ms": _short(own.step_s * 1e3),
        "gpu_link": _short(own.gpu_link),
        "nic": _short(own.nic),
        "tp_overlap": _short(own.tp_overlap),
        "cp_overlap": _short(own.cp_overlap),
        "ep_overlap": _short(own.ep_overlap),
        "dp_overlap": _short(own.dp_overlap),
        "p2p_overlap": _short(own.p2p_overlap),
        "hand_over_us": _short(own.hand_over_s * 1e6),
        "overlap_slowdown": _short(own.overlap_slowdown),
        "straggler": _short(own.straggler),
        "moe_imbalance": _short(own.moe_imbalance),
        "context_gib": _short(own.context_bytes / GIB),
        "communicator_mib": _short(own.communicator_bytes / MIB),
        "reserve": _short(own.reserve),
        "step_time_90": [_short(end) for end in own.step_time_90],
        "step_time_varies": _short(own.step_time_varies),
        "memory_sigma": _short(own.memory_sigma),
    }


def _short(value: float) -> float:
    """Four significant digits; never beyond 1 where the value is not."""
    return float(f"{value:.{DIGITS}g}")
