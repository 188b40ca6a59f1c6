"""`inspect --trace-hash`: the first value that differs between two runs is named, wherever it was planted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moegraph.cli.main import run as moegraph
from moegraph.compiled import Compiled
from moegraph.data.prepare import prepare
from moegraph.runtime import engine
from moegraph.runtime.audit import AUDIT, linked, read_chain
from moegraph.specs.schema import Spec
from tests.checkpoint.small_checkpoints import compiled_for, flip_bit
from tests.cli.conftest import USER_PASS
from tests.data.small import sentence

from .small_runs import run, run_spec

STEPS = ("train.steps=4", "checkpoint.every=2", "layout.microbatches=2")
WEIGHT = "layers.2.moe.w_down"


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("trace")
    run(run_spec(folder, *STEPS), tokens)
    return folder / "run"


@pytest.fixture
def there(trained: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that may be spoilt; the current folder is that of the data."""
    monkeypatch.chdir(tokens)
    return Path(shutil.copytree(trained, tmp_path / "there"))


@pytest.fixture
def traced(capsys: pytest.CaptureFixture[str]) -> Any:
    """Compares two runs: (exit status, the JSON on stdout, what was said)."""

    def call(*arguments: str | Path) -> tuple[int, dict[str, Any], str]:
        capsys.readouterr()
        status = moegraph(["inspect", *map(str, arguments), "--trace-hash", "--json"])
        out, err = capsys.readouterr()
        return status, json.loads(out), err

    return call


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of a spec are compiled once per process, unless a pass was added."""
    from moegraph.passes import registry

    def once(spec: Spec) -> Compiled:
        return original(spec) if "mark-layers" in registry else compiled_for(spec)

    original = engine.compile
    monkeypatch.setattr(engine, "compile", once)


def test_a39_equal_runs_are_equal_and_nothing_is_written(trained: Path, there: Path, traced: Any) -> None:
    """Liger#1255."""
    before = {path: path.stat().st_mtime_ns for path in there.rglob("*")}
    status, found, _ = traced(trained, there)
    assert (status, found["equal"], found["step"], found["differing"], found["only"]) == (0, True, 4, 0, [0, 0])
    assert found["compared"] > 1000
    assert {path: path.stat().st_mtime_ns for path in there.rglob("*")} == before


def test_a39_one_bit_of_a_weight_is_named_where_it_is_read_first(trained: Path, there: Path, traced: Any) -> None:
    """Liger#1255."""
    flip_bit(there / "checkpoints" / "step-000002", f"master.{WEIGHT}")
    status, found, said = traced(trained, there, "--step", "3")
    assert (status, found["equal"]) == (3, False)
    assert "it differed before this step: look at --step 2" in said
    assert f"step 3: the first value that differs is the weight {WEIGHT} that the forward of layers.2 reads" in said
    assert found["first"][0]["digest"] != found["first"][1]["digest"]
    assert "micro-batch 0, on rank 0" in said


@pytest.mark.slow
def test_chains_that_differ_where_the_replay_does_not_are_told(trained: Path, there: Path, traced: Any) -> None:
    lines, previous = [], "0" * 64
    for line in read_chain(there):
        facts = {key: value for key, value in line.items() if key not in ("previous", "digest")}
        lines.append(linked({**facts, **({"loss": 1.0} if line["step"] == 3 else {})}, previous))
        previous = lines[-1]["digest"]
    (there / AUDIT).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    status, found, said = traced(trained, there)
    assert (status, found["step"], found["equal"]) == (0, 3, True)  # the first step in which the chains differ
    assert "their chains differ at step 3, and this replay does not" in said
    (there / AUDIT).unlink()
    assert traced(trained, there, "--step", "3")[0] == 0


@pytest.mark.slow
def test_a_moment_is_named(trained: Path, there: Path, traced: Any) -> None:
    flip_bit(there / "checkpoints" / "step-000002", f"exp_avg.{WEIGHT}")
    status, found, said = traced(trained, there, "--step", "3")
    assert status == 3
    assert f"the first value that differs is the moment exp_avg.{WEIGHT} that the step found, on rank 0" in said
    assert "it differed before this step: look at --step 2" in said
    assert found["differing"] <= 2  # rounding may hide it afterwards


