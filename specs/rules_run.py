"""Rules of the run: lengths, learning-rate schedule, optimizer, recompute, and which folders a spec file may name."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from moegraph.specs.rules import Report, Rule
from moegraph.specs.schema.run import CORPORA, CORPUS_PREFIX, Wsd
from moegraph.specs.schema.spec import Spec
from moegraph.specs.suggest import nearest_word


def sequences_fit_model(spec: Spec, report: Report) -> None:
    """Positions beyond max_seq_len do not exist."""
    length, most = spec.data.seq_len, spec.model.max_seq_len
    if length > most:
        message = f"seq_len {length} is more than model.max_seq_len {most}"
        report.add("data.seq_len", message, allowed=f"1 to {most}", fix="shorten it, or raise model.max_seq_len")


def schedule_fits_steps(spec: Spec, report: Report) -> None:
    """Warm-up and decay both lie within the run, unless who runs moegraph cuts a file's run short (train.steps=5)."""
    schedule, steps = spec.train.schedule, spec.train.steps
    if report.mark("train.steps").trusted and report.mark("train.schedule.warmup").line:
        return
    if schedule.warmup > steps:
        message = f"warmup {schedule.warmup} is more than train.steps {steps}"
        report.add("train.schedule.warmup", message, allowed=f"0 to {steps}")
    elif isinstance(schedule, Wsd) and schedule.warmup + schedule.decay > steps:
        total = schedule.warmup + schedule.decay
        message = f"warmup {schedule.warmup} + decay {schedule.decay} = {total} is more than train.steps {steps}"
        report.add("train.schedule.decay", message, allowed=f"0 to {steps - schedule.warmup}")


def decay_has_effect(spec: Spec, report: Report) -> None:
    """A final learning rate that is never reached is a mistake."""
    schedule = spec.train.schedule
    if isinstance(schedule, Wsd) and schedule.decay == 0 and schedule.final != Wsd.model_fields["final"].default:
        report.add("train.schedule.final", "has no effect with decay 0", fix="add train.schedule.decay, in steps")


def betas_below_one(spec: Spec, report: Report) -> None:
    """A moment with beta 1 never moves."""
    for index, beta in enumerate(spec.train.optimizer.betas):
        if beta >= 1:
            path = f"train.optimizer.betas[{index}]"
            report.add(path, f"beta {beta:g} would keep the moment at its first value", allowed="0 to below 1")


def groups_say_something(spec: Spec, report: Report) -> None:
    """A parameter group that changes nothing is a mistake."""
    for index, group in enumerate(spec.train.optimizer.groups):
        if group.weight_decay is None and group.lr_scale == 1:
            path = f"train.optimizer.groups[{index}]"
            report.add(
                path, f"the group {group.match!r} changes nothing", fix="give lr_scale or weight_decay, or remove it"
            )


def narrow_moments_move(spec: Spec, report: Report) -> None:
    """A moment that changes by less than half a unit in the last place of bfloat16 (2^-9) never changes."""
    optimizer = spec.train.optimizer
    for index, beta in enumerate(optimizer.betas):
        if optimizer.moments == "bf16" and 1.0 - beta < 2.0**-8:
            message = (
                f"{beta:g} with moments bf16 changes a moment by {1 - beta:.1e} of itself, less than bf16 can hold"
            )
            fix = "use a smaller value, or moments: master"
            report.add(f"train.optimizer.betas[{index}]", message, code="MG202", allowed="at most 0.996", fix=fix)


def fused_recompute_has_effect(spec: Spec, report: Report) -> None:
    """What the fused experts keep is no question where they are not fused."""
    fuse = spec.passes.fuse_experts
    if fuse.recompute and not fuse.enabled:
        message = "has no effect, since the pass is switched off"
        report.add("passes.fuse-experts.recompute", message, fix="add passes.fuse-experts.enabled=true, or remove it")


