"""What a launcher runs today -> a plan that can be estimated, explained and beaten."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from executor.launchers.commandline import Source
from executor.launchers.job import arranged
from executor.launchers.modelfacts import facts_of_model, model_of_facts
from executor.launchers.registry import launcher
from planner.inputs import load_inputs
from planner.plandocument import layout_text
from profiles import shelf
from profiles.catalog import load_cluster, load_model
from profiles.errors import InputError, Problem
from profiles.modelwriter import model_text
from profiles.outputfile import refuse_to_overwrite, save_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from costmodel.layout import Layout
    from executor.launchers.job import Heard
    from executor.launchers.registry import Launcher
    from executor.launchers.told import Told
    from planner.inputs import Inputs
    from profiles.model import ModelSpec

__all__ = ["Asked", "Imported", "import_job", "import_text", "save_import"]

FP4_AND_LATER: Final = 10  # compute capability of the devices with an fp4 rate


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was read. ``model_yaml``: the model that the arguments describe, where it is not one
    of the catalogue. ``unknown`` arguments are in no table; ``unmodelled`` ones change what a step
    costs in ways that no estimate knows; ``traps`` are rules that do not hold.
    """

    inputs: Inputs
    layout: Layout
    model_yaml: str | None
    unknown: tuple[str, ...]
    unmodelled: tuple[str, ...]
    notes: tuple[str, ...]
    traps: tuple[str, ...]

    @property
    def remarks(self) -> list[str]:
        """What the reader should know, one line each."""
        return [
            *(f"unknown: {each}" for each in self.unknown),
            *(f"no estimate has it: {each}" for each in self.unmodelled),
            *self.traps,
            *self.notes,
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How something that a launcher was told is to be read.

    ``version`` of the launcher, where its keys have changed. ``num_gpus``: instead of those that
    the launch line starts. ``model`` names it where the launcher was not told it, ``vocab`` is the
    tokenizer's. ``values`` are those of shell variables, ``line`` picks one launch line of several.
    """

    version: str | None = None
    num_gpus: int | None = None
    model: str | None = None
    vocab: int | None = None
    values: Mapping[str, str] | None = None
    line: int | None = None


def import_job(
    given: str,
    launched_by: str,
    *,
    cluster: str,
    asked: Asked | None = None,
    overrides: Mapping[str, Any] | None = None,
    **how: Any,
) -> Imported:
    """The job that ``given`` (a file, or arguments) describes, on ``cluster``.

    ``overrides`` are fields of the training run that win over what was read; ``how`` as in
    ``load_inputs``. Raises ``InputError`` with every problem.
    """
    asked = asked or Asked()
    found, version = launcher(launched_by, asked.version)
    told = _told(found, version, given, cluster, asked)
    named = asked.model or _named(told)
    spec = None if named is None else load_model(named, where="--model")
    if spec is not None:
        told.model_facts = facts_of_model(spec)
    heard = found.hear(told)
    model_yaml = None
    if spec is None:
        spec, named = _described(heard, told, asked.vocab)
        if named is None:
            comment = f"Read from the arguments of {launched_by} by parplan import."
            model_yaml = model_text(spec, comment=comment)
    given_run = {key: value for key, value in (overrides or {}).items() if value is not None}
    run = {**{k: v for k, v in heard.training.items() if v is not None}, **given_run}
    _refuse_unstated(run, how, told)
    micro_batch = given_run.get("micro_batch", heard.micro_batch)
    inputs = load_inputs(
        spec if named is None else named,
        cluster,
        model_ref=named,
        overrides={**run, "micro_batch": micro_batch},
        **how,
    )
    layout = arranged(replace(heard, micro_batch=micro_batch), inputs, told)
    return Imported(
        inputs=inputs.with_training(micro_batch=layout.micro_batch),
        layout=layout,
        model_yaml=model_yaml,
        unknown=tuple(told.unknown),
        unmodelled=tuple(told.unmodelled),
        notes=tuple(told.notes),
        traps=tuple(str(finding) for finding in found.rulebook.findings(told)),
    )


def _told(found: Launcher, version: str, given: str, cluster: str, asked: Asked) -> Told:
    """What the launcher was told, on the devices of the cluster."""
    machines = load_cluster(cluster, where="--cluster")
    source = Source(given, values=asked.values, line=asked.line)
    told = found.tell(source, num_gpus=asked.num_gpus, version=version)
    told.num_gpus = asked.num_gpus or told.started or machines.num_gpus
    if "fp4" in machines.slowest_device.peak_flop_per_s:
        told.compute_capability = FP4_AND_LATER
    return told


def save_import(
    found: Imported, launcher: str, path: str | Path, *, force: bool = False
) -> list[str]:
    """Write the plan file, and beside it the model where the catalogue does not have it: both or
    none. Returns their paths.
    """
    target = Path(path)
    own = target.with_name(f"{target.stem}.model.yaml")
    if found.model_yaml is None:
        text = layout_text(found.inputs, found.layout, launcher=launcher, folder=target.parent)
        save_text(text, target, force=force)
        return [str(target)]
    inputs = replace(found.inputs, model_ref=str(own))
    text = layout_text(inputs, found.layout, launcher=launcher, folder=target.parent)
    refuse_to_overwrite(target, force=force)
    save_text(found.model_yaml, own, force=force)
    save_text(text, target, force=force)
    return [str(own), str(target)]


def import_text(found: Imported, launcher: str) -> str:
    """The plan file as text. Raises ``InputError`` where the model needs a file of its own."""
    if found.model_yaml is not None:
        message = "the model is not in the catalogue and gets a file of its own"
        hint = "-o FILE writes both"
        raise InputError(Problem(where="-o", message=message, hint=hint))
    return layout_text(found.inputs, found.layout, launcher=launcher)


def _refuse_unstated(run: dict[str, Any], how: dict[str, Any], told: Told) -> None:
    """Sizes that neither the launcher nor a flag says."""
    if how.get("training"):
        return
    problems = [
        Problem(
            where=told.where(fact),
            message=f"the {words} is not stated",
            hint=f"--{fact.replace('_', '-')} says it",
        )
        for fact, words in (("global_batch", "global batch"), ("seq_len", "sequence length"))
        if run.get(fact) is None
    ]
    if problems:
        raise InputError(problems)


def _named(told: Told) -> str | None:
    """The catalogue's model that a configuration names, as torchtitan's do."""
    if told.launcher != "torchtitan" or told.module is None or told.config is None:
        return None
    known = shelf.names_and_aliases("models")
    family, size = str(told.module).lower(), str(told.config).lower()
    candidates = (f"{family}-{size}", size, re.sub(r"_(?=\d)", "-", size).replace("_", "-"))
    for name in (*candidates, *(each.replace(".", "") for each in candidates)):
        if name in known:
            told.notes.append(f"model {name}, as {told.module} {told.config} says")
            return name
    return None


def _described(heard: Heard, told: Told, vocab: int | None) -> tuple[ModelSpec, str | None]:
    """The model of the arguments, and its name where it is one of the catalogue."""
    facts = dict(heard.model_facts)
    if not facts:
        message = f"{told.launcher} was not told the model"
        expected = "--model NAME, a config.json or a model YAML"
        raise InputError(Problem(where="--model", message=message, expected=expected))
    if vocab is not None:
        facts["vocab"] = vocab
    if facts.get("vocab") is None:
        message = "the vocabulary is not stated: the tokenizer has it"
        hint = "--vocab-size says it"
        raise InputError(Problem(where=told.where("vocab"), message=message, hint=hint))
    described = model_of_facts(facts, name="model")
    for name in _alike(described):
        known = load_model(name)
        if known.runs == described.runs:
            return known, name
    return described, None


def _alike(model: ModelSpec) -> list[str]:
    """Models of the catalogue whose text has the same width, depth and vocabulary."""
    numbers = {model.hidden, model.num_blocks, facts_of_model(model)["vocab"]}
    found = []
    for name in shelf.names("models"):
        text = (shelf.DATA / "models" / f"{name}.yaml").read_text(encoding="utf-8")
        if numbers <= {int(number) for number in re.findall(r": (\d{1,12})$", text, re.MULTILINE)}:
            found.append(name)
    return found