@pytest.mark.slow
def test_other_data_are_named_at_the_embedding(trained: Path, there: Path, traced: Any, tokens: Path) -> None:
    """With a tokenizer and a spec that are the same."""
    texts = there / "texts"
    texts.mkdir()
    for number in range(200):
        (texts / f"{number:03d}.txt").write_text(sentence(number + 1000), encoding="utf-8")
    prepare([texts], output=there / "tokens", vocab_size=300, validation_fraction=0.2)
    manifest = json.loads((there / "manifest.json").read_text(encoding="utf-8"))
    manifest["spec"]["data"]["source"] = str(there / "tokens")
    (there / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    shutil.rmtree(there / "checkpoints")  # they are of the other data
    shutil.copytree(trained, there / "from-start", ignore=shutil.ignore_patterns("checkpoints"))
    status, found, said = traced(there / "from-start", there, "--step", "1")
    assert status == 3
    assert "the first value that differs is tokens" in said
    assert found["first"][0]["block"] == "embedding"
    assert any(line.startswith("data.source") for line in found["specs"])


def test_a_changed_node_is_named_with_its_layer_and_pass(
    trained: Path, there: Path, traced: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace that was saved before the code of one pass changed, and one after it."""
    from moegraph.passes import registry

    passes, traces = tmp_path / "mine.py", [tmp_path / "first.json", tmp_path / "second.json"]
    try:
        for factor, trace in zip(("1.0", "1.0000001"), traces, strict=True):
            passes.write_text(USER_PASS.replace("node, 1.0)", f"node, {factor})"), encoding="utf-8")
            call = [
                "inspect",
                str(there),
                "--trace-hash",
                "--step",
                "3",
                "--pass-file",
                str(passes),
                "--save",
                str(trace),
            ]
            assert moegraph(call) == 0
    finally:
        registry.unregister("mark-layers")
    status, found, said = traced(*traces)
    assert status == 3
    first = found["first"][0]
    assert (first["block"], first["graph"], first["microbatch"], first["rank"]) == ("layers.1", "forward", 0, 0)
    assert first["node"]["layer"] == "moe.marked"
    assert (first["node"]["direction"], first["node"]["made_by"]) == ("forward", "mark-layers")
    assert "in the forward of layers.1, micro-batch 0, on rank 0" in said
    assert "1.0000001" in said
    # A run that has the pass against one that has not: every value is equal, and the new nodes are told.
    status, found, _ = traced(traces[0], trained)
    assert (status, found["equal"]) == (0, True)
    assert found["only_first"][0]["node"]["layer"] == "moe.marked"


@pytest.mark.slow
def test_a_trace_is_printed_node_by_node(trained: Path, there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert moegraph(["inspect", str(there), "--trace-hash", "--step", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "micro-batch", "block", "graph", "node", "value", "made", "by", "digest"]
    assert sum(" layers.1 " in line for line in lines) > 100


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--step", "9"], "has steps 1 to 4"),
        (["--after", "lower"], "--after does not go with --trace-hash"),
        (["nowhere"], "nowhere is neither the folder of a run nor a trace"),
    ],
)
def test_calls_that_cannot_work_are_refused(
    there: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert moegraph(["inspect", str(there), "--trace-hash", "--step", "1", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_damaged_trace_is_refused(there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    assert moegraph(["inspect", str(there), "--trace-hash", "--step", "1", "--save", str(file)]) == 0
    good = file.read_text(encoding="utf-8")
    calls = json.loads(good)["ranks"][0]["calls"]
    for old, new in (
        ('"step":1', '"step":-1'),
        ('"step":1', '"step":1,"step":1'),
        (calls[0]["digests"], calls[0]["digests"] + "0"),
        ('"kind":"embedding"', '"kind":"other"'),
        ('"place":0', '"place":99'),
        ("moegraph-trace", "x"),
        (good[-5:], ""),
    ):
        assert old in good
        file.write_text(good.replace(old, new), encoding="utf-8")
        capsys.readouterr()
        assert moegraph(["inspect", str(file), str(file), "--trace-hash"]) == 2, new
        assert str(file) in capsys.readouterr().err
