from __future__ import annotations

from pathlib import Path

import pytest

from profiles.errors import InputError


@pytest.fixture
def problems(tmp_path: Path):
    """Writes a file, lets a function read it, and gives back the lines of its InputError with
    the file's folder taken away."""

    def told(read, text: str | bytes, name: str = "file.yaml") -> list[str]:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(InputError) as caught:
            read(str(path))
        return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]

    return told


@pytest.fixture
def shared() -> Path:
    folder = Path(__file__).parents[2].parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip("the folder of published configs is not beside this project")
    return folder
