"""Lengths of the prompts of evaluation sets: a sample, rendered and tokenized without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from surefit.config.schema import SureFitConfig
from surefit.core.errors import DataError
from surefit.core.sampling import evenly_spaced_indices
from surefit.data.rows.sample_checks import example_text, load_tokenizer_file, strip_surrogates
from surefit.data.rows.shorten import prompt_limit
from surefit.data.tokens.light_template import LightTemplate, light_template
from surefit.facts.eval_prompts import EvalPromptSet
from surefit.facts.free_text import median_words
from surefit.facts.thinking import strip_reasoning
from surefit.facts.tokenizer import TokenizerFacts, catch_tokenizer_panics
from surefit.task import Example

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST, OTHERS = 4, 16
"""Prompts that are tokenized: the ones with the most bytes, and others spread evenly, for the mean."""
UNCUT = 2**62
USUAL_BYTES = 4
"""Average bytes of a token, used where none are counted: in English prose four to five, in JSON and code fewer."""
BEGINNING = 50_000
"""Characters of a text that are tokenized; the count of a longer one is extrapolated."""


def measure_eval_prompts(
    name: str,
    rows: int | None,
    examples: Sequence[Example] | None,
    config: SureFitConfig,
    tokenizer: TokenizerFacts | None,
    *,
    counted: bool = False,
) -> EvalPromptSet:
    """Measure the prompts of an evaluation set.

    Args:
        name: name of the set.
        rows: number of its rows; None where they are not counted.
        examples: a sample of it; None where its rows are not on this machine.
        tokenizer: None where it is not on this machine.
        counted: always tokenize; otherwise only where a prompt has more bytes than `data.max_length`.
    """
    prompts = rows if rows is None else min(rows, config.evaluate.max_examples or rows)
    if not examples:
        return EvalPromptSet(name, prompts)
    prompt_examples = [Example(example.prompt, example.tools) for example in examples]
    unanswered = sum(not example.has_answer for example in examples)
    words = median_words(strip_reasoning(example.completion) for example in examples if example.completion)
    sizes = [len(example_text(prompt, tokenizer).encode()) for prompt in prompt_examples]
    limit = prompt_limit(config)
    cut = UNCUT if limit is None else max(1, limit)
    limits = [UNCUT if example.document is None else cut for example in examples]  # only documents are cut
    bound = max(map(min, sizes, limits))
    library = load_tokenizer_file(tokenizer.file) if tokenizer and tokenizer.file else None
    if tokenizer is None or library is None or not (counted or bound > config.data.max_length):
        answer_bytes = [len(text.encode(errors="replace")) for example in examples if (text := example.completion)]
        mean = sum(map(min, sizes, limits)) / len(sizes) / USUAL_BYTES
        answer = sum(answer_bytes) / len(answer_bytes) / USUAL_BYTES if answer_bytes else None
        return EvalPromptSet(name, prompts, bound, mean, answer, len(examples), unanswered, words)
    by_size = sorted(range(len(prompt_examples)), key=lambda n: -sizes[n])[:LONGEST]
    spread = evenly_spaced_indices(len(prompt_examples), OTHERS)
    template = light_template(tokenizer, config)
    lengths = {
        n: min(count_text_tokens(library, _prompt(prompt_examples[n], tokenizer, template)), limits[n])
        for n in {*by_size, *spread}
    }
    answers = [count_text_tokens(library, text) for n in spread if (text := examples[n].completion)]
    return EvalPromptSet(
        name,
        prompts,
        max(lengths.values()),
        sum(lengths[n] for n in spread) / len(spread),
        sum(answers) / len(answers) + 1 if answers else None,  # plus the end token
        len(examples),
        unanswered,
        words,
    )


def _prompt(example: Example, tokenizer: TokenizerFacts, template: LightTemplate | None) -> str:
    """Return the prompt rendered by the chat template; the turns' own text if there is no template or it raises an
    error."""
    if template is None or not example.messages:
        return example_text(example, tokenizer)
    try:
        return template.whole(example)
    except DataError:  # reported where rows are checked
        return example_text(example, tokenizer)


def count_text_tokens(library: Tokenizer, text: str) -> int:
    """Return the number of tokens of a text; extrapolated from its beginning for a very long one."""
    beginning = strip_surrogates(text[:BEGINNING])
    with catch_tokenizer_panics(None):
        tokens = len(library.encode(beginning, add_special_tokens=False).ids)
    return -(-tokens * len(text) // max(1, len(beginning)))
