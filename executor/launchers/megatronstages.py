"""Megatron-LM's rules of pipelines and of recomputation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor.launchers.commonrules import multiples, replicas
from executor.launchers.megatron import modules_of, num_chunks, stage_layers
from executor.launchers.rulebook import Broken, Rulebook, divisors, nearest_legal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from executor.launchers.told import Told

__all__ = ["ARGUMENTS", "CONFIG", "STAGES"]

ARGUMENTS = "training/arguments.py: validate_args"
CONFIG = "core/transformer/transformer_config.py"
SCHEDULES = "core/pipeline_parallel/schedules.py, when training starts"

RULES = Rulebook()


def _microbatches(told: Told) -> int:
    batch = int(told.global_batch or (told.micro_batch or 1) * replicas(told))
    return max(1, batch // ((told.micro_batch or 1) * replicas(told)))


@RULES.fails(ARGUMENTS)
def one_way_of_virtual_stages(told: Told) -> Iterator[Broken]:
    """Layers per virtual stage, virtual stages per rank and a layout exclude one another."""
    given = [f for f in ("virtual_layers", "virtual_stages", "stage_layout") if told.says(f)]
    if len(given) > 1:
        names = " and ".join(told.spelt(fact) for fact in given)
        yield Broken(given[1], f"{names} together", "one of them")


@RULES.fails(ARGUMENTS)
def layers_divide_by_stages(told: Told) -> Iterator[Broken]:
    """Without a layout or first and last numbers, the layers divide by the stages (releases before
    2025 dropped the rest and trained a smaller model: Megatron-LM#1304).
    """
    uneven = told.stage_layout or told.first_layers or told.last_layers
    if told.num_layers is None or uneven:
        return
    layers = told.num_layers + int(told.count_embedding) + int(told.count_loss)
    if layers % told.pp:
        what = f"{told.num_layers} layers"
        if layers != told.num_layers:
            what += f" and {layers - told.num_layers} for embedding and loss"
        legal = nearest_legal(told.pp, divisors(layers))
        valid = f"pp {legal}, or {told.spelt('stage_layout')} for any cut"
        yield Broken("pp", f"{what} do not divide by pp {told.pp}", valid)


@RULES.fails(CONFIG)
def first_and_last_leave_whole_stages(told: Told) -> Iterator[Broken]:
    """What first and last stage leave divides by the stages between them."""
    first, last = told.first_layers or 0, told.last_layers or 0
    if told.num_layers is None or not (first or last):
        return
    rest = told.num_layers - first - last
    stages = told.pp - bool(first) - bool(last)
    if bool(rest) != bool(stages) or rest < 0 or (stages > 0 and rest % stages):
        message = f"{rest} layers are left for {stages} stages between"
        fact = "first_layers" if first else "last_layers"
        yield Broken(fact, message, f"a rest that divides by {max(1, stages)}")


@RULES.fails(CONFIG)
def cut_flags_exclude_one_another(told: Told) -> Iterator[Broken]:
    """A layout, first and last numbers, and counting embedding or loss exclude one another."""
    ends = bool(told.first_layers or told.last_layers)
    counts = bool(told.count_embedding or told.count_loss)
    if told.stage_layout and (ends or counts):
        other = "first_layers" if told.first_layers else "last_layers"
        other = other if ends else ("count_embedding" if told.count_embedding else "count_loss")
        message = f"{told.spelt('stage_layout')} with {told.spelt(other)}"
        yield Broken("stage_layout", message, "one of them")
    elif ends and counts:
        message = f"numbers of first or last layers with {told.spelt('count_embedding')}"
        yield Broken("count_embedding", message, "one of them")


@RULES.fails("core/transformer/pipeline_parallel_layer_layout.py")
def layout_is_whole(told: Told) -> Iterator[Broken]:
    """A layout begins with its one E, ends with its one L, has a t for each layer of the model, and
    a number of stages that divides by pp.
    """
    if not told.stage_layout:
        return
    stages = stage_layers(told.stage_layout)
    flat = "".join(stages)
    strange = sorted(set(flat) - set("EtLm"))
    if strange:
        message = f"{' '.join(strange)} in a layout"
        yield Broken("stage_layout", message, "E, t, m and L, stages split by |")
        return
    if len(stages) % told.pp:
        message = f"a layout of {len(stages)} stages for pp {told.pp}"
        yield Broken("stage_layout", message, f"{multiples(len(stages), told.pp)} stages")
    if flat[:1] != "E" or flat.count("E") != 1:
        yield Broken("stage_layout", f"{flat.count('E')} E, first is {flat[:1]!r}", "one E, first")
    if flat[-1:] != "L" or flat.count("L") != 1:
        yield Broken("stage_layout", f"{flat.count('L')} L, last is {flat[-1:]!r}", "one L, last")
    if told.num_layers is not None and flat.count("t") != told.num_layers:
        message = f"a layout of {flat.count('t')} layers for a model of {told.num_layers}"
        yield Broken("stage_layout", message, f"{told.num_layers} t")


@RULES.fails(ARGUMENTS)
def virtual_stages_need_a_pipeline(told: Told) -> Iterator[Broken]:
    """Virtual stages need pp of at least 2, and of at least 3 without overlapped hand-over."""
    if num_chunks(told) == 1:
        return
    least = 2 if told.overlap_p2p else 3
    if told.pp < least:
        why = "" if told.overlap_p2p else f" and {told.spelt('overlap_p2p')}"
        message = f"{num_chunks(told)} virtual stages with pp {told.pp}{why}"
        yield Broken("pp", message, f"pp at least {least}")


@RULES.fails(CONFIG)
def layers_divide_by_virtual_stages(told: Told) -> Iterator[Broken]:
    """The layers of a rank divide by its virtual stages."""
    layers, pp = told.num_layers, told.pp
    if layers is None or told.stage_layout:
        return
    layers += int(told.count_embedding) + int(told.count_loss)
    if told.virtual_layers and layers % pp == 0 and (layers // pp) % told.virtual_layers:
        message = f"{layers // pp} layers of a rank in virtual stages of {told.virtual_layers}"
        legal = nearest_legal(told.virtual_layers, divisors(layers // pp))
        yield Broken("virtual_layers", message, legal)
    chunks = told.virtual_stages or 1
    if chunks == 1:
        return
    first, last = told.first_layers or 0, told.last_layers or 0
    inner = pp - bool(first) - bool(last)
    share = (layers - first - last) // max(1, inner)
    for fact, size in (("first_layers", first), ("last_layers", last), ("virtual_stages", share)):
        if size % chunks:
            message = f"{size} layers of a rank in {chunks} virtual stages"
            yield Broken(fact, message, nearest_legal(chunks, divisors(size)))


@RULES.fails(SCHEDULES)
def enough_microbatches_for_virtual_stages(told: Told) -> Iterator[Broken]:
    """With virtual stages there are at least as many micro-batches as a group holds (pp), and the
    last group is whole or at least pp. The parser accepts anything; the first step fails.
    """
    if num_chunks(told) == 1:
        return
    pp, count = told.pp, _microbatches(told)
    group = told.group_size or pp
    unit = (told.micro_batch or 1) * replicas(told)
    if group < pp or group > count:
        message = (
            f"groups of {group} of {count} micro-batches at pp {pp}, accepted and then refused"
        )
        fact = "group_size" if told.group_size else "global_batch"
        valid = f"a group from {pp} to {count}" if count >= pp else f"global batch {unit * pp}"
        yield Broken(fact, message, valid)
    elif 0 < count % group < pp:
        message = f"{count} micro-batches leave {count % group} for the last group of {group}"
        yield Broken("global_batch", message, multiples(unit * count, unit * group))


@RULES.fails(CONFIG)
def full_recompute_says_how(told: Told) -> Iterator[Broken]:
    """Full recomputation needs a method and a number of layers; selective has neither."""
    if told.recompute_kind == "full":
        for fact in ("recompute_method", "recompute_layers"):
            if getattr(told, fact) is None:
                valid = {"recompute_method": "block or uniform"}.get(fact, "at least 1")
                yield Broken(fact, f"full recomputation without {told.spelt(fact)}", valid)
    elif told.recompute_kind == "selective" or told.recompute_selective:
        for fact in ("recompute_method", "recompute_layers"):
            if getattr(told, fact) is not None:
                message = f"selective recomputation with {told.spelt(fact)}"
                yield Broken(fact, message, "without it")


@RULES.fails(CONFIG)
def recompute_modules_exist(told: Told) -> Iterator[Broken]:
    """Selective recomputation names modules that there are: moe_act with grouped GEMM only,
    mla_up_proj with latent attention only; not layernorm or moe_act under delayed fp8 scaling.
    """
    modules = set(modules_of(told))
    known = {"core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"}
    known |= {"gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc"}
    if modules - known:
        message = f"no module {', '.join(sorted(modules - known))}"
        yield Broken("recompute_modules", message, ", ".join(sorted(known)))
    if told.recompute_kind != "selective":
        return
    if "moe_act" in modules and not told.grouped_gemm:
        yield Broken(
            "recompute_modules", "moe_act without grouped GEMM", told.spelt("grouped_gemm")
        )
    if "mla_up_proj" in modules and not told.latent:
        yield Broken("recompute_modules", "mla_up_proj without latent attention", "leave it out")
    if told.fp8 and told.fp8_recipe == "delayed" and modules & {"layernorm", "moe_act"}:
        names = " and ".join(sorted(modules & {"layernorm", "moe_act"}))
        message = f"{names} under delayed fp8 scaling"
        yield Broken("recompute_modules", message, f"{told.spelt('fp8_recipe')} tensorwise")


@RULES.trap(CONFIG)
def recompute_no_more_layers_than_there_are(told: Told) -> Iterator[Broken]:
    """The number of recomputed layers is that of each stage or virtual stage; more is taken as
    all of them.
    """
    if told.recompute_kind != "full" or told.recompute_layers is None or told.num_layers is None:
        return
    if told.stage_layout:
        most = max(stage.count("t") for stage in stage_layers(told.stage_layout))
    else:
        most = max(
            -(-told.num_layers // (told.pp * num_chunks(told))),
            (told.first_layers or 0) // num_chunks(told),
            (told.last_layers or 0) // num_chunks(told),
        )
    if told.recompute_layers > most:
        message = f"{told.recompute_layers} recomputed layers where a stage has {most}"
        yield Broken("recompute_layers", message, f"at most {most}")


@RULES.trap(CONFIG)
def core_attention_with_flash(told: Told) -> Iterator[Broken]:
    """Recomputing core attention gains nothing with a flash or fused kernel, which keeps no scores;
    and full is named by no module.
    """
    selective = told.recompute_kind == "selective" or told.recompute_selective
    if selective and "core_attn" in modules_of(told) and told.attention not in ("unfused", "local"):
        message = f"core_attn recomputed with attention {told.attention}: no memory saved"
        yield Broken("recompute_modules", message, "other modules, or none")


@RULES.fails(ARGUMENTS)
def split_saved_activations(told: Told) -> Iterator[Broken]:
    """Saved activations are distributed over tensor ranks only with full recomputation and
    without sequence parallelism.
    """
    if not told.split_saved:
        return
    if told.tp == 1 or told.recompute_kind != "full" or told.sequence_parallel:
        message = (
            f"{told.spelt('split_saved')} needs tp, full recomputation and no sequence parallelism"
        )
        yield Broken("split_saved", message, "leave it out")


STAGES = tuple(RULES.rules)
