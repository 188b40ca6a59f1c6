"""The user's own cache folder: prepared corpora, compiled kernels and tuning tables have folders of their own in it."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/moegraph` where that is an absolute path, else `~/.cache/moegraph`; may not exist yet."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "moegraph"
