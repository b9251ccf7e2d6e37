"""Random legal layouts of real models, within what one launcher can express."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

from costmodel.layout import NO_RECOMPUTE, Recompute, RecomputeKind
from executor.launchers.job import FULL, first_of_chunks
from executor.launchers.setup import layout_of, of_blocks, setup_of
from planner import load_inputs
from planner.expressible import inexpressible
from planner.launchers import LAUNCHERS, Mixing
from planner.manual import ManualLayout, layout_from_degrees
from planner.space import SearchSpace
from profiles.errors import InputError
from profiles.layers import Block, ExpertFeedForward

PROBLEMS = (
    ("llama3-8b", "2x8xh100", 128, 4096),
    ("llama2-13b", "4x8xa100-80g", 256, 2048),
    ("gpt3-6.7b", "2x8xa100-80g", 96, 2048),
    ("qwen2.5-14b", "2x8xh100", 64, 8192),
    ("mixtral-8x7b", "4x8xh100", 128, 4096),
    ("qwen3-30b-a3b", "2x8xh200", 128, 4096),
    ("deepseek-v2-lite", "2x8xh100", 64, 4096),
)


@cache
def inputs_of(problem):
    model, cluster, batch, length = problem
    return load_inputs(model, cluster, overrides={"global_batch": batch, "seq_len": length})


@cache
def degrees_of(launcher, problem):
    inputs = inputs_of(problem)
    space = SearchSpace(inputs.model, inputs.cluster, inputs.training, launcher=launcher)
    space.rules = replace(space.rules, searched=space.rules.schedules)
    by_shape = {}
    for degrees in space.degrees():
        if degrees.pp == 1 and degrees.schedule != "1f1b":
            continue  # one stage has no schedule that a launcher could be told
        by_shape.setdefault((degrees.tp > 1, degrees.pp > 1, degrees.cp > 1), []).append(degrees)
    return space, by_shape


def random_layout(launcher, random_source):
    """(inputs, layout): a legal layout that the launcher can express."""
    rules = LAUNCHERS[launcher]
    while True:
        problem = random_source.choice(PROBLEMS)
        inputs = inputs_of(problem)
        space, by_shape = degrees_of(launcher, problem)
        if not by_shape:
            continue
        degrees = random_source.choice(by_shape[random_source.choice(sorted(by_shape))])
        candidates = list(space.candidates(degrees))
        if not candidates:
            continue
        candidate = random_source.choice(candidates)
        try:
            setup = setup_of(inputs.model, _layout(inputs, candidate))
        except InputError:  # more chunks than layers
            continue
        setup = _recut(setup, rules, inputs, random_source)
        setup = _recomputed(setup, rules, inputs, random_source, candidate)
        layout = layout_of(inputs.model, setup)
        if not inexpressible(launcher, inputs, layout):
            return inputs.with_training(micro_batch=layout.micro_batch), layout


def _layout(inputs, candidate):
    d = candidate.degrees
    names = ("tp", "cp", "ep", "expert_tp", "pp", "dp", "chunks", "micro_batch", "schedule")
    manual = ManualLayout(
        **{name: getattr(d, name) for name in names},
        sequence_parallel=d.sequence_parallel,
        cp_comm=d.cp_comm,
        zero=candidate.zero,
        shard_group=candidate.shard_group,
        rank_order=candidate.rank_order,
    )
    return layout_from_degrees(inputs, manual)


def _recut(setup, rules, inputs, random_source):
    """Another cut where the launcher can have one, sometimes with unequal chunks."""
    count = len(setup.blocks)
    if count == 1 or not rules.uneven_stages or random_source.random() < 0.3:
        return setup
    blocks = inputs.model.num_blocks
    cuts = sorted(random_source.sample(range(1, blocks), count - 1))
    bounds = [0, *cuts, blocks]
    return replace(setup, blocks=tuple(b - a for a, b in pairwise(bounds)))


def _recomputed(setup, rules, inputs, random_source, candidate):
    splits = any(name in candidate.degrees.schedule for name in ("zb", "dualpipe"))
    number = inputs.model.num_blocks
    if splits:
        return setup
    if rules.mixing is Mixing.PER_LAYER:
        options = [random_source.choice([NO_RECOMPUTE, FULL]) for _ in range(number)]
    elif rules.mixing is Mixing.FIRST_OF_CHUNK:
        options = list(first_of_chunks(setup.blocks, random_source.randint(0, max(setup.blocks))))
        if random_source.random() < 0.4:
            inner = "moe_act" if _experts(inputs) else "mlp"
            modules = random_source.choice([("layernorm",), (inner,), ("layernorm", inner)])
            options = [Recompute(RecomputeKind.SELECTIVE, tuple(sorted(modules)))] * number
    else:
        options = [random_source.choice([NO_RECOMPUTE, FULL])] * number
    return replace(setup, recompute=of_blocks(inputs.model, tuple(options)))


def _experts(inputs):
    return any(
        isinstance(run.layer, Block) and isinstance(run.layer.feed_forward, ExpertFeedForward)
        for run in inputs.model.runs
    )


def layouts(launcher, count, seed=7):
    """``count`` random layouts, the same for the same seed."""
    random_source = random.Random(seed)
    return [random_layout(launcher, random_source) for _ in range(count)]
