"""A job that is planned in no time, and where the project lies."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--model", "gpt2", "--cluster", "4xh100-80g", "--global-batch", "16", "--seq-len", "512"),
]
