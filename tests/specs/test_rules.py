"""Every cross-field rule refuses what contradicts, says why and what would do, and lets everything else pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegraph.errors import Problem
from moegraph.specs import load_spec
from moegraph.specs.merge import overlay
from moegraph.specs.nodes import Limits, Mapping, Mark
from moegraph.specs.overrides import read_overrides
from moegraph.specs.rules import Report, all_rules, run_rule
from moegraph.specs.schema import Spec
from moegraph.specs.sources import Sources
from moegraph.specs.validate import parse_spec
from tests.specs.small import MINIMAL, minimal, problems_of, write

PARALLEL = ["layout.dp=4", "layout.ep=2", "layout.microbatches=4"]
PIPELINE = ["layout.pp=2", "layout.microbatches=4"]
GROUPS = "model.moe.router.groups"
STAGES = "layout.stages"

REFUSED = [
    (["data.source=corpus:nope"], "data.source", "no built-in corpus 'nope'", "corpus:python-stdlib, or a folder"),
    # (overrides, path, part of the message, allowed)
    (["train.max_skips=3"], "train.max_skips", "has no effect, since no step is skipped", None),
    (["train.check_replicas=3"], "train.check_replicas", "has no effect with dp 1", None),
    (["checkpoint.mode=async"], "checkpoint.mode", "has no effect, since no checkpoint is written", None),
    (["checkpoint.keep_every=10"], "checkpoint.keep_every", "has no effect, since no checkpoint is written", None),
    (
        ["checkpoint={every: 10, keep_every: 25}"],
        "checkpoint.keep_every",
        "is not a multiple of checkpoint.every 10",
        "10, 20, 30 …",
    ),
    (["model.moe.top_k=9"], "model.moe.top_k", "top_k 9 is more than num_experts 8", "1 to 8"),
    ([f"{GROUPS}={{n: 3, keep: 1}}"], f"{GROUPS}.n", "num_experts 8 is not divisible by 3 groups", "1, 2, 4, 8"),
    ([f"{GROUPS}={{n: 4, keep: 5}}"], f"{GROUPS}.keep", "keep 5 is more than the 4 groups", "1 to 4"),
    (
        [f"{GROUPS}={{n: 4, keep: 1}}", "model.moe.top_k=3"],
        f"{GROUPS}.keep",
        "1 groups of 2 experts hold 2, fewer than top_k 3",
        "2 to 4",
    ),
    (
        [f"{GROUPS}={{n: 8, keep: 4}}"],
        f"{GROUPS}.n",
        "one expert each, and score top2_sum adds the best two",
        "1, 2, 4",
    ),
    (
        [f"{GROUPS}={{n: 4, keep: 2, fill: zero}}", "model.moe.router.select_bias=learned_free"],
        f"{GROUPS}.fill",
        "with select_bias learned_free the allowed ones can be below 0",
        "-inf",
    ),
    (
        [f"{GROUPS}={{n: 4, keep: 2, fill: zero}}", "model.moe.router.score=none"],
        f"{GROUPS}.fill",
        "with score none the allowed ones can be below 0",
        "-inf",
    ),
    (
        ["model.moe.top_k=1", "model.moe.router.weight_from=softmax_selected"],
        "model.moe.router.weight_from",
        "the gradient of the router is zero",
        "score, sigmoid_selected",
    ),
    (
        ["model.moe.top_k=1", "model.moe.router.norm.kind=sum"],
        "model.moe.router.norm.kind",
        "the gradient of the router is zero",
        "none",
    ),
    (
        ["model.moe.router={score: none, norm: {kind: sum}}"],
        "model.moe.router.norm.kind",
        "raw logits of either sign",
        None,
    ),
    (["precision.mxfp8.saved='on'"], "precision.mxfp8.saved", "is for experts that are one operator", None),
    (["model.moe.router.norm.eps=1e-20"], "model.moe.router.norm.eps", "no effect with norm.kind none", None),
    (["model.moe.router.norm.mode=clamp"], "model.moe.router.norm.mode", "no effect with norm.kind none", None),
    (["model.moe.router.bias_update_rate=0.01"], "model.moe.router.bias_update_rate", "with select_bias none", None),
    (["model.moe.balance.over=sequence"], "model.moe.balance.over", "balance.coef is not given", None),
    (["model.moe.balance.f_norm=k"], "model.moe.balance.f_norm", "balance.coef is not given", None),
    (["model.moe.balance.layers=mean"], "model.moe.balance.layers", "balance.coef is not given", None),
    (
        ["model.attention.num_kv_heads=3"],
        "model.attention.num_kv_heads",
        "num_heads 4 is not divisible by num_kv_heads 3",
        "1, 2, 4",
    ),
    (["model.attention.num_heads=5"], "model.attention.num_heads", "d_model 32 is not divisible by num_heads 5", None),
    (["model.attention.head_dim=7"], "model.attention.head_dim", "no even number of rotated values", None),
    (
        ["model.attention.rope.fraction=0.4"],
        "model.attention.rope.fraction",
        "8 × rope.fraction 0.4 = 3.2",
        "rope.fraction 0.25, 0.5, 1",
    ),
    (
        ["model.moe.balance={over: sequence, layers: pooled, coef: 0.1}"],
        "model.moe.balance.layers",
        "over sequence takes each sequence by itself",
        "sum, mean",
    ),
    (
        ["passes.recompute={policy: full, layers: []}"],
        "passes.recompute.layers",
        "names no layers, so that policy full has no effect",
        None,
    ),
    (
        ["model.attention.window={size: 8, pattern: GGGGL}"],
        "model.attention.window.pattern",
        "the pattern has no L among the first 4",
        None,
    ),
    (["model.attention.window={size: 8, pattern: GG}"], "model.attention.window.pattern", "the pattern has no L", None),
    (["model.moe=null"], "model", "has neither `moe` nor `dense`", None),
    (
        ["model.dense={d_ff: 8, layers: all}"],
        "model.dense.layers",
        "all 4 layers are dense, so that `moe` has no effect",
        None,
    ),
    (["precision.compute=fp32", "precision.fp8=rowwise"], "precision.fp8", "needs compute bf16", "off"),
    (["precision.mxfp8.dispatch='on'"], "precision.mxfp8.dispatch", "has no effect with ep 1", "auto | off"),
    (["precision.fp8=blockwise"], "precision.fp8", "whole blocks of 128", "off | rowwise"),
    (
        ["precision.mxfp8.wgrad=mxfp8"],
        "precision.mxfp8.wgrad",
        "no effect with precision.mxfp8.experts, shared and",
        "bf16",
    ),
    (["precision.mxfp8.shared=auto"], "precision.mxfp8.shared", "a model without shared experts", "off"),
    (["model.dense={d_ff: 8, layers: [0, 1, 2, 3]}"], "model.dense.layers", "`moe` has no effect", None),
    (["model.dense={d_ff: 8}"], "model.dense", "names no layers", None),
    (
        ["model.dense={d_ff: 8, layers: [4]}"],
        "model.dense.layers",
        "there is no layer 4 in a model of 4 layers",
        "0 to 3",
    ),
    (["model.dense={d_ff: 8, layers: [1, 1]}"], "model.dense.layers", "names layer 1 more than once", None),
    (
        ["model.moe=null", "model.dense={d_ff: 8, layers: [0, 2]}"],
        "model.dense.layers",
        "layers 1, 3 have no feed-forward",
        None,
    ),
    (["passes.recompute={policy: full, layers: [9]}"], "passes.recompute.layers", "there is no layer 9", "0 to 3"),
    (["passes.overlap-communication.mode=on"], "passes.overlap-communication.mode", "no effect with ep 1", "off"),
    (["passes.recompute.layers=[1]"], "passes.recompute.layers", "no effect with policy none", None),
    (["passes.recompute={policy: full, enabled: false}"], "passes.recompute.enabled", "switched off", None),
    (["passes.fuse-experts.recompute=true"], "passes.fuse-experts.recompute", "switched off", None),
    (
        ["data.seq_len=8192", "train.tokens_per_step=8192"],
        "data.seq_len",
        "seq_len 8192 is more than model.max_seq_len 4096",
        "1 to 4096",
    ),
    (
        ["train.tokens_per_step=1000"],
        "train.tokens_per_step",
        "no multiple of data.seq_len 256",
        "a multiple of 256, such as 768 or 1024",
    ),
    (
        ["layout.microbatches=3"],
        "train.tokens_per_step",
        "dp 1 × microbatches 3 = 3 does not divide 16; valid microbatches with dp 1: 1, 2, 4, 8, 16",
        None,
    ),
    (["layout.dp=3"], "train.tokens_per_step", "valid dp: 1, 2, 4, 8, 16", None),
    (["train.tokens_per_step=17179869184"], "train.tokens_per_step", "more than int32 counts", None),
    (
        ["layout.dp=2", "layout.ep=4"],
        "layout.ep",
        "world 2 = dp 2 × pp 1, but ep 4 is more than dp 2; valid ep: 1, 2",
        None,
    ),
    (
        ["layout.dp=4", "layout.ep=4", "model.moe.num_experts=6"],
        "layout.ep",
        "num_experts 6 is not divisible by ep 4; valid ep: 1, 2, 3, 6",
        None,
    ),
    (
        ["layout.dp=2", "layout.ep=2", "model.moe=null", "model.dense={d_ff: 8}"],
        "layout.ep",
        "the model has no `moe`",
        "1",
    ),
    (
        ["layout.pp=8", "layout.microbatches=8"],
        "layout.pp",
        "pp 8 is more than the 4 layers of the model; valid pp with schedule 1f1b: 1 to 4",
        None,
    ),
    (
        ["layout.pp=4", "layout.microbatches=8", "layout.schedule=zbv_zero_bubble"],
        "layout.pp",
        "pp 4 × 2 stages per rank = 8 stages is more than the 4 layers",
        None,
    ),
    (
        ["layout.pp=4", "layout.microbatches=1"],
        "layout.microbatches",
        "microbatches 1 is fewer than the 4 stages of the pipeline (pp 4)",
        "4 or more",
    ),
    (
        ["layout.pp=2", "layout.microbatches=2", "layout.schedule=dual_pipe_v"],
        "layout.microbatches",
        "microbatches 2 is fewer than the 4 stages of the pipeline (pp 2 × 2 stages per rank)",
        "4 or more",
    ),
    (
        ["layout.pp=2", "layout.microbatches=5", "layout.schedule=interleaved_1f1b", "train.tokens_per_step=5120"],
        "layout.microbatches",
        "takes microbatches 5 in 2 rounds",
        None,
    ),
    (["layout.schedule=zbv_zero_bubble"], "layout.schedule", "but pp is 1", "gpipe, 1f1b"),
    ([*PIPELINE, 'layout.stages="embedding,0-3,head"'], STAGES, "1 stage, but the pipeline has pp 2", None),
    (
        [*PIPELINE, "layout.schedule=dual_pipe_v", 'layout.stages="embedding,0|1|2-3,head"'],
        STAGES,
        "3 stages, but the pipeline has pp 2 × 2 stages per rank = 4",
        None,
    ),
    ([*PIPELINE, 'layout.stages="embedding,0-3||head"'], STAGES, "stage 1 is empty", None),
    ([*PIPELINE, 'layout.stages="embedding,0-1|2,head"'], STAGES, "layer 3 should stand before head", None),
    ([*PIPELINE, 'layout.stages="0-1|2-3,head"'], STAGES, "embedding should stand before layer 0", None),
    ([*PIPELINE, 'layout.stages="embedding,0-1|1-3,head"'], STAGES, "layer 1 stands twice", None),
    ([*PIPELINE, 'layout.stages="embedding,0|1-2"'], STAGES, "layer 3 to head missing at the end", None),
    ([*PIPELINE, 'layout.stages="embedding,0-1|2-4,head"'], STAGES, "no layer 4 in a model of 4 layers (0 to 3)", None),
    ([*PIPELINE, 'layout.stages="embedding,1-0|2-3,head"'], STAGES, "the range 1-0 goes backwards", None),
    ([*PIPELINE, 'layout.stages="embedding,0-1|2-3,tail"'], STAGES, "'tail' is not embedding, head, a layer", None),
    (["layout.overflow=drop"], "layout.overflow", "no effect with ep 1", None),
    (["layout.transport=direct"], "layout.transport", "no effect with ep 1", "exact"),
    (["layout.dp=2", "layout.ep=2", "layout.capacity=2"], "layout.capacity", "no effect with transport exact", None),
    (
        ["layout.dp=2", "layout.ep=2", "layout.transport=padded", "layout.capacity=0.5"],
        "layout.capacity",
        "less than a balanced load",
        "1 or more",
    ),
    (["train.optimizer.betas=[0.9, 1]"], "train.optimizer.betas[1]", "beta 1 would keep the moment", "0 to below 1"),
    (
        ["train.optimizer={moments: bf16, betas: [0.9, 0.999]}"],
        "train.optimizer.betas[1]",
        "changes a moment by 1.0e-03 of itself",
        "at most 0.996",
    ),
    (["train.optimizer.groups=[{match: '*'}]"], "train.optimizer.groups[0]", "changes nothing", None),
    (
        ["train.schedule={kind: wsd, warmup: 20}"],
        "train.schedule.warmup",
        "warmup 20 is more than train.steps 10",
        "0 to 10",
    ),
    (
        ["train.schedule={kind: wsd, warmup: 6, decay: 5}"],
        "train.schedule.decay",
        "6 + decay 5 = 11 is more than train.steps 10",
        "0 to 4",
    ),
    (["train.schedule={kind: wsd, final: 0.1}"], "train.schedule.final", "no effect with decay 0", None),
]

ACCEPTED = [
    ["model.moe.top_k=8"],
    ["model.moe.top_k=1"],
    ["model.moe.top_k=1", "model.moe.router.weight_from=sigmoid_selected", "model.moe.router.score=none"],
    ["model.moe.top_k=1", "model.moe.num_experts=1", "model.moe.router.norm.kind=sum"],
    ["model.moe.router={score: none, weight_from: score}"],
    ["model.moe.router={score: none, weight_from: softmax_selected}"],
    ["model.moe.router.norm={kind: sum, mode: clamp, eps: 0}"],
    [f"{GROUPS}={{n: 8, keep: 4, score: max}}"],
    [f"{GROUPS}={{n: 4, keep: 2, score: max, fill: zero}}"],
    [f"{GROUPS}={{n: 1, keep: 1}}"],
    ["model.moe.balance={over: sequence, coef: 0}"],
    ["model.moe.balance={over: global_batch, coef: 0.1}"],
    ["model.moe.balance={over: global_batch, layers: pooled, coef: 0.1}", "layout={microbatches: 4, schedule: gpipe}"],
    ["model.moe=null", "model.dense={d_ff: 8}"],
    ["model.moe=null", "model.dense={d_ff: 8, layers: [0, 1, 2, 3]}"],
    ["model.attention={num_heads: 5, head_dim: 6, rope: {fraction: 0.3333333333}}"],
    ["model.attention={num_heads: 4, head_dim: 7, rope: null}"],
    ["passes.recompute={policy: selective, layers: [0, 3]}"],
    ["passes.fuse-experts={enabled: true, recompute: true}"],
    [*PARALLEL],
    [*PARALLEL, "layout.transport=padded", "layout.capacity=2", "layout.overflow=error"],
    [*PIPELINE],
    [*PIPELINE, "layout.schedule=interleaved_zero_bubble"],
    [*PIPELINE, "layout.schedule=dual_pipe_v"],
    ['layout.stages="embedding,0-3,head"'],
    [*PIPELINE, 'layout.stages="embedding, 0 | 1-2, 3, head"'],
    [*PIPELINE, "layout.schedule=zbv_zero_bubble", 'layout.stages="embedding|0-2|3|head"'],
    ["layout.microbatches=16"],
    ["train.steps=3"],
    ["train.schedule={kind: cosine, warmup: 10}"],
    ["train.schedule={kind: wsd, warmup: 5, decay: 5, final: 0.1}"],
    ["train.validation={every: 1000, sequences: 1}"],
    ["train.optimizer.betas=[0, 0]"],
    ["checkpoint={every: 10, keep_every: 30, mode: async, keep_last: 1}"],
    ["train.optimizer.moments=bf16"],
]


@pytest.mark.parametrize(("overrides", "path", "sentence", "allowed"), REFUSED)
def test_a_contradiction_is_refused(
    tmp_path: Path, overrides: list[str], path: str, sentence: str, allowed: str | None
) -> None:
    found = {each.path: each for each in problems_of(write(tmp_path, MINIMAL), overrides)}
    assert path in found, found
    assert sentence in found[path].message
    assert allowed is None or found[path].allowed == allowed
    assert allowed is not None or found[path].fix is not None or "; valid" in found[path].message


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_what_makes_sense_is_accepted(tmp_path: Path, overrides: list[str]) -> None:
    minimal(tmp_path, *overrides)


def test_every_rule_refuses_something(tmp_path: Path) -> None:
    """A rule that never fires is dead: each is fed every refused spec, and must object to one of them."""
    silent = set(all_rules())
    cases = [case[0] for case in REFUSED]
    cases.append(["model.moe.num_experts=65536", "model.moe.d_ff=4194304", "model.d_model=4194304"])
    cases.append(["layout.microbatches=2", "model.moe.balance={over: global_batch, coef: 0.1}"])
    cases.append(['train.output_dir="a\\0b"'])
    for overrides in cases:
        spec, tree, whole = parse(tmp_path, overrides)
        for rule in list(silent):
            report = Report(tree, [])
            run_rule(rule, spec, report, whole)
            if report.problems:
                silent.remove(rule)
    assert not {rule.__name__ for rule in silent}


def parse(tmp_path: Path, overrides: list[str]) -> tuple[Spec, Mapping, bool]:
    """What the rules are given: a spec, the tree it came from, and whether it is whole."""
    problems: list[Problem] = []
    tree = Sources(problems, Limits()).read(str(write(tmp_path, MINIMAL)))
    over = read_overrides(overrides, problems, Limits())
    assert tree is not None
    assert over is not None
    merged = overlay(tree, over)
    assert isinstance(merged, Mapping)
    parsed = parse_spec(merged)
    return parsed.spec, merged, parsed.whole


def test_a_fault_in_a_rule_is_not_taken_for_a_hole(tmp_path: Path) -> None:
    def faulty(spec: Spec, report: Report) -> None:
        _ = spec.no_such_field  # type: ignore[attr-defined]

    report = Report(Mapping({}, Mark("x")), [])
    with pytest.raises(AttributeError):
        run_rule(faulty, minimal(tmp_path), report, whole=True)
    run_rule(faulty, minimal(tmp_path), report, whole=False)


def test_the_sentence_on_world_is_arithmetic(tmp_path: Path) -> None:
    overrides = ["layout.dp=3", "layout.ep=2", "layout.pp=4", "layout.microbatches=4", "train.tokens_per_step=3072"]
    problems = problems_of(write(tmp_path, MINIMAL), [*overrides, "model.moe.num_experts=9"])
    messages = [each.message for each in problems]
    assert "world 12 = dp 3 × pp 4, but ep 2 does not divide dp 3; valid ep: 1, 3" in messages


def test_a_run_may_be_cut_short_from_the_command_line_but_not_in_the_file(tmp_path: Path) -> None:
    text = MINIMAL.replace("steps: 10,", "schedule: {kind: wsd, warmup: 3, decay: 4}, steps: 10,")
    assert load_spec(write(tmp_path, text), ["train.steps=2"]).train.steps == 2
    problems_of(write(tmp_path, text.replace("steps: 10,", "steps: 2,")))
    assert load_spec(write(tmp_path, text.replace("steps: 10,", "steps: 2,")), trusted=True).train.steps == 2
