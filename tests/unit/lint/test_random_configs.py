"""No valid config and no facts beside it make a rule fail: random ones of both, from their types."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import surefit.lint.rules
from surefit import recipes
from surefit.config.load import LoadedConfig
from surefit.config.resolve import iter_config_values, resolve_config
from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError, DataError, MachineError, ModelError
from surefit.facts.audit import Observation
from surefit.facts.dataset import DatasetFacts, dataset_facts
from surefit.facts.hardware import HardwareFacts, hardware_facts
from surefit.facts.model import ModelFacts, model_facts
from surefit.facts.setup import Setup, setup_of
from surefit.lint.engine import all_rules, run_rules
from surefit.lint.rule import LintContext

RULES = Path(surefit.lint.rules.__file__).parent


def literals(pattern: str = "*") -> list[str]:
    """The short texts in the rules' source: what they compare with. Drawn at random, they would never be met."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in RULES.glob(f"{pattern}.py")]
    texts = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return sorted({text for text in texts if isinstance(text, str) and re.fullmatch(r"[\w.-]{2,40}", text)})


LITERALS = literals()
WORDS = [
    "auto",
    "surefit/nano",
    "a/b",
    ".",
    "..",
    "runs/x",
    "none",
    "bfloat16",
    "x" * 300,
    "\0",
    "é\n",
    "hf_" + "a" * 30,
]
TEXT = st.sampled_from(WORDS) | st.sampled_from(LITERALS) | st.text(min_size=1, max_size=8)
BOUNDS = {"ge": "min_value", "gt": "min_value", "le": "max_value", "lt": "max_value"}
NANO, LLAMA = model_facts("surefit/nano"), model_facts("meta-llama/Llama-3.2-3B-Instruct")


