"""The stage `merge`: merges the adapter of a run, or of another tool, with a certificate."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surefit.core.errors import ConfigError, ModelError, SureFitError, did_you_mean
from surefit.core.output import json_with, output_file
from surefit.core.rundir import RunDir, read_json
from surefit.facts.lora_settings import adapters_below, describe_nested_adapters
from surefit.facts.model import DTYPE_BYTES, ModelFacts, directory_facts, original_of, read_model_config
from surefit.facts.validate_model_files import require_sound_adapter
from surefit.stages.concluding import report_stage_to_trackers
from surefit.stages.events import record_stage, require_trained
from surefit.stages.placing import require_inputs_apart
from surefit.stages.progress_listener import ProgressListener
from surefit.stages.run_context import CheckedRun, load_held_out_examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefit.config.schema import ModelSection
    from surefit.facts.hardware import HardwareFacts
    from surefit.merge.merge import MergeJob

ADAPTER_CONFIG = "adapter_config.json"
TrainedOnQuantization = Literal["none", "nf4", "fp8"]


@dataclass(frozen=True)
class AdapterOptions:
    """Settings for an adapter without a run.

    Attributes:
        base: the base model; by default the one in adapter_config.json.
        output: directory for merged/ and certificate.json; by default the adapter's.
        trained_on: quantization of the base during training.
        prompts: a text file, one prompt per line, to compare the models on.
        others: ADAPTER or ADAPTER:WEIGHT, to combine with it.
        combine: way to combine them (`merge.combine.COMBINATION_TYPES`).
    """

    base: str | None = None
    output: Path | None = None
    trained_on: TrainedOnQuantization = "none"
    prompts: Path | None = None
    others: Sequence[str] = ()
    combine: str = "cat"


def is_adapter_directory(target: Path) -> bool:
    """Return whether the target is an adapter's directory, not a run's or a config file."""
    return (target / ADAPTER_CONFIG).is_file()


def merge_run(run: CheckedRun, watcher: ProgressListener, into: str = "auto") -> dict[str, Any]:
    """Merge and certify a run's adapter, or certify the saved model of a full fine-tune.

    Returns:
        The certificate.

    Raises:
        ConfigError: nothing is trained yet.
        GateError: the result is not base + adapter.
    """
    from surefit.merge.merge import merge_and_certify
    from surefit.model.saved import load_run_tokenizer

    config = run.resolved.config
    require_trained(run.run, run.loaded.path)
    require_inputs_apart(run, run.run.merged, run.run.certificate)
    if config.train.method == "lora":
        _require_matrices(run.model)
    with (
        report_stage_to_trackers(run.run, "merge", watcher, config.telemetry),
        run.run.locked("merge", watcher.note),
        record_stage(run.run, "merge"),
        watcher.progress("merging") as on_progress,
    ):
        watcher.log_to(run.run.log)
        tokenizer = load_run_tokenizer(config.model, run.run)
        sequences = load_comparison_tokens(run, tokenizer)
        return merge_and_certify(config, run.hardware, run.run, sequences, on_progress, into)  # type: ignore[arg-type]


COMPARED_ROWS = 256
"""Training rows that are tokenized for a comparison where no rows are held out; it uses some of them."""


def load_comparison_tokens(run: CheckedRun, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return token ids, prompt and answer, on which models are compared: the held-out rows or, where nothing is held
    out, training rows. Whether two models compute the same does not depend on their training data.

    Raises:
        DataError: no row can be used.
    """
    from surefit.core.sampling import evenly_spaced_indices
    from surefit.data.rows.layouts import read_splits
    from surefit.data.tokens.dataset import build_dataset, eval_key
    from surefit.data.tokens.shard_manifest import ShardedTokens

    config = run.resolved.config
    data = config.data
    if data.holds_nothing_out and data.tokenized is not None:
        shards = ShardedTokens(Path(data.tokenized), run.gathered.prepared)
        return [shards[index][0].tolist() for index in evenly_spaced_indices(len(shards), COMPARED_ROWS)]
    if data.holds_nothing_out:
        train, _ = read_splits(data, run.recipe, config.train.seed, run.rows, run.mixed)
        rows = train.subset(evenly_spaced_indices(len(train), COMPARED_ROWS))
    else:
        rows = load_held_out_examples(run)
    dataset = build_dataset(
        rows,
        tokenizer,
        max_length=data.max_length,
        too_long=data.too_long,
        bad_rows=data.bad_rows,
        source="data.train" if data.holds_nothing_out else eval_key(data),
    )
    return [dataset[index][0].tolist() for index in range(len(dataset))]


