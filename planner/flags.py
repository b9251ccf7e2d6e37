"""The flags by which inputs and choices are named: their words, kinds and usual values.

Data only: the command line makes options of them, documentation a table. A flag that is not
given is None, so that it never overrides a file; ``usual`` says what None stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from costmodel.layout import ContextComm
from planner.launchers import LAUNCHERS
from planner.plan import MIN_FIT
from profiles.training import (
    DEFAULT_GLOBAL_BATCH,
    DEFAULT_SEQ_LEN,
    AttentionKernel,
    GradDtype,
    Optimizer,
    Precision,
    TrainingSpec,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["INPUT_FLAGS", "LAYOUT_FLAGS", "SEARCH_FLAGS", "Flag", "Kind"]

USUAL: Final = TrainingSpec(global_batch=DEFAULT_GLOBAL_BATCH, seq_len=DEFAULT_SEQ_LEN)


class Kind(StrEnum):
    """What follows a flag."""

    TEXT = "text"
    NUMBER = "number"
    COUNT = "count"  # at least 1
    ZERO = "zero"  # 0 to 3
    PART = "part"  # between 0 and 1
    SWITCH = "switch"  # nothing
    EITHER = "either"  # nothing; --no-... is its opposite
    MANY = "many"  # a text, and the flag may stand several times


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: ``name`` as in ``--name``."""

    name: str
    help: str
    usual: object = None
    kind: Kind = Kind.TEXT
    metavar: str | None = None


def _words(choices: Iterable[StrEnum]) -> str:
    return "|".join(choice.value for choice in choices)


FIT: Final = Flag("min-fit", "Least probability that the layout fits.", MIN_FIT, Kind.PART)

INPUT_FLAGS: Final = (
    Flag("model", "Catalogue name, config.json or its folder, or model YAML."),
    Flag("cluster", "8xh100, 16x8xh100-80g, or cluster YAML."),
    Flag("training", "Training YAML; the flags below win over it.", metavar="FILE"),
    Flag("global-batch", "Sequences a step.", USUAL.global_batch, Kind.NUMBER),
    Flag("seq-len", "Tokens a sequence.", USUAL.seq_len, Kind.NUMBER),
    Flag("precision", "Of the GEMMs.", USUAL.precision.value, metavar=_words(Precision)),
    Flag("optimizer", "And its states.", USUAL.optimizer.value, metavar=_words(Optimizer)),
    Flag("grad-dtype", "Of gradients.", USUAL.grad_dtype.value, metavar=_words(GradDtype)),
    Flag("attention", "Its kernel.", USUAL.attention.value, metavar=_words(AttentionKernel)),
    Flag("fused-kernels", "Norms, activations, RoPE.", "fused", Kind.EITHER),
    Flag("stack", "Software stack whose calibration is used.", "the datasheet's"),
    Flag("calibration", "Calibration YAML of your own.", metavar="FILE"),
    Flag("profile", "Measured layers and links; repeatable.", kind=Kind.MANY, metavar="FILE"),
)
SEARCH_FLAGS: Final = (
    Flag("micro-batch", "Sequences a pass.", "the search chooses", Kind.NUMBER),
    Flag("launcher", f"One of {', '.join(LAUNCHERS)}.", "any", metavar="NAME"),
    Flag("fix", "tp=8 or zero=1,2; repeatable.", None, Kind.MANY, "NAME=VALUE,..."),
    Flag("max", "tp=8; repeatable.", None, Kind.MANY, "NAME=N"),
    Flag("exclude", "zero=3; repeatable.", None, Kind.MANY, "NAME=VALUE,..."),
    Flag("tp-across-nodes", "Let tensor parallelism leave a node.", kind=Kind.SWITCH),
    FIT,
)
LAYOUT_FLAGS: Final = (
    Flag("tp", "Tensor parallel degree.", 1, Kind.COUNT),
    Flag("cp", "Context parallel degree.", 1, Kind.COUNT),
    Flag(
        "cp-comm",
        f"{_words(ContextComm)}: how keys and values reach the ranks of cp.",
        "ring, gather with windows",
    ),
    Flag("ep", "Expert parallel degree.", 1, Kind.COUNT),
    Flag("expert-tp", "Tensor parallel degree of experts.", "tp", Kind.COUNT),
    Flag("pp", "Pipeline stages.", 1, Kind.COUNT),
    Flag("dp", "Data parallel degree.", "fills the cluster", Kind.COUNT),
    Flag("chunks", "Chunks a stage.", 1, Kind.COUNT),
    Flag("micro-batch", "Sequences a pass.", 1, Kind.COUNT),
    Flag(
        "schedule",
        "Pipeline schedule, a name that parplan schedule draws.",
        "1f1b, interleaved with chunks",
    ),
    Flag("zero", "ZeRO stage.", 0, Kind.ZERO),
    Flag("shard-group", "Ranks over which states are sharded.", "dp x cp", Kind.COUNT),
    Flag("sequence-parallel", "Beside tp.", "where it divides", Kind.EITHER),
    Flag("recompute", "none, selective[:module+module], full or full:N.", "none"),
    Flag("rank-order", "Axes of the mesh, fastest first.", "tp-cp-ep-dp-pp"),
    Flag("stage-layers", "Blocks of each stage, as 9,10,10,11.", "even"),
    FIT,
)
