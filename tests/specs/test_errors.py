"""All that is wrong with a spec is said at once, in sentences with a place, what would do, and the nearest key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moegraph.errors import PROBLEM_CODES, MoegraphError, Problem, SpecError
from moegraph.specs import load_spec
from moegraph.specs.fields import walk
from moegraph.specs.suggest import SYNONYMS
from tests.specs.small import MINIMAL, problem_of, problems_of, write

MANY = """\
spec_version: 1
learning_rate: 3e-4
model:
  vocab_size: 4096
  d_modle: 128
  num_layers: "4"
  norm: {kind: rms, placement: pree}
  attention: {num_heads: 4, num_kv_heads: 3, sinks: true, sliding_window: 128}
  tie_embeddings: on
  tie_embeddings: true
  dense: {d_ff: 384.5, layers: [0]}
  moe:
    num_experts: 8
    top_k: 16
    d_ff: 128
    router: {score: softmaxx, norm: {kind: none, eps: 1e-20}, groups: {n: 3, keep: 4}}
    balance: {over: micro_batch, coef: .nan}
layout: {dp: 3, ep: 2, pp: 4}
precision: {compute: fp16}
train:
  tokens_per_step: 1000
  num-epochs: 3
  optimizer: {kind: adam, betas: [0.9, 1.0]}
  schedule: {kind: wsd, warmup: 30, decya: 90}
  output_dir: ../runs
