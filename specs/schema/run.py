"""The sections that say how a model is run: layout, precision, passes, train, data, checkpoint."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moegraph.specs.schema.base import Count, Fraction, Index, NonNegative, Positive, Section

Steps = Annotated[int, Field(ge=0, le=2**31)]


class Layout(Section):
    """Parallel layout: world = dp · pp; experts are spread over `ep` of the `dp` ranks. `stages` names the blocks of
    each pipeline stage (`moegraph.specs.stages`); null lets `split-pipeline` balance them by cost."""

    dp: Count = 1
    ep: Count = 1
    pp: Count = 1
    schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v"
    ] = "1f1b"
    stages: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    microbatches: Count = 1
    transport: Literal["exact", "padded", "direct"] = "exact"
    capacity: Annotated[float, Field(gt=0.0, le=65536.0)] = 1.25
    overflow: Literal["replay", "drop", "error"] = "replay"
    timeout: Annotated[float, Field(gt=0.0, le=86400.0)] = 600.0  # seconds a collective may take

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp


class Mxfp8(Section):
    """Where MXFP8 casts are inserted: `on`, or where a model of the hardware predicts a gain. `shared` are the linear
    layers of shared experts, `attention` the q, k, v and output projections, `dispatch` the rows that travel to experts
    of other ranks. `wgrad` is the format of weight gradients of all that is cast, `saved` whether fused experts keep
    their pre-activation for backward in MXFP8."""

    experts: Literal["auto", "on", "off"] = "off"
    saved: Literal["on", "off"] = "off"
    shared: Literal["auto", "on", "off"] = "off"
    attention: Literal["auto", "on", "off"] = "off"
    dispatch: Literal["auto", "on", "off"] = "off"
    wgrad: Literal["bf16", "mxfp8"] = "bf16"

    @property
    def parts(self) -> dict[str, str]:
        """The parts of the model whose products are cast: part → auto or on."""
        chosen = {"experts": self.experts, "shared": self.shared, "attention": self.attention}
        return {part: word for part, word in chosen.items() if word != "off"}


class Precision(Section):
    """`compute` is the dtype of activations and of the weights used in matrix products; the optimizer's master
    weights are fp32 (fp64 when compute is fp64). `fp8` is Hopper's 8-bit format for products of experts, with a scale
    per row or for blocks of 128; `fp8_wgrad` casts their weight gradients too (rowwise only)."""

    compute: Literal["bf16", "fp32", "fp64"] = "bf16"
    mxfp8: Mxfp8 = Field(default_factory=Mxfp8)
    fp8: Literal["off", "rowwise", "blockwise"] = "off"
    fp8_wgrad: bool = False


class PassSwitch(Section):
    """A pass without options of its own."""

    enabled: bool = True


class FuseExpertsOptions(Section):
    """Off unless asked for: the operators it puts in are measured on H200 only so far. `recompute` keeps no
    pre-activation: backward computes it again, one more up projection."""

    enabled: bool = False
    recompute: bool = False


class RecomputeOptions(Section):
    """`none` saves everything backward needs, `selective` saves matrix products and recomputes what is cheap between
    them, `full` saves only what must not be recomputed (the routing decision and the dispatched rows). `layers`
    names the layers it holds for (default all)."""

    enabled: bool = True
    policy: Literal["none", "selective", "full"] = "none"
    layers: Literal["all"] | tuple[Index, ...] = "all"


class OverlapOptions(Section):
    """Whether independent work runs while tokens travel: `auto` measures when a run starts, and records the times.

    With `chunks: 2` the experts work on half of the tokens while the other half travels. Left out, `on` means 1, and
    `auto` tries 1 and 2.
    """

    mode: Literal["off", "on", "auto"] = "off"
    chunks: Literal[1, 2] | None = None


class UserPassOptions(Section):
    """A pass registered from a Python file: on or off, where it runs, and its own options."""

    enabled: bool = True
    after: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class Passes(Section):
    """Options of the passes, each by its name."""

    canonicalize: PassSwitch = Field(default_factory=PassSwitch)
    balance_losses: PassSwitch = Field(default_factory=PassSwitch, alias="balance-losses")
    fuse_experts: FuseExpertsOptions = Field(default_factory=FuseExpertsOptions, alias="fuse-experts")
    fold_casts: PassSwitch = Field(default_factory=PassSwitch, alias="fold-casts")
    recompute: RecomputeOptions = Field(default_factory=RecomputeOptions)
    fold_decodes: PassSwitch = Field(default_factory=PassSwitch, alias="fold-decodes")
    overlap_communication: OverlapOptions = Field(default_factory=OverlapOptions, alias="overlap-communication")
    accumulate_gradients: PassSwitch = Field(default_factory=PassSwitch, alias="accumulate-gradients")
    custom: dict[str, UserPassOptions] = Field(default_factory=dict)


class ParameterGroup(Section):
    """Parameters whose name matches the shell pattern `match` use these values; the last matching rule wins."""

    match: Annotated[str, Field(min_length=1, max_length=4096)]
    lr_scale: NonNegative = 1.0
    weight_decay: NonNegative | None = None


class AdamW(Section):
    """AdamW with decoupled weight decay (arXiv 1711.05101). `moments` is the dtype both moments are kept in; `master`
    is that of the master weights."""

    kind: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0.0, le=10.0)] = 3e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-8
    weight_decay: NonNegative = 0.1
    moments: Literal["master", "bf16"] = "master"
    groups: tuple[ParameterGroup, ...] = ()


class Cosine(Section):
    """Linear warm-up over `warmup` steps, then a half cosine down to `final` · lr at the last step."""

    kind: Literal["cosine"]
    warmup: Steps = 0
    final: Fraction = 0.1


class Wsd(Section):
    """Warm-up, stable, then linear decay to `final` · lr over the last `decay` steps (arXiv 2404.06395)."""

    kind: Literal["wsd"]
    warmup: Steps = 0
    decay: Steps = 0
    final: Fraction = 0.0


class Constant(Section):
    """Linear warm-up, then a constant learning rate."""

    kind: Literal["constant"]
    warmup: Steps = 0


def _constant() -> Constant:
    return Constant(kind="constant")


class Validation(Section):
    """Every `every` steps (and before the first and after the last), the mean loss over `sequences` held-out
    sequences."""

    every: Count
    sequences: Count = 32


class SkipSpikes(Section):
    """A step whose loss or gradient norm lies more than `deviations` standard deviations above the mean of the last
    `window` accepted steps is skipped, once half of the window is filled."""

    window: Annotated[int, Field(ge=4, le=4096)] = 128
    deviations: Positive = 6.0


class Train(Section):
    """The training run. `tokens_per_step` = sequences per step · data.seq_len, over all ranks.

    `non_finite` is for a step whose loss or gradient norm is not finite: `stop` the run, `skip` the step, or `dump`
    what it takes to find the cause, and stop. More than `max_skips` skipped steps in a row stop the run.
    `check_replicas`: every so many steps the parameters of all replicas are compared, bit for bit.
    """

    steps: Annotated[int, Field(ge=1, le=2**31)]
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    tokens_per_step: Annotated[int, Field(ge=1, le=2**34)]
    optimizer: AdamW = Field(default_factory=AdamW)
    schedule: Annotated[Cosine | Wsd | Constant, Field(discriminator="kind")] = Field(default_factory=_constant)
    clip_norm: Positive | None = 1.0
    non_finite: Literal["stop", "skip", "dump"] = "stop"
    skip_spikes: SkipSpikes | None = None
    max_skips: Count = 10
    check_replicas: Count | None = None
    validation: Validation | None = None
    compile: Literal["inductor", "aot_eager", "eager"] = "inductor"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = False
    log_every: Count = 1
    output_dir: Annotated[str, Field(min_length=1, max_length=4096)] = "runs/default"


CORPUS_PREFIX = "corpus:"
CORPORA = ("python-stdlib",)  # built into moegraph.data.corpora


class Data(Section):
    """`source` is a folder written by `moegraph data prepare`, or `corpus:NAME` for a built-in corpus. With
    `document_mask`, neither attention nor loss crosses a document boundary."""

    source: Annotated[str, Field(min_length=1, max_length=4096)]
    seq_len: Annotated[int, Field(ge=1, le=2**26)]
    document_mask: bool = True


class Checkpoint(Section):
    """Checkpoints of a run, in the folder `checkpoints` of `train.output_dir`: after every `every` steps and after the
    last one. `every: null` writes none, only the final weights.

    The last `keep_last` stay, and those whose step is a multiple of `keep_every`. With `mode: async` a step's state is
    copied to host memory and written while training goes on. `resume: auto` continues the run that is in
    `train.output_dir` from its newest checkpoint, if it has one; `off` moves that run aside and starts anew; anything
    else is the folder of a checkpoint, or of a run, to start from. `verify` compares all files with their hashes before
    anything of them is used.
    """

    every: Count | None = None
    keep_last: Count = 3
    keep_every: Count | None = None
    mode: Literal["sync", "async"] = "sync"
    resume: Annotated[str, Field(min_length=1, max_length=4096)] = "auto"
    verify: bool = True
