"""An export on the hub: private unless asked otherwise, resumable, and nothing but what export.json lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub import errors as hub
from huggingface_hub.utils._validators import validate_repo_id

from surefit.core.env import first_line, hub_token, offline, redact
from surefit.core.errors import ConfigError, GateError, MachineError
from surefit.core.progress import OnProgress, ignore_progress
from surefit.core.rundir import read_json
from surefit.merge.export import CERTIFICATE, MANIFEST, read_export

SECRETS_IN = (".json", ".md", ".jinja", ".txt", ".py")
"""Files that are read for secrets before they leave."""


@dataclass(frozen=True)
class Push:
    """What would be uploaded.

    Attributes:
        files: name → bytes, export.json among them.
        left_behind: what else lies in the folder, and stays here.
    """

    directory: Path
    repo_id: str
    private: bool
    files: dict[str, int]
    left_behind: list[str]

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def prepare_push(directory: Path, repo_id: str, private: bool = True) -> Push:
    """Look at all that would leave this machine; nothing is sent.

    Raises:
        ConfigError: the hub would not take such a name.
        GateError: the export has no certificate that passed, or a file holds a secret.
        ModelError: it is no export, or was changed since it was made.
    """
    try:
        validate_repo_id(repo_id)
        if "/" not in repo_id:
            raise hub.HFValidationError("it has no owner")
    except hub.HFValidationError as error:
        raise ConfigError(
            f"{repo_id!r} is no name on the hub: {first_line(error)}", code="E6020", help="write OWNER/NAME"
        ) from None
    manifest = read_export(directory)
    _require_certified(directory, manifest)
    names = [*manifest["files"], MANIFEST]
    for name in names:
        if name.endswith(SECRETS_IN):
            text = (directory / name).read_text(encoding="utf-8", errors="replace")
            if redact(text) != text:
                raise GateError(
                    "it holds what looks like a secret",
                    code="E6021",
                    path=directory / name,
                    help="remove it, and export again",
                )
    there = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
    others = sorted(name for name in there if name not in names)
    return Push(directory, repo_id, private, {name: (directory / name).stat().st_size for name in names}, others)


def _require_certified(directory: Path, manifest: Mapping[str, Any]) -> None:
    certificate = read_json(directory / CERTIFICATE) if CERTIFICATE in manifest["files"] else {}
    if not certificate.get("passed") or certificate.get("merged_sha256") != manifest["merged_sha256"]:
        raise GateError(
            "the export has no certificate that passed",
            code="E6022",
            path=directory,
            help="`surefit export` writes one",
        )


def push_to_hub(prepared: Push, on_progress: OnProgress = ignore_progress) -> str:
    """Make the repository where it is not there, and upload the files; returns its address.

    What the hub has already is not sent again: a push that was cut off is continued by another one. An existing
    repository keeps its visibility. All files come in one commit: a reader never meets half a model.

    Raises:
        ConfigError: no token, or one that may not write there.
        MachineError: the hub cannot be reached, or breaks off.
    """
    token = hub_token()
    if offline():
        raise MachineError("HF_HUB_OFFLINE is set", code="E6023", help="unset it to push")
    if token is None:
        raise ConfigError(
            "there is no token for the hub",
            code="E6024",
            help="set HF_TOKEN in the environment or in .env, with the right to write",
        )
    api = HfApi(token=token, library_name="surefit")
    try:
        on_progress(0, 2, f"making {prepared.repo_id}")
        address = api.create_repo(prepared.repo_id, private=prepared.private, exist_ok=True)
        on_progress(1, 2, "uploading")
        # upload_folder would make several commits of a large folder.
        api.create_commit(
            repo_id=prepared.repo_id,
            operations=[CommitOperationAdd(name, prepared.directory / name) for name in prepared.files],
            commit_message="Upload by SureFit, with its certificate",
        )
        on_progress(2, 2, "done")
    except Exception as error:  # the HTTP client, and with it the errors, differ between versions of huggingface_hub
        raise _explained(error, prepared.repo_id) from error
    return str(address)


def _explained(error: Exception, repo_id: str) -> ConfigError | MachineError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = first_line(error)
    if status in (401, 403):
        return ConfigError(
            f"the hub does not let this token write to {repo_id} ({status}): {said}",
            code="E6025",
            help="use a token with the right to write, and a name of your own or of your organisation",
        )
    return MachineError(
        f"the hub did not take {repo_id}: {said}", code="E6026", help="push again: what has arrived is not sent again"
    )
