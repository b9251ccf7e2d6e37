"""What-if answers: one table and one chart."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from profiles.units import GIB
from reports.tables import plain_table
from reports.words import money, per_cent, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from planner.whatif import Outcome

__all__ = ["sweep_answer", "sweep_report"]

BAR: Final = 50  # characters of the longest
EIGHTHS: Final = "▏▎▍▌▋▊▉█"


def sweep_answer(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Every case with its changes and what it came to, or why there is no plan."""
    return [{key: part for key, part in asdict(each).items() if key != "key"} for each in outcomes]


def sweep_report(outcomes: Sequence[Outcome]) -> list[RenderableType]:
    """The table of all cases, the chart of their speed, and why some have no plan."""
    swept = _swept(outcomes)
    none = [each for each in outcomes if each.found is None]
    return [
        _table(outcomes, swept),
        *(f"no plan for {_case(each, swept)}: {each.reason}" for each in none),
        *_chart(outcomes, swept),
    ]


def _swept(outcomes: Sequence[Outcome]) -> list[str]:
    """The changes that are not the same in all cases."""
    names = outcomes[0].changes if outcomes else {}
    return [name for name in names if len({each.changes[name] for each in outcomes}) > 1]


def _case(outcome: Outcome, swept: Sequence[str]) -> str:
    return ", ".join(f"{name.split('.')[-1]} {outcome.changes[name]}" for name in swept) or "it"


def _table(outcomes: Sequence[Outcome], swept: Sequence[str]) -> Table:
    """One line a case. ``of first``: tokens/s/GPU against those of the first case."""
    same = {n: v for each in outcomes[:1] for n, v in each.changes.items() if n not in swept}
    table = plain_table(", ".join(f"{name} {value}" for name, value in same.items()) or None)
    for name in swept:
        table.add_column(name.split(".")[-1].replace("_", " "), overflow="fold")
    found = [each.found for each in outcomes if each.found]
    priced = any(own["price_per_step"] is not None for own in found)
    for name in ("GPUs", "step", "tokens/s", "per GPU", "of first", "MFU", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("a step", "per Mtoken") if priced else ():
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for each in outcomes:
        row = [each.changes[name] for name in swept]
        if each.found is not None:
            row += _cells(each.found, found[0], priced=priced)
        table.add_row(*row)
    return table


def _cells(own: dict[str, Any], first: dict[str, Any], *, priced: bool) -> list[str]:
    prices = [own["price_per_step"], own["price_per_million_tokens"]] if priced else []
    return [
        f"{own['gpus']:,}",
        seconds(own["step_s"]),
        f"{own['tokens_per_s']:,.0f}",
        f"{own['tokens_per_s_per_gpu']:,.0f}",
        per_cent(own["tokens_per_s_per_gpu"] / first["tokens_per_s_per_gpu"]),
        per_cent(own["mfu"]),
        f"{own['peak_mem_bytes'] / GIB:.1f}",
        *("" if price is None else money(price) for price in prices),
        _layout(own["layout"]),
    ]


def _layout(own: dict[str, Any]) -> str:
    """The choices that differ most from plan to plan, in short."""
    degrees = [f"{name}{own[name]}" for name in ("tp", "cp", "ep", "dp", "pp") if own[name] != 1]
    chunks = f" x{own['chunks']}" if own["chunks"] > 1 else ""
    schedule = [own["schedule"] + chunks] if own["pp"] > 1 else []
    return " ".join([*degrees, f"mb{own['micro_batch']}", f"zero{own['zero']}", *schedule])


def _chart(outcomes: Sequence[Outcome], swept: Sequence[str]) -> list[str]:
    """Tokens a second as bars."""
    drawn = [(_case(each, swept), each.found["tokens_per_s"]) for each in outcomes if each.found]
    if not drawn:
        return []
    width = max(len(name) for name, _ in drawn)
    most = max(value for _, value in drawn)
    lines = [f"{name:<{width}}  {_bar(value / most)} {value:,.0f}" for name, value in drawn]
    return ["Tokens a second", *lines]


def _bar(part: float) -> str:
    """A bar as long as ``part`` of the longest, in eighths of a character."""
    eighths = max(1, round(BAR * part * 8))
    whole, rest = divmod(eighths, 8)
    return EIGHTHS[-1] * whole + (EIGHTHS[rest - 1] if rest else "")
