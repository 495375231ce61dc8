"""Reader of Python training scripts for `surefit check train.py`: the script is parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from surefit.core.errors import ConfigError
from surefit.facts.job_script import JobScript, Launch
from surefit.facts.setup import SettingLocation
from surefit.importers.hf import to_trackers
from surefit.importers.joined import find_launches
from surefit.importers.known import read_schema
from surefit.importers.python_calls import (
    ANY_ARGUMENTS,
    ANY_TRAINER,
    CONFIGS,
    PRETRAINED,
    ScriptCall,
    find_calls,
    read_call,
)
from surefit.importers.python_conflicts import read_conflicts, read_generation_groups
from surefit.importers.python_faults import read_faults
from surefit.importers.python_models import read_models
from surefit.importers.python_rows import LENGTHS, read_rows
from surefit.importers.python_script import ScriptNotes, not_a_training_script, read_arguments, read_loads
from surefit.importers.python_source import (
    ImportedName,
    Scope,
    ScriptSource,
    find_accidental_tuple,
    last_name,
    parse_script,
)
from surefit.importers.python_tokens import read_tokens
from surefit.importers.releases import TargetReleases
from surefit.importers.requirements import read_project_requirements
from surefit.importers.result import ImportedConfig
from surefit.importers.values import value_kinds

_IMPORTS = read_schema("gone_imports.json")
GONE_IMPORTS: dict[str, tuple[str, str, str]] = _IMPORTS["gone"]
"""Removed imports → (package, the versions without it, what to write instead).

Looked up in the packages of transformers 4.40 to 5.23, PEFT 0.7 to 0.21, TRL 0.8 to 1.16 and datasets 5.2;
transformers.file_utils still exists. TRL's own exports are in the table of releases."""
INSTEAD_OF_IMPORTS: dict[str, str] = _IMPORTS["instead"]
"""Names that TRL no longer exports → what to write instead."""
SCORERS = ("rouge", "rouge_score", "sacrebleu", "smatch", "bert_score", "nltk.translate")
STAGES = ("Config", "Trainer")
COUNTS = ("num_processes", "nproc_per_node", "num_gpus", "config_file")
"""Launcher options that set the number of processes."""
LOADERS = ("load_dataset", "load_from_disk", "from_json", "from_csv", "from_parquet", "from_list", "from_generator")
LOOP_HOOKS = ("on_evaluate", "on_epoch_end", "on_log", "on_save", "on_step_end", "on_substep_end")


def read_python(path: Path) -> ImportedConfig:
    """Return the settings that are written out in a training script.

    Raises:
        ConfigError: it is not Python, or has no call that trains, loads or merges a model.
    """
    source = parse_script(path)
    launches = list(find_launches(path))
    _read_passed(source, launches)
    calls = list(find_calls(source))
    kinds = (*ANY_ARGUMENTS, *ANY_TRAINER, *CONFIGS)
    if not any(call.kind in kinds or call.kind.endswith(PRETRAINED) for call in calls) and not _prepares(source):
        raise not_a_training_script(path)
    notes = ScriptNotes(path)
    judge = find_target_releases(source)
    read_arguments(notes, calls, judge)
    read_loads(notes, calls, judge)
    read_models(notes, source, calls)
    read_rows(notes, source, calls, judge)
    read_conflicts(notes, source, calls)
    read_faults(notes, source, calls, judge)
    read_tokens(notes, source, calls)
    _read_batch(notes, source, calls)
    _read_generation(notes, source)
    _read_trackers(notes, source)
    notes.problems += _find_accidental_tuples(path, source)
    _read_launch(notes, launches)
    if not judge.unsloth:  # Unsloth adjusts the batch itself
        read_generation_groups(notes, calls)
    for name, (instead, line) in _gone_imports(source, judge).items():
        notes.gone_imports[name] = instead
        notes.place(name, name.rpartition(".")[2], line)
    return ImportedConfig(
        "python", path, notes.finished(), None, {}, tuple(notes.lost), None, tuple(notes.problems), lines=notes.lines,
        columns=notes.columns, judged_by=judge.said() if notes.judges else "",
    )  # fmt: skip


def _prepares(source: ScriptSource) -> bool:
    """Return whether the script prepares a dataset: it loads one and transforms its rows."""
    calls = [(node, scope) for node, scope in source.each(ast.Call)]
    loads = any(
        (source.origin(node.func, scope) or "").startswith("datasets.")
        and (source.origin(node.func, scope) or "").rpartition(".")[2] in LOADERS
        for node, scope in calls
    )
    return loads and any(getattr(node.func, "attr", "") in ("map", "filter") for node, _ in calls)


