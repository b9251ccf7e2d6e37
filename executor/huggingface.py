"""Apply a plan to a model of ``transformers``: its layers run as they are, on the parts of weights
that the plan gives to each rank.

    dist.init_process_group()
    model = parallelize(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), plan)

What follows is the loop that one process would run, on ``own_sequences(plan)`` of each batch:
gradients are averaged over the replicas, as the mean loss of each replica's own sequences asks for.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from costmodel.layout import NO_RECOMPUTE, RecomputeKind
from executor.mesh import RankMesh, sequences, shards
from executor.models.styles import Styles, split_tensor, style_problems
from executor.precision import numbers_of
from planner.native import PRECISIONS, layout_problems
from profiles.errors import InputError, Problem
from profiles.huggingface import model_from_config
from profiles.training import GradDtype
from profiles.yamlfile import Document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from costmodel.layout import Strategy
    from executor.models.tensorgroup import TensorGroup
    from planner.plan import Plan
    from profiles.model import ModelSpec

__all__ = ["own_sequences", "parallelize"]

Model = TypeVar("Model", bound=nn.Module)

WEIGHTS_SHARDED: Final = 3  # stage of ZeRO
WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def parallelize(
    model: Model, plan: Plan, *, device: torch.device | None = None, seed: int = 0
) -> Model:
    """Apply ``plan`` to ``model`` in place: tensor and sequence parallelism by the model's own plan
    table, DDP or ZeRO by FSDP2, recomputation of whole blocks, mixed precision. Parameters become
    DTensors with fp32 (or wider) values. The default process group must have the plan's ranks.

    A ``model`` with weights must have the same ones on every rank, which keeps its part. On the
    meta device it gets the first weights of its own class instead, block by block: values
    follow from ``seed`` and the names of modules, whatever the plan. ``device``: the current GPU
    where the process group is NCCL's, else the CPU.

    Raises ``InputError`` with every rule that is broken, before anything is changed.
    """
    _raise("plan", _plan_problems(plan))
    _raise("model", _model_problems(model, plan))
    device = device or _usual_device()
    _raise("model", _unequal_weights(model, device))
    _Application(model, plan, device, seed).apply()
    return model


def own_sequences(plan: Plan) -> list[range]:
    """The sequences of a step's global batch that this rank takes, for each micro-batch. Ranks that
    split a layer take the same.
    """
    first, _ = plan.layout.ends
    return sequences(plan.layout, first)


def _raise(where: str, messages: Iterator[str]) -> None:
    problems = [Problem(where=where, message=f"cannot be applied: {each}") for each in messages]
    if problems:
        raise InputError(problems)


def _plan_problems(plan: Plan) -> Iterator[str]:
    """What of a plan cannot be applied to these models, or not by these ranks."""
    layout, training, model = plan.layout, plan.inputs.training, plan.inputs.model
    mesh = layout.mesh
    if not dist.is_initialized():
        yield "there is no process group; call torch.distributed.init_process_group first"
    elif dist.get_world_size() != mesh.num_ranks:
        yield f"it is for {mesh.num_ranks} ranks, the process group has {dist.get_world_size()}"
    for name in ("pp", "cp", "ep"):
        if getattr(mesh, name) > 1:
            yield f"{name} {getattr(mesh, name)}; expected {name} 1"
    if model.has_experts:
        yield "blocks with experts; expected dense blocks"
    if len({replace(each, recompute=NO_RECOMPUTE) for each in layout.strategies}) > 1:
        yield "layers under different strategies; expected that only recomputation differs"
    for each in dict.fromkeys(own.recompute for own in layout.strategies):
        if each.kind is RecomputeKind.SELECTIVE:
            yield f"recompute {each}; expected none or full"
    if training.precision not in PRECISIONS or training.grad_dtype is GradDtype.FP16:
        yield f"{training.precision} with gradients in {training.grad_dtype}; expected bf16 or fp32"
    yield from layout_problems(model, training, layout)


def _model_problems(model: nn.Module, plan: Plan) -> Iterator[str]:
    """What of a model cannot be split, or is not what was planned for."""
    config, table = getattr(model, "config", None), getattr(model, "_tp_plan", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        yield f"{type(model).__name__} is no model of transformers"
        return
    text = config.to_json_string(use_diff=False)
    spec = model_from_config(Document(path="model.config", data=json.loads(text)), name="model")
    yield from _unlike(spec, plan.inputs.model)
    if model.get_output_embeddings() is None:  # type: ignore[operator]
        yield f"{type(model).__name__} has no head; expected a causal language model"
    if plan.layout.mesh.tp > 1:
        if not table:
            yield f"{type(model).__name__} has no table for tensor parallelism; expected tp 1"
        else:
            yield from style_problems(Styles(model, table))


def _unlike(own: ModelSpec, planned: ModelSpec) -> Iterator[str]:
    """Where two models differ, run by run of equal layers."""
    if len(own.layers) != len(planned.layers):
        yield f"it has {own.num_blocks} blocks, the model of the plan {planned.num_blocks}"
        return
    pairs = zip(own.layer_names, own.layers, planned.layers, strict=True)
    name, mine, other = next((each for each in pairs if each[1] != each[2]), (None, None, None))
    if name is not None:
        yield f"its layer {name} is {mine}, that of the plan {other}"


def _usual_device() -> torch.device:
    if "cuda:nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _unequal_weights(model: nn.Module, device: torch.device) -> Iterator[str]:
    """Weights that are not the same on every rank, by sums of their bits."""
    named = dict(model.named_parameters())
    sums = torch.tensor([_sum_of_bits(weight) for weight in named.values()], device=device)
    both = torch.stack((sums, -sums))
    dist.all_reduce(both, dist.ReduceOp.MAX)
    different = (both[0] != -both[1]).tolist()
    unlike = [name for name, is_one in zip(named, different, strict=True) if is_one]
    if unlike:
        yield (
            f"{unlike[0]} (and {len(unlike) - 1} more weights) differ between ranks; load the same "
            "checkpoint, call torch.manual_seed before building, or build on the meta device"
        )


def _sum_of_bits(weight: Tensor) -> int:
    if weight.is_meta:
        return 0
    return int(weight.detach().contiguous().view(WORDS[weight.element_size()]).sum())


class _Application:
    """A plan, and the model that it is applied to."""

    def __init__(self, model: Any, plan: Plan, device: torch.device, seed: int) -> None:
        self.model, self.device, self.seed = model, device, seed
        self.layout, self.numbers = plan.layout, numbers_of(plan.inputs.training)
        self.strategy: Strategy = plan.layout.strategies[0]
        self.mesh = RankMesh(plan.layout, device.type)
        self.tp: TensorGroup = self.mesh.tensor_group(self.strategy)
        self.styles = Styles(model, getattr(model, "_tp_plan", None) or {})
        self.names = {module: name for name, module in model.named_modules()}
        self.taken: set[nn.Module] = set()
        self.done: dict[nn.Parameter, nn.Parameter] = {}  # a tied matrix stays one
        inside = self.model.base_model.children()
        self.blocks: list[Any] = next([*each] for each in inside if isinstance(each, nn.ModuleList))

    def apply(self) -> None:
        """Each unit of data parallelism gets its values, is split and wrapped before the next."""
        units = self._units()
        for unit in units:
            for module in (part for each in unit for part in each.modules()):
                self._take_part(module)
            self._wrap(unit)
        for module in self.names:
            self._take_part(module)  # what is left has buffers only
        if self.tp.mesh is not None:
            embedding = self.model.get_input_embeddings()
            norms = [each for each in units[-1][:-1] if each is not embedding]
            self.styles.apply(self.tp, stream=[*self.blocks, *norms])
        if self._is_wrapped:  # a root, whose units share streams and prefetch one another
            over = self.mesh.replicas(self.strategy)
            fully_shard(self.model, mesh=over, reshard_after_forward=False)
        self._recompute()

    def _units(self) -> list[list[nn.Module]]:
        """The embedding, each block, the rest with the head last; tied ends are one."""
        embedding = self.model.get_input_embeddings()
        head = self.model.get_output_embeddings()
        inside = {part for block in self.blocks for part in block.modules()}
        rest = [module for _, module in self.styles.owners() if module not in inside]
        ends = [*(module for module in rest if module not in (embedding, head)), head]
        blocks = [[block] for block in self.blocks]
        if embedding.weight is head.weight:
            return [*blocks, [embedding, *ends]]
        return [[embedding], *blocks, ends]

    def _take_part(self, module: nn.Module) -> None:
        """Values where there are none yet, of which this rank keeps its part."""
        if module in self.taken:
            return
        self.taken.add(module)
        own = dict(module.named_parameters(recurse=False))
        unread = [p for p in own.values() if p not in self.done]
        if any(each.is_meta for each in (*unread, *module.buffers(recurse=False))):
            self._fill(module)
        dims = self.styles.split_dims(self.names[module])
        for name, before in own.items():
            if before not in self.done:
                whole = module.get_parameter(name).detach()
                wide = whole.to(torch.promote_types(whole.dtype, torch.float32))
                part = split_tensor(wide, dims.get(name), self.tp, self.device)
                self.done[before] = nn.Parameter(part, requires_grad=before.requires_grad)
            module.register_parameter(name, self.done[before])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(self.device))

    @torch.no_grad()
    def _fill(self, module: nn.Module) -> None:
        """The first values that the model's class gives, the same on every rank."""
        module.to_empty(device=self.device, recurse=False)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(zlib.crc32(f"{self.seed}:{self.names[module]}".encode()))
            self.model._init_weights(module)  # noqa: SLF001 - it has no other name

    @property
    def _is_wrapped(self) -> bool:
        return self.mesh.replicas(self.strategy).size() > 1 or self.numbers.is_mixed

    def _wrap(self, unit: list[nn.Module]) -> None:
        """For its stage of ZeRO; inputs are not cast, rotations stay as they are."""
        if not self._is_wrapped:
            return
        over = self.mesh.replicas(self.strategy)
        policy = MixedPrecisionPolicy(
            param_dtype=self.numbers.compute,
            reduce_dtype=self.numbers.reduce,
            cast_forward_inputs=False,
        )
        if shards(self.strategy) == 1:
            replicate(unit, mesh=over, mp_policy=policy)
            return
        keeps = self.strategy.zero != WEIGHTS_SHARDED
        fully_shard(unit, mesh=over, mp_policy=policy, reshard_after_forward=not keeps)

    def _recompute(self) -> None:
        """Switch on what ``transformers`` has for it, in the blocks that the plan names."""
        spans = (span for chunk in self.layout.chunks for span in chunk.spans)
        kinds = [own.strategy.recompute.kind for own in spans for _ in range(own.first, own.stop)]
        full = [kind is RecomputeKind.FULL for kind in kinds[1:-1]]  # of blocks
        self.model.activation_checkpointing_disable()
        if any(full):
            self.model.activation_checkpointing_enable({"use_reentrant": False})
            for block, recomputes in zip(self.blocks, full, strict=True):
                block.gradient_checkpointing = recomputes
