"""The run directory: every stage reads the config and this directory, and writes its one artifact into it.

A run directory contains everything to understand a run a year later:

    resolved.yaml            every value of the config and where it came from
    check.json  plan.json    what was found and what was planned
    passport.json            what `surefit audit` found in every row of the data
    environment.json         the machine and the installed packages
    batch_audit.json         what the first batches looked like to the loss
    dry_pass.json            what the worst batch and a checkpoint took, before the first step
    events.jsonl             when each stage started, finished, failed or was interrupted
    metrics.jsonl            one line per optimizer step
    log.txt                  what the commands said, with times (core/run_log.py)
    telemetry.json           under which id each tracker knows the run; what they write themselves: config/trackers.py
    checkpoints/step-N/      complete checkpoints only; best.json scores them
    rejected/step-N.safetensors   the batch that stopped a run, for replay
    adapter/ | model/        what was trained (LoRA | full)
    merged/ certificate.json the merged model and the proof that it equals base + adapter
    eval/SET/VARIANT.json    scores; VARIANT.predictions.jsonl beside it; eval/summary.json compares them
    eval/earlier/KEY/SET/    scores of another recipe, on other rows or with other settings, kept
    report.html              the page that shows all of it
    export/FORMAT/           what `surefit export` made for others
    job.sbatch slurm.json    the batch script and the job that `surefit slurm --submit` made of it
    STAGE.sbatch STAGE.slurm.json   the same of a stage after training
    eval/job.sbatch array.json   the same of the array that scores the checkpoints
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from surefit.core.errors import DataError, MachineError
from surefit.core.lock import hold_lock
from surefit.core.reading import open_file, parse_json, read_bytes, read_json_file

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or quota."""
LOG_BYTES = 2 * 1024**3
"""Largest JSONL log in bytes; a million steps need half of it."""
IDLE_SECONDS = 3600.0
PAIRS_AT_START = "pairs at the start"
"""Event of events.jsonl: the held-out pairs' mean log-probabilities, chosen and rejected, before the first step."""
_LEFTOVER = re.compile(r"\.(.+)\.\d+(?:-[0-9a-f]+)?\.(tmp|old)")
_CODE = re.compile(r"os error (\d+)")
_unwritten: dict[Path, bytes] = {}
"""Lines of each JSONL log that could not be written to a full disk, in order."""


class _At:
    """Descriptor for a path inside the run directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """Paths of one run."""

    path: Path

    resolved = _At("resolved.yaml")
    check = _At("check.json")
    plan = _At("plan.json")
    passport = _At("passport.json")
    events = _At("events.jsonl")
    environment = _At("environment.json")
    batch_audit = _At("batch_audit.json")
    dry_pass = _At("dry_pass.json")
    first_batch = _At("first_batch.json")
    reference = _At("reference.safetensors")
    metrics = _At("metrics.jsonl")
    log = _At("log.txt")
    telemetry = _At("telemetry.json")
    checkpoints = _At("checkpoints")
    rejected = _At("rejected")
    adapter = _At("adapter")
    model = _At("model")
    merged = _At("merged")
    certificate = _At("certificate.json")
    eval = _At("eval")
    eval_summary = _At("eval/summary.json")
    report = _At("report.html")
    exports = _At("export")
    job_script = _At("job.sbatch")
    slurm = _At("slurm.json")
    eval_array = _At("eval/array.json")
    lock = _At(".lock")

    def artefacts(self) -> list[Path]:
        """List everything that the stages write; trackers also write the files in config/trackers.py. Other files are
        not ours.
        """
        return [
            self.resolved, self.check, self.plan, self.passport, self.events, self.environment, self.batch_audit,
            self.dry_pass, self.first_batch, self.reference, self.metrics, self.log, self.telemetry, self.checkpoints,
            self.rejected, self.adapter, self.model, self.merged, self.certificate, self.eval, self.report,
            self.exports,
        ]  # fmt: skip

    def stage_script(self, stage: str) -> Path:
        """Return the batch script of a stage."""
        return self.job_script if stage == "train" else self.path / f"{stage}.sbatch"

    def stage_job(self, stage: str) -> Path:
        """Return the record of the job that runs a stage."""
        return self.slurm if stage == "train" else self.path / f"{stage}.slurm.json"

    def create(self) -> None:
        """Make the directory, and prove that it can be written before anything costly starts."""
        with machine_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()

    def note(self, stage: str, event: str, **details: Any) -> None:
        """Append one line to events.jsonl: `event` is started, finished, failed, resumed, interrupted or invalid."""
        append_jsonl(self.events, {"time": time.time(), "stage": stage, "event": event, **details})

    @contextlib.contextmanager
    def locked(self, stage: str, on_note: Callable[[str], None] = lambda text: None) -> Iterator[None]:
        """Lock the run directory against other writers (core/lock.py), and remove the incomplete files of a killed
        process.

        Raises:
            MachineError: another process holds the lock.
        """
        with hold_lock(self.lock, stage, on_note):
            for directory in (self.path, self.exports, *self.eval.glob("*/")):
                remove_leftovers(directory)
            yield


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or the one it was raised from, means that the disk or the quota is full."""
    cause = error.__cause__ if isinstance(error, MachineError) else error
    return isinstance(cause, OSError) and cause.errno in FULL


