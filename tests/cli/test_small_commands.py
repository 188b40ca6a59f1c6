"""`schema`, `init` and `doctor`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moegraph.specs import load_spec

from .conftest import Moegraph


def test_schema_prints_the_json_schema(moegraph: Moegraph) -> None:
    done = moegraph("schema")
    assert done.status == 0
    assert done.json["title"] == "moegraph spec"
    assert moegraph("schema", "--json").out == done.out


def test_init_writes_a_spec_that_loads_and_never_overwrites(here: Path, moegraph: Moegraph) -> None:
    assert moegraph("init").status == 0
    before = Path("moegraph.yaml").read_bytes()
    assert load_spec("moegraph.yaml").spec_version == 1
    done = moegraph("init")
    assert (done.status, "exists already" in done.err) == (2, True)
    assert Path("moegraph.yaml").read_bytes() == before
    assert moegraph("init", "-o", "specs/other.yaml", "--json").json == {"written": "specs/other.yaml"}


def test_doctor_says_what_there_is(here: Path, moegraph: Moegraph) -> None:
    done = moegraph("doctor", "--json")
    found = {each["name"]: each for each in done.json["findings"]}
    assert {"python", "torch", "C++ compiler", "cache folder", "compile cache", "free disk here"} <= set(found)
    assert found["attention of presets/tiny.yaml"]["value"] in ("reference", "cudnn_bias", "cudnn", "flash")
    assert done.status == (0 if done.json["ok"] else 3)
    shown = moegraph("doctor").out
    assert "C++ compiler" in shown
    (mxfp8,) = [line for line in shown.splitlines() if line.startswith("mxfp8 experts")]
    assert "emulated" in mxfp8 or torch.cuda.is_available()


def test_doctor_fails_a_compile_cache_that_others_can_read(
    here: Path, moegraph: Moegraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here))
    cache = here / "moegraph" / "compiled"
    cache.mkdir(parents=True)
    cache.chmod(0o755)
    done = moegraph("doctor", "--json")
    (finding,) = [each for each in done.json["findings"] if each["name"] == "compile cache"]
    assert (done.status, finding["verdict"]) == (3, "failed")
    cache.chmod(0o700)
    (finding,) = [each for each in moegraph("doctor", "--json").json["findings"] if each["name"] == "compile cache"]
    assert finding["verdict"] == "ok"


def test_doctor_fails_without_a_compiler(here: Path, moegraph: Moegraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.cli.doctor.shutil.which", lambda name: None)
    done = moegraph("doctor")
    assert done.status == 3
    assert "install g++" in done.out
