from __future__ import annotations

import os
import subprocess

import pytest

PLACEHOLDERS = {
    **dict.fromkeys(("TOKENIZER_MODEL", "DATA_PATH", "MEGATRON_LM", "MEGATRON_BRIDGE"), "set"),
    **dict.fromkeys(("RECIPE", "MODULE", "CONFIG", "TRAIN", "HEAD"), "set"),
    "SLURM_NODEID": "0",
    "TRAIN_ITERS": "10",
    "LR": "1e-4",
}


@pytest.fixture
def shell_array():
    """The words of an array that a script of a folder sets, as bash itself reads them."""

    def words(folder, script, name):
        done = subprocess.run(
            [
                "/bin/bash",
                "-c",
                f'exec() {{ :; }}; source ./{script}; printf "%s\\0" "${{{name}[@]}}"',
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **PLACEHOLDERS},
        )
        return done.stdout.split("\0")[:-1]

    return words
