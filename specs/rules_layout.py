"""Rules of the parallel layout, each an arithmetic sentence."""

from __future__ import annotations

from moegraph.specs.rules import Report, Rule, divisors, listing
from moegraph.specs.schema.spec import Spec
from moegraph.specs.stages import even_stages, stage_of_block

# Stages of the pipeline on each rank.
STAGES_PER_RANK = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "interleaved_zero_bubble": 2,
    "zbv_zero_bubble": 2,
    "dual_pipe_v": 2,
}


def least_microbatches(pp: int, schedule: str) -> int:
    """How many micro-batches fill a pipeline of `pp` ranks: as many as a schedule has stages one after the other."""
    return pp * (2 if schedule == "dual_pipe_v" else 1)


def ep_divides_dp(spec: Spec, report: Report) -> None:
    """Experts are spread over groups of `ep` of the `dp` data-parallel ranks."""
    layout = spec.layout
    dp, ep, pp = layout.dp, layout.ep, layout.pp
    if dp % ep == 0:
        return
    valid = divisors(dp)
    experts = spec.model.moe.num_experts if spec.model.moe is not None else None
    both = [each for each in valid if experts is not None and experts % each == 0]
    also = f"; of these, {listing(both)} also {_divide(both)} num_experts {experts}" if both and both != valid else ""
    reason = f"ep {ep} does not divide dp {dp}" if ep < dp else f"ep {ep} is more than dp {dp}"
    report.add(
        "layout.ep",
        f"world {layout.world} = dp {dp} × pp {pp}, but {reason}; valid ep: {listing(valid)}{also}",
        code="MG201",
    )


def ep_divides_experts(spec: Spec, report: Report) -> None:
    """Every rank of an expert-parallel group holds the same number of experts."""
    moe, ep, dp = spec.model.moe, spec.layout.ep, spec.layout.dp
    if moe is None:
        if ep > 1:
            report.add(
                "layout.ep",
                f"ep {ep} spreads experts over ranks, but the model has no `moe`",
                code="MG201",
                allowed="1",
            )
        return
    if moe.num_experts % ep:
        valid = divisors(moe.num_experts)
        both = [each for each in valid if dp % each == 0]
        also = f"; of these, {listing(both)} also {_divide(both)} dp {dp}" if both != valid else ""
        message = f"num_experts {moe.num_experts} is not divisible by ep {ep}; valid ep: {listing(valid)}{also}"
        report.add("layout.ep", message, code="MG201")


def stages_have_layers(spec: Spec, report: Report) -> None:
    """Every stage of the pipeline needs a layer."""
    layout, layers = spec.layout, spec.model.num_layers
    per_rank = STAGES_PER_RANK[layout.schedule]
    stages = layout.pp * per_rank
    if layout.pp == 1 or stages <= layers:
        return
    product = f"pp {layout.pp} × {per_rank} stages per rank = {stages} stages" if per_rank > 1 else f"pp {layout.pp}"
    most = layers // per_rank
    valid = f"valid pp with schedule {layout.schedule}: {f'1 to {most}' if most > 1 else '1'}"
    message = f"{product} is more than the {layers} layers of the model; {valid}"
    report.add("layout.pp", message, code="MG201")


def stages_name_every_block(spec: Spec, report: Report) -> None:
    """An explicit cut names every block once, in as many stages as the pipeline has."""
    layout, layers = spec.layout, spec.model.num_layers
    if layout.stages is None:
        return
    per_rank = STAGES_PER_RANK[layout.schedule]
    wanted = layout.pp * per_rank
    fix = "leave it out" + (f', or write such as "{even_stages(layers, wanted)}"' if wanted <= layers else "")
    try:
        found = stage_of_block(layout.stages, layers)[-1] + 1
    except ValueError as error:
        report.add("layout.stages", str(error), code="MG201", fix=fix)
        return
    if found != wanted:
        product = f"pp {layout.pp} × {per_rank} stages per rank = {wanted}" if per_rank > 1 else f"pp {layout.pp}"
        stages = f"{found} stages" if found > 1 else "1 stage"
        message = f"{stages}, but the pipeline has {product}"
        report.add("layout.stages", message, code="MG201", fix=fix)


