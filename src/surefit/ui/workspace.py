"""The one directory that the pages may read and write in, and the paths in it that they may use.

A path from a request is relative, has no hidden part (`.env`, `.git`) and, with all links resolved, stays inside. Only
configs and rows are written, never inside a run; `STATE` is the page's own.
"""

from __future__ import annotations

import contextlib
import glob
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.request import url2pathname

from starlette.exceptions import HTTPException

from surefit.config.edit import write_edited
from surefit.config.inputs import WRITTEN
from surefit.config.load import MAX_BYTES, load_text, parse_yaml, read_config_text
from surefit.config.schema import SureFitConfig, path_texts
from surefit.core.errors import ConfigError, SureFitError
from surefit.core.lock import hold_folder_lock
from surefit.core.output import output_file
from surefit.core.rundir import RunDir, file_sha256, machine_errors, write_atomic
from surefit.data.read.file_io import file_extensions
from surefit.data.read.readers import ENDINGS, NAMED_ONLY

CONFIG_SUFFIXES = (".yaml", ".yml")
DEPTH = 4
"""Maximum depth below the workspace at which configs are looked for."""
MOST_LISTED = 500
"""Configs, and files of rows, that a page lists."""
STATE = ".surefit-ui"
"""Directory of the page's own files: an upload while it arrives, and the record of the run that it started."""
PART = ".part"
"""Ending of an upload while it arrives."""
STALE_SECONDS = 3600.0
LONGEST, LONGEST_NAME = 2_000, 200
"""Bytes of a path and of each of its names; file systems allow 255, and a temporary name is longer."""
NOT_IN_A_PATH = "\\%"
"""Characters with a special meaning in a URL, which a path from one must not contain."""
NOT_LOOKED_INTO = ("node_modules", "site-packages", "__pycache__")


