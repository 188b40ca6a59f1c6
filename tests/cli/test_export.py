"""`moegraph export`: from a run's folder to a directory that transformers loads."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moegraph import compiled
from moegraph.checkpoint.manifest import read_manifest
from moegraph.checkpoint.names import Segment, shard_name
from moegraph.checkpoint.shard_writer import write_shard
from moegraph.cli import run as run_command
from moegraph.data.tokenizer import load_tokenizer
from tests.checkpoint.small_checkpoints import compiled_for, flip_bit, rewrite, whole
from tests.export.models import load_theirs

from .conftest import SMALL, Moegraph
from .test_train import prepare_tokens

# Layer 0 is dense; layer 1 chooses with a bias that moves after each step, and is square: gate and up are 16 x 16.
RUN = Path("runs/small")
STEPS = RUN / "checkpoints"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def glm_spec() -> str:
    router = "router: {score: sigmoid, select_bias: learned_free, norm: {kind: sum, eps: 1e-20}}, balance: {coef: 0}"
    return SMALL.replace("moe: {num_experts: 4,", f"moe: {{{router}, num_experts: 4,") + "checkpoint: {every: 1}\n"


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run of two steps, both saved, that went on after its first from a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "moegraph.yaml").write_text(glm_spec(), encoding="utf-8")
    prepare_tokens(folder / "tokens")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "compile", compiled_for)  # one model, compiled once
        assert run_command(["train", "--set", "train.output_dir=runs/whole"]) == 0
        assert run_command(["train", "--set", "train.steps=1"]) == 0
        assert run_command(["train"]) == 0
    return folder


@pytest.fixture
def run(trained_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run, in a copy of that directory."""
    shutil.copytree(trained_once, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return RUN


def written(folder: str | Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a28_the_expert_bias_of_a_resumed_run_is_exported_to_the_bit(run: Path, moegraph: Moegraph) -> None:
    manifests = [
        json.loads(Path(f"runs/{name}/manifest.json").read_text())["resumed_from"] for name in ("whole", "small")
    ]
    assert manifests == [0, 1]
    resumed, through = whole(STEPS / "step-000002"), whole(Path("runs/whole/checkpoints/step-000002"))
    assert same(resumed, through)
    small, through_all = (read_manifest(Path(f"runs/{name}/checkpoints/step-000002")) for name in ("small", "whole"))
    assert small.numbers.expert_counts == through_all.numbers.expert_counts
    assert small.counters == through_all.counters
    bias = resumed["buffer.layers.1.moe.select_bias"]
    assert bias.abs().max() > 0
    assert not torch.equal(bias, whole(STEPS / "step-000001")["buffer.layers.1.moe.select_bias"])
    for dtype in ("float32", "bfloat16"):
        done = moegraph("export", run, "-o", dtype, "--dtype", dtype, "--json")
        assert done.status == 0, done.err
        assert torch.equal(written(dtype)[BIAS], bias)
        theirs = load_theirs(Path(dtype), dtype=getattr(torch, dtype))
        assert torch.equal(theirs.model.layers[1].mlp.gate.e_score_correction_bias, bias)
        assert theirs.lm_head.weight.dtype == getattr(torch, dtype)


def test_the_directory_holds_the_model_its_tokenizer_and_what_ends_a_text(run: Path, moegraph: Moegraph) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    done = moegraph("export", run, "-o", "models/small", "--json")
    assert (done.status, done.json["notes"]) == (0, [])
    assert {k: done.json[k] for k in ("architecture", "step", "dtype", "verified", "tokenizer")} == {
        "architecture": "glm4_moe", "step": 2, "dtype": "float32", "verified": True, "tokenizer": True,
    }  # fmt: skip
    assert sorted(path.name for path in Path("models").iterdir()) == ["small"]
    text = "def f1(x): return x + 1\n"
    theirs = transformers.AutoTokenizer.from_pretrained("models/small")
    ours = load_tokenizer(Path("tokens/tokenizer.json"))
    assert theirs(text)["input_ids"] == ours.encode_batch([text])[0].tolist()
    assert (theirs.eos_token, theirs.eos_token_id) == (ours.eos_token, ours.eos_id)
    model = load_theirs(Path("models/small"))
    assert model.generation_config.eos_token_id == model.config.eos_token_id == ours.eos_id
    out = model.generate(**theirs(text, return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert out.shape[1] > len(theirs(text)["input_ids"])


def test_a_step_a_checkpoint_and_the_final_weights_are_named_apart(run: Path, moegraph: Moegraph) -> None:
    def export(name: str, *arguments: str | Path) -> dict[str, Tensor]:
        done = moegraph("export", *arguments, "-o", name, "--json")
        assert done.status == 0, done.err
        sources[name] = (done.json["step"], done.json["source"], done.json["verified"])
        return written(name)

    sources: dict[str, tuple[int, str, bool]] = {}
    newest, first = export("newest", run), export("first", run, "--step", "1")
    assert same(export("root", STEPS), newest)
    named = export("named", STEPS / "step-000001")
    assert same(first, named)
    assert not same(first, newest)
    shutil.rmtree(STEPS)
    assert same(export("final", run), newest)
    assert sources["newest"] == (2, str(STEPS / "step-000002"), True)
    assert sources["first"] == sources["named"] == (1, str(STEPS / "step-000001"), True)
    assert sources["final"] == (2, str(run / "model.safetensors"), False)


def test_shards_have_an_index_and_load_the_same(run: Path, moegraph: Moegraph) -> None:
    assert moegraph("export", run, "-o", "one").status == 0
    done = moegraph("export", run, "-o", "many", "--max-shard-gb", "2e-5", "--json")
    files = done.json["files"]
    assert len(files) > 3
    assert all(name.endswith(f"-of-{len(files):05d}.safetensors") for name in files)
    assert all(size == Path("many", name).stat().st_size for name, size in files.items())
    assert same(written("one"), written("many"))
    assert same(load_theirs(Path("one")).state_dict(), load_theirs(Path("many")).state_dict())


@pytest.mark.parametrize("name", ["a file", "a full folder", "a link"])
def test_what_is_there_is_not_touched(run: Path, moegraph: Moegraph, name: str) -> None:
    target = Path("there")
    if name == "a file":
        target.write_text("mine")
    elif name == "a link":
        target.symlink_to("tokens")
    else:
        target.mkdir()
        (target / "mine").touch()
    done = moegraph("export", run, "-o", target)
    assert done.status == 2
    assert "there" in done.err
    assert not list(Path().glob(".there*"))


def test_an_empty_folder_is_filled(run: Path, moegraph: Moegraph) -> None:
    Path("empty").mkdir()
    assert moegraph("export", run, "-o", "empty").status == 0
    assert Path("empty/config.json").is_file()


def test_damaged_weights_leave_no_directory(run: Path, moegraph: Moegraph) -> None:
    shard = STEPS / "step-000002" / "shard-00000-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    done = moegraph("export", run, "-o", "out")
    assert (done.status, f"{shard} is damaged" in done.err) == (1, True)
    assert not list(Path().glob("*out*"))


@pytest.mark.parametrize("final", [False, True])
def test_weights_that_cannot_be_written_leave_no_directory(
    run: Path, moegraph: Moegraph, monkeypatch: pytest.MonkeyPatch, final: bool
) -> None:
    if final:
        shutil.rmtree(STEPS)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("moegraph.export.writer._write", full)
    done = moegraph("export", run, "-o", "out")
    assert (done.status, "out cannot be written: No space left on device" in done.err) == (1, True)
    assert not list(Path().glob("*out*"))


def test_final_weights_that_are_not_of_the_run_are_refused(run: Path, moegraph: Moegraph) -> None:
    shutil.rmtree(STEPS)
    path = run / "model.safetensors"
    whole_file, weights = path.read_bytes(), load_file(path)
    bias = weights.pop("layers.1.moe.select_bias")
    wrong = {
        "cut": lambda: path.write_bytes(whole_file[:-4]),
        "header": lambda: path.write_bytes(b"\xff" * 8 + whole_file[8:]),
        "no step": lambda: save_file(weights, path),
        "another model, missing": lambda: save_file(weights, path, {"step": "2"}),
        "another model, more": lambda: save_file(
            {**weights, "x": bias.clone(), "layers.1.moe.select_bias": bias}, path, {"step": "2"}
        ),
        "another model, shape": lambda: save_file(
            {**weights, "layers.1.moe.select_bias": bias[:2]}, path, {"step": "2"}
        ),
        "another model, dtype": lambda: save_file(
            {**weights, "layers.1.moe.select_bias": bias.double()}, path, {"step": "2"}
        ),
        "link": lambda: (path.unlink(), path.symlink_to("/etc/hostname")),
    }
    for name, change in wrong.items():
        change()
        done = moegraph("export", run, "-o", "out")
        assert (done.status, f"{path} " in done.err) == (2 if name.startswith("another") else 1, True), name
        assert not list(Path().glob("*out*"))


def test_weights_that_two_ranks_kept_are_put_together(run: Path, moegraph: Moegraph) -> None:
    assert moegraph("export", run, "-o", "one").status == 0
    folder = STEPS / "step-000002"
    shards: list[dict[Segment, Tensor]] = [{}, {}]
    for name, value in whole(folder).items():
        cut = value.numel() // 3
        for shard, start, stop in ((shards[1], 0, cut), (shards[0], cut, value.numel())):
            if start < stop:
                shard[Segment(name, start, stop)] = value.reshape(-1)[start:stop]
    (folder / "shard-00000-of-00001.safetensors").unlink()
    files = {}
    for rank, tensors in enumerate(shards):
        name = shard_name(rank, 2)
        entry = write_shard(folder / name, tensors)
        files[name] = {"bytes": entry.bytes, "sha256": entry.sha256}
    rewrite(folder, files=files)
    assert moegraph("export", run, "-o", "two").status == 0
    assert same(written("one"), written("two"))


def test_one_other_bit_is_one_other_element(run: Path, moegraph: Moegraph) -> None:
    assert moegraph("export", run, "-o", "before").status == 0
    flip_bit(STEPS / "step-000002", "master.layers.1.moe.w_up", element=(2 * 2 * 16 + 16 + 3) * 16 + 5)
    assert moegraph("export", run, "-o", "after").status == 0
    before, after = written("before"), written("after")
    assert {n for n in before if not torch.equal(before[n], after[n])} == {
        "model.layers.1.mlp.experts.2.up_proj.weight"
    }
    changed = (
        before["model.layers.1.mlp.experts.2.up_proj.weight"] != after["model.layers.1.mlp.experts.2.up_proj.weight"]
    )
    assert changed.nonzero().tolist() == [[3, 5]]


def test_a_step_that_was_not_saved_and_a_folder_without_weights_are_wrong_calls(run: Path, moegraph: Moegraph) -> None:
    done = moegraph("export", run, "-o", "out", "--step", "7")
    assert (done.status, "there are: 1, 2" in done.err) == (2, True)
    assert moegraph("export", STEPS / "step-000001", "-o", "out", "--step", "2").status == 2
    for name in ("tokens", "nowhere", "moegraph.yaml"):
        done = moegraph("export", name, "-o", "out")
        assert (done.status, name in done.err) == (2, True)


def test_an_architecture_that_is_asked_for_says_what_does_not_fit(run: Path, moegraph: Moegraph) -> None:
    done = moegraph("export", run, "-o", "out", "--architecture", "qwen3_moe")
    assert done.status == 2
    assert "model.moe.router.score is sigmoid, and it has softmax" in done.err
    assert not Path("out").exists()
    done = moegraph("export", run, "-o", "out", "--architecture", "dots1", "--json")
    assert (done.status, done.json["model_class"]) == (0, "Dots1ForCausalLM")
    done = moegraph("export", run, "-o", "other", "--architecture", "gpt5")
    assert (done.status, "qwen3_moe" in done.err) == (2, True)


def test_without_its_data_a_run_is_exported_without_a_tokenizer_and_that_is_said(run: Path, moegraph: Moegraph) -> None:
    shutil.rmtree("tokens")
    done = moegraph("export", run, "-o", "out")
    assert done.status == 0
    assert "no tokenizer is written" in done.err
    assert not Path("out/tokenizer.json").exists()
    assert json.loads(Path("out/config.json").read_text())["eos_token_id"] is None


def test_whether_a_model_can_be_exported_is_known_before_it_is_trained(run: Path, moegraph: Moegraph) -> None:
    for what in ("moegraph.yaml", run, STEPS / "step-000001"):
        done = moegraph("export", what, "--check")
        assert (done.status, done.out) == (0, f"{what}: Glm4MoeForCausalLM (glm4_moe)\n"), done.err
    done = moegraph("export", "presets/tiny.yaml", "--check")
    assert (done.status, done.out) == (3, "")
    assert "none of the published architectures that can be written computes this model" in done.err
    assert moegraph("export", "presets/tiny-dense.yaml", "--check", "--json").json["architecture"] == "qwen3"
    assert moegraph("export", run, "--check", "--architecture", "olmoe").status == 3
    assert moegraph("export", run, "--check", "--architecture", "olmo").status == 2  # there is no such one
    assert moegraph("export", run, "--check", "-o", "out").status == 2
    done = moegraph("export", run)
    assert (done.status, "-o" in done.err) == (2, True)
    assert not Path("out").exists()
