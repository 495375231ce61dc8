"""The training loop: optimizer steps, held-out loss, checkpoints, and a clean stop at any time.

Everything that decides a step (rows, learning rate, dropout) is a pure function of the config and the step number, so a
resumed run equals one that was never interrupted, bit for bit where the arithmetic is deterministic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from surefit.checkpoint.manager import versions
from surefit.checkpoint.snapshot import build_checkpoint_state
from surefit.config.by_objective import require_several_rows
from surefit.config.capabilities import require_compatible_settings
from surefit.config.resolve import iter_config_values, optimizer_steps
from surefit.config.schema import SureFitConfig, decided
from surefit.core.errors import ConfigError, Interrupted
from surefit.core.rundir import PAIRS_AT_START, RunDir, skip_if_disk_full
from surefit.core.units import duration_text
from surefit.model.adapter import lora_modules
from surefit.parallel.engine import SINGLE
from surefit.parallel.process_group import all_reduce_any, barrier, run_on_rank0
from surefit.telemetry.jsonl import MetricsLog
from surefit.telemetry.memory import PhaseMemory
from surefit.telemetry.sink import FanOut
from surefit.train import resuming
from surefit.train.batches import MicroBatcher
from surefit.train.checkpointing import CheckpointWriter
from surefit.train.divergence import MAX_REJECTED_IN_A_ROW, build_divergence_error, require_an_update
from surefit.train.dry_pass import run_dry_pass
from surefit.train.expert_use import ExpertUse
from surefit.train.export import export_trained_model, tensors_to_save
from surefit.train.first_batch import check_first_batch, check_first_labelled_batch, failed_first_batch
from surefit.train.heldout import HeldOutEvaluation
from surefit.train.identity import build_run_identity, execution_settings
from surefit.train.inputs import Callbacks, TrainingData, TrainingEnvironment
from surefit.train.loss import require_whole_routing
from surefit.train.objectives.build import build_objective
from surefit.train.objectives.labels import LabelObjective
from surefit.train.objectives.pairs import PairObjective
from surefit.train.optim import MasterOptimizer, make_optimizer
from surefit.train.out_of_memory import explain_out_of_memory
from surefit.train.preflight import AUDITED, require_sound_batches
from surefit.train.progress import Counters, TrainResult
from surefit.train.reference import StoredReference, key_with_partners, reference_key, switch_off_dropout
from surefit.train.reporting import EtaEstimator, StepReporter, build_mfu_meter
from surefit.train.sampler import dropout_seed, fingerprint_rows, fingerprint_training_rows
from surefit.train.scaling import LossScale
from surefit.train.schedule import learning_rate
from surefit.train.signals import StopRequest
from surefit.train.step import Batch, StepResult, train_step

COMPUTED_AGAIN = {
    "damaged": "damaged", "another": "of another run", "otherwise": "of other micro batches or another device",
}  # fmt: skip
"""State of a stored reference that is not used → the reason."""
SINGLE_PROCESS, NO_CALLBACKS = TrainingEnvironment(), Callbacks()


class Trainer:
    """One training run over tokenized rows.

    Args:
        model: prepared by model/prepare.py, on its device.
        data: tokenized rows.
        config: resolved: no setting is "auto".
        run: run directory that everything is written into.
        environment, callbacks: by default a single process without callbacks.

    Raises:
        DataError: no rows, or a row without a supervised token.
        ConfigError: settings that cannot be combined; `checkpoint.metric_for_best_model` is not measured.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        data: TrainingData,
        config: SureFitConfig,
        run: RunDir,
        environment: TrainingEnvironment = SINGLE_PROCESS,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> None:
        require_compatible_settings(config)
        require_several_rows(config)
        require_whole_routing(model, config.parallel)
        rows, tokenizer, facts, hardware = data.rows, data.tokenizer, environment.model, environment.hardware
        self.engine = engine = environment.engine or SINGLE
        self.world = engine.world
        self.adapted = lora_modules(model) if isinstance(model, PeftModel) else {}
        self.expert_use = ExpertUse(model)
        self.objective = build_objective(config.objective)
        dropping = switch_off_dropout(model) if config.objective.has_reference else 0
        self.survey, self.held_out_survey = fingerprint_training_rows(rows), fingerprint_rows(data.eval_rows)
        self.reference_key = self._build_reference_key(model, config) if config.objective.has_reference else ""
        self.model, self.data, self.config, self.run = engine.wrap(model), data, config, run
        self.environment, self.callbacks = environment, callbacks
        kind, longest = next(model.parameters()).device.type, int(self.survey.lengths.max())
        self._explained = partial(explain_out_of_memory, config=config, model=facts, kind=kind, longest=longest)
        train = config.train
        epochs, batch = decided(train.num_train_epochs), decided(train.global_batch_size)
        self.total_steps = optimizer_steps(
            len(rows) // config.objective.answers_per_example, epochs, batch, train.max_steps
        )
        self.optimizer = self._new_optimizer()
        self.scaling = LossScale() if config.model.dtype == "float16" else None
        self.model.train()
        self.sinks = FanOut(callbacks.sinks if self.world.is_first else (), self.note)
        self.log = MetricsLog(run.metrics, self.sinks.log, self.world.is_first)
        self.memory = PhaseMemory()
        pad = tokenizer.pad_token_id or 0  # padding is masked, so any token id works
        ranks = engine.data_size
        self.batches = MicroBatcher(rows, self.survey.lengths, config, pad, ranks)
        held_out = MicroBatcher(data.eval_rows, self.held_out_survey.lengths, config, pad, ranks)
        self.held_out = HeldOutEvaluation(
            self.model, held_out, config, self.log, self.memory, callbacks.score, engine, self.objective
        )
        checkpoint_lines, save_steps = self.held_out.at_checkpoints, config.checkpoint.save_steps
        self.saving = CheckpointWriter(
            run, config.checkpoint, self.memory, self.log, checkpoint_lines, self.note, self.world
        )
        assert isinstance(save_steps, int)
        self.pace, self.meter = (
            EtaEstimator(save_steps, train.eval_steps),
            build_mfu_meter(model, config, facts, hardware, self.world.size),
        )
        self.counters = Counters()
        self.loss, self.told_to_end = math.nan, False
        self.notes: list[str] = []
        if dropping:
            self.note(f"dropout is off in {dropping} modules of the base model: the reference has none")

    def fit(self, resume: bool = False) -> TrainResult:
        """Train to the last step and write the result.

        Args:
            resume: continue from the newest complete checkpoint; start from the beginning if there is none.

        Raises:
            Interrupted: after a stop signal, with a complete checkpoint of the last finished step.
            GateError: the batch audit found an error; too many rejected steps in a row.
            MachineError: not enough disk space at the start or GPU memory; another process uses the run directory.
            ConfigError, ModelError: there are checkpoints and `resume` is False, or they belong to other settings, or
                all are damaged.
        """
        params = dict(iter_config_values(self.config)) | build_run_identity(
            self.config, self.survey, self.held_out_survey, self.total_steps
        )
        sinks_open = self.sinks.during(str(self.run.path), params)
        stopping = StopRequest(lambda flag: all_reduce_any(flag, self.world))
        with stopping as stop, self.saving.open(stop), self._memory_noted(), sinks_open:
            if resume:
                self.saving.await_room()
                self.dry_pass()
                self._prepare_reference(stop)  # before a checkpoint's weights replace the model of step 0
            resumed_from = resuming.resume_from_latest(self) if resume else None
            if resume and resumed_from is None:
                self.note("there is no checkpoint to resume from: training begins at the first step")
            if resumed_from is None:
                self.saving.require_none()
                self.saving.require_room(self.optimizer.parameters)
                run_on_rank0(self.world, lambda: self.log.rewind(0))
            if self.counters.step < self.total_steps:
                self.audit()
            if not resume:
                self.dry_pass()
                self._prepare_reference(stop)
            if self.counters.step == 0:
                self._check_first_batch()
            if resumed_from is not None and not self.held_out.is_measured(resumed_from):
                self._measure_if_due(stop)
            self._run(stop)
            run_on_rank0(self.world, lambda: require_an_update(self.run, self.counters))
            best_step = resuming.load_best_checkpoint(self)
            tensors = self.engine.whole(tensors_to_save(self.model))
            output = self.saving.write_result(
                self.optimizer.parameters,
                lambda: export_trained_model(
                    self.model, self.data.tokenizer, self.config.model, self.run, tensors, self.adapted
                ),
            )
            self._leave_if_asked(stop)
        early = self.counters.step < self.total_steps
        return TrainResult(
            output, self.counters, self.loss, self.held_out.loss, resumed_from, self.notes, best_step, early
        )

    def audit(self, write: bool = True) -> None:
        """Audit the next micro batches as the loss will get them; an error found is raised as a `GateError`."""
        if self.world.is_first:
            self._audit(write)
        barrier(self.world)

    def _audit(self, write: bool) -> None:
        micros = [*self.batches.of_step(self.counters.step)[:AUDITED], self.batches.fullest()]
        data = self.data
        batches = [(self.batches.make(micro), self.batches.items(micro)) for micro in micros]
        require_sound_batches(batches, data.tokenizer, data.conversations, self.config, self.run if write else None)

    def dry_pass(self, write: bool = True) -> None:
        """Run the worst case, before the first step and before a resume; it leaves nothing but dry_pass.json.

        Raises:
            GateError, MachineError: training would fail (train/dry_pass.py, train/out_of_memory.py).
        """
        with self._explained("in the dry pass, before the first step"), self._phase("dry pass"):
            result = run_dry_pass(
                self.model, self.optimizer, self.batches, self.held_out.batches, self.config, self.memory,
                self.run.checkpoints, self.engine, self.objective,
            )  # fmt: skip
        self.optimizer = self._new_optimizer()
        self.expert_use.taken()  # discard the counts of the dry pass
        self.pace.pause = result.eval_batches * result.eval_seconds
        self.note(result.text(self.environment.planned))
        if warning := result.warning(self.environment.planned):
            self.note(warning)
            self.run.note("train", "dry pass outside the plan", where=result.against(self.environment.planned))
        if write and self.world.is_first:
            with skip_if_disk_full():
                result.write(self.run)

    def _build_reference_key(self, model: torch.nn.Module, config: SureFitConfig) -> str:
        """Return `reference_key`, before the engine divides the weights."""
        dtype = config.model.dtype
        return run_on_rank0(self.world, lambda: reference_key(model, dtype, self.survey, self.held_out_survey))

    def _prepare_reference(self, stop: StopRequest) -> None:
        """Read the stored reference, compute what it lacks with the model as it is before the first step, and hand it
        to the batches; nothing for an objective without a reference.

        Raises:
            ConfigError: a run that continues from a checkpoint finds the reference of another model or other rows.
            Interrupted: after a stop signal, with what is computed saved.
        """
        if not self.config.objective.has_reference:
            return
        partners = [*self.batches.partners_sha256, *self.held_out.batches.partners_sha256]
        stored = StoredReference(
            self.run.reference, key_with_partners(self.reference_key, partners), self.batches,
            self.held_out.batches, self.total_steps,
            execution_settings(self.config, self.engine.name, self.engine.data_size) | versions() | {
                "data.max_length": self.config.data.max_length,
                "train.global_batch_size": self.config.train.global_batch_size,
            },
            self.engine,
        )  # fmt: skip
        continues = self.saving.latest().path is not None
        state = stored.load(continues)
        if state == "another" and continues:
            resuming.require_resumable(self)
            raise ConfigError(
                "the stored reference was computed with other weights, rows or another dtype",
                code="E5841",
                path=self.run.reference,
                field="objective",
                help="restore the base model to resume, or start over in another output_dir",
            )
        if state in COMPUTED_AGAIN:
            self.note(f"{self.run.reference.name} is {COMPUTED_AGAIN[state]}: computed again")
        if missing := stored.missing():
            start = time.perf_counter()
            explained = self._explained("in the reference pass, before the first step")
            with explained, self._phase("reference"), self.memory.during("reference"):
                finished = stored.compute(self.model, self.config.speed.chunked_loss, stop.agreed)
            self.expert_use.taken()  # discard the counts of the pass
            if not finished:
                self._leave_if_asked(stop)
            self.note(
                f"reference: {missing:,} {self.config.objective.examples_name} under the model of step 0, "
                f"{duration_text(time.perf_counter() - start)}"
            )
        stored.hand_out()
        if self.world.is_first and self.counters.step == 0 and (means := stored.held_out_means()) is not None:
            self.run.note("train", PAIRS_AT_START, chosen=means[0], rejected=means[1])

    def _check_first_batch(self) -> None:
        """Check the first batch of a preference objective against its known loss (train/first_batch.py).

        Raises:
            GateError: they differ.
        """
        if not isinstance(self.objective, PairObjective | LabelObjective):
            return
        micros = self.batches.of_step(0)[: AUDITED * self.batches.ranks]
        batches = [self.batches.make(micro) for micro in self.batches.share(micros, self.engine.data_rank)]
        with self._explained("in the check of the first batch, before the first step"):
            if isinstance(self.objective, LabelObjective):
                result = check_first_labelled_batch(self.model, batches, self.objective, self.config, self.engine)
            else:
                result = check_first_batch(self.model, batches, self.objective, self.config, self.engine)
        self.expert_use.taken()  # discard the counts of the check
        if self.world.is_first:
            with skip_if_disk_full():
                result.write(self.run)
        if not result.passed:
            raise failed_first_batch(result, self.model, self.run)
        self.note(result.text())

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Report that something else than steps is at work, then that training goes on."""
        self.callbacks.on_phase(name, self.counters.step, self.total_steps)
        yield
        self.callbacks.on_phase("training", self.counters.step, self.total_steps)

    def _new_optimizer(self) -> MasterOptimizer:
        optimizer: MasterOptimizer = self.engine.optimizer(self.model, partial(make_optimizer, train=self.config.train))
        return optimizer

    def _memory_noted(self) -> AbstractContextManager[None]:
        return self.memory.noted(self.run) if self.world.is_first else nullcontext()

    def _run(self, stop: StopRequest) -> None:
        """Run optimizer steps up to the last one, with the measurements and checkpoints that are due."""
        first_step = self.counters.step
        share = decided(self.config.train.global_batch_size) / self.batches.examples
        reporting = StepReporter(self.log, self.callbacks.on_progress, self.total_steps, share, self.pace, self.meter)
        while self.counters.step < self.total_steps and not self._stops_early():
            self.memory.enter("first step" if self.counters.step == first_step else "step")
            self._step(reporting)
            saved = stop.agreed() or self._is_due()
            if saved:
                self._save()
            if self._measure_if_due(stop) and not saved:
                saved = stop.agreed() or self.held_out.stopped_improving
                if saved:
                    self._save()
            if saved:  # a signal that arrives later is handled after the next step, which is then saved
                self._leave_if_asked(stop)

    def _measure_if_due(self, stop: StopRequest) -> bool:
        """Measure the held-out loss if it is due after this step; return whether it is."""
        step, eval_steps = self.counters.step, self.config.train.eval_steps
        at_checkpoint = self._is_due()
        if not (at_checkpoint or (eval_steps and step > 0 and step % eval_steps == 0)):
            return False
        with self._explained(f"while measuring the held-out loss after step {step}"), self._phase("held-out loss"):
            self.held_out.measure(step, stop, at_checkpoint)
        return True

    def _is_due(self) -> bool:
        save_steps, step = self.config.checkpoint.save_steps, self.counters.step
        assert isinstance(save_steps, int)
        return self.told_to_end or step == self.total_steps or (step > 0 and step % save_steps == 0)

    def _step(self, reporting: StepReporter) -> None:
        """Run one optimizer step, then count, log and report it."""
        step, train = self.counters.step, self.config.train
        start = time.perf_counter()
        torch.manual_seed(dropout_seed(train.seed, step, self.engine.data_rank))
        rate = learning_rate(
            step, self.total_steps, train.learning_rate, train.lr_scheduler_type, train.warmup_steps, train.decay_steps
        )
        self.optimizer.learning_rate = rate
        micros = self.batches.of_step(step)
        rank_micros = self.batches.share(micros, self.engine.data_rank)
        batches = [self.batches.make(micro) for micro in rank_micros]
        with self._explained(f"in step {step + 1}"):
            result = train_step(
                self.model, batches, self.optimizer, train.max_grad_norm, chunked=self.config.speed.chunked_loss,
                scaling=self.scaling, engine=self.engine, objective=self.objective,
            )  # fmt: skip
        seconds = time.perf_counter() - start
        self._count(result, seconds)
        documents = self.batches.document_lengths(micros)
        if self.world.is_first:
            use = self.expert_use.taken()
            end_requested = reporting.step(
                self.counters,
                result,
                rate,
                seconds,
                documents,
                self.held_out.loss,
                use,
                self.held_out.step,
                self.batches.shared_prompts(micros),
            )
            self.told_to_end = end_requested and self.world.size == 1
        if self.counters.rejected_in_a_row >= MAX_REJECTED_IN_A_ROW:
            newest = self.saving.newest()
            run_on_rank0(self.world, lambda: self._give_up(batches, result, newest))

    def _give_up(self, batches: Sequence[Batch], result: StepResult, newest: Path | None) -> None:
        raise build_divergence_error(self.run, self.counters, batches, result, self.config.train.seed, newest)

    def _count(self, result: StepResult, seconds: float) -> None:
        counters = self.counters
        counters.step += 1
        counters.tokens += result.tokens
        counters.supervised_tokens += result.supervised_tokens
        counters.seconds += seconds
        fault = not result.applied and not result.overflow
        counters.overflows += result.overflow
        counters.rejected += fault
        counters.rejected_in_a_row = 0 if result.applied else counters.rejected_in_a_row + fault
        if result.applied:
            self.loss = result.loss

    def _stops_early(self) -> bool:
        if self.told_to_end:
            self.note(f"ended after step {self.counters.step} on request of a callback")
            return True
        if not self.held_out.stopped_improving:
            return False
        patience, metric = self.config.train.early_stopping_patience, self.held_out.metric
        self.note(
            f"stopped after step {self.counters.step}: {patience} measurements without an improvement of {metric}"
        )
        return True

    def _save(self) -> None:
        identity = build_run_identity(self.config, self.survey, self.held_out_survey, self.total_steps)
        execution = execution_settings(self.config, self.engine.name, self.engine.data_size)
        trainer = {"counters": self.counters.as_dict(), "identity": identity, "carried_out": execution}
        if self.scaling is not None:
            trainer["loss_scale"] = self.scaling.state()
        weights_and_state = self.optimizer.parameters, self.optimizer.tensors()
        self.saving.save(
            self.counters.step, build_checkpoint_state(self.engine, *weights_and_state, trainer, bool(self.adapted))
        )

    def _leave_if_asked(self, stop: StopRequest) -> None:
        if stop.agreed():
            self.saving.wait()
            raise Interrupted(
                f"stopped by {stop.signal_name} after step {self.counters.step} of {self.total_steps}; it is saved",
                code="E5105",
                path=self.run.path,
                help=f"continue with: {self.environment.resume_command}",
            )

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.callbacks.on_note(text)
