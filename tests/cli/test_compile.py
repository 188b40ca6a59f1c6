"""`moegraph compile` leaves a directory that says everything, whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moegraph.compiled_folder import read_compiled
from moegraph.errors import UsageError
from moegraph.specs import load_spec

from .conftest import Moegraph

LAYER_PASSES = ["canonicalize", "balance-losses", "dispatch-experts", "split-pipeline"]
PASSES = ["lower", *LAYER_PASSES, "trace", "recompute", "accumulate-gradients", "split-backward"]


@pytest.fixture
def compiled(compiled_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a working directory in which the small spec was compiled: compiled/moegraph in it."""
    folder = tmp_path / "work"
    shutil.copytree(compiled_once, folder)
    monkeypatch.chdir(folder)
    return folder / "compiled" / "moegraph"


def test_the_directory_holds_every_pass(compiled: Path) -> None:
    assert sorted(path.name for path in compiled.iterdir()) == ["graph.json", "passes", "report.json", "spec.yaml"]
    folders = sorted(path.name for path in (compiled / "passes").iterdir() if path.is_dir())
    assert folders == [f"{number:02d}-{name}" for number, name in enumerate(PASSES)]
    diffs = sorted(path.stem for path in (compiled / "passes").glob("*.diff"))
    assert diffs == folders[1:]
    text = (compiled / "passes" / "02-balance-losses" / "moe.layer.txt").read_text(encoding="utf-8")
    assert "moe.z_loss: f32[] = z_loss(" in text
    final = sorted(path.name for path in (compiled / "passes" / "08-split-backward").glob("moe.*"))
    assert final == [
        f"moe.{each}.txt" for each in ("backward", "backward_input", "backward_weight", "evaluate", "forward")
    ]


def test_its_spec_is_complete_and_equal_to_the_one_compiled(compiled: Path) -> None:
    text = (compiled / "spec.yaml").read_text(encoding="utf-8")
    assert "extends" not in text
    assert load_spec(compiled / "spec.yaml") == load_spec("moegraph.yaml")


