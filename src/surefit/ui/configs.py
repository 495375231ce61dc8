"""The config editor: the text, a form for the most used fields, and the findings of `surefit check`."""

from __future__ import annotations

import time
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from surefit import recipes
from surefit.config.edit import edit_text
from surefit.config.load import parse_yaml, read_config_text
from surefit.config.resolve import one_line_yaml
from surefit.config.schema import SureFitConfig
from surefit.config.starter import has_bundled_rows, starter_config
from surefit.core.errors import ConfigError
from surefit.ui.pages import UiContext, require_posted_text
from surefit.ui.workspace import LONGEST_NAME, file_version

FORM = (
    "recipe", "model.name_or_path", "model.quantization", "data.train", "data.eval", "data.max_length", "train.method",
    "lora.r", "lora.lora_alpha", "train.num_train_epochs", "train.max_steps", "train.learning_rate",
    "train.global_batch_size",
    "train.per_device_train_batch_size", "train.gradient_checkpointing", "train.seed", "hardware.gpu", "output_dir",
)  # fmt: skip
"""The fields of the form; all others are edited in the text."""


def config_page(ui: UiContext, request: Request) -> Response:
    """Show a config of the workspace (`?open=PATH`), a starter (`?recipe=NAME`), or the choice between them."""
    open_path, recipe = request.query_params.get("open"), request.query_params.get("recipe")
    name, text, version = "", "", None
    if open_path is not None:
        path = ui.workspace.config(open_path)
        if not path.is_file():
            raise HTTPException(404, "There is no such file in the workspace.")
        name, text, version = open_path, read_config_text(path), file_version(path)
    elif recipe is not None:
        name, text = f"{recipe.replace('_', '-')}.yaml", starter_config(recipes.get_recipe(recipe).name)
    return ui.page(
        "config",
        name=name,
        text=text,
        known=version,
        editing=open_path is not None or recipe is not None,
        configs=ui.workspace.configs(),
        complete=_purposes(with_rows=True),
        own_rows=_purposes(with_rows=False),
        fields=list(list_form_fields()),
    )


def _purposes(with_rows: bool) -> dict[str, str]:
    """Return recipe → what it is for, of the starters with bundled rows, or of the others."""
    names = [name for name in recipes.list_recipes() if has_bundled_rows(name) == with_rows]
    return {name: _purpose(name) for name in names}


def _purpose(name: str) -> str:
    try:
        recipe = recipes.get_recipe(name)
    except ConfigError:  # another package's, which does not load
        return ""
    return recipe.purpose or recipe.citation


def list_form_fields() -> Iterator[dict[str, Any]]:
    """Yield the form's fields from the schema: key, description, default, and the choices of a closed field."""
    for dotted in FORM:
        section: type[BaseModel] = SureFitConfig
        *sections, name = dotted.split(".")
        for section_name in sections:
            inner = section.model_fields[section_name].annotation
            assert isinstance(inner, type)
            assert issubclass(inner, BaseModel)
            section = inner
        field = section.model_fields[name]
        choices = recipes.list_recipes() if dotted == "recipe" else list(_choices(field.annotation))
        default = field.get_default(call_default_factory=True)
        yield {
            "key": dotted,
            "help": " ".join((field.description or "").split()),
            "default": "" if default in (PydanticUndefined, None) else one_line_yaml(default),
            "required": field.is_required(),
            "choices": choices,
        }


def _choices(annotation: Any) -> Iterator[str]:
    """Yield the values of an annotation, as YAML writes them; none if any number or text is allowed."""
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    for option in options:
        if option is bool:
            yield from ("true", "false")
        elif typing.get_origin(option) is typing.Literal:
            yield from (one_line_yaml(value) for value in typing.get_args(option))
        else:
            return


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def check_posted_config(ui: UiContext, body: dict[str, Any]) -> dict[str, Any]:
    """Return the findings of `surefit check` on a text, and the values of the form's fields in it."""
    name, text = (
        Path(require_posted_text(body, "name") or "config.yaml").name or "config.yaml",
        require_posted_text(body, "text"),
    )
    if not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        raise HTTPException(400, "name must be a file name")
    start = time.perf_counter()
    report = ui.stages.check(text, name, ui.workspace.refuse)
    seconds = time.perf_counter() - start
    return {
        "findings": report["findings"],
        "rules": report.get("rules"),
        "skipped": report.get("skipped_text", ""),
        "seconds": seconds,
        "values": _values(text),
    }


def _values(text: str) -> dict[str, str]:
    """Return the values of the form's fields, as far as they can be read."""
    try:
        tree, _ = parse_yaml(text, Path("config.yaml"))
    except ConfigError:
        return {}
    values = {}
    for dotted in FORM:
        node: Any = tree
        for name in dotted.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        if node is not None:
            values[dotted] = one_line_yaml(node)
    return values


def edit_posted_config(ui: UiContext, body: dict[str, Any]) -> dict[str, Any]:
    """Return the text with one field set to a value, or removed if the value is empty."""
    text, key, value_text = (require_posted_text(body, name) for name in ("text", "key", "value"))
    if key not in FORM:
        raise HTTPException(400, f"{key} is not a field of the form")
    value, _ = parse_yaml(value_text, Path(key)) if value_text.strip() else (None, {})
    edited = edit_text(text, {key: value}, Path("config.yaml"))
    return {"text": edited.text, "refused": edited.refused.get(key)}


def save_posted_config(ui: UiContext, body: dict[str, Any]) -> dict[str, Any]:
    """Write the config into the workspace."""
    version = body.get("known")
    path = ui.workspace.save(
        require_posted_text(body, "name"),
        require_posted_text(body, "text"),
        version if isinstance(version, str) else None,
    )
    return {"name": ui.workspace.name(path), "known": file_version(path)}
