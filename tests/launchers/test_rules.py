"""Every rule of every launcher: a job that keeps it, and one that breaks it and no other way."""

from __future__ import annotations

import json

import pytest
import yaml

from executor.checking import check_arguments
from executor.importing import Asked
from executor.launchers.registry import NAMES, launcher

MEGATRON = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 "
    "--seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope "
    "--micro-batch-size 1 --global-batch-size 128 --bf16 --vocab-size 32000"
)
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 4096 --moe-grouped-gemm"
ONE = "CUDA_DEVICE_MAX_CONNECTIONS=1 python pretrain_gpt.py"
FSDP = f"{MEGATRON} --use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor"
TORCH_FSDP = f"{MEGATRON} --use-torch-fsdp2 --no-gradient-accumulation-fusion"
UNTIED = "--untie-embeddings-and-output-weights"

PP, TP = "--pipeline-model-parallel-size", "--tensor-model-parallel-size"
EP, LAYOUT = "--expert-model-parallel-size", "--pipeline-model-parallel-layout"
VIRTUAL, DIST = "--num-virtual-stages-per-pipeline-rank", "--use-distributed-optimizer"
SELECTIVE = "--recompute-granularity selective --recompute-modules"

# rule: arguments that break it (on 64 GPUs), in the order of the rule book
MEGATRON_BREAKS = {
    "attention-heads": f"{ONE} {MEGATRON} --num-attention-heads 12 {TP} 8",
    "query-groups": (
        f"{ONE} {MEGATRON} --group-query-attention --num-query-groups 6 "
        f"--num-attention-heads 48 {TP} 4 --hidden-size 6144"
    ),
    "feed-forward-width": f"{ONE} {MEGATRON} --ffn-hidden-size 10922 {TP} 4",
    "context-pieces": f"{ONE} {MEGATRON} --seq-length 4092 --context-parallel-size 8",
    "sequence-parallel-pieces": f"{ONE} {MEGATRON} --seq-length 4092 {TP} 8 --sequence-parallel",
    "batch-divides": f"{MEGATRON} --global-batch-size 130",
    "world-divides": f"{ONE} {MEGATRON} {TP} 4 --context-parallel-size 32",
    "expert-world-divides": f"{MEGATRON} {EXPERTS} {EP} 8 {PP} 16",
    "optimizer-copies-divide": f"{MEGATRON} {DIST} --num-distributed-optimizer-instances 5",
    "experts-divide": f"{MEGATRON} --num-experts 8 {EP} 16",
    "experts-need-sequence-parallel": f"{ONE} {MEGATRON} {EXPERTS} {TP} 2",
    "sequence-parallel-without-tensor": f"{MEGATRON} --sequence-parallel",
    "one-way-of-virtual-stages": (
        f"{MEGATRON} {PP} 4 {VIRTUAL} 2 --num-layers-per-virtual-pipeline-stage 4"
    ),
    "layers-divide-by-stages": f"{MEGATRON} --num-layers 30 {PP} 4",
    "first-and-last-leave-whole-stages": f"{MEGATRON} {PP} 4 --decoder-first-pipeline-num-layers 7",
    "cut-flags-exclude-one-another": (
        f"{MEGATRON} {PP} 2 --decoder-first-pipeline-num-layers 15 "
        "--account-for-loss-in-pipeline-split"
    ),
    "layout-is-whole": f"{MEGATRON} {PP} 2 {LAYOUT} 'Et*16|t*15L'",
    "virtual-stages-need-a-pipeline": (
        f"{MEGATRON} {PP} 2 {VIRTUAL} 2 --no-overlap-p2p-communication"
    ),
    "layers-divide-by-virtual-stages": f"{MEGATRON} {PP} 4 {VIRTUAL} 3",
    "enough-microbatches-for-virtual-stages": (
        f"{MEGATRON} {PP} 8 {VIRTUAL} 2 --global-batch-size 32"
    ),
    "full-recompute-says-how": f"{MEGATRON} --recompute-granularity full",
    "recompute-modules-exist": f"{MEGATRON} {EXPERTS} {SELECTIVE} experts",
    "recompute-no-more-layers-than-there-are": (
        f"{MEGATRON} {PP} 4 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 9"
    ),
    "core-attention-with-flash": f"{MEGATRON} --recompute-granularity selective",
    "split-saved-activations": f"{MEGATRON} --distribute-saved-activations",
    "overlaps-build-on-one-another": f"{MEGATRON} {DIST} --overlap-param-gather",
    "torch-fsdp2-alone": f"{TORCH_FSDP} {UNTIED} {DIST}",
    "megatron-fsdp-checkpoints": f"{MEGATRON} --use-megatron-fsdp",
    "connections-with-fsdp": f"{ONE} {FSDP}",
    "connections-with-tensor-or-context": f"{MEGATRON} {TP} 2",
    "batch-is-stated-once": (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size "
        "11008 --seq-length 4096 --max-position-embeddings 4096 "
        "--position-embedding-type rope  --global-batch-size 128 --bf16 --vocab-size "
        "32000"
    ),
    "one-precision": f"{MEGATRON} --fp16",
    "stated-precision": (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size "
        "11008 --seq-length 4096 --max-position-embeddings 4096 "
        "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 128  "
        "--vocab-size 32000"
    ),
    "positions-reach": f"{MEGATRON} --seq-length 8192",
    "heads-divide-width": f"{MEGATRON} --hidden-size 4097",
    "latent-or-grouped": (
        f"{MEGATRON} --multi-latent-attention --group-query-attention --num-query-groups 32"
    ),
    "groups-without-grouping": f"{MEGATRON} --num-query-groups 8",
    "expert-pattern-fits": f"{MEGATRON} {EXPERTS} --moe-layer-freq '([0]*1+[1]*30)'",
    "vocabulary-is-padded": (
        f"{ONE} {MEGATRON} --vocab-size 50257 {TP} 8 --make-vocab-size-divisible-by 1024"
    ),
}
# Every clause of rules that have several: what the message says of it.
MEGATRON_CLAUSES = (
    (
        f"{MEGATRON} {EP} 2",
        "no --num-experts",
    ),
    (
        f"{MEGATRON} {PP} 2 {LAYOUT} t*16|Et*16L",
        "E",
    ),
    (
        f"{MEGATRON} {PP} 2 {LAYOUT} Et*16|Lt*16",
        "L",
    ),
    (
        f"{MEGATRON} {PP} 2 {LAYOUT} Et*16|x|t*16L",
        "x",
    ),
    (
        f"{MEGATRON} {PP} 4 {LAYOUT} Et*16|t*8|t*8L",
        "a layout of 3 stages for pp 4",
    ),
    (
        f"{MEGATRON} {PP} 2 {LAYOUT} Et*16|t*16L --decoder-last-pipeline-num-layers 15",
        "with --decoder-last-pipeline-num-layers",
    ),
    (
        f"{MEGATRON} --decoder-last-pipeline-num-layers 8",
        "24 layers are left for 0 stages",
    ),
    (
        f"{MEGATRON} {PP} 4 --account-for-embedding-in-pipeline-split",
        "32 layers and 1 for embedding and loss",
    ),
    (
        f"{MEGATRON} {PP} 4 --num-layers-per-virtual-pipeline-stage 3",
        "8 layers of a rank in virtual stages of 3",
    ),
    (
        f"{MEGATRON} {VIRTUAL} 2",
        "2 virtual stages with pp 1",
    ),
    (
        f"{MEGATRON} {PP} 4 {VIRTUAL} 2 --global-batch-size 96",
        "6 micro-batches leave 2 for the last group of 4",
    ),
    (
        (
            f"{MEGATRON} --recompute-granularity selective --recompute-num-layers 2 "
            "--recompute-modules mlp"
        ),
        "selective recomputation with --recompute-num-layers",
    ),
    (
        (
            f"{MEGATRON} --recompute-granularity selective --recompute-method block "
            "--recompute-modules mlp"
        ),
        "selective recomputation with --recompute-method",
    ),
    (
        f"{MEGATRON} {SELECTIVE} moe_act",
        "moe_act without",
    ),
    (
        f"{MEGATRON} {SELECTIVE} mla_up_proj",
        "mla_up_proj",
    ),
    (
        f"{MEGATRON} --fp8-format hybrid {SELECTIVE} layernorm",
        "layernorm under delayed fp8 scaling",
    ),
    (
        f"{MEGATRON} --overlap-grad-reduce --overlap-param-gather",
        "without --use-distributed-optimizer",
    ),
    (
        f"{MEGATRON} --tp-comm-overlap",
        "without sequence parallelism",
    ),
    (
        f"{MEGATRON} --overlap-param-gather-with-optimizer-step",
        "without overlapped gathers",
    ),
    (
        f"{TORCH_FSDP} {UNTIED} {PP} 2",
        "torch FSDP2 with pp 2",
    ),
    (
        f"{TORCH_FSDP} {UNTIED} {EXPERTS} {EP} 2",
        "torch FSDP2 with ep 2",
    ),
    (
        f"{MEGATRON} --use-torch-fsdp2 {UNTIED}",
        "fused gradient accumulation",
    ),
    (
        f"{TORCH_FSDP}",
        "tied embeddings",
    ),
    (
        (
            "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size "
            "11008 --seq-length 4096 --max-position-embeddings 4096 "
            "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 128 "
            "--fp16 --vocab-size 32000 --use-torch-fsdp2 --no-gradient-accumulation-fusion "
            f"{UNTIED}"
        ),
        "torch FSDP2 with fp16",
    ),
    (
        f"{TORCH_FSDP} {UNTIED} --ckpt-format torch",
        "checkpoints of torch",
    ),
    (
        f"{FSDP} --optimizer muon",
        "Megatron-FSDP with muon",
    ),
    (
        f"{MEGATRON} --ckpt-format fsdp_dtensor",
        "without Megatron-FSDP",
    ),
    (
        f"{ONE} {TORCH_FSDP} {UNTIED}",
        "CUDA_DEVICE_MAX_CONNECTIONS is 1 with FSDP",
    ),
    (
        f"{FSDP} {TP} 2",
        "opposite numbers of connections",
    ),
    (
        f"{MEGATRON} --step-batch-size-schedule 0:64",
        "with --step-batch-size-schedule",
    ),
    (
        f"{MEGATRON} --fp8-format hybrid --fp4-format e2m1",
        "fp8 and fp4 together",
    ),
    (
        f"{MEGATRON} {EXPERTS} {DIST} {EP} 8 --num-distributed-optimizer-instances 16",
        "16 optimizer instances for 8 replicas",
    ),
    (
        (f"{MEGATRON} --num-experts 8 --moe-ffn-hidden-size 4095 {TP} 2 --sequence-parallel"),
        "expert width 4095",
    ),
)

