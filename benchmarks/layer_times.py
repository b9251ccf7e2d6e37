"""Times of layers against measurements: python -m benchmarks.layer_times [FILE.csv] [--write]

A file has the columns source, gpu, model, layer, layers, micro_batch, seq_len, tp, forward_ms and
backward_ms. Lines of one source on one device are a session: one software, one precision. Its
efficiencies are fitted to all but one of its groups (a kind of layer under one tp; a small model of
so many layers), and predict that one. Prints figures by session and what could not be predicted
with the reason; --write records the figures.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.collectives import device_of
from benchmarks.figures import Figures, figures, table
from benchmarks.memory import model_of
from costmodel.context import CostContext
from costmodel.fitting import solve
from costmodel.layout import Mesh, Strategy
from costmodel.localmodel import local_model
from costmodel.parameters import Parameter, changed, distance
from profiles import load_cluster, shelf
from profiles.calibrations import datasheet
from profiles.layers import Attention, Block, Embedding, FeedForward, Head, Norm
from profiles.model import LayerRun, ModelSpec
from profiles.shorthand import Catalog
from profiles.training import AttentionKernel, LossKernel, Precision, TrainingSpec

if TYPE_CHECKING:
    from costmodel.context import Memo
    from costmodel.localmodel import LocalModel
    from profiles.calibration import Calibration
    from profiles.cluster import ClusterSpec

ROOT = Path(__file__).parents[1]
FULL = ROOT.parent / "shared" / "runs" / "layer_times.csv"
RECORD = ROOT / "benchmarks" / "layer_times.json"
LEAST_MS = 0.01  # below it the source means that there is nothing to measure
ROUNDS = 4
GALVATRON = re.compile(r"(gpt|llama|bert)(?:_hf|_fa)? bf16_(?:hidden(\d+)_head(\d+)|llama2-7b)")
# hidden, heads, key-value heads, feed-forward, vocabulary, gated: config.json of each model
SHAPES = {
    "OPT-350": (1024, 16, 16, 4096, 50272, False),
    "OPT-30": (7168, 56, 56, 28672, 50272, False),
    "GPT-Neo-2.7": (2560, 20, 20, 10240, 50257, False),
    "LLAMA-3-8": (4096, 32, 8, 14336, 128256, True),
}
PLACES = {"embedding": 0, "transformer layer": 1, "head": 2}
PARAMETERS = (
    Parameter(name="gemm", spread=0.7, low=0.02, high=1.0),
    Parameter(name="gemm_half_k", spread=0.5, low=10, high=2000),
    Parameter(name="stream", spread=0.4, low=0.05, high=1.0),
    Parameter(name="kernel_launch_s", spread=0.7, low=1e-6, high=2e-4),
    Parameter(name="micro_batch_s", spread=1.5, low=1e-6, high=0.1),
    Parameter(name="gpu_link", spread=1.0, low=0.01, high=1.0),
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A measured pass: of one layer, or of all layers of a small model. Has what a fit asks of a
    replay: its estimate under a calibration.
    """

    session: str
    group: tuple[str, int]
    model: ModelSpec
    places: tuple[int, ...]
    counts: tuple[int, ...]
    cluster: ClusterSpec
    training: TrainingSpec
    micro_batch: int
    tp: int
    backward: bool
    measured_s: float

    def step_s(self, calibration: Calibration, memo: Memo | None = None) -> float:
        """The estimate, with the host's time for each call."""
        context = CostContext(self.model, self.cluster, self.training, calibration, memo=memo)
        strategy, mesh = Strategy(tp=self.tp), Mesh(tp=self.tp)
        seconds = calibration.efficiencies.micro_batch_s
        for place, count in zip(self.places, self.counts, strict=True):
            layer = self.model.runs[place].layer
            cost = context.compute(layer, strategy, self.micro_batch, mesh)
            seconds += count * (cost.backward if self.backward else cost.forward).total_s
        return seconds

    @property
    def least_s(self) -> float:
        """What the datasheet's peak rates allow; nothing is faster."""
        flop = 0
        for place, count in zip(self.places, self.counts, strict=True):
            layer = self.model.runs[place].layer
            tokens = self.micro_batch * self.training.seq_len
            if isinstance(layer, Head):
                flop += count * 2 * tokens * layer.vocab * layer.hidden // self.tp
            elif isinstance(layer, Block):
                flop += (
                    count * 2 * tokens * sum(each.count for each in layer.parameters()) // self.tp
                )
        device = self.cluster.slowest_device
        rate = device.peak_flop_per_s[self.training.precision.gemm]
        return flop * (2 if self.backward else 1) / rate


@cache
def cluster_of(gpu: str, tp: int) -> ClusterSpec:
    """The device's usual node, or another one where that has fewer than tp devices."""
    device = device_of({"GH-96": "gh200-96g"}.get(gpu, gpu))
    catalog = Catalog(device)
    names = [catalog.device_file(device).default_node, *shelf.nodes_of(device)]
    large = [name for name in names if catalog.node(name).num_gpus >= tp]
    if not large:
        raise ValueError(f"no node of the catalogue has {tp} {device}")
    return load_cluster(f"1x{large[0]}")