def overlap_has_effect(spec: Spec, report: Report) -> None:
    """Work overlaps with tokens that travel, in operators that start and wait separately."""
    overlap, layout = spec.passes.overlap_communication, spec.layout
    chunks = "passes.overlap-communication.chunks"
    if overlap.mode != "off" and layout.ep == 1:
        message = "has no effect with ep 1, where no token travels"
        report.add("passes.overlap-communication.mode", message, allowed="off", fix="raise layout.ep, or use off")
    if overlap.chunks is not None and overlap.mode == "off":
        message = "has no effect, since nothing overlaps"
        report.add(chunks, message, fix="use mode on or auto, or remove it")
    elif overlap.chunks == 2 and layout.ep > 1 and layout.transport != "padded":
        message = f"has no effect with transport {layout.transport}: its rows travel in one operator, which also waits"
        report.add(chunks, message, allowed="1", fix="use transport padded, or remove it")


def low_precision_fits(spec: Spec, report: Report) -> None:
    """8-bit operands are made from bf16, in one format, for experts."""
    precision, moe = spec.precision, spec.model.moe
    experts, dispatch = precision.mxfp8.experts, precision.mxfp8.dispatch
    paths = ("precision.mxfp8.experts", "precision.mxfp8.dispatch", "precision.fp8")
    for path, word in zip(paths, (experts, dispatch, precision.fp8), strict=True):
        if word == "off":
            continue
        if precision.compute != "bf16":
            message = f"needs compute bf16, and precision.compute is {precision.compute}"
            report.add(path, message, allowed="off", fix="add precision.compute=bf16, or use off")
        if moe is None:
            report.add(path, "has no effect in a model without experts", allowed="off")
    if moe is not None and experts == "on" and (spec.model.d_model % 32 or moe.d_ff % 32):
        message = f"needs widths of whole blocks of 32, and they are {spec.model.d_model} and {moe.d_ff}"
        report.add("precision.mxfp8.experts", message, allowed="auto | off")
    if experts != "off" and precision.fp8 != "off":
        report.add("precision.fp8", "and precision.mxfp8.experts are both on: a product has operands of one format")
    if precision.fp8_wgrad and precision.fp8 == "off":
        report.add("precision.fp8_wgrad", "has no effect with precision.fp8 off", fix="add precision.fp8=rowwise")


def saved_in_mxfp8_fits(spec: Spec, report: Report) -> None:
    """Fused experts keep their pre-activation, unless it is computed again; it is quantised from bf16, in blocks."""
    if spec.precision.mxfp8.saved == "off":
        return
    path, moe, passes = "precision.mxfp8.saved", spec.model.moe, spec.passes
    if spec.precision.compute != "bf16":
        message = f"needs compute bf16, and precision.compute is {spec.precision.compute}"
        report.add(path, message, allowed="off", fix="add precision.compute=bf16, or use off")
    if moe is None:
        report.add(path, "has no effect in a model without experts", allowed="off")
    elif not passes.fuse_experts.enabled:
        message = "is for experts that are one operator, which keep nothing else"
        report.add(path, message, fix="add passes.fuse-experts.enabled=true, or use off")
    elif moe.d_ff % 16:
        message = f"needs whole blocks of 32, and a pre-activation has 2 · {moe.d_ff}"
        report.add(path, message, allowed="off")
    if passes.fuse_experts.recompute:
        message = "has no effect with passes.fuse-experts.recompute, which keeps no pre-activation"
        report.add(path, message, allowed="off")
    if passes.recompute.policy == "full" and passes.recompute.layers == "all":
        message = "has no effect with passes.recompute.policy full, which keeps no pre-activation"
        report.add(path, message, allowed="off")


def dispatch_cast_has_effect(spec: Spec, report: Report) -> None:
    """Rows travel in MXFP8 where rows travel, in whole blocks of 32. (`auto` decides both by itself.)"""
    if spec.precision.mxfp8.dispatch != "on":
        return
    path, width = "precision.mxfp8.dispatch", spec.model.d_model
    if spec.layout.ep == 1 and spec.model.moe is not None:
        message = "has no effect with ep 1, where no row leaves its rank"
        report.add(path, message, allowed="auto | off", fix="raise layout.ep, or use auto")
    if width % 32:
        report.add(path, f"needs a d_model of whole blocks of 32, and it is {width}", allowed="auto | off")


