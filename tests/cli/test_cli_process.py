from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from clijobs import ROOT, SMALL

HEAVY = ("torch", "pulp", "networkx", "numpy", "pydantic", "rich", "yaml")

# Ctrl-C as soon as the search has a plan, or at once.
INTERRUPTED = """
import os, signal, sys
import planner.planning as planning
from cli import main
search = planning.search
def interrupted(*inputs, on_progress=None, **how):
    def tell(visited, best, bound):
        if best is not None:
            os.kill(os.getpid(), signal.SIGINT)
    if os.environ["WHEN"] == "at once":
        os.kill(os.getpid(), signal.SIGINT)
    return search(*inputs, on_progress=tell, **how)
planning.search = interrupted
main(sys.argv[1:])
"""


def test_help_imports_nothing_heavy(process):
    script = (
        "import sys, cli\n"
        "try: cli.main(['plan', '--help'])\n"
        f"except SystemExit: print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = process("-c", script)
    assert result.stdout.splitlines()[-1] == "[]"


def cpu_s(script):
    """CPU seconds of a process, which do not depend on what else runs here."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_takes_at_most_three_times_the_import_of_click():
    pairs = [
        (cpu_s("from cli import main; main(['--help'])"), cpu_s("import click")) for _ in range(7)
    ]
    assert min(ours for ours, _ in pairs) < 3 * min(clicks for _, clicks in pairs)


def test_the_answer_is_on_stdout_and_the_talk_on_stderr(process):
    result = process("-m", "cli", "plan", *SMALL)
    assert result.returncode == 0
    assert result.stdout.splitlines()[0].startswith("tp ")
    assert "note:" in result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    assert max(map(len, result.stdout.splitlines()[2:30])) <= 120


def test_no_is_one_and_a_wrong_question_is_two(process):
    flags = ("--model", "llama3-70b", "--cluster", "1xh100")
    assert process("-m", "cli", "estimate", *flags).returncode == 1
    assert process("-m", "cli", "estimate", *flags, "--tp", "3").returncode == 2
    assert process("-m", "cli", "estimate", "--tp", "many").returncode == 2


def test_an_interrupted_search_gives_the_best_so_far_with_its_gap(process, tmp_path):
    path = tmp_path / "plan.yaml"
    arguments = ("plan", *SMALL, "-o", str(path))
    result = process("-c", INTERRUPTED, *arguments, env={"WHEN": "with a plan"})
    assert result.returncode == 130
    assert result.stdout.startswith("tp ")
    assert "interrupted: the best so far, gap " in result.stderr
    assert "complete: false" in path.read_text()
    assert process("-m", "cli", "estimate", str(path)).returncode == 0


def test_a_time_limit_gives_a_plan_with_its_gap_or_says_that_there_was_no_time(process):
    result = process("-m", "cli", "plan", *SMALL, "--time-limit", "1e-6")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == "no layout that fits was found in 1e-06 s"
    assert process("-m", "cli", "plan", *SMALL, "--time-limit", "0").returncode == 2
    assert process("-m", "cli", "plan", *SMALL, "--gap", "1.5").returncode == 2


def test_a_search_interrupted_too_early_says_so_and_writes_nothing(process, tmp_path):
    path = tmp_path / "plan.yaml"
    arguments = ("plan", *SMALL, "-o", str(path))
    result = process("-c", INTERRUPTED, *arguments, env={"WHEN": "at once"})
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr.splitlines()[-1].startswith("interrupted before a layout that fits")
    assert not path.exists()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_reader_that_goes_away_is_no_error(form, tmp_path):
    path = tmp_path / "stderr"
    with path.open("w") as stderr:
        writer = subprocess.Popen(
            [sys.executable, "-m", "cli", "catalog", "models", "--format", form],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        writer.stdout.close()
        assert writer.wait() == 0
    assert path.read_text() == ""


def test_colour_is_obeyed_to_be_off(process):
    result = process("-m", "cli", "catalog", "devices", env={"NO_COLOR": "1", "FORCE_COLOR": "1"})
    assert "\x1b[3" not in result.stdout


def test_a_plan_does_not_depend_on_the_folder_it_is_made_in(process, tmp_path):
    texts = [
        process("-m", "cli", "plan", *SMALL, "-o", "-", cwd=folder).stdout
        for folder in (ROOT, tmp_path)
    ]
    assert texts[0] == texts[1] != ""
