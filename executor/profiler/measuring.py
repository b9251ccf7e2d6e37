"""``parplan profile layers``: flags -> a session -> the text of a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from profiles import shelf
from profiles.catalog import load_model, load_training
from profiles.devicename import catalogue_device
from profiles.errors import InputError, Problem
from profiles.measuredfile import profile_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from executor.profiler.tasks import SessionPlan

__all__ = ["device_kind", "device_name", "foresee_layers", "measure_layers"]

HEADER: Final = "# Made by parplan profile layers.\n"


def measure_layers(
    model: str,
    output: str,
    flags: Mapping[str, Any],
    *,
    tell: Callable[[int, int, str], None],
    should_stop: Callable[[], bool],
) -> tuple[str, list[str]]:
    """The profile of a model's layers, and notes on what is not in it. Raises ``InputError``."""
    from executor.profiler.device import open_device  # noqa: PLC0415
    from executor.profiler.session import Session  # noqa: PLC0415 - torch

    kind = device_kind(flags["device"])
    open_device(kind)  # before it is asked for its name
    session = Session(_plan(model, kind, flags), Path(f"{output}.journal"))
    session.run(tell=tell, should_stop=should_stop)
    profile = session.profile(Path(output).stem)
    doubtful = sum(own.doubtful for own in profile.layer_times)
    doubtful += sum(own.doubtful for own in profile.layer_wrapping)
    doubtful += sum(own.doubtful for own in profile.operator_times)
    notes = list(session.notes)
    if doubtful:
        notes.append(f"{doubtful} points are doubtful: is something else running on the device?")
    notes += [
        f"does not fit: {own.layer}, tp {own.tp}, micro-batch {own.batch} x {own.seq_len[0]}"
        for own in profile.no_room
    ]
    return HEADER + profile_text(profile), notes


def foresee_layers(model: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """What measuring them would take, on the device that ``--as`` names, which need not be there,
    or on this machine's. Raises ``InputError``.
    """
    from executor.profiler.device import open_device  # noqa: PLC0415
    from executor.profiler.outlook import outlook_of  # noqa: PLC0415 - torch

    name, kind = flags["device_name"], flags["device"]
    if name is None:
        kind = device_kind(kind)
        open_device(kind)
    elif kind == "auto":
        kind = "cpu" if device_name(name, kind) == "cpu" else "cuda"
    return outlook_of(_plan(model, kind, flags)).document()


def _plan(model: str, kind: str, flags: Mapping[str, Any]) -> SessionPlan:
    """The session that the flags ask for."""
    from executor.profiler.points import Request  # noqa: PLC0415
    from executor.profiler.tasks import SessionPlan  # noqa: PLC0415 - torch

    precision = flags["precision"] or ("fp32" if kind == "cpu" else None)
    training = load_training(
        None,
        {
            "global_batch": max(flags["micro_batch"]),
            "seq_len": max(flags["seq_len"]),
            "precision": precision,
            "optimizer": flags["optimizer"],
        },
    )
    request = Request(
        model=load_model(model, where="parplan profile layers"),
        training=training,
        tp=flags["tp"],
        batches=flags["micro_batch"],
        seq_lens=flags["seq_len"],
    )
    return SessionPlan(
        request=request,
        device=kind,
        device_name=device_name(flags["device_name"], kind),
        budget_s=flags["budget"],
        rounds=flags["rounds"],
        operators=flags["operators"],
        memory=flags["memory"],
        wrapping=flags["wrapping"],
        date=flags["date"],
    )


def device_kind(asked: str) -> str:
    """Cpu or cuda: what is there, where ``auto`` was asked for."""
    if asked != "auto":
        return asked
    import torch  # noqa: PLC0415 - slowly

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(asked: str | None, kind: str) -> str:
    """What clusters call the device. Raises ``InputError`` where that cannot be told."""
    if asked is not None:
        return shelf.find("devices", asked, where="--as").stem
    if kind == "cpu":
        return "cpu"
    import torch  # noqa: PLC0415 - slowly

    own = torch.cuda.get_device_properties(0)
    found = catalogue_device(own.name, own.total_memory / 2**30)
    if found is None:
        message = f"the catalogue has no device like {own.name!r}"
        hint = "--as NAME says which it is: parplan catalog devices"
        raise InputError(Problem(where="--device", message=message, hint=hint))
    return found
