"""Megatron-LM: the model as arguments, and back."""

from __future__ import annotations

import ast
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from executor.launchers.modelfacts import facts_of_model
from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from executor.launchers.job import Job
    from executor.launchers.told import Told

__all__ = ["hear_model", "layers_of_pattern", "say_model"]

VOCABULARIES: Final = {"GPT2BPETokenizer": 50_257}  # the tokenizers that have one vocabulary only
MOST_LAYERS: Final = 10_000


def say_model(job: Job) -> dict[str, Any]:
    """The model's arguments, none where it is known by its layers alone."""
    own = facts_of_model(job.model)
    if not own:
        return {}
    heads, hidden = own["heads"], own["hidden"]
    positions = max(own["max_positions"] or 0, job.inputs.training.seq_len)
    facts: dict[str, Any] = {
        "num_layers": own["num_layers"],
        "hidden": hidden,
        "ffn": own["ffn"],
        "heads": heads,
        "max_positions": own.get("positions") or positions,
        "position": "rope" if own["rope"] else ("learned_absolute" if own["positions"] else "none"),
        "norm": own["norm"] if own["norm"] in ("RMSNorm", "LayerNorm") else "LayerNorm",
        "swiglu": own["gated"],
        "linear_bias": own["output_bias"] and own["ffn_bias"],
        "qkv_bias": own["qkv_bias"] and not (own["output_bias"] and own["ffn_bias"]),
        "qk_norm": own["qk_norm"],
        "tied": own["tied"],
        "vocab": own["vocab"],
        "attention_dropout": 0.1 if own["dropout"] else 0.0,
        "hidden_dropout": 0.1 if own["dropout"] else 0.0,
    }
    if own["latent"]:
        names = ("latent", "query_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
        facts |= {name: own[name] for name in names}
    else:
        facts["head_dim"] = own["head_dim"] if own["head_dim"] * heads != hidden else None
        if own["kv_heads"] != heads:
            facts |= {"grouped_queries": True, "groups": own["kv_heads"]}
    if own["window"]:
        facts["window_pair"] = (str(own["window"] - 1), "0")
    return facts | (_say_experts(own) if "num_experts" in own else {})


def _say_experts(own: dict[str, Any]) -> dict[str, Any]:
    pattern = own["expert_layers"]
    facts = {
        "num_experts": own["num_experts"],
        "top_k": own["top_k"],
        "expert_ffn": own["expert_ffn"],
        "shared_ffn": own["shared_ffn"] or None,
        "shared_gate": own["shared_gate"],
        "correction_bias": own["correction_bias"],
        "grouped_gemm": True,
    }
    if not all(pattern):
        runs = [f"[{value}]*{len(list(equal))}" for value, equal in groupby(pattern)]
        facts["expert_pattern"] = f"({'+'.join(runs)})"
    return facts


def hear_model(told: Told) -> dict[str, Any]:
    """Facts of the model, empty where the arguments do not say it."""
    if told.hidden is None or told.num_layers is None or told.heads is None:
        return {}
    rotary = told.rotary or told.position in ("rope", "mrope", "yarn")
    gated = told.swiglu or told.geglu
    ffn = told.ffn or (int(4 * told.hidden * 2 / 3 / 64) * 64 if gated else 4 * told.hidden)
    facts: dict[str, Any] = {
        "num_layers": told.num_layers,
        "hidden": told.hidden,
        "ffn": ffn,
        "heads": told.heads,
        "kv_heads": told.groups if told.grouped_queries else told.heads,
        "head_dim": told.head_dim,
        "vocab": told.vocab or told.padded_vocab or VOCABULARIES.get(told.tokenizer or ""),
        "max_positions": told.max_positions,
        "positions": (
            told.max_positions or 0 if not rotary and told.position == "learned_absolute" else 0
        ),
        "rope": rotary,
        "norm": told.norm,
        "gated": gated,
        "ffn_bias": told.linear_bias,
        "output_bias": told.linear_bias,
        "qkv_bias": told.linear_bias or told.qkv_bias,
        "qk_norm": told.qk_norm,
        "tied": told.tied,
        "dropout": bool(told.attention_dropout or told.hidden_dropout),
        "mtp_layers": told.mtp_layers or 0,
        "window": int(told.window_pair[0].split(",")[0].strip("(")) + 1
        if told.window_pair
        else None,
    }
    if told.latent:
        names = ("latent", "query_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
        facts |= {name: getattr(told, name) for name in names}
    if told.num_experts:
        facts |= {
            "num_experts": told.num_experts,
            "top_k": told.top_k,
            "expert_ffn": told.expert_ffn or ffn,
            "shared_ffn": told.shared_ffn or 0,
            "shared_gate": told.shared_gate,
            "correction_bias": told.correction_bias,
            "expert_layers": layers_of_pattern(told),
        }
    return facts


def layers_of_pattern(told: Told) -> tuple[int, ...]:
    """Which layers have experts, from ``--moe-layer-freq``: every N-th from the first on, or a
    list like ``([0]*3+[1]*58)``.
    """
    text, layers = told.expert_pattern.strip("\"'"), told.num_layers
    if text.isdigit() and int(text):
        return tuple(int(layer % int(text) == 0) for layer in range(layers))
    pattern = _listed(text)
    if pattern is None or len(pattern) != layers:
        message = f"{told.spelt('expert_pattern')} is {told.expert_pattern!r}"
        expected = f"a number, or a list of {layers} zeros and ones as ([0]*1+[1]*{layers - 1})"
        where = told.where("expert_pattern")
        raise InputError(Problem(where=where, message=message, expected=expected))
    return tuple(int(bool(each)) for each in pattern)


def _listed(text: str) -> list[int] | None:
    """The list of sums and multiples of lists of whole numbers."""

    def of(node: ast.expr) -> Any:
        if isinstance(node, ast.List):
            return [of(each) for each in node.elts]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return min(node.value, MOST_LAYERS)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left, right = of(node.left), of(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        raise ValueError

    try:
        found = of(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return found if isinstance(found, list) else None
