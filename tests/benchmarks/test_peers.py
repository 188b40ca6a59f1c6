"""Peers files: which names a peer may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegraph.benchmarks.peers import load_peers
from moegraph.errors import UsageError


@pytest.mark.parametrize(("number", "name"), list(enumerate(["moegraph", "copy", "a|b"])))
def test_a_peer_cannot_take_the_place_of_another_row(number: int, name: str, tmp_path: Path) -> None:
    file = tmp_path / f"taken_names_{number}.py"
    file.write_text(
        "class Peer:\n    name = " + repr(name) + "\n    def setup(self, *a): pass\n    def fwd(self, *a): pass\n"
    )
    with pytest.raises(UsageError, match="rename the class"):
        load_peers([file], [name])