data: {source: "corpus:python-stdlib", seq_len: 8192}
checkpoint: {every: 100}
"""


def test_every_problem_of_a_spec_is_shown_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, MANY, "many.yaml")
    with pytest.raises(SpecError) as caught:
        load_spec("many.yaml", ["train.seed=abc", "layout.tp=2"])
    golden("many-spec-errors.txt", str(caught.value) + "\n")


def test_every_problem_has_a_place_a_code_and_a_sentence(tmp_path: Path) -> None:
    for problem in problems_of(write(tmp_path, MANY)):
        assert problem.code in PROBLEM_CODES
        assert problem.line > 0
        assert problem.column > 0
        assert problem.message
        assert str(problem).startswith(f"{tmp_path}/spec.yaml:{problem.line}:{problem.column}: ")


def test_problems_stand_in_the_order_of_the_file(tmp_path: Path) -> None:
    places = [(each.line, each.column) for each in problems_of(write(tmp_path, MANY))]
    assert places == sorted(places)


def test_an_error_is_json_too(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(write(tmp_path, MINIMAL.replace("top_k: 2", "top_k: 9")))
    error = caught.value
    assert isinstance(error, MoegraphError)
    assert error.exit_code == 2
    data = json.loads(json.dumps(error.to_json()))
    assert data["exit_code"] == 2
    (problem,) = data["problems"]
    assert problem == {
        "code": "MG106",
        "file": f"{tmp_path}/spec.yaml",
        "line": 7,
        "column": 32,
        "where": f"{tmp_path}/spec.yaml:7:32",
        "path": "model.moe.top_k",
        "value": "9",
        "message": "top_k 9 is more than num_experts 8",
        "allowed": "1 to 8",
        "nearest": None,
        "fix": None,
    }


def test_rules_hold_over_what_parses_even_where_the_rest_does_not(tmp_path: Path) -> None:
    text = MINIMAL.replace("top_k: 2, d_ff: 16", "top_k: 9, d_ff: wide").replace("num_layers: 4", "num_layers: many")
    problems = {(each.path, each.code) for each in problems_of(write(tmp_path, text))}
    assert problems == {("model.moe.d_ff", "MG105"), ("model.moe.top_k", "MG106"), ("model.num_layers", "MG105")}


def test_a_value_that_failed_causes_no_second_problem(tmp_path: Path) -> None:
    text = MINIMAL.replace("num_experts: 8", "num_experts: eight")
    assert problem_of(write(tmp_path, text)).path == "model.moe.num_experts"


def test_a_misspelt_key_is_not_also_missing(tmp_path: Path) -> None:
    problem = problem_of(write(tmp_path, MINIMAL.replace("num_experts: 8", "num_expert: 8")))
    assert (problem.code, problem.nearest) == ("MG103", "num_experts")


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("learning_rate: 1e-4", "train.optimizer.lr"),
        ("lr: 1e-4", "train.optimizer.lr"),
        ("num-epochs: 3", "train.steps"),
        ("top_k: 2", "model.moe.top_k"),
        ("Layout: {}", "layout"),
        ("lay-out: {}", "layout"),
        ("seq_len: 3", "data.seq_len"),
        ("hidden_size: 3", "model.d_model"),
        ("num_experts_per_tok: 3", "model.moe.top_k"),
        ("mxfp8: {}", "precision.mxfp8"),
        ("qqqq: 1", None),
    ],
)
def test_an_unknown_key_names_the_one_that_was_meant(tmp_path: Path, line: str, nearest: str | None) -> None:
    problem = problem_of(write(tmp_path, f"{MINIMAL}{line}\n"))
    assert problem.nearest == nearest
    assert (problem.line, problem.column) == (10, 1)
    assert ("did you mean" in problem.message) == (nearest is not None)
    assert nearest is not None or "the keys spec_version, model" in str(problem.allowed)


def test_the_nearest_key_may_be_in_another_section(tmp_path: Path) -> None:
    problem = problem_of(write(tmp_path, MINIMAL), "model.lr=3")
    assert "unknown in `model`; did you mean `train.optimizer.lr`?" in problem.message
    problem = problem_of(write(tmp_path, MINIMAL), "passes.balance_losses={enabled: true}")
    assert problem.nearest == "balance-losses"


def test_every_synonym_leads_to_a_key_that_exists() -> None:
    paths = {path for path, _, _, _ in walk()}
    assert set(SYNONYMS.values()) <= paths
    assert not {key for key in SYNONYMS if key in {path.rpartition(".")[2] for path in paths}}


@pytest.mark.parametrize(
    ("override", "sentence", "allowed"),
    [
        ("model.norm.placement=above", "is not among what this may be", "one of: pre, post, both"),
        ("model.moe.balance.f_norm=2", "is not among what this may be", "one of: 1, k"),
        ("model.num_layers=0", "is out of range", "a whole number from 1 to 4096"),
        ("model.num_layers=2.5", "must be a whole number, not a number with decimals", "a whole number from 1 to 4096"),
        ("model.num_layers='4'", "must be a whole number, not text", "a whole number from 1 to 4096"),
        ("model.num_layers=true", "must be a whole number, not true or false", "a whole number from 1 to 4096"),
        ("model.num_layers=[1]", "must be a whole number, not a list", "a whole number from 1 to 4096"),
        ("model.num_layers=null", "there is no value", "a whole number from 1 to 4096"),
        ("model.tie_embeddings=1", "must be true or false, not a whole number", "true or false"),
        ("train.optimizer.betas=[0.9]", "does not match what this may be", "a list of 2, each a number from 0 to 1"),
        (
            "model.moe.activation=gelu",
            "is not among what this may be",
            "swiglu, or a mapping with kind: swiglu_clamped",
        ),
        ("train.clip_norm=-1", "is out of range", "a number above 0 up to 1e+30, or null"),
        (
            "passes.recompute.layers=[a]",
            "is not among what this may be",
            "all, or a list, each a whole number from 0 to 16777216",
        ),
        ("model.attention.window={size: 2, pattern: LX}", "does not match", "letters that match ^[LG]+$"),
        ("train.schedule.kind=cosin", "no such kind", "one of: cosine, wsd, constant"),
        ("train.schedule={warmup: 3}", "`kind` is missing", "kind: one of cosine, wsd, constant"),
        ("passes.custom={mine: 3}", "must be a mapping, not a whole number", None),
        ("train.optimizer.groups=3", "must be a list, not a whole number", None),
        ("spec_version=2", "is not among what this may be", "1"),
    ],
)
def test_a_wrong_value_names_what_would_do(tmp_path: Path, override: str, sentence: str, allowed: str | None) -> None:
    problem = problem_of(write(tmp_path, MINIMAL), override)
    assert sentence in problem.message
    assert allowed is None or problem.allowed == allowed


def test_yaml_one_point_one_booleans_are_explained(tmp_path: Path) -> None:
    text = MINIMAL.replace("num_layers: 4", "num_layers: 4\n  tie_embeddings: on")
    problem = problem_of(write(tmp_path, text))
    assert problem.message == "must be true or false, not text"
    assert problem.fix == "write true or false: YAML 1.2 reads this as text"


def test_quoted_numbers_and_unquoted_texts_are_explained(tmp_path: Path) -> None:
    assert problem_of(write(tmp_path, MINIMAL.replace("steps: 10", 'steps: "10"'))).fix == "remove the quotes"
    problem = problem_of(write(tmp_path, MINIMAL.replace("{steps: 10", "{output_dir: 3, steps: 10")))
    assert problem.fix == "put quotes around it"


def test_the_whole_error_is_its_text() -> None:
    error = SpecError(
        [Problem("MG105", "is out of range", where="a.yaml:1:2", path="a.b", value="3", allowed="1, 2")], "a.yaml"
    )
    assert str(error) == "1 problem in a.yaml\na.yaml:1:2: a.b = 3: is out of range [MG105]\n    allowed: 1, 2"
