"""AUD: findings of an audit of the rows, and helpers that the other modules of the family use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from surefit.facts.audit import AuditFacts, Observation
from surefit.lint.rule import Finding, LintContext, rule

LEAKED_SHARE = 0.01
NEAR_SHARE = 0.2
LONG_SHARE = 0.01
FEW_SHARE = 0.01
ANY = 0.0
FEW_AUDITED = 20
"""Number of rows below which shares are not meaningful."""


def often(audit: AuditFacts, name: str, share: float) -> Observation | None:
    """Return an observation of the training rows if at least this share of them shows it, else None."""
    return frequent(audit.observations, name, share)


def frequent(observations: Mapping[str, Observation], name: str, share: float) -> Observation | None:
    """Return one of a source's observations if at least this share of its rows shows it, else None."""
    observation = observations.get(name)
    return observation if observation and observation.rows and observation.share >= share else None


def one_sided(longer: Observation, few: int, least: float) -> tuple[str, float] | None:
    """Return whether answers of one kind are mostly "longer" or "shorter" than the others, with the share of the
    comparisons; None where neither share reaches `least`, or of fewer than `few` comparisons."""
    side = ("longer", longer.share) if longer.share >= 0.5 else ("shorter", 1 - longer.share)
    return side if longer.of >= few and side[1] >= least else None


def rows_text(seen: Observation) -> str:
    """Return the numbers of an observation as `12 of 500 rows`."""
    return f"{seen.rows:,} of {seen.of:,} rows"


def first_text(seen: Observation) -> str:
    """Return the first example as `, the first at file:line: text`; empty if there is none."""
    return f", the first at {seen.examples[0]}" if seen.examples else ""


def rows_found(
    audit: AuditFacts,
    name: str,
    share: float,
    message: str,
    help: str,
    field: str = "data.train",
    unless: tuple[str, float] | None = None,
) -> Iterator[Finding]:
    """Yield a finding if at least this share of the training rows shows an observation, and one for each other source
    of the run whose rows were rendered and show it.

    Args:
        message: with {rows} for `rows_text` and {first} for `first_text`.
        unless: (observation, share) from which another rule reports these rows.
    """
    for key, observations in {field: audit.observations, **audit.others}.items():
        observation = frequent(observations, name, share)
        if observation and not (unless and frequent(observations, *unless)):
            yield Finding(
                field=key, message=message.format(rows=rows_text(observation), first=first_text(observation)), help=help
            )


@rule("AUD001", "train-test-leakage", severity="error")
def train_test_leakage(audit: AuditFacts) -> Iterator[Finding]:
    """Prompts of evaluation rows are also in the training rows.

    ## What it does
    Compares every prompt of `data.eval` (if it names rows) and of `evaluate.extra_sets` with every prompt of the
    training rows: messages and tools, byte for byte. It fires from 1 % of the evaluation rows; below that, AUD007 does.
    `surefit check` compares up to 1,000 evaluation rows if it reads both files completely; `surefit audit` compares
    all.

    ## Why it is bad
    The score measures memorization. It rises with every epoch, and none of that carries over to new prompts.

    ## Example
    An evaluation file sampled from the training file's dump, with its rows still in the training file.

    ## Fix
    Remove those rows from the training file, or hold out a share with `data.eval: 0.02`: equal prompts then stay on the
    same side.

    ## Evidence
    Lee et al. 2022 (arXiv 2107.06499): over 4 % of the validation sets of common corpora overlap with their training
    sets, and models score better on that part.
    """
    observation = audit.seen("leak_exact")
    if observation and observation.share >= LEAKED_SHARE:
        yield Finding(
            field="data.eval",
            message=f"{observation.rows:,} of {observation.of:,} evaluation rows ({observation.share:.1%}) have their "
            f"prompt in the training rows{first_text(observation)}",
            help="remove those rows from the training data, or set data.eval to a share such as 0.02",
            evidence=observation.detail,
        )


