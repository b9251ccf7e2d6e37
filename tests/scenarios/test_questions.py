"""Questions that people ask in issue threads of training frameworks, each answered by a command.

The numbers in comments are what the askers measured; a test takes the mechanism and the direction.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared" / "models"


@pytest.fixture
def answer(parplan):
    """The JSON answer of a command and its exit code."""

    def ask(command: str, *more: str):
        result = parplan(*command.split(), *more, "--format", "json")
        assert result.exit_code in (0, 1), result.output
        return json.loads(result.stdout)

    return ask


@pytest.fixture
def text(parplan):
    """The text answer of a command, on one line."""

    def ask(command: str, *more: str):
        return " ".join(parplan(*command.split(), *more).output.split())

    return ask


def _one_replica(microbatches, tp="1,8", pp="1,8"):
    """A node of 8 for one replica of an 8B, by tensor or by pipeline parallelism alone."""
    return (
        "--model llama3-8b --cluster 8xa100-80g --seq-len 4096 --micro-batch 1 "
        f"--global-batch {microbatches} --fix dp=1 --fix cp=1 --fix tp={tp} --fix pp={pp}"
    )


def test_1_tp_or_pp_inside_a_node_depends_on_the_number_of_micro_batches(answer, text):
    # with many micro-batches PP 8 was about 30 % faster than TP 8
    steps = {}
    for microbatches, (tp, pp) in {4: (8, 1), 256: (1, 8)}.items():
        layout = answer(f"plan {_one_replica(microbatches)}")["layout"]
        assert (layout["tp"], layout["pp"]) == (tp, pp)
        steps[microbatches, "tp"] = answer(f"plan {_one_replica(microbatches, 8, 1)}")["step_s"]
        steps[microbatches, "pp"] = answer(f"plan {_one_replica(microbatches, 1, 8)}")["step_s"]
    assert steps[4, "tp"] < steps[4, "pp"]
    assert 1.15 < steps[256, "tp"] / steps[256, "pp"] < 1.5
    few = text(f"explain {_one_replica(4, 1, 8)}")
    assert "Bubble: 4 micro-batches a replica do not fill 8 stages" in few
    assert "Bubble:" not in text(f"explain {_one_replica(256)}")


def test_2_a_pipeline_that_gives_a_fifth_of_the_speed_has_too_few_micro_batches(answer, tmp_path):
    # GPT-NeoX-20B, 128 GPUs: 33 TFLOP/s per GPU with tp 2 pp 4, 170 with tp 2 pp 1
    asked = "--model gpt-neox-20b --cluster 16x8xa100-80g --seq-len 4096 --tp 2 --zero 1"
    path = str(tmp_path / "plan.yaml")
    slow, more = (
        answer(f"estimate {asked} --pp 4 --dp 16 --global-batch {batch}") for batch in (16, 1024)
    )
    flat = answer(f"estimate {asked} --pp 1 --dp 64 --recompute full --global-batch 64")
    assert slow["mfu"] < 0.45 * flat["mfu"]
    assert more["mfu"] > 2.5 * slow["mfu"]
    inputs = asked.removesuffix("--tp 2 --zero 1")
    fixed = "--fix tp=2 --fix pp=4 --fix dp=16 --fix cp=1 --fix schedule=1f1b"
    answer(f"plan {inputs} --global-batch 16 {fixed} -o {path}")
    bubble = answer(f"explain {path}")["binds"]["bubble"]
    assert bubble["microbatches"] == 1
    assert bubble["idle"] > 0.6
    assert bubble["cure_idle"] <= 0.05
    assert bubble["cure_global_batch"] == 16 * bubble["cure_microbatches"] >= 16 * 32


def test_3_how_many_gpus_a_70b_needs_depends_on_the_recipe(answer):
    recipes = {
        18: (),  # mixed precision with gradients in fp32
        16: ("--grad-dtype", "bf16"),
        10: ("--optimizer", "adamw-8bit", "--grad-dtype", "bf16"),
        8: ("--optimizer", "adamw-bf16", "--grad-dtype", "bf16"),  # all in bf16
    }
    needed = {}
    for state_bytes, flags in recipes.items():
        found = answer("plan --model llama3-70b --cluster h100-80g --smallest", *flags)
        smallest = found["smallest"]
        assert smallest["state_bytes_per_parameter"] == state_bytes
        assert found["fits"]
        assert found["layout"]["used_gpus"] == smallest["num_gpus"]
        assert "device memory" in smallest["next_smaller_lacks"]
        needed[state_bytes] = smallest["num_gpus"]
        states_gib = state_bytes * 70.55e9 / 2**30
        assert smallest["num_gpus"] * 79 > states_gib > smallest["next_smaller"] * 79 * 0.7
    assert needed[18] > needed[8]
    assert sorted(needed.values(), reverse=True) == list(needed.values())


def test_4_a_1b_that_fits_is_not_sharded(answer, tmp_path):
    # measured: DDP 8,034 tokens/s/GPU, full shard 1,747, gradients and optimizer sharded 1,790
    config = {
        "model_type": "olmo",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "vocab_size": 50304,
        "tie_word_embeddings": True,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    job = f"--model {path} --cluster 4xa100-40g --seq-len 2048 --global-batch 16"
    best = answer(f"plan {job}")
    assert best["layout"]["zero"] < 3
    ddp, full = (
        answer(f"estimate {job} --micro-batch 1 --zero {zero}")["tokens_per_s_per_gpu"]
        for zero in (0, 3)
    )
    assert ddp > full


def test_5_the_logits_of_a_large_vocabulary_are_named(answer, text):
    # 1.5B, vocabulary 152k, sequences of 16k: out of 96 GB with micro-batch 16, fits with 2
    job = (
        "estimate --model qwen2.5-1.5b --cluster 8xh20 --zero 3 --recompute full --seq-len 16384 "
        "--global-batch 128"
    )
    large, small = (answer(f"{job} --micro-batch {size}") for size in (16, 2))
    assert not large["fits"]
    assert small["fits"]
    assert small["advice"] == []
    assert "logits and loss take" in large["advice"][0]
    assert "16 x 16,384 tokens x 151,936 words; a loss computed in" in large["advice"][0]
    assert any(line.startswith("would fit: --micro-batch 2") for line in large["advice"])
    assert "- logits and loss take" in text(f"{job} --micro-batch 16")


def test_5_a_smaller_vocabulary_leaves_room_where_a_larger_one_does_not(answer, tmp_path):
    llama = {
        "model_type": "llama",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    }
    peaks = []
    for vocab in (64_000, 152_064):
        path = tmp_path / f"{vocab}.json"
        path.write_text(json.dumps(llama | {"vocab_size": vocab}))
        job = f"estimate --model {path} --cluster 4x8xa100-80g --zero 3 --recompute full"
        peaks.append(answer(f"{job} --seq-len 16384 --micro-batch 2 --global-batch 64"))
    assert [each["fits"] for each in peaks] == [True, False]


@pytest.mark.parametrize("seq_len", [16_384, 32_768])
def test_6_more_replicas_do_not_shrink_one_sequence(answer, seq_len):
    job = f"estimate --model qwen2.5-72b --zero 3 --seq-len {seq_len} --global-batch 128"
    few, many = (answer(f"{job} --cluster {n}x8xa800") for n in (8, 16))
    assert not few["fits"]
    assert not many["fits"]
    few_held, many_held = (each["stages"][0]["memory"]["activations"] for each in (few, many))
    assert few_held == many_held
    told = " ".join(many["advice"])
    assert "data parallelism and ZeRO do not divide them" in told
    assert "tensor, sequence and context parallelism do" in told


def test_7_the_peak_is_that_of_a_steady_step(answer, text):
    job = "--model llama3-8b --cluster 8xh100 --global-batch 64"
    memory = answer(f"estimate {job} --zero 1 --recompute full")["stages"][0]["memory"]
    params = 8_030_261_248
    assert memory["optimizer"] == pytest.approx(12 * params / 8, rel=0.01)
    assert "steady step (from the second on)" in text(f"explain {job}")


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_8_model_states_alone_mislead_and_zero_3_has_buffers_of_its_own(answer, recompute):
    # 7B on 8 GPUs, sequence parallel 4: ZeRO-3 took 52.8 GB against 43.8 with recomputation
    job = (
        f"estimate --model qwen2.5-7b --cluster 8xa100-80g --cp 4 --seq-len 16384 "
        f"--global-batch 16 --recompute {recompute}"
    )
    stage, plain = (answer(f"{job} --zero {zero}")["stages"][0] for zero in (3, 2))
    states = sum(stage["memory"][kind] for kind in ("parameters", "gradients", "optimizer"))
    assert stage["device_bytes"] > 1.4 * states
    outside = stage["memory"]["working"] + stage["memory"]["buffers"]
    assert outside > plain["memory"]["working"] + plain["memory"]["buffers"]


def test_8_a_small_model_takes_many_times_its_states(answer):
    # 0.77 GB promised by an estimator of states alone, 13 GB used
    job = "estimate --model qwen2.5-0.5b --cluster 8xa100-80g --zero 3 --micro-batch 4"
    stage = answer(f"{job} --global-batch 32 --seq-len 2048")["stages"][0]
    states = sum(stage["memory"][kind] for kind in ("parameters", "gradients", "optimizer"))
    assert stage["device_bytes"] > 10 * states


@pytest.mark.parametrize(
    ("layers", "stages", "legal"),
    [
        (46, 4, "1, 2, 23, 46"),
        (94, 4, "1, 2, 47, 94"),
        (30, 4, "1, 2, 3, 5, 6, 10, 15, 30"),
        (126, 16, "1, 2, 3, 6, 7, 9, 14, 18, 21, 42, 63, 126"),
    ],
)
def test_10_layers_that_do_not_divide_by_the_stages(
    answer, parplan, tmp_path, layers, stages, legal
):
    model = tmp_path / "config.json"
    llama = {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "vocab_size": 32000,
    }
    model.write_text(json.dumps(llama))
    job = f"--model {model} --cluster 16x8xh100 --global-batch 128 --seq-len 1024"
    refused = parplan(*f"plan {job} --fix pp={stages} --launcher deepspeed".split())
    assert refused.exit_code == 1
    assert f"{layers} layers do not divide by pp {stages}, which deepspeed needs" in refused.stderr
    assert f"legal are {legal}" in refused.stderr
    own = answer(f"estimate {job} --pp {stages} --dp 1")
    sizes = [_num_blocks(stage["layers"]) for stage in own["stages"]]
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) == 1
    assert own["peak_mem_bytes"] == max(stage["device_bytes"] for stage in own["stages"])


def _num_blocks(layers: str) -> int:
    """How many blocks ``embedding,0-10`` names."""
    spans = [span.split("-") for span in layers.split(",") if span[0].isdigit()]
    return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)


def test_11_heads_that_do_not_divide_list_the_valid_degrees(parplan, tmp_path):
    model = tmp_path / "config.json"
    llama = {
        "model_type": "llama",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 28,
        "vocab_size": 32000,
    }
    model.write_text(json.dumps(llama))
    told = parplan(*f"estimate --model {model} --cluster 4x8xh100 --tp 8".split())
    assert told.exit_code == 2
    assert "--tp: 28 heads do not divide by tp 8; expected one of 1, 2, 4, 7, 14, 28" in told.stderr


def test_11_few_key_value_heads_are_replicated_or_refused_by_launcher(parplan):
    job = "plan --model chatglm3-6b --cluster 4xh100 --global-batch 32 --fix tp=4 --launcher"
    assert parplan(*f"{job} megatron".split()).exit_code == 0
    refused = parplan(*f"{job} torchtitan".split())
    assert refused.exit_code == 1
    assert "2 key/value heads do not divide by tp 4 on torchtitan; legal are 1, 2" in refused.stderr


def test_12_layers_move_away_from_the_stages_of_a_large_vocabulary(answer):
    job = "--model bloom-176b --cluster 12x8xa100-80g --global-batch 512 --seq-len 2048"
    even = answer(f"estimate {job} --tp 4 --pp 12 --zero 1")
    first, *inner = (stage["memory"]["optimizer"] for stage in even["stages"])
    assert first > max(inner[:-1])
    found = answer(f"plan {job} --fix tp=4 --fix pp=12 --fix chunks=1")
    sizes = [_num_blocks(stage["layers"]) for stage in found["stages"]]
    assert sum(sizes) == 70
    assert min(sizes[0], sizes[-1]) < max(sizes[1:-1])
    assert all(stage["device_bytes"] < 80 * 2**30 for stage in found["stages"])


def test_14_attention_without_flash_grows_with_the_square_of_the_sequence(answer, tmp_path):
    # one layer took 3.9, 11.8 and 42.9 GiB at 4k, 8k and 16k
    model = tmp_path / "config.json"
    llama = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "vocab_size": 1000,
    }
    model.write_text(json.dumps(llama))

    def held(kernel: str, seq_len: int) -> int:
        job = f"estimate --model {model} --cluster 1xh100 --global-batch 1 --attention {kernel}"
        memory = answer(f"{job} --seq-len {seq_len}")["stages"][0]["memory"]
        return memory["activations"] + memory["working"]

    unfused = [held("unfused", n) for n in (4096, 8192, 16_384)]
    flash = [held("flash2", n) for n in (4096, 8192, 16_384)]
    assert 2.7 < unfused[1] / unfused[0] < 4
    assert 3.4 < unfused[2] / unfused[1] < 4
    assert flash[2] / flash[0] == pytest.approx(4, rel=0.02)
    assert 20 < unfused[2] / 2**30 < 60


def test_15_every_published_config_is_counted_or_refused_with_its_reason(parplan):
    if not SHARED.is_dir():
        pytest.skip("the published configs are not here")
    with (SHARED / "expected.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        result = parplan("describe", SHARED / "hf" / f"{row['name']}.json", "--format", "json")
        if row["expect"].startswith("parse") and "refuse" not in row["expect"]:
            facts = json.loads(result.stdout)
            total = float(row["count_total_b"]) * 1e9
            assert facts["params_total"] == pytest.approx(total, rel=0.005), row["name"]
        elif row["expect"] == "refuse":
            assert result.exit_code == 2, row["name"]
            assert row["model_type"] in result.stderr
