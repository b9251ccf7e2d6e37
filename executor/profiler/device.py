"""The device at hand: whether it is there, what it calls itself, what can be read of it."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any, Final

import torch

from profiles.errors import InputError, Problem
from profiles.measured import DeviceFacts
from profiles.training import LossKernel

__all__ = ["device_facts", "open_device", "processor"]

KIB: Final = 1024


def open_device(kind: str) -> torch.device:
    """The device of a kind, ready to be measured: a CPU with one thread. Raises ``InputError``
    where there is none.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        message = f"torch {torch.__version__} finds no CUDA device here"
        hint = "--device cpu measures this processor"
        raise InputError(Problem(where="--device", message=message, hint=hint))
    if kind == "cpu":
        torch.set_num_threads(1)
    return torch.device(kind)


def device_facts(device: torch.device, name: str, *, method: str, date: str | None) -> DeviceFacts:
    """What the device is, before anything is measured on it. ``name``: what clusters call it."""
    own = _cuda_facts() if device.type == "cuda" else _cpu_facts()
    return DeviceFacts(
        device=name,
        torch=str(torch.__version__),
        method=method,
        date=date,
        fused_kernels=False,
        fused_norms=device.type == "cuda",  # a CPU has no RMSNorm in one kernel
        loss=LossKernel.SHARDED.value,
        **own,
    )


def _cpu_facts() -> dict[str, Any]:
    factor = 1 if sys.platform == "darwin" else KIB
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "hardware": processor(),
        "threads": torch.get_num_threads(),
        "clocks": _cpu_clock(),
        "memory_bytes": total // (os.cpu_count() or 1),
        "context_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * factor,
    }


def processor() -> str:
    """What this processor calls itself."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_clock() -> str | None:
    rates = [
        float(line.partition(":")[2])
        for line in _lines("/proc/cpuinfo")
        if line.startswith("cpu MHz")
    ]
    return f"{min(rates):.0f} to {max(rates):.0f} MHz at the start" if rates else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _cuda_facts() -> dict[str, Any]:
    own = torch.cuda.get_device_properties(0)
    torch.zeros(1, device="cuda")  # makes the context
    free, total = torch.cuda.mem_get_info()
    return {
        "hardware": own.name,
        "driver": f"CUDA {torch.version.cuda}",
        "clocks": _cuda_clock(),
        "memory_bytes": total,
        "context_bytes": total - free - torch.cuda.memory_reserved(),
    }


def _cuda_clock() -> str | None:
    """What NVML says, where its Python package is there."""
    try:
        return f"{torch.cuda.clock_rate()} MHz, {torch.cuda.temperature()} C at the start"
    except (ModuleNotFoundError, RuntimeError, AttributeError):
        return None
