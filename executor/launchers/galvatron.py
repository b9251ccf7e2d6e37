"""Hetu-Galvatron: the plan JSON that its search writes and its runtime reads.

Keys are those of Hetu-Galvatron cea12ff (2026-06-16), ``core/runtime/hybrid_parallel_config.py``
and ``utils/config_utils.py``. Its search and its example write ``embed_sdp`` where the runtime
reads ``vocab_sdp``: the version says which is written, and both are read.
"""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from costmodel.layout import NO_RECOMPUTE
from executor.launchers.job import FULL, Heard
from executor.launchers.launchlines import launch_script, placeholder, slurm_script
from executor.launchers.mappings import read_document, read_mapping
from executor.launchers.told import Key, Kind
from profiles.errors import InputError, Problem
from profiles.training import Precision

if TYPE_CHECKING:
    from executor.launchers.commandline import Source
    from executor.launchers.job import Job
    from executor.launchers.told import Told

__all__ = ["KEYS", "hear", "layer_values", "say", "tell", "write"]

TEXT, SIZE, COUNT = Kind.TEXT, Kind.SIZE, Kind.COUNT
SHARDS_WEIGHTS: Final = 3


def _key(name: str, fact: str, kind: Kind = TEXT, usual: object = None, *once: str) -> Key:
    return Key(name=name, fact=fact, kind=kind, usual=usual, once=once)


KEYS: Final = (
    _key("pp_deg", "pp", COUNT, 1),
    _key("tp_sizes_enc", "tp_sizes"),
    _key("tp_consecutive_flags", "consecutive"),
    _key("cp_sizes_enc", "cp_sizes"),
    _key("dp_types_enc", "dp_types"),
    _key("use_sp", "ulysses"),
    _key("ep_sizes_enc", "ep_sizes"),
    _key("tp_of_ep_sizes_enc", "expert_tp_sizes"),
    _key("checkpoint", "checkpoints"),
    _key("global_bsz", "global_batch", COUNT),
    _key("chunks", "chunks", COUNT),
    _key("pp_division", "division"),
    _key("pipeline_type", "pipeline", TEXT, "gpipe"),
    _key("default_dp_type", "default_dp", TEXT, "ddp"),
    _key("vtp", "vocab_tp", COUNT, 1),
    _key("vsp", "vocab_sp", SIZE, 0),
    _key("vcp", "vocab_cp", COUNT, 1),
    _key("vocab_sdp", "vocab_sdp", SIZE, 0),
    _key("embed_sdp", "embed_sdp", SIZE),
    _key("world_size", "world", COUNT),
)
SCHEDULES: Final = {"gpipe": "gpipe", "1f1b": "pipedream_flush"}


def say(job: Job, version: str) -> dict[str, Any]:
    """The facts of a job by the names of the table."""
    s = job.setup
    model = job.model
    of_blocks = [z for z, name in zip(s.zero, model.layer_names, strict=True) if name.isdigit()]
    ends = [z for z, name in zip(s.zero, model.layer_names, strict=True) if not name.isdigit()]
    layers = len(of_blocks)
    facts: dict[str, Any] = {
        "pp": s.pp,
        "tp_sizes": _row([s.tp] * layers),
        "consecutive": _row([1] * layers),
        "cp_sizes": _row([s.cp] * layers),
        "dp_types": _row([int(zero == SHARDS_WEIGHTS) for zero in of_blocks]),
        "ulysses": _row([0] * layers),
        "checkpoints": _row([int(option == FULL) for option in job.blocks]),
        "global_batch": job.inputs.training.global_batch,
        "chunks": s.num_microbatches,
        "world": s.num_ranks,
        "division": _row(list(s.blocks)),
        "pipeline": SCHEDULES.get(s.schedule, "pipedream_flush"),
        "default_dp": "zero2" if 2 in s.zero else "ddp",  # noqa: PLR2004 - the stage
        "vocab_tp": s.tp,
        "vocab_sp": 0,
        "vocab_cp": s.cp,
        version: int(bool(ends) and all(zero == SHARDS_WEIGHTS for zero in ends)),
    }
    if s.ep > 1 or s.expert_tp > 1:
        facts |= {
            "ep_sizes": _row([s.ep] * layers),
            "expert_tp_sizes": _row([s.expert_tp] * layers),
        }
    return facts


def _row(values: list[int]) -> str:
    return ",".join(map(str, values))


