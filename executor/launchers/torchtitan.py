"""torchtitan: its configuration as flags of ``torchtitan.train``, and its TOML of earlier days.

Each part is written and read side by side; keys are in ``executor.launchers.torchtitankeys``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from costmodel.layout import NO_RECOMPUTE, ContextComm, Recompute, RecomputeKind
from executor.launchers.commandline import launch_line, read_flags, world_size
from executor.launchers.job import FULL, Heard
from executor.launchers.launchlines import array, launch_script, placeholder, quoted, slurm_script
from executor.launchers.mappings import read_document, read_mapping
from executor.launchers.modelfacts import facts_of_model
from executor.launchers.script import Command, Token
from executor.launchers.told import Key, Kind, by_name
from executor.launchers.torchtitankeys import KEYS, NO_BEARING, UNMODELLED
from profiles.training import GradDtype, Precision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from executor.launchers.commandline import Source
    from executor.launchers.job import Job
    from executor.launchers.told import Told

__all__ = ["hear", "say", "tell", "write"]

SCHEDULES: Final = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
ONE_STAGE: Final = ("GPipe", "1F1B")
REGISTRY: Final = {
    "llama3-8b": ("llama3", "llama3_8b"),
    "llama3.1-8b": ("llama3", "llama3_8b"),
    "llama3-70b": ("llama3", "llama3_70b"),
    "llama3.1-70b": ("llama3", "llama3_70b"),
    "llama3.1-405b": ("llama3", "llama3_405b"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
    "qwen3-1.7b": ("qwen3", "qwen3_1_7b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "gpt-oss-20b": ("gpt_oss", "gpt_oss_20b"),
    "gpt-oss-120b": ("gpt_oss", "gpt_oss_120b"),
}
# Its selective checkpointing keeps the outputs of every second matrix product and of attention;
# recomputing norms and activations is the nearest that an estimate knows.
BY_OPERATOR: Final = Recompute(RecomputeKind.SELECTIVE, ("layernorm", "mlp"))


def say(job: Job, version: str) -> dict[str, Any]:
    """The facts of a job by the names of the table of ``version``."""
    s = job.setup
    sharded = s.one_zero > 0
    shard = s.shard_group // s.cp if sharded else 1
    facts: dict[str, Any] = {
        "tp": s.tp,
        "cp": s.cp,
        "ep": s.ep,
        "pp": s.pp,
        "dp_replicate": s.dp // shard,
        "dp_shard": shard,
        "reshard": {2: "never", 3: "always"}.get(s.one_zero, "never"),
        "sequence_parallel": s.sequence_parallel or s.tp == 1,
        "recompute": "full" if FULL in job.blocks else "none",
        "seq_len": job.inputs.training.seq_len,
        **_say_batch(job, version),
    }
    if s.pp > 1:
        facts |= {
            "pp_schedule": SCHEDULES[s.schedule],
            "stage_modules": _modules(s.blocks),
            "no_graphs": True,
        }
    if job.inputs.training.precision is Precision.FP32:
        facts["param_dtype"] = "float32"
    return facts


def _say_batch(job: Job, version: str) -> dict[str, Any]:
    s, training = job.setup, job.inputs.training
    if version == "main":
        return {
            "micro_tokens": s.micro_batch * training.seq_len,
            "step_tokens": training.tokens,
            "num_pp_microbatches": s.num_microbatches if s.pp > 1 else 1,
        }
    return {
        "local_batch": s.micro_batch * (s.num_microbatches if s.pp > 1 else 1),
        "batch": training.global_batch,
        "pp_micro_batch": s.micro_batch if s.pp > 1 else 1,
    }


def _modules(blocks: Iterable[int]) -> list[str]:
    """The modules of every stage, commas between them, in model order."""
    stages, first = [], 0
    for size in blocks:
        stages.append([f"layers.{number}" for number in range(first, first + size)])
        first += size
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return [",".join(stage) for stage in stages]


def hear(told: Told) -> Heard:
    """What a configuration says."""
    pp, tp, cp = told.pp, told.tp, told.cp
    dp = max(1, told.num_gpus // (tp * cp * pp))
    shard = told.dp_shard if told.dp_shard > 0 else max(1, dp // told.dp_replicate)
    blocks, chunks = _hear_cut(told)
    schedules = {said: name for name, said in SCHEDULES.items()}
    wanted = told.pp_schedule if pp > 1 else "1F1B"
    known = {said.lower(): said for said in schedules}
    schedule = schedules.get(known.get(wanted.lower(), ""), "")
    if not schedule:
        told.unmodelled.append(f"{told.spelt('pp_schedule')} {wanted}")
        schedule = "interleaved-1f1b" if chunks > 1 else "1f1b"
    micro_batch, batch = _hear_batch(told, dp)
    recompute = {"full": FULL, "selective": BY_OPERATOR}.get(
        told.recompute_mode or told.recompute, NO_RECOMPUTE
    )
    if recompute is BY_OPERATOR:
        told.notes.append("selective checkpointing by operator is estimated as layernorm + mlp")
    precision = Precision.BF16 if told.param_dtype == "bfloat16" else Precision.FP32
    grads = GradDtype.FP32 if told.reduce_dtype == "float32" else GradDtype.BF16
    return Heard(
        tp=tp,
        cp=cp,
        ep=told.ep,
        expert_tp=told.expert_tp or 1,
        pp=pp,
        dp=told.dp_replicate * shard,
        chunks=chunks,
        schedule=schedule,
        micro_batch=micro_batch,
        zero=_hear_zero(told, shard),
        shard_group=shard * cp if shard * cp > 1 else None,
        sequence_parallel=tp > 1 and told.sequence_parallel,
        cp_comm=ContextComm.GATHER,
        blocks=blocks,
        recompute=recompute,
        training={
            "global_batch": batch,
            "seq_len": told.seq_len,
            "precision": precision.value,
            "grad_dtype": grads.value,
        },
    )


def _hear_zero(told: Told, shard: int) -> int:
    if shard * told.cp == 1:
        return 0
    policy = told.reshard
    if policy == "default":
        return 3 if told.pp == 1 else 2
    return 3 if policy == "always" else 2


def _hear_batch(told: Told, dp: int) -> tuple[int, int]:
    """(micro-batch, global batch) in sequences."""
    if "micro_tokens" in told.keys:
        size = max(1, told.micro_tokens // told.seq_len)
        step = told.step_tokens
        count = told.num_pp_microbatches if told.pp > 1 else 1
        return size, step // told.seq_len if step > 0 else size * dp * count
    local = told.local_batch
    batch = told.batch if told.batch > 0 else local * dp
    if told.pp == 1:
        return local, batch
    if told.pp_microbatches:
        return max(1, local // told.pp_microbatches), batch
    return told.pp_micro_batch, batch


def _hear_cut(told: Told) -> tuple[tuple[int, ...] | None, int]:
    """Blocks of each chunk (None: not known without the model), and chunks a stage."""
    if told.pp == 1:
        return None, 1
    if told.stage_modules:
        parts = [
            part if isinstance(part, list) else str(part).split(",") for part in told.stage_modules
        ]
        sizes = tuple(sum(str(m).strip().startswith("layers.") for m in part) for part in parts)
        return sizes, max(1, len(sizes) // told.pp)
    if told.split_points and told.num_layers:
        points = [int(str(each).rpartition(".")[2]) for each in told.split_points]
        bounds = [0, *points, told.num_layers]
        sizes = tuple(b - a for a, b in pairwise(bounds))
        return sizes, max(1, len(sizes) // told.pp)
    chunks = 1 if told.pp_schedule.lower() in [name.lower() for name in ONE_STAGE] else 2
    if told.num_layers is None:
        return None, chunks
    effective = told.num_layers + told.first_less + told.last_less
    if told.stage_layers:
        chunks = max(1, -(-effective // told.stage_layers) // told.pp)
    return _usual_cut(told, told.pp * chunks), chunks


def _usual_cut(told: Told, stages: int) -> tuple[int, ...]:
    """Layers of each stage as ``distributed/pipeline_parallel.py`` deals them: embedding and output
    count as ``first_less`` and ``last_less`` layers, what does not divide goes to the first stages.
    """
    share, rest = divmod(told.num_layers + told.first_less + told.last_less, stages)
    sizes = [share + (stage < rest) for stage in range(stages)]
    sizes[0] -= told.first_less
    sizes[-1] -= told.last_less
    return tuple(sizes)


def write(job: Job, *, version: str) -> dict[str, str]:
    """The files of a job."""
    module, config = REGISTRY.get(job.model.name, ("", ""))
    notes = [f"torchtitan {version}."]
    files = {}
    if not module:
        notes.append(
            "The model is not in torchtitan's registry: model_section.yaml has its numbers,"
        )
        notes.append("MODULE and CONFIG are the package and function with which you register it.")
        facts = facts_of_model(job.model).items()
        lines = [f"{name}: {_plain(value)}" for name, value in facts if value is not None]
        files["model_section.yaml"] = "\n".join(
            [f"# {job.model.name}, yours to register", *lines, ""]
        )
    names = {
        "module": module or placeholder("MODULE", "package that registers the model"),
        "config": config or placeholder("CONFIG", "function that returns its Trainer.Config"),
    }
    script = launch_script(
        job,
        ["-m torchtitan.train", '"${TORCHTITAN_ARGS[@]}"'],
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": None},
        notes=notes,
        before=array("TORCHTITAN_ARGS", _lines(say(job, version) | names, version)),
    )
    return {"launch.sh": script, "job.sbatch": slurm_script(job), **files}


def _plain(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value).lower()


def _lines(facts: dict[str, Any], version: str) -> list[str]:
    """Every flag, and the subcommand of recomputation behind them, where tyro wants it."""
    lines = []
    for key in KEYS[version]:
        value = facts.get(key.fact)
        if value is None or key.fact == "recompute":
            continue
        if key.kind is Kind.SWITCH:
            if value != key.usual:
                section, _, name = key.name.rpartition(".")
                lines.append(f"--{section}.{name}" if value else f"--{section}.no_{name}")
        elif key.kind is Kind.WORDS:
            lines.append(" ".join([f"--{key.name}", *value]))
        else:
            lines.append(f"--{key.name} {quoted(value)}")
    return [*lines, f"activation_checkpoint:{facts['recompute']}"]


def tell(source: Source, *, num_gpus: int | None, version: str) -> Told:
    """What flags, a script or a TOML file say."""
    keys = KEYS[version]
    if source.is_file and source.given.endswith(".toml"):
        told = read_mapping(
            "torchtitan",
            tuple(key for key in keys if key.fact != "recompute"),  # there a section of its own
            read_document(source),
            num_gpus=num_gpus or 1,
            no_bearing=NO_BEARING.fullmatch,
            unmodelled=UNMODELLED.fullmatch,
        )
        told.notes.append("TOML files are of torchtitan before 0.3: newer ones take flags")
        return told
    flags = tuple(
        replace(key, name=f"--{key.name}", once=tuple(f"--{old}" for old in key.once))
        for key in keys
    )
    names = by_name(flags)
    forms = "flags as --parallelism.tensor_parallel_degree 8, a script that passes them, or a TOML"
    found = launch_line(source, _spellings(names), forms=forms)
    command = Command(_plainly(found.tokens, names), found.environment)
    started = world_size(found, source)
    told = read_flags(
        "torchtitan",
        flags,
        command,
        num_gpus=num_gpus or started or 1,
        no_bearing=lambda flag: NO_BEARING.fullmatch(_section(flag)),
        unmodelled=lambda flag: UNMODELLED.fullmatch(_section(flag)),
    )
    told.started = started
    told.given["recompute_last"] = _last_is_subcommand(found.tokens)
    return told


def _section(flag: str) -> str:
    """A flag as the table's sections spell it."""
    return flag.removeprefix("--").replace("-", "_")


