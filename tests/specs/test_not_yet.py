"""What waits for later work can be said and is refused; every word of the schema is one or the other (A47)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moegraph.specs import load_spec
from moegraph.specs.fields import choices, field_type, walk
from moegraph.specs.nodes import show
from moegraph.specs.not_yet import NOT_YET
from tests.specs.small import MINIMAL, minimal, problems_of, write

# A value away from the default for each row of the table.
ASKED = {
    "model.norm.kind": "layer",
    "model.norm.bias": "true",
    "model.attention.scale": "0.0078125",
    "model.attention.qk_norm": "l2",
    "model.attention.qk_norm_after_rope": "true",
    "model.attention.clip_qkv": "8",
    "model.attention.output_gate": "true",
    "model.attention.window.rope": "{theta: 10000}",
    "model.attention.chunk": "{size: 64}",
    "model.attention.rope.pattern": "RRRN",
    "model.attention.rope.scaling": "{kind: yarn, factor: 40, original_max_seq_len: 4096}",
    "model.attention.temperature": "{}",
    "model.attention.sinks": "true",
    "model.attention.mla": "{kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 8}",
    "model.attention.experts": "{num_experts: 8, top_k: 2}",
    "model.mixers": "{pattern: AC, short_conv: {}}",
    "model.head_bias": "true",
    "model.multi_token_prediction": "{depth: 1}",
    "model.moe.router.algorithm": "sparsemixer",
    "model.moe.router.jitter": "0.1",
}

# What a word needs around it to make sense.
AROUND = {
    "checkpoint.mode": ["checkpoint.every=100"],
    "layout.schedule": ["layout.pp=2", "layout.microbatches=4"],
    "layout.transport": ["layout.dp=2", "layout.ep=2"],
    "layout.overflow": ["layout.dp=2", "layout.ep=2", "layout.transport=padded"],
    "model.attention.window.rope.scaling.kind": ["model.attention.window.size=8"],
    "model.moe.balance.over": ["model.moe.balance.coef=0.1"],
    "model.moe.balance.layers": ["model.moe.balance.coef=0.1"],
    "model.moe.balance.f_norm": ["model.moe.balance.coef=0.1"],
    "model.moe.router.groups.score": ["model.moe.router.groups.n=2", "model.moe.router.groups.keep=1"],
    "model.moe.router.groups.fill": ["model.moe.router.groups.n=2", "model.moe.router.groups.keep=1"],
    "model.moe.router.norm.mode": ["model.moe.router.norm.kind=sum"],
    "model.moe.shared.gate": ["model.moe.shared.num_experts=1"],
    "model.dense.layers": ["model.dense.d_ff=8", "model.moe=null"],
    "passes.overlap-communication.mode": ["layout.dp=2", "layout.ep=2"],
    "passes.overlap-communication.chunks": [
        "layout={dp: 2, ep: 2, transport: padded}",
        "passes.overlap-communication.mode=on",
    ],
    "precision.mxfp8.experts": ["model.moe.d_ff=32"],
    "precision.mxfp8.saved": ["passes.fuse-experts.enabled=true"],
    "precision.mxfp8.dispatch": ["layout.dp=2", "layout.ep=2"],
    "precision.mxfp8.wgrad": ["precision.mxfp8.experts=auto"],
    "precision.mxfp8.shared": ["model.moe.shared={num_experts: 2}"],
    "precision.fp8": ["model.d_model=128", "model.moe.d_ff=128"],
    "precision.fp8_wgrad": ["precision.fp8=rowwise"],
    "passes.recompute.layers": ["passes.recompute.policy=full"],
}


def words() -> list[tuple[str, Any]]:
    """Every word that the schema lists, with the path it stands at."""
    found = [(path, word) for path, _, _, info in walk() for word in choices(field_type(info))]
    return list(dict.fromkeys(found))


def test_the_table_names_paths_that_exist() -> None:
    assert set(NOT_YET) <= {path for path, _, _, _ in walk()}
    assert set(ASKED) == set(NOT_YET)


@pytest.mark.parametrize("path", NOT_YET)
def test_what_waits_for_later_work_is_refused_in_a_sentence(tmp_path: Path, path: str) -> None:
    overrides = ["model.attention.window.size=8"] if ".window." in path else []
    (problem,) = problems_of(write(tmp_path, MINIMAL), [*overrides, *AROUND.get(path, ()), f"{path}={ASKED[path]}"])
    assert (problem.code, problem.path) == ("MG107", path)
    assert "waits for later work" in problem.message
    assert NOT_YET[path].what in problem.message
    assert problem.fix is not None
    assert problem.fix.startswith("leave it out")


@pytest.mark.parametrize("path", NOT_YET)
def test_its_default_is_accepted_when_written_out(tmp_path: Path, path: str) -> None:
    default = {path: info.default for path, _, _, info in walk()}[path]
    value = f"'{default}'" if isinstance(default, str) else show(default)
    around = ["model.attention.window.size=8"] if ".window." in path else []
    minimal(tmp_path, *around, f"{path}={value}")


@pytest.mark.parametrize(("path", "word"), words())
def test_a47_every_word_of_the_schema_works_or_is_refused(tmp_path: Path, path: str, word: Any) -> None:
    if path.startswith("passes.custom") or "[]" in path:
        pytest.skip("not a word of a single setting")
    value = f"'{word}'" if isinstance(word, str) else word
    overrides = [*AROUND.get(path, []), f"{path}={value}"]
    source = write(tmp_path, MINIMAL)
    refused_here = [row for row in NOT_YET if path == row or path.startswith(f"{row}.")]
    allowed = not refused_here or (NOT_YET[refused_here[0]].values and word not in NOT_YET[refused_here[0]].values)
    default = {where: info.default for where, _, _, info in walk()}[path]
    if allowed or (word == default and path in NOT_YET):
        load_spec(source, overrides)
    else:
        problems = problems_of(source, overrides)
        assert {each.code for each in problems} == {"MG107"}, problems


def test_a_mistake_inside_what_is_refused_is_not_reported_too(tmp_path: Path) -> None:
    (problem,) = problems_of(write(tmp_path, MINIMAL), ["model.attention.mla={kv_rank: x}"])
    assert problem.code == "MG107"
