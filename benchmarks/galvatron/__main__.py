"""Solve recorded cases of Hetu-Galvatron and print our answer beside its own.

    python -m benchmarks.galvatron CASE.json... [--profiles DIR] [--format text|json]

CASE.json is a search problem. The profiles that it names are looked for in DIR (by default the
folder ``profiles`` beside the case's own), the peer's answer in ``results`` beside it; where there
is none, its figures are null. CPU seconds are those of the search: fits, space and solving, without
reading files, as in the peer's own record. Exit code 1: slower than the peer in some case.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.galvatron.cases import Case, read_case, read_profile, read_result
from benchmarks.galvatron.figures import Figures, figures_of
from benchmarks.galvatron.plan import cost, plan_of, recorded_cost
from benchmarks.galvatron.solve import Answer, solve
from benchmarks.galvatron.spaces import families
from profiles.errors import ParplanError

SLOWER = 1e-6  # relative: the peer's own fits are not exact to more


def side_by_side(path: Path, profiles: Path) -> dict[str, Any]:
    """One case: our plan, the peer's, and both under the same rules."""
    case = read_case(path)
    profile = read_profile(case, profiles)
    started = time.process_time()
    figures = figures_of(case, profile)
    answer = solve(families(case, figures), case.budget_mib)
    cpu_s = time.process_time() - started
    ours = _ours(case, figures, answer)
    peer = _peer(case, figures, read_result(path.parent.parent / "results" / path.name))
    return {
        "case": case.name,
        "found": answer.chosen is not None,
        "ours_iteration_s": ours["iteration_s"],
        "peer_iteration_s": peer["iteration_s"],
        "ours_cpu_s": round(cpu_s, 6),
        "peer_cpu_s": peer["cpu_s"],
        "ours_under_peer_costs_s": ours["under_peer_costs_s"],
        "peer_under_peer_costs_s": peer["under_peer_costs_s"],
        "proven": answer.proven,
        "proof": proof(case, answer),
        "ours_plan": ours["plan"],
        "peer_plan": peer["plan"],
        "ours_memory_mib": ours["memory_mib"],
        "ours_config": ours["config"],
        "notes": notes(case, figures, answer),
    }


def _ours(case: Case, figures: Figures, answer: Answer) -> dict[str, Any]:
    """Our plan, as the search found it and as it is costed again."""
    if answer.chosen is None:
        return dict.fromkeys(
            ("iteration_s", "under_peer_costs_s", "plan", "memory_mib", "config"), None
        )
    plan = plan_of(answer.chosen)
    again = cost(case, figures, plan)
    return {
        "iteration_s": answer.chosen.iteration_ms / 1e3,
        "under_peer_costs_s": again.iteration_s,
        "plan": plan.text(),
        "memory_mib": list(again.memory_mib),
        "config": plan.config(case),
    }


def _peer(case: Case, figures: Figures, result: dict[str, Any] | None) -> dict[str, Any]:
    """What is recorded of the peer, and its plan as it is costed here."""
    told = dict.fromkeys(("iteration_s", "cpu_s", "under_peer_costs_s", "plan"), None)
    if result is None:
        return told
    told |= {"iteration_s": result.get("iteration_time_s"), "cpu_s": result.get("search_cpu_s")}
    if result.get("best_task") is not None:
        plan, again = recorded_cost(case, figures, result["best_task"])
        told |= {"under_peer_costs_s": again.iteration_s, "plan": plan.text()}
    return told


def proof(case: Case, answer: Answer) -> str:
    """Why there is no better plan, or none at all."""
    space = f"{answer.num_families} families of plans"
    if answer.chosen is not None:
        if answer.proven:
            return f"optimal: all else in {space} is bounded by it"
        return f"no plan of {space} is faster than {answer.bound_ms / 1e3:.6g} s"
    if not case.chunk_counts:
        chunks = case.options["settle_chunk"]
        return f"no plan exists: {chunks} micro-batches do not divide {case.global_batch} samples"
    if answer.short_mib is None:
        return "no plan exists: no strategy is allowed, divides the GPUs and was measured"
    return (
        f"no plan exists: of {space} the one with the least need lacks {answer.short_mib:,} MiB of "
        f"{case.budget_mib:,.0f} MiB"
    )


def notes(case: Case, figures: Figures, answer: Answer) -> list[str]:
    """What of the case was left out, and where the rules price something else than asked for."""
    told = list(case.notes)
    if case.world > 1 and (case.world, True) not in figures.links.all_reduce:
        told.append(f"a group of {case.world} was not measured: it costs what its neighbours do")
    if answer.chosen is not None and case.engine == "main":
        samples = case.global_batch // answer.chosen.family.chunks
        told += [
            f"dp {dp} does not divide {samples} samples: the rest is not priced"
            for dp in sorted({each.dp for each in answer.chosen.strategies()})
            if samples % dp
        ]
    return told


def report(told: list[dict[str, Any]]) -> str:
    """Two lines a case, then the plans."""
    head = ("ours s", "peer s", "faster", "CPU s", "peer CPU", "ratio")
    lines = [f"{'case':44} " + " ".join(f"{each:>10}" for each in head)]
    for own in told:
        ours, peer = own["ours_iteration_s"], own["peer_iteration_s"]
        cells = [
            "none" if ours is None else f"{ours:.5f}",
            "none" if peer is None else f"{peer:.5f}",
            f"{max(0.0, 100 * (peer / ours - 1)):.3f} %" if ours and peer else "",
            f"{own['ours_cpu_s']:.3f}",
            "" if own["peer_cpu_s"] is None else f"{own['peer_cpu_s']:.2f}",
            f"{own['peer_cpu_s'] / own['ours_cpu_s']:.0f}" if own["peer_cpu_s"] else "",
        ]
        lines.append(f"{own['case']:44} " + " ".join(f"{each:>10}" for each in cells))
        lines += [f"    ours: {own['ours_plan']}"] if own["ours_plan"] else []
        lines += [f"    peer: {own['peer_plan']}"] if own["peer_plan"] else []
        lines += [f"    {own['proof']}", *(f"    note: {note}" for note in own["notes"])]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.galvatron", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cases", nargs="+", type=Path, metavar="CASE.json")
    parser.add_argument("--profiles", type=Path, metavar="DIR")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    asked = parser.parse_args(arguments)
    told, failed = [], False
    for path in asked.cases:
        folder = asked.profiles or path.parent.parent / "profiles"
        try:
            told.append(side_by_side(path, folder))
        except ParplanError as error:
            print(error, file=sys.stderr)
            failed = True
    print(json.dumps({"cases": told}, indent=2) if asked.format == "json" else report(told))
    if failed:
        return 2
    return int(any(slower(own) for own in told))


def slower(own: dict[str, Any]) -> bool:
    """Whether the peer's plan is faster under the same rules."""
    peer = own["peer_under_peer_costs_s"]
    return peer is not None and (
        not own["found"] or own["ours_under_peer_costs_s"] > peer * (1 + SLOWER)
    )


if __name__ == "__main__":
    sys.exit(main())