@rule("AUD002", "near-duplicate-rows", severity="warning")
def near_duplicate_rows(audit: AuditFacts) -> Iterator[Finding]:
    """A large share of the rows are near-duplicates of an earlier row.

    ## What it does
    Compares the messages of users and assistant, as word trigrams, and counts the rows with a Jaccard index of 0.8 or
    more to an earlier row. System messages, tools and exact duplicates (DAT005) are ignored. It fires above 20 %.

    ## Why it is bad
    The data set is effectively smaller than its number of rows. If a share is held out (`data.eval: 0.02`),
    near-duplicates of held-out rows stay in training, and the score measures memorization.

    ## Example
    One template filled in with different names; two dumps of the same source, one with normalized spaces.

    ## Fix
    Keep one row of each group, and use evaluation rows from another source.

    ## Evidence
    Lee et al. 2022 (arXiv 2107.06499): near-duplicates (there by MinHash and edit distance) make up 3 % to 14 % of
    common corpora; without them models emit memorized text ten times less often.
    """
    observation = audit.seen("near_duplicate")
    if observation and observation.of >= FEW_AUDITED and observation.share > NEAR_SHARE:
        yield Finding(
            field="data.train",
            message=f"{rows_text(observation)} ({observation.share:.0%}) are near-duplicates of an earlier "
            f"row{first_text(observation)}",
            help="keep one row of each group, and score on rows from elsewhere",
        )


@rule("AUD003", "answers-over-max-length", severity="warning")
def answers_over_max_length(context: LintContext, audit: AuditFacts) -> Iterator[Finding]:
    """More than one row in a hundred is longer than `max_length`.

    ## What it does
    Tokenizes every row as training will and counts the rows over `data.max_length`. In `surefit check`, LAB003
    estimates this from a sample and fires from one in twenty.

    ## Why it is bad
    SureFit never cuts the end of a row, because that is its answer: it drops the row (`too_long: drop`), stops
    (`too_long: error`) or, in recipes with documents, truncates the document (`too_long: truncate`). The longest rows
    are not a random sample: they are often the hardest, or all of one kind. If a document is truncated, its summary
    mentions things that are no longer in the input: such rows teach the model to hallucinate.

    ## Example
    `max_length: 512` for rows whose 95th percentile is 600 tokens.

    ## Fix
    Raise `data.max_length` as far as the model's context and the memory allow (`surefit plan`), or shorten the rows.

    ## Evidence
    A published report on summaries of long legal documents: right truncation removed the summary, so the loss fell on
    the document.
    """
    observation = audit.seen("over_max_length")
    if not observation or audit.max_length is None or (observation.share <= LONG_SHARE and not _stops(context)):
        return
    cuts = context.config is not None and context.config.data.cuts
    consequence = (
        "training stops at them" if _stops(context) else "their documents are truncated" if cuts else "they are dropped"
    )
    yield Finding(
        field="data.max_length",
        message=f"{observation.rows:,} of {observation.of:,} rows ({observation.share:.1%}) are longer than "
        f"{audit.max_length:,} tokens: {consequence}{first_text(observation)}",
        help="raise data.max_length as far as the model's context and `surefit plan` allow, or shorten those rows",
        evidence=observation.detail or None,
    )


def _stops(context: LintContext) -> bool:
    return context.config is not None and context.config.data.too_long == "error"


@rule("AUD004", "few-supervised-tokens", severity="warning")
def few_supervised_tokens(audit: AuditFacts) -> Iterator[Finding]:
    """Some rows have fewer than two supervised tokens.

    ## What it does
    Counts the supervised tokens of every row, including the end-of-turn token, and fires if more than one row in a
    hundred has fewer than two.

    ## Why it is bad
    An answer with its end-of-turn token has at least two tokens. With one, the model learns either to stop at once or
    never to stop; a row with none is dropped.

    ## Example
    A chat template without an end-of-turn token, with answers of one letter; a plain-text row of one word.

    ## Fix
    Inspect such a row with `surefit check CONFIG --show 3`, which marks the supervised text.

    ## Evidence
    A published report on AMR parsing trained with label masks that left no supervised token in part of the rows.
    """
    observations = [
        observation for name in ("no_supervised_token", "few_supervised_tokens") if (observation := audit.seen(name))
    ]
    if observations and sum(observation.rows for observation in observations) > FEW_SHARE * observations[0].of:
        rows, total = sum(observation.rows for observation in observations), observations[0].of
        yield Finding(
            field="data.train",
            message=f"{rows:,} of {total:,} rows have fewer than two supervised tokens{first_text(observations[0])}",
            help="`surefit check CONFIG --show 3` marks the supervised text; fill in the answers, or fix the template",
        )


