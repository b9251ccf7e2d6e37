"""Files of other tools -> cluster files. The inputs are made here, in the forms that the tools'
manuals and dumps show.
"""

from __future__ import annotations

import re

import pytest

from profiles import load_cluster, load_model_or_cluster, read_topology
from profiles.errors import InputError
from profiles.hostlist import HostlistError, expanded
from profiles.topology import Topology


@pytest.fixture
def read(tmp_path):
    """Reads a text and loads the cluster that comes out; also its notes."""

    def loaded(text: str, name: str = "lab.txt", **told):
        (tmp_path / name).write_text(text)
        made, notes = read_topology(tmp_path / name, **told)
        (tmp_path / "out.yaml").write_text(made)
        return load_cluster(str(tmp_path / "out.yaml")), notes

    return loaded


@pytest.fixture
def refused(tmp_path):
    """The error that a text gives, without the folder's name."""

    def told(text: str, name: str = "lab.txt", **flags) -> str:
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError) as caught:
            read_topology(tmp_path / name, **flags)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return told


def matrix(num_gpus: int, link, nics: dict[str, list[str]] | None = None) -> str:
    """A matrix as nvidia-smi prints it; ``link(i, j)`` is the word between two GPUs, ``nics`` the
    words of each NIC's column."""
    nics = nics or {}
    names = [f"GPU{n}" for n in range(num_gpus)]
    head = "\t".join(["", *names, *nics, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    rows = [
        "\t".join(
            [
                name,
                *(" X " if i == j else link(i, j) for j in range(num_gpus)),
                *(column[i] for column in nics.values()),
                "0-31,64-95\t0\t\tN/A",
            ]
        )
        for i, name in enumerate(names)
    ]
    rows += [
        "\t".join([name, *column, *(" X " if other == name else "SYS" for other in nics)])
        for name, column in nics.items()
    ]
    return "\n".join([head, *rows, "", "Legend:", "", "  X    = Self"])


SWITCHED = matrix(
    8,
    lambda *_: "NV18",
    {
        **{f"NIC{n}": ["PIX" if n == g else "SYS" for g in range(8)] for n in range(8)},
        "NIC8": ["SYS"] * 8,
    },
)
PAIRS = matrix(4, lambda i, j: "NV12" if i // 2 == j // 2 else "SYS")


def test_a_matrix_of_switched_gpus(read):
    cluster, notes = read(SWITCHED, device="h100", num_nodes=4)
    node = cluster.groups[0].node
    assert (cluster.num_nodes, node.num_gpus, node.device.name) == (4, 8, "h100-80g")
    assert (node.gpu_bytes_per_s, node.islands, node.num_nics) == (450e9, (), 8)
    assert "8 of 9 NICs share a PCIe switch with a GPU: only they are counted" in notes
    assert "GB/s of a NIC: 50 as in a dgx-h100; --nic-gb-per-s says otherwise" in notes


@pytest.mark.parametrize(
    ("device", "links", "gb_per_s"),
    [("h800", 8, 200), ("a100", 12, 300), ("b200", 18, 900), ("h20", 18, 450)],
)
def test_links_are_timed_by_the_device(read, device, links, gb_per_s):
    cluster, _ = read(matrix(8, lambda *_: f"NV{links}"), device=device)
    assert cluster.groups[0].node.gpu_bytes_per_s == gb_per_s * 1e9


def test_four_gpus_that_share_their_links_directly(read):
    cluster, _ = read(matrix(4, lambda *_: "NV4"), device="a100")
    assert cluster.groups[0].node.gpu_bytes_per_s == 3 * 4 * 25e9
    assert cluster.groups[0].node.direct_links
    assert not read(matrix(8, lambda *_: "NV12"), device="a100")[0].groups[0].node.direct_links


def test_a_cube_mesh_has_six_links_a_gpu(read):
    mesh = {
        (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 1,
        (2, 6): 2, (3, 7): 2, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 1,
    }  # fmt: skip
    text = matrix(
        8, lambda i, j: f"NV{mesh[pair]}" if (pair := tuple(sorted((i, j)))) in mesh else "SYS"
    )
    cluster, _ = read(text, device="v100")
    assert (
        cluster.groups[0].node.gpu_bytes_per_s
        == load_cluster("8xv100").groups[0].node.gpu_bytes_per_s
    )


def test_bridged_pairs_are_islands_and_their_ring_leaves_them_over_pcie(read):
    cluster, notes = read(PAIRS, device="a100-pcie", num_nics=1, nic_gb_per_s=10)
    node = cluster.groups[0].node
    assert [(each.num_gpus, each.bytes_per_s) for each in node.islands] == [(2, 300e9)]
    assert (node.gpu_bytes_per_s, node.num_nics, node.nic_bytes_per_s) == (31.5e9, 1, 10e9)
    assert Topology(cluster).axis(((4, 1),), num_ranks=4).ring_bytes_per_s == 63e9
    assert notes == ("GPUs without NVLink between them exchange 31.5 GB/s over PCIe",)


def test_pairs_that_are_not_neighbours_are_put_in_order(read):
    text = matrix(4, lambda i, j: "NV4" if i % 2 == j % 2 else "PHB")
    cluster, notes = read(text, device="rtx3090")
    assert cluster.groups[0].node.islands[0].bytes_per_s == 56.25e9
    assert any(note.endswith("set CUDA_VISIBLE_DEVICES=0,2,1,3") for note in notes)


def test_cards_without_nvlink_talk_over_pcie(read):
    cluster, _ = read(matrix(2, lambda *_: "PHB"), device="rtx4090")
    assert (cluster.groups[0].node.gpu_bytes_per_s, cluster.groups[0].node.islands) == (31.5e9, ())


def test_one_bridge_among_four_cards_is_left_out(read):
    text = matrix(4, lambda i, j: "NV4" if {i, j} == {0, 1} else "PHB")
    assert read(text, device="rtx3090")[0].groups[0].node.islands == ()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("NV18", "NX18", "lab.txt:2: 'NX18' in column 2 of GPU0; expected X, NV#, PIX, PXB, PHB, "),
        (
            "NV18",
            "NV17",
            "lab.txt:1: GPU0 to GPU1 is NV17, GPU1 to GPU0 is NV18; expected the same",
        ),
        ("GPU3\tNV18", "GPUX\tNV18", "lab.txt:1: no row GPU3; expected a row for every GPU"),
        ("GPU7\tNIC0", "NIC0", "lab.txt:9: a row GPU7 without a column; expected a square of"),
        ("GPU1\tGPU2", "GPU2\tGPU1", "lab.txt:1: the columns of GPUs; expected GPU0, GPU1, ..."),
    ],
)
def test_a_wrong_matrix_is_told_with_its_line(refused, old, new, told):
    assert refused(SWITCHED.replace(old, new, 1), device="h100").startswith(told)


def test_a_matrix_needs_a_device_that_fits(refused):
    assert "does not say which device it is; expected --device NAME" in refused(SWITCHED)
    assert "18 NVLinks a GPU among 8, and a100-80g has 12" in refused(SWITCHED, device="a100")
    assert "the file has NVLinks and rtx-4090 has none" in refused(PAIRS, device="rtx4090")
    assert refused(SWITCHED, device="h10").startswith("--device: there is no device 'h10'")


def dump(gpus: list[str], nets: str = "", *, pci: str = "0x2330", host: str = "0x1") -> str:
    slots = "".join(
        f'<pci busid="0000:{n:02x}:00.0" device="{pci}" link_speed="32.0 GT/s PCIe" '
        f'link_width="16">\n<gpu dev="{n}" sm="90" rank="{n}">{links}</gpu>\n</pci>\n'
        for n, links in enumerate(gpus)
    )
    return f'<system version="1">\n<cpu host_hash="{host}">\n{slots}{nets}</cpu>\n</system>\n'


SWITCH = '<nvlink target="0000:d{}:00.0" count="{}" tclass="0x068000"/>'
NIC = '<nic><net name="mlx5_{}" speed="{}"/></nic>\n'
H100 = dump(
    [SWITCH.format(0, 5) + SWITCH.format(1, 4) + SWITCH.format(2, 4) + SWITCH.format(3, 5)] * 8,
    "".join(NIC.format(n, 400000) for n in range(8)),
)


def test_a_dump_of_nccl_says_device_links_and_nics(read):
    cluster, notes = read(H100, "topo.xml", num_nodes=2)
    node = cluster.groups[0].node
    reference = load_cluster("8xh100").groups[0].node
    assert node.device == reference.device
    assert node.gpu_bytes_per_s == reference.gpu_bytes_per_s
    assert (node.num_nics, node.nic_bytes_per_s, cluster.num_nodes) == (8, 50e9, 2)
    assert notes == ("PCI number 0x2330 is h100-80g",)


def test_a_dump_of_bridged_cards_has_islands_and_the_slots_rate(read):
    bridge = '<nvlink target="0000:0{}:00.0" count="12" tclass="0x030200"/>'
    text = dump([bridge.format(n ^ 1) for n in range(4)], NIC.format(0, 100000), pci="0x20b5")
    slow = text.replace("32.0 GT/s", "16.0 GT/s", 1)
    node = read(slow, "nc.xml")[0].groups[0].node
    assert (node.device.name, node.islands[0].bytes_per_s) == ("a100-80g-pcie", 300e9)
    assert node.gpu_bytes_per_s == pytest.approx(16 * 16 / 8 * 128 / 130 * 1e9, rel=1e-4)
    unsaid = re.sub(r'link_speed="[^"]*" link_width="16"', 'link_speed="" link_width="0"', text)
    assert read(unsaid, "nc.xml")[0].groups[0].node.gpu_bytes_per_s == 31.5e9


def test_a_dump_of_several_hosts_is_one_domain(read):
    one = dump([SWITCH.format(0, 18)] * 4, pci="0x2941")
    two = one.replace("0000:", "0001:").replace('"0x1"', '"0x2"')
    for n in range(4):
        two = two.replace(f'rank="{n}"', f'rank="{n + 4}"', 1)
    both = one.replace("</system>", "") + two[two.index("<cpu") :]
    node = read(both, "rack.xml")[0].groups[0].node
    assert (node.num_gpus, node.num_hosts, node.gpu_bytes_per_s) == (8, 2, 900e9)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("</pci>", "</pic>", "topo.xml:5:3: not valid XML: mismatched tag"),
        ('<system version="1">', "<!DOCTYPE a [<!ENTITY b 'c'>]>\n<system>", "topo.xml:1: a DOC"),
        ("system", "graphs", "topo.xml:1: the file holds <graphs>; expected <system>, as NCCL_"),
        ('count="5"', 'count="five"', "topo.xml:4: count of <nvlink> is 'five'; expected a whole"),
        (' count="5"', "", "topo.xml:4: <nvlink> lacks count; expected a whole number"),
        ('"400000"', '"fast"', "speed of <net> is 'fast'; expected a whole number"),
        ('device="0x2330"', 'device="0x20b2"', "topo.xml:1: devices of the PCI numbers 0x20b2,"),
        ("gpu", "cpu", "topo.xml:1: 0 <gpu> elements; expected 1 to 1024"),
    ],
)  # fmt: skip
def test_a_wrong_dump_is_told_with_its_line(refused, old, new, told):
    count = 1 if old.startswith(("</pci", "<sys", "dev")) else -1
    assert told in refused(H100.replace(old, new, count), "topo.xml")


