"""What is exported is loaded by the launchers' own parsers, and says the same there.

The packages are those of ``tests/launchers/parsers.txt``; they are part of the test command, so a
missing one fails here. Random plans are legal ones of seven models, the same on every run;
``PARPLAN_RANDOM_PLANS`` asks for more of them.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import field, make_dataclass
from types import SimpleNamespace

import pytest
from randomplans import layouts

from executor.exporting import export_layout, save_files
from executor.launchers.job import FULL
from executor.launchers.setup import setup_of

COUNT = int(os.environ.get("PARPLAN_RANDOM_PLANS", "60"))
pytestmark = pytest.mark.filterwarnings("ignore")


def exported(launcher, folder, *, version=None):
    """(setup, inputs, folder) of each random plan, its files written."""
    for number, (inputs, layout) in enumerate(layouts(launcher, COUNT)):
        own = folder / str(number)
        files = export_layout(inputs, layout, launcher, version=version).files
        save_files(files, own)
        yield setup_of(inputs.model, layout), inputs, own


def flags_of(words):
    """``--a 1 2 --b`` as a mapping."""
    found, name = {}, None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = [value] if equals else []
        else:
            found[name].append(word)
    return found


# --- Megatron-LM -------------------------------------------------------------------------------

RENAMED = {
    "num-experts": "num_moe_experts",
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "swiglu": "gated_linear_unit",
}


def megatron_config(flags):
    """megatron-core's own configuration of some arguments."""
    import torch  # noqa: PLC0415 - slow, and only for these tests
    from megatron.core.transformer.transformer_config import (  # noqa: PLC0415 - as above
        MLATransformerConfig,
        TransformerConfig,
    )

    kind = MLATransformerConfig if "--multi-latent-attention" in flags else TransformerConfig
    known = kind.__dataclass_fields__
    values = {
        "pipeline_dtype": torch.bfloat16,
        "add_bias_linear": "--disable-bias-linear" not in flags,
    }
    for flag, words in flags.items():
        plain = flag.removeprefix("--")
        name = RENAMED.get(plain, plain.replace("-", "_"))
        if name in known and name not in ("fp8", "fp4", "attention_backend", "fp8_recipe"):
            values[name] = value_of(words, name)
    return kind(**values)


def value_of(words, name):
    if not words:
        return True
    if name == "recompute_modules" or (name == "cp_comm_type" and len(words) > 1):
        return words  # one word of cp_comm_type is that of all layers
    if name == "moe_layer_freq":
        return eval(words[0]) if "[" in words[0] else int(words[0])  # noqa: S307 - our own text
    return (
        int(words[0])
        if words[0].isdigit()
        else words[0]
        if not is_float(words[0])
        else float(words[0])
    )


