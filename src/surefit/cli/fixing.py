"""`surefit check --fix`: findings that have one right answer, written into the config. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.config.edit import EditResult, edit_text, rename_text, write_edited
from surefit.config.load import LoadedConfig, is_overridden, read_config_text
from surefit.config.resolve import one_line_yaml
from surefit.core.errors import ConfigError
from surefit.core.rundir import RunDir
from surefit.core.units import plural

if TYPE_CHECKING:
    from surefit.cli.render import Output


CheckText = Callable[[str], Sequence[Mapping[str, Any]]]
"""The text of a config → the findings of a check of it."""


def fix_config(
    out: Output, loaded: LoadedConfig, findings: Sequence[dict[str, Any]], dry_run: bool, judged: CheckText
) -> dict[str, Any]:
    """Change the config file as the findings ask, show the difference, and say what was not changed.

    Each change is judged before it is written: one that leaves its finding there is no fix, and is not made.

    Args:
        judged: checks the changed text.

    Returns:
        "fixed": the changes; "not_fixed": those that could not be made, with a "reason"; "diff"; "written".

    Raises:
        ConfigError: the file is the record of a run.
        MachineError: it cannot be written.
    """
    path = loaded.path
    _require_no_record(path)
    wanted = [{"code": each["code"], "finding": each["field"], **each["fix"]} for each in findings if each["fix"]]
    changes, reasons = _changes(loaded, wanted)
    text = read_config_text(path)
    edited = edit_text(text, changes, path)
    reasons |= edited.refused
    if useless := _without_effect(edited, wanted, judged):
        reasons |= useless
        kept = {key: value for key, value in changes.items() if key in edited.done and key not in useless}
        edited = edit_text(text, kept, path)
    if edited.done and not dry_run:
        write_edited(path, edited.text)
    diff = _diff(text, edited.text, path)
    shown = [{key: each[key] for key in ("code", "field", "value")} for each in wanted]
    fixed = [each for each in shown if each["field"] in edited.done]
    refused = [each | {"reason": reasons[each["field"]]} for each in shown if each["field"] in reasons]
    _say(out, fixed, refused, diff, dry_run)
    return {"fixed": fixed, "not_fixed": refused, "diff": diff, "written": bool(edited.done) and not dry_run}


def _require_no_record(path: Path) -> None:
    if path.name == RunDir(path.parent).resolved.name and RunDir(path.parent).events.exists():
        raise ConfigError(
            "this is the record of a run, which stays as it ran", code="E1018", path=path, help="fix its config file"
        )


def rename_keys(out: Output, path: Path, dry_run: bool) -> None:
    """Write the new names of a config's keys into it, and show the difference.

    Raises:
        ConfigError: the file is the record of a run.
        MachineError: it cannot be written.
    """
    _require_no_record(path)
    text = read_config_text(path)
    edited = rename_text(text, path)
    for key, reason in edited.refused.items():
        out.say(f"not renamed: {key}: {reason}", "yellow")
    if not edited.done:
        return
    if not dry_run:
        write_edited(path, edited.text)
    out.say(_diff(text, edited.text, path))
    out.say(f"{'would rename' if dry_run else 'renamed'}: {', '.join(edited.done)}", "green")


def _without_effect(edited: EditResult, wanted: Sequence[dict[str, Any]], judged: CheckText) -> dict[str, str]:
    """Return the changed keys whose finding is still there, each with the reason."""
    if not edited.done:
        return {}
    try:
        after = {(each["code"], each["field"]): each["message"] for each in judged(edited.text)}
    except ConfigError as error:
        return dict.fromkeys(edited.done, f"the changed config could not be used: {error.message}")
    still = {
        each["field"]: after.get((each["code"], each["finding"])) for each in wanted if each["field"] in edited.done
    }
    return {key: f"it would stay: {message}" for key, message in still.items() if message is not None}


def _changes(loaded: LoadedConfig, wanted: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """The changes to make in the file, and why others are not made there."""
    changes: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for each in wanted:
        key, value = each["field"], each["value"]
        if is_overridden(key, loaded.overridden):
            reasons[key] = "it is set on the command line: change it there"
        elif changes.setdefault(key, value) != value:
            reasons[key] = "the findings ask for different values: choose one"
    return {key: value for key, value in changes.items() if key not in reasons}, reasons


def _diff(before: str, after: str, path: Path) -> str:
    one, other = (text.replace("\r\n", "\n").split("\n") for text in (before, after))
    return "\n".join(difflib.unified_diff(one, other, str(path), f"{path} (fixed)", lineterm=""))


def _say(
    out: Output, fixed: Sequence[dict[str, Any]], refused: Sequence[dict[str, Any]], diff: str, dry_run: bool
) -> None:
    if diff:
        out.say(diff)
    for each in fixed:
        new = "removed" if each["value"] is None else one_line_yaml(each["value"])
        out.say(f"{'would fix' if dry_run else 'fixed'} {each['code']}: {each['field']}: {new}", "green")
    for each in refused:
        out.say(f"not fixed {each['code']}: {each['field']}: {each['reason']}", "yellow")
    if not fixed and not refused:
        out.say("nothing to fix: no finding here has one right answer")
    elif dry_run:
        out.say(f"{plural(len(fixed), 'change')}, nothing was written")