def merge_external_adapter(
    target: Path, watcher: ProgressListener, into: str, options: AdapterOptions
) -> dict[str, Any]:
    """Merge and certify an adapter of any tool, and return the certificate."""
    from surefit.merge.merge import merge_adapter_job as merge

    output = RunDir(options.output or target)
    _require_place(target, output, options)
    with _job(target, output, into, options) as (job, hardware):
        sequences = _sequences(watcher, job, options.prompts)
        with output.locked("merge", watcher.note), watcher.progress("merging") as on_progress:
            return merge(job, hardware, sequences, on_progress)


def _require_place(target: Path, output: RunDir, options: AdapterOptions) -> None:
    """Raise if the merge would overwrite one of its inputs or foreign files.

    Raises:
        ConfigError: merged/ or certificate.json exists and is no earlier merge's, or is an input.
    """
    other_adapters = [name.rpartition(":")[0] if ":" in name else name for name in options.others]
    settings = read_json(target / ADAPTER_CONFIG)
    base = options.base or (settings.get("base_model_name_or_path") if isinstance(settings, dict) else None)
    input_names = {"the adapter": str(target)} | ({"the base": base} if isinstance(base, str) else {})
    input_names |= {f"the adapter {name}": name for name in other_adapters}
    inputs = {name: Path(text) for name, text in input_names.items() if Path(text).expanduser().exists()}
    inputs |= {"the prompts": options.prompts} if options.prompts else {}
    # A merge that was killed leaves its lock, but no certificate.
    is_earlier_merge = json_with("passed", "checks")(output.certificate) or output.lock.exists()
    option = "--output" if options.output else "TARGET"
    other_inputs = {name: path for name, path in inputs.items() if name != "the adapter" or options.output}
    output_file(output.merged, other_inputs, earlier=lambda _: is_earlier_merge, directory=True, option=option)
    output_file(output.certificate, inputs, earlier=lambda _: is_earlier_merge, option=option)


def certify_merge(
    target: Path, merged: Path, watcher: ProgressListener, into: str, options: AdapterOptions
) -> dict[str, Any]:
    """Certify an existing merged model of any tool: whether it is base + adapter."""
    from surefit.merge.merge import certify_merged

    for pattern in ("config.json", "*.safetensors"):
        if not any(merged.glob(pattern)):
            raise ModelError(
                f"this is not a model folder: there is no {pattern}",
                code="E8022",
                path=merged,
                help="name the folder of the merged model",
            )
    with _job(target, RunDir(merged.parent), into, options) as (job, hardware):
        sequences = _sequences(watcher, job, options.prompts)
        # Use the merged model's data type: the allowed rounding depends on it.
        job = replace(job, merged=merged, base=job.base.model_copy(update={"dtype": _stored_dtype(merged)}))
        with watcher.progress("certifying") as on_progress:
            return certify_merged(job, hardware, sequences, on_progress)


@contextlib.contextmanager
def _job(target: Path, output: RunDir, into: str, options: AdapterOptions) -> Iterator[tuple[MergeJob, HardwareFacts]]:
    """Yield the merge job and the hardware; several adapters are first combined in a temporary folder."""
    from surefit.facts.hardware import hardware_facts
    from surefit.merge.combine import COMBINATION_TYPES, AdapterCombination, combine_adapters
    from surefit.merge.merge import MergeJob
    from surefit.model.identity import base_directory
    from surefit.model.layerwise_forward import LayerwiseModel

    if not is_adapter_directory(target):
        nested_adapters = adapters_below(target)
        raise ConfigError(
            f"it has no {ADAPTER_CONFIG}{describe_nested_adapters(nested_adapters)}",
            code="E8023",
            path=target,
            help=f"name {nested_adapters[0]}" if nested_adapters else "name a run, or an adapter's folder",
        )
    base = _base(target, options)
    hardware = hardware_facts()
    own_tokenizer = str(target) if (target / "tokenizer_config.json").is_file() else None
    with tempfile.TemporaryDirectory() as folder:
        adapter, combined = target, None
        if options.combine not in COMBINATION_TYPES:
            raise ConfigError(
                f"there is no combination method {options.combine!r}{did_you_mean(options.combine, COMBINATION_TYPES)}",
                code="E8043",
                field="--combine",
                help=f"choose from {', '.join(COMBINATION_TYPES)}",
            )
        if options.others:
            combined = AdapterCombination(options.combine, ((target, 1.0), *map(_weighted, options.others)))
            adapter = combine_adapters(
                LayerwiseModel(base, base_directory(base), hardware.kind), combined, Path(folder)
            )
        yield (
            MergeJob(
                base, adapter, output.merged, output.certificate, None, into, own_tokenizer, combined  # type: ignore[arg-type]
            ),
            hardware,
        )  # fmt: skip