TITAN = (
    "--module llama3 --config llama3_8b --training.local_batch_size 1 --training.seq_len 4096 "
    "--training.global_batch_size 64 --parallelism.data_parallel_shard_degree -1"
)
PIPED = f"{TITAN} --parallelism.pipeline_parallel_degree 4 --training.disable_cuda_graphs"
EIGHT = f"{PIPED} --training.local_batch_size 8 --training.global_batch_size 128"
STAGES = (
    "tok_embeddings,layers.0,layers.1,layers.2,layers.3,layers.4,layers.5,layers.6,layers.7",
    ",".join(f"layers.{n}" for n in range(8, 16)),
    ",".join(f"layers.{n}" for n in range(16, 24)),
    ",".join([*(f"layers.{n}" for n in range(24, 32)), "norm,lm_head"]),
)
MODULES = f"--parallelism.module_fqns_per_model_part {' '.join(STAGES)}"
NEVER = "--parallelism.fsdp_reshard_after_forward never"
ALWAYS = "--parallelism.fsdp_reshard_after_forward always"
TITAN_BREAKS = {
    "key-value-heads": f"{TITAN} --parallelism.tensor_parallel_degree 16",
    "attention-heads": f"{TITAN} --parallelism.tensor_parallel_degree 64",
    "feed-forward-width": f"{TITAN} --parallelism.tensor_parallel_degree 3",
    "context-pieces": f"{TITAN} --training.seq_len 4092 --parallelism.context_parallel_degree 8",
    "sequence-parallel-pieces": f"{TITAN} --training.seq_len 4092 "
    "--parallelism.tensor_parallel_degree 8",
    "degrees-fill-the-world": f"{TITAN} --parallelism.data_parallel_shard_degree 8",
    "experts-inside-shards": f"{TITAN} --parallelism.expert_parallel_degree 128",
    "experts-divide": f"{TITAN} --parallelism.expert_parallel_degree 16",
    "no-graphs-in-a-pipeline": f"{EIGHT} {MODULES} {NEVER}".replace(
        "--training.disable_cuda_graphs", ""
    ),
    "pipeline-micro-batches-divide": f"{EIGHT} {MODULES} {NEVER} "
    "--parallelism.pipeline_parallel_microbatch_size 3",
    "step-has-whole-batches": f"{TITAN} --training.global_batch_size 100",
    "tokens-hold-sequences": "main",
    "memory-budget-is-compiled": f"{TITAN} activation_checkpoint:memory-budget",
    "async-tensor-parallel-is-compiled": f"{TITAN} --compile.enable_async_tensor_parallel",
    "schedule-exists": f"{EIGHT} {MODULES} {NEVER} --parallelism.pipeline_parallel_schedule 2F2B",
    "stages-divide": f"{EIGHT} {NEVER} --parallelism.module_fqns_per_model_part "
    f"{' '.join(STAGES[:3])}",
    "stages-hold-each-layer-once": f"{EIGHT} {NEVER} --parallelism.module_fqns_per_model_part "
    f"{' '.join([*STAGES[:3], 'layers.24,norm,lm_head'])}",
    "enough-micro-batches": f"{PIPED} {MODULES} {NEVER} --training.local_batch_size 2",
    "split-backward-with-resharding": f"{EIGHT} {ALWAYS} "
    "--parallelism.pipeline_parallel_schedule ZBVZeroBubble",
    "first-and-last-stage-have-fewer-layers": f"{EIGHT} {NEVER}",
    "default-resharding-in-a-pipeline": f"{EIGHT} {MODULES}",
    "recomputation-stands-last": f"activation_checkpoint:full {TITAN}",
    "connections": f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun -m torchtitan.train {TITAN}",
}

