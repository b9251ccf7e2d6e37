"""What people look at: answers as text and as plain data. Loaded when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from reports.accuracy import accuracy_answer, accuracy_report, calibration_report
    from reports.answers import (
        catalog_answer,
        estimate_answer,
        explain_answer,
        json_text,
        plan_answer,
        smallest_answer,
    )
    from reports.facts import facts_of
    from reports.run import run_report
    from reports.schedule import schedule_answer, schedule_report
    from reports.terminal import (
        discard_stdout,
        print_report,
        progress_on_stderr,
        until_interrupt,
    )
    from reports.text import (
        catalog_report,
        estimate_report,
        explain_report,
        facts_report,
        plan_report,
        smallest_report,
    )
    from reports.trace import trace_answer

__all__ = [
    "accuracy_answer",
    "accuracy_report",
    "calibration_report",
    "catalog_answer",
    "catalog_report",
    "discard_stdout",
    "estimate_answer",
    "estimate_report",
    "explain_answer",
    "explain_report",
    "facts_of",
    "facts_report",
    "json_text",
    "plan_answer",
    "plan_report",
    "print_report",
    "progress_on_stderr",
    "run_report",
    "schedule_answer",
    "schedule_report",
    "smallest_answer",
    "smallest_report",
    "trace_answer",
    "until_interrupt",
]

_MODULES: Final = {
    "accuracy_answer": "accuracy",
    "accuracy_report": "accuracy",
    "calibration_report": "accuracy",
    "catalog_answer": "answers",
    "discard_stdout": "terminal",
    "estimate_answer": "answers",
    "explain_answer": "answers",
    "facts_of": "facts",
    "json_text": "answers",
    "plan_answer": "answers",
    "print_report": "terminal",
    "progress_on_stderr": "terminal",
    "run_report": "run",
    "schedule_answer": "schedule",
    "schedule_report": "schedule",
    "smallest_answer": "answers",
    "trace_answer": "trace",
    "until_interrupt": "terminal",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"reports.{_MODULES.get(name, 'text')}"), name)
