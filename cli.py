"""The command line: load -> call -> render -> exit code.

What is slow to import is imported inside the commands, so that ``--help`` is quick.
"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click

import planner
import profiles
import reports
from planner.flags import INPUT_FLAGS, LAYOUT_FLAGS, MIN_FIT, SEARCH_FLAGS, Flag, Kind
from planner.launchers import LAUNCHERS
from profiles.errors import ExitCode, InputError, ParplanError, Problem
from profiles.nearest import nearest
from profiles.training import TrainingSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner import Inputs, Plan

__all__ = ["main"]

Command: TypeAlias = "Callable[..., Any]"
Decorator: TypeAlias = "Callable[[Command], Command]"

TRAINING: Final = tuple(TrainingSpec.__dataclass_fields__)


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
            raise InputError(_unknown("command", args[0], self.commands))
        return super().resolve_command(ctx, args)


def _unknown(kind: str, name: str, known: Any) -> Problem:
    return Problem(
        where={"command": "parplan", "--launcher": kind}.get(kind, f"parplan {kind}"),
        message=f"there is no {kind.removeprefix('--')} {name!r}",
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

    Exit codes: 0 yes, 1 no (nothing fits), 2 asked wrongly, 3 our mistake, 130 interrupted.
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


def _with(*flags: Flag) -> Decorator:
    """Options of flags as one decorator, in this order in the help."""

    def decorate(command: Command) -> Command:
        for flag in reversed(flags):
            command = _option(flag)(command)
        return command

    return decorate


def _format(*formats: str) -> Decorator:
    kind = click.Choice(["text", "json", *formats])
    return click.option("--format", "form", type=kind, default="text", show_default=True)


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
    for note in inputs.notes:
        click.echo(f"note: {note}", err=True)
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


@main.command()
@_with(*INPUT_FLAGS, *SEARCH_FLAGS)
@click.option("--top", default=3, show_default=True, type=click.IntRange(0, 100), help="Next best.")
@click.option(
    "--solver",
    default="closed-form",
    show_default=True,
    type=click.Choice(["closed-form", "dp"]),
    help="Who gives layers their strategies; both are exact, dp takes longer.",
)
@click.option(
    "--smallest",
    is_flag=True,
    help="On as few GPUs as it fits; the cluster may be a bare device or node.",
)
@click.option("-o", "--output", metavar="FILE", help="Write the plan file; - prints it.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@_format("yaml")
@click.pass_context
def plan(ctx: click.Context, /, **flags: Any) -> None:
    """Find the fastest layout that fits."""
    import time  # noqa: PLC0415

    output, form = flags["output"], flags["form"]
    if output not in (None, "-"):
        profiles.refuse_to_overwrite(output, force=flags["force"])
    inputs, space = _asked(flags)
    started_s = time.process_time()
    smallest = None
    with reports.until_interrupt() as should_stop, reports.progress_on_stderr() as tell:
        how = {
            **space,
            "runners_up": flags["top"],
            "solver": flags["solver"],
            "should_stop": should_stop,
            "on_progress": tell,
        }
        if flags["smallest"]:
            smallest = planner.plan_smallest(inputs, **how)
        planned = smallest.planned if smallest else planner.plan_training(inputs, **how)
    cpu_s = time.process_time() - started_s
    if output not in (None, "-"):
        planner.save_plan(planned.plan, output, force=flags["force"])
    if output == "-" or form == "yaml":
        click.echo(planner.plan_text(planned.plan), nl=False)
    elif form == "json":
        extra = reports.smallest_answer(smallest) if smallest else {}
        _print_json({**reports.plan_answer(planned, cpu_s=cpu_s), **extra})
    else:
        _print(
            [
                *(reports.smallest_report(smallest) if smallest else []),
                *reports.plan_report(planned),
            ]
        )
    if output not in (None, "-"):
        click.echo(f"written: {output}", err=True)
    facts = planned.plan.search
    if facts is not None and not facts.complete:
        click.echo(f"interrupted: the best so far, gap {100 * facts.gap:.1f} %", err=True)
        ctx.exit(int(ExitCode.INTERRUPTED))


@main.command()
@click.argument("plan_file", metavar="[PLAN]", required=False)
@_with(*INPUT_FLAGS, *LAYOUT_FLAGS)
@_format("yaml")
@click.pass_context
def estimate(ctx: click.Context, /, plan_file: str | None, **flags: Any) -> None:
    """Estimate a plan file, or the layout that flags describe. Exit code 1: it does not fit."""
    made = _manual_plan(flags) if plan_file is None else _read_plan(ctx, plan_file, flags)
    if flags["form"] == "json":
        _print_json(reports.estimate_answer(made))
    elif flags["form"] == "yaml":
        click.echo(planner.plan_text(made), nl=False)
    else:
        _print(reports.estimate_report(made))
    ctx.exit(int(ExitCode.YES if made.estimate.fits else ExitCode.NO))


def _read_plan(ctx: click.Context, path: str, flags: dict[str, Any]) -> Plan:
    """The plan of a file; flags that it answers itself are refused."""
    open_to_all = ("plan_file", "form", "min_fit")
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
    if flags["form"] == "json":
        _print_json(reports.explain_answer(explanation))
    else:
        _print(reports.explain_report(explanation))
    if stopped:
        click.echo("interrupted: better ones may exist", err=True)
        ctx.exit(int(ExitCode.INTERRUPTED))


@main.command()
@click.argument("reference", metavar="MODEL|CLUSTER")
@_format()
def describe(reference: str, form: str) -> None:
    """Say what was understood of a model or a cluster: a name, a shorthand or a path."""
    facts = reports.facts_of(profiles.load_model_or_cluster(reference, where="parplan describe"))
    if form == "json":
        _print_json(facts)
    else:
        _print(reports.facts_report(facts))


@main.command("import-cluster")
@click.argument("file")
@click.option("--device", metavar="NAME", help="Device of the nodes: parplan catalog devices.")
@click.option("--nodes", "num_nodes", type=TYPES[Kind.COUNT], help="Such nodes; one by default.")
@click.option("--nics", "num_nics", type=TYPES[Kind.COUNT], help="Network cards of a node.")
@click.option("--nic-gb-per-s", type=float, help="GB/s of one of them: 400 Gb/s is 50.")
@click.option("-o", "--output", metavar="FILE", default="-", help="The cluster YAML; - prints it.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def import_cluster(file: str, output: str, *, force: bool, **told: Any) -> None:
    """Make a cluster YAML of a topology of nvidia-smi topo -m, NCCL, Slurm or ASTRA-sim."""
    if output != "-":
        profiles.refuse_to_overwrite(output, force=force)
    text, notes = profiles.read_topology(file, **told)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if output == "-":
        click.echo(text, nl=False)
    else:
        profiles.save_text(text, output, force=force)
        click.echo(f"written: {output}", err=True)


@main.command()
@click.argument("shelf", type=click.Choice(["models", "devices", "nodes"]))
@_format()
def catalog(shelf: Any, form: str) -> None:
    """List what is known by name."""
    entries = profiles.catalog_names(shelf)
    if form == "json":
        _print_json(reports.catalog_answer(entries))
    else:
        _print(reports.catalog_report(entries))


@main.command()
@click.argument("plan_file", metavar="PLAN")
@click.option(
    "--to", required=True, type=click.Choice(["trace"]),
    help="trace: one step for the viewers of Chrome and Perfetto.",
)  # fmt: skip
@click.option("-o", "--output", metavar="FILE", default="-", help="Where to; - prints it.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def export(plan_file: str, to: str, output: str, *, force: bool) -> None:
    """Turn a plan file into what other programs read."""
    if output != "-":
        profiles.refuse_to_overwrite(output, force=force)
    exporters = {"trace": reports.trace_answer}
    text = reports.json_text(exporters[to](planner.load_plan(plan_file)))
    if output == "-":
        click.echo(text)
    else:
        profiles.save_text(text + "\n", output, force=force)
        click.echo(f"written: {output}", err=True)


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
    if form == "json":
        _print_json(reports.schedule_answer(run))
    else:
        _print(reports.schedule_report(run))


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
    for note in (*read.notes, *(others.notes if others else ())):
        click.echo(f"note: {note}", err=True)
    judged = validate(
        read.runs,
        calibration=own,
        calibrate_on=others.runs if others else None,
        tell=lambda note: click.echo(f"note: {note}", err=True),
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
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def calibrate(
    runs: str, device: str | None, stack: str | None, output: str, *, force: bool
) -> None:
    """Fit the efficiencies of a device and a software stack to at least three measured runs."""
    from pathlib import Path  # noqa: PLC0415

    from costmodel.validation import calibrate, fit_section  # noqa: PLC0415
    from profiles.calibrationwriter import calibration_text  # noqa: PLC0415
    from profiles.runs import read_runs  # noqa: PLC0415

    if output != "-":
        profiles.refuse_to_overwrite(output, force=force)
    read = read_runs(runs)
    name = "calibration" if output == "-" else Path(output).stem
    found = calibrate(read.runs, device=device, stack=stack, name=name, shown=Path(runs).name)
    for note in (*read.notes, *found.notes):
        click.echo(f"note: {note}", err=True)
    text = calibration_text(found.calibration, fit_section(found.fit, found.prior))
    if output == "-":
        click.echo(text, nl=False)
    else:
        profiles.save_text(text, output, force=force)
        _print(reports.calibration_report(found))
        click.echo(f"written: {output}", err=True)


@main.command()
@click.argument("plan_file", metavar="PLAN")
@click.option("--steps", required=True, type=TYPES[Kind.COUNT], help="Optimizer steps.")
@click.option(
    "--data", default="synthetic", show_default=True, metavar="FOLDER",
    help="Text (*.txt) or tokens (*.npy, *.bin) to train on, or synthetic.",
)  # fmt: skip
@click.option("--out", required=True, metavar="DIR", help="For run.json, logs and errors.")
@click.option("--lr", default=3e-4, show_default=True, type=Between(0), help="Learning rate.")
@click.option("--warmup", default=0, show_default=True, type=click.IntRange(0), help="Steps.")
@click.option(
    "--weight-decay", default=0.1, show_default=True, type=click.FloatRange(0),
    help="Of matrices.",
)  # fmt: skip
@click.option(
    "--clip", default=1.0, show_default=True, type=click.FloatRange(0),
    help="Greatest norm of the gradients; 0 for none.",
)  # fmt: skip
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0, 2**31),
    help="Of weights and data.",
)  # fmt: skip
@click.option(
    "--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]),
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
@_format()
def launch(plan_file: str, **flags: Any) -> None:
    """Train with a plan in native PyTorch (torchrun underneath) and compare with its estimate.

    Exit code 1: the job failed; the rank that did and its error are told.
    """
    from pathlib import Path  # noqa: PLC0415

    from executor import launch as launching  # noqa: PLC0415
    from executor.job import Job, Recipe, check_plan  # noqa: PLC0415

    names = ("lr", "warmup", "weight_decay", "clip", "seed")
    job = Job(
        plan=Path(plan_file),
        steps=flags["steps"],
        data=flags["data"],
        out=Path(flags["out"]),
        device=flags["device"],
        recipe=Recipe(**{name: flags[name] for name in names}),
    )
    own = planner.load_plan(plan_file)
    check_plan(own, plan_file)
    where = {"endpoint": flags["rdzv_endpoint"], "rdzv_id": flags["rdzv_id"]}
    nodes = launching.nodes_of(own, count=flags["nnodes"], **where)
    if flags["slurm"] or flags["show"]:
        text = launching.slurm_script if flags["slurm"] else launching.torchrun_lines
        click.echo(text(own, job, nodes))
        return
    record = json.loads(launching.launch(own, job, nodes).read_text(encoding="utf-8"))
    if flags["form"] == "json":
        _print_json(record)
    else:
        _print(reports.run_report(record))


if __name__ == "__main__":
    main()
