"""Checkpoints that outlive the schema: what it has gained since counts as its default, and nothing else does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import create_model

from moegraph.checkpoint.manifest import Manifest, read_manifest
from moegraph.checkpoint.same_run import EQUAL, check_same_run
from moegraph.errors import CheckpointError
from moegraph.specs.schema import Spec
from tests.checkpoint.small_checkpoints import rewrite, run_spec, write_checkpoint

FINGERPRINT = "a" * 64


def manifest_of(tmp_path: Path, spec: dict[str, Any]) -> Manifest:
    """The manifest of a checkpoint that was written with this resolved spec."""
    if not (tmp_path / "step-000007").exists():
        write_checkpoint(tmp_path)
    rewrite(tmp_path / "step-000007", spec=spec)
    return read_manifest(tmp_path / "step-000007")


def data(spec: Spec) -> dict[str, Any]:
    return spec.model_dump(mode="json", by_alias=True)


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The place of every value."""
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))


@pytest.fixture
def newer(tmp_path: Path) -> type[Spec]:
    """A schema whose model has one setting more, 7 by default."""
    old = Spec.model_fields["model"].annotation
    assert old is not None
    model = create_model("Model", __base__=old, new_setting=(int, 7))
    return create_model("Spec", __base__=Spec, model=(model, ...))


def test_a_field_that_the_schema_gained_counts_as_its_default(tmp_path: Path, newer: type[Spec]) -> None:
    recorded = data(run_spec(tmp_path, "train.steps=9"))
    manifest = manifest_of(tmp_path, recorded)
    assert check_same_run(tmp_path, manifest, newer.model_validate(recorded), FINGERPRINT) == []
    other = copy.deepcopy(recorded)
    other["model"]["new_setting"] = 8
    with pytest.raises(CheckpointError, match=r"model\.new_setting: 7 → 8"):
        check_same_run(tmp_path, manifest, newer.model_validate(other), FINGERPRINT)


def test_a_field_that_the_schema_lost_is_named(tmp_path: Path, newer: type[Spec]) -> None:
    spec = run_spec(tmp_path, "train.steps=9")
    manifest = manifest_of(tmp_path, data(newer.model_validate(data(spec))))
    with pytest.raises(CheckpointError, match=r"model\.new_setting: 7 → nothing"):
        check_same_run(tmp_path, manifest, spec, FINGERPRINT)


def test_what_a_checkpoint_did_not_record_is_refused_unless_it_is_the_default(tmp_path: Path) -> None:
    """Every setting of the model, one after the other, as if it had been gained since."""
    spec = run_spec(tmp_path, "train.steps=9")
    whole, path = data(spec), tmp_path / "step-000007"
    manifest = manifest_of(tmp_path, whole)
    refused, accepted = set(), set()
    for place in leaves(whole):
        name = ".".join(place)
        if not any(name.startswith(f"{root}.") for root in EQUAL):
            continue
        recorded = copy.deepcopy(whole)
        holder = recorded
        for key in place[:-1]:
            holder = holder[key]
        del holder[place[-1]]
        try:
            default = data(Spec.model_validate(recorded)) == whole
        except ValueError:
            default = False  # it has none
        try:
            check_same_run(path, manifest.model_copy(update={"spec": recorded}), spec, FINGERPRINT)
            accepted.add(name)
            assert default, name
        except CheckpointError as error:
            refused.add(name)
            assert name in str(error)  # noqa: PT017
            assert not default, name
    assert {"model.d_model", "model.moe.top_k", "model.moe.router.select_bias"} <= refused
    assert {"model.tie_embeddings", "model.norm.eps"} <= accepted
