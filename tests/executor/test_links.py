"""``parplan profile links`` on two processes, and what a session makes of samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from executor.profiler.device import processor
from executor.profiler.linkpoints import LinkPoint, link_points
from executor.profiler.linkrank import LinkRank
from executor.profiler.linksession import (
    USED,
    LinkSession,
    LinkTask,
    figures_of,
    measured_links,
    task_key,
    without_room,
)
from executor.profiler.timing import Figure
from profiles import load_cluster, yamlfile
from profiles.measured import Operation
from profiles.measuredfile import profile_of

ROOT = Path(__file__).parents[2]
LIMIT_S = 240
SMALL = ("--device", "cpu", "--nproc", 2, "--largest", "4K", "--rounds", 1)


def parplan(*arguments, cwd, more=""):
    path = os.pathsep.join(str(own) for own in (ROOT, more) if own)
    return subprocess.run(
        [sys.executable, "-m", "cli", *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def left_running(marker):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if str(marker).encode() in words:
            found.append(path.parent.name)
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    place = tmp_path_factory.mktemp("links")
    return parplan("profile", "links", *SMALL, "-o", "links.yaml", cwd=place), place


def test_every_operation_is_measured_on_every_size(measured):
    done, place = measured
    assert done.returncode == 0, done.stderr
    profile = profile_of(yamlfile.read(place / "links.yaml"))
    (facts,) = profile.clusters
    assert (facts.cluster, facts.device, facts.backend) == ("1x2xcpu", "cpu", "gloo")
    assert (facts.num_nodes, facts.gpus_per_node) == (1, 2)
    found = {(own.operation, own.num_bytes) for own in profile.collective_times}
    assert found == {(own, 2**n) for own in Operation for n in (10, 12)}
    assert all(0 < own.seconds < 1 for own in profile.collective_times)
    assert all(own.spread is not None for own in profile.collective_times)
    (overlap,) = profile.overlaps
    assert overlap.slowdown >= 1


def test_the_pieces_are_told_and_nothing_stays_behind(measured):
    done, place = measured
    assert "Links of 1x2xcpu, gloo" in done.stdout
    assert "beyond it GB/s" in done.stdout
    assert "beside compute" in done.stdout
    assert [path.name for path in place.iterdir()] == ["links.yaml"]
    assert not left_running(place)


def test_an_estimate_uses_them(measured):
    _, place = measured
    question = ("--model", "gpt2", "--cluster", "2xcpu", "--global-batch", 2, "--seq-len", 64,
                "--precision", "fp32", "--tp", 2, "--format", "json")  # fmt: skip
    steps = []
    for profiles in ((), ("--profile", "links.yaml")):
        done = parplan("estimate", *question, *profiles, cwd=place)
        assert done.returncode == 0, done.stderr
        steps.append(json.loads(done.stdout)["step_s"])
    assert steps[0] != steps[1]


def test_a_spent_budget_leaves_points_out_and_keeps_those_of_a_stopped_session(tmp_path):
    figure = {"seconds": {"alone": 0.125}, "spread": 0.0, "doubtful": False}
    header = {
        "links": "1x2xcpu",
        "device": ["cpu", processor(), str(torch.__version__)],
        "ranks": [1, 2, "gloo"],
    }
    lines = [
        json.dumps({"journal": header}, sort_keys=True),
        json.dumps(["0: all-reduce, 2 ranks, 4 KiB", {"figure": figure, "parameters": 0}]),
        '["0: all-reduce, 2 ra',  # the line during which it was killed
    ]
    (tmp_path / "links.yaml.journal").write_text("\n".join(lines))
    again = ("profile", "links", *SMALL, "--budget", "0.001s", "-o", "links.yaml")
    done = parplan(*again, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "points are left out" in done.stderr
    times = profile_of(yamlfile.read(tmp_path / "links.yaml")).collective_times
    assert {(own.num_bytes, own.seconds) for own in times} == {(4096, 0.125)}


PATCH = """
import os
if os.environ.get("RANK") == "1":
    import executor.profiler.linkcalls as calls
    def broken(*_): raise RuntimeError("this rank has lost its cable")
    calls.call_of = broken
