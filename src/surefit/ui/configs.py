"""Writing a config: its text, a form for the fields that are used most, and what `surefit check` finds in it."""

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
from surefit.config.schema import Config
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
"""The fields of the form; every other one is written in the text."""


def config_page(ui: UiContext, request: Request) -> Response:
    """A config of the workspace (`?open=PATH`), a starter (`?recipe=NAME`), or the choice between them."""
    opened, recipe = request.query_params.get("open"), request.query_params.get("recipe")
    name, text, known = "", "", None
    if opened is not None:
        path = ui.workspace.config(opened)
        if not path.is_file():
            raise HTTPException(404, "There is no such file in the workspace.")
        name, text, known = opened, read_config_text(path), file_version(path)
    elif recipe is not None:
        name, text = f"{recipe.replace('_', '-')}.yaml", starter_config(recipes.get_recipe(recipe).name)
    return ui.page(
        "config",
        name=name,
        text=text,
        known=known,
        editing=opened is not None or recipe is not None,
        configs=ui.workspace.configs(),
        complete=[name for name in recipes.list_recipes() if has_bundled_rows(name)],
        own_rows=[name for name in recipes.list_recipes() if not has_bundled_rows(name)],
        fields=list(list_form_fields()),
    )


def list_form_fields() -> Iterator[dict[str, Any]]:
    """The form's fields, made of the schema: key, description, default, and the choices where there are only those."""
    for dotted in FORM:
        section: type[BaseModel] = Config
        *sections, name = dotted.split(".")
        for part in sections:
            inner = section.model_fields[part].annotation
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
    """The values of an annotation, as YAML writes them; none where it takes any number or text."""
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
    """What `surefit check` says of a text, and the values of the form's fields in it."""
    name, text = (
        Path(require_posted_text(body, "name") or "config.yaml").name or "config.yaml",
        require_posted_text(body, "text"),
    )
    if not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        raise HTTPException(400, "name must be a file name")
    start = time.perf_counter()
    report = ui.stages.check(text, name, ui.workspace.refuse)
    seconds = time.perf_counter() - start
    return {"findings": report["findings"], "rules": report.get("rules"), "seconds": seconds, "values": _values(text)}


def _values(text: str) -> dict[str, str]:
    """The values of the form's fields, as far as they can be read."""
    try:
        tree, _ = parse_yaml(text, Path("config.yaml"))
    except ConfigError:
        return {}
    found = {}
    for dotted in FORM:
        here: Any = tree
        for name in dotted.split("."):
            here = here.get(name) if isinstance(here, dict) else None
        if here is not None:
            found[dotted] = one_line_yaml(here)
    return found


def edit_posted_config(ui: UiContext, body: dict[str, Any]) -> dict[str, Any]:
    """The text with one field set to a value, or taken out of it where the value is empty."""
    text, key, written = (require_posted_text(body, name) for name in ("text", "key", "value"))
    if key not in FORM:
        raise HTTPException(400, f"{key} is not in the form")
    value, _ = parse_yaml(written, Path(key)) if written.strip() else (None, {})
    edited = edit_text(text, {key: value}, Path("config.yaml"))
    return {"text": edited.text, "refused": edited.refused.get(key)}


def save_posted_config(ui: UiContext, body: dict[str, Any]) -> dict[str, Any]:
    """Write the config into the workspace."""
    known = body.get("known")
    path = ui.workspace.save(
        require_posted_text(body, "name"), require_posted_text(body, "text"), known if isinstance(known, str) else None
    )
    return {"name": ui.workspace.name(path), "known": file_version(path)}
