"""Damaged files: every one is read without a traceback, and nonsense is refused with its place.

    python -m benchmarks.mutations [--files 10000] [--seed 20261130] [--format text|json]

Good files (models, configs, clusters, training runs, plans) are damaged in one place: keys and
lines are deleted, doubled, swapped and nested, values change their type and sign or become zero,
huge or not a number, the text changes its encoding or is cut. Some of these are still good files:
without a key that has a default, say. What is not is ``NONSENSE``: these may never be accepted
where the damaged value is one that is read.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from planner import load_plan
from profiles import import_profile, load_cluster, load_model, load_training
from profiles.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Outcome", "run"]

ROOT = Path(__file__).parents[1]
SEED = 20_261_130
NONSENSE = frozenset({"negative", "huge", "nan", "long", "nest", "encoding", "retype"})

CLUSTER = """\
schema_version: 1
kind: cluster
name: lab
devices:
  big-gpu:
    memory_gib: 95
    memory_bandwidth_gb_per_s: 4000
    peak_tflops: {bf16: 800}
    num_sms: 132
nodes:
  - count: 8
    node:
      name: lab-node
      device: big-gpu
      num_gpus: 4
      gpu_link: {bandwidth_gb_per_s_per_gpu: 200, latency_us: 3}
      nics: {count: 2, bandwidth_gb_per_s: 25, latency_us: 6}
fabric:
  - {name: leaf, nodes_per_switch: 4, oversubscription: 2, latency_us: 1}
"""
MODEL = """\
schema_version: 1
kind: model
name: two-widths
max_seq_len: 8192
layers:
  - {kind: embedding, vocab: 65536, hidden: 4096}
  - kind: block
    count: 4
    hidden: 4096
    attention: {heads: 32, kv_heads: 8}
    feed_forward: {ffn_hidden: 14336}
  - kind: block
    count: 28
    hidden: 4096
    attention: {heads: 32, kv_heads: 8}
    feed_forward: {num_experts: 16, top_k: 2, expert_hidden: 7168}
  - {kind: head, vocab: 65536, hidden: 4096}
