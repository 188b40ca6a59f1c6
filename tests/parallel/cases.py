"""The layouts under which a step must be the same: a covering set for every day, the product for `make test-all`."""

from __future__ import annotations

from itertools import product
from typing import Any

Case = dict[str, Any]

LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 1), (4, 4, 1), (1, 1, 2), (2, 2, 2)]  # dp, ep, pp
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v"]
RECOMPUTE = ["none", "full"]


def case(dp: int, ep: int, pp: int, count: int, schedule: str, recompute: str, transport: str) -> Case:
    """One layout, with what it needs around it."""
    found: Case = {"dp": dp, "ep": ep, "pp": pp, "microbatches": count, "schedule": schedule, "recompute": recompute}
    if ep > 1:
        found["transport"] = transport
        if transport != "exact":
            found["capacity"] = float(ep)
    return found


def valid(each: Case) -> bool:
    """Whether the rules of a layout allow it."""
    two_stages = each["schedule"] not in ("gpipe", "1f1b")
    if each["pp"] == 1:
        return not two_stages
    least = each["pp"] * (2 if each["schedule"] == "dual_pipe_v" else 1)
    return bool(each["microbatches"] >= least)


def every_case() -> list[Case]:
    """The product of layouts, accumulation {1, 4}, schedules, recomputation and transports."""
    found = []
    for (dp, ep, pp), count, schedule, recompute in product(LAYOUTS, (1, 4), SCHEDULES, RECOMPUTE):
        for transport in ("exact", "padded") if ep > 1 else ("exact",):
            each = case(dp, ep, pp, count, schedule, recompute, transport)
            if valid(each):
                found.append(each)
    return found


def pairs_of(each: Case) -> set[tuple[Any, ...]]:
    """Every two choices that a case joins. A schedule runs graphs without looking into them, so it need not meet every
    transport."""
    keys = ("dp", "ep", "pp", "microbatches", "recompute", "schedule")
    choices: list[tuple[str, Any]] = [(key, each[key]) for key in keys]
    pairs: set[tuple[Any, ...]] = {(a, b) for i, a in enumerate(choices) for b in choices[i + 1 :]}
    pairs.add(("layout", each["dp"], each["ep"], each["pp"]))
    if "transport" in each:
        pairs |= {(choice, each["transport"]) for choice in choices[:-1]}
    return pairs


def covering_cases() -> list[Case]:
    """A small set in which every two choices that go together occur together (greedy, in a fixed order)."""
    left = every_case()
    wanted = set().union(*(pairs_of(each) for each in left))
    chosen: list[Case] = []
    while wanted:
        best = max(left, key=lambda each: len(pairs_of(each) & wanted))
        chosen.append(best)
        wanted -= pairs_of(best)
    return chosen


def name_of(each: Case) -> str:
    """A test's name."""
    transport = f"-{each['transport']}" if "transport" in each else ""
    return (
        f"dp{each['dp']}-ep{each['ep']}-pp{each['pp']}-x{each['microbatches']}-{each['schedule']}-"
        f"{each['recompute']}{transport}"
    )
