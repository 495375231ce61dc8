"""Folds an adapter into its base model, and keeps the result only if it is certified to be the trained model.

    adapter + base files → checks of the adapter → merged files → certificate → merged/

Weights are read from the base's files, merged and written one file at a time, and the models that are compared run from
their files layer by layer: the peak memory is one file and one layer, whatever the model's size. No weights are taken
from a model in memory: after training or generation it may hold other values than its files. Without a passed
certificate there is no merged/, and certificate.json says why.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefit.config.resolve import HardwareLike
from surefit.config.schema import LoraSection, ModelSection, SureFitConfig
from surefit.core.errors import DataError, GateError, ModelError
from surefit.core.malloc import trim_heap
from surefit.core.progress import OnProgress, ignore_progress
from surefit.core.rundir import RunDir, directory_atomic, read_json, write_json
from surefit.core.sampling import evenly_spaced
from surefit.generate.save import save_surroundings
from surefit.merge import certify
from surefit.merge.adapter_file import AdapterFile, read_adapter
from surefit.merge.certify import HeldLogits, LogitSource, MergeCheck
from surefit.merge.combine import AdapterCombination
from surefit.merge.dequantize import build_dequantizer, use_stored_weight
from surefit.merge.experts import add_expert_updates
from surefit.merge.stream import (
    CHANGES_NOTHING,
    StreamedMerge,
    find_misfits,
    find_untrained_layers,
    require_in_files,
    resized_vocabulary,
)
from surefit.model.adapter import adapted_modules, adapted_stacks
from surefit.model.identity import (
    RECORD,
    adapter_identity,
    base_directory,
    base_identity,
    base_record,
    describe_base,
    named_tensors_sha256,
    origin_entry,
    read_record,
)
from surefit.model.layerwise_forward import LayerwiseModel, WeightFiles, perturb_weights
from surefit.model.load import load_model
from surefit.model.multimodal_wrapper import MultimodalWrapper, multimodal_config
from surefit.model.saved import load_resized, load_saved, with_adapter
from surefit.model.tokenizer import Resized, load_tokenizer, new_tokens, tokens_with_rows
from surefit.model.vocabulary import token_rows, vocabulary_modules

PROMPTS = 32
"""Number of held-out rows, evenly spaced, that the models are compared on."""
FAILED_CERTIFICATE = "certificate.failed.json"
"""Holds what a failed merge measured where certificate.json belongs to a certified model of another adapter."""
OTHER_BASE = (
    "name the base it was trained with: --base; if it is this one, save the adapter again with "
    "PeftModel.save_pretrained"
)
UNTRAINED = "name the adapter as it was saved after training"
MergeTarget = Literal["auto", "original", "dequantized"]
"""The weights that an adapter which was trained on a quantized base is merged into; auto means dequantized for such a
base."""


@dataclass(frozen=True)
class MergeJob:
    """An adapter to merge, or a merged model to certify.

    Attributes:
        base: the base as in the adapter's training: with its quantization, and a resolved dtype.
        adapter: adapter directory of PEFT or of a run. merged, certificate: paths that are written, or checked.
        expected: configuration of the adapter, if it is known.
        into: see `MergeTarget`.
        tokenizer: directory or id of the tokenizer for the merged model; None for the base's.
        combined: the adapters that `adapter` combines (merge/combine.py); the merged weights are compared with these.
    """

    base: ModelSection
    adapter: Path
    merged: Path
    certificate: Path
    expected: LoraSection | None = None
    into: MergeTarget = "auto"
    tokenizer: str | None = None
    combined: AdapterCombination | None = None

    @property
    def dequantized(self) -> bool:
        return self.base.quantization != "none" and self.into != "original"


def merge_and_certify(
    config: SureFitConfig,
    hardware: HardwareLike,
    run: RunDir,
    sequences: Sequence[Sequence[int]],
    on_progress: OnProgress = ignore_progress,
    into: MergeTarget = "auto",
) -> dict[str, Any]:
    """Write a run's merged/ and certificate.json (LoRA), or certificate.json for model/ (full fine-tune).

    Args:
        config: resolved: no setting is "auto".
        hardware: the hardware that computes.
        sequences: token ids of the run's held-out rows, prompt and gold answer.
        on_progress: called with (steps done, steps, name of the next step).

    Returns:
        The certificate, as in certificate.json.

    Raises:
        GateError: a check failed; there is no merged/, and certificate.json holds all measurements.
        DataError: no sequences.
        ModelError: the base model cannot be loaded.
        MachineError: the disk is full or may not be written to.
    """
    if config.train.method == "full":
        certifying = _CertificateBuilder(config.model, hardware, sequences, on_progress)
        return _run_and_certify(certifying, run.certificate, lambda: _certify_model(certifying, run))
    job = MergeJob(config.model, run.adapter, run.merged, run.certificate, config.adapter, into)
    return merge_adapter_job(job, hardware, sequences, on_progress)


def merge_adapter_job(
    job: MergeJob, hardware: HardwareLike, sequences: Sequence[Sequence[int]], on_progress: OnProgress = ignore_progress
) -> dict[str, Any]:
    """Write `job.merged` and its certificate; arguments and result as `merge_and_certify`."""
    certifying = _CertificateBuilder(job.base, hardware, sequences, on_progress)
    if job.expected is not None or not _certifies_another(job):
        return _run_and_certify(certifying, job.certificate, lambda: _merge(certifying, job), remove=job.merged)
    # What is in the way is the certified model of another adapter: only a certified one may take its place.
    failed = job.certificate.with_name(FAILED_CERTIFICATE)
    try:
        merged = _run_and_certify(certifying, failed, lambda: _merge(certifying, job))
    except GateError as error:
        error.help = f"{error.help}; {job.merged} still holds the certified model of another adapter"
        raise
    failed.replace(job.certificate)
    return merged


def _certifies_another(job: MergeJob) -> bool:
    """Return whether `job.merged` holds a certified model of another adapter than the job's."""
    if not job.merged.is_dir() or not job.certificate.is_file():
        return False
    earlier = read_json(job.certificate)
    return (
        isinstance(earlier, dict)
        and earlier.get("passed") is True
        and earlier.get("adapter_sha256") != adapter_identity(job.adapter)
    )


