"""The command line: load -> call -> render -> exit code.

What is slow to import is imported inside the commands, so that ``--help`` is quick.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import click

import executor
import planner
import profiles
import reports
from executor.job import (
    CHECKPOINT_EVERY,
    DEVICES,
    KEEP,
    OPTIONS,
    RECIPE,
    SYNTHETIC,
    Job,
    Recipe,
    check_plan,
    check_torch,
)
from executor.launchers.registry import NAMES as LAUNCHED
from planner.flags import INPUT_FLAGS, LAYOUT_FLAGS, SEARCH_FLAGS, Flag, Kind
from planner.launchers import LAUNCHERS
from planner.plan import MIN_FIT
from profiles.errors import ExitCode, InputError, ParplanError, Problem
from profiles.nearest import nearest
from profiles.training import TrainingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner import Inputs, Plan, Planned
    from reports.underway import Stop

__all__ = ["main"]

Command: TypeAlias = "Callable[..., Any]"
Decorator: TypeAlias = "Callable[[Command], Command]"

EXPORTS: Final = (*LAUNCHED, "trace")
TRAINING: Final = tuple(TrainingSpec.__dataclass_fields__)
USUAL: Final = Recipe()


class Between(click.FloatRange):
    """A number between two bounds that are left out."""

    def __init__(self, least: float, most: float | None = None) -> None:
        """``most`` None: only the lower one."""
        super().__init__(least, most, min_open=True, max_open=most is not None)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click does it, and not "nan" either, which no bound holds back."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


TYPES: Final = {
    Kind.NUMBER: click.INT,
    Kind.COUNT: click.IntRange(min=1),
    Kind.ZERO: click.IntRange(0, 3),
    Kind.PART: Between(0, 1),
}


class Share(click.ParamType[float]):
    """A part of something as a percentage: ``2%``, or ``0.02``."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The part as a number."""
        text = str(value).strip()
        try:
            number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            self.fail(f"{text!r} is no share of at least 0, as 2%.", param, ctx)
        return number


class Counts(click.ParamType[tuple[int, ...]]):
    """Whole numbers of at least 1, as ``1,2,4``."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Without repetition, the least first."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
            self.fail(f"{value!r} are no whole numbers of at least 1, as 1,2,4.", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


class Duration(click.ParamType[float]):
    """A time: ``90s``, ``5m``, ``1h``, or seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """In seconds."""
        text = str(value).strip()
        unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
        try:
            seconds = float(text[:-1] if unit else text) * (unit or 1)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            self.fail(f"{text!r} is no time, as 90s, 5m or 1h.", param, ctx)
        return seconds


class Bytes(click.ParamType[int]):
    """A size: ``64M``, ``1G``, or bytes."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """In bytes."""
        if isinstance(value, int):
            return value
        form = re.fullmatch(r"([0-9]{1,12})([KMG]?)", str(value).strip().upper())
        if form is None or not int(form[1]):
            self.fail(f"{value!r} is no size, as 64M or 1G.", param, ctx)
        return int(form[1]) * 1024 ** " KMG".index(form[2] or " ")


class Parplan(click.Group):
    """The commands, and the one place where errors become exit codes."""

    def invoke(self, ctx: click.Context) -> None:
        """Run the command."""
        try:
            super().invoke(ctx)
            sys.stdout.flush()
        except ParplanError as error:
            click.echo(str(error), err=True)
            ctx.exit(int(error.exit_code))
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(int(ExitCode.INTERRUPTED))
        except BrokenPipeError:  # the reader has seen enough
            reports.discard_stdout()
            ctx.exit(int(ExitCode.YES))
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception:  # noqa: BLE001 - left alone, Python exits with 1, which means "no" here
            import traceback  # noqa: PLC0415

            click.echo(traceback.format_exc(), err=True)
            click.echo("parplan failed, not you: please report this with the lines above", err=True)
            ctx.exit(int(ExitCode.WE_FAILED))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command; where there is none, the nearest name."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            within = "" if ctx.parent is None else f" {ctx.info_name}"
            problem = _unknown("command", args[0], self.commands)
            raise InputError(replace(problem, where=f"parplan{within}"))
        return super().resolve_command(ctx, args)


NAMED: Final = {"--to": "launcher"}


def _unknown(kind: str, name: str, known: Any) -> Problem:
    return Problem(
        where={"command": "parplan"}.get(kind, kind if kind[:2] == "--" else f"parplan {kind}"),
        message=f"there is no {NAMED.get(kind, kind.removeprefix('--'))} {name!r}",
        expected=f"one of {', '.join(known)}",
        hint=nearest(name, known),
    )


def _version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:  # noqa: FBT001
    if not wanted:
        return
    from importlib import metadata  # noqa: PLC0415

    try:
        click.echo(f"parplan {metadata.version('parplan')}")
    except metadata.PackageNotFoundError:
        click.echo("parplan, not installed")
    ctx.exit()


@click.group(cls=Parplan, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version,
    help="Print the version.",
)  # fmt: skip
def main() -> None:
    """Find the fastest parallel layout for training a model on a cluster, and how sure it is.

    Exit codes: 0 yes, 1 no (nothing fits), 2 asked wrongly, 3 our mistake, 130 interrupted,
    143 stopped by SIGTERM.
    """


def _option(flag: Flag) -> Decorator:
    """A flag as an option."""
    how: dict[str, Any] = {"help": flag.help, "metavar": flag.metavar, "type": TYPES.get(flag.kind)}
    if flag.usual is not None:
        how["show_default"] = str(flag.usual)
    name = f"--{flag.name}"
    if flag.kind is Kind.EITHER:
        return click.option(f"{name}/--no-{flag.name}", default=None, **how)
    if flag.kind is Kind.SWITCH:
        return click.option(name, is_flag=True, **how)
    return click.option(name, multiple=flag.kind is Kind.MANY, **how)


def _all(*options: Decorator) -> Decorator:
    """Several options as one decorator, in this order in the help."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _with(*flags: Flag) -> Decorator:
    return _all(*map(_option, flags))


