"""Specs made to harm: each ends quickly, in a sentence, and does nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from moegraph.specs import load_spec
from tests.specs.small import MINIMAL, problem_of, problems_of, write


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5000,
        "{a: " * 5000,
        "- " * 5000,
        "".join(" " * depth + "a:\n" for depth in range(700)),
        "? " * 5000,
        "[" + "{}," * 80_000,
        "a: 1\n" * 50_000,
        "#\n" * 200_000,
        "\n" * 262_144,
        '"' + "a\n" * 131_000 + '"',
        "a" * 300_000,
        "!" * 262_144,
        "&" * 262_144,
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"b{i}: &b{i} [*{'a' if not i else f'b{i - 1}'}, *a]\n" for i in range(60)),
    ],
)
def test_oversized_and_overdeep_files_end_within_two_seconds(tmp_path: Path, text: str) -> None:
    start = time.perf_counter()
    problems_of(write(tmp_path, text))
    assert time.perf_counter() - start < 2


def test_five_thousand_levels_are_refused_by_their_depth(tmp_path: Path) -> None:
    assert "nested more than 32 levels deep" in problem_of(write(tmp_path, "a: " + "[" * 5000 + "]" * 5000)).message


def test_python_tags_run_nothing(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    text = f"{MINIMAL}layout: !!python/object/apply:os.system ['touch {target}']\n"
    problems = problems_of(write(tmp_path, text))
    assert any("the tag" in each.message for each in problems)
    assert not target.exists()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.num_layers=1000000000", "out of range"),
        ("model.vocab_size=1099511627776", "out of range"),
        ("model.moe.top_k=-1", "out of range"),
        ("train.optimizer.lr=.nan", "must be finite"),
        ("train.optimizer.lr=.inf", "must be finite"),
        ("train.optimizer.lr=1e999", "must be finite"),
        ("train.optimizer.betas=[.nan, 0.9]", "must be finite"),
        ("train.steps=0", "out of range"),
        ("train.seed=1e300", "out of range"),
        ("model.norm.eps=0", "out of range"),
        ("layout.dp=9999999999999999999999999999", "out of range"),
    ],
)
def test_values_out_of_range_are_refused_before_anything_is_allocated(
    tmp_path: Path, override: str, sentence: str
) -> None:
    assert sentence in problem_of(write(tmp_path, MINIMAL), override).message


def test_parameters_no_machine_holds_are_refused(tmp_path: Path) -> None:
    size = ("model.moe.num_experts=65536", "model.moe.d_ff=4194304", "model.d_model=4194304")
    assert any("more than any machine holds" in each.message for each in problems_of(write(tmp_path, MINIMAL), size))


@pytest.mark.parametrize(
    "name", ["../base.yaml", "/etc/passwd", "sub/../../base.yaml", "link.yaml", "sub/link.yaml", "presets/../x.yaml"]
)
def test_extends_stays_in_the_specs_own_folder(tmp_path: Path, name: str) -> None:
    write(tmp_path, MINIMAL, "base.yaml")
    home = tmp_path / "home"
    (home / "sub").mkdir(parents=True)
    (home / "link.yaml").symlink_to(tmp_path / "base.yaml")
    (home / "sub" / "link.yaml").symlink_to(tmp_path / "base.yaml")
    problems = problems_of(write(home, f"extends: {name}\n"))
    assert [each.code for each in problems if each.path == "extends"] == ["MG109"]


def test_a_linked_folder_does_not_lead_extends_out(tmp_path: Path) -> None:
    write(tmp_path / "other", MINIMAL, "base.yaml")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "sub").symlink_to(tmp_path / "other")
    problems = problems_of(write(tmp_path / "home", "extends: sub/base.yaml\n"))
    assert any("link that leads out" in each.message for each in problems)


def test_extends_in_a_circle_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    problems = problems_of(tmp_path / "a.yaml")
    assert any("in a circle: a.yaml → b.yaml → a.yaml" in each.message for each in problems)


def test_a_spec_that_extends_itself_is_refused(tmp_path: Path) -> None:
    assert any("in a circle" in each.message for each in problems_of(write(tmp_path, "extends: spec.yaml\n")))


def test_extends_is_bounded_in_depth(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, "0.yaml")
    for index in range(1, 12):
        write(tmp_path, f"extends: {index - 1}.yaml\n", f"{index}.yaml")
    assert load_spec(tmp_path / "7.yaml").train.steps == 10
    assert any("more than 8 specs" in each.message for each in problems_of(tmp_path / "11.yaml"))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("output_dir: /etc", "an absolute path"),
        ("output_dir: ../../etc", "leaves the working directory"),
        ("output_dir: ~/x", "an absolute path"),
        ("output_dir: out/x", "a link that leads out"),
        ('output_dir: "a\\0b"', "NUL"),
    ],
)
def test_folders_named_by_a_file_stay_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentence: str
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "out").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "work")
    text = MINIMAL.replace("train: {steps: 10,", f"train: {{{line}, steps: 10,")
    assert sentence in problem_of(write(tmp_path, text)).message


def test_the_data_folder_is_confined_too(tmp_path: Path) -> None:
    text = MINIMAL.replace('"corpus:python-stdlib"', "/etc/passwd")
    problem = problem_of(write(tmp_path, text))
    assert (problem.code, problem.path) == ("MG109", "data.source")


def test_who_runs_moegraph_may_name_any_folder(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert load_spec(path, [f"train.output_dir={tmp_path}"]).train.output_dir == str(tmp_path)
    text = MINIMAL.replace('"corpus:python-stdlib"', "/data/tokens")
    assert load_spec(write(tmp_path, text), trusted=True).data.source == "/data/tokens"


def test_a_named_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in problem_of(tmp_path / "pipe").message


def test_devices_and_folders_are_refused(tmp_path: Path) -> None:
    assert "not a regular file" in problem_of("/dev/zero").message
    assert "not a regular file" in problem_of(tmp_path).message


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    text = MINIMAL.replace("steps: 10", 'steps: 10, "\\e[31mred": "\\e]0;x\\a"')
    for problem in problems_of(write(tmp_path, text)):
        assert str(problem).replace("\n", "").isprintable()


def test_nothing_is_interpolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    spec = load_spec(write(tmp_path, MINIMAL), ["train.output_dir=runs/${SECRET}$SECRET{{SECRET}}"])
    assert spec.train.output_dir == "runs/${SECRET}$SECRET{{SECRET}}"


@pytest.mark.parametrize("name", ["a\0b", "\udcff.yaml", "x" * 5000, "\x1b[31m.yaml", "spec\n.yaml"])
def test_odd_file_names_and_overrides_are_shown_safely(name: str) -> None:
    for problem in [
        *problems_of(name),
        *problems_of({"extends": name}),
        *problems_of("presets/tiny.yaml", [f"{name}=1"]),
    ]:
        assert str(problem).replace("\n", "").isprintable()
