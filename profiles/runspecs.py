"""A measured run -> the specs of its model, cluster and training.

What a run leaves open is filled with what is usual for software of its kind, and every such
choice is said in a note. Nothing here depends on which source or row it is.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from profiles import shelf
from profiles.cluster import ClusterSpec, NodeGroup
from profiles.errors import InputError, Problem
from profiles.hardwarefile import resized
from profiles.layers import (
    Attention,
    Block,
    Embedding,
    ExpertFeedForward,
    FeedForward,
    Head,
    LatentAttention,
    Norm,
)
from profiles.model import LayerRun, ModelSpec
from profiles.nearest import nearest
from profiles.runexperts import run_dispatch, run_graphs, run_overlaps_experts
from profiles.shorthand import Catalog
from profiles.training import AttentionKernel, GradDtype, LossKernel, Precision, TrainingSpec
from profiles.units import GB

if TYPE_CHECKING:
    from profiles.cluster import NodeSpec
    from profiles.runs import MeasuredRun

__all__ = ["run_cluster", "run_device", "run_model", "run_training", "stated"]

USUAL_VOCAB: Final = 51_200  # Megatron-LM's GPT vocabulary, padded
LATENT_MODELS: Final = re.compile(r"deepseek|kimi|moonlight", re.IGNORECASE)
WIDE_LATENT: Final = 5120  # from this width on the family projects queries through a latent too
ALTERNATING: Final = re.compile(r"dense/moe (layers )?alternate|alternate dense/moe", re.IGNORECASE)
ENCODERS: Final = re.compile(r"bert", re.IGNORECASE)
NVL72_DOMAIN: Final = 64  # GPUs that jobs use of a 72-GPU link domain: whole powers of two
MAX_NIC_BYTES_PER_S: Final = 110e9
_RATE: Final = re.compile(r"(?:(\d+)x[^\d]*)?(\d+(?:\.\d+)?)\s*(Gb/s|GB/s)")


def stated(run: MeasuredRun, *names: str) -> tuple[int, ...]:
    """The numbers of some columns. Raises ``InputError`` with those that are not stated."""
    problems = [
        Problem(where=f"{run.where}:{name}", message="is not stated")
        for name in names
        if getattr(run, name) is None
    ]
    if problems:
        raise InputError(problems)
    return tuple(getattr(run, name) for name in names)


def run_model(run: MeasuredRun) -> ModelSpec:
    """The model of a run: Llama-like where the feed-forward is gated, else GPT-like.

    GPT-like models of unfused attention are of Megatron's older generation: dropout, learned
    positions. Attention of DeepSeek's families is latent. Raises ``InputError``.
    """
    layers, hidden, heads, seq_len = stated(run, "layers", "hidden", "heads", "seq_len")
    if run.mode == "lora":
        message = "is lora: frozen weights have no gradients, which is not estimated"
        raise InputError(Problem(where=f"{run.where}:mode", message=message))
    gated = bool(run.gated_mlp)
    early = not gated and _attention_kernel(run).stores_scores
    norm = Norm.RMS if gated else Norm.LAYER
    vocab = run.vocab or USUAL_VOCAB
    attention = _attention(run, hidden, heads, early=early)
    ffn_hidden = run.ffn_hidden or 4 * hidden
    wide = FeedForward(ffn_hidden=ffn_hidden, gated=gated, bias=early)
    dense = (run.dense_layers or 0) if run.num_experts else layers
    block = Block(hidden=hidden, attention=attention, feed_forward=wide, norm=norm, dropout=early)
    blocks = [LayerRun(block, dense)] if dense else []
    if run.num_experts:
        sparse = replace(block, feed_forward=_experts(run, ffn_hidden, gated=gated))
        if ALTERNATING.search(run.notes):
            blocks = [LayerRun(each, 1) for _ in range(layers // 2) for each in (block, sparse)]
        else:
            blocks.append(LayerRun(sparse, layers - dense))
    tied = early if run.tied_embeddings is None else run.tied_embeddings
    positions = seq_len if early else 0
    first = Embedding(vocab=vocab, hidden=hidden, positions=positions, dropout=early)
    last = Head(vocab=vocab, hidden=hidden, norm=norm, tied=tied)
    return ModelSpec(
        name=run.model or "unnamed",
        family="generic",
        runs=(LayerRun(first, 1), *blocks, LayerRun(last, 1)),
    )


def _experts(run: MeasuredRun, ffn_hidden: int, *, gated: bool) -> ExpertFeedForward:
    num_experts, top_k = stated(run, "num_experts", "topk")
    return ExpertFeedForward(
        num_experts=num_experts,
        top_k=top_k,
        expert_hidden=run.moe_ffn_hidden or ffn_hidden,
        shared_hidden=run.shared_ffn_hidden or 0,
        gated=gated,
    )


def _attention(run: MeasuredRun, hidden: int, heads: int, *, early: bool) -> Attention:
    size = run.head_dim or hidden // heads
    if LATENT_MODELS.search(run.model):
        rank = 1536 if hidden >= WIDE_LATENT else None
        latent = LatentAttention(query_rank=rank, kv_rank=512, rope_dim=64, nope_dim=128)
        return Attention(
            heads=heads, kv_heads=heads, head_dim=192, value_head_dim=128, latent=latent
        )
    return Attention(
        heads=heads,
        kv_heads=run.kv_heads or heads,
        head_dim=size,
        value_head_dim=size,
        qkv_bias=early,
        output_bias=early,
        rope=bool(run.gated_mlp),
        causal=not ENCODERS.search(run.model),
    )


def run_training(run: MeasuredRun) -> TrainingSpec:
    """Batch, precision and kernels of a run. FSDP reduces gradients in the type of the weights,
    Megatron accumulates them in fp32. Raises ``InputError``.
    """
    global_batch, seq_len = stated(run, "global_batch", "seq_len")
    early = not run.gated_mlp and _attention_kernel(run).stores_scores
    return TrainingSpec(
        global_batch=global_batch,
        seq_len=seq_len,
        precision=_precision(run),
        grad_dtype=_grad_dtype(run),
        attention=_attention_kernel(run),
        fused_kernels=early or _has_fused_kernels(run),
        fused_norms=_norms_are_fused(run),
        loss=_loss_kernel(run),
        keeps_gathered=_is_torchtitan(run),
        reduces_in_fp32=_is_torchtitan(run),
        keeps_half_gradients=_keeps_half_gradients(run),
        graphs=run_graphs(run),
        dispatch=run_dispatch(run),
        overlaps_experts=run_overlaps_experts(run),
    )


def _norms_are_fused(run: MeasuredRun) -> bool | None:
    """The stack torchtitan brings a kernel for its norms, also where it does not compile."""
    return True if "RMS kernel" in run.attn_kernel or _is_torchtitan(run) else None


def _is_torchtitan(run: MeasuredRun) -> bool:
    return "torchtitan" in run.stack.lower()


def _loss_kernel(run: MeasuredRun) -> LossKernel | None:
    """The stack torchtitan computes PyTorch's loss on each rank's part of the vocabulary."""
    if not _is_torchtitan(run):
        return None
    if "chunked cross-entropy" in run.notes:
        return LossKernel.CHUNKED
    return LossKernel.SHARDED


def _grad_dtype(run: MeasuredRun) -> GradDtype:
    """Megatron-LM and its heirs accumulate gradients in fp32, and so does DeepSpeed for weights in
    bf16; FSDP, DeepSpeed in fp16 and plain software keep them in the type of the weights.
    """
    heirs = re.search(r"megatron|nemo|mist|aceso|libai", run.stack, re.IGNORECASE)
    in_16_bit = run.precision.lower() == "fp16" and "deepspeed" in run.stack.lower()
    sharded = run.zero_stage.startswith(("2", "3")) or run.zero_stage == "hsdp"
    if heirs and not in_16_bit and not sharded:
        return GradDtype.FP32
    return GradDtype.FP16 if run.precision.lower() == "fp16" else GradDtype.BF16


def _keeps_half_gradients(run: MeasuredRun) -> bool:
    """DeepSpeed's bf16 optimizer adds the gradients of weights to those in fp32 and keeps both: it
    only sets the former to zero (``deepspeed/runtime/bf16_optimizer.py``, 0.19.8).
    """
    in_bf16 = _precision(run) is Precision.BF16 and _grad_dtype(run) is GradDtype.FP32
    return in_bf16 and "deepspeed" in run.stack.lower()


def _has_fused_kernels(run: MeasuredRun) -> bool:
    """Transformer Engine, cuDNN and compiled PyTorch fuse; plain PyTorch modules do not."""
    kernel = run.attn_kernel.lower()
    if "te" in re.split(r"[^a-z]+", kernel):
        return True
    return "cudnn" in kernel and "eager" not in run.notes


def _precision(run: MeasuredRun) -> Precision:
    text = run.precision.lower() or "bf16"
    if text in ("bf16", "fp16", "fp32"):
        return Precision(text)
    if text == "nvfp4":
        return Precision.NVFP4
    if any(part in text for part in ("mx", "block", "row")):
        return Precision.FP8_BLOCKWISE
    if text.startswith("fp8"):
        return Precision.FP8_TENSORWISE
    known = [*Precision, "mxfp8", "fp8"]
    raise InputError(
        Problem(
            where=f"{run.where}:precision",
            message=f"is {run.precision!r}",
            expected=f"one of {', '.join(known)}",
            hint=nearest(text, known),
        )
    )


def _attention_kernel(run: MeasuredRun) -> AttentionKernel:
    """The kernel, from the words of the source."""
    text = run.attn_kernel.lower()
    if "unfused" in text:
        return AttentionKernel.UNFUSED
    if text == "torch":
        return AttentionKernel.EAGER
    if text == "fused":
        return AttentionKernel.UNFUSED  # Megatron's fused softmax between two GEMMs
    if "v1" in text:
        return AttentionKernel.FLASH1
    if any(word in text for word in ("cudnn", "te)", "te/")):
        return AttentionKernel.FUSED
    return AttentionKernel.FLASH3 if "3" in text else AttentionKernel.FLASH2


@lru_cache(maxsize=256)
def _device_name(gpu: str, memory_gb: float | None) -> str | None:
    """The catalogue's device of that name with the nearest memory, at most a tenth away."""
    known = shelf.names_and_aliases("devices")
    if memory_gb is None:
        return known.get(gpu.lower())
    base, *kind = gpu.lower().split("-")
    suffix = "".join(f"-{re.escape(word)}" for word in kind)
    pattern = re.compile(rf"{re.escape(base)}(?:{suffix}-(\d+)g|-(\d+)g{suffix}|{suffix})")
    sizes = {
        name: float(found[1] or found[2] or memory_gb)
        for name in shelf.names("devices")
        if (found := pattern.fullmatch(name))
    }
    best = min(sizes, key=lambda name: abs(sizes[name] - memory_gb), default=None)
    if best is None or abs(sizes[best] - memory_gb) > memory_gb / 10:
        return None
    return best