def certify_merged(
    job: MergeJob, hardware: HardwareLike, sequences: Sequence[Sequence[int]], on_progress: OnProgress = ignore_progress
) -> dict[str, Any]:
    """Return the certificate of an existing merged model, made by any tool; writes nothing.

    Raises:
        ModelError: `job.merged` holds no model, or the base cannot be read.
    """
    certifying = _CertificateBuilder(job.base, hardware, sequences, on_progress)
    try:
        adapter, streamed = certifying.checked_adapter(job)
        certifying.check_merged(job, adapter, streamed, job.merged, None)
    except GateError as error:
        return certifying.certificate(passed=False, reason=error.message)
    return certifying.certificate(passed=True, reason="every check passed")


def _run_and_certify(
    certifying: _CertificateBuilder, certificate: Path, steps: Callable[[], None], remove: Path | None = None
) -> dict[str, Any]:
    """Run the steps, and write the certificate however they end."""
    try:
        steps()
    except GateError as error:
        if remove is not None:
            shutil.rmtree(remove, ignore_errors=True)
        write_json(certificate, certifying.certificate(passed=False, reason=error.message))
        raise GateError(
            error.message if remove is None else f"the merge is not certified: {error.message}",
            code=error.code,
            path=certificate,
            field=error.field,
            help=error.help or "do not use these weights; docs/merge.md explains every check",
        ) from error
    passed_certificate = certifying.certificate(passed=True, reason="every check passed")
    write_json(certificate, passed_certificate)
    return passed_certificate


