"""The wheel holds the packages with their data, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("profiles", "costmodel", "planner", "reports", "executor")


def test_the_wheel_holds_exactly_the_packages_and_their_data(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if ".dist-info/" not in name}
    wanted = {"cli.py"}
    for package in PACKAGES:
        for suffix in ("*.py", "*.yaml", "*.csv"):
            wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / package).rglob(suffix)}
    assert held == wanted
    assert any(name.endswith("data/models/llama3-70b.yaml") for name in held)
