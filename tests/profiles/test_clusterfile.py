from __future__ import annotations

import pytest

from profiles import load_cluster

HEAD = "schema_version: 1\nkind: cluster\nname: lab\n"
GOOD = HEAD + "nodes:\n  - node: dgx-h100\n    count: 4\n"
INLINE = (
    HEAD
    + """\
nodes:
  - count: 2
    node:
      name: box
      device: card
      num_gpus: 4
      gpu_link: {bandwidth_gb_per_s_per_gpu: 25, latency_us: 5}
      nics: {count: 1, bandwidth_gb_per_s: 12.5, latency_us: 10}
devices:
  card:
    memory_gib: 24
    memory_bandwidth_gb_per_s: 900
    peak_tflops: {bf16: 165}
    num_sms: 128
"""
)
ISLAND = "{num_gpus: %d, bandwidth_gb_per_s_per_gpu: 50, latency_us: 3}"


def load(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load_cluster(str(path))


def test_a_node_of_the_catalogue_by_name(tmp_path):
    cluster = load(tmp_path, GOOD)
    assert (cluster.name, cluster.num_nodes, cluster.num_gpus) == ("lab", 4, 32)
    assert cluster.groups[0].node.device.name == "h100-80g"


def test_a_node_and_a_device_of_the_users_own(tmp_path):
    cluster = load(tmp_path, INLINE)
    node = cluster.groups[0].node
    assert (node.num_gpus, node.gpu_bytes_per_s, node.uplink_bytes_per_s) == (4, 25e9, 12.5e9)
    assert node.device.memory_bytes == 24 * 2**30
    assert node.device.peak_flop_per_s == {"bf16": 165e12}
    assert node.gpu_latency_s == pytest.approx(5e-6)


def test_fewer_gpus_keep_their_links_and_their_share_of_the_nics(tmp_path):
    node = load(tmp_path, GOOD + "    num_gpus: 2\n").groups[0].node
    assert (node.num_gpus, node.num_nics, node.gpu_bytes_per_s) == (2, 2, 450e9)


def test_a_node_with_islands_and_several_hosts(tmp_path):
    text = INLINE.replace(
        "num_gpus: 4", f"num_gpus: 4\n      num_hosts: 2\n      islands: [{ISLAND % 2}]"
    )
    node = load(tmp_path, text).groups[0].node
    assert [(each.num_gpus, each.bytes_per_s) for each in node.islands] == [(2, 50e9)]
    assert (node.num_hosts, node.gpus_per_host) == (2, 2)


def test_overrides_make_another_node(tmp_path):
    text = GOOD + "  - node: dgx-h100\n    host_memory_gib: 512\n    price_per_gpu_hour: 2.5\n"
    cluster = load(tmp_path, text)
    assert not cluster.is_uniform
    changed = cluster.groups[1].node
    assert (changed.host_memory_bytes, changed.price_per_gpu_hour) == (512 * 2**30, 2.5)


def test_a_fabric_of_two_levels(tmp_path):
    text = GOOD + (
        "fabric:\n"
        "  - {name: leaf, nodes_per_switch: 2, oversubscription: 2, latency_us: 1}\n"
        "  - {name: spine, nodes_per_switch: 4}\n"
    )
    leaf, spine = load(tmp_path, text).fabric
    assert (leaf.oversubscription, spine.oversubscription) == (2, 1)
    assert leaf.latency_s == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            GOOD.replace("dgx-h100", "dgx-h10"),
            "file.yaml:5:11: there is no node 'dgx-h10'; expected one of ",
        ),
        (GOOD.replace("4", "0"), "file.yaml:6:12: nodes[0].count is '0'; expected at least 1"),
        (GOOD.replace("4", "1000000"), "file.yaml:5:3: 8,000,000 GPUs; expected at most 1,000,000"),
        (
            GOOD + "    num_gpus: 16\n",
            "file.yaml:7:15: 16 GPUs in a dgx-h100; expected at most its 8 (describe a larger",
        ),
        (
            GOOD + "    nics: {count: 8, bandwidth_gb_per_s: 400, latency_us: 5}\n",
            (
                "file.yaml:7:42: nodes[0].nics.bandwidth_gb_per_s is '400'; expected at most 110 "
                "(Gb/s given for GB/s? 400 Gb/s is 50 GB/s, one direction)"
            ),
        ),
        (
            GOOD + "    gpu_link: {bandwidth_gb_per_s_per_gpu: 3600, latency_us: 2}\n",
            (
                "file.yaml:7:44: nodes[0].gpu_link.bandwidth_gb_per_s_per_gpu is '3600'; "
                "expected at most 1,800 (one direction in GB/s per GPU: NVLink 4 is 450)"
            ),
        ),
        (
            INLINE.replace("device: card", "device: cart"),
            "file.yaml:8:15: there is no device 'cart'; expected one of ",
        ),
        (
            INLINE.replace("num_gpus: 4", "num_gpu: 4"),
            "file.yaml:6:5: nodes[0].node.num_gpus is missing; ",
        ),
        (
            INLINE.replace("num_gpus: 4", "num_gpus: 4\n      islands: [" + ISLAND % 3 + "]"),
            "file.yaml:7:7: nodes[0].node is a mapping; expected islands of 3 GPUs to be whole pa",
        ),
        (
            INLINE.replace("num_gpus: 4", "num_gpus: 4\n      islands: [" + ISLAND % 4 + "]"),
            "file.yaml:7:7: nodes[0].node is a mapping; expected islands of 4 GPUs to be whole pa",
        ),
        (
            INLINE.replace("num_gpus: 4", "num_gpus: 4\n      num_hosts: 3"),
            "file.yaml:7:7: nodes[0].node is a mapping; expected 3 hosts to share 4 GPUs equally",
        ),
        (
            INLINE.replace("bf16: 165", "fp31: 165"),
            (
                "file.yaml:16:19: unknown key devices.card.peak_tflops.fp31; "
                "expected one of bf16, fp16, fp32, fp4, fp8 (did you mean fp32 or "
            ),
        ),
        (
            INLINE.replace("memory_gib: 24", "memory_gib: 24GiB"),
            (
                "file.yaml:14:17: devices.card.memory_gib is '24GiB'; expected a number "
                "(the number only: the key says the unit)"
            ),
        ),
        (
            INLINE.replace("{bf16: 165}", "{}"),
            "file.yaml:16:18: devices.card.peak_tflops is a mapping; expected a 16-bit or 32-bit",
        ),
        (
            INLINE.replace("  card:", "  'a b':").replace("device: card", "device: h100"),
            "file.yaml:13:3: the key devices.a b; expected a name of letters, digits,",
        ),
        (HEAD + "nodes: []\n", "file.yaml:4:8: nodes is a list; expected a list with at least"),
        (HEAD + "nodes: 8\n", "file.yaml:4:8: nodes is '8'; expected a list"),
        (HEAD + "nodes: [8]\n", "file.yaml:4:9: nodes[0] is '8'; expected a mapping"),
        (HEAD + "nodes: [{node: 8}]\n", "file.yaml:4:16: nodes[0].node is '8'; expected text"),
        (HEAD, "file.yaml:1:1: nodes is missing; expected groups of equal nodes, in rank order"),
        (
            GOOD + "fabric: [{name: a, nodes_per_switch: 4}, {name: a, nodes_per_switch: 6}]\n",
            "file.yaml:7:49: the level name 'a' is taken; expected another",
        ),
        (
            INLINE + INLINE[INLINE.index("  - count") : INLINE.index("devices")],
            "file.yaml:18:3: not valid YAML",
        ),
    ],
)
def test_a_wrong_cluster_is_told_with_its_place_and_its_cure(problems, text, told):
    assert problems(load_cluster, text)[0].startswith(told)


def test_switches_that_make_no_tree_are_told(problems):
    text = GOOD + "fabric: [{name: a, nodes_per_switch: 4}, {name: b, nodes_per_switch: 6}]\n"
    assert problems(load_cluster, text) == [
        "file.yaml:7:70: 6 nodes a switch above 4; expected a larger multiple of 4"
    ]


def test_two_different_nodes_of_one_name_are_told(problems):
    group = INLINE[INLINE.index("  - count") : INLINE.index("devices")]
    text = INLINE.replace("devices", group.replace("num_gpus: 4", "num_gpus: 8") + "devices")
    assert problems(load_cluster, text) == [
        "file.yaml:12:5: a second, different node 'box'; expected another name"
    ]


def test_all_problems_are_told_in_order(problems):
    text = INLINE.replace("24", "-1").replace("count: 2", "count: no").replace("lab", "'a b'")
    told = problems(load_cluster, text)
    assert [line.split(": ")[0] for line in told] == [
        "file.yaml:3:7",
        "file.yaml:5:12",
        "file.yaml:14:17",
    ]
