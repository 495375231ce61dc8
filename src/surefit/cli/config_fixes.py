"""`surefit check --fix`: write the fixes with one right answer into the config. Torch-free."""

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
"""The text of a config → the findings of checking it."""


def fix_config(
    out: Output, loaded: LoadedConfig, findings: Sequence[dict[str, Any]], dry_run: bool, judged: CheckText
) -> dict[str, Any]:
    """Apply the findings' fixes to the config file, print the diff, and report the fixes that were not made.

    Each change is checked before it is written: a change that leaves its finding in place is no fix, and is not made.

    Args:
        judged: checks the changed text.

    Returns:
        "fixed": the changes; "not_fixed": changes that could not be made, each with a "reason"; "diff"; "written".

    Raises:
        ConfigError: the file is the record of a run.
        MachineError: it cannot be written.
    """
    path = loaded.path
    _require_no_record(path)
    fixes = [
        {"code": finding["code"], "finding": finding["field"], **finding["fix"]}
        for finding in findings
        if finding["fix"]
    ]
    changes, reasons = _changes(loaded, fixes)
    text = read_config_text(path)
    edited = edit_text(text, changes, path)
    reasons |= edited.refused
    if useless := _without_effect(edited, fixes, judged):
        reasons |= useless
        effective_changes = {key: value for key, value in changes.items() if key in edited.done and key not in useless}
        edited = edit_text(text, effective_changes, path)
    if edited.done and not dry_run:
        write_edited(path, edited.text)
    diff = _diff(text, edited.text, path)
    fix_records = [{key: fix[key] for key in ("code", "field", "value")} for fix in fixes]
    fixed = [fix for fix in fix_records if fix["field"] in edited.done]
    unfixed = [fix | {"reason": reasons[fix["field"]]} for fix in fix_records if fix["field"] in reasons]
    _say(out, fixed, unfixed, diff, dry_run)
    return {"fixed": fixed, "not_fixed": unfixed, "diff": diff, "written": bool(edited.done) and not dry_run}


def _require_no_record(path: Path) -> None:
    if path.name == RunDir(path.parent).resolved.name and RunDir(path.parent).events.exists():
        raise ConfigError(
            "this is the record of a run, which stays as it ran", code="E1018", path=path, help="fix its config file"
        )


def rename_keys(out: Output, path: Path, dry_run: bool) -> None:
    """Write the new names of renamed keys into a config, and print the diff.

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
        remaining = {(finding["code"], finding["field"]): finding["message"] for finding in judged(edited.text)}
    except ConfigError as error:
        return dict.fromkeys(edited.done, f"the changed config could not be used: {error.message}")
    messages = {
        fix["field"]: remaining.get((fix["code"], fix["finding"])) for fix in wanted if fix["field"] in edited.done
    }
    return {key: f"it would stay: {message}" for key, message in messages.items() if message is not None}


def _changes(loaded: LoadedConfig, wanted: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the changes to make in the file, and the reasons of the changes that are not made there."""
    changes: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for fix in wanted:
        key, value = fix["field"], fix["value"]
        if is_overridden(key, loaded.overridden):
            reasons[key] = "it is set on the command line: change it there"
        elif changes.setdefault(key, value) != value:
            reasons[key] = "the findings name different values: choose one"
    return {key: value for key, value in changes.items() if key not in reasons}, reasons


def _diff(before: str, after: str, path: Path) -> str:
    lines_before, lines_after = (text.replace("\r\n", "\n").split("\n") for text in (before, after))
    return "\n".join(difflib.unified_diff(lines_before, lines_after, str(path), f"{path} (fixed)", lineterm=""))


def _say(
    out: Output, fixed: Sequence[dict[str, Any]], refused: Sequence[dict[str, Any]], diff: str, dry_run: bool
) -> None:
    if diff:
        out.say(diff)
    for fix in fixed:
        new_value = "removed" if fix["value"] is None else one_line_yaml(fix["value"])
        out.say(f"{'would fix' if dry_run else 'fixed'} {fix['code']}: {fix['field']}: {new_value}", "green")
    for fix in refused:
        out.say(f"not fixed {fix['code']}: {fix['field']}: {fix['reason']}", "yellow")
    if not fixed and not refused:
        out.say("nothing to fix: no finding here has one right answer")
    elif dry_run:
        out.say(f"{plural(len(fixed), 'change')}, nothing was written")
