"""What if: the same question with other inputs, each planned anew.

A change names an input: ``model``, ``cluster``, ``stack``, ``cluster.num_nodes``,
``cluster.device``, ``cluster.price_per_gpu_hour`` or ``training.FIELD``. Sweeps combine to every
combination of their values. What was found is one line of JSON each, so that a sweep that was
stopped goes on where it ended.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from planner.choices import Restrictions
from planner.inputs import Inputs, checked_inputs
from planner.plan import MIN_FIT, layout_choices
from planner.plandocument import restrictions_document
from planner.planning import plan_training
from planner.spend import spend_of
from profiles.catalog import load_calibration, load_cluster, load_model, load_training
from profiles.cluster import NodeGroup
from profiles.errors import InfeasibleError, InputError, Problem
from profiles.fingerprint import fingerprint
from profiles.nearest import nearest
from profiles.training import TrainingSpec
from profiles.trainingfile import TrainingFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from planner.plan import Plan
    from profiles.cluster import ClusterSpec

__all__ = ["CHANGES", "Case", "Outcome", "cases", "parse_change", "parse_sweep", "run_cases"]

OF_TRAINING: Final = tuple(
    f"training.{name}"
    for name in TrainingFile.model_fields
    if name in TrainingSpec.__dataclass_fields__
)
OF_CLUSTER: Final = ("cluster.num_nodes", "cluster.device", "cluster.price_per_gpu_hour")
CHANGES: Final = ("model", "cluster", "stack", *OF_CLUSTER, *OF_TRAINING)

MOST_CASES: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination: its changes by name, as text."""

    changes: dict[str, str]

    def key(self, base: Inputs, restrictions: Restrictions | None, *asked_for: object) -> str:
        """What an earlier answer must have been asked for to be the answer to this case."""
        asked = [
            *(fingerprint(each) for each in (base.model, base.cluster, base.training)),
            fingerprint(base.calibration),
            *(() if base.profile is None else (fingerprint(base.profile),)),
            _stated(restrictions),
            *asked_for,
            sorted(self.changes.items()),
        ]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a case came to: numbers and choices of its plan, or why there is none."""

    key: str
    changes: dict[str, str]
    found: dict[str, Any] | None
    reason: str = ""

    def line(self) -> str:
        """As a line of a file of results."""
        return json.dumps(asdict(self), sort_keys=True)


def parse_change(text: str, *, where: str = "--set") -> tuple[str, str]:
    """``training.seq_len=8192`` -> name and value. Raises InputError with the nearest name."""
    name, equals, value = text.partition("=")
    if not equals or not value:
        expected = "NAME=VALUE, as cluster.num_nodes=8"
        raise InputError(Problem(where=where, message=f"{text!r}", expected=expected))
    if name not in CHANGES:
        message, expected = f"there is no input {name!r}", f"one of {', '.join(CHANGES)}"
        hint = nearest(name, CHANGES)
        raise InputError(Problem(where=where, message=message, expected=expected, hint=hint))
    return name, value


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """``cluster.num_nodes=1,2,4`` -> name and values."""
    name, values = parse_change(text, where="--sweep")
    parts = list(dict.fromkeys(part.strip() for part in values.split(",") if part.strip()))
    if not parts:
        raise InputError(Problem(where="--sweep", message=f"{text!r} has no values"))
    return name, parts


def cases(sets: Sequence[str], sweeps: Sequence[str]) -> list[Case]:
    """Every combination of the sweeps' values, each with the fixed changes."""
    fixed = dict(parse_change(text) for text in sets)
    swept = dict(parse_sweep(text) for text in sweeps)
    twice = sorted(fixed.keys() & swept.keys())
    if twice:
        raise InputError(Problem(where="--sweep", message=f"{twice[0]} is set as well"))
    found = [
        Case(changes={**fixed, **dict(zip(swept, values, strict=True))})
        for values in product(*swept.values())
    ]
    if len(found) > MOST_CASES:
        message, expected = f"{len(found):,} combinations", f"at most {MOST_CASES:,}"
        raise InputError(Problem(where="--sweep", message=message, expected=expected))
    return found


def run_cases(
    base: Inputs,
    wanted: Sequence[Case],
    *,
    launcher: str = "any",
    restrictions: Restrictions | None = None,
    min_fit: float = MIN_FIT,
    weak_scaling: bool = False,
    known: Mapping[str, Outcome] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome]:
    """The outcome of each case in turn; those ``known`` by key are not planned again.

    ``weak_scaling``: the global batch grows with the GPUs of the cluster. Stops early, without an
    error, when ``should_stop`` says so. Raises InputError where a change cannot be made.
    """
    changed = [(case, _changed(base, case, weak=weak_scaling)) for case in wanted]
    for case, inputs in changed:
        key = case.key(base, restrictions, launcher, min_fit, weak_scaling)
        if known is not None and key in known:
            yield known[key]
            continue
        if should_stop():
            return
        try:
            planned = plan_training(
                inputs,
                launcher=launcher,
                restrictions=restrictions,
                min_fit=min_fit,
                runners_up=0,
                should_stop=should_stop,
            )
        except InfeasibleError as error:
            yield Outcome(key=key, changes=case.changes, found=None, reason=error.constraint)
            continue
        if should_stop():
            return  # half searched: not an answer to keep
        yield Outcome(key=key, changes=case.changes, found=_numbers(planned.plan))


