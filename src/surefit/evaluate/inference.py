"""Generates answers to rows: by a model in this process or by a server, in portions that are cached at once."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedTokenizerBase

from surefit.core.errors import DataError, errors_at
from surefit.core.progress import OnProgress, ignore_progress, offset_progress
from surefit.data.tokens.cache import vocabulary_digest
from surefit.data.tokens.tokenize import tokenize_beginning, tokenize_label_prompt, tokenize_prompt
from surefit.evaluate.answer_cache import AnswerCache
from surefit.evaluate.generation_settings import GenerationSettings
from surefit.evaluate.likelihood import AnswerLikelihoods, read_answer_likelihoods
from surefit.evaluate.pair_likelihoods import read_pair_log_probabilities
from surefit.evaluate.rows import EvalRows, GeneratedAnswer
from surefit.generate.engine import Generation, generate
from surefit.generate.verbalizer import rank_labels
from surefit.task import Example, Grammar, Scores, TaskRecipe, add_task_prefix

if TYPE_CHECKING:
    from surefit.generate.server import ServedModel

PORTION = 8
"""Number of batches that are cached together: the most that a kill loses."""


class PromptModel(Protocol):
    """Model that makes a prompt of each row and answers prompts."""

    def prompts(self, rows: EvalRows) -> list[Any]:
        """Return the prompt of each row, JSON-serializable.

        Raises:
            DataError: a row has no prompt, or the chat template does not support it.
        """

    def shown(self, prompt: Any) -> str:
        """Return a prompt as text."""

    def answer(
        self, rows: EvalRows, prompts: Sequence[Any], way: GenerationSettings, on_progress: OnProgress
    ) -> list[GeneratedAnswer]:
        """Return one answer per row; `on_progress` counts rows."""

    def likelihoods(self, rows: EvalRows, prompts: Sequence[Any], way: GenerationSettings) -> AnswerLikelihoods | None:
        """Return the model's likelihood of each row's own answer; None if it gives none."""


class LocalModel:
    """A model in this process; its prompts are token ids, made after `cut` has shortened long documents
    (`data.rows.shorten`). Likelihoods are read of at most `max_length` tokens of a row, and of both answers
    of pairs where prompts are rendered as in training (`reads_pairs`)."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        recipe: TaskRecipe,
        cut: Callable[[Example], Example],
        max_length: int | None = None,
        reads_pairs: bool = True,
    ) -> None:
        self.model, self.tokenizer, self.recipe, self.cut = model, tokenizer, recipe, cut
        self.max_length, self.reads_pairs = max_length, reads_pairs and recipe.pairs
        self._read: dict[tuple[tuple[int, str], ...], AnswerLikelihoods] = {}

    def prompts(self, rows: EvalRows) -> list[list[int]]:
        tokenize = tokenize_prompt if self.recipe.choices is None else tokenize_label_prompt
        prompts = []
        for example, where in zip(rows.examples, rows.where, strict=True):
            with errors_at(where):
                if example.text is not None:
                    prompts.append(tokenize_beginning(example, self.tokenizer))
                else:
                    prompts.append(tokenize(self.cut(example), self.tokenizer))
        return prompts

    def shown(self, prompt: list[int]) -> str:
        return str(self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False))

    def answer(
        self, rows: EvalRows, prompts: Sequence[list[int]], way: GenerationSettings, on_progress: OnProgress
    ) -> list[GeneratedAnswer]:
        if way.ranked:
            labels = [candidate_labels(self.recipe, rows, position) for position in range(len(rows))]
            batch = way.decoding.batch_size
            ranked = rank_labels(self.model, self.tokenizer, prompts, labels, batch, on_progress)
            return [GeneratedAnswer(ranked=row_ranking) for row_ranking in ranked]
        # A sampled answer depends on the row's number in its set, not on the portion that the row is in.
        numbers = [index * way.samples + draw for index in rows.indices for draw in range(way.samples)]
        generations = generate(
            self.model,
            self.tokenizer,
            _repeated(prompts, way.samples),
            way.decoding,
            _rows_of(on_progress, way.samples),
            row_grammars(self.recipe, rows, way),
            numbers,
        )
        return _group_samples(generations, way.samples)

    def likelihoods(self, rows: EvalRows, prompts: Sequence[list[int]], way: GenerationSettings) -> AnswerLikelihoods:
        """Return the likelihoods of the rows whose task measures them; other rows have none. They are read once: a
        grammar changes answers, but no likelihood."""
        key = tuple(zip(rows.indices, rows.where, strict=True))
        if key not in self._read:
            self._read[key] = self._read_likelihoods(rows, prompts, way.decoding.batch_size)
        return self._read[key]

    def _read_likelihoods(self, rows: EvalRows, prompts: Sequence[list[int]], batch_size: int) -> AnswerLikelihoods:
        measured = [n for n, example in enumerate(rows.examples) if self.recipe.of(example).measures_likelihood]
        chosen = rows.subset(measured)
        others = self._other_prompts(rows, prompts, chosen)
        own = [prompts[n] for n in measured]
        found = read_answer_likelihoods(self.model, self.tokenizer, chosen, own, others, batch_size, self.max_length)
        scores: list[Scores] = [{} for _ in range(len(rows))]
        for n, row_scores in zip(measured, found.scores, strict=True):
            part = rows.examples[n].part
            scores[n] = row_scores if part is None else add_task_prefix(part, row_scores)
        if self.reads_pairs:
            read = read_pair_log_probabilities(self.model, self.tokenizer, rows.examples, batch_size, self.max_length)
            scores = [row_scores | pair for row_scores, pair in zip(scores, read, strict=True)]
        read_with = {"tokenizer": vocabulary_digest(self.tokenizer), "max_length": self.max_length}
        return AnswerLikelihoods(scores, found.counts, read_with)

    def _other_prompts(self, rows: EvalRows, prompts: Sequence[list[int]], chosen: EvalRows) -> list[list[int] | None]:
        """Return the prompt of each row's other row, if it has one; only those are made that `prompts` lacks."""
        made = {id(example): prompt for example, prompt in zip(rows.examples, prompts, strict=True)}
        missing = [
            (other, where)
            for other, where in zip(chosen.others, chosen.where, strict=False)
            if other is not None and id(other) not in made
        ]
        examples, where = [other for other, _ in missing], [place for _, place in missing]
        made_now = self.prompts(EvalRows(list(range(len(missing))), examples, where))
        made |= {id(other): prompt for (other, _), prompt in zip(missing, made_now, strict=True)}
        return [None if other is None else made[id(other)] for other in chosen.others] or [None] * len(chosen)


