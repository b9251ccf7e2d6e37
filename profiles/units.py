"""Units: inside there are four (seconds, bytes, FLOP, and bytes or FLOP per second).

Human units exist only in file fields and in what is printed.
GB is 1e9 bytes (links, datasheets); GiB is 2**30 bytes (memory).
"""

from __future__ import annotations

from typing import Final

__all__ = ["GB", "GIB", "MIB", "TERA"]

GB: Final = 10**9
MIB: Final = 2**20
GIB: Final = 2**30
TERA: Final = 10**12
