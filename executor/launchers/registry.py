"""The launchers by name: who writes, reads and checks for each, loaded when first used."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from profiles.errors import InputError, Problem
from profiles.nearest import nearest

if TYPE_CHECKING:
    from executor.launchers.commandline import Source
    from executor.launchers.job import Heard, Job
    from executor.launchers.rulebook import Rulebook
    from executor.launchers.told import Told

__all__ = ["NAMES", "Launcher", "launcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """One launcher. ``files``, ``choices`` and ``rules`` name the modules of each part;
    ``versions`` are those whose keys differ, the usual one first.
    """

    name: str
    files: str
    choices: str
    rules: str
    versions: tuple[str, ...]

    def write(self, job: Job, version: str) -> dict[str, str]:
        """The files of a job by name."""
        files: dict[str, str] = self._of(self.files).write(job, version=version)
        return files

    def tell(self, source: Source, *, num_gpus: int | None, version: str) -> Told:
        """What the launcher was told."""
        told: Told = self._of(self.files).tell(source, num_gpus=num_gpus, version=version)
        return told

    def hear(self, told: Told) -> Heard:
        """The choices in what it was told."""
        heard: Heard = self._of(self.choices).hear(told)
        return heard

    @property
    def rulebook(self) -> Rulebook:
        """Its rules."""
        rules: Rulebook = self._of(self.rules).RULES
        return rules

    @staticmethod
    def _of(module: str) -> Any:
        return import_module(f"executor.launchers.{module}")


_LAUNCHERS: Final = {
    each.name: each
    for each in (
        Launcher(
            name="megatron",
            files="megatronfiles",
            choices="megatron",
            rules="megatronrules",
            versions=("d98e8a6",),
        ),
        Launcher(
            name="megatron-bridge",
            files="bridge",
            choices="megatron",
            rules="megatronrules",
            versions=("067f987",),
        ),
        Launcher(
            name="torchtitan",
            files="torchtitan",
            choices="torchtitan",
            rules="torchtitanrules",
            versions=("0.3.0", "main"),
        ),
        Launcher(
            name="deepspeed",
            files="deepspeed",
            choices="deepspeed",
            rules="deepspeedrules",
            versions=("0.19.8",),
        ),
        Launcher(
            name="accelerate",
            files="accelerate",
            choices="accelerate",
            rules="acceleraterules",
            versions=("1.15.0",),
        ),
        Launcher(
            name="galvatron",
            files="galvatron",
            choices="galvatron",
            rules="galvatronrules",
            versions=("vocab_sdp", "embed_sdp"),
        ),
    )
}
NAMES: Final = tuple(_LAUNCHERS)


def launcher(name: str, version: str | None = None) -> tuple[Launcher, str]:
    """The launcher of that name, and its version. Raises ``InputError`` for an unknown one."""
    if name not in _LAUNCHERS:
        message = f"there is no launcher {name!r} to export to or to import from"
        expected, hint = f"one of {', '.join(NAMES)}", nearest(name, NAMES)
        raise InputError(Problem(where="launcher", message=message, expected=expected, hint=hint))
    found = _LAUNCHERS[name]
    if version is None:
        return found, found.versions[0]
    if version not in found.versions:
        message = f"{name} has no version {version!r} here"
        expected = f"one of {', '.join(found.versions)}"
        hint = nearest(version, found.versions)
        where = "--launcher-version"
        raise InputError(Problem(where=where, message=message, expected=expected, hint=hint))
    return found, version
