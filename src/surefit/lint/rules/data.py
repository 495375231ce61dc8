"""DAT: rows that cannot be used, or that teach nothing."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.schema import SureFitConfig
from surefit.core.errors import DataError, SureFitError, did_you_mean
from surefit.core.units import plural
from surefit.facts.dataset import SMALL_EVALUATION as SMALL_EVALUATION
from surefit.facts.dataset import DatasetFacts, enough_share
from surefit.facts.examples import ENOUGH, ExampleFacts
from surefit.lint.rule import Finding, LintContext, rule

FEW = 20
"""Number of sampled rows below which the whole data set is not judged."""
DUPLICATE_SHARE = 0.2


@rule("DAT001", "data-unusable", severity="error", suppressible=False)
def data_unusable(context: LintContext) -> Iterator[Finding]:
    """The data cannot be read, or a row cannot be used.

    ## What it does
    Reports the errors raised when `data.train`, `data.mix`, `data.eval` and `evaluate.extra_sets` were read: a missing
    or empty file, broken JSON on some line, a row whose columns do not parse, token ids outside the tokenizer's
    vocabulary.

    ## Why it is bad
    Training would stop at the same place.

    ## Example
    `data.train: trian.jsonl`.

    ## Fix
    The finding says what to change. `data.bad_rows: skip` skips single bad rows, and reports their number.

    ## Evidence
    A missing or empty file is the most frequent first error with any training tool.
    """
    missing_columns = (
        _missing_columns(context, context.config, context.dataset) if context.config and context.dataset else []
    )
    for problem in context.problems:
        if isinstance(problem, DataError):
            for error in (problem, *problem.also):
                if _column(error) not in missing_columns:  # DAT002 reports those
                    yield Finding.of(error, "data.train")


@rule(
    "DAT002",
    "column-missing",
    severity="error",
    suppressible=False,
)
def column_missing(context: LintContext, config: SureFitConfig, dataset: DatasetFacts) -> Iterator[Finding]:
    """A column that the recipe reads is not in the data.

    ## What it does
    Compares the recipe's columns with the columns of the sampled rows.

    ## Why it is bad
    Code that reads a missing column with a default trains on that default: every completion is the same `null`, the
    loss falls as expected, and the model learns to return nothing.

    ## Example
    Rows with `answer` where the recipe reads `answers`.

    ## Fix
    Rename the column, or choose the recipe that fits the data.

    ## Evidence
    A published function-calling project mapped `example["answer"]` while xLAM's column is `answers`: all 60,000
    completions were `null`, and training went on.
    """
    for name in _missing_columns(context, config, dataset):
        hint = did_you_mean(name, dataset.columns)
        column_list = ", ".join(dataset.columns) or "none"
        yield Finding(
            field="data.train",
            message=f"no column {name!r} in {dataset.source}{hint}; its columns are {column_list}",
            help=f"rename the column to {name}, or choose another recipe than {config.recipe}",
        )


def _missing_columns(context: LintContext, config: SureFitConfig, dataset: DatasetFacts) -> list[str]:
    if not dataset.sample or config.data.format not in ("auto", "recipe"):
        return []
    return [name for name in context.columns if name not in dataset.columns]


def _column(problem: SureFitError) -> str:
    """Return the column that an error about one row names: `answers` for `answers[0].name`."""
    return (problem.field or "").partition("[")[0].partition(".")[0]


def _row(problem: SureFitError) -> str:
    """Return the file and line of the row that an error is about, in the form of `DatasetFacts.first_bad`."""
    return f"{problem.path}:{problem.line}" if problem.line is not None else str(problem.path)


@rule(
    "DAT003",
    "null-targets",
    severity="error",
)
def null_targets(context: LintContext, config: SureFitConfig, dataset: DatasetFacts) -> Iterator[Finding]:
    """Some rows have a null or empty answer.

    ## What it does
    Looks, in an even sample, at the column with the answers (or the conversation's assistant turns). The text "None" or
    "null" counts as an answer (see AUD028). With `data.bad_rows: skip` it fires only if such rows are the majority. It
    does not fire if DAT001 already names the first such row.

    ## Why it is bad
    Such a row has nothing to train on, and training stops at it.

    ## Example
    `{"query": "…", "answers": null}`.

    ## Fix
    Fill in or remove those rows, or set `data.bad_rows: skip`.

    ## Evidence
    Merging the schemas of different tools in one Arrow table fills absent fields with nulls, silently
    (`datasets.Dataset.from_list`); a mapping over a misspelled column makes all targets null.
    """
    bad_rows = dataset.target_null + dataset.target_blank
    if bad_rows == 0 or (config.data.bad_rows == "skip" and 2 * bad_rows <= dataset.sample):
        return
    if dataset.first_bad in {_row(error) for problem in context.problems for error in (problem, *problem.also)}:
        return
    kinds = {"null": dataset.target_null, "empty": dataset.target_blank}
    parts = " and ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    yield Finding(
        field="data.train",
        message=f"{bad_rows} of {dataset.sample} sampled rows have no answer in {dataset.target!r} ({parts}), "
        f"the first at {dataset.first_bad}",
        help="fill in or remove those rows, or set data.bad_rows: skip",
    )


@rule("DAT004", "constant-target", severity="error")
def constant_target(dataset: DatasetFacts) -> Iterator[Finding]:
    """All rows have the same answer.

    ## What it does
    Counts the distinct answers in an even sample of at least 20 rows.

    ## Why it is bad
    The model can only learn that one answer. The loss falls to zero within a few steps, which looks like success.

    ## Example
    A thousand rows whose `completion` is `[]`.

    ## Fix
    Check how the column is made: a template without its variable, a misspelled key, a join that matched one row.

    ## Evidence
    See DAT002: 60,000 completions that were all `null`.
    """
    if dataset.sample >= FEW and dataset.target and dataset.target_distinct == 1:
        yield Finding(
            field="data.train",
            message=f"all {dataset.sample} sampled rows have the same {dataset.target!r}: {dataset.target_example}",
            help="check how this column is made",
        )


@rule("DAT005", "duplicate-rows", severity="warning")
def duplicate_rows(dataset: DatasetFacts) -> Iterator[Finding]:
    """A large share of the rows are duplicates.

    ## What it does
    Counts rows of the sample that are equal to an earlier one, and fires above 20 %. In a sample of a large set
    that is a lower bound.

    ## Why it is bad
    The model memorizes duplicate rows. If part of the rows is held out, its duplicates stay in training, and the score
    measures memorization.

    ## Example
    A file that was appended to itself.

    ## Fix
    Remove the duplicates before training.

    ## Evidence
    Lee et al. 2022 (arXiv 2107.06499): models trained on deduplicated data emit memorized text ten times less often,
    and over 4 % of common validation sets overlap with their training sets.
    """
    if dataset.sample >= FEW and dataset.duplicates > DUPLICATE_SHARE * dataset.sample:
        yield Finding(
            field="data.train",
            message=f"{dataset.duplicates} of {dataset.sample} sampled rows are duplicates of an earlier row",
            help="remove the duplicates before training",
        )


@rule(
    "DAT006",
    "held-out-too-small",
    severity="warning",
)
def held_out_too_small(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """There are too few evaluation rows.

    ## What it does
    If `data.eval` is a share, multiplies it by the number of rows (`data.train`, and with several tasks in one run also
    `data.mix`), and fires below 10. The split depends on the hash of each prompt, so the number is not exact. For files
    in `data.eval` and `evaluate.extra_sets`, it counts the rows. (`data.eval: 0`: EVL031. Few rows because of
    `evaluate.max_examples`: EVL004.)

    ## Why it is bad
    With nine rows a score changes in steps of eleven points, and its 95 % interval is nearly useless.

    ## Example
    `eval: 0.02` of 300 rows: 6. Or `eval: test.jsonl`, a file of five rows.

    ## Fix
    Hold out a larger share, or name a file with more evaluation rows in `data.eval`.

    ## Evidence
    The binomial interval: 6 of 9 correct means anything from 30 % to 93 %.
    """
    share = config.data.share
    if context.setup and context.setup.tool != "surefit" and "data.eval" not in context.lines:
        return  # the share is SureFit's default, and not part of another tool's run
    rows = context.dataset.divided if context.dataset else None
    if share and rows and round(share * rows) < SMALL_EVALUATION:
        yield Finding(
            field="data.eval",
            message=f"{share:g} of {rows} rows holds out about {round(share * rows)}: too few for a meaningful score",
            help=_hold_out_more(rows, context.is_foreign),
        )
    share_of_training = enough_share(rows) if rows and not context.is_foreign else None
    instead = f", or hold out a share of the training rows, data.eval: {share_of_training}" if share_of_training else ""
    for prompt_set in context.scored.sets if context.scored else ():
        too_few = (
            prompt_set.prompts is not None
            and prompt_set.prompts < SMALL_EVALUATION
            and not config.evaluate.max_examples
        )
        if too_few and not (prompt_set.name == "eval" and share):
            yield Finding(
                field="data.eval" if prompt_set.name == "eval" else f"evaluate.extra_sets.{prompt_set.name}",
                message=f"{plural(prompt_set.prompts or 0, 'row')} to score: too few for a meaningful score",
                help=f"name a file with a few hundred rows{instead if prompt_set.name == 'eval' else ''}",
            )


def _hold_out_more(rows: int, foreign: bool) -> str:
    """Return advice on held-out rows: a share that most data sets use, or where that is too little, another file."""
    share = enough_share(rows)
    if share is not None:
        how = f"hold out {share:g} of the rows" if foreign else f"set data.eval: {share:g}"
        return f"{how}, which is about {round(share * rows)}, or write rows to hold out into a separate file"
    needed = next(n for n in range(rows, 100 * SMALL_EVALUATION) if enough_share(n) is not None)
    separate = "" if foreign else ", and name it in data.eval"
    return (
        f"no share of {rows} rows is enough: collect {needed} or more, or write {SMALL_EVALUATION} more rows or "
        f"more into a separate file{separate}"
    )


@rule("DAT010", "one-prompt", severity="error")
def one_prompt(context: LintContext, config: SureFitConfig, examples: ExampleFacts) -> Iterator[Finding]:
    """All rows have the same prompt, so no share can be held out.

    ## What it does
    If `data.eval` is a share, counts the distinct prompts in a sample of at least 20 rows. Smaller data sets with a
    single prompt are reported by DAT001.

    ## Why it is bad
    The hash of the prompt decides which rows are held out, so that no prompt is in both sets. Rows with the same prompt
    all go to the same set: nothing is held out, or nothing is left to train on.

    ## Example
    A thousand rows that answer "Write a tweet." in the voice of one person, with `eval: 0.1`.

    ## Fix
    Move some of the rows into a separate file, and name it in `data.eval`.

    ## Evidence
    Data sets for a persona have a single prompt (modelscope/ms-swift#2750).
    """
    if context.is_foreign or not config.data.share:
        return
    if examples.examples >= ENOUGH and examples.prompts == 1:
        yield Finding(
            field="data.eval",
            message=f"all {examples.examples} sampled rows have the same prompt: no share can be held out",
            help="move some of the rows into a separate file, and name it in data.eval",
        )
