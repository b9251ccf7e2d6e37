"""A search problem of Hetu-Galvatron, and what it answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from profiles import jsonfile
from profiles.errors import InputError, Problem
from profiles.galvatron import read_galvatron

if TYPE_CHECKING:
    from pathlib import Path

    from profiles.measured import Profile
    from profiles.yamlfile import Document

MIB_PER_GIB: Final = 1024
RESERVED_ABOVE_GIB: Final = 20
RESERVED_PART: Final = 0.2

Engine = Literal["main", "v2.4.0"]

# The peer's own default of each option; one that is not here is noted and left out.
OPTIONS: Final[dict[str, Any]] = {
    "settle_chunk": -1,
    "mixed_precision": "bf16",
    "default_dp_type": "ddp",
    "pipeline_type": "gpipe",
    "async_grad_reduce": True,
    "sequence_parallel": False,
    "global_memory_buffer": True,
    "time_profile_mode": "static",
    "memory_profile_mode": "static",
    "fine_grained_mode": 1,
    "parallel_search": False,
    "sp_space": "tp",
    "disable_dp": 0,
    "disable_tp": 0,
    "disable_cp": 1,
    "disable_sp": 0,
    "disable_pp": 0,
    "disable_ckpt": 0,
    "disable_fsdp": 0,
    "disable_sdp": 0,
    "disable_vtp": 0,
    "disable_tp_consec": 0,
    "disable_embedding_lmhead_tp": 0,
    "disable_embedding_lmhead_sp": 0,
    "max_tp_deg": 8,
    "max_pp_deg": 8,
    "max_sp_deg": -1,
    "max_cp_deg": -1,
}
CHOICES: Final = {
    "mixed_precision": ("bf16", "fp16", "fp32"),
    "default_dp_type": ("ddp", "zero2"),
    "pipeline_type": ("gpipe", "pipedream_flush"),
    "time_profile_mode": ("static", "batch", "sequence"),
    "memory_profile_mode": ("static", "sequence"),
    "sp_space": ("tp", "sp", "tp+sp"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Equal layers that follow one another."""

    hidden_size: int
    seq_len: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem. ``options`` has every key of ``OPTIONS``; ``files`` are the profiles' names."""

    name: str
    engine: Engine
    kinds: tuple[LayerKind, ...]
    world: int
    memory_gib: float
    global_batch: int
    files: dict[str, str]
    options: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def half(self) -> bool:
        """Whether parameters and activations have two bytes."""
        return bool(self.options["mixed_precision"] != "fp32")

    @property
    def coarse(self) -> bool:
        """Whether all layers take one strategy."""
        return not self.options["fine_grained_mode"]

    @property
    def reserved_mib(self) -> int:
        """What is kept back for the allocator: a fifth of more than 20 GiB."""
        total = self.memory_gib * MIB_PER_GIB
        kept = total // MIB_PER_GIB > RESERVED_ABOVE_GIB
        return int(total * RESERVED_PART) if kept else 0

    @property
    def budget_mib(self) -> float:
        """What layers, embedding, head and buffers may use of each GPU."""
        return self.memory_gib * MIB_PER_GIB - self.reserved_mib

    @property
    def chunk_counts(self) -> list[int]:
        """Numbers of micro-batches to try: divisors of the global batch, or the one that is set."""
        wanted = self.options["settle_chunk"]
        tried = range(1, self.global_batch + 1) if wanted == -1 else [wanted]
        return [chunks for chunks in tried if self.global_batch % chunks == 0]


def read_case(path: Path) -> Case:
    """Read ``inputs/CASE.json``. Raises ``InputError`` with the key that is wrong."""
    document = jsonfile.read(path)
    document.raise_problems()
    given = _Given(document)
    engine = given.one_of(("engine",), get_args(Engine))
    options, unknown = dict(OPTIONS), []
    for key, value in given.mapping(("search",)).items():
        if key == "global_bsz":
            continue
        if key not in OPTIONS:
            unknown.append(f"search.{key} is not known and left out")
            continue
        if key in CHOICES:
            given.one_of(("search", key), CHOICES[key])
        elif not isinstance(value, int):
            given.refuse(("search", key), f"{value!r}", "a whole number or true or false")
        options[key] = value
    if options["settle_chunk"] != -1:
        given.count(("search", "settle_chunk"))
    return Case(
        name=str(document.data.get("case", path.stem)),
        engine=engine,  # type: ignore[arg-type]
        kinds=_kinds(given),
        world=given.count(("cluster", "num_nodes")) * given.count(("cluster", "gpus_per_node")),
        memory_gib=given.number(("memory_constraint_gb",)),
        global_batch=given.count(("search", "global_bsz")),
        files={
            role: given.text(("profiles", role))
            for role in (
                "computation",
                "memory",
                "overlap",
                "allreduce_bandwidth",
                "p2p_bandwidth",
                "sp_time",
            )
        },
        options=options,
        notes=tuple(unknown),
    )


def read_profile(case: Case, folder: Path) -> Profile:
    """The files that a case names, as one profile."""
    paths = [folder / name for name in dict.fromkeys(case.files.values())]
    return read_galvatron(paths, name=case.name, source="Hetu-Galvatron")[0]


def read_result(path: Path) -> dict[str, Any] | None:
    """What the peer answered, as recorded; None where nothing is."""
    return jsonfile.read(path).data if path.is_file() else None


def _kinds(given: _Given) -> tuple[LayerKind, ...]:
    types = given.at(("model", "layer_types"))
    if types is None:
        places: list[tuple[str | int, ...]] = [("model",)]
        keys = ("hidden_size", "seq_length", "num_layers")
    else:
        if not isinstance(types, list) or not types:
            given.refuse(("model", "layer_types"), "no entries", "a list of kinds of layers")
        places = [("model", "layer_types", index) for index in range(len(types))]
        keys = ("hidden_size", "seq_len", "layer_num")
    return tuple(
        LayerKind(
            hidden_size=given.count((*place, keys[0])),
            seq_len=given.count((*place, keys[1])),
            count=given.count((*place, keys[2])),
        )
        for place in places
    )


class _Given:
    """Values of a document by place, or the problem that they are not there."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def at(self, place: tuple[str | int, ...]) -> Any:
        value: Any = self.document.data
        for part in place:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def refuse(self, place: tuple[str | int, ...], message: str, expected: str) -> None:
        where, dotted = self.document.where(place), ".".join(map(str, place))
        raise InputError(Problem(where=where, message=f"{dotted}: {message}", expected=expected))

    def count(self, place: tuple[str | int, ...]) -> int:
        value = self.at(place)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(place, f"{value!r}", "a whole number of at least 1")
        return int(value)

    def number(self, place: tuple[str | int, ...]) -> float:
        value = self.at(place)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            self.refuse(place, f"{value!r}", "a number above 0")
        return float(value)

    def text(self, place: tuple[str | int, ...]) -> str:
        value = self.at(place)
        if not isinstance(value, str):
            self.refuse(place, f"{value!r}", "the name of a file")
        return str(value)

    def one_of(self, place: tuple[str | int, ...], known: tuple[str, ...]) -> str:
        value = self.at(place)
        if value not in known:
            self.refuse(place, f"{value!r}", f"one of {', '.join(known)}")
        return str(value)

    def mapping(self, place: tuple[str | int, ...]) -> dict[str, Any]:
        value = self.at(place)
        if not isinstance(value, dict):
            self.refuse(place, f"{value!r}", "an object")
        return dict(value)
