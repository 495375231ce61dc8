"""Axolotl's `datasets`: the location of the rows, their layout, and what SureFit cannot express of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefit.facts.thinking import FIELDS
from surefit.importers import hf
from surefit.importers.config_mapping import ConfigDraft
from surefit.importers.known import key_set, read_schema
from surefit.importers.paths import first_rows
from surefit.importers.values import expected_value, is_placeholder, value_kinds

LOADERS = ("json", "csv", "parquet", "text", "arrow")
ROW_KEYS = {
    "path", "type", "split", "data_files", "ds_type", "name", "chat_template", "train_on_eos", "roles_to_train",
    "split_thinking", "template_thinking_key",
}  # fmt: skip
"""Keys of a dataset that do not change the layout of its rows."""
_TABLE = read_schema("axolotl_rows.json")
TYPES = key_set(" ".join(_TABLE["types"]))
"""Axolotl 0.19.0: the modules of prompt_strategies/ and the handlers of utils/data/wrappers.py."""
WHY: dict[str, str] = _TABLE["why"]
"""Key of a dataset → why SureFit does not read it."""
COLUMNS = "SureFit reads the columns by name: rename them, or write the rows in a layout of docs/data.md"
REASONING = f"SureFit reads reasoning under any of these names: {', '.join(FIELDS)}"
OTHERS = "not trained on: data.mix needs data sets in a layout of docs/data.md, each named once"


def read_datasets(draft: ConfigDraft) -> None:
    """Map the first of `datasets` to the training set; further sets, or rows in a custom layout, are not read."""
    for key in ("datasets", "test_datasets", "pretraining_dataset"):
        entries = draft.flat.get(key)
        for i, entry in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(entry, dict):
                _judge(draft, f"{key}", f"[{i}]", entry)
    datasets = draft.flat.get("datasets")
    if datasets is None or "datasets" in draft.refused:
        draft.whole_run = False
        return
    if not isinstance(datasets, list) or not datasets or not all(isinstance(entry, dict) for entry in datasets):
        draft.refuse("datasets", "a list of data sets, each with a path")
        return
    first_set = datasets[0]
    rows_source = find_rows_source(first_set)
    if rows_source is None:
        draft.refuse_with("datasets", "expected a path in every data set", "name the rows: `- path: rows.jsonl`")
        return
    draft.reach("datasets")
    draft.carry("data.train", rows_source, "datasets[0].path")
    if is_plain_split(first_set.get("split")):
        draft.carry("data.split", first_set["split"], "datasets[0].split")
    layouts = {_layout(entry) for entry in datasets}
    layout = _layout(first_set)
    if layout is not None and len(layouts) == 1:
        draft.carry("data.format", layout, "datasets[0].type")
    takes_shard = draft.says("dataset_shard_num")
    partial_split = "split" in first_set and not is_plain_split(first_set["split"])
    draft.rows_known = layout is not None and len(datasets) == 1 and not takes_shard and not partial_split
    # A processor, and mistral-common, bring templates of their own besides the tokenizer's.
    has_processor_template = draft.says("processor_type") or draft.flat.get("tokenizer_use_mistral_common") is True
    if layout in ("messages", "sharegpt") and not has_processor_template:
        draft.say("conversations", True, "datasets")
        if first_set.get("chat_template") not in (None, "tokenizer_default"):
            draft.say("chat_template", str(first_set["chat_template"]), "datasets")
    _name_lost(draft, datasets, layouts)
    _held_out_set(draft)


def _name_lost(draft: ConfigDraft, sets: Sequence[dict[str, Any]], layouts: set[str | None]) -> None:
    """Record what the entries set beyond the location of their rows."""
    is_mixed = None not in layouts and hf.map_data_mix(draft, [_to_mix_source(entry) for entry in sets[1:]], "datasets")
    if draft.says("dataset_shard_num"):
        draft.lose("datasets", "SureFit trains on all rows, and dataset_shard_num selects a part of them")
    for i, entry in enumerate(sets):
        mapped_keys = {"path"} | ({"type"} if len(layouts) == 1 and None not in layouts and i == 0 else set())
        mapped_keys |= {"split"} if is_plain_split(entry.get("split")) and (i == 0 or is_mixed) else set()
        mapped_keys |= (
            {"data_files"} if entry.get("path") in LOADERS and find_rows_source(entry) != entry.get("path") else set()
        )
        if i and not is_mixed:
            draft.lose_part("datasets", f"[{i}].path", find_rows_source(entry) or entry.get("path"), OTHERS)
        for key, value in entry.items():
            if key not in mapped_keys and value not in (None, False, "", [], {}):
                why = REASONING if key == "field_thinking" and value in FIELDS else WHY.get(key, COLUMNS)
                draft.lose_part("datasets", f"[{i}].{key}", value, why)


def is_plain_split(value: Any) -> bool:
    """Return whether a split is the name of a whole split, such as `train` and not `train[:1%]`."""
    return isinstance(value, str) and value.isidentifier()


def _judge(draft: ConfigDraft, key: str, at: str, entry: dict[str, Any]) -> None:
    """Record errors for the values of one dataset that Axolotl cannot use."""
    kinds = value_kinds("axolotl_dataset")
    for name, value in entry.items():
        kind = kinds.get(name)
        if value is None or kind is None:
            continue
        expected = expected_value(name, kind, value)
        if expected and not is_placeholder(value, kind):
            draft.refuse_part(key, f"{at}.{name}", value, expected)
    roles = _untrained(entry, draft)
    if roles:
        trained_roles = entry.get("roles_to_train")
        draft.refuse_part(
            key, f"{at}.roles_to_train", trained_roles, f"roles that the rows have ({', '.join(sorted(roles))})"
        )
    kind = entry.get("type")
    if isinstance(kind, str) and not _is_type(kind):
        draft.refuse_part(key, f"{at}.type", kind, f"one of Axolotl's types of rows ({_types_like(kind)})")


ROLES = {
    "human": "user", "user": "user", "assistant": "assistant", "gpt": "assistant", "system": "system", "tool": "tool"
}  # fmt: skip
"""Role in the rows → role in the template, if `roles` is not set (0.19.0, prompt_strategies/chat_template.py)."""


def _untrained(entry: dict[str, Any], draft: ConfigDraft) -> set[str]:
    """Return the roles in the local rows, if `roles_to_train` contains none of them."""
    trained_roles, role_names = entry.get("roles_to_train"), entry.get("roles")
    source = find_rows_source(entry)
    if (
        not isinstance(trained_roles, list)
        or not trained_roles
        or source is None
        or entry.get("type") != "chat_template"
    ):
        return set()
    names = (
        {name: role for role, aliases in role_names.items() for name in aliases}
        if isinstance(role_names, dict)
        else ROLES
    )
    properties = entry.get("message_property_mappings")
    field = properties.get("role", "role") if isinstance(properties, dict) else entry.get("message_field_role", "role")
    column = entry.get("field_messages", "messages")
    file = next((path for path in (Path(source), draft.path.parent / source) if path.is_file()), None)
    turns = [
        turn for row in (first_rows(file) if file else ()) for turn in row.get(column) or () if isinstance(turn, dict)
    ]
    row_roles = {names.get(role, role) for turn in turns if isinstance(role := turn.get(field), str)}
    return row_roles if row_roles and not row_roles & {names.get(role, role) for role in trained_roles} else set()


def _is_type(kind: str) -> bool:
    strategy, *suffix = re.split(r"[.:]", kind, maxsplit=1)
    return strategy in TYPES or (bool(suffix) and "." in kind and strategy.isidentifier())


def _types_like(kind: str) -> str:
    from difflib import get_close_matches

    if kind.startswith("sharegpt"):
        return "chat_template in its place"
    return ", ".join(
        get_close_matches(kind, sorted(TYPES), n=3, cutoff=0.5) or ["alpaca", "chat_template", "completion"]
    )


def _held_out_set(draft: ConfigDraft) -> None:
    held_out = draft.flat.get("test_datasets")
    if not isinstance(held_out, list):
        return
    for i, entry in enumerate(held_out):
        if not isinstance(entry, dict):
            continue
        is_mapped = i == 0 and len(held_out) == 1 and find_rows_source(entry) is not None
        if is_mapped:
            draft.carry("data.eval", find_rows_source(entry), "test_datasets[0].path")
            draft.reach("test_datasets")
        for key, value in entry.items():
            if value not in (None, False, "") and not (is_mapped and key == "path"):
                draft.lose_part(
                    "test_datasets", f"[{i}].{key}", value, "data.eval needs a file of rows or a data set's id"
                )


def _to_mix_source(entry: dict[str, Any]) -> str:
    """Return a further dataset as an entry of `data.mix`; its layout is known, so it has a source."""
    source, split = find_rows_source(entry) or "", entry.get("split", "train")
    return source if split == "train" or entry.get("path") in LOADERS else f"{source}@{split}"


def find_rows_source(entry: dict[str, Any]) -> str | None:
    """Return the path or id of a dataset's rows."""
    path, files = entry.get("path"), entry.get("data_files")
    if path in LOADERS and isinstance(files, list) and len(files) == 1:
        files = files[0]
    if path in LOADERS and isinstance(files, str):
        return files
    return path if isinstance(path, str) and path else None


def _layout(entry: dict[str, Any]) -> str | None:
    """Return the `data.format` of a dataset, or None if SureFit has no such layout."""
    kind = entry.get("type")
    if not isinstance(kind, str) or (entry.get("data_files") and entry.get("path") not in LOADERS):
        return None
    messages = str(entry.get("field_messages", "messages"))
    field_keys = {"field_messages", *(["field_thinking"] if entry.get("field_thinking") in FIELDS else [])}
    if kind == "chat_template" and set(entry) <= ROW_KEYS | field_keys:
        return {"messages": "messages", "conversations": "sharegpt"}.get(messages)
    default_layout = set(entry) <= ROW_KEYS
    return {"alpaca": "alpaca", "completion": "text"}.get(kind.partition(":")[0]) if default_layout else None
