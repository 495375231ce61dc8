"""Fold an adapter into its base model, and keep the result only if it is proved to be the model that was trained.

    adapter/ + base model → checks of the adapter → merged weights → certificate → merged/

The base is loaded afresh: the model that training used, or that has answered a prompt, may hold other numbers than its
files. Without a passed certificate there is no merged/, and certificate.json says why.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from surefit.config.resolve import HardwareLike
from surefit.config.schema import AdapterSection, Config
from surefit.core.errors import DataError, GateError, ModelError
from surefit.core.progress import OnProgress, silent
from surefit.core.rundir import RunDir, directory_atomic, write_json
from surefit.core.sampling import evenly
from surefit.generate.save import save_model
from surefit.merge import certify
from surefit.merge.certify import Check, Reading
from surefit.merge.dequantize import dequantize
from surefit.model.adapter import CONFIG, PREFIX, WEIGHTS, adapted_modules, completeness
from surefit.model.identity import adapter_identity, base_directory, base_identity, read_record, weights_sha256
from surefit.model.load import load_model, load_tokenizer
from surefit.model.saved import load_adapted, load_saved

PROMPTS = 32
"""Held-out rows, taken evenly, that the models are compared on."""


def merge(
    config: Config,
    hardware: HardwareLike,
    run: RunDir,
    sequences: Sequence[Sequence[int]],
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Write merged/ and certificate.json (LoRA), or certificate.json for model/ (full fine-tune).

    Args:
        config: nothing in it is "auto".
        hardware: where the models are loaded, one at a time.
        sequences: token ids of the run's held-out rows, prompt and gold answer.
        on_progress: called with (steps done, steps, what comes next).

    Returns:
        The certificate, as in certificate.json.

    Raises:
        GateError: a check failed; there is no merged/, and certificate.json holds all that was measured.
        DataError: no sequences.
        ModelError: the base model cannot be loaded.
        MachineError: the disk is full or may not be written to.
    """
    if not sequences:
        raise DataError("there are no held-out rows to compare the models on", field="data.eval", help="set data.eval")
    chosen = [sequences[i] for i in evenly(len(sequences), PROMPTS)]
    job = _Merge(config, hardware, run, chosen, on_progress)
    steps = job.certify_model if config.adapter.kind == "full" else job.merge_adapter
    try:
        steps()
    except GateError as error:
        if config.adapter.kind == "lora":
            shutil.rmtree(run.merged, ignore_errors=True)
        write_json(run.certificate, job.certificate(passed=False, reason=error.message))
        raise GateError(
            f"the merge is not certified: {error.message}" if config.adapter.kind == "lora" else error.message,
            path=run.certificate,
            help=error.help or "do not use these weights; docs/merge.md explains every check",
        ) from error
    certificate = job.certificate(passed=True, reason="every check passed")
    write_json(run.certificate, certificate)
    return certificate


