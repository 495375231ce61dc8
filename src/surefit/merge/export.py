"""Exports a run's result as a directory for others: weights, tokenizer, model card, certificate, and a manifest.

    merged/ or model/, certified → copied or converted → certificate.json → export.json, last of all

export.json lists every file with its size and hash: a file that is not in it is not part of the export, and is not
pushed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from surefit import __version__
from surefit.core.errors import ConfigError, DataError, GateError
from surefit.core.output import directory_with, output_file
from surefit.core.rundir import (
    RunDir,
    directory_atomic,
    file_sha256,
    read_json,
    remove_leftovers,
    write_atomic,
    write_json,
)
from surefit.core.sampling import evenly_spaced
from surefit.core.units import shell_quote, without_paths
from surefit.facts.lora_settings import PREFIX
from surefit.facts.tokenizer import GENERATION_CONFIG
from surefit.merge.adapter_file import read_adapter
from surefit.merge.export_manifest import ADAPTER, CARD, CERTIFICATE, HUB, MANIFEST
from surefit.merge.merge import PROMPTS
from surefit.merge.quantised import Conversion, convert_model, measure_conversion, require_convertible
from surefit.model.identity import base_identity, named_tensors_sha256
from surefit.model.load import PROCESSOR
from surefit.model.multimodal_wrapper import renaming_to_multimodal
from surefit.model.remote_code import remote_code_files

WEIGHTS = ("*.safetensors", "model.safetensors.index.json", "*.gguf")
TOKENIZER_AND_CONFIG_FILES = (
    "config.json", "generation_config.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tokenization_*.py",
    *PROCESSOR,
)  # fmt: skip
"""Files of a model beside its weights and its own code; no other files of a directory are ever exported."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
OF_THE_MODEL = ("config.json", "generation_config.json", *PROCESSOR)
"""Files among TOKENIZER_AND_CONFIG_FILES that an adapter must not have: it would be taken for a whole model."""

CardOf = Callable[[Mapping[str, Any], Path], str]
"""(certificate of an export, directory with its weights) → its model card."""


@dataclass(frozen=True)
class CertifiedModel:
    """The exported model of a run; its files match its certificate.

    Attributes:
        directory: merged/ or model/.
        certificate: the run's certificate.json.
    """

    run: RunDir
    directory: Path
    certificate: dict[str, Any]


def load_certified_model(run: RunDir) -> CertifiedModel:
    """Return the certified model of a run.

    Raises:
        GateError: there is no certificate, it did not pass, or it was given for other files.
    """
    certificate = read_json(run.certificate) if run.certificate.exists() else None
    if certificate is None or not certificate.get("passed"):
        why = "has no certificate" if certificate is None else f"is not certified: {certificate.get('reason')}"
        raise GateError(
            f"the model {why}", code="E6007", path=run.path, help=f"`surefit merge {shell_quote(run.path)}` comes first"
        )
    directory = run.merged if run.merged.is_dir() else run.model
    if not directory.is_dir() or base_identity(directory) != certificate.get("merged_sha256"):
        raise GateError(
            f"{directory.name}/ does not match its certificate",
            code="E6008",
            path=run.certificate,
            help="`surefit merge` makes and certifies it again",
        )
    return CertifiedModel(run, directory, certificate)


def list_model_files(directory: Path) -> list[Path]:
    """Return the files of a model that may be exported."""
    files = {
        file
        for pattern in (*WEIGHTS, *TOKENIZER_AND_CONFIG_FILES)
        for file in directory.glob(pattern)
        if file.is_file()
    }
    return sorted({*files, *remote_code_files(directory)})


def export_hub(source: CertifiedModel, output: Path, card: CardOf) -> dict[str, Any]:
    """Write the model unchanged, for the hub and for every tool that reads safetensors.

    Returns:
        The content of export.json.

    Raises:
        MachineError: the disk is full or may not be written to.
    """
    require_export_directory(source, output)
    certificate = redact_certificate(source.certificate)
    with directory_atomic(output) as temporary:
        _copy(source.directory, list_model_files(source.directory), temporary)
        return _finish(temporary, HUB, source, certificate, card)


def _copy(directory: Path, files: Iterable[Path], into: Path) -> None:
    """Copy files of a directory, keeping the names of their subdirectories."""
    for file in files:
        target = into / file.relative_to(directory)
        target.parent.mkdir(exist_ok=True)
        shutil.copy2(file, target)


def export_adapter(source: CertifiedModel, base: str, output: Path, card: CardOf) -> dict[str, Any]:
    """Write the adapter alone, for PEFT and for servers that load it onto its base; arguments and result as
    `export_hub`.

    Args:
        base: name of the base in the exported adapter_config.json; not a directory of this machine.

    Raises:
        GateError: adapter/ is not what was merged and certified.
    """
    require_export_directory(source, output)
    adapter_files = list_adapter_files(source)
    _require_certified_adapter(source)
    with directory_atomic(output) as temporary:
        _copy(source.run.adapter, adapter_files, temporary)
        settings = read_json(temporary / ADAPTER_FILES[0])
        write_json(temporary / ADAPTER_FILES[0], settings | {"base_model_name_or_path": base})
        rename = renaming_to_multimodal(source.directory)
        if rename is not None:
            _rename(temporary, rename)
        _write_stops(source.directory, temporary)
        return _finish(temporary, ADAPTER, source, redact_certificate(source.certificate), card)


def _write_stops(model: Path, directory: Path) -> None:
    """Write the stop tokens into a generation_config.json beside the adapter: a server otherwise uses the base's, and a
    base that was not trained on chats has none for the end of a turn."""
    path = model / GENERATION_CONFIG
    stops = read_json(path).get("eos_token_id") if path.is_file() else None
    if stops is not None:
        write_json(directory / GENERATION_CONFIG, {"eos_token_id": stops})