DEEPSPEED = {
    "train_batch_size": 128,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
}
STAGED = {"pipeline": {"stages": 4, "partition": "type:block"}, "gradient_accumulation_steps": 8}
DEEPSPEED_BREAKS = {
    "world-divides": {"tensor_parallel": {"autotp_size": 5}, "train_batch_size": 24},
    "batch-is-the-product": {"train_batch_size": 100},
    "no-sharded-gradients-in-a-pipeline": {**STAGED, "zero_optimization": {"stage": 2}},
    "zero-stage-exists": {"zero_optimization": {"stage": 4}},
    "no-mics": {"zero_optimization": {"stage": 3, "mics_shard_size": 8}},
    "one-precision": {"fp16": {"enabled": True}},
    "offload-needs-a-stage": {
        "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}
    },
    "experts-tile-the-stage": {"expert_parallel": {"enabled": True, "autoep_size": 48}},
    "tensor-or-ulysses": {
        "tensor_parallel": {"autotp_size": 2},
        "sequence_parallel_size": 2,
        "gradient_accumulation_steps": 8,
    },
    "ulysses-divides-heads": {"sequence_parallel_size": 64, "gradient_accumulation_steps": 128},
    "tensor-ranks-without-heads": {
        "tensor_parallel": {"autotp_size": 16},
        "gradient_accumulation_steps": 32,
    },
    "stages-balanced-by-parameters": {**STAGED, "pipeline": {"stages": 4}},
    "stages-are-the-modules": STAGED,
}

