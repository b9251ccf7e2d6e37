"""Bytes that layers hold, as the profiler counts them, against the cost model's account."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from cases import model_of
from profiled import BATCH, CPU, HIDDEN, LLAMA, SEQ, TRAINING, layout_of, point

from costmodel.context import CostContext
from costmodel.layout import NO_RECOMPUTE, Mesh, Recompute, RecomputeKind, Strategy
from executor.job import Recipe
from executor.profiler.held import Held
from executor.profiler.memory import RECOMPUTES, held_bytes
from executor.profiler.points import layer_labels
from executor.profiler.probe import Probe, pretended_group
from executor.trainer import Trainer
from profiles import load_calibration, load_cluster
from profiles.training import Precision

if TYPE_CHECKING:
    import torch

SHARDS = [(1, False), (2, False), (2, True)]


def norm_statistics(layer: str, modules: tuple[str, ...], tokens: int, *, full: bool) -> int:
    """What the account leaves out: a number a token of each norm that is not computed again."""
    if full or "layernorm" in modules:
        return 0
    return 4 * tokens * (1 if layer == "head" else 2)


@pytest.mark.parametrize(("tp", "sequence_parallel"), SHARDS)
@pytest.mark.parametrize("recompute", RECOMPUTES, ids=str)
def test_a_block_holds_what_the_account_says(tp, sequence_parallel, recompute):
    """To the byte but for the statistics of norms."""
    own = point("block-0", tp, sequence_parallel=sequence_parallel)
    with pretended_group(tp):
        found = held_bytes(LLAMA, TRAINING, own, recompute, CPU)
    cost = account("block-0", recompute, tp, sequence_parallel=sequence_parallel)
    tokens = BATCH * SEQ // (tp if sequence_parallel else 1)
    full = recompute.kind is RecomputeKind.FULL
    extra = norm_statistics("block-0", recompute.modules, tokens, full=full)
    assert found.saved == cost.saved_bytes + extra
    assert found.state == cost.dense_params * TRAINING.state_bytes


def account(
    layer: str, recompute: Recompute = NO_RECOMPUTE, tp: int = 1, *, sequence_parallel: bool = False
):
    cluster = load_cluster("8xcpu")
    context = CostContext(LLAMA, cluster, TRAINING, load_calibration(None, cluster)[0])
    strategy = Strategy(tp=tp, sequence_parallel=sequence_parallel, recompute=recompute)
    return context.compute(layer_labels(LLAMA)[layer], strategy, BATCH, Mesh(tp=tp))


def test_ends_hold_what_the_account_says():
    with pretended_group(1):
        head = held_bytes(LLAMA, TRAINING, point("head"), NO_RECOMPUTE, CPU)
        embedding = held_bytes(LLAMA, TRAINING, point("embedding"), NO_RECOMPUTE, CPU)
    tokens = BATCH * SEQ
    own = account("head")
    # beside the account: the norm's statistics and what it normalised, and two sums of the loss
    assert head.saved == own.saved_bytes + 4 * tokens + 4 * tokens * HIDDEN + 8
    assert head.transient == own.transient_bytes
    assert embedding.saved == account("embedding").saved_bytes


@pytest.mark.parametrize("recompute", [RECOMPUTES[0], RECOMPUTES[-1]], ids=str)
def test_fake_tensors_hold_what_real_ones_hold(recompute):
    own = point("block-0")
    with pretended_group(1):
        fake = held_bytes(LLAMA, TRAINING, own, recompute, CPU)
        probe = Probe(LLAMA, TRAINING, own, CPU, copies=1, strategy=Strategy(recompute=recompute))
        probe.backward(probe.forward())
        held = Held()
        held.know([probe.x, *probe.parameters()])
        with held:
            before = held.now
            y = probe.forward()
            saved = held.now - before
    assert y.shape == probe.x.shape
    assert saved == fake.saved


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_of_every_zero_stage_are_what_the_account_says(zero, precision):
    """Between steps the executor has whole weights in no stage but 0: then they are the shards in
    fp32, which are the account's master copy, and with bf16 all that it counts for the optimizer.
    """
    training = replace(TRAINING, precision=precision)
    strategy = Strategy(dp=2, zero=zero, shard_group=2 if zero else 1)
    with pretended_group(2):
        probe = Probe(LLAMA, training, point("block-0"), CPU, copies=1, strategy=strategy)
        probe.data_parallel.set_last_backward(last=True)
        probe.backward(probe.forward())
        probe.optimizer.step()
        held = sum(local(own).nbytes for own in probe.parameters())
        for state in probe.optimizer.state.values():
            held += sum(local(each).nbytes for each in state.values() if each.dim())
    cluster = load_cluster("2xcpu")
    context = CostContext(LLAMA, cluster, training, load_calibration(None, cluster)[0])
    mesh = Mesh(dp=2)
    cost = context.compute(layer_labels(LLAMA)["block-0"], strategy, BATCH, mesh)
    states = context.states(cost, mesh, zero, strategy.shard_group)
    weights = 4 * states.owned if precision is Precision.FP32 else 0
    assert held == states.optimizer_bytes + weights


def local(tensor: torch.Tensor) -> torch.Tensor:
    own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return own


@pytest.mark.parametrize("tied", [False, True])
def test_tied_ends_hold_one_matrix(tied):
    model = model_of(tied=tied)
    training = replace(TRAINING, seq_len=16, global_batch=BATCH)
    with pretended_group(1):
        trainer = Trainer(model, layout_of(model, 1), training, Recipe(), device=CPU, num_steps=1)
        assert trainer.num_held == model.params_total
