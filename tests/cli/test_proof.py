"""plan --prove and --mix-degrees from the command line to the plan file and back."""

from __future__ import annotations

import json

import yaml

JOB = ("--model", "gpt2-xl", "--cluster", "8xa10g", "--global-batch", "64", "--seq-len", "1024")


def test_a_certificate_is_shown_and_kept_in_the_plan(parplan, tmp_path):
    path = tmp_path / "plan.yaml"
    ran = parplan("plan", *JOB, "--prove", "-o", str(path), "--format", "json")
    assert ran.exit_code == 0
    own = json.loads(ran.stdout)["search"]["certificate"]
    assert own["solver"] == "HiGHS"
    assert 0 <= own["gap"] < 2e-6
    kept = yaml.safe_load(path.read_text())["search"]["certificate"]
    assert kept["bound_s"] == float(f"{own['bound_s']:.6g}")
    explained = parplan("explain", str(path))
    assert "HiGHS finds no assignment of the best candidate" in " ".join(explained.stdout.split())


def test_a_mix_says_what_it_gains_over_equal_degrees(parplan, tmp_path):
    path = tmp_path / "plan.yaml"
    ran = parplan("plan", *JOB, "--fix", "pp=1", "--mix-degrees", "-o", str(path))
    assert ran.exit_code == 0
    assert "the mix is" in " ".join(ran.stdout.split())
    again = parplan("estimate", str(path), "--format", "json")
    step = yaml.safe_load(path.read_text())["estimate"]["step_s"]
    assert float(f"{json.loads(again.stdout)['step_s']:.6g}") == step


def test_a_launcher_that_cannot_mix_refuses_with_those_that_can(parplan):
    ran = parplan("plan", *JOB, "--mix-degrees", "--launcher", "megatron")
    assert ran.exit_code == 2
    assert ran.stderr.splitlines()[-1] == (
        "--mix-degrees: megatron gives all layers the same tp, dp and ZeRO stage; "
        "expected launcher any, native, galvatron"
    )
