"""The profile YAML: what is written is read, merging, mistakes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import yamlfile
from profiles.errors import InputError
from profiles.measured import (
    Bandwidth,
    DeviceFacts,
    LayerHeld,
    LayerTime,
    LayerWrapping,
    ModelFacts,
    NoRoom,
    Operation,
    OperatorTime,
    Profile,
)
from profiles.measuredfile import profile_of, profile_text
from profiles.mergedprofile import load_profiles, merged_profile

PLACE = {"model": "m", "layer": "block-0", "batch": 2, "seq_len": (128,), "device": "cpu"}
FACTS = DeviceFacts(
    device="cpu",
    hardware="a processor: fast",
    torch="2.13.0+cpu",
    method="by hand",
    threads=1,
    date="2026-11-30",
    memory_bytes=2**33 + 12345,
    context_bytes=12345,
    memory_bytes_per_s=12.5e9,
    flop_per_s={"fp32": 0.1e12},
    fused_kernels=False,
    fused_norms=True,
    loss="sharded",
)
LAYERS = Profile(
    name="layers",
    source="test",
    devices=(FACTS,),
    models=(ModelFacts(model="m", layers={"block-0": "0123456789abcdef"}),),
    layer_times=(
        LayerTime(**PLACE, forward_s=0.00125, backward_s=0.0025, step_s=1e-4, parameters=7,
                  precision="fp32", optimizer="adamw", spread=0.1, doubtful=True),
    ),
    layer_wrapping=(
        LayerWrapping(device="cpu", model="m", layer="block-0", tp=2, precision="fp32", zero=3,
                      forward_s=0.001, backward_s=0.002, step_s=0.0, doubtful=True),
    ),
    layer_held=(
        LayerHeld(**PLACE, precision="fp32", recompute="selective(core_attn+mlp)",
                  saved_bytes=123456789, transient_bytes=1, state_bytes=0),
    ),
    no_room=(NoRoom(**PLACE, precision="fp32", tp=4, sequence_parallel=True),),
    operator_times=(
        OperatorTime(device="cpu", precision="fp32", operator="gemm", shape=(1, 2, 3),
                     forward_s=0.5),
    ),
)  # fmt: skip
LINKS = Profile(
    name="links",
    source="another test",
    bandwidths=(
        Bandwidth(cluster="here", operation=Operation.ALL_REDUCE, group=2, bytes_per_s=1.5e9),
    ),
)


def again(profile: Profile) -> Profile:
    return profile_of(yamlfile.parse(profile_text(profile), "file"))


def test_a_profile_is_the_same_after_writing_and_reading():
    assert again(LAYERS) == LAYERS
    assert again(LINKS) == LINKS


@given(
    st.integers(0, 2**42),
    st.floats(1e-9, 1e6),
)
def test_bytes_come_back_exactly_and_seconds_nearly(size, seconds):
    held = replace(LAYERS.layer_held[0], saved_bytes=size)
    time = replace(LAYERS.layer_times[0], forward_s=seconds)
    found = again(replace(LAYERS, layer_held=(held,), layer_times=(time,)))
    assert found.layer_held[0].saved_bytes == size
    assert math.isclose(found.layer_times[0].forward_s, seconds, rel_tol=1e-12)


def test_profiles_of_layers_and_of_links_merge():
    found = merged_profile([("a.yaml", LAYERS), ("b.yaml", LINKS), ("a.yaml", LAYERS)])
    assert (found.name, found.source) == ("layers+links", "test; another test")
    assert found.layer_times == LAYERS.layer_times
    assert found.bandwidths == LINKS.bandwidths
    assert found.devices == LAYERS.devices


def test_what_only_a_later_file_knows_of_a_device_is_kept():
    bare = replace(LAYERS, devices=(replace(FACTS, memory_bytes_per_s=None, flop_per_s={}),))
    assert merged_profile([("a", bare), ("b", LAYERS)]).devices == (FACTS,)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"torch": "2.14.0"}, "b.yaml: cpu was measured with torch 2.14.0"),
        ({"hardware": "slow"}, "b.yaml: cpu was measured with hardware slow"),
    ],
)
def test_different_devices_of_one_name_do_not_merge(change, told):
    other = replace(LAYERS, devices=(replace(FACTS, **change),))
    with pytest.raises(InputError, match=told):
        merged_profile([("a.yaml", LAYERS), ("b.yaml", other)])


def test_different_models_of_one_name_do_not_merge():
    other = replace(LAYERS, models=(ModelFacts(model="m", layers={"block-0": "f" * 16}),))
    with pytest.raises(InputError, match="block-0 of m differ from another file"):
        merged_profile([("a.yaml", LAYERS), ("b.yaml", other)])


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("forward_ms: 1.25", "forward_ms: fast", "forward_ms"),
        ("layer: block-0", "layer: blok-0", "layer"),
        ("operator: gemm", "operator: gem", "did you mean gemm"),
        ("batch: 2", "batch: 0", "batch"),
        ("doubtful: true", "doubtfull: true", "did you mean doubtful"),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path, old, new, told):
    path = tmp_path / "profile.yaml"
    text = profile_text(LAYERS)
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_profiles([path])
    assert f"{path}:" in str(caught.value)
    assert told in str(caught.value)
