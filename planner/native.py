"""What the native executor can run: rules beside the degrees of ``LauncherRules``.

The search and the executor ask the same functions, so nothing is planned that would be refused.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from costmodel.layout import MODULES, ContextComm, RecomputeKind, mixing_problems
from costmodel.schedules import SCHEDULES
from planner.launchers import LAUNCHERS
from planner.plan import plan_of
from planner.rules import SPLIT_RULE
from profiles.errors import InputError, Problem
from profiles.layers import Block, Embedding, ExpertFeedForward, Head
from profiles.training import GradDtype, LossKernel, Optimizer, Precision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from costmodel.layout import Layout, Mesh, Strategy
    from planner.inputs import Inputs
    from planner.plan import Plan
    from profiles.layers import Layer
    from profiles.model import ModelSpec
    from profiles.training import TrainingSpec

__all__ = [
    "as_executed",
    "executed",
    "layout_problems",
    "model_problems",
    "training_problems",
]

PRECISIONS: Final = (Precision.BF16, Precision.FP32)
OPTIMIZERS: Final = (Optimizer.ADAMW, Optimizer.ADAM, Optimizer.SGD)


def model_problems(model: ModelSpec, training: TrainingSpec) -> list[str]:
    """Parts of a model for which there is no native layer."""
    layers = [run.layer for run in model.runs]
    found = list(dict.fromkeys(problem for each in layers for problem in _layer_problems(each)))
    ends = [type(layer) for layer in layers if not isinstance(layer, Block)]
    if ends != [Embedding, Head] or not isinstance(layers[0], Embedding):
        found.append("the model is not an embedding, blocks and a head")
        return found
    positions = layers[0].positions
    rotary = all(block.attention.rope for block in layers if isinstance(block, Block))
    if positions and positions < training.seq_len:
        found.append(f"{positions} learned positions for sequences of {training.seq_len} tokens")
    if not positions and not rotary:
        found.append("positions are neither rotary nor learned")
    return found


def _layer_problems(layer: Layer) -> Iterator[str]:
    if not isinstance(layer, Block):
        return
    attention = layer.attention
    lacking = {
        "latent attention": attention.latent is not None,
        "cross-attention": attention.cross is not None,
        "attention sinks": attention.sinks,
        "sequences of a length of their own": layer.tokens is not None,
    }
    if isinstance(layer.feed_forward, ExpertFeedForward):
        experts = layer.feed_forward
        lacking["biases of experts"] = experts.bias
        lacking["bias of a router"] = experts.router_bias or experts.correction_bias
    yield from (f"no native {what}" for what, is_there in lacking.items() if is_there)
    legal = (1, 2) if layer.parallel else (2, 4)
    if layer.num_norms not in legal:
        yield f"no native block with {layer.num_norms} norms"


def as_executed(inputs: Inputs, layout: Layout) -> Inputs:
    """The inputs with the kernels and the states of the native executor: PyTorch's attention is one
    kernel, and its norms on GPUs; its rotary embedding and gated activation are several; the loss
    is PyTorch's on one rank, in place over the parts of several. No layer drops anything.
    """
    is_wide = inputs.training.precision is Precision.FP32
    training = replace(
        inputs.training,
        fused_kernels=False,
        fused_norms=inputs.cluster.slowest_device.name != "cpu",
        loss=LossKernel.SHARDED if layout.ends[1].tp == 1 else LossKernel.FUSED,
        keeps_gathered=False,
        reduces_in_fp32=False,
        fsdp2=True,
        grad_dtype=GradDtype.FP32 if is_wide else inputs.training.grad_dtype,
    )
    return replace(inputs, model=_without_dropout(inputs.model), training=training)


def executed(plan: Plan) -> Plan:
    """The plan as ``parplan launch`` runs it: its costs are those of the executor's kernels and
    states. Raises ``InputError`` where the executor cannot run it.
    """
    training = plan.inputs.training
    problems = [
        *model_problems(plan.inputs.model, training),
        *training_problems(training),
        *layout_problems(plan.inputs.model, training, plan.layout),
    ]
    if problems:
        found = (f"native cannot run it: {each}" for each in problems)
        raise InputError([Problem(where="--launcher", message=each) for each in found])
    note = "kernels and states are those of parplan launch, whose --dry-run they stand beside"
    inputs = as_executed(plan.inputs, plan.layout)
    inputs = replace(inputs, notes=(*inputs.notes, note))
    return plan_of(inputs, plan.layout, launcher=plan.launcher, min_fit=plan.min_fit)


def _without_dropout(model: ModelSpec) -> ModelSpec:
    return replace(
        model,
        runs=tuple(
            replace(run, layer=replace(run.layer, dropout=False))
            if isinstance(run.layer, Block | Embedding)
            else run
            for run in model.runs
        ),
    )


def training_problems(training: TrainingSpec) -> list[str]:
    """What of a training run the executor cannot do."""
    found = []
    if training.precision not in PRECISIONS:
        found.append(f"precision {training.precision}; expected one of {', '.join(PRECISIONS)}")
    if training.optimizer not in OPTIMIZERS:
        found.append(f"optimizer {training.optimizer}; expected one of {', '.join(OPTIMIZERS)}")
    if training.grad_dtype is GradDtype.FP16:
        found.append("gradients in fp16; expected fp32 or bf16")
    if training.attention.stores_scores:
        found.append(f"attention {training.attention}, which stores scores; expected flash2")
    return found


def layout_problems(model: ModelSpec, training: TrainingSpec, layout: Layout) -> list[str]:
    """What of a layout the executor cannot do, each with its rule."""
    mesh, schedule = layout.mesh, SCHEDULES[layout.schedule]
    found = []
    if layout.schedule not in LAUNCHERS["native"].schedules:
        known = ", ".join(LAUNCHERS["native"].schedules)
        found.append(f"schedule {layout.schedule}; expected one of {known}")
    problem = schedule.problem(layout.shape)
    if problem is not None:
        found.append(problem)
    if layout.schedule == "1f1b" and layout.num_microbatches < layout.num_stages:
        found.append(
            f"1f1b with {layout.num_microbatches} micro-batches for {layout.num_stages} stages; "
            "it needs at least as many"
        )
    if mesh.dp * layout.micro_batch * layout.num_microbatches != training.global_batch:
        found.append(
            f"dp {mesh.dp} x micro-batch {layout.micro_batch} x {layout.num_microbatches} are not "
            f"the global batch {training.global_batch}"
        )
    places = tuple((chunk.stage, chunk.chunk) for chunk in layout.chunks)
    if places not in schedule.paths(layout.shape):
        found.append(f"chunks are not placed as {layout.schedule} runs them")
    for strategy in layout.strategies:
        found += _strategy_problems(training, layout, strategy)
    for span in (span for chunk in layout.chunks for span in chunk.spans):
        for run in model.runs_between(span.first, span.stop):
            found += _block_problems(run.layer, span.strategy, mesh)
            found += _context_problems(run.layer, span.strategy, training)
    first, last = layout.ends
    if model.tied and first != last:
        found.append("tied embedding and head under different strategies; native needs one")
    return list(dict.fromkeys(found))


def _strategy_problems(training: TrainingSpec, layout: Layout, own: Strategy) -> Iterator[str]:
    yield from mixing_problems(own, layout.mesh, layout.micro_batch, layout.strategies)
    if own.cp > 1 and training.seq_len % (2 * own.cp):
        yield f"sequences of {training.seq_len} tokens do not divide by 2 x cp {own.cp}"
    tokens = training.seq_len // own.cp
    if own.sequence_parallel and tokens % own.tp:
        yield f"sequences of {tokens} tokens do not divide by tp {own.tp}"
    yield from _sharding_problems(layout.mesh_of(own), own)
    splits = SCHEDULES[layout.schedule].splits
    if splits and own.dp * own.cp > 1 and own.zero not in LAUNCHERS["native"].split_zero:
        yield (
            f"ZeRO-{own.zero} with {layout.schedule}: gradients would be reduced before its split "
            "backward passes have made them; expected ZeRO-0 or 1"
        )
    if splits and own.recompute.kind is not RecomputeKind.NONE:
        yield f"recompute with {layout.schedule}: {SPLIT_RULE}"
    unknown = [module for module in own.recompute.modules if module not in MODULES]
    if unknown:
        yield f"recomputation of {', '.join(unknown)}; expected {', '.join(MODULES)}"


def _sharding_problems(mesh: Mesh, own: Strategy) -> Iterator[str]:
    """States are sharded over the first ranks of those of dp and cp, in the order of ranks."""
    inner = math.prod(size for size, _ in mesh.shard_dims(own.shard_group))
    outer = math.prod(size for size, _ in mesh.replica_dims(own.shard_group))
    if own.zero and (inner, inner * outer) != (own.shard_group, own.dp * own.cp):
        yield (
            f"shard group {own.shard_group} does not divide dp {own.dp} x cp {own.cp} in this "
            "order of ranks"
        )


def _block_problems(block: Layer, own: Strategy, mesh: Mesh) -> Iterator[str]:
    if not isinstance(block, Block):
        return
    tp = own.tp
    sizes = {"heads": block.attention.heads, "key/value heads": block.attention.kv_heads}
    if isinstance(block.feed_forward, ExpertFeedForward):
        sizes["inner features of shared experts"] = block.feed_forward.shared_hidden
        yield from _expert_problems(block.feed_forward, own, mesh)
    else:
        sizes["inner features"] = block.feed_forward.ffn_hidden
    yield from (f"{n} {what} do not divide by tp {tp}" for what, n in sizes.items() if n % tp)


def _context_problems(block: Layer, own: Strategy, training: TrainingSpec) -> Iterator[str]:
    """The kernel of a ring masks by causality alone."""
    if own.cp == 1 or own.cp_comm is not ContextComm.RING or not isinstance(block, Block):
        return
    window = block.attention.window
    if window is not None and window < training.seq_len:
        yield f"cp_comm ring with attention in windows of {window}; expected gather"


def _expert_problems(layer: ExpertFeedForward, own: Strategy, mesh: Mesh) -> Iterator[str]:
    if layer.num_experts % own.ep:
        yield f"{layer.num_experts} experts do not divide by ep {own.ep}"
    if layer.expert_hidden % own.expert_tp:
        width, parts = layer.expert_hidden, own.expert_tp
        yield f"{width} inner features of experts do not divide by expert_tp {parts}"
    if own.tp > 1 and not own.sequence_parallel:
        yield f"experts with tp {own.tp} need sequence parallelism"
    if own.tp != mesh.tp and own.ep * own.expert_tp > 1:
        yield f"layers of tp {own.tp} and {mesh.tp} beside ep {own.ep} x expert_tp {own.expert_tp}"
    if own.zero and own.shard_group == 1:
        yield f"ZeRO-{own.zero} in shard groups of one rank; experts need two"
