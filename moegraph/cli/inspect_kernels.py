"""`moegraph inspect SPEC --kernels`: what each grouped product of a spec runs on, with which configuration, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moegraph.cli.output import print_json, print_table
from moegraph.errors import UsageError

if TYPE_CHECKING:
    from moegraph.compiled import Compiled
    from moegraph.runtime.grouped_products import Product, Resolved


def print_kernels(compiled: Callable[[], Compiled], arch: str | None, kind: str | None, *, as_json: bool) -> None:
    """Prints the products of a spec as a chip would run them; `compiled` is called once `arch` is known to be good."""
    from moegraph.kernels.chips import CHIPS, card_for
    from moegraph.runtime.grouped_products import grouped_products, resolve

    card = card_for(arch)
    program = compiled().program
    if kind is not None and kind not in program.units:
        raise UsageError(f"this spec has no block of kind {kind!r}: there are {', '.join(program.units)}")
    products = [product for product in grouped_products(program) if kind in (None, product.kind)]
    found = [(product, resolve(product, card)) for product in products]
    if as_json:
        products_json = [_json(product, resolved) for product, resolved in found]
        print_json({"chip": CHIPS[card.capability].title, "card": card.name, "products": products_json})
        return
    if not found:
        print("no grouped products: these blocks have no experts")
        return
    print(f"for {CHIPS[card.capability].title}, {card.name}")
    for each in dict.fromkeys((product.kind, product.instances) for product in products):
        print(f"\n{each[0]} — {each[1]}")
        columns = ["graph", "node", "kernel", "dtype", ">n", ">k", "rows/expert", "backend", "configuration", "source"]
        print_table(columns, [_row(product, resolved) for product, resolved in found if product.kind == each[0]])
    print()
    for reason, nodes in _reasons(found).items():
        print(f"{', '.join(nodes)}: {reason}")


def _row(product: Product, resolved: Resolved) -> list[str]:
    shape, choice = resolved.problem.shape, resolved.choice
    row = [product.graph, product.node, shape.kernel, shape.dtype_name, str(shape.n), str(shape.k), shape.rows_text]
    return [*row, resolved.backend, str(choice.config) if choice else "–", choice.source if choice else "–"]


def _reasons(found: list[tuple[Product, Resolved]]) -> dict[str, list[str]]:
    """Every reason once, with the kernels it is given for."""
    reasons: dict[str, dict[str, None]] = {}
    for _, resolved in found:
        texts = [f"{resolved.backend}: {resolved.reason}"]
        texts += [f"configuration {resolved.choice.reason}"] if resolved.choice else []
        for text in texts:
            p = resolved.problem
            reasons.setdefault(text, {})[f"{p.kernel} {p.n}×{p.k}"] = None
    return {reason: list(kernels) for reason, kernels in reasons.items()}


def _json(product: Product, resolved: Resolved) -> dict[str, Any]:
    problem, choice = resolved.problem, resolved.choice
    where = {"kind": product.kind, "instances": product.instances, "graph": product.graph, "node": product.node}
    return {
        **where,
        **problem.shape.to_json(),
        "rows": problem.rows,
        "experts": problem.experts,
        "backend": resolved.backend,
        "reason": resolved.reason,
        "choice": choice and {**choice._asdict(), "config": asdict(choice.config)},
    }
