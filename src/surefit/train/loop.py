"""The training loop: steps, held-out loss, checkpoints, and a way out of it at any time.

Everything that decides a step (rows, learning rate, dropout) is a pure function of the config and the step number, so a
resumed run equals one that was never interrupted, bit for bit where the arithmetic is deterministic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefit.checkpoint import manager
from surefit.config.resolve import optimizer_steps
from surefit.config.schema import Config
from surefit.core.errors import ConfigError, GateError, Interrupted, MachineError, ModelError
from surefit.core.rundir import RunDir
from surefit.data.collate import collate
from surefit.model.compat import checkpoint_activations
from surefit.telemetry.jsonl import MetricsLog
from surefit.telemetry.memory import PhaseMemory
from surefit.train.export import export
from surefit.train.identity import identity, require_same
from surefit.train.optim import MasterAdamW, learning_rate
from surefit.train.order import Rows, batch_rows, dropout_seed, micro_batches, survey
from surefit.train.preflight import audited_rows, require_sound_batches
from surefit.train.progress import Counters, OnNote, OnStep, Progress, TrainResult
from surefit.train.signals import StopRequest
from surefit.train.step import Batch, StepResult, mean_loss, train_step

MAX_REJECTED_IN_A_ROW = 10
"""After so many steps without a finite gradient nothing will come of the run."""


class Training:
    """One run over tokenised rows.

    Args:
        model: with its adapter, or whole; on its device.
        tokenizer: saved beside the result; its padding token fills up micro batches.
        rows: the training rows, each (input ids, labels), every one with a supervised token.
        eval_rows: the held-out rows; may be empty.
        config: nothing in it is "auto".
        run: where everything is written.
        conversations: the rows are conversations, whose prompts must be masked; plain text has none.
        resume_command: what the user types to continue after an interruption.
        on_progress: called after every step.
        on_note: called with a sentence when something unusual happened.

    Raises:
        DataError: no rows, or one without a supervised token.
        ConfigError: float16 weights.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        rows: Rows,
        eval_rows: Rows,
        config: Config,
        run: RunDir,
        conversations: bool = False,
        resume_command: str = "surefit train --resume",
        on_progress: OnStep = lambda progress: None,
        on_note: OnNote = lambda text: None,
    ) -> None:
        self.model, self.tokenizer, self.config, self.run = model, tokenizer, config, run
        self.rows, self.eval_rows, self.conversations = rows, eval_rows, conversations
        self.resume_command, self.on_progress, self.on_note = resume_command, on_progress, on_note
        self.survey = survey(rows)
        train = config.train
        self.total_steps = optimizer_steps(len(rows), train.epochs, train.global_batch_size, train.max_steps)
        self.optimizer = MasterAdamW(model, train.weight_decay)
        if any(p.dtype == torch.float16 for p in self.optimizer.parameters.values()):
            raise ConfigError(
                "training in float16 needs loss scaling, which SureFit does not have yet",
                field="model.dtype",
                help="use bfloat16, or float32 on a GPU without it",
            )
        if train.gradient_checkpointing is True:
            checkpoint_activations(model)
        model.train()
        self.log = MetricsLog(run.metrics)
        self.memory = PhaseMemory()
        self.counters = Counters()
        self.eval_loss: float | None = None
        self.loss = math.nan
        self.notes: list[str] = []

    def fit(self, resume: bool = False) -> TrainResult:
        """Train to the last step and write the result.

        Args:
            resume: continue from the newest complete checkpoint, or start where there is none.

        Raises:
            Interrupted: after a stop signal, with a complete checkpoint of the last finished step.
            GateError: the batches are not what they should be; too many rejected steps in a row.
            MachineError: no disk space, no GPU memory.
            ConfigError, ModelError: checkpoints are there and not to be resumed, are of other settings, or all damaged.
        """
        with StopRequest() as stop, self.memory.noted(self.run):
            resumed_from = self._resume() if resume else None
            if resumed_from is None:
                self._start()
            if self.counters.step < self.total_steps:
                self.audit()
            if resumed_from is not None and self._is_due() and self.eval_loss is None:
                self._evaluate(stop)
            first, began = self.counters.step, time.monotonic()
            while self.counters.step < self.total_steps:
                self.memory.enter("first step" if self.counters.step == first else "step")
                self._step(first, began)
                if self._is_due():
                    self._save()
                    self._evaluate(stop)
                elif stop.requested:
                    self._save()
                self._leave_if_asked(stop)
            self._require_an_update()
            output = export(self.model, self.tokenizer, self.config.model, self.run)
            self._leave_if_asked(stop)
        return TrainResult(output, self.counters, self.loss, self.eval_loss, resumed_from, self.notes)

    def audit(self, write: bool = True) -> None:
        """Look at the next micro batches as the loss will see them; an error found there is a `GateError`."""
        batches = [
            (next(self._batches(self.rows, micro, self.survey.lengths)), [self.rows[index] for index in micro])
            for micro in audited_rows(self.config.train, self.survey.lengths, self.counters.step)
        ]
        require_sound_batches(batches, self.tokenizer, self.conversations, self.config, self.run if write else None)

    def _is_due(self) -> bool:
        every, step = self.config.checkpoint.every, self.counters.step
        assert isinstance(every, int)
        return step == self.total_steps or (step > 0 and step % every == 0)

    def _step(self, first: int, began: float) -> None:
        """One optimizer step, counted, logged and announced."""
        step, train = self.counters.step, self.config.train
        start = time.perf_counter()
        torch.manual_seed(dropout_seed(train.seed, step))
        rate = learning_rate(step, self.total_steps, train.learning_rate, train.schedule, train.warmup)
        self.optimizer.learning_rate = rate
        batch = batch_rows(step, train.seed, len(self.rows), train.global_batch_size)
        batches = list(self._batches(self.rows, batch, self.survey.lengths))
        try:
            result = train_step(self.model, batches, self.optimizer, train.max_grad_norm)
        except torch.OutOfMemoryError as error:
            longest = max(micro["input_ids"].shape[1] for micro in batches)
            raise MachineError(
                f"the GPU's memory ran out in step {step + 1}, with micro batches of "
                f"{train.per_device_train_batch_size} rows of up to {longest} tokens",
                field="train.per_device_train_batch_size",
                help="halve it (the global batch stays), or set train.gradient_checkpointing: true; then --resume",
            ) from error
        seconds = time.perf_counter() - start
        self._count(result, seconds)
        self._report(result, rate, seconds, (time.monotonic() - began) / (self.counters.step - first))
        self._stop_if_hopeless()

    def _batches(self, rows: Rows, chosen: Sequence[int], lengths: Any) -> Iterator[Batch]:
        size = self.config.train.per_device_train_batch_size
        assert isinstance(size, int)
        pad = self.tokenizer.pad_token_id or 0  # masked wherever it stands, so any token does
        for micro in micro_batches(chosen, lengths, size):
            yield collate([rows[index] for index in micro], pad)

    def _count(self, result: StepResult, seconds: float) -> None:
        counters = self.counters
        counters.step += 1
        counters.tokens += result.tokens
        counters.supervised_tokens += result.supervised_tokens
        counters.seconds += seconds
        counters.rejected += not result.applied
        counters.rejected_in_a_row = 0 if result.applied else counters.rejected_in_a_row + 1
        if result.applied:
            self.loss = result.loss

    def _report(self, result: StepResult, rate: float, seconds: float, pace: float) -> None:
        step = self.counters.step
        epoch = round(step * self.config.train.global_batch_size / len(self.rows), 4)
        speed = result.tokens / seconds
        record = {
            "step": step,
            "epoch": epoch,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
            "tokens": result.tokens,
            "supervised_tokens": result.supervised_tokens,
            "tokens_per_second": speed,
            "seconds": seconds,
            "memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            "rejected": not result.applied,
        }
        self.log.append(record)
        left = pace * (self.total_steps - step)
        self.on_progress(
            Progress(
                step, self.total_steps, epoch, result.loss, result.grad_norm, rate, speed, left,
                not result.applied, self.eval_loss,
            )
        )  # fmt: skip

    def _stop_if_hopeless(self) -> None:
        if self.counters.rejected_in_a_row < MAX_REJECTED_IN_A_ROW:
            return
        step = self.counters.step
        steps = manager.list_steps(self.run.checkpoints)
        raise GateError(
            f"the loss or the gradient was not finite in steps {step - MAX_REJECTED_IN_A_ROW + 1} to {step}",
            path=steps[-1][1] if steps else self.run.path,
            field="train.learning_rate",
            help="no update was made with them; lower the learning rate, or check the base model and its dtype"
            + ("; the last checkpoint is good" if steps else ""),
        )

    def _require_an_update(self) -> None:
        if self.counters.rejected == self.counters.step:
            raise GateError(
                f"all {self.counters.step} steps were rejected: the loss or the gradient was never finite",
                path=self.run.path,
                field="train.learning_rate",
                help="nothing was learnt; check the base model and its dtype",
            )

    def _evaluate(self, stop: StopRequest) -> None:
        """Log the held-out loss, unless a stop is asked for: then the resumed run does."""
        lengths = [len(self.eval_rows[index][0]) for index in range(len(self.eval_rows))]
        batches = self._batches(self.eval_rows, range(len(lengths)), lengths)
        with self.memory.during("eval"):
            measured = mean_loss(self.model, batches, lambda: stop.requested)
        if measured is not None:
            self.eval_loss, tokens = measured
            self.log.append({"step": self.counters.step, "eval_loss": self.eval_loss, "eval_tokens": tokens})

    def _save(self) -> None:
        same = identity(self.config, self.survey, self.total_steps)
        trainer = {"counters": self.counters.as_dict(), "identity": same}
        state = manager.State(self.optimizer.parameters, self.optimizer.tensors(), trainer)
        with self.memory.during("save"):
            manager.save(self.run.checkpoints, self.counters.step, state)
        for path in manager.prune(self.run.checkpoints, self.config.checkpoint.save_total_limit):
            self._note(f"{path} should be gone and cannot be deleted: the disk may fill up")

    def _start(self) -> None:
        if steps := manager.list_steps(self.run.checkpoints):
            raise ConfigError(
                f"there is a run here already: its newest checkpoint is step {steps[-1][0]}",
                path=self.run.path,
                field="output_dir",
                help="--resume continues it, --overwrite deletes it first, or choose another output_dir",
            )
        self.log.rewind(0)

    def _resume(self) -> int | None:
        """Continue from the newest complete checkpoint; returns its step."""
        latest = manager.latest_complete(self.run.checkpoints)
        for path, fault in latest.skipped:
            self._note(f"{path.name} is damaged and was skipped: {fault}")
        if latest.path is None:
            if latest.skipped:
                raise ModelError(
                    f"all {len(latest.skipped)} checkpoints are damaged: {latest.skipped[0][1]}",
                    path=self.run.checkpoints,
                    help="--overwrite starts anew; if the disk is failing, choose another output_dir",
                )
            return None
        state = manager.load(latest.path)
        now = identity(self.config, self.survey, self.total_steps)
        require_same(state.trainer["identity"], now, self.run.path)
        manager.restore(state, self.optimizer.parameters, latest.path)
        self.optimizer.load_tensors(state.optimizer)
        self.counters = Counters(**state.trainer["counters"])
        for line in self.log.rewind(latest.step):
            if "loss" in line and not line["rejected"]:
                self.loss = line["loss"]
            if line["step"] == latest.step:
                self.eval_loss = line.get("eval_loss", self.eval_loss)
        for change in manager.changed_versions(latest.path):
            self._note(f"{change}: the last bits may differ from an uninterrupted run")
        self.run.note("train", "resumed", step=latest.step, skipped=[path.name for path, _ in latest.skipped])
        return latest.step

    def _leave_if_asked(self, stop: StopRequest) -> None:
        if stop.requested:
            raise Interrupted(
                f"stopped by {stop.signal_name} after step {self.counters.step} of {self.total_steps}; it is saved",
                path=self.run.path,
                help=f"continue with: {self.resume_command}",
            )

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.on_note(text)
