"""Pipeline schedules as order lists: for each device, the passes it runs, one after another.

A new schedule is one ``Schedule`` in a short file and one entry of ``SCHEDULES``.
"""

from __future__ import annotations

from costmodel.schedules.core import (
    BACKWARD,
    FORWARD,
    GATHER,
    INPUT,
    LETTERS,
    PASSES,
    REDUCE,
    WEIGHT,
    Action,
    Order,
    Path,
    Place,
    Schedule,
    Shape,
)
from costmodel.schedules.flush import ASYNC, GPIPE, ONE_F_ONE_B, TWO_BP, TWO_BP_1F1B
from costmodel.schedules.interleaved import INTERLEAVED, INTERLEAVED_ZB
from costmodel.schedules.twoway import BITPIPE, CHIMERA
from costmodel.schedules.vshaped import DUALPIPE_V, V_HALF, V_MIN, ZBV
from costmodel.schedules.zerobubble import ZB_H1, ZB_H2
from costmodel.schedules.zeropp import ZEROPP

__all__ = [
    "BACKWARD",
    "FORWARD",
    "GATHER",
    "INPUT",
    "LETTERS",
    "PASSES",
    "REDUCE",
    "SCHEDULES",
    "WEIGHT",
    "Action",
    "Order",
    "Path",
    "Place",
    "Schedule",
    "Shape",
]

SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        GPIPE,
        ONE_F_ONE_B,
        INTERLEAVED,
        INTERLEAVED_ZB,
        ZB_H1,
        ZB_H2,
        ZBV,
        V_HALF,
        V_MIN,
        DUALPIPE_V,
        ZEROPP,
        BITPIPE,
        CHIMERA,
        TWO_BP,
        TWO_BP_1F1B,
        ASYNC,
    )
}
