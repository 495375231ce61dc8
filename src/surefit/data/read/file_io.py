"""One file of rows as a byte stream: local or behind a URL, plain or compressed.

URLs go through `fsspec`, which supports s3, gs, hf, http and more. Every error names the file and the byte position.
"""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from surefit.core import env
from surefit.core.errors import DataError, MachineError, SureFitError
from surefit.core.packaging import install_extra, require_import
from surefit.core.reading import reason_of
from surefit.core.units import MIB

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PACKED = (".gz", ".zst")
"""File endings of compressed files that are read."""
CONNECT_SECONDS, READ_SECONDS = 10, 60
"""Seconds after which a web server without an answer counts as unreachable."""
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_WEB = ("http", "https")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


def is_url(name: str) -> bool:
    """Return whether a name is a URL, of any scheme."""
    return bool(_URL.match(name))


def display_name(name: str) -> str:
    """Return a file's name for messages and records, without a web address's query, which may hold signatures.

    >>> display_name("https://me:pw@a.org/b.jsonl?X-Signature=secret"), display_name("rows.jsonl")
    ('https://a.org/b.jsonl', 'rows.jsonl')
    """
    if not is_url(name):
        return name
    scheme, address = name.split("://", 1)
    if scheme.lower() in _WEB:
        address = re.split(r"[?#]", address, maxsplit=1)[0]
    host, slash, path = address.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def file_extensions(name: str) -> tuple[str, str]:
    """Return (ending that names the format, ending of the compression or ""), in lower case.

    >>> [file_extensions(name) for name in ("a/b.JSONL.gz", "https://a.org/b.parquet?download=true", "LICENSE")]
    [('.jsonl', '.gz'), ('.parquet', ''), ('', '')]
    """
    path = PurePosixPath(urlsplit(name).path if name.lower().startswith(("http://", "https://")) else name)
    last = path.suffix.lower()
    return (PurePosixPath(path.stem).suffix.lower(), last) if last in PACKED else (last, "")


@contextmanager
def open_decompressed(name: str, start: int = 0) -> Iterator[io.BufferedReader]:
    """Open the decompressed bytes of a file from byte `start` (0 if it is compressed or behind a URL).

    Raises:
        DataError: it is not there, may not be read, or is damaged. MachineError: it cannot be reached.
        OSError: a local file cannot be read.
    """
    compression = file_extensions(name)[1]
    with open_raw(name, seekable=False) as inner:
        if not compression and not is_url(name):
            inner.seek(start)
            yield inner  # type: ignore[misc]  # the result of open()
            return
        source: Any = _RemoteStream(inner, name)
        if compression:
            source = _Unpacked(_decompressor(source, compression, name), source)
        with io.BufferedReader(source, MIB) as file:
            yield file


def _decompressor(source: Any, compression: str, name: str) -> Any:
    """Return a decompressing stream. Python reads gzip itself; for zstd it is pyarrow.

    Raises:
        MachineError: pyarrow is not installed.
    """
    if compression == ".gz":
        return gzip.GzipFile(fileobj=source)
    require_import("pyarrow", display_name(name))
    import pyarrow as pa

    return pa.CompressedInputStream(source, "zstd")


@contextmanager
def open_raw(name: str, *, seekable: bool) -> Iterator[IO[bytes]]:
    """Open the bytes of a file as they are stored. A web server sends the whole file once, unless `seekable`.

    Raises:
        DataError, MachineError, OSError: as `open_decompressed`.
    """
    if not is_url(name):
        with open(name, "rb", buffering=MIB) as file:
            yield file
        return
    system, path = filesystem(name)
    streamed = {} if seekable or not name.lower().startswith(("http://", "https://")) else {"block_size": 0}
    with remote_file_errors(name):
        remote = system.open(path, "rb", **streamed)
    with remote:
        yield remote


def filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system behind a URL, and the path in it.

    Raises:
        DataError: no such scheme. MachineError: it needs a package that is not installed.
    """
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0].lower()
    options: dict[str, Any] = {}
    if scheme in _WEB:
        require_import("aiohttp", display_name(url))
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        options = {"client_kwargs": {"timeout": timeout}}
    elif scheme == "hf":
        options = {"token": env.hub_token()}
    with remote_file_errors(url):
        system, path = url_to_fs(url, **options)
    return system, path


def require_file_system(url: str) -> None:
    """Raise if this machine cannot read URLs of this scheme; nothing is downloaded.

    Raises:
        DataError: no such scheme. MachineError: it needs a package that is not installed.
    """
    from fsspec import get_filesystem_class

    with remote_file_errors(url):
        get_filesystem_class(url.partition("://")[0].lower())


class _RemoteStream(io.RawIOBase):
    """A remote stream whose errors name the file and the byte."""

    def __init__(self, inner: IO[bytes], name: str) -> None:
        self._inner, self.name, self.position = inner, name, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with remote_file_errors(self.name, self.position):
            data = self._inner.read(len(buffer))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


class _Unpacked(io.RawIOBase):
    """A compressed stream whose errors name the file and the byte."""

    def __init__(self, inner: Any, packed: _RemoteStream) -> None:
        self._inner, self.packed, self.position = inner, packed, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data: bytes = self._inner.read(len(buffer))
        except SureFitError:
            raise
        except Exception as error:
            truncated = isinstance(error, EOFError) or "runcated" in str(error)
            raise DataError(
                f"damaged: it {'ends in the middle of' if truncated else 'cannot be decompressed after'} the first "
                f"{self.packed.position:,} bytes of compressed data ({reason_of(error)})",
                code="E4074",
                path=display_name(self.packed.name),
                help="test it with gzip -t or zstd -t, and download it again",
            ) from None
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def count_consumed_bytes(file: io.BufferedReader) -> int:
    """Return the bytes of a local file consumed so far, as stored (compressed); `file` is from `open_decompressed`."""
    if not isinstance(file.raw, _Unpacked):
        return file.tell()
    ahead = len(file.peek())
    return round(file.raw.packed.position * (1 - ahead / file.raw.position))


@contextmanager
def remote_file_errors(url: str, position: int | None = None) -> Iterator[None]:
    """Translate a file system's exceptions into SureFit's errors; `position` is the byte reached."""
    try:
        yield
    except SureFitError:
        raise
    except Exception as error:
        raise _failure(url, position, error) from None


def _failure(url: str, position: int | None, error: Exception) -> SureFitError:
    path, scheme = display_name(url), url.partition("://")[0].lower()
    while isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec raises this for every error of a web server
    position_text = f" after {position:,} bytes" if position else ""
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError) or status == 404:
        return DataError(
            f"no such file{' (404)' if scheme in _WEB else ''}", code="E4075", path=path, help="check the address"
        )
    if isinstance(error, PermissionError) or status in (401, 403):
        status_text = f" ({status})" if status else ""
        help_text = "check this machine's credentials for it, and that they allow you to read it"
        return DataError(f"access denied{status_text}", code="E4076", path=path, help=help_text)
    if isinstance(error, ImportError):
        package = _PACKAGES.get(scheme, "")
        help_text = f"pip install {package}" if package else env.first_line(error)
        help_text = install_extra("data") if scheme in _WEB else help_text
        return MachineError(
            f"{scheme}:// needs a package that is not installed", code="E4077", path=path, help=help_text
        )
    if isinstance(error, ValueError) and "Protocol not known" in str(error):
        return DataError(
            f"{scheme}:// is not supported", code="E4078", path=path, help="supported: https, s3, gs and hf"
        )
    if isinstance(error, TimeoutError):
        return MachineError(
            f"no answer{position_text}: timed out",
            code="E4079",
            path=path,
            help="check the network, or copy the file here",
        )
    reason = reason_of(error)
    return MachineError(
        f"cannot be read{position_text}: {reason}",
        code="E4080",
        path=path,
        help="check the network, or copy the file here",
    )
