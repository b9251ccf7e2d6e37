"""One rank of a job without its peers and without its memory: shapes run, values do not exist.

Tensors are torch's FakeTensors; collectives end at once in its fake process group, whatever its
size. What a GPU would do otherwise than the CPU that pretends is put right here: norms and
attention run as its fused kernels, so that what they keep and what they allocate is theirs.
Where tokens go to experts, which only values say, each expert gets the same number of them.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn import functional
from torch.nn.attention.bias import CausalBias
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor import strategies
from executor.mesh import RankMesh
from executor.models import block, experts
from executor.models.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["fake_rank"]

REAL: Final = (  # they compute with ranks, or build on the meta device
    (strategies, "Chain"),
    (strategies, "split_parameters"),
    (strategies, "DataParallel"),
    (nn.Module, "to"),
    (RankMesh, "__init__"),
    (Exchange, "__init__"),
    (DeviceMesh, "__getitem__"),
    (DeviceMesh, "_flatten"),
    (DeviceMesh, "_concatenate"),
)


@contextmanager
def fake_rank(rank: int, num_ranks: int, *, on_gpu: bool) -> Iterator[None]:
    """Be ``rank`` of ``num_ranks``; ``on_gpu``: with the kernels of one."""
    hook = sys.excepthook  # which a process group makes its own
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    _forget()
    try:
        with ExitStack() as stack:
            for owner, name in REAL:
                stack.enter_context(patch.object(owner, name, _really(getattr(owner, name))))
            stack.enter_context(patch.object(strategies, "initialise"))
            stack.enter_context(patch.object(experts, "_row_counts", _even_counts))
            stack.enter_context(patch.object(_PipelineSchedule, "_warmup_p2p", _know_shapes))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            if on_gpu:
                stack.enter_context(patch.object(block, "is_one_kernel", lambda _: True))
                for name, kernel in GPU_KERNELS.items():
                    stack.enter_context(patch.object(functional, name, kernel))
            yield
    finally:
        _forget()
        dist.destroy_process_group()
        sys.excepthook = hook


def _forget() -> None:
    """Tables that layers share must be fake inside, and only there; what DTensor remembers names
    groups that exist no more.
    """
    block.forget_tables()
    _clear_sharding_prop_cache()


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


def _even_counts(chosen: Tensor, num_experts: int) -> Tensor:
    """The same number of rows for each expert, as far as they divide; not fake, since shapes follow
    from it.
    """
    with unset_fake_temporarily():
        few, more = divmod(chosen.numel(), num_experts)
        return few + (torch.arange(num_experts) < more).to(torch.int64)


def _know_shapes(_schedule: Any, stages: list[Any], _has_backward: bool, _done: bool) -> None:  # noqa: FBT001
    """Stages were told all shapes; there is nobody to agree with."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC  # noqa: SLF001 - what the vote would set


def _rms_norm(x: Tensor, _shape: Any, weight: Tensor | None = None, _eps: Any = None) -> Tensor:
    normed: Tensor = _FusedNorm.apply(x, weight)  # type: ignore[no-untyped-call] # torch's has none
    return normed


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *, is_causal: bool, **how: Any
) -> Tensor:
    """Flash attention, which shares keys and values among heads; other masks than causal ones are
    not its business.
    """
    if attn_mask is not None and not isinstance(attn_mask, CausalBias):
        return _ATTENTION(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **how)
    out: Tensor = FLASH(q, k, v, 0.0, is_causal or attn_mask is not None)[0]
    return out


class _FusedNorm(Function):
    """The shapes of ``_fused_rms_norm``: it keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=wide))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _, weight, _ = ctx.saved_tensors
        wanted = None if weight is None else torch.empty_like(weight)
        return torch.empty_like(gradients[0]), wanted


FLASH: Final = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001 - its name
_ATTENTION: Final = functional.scaled_dot_product_attention
GPU_KERNELS: Final[dict[str, Any]] = {
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
}
