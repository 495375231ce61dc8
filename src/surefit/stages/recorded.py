"""The values that a run decided at its start: a resumed run takes them from resolved.yaml and decides none again."""

from __future__ import annotations

from dataclasses import replace

from surefit.checkpoint.files import list_steps
from surefit.config.load import LoadedConfig, load_config, read_config_text
from surefit.config.memory import MICRO
from surefit.config.resolve import iter_config_values, lookup, with_decisions
from surefit.config.world import MODE, LaunchedProcesses, count_processes
from surefit.core.errors import ConfigError
from surefit.core.rundir import RunDir

BY_DEVICES = (MODE, "parallel.cp", MICRO)
"""Decided values that follow from the number of devices. They change how a step is carried out, not what it learns."""
OF_THIS_START = ("hardware.gpu", "hardware.count", "hardware.nodes")
"""Values that say where the resumed run is at work."""


def with_recorded_decisions(loaded: LoadedConfig, run: RunDir, started: LaunchedProcesses | None) -> LoadedConfig:
    """Return the config with the decisions of a run that has a checkpoint, in place of "auto".

    Rows, devices and memory may be others than at the start, and with them the choice that "auto" would make now: the
    checkpoint would not fit it. Where the number of devices has changed, the values of `BY_DEVICES` are decided again,
    and where the config names another GPU, the micro batch.

    Args:
        loaded: the config of the resumed run, with its "auto".
        run: its directory.
        started: the launched processes, where this is one of several.
    """
    if loaded.path == run.resolved or not run.resolved.is_file() or not list_steps(run.checkpoints):
        return loaded
    try:
        before = load_config(run.resolved).config
        reasons = _decisions(run)
    except (ConfigError, ValueError):  # of another version; the checkpoint's own settings are compared in any case
        return loaded
    processes = started.each * started.nodes if started else count_processes(loaded.config)
    left_out: tuple[str, ...] = OF_THIS_START
    if processes != count_processes(before):
        left_out += BY_DEVICES
    if loaded.config.hardware.gpu != before.hardware.gpu:
        left_out += (MICRO,)  # which another card's memory decides
    open_keys = {key for key, value in iter_config_values(loaded.config) if value == "auto"}
    if MODE in open_keys and "parallel.cp" in reasons and "parallel.cp" not in loaded.lines:
        open_keys.add("parallel.cp")  # decided together with the mode
    taken = {key: lookup(before, key) for key in reasons if key in open_keys and key not in left_out}
    recorded = {key: reasons[key] for key in taken}
    return replace(loaded, config=with_decisions(loaded.config, taken), recorded=recorded)


def _decisions(run: RunDir) -> dict[str, str]:
    """Return dotted key → reason of the values that the run decided by itself."""
    from surefit.report.artefacts import read_settings

    settings = read_settings(read_config_text(run.resolved))
    return {setting.key: setting.detail for setting in settings if setting.origin == "auto"}
