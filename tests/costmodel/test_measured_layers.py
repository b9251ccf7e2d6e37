"""Measured layers in the cost model: interpolation, what an estimate rests on, operators."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.compute import DeviceModel
from costmodel.context import CostContext
from costmodel.estimate import estimate
from costmodel.interpolation import Basis, freed_of_noise, value_at
from costmodel.layout import NO_RECOMPUTE, Layout, Mesh, Recompute, RecomputeKind, Strategy
from costmodel.measuredlayers import MeasuredLayers
from costmodel.operatorfit import as_found, calibration_from
from costmodel.placing import even_cut, placed_chunks
from costmodel.work import AttentionCore, Gemm, Stream
from profiles import load_calibration, load_cluster
from profiles.fingerprint import fingerprint
from profiles.layers import Attention, Block, Embedding, FeedForward, Head, Norm
from profiles.measured import (
    DeviceFacts,
    LayerHeld,
    LayerTime,
    LayerWrapping,
    ModelFacts,
    OperatorTime,
    Profile,
)
from profiles.model import LayerRun, ModelSpec
from profiles.training import AttentionKernel, Optimizer, Precision, TrainingSpec

BLOCK = Block(
    hidden=256,
    attention=Attention(heads=4, kv_heads=4, head_dim=64, value_head_dim=64),
    feed_forward=FeedForward(ffn_hidden=704, gated=True),
    norm=Norm.RMS,
)
ENDS = (Embedding(vocab=4096, hidden=256), Head(vocab=4096, hidden=256, norm=Norm.RMS, tied=False))
LAYERS = {"block-0": BLOCK, "embedding": ENDS[0], "head": ENDS[1]}
MODEL = ModelSpec(
    name="small",
    family="generic",
    runs=(LayerRun(ENDS[0], 1), LayerRun(BLOCK, 8), LayerRun(ENDS[1], 1)),
)
TRAINING = TrainingSpec(global_batch=4, seq_len=256, precision=Precision.FP32)
FACTS = DeviceFacts(
    device="cpu",
    hardware="a processor",
    torch="2.13.0",
    method="by hand",
    threads=1,
    memory_bytes=2**33,
    context_bytes=2**28,
    memory_bytes_per_s=12e9,
    flop_per_s={"fp32": 0.1e12},
    fused_kernels=False,
    fused_norms=False,
    loss="sharded",
)
PARAMETERS = 1000


def row(layer="block-0", *, batch=1, seq_len=256, forward_s=0.01, **more) -> LayerTime:
    return LayerTime(
        model="small", layer=layer, batch=batch, seq_len=(seq_len,), forward_s=forward_s,
        device="cpu", precision="fp32", optimizer="adamw", parameters=PARAMETERS,
        **{"backward_s": 2 * forward_s, "step_s": 1e-3, **more},
    )  # fmt: skip


def profile(*rows: LayerTime, **sections) -> Profile:
    facts = ModelFacts(
        model="small", layers={name: fingerprint(own)[:16] for name, own in LAYERS.items()}
    )
    return Profile(
        name="p", source="test", devices=(FACTS,), models=(facts,), layer_times=rows, **sections
    )


def context(own: Profile | None, training: TrainingSpec = TRAINING) -> CostContext:
    cluster = load_cluster("2xcpu")
    return CostContext(MODEL, cluster, training, load_calibration(None, cluster)[0], profile=own)


def one_rank(training: TrainingSpec = TRAINING, micro_batch: int = 1) -> Layout:
    cut = even_cut(MODEL.num_blocks, 1)
    chunks = placed_chunks(MODEL, cut, ((0, 0),), Strategy(), (NO_RECOMPUTE, None))
    return Layout(
        mesh=Mesh(), schedule="1f1b", num_chunks=1, micro_batch=micro_batch,
        num_microbatches=training.global_batch // micro_batch, chunks=chunks,
    )  # fmt: skip


def whole(**more) -> Profile:
    return profile(row(**more), row("embedding", **more), row("head", **more))


def test_between_two_points_the_formula_gives_the_weight():
    values = {(1, 2): 10.0, (1, 4): 30.0}
    assert value_at(values, (1, 3), lambda place: place[1] ** 2) == (
        pytest.approx(10 + 20 * (9 - 4) / (16 - 4)),
        Basis.INTERPOLATED,
    )


def test_beyond_the_last_point_the_formula_scales_and_the_basis_says_so():
    values = {(1, 2): 10.0, (1, 4): 30.0}
    assert value_at(values, (1, 8), lambda place: float(place[1])) == (60.0, Basis.EXTRAPOLATED)
    assert value_at(values, (2, 4), lambda place: 1 / place[0]) == (15.0, Basis.EXTRAPOLATED)


def test_a_measured_point_is_itself():
    assert value_at({(1, 2): 10.0}, (1, 2), lambda _: 1.0) == (10.0, Basis.MEASURED)


def test_a_point_takes_no_longer_than_one_with_more_work():
    noisy = {(1, 1): 3.0, (1, 2): 2.0, (2, 1): 4.0}
    assert freed_of_noise(noisy, (-1, 1)) == {(1, 1): 2.0, (1, 2): 2.0, (2, 1): 2.0}


@given(
    times=st.lists(st.floats(1e-3, 1e3), min_size=9, max_size=9),
    quadratic=st.floats(0, 1),
)
def test_interpolation_and_extrapolation_grow_along_every_axis(times, quadratic):
    places = [(seq, batch) for seq in (128, 512, 1024) for batch in (1, 4, 8)]
    values = freed_of_noise(dict(zip(places, times, strict=True)), (1, 1))

    def reference(place):
        seq, batch = place
        return batch * (seq + quadratic * seq**2)

    sizes = (64, 128, 200, 512, 700, 1024, 2048)
    batches = (1, 2, 3, 4, 6, 8, 16)
    table = [[value_at(values, (s, b), reference)[0] for b in batches] for s in sizes]
    for line in (*table, *zip(*table, strict=True)):
        assert all(high >= low * (1 - 1e-9) for low, high in pairwise(line))


def test_measured_layers_replace_the_formula_and_make_the_estimate_measured():
    own = estimate(context(whole()), one_rank())
    passes = TRAINING.global_batch * 10 * 3 * 0.01
    assert own.split.compute_s == pytest.approx(passes)
    assert own.knowledge == "measured"
    assert own.notes == ()


def test_the_optimizer_step_is_that_of_the_elements_that_a_rank_updates():
    own = estimate(context(whole()), one_rank())
    assert own.split.optimizer_s == pytest.approx(MODEL.params_total * 1e-3 / PARAMETERS)


def test_another_optimizer_than_the_measured_one_follows_the_formula():
    training = replace(TRAINING, optimizer=Optimizer.SGD)
    plain = estimate(context(None, training), one_rank(training))
    rates = as_found(load_cluster("2xcpu"), whole()).slowest_device.memory_bytes_per_s
    faster = rates / load_cluster("2xcpu").slowest_device.memory_bytes_per_s
    own = estimate(context(whole(), training), one_rank(training))
    assert own.split.optimizer_s == pytest.approx(plain.split.optimizer_s / faster)


def test_extrapolation_is_told_and_widens_the_interval():
    sure = estimate(context(whole()), one_rank())
    far = estimate(context(whole(seq_len=64)), one_rank())
    assert far.notes == ("100 % of the layers' time lies beyond the points of the profile",)

    def width(own):
        return math.log(own.interval_s[1] / own.interval_s[0])

    assert width(far) > 1.5 * width(sure)


def test_doubtful_points_are_told():
    own = estimate(context(whole(doubtful=True)), one_rank())
    assert own.notes == ("100 % of the layers' time rests on doubtful points of the profile",)


def test_layers_that_were_not_measured_keep_the_formula_and_are_told():
    own = estimate(context(profile(row("head"))), one_rank())
    assert own.knowledge == "datasheet"
    assert "of layers that the profile does not have" in own.notes[0]


def test_a_recomputed_block_takes_its_measured_forward_again():
    full = Strategy(recompute=Recompute(RecomputeKind.FULL))
    own = context(whole()).compute(BLOCK, full, 1, Mesh())
    assert own.backward.recompute_s == pytest.approx(0.01)


def test_a_shard_that_was_not_measured_shrinks_as_the_formula_says():
    half = context(whole()).compute(BLOCK, Strategy(tp=2), 1, Mesh(tp=2))
    assert half.basis is Basis.EXTRAPOLATED
    assert 0.005 < half.forward.compute_s < 0.01


def test_a_layer_is_known_by_its_value_and_not_by_its_model():
    other = replace(
        MODEL, name="another", runs=(*MODEL.runs[:1], LayerRun(BLOCK, 3), MODEL.runs[2])
    )
    cluster = load_cluster("2xcpu")
    calibration, _ = load_calibration(None, cluster)
    own = CostContext(other, cluster, TRAINING, calibration, profile=whole())
    assert own.compute(BLOCK, Strategy(), 1, Mesh()).basis is Basis.MEASURED
    changed = replace(BLOCK, norm=Norm.LAYER)
    assert own.compute(changed, Strategy(), 1, Mesh()).basis is Basis.FORMULA


def test_a_window_that_spans_the_sequence_does_not_hide_a_measured_layer():
    windowed = replace(BLOCK, attention=replace(BLOCK.attention, window=4096))
    facts = ModelFacts(model="small", layers={"block-0": fingerprint(windowed)[:16]})
    model = replace(MODEL, runs=(MODEL.runs[0], LayerRun(windowed, 8), MODEL.runs[2]))
    cluster = load_cluster("2xcpu")
    own = replace(profile(row()), models=(facts,))
    found = CostContext(model, cluster, TRAINING, load_calibration(None, cluster)[0], profile=own)
    assert found.compute(found.classes[1], Strategy(), 1, Mesh()).basis is Basis.MEASURED
    assert found.compute(windowed, Strategy(), 1, Mesh()).basis is Basis.MEASURED


def test_measured_bytes_grow_with_the_micro_batch_and_leave_others_alone():
    held = LayerHeld(
        device="cpu", model="small", layer="block-0", batch=1, seq_len=(256,), precision="fp32",
        recompute="full", saved_bytes=1000, transient_bytes=70, state_bytes=0,
    )  # fmt: skip
    own = context(profile(row(), layer_held=(held,)))
    full = Strategy(recompute=Recompute(RecomputeKind.FULL))
    found = own.compute(BLOCK, full, 3, Mesh())
    assert (found.saved_bytes, found.transient_bytes) == (3000, 210)
    plain = context(None).compute(BLOCK, Strategy(), 3, Mesh())
    assert own.compute(BLOCK, Strategy(), 3, Mesh()).saved_bytes == plain.saved_bytes


def wrapping(zero: int, tp: int = 1, **more) -> LayerWrapping:
    return LayerWrapping(
        device="cpu", model="small", layer="block-0", tp=tp, precision="fp32", zero=zero,
        **{"forward_s": 1e-3, "backward_s": 2e-3, "step_s": 4e-3, **more},
    )  # fmt: skip


def test_wrapping_adds_to_passes_and_to_the_step_where_ranks_hold_the_same_weights():
    bare, wrapped = (
        context(profile(row(), layer_wrapping=own)) for own in ((), (wrapping(0), wrapping(3)))
    )
    for mesh, zero, count in ((Mesh(dp=2), 0, 1), (Mesh(dp=2), 3, 1), (Mesh(), 0, 0)):
        strategy = Strategy(dp=mesh.dp, zero=zero)
        less, more = (own.layer(BLOCK, strategy, 1, mesh) for own in (bare, wrapped))
        assert more.forward.total_s - less.forward.total_s == pytest.approx(count * 1e-3)
        assert more.backward.total_s - less.backward.total_s == pytest.approx(count * 2e-3)
        assert more.states.optimizer_s - less.states.optimizer_s == pytest.approx(count * 4e-3)


def test_wrapping_goes_with_the_weights_of_a_shard_and_is_of_its_stage():
    found = profile(row(), layer_wrapping=(wrapping(3),))
    own = MeasuredLayers(found, context(found).device, TRAINING)
    assert own.wrapping(BLOCK, 1, 3).step_s == 4e-3
    assert own.wrapping(BLOCK, 2, 3).step_s == pytest.approx(2e-3, rel=0.01)  # norms stay whole
    assert own.wrapping(BLOCK, 1, 2) == (0, 0, 0)
    assert own.wrapping(ENDS[0], 1, 3) == (0, 0, 0)


def test_a_device_is_as_it_was_found():
    device = as_found(load_cluster("2xcpu"), profile()).slowest_device
    assert device.memory_bytes == FACTS.memory_bytes
    assert device.memory_bytes_per_s == FACTS.memory_bytes_per_s
    assert device.peak_flop_per_s["fp32"] == 0.1e12
    assert as_found(load_cluster("8xh100"), profile()) == load_cluster("8xh100")


def operators(seconds) -> tuple[OperatorTime, ...]:
    """Operators that take what ``seconds`` says of their work."""

    def own(name, shape, forward, backward=None):
        return OperatorTime(
            device="cpu", precision="fp32", operator=name, shape=shape,
            forward_s=seconds(forward), backward_s=backward and seconds(backward),
        )  # fmt: skip

    def core(length, *, backward):
        return AttentionCore(
            batch=1, heads=8, query_len=length, key_len=length, head_dim=64, value_head_dim=64,
            visible=(length + 1) / 2, kernel=AttentionKernel.FLASH2, backward=backward,
        )  # fmt: skip

    gemms = [(1024, 1024, k) for k in (64, 256, 1024, 8192)]
    return (
        *(own("gemm", shape, Gemm(*shape, block=False)) for shape in gemms),
        *(
            own("attention", (1, 8, s, 64), core(s, backward=False), core(s, backward=True))
            for s in (1024, 4096)
        ),
        own("stream", (2**26,), Stream(3 * 4 * 2**26)),
    )


def test_efficiencies_of_operators_come_back_from_their_times():
    cluster = load_cluster("1xcpu")
    base, _ = load_calibration(None, cluster)
    device = as_found(cluster, profile()).slowest_device
    true = replace(base.efficiencies, gemm=0.8, gemm_half_k=64, stream=1.0)
    model = DeviceModel(device, true, Precision.FP32)
    own = profile(operator_times=operators(model.seconds))
    found = calibration_from(own, cluster.slowest_device, base, Precision.FP32)
    assert found.knowledge == "calibrated"
    assert found.efficiencies.gemm == pytest.approx(0.8)
    assert found.efficiencies.gemm_half_k == 64
    own_kernel, true_kernel = (each.attention["flash2"] for each in (found.efficiencies, true))
    assert own_kernel.forward == pytest.approx(true_kernel.forward)
    assert own_kernel.backward == pytest.approx(true_kernel.backward)
    assert found.efficiencies.context_bytes == FACTS.context_bytes
