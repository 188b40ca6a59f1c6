"""`moegraph inspect SPEC --shards`: over which ranks each parameter is reduced, and what of it each of them keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moegraph.cli.output import counted, print_json, print_table

if TYPE_CHECKING:
    from moegraph.graph.program import Program


def print_shards(program: Program, *, as_json: bool) -> None:
    """Prints, for the first rank of each pipeline rank, its families of parameters."""
    rows = [row for pp_rank in range(program.spec.layout.pp) for row in _rows(program, pp_rank)]
    if as_json:
        print_json({"families": rows})
        return
    columns = [">pp rank", "family", ">parameters", ">elements", "summed over", ">ranks", ">shard", "first … last"]
    print_table(columns, [_cells(row) for row in rows])
    print(
        "\nelements: on each rank; shard: what of the gradients, masters and moments a rank keeps. Experts are spread"
    )
    print(f"over ep {program.spec.layout.ep} first, so that each of their replicas sees the tokens of that many ranks.")


def _rows(program: Program, pp_rank: int) -> list[dict[str, Any]]:
    import torch

    from moegraph.graph.placement import stages_of_rank
    from moegraph.runtime.families import plan_families
    from moegraph.runtime.mesh import Mesh, axis_ranks

    layout = program.spec.layout
    rank = pp_rank * layout.dp
    mesh = Mesh(layout.dp, layout.ep, layout.pp, rank)
    stages = stages_of_rank(layout, pp_rank)
    mine = [each for each in program.instances if each.stage in stages]
    names = dict.fromkeys(name for each in mine for name in each.parameters.values())
    groups = axis_ranks(layout.dp, layout.ep, layout.pp)
    found = []
    for family in plan_families([program.parameters[n] for n in names if program.parameters[n].trained], mesh):
        buffer = family.buffer(family.dtype, torch.device("meta"))
        axis = "edp" if family.name.startswith("experts") else "dp"
        ranks = next(ranks for ranks in groups[axis] if rank in ranks)
        found.append(
            {
                "pp_rank": pp_rank,
                "family": family.name,
                "axis": axis,
                "ranks": ranks,
                "elements": sum(buffer[p.name].numel() for p in family.parameters),
                "shard": buffer.flat.numel() // family.ranks,
                "parameters": [p.name for p in family.parameters],
            }
        )
    return found


def _cells(row: dict[str, Any]) -> list[Any]:
    names = row["parameters"]
    over = ", ".join(map(str, row["ranks"][:8])) + (" …" if len(row["ranks"]) > 8 else "")
    ends = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    return [
        row["pp_rank"],
        row["family"],
        len(names),
        counted(row["elements"]),
        f"{row['axis']}: {over}",
        len(row["ranks"]),
        counted(row["shard"]),
        ends,
    ]
