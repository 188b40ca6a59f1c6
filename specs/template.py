"""The spec that `moegraph init` writes: every setting there is, with its default and what it means.

Values without a default are those of a small model that trains on two CPU cores in minutes. A commented line shows a
section that is off by default; it works once the `# ` before its key is removed.
"""

from __future__ import annotations

TEMPLATE = """\
# A moegraph spec. Whatever is left out has the value shown here, except where a comment says "no default".
# `moegraph inspect --resolved` prints every final value and where it comes from; `moegraph schema` prints the schema.
spec_version: 1
# extends: presets/tiny.yaml           # lay this file over another spec below its folder, or over a shipped preset

model:
  vocab_size: 4096                     # no default
  d_model: 128                         # no default; width of the residual stream
  num_layers: 4                        # no default
  max_seq_len: 4096                    # tokens
  norm:
    kind: rms
    eps: 1e-6
    placement: pre                     # pre | post | both: before a sub-layer, on its output, or both
  attention:
    num_heads: 4                       # no default
    num_kv_heads: null                 # null: num_heads
    head_dim: null                     # null: d_model / num_heads
    qk_norm: none                      # none | per_head | full (over all heads together)
    qkv_bias: false
    output_bias: false
    window: null
    # window: {size: 256, pattern: LLLG}   # sliding window of 256 tokens; repeated over layers, L with it, G without
    rope:                              # null: no position embedding
      theta: 10000
      fraction: 1.0                    # of each head that is rotated
      interleaved: false               # pairs (0, 1), (2, 3), … instead of (0, n/2), (1, n/2 + 1), …
  dense: null                          # ordinary feed-forward layers; a model needs dense, moe, or both
  # dense: {d_ff: 384, layers: [0]}    # these layers instead of experts; `layers: all` without moe
  moe:                                 # null: no experts
    num_experts: 8                     # no default
    top_k: 2                           # no default; experts per token
    d_ff: 128                          # no default; width of one expert
    activation: swiglu
    # activation: {kind: swiglu_clamped, alpha: 1.702, limit: 7.0}   # that of gpt-oss, with its default values
    expert_bias: false                 # a bias on each expert's up and down projection
    output_bias: false                 # a bias on what the experts of a token sum up to
    router:
      score: softmax                   # softmax | sigmoid | none: scores from logits
      gate_dtype: fp32                 # the router computes in fp32 whatever precision.compute is
      gate_bias: false
      select_bias: none                # none | learned_free: balance by a bias that only the choice sees
      bias_update_rate: 1e-3           # of that bias, after each step
      groups: null
      # groups: {n: 4, keep: 2, score: top2_sum, fill: "-inf"}   # choose within the best groups; score: or max
      weight_from: score               # score | softmax_selected | sigmoid_selected
      norm: {kind: none, eps: 0.0, mode: add}   # kind: or sum, divide the weights by their sum; mode: or clamp
      scale: 1.0                       # multiplies the weights
      apply: output                    # output | input: what of the expert the weight multiplies
    shared: null
    # shared: {num_experts: 1, d_ff: 128, gate: none}   # experts for every token; gate: or sigmoid
    balance:
      definition: switch               # num_experts · Σ f · P
      over: micro_batch                # micro_batch | sequence | global_batch: the tokens that f and P are taken over
      layers: sum                      # sum | mean | pooled: how layers are put together
      f_norm: 1                        # 1 | k: what f sums to
      coef: 0.0                        # 0: no balance loss
      z_coef: 0.0                      # 0: no z loss
  tie_embeddings: false
  embedding_scale: 1.0                 # multiplies the embedding
  residual_scale: 1.0                  # multiplies what each sub-layer adds
  logit_scale: 1.0                     # multiplies the logits
  init:
    std: 0.02
    scale_depth: true                  # output projections: divided by sqrt(2 · num_layers)

layout:                                # world = dp · pp ranks
  dp: 1                                # data-parallel ranks
  ep: 1                                # of them, how many share the experts
  pp: 1                                # pipeline stages
  schedule: 1f1b                       # gpipe | 1f1b | interleaved_1f1b | interleaved_zero_bubble |
                                       # zbv_zero_bubble | dual_pipe_v
  stages: null                         # null: cut into stages of equal cost
  # stages: "embedding,0-3,head"       # the blocks of each stage, stages separated by |
  microbatches: 1                      # gradient accumulation, and what a pipeline is filled with
  transport: exact                     # exact | padded | direct: how tokens travel to experts
  capacity: 1.25                       # of padded and direct, times a balanced load
  overflow: replay                     # replay | drop | error: what happens beyond it
  timeout: 600                         # seconds that a collective may take

precision:
  compute: bf16                        # bf16 | fp32 | fp64; master weights are fp32, or fp64
  mxfp8:
    experts: off                       # on | auto: products of experts in 8 bits, for Blackwell
    saved: off                         # on: fused experts keep half as much for backward
    shared: off                        # on | auto: linear layers of shared experts
    attention: off                     # on | auto: projections of attention
    dispatch: off                      # on | auto: rows that travel to other ranks, in half the bytes
    wgrad: bf16                        # or mxfp8: weight gradients of what is cast
  fp8: off                             # rowwise | blockwise: experts in Hopper's 8-bit format
  fp8_wgrad: false                     # their weight gradients too

passes:
  canonicalize: {enabled: true}
  balance-losses: {enabled: true}
  fuse-experts:                        # the experts as one operator: less is kept for backward, Triton on a GPU
    enabled: false
    recompute: false                   # true: keep no pre-activation either, and compute it again in backward
  fold-casts: {enabled: true}          # 8-bit operands are written by what makes them
  recompute: {enabled: true, policy: none, layers: all}   # policy: none | selective | full; layers: or a list
  fold-decodes: {enabled: true}        # weight gradients read rows that arrived in MXFP8 as they are
  overlap-communication: {mode: off, chunks: null}   # off | on | auto: other work while tokens travel; 2: in halves
  accumulate-gradients: {enabled: true}   # products add the gradients of weights to their buffers
  custom: {}                           # passes of your own, by name: {enabled: true, after: NAME, options: {}}

train:
  steps: 300                           # no default; optimizer steps
  seed: 0
  tokens_per_step: 4096                # no default; over all ranks, a multiple of data.seq_len
  optimizer:
    kind: adamw
    lr: 3e-4
    betas: [0.9, 0.95]
    eps: 1e-8
    weight_decay: 0.1
    moments: master                    # master | bf16: the dtype both moments are kept in
    groups: []                         # the last match wins: [{match: "*norm*", weight_decay: 0, lr_scale: 1.0}]
  schedule: {kind: constant, warmup: 0}
  # schedule: {kind: wsd, warmup: 30, decay: 90, final: 0.0}      # warm-up, stable, decay to final · lr
  # schedule: {kind: cosine, warmup: 30, final: 0.1}
  clip_norm: 1.0                       # null: no clipping
  non_finite: stop                     # stop | skip | dump: a step whose loss or gradient norm is not finite
  skip_spikes: null
  # skip_spikes: {window: 128, deviations: 6.0}   # skip steps whose loss or norm is this far above the last ones
  max_skips: 10                        # more of them in a row stop the run
  check_replicas: null                 # steps: compare the parameters of all replicas, bit for bit, every so many
  validation: null
  # validation: {every: 100, sequences: 32}
  compile: inductor                    # inductor | aot_eager | eager
  device: auto                         # auto | cpu | cuda
  deterministic: false                 # true: bitwise the same from run to run
  log_every: 1                         # steps
  output_dir: runs/default

data:
  source: "corpus:python-stdlib"       # no default; corpus:NAME, or a folder written by `moegraph data prepare`
  seq_len: 256                         # no default; at most model.max_seq_len
  document_mask: true                  # neither attention nor loss crosses a document

checkpoint:
  every: null                          # steps; null: only the final weights
  keep_last: 3
  keep_every: null                     # steps: those at a multiple of it stay for ever
  mode: sync                           # sync | async: written while training goes on
  resume: auto                         # auto: continue the run in output_dir | off: start anew | a folder to start from
  verify: true                         # compare all files with their hashes before they are used
"""


def template() -> str:
    """The text of a commented spec that loads as it is."""
    return TEMPLATE
