"""Schedules whose use is narrow: the search tries them only where they may pay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from costmodel.schedules.zeropp import moves_less_than_tp

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NARROW", "Pipeline"]

LEAST_BUBBLE: Final = 0.02


class Pipeline(NamedTuple):
    """What decides: degrees, micro-batches of a step, and sizes of a micro-batch."""

    tp: int
    pp: int
    microbatches: int
    micro_batch: int
    seq_len: int
    hidden: int | None


def _bubble_matters(job: Pipeline) -> bool:
    """ZB-H1 takes up to two thirds of 1F1B's bubble away, so that must be 2 % or more."""
    return job.pp - 1 >= LEAST_BUBBLE * (job.microbatches + job.pp - 1)


def _one_unit(job: Pipeline) -> bool:
    """BitPipe: as many micro-batches as stages, so that both directions are filled once."""
    return job.microbatches == job.pp


def _gathers_little(job: Pipeline) -> bool:
    """ZeroPP: in place of tensor parallelism, for few micro-batches, where gathers move less."""
    return (
        job.tp == 1
        and job.pp <= job.microbatches <= 2 * job.pp
        and moves_less_than_tp(
            unit=job.pp,
            seq_len=job.seq_len,
            micro_batch=job.micro_batch,
            hidden=job.hidden or 0,
        )
    )


NARROW: Final[dict[str, Callable[[Pipeline], bool]]] = {
    "zb-h1": _bubble_matters,
    "bitpipe": _one_unit,
    "zeropp": _gathers_little,
}
