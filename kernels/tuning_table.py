"""A tuning table: per shape class the configuration that was fastest on one card, and what it was measured against.

    {"format": "moegraph-tuning", "format_version": 1, "card": "NVIDIA H200", "capability": 90, "entries": [{
      "kernel": "wgrad", "dtype": "bf16", "n": 2048, "k": 1024, "rows_per_expert": 2048,   the shape class
      "backend": "triton",                              or "_grouped_mm", where torch's grouped kernel was faster
      "config": {"block_m": 128, …},                    the best of moegraph's kernel
      "milliseconds": 1.53, "tflops": 718.0,            of that configuration
      "against": {"rule": 1.60, "_grouped_mm": 1.66},   milliseconds of others, timed in turn with it
      "rows": 262144, "experts": 128,                   the size it was measured at
      "versions": {"moegraph": "0.1.0", "torch": "2.11.0", "triton": "3.6.0"}, "date": "2026-07-01"}]}

Contract: a table is data. It is read strictly (every key known and there, every value of its type and within bounds) or
refused with a sentence that names the file and the place; nothing in it is ever executed. It is written aside and
renamed, so it is whole or absent.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from moegraph.errors import RunError
from moegraph.kernels.chips import Card
from moegraph.kernels.config import Config
from moegraph.kernels.shapes import DTYPES, KERNELS, ROWS_PER_EXPERT, TORCH_HAS, ShapeClass, rows_class
from moegraph.kernels.strict_json import Refused, anything, matching, object_of, one_of, parse, positive, whole

FORMAT, FORMAT_VERSION = "moegraph-tuning", 1
BACKENDS = ("triton", "_grouped_mm")
MAX_BYTES = 4 << 20
_CLASS = ("kernel", "dtype", "n", "k", "rows_per_expert")
_VERSIONS = ("moegraph", "torch", "triton")
_AGAINST = ("rule", "_grouped_mm")
_SEPARABLE = ("up_swiglu", "dgrad_swiglu")  # kernels that can leave what is fused into them to a kernel of its own
_SLICED = ("grouped_mm", "grouped_mm_dgrad", "dgrad_swiglu")  # kernels whose epilogue can work in column slices


@dataclass(frozen=True)
class Entry:
    """What was measured for a shape class. `milliseconds` and `tflops` are of `config`; `against` holds milliseconds of
    the rule's configuration (`rule`) and of torch's kernel (`_grouped_mm`) in the same run."""

    shape: ShapeClass
    backend: str
    config: Config
    milliseconds: float
    tflops: float
    against: Mapping[str, float]
    rows: int
    experts: int
    versions: Mapping[str, str]
    date: str

    def reason(self, card: str) -> str:
        """The figures in one sentence."""
        kernel = f"{self.milliseconds:.3f} ms ({self.tflops:.0f} TFLOP/s)"
        others = [f"{ms:.3f} ms {'by rule' if name == 'rule' else name}" for name, ms in self.against.items()]
        where = f"measured on {card}, {self.date}, torch {self.versions['torch']}, Triton {self.versions['triton']}"
        return f"{kernel}" + (f" against {' and '.join(others)}" if others else "") + f"; {where}"


@dataclass(frozen=True)
class Table:
    """The entries of one card, at most one per shape class."""

    card: Card
    entries: Mapping[ShapeClass, Entry]

    def with_entries(self, new: Iterable[Entry]) -> Table:
        """The table with these entries in the place of those of the same classes."""
        return Table(self.card, {**self.entries, **{entry.shape: entry for entry in new}})


def read_table(path: Path) -> Table:
    """The table in a file. Raises RunError, which names the file, if it is not exactly one."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RunError(f"the tuning table {path} cannot be read: {error.strerror or error}") from error
    try:
        if len(raw) > MAX_BYTES:
            raise Refused(f"it is larger than {MAX_BYTES >> 20} MiB")
        return _table(parse(raw))
    except Refused as error:
        remedy = "remove it, and measure again with `moegraph bench tune`"
        raise RunError(f"the tuning table {path} is refused: {error}; {remedy}") from error