class ServerModel:
    """A model behind an OpenAI-compatible server; its prompts are conversations, which the server renders with its own
    chat template."""

    def __init__(self, served: ServedModel, recipe: TaskRecipe) -> None:
        self.served, self.recipe = served, recipe

    def prompts(self, rows: EvalRows) -> list[list[dict[str, Any]]]:
        for example, where in zip(rows.examples, rows.where, strict=True):
            if not example.prompt or example.tools:
                problem = "plain text has no prompt" if not example.prompt else "tools of the chat template"
                help_text = "score such rows without evaluate.server"
                raise DataError(f"{problem}: a server cannot answer this", code="E7017", path=where, help=help_text)
        return [list(example.prompt) for example in rows.examples]

    def shown(self, prompt: Sequence[dict[str, Any]]) -> str:
        return "\n".join(f"{turn['role']}: {turn.get('content', '')}" for turn in prompt)

    def answer(
        self, rows: EvalRows, prompts: Sequence[Any], way: GenerationSettings, on_progress: OnProgress
    ) -> list[GeneratedAnswer]:
        generations = self.served.answer(
            _repeated(prompts, way.samples),
            way.decoding,
            row_grammars(self.recipe, rows, way),
            _rows_of(on_progress, way.samples),
        )
        return _group_samples(generations, way.samples)

    def likelihoods(self, rows: EvalRows, prompts: Sequence[Any], way: GenerationSettings) -> None:
        """Return None: a server's interface has no likelihood of a given answer."""


