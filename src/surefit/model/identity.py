"""The identity of models: hashes that tie an adapter to its base and a saved model to the trained weights.

Training writes `surefit.json` (`write_record`) beside the weights it saves, merging reads it: an adapter of another
base, or weights that changed on their way to the disk, then raise an error that names them instead of producing a model
that runs and answers nonsense.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from surefit import __version__
from surefit.config.schema import ModelSection
from surefit.core.errors import GateError, ModelError
from surefit.core.reading import read_json_file
from surefit.core.rundir import file_sha256, write_json
from surefit.facts.gguf_source import gguf_provenance
from surefit.facts.model import cached_snapshot
from surefit.model.tokenizer import model_path

RECORD = "surefit.json"
IDENTIFYING = ("*.safetensors", "tokenizer.json", "tokenizer.model")
"""Identifying files besides config.json: other weights are another model, and so are the same weights under another
vocabulary. The chat template and the generation config are not part of it."""


def base_directory(section: ModelSection) -> Path:
    """Return the directory of the base model's files on this machine, once it has been loaded.

    Raises:
        ModelError: a hub model that is not in the cache.
    """
    path = Path(model_path(section.name_or_path, section.revision))
    if path.is_dir():
        return path
    snapshot = cached_snapshot(section.name_or_path, section.revision)
    if snapshot is None:
        raise ModelError(
            "is not in the local cache", code="E5051", path=section.name_or_path, help="go online once to fetch it"
        )
    return snapshot


def base_identity(directory: Path) -> str:
    """Return the sha256 of a model directory: of config.json without the fields that name the library that wrote it, of
    the weight files and of the vocabulary, each under its file name. About a second per GB.

    Raises:
        ModelError: there is no readable config.json.
    """
    try:
        config = read_json_file(directory / "config.json")
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no readable config.json: {error}", code="E5052", path=directory, help="download the model again"
        ) from error
    for written_by in ("transformers_version", "_name_or_path"):
        config.pop(written_by, None)
    files = sorted({file for pattern in IDENTIFYING for file in directory.glob(pattern)})
    return _named_sha256(json.dumps(config, sort_keys=True), files)


def adapter_identity(directory: Path) -> str:
    """Return the sha256 of an adapter directory: its config and its weights."""
    return _named_sha256("", sorted(directory.glob("adapter_*")))


def _named_sha256(text: str, files: Sequence[Path]) -> str:
    digest = hashlib.sha256(text.encode())
    for path in files:
        try:
            digest.update(f"{path.name} {file_sha256(path)}\n".encode())
        except OSError as error:
            raise ModelError(
                f"cannot be read: {error.strerror}", code="E5053", path=path, help="copy the file again"
            ) from None
    return digest.hexdigest()


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Return the sha256 of a tensor's dtype, shape and bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(data.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def named_tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the sha256 of named tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensor_sha256(tensors[name])}\n".encode())
    return digest.hexdigest()


def base_record(section: ModelSection) -> dict[str, Any]:
    """Return the base's entry in an adapter's record and in a certificate: `name`, `sha256`, and for a base converted
    from a GGUF file, `gguf`: that file's name and hash, and the details of the conversion."""
    directory = base_directory(section)
    return {"name": section.name_or_path, "sha256": base_identity(directory), **origin_entry(directory)}


def origin_entry(directory: Path) -> dict[str, Any]:
    """Return the `gguf` part of such an entry; empty where the directory was not converted from a GGUF file."""
    origin = gguf_provenance(directory)
    return {"gguf": origin} if origin else {}


def write_record(directory: Path, section: ModelSection, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `surefit.json` into a directory that training has just filled.

    Args:
        directory: adapter/ or model/.
        section: the base model; its files are hashed.
        tensors: the trained tensors of the live model, under their names in the file: PEFT's
            `get_peft_model_state_dict(model)` for an adapter, `model.state_dict()` for a whole model.
    """
    record = {"surefit": __version__, "base": base_record(section), "weights_sha256": named_tensors_sha256(tensors)}
    write_json(directory / RECORD, record)


def describe_base(base: Mapping[str, Any]) -> str:
    """Return a record's base in words: for a GGUF file also its own name and hash."""
    gguf = base.get("gguf")
    if not gguf or not isinstance(gguf.get("sha256"), str):
        return str(base["name"])
    return f"{base['name']} ({gguf.get('file')}, {gguf.get('quantization')}, sha256 {gguf['sha256'][:12]}…)"


def read_record(directory: Path) -> dict[str, Any]:
    """Return the record that `write_record` wrote.

    Raises:
        GateError: it is missing or damaged, so the base of the weights is unknown.
    """
    try:
        record = read_json_file(directory / RECORD)
        base = {key: record["base"][key] for key in ("name", "sha256")}
        base |= {"gguf": record["base"]["gguf"]} if "gguf" in record["base"] else {}
        return {"base": base, "weights_sha256": record["weights_sha256"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GateError(
            f"the base model it was trained from is not recorded ({type(error).__name__}: {error})",
            code="E5054",
            path=directory / RECORD,
            help="train again: only models saved by `surefit train` can be certified",
        ) from error
