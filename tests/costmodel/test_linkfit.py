"""Links from measured collectives: they are found again, and hold against published ones."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from published import RUNS

from costmodel.collectives import collective_seconds
from costmodel.linkfit import MeasuredCollective, fit_links
from costmodel.work import CollectiveKind
from profiles import load_calibration, load_cluster
from profiles.topology import Topology

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import collectives  # noqa: E402 - it lies beside the tests

OWN = load_calibration(None, load_cluster("8xh100"))[0].efficiencies
TREE = Topology(load_cluster("2x8xa100-80g"))
ONE_NODE = TREE.axis(((8, 1),), num_ranks=16)
TWO_NODES = TREE.axis(((16, 1),), num_ranks=16)
PUBLISHED = RUNS / "collectives.csv"


def measured(link, kind, *, gpu_link: float, nic: float, start_s: float):
    """Collectives of 1 MB to 1 GB as such links would give them."""
    real = replace(OWN, gpu_link=gpu_link, nic=nic)
    sizes = [2**power for power in range(20, 31, 2)]
    return [
        MeasuredCollective(
            kind=kind,
            size=size,
            link=link,
            seconds=start_s + collective_seconds(kind, size, link, real),
        )
        for size in sizes
    ]


def test_links_are_found_again_from_what_they_give():
    real = {"gpu_link": 0.6, "nic": 0.35, "start_s": 1e-4}
    several = [
        each
        for link in (ONE_NODE, TWO_NODES)
        for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
        for each in measured(link, kind, **real)
    ]
    found = fit_links(several, OWN)
    assert found.gpu_link == pytest.approx(0.6, rel=0.02)
    assert found.nic == pytest.approx(0.35, rel=0.02)
    assert found.start_s == pytest.approx(1e-4, rel=0.1)


def test_what_was_not_measured_stays_as_it_was():
    found = fit_links([], OWN)
    assert (found.gpu_link, found.nic, found.exchange) == (OWN.gpu_link, OWN.nic, 1.0)
    within = fit_links(
        measured(ONE_NODE, CollectiveKind.ALL_REDUCE, gpu_link=0.5, nic=0.1, start_s=1e-5), OWN
    )
    assert within.nic == OWN.nic


def test_one_wrong_measurement_does_not_steer():
    fine = measured(ONE_NODE, CollectiveKind.ALL_REDUCE, gpu_link=0.6, nic=0.5, start_s=2e-5)
    wrong = replace(fine[-1], seconds=10 * fine[-1].seconds)
    assert fit_links([*fine, wrong], OWN).gpu_link == pytest.approx(0.6, rel=0.05)


def test_links_that_no_group_has_are_no_faster_than_the_datasheet():
    swift = measured(ONE_NODE, CollectiveKind.ALL_GATHER, gpu_link=3.0, nic=0.5, start_s=1e-6)
    assert fit_links(swift, OWN).gpu_link == 1.0


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="collectives.csv is not beside this project")
def test_published_collectives_are_predicted_by_other_groups_of_their_device():
    found, _, left_out = collectives.measure(PUBLISHED)
    assert found["total"].n >= 990
    assert found["total"].median <= 0.12
    assert math.fabs(found["total"].bias) <= 0.02
    recorded = json.loads(collectives.RECORD.read_text(encoding="utf-8"))
    assert found["total"].median == pytest.approx(recorded["total"]["median"], abs=0.005)
    assert sum(left_out.values()) + found["total"].n == 1104
