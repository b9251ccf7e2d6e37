"""Every device and node against the figures that their makers print, which stand in a file of
their own, in units of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from profiles import shelf
from profiles.shorthand import Catalog
from profiles.units import GB, GIB, TERA

EXPECTED = yaml.safe_load(Path(__file__).with_name("expected_hardware.yaml").read_text())
CATALOG = Catalog("test")


@pytest.mark.parametrize("kind", ["devices", "nodes"])
def test_every_entry_has_its_expected_figures(kind):
    assert set(shelf.names(kind)) == EXPECTED[kind].keys()


@pytest.mark.parametrize("name", EXPECTED["devices"])
def test_a_device_has_the_published_figures(name):
    device, expected = CATALOG.device(name), EXPECTED["devices"][name]
    peaks = device.peak_flop_per_s
    wide = expected.get("dense") or expected["sparse"] / 2
    assert (peaks.get("bf16") or peaks["fp16"]) == pytest.approx(wide * TERA, rel=0.002)
    assert device.memory_bytes_per_s == pytest.approx(expected["tb_per_s"] * TERA, rel=0.02)
    assert peaks.get("fp8", 0) == pytest.approx(expected.get("sparse_fp8", 0) / 2 * TERA, rel=0.002)
    assert device.watts == expected.get("watts")
    # GB as sold are GiB for most and 10**9 bytes for others; the driver keeps up to 8 %
    assert 0.92 * expected["gb"] * GB <= device.memory_bytes <= expected["gb"] * GIB


@pytest.mark.parametrize("name", EXPECTED["nodes"])
def test_a_node_has_the_published_links(name):
    node, expected = CATALOG.node(name), EXPECTED["nodes"][name]
    assert (node.num_gpus, node.num_hosts) == (expected["gpus"], expected.get("hosts", 1))
    assert 2 * node.gpu_bytes_per_s == pytest.approx(expected["link"] * GB)
    assert 8 * node.uplink_bytes_per_s == pytest.approx(expected["network"] * GB)
    pairs = [2 * each.bytes_per_s for each in node.islands if each.num_gpus == 2]
    assert pairs == ([expected["pairs"] * GB] if "pairs" in expected else [])


@pytest.mark.parametrize("name", shelf.names("nodes"))
def test_nobody_sends_faster_than_its_ports_or_its_memory(name):
    node = CATALOG.node(name)
    file = CATALOG.device_file(node.device.name)
    fastest = node.islands[0].bytes_per_s if node.islands else node.gpu_bytes_per_s
    assert fastest < node.device.memory_bytes_per_s
    assert node.nic_bytes_per_s <= 100e9
    if file.nvlink is not None:
        ports = file.nvlink.links * file.nvlink.gb_per_s_per_link * GB
        assert fastest <= ports
        switched = not node.islands and node.gpu_bytes_per_s > 63e9
        assert not switched or fastest == ports
