"""Write the plan of every example anew: ``python examples/regenerate.py``."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent


def main() -> None:
    """Run the command of each example in its folder."""
    commands = yaml.safe_load((FOLDER / "commands.yaml").read_text())
    for name, command in commands.items():
        subprocess.run(
            [sys.executable, "-m", "cli", *shlex.split(command), "--force"],
            cwd=FOLDER / name,
            check=True,
            stdout=subprocess.DEVNULL,
        )


if __name__ == "__main__":
    main()
