"""Output of nccl-tests: as several versions print it, and as files in the wild are broken."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from profiles import yamlfile
from profiles.devicename import catalogue_device
from profiles.errors import InputError
from profiles.measured import Operation
from profiles.measuredfile import profile_of
from profiles.nccltests import read_nccl_tests
from profiles.profileimport import import_profile

ROOT = Path(__file__).parents[2]
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"

# Layout of lines as src/util.cu of nccl-tests prints them; figures of 2 x 8 H100: a public log of
# an A3 cluster on Google Cloud (lessizzmore/create-a3mega-ztan-fork).
SETTINGS = (
    "# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 "
    "agg iters: 1 validation: 1 graph: 0"
)
COLUMNS = """\
#   out-of-place   in-place
#   size   count   type   redop   root   time   algbw   busbw #wrong   time   algbw   busbw #wrong
#   (B)   (elements)   (us)  (GB/s)  (GB/s)   (us)  (GB/s)  (GB/s)
"""
ROWS = """\
        1024   256   float   sum   -1   147.1   0.01   0.01   0   123.1   0.01   0.02   0
     1048576   262144   float   sum   -1   203.2   5.16   9.68   0   207.2   5.06   9.49   0
  8589934592   2147483648   float   sum   -1   47535  180.71  338.82   0   47743  179.92  337.35   0
"""
END = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 70.742 \n#\n"


def ranks(nodes=2, per_node=8, device=H100, group=lambda _: 0, *, old=False):
    lines = []
    for rank in range(nodes * per_node):
        where = f"host-{rank // per_node} device  {rank % per_node}"
        middle = "" if old else f"Group {group(rank):2} "
        bus = "0x00" if old else "0000:04:00"
        lines.append(f"#  Rank {rank:2} {middle}Pid   {6899 + rank} on {where} [{bus}] {device}")
    return "\n".join(lines) + "\n#\n"


def output(rows=ROWS, *, columns=COLUMNS, end=END, head="", **how):
    return f"{head}{SETTINGS}\n#\n# Using devices\n{ranks(**how)}{columns}{rows}{end}"


def read(tmp_path, text, name="all_reduce_perf.txt"):
    path = tmp_path / name
    path.write_text(text)
    return read_nccl_tests([path], "p", "s")


def problems(tmp_path, text, name="all_reduce_perf.txt"):
    with pytest.raises(InputError) as caught:
        read(tmp_path, text, name)
    return [str(own).removeprefix(str(tmp_path) + "/") for own in caught.value.problems]


def test_rows_become_times_of_a_group_over_all_ranks(tmp_path):
    profile, notes = read(tmp_path, output())
    assert notes == []
    (facts,) = profile.clusters
    assert (facts.cluster, facts.device) == ("2x8xh100-80g", "h100-80g")
    assert (facts.num_nodes, facts.gpus_per_node, facts.hardware) == (2, 8, H100)
    first, _, last = profile.collective_times
    assert {own.operation for own in profile.collective_times} == {Operation.ALL_REDUCE}
    assert (first.group, first.stride, first.num_bytes) == (16, 1, 1024)
    assert first.seconds == pytest.approx(123.1e-6)  # the lesser: in place
    assert first.spread == pytest.approx(0.19)
    assert last.num_bytes == 8589934592
    assert last.seconds == pytest.approx(0.047535)


def test_the_bus_bandwidth_that_the_tool_prints_is_that_of_its_times(tmp_path):
    profile, _ = read(tmp_path, output())
    last = profile.collective_times[-1]
    bus = 2 * (last.group - 1) / last.group * last.num_bytes / last.seconds
    assert bus / 1e9 == pytest.approx(338.82, rel=1e-3)


@pytest.mark.parametrize(
    ("program", "operation"),
    [
        ("all_gather", Operation.ALL_GATHER),
        ("reduce_scatter", Operation.REDUCE_SCATTER),
        ("alltoall", Operation.ALL_TO_ALL),
        ("sendrecv", Operation.P2P),
    ],
)
def test_the_operation_is_told_by_the_file_or_by_its_name(tmp_path, program, operation):
    new = f"# nccl-tests version 2.17.6\n# Collective test starting: {program}_perf\n"
    for text, name in (
        (output(), f"{program}.log"),
        (output(head=new), "log.txt"),
        (output(head=f"$ mpirun -np 16 ./build/{program}_perf -b 8 -e 8G -f 2\n"), "log.txt"),
    ):
        profile, _ = read(tmp_path, text, name)
        assert {own.operation for own in profile.collective_times} == {operation}


def test_without_a_name_the_columns_tell_an_all_reduce(tmp_path):
    profile, _ = read(tmp_path, output(), "log.txt")
    assert profile.collective_times[0].operation is Operation.ALL_REDUCE


def test_a_name_that_nothing_tells_is_asked_for(tmp_path):
    gathered = ROWS.replace("  sum ", " none ")
    (told,) = problems(tmp_path, output(gathered), "log.txt")
    assert re.match(r"log.txt:\d+:1: does not say which operation ran; expected", told)
    assert "all_gather.txt" in told


def test_an_operation_that_training_does_not_use_is_refused(tmp_path):
    (told,) = problems(tmp_path, output(), "broadcast_perf.txt")
    assert "broadcast is no operation of training" in told


def test_several_runs_of_a_file_and_several_files_make_one_profile(tmp_path):
    head = "# Collective test starting: {}_perf\n"
    text = output(head=head.format("all_reduce")) + output(head=head.format("all_gather"))
    path = tmp_path / "both.txt"
    path.write_text(text)
    other = tmp_path / "alltoall.txt"
    other.write_text(output(nodes=1))
    profile, _ = read_nccl_tests([path, other], "p", "s")
    assert len(profile.collective_times) == 9
    assert [own.num_nodes for own in profile.clusters] == [2, 1]


def test_split_communicators_are_strided_groups(tmp_path):
    profile, _ = read(tmp_path, output(group=lambda rank: rank % 8))
    assert {(own.group, own.stride) for own in profile.collective_times} == {(2, 8)}


def test_versions_without_groups_and_roots_and_with_more_columns_are_read(tmp_path):
    old = """\
