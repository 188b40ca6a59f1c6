"""Files, presets, mappings, `extends:` and `--set` become one spec whose every value has an origin."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from moegraph.specs import load_resolved, load_spec
from moegraph.specs.resolved import resolved_data, resolved_lines, resolved_yaml, spec_data
from moegraph.specs.schema import Cosine, Wsd
from moegraph.specs.sources import preset_names
from tests.specs.small import MINIMAL, TINY, minimal, problem_of, problems_of, write


def test_a_preset_loads_by_its_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_spec(TINY).model.d_model == 128


def test_a_file_goes_before_a_preset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, MINIMAL, TINY)
    assert load_spec(TINY).model.d_model == 32


def test_a_mapping_loads_like_a_file(tmp_path: Path) -> None:
    data = {
        "spec_version": 1,
        "model": {
            "vocab_size": 64,
            "d_model": 32,
            "num_layers": 4,
            "attention": {"num_heads": 4},
            "moe": {"num_experts": 8, "top_k": 2, "d_ff": 16},
        },
        "train": {"steps": 10, "tokens_per_step": 4096},
        "data": {"source": "corpus:python-stdlib", "seq_len": 256},
    }
    assert load_spec(data) == minimal(tmp_path)
    assert load_spec(json.loads(json.dumps(data))) == minimal(tmp_path)
    assert load_spec({"extends": TINY, "train": {"steps": 3}}).train.steps == 3


def test_a_mapping_holds_plain_values_only() -> None:
    problem = problem_of({"extends": TINY, "train": {"seed": SimpleNamespace()}})
    assert problem.message == "a spec cannot hold a Python SimpleNamespace"
    endless: dict[str, object] = {"extends": TINY}
    endless["model"] = endless
    assert any("32 levels deep" in each.message for each in problems_of(endless))


def test_json_is_a_spec_too(tmp_path: Path) -> None:
    data = spec_data(minimal(tmp_path))
    assert load_spec(write(tmp_path, json.dumps(data), "spec.json")) == minimal(tmp_path)


def test_extends_lays_mappings_over_mappings_and_replaces_lists(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL.replace("moe: {", "dense: {d_ff: 8, layers: [0, 1]}\n  moe: {"), "base.yaml")
    text = "extends: base.yaml\nmodel: {d_model: 64, dense: {layers: [3]}}\ntrain: {steps: 11}\n"
    resolved = load_resolved(write(tmp_path, text))
    spec = resolved.spec
    assert (spec.model.d_model, spec.model.num_layers, spec.train.steps, spec.train.tokens_per_step) == (
        64,
        4,
        11,
        4096,
    )
    assert spec.model.dense is not None
    assert (spec.model.dense.d_ff, spec.model.dense.layers) == (8, (3,))
    assert [Path(each).name for each in resolved.sources] == ["spec.yaml", "base.yaml"]
    assert resolved.source == str(tmp_path / "spec.yaml")
    assert resolved.origins["model.d_model"] == f"{tmp_path}/spec.yaml:2:18"
    assert resolved.origins["model.num_layers"] == f"{tmp_path}/base.yaml:5:15"
    assert resolved.origins["train.seed"] == "default"


def test_extends_a_shipped_preset_and_a_file_of_a_subfolder(tmp_path: Path) -> None:
    write(tmp_path, f"extends: {TINY}\ntrain: {{steps: 500}}\n", "sub/middle.yaml")
    resolved = load_resolved(write(tmp_path, "extends: sub/middle.yaml\nlayout: {}\n"))
    assert resolved.spec.train.steps == 500
    assert resolved.origins["model.d_model"] == f"{TINY}:5:12"


def test_another_kind_replaces_the_whole_mapping(tmp_path: Path) -> None:
    write(
        tmp_path, MINIMAL.replace("{steps: 10,", "{schedule: {kind: wsd, warmup: 1, decay: 2}, steps: 10,"), "base.yaml"
    )
    text = "extends: base.yaml\ntrain: {schedule: {kind: cosine, final: 0.5}}\n"
    assert load_spec(write(tmp_path, text)).train.schedule == Cosine(kind="cosine", final=0.5)
    text = "extends: base.yaml\ntrain: {schedule: {warmup: 3}}\n"
    assert load_spec(write(tmp_path, text)).train.schedule == Wsd(kind="wsd", warmup=3, decay=2)


def test_problems_of_an_extended_file_stand_at_their_place_in_it(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL.replace("top_k: 2", "top_k: 0"), "base.yaml")
    problem = problem_of(write(tmp_path, "extends: base.yaml\n"))
    assert problem.where == f"{tmp_path}/base.yaml:7:32"


def test_overrides_are_typed_by_the_schema(tmp_path: Path) -> None:
    spec = minimal(
        tmp_path,
        "train.optimizer.lr=1e-4",
        "train.steps=1e3",
        "train.output_dir=123",
        "model.tie_embeddings=true",
        "model.attention.rope=null",
        "model.dense={d_ff: 8, layers: [0, 2]}",
        "train.optimizer.betas=[0.8, 0.9]",
        "train.optimizer.groups=[{match: '*norm*', weight_decay: 0}]",
        "passes.balance-losses.enabled=false",
    )
    assert spec.train.optimizer.lr == 1e-4
    assert spec.train.steps == 1000
    assert spec.train.output_dir == "123"
    assert spec.model.tie_embeddings is True
    assert spec.model.attention.rope is None
    assert spec.model.dense is not None
    assert spec.model.dense.layers == (0, 2)
    assert spec.train.optimizer.betas == (0.8, 0.9)
    assert spec.train.optimizer.groups[0].weight_decay == 0
    assert spec.passes.balance_losses.enabled is False


def test_overrides_do_not_depend_on_their_order_and_the_last_of_a_key_holds(tmp_path: Path) -> None:
    first = minimal(tmp_path, "train.schedule.kind=cosine", "train.schedule.warmup=5")
    second = minimal(tmp_path, "train.schedule.warmup=5", "train.schedule.kind=cosine")
    assert first == second
    assert minimal(tmp_path, "train.steps=5", "train.steps=6").train.steps == 6


def test_overrides_say_where_they_come_from(tmp_path: Path) -> None:
    resolved = load_resolved(write(tmp_path, MINIMAL), ["model.moe.top_k=1"])
    assert resolved.origins["model.moe.top_k"] == "--set model.moe.top_k=1"
    problem = problem_of(write(tmp_path, MINIMAL), "model.moe.topk=1")
    assert problem.where == "--set model.moe.topk=1"
    assert problem.nearest == "top_k"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.steps", "needs a key, `=` and a value"),
        ("=3", "needs a key, `=` and a value"),
        ("train..steps=3", "needs a key, `=` and a value"),
        ("extends=x.yaml", "can only stand in a file"),
        ("train.steps=[1", "cannot be read as YAML"),
        ("train.steps=!!int 3", "the tag"),
        (".".join("a" * 100) + "=1", "levels deep"),
        ("train.steps=", "there is no value"),
        ("train.steps=ten", "must be a whole number, not text"),
        ("train=3", "must be a mapping, not a whole number"),
        ("model.attention.num_heads.x=3", "must be a whole number, not a mapping"),
    ],
)
def test_malformed_overrides_are_refused(tmp_path: Path, override: str, sentence: str) -> None:
    assert any(sentence in each.message for each in problems_of(write(tmp_path, MINIMAL), [override]))


def test_a_missing_file_names_the_presets(tmp_path: Path) -> None:
    problem = problem_of("presets/tiny.yml")
    assert problem.message == "there is no such file"
    assert problem.fix == "did you mean presets/tiny.yaml?"
    problem = problem_of(tmp_path / "none.yaml")
    assert problem.fix is not None
    assert all(name in problem.fix for name in preset_names())
    problems = problems_of(write(tmp_path, "extends: nothing.yaml\n"))
    assert problems[0].where.endswith("spec.yaml:1:10")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "[1, 2]", "just text", "3"])
def test_what_is_no_mapping_is_no_spec(tmp_path: Path, text: str) -> None:
    assert problem_of(write(tmp_path, text)).code == "MG102"


def test_resolved_lines_show_every_value_with_its_origin(tmp_path: Path) -> None:
    resolved = load_resolved(write(tmp_path, MINIMAL), ["train.steps=7"])
    lines = resolved_lines(resolved)
    assert len(lines) == len(resolved.origins) == len(resolved_data(resolved))
    table = {line.split(":")[0]: line for line in lines}
    assert table["train.steps"].split() == ["train.steps:", "7", "#", "--set", "train.steps=7"]
    assert table["model.moe.num_experts"].endswith("spec.yaml:7:22")
    assert table["passes.balance-losses.enabled"].split() == ["passes.balance-losses.enabled:", "true", "#", "default"]
    assert resolved_data(resolved)["train.steps"] == {"value": 7, "origin": "--set train.steps=7"}
    json.dumps(resolved_data(resolved))


@pytest.mark.parametrize("name", preset_names())
def test_the_resolved_text_loads_to_the_same_spec(tmp_path: Path, name: str) -> None:
    spec = load_spec(name)
    path = write(tmp_path, resolved_yaml(spec))
    assert load_spec(path) == spec
    assert resolved_yaml(load_spec(path)) == resolved_yaml(spec)


def test_the_resolved_text_keeps_awkward_strings(tmp_path: Path) -> None:
    for text in ("on", "1e4", "null", "a: b", "é", "x #y", "'", '"', "-", "[", "1.", "tab\there"):
        spec = minimal(tmp_path, f"train.output_dir={json.dumps(text)}")
        assert spec.train.output_dir == text
        assert load_spec(write(tmp_path, resolved_yaml(spec), "again.yaml")).train.output_dir == text


def test_a_spec_cannot_be_changed(tmp_path: Path) -> None:
    spec = minimal(tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        spec.train.steps = 3  # type: ignore[misc]


def test_a_spec_error_comes_within_two_seconds_and_without_torch(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL.replace("top_k: 2", "topk: 2"))
    code = (
        "import sys\nfrom moegraph.errors import SpecError\nfrom moegraph.specs import load_spec\n"
        f"try: load_spec({str(path)!r})\nexcept SpecError as error: print(error)\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'safetensors', 'networkx'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "did you mean `top_k`?" in result.stdout
    assert time.perf_counter() - start < 2
