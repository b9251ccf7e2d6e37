"""Measured training runs: the CSV that ``validate`` and ``calibrate`` read, one run a line.

A cell that is empty was not stated. Columns that are not known are ignored and named in a note.
The record of a run of ``parplan launch`` (``run.json``) is one such line, a folder of them several.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

from profiles.errors import InputError, Problem
from profiles.nearest import nearest

__all__ = ["MeasuredRun", "RunsFile", "published_runs", "read_runs"]

NEEDED: Final = ("id", "gpu", "n_gpus", "stack", "outcome")
OUTCOMES: Final = ("ok", "oom", "oom_cpu", "unavailable", "failed", "error")
TRUST: Final = ("high", "medium", "low")
RECORD: Final = "run.json"
MOST_LAYERS: Final = 10_000
GREATEST: Final = 1e15  # beyond it a number is a slip of the pen, whatever its unit


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run as its source states it; None and "" are what the source leaves open.

    ``where`` is ``file:line``. ``file`` is the source that the run was published in. ``dp`` is
    what is left of the GPUs by tp, pp and cp; expert parallelism lies inside dp x cp x tp.
    ``vpp``: chunks a stage. ``peak_mem_gib`` means what ``mem_basis`` says. Runs of one
    ``rank_group`` differ in their layout only.
    """

    where: str
    id: str
    file: str = ""
    source: str = ""
    stack: str
    framework: str = ""
    gpu: str
    gpu_mem_gb: float | None = None
    gpus_per_node: int | None = None
    intra_bw: str = ""
    inter_bw: str = ""
    n_gpus: int
    model: str = ""
    layers: int | None = None
    hidden: int | None = None
    ffn_hidden: int | None = None
    gated_mlp: bool | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    tied_embeddings: bool | None = None
    num_experts: int | None = None
    topk: int | None = None
    moe_ffn_hidden: int | None = None
    shared_ffn_hidden: int | None = None
    dense_layers: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    sequence_parallel: bool | None = None
    zero_stage: str = ""
    recompute: str = ""
    precision: str = ""
    attn_kernel: str = ""
    step_time_s: float | None = None
    peak_mem_gib: float | None = None
    mem_basis: str = ""
    outcome: str
    notes: str = ""
    full_config: bool | None = None
    trust: str = ""
    mode: str = ""
    rank_group: str = ""

    @property
    def release(self) -> str:
        """The software stack with its release: where the stack names none, but the notes say
        which PyTorch it ran on, that is its release. Omni-Path has a transport of its own below
        the collectives, which makes another stack of it.
        """
        found = _TORCH.search(self.notes)
        stack = f"{self.stack} torch {found[1]}" if found else self.stack
        return f"{stack} over Omni-Path" if "omni-path" in self.inter_bw.lower() else stack

    @property
    def memory_basis(self) -> str:
        """What the peak counts, also where only the notes say that it is what was reserved."""
        return "reserved" if "peak reserved" in self.notes else self.mem_basis

    @property
    def always_predicted(self) -> bool:
        """Whether everything is stated that an estimate needs, by a source to be trusted."""
        trusted = self.trust in ("high", "medium")
        return bool(self.full_config) and trusted and self.mode in ("pretrain", "sft")


@dataclass(frozen=True, slots=True)
class RunsFile:
    """The runs of one file in its order, and notes on what was left aside."""

    runs: tuple[MeasuredRun, ...]
    notes: tuple[str, ...]


_TORCH: Final = re.compile(r"\btorch (\d+\.\d+(?:/\d+\.\d+)?)")
_READ: Final = {name: hint for name, hint in get_type_hints(MeasuredRun).items() if name != "where"}


def read_runs(path: str | Path) -> RunsFile:
    """The runs of a CSV file, of a ``run.json`` or of all of these below a folder. Raises
    ``InputError`` with every problem, by line and column.
    """
    if Path(path).is_dir():
        return _read_folder(Path(path))
    if Path(path).suffix == ".json":
        return _read_record(Path(path))
    shown = str(path)
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    columns = list(reader.fieldnames or [])
    _check_columns(shown, columns)
    problems: list[Problem] = []
    runs = []
    try:
        for cells in reader:
            run = _run(f"{shown}:{reader.line_num}", cells, problems)
            if run is not None:
                runs.append(run)
    except csv.Error as error:
        problems.append(Problem(where=f"{shown}:{reader.line_num}", message=f"not CSV: {error}"))
    problems += _repeated(runs)
    if not runs and not problems:
        problems.append(Problem(where=shown, message="has no run", expected="one run a line"))
    if problems:
        raise InputError(problems)
    unknown = [name for name in columns if name not in _READ]
    notes = (f"{shown}: columns that are not known are ignored: {', '.join(unknown)}",)
    return RunsFile(tuple(runs), notes if unknown else ())


