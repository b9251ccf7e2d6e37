from __future__ import annotations

import pytest

from profiles.calibrations import stack_family
from profiles.errors import InputError
from profiles.layers import Block, ExpertFeedForward
from profiles.runs import published_runs, read_runs
from profiles.runspecs import run_cluster, run_model, run_training
from profiles.training import AttentionKernel, GradDtype, Precision

ROW = {
    "id": "mine-1",
    "stack": "Megatron-LM",
    "gpu": "A100",
    "gpu_mem_gb": "80",
    "gpus_per_node": "8",
    "n_gpus": "16",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "vocab": "50304",
    "seq_len": "1024",
    "global_batch": "64",
    "micro_batch": "4",
    "tp": "2",
    "pp": "1",
    "precision": "bf16",
    "attn_kernel": "flash2",
    "step_time_s": "1.5",
    "outcome": "ok",
}


@pytest.fixture
def write(tmp_path):
    """Writes rows as CSV and gives its path."""

    def rows(*changes: dict[str, str]):
        given = [{**ROW, "id": f"mine-{i}", **change} for i, change in enumerate(changes)]
        columns = list(dict.fromkeys(name for row in given for name in row))
        lines = [",".join(columns)]
        lines += [",".join(f'"{row.get(name, "")}"' for name in columns) for row in given]
        path = tmp_path / "runs.csv"
        path.write_text("\n".join(lines) + "\n")
        return path

    return rows


@pytest.fixture
def run(write):
    """The one run of a file with some cells changed."""
    return lambda **change: read_runs(write(change)).runs[0]


def told(path) -> list[str]:
    with pytest.raises(InputError) as error:
        read_runs(path)
    return [str(problem).replace(f"{path}:", "") for problem in error.value.problems]


def test_numbers_are_numbers_and_empty_cells_are_not_stated(run):
    read = run(tp="2.0", heads="16", kv_heads="")
    assert (read.tp, read.heads, read.kv_heads) == (2, 16, None)


def test_unknown_columns_are_named_in_a_note(write):
    assert read_runs(write({"mood": "good"})).notes[0].endswith("are ignored: mood")


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ({"tp": "two"}, "2:tp: is 'two'; expected a whole number above 0"),
        ({"tp": "1.5"}, "2:tp: is '1.5'; expected a whole number above 0"),
        ({"layers": "99999"}, "2:layers: is '99999'; expected a whole number above 0 to 10,000"),
        ({"step_time_s": "-1"}, "2:step_time_s: is '-1'; expected a number above 0"),
        ({"step_time_s": "nan"}, "2:step_time_s: is 'nan'; expected a number above 0"),
        ({"gated_mlp": "maybe"}, "2:gated_mlp: is 'maybe'; expected 1 or 0"),
        ({"gpu": ""}, "2:gpu: is empty"),
        ({"outcome": "okay"}, "2:outcome: is 'okay'; expected one of ok, oom, oom_cpu"),
    ],
)
def test_a_wrong_cell_is_told_by_row_and_column(write, cell, problem):
    (line,) = told(write(cell))
    assert line.startswith(problem)


def test_every_wrong_cell_is_told(write):
    assert len(told(write({"tp": "x", "pp": "y"}, {"n_gpus": "0"}))) == 3