def is_float(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


def test_megatron_core_takes_every_exported_plan(tmp_path, shell_array):
    for setup, inputs, folder in exported("megatron", tmp_path):
        flags = flags_of(shell_array(folder, "megatron_args.sh", "MEGATRON_ARGS"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = megatron_config(flags)
        assert config.tensor_model_parallel_size == setup.tp
        assert config.pipeline_model_parallel_size == setup.pp
        assert config.context_parallel_size == setup.cp
        assert config.expert_model_parallel_size == setup.ep
        assert bool(config.sequence_parallel) == setup.sequence_parallel
        assert (config.virtual_pipeline_model_parallel_size or 1) == setup.chunks
        assert config.num_layers == inputs.model.num_blocks
        assert config.hidden_size == inputs.model.hidden
        assert stages_of(config, setup) == list(setup.blocks)


def stages_of(config, setup):
    """Layers of every chunk in model order, as megatron-core counts them."""
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        return [config.num_layers // (setup.pp * setup.chunks)] * (setup.pp * setup.chunks)
    return [
        sum(each.name == "decoder" for each in layout.layout[stage][chunk])
        for chunk in range(setup.chunks)
        for stage in range(setup.pp)
    ]


# --- torchtitan --------------------------------------------------------------------------------


def test_torchtitan_parses_every_exported_plan(tmp_path, shell_array):
    import tyro  # noqa: PLC0415 - slow, and only for these tests
    from torchtitan.config import (  # noqa: PLC0415 - as above
        CompileConfig,
        ConfigManager,
        ParallelismConfig,
        TrainingConfig,
    )
    from torchtitan.config.manager import custom_registry  # noqa: PLC0415 - as above
    from torchtitan.distributed import activation_checkpoint as recompute  # noqa: PLC0415
    from torchtitan.distributed.parallel_dims import ParallelDims  # noqa: PLC0415 - as above

    # Trainer.Config itself needs packages for logs and data; these are its parts.
    parts = {
        "training": (TrainingConfig, TrainingConfig),
        "parallelism": (ParallelismConfig, ParallelismConfig),
        "activation_checkpoint": (
            recompute.ActivationCheckpointingConfig,
            recompute.SelectiveAC.Config,
        ),
        "compile": (CompileConfig, CompileConfig),
    }
    Config = make_dataclass(  # noqa: N806 - a class
        "Config",
        [(name, kind, field(default_factory=usual)) for name, (kind, usual) in parts.items()],
    )
    ConfigManager()
    for setup, inputs, folder in exported("torchtitan", tmp_path):
        words = shell_array(folder, "launch.sh", "TORCHTITAN_ARGS")
        start = words.index("--config")
        own = [*words[: words.index("--module")], *words[start + 2 :]]
        config = tyro.cli(Config, args=own, registry=custom_registry, default=Config())
        p = config.parallelism
        dims = ParallelDims(
            dp_replicate=p.data_parallel_replicate_degree,
            dp_shard=p.data_parallel_shard_degree,
            cp=p.context_parallel_degree,
            tp=p.tensor_parallel_degree,
            pp=p.pipeline_parallel_degree,
            ep=p.expert_parallel_degree,
            world_size=setup.num_ranks,
        )
        assert dims.dp_replicate * dims.dp_shard == setup.dp
        assert (dims.tp, dims.cp, dims.pp, dims.ep) == (setup.tp, setup.cp, setup.pp, setup.ep)
        full = isinstance(config.activation_checkpoint, recompute.FullAC.Config)
        assert full == (FULL in setup.recompute)
        training = config.training
        assert training.global_batch_size == inputs.training.global_batch
        size = p.pipeline_parallel_microbatch_size if setup.pp > 1 else training.local_batch_size
        assert size == setup.micro_batch
        if setup.pp > 1:
            stages = [
                sum(n.startswith("layers.") for n in part) for part in p.module_fqns_per_model_part
            ]
            assert stages == list(setup.blocks)
            schedule_runs(p, training, setup)


def schedule_runs(parallelism, training, setup):
    """torch has a schedule of that name that takes so many stages and micro-batches."""
    from torch.distributed.pipelining.schedules import (  # noqa: PLC0415 - slow
        PipelineScheduleMulti,
        get_schedule_class,
    )

    kind = get_schedule_class(parallelism.pipeline_parallel_schedule)
    assert issubclass(kind, PipelineScheduleMulti) == (setup.chunks > 1)
    assert training.local_batch_size % parallelism.pipeline_parallel_microbatch_size == 0
    assert training.local_batch_size // parallelism.pipeline_parallel_microbatch_size == (
        setup.num_microbatches
    )


# --- DeepSpeed ---------------------------------------------------------------------------------


def test_deepspeed_takes_every_exported_plan(tmp_path, monkeypatch):
    from deepspeed.module_inject.auto_ep_config import (  # noqa: PLC0415 - slow
        parse_autoep_config,
        validate_autoep_config,
    )
    from deepspeed.runtime import config as deepspeed_config  # noqa: PLC0415 - as above

    # Outside of a job there is no rank, and then it takes the world to be of size one.
    monkeypatch.setattr(deepspeed_config, "dist", SimpleNamespace(get_rank=lambda: 0))
    DeepSpeedConfig = deepspeed_config.DeepSpeedConfig  # noqa: N806 - a class
    for setup, inputs, folder in exported("deepspeed", tmp_path):
        data = json.loads((folder / "deepspeed.json").read_text())
        replicas = SimpleNamespace(get_data_parallel_world_size=lambda size=setup.dp: size)
        config = DeepSpeedConfig(data, mpu=replicas)
        assert config.train_batch_size == inputs.training.global_batch
        assert config.train_micro_batch_size_per_gpu == setup.micro_batch
        assert config.gradient_accumulation_steps == setup.num_microbatches
        assert config.zero_optimization_stage == setup.one_zero
        assert max(1, config.tensor_parallel_config.autotp_size) == setup.tp
        if setup.pp > 1:
            assert config.pipeline["stages"] == setup.pp
            assert bool(config.pipeline["activation_checkpoint_interval"]) == (
                FULL in setup.recompute
            )
        experts = parse_autoep_config(data.get("expert_parallel", {}))
        validate_autoep_config(experts, setup.num_ranks, setup.pp, setup.tp, 1)
        assert experts.autoep_size == setup.ep


# --- Accelerate --------------------------------------------------------------------------------


def test_accelerate_launches_every_exported_plan(tmp_path, monkeypatch):
    from accelerate.commands.launch import (  # noqa: PLC0415 - slow
        _validate_launch_command,
        launch_command_parser,
    )
    from accelerate.parallelism_config import ParallelismConfig  # noqa: PLC0415 - as above
    from accelerate.utils.dataclasses import (  # noqa: PLC0415 - as above
        FullyShardedDataParallelPlugin,
    )
    from accelerate.utils.launch import prepare_multi_gpu_env  # noqa: PLC0415 - as above

    parser = launch_command_parser()
    for setup, _, folder in exported("accelerate", tmp_path):
        line = ["--config_file", str(folder / "accelerate.yaml"), "--main_process_ip", "localhost"]
        own = [*line, "--main_process_port", "29500", "train.py"]
        arguments, *_ = _validate_launch_command(parser.parse_args(own))
        assert int(arguments.num_processes) == setup.num_ranks
        if not arguments.use_fsdp:
            assert setup.one_zero == 0
            assert setup.tp * setup.cp == 1
            continue
        with monkeypatch.context() as patched:
            for name, value in prepare_multi_gpu_env(arguments).items():
                patched.setenv(name, str(value))
            axes = ParallelismConfig()
            plugin = FullyShardedDataParallelPlugin()
        assert axes.total_size == setup.num_ranks
        assert (axes.tp_size, axes.cp_size) == (setup.tp, setup.cp)
        assert axes.dp_replicate_size * axes.dp_shard_size == setup.dp
        if setup.one_zero:
            assert axes.dp_shard_size * axes.cp_size == setup.shard_group
            assert plugin.reshard_after_forward == (setup.one_zero == 3)
        assert plugin.activation_checkpointing == (FULL in setup.recompute)