"""


def test_a_rank_that_fails_ends_it_with_its_own_error(tmp_path):
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch" / "sitecustomize.py").write_text(PATCH)
    done = parplan(
        "profile", "links", *SMALL, "-o", "links.yaml", cwd=tmp_path, more=tmp_path / "patch"
    )
    assert done.returncode == 1
    assert "rank 1: RuntimeError: this rank has lost its cable" in done.stderr
    assert not (tmp_path / "links.yaml").exists()
    assert not left_running(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nproc", 1), "one rank has no links"),
        (("4xcpu", "--nproc", 3), "1 nodes x 3 ranks are not the 4 devices of 4xcpu"),
        (("2xcpuu",), "did you mean"),
        (("--largest", "1T"), "is no size"),
        (("--rdzv-endpoint", "nohost.invalid:1", "--nproc", 2), "ranks cannot meet at nohost"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_starts(tmp_path, arguments, message):
    done = parplan("profile", "links", "--device", "cpu", *arguments, "-o", "l.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


# ---- a session


def point(operation="all-reduce", size=1024, **how):
    how = {"group": 2, "stride": 1} | how
    return LinkPoint(operation=Operation(operation), num_bytes=size, **how)


def session(tmp_path, points, rounds=2, budget_s=None):
    return LinkSession(
        device="cpu", backend="gloo", points=tuple(points), rounds=rounds,
        budget_s=budget_s, out=tmp_path, journal_path=tmp_path / "journal", header={"links": "x"},
    )  # fmt: skip


def test_a_session_reaches_the_ranks_whole(tmp_path):
    own = session(tmp_path, link_points(load_cluster("2x2xcpu"), largest=2**20), budget_s=3.0)
    own.write(tmp_path / "session.json")
    assert LinkSession.read(tmp_path / "session.json") == own


def test_the_least_of_rounds_counts_and_half_of_there_and_back(tmp_path):
    own = session(tmp_path, [point("p2p")])
    journal = own.journal()
    for number, samples in enumerate(([4.0, 4.2, 4.1], [2.0, 2.1, 2.2])):
        task = LinkTask(own.points[0], number)
        journal.add(task_key(task), own.figure(task, {"alone": samples}))
    (figure,) = figures_of(own, own.journal()).values()
    assert figure.seconds == {"alone": 1.0}
    assert figure.doubtful  # twice as long in the other round


def test_of_collectives_in_use_the_median_sample_counts(tmp_path):
    own = session(tmp_path, [point()])
    journal = own.journal()
    for number, samples in enumerate(([4.0, 6.0, 5.0], [3.0, 3.0, 2.0])):
        task = LinkTask(own.points[0], number)
        journal.add(task_key(task), own.figure(task, {USED: samples}))
    (time,), _ = measured_links("2xcpu", figures_of(own, own.journal()))
    assert time.seconds == 3.0


def test_samples_that_differ_are_doubtful(tmp_path):
    own = session(tmp_path, [point()], rounds=1)
    task = own.tasks[0]
    assert own.figure(task, {"alone": [1.0, 2.0, 2.0]}).doubtful
    assert not own.figure(task, {"alone": [1.0, 1.1, 1.2]}).doubtful
    assert own.figure(task, {"alone": [1.0, 2.0, 2.0]}).spread == 1.0


def test_a_point_without_memory_is_noted(tmp_path):
    own = session(tmp_path, [point(size=2**40)], rounds=1)
    journal = own.journal()
    journal.add(task_key(own.tasks[0]), own.figure(own.tasks[0], None))
    assert figures_of(own, journal) == {}
    assert without_room(own, journal) == [own.points[0]]


@pytest.mark.parametrize(
    ("compute", "both", "slowdown"),
    [(2.0, 2.0, 1.0), (1.0, 1.0, 1.0), (1.0, 2.0, 2.0), (2.0, 2.5, 1.5), (1.0, 0.9, 1.0)],
)
def test_the_slow_down_is_what_overlapping_adds_to_the_shorter(compute, both, slowdown):
    figure = Figure({"alone": 1.0, "compute": compute, "both": both}, 0.0, doubtful=False)
    _, (own,) = measured_links("2xcpu", {point(overlap=True): figure})
    assert own.slowdown == slowdown


def test_what_would_not_end_in_time_is_left_out(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("executor.profiler.linkrank.time.monotonic", lambda: now[0])
    sizes = (2**20, 2**24, 2**10)
    own = session(tmp_path, [point(size=size) for size in sizes], rounds=1, budget_s=10.0)
    took = []
    for number in LinkRank.wanted(SimpleNamespace(session=own), own.journal()):
        took.append(own.points[number].num_bytes)
        now[0] += 1.0
    assert took == [2**20, 2**10]  # the large one would take 16 s


def test_what_the_journal_has_is_not_measured_again(tmp_path):
    own = session(tmp_path, [point(), point(size=4096)], rounds=1)
    own.journal().add(task_key(own.tasks[0]), own.figure(own.tasks[0], {"alone": [1.0] * 3}))
    again = own.journal()
    assert list(LinkRank.wanted(SimpleNamespace(session=own), again)) == [1]
