"""A journal beside the output: each point as soon as it is measured, so that a session that was
killed is taken up where it ended.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from executor.profiler.timing import Figure

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NO_ROOM", "Journal"]

NO_ROOM: Final = "no room"


class Journal:
    """Figures by task, in a file of JSON lines under a header that says what they are of."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        """Take up what is there if it is of the same session. ``path`` None: kept nowhere."""
        self.path, self.found = path, dict[str, Any]()
        if path is None:
            return
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        first = json.dumps({"journal": header}, sort_keys=True)
        if lines[:1] != [first]:
            path.write_text(first + "\n", encoding="utf-8")
            return
        for line in lines[1:]:
            try:
                task, found = json.loads(line)
            except ValueError:
                break  # the line during which the session was killed
            self.found[task] = found
        sound = [first, *(json.dumps(entry) for entry in self.found.items())]
        path.write_text("\n".join(sound) + "\n", encoding="utf-8")

    def figure(self, task: str) -> Figure | None:
        """What was measured, None where it was not, or had no room."""
        found = self.found.get(task)
        return Figure(**found["figure"]) if isinstance(found, dict) and "figure" in found else None

    def parameters(self, task: str) -> int:
        """Elements of the layer of a task that was measured."""
        return int(self.found[task]["parameters"])

    def add(self, task: str, figure: Figure | None, *, parameters: int = 0) -> None:
        """Note a figure, or None for a point without room."""
        own = {"figure": asdict(figure), "parameters": parameters} if figure else NO_ROOM
        self._write(task, own)

    def _write(self, task: str, own: Any) -> None:
        self.found[task] = own
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([task, own]) + "\n")

    def add_bytes(self, task: str, found: dict[str, int]) -> None:
        """Note what a layer holds."""
        self._write(task, {"bytes": found})
