"""A fixture config → the context the rules would see, on a machine that is the same everywhere."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefit import importers, recipes
from surefit.cli.audit import build_audit_job, load_eval_rows
from surefit.cli.other_tools import build_lint_context
from surefit.config.load import load_config
from surefit.config.resolve import resolve_config
from surefit.config.schema import SureFitConfig
from surefit.core.errors import SureFitError
from surefit.core.units import GIB
from surefit.data.audit.sample import audit_sample
from surefit.data.audit.whole import audit_rows
from surefit.data.read.load import Rows, load_rows
from surefit.data.read.sources import is_local
from surefit.data.rows.layouts import Examples, load_mixed, to_examples
from surefit.data.rows.reasoning import apply_reasoning_mode
from surefit.data.rows.sample_checks import example_facts
from surefit.data.rows.template_checks import check_template
from surefit.facts import hardware as hardware_module
from surefit.facts.audit import AuditFacts, Observation
from surefit.facts.batch import BatchFacts
from surefit.facts.dataset import dataset_facts
from surefit.facts.environment import EnvironmentFacts
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts
from surefit.facts.setup import setup_of
from surefit.facts.stack import StackFacts
from surefit.facts.tokenizer import TokenizerFacts, tokenizer_facts
from surefit.lint.rule import LintContext
from surefit.samples import PREFIX
from surefit.stages.eval_prompts import load_eval_prompt_facts
from surefit.stages.run_context import count_training_rows, with_auto_micro_batch
from surefit.task import TaskRecipe

collect_ignore_glob = ["*/bad.py", "*/good.py", "*/train.py"]  # scripts to be read: nothing imports them
MACHINE = {"name": "a CPU", "memory_bytes": 64 * GIB, "ram_bytes": 64 * GIB, "disk_free_bytes": 1000 * GIB}


def stated_facts(path: Path) -> dict[str, Any]:
    """The mapping behind `# facts:` in a config's first lines: facts that differ from this machine's."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# facts:")]
    return yaml.safe_load(lines[0].removeprefix("# facts:")) if lines else {}


def fixture(code: str, kind: str) -> Path:
    """The one file `bad.*` or `good.*` of a rule: SureFit's own config, or another tool's."""
    (path,) = (Path(__file__).parent / code).glob(f"{kind}.*")
    return path


def batch_facts(stated: dict[str, Any]) -> BatchFacts:
    """What a batch audit saw, by its counts: `{dead: {rows: 1, of: 8}}`."""
    seen = {name: Observation(**each) for name, each in stated.items()}
    return BatchFacts(micro_batches=5, examples=40, tokens=2_000, supervised_tokens=400, longest=90, observations=seen)


@cache
def sample_rows(source: str) -> Rows:
    """A sample set of the package; most fixtures train on the same, so this and what follows from it is kept."""
    return load_rows(source)


@cache
def sample_examples(source: str, recipe: str, fmt: str, bad_rows: str) -> Examples:
    return to_examples(sample_rows(source).sample(500), recipes.get_recipe(recipe), fmt, bad_rows)


@cache
def sample_audited(source: str, recipe: str) -> AuditFacts:
    return audit_sample(sample_rows(source), recipe)


def is_sample(source: str) -> bool:
    return source.startswith(PREFIX)


def sampled(rows: Rows, recipe: TaskRecipe, config: SureFitConfig) -> Examples | None:
    """What the rows become; None where one of them cannot be used."""
    how = config.data.format, config.data.bad_rows
    try:
        if is_sample(rows.source):
            return sample_examples(rows.source, recipe.name, *how)
        return apply_reasoning_mode(to_examples(rows.sample(500), recipe, *how), config.data.thinking)
    except SureFitError:
        return None


def foreign_context(path: Path, stated: dict[str, Any]) -> LintContext:
    """The context of another tool's file, with the facts that the fixture states."""
    found = importers.read_tool_config(path)
    context, _ = build_lint_context(found)
    device = hardware_facts("auto")
    hardware = replace(device, **{**MACHINE, **stated["hardware"]}) if "hardware" in stated else context.hardware
    return replace(
        context,
        hardware=hardware,
        setup=replace(context.setup or found.setup, **stated.get("setup", {})),
        model=replace(context.model, **stated.get("model", {})) if context.model else None,
        stack=StackFacts(**stated["stack"]) if "stack" in stated else found.stack,
        tokenizer=TokenizerFacts(**stated["tokenizer"]) if "tokenizer" in stated else context.tokenizer,
        environment=EnvironmentFacts(**stated.get("environment", {"hub_token": True})),
    )