def _read_folder(folder: Path) -> RunsFile:
    paths = sorted(folder.rglob(RECORD))
    if not paths:
        problem = Problem(where=str(folder), message="has no run", expected=f"{RECORD} below it")
        raise InputError(problem)
    runs = [run for path in paths for run in _read_record(path).runs]
    problems = _repeated(runs)
    if problems:
        raise InputError(problems)
    return RunsFile(tuple(runs), ())


def _read_record(path: Path) -> RunsFile:
    """The row in a run's record, read like a line of a CSV."""
    try:
        document = json.loads(_text(path))
        row = dict(document["row"])
    except (ValueError, KeyError, TypeError):
        problem = Problem(
            where=str(path), message="is no record of a run", expected="a run.json of parplan"
        )
        raise InputError(problem) from None
    cells = {
        name: "" if value is None else str(int(value) if isinstance(value, bool) else value)
        for name, value in row.items()
    }
    problems = [
        Problem(where=f"{path}:row", message=f"has no {name}")
        for name in NEEDED
        if name not in cells
    ]
    run = None if problems else _run(str(path), cells, problems)
    if run is None:
        raise InputError(problems)
    return RunsFile((run,), ())


def published_runs() -> Path:
    """The table of published runs that comes with parplan."""
    return Path(__file__).parent / "data" / "runs" / "published.csv"


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        problem = Problem(where=str(path), message=f"cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        problem = Problem(where=str(path), message="is not text", expected="CSV in UTF-8")
    raise InputError(problem)


def _check_columns(shown: str, names: list[str]) -> None:
    """A header without a needed column, or with one twice, ends the reading at once."""
    missing = [name for name in NEEDED if name not in names]
    problems = [
        Problem(
            where=f"{shown}:1",
            message=f"there is no column {name}",
            expected=f"the columns {', '.join(NEEDED)}",
            hint=nearest(name, [other for other in names if other not in _READ]),
        )
        for name in missing
    ]
    problems += [
        Problem(where=f"{shown}:1:{name}", message="the column stands twice")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if problems:
        raise InputError(problems)


def _run(where: str, cells: dict[str, Any], problems: list[Problem]) -> MeasuredRun | None:
    """One line; None where it has a problem."""
    before = len(problems)
    if None in cells or None in cells.values():
        problems.append(Problem(where=where, message="has more or fewer cells than the header"))
        return None
    values: dict[str, Any] = {"where": where}
    for name, hint in _READ.items():
        text = str(cells.get(name, "")).strip()
        if text:
            values[name] = _cell(f"{where}:{name}", text, hint, problems)
        elif name in NEEDED:
            problems.append(Problem(where=f"{where}:{name}", message="is empty"))
    choices = {"outcome": OUTCOMES, "trust": TRUST}
    problems += [
        Problem(
            where=f"{where}:{name}",
            message=f"is {values[name]!r}",
            expected=f"one of {', '.join(known)}",
            hint=nearest(str(values[name]), known),
        )
        for name, known in choices.items()
        if name in values and values[name] not in known
    ]
    return MeasuredRun(**values) if len(problems) == before else None


def _cell(where: str, text: str, hint: Any, problems: list[Problem]) -> Any:
    """The value of one cell; ``1.0`` means 1."""
    if hint is str:
        return text
    if hint == bool | None:
        known = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
        if text.lower() not in known:
            problems.append(Problem(where=where, message=f"is {text!r}", expected="1 or 0"))
        return known.get(text.lower())
    whole = hint in (int, int | None)
    least = 0 if where.endswith(_MAY_BE_ZERO) else math.ulp(0.0)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    most = MOST_LAYERS if where.endswith(":layers") else GREATEST
    if not least <= number <= most or (whole and number != int(number)):
        above = "from 0" if least == 0 else "above 0"
        above += f" to {most:,}" if most < GREATEST else ""
        expected = f"a {'whole ' if whole else ''}number {above}"
        problems.append(Problem(where=where, message=f"is {text!r}", expected=expected))
        return None
    return int(number) if whole else number


_MAY_BE_ZERO: Final = (":num_experts", ":topk", ":shared_ffn_hidden", ":dense_layers")


def _repeated(runs: list[MeasuredRun]) -> list[Problem]:
    """Runs whose name another one has."""
    seen: dict[str, str] = {}
    problems = []
    for run in runs:
        if run.id in seen:
            message = f"{run.id!r} stands in {seen[run.id]} too"
            problems.append(Problem(where=f"{run.where}:id", message=message))
        seen.setdefault(run.id, run.where)
    return problems
