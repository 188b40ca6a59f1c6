"""What `inspect` shows of a run: its last record, or the load of its experts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from moegraph.cli.output import print_json
from moegraph.errors import UsageError


def print_run(folder: Path, *, router: bool, as_json: bool) -> None:
    """Prints the run in `folder`. Raises UsageError if it has no record, and for `router` if it has no experts."""
    from moegraph.runtime.run_log import MANIFEST, METRICS, read_manifest, read_records

    records = read_records(folder)
    if not records:
        raise UsageError(f"the run in {folder} has written no record yet")
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else None
    try:
        _show(folder, records, manifest, router=router, as_json=as_json)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise UsageError(f"{folder}: its {MANIFEST} or {METRICS} is not what a run writes ({what})") from error


def _show(
    folder: Path, records: list[dict[str, Any]], manifest: dict[str, Any] | None, *, router: bool, as_json: bool
) -> None:
    from moegraph.runtime.router_view import router_json, router_text

    if router:
        if as_json:
            print_json({"run": str(folder), **router_json(records)})
        else:
            unicode = (sys.stdout.encoding or "").lower().startswith("utf")
            print(router_text(records, shutil.get_terminal_size((100, 24)).columns, unicode=unicode))
    elif as_json:
        print_json({"run": str(folder), "records": len(records), "last": records[-1], "manifest": manifest})
    else:
        _print(folder, records, manifest)


def _print(folder: Path, records: list[dict[str, Any]], manifest: dict[str, Any] | None) -> None:
    from moegraph.runtime.progress import format_record

    last = records[-1]
    steps = last["step"]
    if manifest is not None:
        steps = manifest["spec"]["train"]["steps"]
        parameters = manifest["parameters"]
        versions = manifest["versions"]
        print(f"run         {folder}, started {manifest['started']}")
        print(f"parameters  {parameters['total']:,}, of which a token meets {parameters['active']:,}")
        print(f"device      {manifest['device']}, torch {versions.get('torch', 'unknown')}")
    print(f"last        {format_record(last, steps)}")
    for name, key in (("loss", "loss"), ("validation", "validation_loss")):
        values = [(r["step"], r[key]) for r in records if r.get(key) is not None]
        if len(values) > 1:
            (first_step, first), (last_step, final) = values[0], values[-1]
            print(f"{name:<11} {first:.4f} at step {first_step} → {final:.4f} at step {last_step}")
    if manifest is not None and manifest["spec"]["model"]["moe"] is not None:
        print(f"experts     `moegraph inspect {folder} --router` draws their load")
