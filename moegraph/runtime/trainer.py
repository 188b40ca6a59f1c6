"""Training: the loop from a spec to final weights, in one process.

    open data -> compile -> initialise -> for each step: compute, agree, commit -> validate now and then -> weights

The loss that is reported is the mean cross entropy per valid target in nats; what auxiliary losses add is reported
beside it. A step is a function of (seed, step): stopping after any step leaves nothing half done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moegraph.compiled import Compiled, compile
from moegraph.data.corpora import resolve_source
from moegraph.data.dataset import TokenDataset
from moegraph.data.loader import Loader, ValidationLoader
from moegraph.errors import RunError, UsageError
from moegraph.runtime.accounting import count_parameters, flops_per_token
from moegraph.runtime.compile_cache import compile_cache
from moegraph.runtime.device import choose_device, device_name, peak_memory, run_settings
from moegraph.runtime.executor import Executor
from moegraph.runtime.gradient_norm import clip_factor, global_norm, is_finite
from moegraph.runtime.gradients import GradientBuffers
from moegraph.runtime.initialise import initial_values
from moegraph.runtime.learning_rate import learning_rate
from moegraph.runtime.manifest import build_manifest
from moegraph.runtime.optimizer import AdamW
from moegraph.runtime.peaks import peak_flops, utilisation
from moegraph.runtime.progress import Progress
from moegraph.runtime.router_metrics import layer_routing, updated_bias
from moegraph.runtime.run_folder import claim_run_folder
from moegraph.runtime.run_log import RunLog
from moegraph.runtime.step import Computed, StepComputer
from moegraph.runtime.weights import save_weights
from moegraph.specs.schema import Spec


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. Losses in nats per token; `compilations` counts them per graph."""

    folder: Path
    steps: int
    seconds: float
    loss: float
    first_validation_loss: float | None
    validation_loss: float | None
    compilations: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON-able data."""
        return {**self.__dict__, "folder": str(self.folder)}


def train(spec: Spec, *, base: Path, progress: Progress | None = None, compiled: Compiled | None = None) -> TrainResult:
    """Trains `spec` in this process and returns how it ended.

    `base` is the folder that `data.source` is relative to; `train.output_dir` is relative to the current folder.
    `compiled` saves compiling again what the caller has. Raises `UsageError` for a layout of several ranks, `DataError`,
    and `RunError` when a loss or gradient is not finite (parameters are then as before that step).
    """
    if spec.layout.world > 1:
        raise UsageError(
            f"layout.dp {spec.layout.dp} × layout.pp {spec.layout.pp} asks for {spec.layout.world} ranks, and training "
            "on several ranks waits for the parallel layouts; --set layout.dp=1 layout.ep=1 layout.pp=1 trains here"
        )
    device = choose_device(spec.train.device)
    with run_settings(spec.train.deterministic), compile_cache(device_name(device)):
        shown = progress or Progress(spec.train.steps, spec.train.log_every)
        with shown:
            return Trainer(spec, base, device, shown, compiled).run()


class Trainer:
    """One run: everything that lives from the first step to the last."""

    def __init__(
        self, spec: Spec, base: Path, device: torch.device, progress: Progress, compiled: Compiled | None = None
    ) -> None:
        self.spec, self.device, self.progress = spec, device, progress
        self.dataset, self.loader, self.validation = _open_data(spec, base)
        self.compiled = compiled or compile(spec)
        self.program = self.compiled.program
        masters = torch.float64 if spec.precision.compute == "fp64" else torch.float32
        start = initial_values(self.program.parameters.values(), spec.train.seed, masters)
        start = {name: value.to(device) for name, value in start.items()}
        self.optimizer = AdamW(self.program.parameters, start, spec.train.optimizer)
        self.values = self._compute_values(start)
        self.executor = Executor(self.program, self.values, device, spec.train.compile)
        self.gradients = GradientBuffers(self.program.trained(), masters, device)
        self.computer = StepComputer(spec, self.executor, self.gradients, device)
        self.flops_per_token = flops_per_token(spec, self.program)
        self.peak = peak_flops(device_name(device), spec.precision.compute)
        self.biases = [name for name, p in self.program.parameters.items() if p.role == "select_bias"]

    def _compute_values(self, start: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the graphs read: the masters themselves where the dtypes agree, copies elsewhere."""
        values = {}
        for name, parameter in self.program.parameters.items():
            if not parameter.trained:
                values[name] = start[name].to(parameter.dtype).clone()
            elif parameter.dtype == self.optimizer.masters.flat.dtype:
                values[name] = self.optimizer.masters[name]
            else:
                values[name] = self.optimizer.masters[name].to(parameter.dtype)
        masters = self.optimizer.masters
        self._copies = {name: v for name, v in values.items() if name in masters and v is not masters[name]}
        return values

    def run(self) -> TrainResult:
        """All steps, then the final weights."""
        folder = claim_run_folder(Path(self.spec.train.output_dir), self.progress.note)
        started = time.perf_counter()
        self._announce(folder)
        with RunLog(folder, self.progress.note) as log:
            log.write_manifest(self._manifest(folder))
            first = last = self._validate(log, 0)
            record: dict[str, Any] = {}
            for step in range(1, self.spec.train.steps + 1):
                record = self._step(step)
                if self._validates(step):
                    last = record["validation_loss"] = self._validation_loss()
                log.write(record)
                self.progress.show(record)
        weights = {**self.optimizer.masters, **{name: self.values[name] for name in self.biases}}
        save_weights(folder, weights, {"format": "pt", "step": str(self.spec.train.steps)})
        result = TrainResult(
            folder,
            self.spec.train.steps,
            time.perf_counter() - started,
            record["loss"],
            first,
            last,
            self.executor.compilations(),
        )
        self._conclude(result)
        return result

    def _step(self, step: int) -> dict[str, Any]:
        batch = self.loader.step(step - 1)
        began = time.perf_counter()
        computed = self.computer.compute(batch)
        norm_tensor = global_norm(self.gradients)
        loss, balance, z, norm = self._agree(computed, norm_tensor, step)
        lr = learning_rate(step, self.spec.train.steps, self.spec.train.schedule, self.spec.train.optimizer.lr)
        self._commit(computed, norm, lr)
        record = {"step": step, "loss": loss, "loss_total": loss + balance + z, "balance_loss": balance, "z_loss": z}
        record.update(grad_norm=norm, lr=lr, valid_targets=batch.valid_targets)
        if step % self.spec.train.log_every == 0 or step == self.spec.train.steps:
            record["router"] = self._routing(computed)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began
        rate = batch.tokens.numel() / seconds
        record.update(seconds=seconds, tokens_per_second=rate, tflops=rate * self.flops_per_token / 1e12)
        record.update(mfu=utilisation(rate, self.flops_per_token, self.peak), memory_bytes=peak_memory(self.device))
        return record

    def _agree(self, computed: Computed, norm: Tensor, step: int) -> tuple[float, float, float, float]:
        """The step's numbers on the host, in one transfer; nothing has been changed yet if they are not finite."""
        numbers = torch.stack([computed.loss, computed.balance, computed.z, norm.to(computed.loss.device)]).double()
        loss, balance, z, size = numbers.tolist()
        for name, value in (("loss", loss), ("balance loss", balance), ("z loss", z), ("gradient norm", size)):
            if not is_finite(value):
                raise RunError(f"step {step}: the {name} is {value}; parameters are as they were after step {step - 1}")
        return loss, balance, z, size

    def _commit(self, computed: Computed, norm: float, lr: float) -> None:
        """The only place where parameters, moments and selection biases change."""
        factor = clip_factor(norm, self.spec.train.clip_norm)
        if factor != 1.0:
            self.gradients.flat.mul_(factor)
        self.optimizer.step(self.gradients, lr)
        self.optimizer.write_compute_copies(self._copies)
        moe = self.spec.model.moe
        if self.biases and moe is not None and computed.expert_counts is not None:
            for name, counts in zip(self.biases, computed.expert_counts, strict=True):
                self.values[name].copy_(updated_bias(self.values[name], counts, moe.router.bias_update_rate))

    def _routing(self, computed: Computed) -> dict[str, Any]:
        """Per MoE layer, what its router did in this step."""
        if computed.expert_counts is None or computed.probability_sum is None or computed.router_entropy is None:
            return {}
        columns = zip(
            self._moe_layers(),
            computed.expert_counts.tolist(),
            computed.probability_sum.tolist(),
            computed.router_entropy.tolist(),
            strict=True,
        )
        return {f"layers.{n}": layer_routing(counts, p, entropy).to_json() for n, counts, p, entropy in columns}

    def _moe_layers(self) -> list[int]:
        return [n for n in range(self.spec.model.num_layers) if not self.spec.model.is_dense(n)]

    def _validates(self, step: int) -> bool:
        every = self.spec.train.validation
        return every is not None and (step % every.every == 0 or step == self.spec.train.steps)

    def _validate(self, log: RunLog, step: int) -> float | None:
        """Validation before the first step, as a record of its own."""
        if self.spec.train.validation is None:
            return None
        record = {"step": step, "validation_loss": self._validation_loss()}
        log.write(record)
        self.progress.show(record)
        return float(record["validation_loss"])

    def _validation_loss(self) -> float:
        assert self.validation is not None
        batches = [self.validation.step(i) for i in range(len(self.validation))]
        targets = sum(batch.valid_targets for batch in batches)
        losses = [self.executor.evaluate(self.computer.place(batch.microbatch(), targets)) for batch in batches]
        return float(torch.stack(losses).sum())

    def _announce(self, folder: Path) -> None:
        from moegraph.passes.balance_losses import definition

        total, active = count_parameters(self.program)
        note: Callable[[str], None] = self.progress.note
        graphs = sum(len(unit) for unit in self.executor.graphs.values())
        note(
            f"model: {total:,} parameters, {active:,} active, {self.flops_per_token / 1e9:.4g} GFLOP per token; "
            f"auxiliary: {definition(self.spec)}"
        )
        note(
            f"run: {folder}, {device_name(self.device)}, compute {self.spec.precision.compute}, "
            f"{len(self.program.units)} kinds of block, {graphs} graphs, {self.spec.train.compile}"
        )

    def _conclude(self, result: TrainResult) -> None:
        compiled, most = len(result.compilations), max(result.compilations.values(), default=0)
        once = "each once" if most <= 1 else f"some {most} times"
        if compiled:
            self.progress.note(f"compiled {compiled} graphs, {once}, however the routing moved")
        self.progress.note(f"results: {result.folder}")

    def _manifest(self, folder: Path) -> dict[str, Any]:
        return build_manifest(
            resolved_spec=self.spec.model_dump(mode="json", by_alias=True),
            graph_hashes=self.compiled.hashes,
            data={"source": self.spec.data.source, "fingerprint": self.dataset.fingerprint},
            parameters=count_parameters(self.program),
            flops_per_token=self.flops_per_token,
            device=device_name(self.device),
            folder=folder,
        )


def _open_data(spec: Spec, base: Path) -> tuple[TokenDataset, Loader, ValidationLoader | None]:
    path = resolve_source(spec.data.source, base)
    dataset = TokenDataset.open(path)
    common: dict[str, Any] = {
        "seq_len": spec.data.seq_len,
        "document_mask": spec.data.document_mask,
        "vocab_size": spec.model.vocab_size,
    }
    loader = Loader(dataset, sequences_per_step=spec.sequences_per_step, seed=spec.train.seed, **common)
    if spec.train.validation is None:
        return dataset, loader, None
    held_out = TokenDataset.open(path, split="validation")
    sequences = spec.train.validation.sequences
    size = spec.sequences_per_microbatch
    return dataset, loader, ValidationLoader(held_out, sequences=sequences, sequences_per_step=size, **common)