@contextlib.contextmanager
def machine_errors(path: Path) -> Iterator[None]:
    """Turn operating system errors at `path` into errors with advice, in whatever class a library has raised them:
    safetensors has its own, tokenizers raises a plain `Exception`.
    """
    helps = {
        errno.EACCES: "choose an output_dir you may write to, or change its permissions",
        errno.EPERM: "choose an output_dir you may write to, or change its permissions",
        errno.EROFS: "the file system is read-only: choose another output_dir",
        errno.ENOSPC: "free some space or choose an output_dir on another disk; no half-written file was left",
        errno.EDQUOT: "your disk quota is used up: free some space or choose another output_dir",
        errno.ENOTDIR: "a part of this path is a file: choose another output_dir",
        errno.EEXIST: "this path is a file: choose another output_dir",
        errno.EISDIR: "a folder has this file's name: remove it, or choose another output_dir",
    }
    try:
        yield
    except Exception as error:
        cause = os_error_from_rust(error) or error
        if not isinstance(cause, OSError) or cause.errno not in helps:
            raise
        raise MachineError(
            f"cannot write: {cause.strerror}", code="E1058", path=path, help=helps[cause.errno]
        ) from cause


def os_error_from_rust(error: Exception) -> OSError | None:
    """Return the `OSError` behind the message of a library written in Rust, or None."""
    may_be_rust = type(error) is Exception or type(error).__name__ == "SafetensorError"
    code = _CODE.search(str(error)) if may_be_rust else None
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else None


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn a Rust library's message about a full disk back into the original `OSError`.

    safetensors raises its own class, tokenizers a plain `Exception`.
    """
    try:
        yield
    except Exception as error:
        os_error = os_error_from_rust(error)
        if os_error is None:
            raise
        raise os_error from error


@contextlib.contextmanager
def skip_if_disk_full() -> Iterator[None]:
    """Skip a record that does not fit on the disk: a log line is no reason to end a run."""
    try:
        yield
    except MachineError as error:
        if not is_full(error):
            raise


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part of it."""
    # A file name that is not UTF-8 is a string with surrogates: written as JSON and YAML escape them.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with file_atomic(path) as file:
        file.write(data)


def temporary_sibling(path: Path, kind: Literal["tmp", "old"] = "tmp") -> Path:
    """Return a hidden name beside `path` that no other process uses; `remove_leftovers` recognizes such names."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.{kind}")


@contextlib.contextmanager
def file_atomic(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` once it is written; on an exception `path` stays as it was."""
    with machine_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_sibling(path)
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(path.parent)


@contextlib.contextmanager
def directory_atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling directory to fill; on success fsync it and rename it to `path`, replacing the old one.

    On an exception the temporary directory is removed and `path` stays as it was.
    """
    temporary = temporary_sibling(path)
    with machine_errors(path):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for file in sorted(temporary.rglob("*")):
                fsync_directory(file) if file.is_dir() else fsync_file(file)
            put_in_place(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a directory whose files are on the disk to `path`, a sibling, replacing the old one."""
    fsync_directory(temporary)
    if path.exists():
        old = temporary_sibling(path, "old")
        os.replace(path, old)
        try:
            os.replace(temporary, path)
        except OSError:
            os.replace(old, path)
            raise
        shutil.rmtree(old)
    else:
        os.replace(temporary, path)
    fsync_directory(path.parent)