class _CertificateBuilder:
    """Collects the checks and facts of a certificate."""

    def __init__(
        self,
        base: ModelSection,
        hardware: HardwareLike,
        sequences: Sequence[Sequence[int]],
        on_progress: OnProgress,
    ) -> None:
        if not sequences:
            raise DataError(
                "there are no held-out rows to compare the models on",
                code="E6018",
                field="data.eval",
                help="set data.eval",
            )
        self.base, self.hardware, self.on_progress = base, hardware, on_progress
        self.sequences = evenly_spaced(sequences, PROMPTS)
        self.dtype: torch.dtype = getattr(torch, base.dtype)
        self.directory = base_directory(base)
        self.started = time.monotonic()
        self.checks: list[MergeCheck] = []
        self.positions = 0
        self.resized: Resized | None = None
        self.about: dict[str, Any] = {
            "base": {"name": base.name_or_path, "sha256": None, **origin_entry(self.directory)}
        }

    def certificate(self, passed: bool, reason: str) -> dict[str, Any]:
        return {
            "passed": passed,
            "reason": reason,
            "checks": [check.as_dict() for check in self.checks],
            "prompts": len(self.sequences),
            "positions": self.positions,
            "adapter_sha256": None,
            "merged_sha256": None,
            "dtype": self.base.dtype,
            **self.about,
            "seconds": round(time.monotonic() - self.started, 2),
        }

    def require(self, *checks: MergeCheck, help: str | None = None) -> None:
        """Add checks to the certificate; raise at the first that fails."""
        self.checks.extend(checks)
        for check in checks:
            if not check.passed:
                raise GateError(str(check), code="E6019", help=help)

    def same_base(self, directory: Path) -> dict[str, Any]:
        """Check that the base is the one that training recorded, and return the record."""
        record = read_record(directory)
        self.about["base"] = base_record(self.base)
        self.require(
            MergeCheck(
                "base_identity",
                self.about["base"]["sha256"],
                record["base"]["sha256"],
                "==",
                f"{directory.name}/ was trained from {describe_base(record['base'])} with this hash of "
                "config, weights and vocabulary",
            ),
            help="set model.name_or_path and model.revision to the base it was trained from, or train again",
        )
        return record

    def checked_adapter(self, job: MergeJob) -> tuple[AdapterFile, LayerwiseModel]:
        """Read the adapter, and check that it is the one that was trained and that it fits the base."""
        self.on_progress(0, 4, "checking the adapter")
        self.about |= {"quantization": self.base.quantization, "into": "dequantized" if job.dequantized else "original"}
        # An adapter of another tool has no record of its base: the certificate then shows that the base is unverified.
        record = self.same_base(job.adapter) if job.expected or (job.adapter / RECORD).exists() else None
        self.about["adapter_sha256"] = adapter_identity(job.adapter)
        self.about["base_recorded"] = record is not None
        streamed = LayerwiseModel(self.base, self.directory, self.hardware.kind)
        adapter = self._read_adapter(job.adapter, streamed.model)
        rows = len(vocabulary_modules(streamed.model)[0].weight)
        tokens = tokens_with_rows(self.base, job.tokenizer, rows) if job.tokenizer is not None else 0
        self.resized = resized_vocabulary(adapter, streamed.model, tokens)
        if self.resized is not None:
            streamed = LayerwiseModel(self.base, self.directory, self.hardware.kind, self.resized)
        self.about["not_trained"] = find_untrained_layers(adapter)
        if job.combined is not None:
            self.about["combined"] = job.combined.as_dict()
        expected = None
        if job.expected is not None:
            config, section = adapter.config, job.expected
            self.require(
                MergeCheck(
                    "adapter_scaling",
                    _scaling(config.get("lora_alpha", 0), config["r"], bool(config.get("use_rslora"))),
                    _scaling(section.lora_alpha, section.r, section.use_rslora),
                    "==",
                    "alpha/r as the run was configured, or alpha/√r",
                )
            )  # fmt: skip
            expected = {*adapted_modules(streamed.model, section.target_modules)}
            expected |= {name.removesuffix(".weight") for name in adapted_stacks(streamed.model, section)}
        added_tokens = new_tokens(self.base)
        problems = find_misfits(
            adapter, streamed.model, expected, token_rows(streamed.model, added_tokens.ids) if added_tokens else None
        )
        self.require(
            MergeCheck(
                "adapter_complete", "; ".join(problems[:3]) or "complete", "complete", "==",
                "factors for every layer, finite, of its shape, not all zero; a row for every new token",
            ),
            help=None if record is not None else UNTRAINED if CHANGES_NOTHING in " ".join(problems) else OTHER_BASE,
        )  # fmt: skip
        if record is not None:
            self.require(
                MergeCheck(
                    "adapter_as_trained", named_tensors_sha256(adapter.tensors), record["weights_sha256"], "==",
                    "the hash that training recorded for the factors in memory",
                )
            )  # fmt: skip
        return adapter, streamed

    def tokenizer(self, job: MergeJob) -> PreTrainedTokenizerBase:
        """Load the tokenizer for the merged model."""
        changes = {} if job.tokenizer is None else {"name_or_path": job.tokenizer}
        return load_tokenizer(self.base.model_copy(update=changes))

    def _read_adapter(self, directory: Path, model: PreTrainedModel) -> AdapterFile:
        try:
            return add_expert_updates(read_adapter(directory), model)
        except GateError as error:
            self.checks.append(MergeCheck("adapter_complete", error.message, "complete", "==", "readable and complete"))
            raise

    def merging(self, job: MergeJob, adapter: AdapterFile, streamed: LayerwiseModel) -> StreamedMerge:
        frozen = build_dequantizer(streamed.model, self.base.quantization) if job.dequantized else use_stored_weight
        parts = job.combined.parts() if job.combined is not None else None
        merging = StreamedMerge(
            streamed.model, streamed.weights, adapter, self.dtype, frozen, self.hardware.kind, parts
        )
        require_in_files(merging)
        return merging

    def check_merged(
        self,
        job: MergeJob,
        adapter: AdapterFile,
        streamed: LayerwiseModel,
        directory: Path,
        written: dict[str, str] | None,
    ) -> None:
        """Check the merged weights, then the outputs of the models."""
        self.about["merged_sha256"] = base_identity(directory)
        self.on_progress(2, 4, "comparing the weights")
        trim_heap()  # of the merged file's matrices, each of a few MiB
        self._check_weights(self.merging(job, adapter, streamed), directory, written)
        self.on_progress(3, 4, "comparing the answers")
        saved_section = ModelSection(
            name_or_path=str(directory), dtype=self.base.dtype, trust_remote_code=self.base.trust_remote_code
        )
        merged, nudged, size = self._read(saved_section, directory)
        base, tuned = self._read_adapted(job, adapter)
        self.positions = tuned.positions
        advice = (
            "the adapter was trained on quantized weights: merge it into these, with --into dequantized"
            if self.base.quantization != "none" and not job.dequantized
            else None
        )
        difference = certify.compare_logits(tuned, merged, nudged, base)
        self.require(*certify.check_agreement("reloaded", difference, self.dtype, size), help=advice)
        self.require(certify.check_effect(difference))

    def _check_weights(self, merging: StreamedMerge, directory: Path, written: dict[str, str] | None) -> None:
        try:
            result = merging.check(WeightFiles(directory), written, lambda done, files: None)
        except ModelError as error:
            self.require(
                MergeCheck("loads_from_disk", error.message, "loads", "==", "the written files must load completely")
            )
            raise
        rounding, worst = result.rounding
        self.require(
            _check_none("weights_off_disk", result.off_disk, "the file has the computed values bit for bit"),
            _check_none("weights_off_base", result.off_base, "tensors without factors equal the base's"),
            _check_none("weights_not_finite", result.not_finite, "tensors with NaN or infinity"),
            MergeCheck(
                "merge_rounding", rounding, 1.0, "<=",
                "largest error of a weight W + scaling·BA; 1 is the bound for computing in float32 and rounding "
                f"once to {self.base.dtype}{f': {worst}' if rounding > 1 else ''}",
            ),
        )  # fmt: skip

    def _read(
        self, section: ModelSection, directory: Path
    ) -> tuple[LogitSource, LogitSource, certify.RoundingDimensions]:
        """Return the logits of a model with unquantized weights, the logits after each weight is nudged, and the
        model's dimensions."""
        try:
            streamed = LayerwiseModel(section, directory, self.hardware.kind)
            model: Any = streamed.model
            size = certify.rounding_dimensions(model)
            share = certify.nudge(self.dtype, size)
            if streamed.why_not():
                model = load_saved(section, directory, self.hardware)
                logits = certify.read_logits(model, self.sequences)
                for name, parameter in model.named_parameters():
                    perturb_weights(parameter.data, share, name)
                return HeldLogits(logits), HeldLogits(certify.read_logits(model, self.sequences)), size
            merged, nudged = (self._read_from_files(streamed, model, nudge) for nudge in (0.0, share))
            return merged, nudged, size
        except ModelError as error:
            self.require(
                MergeCheck("loads_from_disk", error.message, "loads", "==", "the written files must load completely")
            )
            raise

    def _read_adapted(self, job: MergeJob, adapter: AdapterFile) -> tuple[LogitSource, LogitSource]:
        """Return the logits of the base alone, and with the adapter as it was trained.

        They are two models, or the base's logits are computed before PEFT loads the adapter: tensors that PEFT loads
        into the base itself, such as trained biases, stay there while the adapter is disabled.
        """
        streamed = LayerwiseModel(self.base, self.directory, self.hardware.kind, self.resized)
        if self.base.quantization != "none" or streamed.why_not():
            base_model = load_resized(self.base, self.hardware, self.resized)
            base = HeldLogits(certify.read_logits(base_model, self.sequences, self.hardware.kind))
            adapted: Any = with_adapter(base_model, job.adapter)
            return base, certify.read_states(adapted, self.sequences, self.hardware.kind)
        alone = LayerwiseModel(self.base, self.directory, self.hardware.kind, self.resized)
        adapted = streamed.with_adapter(job.adapter, adapter.read_by_peft)
        return self._read_from_files(alone, alone.model), self._read_from_files(streamed, adapted)

    def _read_from_files(self, streamed: LayerwiseModel, model: Any, nudge: float = 0.0) -> LogitSource:
        running = partial(streamed.running, model, nudge)
        return certify.read_states(model, self.sequences, self.hardware.kind, running)


