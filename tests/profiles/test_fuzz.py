"""Files broken at random are refused with a place, or read as what they still say."""

from __future__ import annotations

import json
import random
import re

import pytest

from profiles import (
    load_calibration,
    load_cluster,
    load_model,
    load_training,
    read_topology,
    shelf,
)
from profiles.errors import InputError
from profiles.schemas import SCHEMAS, json_schema

CLUSTER = load_cluster("8xh100")
TRAINING = """\
schema_version: 1
kind: training
global_batch: 512
seq_len: 4096
precision: bf16
"""
CLUSTER_FILE = """\
schema_version: 1
kind: cluster
name: lab
nodes:
  - node: dgx-h100
    count: 4
  - node: {name: box, device: h100, num_gpus: 4,
           gpu_link: {bandwidth_gb_per_s_per_gpu: 25, latency_us: 5},
           nics: {count: 1, bandwidth_gb_per_s: 12.5, latency_us: 10}}
fabric:
  - {name: leaf, nodes_per_switch: 2}
"""
MODEL_FILE = """\
schema_version: 1
kind: model
name: tiny
layers:
  - {kind: embedding, vocab: 32000, hidden: 4096}
  - {kind: block, count: 32, hidden: 4096, attention: {heads: 32}, feed_forward: {ffn_hidden: 9}}
  - {kind: head, vocab: 32000, hidden: 4096}
"""
CONFIG = json.dumps(
    {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
)
DATASHEET = (shelf.DATA / "calibrations" / "datasheet.yaml").read_text(encoding="utf-8")
READERS = {
    "training.yaml": (TRAINING, load_training),
    "cluster.yaml": (CLUSTER_FILE, load_cluster),
    "model.yaml": (MODEL_FILE, load_model),
    "config.json": (CONFIG, load_model),
    "calibration.yaml": (DATASHEET, lambda path: load_calibration(None, CLUSTER, path)),
}
TOPOLOGIES = {
    "matrix.txt": "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV4\tPIX\t0-7\n"
    "GPU1\tNV4\t X \tSYS\t0-7\nNIC0\tPIX\tSYS\t X\n",
    "dump.xml": '<system version="1">\n<cpu>\n<pci busid="0:1" device="0x2330" link_width="16" '
    'link_speed="16.0 GT/s PCIe">\n<gpu rank="0"/></pci>\n<nic><net speed="100000"/></nic>\n'
    "</cpu>\n</system>\n",
    "topology.conf": "SwitchName=a Nodes=n[1-4]\nSwitchName=b Nodes=n[5-8]\n"
    "SwitchName=c Switches=a,b\n",
    "topology.yaml": "- topology: t\n  tree:\n    switches:\n      - {switch: a, nodes: n[1-4]}\n",
    "network.yml": "topology: [Ring, Switch]\nnpus_count: [8, 2]\nbandwidth: [450, 50]\n"
    "latency: [500, 2000]\n",
}
NONSENSE = ["-1", "1e30", "1.0e+30", "null", "[]", "{}", '"x"', "[[1]]", ".nan"]


@pytest.mark.parametrize("name", READERS)
def test_random_damage_never_ends_in_a_traceback(tmp_path, name):
    text, read = READERS[name]
    chance = random.Random(name)
    path = tmp_path / name
    for _ in range(200):
        path.write_text(damaged(text, chance), encoding="utf-8")
        try:
            read(str(path))
        except InputError as error:
            assert all(str(path) in problem.where for problem in error.problems)  # noqa: PT017 - it may be fine, too


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_random_damage_of_a_topology_never_ends_in_a_traceback(tmp_path, name):
    chance = random.Random(name)
    path = tmp_path / name
    for _ in range(400):
        path.write_text(damaged(TOPOLOGIES[name], chance), encoding="utf-8")
        try:
            read_topology(path, device="h100")
        except InputError as error:
            assert all(str(path) in problem.where for problem in error.problems)  # noqa: PT017 - it may be fine, too


def damaged(text, chance):
    """The text with one to three characters, tokens or lines changed."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(text))
        kind = chance.randrange(4)
        if kind == 0:
            text = text[:at] + text[at + 1 :]
        elif kind == 1:
            text = (
                text[:at] + chance.choice("{}[]:,&*!|>'\"%@`#-? \n\t0x\u00e9\U0001f600") + text[at:]
            )
        elif kind == 2:
            numbers = list(re.finditer(r"\d+", text))
            if numbers:
                number = chance.choice(numbers)
                text = text[: number.start()] + chance.choice(NONSENSE) + text[number.end() :]
        else:
            lines = text.splitlines(keepends=True)
            lines.insert(chance.randrange(len(lines) + 1), chance.choice(lines))
            text = "".join(lines)
    return text


@pytest.mark.parametrize("value", NONSENSE)
@pytest.mark.parametrize("name", READERS)
def test_nonsense_in_place_of_any_number_is_never_accepted(tmp_path, name, value):
    text, read = READERS[name]
    path = tmp_path / name
    for number in re.finditer(r"(?<=: )[0-9.]+\b", text):
        if (
            value == "null"
            and name == "config.json"
            and "key_value" in text[: number.start()][-24:]
        ):
            continue  # null key/value heads mean as many as heads
        path.write_text(text[: number.start()] + value + text[number.end() :], encoding="utf-8")
        with pytest.raises(InputError):
            read(str(path))


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_kind_of_file_has_a_json_schema_that_forbids_unknown_keys(kind):
    schema = json_schema(kind)
    assert schema["additionalProperties"] is False
    assert {"schema_version", "kind"} <= set(schema["required"])
