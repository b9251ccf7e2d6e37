"""Megatron-Bridge (NeMo): overrides of a recipe, ``KEY=VALUE`` behind ``run_recipe.py``.

The facts are Megatron-LM's, said and read by ``executor.launchers.megatron``; only their keys
differ, and they stand in the same table. The recipe gives the model; what an override list does
not say is the recipe's too.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from executor.launchers.commandline import launch_line, read_flags, world_size
from executor.launchers.launchlines import array, launch_script, placeholder, quoted, slurm_script
from executor.launchers.megatron import say
from executor.launchers.megatronfiles import environment
from executor.launchers.megatronkeys import BATCH, MODEL, PARALLEL
from executor.launchers.script import Command, Token
from executor.launchers.told import Key, Kind, by_fact, by_name
from profiles.training import GradDtype, Precision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from executor.launchers.commandline import Source
    from executor.launchers.job import Job
    from executor.launchers.told import Told

__all__ = ["KEYS", "tell", "write"]


def _bridged(key: Key) -> Key:
    """A key of Megatron-LM as the recipe spells it; its switches say true or false."""
    kind = Kind.SWITCH if key.kind is Kind.OFF else key.kind
    return replace(key, name=key.bridge, kind=kind, once=())


def _plain_name(key: Key) -> Key:
    """A fact that no recipe says, under a name that nobody can type."""
    return replace(key, name=f"({key.fact})", once=())


RECIPES: Final = {
    Precision.BF16: "bf16_mixed",
    Precision.FP16: "fp16_mixed",
    Precision.FP8_TENSORWISE: "bf16_with_fp8_current_scaling_mixed",
    Precision.FP8_BLOCKWISE: "bf16_with_fp8_subchannel_scaling_mixed",
    Precision.NVFP4: "bf16_with_nvfp4_mixed",
}
OWN: Final = (
    Key(name="mixed_precision", fact="mixed", kind=Kind.TEXT),
    Key(name="ddp.grad_reduce_in_fp32", fact="reduce_fp32", kind=Kind.SWITCH, usual=True),
    Key(name="model.seq_length", fact="model_seq_len"),
    Key(
        name="model.gradient_accumulation_fusion", fact="fused_grads", kind=Kind.SWITCH, usual=True
    ),
)
LAYOUT: Final = tuple(_bridged(key) for key in (*PARALLEL, *BATCH) if key.bridge)
KEYS: Final = (
    *LAYOUT,
    *OWN,
    *(_bridged(key) for key in MODEL if key.bridge),
    *(
        _plain_name(key)
        for key in (*PARALLEL, *BATCH, *MODEL)
        if not key.bridge and key.fact != "fused_grads"
    ),
)
GROUPED: Final = _bridged(by_fact(MODEL)["grouped_gemm"])
STATED: Final = ("tp", "pp", "cp", "micro_batch", "global_batch")
OPTIONS: Final = {  # of run_recipe.py
    "--max_steps": "", "-ms": "", "--lr": "", "--min_lr": "", "--warmup_iters": "",
    "--global_batch_size": "global_batch", "-gb": "global_batch",
    "--micro_batch_size": "micro_batch", "-mb": "micro_batch",
    "--seq_length": "seq_len", "-sl": "seq_len",
    "--tensor_model_parallel_size": "tp", "-tp": "tp",
    "--pipeline_model_parallel_size": "pp", "-pp": "pp",
    "--context_parallel_size": "cp", "-cp": "cp",
    "--virtual_pipeline_model_parallel_size": "virtual_stages", "-vp": "virtual_stages",
    "--expert_model_parallel_size": "ep", "-ep": "ep",
    "--expert_tensor_parallel_size": "expert_tp", "-etp": "expert_tp",
}  # fmt: skip
UNMODELLED: Final = re.compile(
    r"(comm_overlap|model\.(cpu_offloading|cuda_graph|moe_(expert_capacity|pad)|mtp|hybrid|mamba)"
    r"|optimizer\.(optimizer_cpu_offload|use_precision_aware)|peft).*"
)
NO_BEARING: Final = re.compile(
    r"(train|optimizer|scheduler|dataset|tokenizer|logger|checkpoint|validation|rng|profiling|dist"
    r"|ddp|rerun_state_machine|straggler|nvrx_straggler|ft|inprocess_restart|mixed_precision|model"
    r"|tensor_inspect|env_vars)\..*|recipe|mode|model|dataset|.*_(steps|iters|dir|checkpoint|interval)"
    r"|.*lr|step_func|peft_scheme|packed_sequence|hf_path|config_file|override_file|seed"
)
FSDP2: Final = 2


def write(job: Job, *, version: str) -> dict[str, str]:
    """The files of a job."""
    facts = say(job)
    training = job.inputs.training
    if "cp_comm" in facts:  # a list has one word for each layer
        (facts["cp_comm"],) = facts["cp_comm"]
    facts["mixed"] = RECIPES.get(training.precision)
    facts["reduce_fp32"] = training.grad_dtype is GradDtype.FP32
    lines = []
    for key in (*LAYOUT, *OWN, GROUPED):
        value = facts.get(key.fact)
        if value is None or key.fact in ("fp8", "fp8_recipe", "fp4", "optimizer", "attention"):
            continue
        usual = key.usual is False and value is False
        if not usual:
            lines.append(quoted(f"{key.name}={_said(value)}"))
    notes = [
        f"Megatron-Bridge {version}: layout, batch and precision override those of RECIPE, which",
        "gives the model and the data; set RECIPE to the function of your model.",
    ]
    if job.setup.one_zero >= FSDP2:
        lines += ["dist.use_megatron_fsdp=true"]
    script = launch_script(
        job,
        [
            placeholder("MEGATRON_BRIDGE", "folder of Megatron-Bridge")[:-1]
            + '/scripts/training/run_recipe.py"',
            f"--recipe {placeholder('RECIPE', 'recipe, as llama3_8b_pretrain_config')}",
            "--mode pretrain",
            '"${OVERRIDES[@]}"',
        ],
        environment=environment(job),
        notes=notes,
        before=array("OVERRIDES", lines),
    )
    return {"launch.sh": script, "job.sbatch": slurm_script(job)}


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{','.join(map(str, value))}]"
    return str(value)


def tell(source: Source, *, num_gpus: int | None, version: str) -> Told:  # noqa: ARG001
    """What overrides, or a script that passes them, say."""
    names = by_name(KEYS)
    forms = "overrides as model.tensor_model_parallel_size=8, or a script that passes them"
    found = launch_line(source, (*names, *OPTIONS), forms=forms)
    command = Command(_flags(found.tokens, names), found.environment)
    started = world_size(found, source)
    told = read_flags(
        "megatron-bridge",
        tuple(replace(key, name=f"--{key.name}") for key in KEYS),
        command,
        num_gpus=num_gpus or started or 1,
        no_bearing=lambda flag: NO_BEARING.fullmatch(flag.removeprefix("--")),
        unmodelled=lambda flag: UNMODELLED.fullmatch(flag.removeprefix("--")),
    )
    told.started = started
    _settle(told)
    return told


def _flags(tokens: Iterable[Token], names: dict[str, Key]) -> tuple[Token, ...]:
    """``KEY=VALUE`` and the options of ``run_recipe.py`` as flags of the table."""
    spelt = {key.fact: key.name for key in names.values()}
    found: list[Token] = []
    for token in tokens:
        name, equals, value = token.text.lstrip("+").partition("=")
        if OPTIONS.get(name):
            found.append(Token(spelt[OPTIONS[name]], token.place))
            if equals:
                found.append(Token(value, token.place, token.missing))
        elif equals and re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*", name):
            words = value[1:-1].split(",") if value.startswith("[") else [value]
            found.append(Token(name if name in names else f"--{name}", token.place))
            found += [Token(word.strip(), token.place, token.missing) for word in words]
        else:
            found.append(token)
    return tuple(_dashed(token, names) for token in found)


def _dashed(token: Token, names: dict[str, Key]) -> Token:
    return Token(f"--{token.text}", token.place, token.missing) if token.text in names else token


def _settle(told: Told) -> None:
    """Facts that the recipe says in words of its own."""
    recipes = {name: precision for precision, name in RECIPES.items()}
    precision = recipes.get(told.mixed or "bf16_mixed", Precision.BF16)
    told.given["bf16"], told.given["fp16"] = precision.other == "bf16", precision.other == "fp16"
    if precision.is_quantised:
        told.given["fp8"] = "hybrid"
        blockwise = precision is Precision.FP8_BLOCKWISE
        told.given["fp8_recipe"] = "blockwise" if blockwise else "tensorwise"
    if precision is Precision.NVFP4:
        told.given["fp4"], told.given["fp8"] = "e2m1", None
    if told.says("reduce_fp32") and not told.reduce_fp32:
        told.given["bf16_grads"] = True
    if told.says("groups"):
        told.given["grouped_queries"] = True
    told.given["kv_heads"] = told.groups if told.grouped_queries else told.heads
    if told.seq_len is None and told.model_seq_len:
        told.given["seq_len"] = told.model_seq_len
    unsaid = [fact for fact in STATED if not told.says(fact)]
    if unsaid:
        names = ", ".join(told.spelt(fact) for fact in unsaid)
        told.notes.append(f"the recipe says {names}: taken as 1 or from your flags")
