"""What a device calls itself -> what the catalogue calls it."""

from __future__ import annotations

import re
from typing import Final

from profiles import shelf

__all__ = ["catalogue_device"]

FAR: Final = 0.1  # of memory: another device than the one of that name
SIZE: Final = re.compile(r"(\d+)g")
FORMS: Final = {"pcie", "nvl"}  # of a chip: a name has them where the device says them


def catalogue_device(hardware: str, memory_gib: float | None = None) -> str | None:
    """The device of the catalogue that calls itself ``hardware`` ("NVIDIA H100 80GB HBM3"), of
    several the one nearest in memory, which the name may tell; None if there is none within a
    tenth, or several without a memory to choose by.
    """
    words = set(re.split(r"[^a-z0-9]+", hardware.lower()))
    if memory_gib is None:
        memory_gib = next(
            (float(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)), None
        )
    found = []
    for name in shelf.names("devices"):
        parts = name.split("-")
        chip = {part for part in parts if not SIZE.fullmatch(part)}
        if not chip <= words or (words & FORMS) != (chip & FORMS):
            continue
        sizes = [float(size[1]) for part in parts if (size := SIZE.fullmatch(part))]
        far = abs(sizes[0] / memory_gib - 1) if sizes and memory_gib else 0.0
        if far < FAR:
            found.append((far, -len(chip), name))
    best = sorted(found)[:2]
    if len(best) > 1 and best[0][:2] == best[1][:2]:
        return None
    return best[0][2] if best else None
