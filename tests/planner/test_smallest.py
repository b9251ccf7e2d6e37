"""How many GPUs a model needs, of a device, a node, a shorthand or a cluster file."""

from __future__ import annotations

import json

import pytest

CLUSTER = """\
schema_version: 1
kind: cluster
name: lab
nodes:
  - {node: dgx-a100-40g, count: 2}
"""


@pytest.fixture
def smallest(parplan):
    def ask(cluster, model="llama3-8b", *more):
        job = f"plan --model {model} --cluster {cluster} --global-batch 64 --smallest --format json"
        return parplan(*job.split(), *more)

    return ask


@pytest.mark.parametrize(
    ("cluster", "named"),
    [
        ("a100-40g", "5xa100-40g"),
        ("dgx-a100-40g", "1xdgx-a100-40g"),
        ("64xa100-40g", "5xa100-40g"),
        ("8x4xa100-40g", "2x4xa100-40g"),
    ],
)
def test_the_smallest_part_of_a_cluster_has_a_name(smallest, parplan, cluster, named):
    answer = json.loads(smallest(cluster).stdout)
    assert answer["fits"]
    assert answer["smallest"]["num_gpus"] >= answer["layout"]["used_gpus"]
    job = f"plan --model llama3-8b --cluster {cluster} --global-batch 64 --smallest -o -"
    assert f"ref: {named}, " in parplan(*job.split()).stdout


def test_one_gpu_less_is_too_few(smallest, parplan):
    answer = json.loads(smallest("a100-40g").stdout)
    needed = answer["smallest"]["num_gpus"]
    assert answer["smallest"]["next_smaller"] == needed - 1
    job = f"plan --model llama3-8b --cluster {needed - 1}xa100-40g --global-batch 64"
    assert parplan(*job.split()).exit_code == 1


def test_of_a_cluster_file_the_plan_leaves_gpus_unused(smallest, tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    answer = json.loads(smallest(path).stdout)
    assert answer["layout"]["used_gpus"] <= answer["smallest"]["num_gpus"] < 16


def test_a_model_that_one_gpu_holds_needs_one(smallest):
    answer = json.loads(smallest("h100", "gpt2").stdout)
    assert answer["smallest"]["num_gpus"] == 1
    assert answer["smallest"]["next_smaller"] is None


def test_a_cluster_that_is_too_small_is_said_to_be(smallest):
    result = smallest("2x8xa100-40g", "llama3.1-405b")
    assert result.exit_code == 1
    assert "does not fit" in result.stderr


def test_a_bare_device_needs_a_number_otherwise(parplan):
    result = parplan("plan", "--model", "gpt2", "--cluster", "h100-80g")
    assert result.exit_code == 2
    assert "say how many: 8xh100-80g" in result.stderr
