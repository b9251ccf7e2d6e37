"""Run the commands that pages show, and write what they print now: ``python docs/refresh.py``.

The output in a page is cut by hand. Lines between two ``...`` are replaced by the printed lines
from the one that resembles their first to the one that resembles their last; a line that ends in
``...`` keeps as many words. So read the difference before you keep it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```(console|json|yaml|text) ?([\w.-]*)\n(.*?)```", re.DOTALL)
ELISION = "..."


def refreshed(text: str, folder: Path) -> str:
    """A page with the output of its commands, run one after another in ``folder``."""

    def replace(block: re.Match[str]) -> str:
        kind, name, body = block.groups()
        if kind != "console":
            if name:
                (folder / name).write_text(body)
            return block[0]
        command, _, shown = body.partition("\n")
        printed = _run(command.removeprefix("$ "), folder)
        return f"```console\n{command}\n{_resembling(shown.splitlines(), printed)}```"

    return BLOCK.sub(replace, text)


def _run(command: str, folder: Path) -> list[str]:
    done = subprocess.run(  # noqa: S603 - what the pages say
        [sys.executable, "-m", "cli", *shlex.split(command)[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
    )
    return [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]


def _resembling(shown: list[str], printed: list[str]) -> str:
    """What is printed where ``shown`` was: each stretch of lines between two elisions anew."""
    found: list[str] = []
    at, stretch = 0, list[str]()
    for line in [*shown, ELISION]:
        if line != ELISION:
            stretch.append(line)
            continue
        if stretch:
            first = _nearest(stretch[0], printed, at)
            last = _nearest(stretch[-1], printed, first) if len(stretch) > 1 else first
            fresh = printed[first : last + 1]
            found += [_cut(line, old) for line, old in _aligned(fresh, stretch)]
            at, stretch = last + 1, []
        found.append(ELISION)
    return "".join(f"{line}\n" for line in found[:-1])


def _aligned(fresh: list[str], stretch: list[str]) -> list[tuple[str, str]]:
    """Printed lines with the shown ones; only first and last lines are cut."""
    if len(fresh) == 1:
        return [(fresh[0], stretch[0])]
    return [
        (fresh[0], stretch[0]),
        *((line, line) for line in fresh[1:-1]),
        (fresh[-1], stretch[-1]),
    ]


def _nearest(wanted: str, printed: list[str], start: int) -> int:
    """The line that resembles ``wanted`` most, digits aside."""
    plain = re.sub(r"[\d.,]+", "0", wanted.removesuffix(ELISION))

    def likeness(position: int) -> float:
        line = re.sub(r"[\d.,]+", "0", printed[position])
        return SequenceMatcher(None, line[: len(plain)], plain).ratio()

    return max(range(start, len(printed)), key=lambda each: (likeness(each), -each))


def _cut(line: str, shown: str) -> str:
    """``line``, cut after as many words as ``shown`` has if that ends in an elision."""
    if not shown.endswith(ELISION):
        return line
    kept = shown.removesuffix(ELISION)
    ends = [word.end() for word in re.finditer(r"\S+", line)]
    text = line[: ends[min(len(kept.split()), len(ends)) - 1]]
    return (text if kept.endswith((",", ";", ":")) else text.rstrip(",;:")) + ELISION


def main() -> None:
    """Refresh the README, the tutorial and the how-to pages, each in a folder of its own."""
    pages = [ROOT / "README.md"]
    for folder in ("tutorial", "how-to"):
        pages += sorted((ROOT / "docs" / folder).glob("*.md"))
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(refreshed(page.read_text(), Path(folder)))


if __name__ == "__main__":
    main()
