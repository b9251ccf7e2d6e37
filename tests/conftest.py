"""Helper modules beside the tests (``oracle``, ``published``, ...) are imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("planner", "costmodel"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
