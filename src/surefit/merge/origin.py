"""The public origin of a model: its id on the hub, and its license."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, hf_hub_download
from huggingface_hub import errors as hub

from surefit.config.schema import ModelSection
from surefit.core.env import hub_token, offline
from surefit.core.rundir import read_json
from surefit.facts.gguf_source import PACKAGED, gguf_provenance, license_in
from surefit.facts.model import NANO
from surefit.model.identity import base_directory

CARD = "README.md"


@dataclass(frozen=True)
class GgufOrigin:
    """A GGUF file as a model card names it; `install` is the command that installs a packaged one."""

    file: str
    sha256: str
    quantization: str
    dequantized_to: str
    install: str | None = None


def hub_id(section: ModelSection) -> str | None:
    """Return the model's id on the hub; None for a directory, a file and the built-in model, which is not on the hub.
    For a packaged GGUF file it is the id of the model that was quantized."""
    name = section.name_or_path
    if name in PACKAGED:
        return PACKAGED[name].of
    return None if name == NANO or Path(name).expanduser().exists() else name


def base_model_name(section: ModelSection) -> str:
    """Return the base's public name: its id, or the name of its directory or file."""
    origin = gguf_provenance(base_directory(section))
    if origin is not None:
        return str(origin["file"])
    return hub_id(section) or Path(section.name_or_path).name


def find_gguf_origin(section: ModelSection) -> GgufOrigin | None:
    """Return the GGUF file that a base was converted from; None for any other base."""
    origin = gguf_provenance(base_directory(section))
    if origin is None:
        return None
    packaged = PACKAGED.get(section.name_or_path)
    return GgufOrigin(
        file=str(origin["file"]),
        sha256=str(origin["sha256"]),
        quantization=str(origin["quantization"]),
        dequantized_to=str(origin["dequantized_to"]),
        install=packaged.install if packaged else None,
    )


def license_of(section: ModelSection) -> str | None:
    """Return the base's license from its model card or config.json; None if neither has one, or the hub cannot be
    reached."""
    directory = base_directory(section)
    license_id = _in_card(directory / CARD) or license_in(directory)
    if license_id is None:
        value = read_json(directory / "config.json").get("license")
        license_id = value if isinstance(value, str) else None
    repo_id = hub_id(section)
    if license_id is None and repo_id is not None and not offline():
        try:
            path = hf_hub_download(repo_id, CARD, revision=section.revision, token=hub_token(), etag_timeout=5)
            license_id = _in_card(Path(path))
        except (hub.HfHubHTTPError, hub.LocalEntryNotFoundError, OSError):
            return None
    return license_id


def _in_card(path: Path) -> str | None:
    try:
        value = ModelCard.load(path).data.get("license") if path.is_file() else None
    except (ValueError, OSError):
        return None
    return value if isinstance(value, str) else None