def write_table(path: Path, table: Table) -> None:
    """Writes the file in one rename. Raises RunError if that cannot be done."""
    entries = sorted(map(_entry_json, table.entries.values()), key=lambda entry: [entry[key] for key in _CLASS])
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "card": table.card.name}
    data = {**head, "capability": table.card.capability, "entries": entries}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            partial = Path(file.name)
            try:
                file.write(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise RunError(f"the tuning table {path} cannot be written: {error.strerror or error}") from error


def _entry_json(entry: Entry) -> dict[str, Any]:
    rest = {field.name: getattr(entry, field.name) for field in fields(Entry) if field.name != "shape"}
    made = {"config": asdict(entry.config), "against": dict(entry.against), "versions": dict(entry.versions)}
    return {**entry.shape.to_json(), **rest, **made}


_TEXT = matching(r"[^\x00-\x1f]{1,100}", "a line of text of at most 100 characters")
_BLOCK = one_of(16, 32, 64, 128, 256, 512)
_CONFIG = {
    "block_m": _BLOCK,
    "block_n": _BLOCK,
    "block_k": _BLOCK,
    "num_warps": one_of(1, 2, 4, 8, 16),
    "num_stages": whole(1, 8),
    "group_m": whole(1, 64),
    "parts": one_of(1, 2, 4),
    "flatten": one_of(True, False),
    "separate": one_of(True, False),
}
_ENTRY = object_of(
    {
        "kernel": one_of(*KERNELS),
        "dtype": one_of(*DTYPES),
        "n": whole(1, 2**31),
        "k": whole(1, 2**31),
        "rows_per_expert": one_of(*ROWS_PER_EXPERT),
        "backend": one_of(*BACKENDS),
        "config": object_of(_CONFIG),
        "milliseconds": positive,
        "tflops": positive,
        "against": object_of(dict.fromkeys(_AGAINST, positive), partial=True),
        "rows": whole(1, 2**40),
        "experts": whole(1, 2**20),
        "versions": object_of(dict.fromkeys(_VERSIONS, _TEXT)),
        "date": matching(r"\d{4}-\d\d-\d\d", "a date such as 2026-07-01"),
    }
)
_TABLE = object_of(
    {
        "format": one_of(FORMAT),
        "format_version": one_of(FORMAT_VERSION),
        "card": _TEXT,
        "capability": whole(10, 999),
        "entries": anything(list, "a list"),
    }
)


def _table(data: Any) -> Table:
    if isinstance(data, dict) and data.get("format") == FORMAT:  # before its keys: another version may have others
        one_of(FORMAT_VERSION)(data.get("format_version"), "format_version")
    _TABLE(data, "the table")
    entries: dict[ShapeClass, Entry] = {}
    for i, each in enumerate(data["entries"]):
        entry = _entry(each, f"entries[{i}]")
        if entry.shape in entries:
            raise Refused(f"entries[{i}] is the second one for {entry.shape}")
        entries[entry.shape] = entry
    return Table(Card(data["card"], data["capability"]), entries)


def _entry(data: Any, where: str) -> Entry:
    _ENTRY(data, where)
    rest = dict(data)
    kernel, dtype, n, k, rows_per_expert = (rest.pop(key) for key in _CLASS)
    shape = ShapeClass(kernel, DTYPES[dtype], n, k, rows_per_expert)
    config = Config(**rest.pop("config"))
    if config.separate and kernel not in _SEPARABLE:
        raise Refused(f"{where}.config: {kernel} has nothing that could be separate")
    sliced = kernel in _SLICED or (kernel != "dgrad_swiglu" and dtype == "fp8")
    most = 4 if kernel == "dgrad_swiglu" and not config.separate else 2 if sliced else 1
    if config.parts > most or config.block_n // config.parts < 16:
        raise Refused(f"{where}.config: {kernel} cannot store {config.block_n} columns in {config.parts} parts")
    if rows_class(rest["rows"], rest["experts"]) != shape.rows_per_expert:
        raise Refused(f"{where}: {rest['rows']} rows over {rest['experts']} experts are not {shape.rows_text} each")
    if rest["backend"] != "triton":
        if shape.kernel not in TORCH_HAS or dtype != "bf16":
            raise Refused(f"{where}: torch has no grouped kernel for {shape.kernel} in {dtype}")
        if "_grouped_mm" not in rest["against"]:
            raise Refused(f"{where}.against lacks '_grouped_mm', the backend that it chooses")
    return Entry(shape=shape, config=config, **rest)
