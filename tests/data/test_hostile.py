"""Prepared data that somebody damaged or forged: each mutation is refused in a sentence, in little memory, or harmless.

Hashes and fingerprints are made right again: whoever forges a file can forge those too.
"""

from __future__ import annotations

import json
import random
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from moegraph.data.dataset import TokenDataset
from moegraph.data.loader import Loader
from moegraph.data.manifest import Manifest
from moegraph.errors import DataError
from tests.mutations import mutate_bytes, mutate_text, mutate_tree, within_memory

from .small import write_tokens

LIMIT = 256 << 20  # bytes of address space, of which the damaged files are a thousandth
SHARDS = ("train-00000.tokens.bin", "train-00000.offsets.bin", "train-00001.tokens.bin", "train-00001.offsets.bin")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a folder of two shards."""
    chance = random.Random(0)
    documents = [[chance.randrange(1, 290) for _ in range(chance.randrange(1, 30))] for _ in range(20)]
    folder = write_tokens(tmp_path_factory.mktemp("good") / "tokens", documents, shard_tokens=150)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(SHARDS) < set(files)
    return files


def signed(table: Any) -> bytes:
    """The text of a manifest, its fingerprint right where it is a manifest."""
    text = json.dumps(table).encode()
    try:
        table["fingerprint"] = Manifest.model_validate_json(text).computed_fingerprint()
    except (ValueError, TypeError):
        return text
    return json.dumps(table).encode()


def mutate(good: dict[str, bytes], chance: random.Random) -> dict[str, bytes]:
    """One file is another."""
    files, table = dict(good), json.loads(good["manifest.json"])
    name = chance.choice(["manifest.json", "manifest.json", "tokenizer.json", *SHARDS])
    if name == "manifest.json":
        damaged = signed(mutate_tree(table, chance)) if chance.random() < 0.6 else mutate_text(good[name], chance)
        return {**files, name: damaged}
    if name == "tokenizer.json":
        tree = json.loads(good[name])
        files[name] = json.dumps(mutate_tree(tree, chance)).encode()
        if chance.random() < 0.4:
            files[name] = mutate_text(good[name], chance)
        table["tokenizer"]["sha256"] = sha256(files[name]).hexdigest()
    else:
        files[name] = mutate_bytes(good[name], chance)
        shard = table["splits"]["train"]["shards"][int(name[6:11])]
        shard["tokens_sha256" if "tokens" in name else "offsets_sha256"] = sha256(files[name]).hexdigest()
        if chance.random() < 0.5:  # and of a size that is right
            shard["tokens" if "tokens" in name else "documents"] = len(files[name]) // (
                2 if "tokens" in name else 8
            ) - ("offsets" in name)
    return {**files, "manifest.json": signed(table)}


def use(folder: Path, verify: bool) -> str | None:
    """Reads all that a run reads of it. Why it was refused, or None."""
    try:
        dataset = TokenDataset.open(folder, verify=verify)
        loader = Loader(dataset, seq_len=16, sequences_per_step=4, seed=0, document_mask=True, vocab_size=300)
        batches = [loader.step(step) for step in range(6)]
    except DataError as error:
        return str(error)
    assert all(0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < 300 for batch in batches)
    return None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 17))])
def test_mutated_shards_manifests_and_tokenizers(good: dict[str, bytes], tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    refused = 0
    for number in range(60):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in mutate(good, chance).items():
            (folder / name).write_bytes(content)
        with within_memory(LIMIT):
            said = use(folder, verify=chance.random() < 0.7)
        refused += said is not None
        assert said is None or (len(said) < 2000 and said.encode())
    assert refused > 25
