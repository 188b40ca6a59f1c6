"""docs/passes.md: its example runs as it stands there, takes its option, and does what the text says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moegraph import ops
from moegraph.compiled import compile
from moegraph.passes import registry
from tests.passes.user_passes import restored_registry
from tests.small_models import small_spec
from tests.step.kinds import TWO_LAYERS

DOCUMENT = Path(__file__).parents[2] / "docs/passes.md"


@pytest.fixture(autouse=True)
def example(tmp_path: Path) -> Iterator[None]:
    """The example, loaded as a user would load it."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "scale_experts.py"
    path.write_text(code, encoding="utf-8")
    with restored_registry():
        assert registry.load_file(path) == ["scale-experts"]
        yield


def test_the_example_scales_the_experts_of_each_block_that_has_them() -> None:
    result = compile(
        small_spec(*TWO_LAYERS, "passes.custom.scale-experts={after: canonicalize, options: {factor: 0.5}}")
    )
    names = [record.name for record in result.records]
    assert names.index("canonicalize") < names.index("scale-experts") < names.index("trace")
    record = result.record("scale-experts")
    (node,) = [n for n in record.program.units["moe"].graphs["layer"].graph.nodes if n.target is ops.scale]
    assert node.args[1] == 0.5
    assert record.rewritten["moe"] == ("moe.scaled",)
    assert record.notes["dense"] == "no experts in this block"


def test_the_passes_are_listed_in_their_order() -> None:
    listed = re.findall(r"^\| `([a-z-]+)` \| (layer|step) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) >= 4
    assert listed == [(p.name, p.level) for p in registry if p.name in dict(listed)]
