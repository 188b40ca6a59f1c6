"""Passes of a user's own: from a Python file, with options from the spec, and what is said when they go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from moegraph import ops
from moegraph.compiled import Compiled, compile
from moegraph.errors import CheckFailed, RunError, UsageError
from moegraph.graph.edit import Rewriter
from moegraph.graph.program import Unit
from moegraph.passes import PassContext, PassResult, registry
from moegraph.passes.pipeline import passes_for
from tests.passes.user_passes import insert_after, pass_class, restored_registry, scale_experts, write_user_file
from tests.small_models import small_spec
from tests.step.kinds import TWO_LAYERS

NAME = "scale-experts"


@pytest.fixture(autouse=True)
def registered_passes_are_forgotten() -> Iterator[None]:
    with restored_registry():
        yield


@pytest.fixture
def loaded(tmp_path: Path) -> Path:
    path = write_user_file(tmp_path)
    assert registry.load_file(path) == [NAME]
    return path


def compiled(*overrides: str) -> Compiled:
    return compile(small_spec(*TWO_LAYERS, *overrides))


def options(text: str) -> str:
    return f"passes.custom.{NAME}.options={text}"


def scaled(result: Compiled) -> list[fx.Node]:
    graph = result.record(NAME).program.units["moe"].graphs["layer"].graph
    return [node for node in graph.nodes if node.target is ops.scale]


def test_a_pass_from_a_file_runs_with_its_defaults(loaded: Path) -> None:
    result = compiled()
    layer = [record.name for record in result.records if record.level == "layer"]
    assert layer == ["lower", "canonicalize", "balance-losses", "dispatch-experts", "split-pipeline", NAME]
    (node,) = scaled(result)
    assert node.args[1] == 1.0
    assert node.meta["custom"]["made_by"] == NAME


def test_its_options_come_from_the_spec(loaded: Path) -> None:
    nodes = scaled(compiled(options("{factor: 3, times: 2}")))
    assert [node.args[1] for node in nodes] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{facto: 2.0}", "options.facto: pass 'scale-experts' has no such option; did you mean 'factor'?"),
        ("{zzz: 2.0}", "its options are: factor, times, mode"),
        ("{factor: big}", "options.factor = 'big'"),
        ("{times: 1.5}", "options.times = 1.5"),
        ("{times: true}", "options.times = True"),
        ("{mode: some}", "options.mode = 'some'"),
        ("{name: other}", "options.name: pass 'scale-experts' has no such option"),
    ],
)
def test_options_that_do_not_fit_are_refused(loaded: Path, given: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        passes_for(small_spec(options(given)))
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_wrong_option_is_told_at_once(loaded: Path) -> None:
    with pytest.raises(UsageError) as caught:
        passes_for(small_spec(options("{factor: big, times: many, colour: red}")))
    assert len(str(caught.value).splitlines()) == 3


def test_an_option_without_a_default_has_to_be_given(tmp_path: Path) -> None:
    text = write_user_file(tmp_path).read_text(encoding="utf-8").replace("factor: float = 1.0", "factor: float")
    registry.load_file(write_user_file(tmp_path, "needs.py", text))
    with pytest.raises(UsageError, match=r"options.factor: pass 'scale-experts' needs this option"):
        passes_for(small_spec())


def test_it_can_be_switched_off_and_placed(loaded: Path) -> None:
    off = small_spec(f"passes.custom.{NAME}.enabled=false")
    assert NAME not in [p.name for p in passes_for(off)]
    placed = small_spec(f"passes.custom.{NAME}.after=canonicalize", "passes.custom.balance-losses.after=scale-experts")
    names = [p.name for p in passes_for(placed)]
    assert [name for name in names if name in ("canonicalize", NAME, "balance-losses")] == [
        "canonicalize", NAME, "balance-losses",
    ]  # fmt: skip


def test_a_pass_that_is_not_registered_is_named_with_the_fix() -> None:
    with pytest.raises(UsageError, match=r"passes.custom.scale-experts: no such pass .* --pass-file"):
        passes_for(small_spec(options("{factor: 2}")))
    with pytest.raises(UsageError, match="did you mean 'recompute'"):
        passes_for(small_spec("passes.custom.recompte.enabled=true"))


@pytest.mark.parametrize(
    "override", ["recompute.enabled=false", "split-backward.enabled=false", "recompute.options={a: 1}"]
)
def test_settings_of_a_built_in_pass_do_not_stand_under_custom(override: str) -> None:
    with pytest.raises(UsageError, match=r"comes with moegraph, and (its settings stand in passes|it always runs)"):
        passes_for(small_spec(f"passes.custom.{override}"))


def test_loading_a_changed_file_again_replaces_its_passes(loaded: Path) -> None:
    loaded.write_text(loaded.read_text(encoding="utf-8").replace("times: int = 1", "times: int = 3"), encoding="utf-8")
    assert registry.load_file(loaded) == [NAME]
    assert len(scaled(compiled())) == 3


def test_two_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        text = write_user_file(tmp_path).read_text(encoding="utf-8").replace(NAME, f"scale-{folder}")
        assert registry.load_file(write_user_file(tmp_path / folder, text=text)) == [f"scale-{folder}"]
    assert registry["scale-a"].__module__ != registry["scale-b"].__module__


@pytest.mark.parametrize("text", ["x = 1\n", "raise ValueError('no')\n", "def broken(:\n"])
def test_a_file_that_fails_or_registers_nothing_changes_nothing(tmp_path: Path, text: str) -> None:
    before = registry.names()
    with pytest.raises((UsageError, ValueError, SyntaxError)):
        registry.load_file(write_user_file(tmp_path, text=text))
    assert registry.names() == before


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no pass file"):
        registry.load_file(tmp_path / "absent.py")


# --- passes that do harm -----------------------------------------------------------------------------------------


def compile_with(apply: Any, level: str = "layer", **declared: Any) -> Compiled:
    registry.register(pass_class("mine", level, apply, **declared))
    return compiled()


def test_a_pass_that_breaks_a_shape_is_caught_at_the_node() -> None:
    def transpose(rewriter: Rewriter, unit: Unit, context: PassContext) -> None:
        for node in rewriter.find(ops.swiglu):
            new = rewriter.call_before(node, "flipped", torch.t, node.args[0])
            node.replace_input_with(node.args[0], new)  # type: ignore[arg-type]

    with pytest.raises(
        CheckFailed, match=r"after mine: dense/layer: node dense.act gives f64\[96, 8\], but f64\[16, 48\]"
    ):
        compile_with(transpose)


def test_a_pass_that_makes_a_node_impossible_is_caught_at_the_node() -> None:
    def cut_rows(rewriter: Rewriter, unit: Unit, context: PassContext) -> None:
        for node in rewriter.find(ops.combine):
            insert_after(rewriter, node, "cut", torch.narrow, 0, 0, 3)

    with pytest.raises(CheckFailed, match=r"after mine: moe/layer: node moe.\w+ .*cannot be evaluated"):
        compile_with(cut_rows)


def test_a_pass_that_changes_what_other_blocks_get_is_caught() -> None:
    def narrow(rewriter: Rewriter, unit: Unit, context: PassContext) -> None:
        for node in rewriter.find(ops.embedding):
            new = rewriter.call_before(rewriter.output_node(), "rounded", torch.Tensor.float, node)
            rewriter.set_output("hidden", "hidden", new)

    with pytest.raises(CheckFailed, match=r"after mine: embedding: .*hidden was f64\[16, 32\] and is f32\[16, 32\]"):
        compile_with(narrow)


def test_a_pass_that_drops_an_output_is_caught() -> None:
    def drop(rewriter: Rewriter, unit: Unit, context: PassContext) -> None:
        if unit.kind == "moe":
            result = rewriter.output_node()
            result.args = (result.args[0][1:],)  # type: ignore[index]
            result.meta["val"] = result.meta["val"][1:]
            rewriter.module.meta["outputs"] = rewriter.module.meta["outputs"][1:]
            rewriter.rewritten.append("output")

    with pytest.raises(CheckFailed, match="after mine: moe: layer: output expert_counts is gone"):
        compile_with(drop)


def test_a_pass_that_edits_the_graph_it_was_given_is_caught() -> None:
    def apply(self: Any, unit: Unit, context: PassContext) -> PassResult:
        for node in unit.graphs["layer"].graph.nodes:
            if node.target is ops.scale:
                node.args = (node.args[0], 2.0)
                return PassResult(unit, [node.name])
        return PassResult(unit, note="no scale")

    pass_type = pass_class("mine")
    pass_type.apply = apply  # type: ignore[method-assign]
    registry.register(pass_type)
    with pytest.raises(CheckFailed, match="'mine' changed the graph of embedding that it was given"):
        compiled("model.embedding_scale=3")


def test_a_pass_that_fails_is_named_with_the_block_and_the_line() -> None:
    def fail(rewriter: Rewriter, unit: Unit, context: PassContext) -> None:
        raise KeyError("nowhere")

    with pytest.raises(
        RunError, match=r"pass 'mine' fails on embedding: KeyError: 'nowhere' \(.*test_user_passes.py:\d+\)"
    ):
        compile_with(fail)


def test_a_pass_that_returns_something_else_is_named() -> None:
    pass_type = pass_class("mine")
    pass_type.apply = lambda self, unit, context: unit  # type: ignore[method-assign, assignment, return-value]
    registry.register(pass_type)
    with pytest.raises(RunError, match="pass 'mine' returned Unit for embedding, not a PassResult"):
        compiled()


def test_a_graph_out_of_order_is_caught() -> None:
    def reorder(rewriter: Rewriter, unit: Unit, context: PassContext) -> None:
        for node in rewriter.find(ops.combine):
            rewriter.output_node().prepend(node)
            rewriter.rewritten.append("moe.combine")

    def finish_without_lint(rewriter: Rewriter) -> fx.GraphModule:
        return rewriter.module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rewriter, "finish", finish_without_lint)
        with pytest.raises(CheckFailed, match="after mine: moe/layer: not a valid graph"):
            compile_with(reorder)


def test_a_step_pass_runs_on_the_joint_graph() -> None:
    def halve(rewriter: Rewriter, unit: Unit, context: PassContext) -> None:
        for node in rewriter.find(torch.ops.moegraph.combine.default):
            new = insert_after(rewriter, node, "halved", torch.ops.aten.mul.Tensor, 1.0)
            new.meta["custom"].update(layer=node.meta["custom"]["layer"], direction=node.meta["custom"]["direction"])

    result = compile_with(halve, "step", requires=("joint",))
    assert [record.name for record in result.records][-2:] == ["mine", "split-backward"]
    assert result.record("mine").rewritten["moe"] == ("halved", "halved.2")


def test_scaling_by_one_is_found_exact_and_scaling_by_two_is_not() -> None:
    from moegraph.verify.passes import verify_spec

    spec = small_spec(*TWO_LAYERS)
    for factor, holds in ((1.0, True), (2.0, False)):
        with restored_registry():
            registry.register(pass_class("mine", apply=scale_experts(factor)))
            row = next(row for row in verify_spec(spec).rows if row.name == "mine")
        assert row.ok is holds, row
        assert row.first_difference is None if holds else row.first_difference == "moe: moe.sum"