def _base(target: Path, options: AdapterOptions) -> ModelSection:
    from surefit.config.schema import ModelSection
    from surefit.model.load import fetch_model

    settings = require_sound_adapter(read_json(target / ADAPTER_CONFIG), target / ADAPTER_CONFIG)
    name = options.base or settings.get("base_model_name_or_path")
    if not name:
        raise ConfigError(
            f"{ADAPTER_CONFIG} names no base model", code="E8024", path=target, help="name it with --base"
        )
    section = ModelSection(name_or_path=name, revision=None if options.base else settings.get("revision"))
    try:
        directory = fetch_model(section)
    except SureFitError as error:
        if options.base:
            raise type(error)(
                error.message, code=error.code, path=error.path, field="--base", help=error.help
            ) from error
        raise type(error)(
            f"its base model {name} {error.message}",
            code=error.code,
            path=target / ADAPTER_CONFIG,
            field="base_model_name_or_path",
            help=f"{error.help}; or name a copy of it with --base",
        ) from error
    _require_matrices(directory_facts(directory, name))
    stored_dtype = _stored_dtype(directory)
    return section.model_copy(update={"dtype": stored_dtype, "quantization": options.trained_on})


def _require_matrices(model: ModelFacts) -> None:
    """Raise if the base is stored quantized.

    Raises:
        ModelError: the base's files hold quantized blocks, to which no adapter can be added.
    """
    if model.quantization is None:
        return
    original = original_of(model.name) or "ORIGINAL"
    hint = f"; or merge into the original model, --base {original} --trained-on nf4"
    raise ModelError(
        f"{model.name} has quantized files ({model.quantization}): an adapter cannot be merged into them",
        code="E8025",
        path=model.path,
        help=f"serve the adapter with its base{hint if model.stored_nf4 else ''}",
    )


def _stored_dtype(directory: Path) -> str:
    settings = read_model_config(directory)
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        known_dtypes = ", ".join(DTYPE_BYTES)
        problem = f"dtype is {dtype!r}; {known_dtypes} can be merged"
        raise ModelError(problem, code="E8026", path=directory / "config.json", help="convert the base first")
    return dtype


def _weighted(text: str) -> tuple[Path, float]:
    path, separator, weight = text.rpartition(":")
    if not separator or not is_adapter_directory(Path(path)):
        path, weight = text, "1"
    try:
        weighted = (Path(path), float(weight))
    except ValueError:
        weighted = (Path(path), math.nan)
    if not math.isfinite(weighted[1]) or not weighted[1]:
        raise ConfigError(f"{weight!r} is not a weight", code="E8027", field="--with", help="write ADAPTER:0.5")
    if not is_adapter_directory(weighted[0]):
        nested_adapters = adapters_below(weighted[0])
        raise ConfigError(
            f"it has no {ADAPTER_CONFIG}{describe_nested_adapters(nested_adapters)}",
            code="E8028",
            path=path,
            field="--with",
            help=f"name {nested_adapters[0]}" if nested_adapters else "name an adapter",
        )
    return weighted


def _prompts(file: Path) -> list[str]:
    try:
        texts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"cannot be read: {reason}",
            code="E8029",
            path=file,
            field="--prompts",
            help="a text file, one prompt per line",
        ) from None
    if not texts:
        raise ConfigError("contains no prompt", code="E8030", path=file, field="--prompts", help="write one per line")
    return texts


def _sequences(watcher: ProgressListener, job: MergeJob, prompts: Path | None) -> list[list[int]]:
    """Return token ids to compare the models on: the user's prompts, or sentences that come with SureFit."""
    from surefit.core.rundir import read_jsonl
    from surefit.model.tokenizer import load_tokenizer
    from surefit.samples import find_sample

    section = job.base if job.tokenizer is None else job.base.model_copy(update={"name_or_path": job.tokenizer})
    tokenizer = load_tokenizer(section)
    if prompts is not None:
        texts = _prompts(prompts)
    else:
        sample = find_sample("surefit/function-calling-eval")
        assert sample is not None
        texts = [row["query"] for row in read_jsonl(sample)[:64]]
        watcher.note("compared on SureFit's own sentences; use --prompts FILE for your own, one per line")
    return [ids for ids in tokenizer(texts).input_ids if ids]
