"""Several ranks in one process: what they exchange, and that faults no single rank could see are found and named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, fx

from moegraph import ops
from moegraph.compiled import Compiled, compile
from moegraph.errors import CheckFailed
from moegraph.graph.edit import clone
from moegraph.graph.names import display_name
from moegraph.graph.program import Unit
from moegraph.passes import PassResult
from moegraph.passes.dispatch_experts import DispatchExperts
from moegraph.passes.pipeline import run_pipeline
from moegraph.verify import distributed
from moegraph.verify.distributed import check_tight_buckets, execute_ranks, prepare
from moegraph.verify.inputs import local_inputs, random_inputs
from moegraph.verify.passes import verify_records, verify_spec
from moegraph.verify.run import deterministic_threads, execute, run_graph
from moegraph.verify.stages import prove_stages
from moegraph.verify.world import Rank, World
from tests.everyday import everyday
from tests.small_models import small_spec

SHORT = ("model.num_layers=1", "model.dense=null", "data.seq_len=8", "train.tokens_per_step=32")
PADDED = "layout={dp: 2, ep: 2, transport: padded, capacity: 2}"
EXACT = "layout={dp: 2, ep: 2}"
WAYS = {
    "padded": (PADDED,),
    "exact": (EXACT, "passes.recompute.policy=full"),
    "drop": ("layout={dp: 2, ep: 2, transport: padded, capacity: 2, overflow: drop}",),
    "four ranks in fp32": ("layout={dp: 4, ep: 4, transport: padded, capacity: 4}", "precision.compute=fp32"),
    "bf16, fused": (PADDED, "precision.compute=bf16", "passes.fuse-experts={enabled: true}"),
}
BOUNDS = {"four ranks in fp32": 1e-4, "bf16, fused": 1e-2}


@cache
def compiled_way(way: str) -> Compiled:
    """One layer of experts, spread over ranks."""
    return compile(small_spec(*SHORT, *WAYS[way]))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """And no rank is left behind."""
    before = threading.active_count()
    with deterministic_threads():
        yield
    assert threading.active_count() == before


def exchange(rank: Rank, value: float, name: str = "x", rows: int = 1) -> list[float]:
    """One row of `value` to each of two ranks."""
    rank.at(name, "all_to_all")
    return rank.all_to_all(torch.full((2 * rows, 1), value), [rows] * 2, [rows] * 2, "ep").flatten().tolist()


# --- the world itself --------------------------------------------------------------------------------------------


def test_each_rank_gets_what_the_others_sent_to_it() -> None:
    def work(rank: Rank) -> Tensor:
        sizes = [[1, 2], [3, 0]]  # rows from rank to rank
        x = torch.tensor([10.0 * rank.index + place for place in range(3)])
        return rank.all_to_all(x, [row[rank.index] for row in sizes], sizes[rank.index], "ep")

    first, second = World(2).run(work)
    assert first.tolist() == [0.0, 10.0, 11.0, 12.0]
    assert second.tolist() == [1.0, 2.0]


def test_another_number_of_rows_than_expected_names_both_ranks() -> None:
    def work(rank: Rank) -> Tensor:
        rank.at("moe.dispatch_start", "all_to_all")
        send, receive = ([1, 1], [1, 1]) if rank.index == 0 else ([1, 1], [2, 1])
        return rank.all_to_all(torch.zeros(2, 4), receive, send, "ep")

    with pytest.raises(CheckFailed, match=r"rank 0 sends 1 rows to rank 1 in moe\.dispatch_start .* rank 1 expects 2"):
        World(2).run(work)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            lambda rank: [exchange(rank, 1.0, name) for name in (("a", "b") if rank.index else ("b", "a"))],
            r"rank 0 is at b = all_to_all\(.*\), rank 1 is at a = all_to_all",
        ),
        (lambda rank: rank.index or exchange(rank, 1.0, "a"), r"rank 0 is at a = .*, rank 1 has ended"),
        (lambda rank: exchange(rank, 1.0, "a", rows=1 + rank.index), r"rank 0 sends 1 rows to rank 1 in a = "),
    ],
)
def test_another_order_a_missing_collective_and_another_size_are_named(
    work: Callable[[Rank], object], message: str
) -> None:
    with pytest.raises(CheckFailed, match=message):
        World(2).run(work)


@pytest.mark.parametrize("at", ["before", "between", "after"])
def test_a_rank_that_raises_ends_the_others_and_is_named(at: str) -> None:
    def work(rank: Rank) -> None:
        for moment in ("before", "between", "after"):
            if moment == at and rank.index == 1:
                raise ZeroDivisionError("mine")
            if moment != "after":
                exchange(rank, 1.0)

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        World(2).run(work)
    assert caught.value.__notes__ == ["in rank 1 of a simulated world of 2"]


def test_a_world_gives_the_same_values_in_every_run() -> None:
    unit = compiled_way("padded").program.units["moe"]
    inputs = [random_inputs(compiled_way("padded").program, unit.layer_graph, 0, rank) for rank in range(2)]
    runs = [execute_ranks(unit, inputs) for _ in range(3)]
    for again in runs[1:]:
        for one, other in zip(runs[0], again, strict=True):
            assert all(torch.equal(value, other.results[port]) for port, value in one.results.items())


# --- proofs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", everyday(WAYS))
def test_every_pass_holds_on_all_ranks_and_its_planted_fault_is_found(way: str) -> None:
    rows = {row.name: row for row in verify_records(list(compiled_way(way).records))}
    for row in rows.values():
        assert row.ok, row
        assert row.planted_found is not False
    dispatch = rows["dispatch-experts"]
    assert dispatch.tolerance == BOUNDS.get(way, 1e-10)
    assert dispatch.planted_found
    assert 0.0 < dispatch.gradient_difference < dispatch.tolerance
    for name in ("trace", "recompute", "split-backward"):
        assert rows[name].output_difference == rows[name].gradient_difference == 0.0


def test_ranks_have_other_tokens_and_the_same_weights() -> None:
    before, after = (compiled_way("padded").record(name).program for name in ("balance-losses", "dispatch-experts"))
    unit = after.units["moe"]
    first, second = (random_inputs(after, unit.layer_graph, 0, rank) for rank in range(2))
    for port, value in first.items():
        assert torch.equal(value, second[port]) is (port.role in ("parameter", "buffer") or port.name in FIXED), port
    whole = random_inputs(before, before.units["moe"].layer_graph, 0)
    w_up = next(port for port in whole if port.name == "moe.w_up")
    parts = [local_inputs(each, unit, rank)[w_up] for rank, each in enumerate((first, second))]
    assert torch.equal(torch.cat(parts), whole[w_up])


FIXED = ("positions", "document_ids")


def verdict_note(unit_of: Callable[[Unit], Unit], monkeypatch: pytest.MonkeyPatch) -> tuple[bool, str]:
    """The verdict on `dispatch-experts` where what it leaves is changed by `unit_of`."""
    original = DispatchExperts.apply

    def apply(self: DispatchExperts, unit: Unit, context: object) -> PassResult:
        result = original(self, unit, context)  # type: ignore[arg-type]
        return replace(result, unit=unit_of(result.unit)) if result.rewritten else result

    monkeypatch.setattr(DispatchExperts, "apply", apply)
    program = compiled_way("padded").record("lower").program
    passes = [DispatchExperts(2, "padded", 2.0, drop=False)]
    verdict = verify_records(run_pipeline(program.with_units({"moe": program.units["moe"]}), passes), plant=False)[0]
    return verdict.ok, verdict.first_difference or verdict.note


def edited(unit: Unit, edit: Callable[[fx.GraphModule], None]) -> Unit:
    """The unit with a layer graph that is edited."""
    module = clone(unit.graphs["layer"])
    edit(module)
    module.recompile()
    return unit.with_graphs({"layer": module})


def test_rows_that_return_from_the_wrong_place_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip_return(module: fx.GraphModule) -> None:
        nodes = {display_name(node): node for node in module.graph.nodes}
        nodes["moe.returned"].replace_input_with(nodes["moe.return"], nodes["moe.local_results"])

    ok, note = verdict_note(lambda unit: edited(unit, skip_return), monkeypatch)
    assert not ok
    assert "moe.combine" in note or "moe.returned" in note


def test_a_wrong_slice_of_the_expert_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = (compiled_way("padded").record(name).program for name in ("balance-losses", "dispatch-experts"))
    trial = prepare(before, before.units["moe"], after.units["moe"], 0)
    assert trial.difference(execute_ranks(after.units["moe"], trial.inputs), 1e-10).within(1e-10)
    original = distributed.local_inputs
    monkeypatch.setattr(distributed, "local_inputs", lambda inputs, unit, rank: original(inputs, unit, 1 - rank))
    difference = trial.difference(execute_ranks(after.units["moe"], trial.inputs), 1e-10)
    assert difference.outputs > 0.1
    assert difference.first_node == "moe.returned" or difference.first_node == "moe.combine"


def on_rank_one(edit: Callable[[fx.Graph], None]) -> Callable[[Rank], object]:
    """The forward graph of a block, other on rank 1 than on rank 0."""
    program = compiled_way("padded").program
    unit = program.units["moe"]
    other = clone(unit.graphs["forward"])
    edit(other.graph)
    other.recompile()

    def work(rank: Rank) -> object:
        inputs = local_inputs(random_inputs(program, unit.layer_graph, 0, rank.index), unit, rank.index)
        return run_graph(other if rank.index else unit.graphs["forward"], inputs)

    return work


def start_of(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if display_name(node) == f"moe.{name}_start/all_to_all_single")


def test_a_collective_that_one_ranks_graph_has_not_is_named() -> None:
    def leave_out(graph: fx.Graph) -> None:
        start = start_of(graph, "dispatch_weights")
        (wait,) = start.users
        wait.replace_all_uses_with(start.args[0])
        graph.erase_node(wait)
        graph.erase_node(start)

    message = r"rank 0 is at moe\.dispatch_weights_start/.* 'ep'\), rank 1 is at moe\.return_start/all_to_all_single"
    with pytest.raises(CheckFailed, match=message):
        World(2).run(on_rank_one(leave_out))


def test_collectives_in_another_order_on_one_rank_are_named() -> None:
    def counts_after_rows(graph: fx.Graph) -> None:
        counts, rows = start_of(graph, "counts"), start_of(graph, "dispatch")
        (wait,) = counts.users
        rows.append(wait)
        rows.append(counts)

    message = r"rank 0 is at moe\.counts_start/.*, rank 1 is at moe\.dispatch_start/"
    with pytest.raises(CheckFailed, match=message):
        World(2).run(on_rank_one(counts_after_rows))


def test_a_disagreement_is_a_verdict_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Rank.at

    def at(self: Rank, node: str, operator: str) -> None:
        original(self, f"{node}.{self.index}" if "moe.counts" in node else node, operator)

    monkeypatch.setattr(Rank, "at", at)
    rows = verify_records(list(compiled_way("padded").records), plant=False)
    broken = {row.name for row in rows if not row.ok}
    assert {"dispatch-experts", "trace", "split-backward"} <= broken
    assert "rank 0 is at moe.counts_start.0" in next(row.note for row in rows if row.name == "dispatch-experts")
    (proof,) = prove_stages(compiled_way("padded").program, 0)
    assert not proof.ok
    assert "rank 0 is at moe.counts_start/all_to_all_single.0" in str(proof)


# --- overflow ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["padded", "drop", "four ranks in fp32"])
def test_rows_that_do_not_fit_are_counted(way: str) -> None:
    record = compiled_way(way).record("dispatch-experts")
    before = compiled_way(way).record("balance-losses").program
    assert isinstance(record.made_by, DispatchExperts)
    lost, problems = check_tight_buckets(record.made_by, before, before.units["moe"], 0)
    assert lost > 0
    assert problems == []


def test_a_wrong_count_of_lost_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = distributed.lost_rows
    monkeypatch.setattr(distributed, "lost_rows", lambda execution: original(execution) - 1)
    row = next(
        r for r in verify_records(list(compiled_way("padded").records)[:4], plant=False) if r.name == "dispatch-experts"
    )
    assert not row.ok
    assert "rows of rank 0 do not fit, and" in row.note


# --- stages ------------------------------------------------------------------------------------------------------


def test_every_stage_says_what_it_exchanges() -> None:
    layout = "layout={dp: 2, ep: 2, pp: 2, microbatches: 2, stages: 'embedding,0|1,head', transport: padded}"
    report = verify_spec(small_spec("model.num_layers=2", *SHORT[2:], layout), plant=False)
    assert report.ok
    assert report.layout.startswith("world 4 = dp 2 × pp 2, ep 2, transport padded, capacity 2")
    first, second = report.stages
    assert (first.ranks, first.blocks, first.group, first.forward) == ((0, 1), "embedding, layers.0", "", 0)
    assert (second.ranks, second.group, second.forward, second.backward) == ((2, 3), "ep", 4, 3)
    assert str(second).endswith("in one order on all 2 ranks; no host synchronisation")
    moved = next(row for row in report.rows if row.name == "split-pipeline")
    assert (moved.rewritten, moved.ok) == (2, True)


def test_the_waits_of_transport_exact_are_said() -> None:
    (proof,) = prove_stages(compiled_way("exact").program, 0)
    assert proof.ok
    assert "the host waits 6 times, for the counts of transport exact" in str(proof)


def test_a_block_without_collectives_needs_no_world() -> None:
    unit = compiled_way("padded").program.units["head"]
    inputs = random_inputs(compiled_way("padded").program, unit.layer_graph, 0)
    assert execute(unit, inputs).results.keys() == execute_ranks(unit, [inputs])[0].results.keys()
    assert ops.all_to_all_start not in {node.target for node in unit.layer_graph.graph.nodes}