@cache
def sailor_model(name: str, seq_len: int) -> ModelSpec:
    hidden, heads, kv_heads, ffn, vocab, gated = SHAPES[name]
    size, plain = hidden // heads, not gated
    attention = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        value_head_dim=size,
        qkv_bias=plain,
        output_bias=plain,
        rope=gated,
    )
    norm = Norm.RMS if gated else Norm.LAYER
    wide = FeedForward(ffn_hidden=ffn, gated=gated, bias=plain)
    block = Block(hidden=hidden, attention=attention, feed_forward=wide, norm=norm, dropout=plain)
    first = Embedding(vocab=vocab, hidden=hidden, positions=seq_len if plain else 0, dropout=plain)
    last = Head(vocab=vocab, hidden=hidden, norm=norm, tied=False)
    runs = (LayerRun(first, 1), LayerRun(block, 1), LayerRun(last, 1))
    return ModelSpec(name=name, family="generic", runs=runs)


def samples_of(cells: dict[str, str]) -> list[Sample]:
    """The passes of a line. Raises ValueError with the reason where there is none to predict."""
    tp, micro_batch = int(cells["tp"]), int(cells["micro_batch"])
    cluster = cluster_of(cells["gpu"], tp)
    whole = GALVATRON.match(cells["model"])
    if whole:
        found = re.search(r"seqlen(\d+)", cells["model"])
        seq_len = int(cells["seq_len"] or (found[1] if found else 0))
        hidden, heads = int(whole[2] or 4096), int(whole[3] or 32)
        kind = "llama" if "llama" in cells["model"] else whole[1]
        model, places = model_of(kind, hidden, heads, seq_len), (0, 1, 2)
        counts = (1, int(cells["layers"]), 1)
        kernel = AttentionKernel.UNFUSED if kind == "bert" else AttentionKernel.FLASH2
        precision, loss = Precision.BF16, LossKernel.FUSED
    elif cells["model"] in SHAPES:
        seq_len = int(cells["seq_len"])
        model, places = sailor_model(cells["model"], seq_len), (PLACES[cells["layer"]],)
        counts = (1,)
        kernel, precision, loss = AttentionKernel.EAGER, Precision.FP32, LossKernel.SHARDED
    else:
        raise ValueError(f"the shape of {cells['model']} is not known")
    training = TrainingSpec(
        global_batch=micro_batch,
        seq_len=seq_len,
        precision=precision,
        attention=kernel,
        fused_kernels="llama" not in model.name.lower(),
        loss=loss,
    )
    passes = {False: cells["forward_ms"], True: cells["backward_ms"]}
    return [
        Sample(
            session=f"{cells['gpu']}: {cells['model']}",
            group=(cells["layer"], tp if not whole else int(cells["layers"])),
            model=model,
            places=places,
            counts=counts,
            cluster=cluster,
            training=training,
            micro_batch=micro_batch,
            tp=tp,
            backward=backward,
            measured_s=float(milliseconds) / 1000,
        )
        for backward, milliseconds in passes.items()
        if milliseconds and float(milliseconds) > LEAST_MS
    ]


def read(path: Path) -> tuple[list[Sample], Counter[str]]:
    """What can be predicted, and how many passes or lines cannot for which reason."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    samples, left_out = [], Counter[str]()
    for line in lines:
        try:
            found = samples_of(line)
        except ValueError as reason:
            left_out[f"lines: {reason}"] += 1
            continue
        for each in found:
            if each.measured_s < each.least_s:
                left_out["passes: faster than the device's peak rate: not all of the layer"] += 1
            else:
                samples.append(each)
    return samples, left_out


def fitted(samples: list[Sample]) -> tuple[LocalModel, np.ndarray]:
    """A model of the session's passes around the best efficiencies, and where the prior lies."""
    kernel = f"attention.{samples[0].training.attention.value}"
    attention = Parameter(name=kernel, spread=0.4, low=0.02, high=1.0)
    split = any(each.tp > 1 for each in samples)
    parameters = tuple(p for p in (*PARAMETERS, attention) if split or p.name != "gpu_link")
    spread = np.array([parameter.spread for parameter in parameters])
    prior = now = datasheet()
    measured = np.log([each.measured_s for each in samples])
    for _ in range(ROUNDS):
        model = local_model(samples, now, parameters)
        now = changed(
            now, parameters, solve(model, measured, distance(parameters, now, prior), spread)
        )
    return local_model(samples, now, parameters), distance(parameters, now, prior)


def cross_validated(samples: list[Sample]) -> list[float]:
    """Errors of a session's passes, each group's by a fit to the others."""
    model, centre = fitted(samples)
    spread = np.array([parameter.spread for parameter in model.parameters])
    measured = np.log([each.measured_s for each in samples])
    errors: list[float] = []
    for group in dict.fromkeys(each.group for each in samples):
        out = np.array([each.group == group for each in samples])
        change = solve(model.of(~out), measured[~out], centre, spread)
        errors += np.expm1(model.at(change)[0][out] - measured[out]).tolist()
    return errors


def measure(path: Path) -> tuple[dict[str, Figures], Counter[str]]:
    """Figures by session and in total, and what was left out."""
    samples, left_out = read(path)
    sessions: dict[str, list[Sample]] = defaultdict(list)
    for each in samples:
        sessions[each.session].append(each)
    errors = {name: cross_validated(own) for name, own in sorted(sessions.items())}
    found = {name: figures(own) for name, own in errors.items()}
    total = figures([error for own in errors.values() for error in own])
    return {**found, "total": total}, left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=FULL)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    found, left_out = measure(asked.file)
    print(table("session", found))
    for reason, count in left_out.items():
        print(f"left out: {count} {reason}")
    if asked.write:
        record = {name: asdict(own) for name, own in found.items()}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