def of(annotation: Any, metadata: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """Values of a type annotation: sections of the config and dataclasses of facts included."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner, *extra = arguments
        return of(inner, [m for each in extra for m in getattr(each, "metadata", [each])])
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(of(each, metadata) for each in arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple and Ellipsis not in arguments:
        return st.tuples(*(of(each) for each in arguments))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key = SEEN if arguments[1] is Observation else KEY
        return st.dictionaries(key, of(arguments[1]), max_size=12)
    if isinstance(origin, type) and issubclass(origin, Collection):
        return st.lists(of(arguments[0]), max_size=3).map(origin if origin in (list, set, frozenset) else tuple)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return section(annotation)
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        return st.builds(annotation, **{each.name: of(hints[each.name]) for each in dataclasses.fields(annotation)})
    return number(annotation, metadata) if annotation in (int, float) else SIMPLE[annotation]


KEY = st.sampled_from([*(rule.code for rule in all_rules()), *LITERALS])
SEEN = st.sampled_from(
    [text for name in ("audit", "labels") for text in literals(name) if "_" in text or text.islower()]
)
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    str: TEXT,
    type(None): st.none(),
    Path: st.sampled_from([Path("rows.jsonl"), Path("/nowhere")]),
    Any: st.none() | st.integers() | TEXT,
}


def number(kind: type, metadata: Sequence[Any]) -> st.SearchStrategy[Any]:
    """A number within the bounds that the schema states; facts are counts and sizes, so at least 0."""
    stated = {name: getattr(each, name) for each in metadata for name in BOUNDS if hasattr(each, name)}
    bounds: dict[str, Any] = {"min_value": 0, "max_value": 10**18} | {
        BOUNDS[name]: value for name, value in stated.items()
    }
    if kind is int:
        bounds["max_value"] -= "lt" in stated
        return st.integers(**bounds) | st.integers(bounds["min_value"], min(bounds["max_value"], 4096))
    outside = {"exclude_min": "gt" in stated, "exclude_max": "lt" in stated}
    return st.floats(**bounds, allow_nan=False, allow_infinity=False, **outside)


def section(kind: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """A section as the YAML reader hands it over, with any of its optional keys."""
    required = {n: of(f.annotation, f.metadata) for n, f in kind.model_fields.items() if f.is_required()}
    optional = {n: of(f.annotation, f.metadata) for n, f in kind.model_fields.items() if not f.is_required()}
    return st.fixed_dictionaries(required, optional=optional)


def valid(tree: dict[str, Any]) -> bool:
    try:
        SureFitConfig.model_validate(tree)
    except ValueError:
        return False
    return True


CONFIGS = section(SureFitConfig).filter(valid).map(SureFitConfig.model_validate)
ROWS = st.lists(
    st.dictionaries(
        st.sampled_from(["answers", "messages", "text", "output", "query"]),
        st.none() | st.text(max_size=5) | st.integers() | st.lists(st.none() | st.text(max_size=3), max_size=3),
        max_size=4,
    ),
    max_size=30,
)
SIZE = st.none() | st.integers(0, 10**15)
BUILT: dict[type, st.SearchStrategy[Any]] = {
    ModelFacts: st.builds(
        replace,
        st.sampled_from([NANO, LLAMA]),
        parameters=SIZE,
        max_position_embeddings=SIZE,
        source=st.sampled_from(["local", "cache", "hub", "catalogue", "builtin"]),
        has_weights=st.booleans(),
        pickle_only=st.booleans(),
        gated=st.none() | st.booleans(),
        chat_template=st.none() | TEXT,
        quantization=st.none() | st.sampled_from(["bitsandbytes", "gptq"]),
    ),
    HardwareFacts: st.builds(
        replace,
        st.sampled_from([hardware_facts(gpu) for gpu in ("cpu", "t4", "h100")]),
        memory_bytes=SIZE,
        disk_free_bytes=st.integers(0, 10**15),
        source=st.sampled_from(["detected", "catalogue"]),
        unused_gpu=st.none() | TEXT,
    ),
    DatasetFacts: st.builds(dataset_facts, st.just("rows.jsonl"), ROWS),
}
HINTS = typing.get_type_hints(LintContext)
KINDS = {
    name: kind
    for name, hint in HINTS.items()
    for kind in typing.get_args(hint)
    if dataclasses.is_dataclass(kind) and name not in ("setup", "resolved")
}
FACTS = {name: st.none() | (BUILT[kind] if kind in BUILT else of(kind)) for name, kind in KINDS.items()}
SETUPS = of(Setup)
PROBLEMS = st.lists(
    st.builds(
        lambda kind, message, field, line: kind(message, field=field, line=line, path="rows.jsonl"),
        st.sampled_from([ConfigError, DataError, ModelError, MachineError]),
        TEXT,
        st.none() | st.sampled_from(["recipe", "answers[0].name", "model.name_or_path"]),
        st.none() | st.integers(1, 9),
    ),
    max_size=2,
).map(tuple)


@st.composite
def contexts(draw: st.DrawFn) -> LintContext:
    """What a rule may be handed: a config, and any of the facts."""
    config = draw(CONFIGS)
    known = {name: draw(facts, label=name) for name, facts in FACTS.items()}
    keys = sorted(key for key, _ in iter_config_values(config))
    lines = {key: number for number, key in enumerate(draw(st.sets(st.sampled_from(keys))), 1)}
    overridden = draw(st.frozensets(st.sampled_from(keys), max_size=2))
    loaded = LoadedConfig(config, Path("run.yaml"), lines, overridden)
    resolved = None
    if known["model"] and known["hardware"]:
        with contextlib.suppress(ConfigError):
            resolved = resolve_config(
                loaded, known["model"], known["hardware"], draw(st.none() | st.integers(0, 10**6))
            )
    columns = recipes.get_recipe(draw(st.sampled_from(recipes.list_recipes()))).columns
    setup = draw(st.just(setup_of(config, resolved)) | SETUPS)
    return LintContext(
        config, loaded.path, lines, overridden, setup=setup, resolved=resolved, columns=columns,
        problems=draw(PROBLEMS), **known,
    )  # fmt: skip


@settings(
    max_examples=150,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # what failed is in the message; shrinking takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(contexts())
def test_no_rule_fails_on_any_valid_config(context: LintContext) -> None:
    result = run_rules(context)
    accepted = [one.finding for one in result.suppressed]
    assert [finding.message for finding in result.findings if finding.code == "INT001"] == []
    assert all(finding.message for finding in [*result.findings, *accepted])
    assert {finding.code for finding in accepted}.isdisjoint(finding.code for finding in result.findings)
    assert {finding.code for finding in accepted} <= set(context.config.lint.ignore if context.config else ())
    assert result.rules + len(result.skipped) == len(all_rules())


def test_all_facts_are_drawn() -> None:
    assert {"model", "hardware", "dataset", "environment", "stack", "tokenizer", "audit", "batch", "job"} <= set(KINDS)