def layer_values(told: Told, fact: str, usual: int = 0) -> tuple[int, ...]:
    """A comma-separated list; its length is that of tp_sizes_enc where it is not given."""
    text = getattr(told, fact)
    if text is None:
        return (usual,) * len(layer_values(told, "tp_sizes")) if fact != "tp_sizes" else ()
    parts = [part.strip() for part in str(text).split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}", part) for part in parts):
        message = f"{told.spelt(fact)} is {str(text)[:60]!r}"
        expected = "whole numbers with commas, as '2,2,1'"
        raise InputError(Problem(where=told.where(fact), message=message, expected=expected))
    return tuple(map(int, parts))


def _one(told: Told, fact: str, usual: int = 1) -> int:
    """The one value of a list. Raises ``InputError`` where layers differ."""
    values = layer_values(told, fact, usual)
    if len(set(values)) > 1:
        runs, first = [], 0
        for value, equal in groupby(values):
            last = first + len(list(equal)) - 1
            runs.append(f"{value} in layers {first}-{last}")
            first = last + 1
        message = f"{told.spelt(fact)}: {', '.join(runs[:4])}"
        expected = "one degree for all layers: a layout here has no other"
        raise InputError(Problem(where=told.where(fact), message=message, expected=expected))
    return values[0] if values else usual


def hear(told: Told) -> Heard:
    """What a plan JSON says."""
    if told.tp_sizes is None:
        where = told.where("tp_sizes")
        raise InputError(Problem(where=where, message="tp_sizes_enc is missing"))
    tp, cp = _one(told, "tp_sizes"), _one(told, "cp_sizes")
    dp = max(1, told.num_gpus // (told.pp * tp * cp))
    if any(layer_values(told, "ulysses")):
        told.unmodelled.append("use_sp: Ulysses sequence parallelism, estimated as tp")
    default = {"ddp": 0, "zero2": 2, "zero3": 3}.get(told.default_dp, 0)
    zero = tuple(3 if own else default for own in layer_values(told, "dp_types"))
    ends = told.embed_sdp if told.embed_sdp is not None else told.vocab_sdp
    if dp * cp == 1:
        zero, ends, default = (0,) * len(zero), 0, 0
    checkpoints = layer_values(told, "checkpoints")
    if told.vocab_tp != tp:
        told.notes.append(f"vtp {told.vocab_tp}: embedding and head are estimated with tp {tp}")
    batch, count = told.global_batch, told.chunks
    micro = max(1, batch // dp // count) if batch and count else None
    schedules = {said: name for name, said in SCHEDULES.items()}
    return Heard(
        tp=tp,
        cp=cp,
        ep=_one(told, "ep_sizes"),
        expert_tp=_one(told, "expert_tp_sizes"),
        pp=told.pp,
        dp=dp,
        schedule=schedules.get(told.pipeline, "1f1b") if told.pp > 1 else "1f1b",
        micro_batch=micro,
        zero=zero,
        end_zero=3 if ends else default,
        sequence_parallel=tp > 1,
        blocks=layer_values(told, "division") if told.division else None,
        recompute=tuple(FULL if own else NO_RECOMPUTE for own in checkpoints),
        training={"global_batch": batch},
    )


def write(job: Job, *, version: str) -> dict[str, str]:
    """The files of a job."""
    facts = say(job, version)
    config = {key.name: facts[key.fact] for key in KEYS if key.fact in facts}
    precision = job.inputs.training.precision
    mixed = {Precision.FP32: "fp32", Precision.FP16: "fp16"}.get(precision, "bf16")
    notes = [
        f"Hetu-Galvatron, the plan's key for embedding and head is {version}.",
        "TRAIN is its training script for your model, as models/gpt/train_dist.py.",
        "Its chunks are micro-batches; the batch of the plan wins over that of the script.",
    ]
    script = launch_script(
        job,
        [
            placeholder("TRAIN", "training script of Hetu-Galvatron"),
            "--galvatron_config_path galvatron.json",
            f"--mixed_precision {mixed} --seq-length {job.inputs.training.seq_len}",
        ],
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if job.setup.tp > 1 else {},
        notes=notes,
    )
    return {
        "galvatron.json": json.dumps(config, indent=4) + "\n",
        "launch.sh": script,
        "job.sbatch": slurm_script(job),
    }


def tell(source: Source, *, num_gpus: int | None, version: str) -> Told:  # noqa: ARG001
    """What a plan JSON says."""
    told = read_mapping(
        "galvatron",
        KEYS,
        read_document(source),
        num_gpus=num_gpus or 1,
        no_bearing=lambda _: False,
        unmodelled=lambda name: name in ("cp_mode", "async_grad_reduce"),
    )
    told.started = told.world
    if num_gpus is None and told.world:
        told.num_gpus = told.world
    if told.tp_sizes is not None:
        told.given.setdefault("num_layers", len(str(told.tp_sizes).split(",")))
    return told
