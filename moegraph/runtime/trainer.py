"""Training: the loop from a spec to final weights, on one rank or as one of several.

    open data -> compile -> initialise or resume -> for each step: compute, agree, commit -> validate, save -> weights

Rank 0 alone writes the run's folder, its log and weights, and what is shown; all ranks write checkpoints.

The loss that is reported is the mean cross entropy per valid target in nats; what auxiliary losses add is reported
beside it. A step is a function of (seed, step): stopping after any step leaves nothing half done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from moegraph.checkpoint.run_checkpoints import RunCheckpoints
from moegraph.checkpoint.start import claim_with_start
from moegraph.compiled import Compiled
from moegraph.data.loader import StepBatch
from moegraph.errors import RunError
from moegraph.kernels.tuning import table_digests
from moegraph.runtime.accounting import count_parameters, flops_per_token
from moegraph.runtime.agree import Agreed
from moegraph.runtime.announce import announce, conclude
from moegraph.runtime.audit import Audit, step_facts
from moegraph.runtime.compile_cache import compile_cache
from moegraph.runtime.device import choose_device, device_name, peak_memory, run_settings
from moegraph.runtime.dump_step import dump_step
from moegraph.runtime.engine import Engine, gather_weights
from moegraph.runtime.learning_rate import learning_rate
from moegraph.runtime.manifest import build_manifest
from moegraph.runtime.mesh import SINGLE, Mesh, check_world, join
from moegraph.runtime.open_data import open_data
from moegraph.runtime.peaks import peak_flops, utilisation
from moegraph.runtime.progress import Progress
from moegraph.runtime.replicas import check_replicas
from moegraph.runtime.router_metrics import layer_routing
from moegraph.runtime.run_log import RunLog
from moegraph.runtime.start import check_equal, together
from moegraph.runtime.step_policy import StepPolicy, not_finite
from moegraph.runtime.weights import save_weights
from moegraph.specs.schema import Spec


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. Losses in nats per token; `compilations` counts them per graph. `stopped`: by SIGTERM, after
    `steps` steps and with a checkpoint of them, but no final weights."""

    folder: Path
    steps: int
    seconds: float
    loss: float
    first_validation_loss: float | None
    validation_loss: float | None
    compilations: dict[str, int] = field(default_factory=dict)
    stopped: bool = False

    def to_json(self) -> dict[str, Any]:
        """The result as JSON-able data."""
        return {**self.__dict__, "folder": str(self.folder)}


def train(
    spec: Spec,
    *,
    base: Path,
    progress: Progress | None = None,
    compiled: Compiled | None = None,
    rank: int = 0,
    world: int = 1,
) -> TrainResult:
    """Trains `spec` in this process, as one rank of the layout, and returns how it ended.

    `base` is the folder that `data.source` is relative to; `train.output_dir` is relative to the current folder.
    `compiled` saves compiling again what the caller has. With a `world` above 1 the other ranks run in processes of
    their own, found through MASTER_ADDR and MASTER_PORT. Raises `UsageError` for another number of processes than the
    layout has ranks, `DataError`, and `RunError` when a loss or gradient is not finite (parameters are then as before
    that step) or a peer is lost.
    """
    check_world(spec.layout, world)
    device = choose_device(spec.train.device)
    shown = progress or Progress(spec.train.steps, spec.train.log_every)
    cache = compile_cache(device_name(device), inductor=spec.train.compile == "inductor", note=shown.note)
    settings = run_settings(spec.train.deterministic)
    with settings, cache as keep_compiled, shown, join(spec.layout, rank, world, device) as mesh:
        with together(mesh, "opening the data and compiling"):
            trainer = Trainer(spec, base, device, shown, compiled, mesh)
        check_equal(mesh, trainer.engine.compiled, trainer.dataset.fingerprint)
        return trainer.run(keep_compiled)