def _spellings(names: Iterable[str]) -> set[str]:
    """Tyro takes hyphens for underscores, and ``no_`` before the name of a switch."""
    found = set(names)
    for name in names:
        section, _, plain = name.rpartition(".")
        found |= {name.replace("_", "-"), f"{section}.no_{plain}", f"{section}.no-{plain}"}
    return found


def _plainly(tokens: Iterable[Token], names: dict[str, Key]) -> tuple[Token, ...]:
    """Flags as the table spells them; the subcommand of recomputation as a flag."""
    found: list[Token] = []
    for token in tokens:
        text = token.text
        kind = re.fullmatch(r"activation[-_]checkpoint:([\w-]+)", text)
        if kind:
            found += [
                Token("--activation_checkpoint", token.place),
                Token(kind[1], token.place),
            ]
            continue
        if text.startswith("--"):
            name, equals, value = text.partition("=")
            name = "--" + name[2:].replace("-", "_")
            section, _, plain = name.rpartition(".")
            key = names.get(f"{section}.{plain.removeprefix('no_')}")
            if plain.startswith("no_") and key is not None:
                text = f"{section}.{plain.removeprefix('no_')}=false"
            else:
                text = f"{name}{equals}{value}"
        found.append(Token(text, token.place, token.missing))
    return tuple(found)


def _last_is_subcommand(tokens: tuple[Token, ...]) -> bool:
    """Whether no flag of the configuration stands behind the subcommand."""
    at = [n for n, t in enumerate(tokens) if re.match(r"activation[-_]checkpoint:", t.text)]
    return not at or not any(t.text.startswith("--parall") or t.text.startswith("--train")
                             for t in tokens[at[-1] :])  # fmt: skip