AXES = {f"parallelism_config_{axis}_size": 1 for axis in ("dp_replicate", "tp", "cp")}
ACCELERATE = {
    "distributed_type": "FSDP",
    "num_processes": 64,
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
    "parallelism_config": {**AXES, "parallelism_config_dp_shard_size": 64},
}


def axes(**sizes):
    named = {f"parallelism_config_{axis}": size for axis, size in sizes.items()}
    return {"parallelism_config": {**ACCELERATE["parallelism_config"], **named}}


ACCELERATE_BREAKS = {
    "axes-fill-the-processes": axes(dp_shard_size=32),
    "replicas-with-tensor-or-context": axes(dp_shard_size=1, dp_replicate_size=32, tp_size=2),
    "context-or-ulysses": axes(dp_shard_size=8, cp_size=4, sp_size=2),
    "backends": axes(cp_backend="ring"),
    "axes-need-the-second-fsdp": {"fsdp_config": {"fsdp_version": 1}},
    "resharding-as-the-version-wants": {
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD"}
    },
    "tensor-divides-heads": axes(dp_shard_size=4, tp_size=16),
    "context-divides-the-sequence": "script",
    "sharding-strategy-in-the-second-fsdp": {
        "fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}
    },
    "only-axes-no-fsdp-section": {
        "fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": "HYBRID_SHARD"}
    },
}

ROW = ",".join(["1"] * 32)
GALVATRON = {
    "pp_deg": 2,
    "tp_sizes_enc": ROW,
    "tp_consecutive_flags": ROW,
    "dp_types_enc": ROW,
    "checkpoint": ROW,
    "global_bsz": 64,
    "chunks": 2,
    "pp_division": "16,16",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "zero2",
}
GALVATRON_BREAKS = {
    "lists-have-a-value-for-each-layer": {"checkpoint": "1,0"},
    "tensor-divides-the-stage": {"tp_sizes_enc": ",".join(["3"] * 32), "global_bsz": 96},
    "batch-divides": {"global_bsz": 40},
    "runtime-needs-batch-and-chunks": {"global_bsz": None},
    "division-covers-the-layers": {"pp_division": "16,15"},
    "flags-are-zero-or-one": {"checkpoint": ",".join(["2"] * 32)},
    "names-exist": {"pipeline_type": "1f1b"},
    "old-name-of-vocabulary-sharding": {"embed_sdp": 1},
    "micro-batches-are-equal": {"chunks": 3},
}

