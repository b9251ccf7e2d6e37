"""Megatron-LM's files: arguments and launch line written, scripts and argument lists read."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from executor.launchers.commandline import launch_line, read_flags, world_size
from executor.launchers.launchlines import (
    array,
    header,
    launch_script,
    placeholder,
    quoted,
    slurm_script,
)
from executor.launchers.megatron import say
from executor.launchers.megatronkeys import BATCH, KEYS, MODEL, PARALLEL, UNMODELLED
from executor.launchers.script import Command, Token
from executor.launchers.told import Kind, by_name
from profiles import yamlfile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from executor.launchers.commandline import Source
    from executor.launchers.job import Job
    from executor.launchers.told import Key, Told

__all__ = ["environment", "known_flags", "tell", "write"]

FORMS: Final = "arguments as --tensor-model-parallel-size 8, or a script that passes them"
ALWAYS: Final = ("tp", "pp", "micro_batch", "global_batch", "seq_len", "position")
FSDP: Final = 2


def write(job: Job, *, version: str) -> dict[str, str]:  # noqa: ARG001 - one version so far
    """The files of a job."""
    notes = [
        "The variables in capitals are yours to set: data, tokenizer, folder of Megatron-LM.",
        *_notes(job),
    ]
    arguments = [
        "#!/usr/bin/env bash",
        *header(job, notes),
        *array("MEGATRON_ARGS", _lines(say(job))),
        "",
    ]
    script = launch_script(
        job,
        [placeholder("MEGATRON_LM", "folder of Megatron-LM")[:-1] + '/pretrain_gpt.py"',
         '"${MEGATRON_ARGS[@]}"'],
        environment=environment(job),
        before=["source ./megatron_args.sh"],
    )  # fmt: skip
    return {
        "megatron_args.sh": "\n".join(arguments),
        "launch.sh": script,
        "job.sbatch": slurm_script(job),
    }


def environment(job: Job) -> dict[str, str | None]:
    """CUDA_DEVICE_MAX_CONNECTIONS: 1 where tensor or context parallelism needs it, never with
    FSDP.
    """
    if job.setup.one_zero >= FSDP:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": None}
    if job.setup.tp > 1 or job.setup.cp > 1:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {}


def _notes(job: Job) -> list[str]:
    notes = []
    if job.model.mtp_layers:
        notes.append("Multi-token prediction is left out, as in the estimate.")
    if job.setup.one_zero >= FSDP and max(job.setup.tp, job.setup.cp) > 1:
        notes.append("FSDP wants more than one connection, tp and cp want one: FSDP has its way.")
    return notes


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    """The arguments that differ from what is usual, grouped, then the user's own."""
    for title, keys in (("layout", PARALLEL), ("batch and precision", BATCH), ("model", MODEL)):
        yield f"# {title}"
        for key in keys:
            value = facts.get(key.fact, key.usual)
            if value is not None and (value != key.usual or key.fact in ALWAYS):
                yield _argument(key, value)
    yield "# yours"
    yield f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {_yours('TOKENIZER_MODEL')}"
    yield f"--data-path {_yours('DATA_PATH')} --split 99,1,0"
    yield f"--train-iters {_yours('TRAIN_ITERS')} --lr {_yours('LR')}"


def _yours(name: str) -> str:
    return placeholder(name, "set it")


def _argument(key: Key, value: Any) -> str:
    if key.kind in (Kind.SWITCH, Kind.OFF):
        return key.name
    words = value if key.kind is Kind.WORDS else [value]
    return " ".join([key.name, *(quoted(word) for word in words)])


@cache
def known_flags() -> frozenset[str]:
    """Every argument of Megatron-LM that has no fact."""
    path = Path(__file__).with_name("megatron_flags.txt")
    lines = path.read_text(encoding="utf-8").splitlines()
    return frozenset(f"--{line}" for line in lines if line and not line.startswith("#"))


def tell(source: Source, *, num_gpus: int | None, version: str) -> Told:  # noqa: ARG001
    """What arguments, a script, or a YAML with MODEL_ARGS says."""
    command = _of_yaml(source) or launch_line(source, by_name(KEYS), forms=FORMS)
    started = world_size(command, source)
    told = read_flags(
        "megatron",
        KEYS,
        command,
        num_gpus=num_gpus or started or 1,
        no_bearing=known_flags().__contains__,
        unmodelled=UNMODELLED.fullmatch,
        known=known_flags(),
    )
    told.started = started
    told.given["kv_heads"] = told.groups if told.grouped_queries else told.heads
    if "embedding" in (told.partition or ""):  # of Megatron-DeepSpeed: they count as layers
        told.given["count_embedding"] = told.given["count_loss"] = True
    if told.fp8_hybrid or told.fp8_e4m3:
        told.given["fp8"] = "hybrid" if told.fp8_hybrid else "e4m3"
    return told


def _of_yaml(source: Source) -> Command | None:
    """The arguments of a YAML such as Megatron-LM's test cases: a mapping of flags to values."""
    if not (source.is_file and Path(source.given).suffix in (".yaml", ".yml")):
        return None
    document = yamlfile.read(source.given)
    place: tuple[str, ...] = ("MODEL_ARGS",) if "MODEL_ARGS" in document.data else ()
    mapping = document.data["MODEL_ARGS"] if place else document.data
    names, tokens = by_name(KEYS), list[Token]()
    for flag, value in mapping.items():
        at = document.where((*place, flag), key=True)
        key = names.get(str(flag))
        if value is False and key is not None and key.kind in (Kind.SWITCH, Kind.OFF):
            continue
        words = [] if value is True or value is None else str(value).split()
        if isinstance(value, list):
            words = [str(word) for word in value]
        tokens += [Token(str(flag), at), *(_word(word, at) for word in words)]
    variables = document.data.get("ENV_VARS")
    known = variables if isinstance(variables, dict) else {}
    return Command(tuple(tokens), {str(name): str(value) for name, value in known.items()})


def _word(word: str, place: str) -> Token:
    return Token(word, place, (word,) if word.startswith("$") else ())