def test_an_unknown_pci_number_asks_for_a_device(read, refused):
    text = H100.replace("0x2330", "0xffff")
    assert "no device of the catalogue has the PCI number 0xffff" in refused(text, "topo.xml")
    assert read(text, "topo.xml", device="h100")[0].num_gpus == 8


TREE = """\
# two leaves
SwitchName=s0 Nodes=n[00-15]
SwitchName=s1 Nodes=n[16-31] LinkSpeed=400
SwitchName=top Switches=s[0-1]
"""
TREE_YAML = """\
- topology: racks
  cluster_default: true
  tree:
    switches:
      - switch: top
        children: s[0-1]
      - switch: s0
        nodes: n[00-15]
      - switch: s1
        nodes: n[16-31]
- topology: all
  flat: true
"""


@pytest.mark.parametrize(("text", "name"), [(TREE, "topology.conf"), (TREE_YAML, "topology.yaml")])
def test_a_tree_of_slurm_is_nodes_under_leaves(read, text, name):
    cluster, notes = read(text, name, device="h100")
    assert [(g.node.name, g.count) for g in cluster.groups] == [("dgx-h100", 32)]
    assert [(f.name, f.nodes_per_switch, f.oversubscription) for f in cluster.fabric] == [
        ("leaf", 16, 1)
    ]
    assert "the file does not say uplinks: no switch is taken as oversubscribed" in notes


