"""The executor against loops written by hand: ``python -m benchmarks.executor``.

The same model, trained by ``executor.trainer`` and by plain FSDP2, DTensor and pipelining below, as
PyTorch's tutorials have it. Two processes on CPUs; steps of both alternate, and the figure is the
median of the ratios of pairs. Beside it stands that of CPU times on rank 0, which other load on the
machine disturbs less.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from costmodel.layout import NO_RECOMPUTE, Layout, Mesh, Strategy
from costmodel.placing import even_cut, placed_chunks
from costmodel.schedules import SCHEDULES, Shape
from executor.job import Recipe
from executor.precision import Numbers
from executor.trainer import Trainer
from profiles.layers import Attention, Block, Embedding, FeedForward, Head, Norm
from profiles.model import LayerRun, ModelSpec
from profiles.training import Optimizer, Precision, TrainingSpec

if TYPE_CHECKING:
    from collections.abc import Callable

HIDDEN, HEADS, INNER, VOCAB, LAYERS, SEQ, BATCH = 256, 4, 768, 1024, 4, 128, 4
PAIRS = 31
RANKS = 2


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        angles = torch.arange(SEQ)[:, None] * 10_000.0 ** (-torch.arange(0, 1, 2 * HEADS / HIDDEN))
        self.cos, self.sin = angles.cos(), angles.sin()

    def rotate(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat(
            (low * self.cos - high * self.sin, high * self.cos + low * self.sin), dim=-1
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        size = HIDDEN // HEADS
        q, k, v = (
            each(y).unflatten(-1, (-1, size)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        context = functional.scaled_dot_product_attention(
            self.rotate(q), self.rotate(k), v, is_causal=True
        )
        x = x + self.o(context.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class PlainModel(nn.Module):
    """All of it, or the part of a stage."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        count = LAYERS if stage is None else LAYERS // RANKS
        self.embedding = nn.Embedding(VOCAB, HIDDEN) if stage in (None, 0) else None
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(count))
        last = stage in (None, RANKS - 1)
        self.norm = nn.RMSNorm(HIDDEN) if last else None
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def whole_step(model: nn.Module) -> Callable[[Tensor, Tensor], None]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        loss_of(model(tokens), targets).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        getattr(norm, "full_tensor", lambda: norm)().item()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_fsdp() -> Callable[[Tensor, Tensor], None]:
    model = PlainModel()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return whole_step(model)


def plain_tensor() -> Callable[[Tensor, Tensor], None]:
    model = PlainModel()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        columns = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        parallelize_module(
            block, mesh, {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()}
        )
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(tokens: Tensor, targets: Tensor) -> None:  # norms are plain: clipping would fail
        loss_of(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_pipeline() -> Callable[[Tensor, Tensor], None]:
    stage = dist.get_rank()
    model = PlainModel(stage)
    part = PipelineStage(model, stage, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(part, n_microbatches=BATCH, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        if stage == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=[])
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        square = norm**2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(tp: int, dp: int, pp: int, zero: int) -> Callable[[Tensor, Tensor], None]:
    size = HIDDEN // HEADS
    attention = Attention(heads=HEADS, kv_heads=HEADS, head_dim=size, value_head_dim=size)
    inner = FeedForward(ffn_hidden=INNER, gated=True)
    block = Block(hidden=HIDDEN, attention=attention, feed_forward=inner, norm=Norm.RMS)
    ends = Embedding(vocab=VOCAB, hidden=HIDDEN), Head(vocab=VOCAB, hidden=HIDDEN, norm=Norm.RMS)
    runs = (LayerRun(ends[0], 1), LayerRun(block, LAYERS), LayerRun(ends[1], 1))
    model = ModelSpec(name="benchmark", family="generic", runs=runs)
    micro_batch = 1 if pp > 1 else BATCH // dp
    count = BATCH // dp // micro_batch
    path, *_ = SCHEDULES["1f1b"].paths(Shape(pp, 1, count))
    strategy = Strategy(tp=tp, dp=dp, zero=zero, shard_group=dp)
    chunks = placed_chunks(model, even_cut(LAYERS, pp), path, strategy, (NO_RECOMPUTE, None))
    layout = Layout(
        mesh=Mesh(tp=tp, dp=dp, pp=pp), schedule="1f1b", num_chunks=1, micro_batch=micro_batch,
        num_microbatches=count, chunks=chunks,
    )  # fmt: skip
    training = TrainingSpec(
        global_batch=BATCH, seq_len=SEQ, precision=Precision.FP32, optimizer=Optimizer.ADAMW
    )
    trainer = Trainer(
        model, layout, training, Recipe(), device=torch.device("cpu"), num_steps=100,
        numbers=Numbers(),
    )  # fmt: skip

    def step(tokens: Tensor, targets: Tensor) -> None:
        trainer.step(tokens, targets)

    return step


CASES = {
    "FSDP2, dp 2": (plain_fsdp, {"tp": 1, "dp": 2, "pp": 1, "zero": 3}),
    "DTensor, tp 2": (plain_tensor, {"tp": 2, "dp": 1, "pp": 1, "zero": 0}),
    "1F1B, pp 2": (plain_pipeline, {"tp": 1, "dp": 1, "pp": 2, "zero": 0}),
}


class Cost(NamedTuple):
    """Seconds of a step: of the slower rank, and of this rank's CPU."""

    wall: float
    cpu: float

    def over(self, other: Cost) -> Cost:
        return Cost(self.wall / other.wall, self.cpu / other.cpu)


def cost_of(step: Callable[[Tensor, Tensor], None], rows: Tensor) -> Cost:
    dist.barrier()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    dist.barrier()
    return Cost(time.perf_counter() - began_s, time.process_time() - cpu_s)


def compare(own: Callable[..., None], theirs: Callable[..., None], rows: Tensor) -> str:
    pairs = []
    for pair in range(PAIRS + 2):
        first, second = (own, theirs) if pair % 2 else (theirs, own)
        a, b = cost_of(first, rows), cost_of(second, rows)
        pairs.append((a, b) if pair % 2 else (b, a))
    pairs = pairs[2:]
    mine, other = (
        1e3 * statistics.median(each.wall for each in side) for side in zip(*pairs, strict=True)
    )
    ratios = sorted(a.over(b).wall for a, b in pairs)
    cpu = statistics.median(a.over(b).cpu for a, b in pairs)
    return (
        f"ours {mine:6.1f} ms, by hand {other:6.1f} ms, median of ratios "
        f"{statistics.median(ratios):.3f} (quartiles {ratios[PAIRS // 4]:.3f} to "
        f"{ratios[3 * PAIRS // 4]:.3f}), of CPU time {cpu:.3f}"
    )


def rank(number: int, port: int) -> None:
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=number, world_size=RANKS)
    for name, (plain, degrees) in CASES.items():
        rows = torch.randint(0, VOCAB, (BATCH // degrees["dp"], SEQ + 1))
        line = compare(ours(**degrees), plain(), rows)
        if number == 0:
            print(f"{name:15} {line}")
            sys.stdout.flush()
    dist.destroy_process_group()


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank, args=(port,), nprocs=RANKS)


if __name__ == "__main__":
    main()
