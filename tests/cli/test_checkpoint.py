"""`moegraph checkpoint`, and a run that is continued from the command line."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from moegraph.cli import run as run_command
from moegraph.cli.sources import load_run
from moegraph.specs import load_spec

from .conftest import SMALL, Moegraph
from .test_train import prepare_tokens

RUN = Path("runs/small")
CHECKPOINTS = RUN / "checkpoints"


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run of two steps, both saved."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "moegraph.yaml").write_text(f"{SMALL}checkpoint: {{every: 1}}\n", encoding="utf-8")
    prepare_tokens(folder / "tokens")
    with contextlib.chdir(folder):
        assert run_command(["train"]) == 0
    return folder


@pytest.fixture
def run(trained_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_compile: None) -> Path:
    """The run, in a copy of that directory."""
    shutil.copytree(trained_once, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return RUN


def shard(step: int) -> Path:
    (path,) = (CHECKPOINTS / f"step-{step:06d}").glob("*.safetensors")
    return path


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_list_shows_each_and_what_is_wrong_with_it(run: Path, moegraph: Moegraph) -> None:
    done = moegraph("checkpoint", "list", run)
    assert done.status == 0
    head, first, second = done.out.splitlines()
    assert head.split() == ["step", "saved", "layout", "loss", "size"]
    assert (first.split()[0], second.split()[0]) == ("1", "2")
    (CHECKPOINTS / "step-000001" / "manifest.json").write_text("{}", encoding="utf-8")
    done = moegraph("checkpoint", "list", run, "--json")
    first, second = done.json["checkpoints"]
    assert "step-000001/manifest.json is not the manifest of a checkpoint" in first["problem"]
    assert (second["problem"], second["step"], second["layout"]) == (None, 2, "dp 1 ep 1 pp 1")
    assert second["loss"] > 0


def test_verify_names_the_file_that_is_damaged(run: Path, moegraph: Moegraph) -> None:
    done = moegraph("checkpoint", "verify", run)
    assert (done.status, "step-000002: whole; step 2, 1 shard file" in done.out) == (0, True)
    assert moegraph("checkpoint", "verify", CHECKPOINTS / "step-000001", "--json").json["whole"] is True
    damage(shard(2))
    done = moegraph("checkpoint", "verify", run)
    assert (done.status, done.out) == (3, "")
    assert f"{shard(2)} is damaged: its content has not the SHA-256 of the manifest" in done.err
    assert moegraph("checkpoint", "verify", run, "--json").json["exit_code"] == 3


def test_show_says_what_is_in_it(run: Path, moegraph: Moegraph) -> None:
    done = moegraph("checkpoint", "show", run)
    assert done.status == 0
    assert "step 2, saved" in done.out
    manifest = moegraph("checkpoint", "show", run, "--json").json["manifest"]
    assert manifest["step"] == 2
    assert manifest["spec"]["data"]["source"] == "tokens"
    lines = moegraph("checkpoint", "show", run, "--tensors").out.splitlines()
    (up,) = (line for line in lines if line.startswith("exp_avg.layers.1.moe.w_up "))
    assert up.split()[1:3] == ["F32", "4"]  # the first axis counts experts
    damage(shard(2))  # only its data: what is shown is not touched
    assert moegraph("checkpoint", "show", run).status == 0


@pytest.mark.parametrize("command", ["list", "verify", "show"])
@pytest.mark.parametrize("where", ["nowhere", "."])
def test_a_folder_without_checkpoints_is_a_wrong_call(run: Path, moegraph: Moegraph, command: str, where: str) -> None:
    done = moegraph("checkpoint", command, where)
    assert done.status == 2
    assert where in done.err


def test_the_same_command_goes_on_where_the_run_was(run: Path, moegraph: Moegraph) -> None:
    done = moegraph("train", "--set", "train.steps=3")
    assert done.status == 0, done.err
    assert "resumed from runs/small/checkpoints/step-000002, step 2" in done.out
    assert "step 3/3" in done.out
    assert moegraph("inspect", run, "--json").json["manifest"]["resumed_from"] == 2
    again = moegraph("train", "--set", "train.steps=3", "--json")
    assert again.json["steps"] == 3
    assert again.json["loss"] == moegraph("inspect", run, "--json").json["last"]["loss"]


def test_the_folder_of_a_run_is_enough_to_go_on(run: Path, moegraph: Moegraph) -> None:
    Path("moegraph.yaml").unlink()
    run.rename("moved")
    done = moegraph("train", "moved", "--set", "train.steps=3")
    assert done.status == 0, done.err
    assert "resumed from moved/checkpoints/step-000002, step 2" in done.out
    assert "step 3/3" in done.out
    assert not run.exists()
    shutil.rmtree("moved/checkpoints")
    done = moegraph("train", "moved")
    assert (done.status, "moved holds no checkpoint" in done.err) == (2, True)
    Path("moved/manifest.json").write_text("{}", encoding="utf-8")
    assert moegraph("train", "moved").status == 2


def test_the_spec_of_every_run_is_read_back_as_it_was(here: Path) -> None:
    for preset in ("tiny", "tiny-dense", "olmo3-47b", "olmo3-ultra-2t"):
        spec = load_spec(f"presets/{preset}.yaml", ["train.output_dir=old", "train.steps=5"])
        folder = here / preset
        folder.mkdir()
        text = json.dumps({"spec": spec.model_dump(mode="json", by_alias=True)})
        (folder / "manifest.json").write_text(text, encoding="utf-8")
        train = spec.train.model_copy(update={"output_dir": str(folder)})
        checkpoint = spec.checkpoint.model_copy(update={"resume": str(folder)})
        assert load_run(folder, []) == spec.model_copy(update={"train": train, "checkpoint": checkpoint})


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000-of-00001.safetensors"])
def test_a_damaged_checkpoint_stops_train_with_its_name(run: Path, moegraph: Moegraph, name: str) -> None:
    damage(CHECKPOINTS / "step-000002" / name)
    log = (run / "metrics.jsonl").read_bytes()
    done = moegraph("train", "--set", "train.steps=3")
    assert done.status == 1
    assert f"step-000002/{name} is damaged" in done.err
    assert "--set checkpoint.resume=runs/small/checkpoints/step-000001" in done.err
    assert (run / "metrics.jsonl").read_bytes() == log


def test_another_model_is_a_wrong_call(run: Path, moegraph: Moegraph) -> None:
    done = moegraph("train", "--set", "model.d_model=32")
    assert done.status == 2
    assert "model.d_model: 16 → 32" in done.err


def test_a_spec_file_may_not_resume_from_outside(run: Path, moegraph: Moegraph) -> None:
    spec = Path("moegraph.yaml")
    text = spec.read_text(encoding="utf-8")
    spec.write_text(text.replace("{every: 1}", "{every: 1, resume: ../x}"), encoding="utf-8")
    done = moegraph("train")
    assert (done.status, "checkpoint.resume" in done.err, "MG109" in done.err) == (2, True, True)