def remove_leftovers(directory: Path, of: str | None = None) -> list[Path]:
    """Remove the leftovers of a process killed inside `write_atomic` or `directory_atomic`; return those that remain.

    If it was killed between its two renames, the old content has lost its name and the new has none yet: the old is
    renamed back. Call it only while holding the lock: another process's temporary names look the same.

    Args:
        of: consider only leftovers of this name, and only if nothing was written to them for an hour: for a path that
            no lock guards.
    """
    remaining = leftovers(directory)
    if of is not None:
        matches = [path for path in remaining if _LEFTOVER.fullmatch(path.name)[1] == of]  # type: ignore[index]
        remaining = [path for path in matches if time.time() - _last_written(path) > IDLE_SECONDS]
    for path in remaining:
        name, kind = _LEFTOVER.fullmatch(path.name).groups()  # type: ignore[union-attr]
        original = path.with_name(name)
        with contextlib.suppress(OSError):
            if kind == "old" and not original.exists():
                path.rename(original)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    return [path for path in remaining if path.exists()]


def _last_written(path: Path) -> float:
    times = [0.0]
    for entry in (path, *(path.iterdir() if path.is_dir() else ())):
        with contextlib.suppress(OSError):
            times.append(entry.stat().st_mtime)
    return max(times)


def leftovers(directory: Path) -> list[Path]:
    """List the paths that `remove_leftovers` considers."""
    return [path for path in directory.iterdir() if _LEFTOVER.fullmatch(path.name)] if directory.is_dir() else []


def fsync_directory(path: Path) -> None:
    """Make a rename inside `path` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the content of a file survive a power failure."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON atomically; NaN and infinity raise instead of becoming invalid JSON."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON artifact of an earlier stage; a missing or damaged one is a `DataError` that names the file."""
    try:
        return read_json_file(path)
    except FileNotFoundError:
        raise DataError(
            "does not exist yet", code="E1059", path=path, help="run the stage that writes it first"
        ) from None
    except OSError as error:
        raise _unreadable(error, path) from None
    except ValueError as error:
        raise DataError(
            f"not valid JSON: {error}", code="E1060", path=path, help="run the stage that writes it again"
        ) from error


def append_jsonl(path: Path, record: dict[str, Any]) -> None:
    """Append one record as one line, whole or not at all.

    A full disk does not stop a run for a line of its log: the line is buffered, and written before the next one or by
    `flush_jsonl`, whichever comes first.
    """
    line = json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
    _unwritten[path] = _unwritten.get(path, b"") + line
    flush_jsonl(path)


def flush_jsonl(path: Path) -> int:
    """Write the lines that a full disk delayed; return the bytes that are still buffered."""
    lines = _unwritten.get(path, b"")
    if lines:
        try:
            with machine_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                _append(path, lines)
        except MachineError as error:
            if not is_full(error):
                del _unwritten[path]
                raise
            return len(lines)
        del _unwritten[path]
    return 0


def forget_unwritten(path: Path) -> None:
    """Drop the buffered lines of a log, which is about to be rewritten."""
    _unwritten.pop(path, None)


def _append(path: Path, lines: bytes) -> None:
    """Append all lines or none; first remove a last line that a crash truncated, which would damage the next."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a full pipe would block the run
            raise MachineError(
                "not a regular file", code="E1061", path=path, help="remove it, or choose another output_dir"
            )
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            size = path.read_bytes().rfind(b"\n") + 1
            os.ftruncate(descriptor, size)
        try:
            unwritten = memoryview(lines)
            while unwritten:
                unwritten = unwritten[os.write(descriptor, unwritten) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the records of one of our own JSONL logs, none if it does not exist; a truncated last line is skipped.

    Raises:
        DataError: the file cannot be read, or another line is damaged.
    """
    try:
        # Bytes, because only they split at line feeds alone: a value may contain U+2028.
        lines = read_bytes(path, LOG_BYTES).rstrip().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(error, path) from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
            if not isinstance(record, dict):
                raise ValueError("a record must be a JSON object")
            records.append(record)
        except ValueError as error:
            if number < len(lines):
                help_text = "restore the file, or delete it and run the stage that writes it again"
                raise DataError(
                    f"not valid JSON: {error}", code="E1062", path=path, line=number, help=help_text
                ) from error
    return records


def _unreadable(error: OSError, path: Path) -> DataError:
    return DataError(
        f"cannot be read: {error.strerror}", code="E1063", path=path, help="check the run directory and its permissions"
    )


def disk_size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory. Links in it count as nothing, and so does a file
    that another process deletes meanwhile."""
    if path.is_dir():
        return sum(disk_size(Path(folder, name)) for folder, _, names in os.walk(path) for name in names)
    with contextlib.suppress(OSError):
        status = path.lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    return 0


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as `sha256sum` prints it."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
