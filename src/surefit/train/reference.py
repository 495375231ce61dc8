"""The stored reference: the log-probabilities of a run's examples under the model as it is before the first step.

One forward pass over the pairs that the run will see, or over the labelled answers and their mismatched ones
(train/mismatched.py), with the very model that is about to be trained: new factors are still zero, an adapter that is
continued is in place. So the reference is the start of the run by construction, for LoRA, a continued adapter, full
fine-tuning and quantized weights alike, and no second model is held.

RUN/reference.safetensors    train  (examples, 2) float32  chosen and rejected, or the answer and the mismatched one, in
                                                       nats; NaN for examples that no step sees
                             eval   (held-out examples, 2)
                             metadata: {"key": …}, the hash of all that the numbers depend on, {"sha256": …}, the
                             numbers' own, and {"rounding": …}, settings that decide their last bits

The pass goes through the micro batches of the steps, so that a step sees numbers that were computed from the same
tensors. It is saved from time to time, and a run that was killed meanwhile continues it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from surefit.core.errors import GateError
from surefit.core.rundir import write_atomic
from surefit.model.identity import named_tensors_sha256, tensor_sha256
from surefit.model.quantize import hidden_tensors
from surefit.parallel.engine import Engine
from surefit.parallel.process_group import all_gather, run_on_rank0
from surefit.train.batches import MicroBatcher
from surefit.train.loss import token_losses
from surefit.train.objectives.labels import answer_and_mismatched
from surefit.train.objectives.pairs import Batch, evaluate_answers
from surefit.train.sampler import DatasetFingerprint

SAVED_EVERY = 256
"""Examples between two saves of a pass; at least a hundredth of all examples."""

FACTOR = re.compile(r"(\.lora_(?:embedding_)?)([AB])\.")
"""LoRA's two factors, by the names of PEFT; of a new pair one is zero, an embedding's A or another layer's B."""

References = dict[str, npt.NDArray[np.float32]]
"""The tensors of the file: train and eval."""


def reference_key(
    model: torch.nn.Module,
    dtype: str,
    survey: DatasetFingerprint,
    held_out: DatasetFingerprint,
) -> str:
    """Return the hash of all that a reference depends on: every weight of the model at step 0 (the base's, with the
    scales of quantized ones, and the adapter's), the dtype of the computation, and the tokens of all examples. About a
    second per GB of weights.

    A factor of LoRA counts only where the other one is not zero: a new one is random, and of no effect.

    Args:
        model: whole, before an engine shards it, so that all modes have the same hash.
    """
    named = dict(model.named_parameters())
    zero = [name for name, tensor in named.items() if FACTOR.search(name) and not tensor.any()]
    idle = {FACTOR.sub(lambda match: f"{match[1]}{'A' if match[2] == 'B' else 'B'}.", name) for name in zero}
    # Without names: switches that rename modules, such as compiled layers, may change on resume.
    tensors = [*(tensor for name, tensor in named.items() if name not in idle), *_other_tensors(model)]
    weights = sorted(map(tensor_sha256, tensors))
    return hashlib.sha256(json.dumps([dtype, survey.sha256, held_out.sha256, weights]).encode()).hexdigest()


def key_with_partners(key: str, partners: Sequence[str]) -> str:
    """Return `reference_key` with the hashes of what mismatched answers are made from, where there are any
    (`MicroBatcher.partners_sha256`)."""
    return hashlib.sha256(json.dumps([key, *partners]).encode()).hexdigest() if partners else key


def _other_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield what a model computes with beside its parameters: saved buffers, such as the scales of fp8, and the scales
    of nf4. Weights that are twice as large have the same bits, and other scales."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer
    for _, _, _, tensor in hidden_tensors(model):
        yield tensor


def switch_off_dropout(model: torch.nn.Module) -> int:
    """Set the dropout of the model's own modules to 0, as the reference has none; return how many had some.

    Many families keep rates as plain numbers, of the module (OPT, BLOOM, StarCoder2) or of the config, which some read
    in the forward pass (Falcon).
    """
    found, configs = 0, {}
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            module.p, found = 0.0, found + 1
        elif rates := _dropout_rates(module):
            vars(module).update(dict.fromkeys(rates, 0.0))
            found += 1
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            configs[id(config)] = config
    for config in configs.values():
        for name in _dropout_rates(config):
            setattr(config, name, 0.0)
    return found


def _dropout_rates(owner: object) -> list[str]:
    """Return the names of the attributes that are a dropout rate above 0."""
    return [name for name, value in vars(owner).items() if "drop" in name and isinstance(value, float) and value > 0]