@rule("AUD005", "mask-inside-the-prompt", severity="error")
def mask_inside_the_prompt(audit: AuditFacts) -> Iterator[Finding]:
    """The loss starts before the answer does.

    ## What it does
    Decodes some rows and compares the position of the first supervised token with the end of the prompt in the chat
    template.

    ## Why it is bad
    The model is trained to write the user's words, or the header of its own turn, which at evaluation is part of its
    prompt.

    ## Example
    A tokenizer that merges the last letters of the prompt and the first letters of the answer into one token.

    ## Fix
    SureFit tokenizes prompt and answer separately, so this cannot happen with its own code: please report it, with the
    tokenizer's name.

    ## Evidence
    huggingface/trl#622: Llama 2's tokenizer encodes the marker before the answer differently when text precedes it, so
    a mask that searches for those tokens is misplaced.
    """
    yield from rows_found(
        audit,
        "mask_inside_prompt",
        ANY,
        "in {rows} the loss falls on part of the prompt{first}",
        "report it with the tokenizer's name, and train with another one until then",
        field="model.name_or_path",
    )


@rule("AUD006", "template-does-not-round-trip", severity="warning")
def template_does_not_round_trip(audit: AuditFacts) -> Iterator[Finding]:
    """The tokens do not decode to the rendered conversation.

    ## What it does
    Renders some rows with the chat template, tokenizes them as training will, decodes the tokens and compares, ignoring
    whitespace at the very start.

    ## Why it is bad
    The model never sees what the tokenizer drops: it cannot learn code without line breaks and indentation, and letters
    without a token turn names and formulas into the unknown token.

    ## Example
    Python answers with a tokenizer whose normalizer collapses spaces; Vietnamese with a lower-casing one.

    ## Fix
    Choose a base model whose tokenizer is byte-level or has byte fallback, as all current chat models' have.

    ## Evidence
    Measured: with a tokenizer that replaces runs of whitespace, every row with an indented answer came back changed
    (tests/rules/AUD006).
    """
    yield from rows_found(
        audit,
        "template_round_trip",
        ANY,
        "{rows} differ from what their tokens decode to{first}",
        "choose a model whose tokenizer is lossless, or remove from the rows what the tokenizer cannot represent",
        field="model.name_or_path",
    )


@rule("AUD007", "some-scored-rows-leak", severity="warning")
def some_scored_rows_leak(audit: AuditFacts) -> Iterator[Finding]:
    """Some evaluation rows, or near-duplicates of them, are in the training rows.

    ## What it does
    Counts the evaluation rows whose prompt is verbatim in the training rows, below the 1 % at which AUD001 stops the
    run, and the evaluation rows whose user messages have a Jaccard index of 0.8 or more (word trigrams) with a training
    row.

    ## Why it is bad
    Each leaked row inflates the score a little: with 1 % of the rows leaked, a gain of one point may be entirely due to
    leakage.

    ## Example
    The question "How many litres does the tank hold?" in training, "How many litres does the tank hold ?" in the test.

    ## Fix
    Remove the rows that the finding names from the training file.

    ## Evidence
    Yang et al. 2023 (arXiv 2311.04850): rephrased test questions in the training data lift a 13B model to GPT-4's score
    on MMLU, GSM8K and HumanEval, and exact comparison does not find them.
    """
    exact_leak, near_leak = audit.seen("leak_exact"), audit.seen("leak_near")
    rare_exact = exact_leak if exact_leak and exact_leak.share < LEAKED_SHARE else None
    parts = [(rare_exact, "are in the training rows"), (near_leak, "have a near-duplicate in the training rows")]
    for observation, location in parts:
        if observation:
            yield Finding(
                field="data.eval",
                message=f"the prompts of {observation.rows:,} of {observation.of:,} evaluation rows "
                f"{location}{first_text(observation)}",
                help="remove those rows from the training data",
                evidence=observation.detail,
            )