def _merge(certifying: _CertificateBuilder, job: MergeJob) -> None:
    adapter, streamed = certifying.checked_adapter(job)
    merging = certifying.merging(job, adapter, streamed)
    with directory_atomic(job.merged) as temporary:
        certifying.on_progress(1, 4, "merging")
        tensor_hashes = merging.write(temporary, lambda done, files: None)
        _write_surroundings(certifying, job, merging, temporary)
        certifying.check_merged(job, adapter, streamed, temporary, tensor_hashes)
        # Until the new certificate is written there is none: after a crash nothing looks certified.
        job.certificate.unlink(missing_ok=True)
    certifying.on_progress(4, 4, "certified")


def _write_surroundings(
    certifying: _CertificateBuilder, job: MergeJob, merging: StreamedMerge, directory: Path
) -> None:
    model: Any = merging.model
    tokenizer = certifying.tokenizer(job)
    if merging.unties:
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    save_surroundings(model, tokenizer, certifying.directory, directory)


def _certify_model(certifying: _CertificateBuilder, run: RunDir) -> None:
    """Certify a full fine-tune, which needs no merge: check that model/ loads as the weights that training held in
    memory."""
    certifying.on_progress(0, 2, "checking the model")
    record = certifying.same_base(run.model)
    certifying.about["merged_sha256"] = base_identity(run.model)
    certifying.on_progress(1, 2, "comparing what is on disk")
    try:
        model: Any = load_saved(certifying.base, run.model, certifying.hardware)
    except ModelError as error:
        certifying.require(
            MergeCheck("loads_from_disk", error.message, "loads", "==", "the written files must load completely")
        )
        raise
    state = model.state_dict()
    infinite = [name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())]
    certifying.require(
        MergeCheck(
            "weights_as_trained", named_tensors_sha256(state), record["weights_sha256"], "==",
            "the hash that training recorded for the weights in memory",
        ),
        _check_none("weights_not_finite", infinite, "tensors with NaN or infinity"),
    )  # fmt: skip
    config = multimodal_config(model.config, certifying.directory)
    if config is not None:
        changed_tensors = MultimodalWrapper(model, config, certifying.directory).changed_in(run.model)
        certifying.require(_check_none("weights_off_base", changed_tensors, "untrained tensors equal the base's"))
    logits = certify.read_logits(model, certifying.sequences)
    del model, state
    base = certify.read_logits(load_model(certifying.base, certifying.hardware), certifying.sequences)
    certifying.positions = sum(len(rows) for rows in base)
    difference = certify.compare_logits(base, logits)
    certifying.require(
        MergeCheck("logits_not_finite", difference.infinite, 0, "==", "of the base or the trained model"),
        MergeCheck("trained_differs_from_base", difference.rms > 0, True, "==", "training changes something"),
    )
    certifying.on_progress(2, 2, "certified")


def _scaling(alpha: float, rank: int, stabilised: bool) -> str:
    """Format alpha/r, or alpha/√r, as text: a quotient would hide which of the two numbers differs."""
    return f"{alpha:g}/{'√' * stabilised}{rank}"


def _check_none(name: str, found: list[str], why: str) -> MergeCheck:
    return MergeCheck(name, len(found), 0, "==", f"{why}{': ' + found[0] if found else ''}")