def candidate_labels(recipe: TaskRecipe, rows: EvalRows, place: int) -> Sequence[str]:
    """Return the labels that are ranked for a row."""
    assert recipe.choices is not None
    with errors_at(rows.where[place]):
        return recipe.choices(rows.examples[place])


def row_grammars(recipe: TaskRecipe, rows: EvalRows, way: GenerationSettings) -> list[Grammar | None] | None:
    """Return each prompt's grammar, or None if answers are not constrained."""
    if not way.constrained:
        return None
    assert recipe.grammar is not None  # `require_evaluation_settings` has checked
    grammars: list[Grammar | None] = []
    for example, where in zip(rows.examples, rows.where, strict=True):
        with errors_at(where):
            grammars += [recipe.grammar(example)] * way.samples
    return grammars


def _repeated(prompts: Sequence[Any], times: int) -> list[Any]:
    return [prompt for prompt in prompts for _ in range(times)]


def _group_samples(made: Sequence[Generation], samples: int) -> list[GeneratedAnswer]:
    return [GeneratedAnswer(tuple(made[start : start + samples])) for start in range(0, len(made), samples)]


def _rows_of(on_progress: OnProgress, samples: int) -> OnProgress:
    return lambda done, total, text: on_progress(done // samples, total // samples, text)


@dataclass(frozen=True)
class PromptedAnswers:
    """Prompts and answers in the order of the rows; `seconds` is the time for all answers, cached ones included."""

    prompts: list[Any]
    answers: list[GeneratedAnswer]
    seconds: float


def answer_rows(
    respondent: PromptModel,
    recipe: TaskRecipe,
    rows: EvalRows,
    way: GenerationSettings,
    kept: AnswerCache,
    on_progress: OnProgress = ignore_progress,
) -> PromptedAnswers:
    """Generate an answer to every row that has none in `kept`.

    Long prompts come first, so that a batch that exceeds the memory fails at once and not after an hour.

    Args:
        recipe: provides grammars and labels.
        kept: stores every portion of answers before the next one is generated. It is not deleted: the caller calls
            `forget` after using the answers.
        on_progress: called with (rows answered, rows, speed).
    """
    prompts = respondent.prompts(rows)
    keys = [_key(recipe, rows, position, prompts[position], way) for position in range(len(rows))]
    cached = kept.read()
    answers_by_row = {position: cached[key] for position, key in enumerate(keys) if key in cached}
    missing = sorted(
        (p for p in range(len(rows)) if p not in answers_by_row), key=lambda position: -len(prompts[position])
    )
    size = max(1, PORTION * way.decoding.batch_size // way.samples)
    for start in range(0, len(missing), size):
        portion = missing[start : start + size]
        start_time = time.perf_counter()
        answers = respondent.answer(
            rows.subset(portion),
            [prompts[p] for p in portion],
            way,
            offset_progress(on_progress, len(answers_by_row), len(rows)),
        )
        seconds_per_row = (time.perf_counter() - start_time) / len(portion)
        kept.add(((keys[p], answer) for p, answer in zip(portion, answers, strict=True)), seconds_per_row)
        answers_by_row.update((p, (answer, seconds_per_row)) for p, answer in zip(portion, answers, strict=True))
    return PromptedAnswers(
        prompts, [answers_by_row[p][0] for p in range(len(rows))], sum(answers_by_row[p][1] for p in range(len(rows)))
    )


def _key(recipe: TaskRecipe, rows: EvalRows, place: int, prompt: Any, way: GenerationSettings) -> str:
    """Return the row's number in its set with a hash of everything that its answer depends on besides model and
    settings."""
    inputs: list[Any] = [prompt]
    if way.ranked:
        inputs.append(list(candidate_labels(recipe, rows, place)))
    if way.constrained:
        inputs += [
            asdict(grammar) for grammar in (row_grammars(recipe, rows.subset([place]), way) or ())[:1] if grammar
        ]
    digest = hashlib.sha256(json.dumps(inputs, ensure_ascii=False, default=str).encode()).hexdigest()
    return f"{rows.indices[place]}:{digest[:32]}"
