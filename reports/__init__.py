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
    from reports.choices import choices_answer, choices_report
    from reports.comparison import comparison_answer, comparison_report
    from reports.dryrun import dry_run_report
    from reports.facts import facts_of
    from reports.html import comparison_page, plan_page, require_pages
    from reports.launchers import check_report
    from reports.links import links_report
    from reports.outlook import outlook_report
    from reports.run import run_report
    from reports.schedule import schedule_answer, schedule_report
    from reports.sweep import sweep_answer, sweep_report
    from reports.terminal import print_report
    from reports.text import (
        catalog_report,
        estimate_report,
        explain_report,
        facts_report,
        plan_report,
        smallest_report,
    )
    from reports.trace import trace_answer
    from reports.underway import (
        discard_stdout,
        profile_progress,
        progress_on_stderr,
        sweep_progress,
        until_interrupt,
    )
    from reports.words import executed_words

__all__ = [
    "accuracy_answer",
    "accuracy_report",
    "calibration_report",
    "catalog_answer",
    "catalog_report",
    "check_report",
    "choices_answer",
    "choices_report",
    "comparison_answer",
    "comparison_page",
    "comparison_report",
    "discard_stdout",
    "dry_run_report",
    "estimate_answer",
    "estimate_report",
    "executed_words",
    "explain_answer",
    "explain_report",
    "facts_of",
    "facts_report",
    "json_text",
    "links_report",
    "outlook_report",
    "plan_answer",
    "plan_page",
    "plan_report",
    "print_report",
    "profile_progress",
    "progress_on_stderr",
    "require_pages",
    "run_report",
    "schedule_answer",
    "schedule_report",
    "smallest_answer",
    "smallest_report",
    "sweep_answer",
    "sweep_progress",
    "sweep_report",
    "trace_answer",
    "until_interrupt",
]

_MODULES: Final = {
    "accuracy_answer": "accuracy",
    "accuracy_report": "accuracy",
    "calibration_report": "accuracy",
    "catalog_answer": "answers",
    "check_report": "launchers",
    "choices_answer": "choices",
    "choices_report": "choices",
    "comparison_answer": "comparison",
    "comparison_page": "html",
    "comparison_report": "comparison",
    "discard_stdout": "underway",
    "estimate_answer": "answers",
    "executed_words": "words",
    "explain_answer": "answers",
    "facts_of": "facts",
    "json_text": "answers",
    "plan_answer": "answers",
    "plan_page": "html",
    "print_report": "terminal",
    "require_pages": "html",
    "links_report": "links",
    "outlook_report": "outlook",
    "profile_progress": "underway",
    "progress_on_stderr": "underway",
    "dry_run_report": "dryrun",
    "run_report": "run",
    "schedule_answer": "schedule",
    "schedule_report": "schedule",
    "smallest_answer": "answers",
    "sweep_answer": "sweep",
    "sweep_progress": "underway",
    "sweep_report": "sweep",
    "trace_answer": "trace",
    "until_interrupt": "underway",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"reports.{_MODULES.get(name, 'text')}"), name)
