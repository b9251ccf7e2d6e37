from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import load_cluster
from profiles.errors import InputError


def groups(ref):
    return [(g.node.name, g.count, g.node.num_gpus) for g in load_cluster(ref).groups]


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("8xh100", [("dgx-h100", 1, 8)]),
        ("8xH100", [("dgx-h100", 1, 8)]),
        ("16x8xh100-80g", [("dgx-h100", 16, 8)]),
        ("4x8xa100-40g", [("dgx-a100-40g", 4, 8)]),
        ("60xh100", [("dgx-h100", 7, 8), ("dgx-h100[4]", 1, 4)]),
        ("1x4xh100", [("dgx-h100[4]", 1, 4)]),
        ("4xh100", [("dgx-h100[4]", 1, 4)]),
        ("2xcpu", [("cpu-host[2]", 1, 2)]),
        ("2x8xv100-16g", [("dgx-1-v100-16g", 2, 8)]),
        ("1000000xh800", [("hgx-h800", 125_000, 8)]),
        ("5128xh100", [("dgx-h100", 641, 8)]),
        ("8xrtx4090", [("pcie-rtx-4090", 1, 8)]),
        ("4xl4", [("aws-g6.48xlarge[4]", 1, 4)]),
        ("72xgb200", [("gb200-nvl72", 1, 72)]),
        ("18x4xgb200", [("gb200-nvl72", 1, 72)]),
        ("40x4xgb200", [("gb200-nvl72", 2, 72), ("gb200-nvl72[16]", 1, 16)]),
        ("18x2xgb200", [("gb200-nvl72[36]", 1, 36)]),
        ("2x36xgb200", [("gb200-nvl72[36]", 2, 36)]),
        ("16xgh200", [("gh200", 16, 1)]),
        ("2x8xmi250x", [("frontier-mi250x", 2, 8)]),
        ("4xdgx-h100", [("dgx-h100", 4, 8)]),
        ("2xP5.48xlarge", [("aws-p5.48xlarge", 2, 8)]),
    ],
)
def test_a_shorthand_is_nodes_of_the_devices_default_node(ref, expected):
    assert groups(ref) == expected


def test_a_smaller_node_keeps_its_links_and_a_share_of_the_nics():
    node = load_cluster("3x4xh100").groups[0].node
    assert (node.gpu_bytes_per_s, node.num_nics, node.nic_bytes_per_s) == (450e9, 4, 50e9)
    assert load_cluster("1x1xv100").groups[0].node.num_nics == 1


def test_a_part_of_a_rack_has_as_many_hosts_as_it_needs():
    rack, part = load_cluster("40x4xgb200").groups
    assert (rack.node.num_hosts, rack.node.gpus_per_host) == (18, 4)
    assert (part.node.num_hosts, part.node.gpus_per_host) == (4, 4)


def test_a_bridged_pair_is_as_fast_as_its_bridge():
    pair = load_cluster("2xh100-nvl").groups[0].node
    assert (pair.gpu_bytes_per_s, pair.islands) == (300e9, ())
    three = load_cluster("3xh100-nvl").groups[0].node
    assert (three.gpu_bytes_per_s, [each.num_gpus for each in three.islands]) == (63e9, [2])


@pytest.mark.parametrize(
    ("ref", "told"),
    [
        ("8xh10", "cluster: there is no device 'h10'; expected one of a10g, a100-40g"),
        ("9x9xh100", "cluster: 9x9xh100 wants 9 GPUs a node; expected at most 8, the size of a "),
        ("0xh100", "cluster: 0 in 0xh100; expected a count from 1 to 1,000,000"),
        ("8x0xh100", "cluster: 0 in 8x0xh100; expected a count from 1 to 1,000,000"),
        ("-8xh100", "cluster: -8 in -8xh100; expected a count from 1 to 1,000,000"),
        ("1000001xh100", "cluster: 1000001 in 1000001xh100; expected a count from 1"),
        ("1000000x8xh100", "cluster: 1000000x8xh100 has 8,000,000 GPUs; expected at most"),
        ("1000000xdgx-h100", "cluster: 1000000xdgx-h100 has 8,000,000 GPUs; expected at most 1,0"),
        ("9" * 5000 + "xh100", "cluster: a huge number; expected a count from 1 to 1,000,000"),
        ("h100", "cluster: 'h100' is neither in the catalogue nor a file here; expected GPUSx"),
        ("8x", "cluster: '8x' is neither in the catalogue nor a file here; expected GPUSxDEVICE"),
        ("my/cluster.yaml", "cluster: there is no file my/cluster.yaml; expected GPUSxDEVICE"),
    ],
)
def test_a_wrong_shorthand_is_told_with_the_grammar_or_the_cure(ref, told):
    with pytest.raises(InputError) as caught:
        load_cluster(ref)
    assert str(caught.value).startswith(told)


def test_a_bare_device_is_asked_how_many():
    with pytest.raises(InputError, match="say how many: 8xh100"):
        load_cluster("h100")


@given(nodes=st.integers(1, 1000), gpus=st.integers(1, 8))
def test_no_gpu_is_lost(nodes, gpus):
    assert load_cluster(f"{nodes}x{gpus}xh100").num_gpus == nodes * gpus
    assert load_cluster(f"{nodes * gpus}xh100").num_gpus == nodes * gpus


@given(st.text(alphabet="0123456789xh-.a/", max_size=20))
def test_any_word_is_a_cluster_or_the_users_mistake(ref):
    try:
        assert load_cluster(ref).num_gpus >= 1
    except InputError as error:
        assert error.problems  # noqa: PT017 - it may be fine, too