def recompute_has_effect(spec: Spec, report: Report) -> None:
    """Layers of a recompute policy that saves everything are a mistake."""
    recompute = spec.passes.recompute
    if recompute.layers != "all" and recompute.policy == "none":
        message = "has no effect with policy none, which recomputes nothing"
        report.add("passes.recompute.layers", message, fix="add passes.recompute.policy=selective or full")
    if recompute.layers == () and recompute.policy != "none":
        message = f"names no layers, so that policy {recompute.policy} has no effect"
        report.add("passes.recompute.layers", message, fix="list the layers, write layers: all, or use policy none")
    if not recompute.enabled and recompute.policy != "none":
        message = f"the pass is switched off, so that policy {recompute.policy} has no effect"
        report.add("passes.recompute.enabled", message, fix="remove enabled, or use policy none")


def checkpoints_have_effect(spec: Spec, report: Report) -> None:
    """How checkpoints are written is no question where none is; what stays has to be written first."""
    given = spec.checkpoint
    if given.every is None:
        for key, value in (("keep_every", given.keep_every), ("mode", given.mode == "async")):
            if value:
                fix = "add checkpoint.every, in steps"
                report.add(f"checkpoint.{key}", "has no effect, since no checkpoint is written", fix=fix)
    elif given.keep_every is not None and given.keep_every % given.every:
        message = f"is not a multiple of checkpoint.every {given.every}, so that few checkpoints would be at one of it"
        report.add("checkpoint.keep_every", message, allowed=f"{given.every}, {2 * given.every}, {3 * given.every} …")


def skips_have_effect(spec: Spec, report: Report) -> None:
    """How many steps may be skipped is no question where none is."""
    train = spec.train
    given = train.max_skips != type(train).model_fields["max_skips"].default
    if given and train.non_finite != "skip" and train.skip_spikes is None:
        fix = "add train.non_finite=skip or train.skip_spikes, or remove it"
        report.add("train.max_skips", "has no effect, since no step is skipped", fix=fix)


def replicas_exist(spec: Spec, report: Report) -> None:
    """Replicas can be compared where there are several."""
    if spec.train.check_replicas is not None and spec.layout.dp == 1:
        message = "has no effect with dp 1, where nothing is replicated"
        report.add("train.check_replicas", message, fix="raise layout.dp, or remove it")


def corpus_is_built_in(spec: Spec, report: Report) -> None:
    """`corpus:NAME` names a corpus that exists."""
    name = spec.data.source.removeprefix(CORPUS_PREFIX)
    if name != spec.data.source and name not in CORPORA:
        near = nearest_word(name, CORPORA)
        fix = f"did you mean {CORPUS_PREFIX}{near}?" if near else None
        allowed = ", ".join(CORPUS_PREFIX + each for each in CORPORA) + ", or a folder"
        report.add("data.source", f"there is no built-in corpus {name!r}", allowed=allowed, fix=fix)


def paths_are_confined(spec: Spec, report: Report) -> None:
    """A spec file is data from anywhere; what it names must lie below the working directory.

    The person who runs moegraph may name any folder, by an override or from Python.
    """
    named = {
        "data.source": spec.data.source,
        "train.output_dir": spec.train.output_dir,
        "checkpoint.resume": spec.checkpoint.resume,
    }
    for path, value in named.items():
        if path == "data.source" and value.startswith(CORPUS_PREFIX):
            continue
        reason = "holds a NUL character" if "\0" in value else None
        if reason is None and not report.mark(path).trusted:
            reason = _why_outside(value)
        if reason is not None:
            fix = f"use a path below the working directory, or give it yourself: --set {path}=…"
            report.add(
                path,
                f"{reason}, and a spec file may only name what lies below the working directory",
                code="MG109",
                fix=fix,
            )


def _why_outside(value: str) -> str | None:
    if PurePath(value).is_absolute() or value.startswith("~"):
        return "is an absolute path"
    if ".." in PurePath(value).parts:
        return "leaves the working directory"
    try:
        inside = Path(os.path.realpath(value)).is_relative_to(os.path.realpath(os.curdir))
    except OSError:
        return "is not a path"
    return None if inside else "is a link that leads out of the working directory"


RULES: tuple[Rule, ...] = (
    sequences_fit_model,
    schedule_fits_steps,
    decay_has_effect,
    betas_below_one,
    narrow_moments_move,
    groups_say_something,
    fused_recompute_has_effect,
    overlap_has_effect,
    low_precision_fits,
    saved_in_mxfp8_fits,
    dispatch_cast_has_effect,
    recompute_has_effect,
    checkpoints_have_effect,
    skips_have_effect,
    replicas_exist,
    corpus_is_built_in,
    paths_are_confined,
)