BREAKS = {
    "megatron": MEGATRON_BREAKS,
    "torchtitan": TITAN_BREAKS,
    "deepspeed": DEEPSPEED_BREAKS,
    "accelerate": ACCELERATE_BREAKS,
    "galvatron": GALVATRON_BREAKS,
}
MODELS = {"torchtitan": "llama3-8b", "deepspeed": "llama3-8b", "accelerate": "llama3-8b"}
BASES = {"deepspeed": DEEPSPEED, "accelerate": ACCELERATE, "galvatron": GALVATRON}


def checked(name, given, *, model=None, version=None):
    asked = Asked(num_gpus=64, model=model or MODELS.get(name), version=version)
    return check_arguments(given, name, asked)


def broken(found):
    return {finding.rule.name for finding in found.findings}


def source_of(name, breach, folder):
    """What to give to the checker for one case: arguments, or a file with changed keys."""
    if name == "accelerate" and breach == "script":
        (folder / "a.yaml").write_text(
            yaml.safe_dump({**ACCELERATE, **axes(dp_shard_size=8, cp_size=8)})
        )
        script = folder / "run.sh"
        script.write_text(
            "accelerate launch --config_file a.yaml train.py --per_device_train_batch_size 1 "
            "--max_seq_length 4090\n"
        )
        return str(script)
    if name not in BASES:
        return breach
    data = {key: value for key, value in {**BASES[name], **breach}.items() if value is not None}
    suffix = "yaml" if name == "accelerate" else "json"
    path = folder / f"config.{suffix}"
    path.write_text(yaml.safe_dump(data) if suffix == "yaml" else json.dumps(data))
    return str(path)


CASES = [(name, rule, case) for name, cases in BREAKS.items() for rule, case in cases.items()]


@pytest.mark.parametrize(("name", "rule", "breach"), CASES, ids=[f"{n}-{r}" for n, r, _ in CASES])
def test_a_job_that_breaks_the_rule_is_told_so(name, rule, breach, tmp_path):
    if breach == "main":
        flags = (
            "--module llama3 --config llama3_8b --training.max_context_length 4096 "
            "--training.num_tokens_per_microbatch_per_dp_rank 10000"
        )
        assert rule in broken(checked(name, flags, version="main"))
        return
    model = "mixtral-8x7b" if rule == "experts-divide" and name == "torchtitan" else None
    found = checked(name, source_of(name, breach, tmp_path), model=model)
    own = [finding for finding in found.findings if finding.rule.name == rule]
    assert own
    assert all(finding.message and finding.valid for finding in own)


@pytest.mark.parametrize(("arguments", "words"), MEGATRON_CLAUSES, ids=lambda case: case[-50:])
def test_each_clause_of_a_rule_of_megatron_is_told(arguments, words):
    assert any(words in finding.message for finding in checked("megatron", arguments).findings)


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_has_a_job_that_breaks_it(name):
    book = launcher(name)[0].rulebook
    own = BREAKS["megatron" if name == "megatron-bridge" else name]
    assert {rule.name for rule in book.rules} == own.keys()
    assert all(rule.says and rule.source for rule in book.rules)


def test_jobs_that_keep_all_rules_have_no_findings(tmp_path):
    assert broken(checked("megatron", MEGATRON)) == set()
    assert broken(checked("megatron", FSDP)) == set()
    assert broken(checked("megatron", f"{TORCH_FSDP} {UNTIED}")) == set()
    assert broken(checked("torchtitan", TITAN)) == set()
    assert broken(checked("torchtitan", f"{EIGHT} {MODULES} {NEVER}")) == set()
    for name in BASES:
        assert broken(checked(name, source_of(name, {}, tmp_path))) == set()


def test_numbers_and_the_nearest_legal_values_are_told():
    (finding,) = checked("megatron", f"{MEGATRON} --global-batch-size 130").findings
    assert "130" in finding.message
    assert "64 replicas" in finding.message
    assert finding.valid == "128 or 192"


def test_what_the_parser_accepts_and_the_schedule_refuses_is_no_failure_of_the_parser():
    few = MEGATRON_BREAKS["enough-microbatches-for-virtual-stages"]
    found = checked("megatron", few)
    assert [finding.fails for finding in found.findings] == [True]