def run_device(run: MeasuredRun) -> str:
    """The catalogue's name of the run's device. Raises ``InputError``."""
    name = _device_name(run.gpu, run.gpu_mem_gb)
    if name is None:
        memory = f" with {run.gpu_mem_gb:g} GB" if run.gpu_mem_gb else ""
        known = shelf.names_and_aliases("devices")
        raise InputError(
            Problem(
                where=f"{run.where}:gpu",
                message=f"{run.gpu}{memory} is not in the catalogue of devices",
                hint=nearest(run.gpu.lower(), known),
            )
        )
    return name


def run_cluster(run: MeasuredRun) -> ClusterSpec:
    """Nodes of the run's device in the run's size, with the network that it states; where it
    states none, that of the device's usual node. Raises ``InputError``.
    """
    device = run_device(run)
    per_node = run.gpus_per_node or 0
    if run.intra_bw.upper() == "NVL72":
        per_node = NVL72_DOMAIN
    return _cluster(device, run.n_gpus, per_node, _nics(run))


@lru_cache(maxsize=512)
def _cluster(
    device: str, num_gpus: int, per_node: int, nics: tuple[int, float] | None
) -> ClusterSpec:
    node = _node(device, per_node)
    size = min(per_node or node.num_gpus, num_gpus)
    if nics is not None:
        count, rate = nics
        node = replace(node, num_nics=count or node.num_gpus, nic_bytes_per_s=rate)
    if size > node.num_gpus:
        node = replace(node, num_gpus=size)
    stated_per_node = nics is not None and nics[0] > 0
    node = replace(node, num_gpus=size) if stated_per_node else resized(node, size)
    full, rest = divmod(num_gpus, size)
    groups = [NodeGroup(node, full)]
    if rest:
        groups.append(NodeGroup(resized(node, rest), 1))
    return ClusterSpec(name=f"{num_gpus}x{device}", groups=tuple(groups))


