"""The command line in this process: `moegraph("inspect", …)` gives its exit status and what it printed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moegraph.cli import run

# Half a second to compile: two layers, one of them with experts.
SMALL = """\
spec_version: 1
extends: presets/tiny.yaml
model:
  vocab_size: 300
  num_layers: 2
  d_model: 16
  attention: {num_heads: 2, num_kv_heads: 1}
  dense: {d_ff: 16}
  moe: {num_experts: 4, d_ff: 16, shared: {d_ff: 16}}
train:
  steps: 2
  tokens_per_step: 64
  compile: eager
  schedule: {kind: constant}
  validation: null
  output_dir: runs/small
data: {source: tokens, seq_len: 16}
"""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as the one JSON document that it has to be."""
        return json.loads(self.out)


Moegraph = Callable[..., Done]


@pytest.fixture
def moegraph(capsys: pytest.CaptureFixture[str]) -> Moegraph:
    """Runs one command line in this process."""

    def call(*arguments: str | Path) -> Done:
        capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Done(status, out, err)

    return call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small(here: Path) -> Path:
    """The small spec as ./moegraph.yaml of an empty working directory."""
    path = here / "moegraph.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


_compiled: dict[str, Any] = {}


@pytest.fixture
def cached_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling one spec several times takes the time of once; for tests of what comes afterwards."""
    from moegraph import compiled

    original = compiled.compile

    def compile_once(spec: Any, **options: Any) -> Any:
        key = spec.model_dump_json(by_alias=True)
        if key not in _compiled:
            _compiled[key] = original(spec, **options)
        return _compiled[key]

    monkeypatch.setattr(compiled, "compile", compile_once)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which the small spec was compiled; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "moegraph.yaml").write_text(SMALL, encoding="utf-8")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert run(["compile"]) == 0
    finally:
        os.chdir(before)
    return folder


USER_PASS = '''\
from dataclasses import dataclass
from typing import ClassVar

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.passes import Pass, PassResult, registry


@registry.register
@dataclass(frozen=True)
class MarkLayers(Pass):
    """Multiplies the experts' output by one."""

    name: ClassVar[str] = "mark-layers"
    level: ClassVar[str] = "layer"

    @classmethod
    def from_spec(cls, spec):
        return cls()

    def apply(self, unit, context):
        rewriter = Rewriter(unit.graphs["layer"], self.name)
        combined = rewriter.find(ops.combine)
        if not combined:
            return PassResult(unit, note="no experts in this block")
        (node,) = combined
        new = rewriter.call_before(node.next, "moe.marked", ops.scale, node, 1.0)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return PassResult(unit.with_graphs({"layer": rewriter.finish()}), rewriter.rewritten)
'''


@pytest.fixture
def user_pass(tmp_path: Path) -> Iterator[Path]:
    """A file that registers the pass `mark-layers`; afterwards it is registered no more."""
    from moegraph.passes import registry

    path = tmp_path / "mark_layers.py"
    path.write_text(USER_PASS, encoding="utf-8")
    yield path
    if "mark-layers" in registry:
        registry.unregister("mark-layers")