def _format(*formats: str) -> Decorator:
    kind = click.Choice(["text", "json", *formats])
    return click.option("--format", "form", type=kind, default="text", show_default=True)


_force_option: Final = click.option("--force", is_flag=True, help="Overwrite FILE.")
_page_option: Final = _all(
    click.option("--html", metavar="FILE", help="Write a page that opens offline as well."),
    _force_option,
)


def _output_option(what: str) -> Decorator:
    """Where text goes that is printed unless a file is named."""
    help_text = f"The {what}; - prints it."
    return _all(
        click.option("-o", "--output", metavar="FILE", default="-", help=help_text), _force_option
    )


def _load_inputs(flags: dict[str, Any]) -> Inputs:
    """The inputs of the flags; notes on them go to stderr."""
    missing = [f"--{name}" for name in ("model", "cluster") if not flags[name]]
    if missing:
        raise InputError([Problem(where=flag, message="is missing") for flag in missing])
    inputs = planner.load_inputs(
        flags["model"],
        flags["cluster"],
        training=flags["training"],
        overrides={name: flags.get(name) for name in TRAINING},
        stack=flags["stack"],
        calibration=flags["calibration"],
        open_ended=flags.get("smallest", False),
    )
    inputs = planner.with_profiles(inputs, flags["profile"])
    _tell(*inputs.notes)
    return inputs


def _space(flags: dict[str, Any]) -> dict[str, Any]:
    """What the search is restricted to."""
    launcher = flags["launcher"] or "any"
    problems = []
    if launcher not in LAUNCHERS:
        problems.append(_unknown("--launcher", launcher, LAUNCHERS))
    try:
        restrictions = planner.parse_restrictions(
            flags["fix"], flags["max"], flags["exclude"], tp_across_nodes=flags["tp_across_nodes"]
        )
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError(problems)
    min_fit = flags["min_fit"] or MIN_FIT
    return {"launcher": launcher, "restrictions": restrictions, "min_fit": min_fit}


