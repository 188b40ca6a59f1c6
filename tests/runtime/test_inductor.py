"""The whole way through Inductor, once: equal to eager, and right again after its cache was damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moegraph.runtime.run_log import read_records

from .small_runs import run, run_spec

# As few different operations as still make a model with experts: most of the time goes into the C++ compiler.
ONE_LAYER = (
    "model.num_layers=1",
    "model.dense=null",
    "model.moe.shared=null",
    "model.attention.qk_norm=none",
    "precision.compute=fp32",
    "train.steps=3",
)

SCRIPT = """\
import json, sys
from pathlib import Path
from tests.runtime.small_runs import run, run_spec
done = run(run_spec(Path(sys.argv[1]), *sys.argv[3:]), Path(sys.argv[2]))
(Path(sys.argv[1]) / "printed").write_text(done.printed, encoding="utf-8")
print(json.dumps(done.result.compilations))
"""


def run_apart(folder: Path, tokens: Path, cache: Path) -> tuple[list[float], dict[str, int]]:
    """Losses and compilations of a run through Inductor in a process of its own."""
    command = [sys.executable, "-c", SCRIPT, str(folder), str(tokens), *ONE_LAYER, "train.compile=inductor"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    losses = [record["loss"] for record in read_records(folder / "run")]
    return losses, json.loads(done.stdout)


@pytest.fixture(scope="module")
def cold(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, int]]:
    """The cache, the losses and the compilations of a run that found nothing compiled."""
    folder = tmp_path_factory.mktemp("inductor")
    return folder / "cache", *run_apart(folder, tokens, folder / "cache")


def test_inductor_computes_what_eager_computes_and_compiles_once(
    cold: tuple[Path, list[float], dict[str, int]], tokens: Path, tmp_path: Path
) -> None:
    cache, losses, compilations = cold
    assert losses == pytest.approx(run(run_spec(tmp_path, *ONE_LAYER), tokens).column("loss"), rel=1e-5)
    assert compilations == {f"{k}/{g}": 1 for k in ("embedding", "moe", "head") for g in ("forward", "backward")}
    # Whatever was compiled for it lies here, the precompiled header too.
    assert [path.parent.name for path in cache.rglob("*.gch")] == ["headers"]


@pytest.mark.slow
def test_a_damaged_cache_is_compiled_again_and_the_run_is_the_same(
    cold: tuple[Path, list[float], dict[str, int]], tokens: Path, tmp_path: Path
) -> None:
    cache, losses, _ = cold
    library = max(cache.rglob("*.so"), key=lambda path: path.stat().st_size)
    library.write_bytes(library.read_bytes()[:2000])  # as a killed compiler leaves it
    graphs = [path for path in sorted(cache.rglob("fxgraph/*/*/*")) if path.is_file()]
    graphs[0].write_bytes(b"not a graph")
    content = bytearray(graphs[1].read_bytes())
    content[len(content) // 2] ^= 1
    graphs[1].write_bytes(content)
    emptied = next(path for path in sorted(cache.rglob("*.so")) if path != library)
    emptied.write_bytes(b"")
    assert run_apart(tmp_path, tokens, cache)[0] == losses
    said = (tmp_path / "printed").read_text(encoding="utf-8")
    assert "compile cache: " in said
    assert "and 1 more" in said
    assert min(library.stat().st_size, emptied.stat().st_size) > 2000
    compiled = [path for path in (tmp_path / "run").rglob("*") if path.suffix in (".so", ".cpp", ".py", ".gch", ".o")]
    assert compiled == []  # code is never in a run