class StoredReference:
    """The reference of one run.

    Args:
        path: its file.
        key: from `reference_key`.
        train, held_out: the batchers; each gets its numbers.
        steps: optimizer steps of the run.
        rounding: settings and device that decide the last bits, which in 16 bits are tenths of a nat per token.
        engine: distributes the pass over processes; the first one writes.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        train: MicroBatcher,
        held_out: MicroBatcher,
        steps: int,
        rounding: Mapping[str, Any],
        engine: Engine,
    ) -> None:
        self.path, self.key, self.steps, self.engine = path, key, steps, engine
        self.rounding = json.dumps(rounding, sort_keys=True)
        self.batchers = {"train": train, "eval": held_out}
        self.values: References = {
            name: np.full((batcher.examples, 2), np.nan, np.float32) for name, batcher in self.batchers.items()
        }

    def load(self, continues: bool) -> str:
        """Read the file; return "found", or "absent", "damaged", "another" or "otherwise" where there is none for this
        run; the last where the same numbers were rounded otherwise.

        Args:
            continues: whether steps have been taken with these numbers, which then are kept, however rounded.
        """
        state, values = run_on_rank0(self.engine.world, lambda: self._read(continues))
        if state == "found":
            self.values = values
        return state

    def _read(self, continues: bool) -> tuple[str, References]:
        if not self.path.exists():
            return "absent", {}
        try:
            with safe_open(self.path, framework="numpy") as file:
                metadata = file.metadata() or {}
                values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return "damaged", {}
        if metadata.get("key") != self.key:
            return "another", {}
        fits = {name: array.shape for name, array in values.items()} == {n: a.shape for n, a in self.values.items()}
        if not fits or metadata.get("sha256") != _sha256(values):
            return "damaged", {}
        # Other micro batches, as after running out of memory in the pass: the rewards would not be 0 at the start.
        return ("found", values) if continues or metadata.get("rounding") == self.rounding else ("otherwise", {})

    def missing(self) -> int:
        """Return the number of examples that the run needs and the file lacks."""
        return sum(len(micro) for _, micro in self._pending())

    def _pending(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the micro batches with an example that is not known yet, in the order of the steps, then the held-out
        ones."""
        train, seen = self.batchers["train"], _known(self.values["train"])
        for step in range(self.steps):
            if seen.all():
                break
            for micro in train.of_step(step):
                if not seen[micro].all():
                    seen[micro] = True
                    yield "train", micro
        held_out, known = self.batchers["eval"], _known(self.values["eval"])
        yield from (("eval", micro) for micro in held_out.cut(range(held_out.examples)) if not known[micro].all())

    def compute(
        self,
        model: torch.nn.Module,
        chunked: bool,
        stop: Callable[[], bool],
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> bool:
        """Compute what is missing, and save it; return False if `stop` asked to leave before the end, with what is
        done saved.

        Args:
            model: as it is before the first step; its mode is restored.
        """
        was_training = model.training
        model.eval()
        try:
            return self._compute(model, chunked, stop, on_progress)
        finally:
            model.train(was_training)

    @torch.no_grad()
    def _compute(
        self, model: torch.nn.Module, chunked: bool, stop: Callable[[], bool], on_progress: Callable[[int], None]
    ) -> bool:
        pending = list(self._pending())
        total = sum(len(micro) for _, micro in pending)
        block, done, unsaved = max(SAVED_EVERY, total // 100), 0, 0
        ranks, rank = self.engine.data_size, self.engine.data_rank
        for start in range(0, len(pending), ranks):
            group = pending[start : start + ranks]
            # Where there is none left, an empty one: weights in shards are gathered from all processes.
            name, micro = group[rank] if rank < len(group) else (group[0][0], [])
            values = dict(all_gather((rank, self._measure(model, name, micro, chunked)), self.engine.world))
            for number, (name, micro) in enumerate(group):
                _require_finite(values[number], micro)
                self._fill(name, micro, values[number])
            done, unsaved = done + sum(len(m) for _, m in group), unsaved + sum(len(m) for _, m in group)
            asked = stop()
            if asked or unsaved >= block or start + ranks >= len(pending):
                self._write()
                unsaved = 0
            on_progress(done)
            if asked and done < total:
                return False
        return True

    def _measure(self, model: torch.nn.Module, name: str, micro: list[int], chunked: bool) -> npt.NDArray[np.float32]:
        def losses_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
            return token_losses(model, batch, chunked)[0]

        batch = self.batchers[name].make(micro)
        if "mismatched" in batch:  # in whole models only: a process without a micro batch has nothing to gather
            log_probs = answer_and_mismatched(model, batch, chunked) if micro else torch.zeros(0, 2)
        else:
            log_probs = evaluate_answers(self.engine, model, batch, losses_of).log_probs
        values: npt.NDArray[np.float32] = log_probs.float().cpu().numpy()
        return values

    def _fill(self, name: str, micro: list[int], values: npt.NDArray[np.float32]) -> None:
        """Take over what is not known yet: a later micro batch may repeat an example, padded otherwise."""
        for pair, value in zip(micro, values, strict=True):
            if np.isnan(self.values[name][pair]).any():
                self.values[name][pair] = value

    def _write(self) -> None:
        metadata = {"key": self.key, "sha256": _sha256(self.values), "rounding": self.rounding}
        content = safetensors.numpy.save(self.values, metadata)
        run_on_rank0(self.engine.world, lambda: write_atomic(self.path, content))

    def held_out_means(self) -> tuple[float, float] | None:
        """Return the mean log-probability of the held-out pairs' chosen and rejected answers, or of the desirable and
        the undesirable ones; None without answers of both kinds."""
        values, batcher = self.values["eval"], self.batchers["eval"]
        if batcher.partners is None:
            kinds = [values[:, 0], values[:, 1]]
        else:
            kinds = [values[batcher.desirable, 0], values[~batcher.desirable, 0]]
        return (float(kinds[0].mean()), float(kinds[1].mean())) if all(map(len, kinds)) else None

    def hand_out(self) -> None:
        """Give the batchers their numbers."""
        for name, batcher in self.batchers.items():
            batcher.reference = self.values[name]


def _require_finite(values: npt.NDArray[np.float32], micro: list[int]) -> None:
    if not np.isfinite(values).all():
        number = micro[int(np.argmin(np.isfinite(values).all(axis=1)))]
        raise GateError(
            f"the log-probability of an answer is not finite under the model before the first step: example {number}",
            code="E5842",
            field="model.dtype",
            help="the base model overflows on these tokens: try bfloat16 or float32; no step was taken",
        )


def _sha256(values: References) -> str:
    return named_tensors_sha256({name: torch.from_numpy(array) for name, array in values.items()})


def _known(values: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Return which examples have both of their numbers."""
    return np.asarray(~np.isnan(values).any(axis=1), dtype=np.bool_)
