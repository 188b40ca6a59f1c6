"""Triton kernels for the mixture-of-experts block, one idea per file.

| file | kernel | its plain-torch reference |
| --- | --- | --- |
| `top_k.py` | the k largest scores of each token | `moegraph.ops.choose_experts` on a CPU |
| `sort_rows.py` | stable sort of the choices by expert | `moegraph.ops.sort_by_expert` on a CPU |
| `tiles.py` | the schedule of a ragged product | `tile_schedule_reference` |
| `rows_gemm.py` | product over ragged rows, and its input gradient | `moegraph.ops.grouped_mm` on a CPU |
| `up_swiglu.py` | gathered up projection with the activation in its epilogue | `moegraph.ops.expert_ffn` on a CPU |
| `dgrad_swiglu.py` | gradient of down, activation and router weight | `moegraph.ops.expert_ffn_dgrad` on a CPU |
| `gated_backward.py` | the same gradient of the activation as a pass of its own | as `dgrad_swiglu.py` |
| `gated_forward.py` | the activation as a pass of its own, in 8 bits too | `moegraph.ops.swiglu_quantize` on a CPU |
| `gated_gradient.py` | its gradient, in 8 bits too | `moegraph.ops.swiglu_quantize` on a CPU |
| `wgrad.py` | weight gradient, contraction over ragged rows | `moegraph.ops.grouped_mm_wgrad` on a CPU |
| `payload_wgrad.py` | the same of rows in MXFP8, dequantised as they load | `moegraph.ops.payload_wgrad` on a CPU |
| `bias_grad.py` | gradient of the experts' biases, a sum over ragged rows | `moegraph.ops.expert_bias_wgrad` on a CPU |
| `mx_quantize.py` | MXFP8 along rows, columns or both, scales swizzled | `moegraph.ops.mx_format`, `mx_scales` |
| `fp8_quantize.py` | FP8 with fp32 scales per row, or per expert's column | `moegraph.ops.fp8_format` |
| `padded_offsets.py` | ends of experts' runs padded to tiles | `moegraph.ops.mx_scales.padded_offsets` |
| `fp8_*.py` | products, up projection and gradients on FP8 operands | `moegraph.ops.scaled_mm`, `block_mm` on a CPU |
| `mx_*.py` | products, up projection and gradients on MXFP8 operands | `moegraph.ops.mx_mm` on a CPU |
| `move_rows.py` | permute and combine at memory speed | `moegraph.ops.permute`, `combine` on a CPU |
| `zero_tail.py` | zeros in the rows that routing did not fill | the zeros of the above |
| `cross_entropy.py` | loss of each token and its gradient | `moegraph.ops.cross_entropy` on a CPU |
| `embedding_grad.py` | gradient of an embedding, added to its buffer | `moegraph.ops.embedding_wgrad` on a CPU |

`launch.py` holds what makes a launch: the very same description runs a kernel, and compiles it for a chip that is not
here (`compiled.py`). How it is tiled is chosen by `tuning.py`. Importing this package imports only torch, Triton, and
of moegraph its errors and where the user's cache lies. Every kernel also runs in Triton's interpreter, which is how
they are tested without a GPU.
"""