#                                                       out-of-place                       in-place
#   size   count   type   redop   time   algbw   busbw  error   time   algbw   busbw  error
#   (B)   (elements)   (us)  (GB/s)  (GB/s)   (us)  (GB/s)  (GB/s)
"""
    row = "  1048576  262144  float  sum  203.2  5.16  9.68  1e-06  207.2  5.06  9.49  1e-06\n"
    profile, _ = read(tmp_path, output(row, columns=old, nodes=1, device=A100, old=True))
    assert profile.clusters[0].device == "a100-40g"
    assert profile.collective_times[0].seconds == pytest.approx(203.2e-6)
    stamped = COLUMNS.replace(" #wrong\n", " #wrong            timestamp\n", 1)
    profile, _ = read(
        tmp_path, output(ROWS.replace(" 0\n", " 0  2026-07-09 16:03:21\n"), columns=stamped)
    )
    assert len(profile.collective_times) == 3


def test_lines_whose_marks_were_lost_are_read(tmp_path):
    text = "\n".join(line.removeprefix("#") for line in output().splitlines())
    profile, _ = read(tmp_path, text)
    assert len(profile.collective_times) == 3


def test_wrong_results_and_times_that_are_no_numbers_are_left_out_with_a_note(tmp_path):
    rows = [line.split() for line in ROWS.splitlines()]
    rows[0][8] = rows[0][12] = "12"
    rows[1][5], rows[1][9] = "nan", "0"
    text = "".join(" ".join(row) + "\n" for row in rows)
    profile, notes = read(tmp_path, output(text))
    assert [own.num_bytes for own in profile.collective_times] == [8589934592]
    assert len(notes) == 2
    assert all("left out" in note for note in notes)


def test_results_that_nobody_checked_count(tmp_path):
    profile, _ = read(tmp_path, output(re.sub(r" 0(?= |$)", " N/A", ROWS, flags=re.MULTILINE)))
    assert len(profile.collective_times) == 3


def test_a_file_that_ends_early_gives_what_is_whole(tmp_path):
    text = output(end="")[:-60]
    profile, notes = read(tmp_path, text)
    assert len(profile.collective_times) == 2
    assert any("ends early" in note for note in notes)
    assert any("cut row" in note for note in notes)


def test_a_short_row_in_the_middle_is_an_error_with_its_place(tmp_path):
    first, second, last = ROWS.splitlines()
    short = " ".join(second.split()[:6])
    text = output(f"{first}\n{short}\n{last}\n")
    line = text.splitlines().index(short) + 1
    (told,) = problems(tmp_path, text)
    assert told == f"all_reduce_perf.txt:{line}:1: 6 columns; expected 13, as in the header"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "all_reduce_perf.txt:1:1: no output of nccl-tests is in it"),
        ("hello\n" * 5, "all_reduce_perf.txt:1:1: no output of nccl-tests is in it"),
        (SETTINGS + "\n" + COLUMNS + ROWS, "0 ranks are listed above the columns"),
        (output(nodes=1, per_node=1), "1 ranks are listed"),
        (output(rows=""), "no row of this run has a time"),
        (output(device="NVIDIA GeForce GT 710"), "the catalogue has no device like"),
        (output(group=lambda rank: (0, 0, 1, 0)[rank % 4]), "groups of ranks"),
        (
            output().replace("host-1 device  7", "host-2 device  7"),
            "3 hosts with [1, 7, 8] ranks",
        ),
    ],
)
def test_bad_files_are_told_with_their_place(tmp_path, text, message):
    (told,) = problems(tmp_path, text)
    assert message in told
    assert re.match(r"all_reduce_perf.txt:\d+:1: ", told)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_nccl_tests([tmp_path / "none.txt"], "p", "s")


def test_what_is_imported_is_a_profile_that_reads_back(tmp_path):
    path = tmp_path / "all_reduce_perf.txt"
    path.write_text(output())
    text, _ = import_profile("nccl-tests", [path])
    again = profile_of(yamlfile.parse(text, "file"))
    direct, _ = read_nccl_tests([path], "p", "s")
    assert again.clusters == direct.clusters
    for ours, theirs in zip(again.collective_times, direct.collective_times, strict=True):
        assert ours.num_bytes == theirs.num_bytes
        assert ours.seconds == pytest.approx(theirs.seconds)


def test_the_command_imports(tmp_path):
    path = tmp_path / "all_reduce_perf.txt"
    path.write_text(output(end=""))
    done = subprocess.run(
        [sys.executable, "-m", "cli", "profile", "import", "--from", "nccl-tests", path],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "collective_times:" in done.stdout
    assert "ends early" in done.stderr


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        (H100, "h100-80g"),
        (A100, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("NVIDIA H200", "h200-141g"),
        ("NVIDIA H100 NVL", "h100-94g-nvl"),
        ("Tesla V100-SXM2-16GB", "v100-16g"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA B200", "b200-180g"),
        ("Tesla V100", None),  # of 16 or of 32 GB
        ("NVIDIA GeForce GT 710", None),
    ],
)
def test_devices_are_known_by_what_they_call_themselves(hardware, name):
    assert catalogue_device(hardware) == name
