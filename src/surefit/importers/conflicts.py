"""Values that a tool rejects in combination, by its own checks, and values that it accepts and ignores.

schemas/conflicts.json has a row for each: (condition, the keys of which the last in the file is reported, what the
tool expects); in the tables of ignored values, (condition, the keys without effect, why). `["only one", "a b"]` is the
row of two keys that exclude each other, `["needs", "a", "b c"]` the row of a key that needs one of two others. The
rows are facts about the releases that the files in schemas/ name, each tested with the tool's own parser.

A condition is a list of terms that must all hold: `a` and `!a` (switched on, off), `a=x|y` and `a!=x|y` (the value is
one of these words, or none of them; `null` if the key is not set, and * stands for any text), `a>1` and `a<1` (0 if it
is no number), `a/b` (either key), and `name()` (a function of this file).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, TypeGuard

from surefit.config.modes import MODES
from surefit.importers.config_mapping import ConfigDraft
from surefit.importers.known import read_schema

Values = Mapping[str, Any]
Row = tuple[str, str, str]
"""(condition, keys, what is expected, or why the keys have no effect)."""
FIRST = "! "
"""Prefix of keys of which the first in the written order is reported."""
_TERM = re.compile(r"(?P<off>!?)(?P<keys>[\w./]+?)(?:(?P<sign>!=|=|<|>)(?P<words>.*)|(?P<call>\(\)))?")


@lru_cache(maxsize=1)
def _tables() -> dict[str, list[list[str]]]:
    tables: dict[str, list[list[str]]] = read_schema("conflicts.json")
    return tables


def read_conflict_rows(table: str) -> Iterator[Row]:
    """Yield the rows of a table, its short forms written out."""
    for kind, *rest in _tables()[table]:
        if kind == "only one":
            yield rest[0], rest[0], f"only one of {' and '.join(rest[0].split())}"
        elif kind == "needs":
            key, needed = rest[0], rest[1].split()
            yield f"{key} !{' !'.join(needed)}", key, f"{' or '.join(needed)} with {key}"
        else:
            yield kind, rest[0], rest[1]


def is_switched_off(value: Any) -> bool:
    """Return whether a value switches its key off."""
    return value is None or value is False or value in (0, "", [], {}, "none", "no")


def holds(condition: str, flat: Values) -> bool:
    """Return whether all terms of a condition hold for a file's values.

    >>> holds("rl=kto|dpo !packing lr>0", {"rl": "kto", "lr": 2e-4}), holds("fsdp/deepspeed", {"fsdp": "no"})
    (True, False)
    """
    return all(_term_holds(term, flat) for term in condition.split())


def _term_holds(term: str, flat: Values) -> bool:
    parts = _TERM.fullmatch(term)
    assert parts is not None, term
    if parts["call"]:
        return bool(CONDITIONS[parts["keys"]](flat))
    values = [flat.get(key) for key in parts["keys"].split("/")]
    match parts["sign"]:
        case "=" | "!=":
            patterns = parts["words"].split("|")
            is_one = any(fnmatchcase(_word(value), pattern) for value in values for pattern in patterns)
            return is_one == (parts["sign"] == "=")
        case "<":
            return any(_numeric(value) < float(parts["words"]) for value in values)
        case ">":
            return any(_numeric(value) > float(parts["words"]) for value in values)
    return any(map(is_switched_off, values)) if parts["off"] else not all(map(is_switched_off, values))


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower()


def is_whole_number(value: Any, least: int = 1) -> TypeGuard[int]:
    """Return whether a value is an integer of at least `least`."""
    return type(value) is int and value >= least


def _numeric(value: Any) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def _count(value: Any) -> int:
    """Return the number of entries of a list or a comma-separated text, 0 for None."""
    if isinstance(value, list):
        return len(value)
    return 0 if value is None else str(value).count(",") + 1


def _strategies_differ(flat: Values) -> bool:
    evaluates = flat.get("eval_strategy", flat.get("evaluation_strategy", "no"))
    return str(evaluates) != str(flat.get("save_strategy", "steps"))


def _saves_between_evaluations(flat: Values) -> bool:
    save_steps, eval_steps = flat.get("save_steps"), flat.get("eval_steps")
    return is_whole_number(save_steps) and is_whole_number(eval_steps) and bool(save_steps % eval_steps)


def _wrong_number_of_loss_weights(flat: Values) -> bool:
    losses, weights = flat.get("loss_type", "sigmoid"), flat.get("loss_weights")
    return isinstance(weights, list) and len(weights) != (len(losses) if isinstance(losses, list) else 1)


def _wrong_number_of_dpo_weights(flat: Values) -> bool:
    losses, weights = _count(flat.get("dpo_loss_type")), _count(flat.get("dpo_loss_weights"))
    return weights not in (0, losses)


def _indivisible_train_batch(flat: Values) -> bool:
    batch, micro_batch = flat.get("train_batch_size"), flat.get("train_micro_batch_size_per_gpu")
    accumulation = _numeric(flat.get("gradient_accumulation_steps")) or 1
    return is_whole_number(batch) and is_whole_number(micro_batch) and bool(batch % (micro_batch * accumulation))


def _machine_rank_too_high(flat: Values) -> bool:
    rank, machines = flat.get("machine_rank"), flat.get("num_machines")
    return is_whole_number(rank, 0) and is_whole_number(machines, 2) and rank >= machines


def _grpo(flat: Values, name: str) -> Any:
    """Return a setting of GRPO, whether or not the section `trl` was read key by key."""
    section = flat.get("trl")
    return section.get(name) if isinstance(section, dict) else flat.get(f"trl.{name}")


def _group_of_one(flat: Values) -> bool:
    generations = _grpo(flat, "num_generations")
    return is_whole_number(generations) and generations == 1


def _splits_group(flat: Values) -> bool:
    """Return whether the completions of a step do not make up whole groups (check_grpo_batch_size_divisibility)."""
    generations, batch = _grpo(flat, "num_generations"), _grpo(flat, "generation_batch_size")
    factors = [batch] if batch is not None else [flat.get("micro_batch_size"), flat.get("gradient_accumulation_steps")]
    sizes = [1 if factor is None else factor for factor in factors]
    return is_whole_number(generations) and all(map(is_whole_number, sizes)) and bool(math.prod(sizes) % generations)


def _has_fsdp_config(flat: Values) -> bool:
    return any(key.startswith("fsdp_config") for key in flat)


def _several_cross_entropies(flat: Values) -> bool:
    names = ("cut_cross_entropy", "chunked_cross_entropy", "liger_cross_entropy", "liger_fused_linear_cross_entropy")
    return sum(not is_switched_off(flat.get(name)) for name in names) > 1


def _unknown_adapter(flat: Values) -> bool:
    """Return whether Axolotl has no such adapter; with plugins, only whether it is a misspelled name of its own."""
    kind, adapters = str(flat.get("adapter") or "lora"), ("lora", "qlora", "llama-adapter")
    return kind not in adapters and (not flat.get("plugins") or bool(get_close_matches(kind, adapters, cutoff=0.8)))


CONDITIONS = {
    "strategies_differ": _strategies_differ,
    "saves_between_evaluations": _saves_between_evaluations,
    "wrong_number_of_loss_weights": _wrong_number_of_loss_weights,
    "wrong_number_of_dpo_weights": _wrong_number_of_dpo_weights,
    "wrong_number_of_shares": lambda flat: _count(flat.get("interleave_probs")) != _count(flat.get("dataset")),
    "max_length_is_null": lambda flat: "max_length" in flat and flat["max_length"] is None,
    "indivisible_train_batch": _indivisible_train_batch,
    "machine_rank_too_high": _machine_rank_too_high,
    "target_modules_are_a_pattern": lambda flat: isinstance(flat.get("target_modules"), str),
    "group_of_one": _group_of_one,
    "splits_group": _splits_group,
    "has_fsdp": lambda flat: not is_switched_off(flat.get("fsdp")) or _has_fsdp_config(flat),
    "has_fsdp_config": _has_fsdp_config,
    "several_cross_entropies": _several_cross_entropies,
    "unknown_adapter": _unknown_adapter,
}
"""Conditions that no term expresses, by the names that schemas/conflicts.json calls them."""


def refuse_conflicts(draft: ConfigDraft, *tables: str) -> None:
    """Record an error for each combination of values that the tool rejects."""
    flat = {key: value for key, value in draft.flat.items() if key not in draft.refused}
    for condition, keys, expected in (row for table in tables for row in read_conflict_rows(table)):
        by_order = keys.startswith(FIRST)
        set_keys = [key for key in keys.lstrip(FIRST).split() if key in flat and (by_order or flat[key] is not None)]
        if set_keys and holds(condition, flat):
            key = set_keys[0] if by_order else max(set_keys, key=lambda key: draft.line(key) or 0)
            draft.refuse_with(key, f"expected {expected}", "change this key, or the one that it conflicts with")


def mark_ignored_keys(draft: ConfigDraft, table: str) -> None:
    """Record the keys that the tool accepts and does not use, except those switched off."""
    for condition, keys, reason in read_conflict_rows(table):
        if holds(condition, draft.flat):
            active_keys = [
                key for key in keys.split() if key not in draft.refused and not is_switched_off(draft.flat.get(key))
            ]
            draft.without_effect(active_keys, reason)


def check_conflicts(draft: ConfigDraft) -> None:
    """Check a file by the tables of its tool: combinations that it rejects, and keys that it does not use."""
    tool = draft.tool.name
    if tool == "peft" and str(draft.flat.get("peft_type")).upper() != "LORA":
        return
    refuse_conflicts(draft, *(["trainer"] if tool in ("trl", "llamafactory") else []), tool)
    if f"{tool} ignored" in _tables():
        mark_ignored_keys(draft, f"{tool} ignored")
    mode = MODES.get(draft.setup.get("parallel") or "single")
    shards_weights = mode is not None and mode.zero_stage == 3
    if tool == "llamafactory" and (shards_weights or draft.setup.get("parallel") == "fsdp"):
        refuse_conflicts(draft, "llamafactory fsdp", *(["llamafactory sharded weights"] if shards_weights else []))
