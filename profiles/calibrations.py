"""The shelf of calibrations: the one of a device and a stack, or the nearest there is.

Nearest means, in this order: the stack in its release on the device; all releases of the stack on
the device; all stacks of the device; the stack (or its releases) on another device; the datasheet.
Whatever is not exactly what was asked for gets a wider interval and a note; the interval of all
stacks of a device is made for one that is not among them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from profiles import shelf, yamlfile
from profiles.calibrationfile import calibration_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from profiles.calibration import Calibration

__all__ = [
    "ANY",
    "calibration_named",
    "calibration_of_name_or_file",
    "datasheet",
    "nearest_calibration",
    "stack_family",
    "widened",
]

ANY: Final = "any"
_LINE: Final = r"^{}: [\"']?(.+?)[\"']?$"


class _Rung(NamedTuple):
    """One rung of the search: what must match, how much wider the interval gets, what to say."""

    on_device: bool
    stack: str
    wider: float
    words: str


def stack_family(stack: str) -> str:
    """All releases of a stack: its name without the release, and ``any``."""
    name = stack.removesuffix(" over Omni-Path")
    words = [word for word in name.split() if not word[0].isdigit() and word != "torch"]
    if words[-1:] == [ANY]:
        words.pop()
    return " ".join([*(words or [stack]), ANY])


def nearest_calibration(device: str, stack: str | None) -> tuple[Calibration, str | None]:
    """The calibration, and a note where it is not exactly what was asked for. Without a stack it
    is the datasheet's.
    """
    known = _known()
    if stack is None:
        return datasheet(), _no_stack(device, known)
    own = stack_family(stack)
    rungs = (
        _Rung(on_device=True, stack=stack, wider=1.0, words=""),
        _Rung(on_device=True, stack=own, wider=1.25, words=f"other releases of {stack}"),
        _Rung(on_device=True, stack=own.removesuffix(f" {ANY}"), wider=1.25, words="its namesake"),
        _Rung(on_device=True, stack=ANY, wider=1.0, words=f"other stacks on {device}"),
        _Rung(on_device=False, stack=stack, wider=1.5, words="another device"),
        _Rung(on_device=False, stack=own, wider=1.75, words="other releases on another device"),
    )
    for rung in rungs:
        for (on, of), name in known.items():
            if of.casefold() == rung.stack.casefold() and (on == device or not rung.on_device):
                found = calibration_named(name)
                if not rung.words:
                    return found, None
                note = (
                    f"no calibration of {stack} on {device}: that of {rung.words} is used, {name}"
                )
                return widened(found, rung.wider), f"{note}, with a wider interval"
    return datasheet(), _fallback_note(device, stack, known)


def widened(calibration: Calibration, factor: float) -> Calibration:
    """The calibration with intervals that reach ``factor`` times as far, in the logarithm."""
    own = calibration.efficiencies
    fast, slow = own.step_time_90
    interval = (fast**factor, slow**factor)
    sigma = own.memory_sigma * factor
    return replace(
        calibration, efficiencies=replace(own, step_time_90=interval, memory_sigma=sigma)
    )


def _no_stack(device: str, known: dict[tuple[str, str], str]) -> str:
    stacks = _families(of for on, of in known if on == device)
    text = f"no calibration of {device}: default efficiencies are used"
    if stacks:
        text = "no --stack: default efficiencies are used"
        return f"{text}; calibrated on {device}: {', '.join(stacks)}"
    others = sorted({on for on, _ in known})
    return f"{text}; calibrated are: {', '.join(others) or 'none'}"


def _fallback_note(device: str, stack: str, known: dict[tuple[str, str], str]) -> str:
    """Why the datasheet's efficiencies are used, and which stacks are calibrated."""
    others = _families(of for _, of in known)
    text = f"no calibration of the stack {stack} on {device}: default efficiencies are used"
    return f"{text}; calibrated are: {', '.join(others) or 'none'}"


def _families(stacks: Iterable[str]) -> list[str]:
    """The stacks without their releases."""
    names = {stack_family(stack).removesuffix(ANY).strip() for stack in stacks if stack != ANY}
    return sorted(names)


@cache
def datasheet() -> Calibration:
    """The default: typical efficiencies, no stack in mind."""
    return calibration_named("datasheet")


@cache
def calibration_named(name: str) -> Calibration:
    """The shipped calibration of that name."""
    return calibration_of(yamlfile.read(shelf.DATA / "calibrations" / f"{name}.yaml"))


def calibration_of_name_or_file(reference: str) -> Calibration:
    """A calibration by its name on the shelf, or of a YAML file. Raises ``InputError``."""
    if reference.endswith((".yaml", ".yml")):
        return calibration_of(yamlfile.read(reference))
    return calibration_of(
        yamlfile.read(shelf.find("calibrations", reference, where="--calibration"))
    )


@cache
def _known() -> dict[tuple[str, str], str]:
    """The names of the calibrations by device and stack, from a scan of their text."""
    found = {}
    for name in shelf.names("calibrations"):
        text = (shelf.DATA / "calibrations" / f"{name}.yaml").read_text(encoding="utf-8")
        device = re.search(_LINE.format("device"), text, re.MULTILINE)
        stack = re.search(_LINE.format("stack"), text, re.MULTILINE)
        if device and stack and device[1] != ANY:
            found[device[1], stack[1]] = name
    return found
