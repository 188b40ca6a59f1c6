"""Compiling a launch for a chip that is not here, and reading what came out.

Triton compiles for any of its targets on a machine without a GPU; `ptxas`, which it carries, then says how many
registers a kernel takes and whether it spills. So what a B300 would run can be inspected anywhere, with the very
specialisation of the launch: dtypes, block shapes, and which pointers and integers are multiples of 16.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraph.kernels.chips import CHIPS
from moegraph.kernels.launch import Launch

_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}


@dataclass(frozen=True)
class KernelReport:
    """What a kernel became on a chip. Bytes are per thread for spills, per block for shared memory."""

    kernel: str
    chip: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    shared_limit: int
    matrix_instruction: str  # wgmma, tcgen05.mma, mma or none
    asynchronous_loads: bool

    @property
    def fits(self) -> bool:
        """Nothing spills and shared memory is within the chip's limit."""
        return self.spill_bytes == 0 and self.shared_bytes <= self.shared_limit

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able data."""
        return {**asdict(self), "fits": self.fits}


def compile_launch(launch: Launch, capability: int) -> KernelReport:
    """Compiles a launch whose tensors may be meta tensors for compute capability `capability` (90, 100 or 103)."""
    chip = CHIPS[capability]
    built = build(launch, capability)
    ptx: str = built.asm["ptx"]
    registers, spills = _ptxas(ptx, capability)
    return KernelReport(
        launch.kernel.__name__,
        chip.title,
        registers,
        spills,
        int(built.metadata.shared),
        chip.shared_limit,
        _matrix_instruction(ptx),
        "cp.async" in ptx,
    )


def build(launch: Launch, capability: int) -> Any:
    """Triton's compiled kernel of a launch; its PTX is `.asm["ptx"]`."""
    kernel = launch.kernel
    constants = dict(launch.constants)
    if "PROGRAMS" in constants:
        constants["PROGRAMS"] = CHIPS[capability].processors
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name], divisible = _specialise(launch.arguments[name])
        if signature[name] == "constexpr":
            constants[name] = launch.arguments[name]
        elif divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=places, attrs=attributes)
    options = {"num_warps": launch.config.num_warps, "num_stages": launch.config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _specialise(argument: Any) -> tuple[str, bool]:
    """How Triton's launcher types an argument, and whether it knows it to be a multiple of 16."""
    if isinstance(argument, Tensor):
        return f"*{_DTYPES[argument.dtype]}", argument.data_ptr() % 16 == 0
    if isinstance(argument, TensorDescriptor):
        return f"tensordesc<{_DTYPES[argument.base.dtype]}{list(argument.block_shape)}>", False
    if isinstance(argument, float):
        return "fp32", False
    if argument == 1:
        return "constexpr", False
    return "i32" if -(2**31) <= argument < 2**31 else "i64", argument % 16 == 0


def _matrix_instruction(ptx: str) -> str:
    for text, name in (("tcgen05.mma", "tcgen05.mma"), ("wgmma.mma_async", "wgmma"), ("mma.sync", "mma")):
        if text in ptx:
            return name
    return "none"


def _ptxas(ptx: str, capability: int) -> tuple[int, int]:
    """(registers per thread, bytes spilled) by the assembler that Triton uses.

    That is the one it carries, unless TRITON_PTXAS_PATH names another, as Inductor does in torch's builds for CUDA 13;
    the version of the PTX follows it.
    """
    assembler = get_ptxas(capability).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            assembler,
            "-v",
            f"--gpu-name=sm_{capability}a",
            str(source),
            "-o",
            str(Path(folder) / "kernel"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = done.stderr
    if done.returncode:
        raise RuntimeError(f"{assembler} returned {done.returncode}: {said[:500]}")
    used = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    if used is None:
        raise RuntimeError(f"ptxas said nothing about registers: {said[:500]}")
    return int(used.group(1)), max(int(spilled.group(1)), int(spilled.group(2))) if spilled else 0