"""


MEASURED = """\
{
 "layertype_0_bsz8_seq2048": 3.9,
 "layertype_other_bsz8_seq2048": 2.9,
 "layertype_0_sp": {"2048": {
  "parameter_size": 778.2,
  "tp_activation_per_bsz_dict": {"1": 514.6, "2": 273.3, "checkpoint": 32.0}
 }},
 "other_memory_pp_off_sp": {"2048": {"model_states": {"1": 4130.3}, "activation": {"1": 841.6}}},
 "allreduce_size_8_consec_1": 154.2,
 "pp_size_2": 163.7,
 "all2all_size_8_16MB_time": 0.2,
 "overlap_coe": 1.13
}
"""


class Seed(NamedTuple):
    """A good file: its name, its text, who reads it."""

    name: str
    text: str
    read: Callable[[str], Any]


class Damaged(NamedTuple):
    """A damaged text: what was done to it, and to which value (empty: to the text)."""

    kind: str
    place: tuple[str | int, ...]
    text: bytes


@dataclass
class Outcome:
    """What came of the files: refused or accepted by kind of damage, and what must not happen."""

    refused: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    cpu_s: float = 0.0


def seeds() -> list[Seed]:
    """The good files."""
    found = [
        Seed("cluster.yaml", CLUSTER, load_cluster),
        Seed("model.yaml", MODEL, load_model),
        Seed("training.yaml", _text("examples/own-config-for-megatron/training.yaml"), _training),
        Seed("config.json", _text("examples/own-config-for-megatron/config.json"), load_model),
        Seed("measured.json", MEASURED, _measured),
        Seed("plan.yaml", _text("examples/llama3-70b-on-128-h100/plan.yaml"), load_plan),
    ]
    for name in ("deepseek-v3", "gpt2", "qwen3-30b-a3b"):
        entry = yaml.safe_load(_text(f"profiles/data/models/{name}.yaml"))
        found.append(Seed(f"{name}.json", json.dumps(entry["config"], indent=1), load_model))
    return found


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _training(path: str) -> Any:
    return load_training(path, {})


def _measured(path: str) -> Any:
    return import_profile("galvatron", [path])


def run(files: int, seed: int = SEED) -> Outcome:
    """Read ``files`` damaged files."""
    rng, outcome = random.Random(seed), Outcome()  # noqa: S311 - no secret
    started_s = time.process_time()
    known = seeds()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(files):
            good = known[number % len(known)]
            path = Path(folder) / good.name
            if number % PAIRS == 0:
                _judge_pair(good, path, rng, outcome)
                continue
            damaged = damage(good, rng)
            path.write_bytes(damaged.text)
            _judge(good, damaged, str(path), outcome)
    outcome.cpu_s = time.process_time() - started_s
    return outcome


def _judge(good: Seed, damaged: Damaged, path: str, outcome: Outcome) -> None:
    told = f"{good.name}: {damaged.kind} at {'.'.join(map(str, damaged.place)) or 'the text'}"
    try:
        good.read(path)
    except InputError as error:
        outcome.refused[damaged.kind] += 1
        lost = [str(p) for p in error.problems if path not in p.where]
        if lost:
            outcome.failures.append(f"{told}: no place: {lost[0][:200]}")
        if len(str(error)) > LONGEST_MESSAGE:
            outcome.failures.append(f"{told}: a message of {len(str(error)):,} characters")
    except Exception:  # noqa: BLE001 - that is what is looked for
        outcome.failures.append(f"{told}: {traceback.format_exc(limit=-3)}")
    else:
        outcome.accepted[damaged.kind] += 1
        if damaged.kind in NONSENSE and _is_read(damaged.place):
            outcome.failures.append(f"{told}: accepted")


def _judge_pair(good: Seed, path: Path, rng: random.Random, outcome: Outcome) -> None:
    """Two mistakes in one file: what is told of each alone is told of both together."""
    data = yaml.safe_load(good.text)
    places = [p for p in _places(data) if _takes("negative", _value(data, p)) and _is_read(p)]
    first, second = rng.sample(places, 2)
    told = []
    for chosen in ((first,), (second,), (first, second)):
        changed = yaml.safe_load(good.text)
        for place in chosen:
            TREE["negative"](changed, place, rng)
        path.write_text(_dumped(good, changed))
        try:
            good.read(str(path))
            told.append(set[str]())
        except InputError as error:
            told.append({problem.message for problem in error.problems})
    outcome.refused["two at once"] += 1
    lost = (told[0] | told[1]) - told[2]
    if lost:
        names = " and ".join(".".join(map(str, place)) for place in (first, second))
        outcome.failures.append(f"{good.name}: two mistakes at {names}: not told: {sorted(lost)}")


def _dumped(good: Seed, data: Any) -> str:
    if good.name.endswith(".json"):
        return json.dumps(data, indent=1)
    return yaml.safe_dump(data, sort_keys=False)


PAIRS = 10  # one file in so many has two mistakes
LONGEST_MESSAGE = 20_000
# Fields of configs that this project does not read, and free text.
UNREAD = re.compile(
    r"rope|rms_norm_eps|layer_norm|initializer|dropout|pdrop|hidden_act|activation|torch_dtype|"
    r"token_id|use_cache|architectures|scoring|aux_loss|topk_|norm_topk|n_group|seq_aux|"
    r"routed_scaling|ep_size|quantization|transformers|router_|summary|embd_|attn_|reorder|"
    r"scale_attn|task_specific|pretraining_tp|model_type|name|remarks|notes|sha256|clip"
)


def _is_read(place: tuple[str | int, ...]) -> bool:
    return not any(isinstance(part, str) and UNREAD.search(part) for part in place)


# --- damage ----------------------------------------------------------------------------------


def damage(good: Seed, rng: random.Random) -> Damaged:
    """One kind of damage in one place."""
    kind = rng.choice([*TREE, *TEXT])
    if kind in TEXT:
        return Damaged(kind, (), TEXT[kind](good.text, rng))
    data = yaml.safe_load(good.text)
    places = [place for place in _places(data) if _takes(kind, _value(data, place))]
    place = rng.choice(places)
    TREE[kind](data, place, rng)
    return Damaged(kind, place, _dumped(good, data).encode())


def _places(data: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield (*place, key)
        if isinstance(value, (dict, list)):
            yield from _places(value, (*place, key))


def _value(data: Any, place: tuple[str | int, ...]) -> Any:
    for part in place:
        data = data[part]
    return data


def _takes(kind: str, value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind in ("negative", "zero", "huge", "nan"):
        return number and value != 0
    return number or not isinstance(value, (dict, list)) or kind not in ("retype", "nest", "long")


def _replace(change: Callable[[Any, random.Random], Any]) -> Callable[..., None]:
    def act(data: Any, place: tuple[str | int, ...], rng: random.Random) -> None:
        outer = _value(data, place[:-1])
        outer[place[-1]] = change(outer[place[-1]], rng)

    return act


def _delete(data: Any, place: tuple[str | int, ...], _rng: random.Random) -> None:
    del _value(data, place[:-1])[place[-1]]


def _swap(data: Any, place: tuple[str | int, ...], rng: random.Random) -> None:
    other = rng.choice([each for each in _places(data) if len(each) == len(place)])
    outer, inner = _value(data, place[:-1]), _value(data, other[:-1])
    outer[place[-1]], inner[other[-1]] = inner[other[-1]], outer[place[-1]]


def _unknown_key(data: Any, place: tuple[str | int, ...], _rng: random.Random) -> None:
    outer = _value(data, place[:-1])
    if isinstance(outer, dict):
        outer[f"{place[-1]}x"] = outer.pop(place[-1])
    else:
        outer.append(outer[0])


def _retype(value: Any, rng: random.Random) -> Any:
    others: list[Any] = ["text", True, ["a", 1], {"a": 1}]
    if isinstance(value, bool):
        others = ["text", 7, ["a", 1], {"a": 1}]
    elif isinstance(value, str):
        others = [True, 7, ["a", 1], {"a": 1}]
    return rng.choice(others)


TREE: dict[str, Callable[..., None]] = {
    "delete": _delete,
    "swap": _swap,
    "unknown key": _unknown_key,
    "null": _replace(lambda _value, _rng: None),
    "nest": _replace(lambda value, rng: rng.choice([[value], {"a": value}])),
    "retype": _replace(_retype),
    "negative": _replace(lambda value, _rng: -value),
    "zero": _replace(lambda _value, _rng: 0),
    "huge": _replace(lambda _value, rng: rng.choice([1e30, 10**30, float("1e300")])),
    "nan": _replace(lambda _value, rng: rng.choice([float("nan"), float("inf")])),
    "long": _replace(lambda _value, rng: rng.choice(["a" * 100_000, list(range(10_000))])),
}


def _double_line(text: str, rng: random.Random) -> bytes:
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    return "\n".join([*lines[: at + 1], *lines[at:]]).encode()


def _swap_lines(text: str, rng: random.Random) -> bytes:
    lines = text.splitlines()
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return "\n".join(lines).encode()


def _drop_character(text: str, rng: random.Random) -> bytes:
    at = rng.randrange(len(text))
    return (text[:at] + text[at + 1 :]).encode()


def _stray_character(text: str, rng: random.Random) -> bytes:
    at = rng.randrange(len(text))
    return (text[:at] + rng.choice("{}[]:,#&*!|>'\"%@`\t\0\x1b\u2028") + text[at:]).encode()


def _other_encoding(text: str, rng: random.Random) -> bytes:
    at = rng.randrange(len(text))
    with_accent = text[:at] + "é" + text[at:]
    return with_accent.encode(rng.choice(["latin-1", "utf-16", "utf-32", "cp037"]))


TEXT: dict[str, Callable[[str, random.Random], bytes]] = {
    "double a line": _double_line,
    "swap lines": _swap_lines,
    "drop a character": _drop_character,
    "stray character": _stray_character,
    "cut": lambda text, rng: text[: rng.randrange(len(text))].encode(),
    "encoding": _other_encoding,
    "bytes": lambda _text, rng: rng.randbytes(rng.randrange(200)),
}


def main() -> None:
    """Print what came of the files; exit code 1 where something must not happen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    asked = parser.parse_args()
    outcome = run(asked.files, asked.seed)
    if asked.format == "json":
        answer = {
            "files": asked.files,
            "cpu_s": round(outcome.cpu_s, 1),
            "refused": dict(outcome.refused),
            "accepted": dict(outcome.accepted),
            "failures": outcome.failures,
        }
        print(json.dumps(answer, indent=2))
    else:
        for kind in [*TREE, *TEXT, "two at once"]:
            print(
                f"{kind:18} refused {outcome.refused[kind]:6} still good {outcome.accepted[kind]:6}"
            )
        print(f"{asked.files} files, {outcome.cpu_s:.0f} CPU s, {len(outcome.failures)} failures")
        print("\n".join(outcome.failures[:40]))
    sys.exit(1 if outcome.failures else 0)


if __name__ == "__main__":
    main()