def test_three_levels_and_switches_of_several_sizes(read):
    text = "".join(f"SwitchName=l{n} Nodes=n[{4 * n}-{4 * n + 3 - (n == 1)}]\n" for n in range(6))
    text += "switchname=p0 switches=l[0-2]\nSwitchName=p1 Switches=l[3-5]\n"
    cluster, notes = read(text + "SwitchName=root Switches=p[0-1]\n", device="a100")
    assert [(f.name, f.nodes_per_switch) for f in cluster.fabric] == [("leaf", 4), ("spine", 12)]
    assert cluster.num_nodes == 23
    assert "switches of 3 to 4 in one level are taken as 4" in notes


def test_blocks_are_racks_of_nvl72_or_switches_of_other_machines(read):
    text = "BlockName=b0 Nodes=t[001-018]\nBlockName=b1 Nodes=t[019-034]\nBlockSizes=18\n"
    racks, _ = read(text, device="gb200")
    assert [(g.node.num_gpus, g.node.num_hosts, g.count) for g in racks.groups] == [
        (72, 18, 1),
        (64, 16, 1),
    ]
    others, _ = read(text, device="h100", nic_gb_per_s=25)
    assert [(f.name, f.nodes_per_switch) for f in others.fabric] == [("block", 18)]
    assert (others.num_nodes, others.groups[0].node.nic_bytes_per_s) == (34, 25e9)