def _rename(directory: Path, renamed: Callable[[str], str]) -> None:
    """Rename the adapter's layers to their names in the multimodal checkpoint, in place.

    Training used the language model alone. vLLM loads the whole checkpoint, and silently serves the base if it does not
    find a name there (vllm-project/vllm#34186, open in September 2026).
    """
    config, weights = (directory / name for name in ADAPTER_FILES)
    adapter, settings = read_adapter(directory), read_json(config)
    settings["target_modules"] = sorted(
        map(renamed, adapter.updates)
    )  # full names: a suffix would match the vision part's layers, too
    rows = settings.get("trainable_token_indices")
    if isinstance(rows, dict):
        settings["trainable_token_indices"] = {renamed(name): indices for name, indices in rows.items()}
    write_json(config, settings)
    tensors = {f"{PREFIX}{renamed(name.removeprefix(PREFIX))}": tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})


def list_adapter_files(source: CertifiedModel) -> list[Path]:
    """Return the files of a run's adapter that may be exported.

    Raises:
        ConfigError: the run has no adapter.
    """
    folder = source.run.adapter
    if not all((folder / name).is_file() for name in ADAPTER_FILES):
        raise ConfigError(
            "the run has no adapter: all weights were trained", code="E6009", path=source.run.path, help="--format hub"
        )
    other_files = {file for pattern in TOKENIZER_AND_CONFIG_FILES for file in folder.glob(pattern) if file.is_file()}
    other_files -= {file for pattern in OF_THE_MODEL for file in folder.glob(pattern)}
    return sorted({*other_files, *(folder / name for name in ADAPTER_FILES)})


def _require_certified_adapter(source: CertifiedModel) -> None:
    values = {check["name"]: check["value"] for check in source.certificate["checks"]}
    if named_tensors_sha256(read_adapter(source.run.adapter).tensors) != values.get("adapter_as_trained"):
        raise GateError(
            "adapter/ does not match the merged, certified adapter",
            code="E6010",
            path=source.run.adapter,
            help="`surefit merge` makes and certifies the model again",
        )


def export_quantized(
    source: CertifiedModel,
    conversion: Conversion,
    output: Path,
    sequences: Sequence[Sequence[int]],
    card: CardOf,
    write_beside: Callable[[Path], None] = lambda directory: None,
) -> dict[str, Any]:
    """Write the model in fewer bits, and certify it against the merged one; result as `export_hub`.

    Args:
        sequences: token ids of the run's held-out rows, prompt and gold answer.
        write_beside: writes further files into the directory of the certified weights, such as a Modelfile.

    Raises:
        GateError: the converted model failed a check; it is deleted, and the message says what was measured.
        MachineError, ModelError: this machine, or the library, cannot convert it.
    """
    if not sequences:
        raise DataError(
            "there are no held-out rows to compare the models on", code="E6011", field="data.eval", help="set data.eval"
        )
    require_export_directory(source, output)
    require_convertible(conversion)
    started = time.monotonic()
    prompts = evenly_spaced(sequences, PROMPTS)
    with directory_atomic(output) as temporary:
        weights = {file for pattern in WEIGHTS for file in source.directory.glob(pattern)}
        _copy(source.directory, (file for file in list_model_files(source.directory) if file not in weights), temporary)
        convert_model(conversion, temporary)
        checks, measurements = measure_conversion(conversion, temporary, prompts)
        failed = next((check for check in checks if not check.passed), None)
        if failed is not None:
            raise GateError(
                f"the {conversion.format} model is not certified: {failed}",
                code="E6012",
                path=source.directory,
                help="do not use such weights; export another format",
            )
        write_beside(temporary)
        certificate = {
            "passed": True,
            "reason": "it is complete, and differs from the merged model by no more than its format explains",
            "against": "merged",
            "format": conversion.format,
            "how": conversion.how,
            "checks": [check.as_dict() for check in checks],
            "measured": measurements,
            "prompts": len(prompts),
            "merged_sha256": source.certificate["merged_sha256"],
            "seconds": round(time.monotonic() - started, 2),
            "merge": redact_certificate(source.certificate),
        }
        return _finish(temporary, conversion.format, source, certificate, card)


def _finish(
    directory: Path, name: str, source: CertifiedModel, certificate: Mapping[str, Any], card: CardOf
) -> dict[str, Any]:
    write_json(directory / CERTIFICATE, certificate)
    write_atomic(directory / CARD, card(certificate, directory))
    files = {
        file.relative_to(directory).as_posix(): {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }
    manifest = {
        "format": name,
        "surefit": __version__,
        "merged_sha256": source.certificate["merged_sha256"],
        "files": files,
    }
    write_json(directory / MANIFEST, manifest)
    return manifest


def require_export_directory(source: CertifiedModel, output: Path) -> None:
    """Check that the export may be written to `output`.

    Raises:
        ConfigError: something else is at that path.
    """
    remove_leftovers(output.parent, of=output.name)
    inputs = {"the model": source.directory, "the adapter": source.run.adapter}
    output_file(output, inputs, earlier=directory_with(MANIFEST, CERTIFICATE), directory=True)


def redact_certificate(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Return a certificate without the directories of this machine: of a base that is a directory, only its name
    remains."""

    def clean(value: Any) -> Any:
        match value:
            case str():
                return without_paths(value)
            case list():
                return [clean(item) for item in value]
            case dict():
                return {key: clean(item) for key, item in value.items()}
            case _:
                return value

    cleaned: dict[str, Any] = clean(dict(certificate))
    return cleaned
