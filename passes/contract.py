"""What a pass is, and what it is told and answers.

A pass expects a valid graph and leaves a valid graph. It declares the level it works on, what must have run before it
(`requires`), what it adds (`provides`), what it takes away (`removes`), after what it can no longer run (`conflicts`),
and its tier: `exact` (the numbers stay bitwise the same on a CPU) or `close` (they stay within a stated bound).
Requirements are names of properties of the program; tracing provides "joint", and `split-backward` removes it and
provides "split".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from moegraph.graph.program import Instance, Program, Unit
from moegraph.passes.options import build_from_options
from moegraph.specs.schema import Spec

Level = Literal["layer", "step"]
Tier = Literal["exact", "close"]


@dataclass(frozen=True)
class PassContext:
    """What a pass may look at besides its graph: the spec and the program as it was before the pass."""

    program: Program

    @property
    def spec(self) -> Spec:
        """The spec of the run."""
        return self.program.spec


@dataclass(frozen=True)
class PassResult:
    """The rewritten unit, the names of the nodes that were added, replaced or removed, and of the blocks that changed
    their stage; and, where there are none, why."""

    unit: Unit
    rewritten: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite of one kind of block. Subclasses are frozen dataclasses whose fields are the pass's options.

    A pass that requires what another one removes runs before that one; nothing needs to be said twice.
    """

    name: ClassVar[str]
    level: ClassVar[Level]
    tier: ClassVar[Tier] = "exact"
    tolerance: ClassVar[float] = 0.0  # largest relative difference of outputs and gradients; 0 for `exact`
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    removes: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def from_spec(cls, spec: Spec) -> Pass | None:
        """The pass as the spec's `passes:` section configures it, or None when it is switched off.

        As it stands here, for users' passes: the fields are filled from `passes.custom.NAME.options`. Raises UsageError
        for options that do not exist, are missing, or are of the wrong type.
        """
        custom = spec.passes.custom.get(cls.name)
        if custom is not None and not custom.enabled:
            return None
        return build_from_options(cls, cls.name, custom.options if custom is not None else {})

    def bound(self, compute: str) -> float:
        """The largest relative difference where the spec computes in `compute` (bf16, fp32 or fp64).

        As it stands here: `tolerance`, whatever the dtype.
        """
        return self.tolerance

    @abstractmethod
    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        """The unit after the rewrite. The unit given is not changed."""

    def place(self, program: Program) -> tuple[Instance, ...]:
        """The blocks of the program, each with its pipeline stage; called once, with the program before the pass.

        As it stands here: where they are. A pass that moves blocks names them in what `apply` says it rewrote.
        """
        return program.instances