class _Merge:
    """One merge: its inputs, and the certificate as it grows."""

    def __init__(
        self,
        config: Config,
        hardware: HardwareLike,
        run: RunDir,
        sequences: Sequence[Sequence[int]],
        on_progress: OnProgress,
    ) -> None:
        self.config, self.hardware, self.run, self.sequences = config, hardware, run, sequences
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.on_progress = on_progress
        self.started = time.monotonic()
        self.checks: list[Check] = []
        self.positions = 0
        self.base_sha256: str | None = None
        self.adapter_sha256: str | None = None
        self.merged_sha256: str | None = None

    def certificate(self, passed: bool, reason: str) -> dict[str, Any]:
        return {
            "passed": passed,
            "reason": reason,
            "checks": [check.as_dict() for check in self.checks],
            "prompts": len(self.sequences),
            "positions": self.positions,
            "base": {"name": self.config.model.name_or_path, "sha256": self.base_sha256},
            "adapter_sha256": self.adapter_sha256,
            "merged_sha256": self.merged_sha256,
            "dtype": self.config.model.dtype,
            "seconds": round(time.monotonic() - self.started, 2),
        }

    def require(self, *checks: Check, help: str | None = None) -> None:
        """Add checks to the certificate; the first that fails ends the merge."""
        self.checks.extend(checks)
        for check in checks:
            if not check.passed:
                raise GateError(str(check), help=help)

    def merge_adapter(self) -> None:
        self.on_progress(0, 4, "checking the adapter")
        record = self._same_base(self.run.adapter)
        self.adapter_sha256 = adapter_identity(self.run.adapter)
        self.require(_scaling(self.run.adapter, self.config.adapter))
        with directory_atomic(self.run.merged) as temporary:
            self.on_progress(1, 4, "merging")
            in_memory, changed = self._write_merged(temporary, record)
            self.merged_sha256 = base_identity(temporary)
            self.on_progress(2, 4, "comparing with the adapter")
            adapter, base = self._read_adapter()
            self.on_progress(3, 4, "comparing what is on disk")
            reloaded, size = self._read_saved(temporary)
            self._compare(base, adapter, in_memory, reloaded, changed, size)
            # From here until the new certificate is written there is none: a crash leaves nothing that looks certified.
            self.run.certificate.unlink(missing_ok=True)
        self.on_progress(4, 4, "certified")

    def certify_model(self) -> None:
        """A full fine-tune has nothing to merge: show that model/ loads as what training held in memory."""
        self.on_progress(0, 2, "checking the model")
        record = self._same_base(self.run.model)
        self.merged_sha256 = base_identity(self.run.model)
        self.on_progress(1, 2, "comparing what is on disk")
        model = self._open_saved(self.run.model)
        state = model.state_dict()
        self.require(
            Check(
                "weights_as_trained", weights_sha256(state), record["weights_sha256"], "==",
                "the hash that training took of the weights in memory",
            ),
            _finite("weights_not_finite", state),
        )  # fmt: skip
        logits = certify.read_logits(model, self.sequences)
        del model, state
        base = certify.read_logits(load_model(self.config.model, self.hardware), self.sequences)
        self._count(base)
        found = certify.difference(base, logits)
        self.require(
            Check("logits_not_finite", found.infinite, 0, "==", "of the base or the trained model"),
            Check("trained_differs_from_base", found.rms > 0, True, "==", "training changes something"),
        )
        self.on_progress(2, 2, "certified")

    def _same_base(self, directory: Path) -> dict[str, Any]:
        record = read_record(directory)
        self.base_sha256 = base_identity(base_directory(self.config.model))
        self.require(
            Check(
                "base_identity", self.base_sha256, record["base"]["sha256"], "==",
                f"{directory.name}/ was trained from {record['base']['name']} with this hash of config, weights and "
                "vocabulary",
            ),
            help="set model.name_or_path and model.revision to the base it was trained from, or train again",
        )  # fmt: skip
        return record

    def _write_merged(self, directory: Path, record: dict[str, Any]) -> tuple[Reading, tuple[str, ...]]:
        """Merge in memory, write, and only then let the model read: see `certify.read`.

        Into what the adapter was trained beside: of a quantised base, the weights it computes with.
        """
        model: Any = load_model(self.config.model, self.hardware)
        stored_otherwise = dequantize(model)
        modules = adapted_modules(model, self.config.adapter.target_modules)
        self.require(_complete(self.run.adapter, modules))
        factors = load_file(self.run.adapter / WEIGHTS)
        self.require(
            Check(
                "adapter_as_trained", weights_sha256(factors), record["weights_sha256"], "==",
                "the hash that training took of the factors in memory",
            )
        )  # fmt: skip
        scaling = self.config.adapter.alpha / self.config.adapter.r
        worst = max(fold(model.get_submodule(name), *_factors(factors, name), scaling) for name in modules)
        self.require(
            _finite("weights_not_finite", model.state_dict()),
            Check(
                "merge_rounding", worst, 1.0, "<=",
                f"largest error of a weight W + {scaling:g}·BA; 1 is the bound on computing it in float32 and rounding "
                f"it once to {self.config.model.dtype}",
            ),
        )  # fmt: skip
        base = base_directory(self.config.model)
        save_model(model, load_tokenizer(self.config.model), base, directory)
        changed = (*(f"{name}.weight" for name in modules), *(f"{name}." for name in stored_otherwise))
        return certify.read(model, self.sequences), changed

    def _read_adapter(self) -> tuple[Reading, Reading]:
        """What base + adapter is and answers, and the same with the adapter switched off."""
        model = load_adapted(self.config.model, self.run.adapter, self.hardware)
        adapter = certify.read(model, self.sequences)
        with model.disable_adapter():
            base = Reading(adapter.weights, certify.read_logits(model, self.sequences))
        return adapter, base

    def _open_saved(self, directory: Path) -> Any:
        try:
            return load_saved(self.config.model, directory, self.hardware)
        except ModelError as error:
            self.require(Check("loads_from_disk", error.message, "loads", "==", "what was written must load whole"))
            raise

    def _read_saved(self, directory: Path) -> tuple[Reading, certify.Size]:
        model = self._open_saved(directory)
        return certify.read(model, self.sequences), certify.size_of(model)

    def _compare(
        self,
        base: Reading,
        adapter: Reading,
        in_memory: Reading,
        reloaded: Reading,
        changed: tuple[str, ...],
        size: certify.Size,
    ) -> None:
        self._count(adapter.logits)
        # What a quantised layer holds has other names and bytes than what it is merged to; the logits speak for it.
        untouched = {name: base.weights[name] for name in base.weights if not name.startswith(changed)}
        self.require(
            certify.same_weights("weights_off_disk", in_memory.weights, reloaded.weights, "loaded as written"),
            certify.same_weights("weights_off_base", untouched, reloaded.weights, "what has no factors is the base's"),
            *certify.agreement("in_memory", adapter.logits, in_memory.logits, self.dtype, size),
            *certify.agreement("reloaded", adapter.logits, reloaded.logits, self.dtype, size),
            certify.effect_kept(base.logits, adapter.logits, reloaded.logits),
        )

    def _count(self, logits: certify.Logits) -> None:
        self.positions = sum(len(rows) for rows in logits)


