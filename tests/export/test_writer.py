"""Files are written piece by piece, and what is read at once stays small."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from moegraph.export.architecture import choose
from moegraph.export.architectures import ARCHITECTURES
from moegraph.export.model_directory import default_dtype, write_model
from moegraph.export.names import in_turns
from moegraph.lowering import lower
from tests.export.models import MODELS, random_values, reader, spec_of


def test_no_more_than_a_chunk_or_one_expert_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.export.writer.CHUNK", 100)
    spec = spec_of("gpt_oss")
    values, sizes = random_values(spec), set[int]()

    def read(name: str, start: int, count: int) -> Tensor:
        sizes.add(count)
        return reader(values)(name, start, count)

    write_model(tmp_path, spec.model, choose(spec.model, ARCHITECTURES), read, "float32")
    expert = values["layers.0.moe.w_up"][0].numel()
    assert max(sizes) == expert
    assert {size for size in sizes if size > 100} <= {expert, expert // 2}
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], values["embedding.weight"])
    up = torch.stack([in_turns(each).t() for each in values["layers.1.moe.w_up"]])
    assert torch.equal(found["model.layers.1.mlp.experts.gate_up_proj"], up)


def test_bfloat16_rounds_to_nearest_and_leaves_the_router_in_float32(tmp_path: Path) -> None:
    spec = spec_of("glm4_moe")
    values = random_values(spec)
    write_model(tmp_path, spec.model, choose(spec.model, ARCHITECTURES), reader(values), "bfloat16")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    wide = {name for name, value in found.items() if value.dtype == torch.float32}
    gate = "model.layers.1.mlp.gate"
    assert wide == {f"{gate}.weight", f"{gate}.e_score_correction_bias"}
    assert torch.equal(found[f"{gate}.weight"], values["layers.1.moe.router.weight"])
    assert torch.equal(found["lm_head.weight"], values["head.weight"].bfloat16())


def test_a_tensor_above_the_limit_has_a_file_of_its_own(tmp_path: Path) -> None:
    spec = spec_of("llama")
    write_model(
        tmp_path, spec.model, choose(spec.model, ARCHITECTURES), reader(random_values(spec)), "float32",
        max_shard_bytes=6000,
    )  # fmt: skip
    files = {path.name: list(load_file(path)) for path in sorted(tmp_path.glob("*.safetensors"))}
    assert files[f"model-00001-of-{len(files):05d}.safetensors"] == ["model.embed_tokens.weight"]
    assert len(files) > 4


@pytest.mark.parametrize("name", MODELS)
def test_every_element_of_a_model_is_written_once(name: str) -> None:
    spec = spec_of(name)
    times = {name: torch.zeros(each.numel, dtype=torch.uint8) for name, each in lower(spec).parameters.items()}
    for tensor in choose(spec.model, ARCHITECTURES).tensors(spec.model):
        if tensor.source is not None:
            size = math.prod(tensor.piece) * tensor.count
            assert size == tensor.numel
            times[tensor.source][tensor.start : tensor.start + size] += 1
    assert all(bool((each == 1).all()) for each in times.values())


@pytest.mark.parametrize(("compute", "dtype"), [("bf16", "bfloat16"), ("fp32", "float32"), ("fp64", "float32")])
def test_the_dtype_is_what_the_graphs_of_the_model_read(compute: str, dtype: str) -> None:
    assert default_dtype(spec_of("mixtral", f"precision.compute={compute}")) == dtype
