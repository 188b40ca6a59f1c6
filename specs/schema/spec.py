"""The whole spec."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moegraph.specs.schema.base import Section
from moegraph.specs.schema.model import Model
from moegraph.specs.schema.run import Checkpoint, Data, Layout, Passes, Precision, Train


class Spec(Section):
    """A model, its parallel layout, and the run that trains it."""

    spec_version: Literal[1]
    model: Model
    layout: Layout = Field(default_factory=Layout)
    precision: Precision = Field(default_factory=Precision)
    passes: Passes = Field(default_factory=Passes)
    train: Train
    data: Data
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step, over all ranks."""
        return self.train.tokens_per_step // self.data.seq_len

    @property
    def sequences_per_microbatch(self) -> int:
        """Sequences of one micro-batch on one rank."""
        return self.sequences_per_step // (self.layout.dp * self.layout.microbatches)