def _asked(flags: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
    """Inputs and space; the problems of both are told together."""
    found: list[Any] = []
    problems: list[Problem] = []
    for read in (_load_inputs, _space):
        try:
            found.append(read(flags))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return found[0], found[1]


def _print(report: Any) -> None:
    reports.print_report(report)


def _print_json(answer: Any) -> None:
    click.echo(reports.json_text(answer))


def _show(form: str, answer: Callable[..., Any], report: Callable[..., Any], *found: Any) -> None:
    """What was found, as JSON for programs or as text for people."""
    if form == "json":
        _print_json(answer(*found))
    else:
        _print(report(*found))


def _tell(*notes: str) -> None:
    for note in notes:
        click.echo(f"note: {note}", err=True)


def _check_output(output: str, *, force: bool) -> None:
    """Say before anything is computed that a file stands in the way."""
    if output != "-":
        profiles.refuse_to_overwrite(output, force=force)


def _save(text: str, output: str, *, force: bool) -> None:
    """Into the file, or to stdout for ``-``."""
    if output == "-":
        click.echo(text, nl=False)
    else:
        profiles.save_text(text, output, force=force)
        click.echo(f"written: {output}", err=True)


def _check_page(path: str | None, *, force: bool) -> None:
    """Say before anything is computed that a page cannot be written."""
    if path is not None:
        reports.require_pages()
        profiles.refuse_to_overwrite(path, force=force)


@main.command()
@_with(*INPUT_FLAGS, *SEARCH_FLAGS)
@click.option(
    "--top",
    default=3,
    show_default=True,
    type=click.IntRange(0, 100),
    help="Next best plans to show.",
)
@click.option(
    "--solver",
    default="closed-form",
    show_default=True,
    type=click.Choice(["closed-form", "dp"]),
    help="Who gives layers their strategies; both are exact, dp takes longer.",
)
@click.option(
    "--gap",
    type=Between(0, 1),
    metavar="FRACTION",
    help="Stop when the plan is shown to be within it of the optimum.",
)
@click.option(
    "--time-limit",
    type=Between(0),
    metavar="SECONDS",
    help="Stop then, with the best plan so far.",
)
@click.option(
    "--smallest",
    is_flag=True,
    help="On as few GPUs as it fits; the cluster may be a bare device or node.",
)
@click.option(
    "--mix-degrees",
    is_flag=True,
    help="Let layers differ in tp, dp and ZeRO stage, where the launcher can.",
)
@click.option(
    "--prove",
    is_flag=True,
    help="Have an integer programme check the best plan's candidate as well.",
)
@click.option(
    "--objective",
    default="step-time",
    show_default=True,
    type=click.Choice(["step-time", "cost", "energy", "time-to-target"]),
    help="What the plan should have least of; cost and energy may leave GPUs unused.",
)
@click.option("--target", metavar="FILE", help="Epochs by global batch, for time-to-target.")
@click.option("-o", "--output", metavar="FILE", help="Write the plan file; - prints it.")
@_page_option
@_format("yaml")
@click.pass_context
def plan(ctx: click.Context, /, **flags: Any) -> None:
    """Find the fastest layout that fits."""
    import time  # noqa: PLC0415

    if flags["output"] not in (None, "-"):
        profiles.refuse_to_overwrite(flags["output"], force=flags["force"])
    _check_page(flags["html"], force=flags["force"])
    started_s = time.process_time()
    until = reports.until_interrupt(flags["time_limit"])
    with until as should_stop, reports.progress_on_stderr() as tell:
        planned, also = _planned(flags, should_stop, tell)
    cpu_s = time.process_time() - started_s
    _show_planned(planned, also, cpu_s, flags)
    if planned.plan.launcher == "native":
        _tell(reports.executed_words(planner.executed(planned.plan)))
    facts = planned.plan.search
    if facts is not None and not facts.complete:
        cause = "interrupted" if should_stop.interrupted else "time limit"
        click.echo(f"{cause}: the best so far, gap {100 * facts.gap:.1f} %", err=True)
    if should_stop.interrupted:
        ctx.exit(int(ExitCode.INTERRUPTED))


class _Also(NamedTuple):
    """What stands beside a plan: more keys of its answer, and parts around its report."""

    answer: dict[str, Any]
    before: Sequence[Any] = ()
    after: Sequence[Any] = ()


def _show_planned(planned: Planned, also: _Also, cpu_s: float, flags: dict[str, Any]) -> None:
    """The plan in the form that is asked for, its file and its page."""
    output, form = flags["output"], flags["form"]
    if output not in (None, "-"):
        planner.save_plan(planned.plan, output, force=flags["force"])
    answer = {**reports.plan_answer(planned, cpu_s=cpu_s), **also.answer}
    if output == "-" or form == "yaml":
        click.echo(planner.plan_text(planned.plan), nl=False)
    elif form == "json":
        _print_json(answer)
    else:
        _print([*also.before, *reports.plan_report(planned), *also.after])
    if flags["html"] is not None:
        page = reports.plan_page(answer, (planned.plan, *planned.runners_up))
        _save(page, flags["html"], force=flags["force"])
    if output not in (None, "-"):
        click.echo(f"written: {output}", err=True)


def _planned(flags: dict[str, Any], should_stop: Stop, tell: Any) -> tuple[Planned, _Also]:
    """The plan that flags ask for, by the objective, or on as few GPUs as possible."""
    objective, target = planner.Objective(flags["objective"]), flags["target"]
    if flags["smallest"] and objective is not planner.Objective.STEP_TIME:
        raise InputError(Problem(where="--smallest", message=f"with --objective {objective}"))
    if target is not None and objective is not planner.Objective.TIME_TO_TARGET:
        expected = "--objective time-to-target with it"
        raise InputError(Problem(where="--target", message=f"with {objective}", expected=expected))
    inputs, space = _asked(flags)
    how = {
        **space,
        "runners_up": flags["top"],
        "solver": flags["solver"],
        "gap": flags["gap"] or 0.0,
        "after": planner.AfterSearch(mix_degrees=flags["mix_degrees"], prove=flags["prove"]),
        "should_stop": should_stop,
        "on_progress": tell,
    }
    try:
        return _found(objective, inputs, how, flags)
    except planner.InterruptedSearchError:
        if should_stop.interrupted:
            raise
        message = f"no layout that fits was found in {flags['time_limit']:g} s"
        raise planner.NothingInTimeError(message) from None


def _found(
    objective: Any, inputs: Inputs, how: dict[str, Any], flags: dict[str, Any]
) -> tuple[Planned, _Also]:
    """The plan of inputs, and what stands beside it."""
    if flags["smallest"]:
        found = planner.plan_smallest(inputs, **how)
        before = reports.smallest_report(found)
        return found.planned, _Also(reports.smallest_answer(found), before=before)
    if objective is planner.Objective.STEP_TIME:
        return planner.plan_training(inputs, **how), _Also({})
    wanted = None if flags["target"] is None else profiles.load_target(flags["target"])
    choices = planner.plan_for(objective, inputs, target=wanted, **how)
    after = reports.choices_report(objective, choices)
    return choices[0].planned, _Also(reports.choices_answer(objective, choices), after=after)


@main.command()
@click.argument("plan_file", metavar="[PLAN]", required=False)
@_with(*INPUT_FLAGS, *LAYOUT_FLAGS)
@click.option(
    "--launcher",
    type=click.Choice(["native"]),
    help="Price the kernels and states of parplan launch instead of those of any launcher.",
)
@_page_option
@_format("yaml")
@click.pass_context
def estimate(ctx: click.Context, /, plan_file: str | None, **flags: Any) -> None:
    """Estimate a plan file, or the layout that flags describe. Exit code 1: it does not fit."""
    _check_page(flags["html"], force=flags["force"])
    made = (
        _manual_plan(flags)
        if plan_file is None
        else _read_plan(ctx, plan_file, flags, "html", "force", "launcher")
    )
    if flags["launcher"] is not None:
        if flags["form"] == "yaml":
            message = "with --format yaml: a plan file has costs for any launcher"
            raise InputError(Problem(where="--launcher", message=message))
        made = planner.executed(made)
    answer = reports.estimate_answer(made)
    if flags["form"] == "json":
        _print_json(answer)
    elif flags["form"] == "yaml":
        click.echo(planner.plan_text(made), nl=False)
    else:
        _print(reports.estimate_report(made))
    if flags["html"] is not None:
        page = reports.plan_page(answer, (made,))
        _save(page, flags["html"], force=flags["force"])
    ctx.exit(int(ExitCode.YES if made.estimate.fits else ExitCode.NO))


def _read_plan(ctx: click.Context, path: str, flags: dict[str, Any], *allowed: str) -> Plan:
    """The plan of a file; flags that it answers itself are refused."""
    open_to_all = ("plan_file", "form", "min_fit", *allowed)
    given = [
        name
        for name in ctx.params
        if name not in open_to_all
        and ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        flag = "--" + given[0].replace("_", "-")
        message = f"with the plan file {path}, which says it itself"
        raise InputError(Problem(where=flag, message=message, expected="either"))
    return planner.load_plan(path, min_fit=flags["min_fit"])


def _manual_plan(flags: dict[str, Any]) -> Plan:
    """The plan of the layout that flags describe."""
    inputs = _load_inputs({**flags, "micro_batch": None})
    names = [flag.name.replace("-", "_") for flag in LAYOUT_FLAGS if flag.name != "min-fit"]
    said = {name: flags[name] for name in names if flags[name] is not None}
    if inputs.training.micro_batch is not None:
        said = {"micro_batch": inputs.training.micro_batch, **said}
    layout = planner.layout_from_degrees(inputs, planner.ManualLayout(**said))
    return planner.plan_of(inputs, layout, min_fit=flags["min_fit"] or MIN_FIT)


@main.command()
@click.argument("plan_file", metavar="[PLAN]", required=False)
@_with(*INPUT_FLAGS, *SEARCH_FLAGS)
@_format()
@click.pass_context
def explain(ctx: click.Context, /, plan_file: str | None, **flags: Any) -> None:
    """Explain a plan file, or the plan that flags lead to: what binds it, why others lost."""
    with reports.until_interrupt() as should_stop, reports.progress_on_stderr() as tell:
        if plan_file is not None:
            own = _read_plan(ctx, plan_file, flags)
            explanation = planner.explain_plan(own, should_stop=should_stop, on_progress=tell)
        else:
            inputs, space = _asked(flags)
            planned = planner.plan_training(
                inputs, **space, should_stop=should_stop, on_progress=tell
            )
            explanation = planner.explain_plan(planned.plan, planned.runners_up)
        stopped = should_stop()
    _show(flags["form"], reports.explain_answer, reports.explain_report, explanation)
    if stopped:
        click.echo("interrupted: better ones may exist", err=True)
        ctx.exit(int(ExitCode.INTERRUPTED))


@main.command()
@click.argument("reference", metavar="MODEL|CLUSTER")
@_format()
def describe(reference: str, form: str) -> None:
    """Say what was understood of a model or a cluster: a name, a shorthand or a path."""
    facts = reports.facts_of(profiles.load_model_or_cluster(reference, where="parplan describe"))
    _show(form, dict, reports.facts_report, facts)


@main.command("import-cluster")
@click.argument("file")
@click.option("--device", metavar="NAME", help="Device of the nodes: parplan catalog devices.")
@click.option("--nodes", "num_nodes", type=TYPES[Kind.COUNT], help="Such nodes; one by default.")
@click.option("--nics", "num_nics", type=TYPES[Kind.COUNT], help="Network cards of a node.")
@click.option("--nic-gb-per-s", type=float, help="GB/s of one of them: 400 Gb/s is 50.")
@_output_option("cluster YAML")
def import_cluster(file: str, output: str, *, force: bool, **told: Any) -> None:
    """Make a cluster YAML of a topology of nvidia-smi topo -m, NCCL, Slurm or ASTRA-sim."""
    _write_imported(output, force=force, read=lambda: profiles.read_topology(file, **told))


def _write_imported(
    output: str, *, force: bool, read: Callable[[], tuple[str, Sequence[str]]]
) -> None:
    """Write or print the text that was made, with its notes on stderr."""
    _check_output(output, force=force)
    text, notes = read()
    _tell(*notes)
    _save(text, output, force=force)


@main.group(cls=Parplan)
def profile() -> None:
    """Measured layers, memory and links of your own devices, as a profile YAML."""


@profile.command("import")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--from", "tool", required=True, type=click.Choice(["galvatron", "nccl-tests"]),
    help="galvatron: JSON of Hetu-Galvatron's profilers, files or their folder. nccl-tests: what "
    "all_reduce_perf and its like print.",
)  # fmt: skip
@_output_option("profile YAML")
def import_profile(paths: tuple[str, ...], tool: str, output: str, *, force: bool) -> None:
    """Make a profile YAML of what another tool measured."""
    _write_imported(output, force=force, read=lambda: profiles.import_profile(tool, paths))


_measuring: Final = _all(
    click.option("--budget", type=Duration(), metavar="TIME", help="Stop then, as 5m."),
    click.option(
        "--rounds",
        type=click.IntRange(1, 1000),
        default=2,
        show_default=True,
        help="Times that all is measured.",
    ),
    click.option("--date", metavar="TEXT", help="To be written into the profile."),
    click.option("-o", "--output", metavar="FILE", help="The profile YAML."),
    _force_option,
)


def _new_profile(output: str | None, *, force: bool) -> str:
    """The file that a profile is to be written to, before anything is measured."""
    if output is None:
        raise InputError(Problem(where="--output", message="is missing", hint="-o FILE"))
    profiles.refuse_to_overwrite(output, force=force)
    return output


def _save_measured(text: str, output: str, *, force: bool) -> None:
    """The profile, which takes the place of the journal that it was made of."""
    _save(text, output, force=force)
    Path(f"{output}.journal").unlink(missing_ok=True)


@profile.command("layers")
@click.argument("model")
@click.option(
    "--device", default="auto", show_default=True, type=click.Choice(DEVICES),
    help="auto: a GPU where there is one. A CPU is measured with one thread.",
)  # fmt: skip
@click.option(
    "--as", "device_name", metavar="NAME",
    help="What clusters call the device: parplan catalog devices.  [default: found by its name]",
)  # fmt: skip
@click.option("--tp", type=Counts(), default="1", show_default=True, help="Degrees, as 1,2,4.")
@click.option("--micro-batch", type=Counts(), default="1,2,4", show_default=True, help="Sequences.")
@click.option("--seq-len", type=Counts(), default="4096", show_default=True, help="Tokens.")
@_with(*(flag for flag in INPUT_FLAGS if flag.name in ("precision", "optimizer")))
@click.option("--operators/--no-operators", default=True, help="Plain operators as well.")
@click.option("--memory/--no-memory", default=True, help="What layers hold as well.")
@click.option("--wrapping/--no-wrapping", default=True, help="What FSDP adds to them as well.")
@click.option(
    "--dry-run", is_flag=True,
    help="Only say how long it takes and how much memory, here or on the device that --as names.",
)  # fmt: skip
@_measuring
@click.pass_context
def profile_layers(ctx: click.Context, /, model: str, output: str | None, **flags: Any) -> None:
    """Measure each distinct layer of MODEL on this machine, one shard at a time on one device.

    What is measured is noted in FILE.journal, from which a session that was stopped goes on.
    """
    check_torch("parplan profile layers")
    from executor.profiler.measuring import foresee_layers, measure_layers  # noqa: PLC0415

    if flags["dry_run"]:
        _print(reports.outlook_report(foresee_layers(model, flags)))
        return
    output = _new_profile(output, force=flags["force"])
    with reports.until_interrupt() as should_stop, reports.profile_progress() as tell:
        text, notes = measure_layers(model, output, flags, should_stop=should_stop, tell=tell)
    _tell(*notes)
    if should_stop.interrupted:
        click.echo(f"interrupted: {output}.journal has what is measured", err=True)
        ctx.exit(int(ExitCode.INTERRUPTED))
    _save_measured(text, output, force=flags["force"])


@profile.command("links")
@click.argument("cluster", required=False)
@click.option(
    "--device", default="auto", show_default=True, type=click.Choice(DEVICES),
    help="auto: GPUs (NCCL) where there are any, else CPUs (gloo).",
)  # fmt: skip
@click.option("--as", "device_name", metavar="NAME", help="Without CLUSTER: its device's name.")
@click.option("--nnodes", type=TYPES[Kind.COUNT], help="Nodes.  [default: those of CLUSTER, or 1]")
@click.option("--nproc", type=TYPES[Kind.COUNT], help="Ranks on each.  [default: its devices]")
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where nodes meet, as in torchrun.")
@click.option("--rdzv-id", metavar="ID", help="Name of the job among others that meet there.")
@click.option(
    "--largest", type=Bytes(), default="1G", show_default=True, help="Greatest message, as 64M."
)
@_measuring
def profile_links(cluster: str | None, output: str | None, **flags: Any) -> None:
    """Measure collectives between the devices of CLUSTER, or of this machine, under torchrun.

    On several nodes, give the same command on each; the file is written where rank 0 is. What is
    measured is noted in FILE.journal, from which a session that was stopped goes on.
    """
    check_torch("parplan profile links")
    from executor.profiler.linkmeasuring import measure_links  # noqa: PLC0415

    output = _new_profile(output, force=flags["force"])
    with reports.profile_progress() as tell:
        found = measure_links(cluster, output, flags, tell=tell)
    if found is None:
        click.echo("measured: the node of rank 0 writes the file", err=True)
        return
    _tell(*found.notes)
    _print(reports.links_report(found.profile))
    _save_measured(found.text, output, force=flags["force"])


@profile.command("merge")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@_output_option("profile YAML")
def merge_profiles(files: tuple[str, ...], output: str, *, force: bool) -> None:
    """Make one profile YAML of several, as of layers and of links."""
    _write_imported(output, force=force, read=lambda: (profiles.merged_text(files), ()))


@main.command()
@click.argument("shelf", type=click.Choice(["models", "devices", "nodes"]))
@_format()
def catalog(shelf: Any, form: str) -> None:
    """List what is known by name."""
    entries = profiles.catalog_names(shelf)
    _show(form, reports.catalog_answer, reports.catalog_report, entries)


class Quoted(click.Command):
    """A command to which arguments of another program may be given as one word."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """A word with blanks in it is no option, though it begins like one."""
        words = [word for word in args if word.startswith("-") and " " in word.strip()]
        if not words:
            return super().parse_args(ctx, args)
        return super().parse_args(ctx, [*(w for w in args if w not in words), "--", *words])


_launched: Final = _all(  # of commands that read what a launcher was told
    click.option("--model", help="Where the launcher was not told it."),
    click.option("--num-gpus", type=TYPES[Kind.COUNT], help="Instead of the launch line's."),
    click.option("--launcher-version", metavar="VERSION", help="The release whose keys are meant."),
    click.option(
        "--set", "values", metavar="NAME=VALUE", multiple=True, help="A variable of the script."
    ),
    click.option("--line", type=TYPES[Kind.COUNT], help="Line of the launch line to read."),
)


def _asked_of_launcher(flags: dict[str, Any]) -> executor.Asked:
    """How to read what a launcher was told."""
    wrong = [text for text in flags["values"] if "=" not in text]
    if wrong:
        raise InputError(Problem(where="--set", message=repr(wrong[0]), expected="NAME=VALUE"))
    return executor.Asked(
        version=flags["launcher_version"],
        vocab=flags.get("vocab_size"),
        values=dict(text.split("=", 1) for text in flags["values"]),
        **{name: flags[name] for name in ("model", "num_gpus", "line")},
    )


@main.command()
@click.argument("plan_file", metavar="PLAN")
@click.option("--to", required=True, metavar="NAME", help=f"{', '.join(EXPORTS)}.")
@click.option("--launcher-version", metavar="VERSION", help="The release whose keys are meant.")
@click.option("-o", "--output", metavar="DIR|FILE", default="-", help="Where to; - prints it.")
@click.option("--force", is_flag=True, help="Overwrite what is there.")
def export(plan_file: str, to: str, output: str, *, launcher_version: str, force: bool) -> None:
    """Turn a plan file into the files of a launcher, or into a trace of one step (a FILE).

    Exit code 1: the launcher cannot express the plan.
    """
    if to not in EXPORTS:
        raise InputError(_unknown("--to", to, EXPORTS))
    if to == "trace":
        _export_trace(plan_file, output, force=force)
        return
    made = executor.export_plan(plan_file, to, version=launcher_version)
    _tell(*made.notes)
    if output == "-":
        for name, text in made.files.items():
            click.echo(f"==> {name} <==\n{text}")
        return
    for path in executor.save_files(made.files, output, force=force):
        click.echo(f"written: {path}", err=True)
    click.echo(f"start: sbatch {output}/job.sbatch, or on each node: bash {output}/launch.sh")


def _export_trace(plan_file: str, output: str, *, force: bool) -> None:
    _check_output(output, force=force)
    text = reports.json_text(reports.trace_answer(planner.load_plan(plan_file)))
    _save(text + "\n", output, force=force)


@main.command("import", cls=Quoted)
@click.argument("source", metavar="FILE|ARGS")
@click.option("--from", "name", required=True, metavar="NAME", help=f"{', '.join(LAUNCHED)}.")
@click.option("--vocab-size", type=TYPES[Kind.COUNT], help="Where only the tokenizer knows it.")
@_launched
@_with(*(flag for flag in INPUT_FLAGS if flag.name not in ("model", "profile")), *SEARCH_FLAGS[:1])
@_output_option("plan file")
def import_job(source: str, name: str, **flags: Any) -> None:
    """Read what a launcher runs today into a plan file, for estimate, explain and the others."""
    output, force = flags["output"], flags["force"]
    _check_output(output, force=force)
    if not flags["cluster"]:
        raise InputError(Problem(where="--cluster", message="is missing"))
    found = executor.import_job(
        source,
        name,
        cluster=flags["cluster"],
        asked=_asked_of_launcher(flags),
        overrides={field: flags.get(field) for field in TRAINING},
        **{key: flags[key] for key in ("training", "stack", "calibration")},
    )
    _tell(*found.remarks, *found.inputs.notes)
    if output == "-":
        click.echo(executor.import_text(found, name), nl=False)
    else:
        written = executor.save_import(found, name, output, force=force)
        click.echo("".join(f"written: {path}\n" for path in written), err=True, nl=False)


@main.command(cls=Quoted)
@click.argument("source", metavar="FILE|ARGS")
@click.option("--launcher", "name", required=True, metavar="NAME", help=f"{', '.join(LAUNCHED)}.")
@_launched
@_format()
@click.pass_context
def check(ctx: click.Context, /, source: str, name: str, form: str, **flags: Any) -> None:
    """Say what of a launcher's arguments would fail, or would not do what they say.

    Exit code 1: the job would fail.
    """
    checked = executor.check_arguments(source, name, _asked_of_launcher(flags))
    _show(form, dict, reports.check_report, checked.answer)
    ctx.exit(int(ExitCode.NO if checked.fails else ExitCode.YES))


@main.command()
@click.argument("name")
@click.option("--stages", required=True, type=click.IntRange(min=1), help="Devices in a row.")
@click.option("--micro-batches", required=True, type=click.IntRange(min=1), help="Of a step.")
@click.option("--chunks", type=click.IntRange(min=1), help="Chunks a device.  [default: usual]")
@click.option("--unit", type=click.IntRange(min=1), help="Micro-batches of a unit, for zeropp.")
@click.option(
    "--times", default="1,1,1", show_default=True, metavar="F,B,W",
    help="Times of a whole stage for one micro-batch: forward, input and weight gradients.",
)  # fmt: skip
@_format()
def schedule(name: str, form: str, **flags: Any) -> None:
    """Draw a pipeline schedule; say its span, makespan, bubble and what it holds."""
    flags["microbatches"] = flags.pop("micro_batches")
    run = planner.run_schedule(name, **flags)
    _show(form, reports.schedule_answer, reports.schedule_report, run)


@main.command()
@click.argument("kind", required=False)
def schema(kind: str | None) -> None:
    """Print the JSON Schema of a kind of file; without KIND, list the kinds."""
    if kind is None:
        click.echo("\n".join(planner.schema_kinds()))
    elif kind in planner.schema_kinds():
        _print_json(planner.json_schema(kind))
    else:
        raise InputError(_unknown("schema", kind, planner.schema_kinds()))


@main.command()
@click.option("--runs", metavar="FILE", help="Measured runs, CSV.  [default: the shipped table]")
@click.option("--calibrate-on", metavar="FILE", help="Fit calibrations to these runs first, CSV.")
@click.option("--calibration", metavar="NAME", help="One calibration for all: a name or a YAML.")
@click.option(
    "--tolerance",
    type=Between(0),
    help="Exit with 1 where the median error of step times is greater, as 0.1.",
)
@_format()
@click.pass_context
def validate(ctx: click.Context, /, **flags: Any) -> None:
    """Compare estimates with measured runs: error, interval, fit, choice, by source.

    Exit code 1: beyond the tolerance, or too many runs could not be estimated.
    """
    from costmodel.validation import accepted, validate  # noqa: PLC0415
    from profiles.calibrations import calibration_of_name_or_file  # noqa: PLC0415
    from profiles.runs import published_runs, read_runs  # noqa: PLC0415

    if flags["calibration"] and flags["calibrate_on"]:
        raise InputError(Problem(where="--calibration", message="with --calibrate-on"))
    own = (
        None if flags["calibration"] is None else calibration_of_name_or_file(flags["calibration"])
    )
    shown = flags["runs"] or "the table that comes with parplan"
    read = read_runs(flags["runs"] or published_runs())
    others = None if flags["calibrate_on"] is None else read_runs(flags["calibrate_on"])
    _tell(*read.notes, *(others.notes if others else ()))
    judged = validate(
        read.runs,
        calibration=own,
        calibrate_on=others.runs if others else None,
        tell=_tell,
    )
    if flags["form"] == "json":
        _print_json(reports.accuracy_answer(judged, runs=shown, notes=read.notes))
    else:
        _print(reports.accuracy_report(judged, runs=shown))
    ctx.exit(int(ExitCode.YES if accepted(judged, flags["tolerance"]) else ExitCode.NO))


@main.command()
@click.option("--runs", metavar="FILE", required=True, help="Measured runs, CSV.")
@click.option("--device", metavar="NAME", help="Only runs on this device of the catalogue.")
@click.option("--stack", metavar="NAME", help="Only runs of this software stack.")
@click.option(
    "-o", "--output", metavar="FILE", required=True, help="Calibration YAML; - prints it."
)
@_force_option
def calibrate(
    runs: str, device: str | None, stack: str | None, output: str, *, force: bool
) -> None:
    """Fit the efficiencies of a device and a software stack to at least three measured runs."""
    from costmodel.validation import calibrate, fit_section  # noqa: PLC0415
    from profiles.calibrationwriter import calibration_text  # noqa: PLC0415
    from profiles.runs import read_runs  # noqa: PLC0415

    _check_output(output, force=force)
    read = read_runs(runs)
    name = "calibration" if output == "-" else Path(output).stem
    found = calibrate(read.runs, device=device, stack=stack, name=name, shown=Path(runs).name)
    _tell(*read.notes, *found.notes)
    text = calibration_text(found.calibration, fit_section(found.fit, found.prior))
    _save(text, output, force=force)
    if output != "-":
        _print(reports.calibration_report(found))


@main.command()
@click.argument("files", metavar="PLAN...", nargs=-1, required=True)
@click.option(
    "--fail-above",
    type=Share(),
    metavar="SHARE",
    help="Exit with 1 where one is slower than the first by more, as 2%, or not comparable.",
)
@_page_option
@_format()
@click.pass_context
def compare(ctx: click.Context, /, files: tuple[str, ...], form: str, **flags: Any) -> None:
    """Compare plans with the first one, and runs of it (run.json) with its estimate."""
    from planner.measuredrun import is_run, run_of_plan  # noqa: PLC0415

    records = [path for path in files if is_run(path)]
    if len(files) == 1 or len(records) == len(files):
        expected = "two plans, or a plan and its run.json"
        raise InputError(
            Problem(where="parplan compare", message=", ".join(files), expected=expected)
        )
    _check_page(flags["html"], force=flags["force"])
    sound, refused = planner.load_sound_plans([path for path in files if path not in records])
    for line in refused:
        click.echo(line, err=True)
    if sound:
        found = planner.compare_plans(sound)
        runs = [run_of_plan(found.plan, path) for path in records]
        answer = reports.comparison_answer(found, refused, runs)
        if form == "json":
            _print_json(answer)
        else:
            _print(reports.comparison_report(found, runs))
        if flags["html"] is not None:
            page = reports.comparison_page(answer, found)
            _save(page, flags["html"], force=flags["force"])
    if refused:
        ctx.exit(int(ExitCode.ASKED_WRONGLY))
    tolerance = flags["fail_above"]
    if tolerance is not None:
        within = [each.passes(tolerance) for each in found.others]
        within += [each.passes(tolerance) for each in runs]
        ctx.exit(int(ExitCode.YES if all(within) else ExitCode.NO))


@main.command()
@click.argument("plan_file", metavar="[PLAN]", required=False)
@_with(*INPUT_FLAGS, *SEARCH_FLAGS)
@click.option("--set", "sets", multiple=True, metavar="NAME=VALUE", help="Change an input.")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="NAME=VALUE,...",
    help="Try each value; several sweeps combine.",
)
@click.option("--weak-scaling", is_flag=True, help="Let the global batch grow with the GPUs.")
@click.option("--results", metavar="FILE", help="Keep what is finished, and take up what is there.")
@_format()
@click.pass_context
def whatif(ctx: click.Context, /, plan_file: str | None, **flags: Any) -> None:
    """Plan anew for other inputs: model, cluster, stack, cluster.num_nodes, cluster.device,
    cluster.price_per_gpu_hour, training.global_batch and the like.
    """
    from planner.resultsfile import kept, read_outcomes  # noqa: PLC0415
    from planner.whatif import cases, run_cases  # noqa: PLC0415

    wanted = cases(flags["sets"], flags["sweeps"])
    own = ("sets", "sweeps", "weak_scaling", "results")
    if plan_file is not None:
        base, space = planner.question_of(_read_plan(ctx, plan_file, flags, *own))
    else:
        base, space = _asked(flags)
    results, found = flags["results"], []
    known = {} if results is None else read_outcomes(results)
    with reports.until_interrupt() as should_stop, reports.sweep_progress(len(wanted)) as tell:
        outcomes = run_cases(
            base, wanted, **space, weak_scaling=flags["weak_scaling"], known=known,
            should_stop=should_stop,
        )  # fmt: skip
        for outcome in outcomes if results is None else kept(outcomes, results):
            found.append(outcome)
            tell()
    _show(flags["form"], reports.sweep_answer, reports.sweep_report, found)
    if len(found) < len(wanted):
        click.echo(f"interrupted: {len(found)} of {len(wanted)} are planned", err=True)
        ctx.exit(int(ExitCode.INTERRUPTED))
    ctx.exit(int(ExitCode.YES if any(each.found for each in found) else ExitCode.NO))


@main.command()
@click.argument("plan_file", metavar="PLAN")
@click.option("--steps", type=TYPES[Kind.COUNT], help="Optimizer steps.")
@click.option(
    "--data", default=SYNTHETIC, show_default=True, metavar="FOLDER",
    help="Text (*.txt) or tokens (*.npy, *.bin) to train on, or synthetic.",
)  # fmt: skip
@click.option("--out", metavar="DIR", help="For run.json, logs, checkpoints.")
@click.option(
    "--checkpoint-every", default=CHECKPOINT_EVERY, show_default=True, type=click.IntRange(0),
    help="Steps between checkpoints, which the last step has too; 0 for none.",
)  # fmt: skip
@click.option(
    "--keep", default=KEEP, show_default=True, type=TYPES[Kind.COUNT], help="Checkpoints that stay."
)
@click.option(
    "--stop-at", type=TYPES[Kind.COUNT], metavar="STEP", help="Stop early, to go on later."
)
@click.option("--compile", "compiles", is_flag=True, help="Compile the blocks (torch.compile).")
@click.option("--lr", default=USUAL.lr, show_default=True, type=Between(0), help="Learning rate.")
@click.option(
    "--warmup", default=USUAL.warmup, show_default=True, type=click.IntRange(0),
    help="Steps in which the rate rises to it.",
)  # fmt: skip
@click.option(
    "--weight-decay", default=USUAL.weight_decay, show_default=True, type=click.FloatRange(0),
    help="Of matrices.",
)  # fmt: skip
@click.option(
    "--clip", default=USUAL.clip, show_default=True, type=click.FloatRange(0),
    help="Greatest norm of the gradients; 0 for none.",
)  # fmt: skip
@click.option(
    "--seed", default=USUAL.seed, show_default=True, type=click.IntRange(0, 2**31),
    help="Of weights and data.",
)  # fmt: skip
@click.option(
    "--device", default="auto", show_default=True, type=click.Choice(DEVICES),
    help="auto: GPUs where there are any.",
)  # fmt: skip
@click.option(
    "--nnodes", type=TYPES[Kind.COUNT], help="Nodes; as many as the plan's cluster needs."
)
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where nodes meet, as in torchrun.")
@click.option("--rdzv-id", metavar="ID", help="Name of the job among others that meet there.")
@click.option(
    "--print", "show", is_flag=True, help="Print the torchrun line of each node, run nothing."
)
@click.option("--slurm", is_flag=True, help="Print an sbatch file, run nothing.")
@click.option(
    "--dry-run", is_flag=True,
    help="Find what a rank holds and moves, without its memory; needs no --steps, no --out.",
)  # fmt: skip
@click.option("--rank", type=int, help="Rank of --dry-run.  [default: 0]")
@_format()
@click.pass_context
def launch(ctx: click.Context, /, plan_file: str, **flags: Any) -> None:
    """Train with a plan in native PyTorch (torchrun underneath) and compare with its estimate.

    Started again with the same --out, under this plan or another of the same model, a run goes on
    from its last whole checkpoint.

    Exit code 1: the job failed (the rank that did and its error are told), or a dry run differs
    from the estimate by more than it should.
    """
    if flags["dry_run"]:
        ctx.exit(int(_dry_run(plan_file, flags["rank"] or 0, flags["form"])))
    for name, needed in (("steps", True), ("out", True), ("rank", False)):
        if (flags[name] is None) == needed:
            message = "is missing" if needed else "without --dry-run"
            raise InputError(Problem(where=f"--{name}", message=message))
    if flags["stop_at"] is not None and flags["stop_at"] > flags["steps"]:
        message, expected = f"{flags['stop_at']} is beyond --steps", f"at most {flags['steps']}"
        raise InputError(Problem(where="--stop-at", message=message, expected=expected))
    from executor import launch as launching  # noqa: PLC0415

    job = Job(
        plan=Path(plan_file),
        steps=flags["steps"],
        data=flags["data"],
        out=Path(flags["out"]),
        **{name: flags[name] for name in (*OPTIONS, "compiles")},
        recipe=Recipe(**{name: flags[name] for name in RECIPE}),
    )
    own = planner.load_plan(plan_file)
    check_plan(own, plan_file, compiles=job.compiles)
    where = {"endpoint": flags["rdzv_endpoint"], "rdzv_id": flags["rdzv_id"]}
    nodes = launching.nodes_of(own, count=flags["nnodes"], **where)
    if flags["slurm"] or flags["show"]:
        text = launching.slurm_script if flags["slurm"] else launching.torchrun_lines
        click.echo(text(own, job, nodes))
        return
    record = json.loads(launching.launch(own, job, nodes).read_text(encoding="utf-8"))
    _show(flags["form"], dict, reports.run_report, record)


def _dry_run(plan_file: str, rank: int, form: str) -> ExitCode:
    check_torch("--dry-run")
    from executor.dry_run import dry_run  # noqa: PLC0415

    found = dry_run(planner.load_plan(plan_file), plan_file, rank=rank)
    _show(form, dict, reports.dry_run_report, found.document())
    return ExitCode.YES if found.passes else ExitCode.NO


if __name__ == "__main__":
    main()
