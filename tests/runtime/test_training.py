"""A run from its spec to its final weights: it learns, and leaves what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moegraph.errors import RunError, UsageError
from moegraph.lowering import lower
from moegraph.runtime.run_folder import claim_run_folder
from moegraph.runtime.trainer import train

from .small_runs import Run, run, run_spec

STEPS = 20
VALIDATION = "train.validation={every: 10, sequences: 5}"


@pytest.fixture(scope="module")
def done(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run that validates every ten steps, through torch.compile."""
    folder = tmp_path_factory.mktemp("learns")
    overrides = [f"train.steps={STEPS}", "train.optimizer.lr=3e-3", "train.compile=aot_eager", VALIDATION]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return run(run_spec(folder, *overrides), tokens)


def test_a_small_model_learns(done: Run) -> None:
    losses = done.column("loss")
    assert losses[-1] < losses[0] - 1.5
    assert done.result.first_validation_loss is not None
    assert done.result.validation_loss is not None
    assert done.result.validation_loss < done.result.first_validation_loss - 1.5
    assert done.result.loss == losses[-1]


def test_a37_every_graph_is_compiled_once_however_the_routing_moves(done: Run) -> None:
    counts = [record["router"]["layers.2"]["counts"] for record in done.records if record["step"] > 0]
    assert len({tuple(each) for each in counts}) > STEPS // 2  # the routing did move
    assert len(set(done.column("valid_targets"))) > 1
    kinds = ("embedding", "dense", "moe", "head")
    assert done.result.compilations == {f"{k}/{g}": 1 for k in kinds for g in ("forward", "backward", "evaluate")}
    assert "compiled 12 graphs, each once" in done.printed


def test_every_step_has_a_record(done: Run) -> None:
    assert [record["step"] for record in done.records] == list(range(STEPS + 1))
    for record in done.records[1:]:
        assert {"loss", "loss_total", "balance_loss", "z_loss", "grad_norm", "lr", "seconds"} <= record.keys()
        assert {"tokens_per_second", "tflops", "memory_bytes", "valid_targets"} <= record.keys()
        assert list(record["router"]) == ["layers.1", "layers.2", "layers.3"]
        for layer in record["router"].values():
            assert sum(layer["counts"]) == 2 * 64
            assert 0 < layer["entropy"] <= 1
            assert layer["dropped_tokens"] == 0


def test_a10_the_total_is_the_cross_entropy_and_each_auxiliary_loss_once(done: Run) -> None:
    for record in done.records[1:]:
        assert record["loss_total"] == pytest.approx(record["loss"] + record["balance_loss"] + record["z_loss"])
        # coef 0.01, three layers, each 1 + alignment where every sequence has as many tokens
        assert 0.03 * 0.9 < record["balance_loss"] < 0.03 * 2
        assert record["z_loss"] > 0


def test_validation_comes_before_the_first_step_at_its_interval_and_after_the_last(done: Run) -> None:
    assert [record["step"] for record in done.records if "validation_loss" in record] == [0, 10, 20]
    assert done.records[0].keys() == {"step", "loss", "grad_norm", "validation_loss"}
    assert done.records[0]["loss"] is done.records[0]["grad_norm"] is None  # no step has been taken yet


def test_the_final_weights_are_every_parameter_by_its_name(done: Run, tmp_path: Path) -> None:
    parameters = lower(run_spec(tmp_path)).parameters
    assert done.weights.keys() == parameters.keys()
    for name, value in done.weights.items():
        assert tuple(value.shape) == parameters[name].shape
        assert value.isfinite().all()


def test_the_manifest_says_what_was_run(done: Run) -> None:
    manifest = json.loads((done.result.folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["spec"]["train"]["steps"] == STEPS
    assert list(manifest["graph_hashes"])[-1] == "split-backward"
    assert len(manifest["data"]["fingerprint"]) == 64
    assert manifest["parameters"]["total"] == sum(value.numel() for value in done.weights.values())
    assert manifest["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert manifest["flops_per_token"] > 0


def test_nothing_half_written_is_left(done: Run) -> None:
    assert {path.name for path in done.result.folder.iterdir()} >= {"manifest.json", "metrics.jsonl"}
    assert not [path for path in done.result.folder.iterdir() if path.name.startswith(".")]


def test_the_validation_loss_does_not_depend_on_the_micro_batch(tokens: Path, tmp_path: Path) -> None:
    """Five sequences in batches of 4 (three rows of padding), of 2 (one), and of 1."""
    losses = [
        run(run_spec(tmp_path / str(n), "train.steps=1", VALIDATION, f"layout.microbatches={n}"), tokens)
        for n in (1, 2, 4)
    ]
    first = losses[0].result.first_validation_loss
    for other in losses[1:]:
        assert other.result.first_validation_loss == pytest.approx(first, rel=1e-12)


@pytest.mark.parametrize("layout", ["{dp: 2}", "{dp: 1, pp: 2, microbatches: 2}"])
def test_a_layout_of_several_ranks_is_refused_in_a_sentence(layout: str, tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"asks for 2 ranks.*1 process runs.*--nproc 2"):
        train(run_spec(tmp_path, f"layout={layout}"), base=tokens)
    assert not (tmp_path / "run").exists()


def test_what_is_announced_about_balance_losses_is_what_is_added(tokens: Path, tmp_path: Path) -> None:
    done = run(run_spec(tmp_path, "train.steps=1", "passes.balance-losses.enabled=false"), tokens)
    assert "auxiliary: no balance loss, passes.balance-losses is off" in done.printed
    assert done.records[0]["loss_total"] == done.records[0]["loss"]


def test_a_second_run_leaves_the_first_one_whole(done: Run, tokens: Path, tmp_path: Path) -> None:
    first = run(run_spec(tmp_path, "train.steps=1"), tokens)
    second = run(run_spec(tmp_path, "train.steps=1", "train.seed=1"), tokens)
    aside = tmp_path / "run.1"
    assert f"an earlier run was in {tmp_path / 'run'}; it is now {aside}" in second.printed
    assert (aside / "model.safetensors").is_file()
    assert first.records != second.records


def test_two_runs_do_not_write_into_one_folder(tokens: Path, tmp_path: Path) -> None:
    spec = run_spec(tmp_path, "train.steps=1")
    with claim_run_folder(tmp_path / "run", print) as folder:
        (folder / "metrics.jsonl").write_text("", encoding="utf-8")
        with pytest.raises(RunError, match="another process is training into"):
            train(spec, base=tokens)
    assert run(spec, tokens).result.steps == 1
