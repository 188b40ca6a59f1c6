"""Triton kernels for the mixture-of-experts block, one idea per file.

| file | kernel | its plain-torch reference |
| --- | --- | --- |
| `tiles.py` | the schedule of a ragged product | `tile_schedule_reference` |
| `rows_gemm.py` | product over ragged rows, and its input gradient | `moegraph.ops.grouped_mm` on a CPU |
| `up_swiglu.py` | gathered up projection with SwiGLU in its epilogue | `moegraph.ops.expert_ffn` on a CPU |
| `dgrad_swiglu.py` | gradient of down projection, SwiGLU and router weight | `moegraph.ops.expert_ffn_dgrad` on a CPU |
| `wgrad.py` | weight gradient, contraction over ragged rows | `moegraph.ops.grouped_mm_wgrad` on a CPU |
| `move_rows.py` | permute and combine at memory speed | `moegraph.ops.permute`, `combine` on a CPU |

`launch.py` holds what makes a launch: the very same description runs a kernel, and compiles it for a chip that is not
here (`compiled.py`). Importing this package imports only torch and Triton. Every kernel also runs in Triton's
interpreter, which is how they are tested without a GPU.
"""