@lru_cache(maxsize=64)
def _node(device: str, num_gpus: int) -> NodeSpec:
    """The device's usual node, or where another one has exactly that many GPUs, that one."""
    catalog = Catalog(device)
    usual = catalog.node(catalog.device_file(device).default_node)
    if num_gpus in (0, usual.num_gpus):
        return usual
    nodes = (catalog.node(name) for name in shelf.nodes_of(device))
    return next((node for node in nodes if node.num_gpus == num_gpus), usual)


def _nics(run: MeasuredRun) -> tuple[int, float] | None:
    """(cards of a node, bytes per second of one) as ``inter_bw`` states them; 0 cards: one for
    each GPU. A rate in Gb/s or GB/s, before it the number of cards, after it "per GPU" or "per
    port" where it is not that of a node. None where nothing is stated.
    """
    found = _RATE.search(run.inter_bw)
    if found is None:
        return None
    cards, rate, unit = int(found[1] or 1), float(found[2]), found[3]
    each = bool(re.match(r"\s*per (GPU|port)", run.inter_bw[found.end() :]))
    rate *= GB / (8 if unit == "Gb/s" else 1)
    if each:
        cards = 0
    elif found[1] is None:
        share = run.gpus_per_node or 8  # a rate of the node stands for as many cards as it has GPUs
        cards, rate = share, rate / share
    if rate > MAX_NIC_BYTES_PER_S:
        raise InputError(
            Problem(
                where=f"{run.where}:inter_bw",
                message=f"is {run.inter_bw!r}, {rate / GB:g} GB/s a card",
                expected=f"at most {MAX_NIC_BYTES_PER_S / GB:g} GB/s a card",
                hint="Gb/s given as GB/s?",
            )
        )
    return cards, rate