def _read_passed(source: ScriptSource, launches: list[tuple[JobScript, Launch]]) -> None:
    """Record the values that launch scripts beside the script pass to its parser."""
    for name in {name for _, launch in launches for name in launch.arguments}:
        values = [launch.arguments.get(name) for _, launch in launches]
        # One of several launches may keep the default; a shell variable is known only at run time.
        source.passed[name] = {None if value is None or "$" in value else value for value in values}


def _read_launch(notes: ScriptNotes, launches: list[tuple[JobScript, Launch]]) -> None:
    """Note the number of processes that a launch script beside the script starts."""
    counts = [
        (launch.processes or (launch.per_node or 0) * (launch.machines or 1), job, launch) for job, launch in launches
    ]
    count, job, launch = max(counts, key=lambda each: each[0], default=(0, None, None))
    if job is not None and launch is not None and count > 1 and launch.tool != "python":
        flag = next((name for name in COUNTS if name in launch.flags), None)
        notes.setup["processes"] = count
        line = launch.lines.get(flag or "", launch.line)
        notes.places["processes"] = SettingLocation(f"--{flag}" if flag else launch.tool, job.path, line)


def find_target_releases(source: ScriptSource) -> TargetReleases:
    """Return the library releases that the script's inline metadata or the requirements beside it specify."""
    versions, files = read_project_requirements(source.path)
    unsloth = any(imported.dotted.partition(".")[0] == "unsloth" for imported in _imported(source))
    return TargetReleases(versions, files, unsloth)


def _imported(source: ScriptSource) -> Iterator[ImportedName]:
    """Yield every import of the script."""
    scopes = [source.module, *source.inside.values()]
    bindings = (binding for scope in scopes for bindings in scope.names.values() for binding in bindings)
    yield from (binding.value for binding in bindings if isinstance(binding.value, ImportedName))


def _gone_imports(source: ScriptSource, judge: TargetReleases) -> dict[str, tuple[str, int]]:
    """Return the imports that the releases no longer have: name → (what to write instead, line)."""
    removed: dict[str, tuple[str, int]] = {}
    for imported in _imported(source):
        if imported.guarded:
            continue
        for name, (package, versions, instead) in GONE_IMPORTS.items():
            if f"{imported.dotted}.".startswith(f"{name}.") and judge.reaches(package, versions):
                removed.setdefault(imported.dotted, (instead, imported.line))
        root, _, name = imported.dotted.partition(".")
        if root == "trl" and judge.exports(name) == "gone":
            advice = (
                "import it from trl.experimental, or pin an older TRL" if name.endswith(STAGES) else "pin an older TRL"
            )
            removed.setdefault(imported.dotted, (INSTEAD_OF_IMPORTS.get(name, advice), imported.line))
    return dict(sorted(removed.items(), key=lambda entry: entry[1][1]))


def _find_accidental_tuples(path: Path, source: ScriptSource) -> Iterator[ConfigError]:
    """Yield an error for each tuple that a stray comma made out of a needed number."""
    numbers = {key for key, kind in value_kinds("trl").items() if kind in ("int", "float")} | LENGTHS
    used_names = {last_name(call.value) for call, _ in source.each(ast.keyword) if call.arg in numbers}
    comparisons = [node for node, _ in source.each(ast.Compare) if not isinstance(node.ops[0], ast.In | ast.NotIn)]
    used_names |= {last_name(side) for node in comparisons for side in (node.left, *node.comparators)}
    for node, _ in source.each(ast.Assign):
        name = last_name(node.targets[0]) if len(node.targets) == 1 else ""
        number = find_accidental_tuple(source, node.value)
        if number is not None and name and name in used_names:
            text = source.text_of(node.value)
            yield ConfigError(
                f"expected a number, got a tuple: the comma in {text} makes it one",
                code="E3018", path=path, line=node.lineno,
                field=name, help=f"write {name} = {number}",
            )  # fmt: skip


def _read_batch(notes: ScriptNotes, source: ScriptSource, calls: list[ScriptCall]) -> None:
    """Note a batch size per device that is multiplied by the number of devices."""
    for call in calls:
        batch_size = call.given.get("per_device_train_batch_size") if call.kind in ANY_ARGUMENTS else None
        if batch_size is not None and _times_devices(source, *batch_size):
            line = call.lines["per_device_train_batch_size"]
            notes.say("micro_batch_times_gpus", True, "per_device_train_batch_size", line)


