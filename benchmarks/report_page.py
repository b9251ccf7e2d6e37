"""CPU seconds and size of a report page: a pipeline of 64 stages, 1,000 simulated candidates.

``python -m benchmarks.report_page``; the limits are 8 CPU seconds and 8 MB.
"""

from __future__ import annotations

import time
from dataclasses import replace

from planner import ManualLayout, Plan, Planned, layout_from_degrees, load_inputs, plan_of
from planner.plan import SearchFacts
from planner.space import Restrictions
from reports import plan_answer, plan_page

STAGES, CANDIDATES = 64, 1_000
MODEL = "llama3.1-405b"  # 126 blocks, so that every stage has two, embedding and head apart


def planned() -> Planned:
    """A plan of 64 stages with runners-up, as a search would hand it on."""
    inputs = load_inputs(MODEL, "128x8xh100-80g", overrides={"global_batch": 2048, "seq_len": 8192})
    cut = ",".join(["1", *["2"] * (STAGES - 2), "1"])
    degrees = [(4, 4, STAGES, cut), (2, 8, STAGES, cut), (8, 2, STAGES, cut), (8, 8, 16, None)]
    plans = []
    for tp, dp, pp, layers in degrees:
        manual = ManualLayout(tp=tp, dp=dp, pp=pp, zero=1, recompute="full", stage_layers=layers)
        plans.append(plan_of(inputs, layout_from_degrees(inputs, manual)))
    best, *others = sorted(plans, key=lambda plan: plan.estimate.step_s)
    facts = SearchFacts(
        restrictions=Restrictions(), candidates=CANDIDATES, pruned={}, refused={}, bound_s=0.0,
        gap=1.0, proven=False,
    )  # fmt: skip
    tried = tuple(_other(best, number) for number in range(CANDIDATES))
    return Planned(plan=replace(best, search=facts), runners_up=tuple(others), tried=tried)


def _other(plan: Plan, number: int) -> Plan:
    """The plan with another step and another peak."""
    own, part = plan.estimate, number / CANDIDATES
    step_s, peak = own.step_s * (1 + part), int(own.peak_mem_bytes * (1 - part))
    return replace(plan, estimate=replace(own, step_s=step_s, peak_mem_bytes=peak))


def main() -> None:
    """Print the two figures."""
    found = planned()
    started_s = time.process_time()
    page = plan_page(plan_answer(found, cpu_s=0.0), (found.plan, *found.runners_up))
    cpu_s = time.process_time() - started_s
    print(f"{cpu_s:.2f} CPU s (at most 8), {len(page.encode()) / 1e6:.2f} MB (at most 8)")


if __name__ == "__main__":
    main()