def audit_facts(config: SureFitConfig, columns: tuple[str, ...], rows: Rows, stated: Any) -> AuditFacts:
    """What the audit of a check finds; with `audit: full` that of `surefit audit`; observations may be stated."""
    if stated == "full":
        question, scored = build_audit_job(config), load_eval_rows(config, rows, [])
        return audit_rows(rows, question, scored=scored, expected=columns).facts
    found = sample_audited(rows.source, config.recipe) if is_sample(rows.source) else audit_sample(rows, config.recipe)
    more = {name: Observation(**seen) for name, seen in (stated or {}).items()}
    return replace(found, observations={**found.observations, **more})


@pytest.fixture
def gather(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """gather(config file) → `LintContext`, in the config's own directory, with no GPU, no cache and no network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hardware_module, "detect_gpus", list)

    def attempt(problems: list[SureFitError], look):
        try:
            return look()
        except SureFitError as error:
            problems.append(error)
            return None

    def build(path: Path, directory: Path | None = None) -> LintContext:
        monkeypatch.chdir(directory or path.parent)
        stated, problems = stated_facts(path), []
        if importers.detect_tool(path) != "surefit":
            return foreign_context(path, stated)
        loaded = load_config(path)
        config = loaded.config
        recipe = attempt(problems, lambda: recipes.get_recipe(config.recipe))
        model = attempt(problems, lambda: model_facts(config.model.name_or_path, config.model.revision))
        device = attempt(problems, lambda: hardware_facts(config.hardware.gpu))
        train = config.data.train
        read_rows = sample_rows if is_sample(train) else load_rows
        rows = attempt(problems, lambda: read_rows(train)) if is_local(train) else None
        if device is not None:
            device = replace(device, **{**(MACHINE if device.kind == "cpu" else {}), **stated.get("hardware", {})})
        if model is not None:
            model = replace(model, **stated.get("model", {}))
        read = {source: attempt(problems, partial(load_mixed, source, config.data)) for source in config.data.mix}
        mixed = {source: more for source, more in read.items() if more is not None}
        count, added = count_training_rows(config, rows, mixed)
        resolved = None
        if model and device:
            resolved = attempt(problems, lambda: resolve_config(loaded, model, device, count, added)) or resolve_config(
                with_auto_micro_batch(loaded), model, device, count, added
            )
        columns = recipe.columns if recipe else ()
        setup = replace(setup_of(config, resolved), **stated.get("setup", {}))
        stack = StackFacts(**stated["stack"]) if "stack" in stated else None
        found = attempt(problems, lambda: tokenizer_facts(model.path)) if model and model.path else None
        tokenizer = replace(found or TokenizerFacts(), **stated["tokenizer"]) if "tokenizer" in stated else found
        examples = sampled(rows, recipe, config) if rows and recipe else None
        counted = config.evaluate.in_training
        rendered = audit_facts(config, columns, rows, stated.get("audit")) if rows and recipe else None
        if rendered and examples and stated.get("audit") != "full" and "tokenizer" not in stated:
            looked = check_template(examples, tokenizer, config).observations
            rendered = replace(rendered, observations={**looked, **rendered.observations})
        return LintContext(
            config=config,
            path=loaded.path,
            lines=loaded.lines,
            setup=setup,
            tokenizer=tokenizer,
            examples=example_facts(examples, tokenizer, config.data.max_length) if examples else None,
            scored=load_eval_prompt_facts(config, recipe, rows, examples, tokenizer, counted=counted)[0],
            batch=batch_facts(stated["batch"]) if "batch" in stated else None,
            stack=stack,
            resolved=resolved,
            model=model,
            hardware=device,
            dataset=dataset_facts(rows.source, rows, rows.where, expected=columns) if rows else None,
            environment=EnvironmentFacts(**stated.get("environment", {"hub_token": True})),
            columns=columns,
            metrics=recipe.metrics if recipe else (),
            baselines=tuple(recipe.baselines) if recipe else (),
            audit=rendered if rows and recipe else None,
            problems=tuple(problems),
        )

    return build
