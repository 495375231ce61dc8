"""What may be said in public of where a model comes from: its id on the hub, and its licence."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard, hf_hub_download
from huggingface_hub import errors as hub

from surefit.config.schema import ModelSection
from surefit.core.env import hub_token, offline
from surefit.core.rundir import read_json
from surefit.facts.model import NANO
from surefit.model.identity import base_directory

CARD = "README.md"


def hub_id(section: ModelSection) -> str | None:
    """The model's id on the hub; None for a directory and for the built-in model, which is not there."""
    name = section.name_or_path
    return None if name == NANO or Path(name).expanduser().exists() else name


def license_of(section: ModelSection) -> str | None:
    """The base's licence as its model card or its config.json says; None where neither does, or nobody can be asked."""
    directory = base_directory(section)
    said = _in_card(directory / CARD)
    if said is None:
        value = read_json(directory / "config.json").get("license")
        said = value if isinstance(value, str) else None
    name = hub_id(section)
    if said is None and name is not None and not offline():
        try:
            path = hf_hub_download(name, CARD, revision=section.revision, token=hub_token(), etag_timeout=5)
            said = _in_card(Path(path))
        except (hub.HfHubHTTPError, hub.LocalEntryNotFoundError, OSError):
            return None
    return said


def _in_card(path: Path) -> str | None:
    try:
        value = ModelCard.load(path).data.get("license") if path.is_file() else None
    except (ValueError, OSError):
        return None
    return value if isinstance(value, str) else None