def test_the_report_says_what_was_done(compiled: Path) -> None:
    report = json.loads((compiled / "report.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in report["passes"]] == PASSES
    assert all(len(each["hash"]) == 64 and each["seconds"] > 0 for each in report["passes"])
    assert {"python", "torch", "moegraph"} <= set(report["versions"])
    # embedding, head and their norm; two layers of attention (q, o: 16×16, k, v: 8×16, norms), SwiGLU, 4 experts
    attention, swiglu = 16 + 2 * 16 * 16 + 2 * 8 * 16 + 2 * 8, 3 * 16 * 16
    shared = 2 * 300 * 16 + 16 + 2 * attention + (16 + swiglu) + (16 + 4 * 16 + swiglu)
    assert report["parameters"] == {"total": shared + 4 * swiglu, "active": shared + 2 * swiglu}
    assert report["flops_per_token"] > 6 * 300 * 16
    assert set(report["verifiers"]["structural"].values()) == {"ok"}
    assert report["verifiers"]["numeric"] is None
    assert report["notes"] == []


def test_graph_json_maps_blocks_to_graphs_and_parameters(compiled: Path) -> None:
    data = json.loads((compiled / "graph.json").read_text(encoding="utf-8"))
    assert [each["prefix"] for each in data["instances"]] == ["embedding", "layers.0", "layers.1", "head"]
    assert set(data["kinds"]["moe"]) == {
        "layer",
        "forward",
        "backward_input",
        "backward_weight",
        "backward",
        "evaluate",
    }
    for instance in data["instances"]:
        assert set(instance["parameters"].values()) <= set(data["parameters"])
    assert data["parameters"]["layers.1.moe.w_up"]["shape"] == [4, 32, 16]


def test_compiling_again_replaces_it_with_the_same_graphs(compiled: Path, moegraph: Moegraph) -> None:
    def contents() -> dict[str, str]:
        files = (path for path in compiled.rglob("*") if path.is_file() and path.name != "report.json")
        return {str(path.relative_to(compiled)): path.read_text(encoding="utf-8") for path in files}

    before = contents()
    (compiled / "passes" / "02-balance-losses.diff").write_text("something else\n", encoding="utf-8")
    done = moegraph("compile", "--json")
    assert done.status == 0
    assert contents() == before
    assert done.json["directory"] == "compiled/moegraph"
    assert [path.name for path in compiled.parent.iterdir()] == ["moegraph"]


def test_another_folder_is_never_overwritten(small: Path, moegraph: Moegraph) -> None:
    mine = small.parent / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work", encoding="utf-8")
    done = moegraph("compile", "-o", "mine")
    assert done.status == 2
    assert "thesis.txt" in done.err
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    for name in ("moegraph.yaml", "link"):
        if name == "link":
            (small.parent / name).symlink_to(mine)
        done = moegraph("compile", "-o", name)
        assert (done.status, "not a folder" in done.err) == (2, True)


@pytest.mark.parametrize(("error", "status"), [(OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)])
def test_when_writing_fails_the_old_directory_stays_and_nothing_else(
    compiled: Path, moegraph: Moegraph, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int
) -> None:
    before = (compiled / "report.json").read_bytes()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("moegraph.artifact.build_graphs", fail)
    done = moegraph("compile")
    assert done.status == status
    assert (compiled / "report.json").read_bytes() == before
    assert [path.name for path in compiled.parent.iterdir()] == ["moegraph"]


def test_the_table_names_every_pass_and_the_sizes(small: Path, moegraph: Moegraph) -> None:
    done = moegraph("compile", "-o", "elsewhere/deep")
    assert done.status == 0
    assert [line.split()[0] for line in done.out.splitlines()[1 : len(PASSES) + 1]] == PASSES
    assert "written to  elsewhere/deep" in done.out
    assert "\x1b" not in done.out
    assert Path(".moegraph/last-compiled").read_text(encoding="utf-8") == "elsewhere/deep\n"


def test_verify_also_proves_each_pass(small: Path, moegraph: Moegraph) -> None:
    done = moegraph("compile", "--verify", "--json")
    assert done.status == 0, done.err
    numeric = done.json["verifiers"]["numeric"]
    assert numeric["ok"]
    assert [each["name"] for each in numeric["passes"]] == PASSES[1:]


def test_a_users_pass_is_in_the_report(small: Path, moegraph: Moegraph, user_pass: Path) -> None:
    done = moegraph("compile", "--pass-file", user_pass, "--json")
    assert done.status == 0, done.err
    assert done.json["pass_files"] == {str(user_pass): ["mark-layers"]}
    (mine,) = [each for each in done.json["passes"] if each["name"] == "mark-layers"]
    assert mine["rewritten"] == {"embedding": 0, "dense": 0, "moe": 1, "head": 0}


def test_a_pass_file_that_fails_is_named(small: Path, moegraph: Moegraph) -> None:
    broken = small.parent / "broken.py"
    broken.write_text("1 / 0\n", encoding="utf-8")
    done = moegraph("compile", "--pass-file", broken)
    assert done.status == 2
    assert "broken.py fails when it is run: ZeroDivisionError" in done.err
    assert moegraph("compile", "--pass-file", "absent.py").status == 2


TWO_BY_TWO = "layout={dp: 2, ep: 2, pp: 2, microbatches: 2, transport: padded}"


def test_a_layout_is_compiled_whole_without_a_rank(small: Path, moegraph: Moegraph) -> None:
    report = moegraph("compile", "--set", TWO_BY_TWO, "--json").json
    assert (report["rank"], report["world"], report["notes"]) == (None, 4, [])
    assert [stage["blocks"] for stage in report["stages"]] == [["embedding", "layers.0"], ["layers.1", "head"]]
    assert report["stages"][0]["collectives"] == []
    data = json.loads(Path("compiled/moegraph/graph.json").read_text(encoding="utf-8"))
    assert (
        data["parameters"]["layers.1.moe.w_up"] | {"shape": [2, 32, 16], "shards": 2}
        == (data["parameters"]["layers.1.moe.w_up"])
    )


def test_a_rank_gets_the_graphs_of_its_stages_and_their_collectives(small: Path, moegraph: Moegraph) -> None:
    whole = moegraph("compile", "--set", TWO_BY_TWO, "--json").json
    done = moegraph("compile", "--set", TWO_BY_TWO, "--rank", "3", "-o", "rank3")
    assert done.status == 0, done.err
    assert "rank        3 of 4: stage 1 (layers.1, head)\n" in done.out
    report = json.loads(Path("rank3/report.json").read_text(encoding="utf-8"))
    assert (report["rank"], report["world"]) == (3, 4)
    assert report["stages"] == whole["stages"][1:]
    (traffic,) = report["stages"][0]["collectives"]
    assert traffic["group"] == "ep"
    names = [each["node"].split("_start")[0].split("/")[0] for each in traffic["forward"]]
    assert names == [f"layers.1.moe.{name}" for name in ("counts", "dispatch", "dispatch_weights", "return")]
    assert len(traffic["backward"]) == 3
    assert [each["hash"] for each in report["passes"]] == [each["hash"] for each in whole["passes"]]
    data = json.loads(Path("rank3/graph.json").read_text(encoding="utf-8"))
    assert list(data["kinds"]) == ["moe", "head"]
    assert [each["prefix"] for each in data["instances"]] == ["layers.1", "head"]
    assert not [name for name in data["parameters"] if name.startswith(("layers.0", "embedding"))]
    texts = {path.name.split(".")[0] for path in Path("rank3/passes").glob("*/*.txt")}
    assert texts == {"moe", "head"}


def test_training_wants_the_graphs_of_all_ranks(small: Path, moegraph: Moegraph) -> None:
    assert moegraph("compile", "--set", TWO_BY_TWO, "--rank", "0", "-o", "rank0").status == 0
    assert not Path(".moegraph/last-compiled").exists()
    with pytest.raises(UsageError, match="holds the graphs of rank 0 of 4 only, and training needs those of all ranks"):
        read_compiled(Path("rank0"))
    done = moegraph("train", "rank0", "--nproc", "4")
    assert (done.status, done.err.count("holds the graphs of rank 0 of 4 only")) == (2, 1)
    assert moegraph("compile", "--rank", "0").status == 0
    assert Path(".moegraph/last-compiled").exists()
    read_compiled(Path("compiled/moegraph"))


@pytest.mark.parametrize(("options", "valid"), [((), "0"), (("--set", TWO_BY_TWO), "0 to 3")])
def test_a_rank_that_the_layout_has_not_is_refused(
    small: Path, moegraph: Moegraph, options: tuple[str, ...], valid: str
) -> None:
    done = moegraph("compile", *options, "--rank", "4")
    assert done.status == 2
    assert "there is no rank 4" in done.err
    assert done.err.endswith(f"valid: {valid}\n")