def _times_devices(source: ScriptSource, node: ast.expr, scope: Scope, depth: int = 0) -> bool:
    """Return whether an expression is a product with `torch.cuda.device_count()`."""
    node, scope = source.expression(node, scope)
    if isinstance(node, ast.Attribute) and depth < 3:
        sources = [
            source,
            *(module for module in source.modules.values() if module is not None and module is not source),
        ]
        assignments = [
            (assignment.value, assignment_scope, home)
            for home in sources
            for assignment, assignment_scope in home.each(ast.Assign)
            if _same(assignment.targets[0], node)
        ]
        if len(assignments) != 1:
            return False
        value, assignment_scope, home = assignments[0]
        return _times_devices(home, value, assignment_scope if home is not source else scope, depth + 1)
    factors = [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) else []
    return any(_counts_devices(source, factor, scope) for factor in factors)


def _same(target: ast.AST, node: ast.Attribute) -> bool:
    return (
        isinstance(target, ast.Attribute)
        and target.attr == node.attr
        and last_name(target.value) == last_name(node.value)
    )


def _counts_devices(source: ScriptSource, node: ast.expr, scope: Scope) -> bool:
    node, scope = source.expression(node, scope)
    if isinstance(node, ast.IfExp):
        node, scope = source.expression(node.body, scope)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "max" and len(node.args) == 2:
        return any(_counts_devices(source, argument, scope) for argument in node.args)
    return isinstance(node, ast.Call) and source.origin(node.func, scope) == "torch.cuda.device_count"


def _read_generation(notes: ScriptNotes, source: ScriptSource) -> None:
    """Note generation during training, and random sampling of text that is scored."""
    callbacks = [node for node, scope in source.each(ast.ClassDef) if _is_callback(source, node, scope)]
    hooks = [
        statement
        for node in callbacks
        for statement in node.body
        if isinstance(statement, ast.FunctionDef) and statement.name in LOOP_HOOKS
    ]
    for node in (descendant for hook in hooks for descendant in ast.walk(hook)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "generate":
            notes.say("generates_in_loop", True, "generate()", node.lineno)
            break
    if _scores(source):
        for node, scope in source.each(ast.Call):
            _read_sampling(notes, source, node, scope)


def _is_callback(source: ScriptSource, node: ast.ClassDef, scope: Scope) -> bool:
    return any((source.origin(base, scope) or "").endswith(".TrainerCallback") for base in node.bases)


def _scores(source: ScriptSource) -> bool:
    """Return whether the script compares texts: it imports a scorer, or loads one with `evaluate`."""
    imported = {imported_name.dotted for imported_name in _imported(source)}
    if any(f"{name}.".startswith(f"{scorer}.") for name in imported for scorer in SCORERS):
        return True
    loads = [node for node, scope in source.each(ast.Call) if source.origin(node.func, scope) == "evaluate.load"]
    names = [node.args[0].value for node in loads if node.args and isinstance(node.args[0], ast.Constant)]
    return any(name in ("rouge", "bleu", "sacrebleu", "bertscore", "exact_match") for name in names)


def _read_sampling(notes: ScriptNotes, source: ScriptSource, node: ast.Call, scope: Scope) -> None:
    """Note `do_sample` and `temperature` of a call that generates one answer per prompt."""
    if last_name(node.func) not in ("generate", "GenerationConfig"):
        return
    call = read_call(source, "generate", node, scope)
    single_answer = "num_return_sequences" not in call.given or call.known.get("num_return_sequences") == 1
    if single_answer and call.known.get("do_sample") is True:
        notes.say("do_sample", True, "do_sample", call.lines["do_sample"])
        temperature = call.known.get("temperature")
        if type(temperature) in (int, float):
            notes.say("temperature", temperature, "temperature", call.lines["temperature"])


def _read_trackers(notes: ScriptNotes, source: ScriptSource) -> None:
    """Note whether the script starts Weights & Biases itself, and the mode it sets."""
    for node, scope in source.each(ast.Call):
        if source.origin(node.func, scope) == "wandb.init" and "trackers" not in notes.setup:
            call = read_call(source, "wandb.init", node, scope)
            notes.say("trackers", to_trackers(["wandb"]), "wandb.init()", node.lineno)
            if not call.silent("mode") and call.known.get("mode") != "online":
                notes.setup["quiet_trackers"] = ("wandb",)
    # A login in the script, or a variable that it sets, makes the prompt for a login unnecessary.
    if any(word in source.text for word in ("wandb.login", "WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED")):
        notes.setup["quiet_trackers"] = ("wandb",)
