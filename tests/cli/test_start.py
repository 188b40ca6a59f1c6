"""What the command line does before it does anything: it starts fast, and without torch."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import moegraph as package

HEAVY = "{'torch', 'numpy', 'tokenizers', 'networkx'}"


def python(code: str, *, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=60)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["compile", "--help"], ["inspect", "presets/tiny.yaml", "--resolved"]]
)
def test_help_and_resolved_values_import_nothing_heavy(arguments: list[str]) -> None:
    done = python(
        f"import sys; from moegraph.cli import run; run({arguments}); sys.exit(bool({HEAVY} & set(sys.modules)))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_takes_less_than_half_a_second() -> None:
    def seconds() -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "moegraph", "--help"], capture_output=True, check=True)
        return time.perf_counter() - started

    assert min(seconds() for _ in range(4)) < 0.5


def test_help_names_every_command_in_full() -> None:
    text = python("from moegraph.cli import run; run([])").stdout
    commands = ("compile", "train", "inspect", "verify", "export", "data", "schema", "init", "doctor")
    assert [name for name in commands if f"\n  {name} " not in text] == []
    assert "..." not in text.partition("Commands:")[2], "a summary is cut off"


def test_a_spec_error_takes_less_than_two_seconds(tmp_path: Path) -> None:
    (tmp_path / "moegraph.yaml").write_text("spec_version: 1\nlearning_rate: 1\n", encoding="utf-8")
    for command in ("compile", "train", "inspect", "verify"):
        started = time.perf_counter()
        done = python(f"import sys; from moegraph.cli import run; sys.exit(run(['{command}']))", cwd=tmp_path)
        assert time.perf_counter() - started < 2.0
        assert done.returncode == 2


def test_the_package_loads_its_names_when_they_are_used() -> None:
    code = f"""
import sys, moegraph
assert not {HEAVY} & set(sys.modules)
spec = moegraph.load_spec("presets/tiny.yaml", overrides=["train.steps=10"])
assert spec.train.steps == 10 and not {HEAVY} & set(sys.modules)
assert len(moegraph.lower(spec).instances) == 6
assert "balance-losses" in moegraph.passes.registry
assert callable(moegraph.compile) and moegraph.__version__ == "{package.__version__}"
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018
    assert {"load_spec", "lower", "compile", "passes"} <= set(dir(package))


def test_python_m_moegraph_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "moegraph", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"moegraph {package.__version__}\n")
