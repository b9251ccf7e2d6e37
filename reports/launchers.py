"""Which rules of a launcher do not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["check_report"]


def check_report(answer: dict[str, Any]) -> list[RenderableType]:
    """The verdict on a launcher's arguments, then each finding with what is legal."""
    findings = answer["findings"]
    failing = sum(finding["kind"] == "fails" for finding in findings)
    verdict = "would fail" if failing else "would run"
    if not findings:
        verdict = "no rule is broken"
    title = f"{verdict} on {answer['num_gpus']} GPUs: {answer['rules']} rules, {failing} fail"
    lines: list[RenderableType] = [Text(f"{title}, {len(findings) - failing} silent traps")]
    for finding in findings:
        cure = f"; legal: {finding['legal']}" if finding["legal"] else ""
        lines.append(Text(f"{finding['where']}: {finding['kind']}: {finding['message']}{cure}"))
        lines.append(Text(f"    {finding['rule']}, {finding['source']}"))
    lines += [Text(f"unknown: {each}") for each in answer["unknown"]]
    return [*lines, *(Text(f"note: {each}") for each in answer["notes"])]