def _stated(restrictions: Restrictions | None) -> dict[str, Any]:
    """Restrictions in an order that is the same in every process."""
    return restrictions_document(restrictions or Restrictions())


def _numbers(plan: Plan) -> dict[str, Any]:
    own = plan.estimate
    return {
        "gpus": plan.layout.mesh.num_ranks,
        "step_s": own.step_s,
        "interval_s": list(own.interval_s),
        "tokens_per_s": own.tokens_per_s_per_gpu * plan.layout.mesh.num_ranks,
        "tokens_per_s_per_gpu": own.tokens_per_s_per_gpu,
        "mfu": own.mfu,
        "peak_mem_bytes": own.peak_mem_bytes,
        **asdict(spend_of(plan)),
        "layout": layout_choices(plan.inputs.model, plan.layout),
    }


def _changed(base: Inputs, case: Case, *, weak: bool) -> Inputs:
    """The inputs with a case's changes; the calibration is found anew for another device."""
    changes = case.changes
    inputs = base
    if "model" in changes:
        inputs = replace(
            inputs,
            model=load_model(changes["model"], where="model"),
            model_ref=changes["model"],
        )
    cluster = _cluster(inputs.cluster, changes)
    training = {
        name.removeprefix("training."): value
        for name, value in changes.items()
        if name.startswith("training.")
    }
    if weak and "global_batch" not in training and cluster.num_gpus != base.cluster.num_gpus:
        batch = base.training.global_batch * cluster.num_gpus / base.cluster.num_gpus
        training["global_batch"] = str(max(1, round(batch)))
    if training:
        inputs = replace(inputs, training=_retrained(inputs.training, training))
    stack = changes.get("stack", inputs.stack)
    calibration, note = load_calibration(stack, cluster, inputs.calibration_ref)
    return checked_inputs(
        replace(
            inputs,
            cluster=cluster,
            cluster_ref=changes.get("cluster", inputs.cluster_ref),
            calibration=calibration,
            stack=stack,
            notes=() if note is None else (note,),
        )
    )


def _retrained(training: TrainingSpec, changes: Mapping[str, str]) -> TrainingSpec:
    """A training run with changes, which are read like flags."""
    names = [name.removeprefix("training.") for name in OF_TRAINING]
    stated = {name: getattr(training, name) for name in names}
    given = {**stated, **{name: _typed(value) for name, value in changes.items()}}
    read = load_training(None, {n: v for n, v in given.items() if v is not None})
    return replace(training, **{name: getattr(read, name) for name in names})


def _typed(text: str) -> Any:
    if text in ("True", "False", "true", "false"):
        return text.lower() == "true"
    return int(text) if text.isascii() and text.isdigit() else text


def _cluster(cluster: ClusterSpec, changes: Mapping[str, str]) -> ClusterSpec:
    if "cluster" in changes:
        cluster = load_cluster(changes["cluster"], where="cluster")
    if "cluster.device" in changes:
        shape = f"{cluster.num_nodes}x{cluster.gpus_per_node}"
        cluster = load_cluster(f"{shape}x{changes['cluster.device']}", where="cluster.device")
    if "cluster.num_nodes" in changes:
        name = "cluster.num_nodes"
        count = _positive(changes[name], name, whole=True)
        if not cluster.is_uniform:
            message = f"{cluster.name} has several kinds of nodes"
            raise InputError(Problem(where=name, message=message, expected="a cluster of one kind"))
        node = cluster.groups[0].node
        cluster = replace(cluster, groups=(NodeGroup(node, int(count)),))
    if "cluster.price_per_gpu_hour" in changes:
        name = "cluster.price_per_gpu_hour"
        price = _positive(changes[name], name)
        groups = tuple(
            replace(each, node=replace(each.node, price_per_gpu_hour=price))
            for each in cluster.groups
        )
        cluster = replace(cluster, groups=groups)
    return cluster


def _positive(text: str, name: str, *, whole: bool = False) -> float:
    try:
        number = float(int(text) if whole else float(text))
    except ValueError:
        number = 0.0
    if not 0 < number <= MOST_NODES:
        expected = f"a {'whole ' if whole else ''}number above 0, at most {MOST_NODES:,}"
        raise InputError(Problem(where=name, message=f"{text!r}", expected=expected))
    return number


MOST_NODES: Final = 100_000
