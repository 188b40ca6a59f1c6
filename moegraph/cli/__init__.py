"""The `moegraph` command: each subcommand in a file of its own, torch imported only by those that need it."""

from __future__ import annotations

from moegraph.cli.main import main, run

__all__ = ["main", "run"]
