"""The page that begins with somebody's rows: a file is stored in the workspace, and a config is made for it, as by
`surefit init --data`."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError
from surefit.core.rundir import file_sha256, fsync_directory, fsync_file, machine_errors
from surefit.core.units import MIB, bytes_text
from surefit.data.read.file_io import file_extensions
from surefit.data.read.readers import ENDINGS
from surefit.facts.gpus import GPUS
from surefit.facts.model import NANO, catalogue
from surefit.stages.starting import build_starting_config, choose_run_name, next_command
from surefit.ui.pages import UiContext, require_posted_text
from surefit.ui.workspace import PART, Workspace

MAX_UPLOAD = 256 * MIB
"""Bytes of the largest file that is stored through the page; a larger one is copied into the workspace by hand."""
UPLOADS_AT_ONCE = 2
IDLE_SECONDS, UPLOAD_SECONDS = 30.0, 1800.0
"""Longest pause in an upload, and its longest time."""
LONGEST_STEM = 80
NAME_TRIES = 1000


def rows_page(ui: UiContext, request: Request) -> Response:
    """Show where to drop a file, and the rows that are in the workspace already."""
    models = list(dict.fromkeys([NANO, *catalogue()]))
    files = ui.workspace.row_files()
    return ui.page("rows", files=files, models=models, gpus=list(GPUS), most=MAX_UPLOAD, endings=ENDINGS)


async def receive_rows(request: Request) -> Response:
    """Store an uploaded file, whose bytes are the request's body, and return its name in the workspace."""
    ui: UiContext = request.app.state.ui
    name = safe_name(request.query_params.get("name", ""))
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > MAX_UPLOAD:
        raise _too_large()
    if ui.uploads >= UPLOADS_AT_ONCE:
        raise HTTPException(409, f"{UPLOADS_AT_ONCE} uploads are under way: wait for one to end.")
    ui.uploads += 1
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            path = await store_upload(ui.workspace, name, request.stream())
    except (TimeoutError, ClientDisconnect):
        raise HTTPException(408, "The upload stopped before its end; nothing of it was kept.") from None
    finally:
        ui.uploads -= 1
    return JSONResponse({"name": ui.workspace.name(path)})


def safe_name(name: str) -> str:
    """Return a file name that needs no quotes in a config or a shell.

    Raises:
        HTTPException: 400 if no reader knows files of that kind.

    >>> safe_name("my rows (2).JSONL"), safe_name("../../x.csv"), safe_name("-.jsonl.gz"), safe_name("übung.txt")
    ('my-rows-2.jsonl', 'x.csv', 'rows.jsonl.gz', 'übung.txt')
    """
    last = re.split(r"[/\\]", name)[-1]
    kind, packing = file_extensions(last)
    if kind not in ENDINGS:
        raise HTTPException(400, f"A file of rows ends in {', '.join(ENDINGS)}; this one is named {last[:80]!r}.")
    stem = re.sub(r"[^\w.]+", "-", last[: len(last) - len(kind + packing)]).strip("-._")
    while len(stem.encode()) > LONGEST_STEM:
        stem = stem[:-1]
    return f"{stem or 'rows'}{kind}{packing}"


async def store_upload(
    workspace: Workspace,
    name: str,
    chunks: AsyncIterator[bytes],
    limit: int = MAX_UPLOAD,
    idle_seconds: float = IDLE_SECONDS,
) -> Path:
    """Write an upload to a temporary file, then give it its name; whatever goes wrong, nothing of it remains.

    Raises:
        HTTPException: 413 above `limit` bytes; 400 if it is empty.
        TimeoutError: nothing arrived for `idle_seconds`.
    """
    temporary = workspace.state_folder() / f"{secrets.token_hex(8)}{PART}"
    size = 0
    try:
        with machine_errors(temporary), open(temporary, "xb") as file:
            while True:
                async with asyncio.timeout(idle_seconds):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    break
                size += len(chunk)
                if size > limit:
                    raise _too_large()
                file.write(chunk)
        if not size:
            raise HTTPException(400, "The file is empty.")
        return await run_sync(_move_in, temporary, workspace.root, name)
    finally:
        temporary.unlink(missing_ok=True)


def _too_large() -> HTTPException:
    how = "Put a larger file into the workspace directory yourself: it is then listed on this page."
    return HTTPException(413, f"The page takes files of up to {bytes_text(MAX_UPLOAD)}. {how}", {"Connection": "close"})


def _move_in(temporary: Path, folder: Path, name: str) -> Path:
    """Rename a file to `name`, or `name` with a number, and return its path; a file with the same content is used as it
    is, and nothing is ever written over."""
    with machine_errors(folder):
        fsync_file(temporary)
        for number in range(1, NAME_TRIES):
            path = folder / numbered(name, number)
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            except FileExistsError:
                if _same_content(temporary, path):
                    return path
                continue
            try:
                os.replace(temporary, path)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            fsync_directory(folder)
            return path
    raise HTTPException(409, f"The workspace has too many files named {name}.")


def numbered(name: str, number: int) -> str:
    """Return a file name with a number before its ending, from 2 on.

    >>> numbered("rows.jsonl.gz", 1), numbered("rows.jsonl.gz", 2), numbered("rows.csv", 3)
    ('rows.jsonl.gz', 'rows-2.jsonl.gz', 'rows-3.csv')
    """
    ending = "".join(file_extensions(name))
    return name if number == 1 else f"{name[: len(name) - len(ending)]}-{number}{ending}"


def _same_content(one: Path, other: Path) -> bool:
    if other.is_symlink() or not other.is_file() or one.stat().st_size != other.stat().st_size:
        return False
    return file_sha256(one) == file_sha256(other)


def draft_config(ui: UiContext, body: dict[str, Any]) -> dict[str, Any]:
    """Return the config that `surefit init --data` makes for a file of the workspace, with what was seen in it.

    Memory is judged by the formula alone: a simulation would import torch into the server.

    Raises:
        SureFitError: the rows, the model or the card cannot be used, or do not fit together.
    """
    rows, model, gpu = (require_posted_text(body, name).strip() for name in ("rows", "model", "gpu"))
    source = ui.workspace.name(ui.workspace.row_file(rows))
    _require_inside(ui, source, model)
    run = choose_run_name(ui.workspace.root, source, for_config=True)
    draft = build_starting_config(source, model or None, gpu or "auto", name=run, simulate=False)
    return {
        "name": f"{run}.yaml",
        "text": draft.text,
        "columns": list(draft.columns),
        "seen": list(draft.seen),
        "proposals": [{"name": name, "size": size, "license": license} for name, size, license in draft.proposals],
        "command": next_command(Path(f"{run}.yaml")),
    }


def _require_inside(ui: UiContext, rows: str, model: str) -> None:
    """Raise if the rows or the model are files outside the workspace.

    Raises:
        ConfigError: they are, or the model is no name.
    """
    values = {"model": {"name_or_path": model or NANO}, "data": {"train": rows}, "output_dir": "runs/rows"}
    try:
        config = SureFitConfig.model_validate(values)
    except ValidationError:
        raise ConfigError("this is not the name of a model", code="E1078", help="write a hub id: owner/name") from None
    for problem in ui.workspace.refuse(config, "surefit init --data ROWS"):
        raise problem
