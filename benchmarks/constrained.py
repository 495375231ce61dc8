"""Constrained decoding on models that know nothing: is every answer that ends valid, and what does a token cost?

    python benchmarks/constrained.py [--rows 48] [--tokens 256] [--repeats 2] [--limit 1.5] [--json]

The embedded model as it ships (a base that no fine-tuning has seen) answers rows of the sample sets greedily, and again
with tokens drawn at temperature 1.5; one of the same shape with random weights draws at 1. Drawing visits the corners
of a grammar that a greedy answer never sees. Two grammars: JSON calls of the row's tools, and PENMAN. "valid" counts
the answers that ended and that a reader reads which has nothing to do with the grammar: for JSON a check of every
argument against its tool, for PENMAN the package penman. "read" are those that the recipe's own parser takes; it also
refuses what no grammar can say, a variable used twice.

Time per token is the processor time of one decoding step of a whole batch (the process's own, so that a busy machine
does not enter); free and constrained answers of the same rows are timed in turn in the same run, each the fastest of
the repeats, compiling the grammars included. Exits with 1 if an answer that ended is not valid, or a step costs more
than the limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penman
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from surefit import nano, recipes, samples
from surefit.core.env import quiet_libraries
from surefit.data.tokens.tokenize import tokenize_prompt
from surefit.generate.engine import DecodingConfig, Generation, generate
from surefit.metrics.strict_json import strict_json
from surefit.task import Example, TaskRecipe

Valid = Callable[[Example, str], bool]


def calls_are_valid(example: Example, text: str) -> bool:
    """Names, required and known arguments, and their types, read from the tools in the prompt."""
    content = example.messages[0]["content"]
    tools = {tool["name"]: tool["parameters"] for tool in json.loads(content[content.index("[{") :])}
    try:
        calls = strict_json(text)
    except ValueError:
        return False
    return isinstance(calls, list) and all(
        call.keys() == {"name", "arguments"}
        and call["name"] in tools
        and _arguments_are_valid(tools[call["name"]], call["arguments"])
        for call in calls
    )


def _arguments_are_valid(parameters: dict[str, Any], arguments: dict[str, Any]) -> bool:
    if parameters.get("type") in ("object", "dict") and isinstance(parameters.get("properties"), dict):
        known, required = parameters["properties"], parameters.get("required", [])
    else:
        known = parameters
        required = [n for n, spec in known.items() if "default" not in spec and "optional" not in spec["type"]]
    types = {"str": str, "string": str, "int": int, "integer": int, "float": (int, float), "number": (int, float)}
    return set(required) <= arguments.keys() <= known.keys() and all(
        isinstance(value, types.get(known[name]["type"].removesuffix(", optional"), object))
        and value in known[name].get("enum", [value])
        for name, value in arguments.items()
    )


def graph_is_valid(example: Example, text: str) -> bool:
    """One PENMAN graph, and nothing behind it."""
    try:
        return len(penman.loads(text)) == 1
    except penman.PenmanError:
        return False


TASKS: dict[str, tuple[str, str, Valid]] = {
    "JSON": ("function_calling", "surefit/function-calling-eval", calls_are_valid),
    "PENMAN": ("amr_parsing", "surefit/amr-tiny-eval", graph_is_valid),
}


@dataclass(frozen=True)
class Measured:
    """One way of answering a task's rows."""

    answers: list[Generation]
    seconds: float
    steps: int

    @property
    def milliseconds(self) -> float:
        """Of one step of a batch."""
        return 1e3 * self.seconds / self.steps


def models() -> dict[str, tuple[Any, float]]:
    """Name → the model, and the temperature to ask it at."""
    torch.manual_seed(0)
    shipped = AutoModelForCausalLM.from_pretrained(nano.PATH, dtype=torch.float32)
    random = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(nano.PATH), dtype=torch.float32)
    return {"shipped": (shipped.eval(), 0.0), "drawn": (shipped, 1.5), "random": (random.eval(), 1.0)}


def rows_of(recipe: TaskRecipe, sample: str, count: int) -> list[Example]:
    """The first rows of a sample set."""
    path = samples.find_sample(sample)
    assert path is not None
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [recipe.to_example(json.loads(line)) for line in lines[:count]]


def timed(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], decoding: DecodingConfig, grammars: Any
) -> Measured:
    """Answer, with the forward passes counted."""
    steps: list[None] = []
    hook = model.register_forward_hook(lambda *_: steps.append(None))
    started = time.process_time()
    answers = generate(model, tokenizer, prompts, decoding, grammars=grammars)
    seconds = time.process_time() - started
    hook.remove()
    return Measured(answers, seconds, len(steps))


def measure(model: Any, temperature: float, task: str, options: argparse.Namespace) -> dict[str, Any]:
    """Free and constrained answers to one task's rows."""
    name, sample, valid = TASKS[task]
    recipe = recipes.get_recipe(name)
    assert recipe.grammar is not None
    examples = rows_of(recipe, sample, options.rows)
    tokenizer = AutoTokenizer.from_pretrained(nano.PATH)
    prompts = [tokenize_prompt(example, tokenizer) for example in examples]
    decoding = DecodingConfig(options.tokens, options.batch, temperature=temperature)
    runs: dict[str, list[Measured]] = {"free": [], "constrained": []}
    for _ in range(options.repeats):
        for way, found in runs.items():
            grammars = [recipe.grammar(example) for example in examples] if way == "constrained" else None
            found.append(timed(model, tokenizer, prompts, decoding, grammars))
    free, held = (min(found, key=lambda run: run.milliseconds) for found in runs.values())
    counts = {}
    for way, run in (("free", free), ("constrained", held)):
        ended = [(e, a.text) for e, a in zip(examples, run.answers, strict=True) if not a.truncated]
        counts[way] = {
            "ended": len(ended),
            "valid": sum(valid(example, text) for example, text in ended),
            "read": sum(recipe.parse(text) is not None for _, text in ended),
            "ms_per_step": round(run.milliseconds, 3),
        }
    return {"rows": len(examples), **counts, "cost": round(held.milliseconds / free.milliseconds, 3)}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1.5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    found = {
        f"{name} {task}": measure(model, temperature, task, options)
        for name, (model, temperature) in models().items()
        for task in TASKS
    }
    if options.json:
        print(json.dumps(found))
    else:
        _print(found)
    good = all(
        0 < one["constrained"]["ended"] == one["constrained"]["valid"] and one["cost"] < options.limit
        for one in found.values()
    )
    return 0 if good else 1


def _print(found: dict[str, Any]) -> None:
    print(
        f"{'model, grammar':16} {'way':12} {'rows':>5} {'ended':>6} {'valid':>6} {'read':>6} {'ms/step':>8} {'cost':>6}"
    )
    for name, one in found.items():
        for way in ("free", "constrained"):
            row = one[way]
            cost = f"{one['cost']:.2f}" if way == "constrained" else ""
            print(
                f"{name:16} {way:12} {one['rows']:5} {row['ended']:6} {row['valid']:6} {row['read']:6} "
                f"{row['ms_per_step']:8.2f} {cost:>6}"
            )


if __name__ == "__main__":
    sys.exit(main())