def microbatches_fill_pipeline(spec: Spec, report: Report) -> None:
    """A pipeline with fewer micro-batches than stages would wait for ever, or idle."""
    layout = spec.layout
    if layout.pp == 1:
        return
    least = least_microbatches(layout.pp, layout.schedule)
    many, path = layout.microbatches, "layout.microbatches"
    if many < least:
        stages = f"pp {layout.pp}" + (" × 2 stages per rank" if least > layout.pp else "")
        message = f"microbatches {many} is fewer than the {least} stages of the pipeline ({stages})"
        report.add(path, message, code="MG202", allowed=f"{least} or more")
    elif layout.schedule.startswith("interleaved") and many % (many // layout.pp):
        rounds = many // layout.pp
        message = (
            f"schedule {layout.schedule} takes microbatches {many} in {rounds} rounds of at least pp {layout.pp}, "
            f"and {rounds} does not divide {many}"
        )
        report.add(path, message, code="MG202", fix=f"use a multiple of pp, such as {rounds * layout.pp}")


def schedule_has_pipeline(spec: Spec, report: Report) -> None:
    """Schedules that move stages between ranks mean nothing on one rank."""
    layout = spec.layout
    if layout.pp == 1 and STAGES_PER_RANK[layout.schedule] > 1:
        message = f"schedule {layout.schedule} puts two stages on each pipeline rank, but pp is 1"
        report.add("layout.schedule", message, code="MG202", allowed="gpipe, 1f1b", fix="raise layout.pp, or use 1f1b")


def sequences_divide(spec: Spec, report: Report) -> None:
    """An optimizer step is a whole number of sequences on every rank and in every micro-batch."""
    tokens, length = spec.train.tokens_per_step, spec.data.seq_len
    path = "train.tokens_per_step"
    if tokens % length:
        lower = tokens - tokens % length
        near = f"{lower} or {lower + length}" if lower else str(length)
        message = f"tokens_per_step {tokens} is no multiple of data.seq_len {length}"
        report.add(path, message, code="MG201", allowed=f"a multiple of {length}, such as {near}")
        return
    dp, many = spec.layout.dp, spec.layout.microbatches
    sequences = tokens // length
    if sequences % (dp * many):
        message = (
            f"{sequences} sequences per step = tokens_per_step {tokens} / seq_len {length}, "
            f"but dp {dp} × microbatches {many} = {dp * many} does not divide {sequences}"
        )
        valid = divisors(sequences // dp) if sequences % dp == 0 else []
        suffix = (
            f"; valid microbatches with dp {dp}: {listing(valid)}"
            if valid
            else f"; valid dp: {listing(divisors(sequences))}"
        )
        report.add(path, message + suffix, code="MG201")


def rows_fit_index(spec: Spec, report: Report) -> None:
    """Routed rows are counted in int32."""
    moe, layout = spec.model.moe, spec.layout
    if moe is None:
        return
    rows = spec.train.tokens_per_step // (layout.dp * layout.microbatches) * moe.top_k
    if rows >= 2**31:
        message = f"a micro-batch has {rows:,} routed rows (tokens × top_k) on a rank, more than int32 counts"
        report.add("train.tokens_per_step", message, code="MG201", fix="raise layout.microbatches")


def balance_sees_its_tokens(spec: Spec, report: Report) -> None:
    """A balance loss over more than a micro-batch of a layer needs every forward before the first backward."""
    moe, layout = spec.model.moe, spec.layout
    if moe is None or moe.balance.coef == 0:
        return
    if moe.balance.layers == "pooled" and layout.pp > 1:
        message = f"layers pooled needs the counts of all layers at once, but pp {layout.pp} spreads them over ranks"
        report.add("model.moe.balance.layers", message, code="MG202", fix="use layers: sum or mean, or layout.pp=1")
        return
    if layout.microbatches == 1 or layout.schedule == "gpipe":
        return
    for name, value in (("over", "global_batch"), ("layers", "pooled")):
        if getattr(moe.balance, name) == value:
            message = (
                f"{name} {value} needs every forward before the first backward, but schedule {layout.schedule} starts "
                f"the backward of the first of {layout.microbatches} micro-batches before the last one's forward"
            )
            fix = "use layout.schedule=gpipe, layout.microbatches=1, or " + (
                "over: micro_batch or sequence" if name == "over" else "layers: sum or mean"
            )
            report.add(f"model.moe.balance.{name}", message, code="MG202", fix=fix)


def transport_settings_have_effect(spec: Spec, report: Report) -> None:
    """A transport belongs to expert parallelism, capacity and overflow to transports with a fixed capacity."""
    layout = spec.layout
    if layout.ep == 1 and layout.transport != "exact":
        message = f"transport {layout.transport} has no effect with ep 1, where no token travels"
        report.add("layout.transport", message, code="MG201", allowed="exact", fix="raise layout.ep, or use exact")
    defaults = {name: type(layout).model_fields[name].default for name in ("capacity", "overflow")}
    reason = None
    if layout.transport == "exact" and layout.ep > 1:
        reason = "has no effect with transport exact, which sends exactly the rows that were routed"
    elif layout.ep == 1:
        reason = "has no effect with ep 1, where no token travels and none is dropped"
    for name, default in defaults.items():
        if reason is not None and getattr(layout, name) != default:
            fix = f"remove layout.{name}" + (
                ", or use transport padded or direct" if layout.ep > 1 else ", or raise layout.ep"
            )
            report.add(f"layout.{name}", reason, code="MG201", fix=fix)
    if reason is None and layout.overflow != "drop" and layout.capacity < 1:
        message = f"capacity {layout.capacity:g} is less than a balanced load, so that every step overflows"
        report.add("layout.capacity", message, code="MG201", allowed="1 or more")


def _divide(values: list[int]) -> str:
    return "divides" if len(values) == 1 else "divide"


RULES: tuple[Rule, ...] = (
    ep_divides_dp,
    ep_divides_experts,
    stages_have_layers,
    stages_name_every_block,
    microbatches_fill_pipeline,
    schedule_has_pipeline,
    sequences_divide,
    rows_fit_index,
    balance_sees_its_tokens,
    transport_settings_have_effect,
)
