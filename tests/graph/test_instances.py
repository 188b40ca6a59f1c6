"""Blocks of one kind are named in short, and a graph can be written with the names of one block."""

from __future__ import annotations

from moegraph.graph.instances import expanded, instances_text
from moegraph.graph.text import graph_text
from moegraph.lowering import lower
from tests.small_models import small_spec


def test_neighbouring_layers_are_written_as_one() -> None:
    spec = small_spec("model.num_layers=8", "model.dense.layers=[0, 5]")
    program = lower(spec)
    assert instances_text(program, "embedding") == "embedding"
    assert instances_text(program, "dense") == "layers.0, layers.5"
    assert instances_text(program, "moe") == "layers.1 … layers.4, layers.6, layers.7"


def test_names_are_joined_and_the_graph_itself_stays_as_it_was() -> None:
    program = lower(small_spec("model.tie_embeddings=true"))
    module = program.units["moe"].graphs["layer"]
    before = graph_text(module)
    instance = program.instances_of("moe")[1]
    text = graph_text(expanded(module, instance))
    assert "layers.2.moe.rows: " in text
    assert all(line.startswith(("layers.2.", "return ")) for line in text.splitlines())
    assert graph_text(module) == before
    (head,) = program.instances_of("head")
    assert "\nembedding.weight: " in graph_text(expanded(program.units["head"].graphs["layer"], head))
