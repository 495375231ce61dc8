"""Uploads an export to the hub: private by default, resumable, and only the files that export.json lists."""

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
from surefit.merge.export_manifest import CERTIFICATE, MANIFEST, read_export

SECRETS_IN = (".json", ".md", ".jinja", ".txt", ".py")
"""Suffixes of the files that are searched for secrets before the upload."""


@dataclass(frozen=True)
class Push:
    """A prepared upload.

    Attributes:
        files: name → bytes, export.json included.
        left_behind: other files of the directory, which are not uploaded.
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
    """Check every file that would be uploaded; nothing is sent.

    Raises:
        ConfigError: the hub does not allow this name.
        GateError: the export has no passing certificate, or a file holds a secret.
        ModelError: the directory is no export, or was changed since.
    """
    try:
        validate_repo_id(repo_id)
        if "/" not in repo_id:
            raise hub.HFValidationError("it has no owner")
    except hub.HFValidationError as error:
        raise ConfigError(
            f"{repo_id!r} is not a valid hub name: {first_line(error)}", code="E6020", help="write OWNER/NAME"
        ) from None
    manifest = read_export(directory)
    _require_certified(directory, manifest)
    names = [*manifest["files"], MANIFEST]
    for name in names:
        if name.endswith(SECRETS_IN):
            text = (directory / name).read_text(encoding="utf-8", errors="replace")
            if redact(text) != text:
                raise GateError(
                    "it contains something that looks like a secret",
                    code="E6021",
                    path=directory / name,
                    help="remove it, and export again",
                )
    existing = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
    unlisted = sorted(name for name in existing if name not in names)
    return Push(directory, repo_id, private, {name: (directory / name).stat().st_size for name in names}, unlisted)


def _require_certified(directory: Path, manifest: Mapping[str, Any]) -> None:
    certificate = read_json(directory / CERTIFICATE) if CERTIFICATE in manifest["files"] else {}
    if not certificate.get("passed") or certificate.get("merged_sha256") != manifest["merged_sha256"]:
        raise GateError(
            "the export has no passing certificate",
            code="E6022",
            path=directory,
            help="`surefit export` writes one",
        )


def push_to_hub(prepared: Push, on_progress: OnProgress = ignore_progress) -> str:
    """Create the repository if it does not exist, and upload the files; return its URL.

    Files that the hub already has are not sent again, so pushing again continues an interrupted push. An existing
    repository keeps its visibility. All files are in one commit, so a reader never gets half a model.

    Raises:
        ConfigError: no token, or a token without write permission.
        MachineError: the hub cannot be reached, or the connection is lost.
    """
    token = hub_token()
    if offline():
        raise MachineError("HF_HUB_OFFLINE is set", code="E6023", help="unset it to push")
    if token is None:
        raise ConfigError(
            "there is no token for the hub",
            code="E6024",
            help="set HF_TOKEN in the environment or in .env, with write permission",
        )
    api = HfApi(token=token, library_name="surefit")
    try:
        on_progress(0, 2, f"making {prepared.repo_id}")
        url = api.create_repo(prepared.repo_id, private=prepared.private, exist_ok=True)
        on_progress(1, 2, "uploading")
        # upload_folder would split a large directory into several commits.
        api.create_commit(
            repo_id=prepared.repo_id,
            operations=[CommitOperationAdd(name, prepared.directory / name) for name in prepared.files],
            commit_message="Upload by SureFit, with its certificate",
        )
        on_progress(2, 2, "done")
    except Exception as error:  # the HTTP client, and with it the errors, differ between versions of huggingface_hub
        raise _explained(error, prepared.repo_id) from error
    return str(url)


def _explained(error: Exception, repo_id: str) -> ConfigError | MachineError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = first_line(error)
    if status in (401, 403):
        return ConfigError(
            f"the hub does not let this token write to {repo_id} ({status}): {reason}",
            code="E6025",
            help="use a token with write permission, and your own or your organization's name",
        )
    return MachineError(
        f"the hub did not accept {repo_id}: {reason}",
        code="E6026",
        help="push again: uploaded files are not sent again",
    )