def test_hosts_of_a_rack_in_a_tree_must_fill_it(read, refused):
    text = "SwitchName=a Nodes=t[1-{}]\nSwitchName=b Nodes=u[1-{}]\nSwitchName=c Switches=a,b\n"
    cluster, _ = read(text.format(36, 36), device="gb200")
    assert (cluster.num_nodes, cluster.fabric[0].nodes_per_switch) == (4, 2)
    told = refused(text.format(16, 16), device="gb200")
    assert told == "lab.txt:1: a switch of 16 hosts; expected whole gb200-nvl72, 18 hosts each"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TREE.replace("Nodes", "Node", 1), "lab.txt:2: 'node'; expected SwitchName=, BlockName="),
        (TREE.replace("[0-1]", "[0-2]"), "lab.txt:4: there is no switch s2; expected one of the f"),
        (TREE.replace("[16-31]", "[15-31]"), "lab.txt:3: host n15 stands in s0 too; expected one "),
        (TREE.replace("[00-15]", "[15-00]"), "lab.txt:2: the range '15-00'; expected a hostlist"),
        (TREE.replace("[00-15]", "[0-"), "lab.txt:2: 'n[0-'; expected a hostlist like n[0-7,9]"),
        (TREE.replace("s1 ", "s0 "), "lab.txt:3: a second switch s0; expected another name"),
        (TREE + "SwitchName=x Switches=top Nodes=m1\n", "lab.txt:5: x joins both; expected hosts"),
        (TREE + "SwitchName=x\n", "lab.txt:5: x joins nothing; expected hosts or switches"),
        (TREE + "SwitchName=x Nodes=m1\n", "lab.txt:5: x stands beside switches with another num"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", "lab.txt:1: switches join one anot"),
        (TREE + "what\n", "lab.txt:5: 'what'; expected SwitchName=, BlockName= or BlockSizes="),
    ],
)
def test_a_wrong_topology_conf_is_told_with_its_line(refused, text, told):
    assert refused(text, device="h100").startswith(told)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("switch: s0", "swich: s0", "t.yaml:7:9: topologies[0].tree.switches[1].switch is missing"),
        ("n[00-15]", "n[00-", "t.yaml:7:9: 'n[00-'; expected a hostlist"),
        ("children: s[0-1]", "children: s[0-3]", "t.yaml:5:9: there is no switch s2"),
    ],
)
def test_a_wrong_topology_yaml_is_told_with_its_line(refused, old, new, told):
    assert refused(TREE_YAML.replace(old, new), "t.yaml", device="h100").startswith(told)


