"""What the tests of specs share: the smallest spec, and the problems that a spec has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from moegraph.errors import Problem, SpecError
from moegraph.specs import Spec, load_spec

TINY = "presets/tiny.yaml"
MINIMAL = """\
spec_version: 1
model:
  vocab_size: 64
  d_model: 32
  num_layers: 4
  attention: {num_heads: 4}
  moe: {num_experts: 8, top_k: 2, d_ff: 16}
train: {steps: 10, tokens_per_step: 4096}
data: {source: "corpus:python-stdlib", seq_len: 256}
"""


def write(folder: Path, text: str | bytes, name: str = "spec.yaml") -> Path:
    """A spec file with this content."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def minimal(tmp_path: Path, *overrides: str) -> Spec:
    """The smallest spec with overrides."""
    return load_spec(write(tmp_path, MINIMAL), overrides)


def problems_of(source: Any, overrides: Iterable[str] = ()) -> list[Problem]:
    """The problems that loading ends with; it has to end with some."""
    with pytest.raises(SpecError) as caught:
        load_spec(source, overrides)
    assert "pydantic" not in str(caught.value).lower()
    assert "Traceback" not in str(caught.value)
    return caught.value.problems


def problem_of(source: Any, *overrides: str) -> Problem:
    """The one problem that loading ends with."""
    (problem,) = problems_of(source, overrides)
    return problem
