"""What would run anywhere: every entry of the shipped tables, and the rules at every preset, compiled for each chip.

Minutes of compiling: `make test-all`. `make test` has the rules at one shape (`test_compiled.py`).
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from moegraph.benchmarks.shapes import PRESETS
from moegraph.kernels.candidates import candidates
from moegraph.kernels.chips import CHIPS, Card
from moegraph.kernels.compiled import KernelReport, compile_launch
from moegraph.kernels.config import shared_memory
from moegraph.kernels.products import product_launch
from moegraph.kernels.shapes import Problem, block_problems
from moegraph.kernels.tuning import SHIPPED, choose_for
from moegraph.kernels.tuning_table import Entry, read_table

pytestmark = pytest.mark.slow


def problems_of(preset: str) -> dict[str, Problem]:
    s = PRESETS[preset]
    return block_problems(tokens=s.tokens, d_model=s.d_model, d_ff=s.d_ff, num_experts=s.experts, top_k=s.top_k)


PROBLEMS = {problem.shape: problem for preset in PRESETS for problem in problems_of(preset).values()}
TABLES = [read_table(Path(str(resources.files("moegraph.kernels"))) / "tables" / name) for name in SHIPPED.values()]
ENTRIES = [pytest.param(table.card, each, id=str(each.shape)) for table in TABLES for each in table.entries.values()]


def check(report: KernelReport, capability: int) -> None:
    assert report.fits, report
    assert report.matrix_instruction == CHIPS[capability].matrix_instruction, report
    assert report.asynchronous_loads, report


@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=map(str, PROBLEMS))
def test_the_rule_fits_at_every_preset(problem: Problem, capability: int) -> None:
    config = choose_for(problem, Card("nobody's", capability)).config
    check(compile_launch(product_launch(problem, config), capability), capability)


@pytest.mark.parametrize(("card", "entry"), ENTRIES)
def test_every_entry_of_a_shipped_table_fits_its_card(card: Card, entry: Entry) -> None:
    s = entry.shape
    problem = Problem(s.kernel, s.dtype, s.n, s.k, entry.rows, entry.experts, tokens=entry.rows)
    check(compile_launch(product_launch(problem, entry.config), card.capability), card.capability)


@pytest.mark.parametrize("capability", [90, 103])
@pytest.mark.parametrize("problem", problems_of("A").values(), ids=problems_of("A"))
def test_candidates_near_the_rule_compile_and_take_about_the_memory_that_was_estimated(
    problem: Problem, capability: int
) -> None:
    found = candidates(problem.kernel, problem.dtype, problem.n, problem.k, capability)
    for config in found[1:40:8]:
        report = compile_launch(product_launch(problem, config), capability)
        estimate, tile = (
            shared_memory(problem.kernel, config, problem.dtype, capability),
            config.block_m * config.block_n,
        )
        assert report.shared_bytes <= estimate + tile * problem.dtype.itemsize + 128, config