@dataclass(frozen=True)
class Workspace:
    """The workspace; `root` is an existing directory with all links resolved."""

    root: Path

    def path(self, text: str) -> Path:
        """Return the path of a request.

        Raises:
            HTTPException: 404 for a path that is outside, hidden or invalid; the response does not tell which.
        """
        parts = PurePosixPath(text).parts
        is_valid = text.isprintable() and not any(character in text for character in NOT_IN_A_PATH)
        is_valid = (
            is_valid and len(text.encode()) <= LONGEST and all(len(part.encode()) <= LONGEST_NAME for part in parts)
        )
        if text and is_valid and not text.startswith("/") and not any(_hidden(part) for part in parts):
            try:
                resolved = (self.root / text).resolve()
            except (OSError, RuntimeError, ValueError):
                raise _absent() from None
            if self.holds(resolved):
                return resolved
        raise _absent()

    def holds(self, resolved: Path) -> bool:
        """Return whether a path without links is inside, and not hidden."""
        if not resolved.is_relative_to(self.root):
            return False
        return not any(_hidden(part) for part in resolved.relative_to(self.root).parts)

    def name(self, path: Path) -> str:
        """Return the path as a request names it."""
        return path.relative_to(self.root).as_posix()

    def config(self, text: str) -> Path:
        """Return the config file of a request, existing or not."""
        path = self.path(text)
        if path.suffix not in CONFIG_SUFFIXES or text.endswith("/") or (path.exists() and not path.is_file()):
            raise _absent()
        return path

    def run(self, text: str) -> RunDir:
        """Return the run directory of a request."""
        run = RunDir(self.path(text))
        if not is_run(run.path) or not self.shows(run.path):
            raise _absent()
        return run

    def shows(self, directory: Path) -> bool:
        """Return whether everything that pages show of a run is inside the workspace; checkpoints may be links to
        another disk."""
        links = (path for path in directory.rglob("*") if path.is_symlink() and path != directory / "checkpoints")
        return self.leads_inside(directory) and all(self.leads_inside(link) for link in links)

    def leads_inside(self, path: Path) -> bool:
        """Return whether a path, with all links resolved, is inside."""
        try:
            return self.holds(path.resolve())
        except (OSError, RuntimeError):  # a cycle of links, or no permission to follow one
            return False

    def file_of(self, run: RunDir, path: Path) -> Path:
        """Return a file of a run, checked to be inside the workspace with all links resolved."""
        resolved = path.resolve()
        if not self.holds(resolved) or not resolved.is_file() or not path.is_relative_to(run.path):
            raise _absent()
        return resolved

    def configs(self) -> list[str]:
        """Return the names of the existing configs, except configs in run directories, sorted."""
        return self._list(lambda path: path.name.endswith(CONFIG_SUFFIXES))

    def row_files(self) -> list[str]:
        """Return the names of the files that may hold rows, except files in run directories, sorted.

        A text file counts only where uploads are stored: elsewhere it is rather a license or a note.
        """

        def may_hold_rows(path: Path) -> bool:
            kind = file_extensions(path.name)[0]
            return kind in ENDINGS and (kind not in NAMED_ONLY or path.parent == self.root)

        return self._list(may_hold_rows)

    def _list(self, wanted: Callable[[Path], bool]) -> list[str]:
        return sorted(self.name(path) for _, path in zip(range(MOST_LISTED), self._files(wanted), strict=False))

    def _files(self, wanted: Callable[[Path], bool]) -> Iterator[Path]:
        for folder, folders, files in os.walk(self.root):
            directory = Path(folder)
            at_limit = len(directory.relative_to(self.root).parts) >= DEPTH
            folders[:] = (
                [] if at_limit or is_run(directory) else sorted(n for n in folders if self._looked_into(directory / n))
            )
            if not is_run(directory):
                paths = [directory / name for name in sorted(files) if not _hidden(name)]
                yield from (path for path in paths if wanted(path) and self.holds(path.resolve()) and path.is_file())

    def _looked_into(self, folder: Path) -> bool:
        name = folder.name
        return not _hidden(name) and name not in NOT_LOOKED_INTO and not (folder / "pyvenv.cfg").exists()

    def save(self, text: str, content: str, expected: str | None) -> Path:
        """Write a config, and return its path.

        Args:
            text: its path.
            content: the new text.
            expected: the `file_version` that was opened; None for a new file.

        Raises:
            HTTPException: 409 if the file is not the one that was opened.
            ConfigError: it would be too large, is a link, is inside a run, or is a file that the new text names.
            MachineError: it cannot be written.
        """
        path = self.config(text)
        if (self.root / text).is_symlink():
            raise ConfigError("this is a link", code="E1071", help=f"open its target, {self.name(path)}")
        if len(content.encode("utf-8", "replace")) > MAX_BYTES:
            raise ConfigError(f"larger than {MAX_BYTES:,} bytes: this is not a config file", code="E1072")
        if any(is_run(folder) for folder in path.parents if folder.is_relative_to(self.root)):
            raise ConfigError(
                "this is inside a run directory, which is read-only", code="E1073", help="choose another folder"
            )
        with machine_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with hold_folder_lock(path.parent):  # of two saves at once, the second sees the text of the first
            if file_version(path) != expected:
                problem = "was changed by someone else" if expected is not None else "already exists"
                raise HTTPException(409, f"{text} {problem}: open it again, or save under another name")
            output_file(path, self._read_by(content), overwrite=expected is not None, option="name")
            if expected is None:
                write_atomic(path, content)
            else:
                # A text area has line feeds only.
                content = content.replace("\n", "\r\n") if b"\r\n" in path.read_bytes() else content
                write_edited(path, content)
        return path

    def _read_by(self, content: str) -> dict[str, Path]:
        """Return the files and directories that a config names, by key; none for a text that is not a valid config."""
        try:
            config = load_text(content, Path("config.yaml")).config
        except ConfigError:
            return {}
        named_paths = [
            (key, self.root / Path(text).expanduser()) for key, text in path_texts(config) if key not in WRITTEN
        ]
        return {key: path for key, path in named_paths if os.path.lexists(path)}

    def row_file(self, text: str) -> Path:
        """Return the file of rows of a request."""
        path = self.path(text)
        if not path.is_file() or file_extensions(path.name)[0] not in ENDINGS:
            raise _absent()
        return path

    def state_folder(self) -> Path:
        """Return the directory of the page's own files, without what a killed upload left there.

        Raises:
            ConfigError: it is not a directory, or a link.
        """
        folder = self.root / STATE
        with machine_errors(folder):
            if not os.path.lexists(folder):
                folder.mkdir(mode=0o700, exist_ok=True)
                write_atomic(folder / ".gitignore", "*\n")
        if folder.is_symlink() or not folder.is_dir():
            raise ConfigError(
                "this is not a directory", code="E1079", path=folder, help="remove it: the page makes its own"
            )
        for part in folder.glob(f"*{PART}"):
            with contextlib.suppress(OSError):
                if time.time() - part.lstat().st_mtime > STALE_SECONDS:
                    part.unlink()
        return folder

    def refuse(self, config: SureFitConfig, command: str = "surefit check") -> list[SureFitError]:
        """Return an error for each path of a config that is outside the workspace or hidden in it: pages read none of
        these.

        Args:
            command: does the same on the command line, without this limit.
        """
        return [
            ConfigError(
                f"{text!r} is outside the workspace, so this page does not use it",
                code="E1074",
                field=key,
                help=f"move it there, or use the command line: `{command}`",
            )
            for key, text in (*path_texts(config), *self._named_by_accelerate(config))
            if not self._may_be_read(text)
        ]

    def _named_by_accelerate(self, config: SureFitConfig) -> Iterator[tuple[str, str]]:
        """Yield the DeepSpeed file that an Accelerate file in the workspace names, which is read with it."""
        accelerate_file = config.parallel.accelerate_config
        if accelerate_file is None or not self._may_be_read(accelerate_file):
            return
        path = self.root / accelerate_file
        try:
            tree, _ = parse_yaml(read_config_text(path), path)
        except SureFitError:  # `check` reports its errors
            return
        section = tree.get("deepspeed_config") if isinstance(tree, dict) else None
        file = section.get("deepspeed_config_file") if isinstance(section, dict) else None
        if isinstance(file, str):
            yield "parallel.accelerate_config", str(path.parent / file)

    def _may_be_read(self, text: str) -> bool:
        """Return whether a path leads nowhere outside. A hub id and a sample count as paths that are not there yet."""
        if text[:7].lower() == "file://":  # as data/read/sources.py reads it
            text = url2pathname(text[7:].removeprefix("localhost"))
        try:
            path = self.root / Path(text).expanduser()
            if not self.holds(path.resolve()):
                return False
            targets = [child for child in path.iterdir() if child.is_symlink()] if path.is_dir() else []
            if glob.has_magic(text) and not os.path.lexists(path):
                pattern = os.path.expanduser(text)
                targets = [self.root / match for match in glob.glob(pattern, root_dir=self.root, recursive=True)]
            return all(self.holds(target.resolve()) for target in targets)
        except (OSError, RuntimeError, ValueError):
            return False


def file_version(path: Path) -> str | None:
    """Return a hash of the file's current content; None if there is no file."""
    return file_sha256(path) if path.is_file() else None


def is_run(directory: Path) -> bool:
    """Return whether a stage has written into this directory."""
    return any((directory / name).exists() for name in ("resolved.yaml", "events.jsonl", "slurm.json"))


def _hidden(part: str) -> bool:
    return part.startswith(".")


def _absent() -> HTTPException:
    return HTTPException(404, "There is no such file in the workspace.")