@torch.no_grad()
def fold(layer: torch.nn.Module, a: torch.Tensor, b: torch.Tensor, scaling: float) -> float:
    """W ← W + scaling · B A in float32, rounded once to W's dtype.

    Args:
        layer: `nn.Linear`, weight (outputs, inputs), or transformers' `Conv1D`, whose weight is transposed.
        a: (r, inputs). b: (outputs, r).

    Returns:
        The largest error of a merged weight, as a share of the rounding error that this arithmetic may make: below 1.
        The bound is u|W'| + 2 · 2⁻²⁴ (|W'| + (r + 2) · scaling · |B| |A|) (Higham, §3.5), with the exact W' taken from
        float64; its first term is the rounding to W's dtype, its second the sum.
    """
    weight = layer.weight
    assert isinstance(weight, torch.nn.Parameter)
    matrix = weight.data.T if isinstance(layer, Conv1D) else weight.data
    a, b = a.to(matrix.device), b.to(matrix.device)
    worst = 0.0
    for start in range(0, len(matrix), 1024):  # a block at a time: float64 copies of a whole layer are large
        rows = slice(start, start + 1024)
        old, part = matrix[rows], b[rows]
        new = (old.float() + scaling * (part.float() @ a.float())).to(old.dtype)
        exact = old.double() + scaling * (part.double() @ a.double())
        terms = scaling * (part.double().abs() @ a.double().abs())
        unit, unit32 = torch.finfo(old.dtype).eps / 2, torch.finfo(torch.float32).eps / 2
        bound = unit * exact.abs() + 2 * unit32 * (exact.abs() + (len(a) + 2) * terms) + torch.finfo(old.dtype).tiny
        worst = max(worst, float(((new.double() - exact).abs() / bound).max()))
        matrix[rows] = new
    return worst


def _factors(tensors: dict[str, torch.Tensor], module: str) -> tuple[torch.Tensor, torch.Tensor]:
    return tensors[f"{PREFIX}{module}.lora_A.weight"], tensors[f"{PREFIX}{module}.lora_B.weight"]


def _scaling(directory: Path, section: AdapterSection) -> Check:
    try:
        saved = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        value = f"{saved['lora_alpha']:g}/{saved['r']}"
    except (OSError, ValueError, KeyError) as error:
        raise GateError(f"the adapter cannot be read: {error}", path=directory / CONFIG, help="train again") from error
    return Check("adapter_scaling", value, f"{section.alpha:g}/{section.r}", "==", "alpha/r as the run was configured")


def _complete(directory: Path, modules: dict[str, tuple[int, int]]) -> Check:
    try:
        completeness(directory, modules)
        found = "complete"
    except GateError as error:
        found = error.message
    return Check("adapter_complete", found, "complete", "==", "factors for every layer, finite, of its shape, not zero")


def _finite(name: str, state: dict[str, torch.Tensor]) -> Check:
    floats = {key: tensor for key, tensor in state.items() if tensor.is_floating_point()}
    bad = [key for key, tensor in floats.items() if not bool(torch.isfinite(tensor).all())]
    return Check(name, len(bad), 0, "==", f"tensors with NaN or infinity{': ' + bad[0] if bad else ''}")