class Trainer:
    """One run: everything that lives from the first step to the last."""

    def __init__(
        self,
        spec: Spec,
        base: Path,
        device: torch.device,
        progress: Progress,
        compiled: Compiled | None = None,
        mesh: Mesh = SINGLE,
    ) -> None:
        self.spec, self.device, self.progress, self.mesh = spec, device, progress, mesh
        self.dataset, self.loader, self.validation = open_data(spec, base)
        self.engine = Engine(spec, device, mesh, compiled, progress.note)
        self.compiled, self.program, self.state = self.engine.compiled, self.engine.program, self.engine.state
        self.gradients, self.computer = self.engine.gradients, self.engine.computer
        self.policy = StepPolicy(spec.train)
        self.checkpoints: RunCheckpoints | None = None  # of a run that goes on
        self.save_asked = self.stop_asked = False  # by signals, as the last step's agreement has it
        self.expert_counts: list[list[int]] = []  # of the last step, [MoE layers][E]
        self.sample_ids = torch.empty(0, dtype=torch.int64)  # of the last step, [B]
        self.flops_per_token = flops_per_token(spec, self.program)
        self.peak = peak_flops(device_name(device), spec.precision.compute)

    def run(self, after_first_step: Callable[[], None] = lambda: None) -> TrainResult:
        """All steps, then the final weights. `after_first_step` is called once, when every graph has been compiled."""
        output, note, steps = Path(self.spec.train.output_dir), self.progress.note, self.spec.train.steps
        with ExitStack() as stack:
            log = start = None
            with together(self.mesh, "opening the run's folder"):
                if self.mesh.rank == 0:
                    start = stack.enter_context(claim_with_start(self.spec.checkpoint.resume, output, note))
                    log = stack.enter_context(RunLog(output, note))
            started = time.perf_counter()
            announce(self.engine, output, self.flops_per_token, note)
            checkpoints = RunCheckpoints(self.engine, self.loader, self.dataset.fingerprint, output, note, self.policy)
            self.checkpoints = stack.enter_context(checkpoints)
            done = checkpoints.resume(start)
            if self.spec.passes.overlap_communication.mode == "auto":
                self.engine.decide_overlap(self.loader.step(0))
            if log is not None:
                log.write_manifest(self._manifest(output, done))
            first = last = None if done else self._validate_first(log)
            audit = Audit(output, note) if self.mesh.rank == 0 else None
            if audit is not None:
                audit.begin(done, checkpoints.digest, self.dataset.fingerprint, self.spec.train.seed)
            loss, step, stopped = checkpoints.loss, done, False
            stack.enter_context(self.engine.signals)
            while step < steps and not stopped:
                step += 1
                record = self.step(step, log)
                loss = record["loss"] if "skipped" not in record else loss
                stopped = self.stop_asked and step < steps
                if self._validates(step) and not stopped:
                    last = record["validation_loss"] = self._validation_loss()
                self._say(log, record)
                if audit is not None:
                    audit.add(step_facts(record, self.expert_counts, self.sample_ids))
                    checkpoints.digest = audit.digest
                checkpoints.after_step(step, record, self.expert_counts, now=self.save_asked or stopped)
                if step == done + 1:
                    after_first_step()
            checkpoints.finish()
            if stopped:
                note(f"SIGTERM: stopped after step {step}; the same command goes on from its checkpoint")
                seconds = time.perf_counter() - started
                return TrainResult(output, step, seconds, loss, first, last, self.engine.compilations(), stopped=True)
            if done == steps and self.spec.train.validation is not None:
                last = self._validation_loss()
            weights = gather_weights(self.engine)
            if self.mesh.rank == 0:
                save_weights(output, weights, {"format": "pt", "step": str(steps)})
        seconds = time.perf_counter() - started
        result = TrainResult(output, steps, seconds, loss, first, last, self.engine.compilations())
        conclude(result.compilations, output, note)
        return result

    def _say(self, log: RunLog | None, record: dict[str, Any]) -> None:
        if log is not None:
            log.write(record)
        self.progress.show(record)

    def step(self, step: int, log: RunLog | None = None) -> dict[str, Any]:
        """One step and its record. Raises `RunError`, having changed nothing, if it is not finite."""
        try:
            return self._try_step(step, log)
        except RunError as error:
            if self.mesh.world == 1 or str(error).startswith(f"step {step}"):
                raise
            raise RunError(f"rank {self.mesh.rank}, step {step}: {error}") from error

    def _try_step(self, step: int, log: RunLog | None) -> dict[str, Any]:
        began = time.perf_counter()
        batch = self.loader.step(step - 1)
        replays = self.engine.replays
        agreed = self.engine.compute(batch)
        record: dict[str, Any] = {"step": step, **agreed.numbers(), "valid_targets": batch.valid_targets}
        if self.engine.capacity is not None:
            record.update(capacity=self.engine.capacity, replays=self.engine.replays - replays)
        lost, why = not_finite(record), self.policy.why_skip(record)
        if why is not None:
            record["skipped"] = why
            if not self.policy.skip():
                lost = f"{why}, and {self.policy.in_a_row} steps in a row were skipped, more than train.max_skips"
        if self.policy.skips:
            record["skipped_steps"] = self.policy.skipped
        if lost is not None and (why is None or lost != why):
            self._stop(step, batch, record, lost, log)
        record["lr"] = self._learning_rate(step)
        self.save_asked, self.stop_asked = agreed.save, agreed.stop
        if agreed.save:
            self.engine.signals.saved()
        if why is None:
            self.engine.commit(agreed, record["lr"])
            self.policy.accept(record["loss"], record["grad_norm"])
            every = self.spec.train.check_replicas
            if every is not None and step % every == 0:
                check_replicas(self.state, self.mesh, step)
        else:
            self.progress.note(f"step {step}: skipped, {why}; {self.policy.skipped} so far")
        self.expert_counts, self.sample_ids = agreed.expert_counts, batch.sample_ids
        if not_finite(record) is None and (step % self.spec.train.log_every == 0 or step == self.spec.train.steps):
            record["router"] = self._routing(agreed)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began
        rate = batch.tokens.numel() / seconds
        each = rate / self.mesh.world  # TFLOP/s and MFU are of one device
        record.update(seconds=seconds, tokens_per_second=rate, tflops=each * self.flops_per_token / 1e12)
        record.update(mfu=utilisation(each, self.flops_per_token, self.peak), memory_bytes=peak_memory(self.device))
        return record

    def _stop(self, step: int, batch: StepBatch, record: dict[str, Any], why: str, log: RunLog | None) -> NoReturn:
        """Ends the run by a step that is not accepted: nothing has been changed by it."""
        if log is not None:
            log.write(record)
        if self.checkpoints is not None:
            self.checkpoints.finish()
        found = ""
        if self.spec.train.non_finite == "dump" and not_finite(record) is not None:
            found = dump_step(self.engine, step, batch, record, Path(self.spec.train.output_dir))
        raise RunError(
            f"step {step}: {why}; the model is as it was after step {step - 1}, and nothing of it is written; "
            f"{found or 'a lower train.optimizer.lr or a longer warmup may help'}"
        )

    def _learning_rate(self, step: int) -> float:
        train = self.spec.train
        return learning_rate(step, train.steps, train.schedule, train.optimizer.lr)

    def _routing(self, agreed: Agreed) -> dict[str, Any]:
        """Per MoE layer, what its router did in this step."""
        columns = zip(
            self._moe_layers(),
            agreed.expert_counts,
            agreed.probability_sum,
            agreed.router_entropy,
            agreed.dropped,
            strict=True,
        )
        return {
            f"layers.{n}": layer_routing(counts, p, entropy, dropped).to_json()
            for n, counts, p, entropy, dropped in columns
        }

    def _moe_layers(self) -> list[int]:
        return [n for n in range(self.spec.model.num_layers) if not self.spec.model.is_dense(n)]

    def _validates(self, step: int) -> bool:
        every = self.spec.train.validation
        return every is not None and (step % every.every == 0 or step == self.spec.train.steps)

    def _validate_first(self, log: RunLog | None) -> float | None:
        """Validation before the first step, as a record of its own."""
        if self.spec.train.validation is None:
            return None
        record = {"step": 0, "loss": None, "grad_norm": None, "validation_loss": self._validation_loss()}
        self._say(log, record)
        return record["validation_loss"]

    def _validation_loss(self) -> float:
        """Mean cross entropy per valid target over the held-out sequences."""
        assert self.validation is not None
        return self.engine.evaluate([self.validation.step(i) for i in range(len(self.validation))])

    def _manifest(self, folder: Path, resumed_from: int) -> dict[str, Any]:
        return build_manifest(
            resolved_spec=self.spec.model_dump(mode="json", by_alias=True),
            graph_hashes=self.compiled.hashes,
            data={"source": self.spec.data.source, "fingerprint": self.dataset.fingerprint},
            parameters=count_parameters(self.program),
            flops_per_token=self.flops_per_token,
            device=device_name(self.device),
            tuning_tables=table_digests(self.device),
            overlap_seconds=self.engine.overlap_seconds,
            resumed_from=resumed_from,
            folder=folder,
        )
