"""What was understood of a model or a cluster: what ``parplan describe`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from profiles.cluster import ClusterSpec
from profiles.layers import Block, Embedding, ExpertFeedForward, Head
from reports.words import gib, rate

if TYPE_CHECKING:
    from profiles.cluster import DeviceSpec, NodeSpec
    from profiles.model import ModelSpec

__all__ = ["cluster_facts", "facts_of", "human_facts", "model_facts"]


def facts_of(value: ModelSpec | ClusterSpec) -> dict[str, Any]:
    """The facts of either, in base units."""
    return cluster_facts(value) if isinstance(value, ClusterSpec) else model_facts(value)


def model_facts(model: ModelSpec) -> dict[str, Any]:
    """Counts and shapes. ``params_total`` and ``params_active`` include embedding, head and
    router, and leave multi-token prediction out. A shape that blocks differ in is a list.
    """
    layers = [run.layer for run in model.runs]
    blocks = [layer for layer in layers if isinstance(layer, Block)]
    facts: dict[str, Any] = {
        "name": model.name,
        "family": model.family,
        "params_total": model.params_total,
        "params_active": model.params_active,
        "layers": dict(model.kinds),
        "hidden": model.hidden,
        "heads": _one(block.attention.heads for block in blocks),
        "kv_heads": _one(block.attention.kv_heads for block in blocks),
        "head_dim": _one(block.attention.head_dim for block in blocks),
        "window": _one(block.attention.window for block in blocks),
        "latent_attention": any(block.attention.latent for block in blocks),
    }
    dense = [b.feed_forward for b in blocks if not isinstance(b.feed_forward, ExpertFeedForward)]
    moe = [b.feed_forward for b in blocks if isinstance(b.feed_forward, ExpertFeedForward)]
    facts["ffn_hidden"] = _one(each.ffn_hidden for each in dense)
    if moe:
        names = ("num_experts", "top_k", "expert_hidden", "shared_hidden")
        facts["experts"] = {name: _one(getattr(each, name) for each in moe) for name in names}
    return {
        **facts,
        "vocab": _one(layer.vocab for layer in layers if isinstance(layer, Embedding | Head)),
        "tied": model.tied,
        "max_seq_len": model.max_seq_len,
        "mtp_layers": model.mtp_layers,
    }


def _one(values: Any) -> Any:
    """The value that all share, None where there is none, else the list of different ones."""
    found = list(dict.fromkeys(values))
    if len(found) > 1:
        return found
    return found[0] if found else None


def cluster_facts(cluster: ClusterSpec) -> dict[str, Any]:
    """Nodes, devices and links; bandwidths are of one direction."""
    return {
        "name": cluster.name,
        "num_nodes": cluster.num_nodes,
        "num_gpus": cluster.num_gpus,
        "nodes": [{"count": group.count, **_node(group.node)} for group in cluster.groups],
        "devices": [_device(device) for device in cluster.devices],
        "fabric": [
            {
                "name": level.name,
                "nodes_per_switch": level.nodes_per_switch,
                "oversubscription": level.oversubscription,
                "latency_s": level.latency_s,
            }
            for level in cluster.fabric
        ],
    }


def _node(node: NodeSpec) -> dict[str, Any]:
    return {
        "name": node.name,
        "device": node.device.name,
        "num_gpus": node.num_gpus,
        "num_hosts": node.num_hosts,
        "gpu_link_bytes_per_s": node.gpu_bytes_per_s,
        "gpu_link_latency_s": node.gpu_latency_s,
        "direct_links": node.direct_links,
        "islands": [
            {
                "num_gpus": island.num_gpus,
                "gpu_link_bytes_per_s": island.bytes_per_s,
                "gpu_link_latency_s": island.latency_s,
            }
            for island in node.islands
        ],
        "num_nics": node.num_nics,
        "nic_bytes_per_s": node.nic_bytes_per_s,
        "nic_latency_s": node.nic_latency_s,
        "host_memory_bytes": node.host_memory_bytes,
        "price_per_gpu_hour": node.price_per_gpu_hour,
    }


def _device(device: DeviceSpec) -> dict[str, Any]:
    return {
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "peak_flop_per_s": dict(device.peak_flop_per_s),
        "sustained": device.sustained,
        "num_sms": device.num_sms,
        "watts": device.watts,
    }


def human_facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts as rows of (name, text) in human units; what is not known is left out."""
    rows = []
    for key, value in facts.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for number, part in enumerate(value):
                label = key if len(value) == 1 else f"{key} {number}"
                rows.append((label, _joined(part)))
        elif value not in (None, [], {}):
            name, text = _human(key, value)
            rows.append((name, text))
    return rows


def _joined(part: dict[str, Any]) -> str:
    pairs = [_human(key, value) for key, value in part.items() if value not in (None, [])]
    return ", ".join(f"{name} {text}" for name, text in pairs)


def _human(key: str, value: Any) -> tuple[str, str]:
    """A fact's name without its unit, and its value with one."""
    for suffix, scale in (("_bytes_per_s", rate), ("_bytes", gib)):
        if key.endswith(suffix):
            return _name(key.removesuffix(suffix)), scale(value)
    if key.endswith("_flop_per_s"):
        rates = ", ".join(f"{dtype} {own / 1e12:.4g}" for dtype, own in value.items())
        return _name(key.removesuffix("_flop_per_s")), f"{rates} TFLOP/s"
    if key.endswith("latency_s"):
        return _name(key.removesuffix("_s")), f"{value * 1e6:.4g} us"
    return _name(key), _plain(value)


def _plain(value: Any) -> str:
    """A value that has no unit."""
    if isinstance(value, list) and isinstance(value[0], dict):
        return "; ".join(_joined(each) for each in value)
    if isinstance(value, dict):
        return ", ".join(f"{_name(name)} {own}" for name, own in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _name(key: str) -> str:
    return key.replace("_", " ")