def test_a_missing_column_is_told_with_the_nearest_name(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("id,gpus,n_gpus,stack,outcome\na,A100,8,x,ok\n")
    assert told(path) == [
        (
            "1: there is no column gpu; expected the columns id, gpu, n_gpus, stack, outcome "
            "(did you mean gpus?)"
        ),
    ]


def test_a_file_without_runs_and_a_name_that_stands_twice_are_told(write, tmp_path):
    empty = tmp_path / "empty.csv"
    empty.write_text(",".join(ROW) + "\n")
    assert "has no run" in told(empty)[0]
    assert "stands in" in told(write({"id": "a"}, {"id": "a"}))[0]


def test_the_torch_release_of_the_notes_belongs_to_the_stack(run):
    assert run(stack="FSDP", notes="ran on torch 1.13; fast").release == "FSDP torch 1.13"
    assert run(stack="FSDP", notes="").release == "FSDP"


def test_the_transport_of_omni_path_makes_another_stack_of_the_same_family(run):
    release = run(stack="Trainer 2", inter_bw="4x Omni-Path 100 Gb/s per node").release
    assert release == "Trainer 2 over Omni-Path"
    assert stack_family(release) == stack_family("Trainer 1.9") == "Trainer any"


@pytest.mark.parametrize(
    ("text", "per_node"),
    [
        ("400 Gb/s per GPU", 8 * 50e9),
        ("IB HDR 4x200Gb/s", 4 * 25e9),
        ("800 Gb/s per node", 100e9),
        ("4x Omni-Path 100 Gb/s per node", 50e9),
        ("", 8 * 25e9),  # the node of the catalogue
    ],
)
def test_the_network_is_read_in_the_words_of_the_sources(run, text, per_node):
    (group,) = run_cluster(run(inter_bw=text)).groups
    assert group.node.uplink_bytes_per_s == pytest.approx(per_node)


def test_a_rate_in_gigabytes_that_was_meant_in_gigabits_is_told(run):
    with pytest.raises(InputError, match=r"runs.csv:2:inter_bw: .*Gb/s given as GB/s"):
        run_cluster(run(inter_bw="400 GB/s per GPU"))


def test_an_unknown_device_is_told_by_row_and_column(run):
    with pytest.raises(InputError, match=r"2:gpu: A10O with 80 GB is not in the catalogue"):
        run_cluster(run(gpu="A10O"))


def test_the_memory_tells_devices_of_one_name_apart(run):
    names = [
        run_cluster(run(gpu="H100", gpu_mem_gb=size)).slowest_device.name for size in ("80", "95")
    ]
    assert names == ["h100-80g", "h100-96g"]


def test_a_gated_model_is_llama_like_and_another_gpt_like(run):
    llama = run_model(run(gated_mlp="1", ffn_hidden="5632"))
    gpt = run_model(run(gated_mlp="0", attn_kernel="unfused"))
    assert (llama.tied, gpt.tied) == (False, True)
    assert llama.params_total < gpt.params_total + 2 * 50304 * 2048


def test_parameters_of_a_published_moe_model_are_those_of_its_makers(run):
    """Qwen3-30B-A3B: 30.5 billion, 3.3 active."""
    model = run_model(
        run(
            gated_mlp="1", layers="48", hidden="2048", ffn_hidden="6144", heads="32",
            kv_heads="4", head_dim="128", vocab="151936", num_experts="128", topk="8",
            moe_ffn_hidden="768", tied_embeddings="0",
        )
    )  # fmt: skip
    assert model.params_total == pytest.approx(30.5e9, rel=0.005)
    assert model.params_active == pytest.approx(3.35e9, rel=0.01)


def test_dense_and_sparse_blocks_alternate_where_the_notes_say_so(run):
    experts = {"num_experts": 8, "topk": 1, "moe_ffn_hidden": 1024, "shared_ffn_hidden": 0}
    every = run_model(run(**experts))
    other = run_model(run(**experts, notes="proxy; dense/MoE alternate layers; release 2025"))
    sparse = [
        [isinstance(r.layer, Block) and isinstance(r.layer.feed_forward, ExpertFeedForward)
         for r in model.runs for _ in range(r.count)][1:-1]
        for model in (every, other)
    ]  # fmt: skip
    assert all(sparse[0])
    assert sparse[1] == [False, True] * (len(sparse[1]) // 2)


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        ("flash_attention2 + RMS kernel", AttentionKernel.FLASH2),
        ("flash_attentionv1.0.8", AttentionKernel.FLASH1),
        ("unfused (megatron fused softmax)", AttentionKernel.UNFUSED),
        ("torch", AttentionKernel.EAGER),
        ("cuDNN/TE fused", AttentionKernel.FUSED),
    ],
)
def test_attention_kernels_are_read_in_the_words_of_the_sources(run, words, kernel):
    assert run_training(run(attn_kernel=words)).attention is kernel


def test_precisions_and_gradient_types_are_those_of_the_software(run):
    assert run_training(run(precision="mxfp8")).precision is Precision.FP8_BLOCKWISE
    assert run_training(run(precision="nvfp4")).precision is Precision.NVFP4
    assert run_training(run()).grad_dtype is GradDtype.FP32
    assert run_training(run(stack="torchtitan", zero_stage="3")).grad_dtype is GradDtype.BF16
    with pytest.raises(InputError, match="2:precision: is 'bf17'"):
        run_training(run(precision="bf17"))


@pytest.mark.parametrize(
    ("stack", "precision", "kept"),
    [
        ("Megatron-DeepSpeed", "bf16", True),
        ("Megatron-DeepSpeed", "fp16", False),
        ("Megatron-LM", "bf16", False),
    ],
)
def test_deepspeed_keeps_16_bit_gradients_in_bf16_only(run, stack, precision, kept):
    training = run_training(run(stack=stack, precision=precision))
    assert training.keeps_half_gradients is kept


def test_the_shipped_table_is_small_cited_and_wholly_stated():
    runs = read_runs(published_runs()).runs
    assert 100 <= len(runs) <= 150
    assert all(each.source and each.always_predicted for each in runs)
