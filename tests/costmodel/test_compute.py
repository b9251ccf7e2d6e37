"""Compute by physics: no operator beats its device; more work or less bandwidth takes longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.compute import CONVERSION_BYTES, LEAST_KERNEL_S, TILES, DeviceModel
from costmodel.work import AttentionCore, Gemm, Stream
from profiles import load_calibration, load_cluster
from profiles.training import AttentionKernel, Precision

CLUSTERS = ("8xv100-32g", "8xa100-80g", "8xh100-80g", "8xh200", "8xb200")


def device_model(ref: str, precision: Precision = Precision.FP16) -> DeviceModel:
    cluster = load_cluster(ref)
    calibration, _ = load_calibration(None, cluster)
    return DeviceModel(cluster.slowest_device, calibration.efficiencies, precision)


DEVICES = {ref: device_model(ref) for ref in CLUSTERS}
H100 = DEVICES["8xh100-80g"]
devices = st.sampled_from(sorted(DEVICES)).map(DEVICES.__getitem__)
extents = st.one_of(st.integers(1, 300), st.integers(1, 512).map(lambda n: 128 * n))
gemms = st.builds(Gemm, extents, extents, extents, st.integers(1, 64), st.booleans())


@st.composite
def attentions(draw):
    """Self-attention of any kernel, causal or with a window or neither."""
    length = draw(st.sampled_from([128, 1024, 4096, 32768]))
    return AttentionCore(
        batch=draw(st.integers(1, 8)),
        heads=draw(st.integers(1, 128)),
        query_len=draw(st.sampled_from([length, length // 4])),
        key_len=length,
        head_dim=draw(st.sampled_from([64, 128, 192])),
        value_head_dim=draw(st.sampled_from([64, 128])),
        visible=draw(st.sampled_from([length, (length + 1) / 2, 64.0])),
        kernel=draw(st.sampled_from(AttentionKernel)),
        backward=draw(st.booleans()),
    )


@given(device=devices, work=gemms)
def test_no_gemm_beats_the_sustained_peak(device, work):
    peak = device.device.peak_flop_per_s["fp16"] * device.device.sustained
    assert work.flop / device.seconds(work) <= peak


@given(device=devices, work=gemms)
def test_no_gemm_moves_its_operands_faster_than_memory(device, work):
    moved = 2 * work.groups * (work.m * work.k + work.k * work.n + work.m * work.n)
    assert moved / device.seconds(work) <= device.device.memory_bytes_per_s


@given(device=devices, work=attentions())
def test_no_attention_beats_the_sustained_peak_by_what_it_executes(device, work):
    executed = work.flop * work.visible / work.key_len
    peak = device.device.peak_flop_per_s["fp16"] * device.device.sustained
    assert executed / device.seconds(work) <= peak


@given(device=devices, size=st.integers(1, 10**11), kernels=st.integers(1, 9))
def test_no_stream_beats_memory_nor_the_shortest_kernels(device, size, kernels):
    seconds = device.seconds(Stream(size, kernels))
    assert size / seconds <= device.device.memory_bytes_per_s
    assert seconds >= kernels * LEAST_KERNEL_S


# A larger matrix may fill its last wave of tiles better, or let a larger tile be used; it cannot
# need fewer tiles of any one shape. So time falls by at most the best tile's lead over the one
# that was used, the ceiling of split-K (0.6) may be passed, and its sizes may be multiples of 8
# where those of the smaller one were not: all are in this slack.
SLACK = max(feed for _, _, feed in TILES) / 0.6 / H100.efficiencies.misaligned


@given(device=devices, work=gemms, side=st.sampled_from("mnk"), more=st.integers(1, 4096))
def test_a_larger_gemm_is_not_faster_beyond_tile_quantisation(device, work, side, more):
    larger = replace(work, **{side: getattr(work, side) + more})
    assert device.seconds(larger) * SLACK >= device.seconds(work)


@given(device=devices, work=gemms, side=st.sampled_from("mnk"))
def test_a_gemm_of_twice_the_extent_takes_no_less_time(device, work, side):
    """Whole tiles double exactly, so only sizes that become multiples of 8 need slack."""
    larger = replace(work, **{side: 2 * getattr(work, side)})
    slack = device.efficiencies.misaligned if work.n % 8 or work.k % 8 else 1.0
    assert device.seconds(larger) >= device.seconds(work) * slack * (1 - 1e-9)


@given(device=devices, work=gemms)
def test_a_gemm_is_at_least_as_efficient_with_a_longer_inner_side(device, work):
    longer = replace(work, k=2 * work.k)
    rate, longer_rate = (each.flop / device.seconds(each) for each in (work, longer))
    assert longer_rate >= rate * (1 - 1e-9)


def test_a_vocabulary_that_is_no_multiple_of_8_costs_more_than_the_next_that_is():
    odd, padded = Gemm(8192, 50257, 2048), Gemm(8192, 50304, 2048)
    part = H100.efficiencies.misaligned
    assert H100.seconds(padded) == pytest.approx(part * H100.seconds(odd), rel=0.02)


def test_large_gemms_reach_the_calibrated_part_of_the_peak():
    work = Gemm(16384, 16384, 16384)
    part = work.flop / H100.seconds(work) / H100.peak("fp16")
    assert part == pytest.approx(H100.efficiencies.gemm, rel=0.05)


def test_a_tile_beyond_a_full_wave_costs_more_than_its_share():
    """132 tiles fill the SMs of this device once; 144 tiles are 9 % more work."""
    assert H100.device.num_sms == 132
    rows, columns, _ = TILES[0]
    full, beyond = Gemm(12 * rows, 11 * columns, 8192), Gemm(12 * rows, 12 * columns, 8192)
    assert H100.seconds(beyond) > 1.2 * H100.seconds(full)


@given(
    device=devices,
    work=st.one_of(gemms, attentions(), st.builds(Stream, st.integers(1, 10**11))),
    part=st.sampled_from(["memory_bytes_per_s", "peak"]),
)
def test_a_device_twice_as_fast_is_never_slower(device, work, part):
    spec = device.device
    if part == "peak":
        faster = replace(spec, peak_flop_per_s={k: 2 * v for k, v in spec.peak_flop_per_s.items()})
    else:
        faster = replace(spec, memory_bytes_per_s=2 * spec.memory_bytes_per_s)
    assert replace(device, device=faster).seconds(work) <= device.seconds(work)


def test_causal_masks_halve_flash_attention_and_leave_stored_scores_alone():
    whole = AttentionCore(
        batch=4,
        heads=32,
        query_len=8192,
        key_len=8192,
        head_dim=128,
        value_head_dim=128,
        visible=8192.0,
        kernel=AttentionKernel.FLASH2,
    )
    causal = replace(whole, visible=8193 / 2)
    assert H100.seconds(causal) / H100.seconds(whole) == pytest.approx(0.5, rel=1e-3)


def test_stored_scores_are_bound_by_their_traffic_when_heads_are_small():
    work = AttentionCore(
        batch=8,
        heads=16,
        query_len=2048,
        key_len=2048,
        head_dim=16,
        value_head_dim=16,
        visible=2048.0,
        kernel=AttentionKernel.UNFUSED,
    )
    scores = 8 * 16 * 2048**2
    assert H100.seconds(work) == pytest.approx(H100.stream_seconds(2 * scores * 2))


def test_fp8_doubles_the_rate_of_block_gemms_only():
    fp8 = device_model("8xh100-80g", Precision.FP8_TENSORWISE)
    bf16 = device_model("8xh100-80g", Precision.BF16)
    block, head = Gemm(8192, 8192, 8192), Gemm(8192, 8192, 8192, block=False)
    kept = fp8.efficiencies.quantised
    conversion = fp8.stream_seconds(CONVERSION_BYTES["fp8"] * 8192 * 8192)
    rate = bf16.seconds(block) / (fp8.seconds(block) - conversion)
    assert rate == pytest.approx(2 * kept, rel=0.01)
    assert fp8.seconds(head) == bf16.seconds(head)


def test_operands_are_converted_once_for_both_gradients():
    fp8 = device_model("8xh100-80g", Precision.FP8_BLOCKWISE)
    again = replace(fp8, gradient_bytes=2).seconds(Gemm(8192, 8192, 8192, weight_gradient=True))
    conversion = fp8.stream_seconds(CONVERSION_BYTES["fp8"] * 8192 * 8192)
    assert fp8.seconds(Gemm(8192, 8192, 8192)) - again == pytest.approx(conversion)


def test_gradients_of_weights_that_few_tokens_reach_are_bound_by_their_sum_in_fp32():
    """Read and written, 8 bytes an element: the operands beside them are small."""
    device = replace(device_model("8xb200", Precision.BF16), gradient_bytes=8)
    work = Gemm(4096, 4096, 256, groups=32, weight_gradient=True)
    moved = 32 * (8 * 4096 * 4096 + 2 * 2 * 4096 * 256)
    assert device.seconds(work) == pytest.approx(device.stream_seconds(moved))
    assert device.seconds(work) > device.seconds(replace(work, weight_gradient=False))
