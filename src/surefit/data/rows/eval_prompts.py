"""How long the prompts are that a model is scored on: a sample, rendered and tokenised without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from surefit.config.schema import Config
from surefit.core.errors import DataError
from surefit.core.sampling import evenly_spaced_indices
from surefit.data.rows.sample_checks import example_text, load_tokenizer_file, strip_surrogates
from surefit.data.rows.shorten import prompt_limit
from surefit.data.tokens.light_template import LightTemplate, light_template
from surefit.facts.eval_prompts import EvalPromptSet
from surefit.facts.tokenizer import TokenizerFacts, catch_tokenizer_panics
from surefit.task import Example

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST, OTHERS = 4, 16
"""Prompts that are tokenised: those with the most bytes, and others spread evenly, for the mean."""
UNCUT = 2**62
USUAL_BYTES = 4
"""Of a token on average, where none is counted: in English prose four to five, in JSON and code less."""
BEGINNING = 50_000
"""Characters of a text that are tokenised; a longer one is taken to go on as it begins."""


def measure_eval_prompts(
    name: str,
    rows: int | None,
    examples: Sequence[Example] | None,
    config: Config,
    tokenizer: TokenizerFacts | None,
    *,
    counted: bool = False,
) -> EvalPromptSet:
    """A set in numbers.

    Args:
        name: of the set.
        rows: all it has; None where they are not counted.
        examples: a sample of it; None where its rows are not on this machine.
        tokenizer: None where it is not on this machine.
        counted: tokenise in any case; else only where a prompt has more bytes than `data.max_length`.
    """
    prompts = rows if rows is None else min(rows, config.evaluate.max_examples or rows)
    if not examples:
        return EvalPromptSet(name, prompts)
    asked = [Example(example.prompt, example.tools) for example in examples]
    unanswered = sum(not each.has_answer for each in examples)
    sizes = [len(example_text(one, tokenizer).encode()) for one in asked]
    limit = prompt_limit(config)
    cut = UNCUT if limit is None else max(1, limit)
    limits = [UNCUT if example.document is None else cut for example in examples]  # only documents are cut
    bound = max(map(min, sizes, limits))
    library = load_tokenizer_file(tokenizer.file) if tokenizer and tokenizer.file else None
    if tokenizer is None or library is None or not (counted or bound > config.data.max_length):
        written = [len(text.encode(errors="replace")) for example in examples if (text := example.completion)]
        mean = sum(map(min, sizes, limits)) / len(sizes) / USUAL_BYTES
        answer = sum(written) / len(written) / USUAL_BYTES if written else None
        return EvalPromptSet(name, prompts, bound, mean, answer, len(examples), unanswered)
    by_size = sorted(range(len(asked)), key=lambda n: -sizes[n])[:LONGEST]
    spread = evenly_spaced_indices(len(asked), OTHERS)
    template = light_template(tokenizer, config)
    found = {
        n: min(count_text_tokens(library, _prompt(asked[n], tokenizer, template)), limits[n])
        for n in {*by_size, *spread}
    }
    answers = [count_text_tokens(library, text) for n in spread if (text := examples[n].completion)]
    return EvalPromptSet(
        name,
        prompts,
        max(found.values()),
        sum(found[n] for n in spread) / len(spread),
        sum(answers) / len(answers) + 1 if answers else None,  # and the token that ends it
        len(examples),
        unanswered,
    )


def _prompt(example: Example, tokenizer: TokenizerFacts, template: LightTemplate | None) -> str:
    """Return the text that the chat template makes of a prompt; without a template, or where it takes none, the turns'
    own text."""
    if template is None or not example.messages:
        return example_text(example, tokenizer)
    try:
        return template.whole(example)
    except DataError:  # reported where rows are looked at
        return example_text(example, tokenizer)


def count_text_tokens(library: Tokenizer, text: str) -> int:
    """Return how many tokens a text has; a very long one is taken to go on as it begins."""
    beginning = strip_surrogates(text[:BEGINNING])
    with catch_tokenizer_panics(None):
        tokens = len(library.encode(beginning, add_special_tokens=False).ids)
    return -(-tokens * len(text) // max(1, len(beginning)))
