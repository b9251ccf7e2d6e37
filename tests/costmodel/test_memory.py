"""Memory: the formulas of Korthikanti et al. 2022, ZeRO's table, measured allocator peaks.

Notation of the paper: s sequence, b micro-batch, h hidden, a heads, t tensor parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from published import RECOMPUTES, model_of, read_csv, run_of, runs, training_of

from costmodel.context import CostContext
from costmodel.layout import NO_RECOMPUTE, Mesh, Recompute, RecomputeKind, Strategy
from costmodel.sharding import state_bytes
from profiles import load_calibration, load_cluster
from profiles.layers import Attention, Block, ExpertFeedForward, FeedForward, Norm
from profiles.model import LayerRun, ModelSpec
from profiles.training import AttentionKernel, GradDtype, Optimizer, Precision, TrainingSpec

GIB = 2**30
S, B, H, A, T = 2048, 4, 6144, 64, 8
SBH = S * B * H
SCORES = 5 * A * S**2 * B
SELECTIVE, FULL = RECOMPUTES["selective"], RECOMPUTES["full"]
FP16 = TrainingSpec(
    global_batch=8, seq_len=S, precision=Precision.FP16, attention=AttentionKernel.UNFUSED
)
GPT = Block(
    hidden=H,
    attention=Attention(heads=A, kv_heads=A, head_dim=H // A, value_head_dim=H // A, rope=False),
    feed_forward=FeedForward(ffn_hidden=4 * H, gated=False),
    norm=Norm.LAYER,
    dropout=True,
)
LLAMA = Block(
    hidden=4096,
    attention=Attention(heads=32, kv_heads=8, head_dim=128, value_head_dim=128),
    feed_forward=FeedForward(ffn_hidden=14336, gated=True),
    norm=Norm.RMS,
)
EXPERTS = ExpertFeedForward(num_experts=8, top_k=2, expert_hidden=14336, shared_hidden=4096)
MIXTRAL = replace(LLAMA, feed_forward=EXPERTS)


def cost(block: Block, training: TrainingSpec = FP16, micro_batch: int = B, **degrees):
    """The cost of one block on 8 GPUs."""
    cluster = load_cluster("8xa100-80g")
    calibration, _ = load_calibration(None, cluster)
    model = ModelSpec(name="one", family="generic", runs=(LayerRun(block, 1),))
    strategy = Strategy(**degrees)
    mesh = Mesh(**{name: getattr(strategy, name) for name in ("tp", "cp", "ep", "dp")})
    context = CostContext(model, cluster, training, calibration)
    return context.compute(block, strategy, micro_batch, mesh)


def test_a_block_keeps_34_sbh_and_5_a_s_s_b():
    assert cost(GPT).saved_bytes == 34 * SBH + SCORES


def test_tensor_parallelism_divides_24_of_the_34():
    assert cost(GPT, tp=T).saved_bytes == 10 * SBH + (24 * SBH + SCORES) // T


def test_sequence_parallelism_divides_all_34():
    assert cost(GPT, tp=T, sequence_parallel=True).saved_bytes == (34 * SBH + SCORES) // T


def test_selective_recomputation_drops_all_that_grows_with_s_squared():
    assert cost(GPT, recompute=SELECTIVE).saved_bytes == 34 * SBH
    parallel = cost(GPT, tp=T, sequence_parallel=True, recompute=SELECTIVE)
    assert parallel.saved_bytes == 34 * SBH // T


def test_full_recomputation_keeps_the_input_of_the_layer():
    assert cost(GPT, recompute=FULL).saved_bytes == 2 * SBH
    assert cost(GPT, tp=T, recompute=FULL).saved_bytes == 2 * SBH
    assert cost(GPT, tp=T, sequence_parallel=True, recompute=FULL).saved_bytes == 2 * SBH // T


def test_flash_attention_keeps_no_scores():
    flash = replace(FP16, attention=AttentionKernel.FLASH2)
    statistics = 4 * S * B * A
    assert cost(GPT, flash).saved_bytes == 34 * SBH + statistics


@pytest.mark.parametrize("modules", [("core_attn",), ("layernorm",), ("mlp",), ("moe_act",)])
@pytest.mark.parametrize("block", [GPT, LLAMA, MIXTRAL], ids=["gpt", "llama", "mixtral"])
def test_what_recomputation_does_not_keep_lives_while_it_runs_backward(block, modules):
    whole = cost(block)
    for recompute in (FULL, Recompute(RecomputeKind.SELECTIVE, modules)):
        lean = cost(block, recompute=recompute)
        assert lean.saved_bytes <= whole.saved_bytes
        assert lean.saved_bytes + lean.transient_bytes == whole.saved_bytes + whole.transient_bytes
        assert lean.forward == whole.forward
        assert lean.backward.total_s >= whole.backward.total_s


def test_recomputing_everything_replays_the_whole_forward():
    whole, lean = (cost(GPT, tp=T, recompute=each) for each in (NO_RECOMPUTE, FULL))
    again = lean.backward.total_s - whole.backward.total_s
    assert again == pytest.approx(whole.forward.total_s)
    assert lean.backward.recompute_s == pytest.approx(whole.forward.compute_s)
    assert lean.backward.tp_s == pytest.approx(whole.backward.tp_s + whole.forward.tp_s)


# quantity of figure 7 -> strategy of the block that it divides by the tensor-parallel one
FIGURE_7 = {
    "activations vs tensor-parallel baseline: sequence parallel": {"sequence_parallel": True},
    "selective recompute": {"recompute": SELECTIVE},
    "selective + sequence": {"recompute": SELECTIVE, "sequence_parallel": True},
    "full recompute": {"recompute": FULL},
}
FIGURES = "memory_korthikanti_figs.csv"
MODELS = ("GPT-22B", "GPT-175B", "GPT-530B", "GPT-1T")


def published(model: str) -> dict[str, float]:
    """Quantity -> value for one model."""
    rows = [row for row in read_csv(FIGURES) if row["model"] == model]
    return {row["quantity"]: float(row["value"]) for row in rows}


@pytest.mark.parametrize("model", MODELS)
def test_a_blocks_activations_are_the_percents_of_figure_7(model):
    row = next(row for row in read_csv(FIGURES) if row["model"] == model)
    hidden, heads = int(row["hidden"]), int(row["heads"])
    size = hidden // heads
    attention = replace(
        GPT.attention, heads=heads, kv_heads=heads, head_dim=size, value_head_dim=size
    )
    wide = FeedForward(ffn_hidden=4 * hidden, gated=False)
    block = replace(GPT, hidden=hidden, attention=attention, feed_forward=wide)

    def saved(**degrees) -> int:
        return cost(block, micro_batch=int(row["micro_batch"]), tp=T, **degrees).saved_bytes

    expected, baseline = published(model), saved()
    percents = {key: 100 * saved(**chosen) / baseline for key, chosen in FIGURE_7.items()}
    assert percents == pytest.approx({key: expected[key] for key in FIGURE_7}, abs=1.5)


def table_5(model: str, recompute: str):
    """The published run of a model with ``recompute``, as one of its two runs states it."""
    rows = read_csv("measured_runs.csv")
    row = next(r for r in rows if r["file"] == "korthikanti_tab5" and r["model"] == model)
    parallel = "1" if recompute == "selective" else "0"
    return run_of({**row, "recompute": recompute, "sequence_parallel": parallel})


@pytest.mark.parametrize(
    ("recompute", "quantity"),
    [
        ("none", "activations per GPU, no recompute, tensor parallel only"),
        ("selective", "activations per GPU, selective + sequence parallel"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_the_first_stage_holds_the_activations_of_figure_1(model, recompute, quantity):
    """The figure counts the blocks alone: L (1 + (p-1)/(pv)) times one block. The first stage
    also holds the embedding's dropout masks and, without a pipeline, the logits' softmax.
    """
    first = table_5(model, recompute).estimate().stages[0]
    assert first.memory.activations / GIB == pytest.approx(published(model)[quantity], rel=0.05)


@pytest.mark.parametrize("model", MODELS)
def test_a_middle_stage_holds_the_states_of_figure_1(model):
    """18 bytes for each parameter of the blocks, norms and biases left out; 22B has only one
    stage, with the embedding on it.
    """
    stages = table_5(model, "selective").estimate().stages
    memory = stages[len(stages) // 2].memory
    states = (memory.parameters + memory.gradients + memory.optimizer) / GIB
    rel = 0.002 if len(stages) > 1 else 0.02
    expected = published(model)["params+grads+optimizer per GPU"]
    assert states == pytest.approx(expected, rel=rel)


PSI, D = 64_000, 8
SIXTEEN = TrainingSpec(global_batch=8, seq_len=1, grad_dtype=GradDtype.BF16)
EIGHTEEN = replace(SIXTEEN, grad_dtype=GradDtype.FP32)
ZERO = [(0, 16 * PSI), (1, 4 * PSI + 12 * PSI // D), (2, 2 * PSI + 14 * PSI // D)]


@pytest.mark.parametrize("dtype", [GradDtype.BF16, GradDtype.FP16])
@pytest.mark.parametrize(("zero", "total"), [*ZERO, (3, 16 * PSI // D)])
def test_states_with_16_bit_gradients_follow_the_table_of_zero(zero, total, dtype):
    training = replace(SIXTEEN, grad_dtype=dtype)
    assert state_bytes(PSI, zero, D, training).total == total


@pytest.mark.parametrize(
    ("zero", "total"),
    [
        (0, 18 * PSI),
        (1, 6 * PSI + 12 * PSI // D),
        (2, 2 * PSI + 16 * PSI // D),
        (3, 18 * PSI // D),
    ],
)
def test_gradients_in_fp32_cost_two_bytes_more(zero, total):
    assert state_bytes(PSI, zero, D, EIGHTEEN).total == total


def test_16_bit_gradients_that_stay_beside_those_in_fp32_cost_two_bytes_more_wherever_zero_1_is():
    both = replace(EIGHTEEN, keeps_half_gradients=True)
    for zero in (0, 1):
        more = state_bytes(PSI, zero, D, both).total - state_bytes(PSI, zero, D, EIGHTEEN).total
        assert more == 2 * PSI


@pytest.mark.parametrize(
    ("precision", "optimizer", "grad_dtype", "expected"),
    [
        (Precision.BF16, Optimizer.ADAMW, GradDtype.FP32, 18),
        (Precision.FP32, Optimizer.ADAMW, GradDtype.FP32, 16),
        (Precision.BF16, Optimizer.SGD, GradDtype.BF16, 12),
        (Precision.BF16, Optimizer.ADAMW_8BIT, GradDtype.BF16, 10),
        (Precision.BF16, Optimizer.ADAMW_BF16, GradDtype.BF16, 8),
    ],
)
def test_bytes_of_one_parameter_follow_precision_and_optimizer(
    precision, optimizer, grad_dtype, expected
):
    training = TrainingSpec(
        global_batch=1,
        seq_len=1,
        precision=precision,
        optimizer=optimizer,
        grad_dtype=grad_dtype,
    )
    assert training.state_bytes == state_bytes(1, 0, 1, training).total == expected


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shards_are_rounded_up_so_that_together_they_hold_everything(zero):
    part, whole = (state_bytes(1001, each, 8, EIGHTEEN) for each in (zero, 0))
    assert 8 * part.optimizer >= whole.optimizer
    assert part.owned == 126


def test_measured_allocator_peaks_are_met():
    """B200 runs of SimuMax: Llama 70B and DeepSeek-V2 cut to a few layers, tp, pp, cp and ep."""
    errors = []
    for run in runs("simumax"):
        if run.row["peak_mem_gib"]:
            ours = run.estimate().allocated_bytes / GIB
            errors.append(abs(ours / float(run.row["peak_mem_gib"]) - 1))
    assert len(errors) >= 20
    assert median(errors) <= 0.05
    assert max(errors) <= 0.10


def test_the_reader_gives_published_models_their_published_size():
    rows = {row["model"]: row for row in read_csv("measured_runs.csv") if row["trust"] == "high"}
    billions = {"GPT-22B": 22.0, "GPT-175B": 175.0, "GPT-530B": 529.6, "GPT-1T": 1008.0}
    for model, expected in billions.items():
        assert model_of(rows[model]).params_total / 1e9 == pytest.approx(expected, rel=0.01)
        assert training_of(rows[model]).attention is AttentionKernel.UNFUSED