def test_slurm_names_neither_machines_nor_their_count(refused):
    assert "does not say which machines it lists; expected --device NAME" in refused(TREE)
    told = refused(TREE, device="h100", num_nodes=2)
    assert told == "--nodes: with lab.txt, which lists the nodes; expected either"


ASTRA = """\
topology: [ Switch, Switch, Ring ]  # three
npus_count: [ 8, 4, 2 ]
bandwidth: [ 450.0, 50.0, 25.0 ]  # GB/s
latency: [ 500.0, 2000.0, 3000.0 ]  # ns
"""


def test_dimensions_of_astra_sim_are_node_nics_and_switches(read):
    cluster, _ = read(ASTRA, "net.yml", device="h100")
    node, (level,) = cluster.groups[0].node, cluster.fabric
    assert (node.num_gpus, cluster.num_nodes, cluster.num_gpus) == (8, 8, 64)
    assert (node.gpu_bytes_per_s, node.num_nics, node.nic_bytes_per_s) == (450e9, 8, 50e9)
    assert (node.gpu_latency_s, node.nic_latency_s) == pytest.approx((5e-7, 2e-6))
    assert (level.nodes_per_switch, level.oversubscription) == (4, 2)
    topology = Topology(cluster)
    across = topology.axis(((2, 32),), num_ranks=64)
    assert across.ring_bytes_per_s == pytest.approx(25e9)


def test_one_fully_connected_dimension_sends_on_all_its_links(read):
    text = "topology: [ FullyConnected ]\nnpus_count: [ 8 ]\nbandwidth: [ 64 ]\nlatency: [ 700 ]\n"
    cluster, _ = read(text, device="mi300x")
    assert (cluster.num_gpus, cluster.groups[0].node.gpu_bytes_per_s) == (8, 7 * 64e9)
    assert Topology(cluster).axis(((2, 1),), num_ranks=8).ring_bytes_per_s == pytest.approx(64e9)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("Ring", "Torus", "net.yml:1:29: topology[2] is 'Torus'; expected Ring, Switch or Fully"),
        ("[ 8, 4, 2 ]", "[ 8, 4 ]", "net.yml:2:13: npus_count has 2 entries; expected 3, one for"),
        ("450.0", "fast", "net.yml:3:14: bandwidth[0] is 'fast'; expected a number"),
        ("450.0", "-1", "net.yml:3:14: -1; expected 1 to 1,000,000,000"),
        ("8, 4", "8000, 4", "net.yml:2:15: 8,000 NPUs in a node; expected at most 1,024"),
        ("latency", "latencies", "net.yml:1:1: latency is missing; expected nanoseconds of a lin"),
    ],
)
def test_a_wrong_network_file_is_told_with_its_place(refused, old, new, told):
    assert refused(ASTRA.replace(old, new), "net.yml", device="h100").startswith(told)


def test_a_file_of_no_known_format_is_told_what_is_known(refused):
    for text in ("", "hello\n", "- a\n", "kind: cluster\n"):
        assert refused(text).startswith("lab.txt: is of no format that is known; expected the out")


@pytest.mark.parametrize("text", [SWITCHED, H100, TREE, TREE_YAML, ASTRA])
@pytest.mark.parametrize("load", [load_cluster, load_model_or_cluster])
def test_a_topology_in_place_of_a_cluster_is_told_how_to_become_one(tmp_path, text, load):
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=f"is a topology .*parplan import-cluster {path} makes"):
        load(str(path))


def test_a_missing_file_is_told():
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_topology("no/such/file")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("a,b[1,3-4],c", ["a", "b1", "b3", "b4", "c"]),
        ("r[1-2]n[1-2]x", ["r1n1x", "r1n2x", "r2n1x", "r2n2x"]),
        ("", []),
    ],
)
def test_hostlists_are_expanded_as_slurm_does(text, names):
    assert expanded(text) == names


@pytest.mark.parametrize("text", ["n[", "n]", "n[a]", "n[1-]", "n[1-9999999]", "n[1-999999]m[1-9]"])
def test_a_wrong_hostlist_is_refused(text):
    with pytest.raises(HostlistError):
        expanded(text)
