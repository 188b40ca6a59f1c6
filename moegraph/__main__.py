"""`python -m moegraph` is the `moegraph` command."""

from __future__ import annotations

from moegraph.cli import main

if __name__ == "__main__":
    main()
