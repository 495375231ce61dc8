"""AUD029 to AUD039: what an audit found in tools, conventions, graphs and known files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from surefit.facts.audit import AuditFacts, Observation
from surefit.lint.rule import Finding, LintContext, rule
from surefit.lint.rules.audit import ANY, first_text, rows_found, rows_text
from surefit.lint.rules.audit_texts import DAMAGED, FREQUENT

MINORITY = 0.02
"""Share of the rarer of two ways from which both are in use."""
FEW = 2
"""Rows of the rarer way that may be slips."""


@rule("AUD029", "tools-contradict-answers", severity="warning")
def tools_contradict_answers(audit: AuditFacts) -> Iterator[Finding]:
    """Answers call tools, or give arguments, that the row's tools do not have.

    ## What it does
    Checks every call against the row's own tools: the name, the arguments, the required parameters. Fires from
    0.5 % of the rows.

    ## Why it is bad
    The model learns that tools may be made up. By the schema, such a gold answer is itself wrong.

    ## Example
    A call with `{"city": …}` of a tool whose only parameter is `location`.

    ## Fix
    Fix the schema or the answer, or drop the row.

    ## Evidence
    Two questions of the Berkeley Function-Calling Leaderboard (parallel_multiple 12 and 26) list answers with
    parameters that their schema lacks.
    """
    kinds = {
        "unknown_tool": "call a tool that is not among the row's tools",
        "unknown_parameter": "give an argument that the tool does not have",
        "missing_required": "leave out a required parameter",
    }
    for name, what in kinds.items():
        yield from rows_found(
            audit,
            name,
            DAMAGED,
            f"the answers of {{rows}} {what}{{first}}",
            "fix the schema or the answer, or drop those rows",
        )


@rule("AUD030", "unwinnable-rows", severity="warning")
def unwinnable_rows(audit: AuditFacts) -> Iterator[Finding]:
    """Rows that no answer can pass.

    ## What it does
    Scores each gold answer by the metric that will score the model, and looks for parameters whose list of acceptable
    values is empty, or that the schema requires and the answer rules out. One row is enough.

    ## Why it is bad
    The score stays below 100 % and nobody can explain why; and if the rows are trained on, their answers are wrong by
    their own metric.

    ## Example
    `{"record": {"start": []}}`: whatever is given for `start` is wrong, and so is leaving it out.

    ## Fix
    Drop those rows, or fix the gold answers.

    ## Evidence
    Four rows of the Berkeley Function-Calling Leaderboard cannot be passed (live_simple_106-63-0 and 112-68-0,
    live_multiple_862-181-3 and 964-207-0).
    """
    yield from rows_found(
        audit, "unwinnable", ANY, "no answer can pass in {rows}{first}", "drop those rows, or fix their gold answers"
    )


@rule("AUD031", "merged-schemas", severity="error")
def merged_schemas(audit: AuditFacts) -> Iterator[Finding]:
    """Tools or calls carry nulls that come from other tools.

    ## What it does
    Counts rows whose tool schemas have parameters set to null (or null where a type, items or properties belong), and
    calls with null for an argument that the tool does not have; fires from 1 %.

    ## Why it is bad
    A table gives all its objects the same keys. So every tool is shown with the parameters of all others, and the model
    learns to write arguments full of nulls.

    ## Example
    `{"name": "weather", "arguments": {"city": "Hue", "amount": null, "currency": null}}`.

    ## Fix
    Store tools and calls as JSON text, or give the columns the type Json:
    `Features({"messages": List(Json()), "tools": List(Json())})`.

    ## Evidence
    huggingface/datasets#7617; measured: `Dataset.from_list` of two tools with different arguments gives each tool the
    arguments of both.
    """
    yield from rows_found(
        audit,
        "merged_schema",
        FREQUENT,
        "{rows} have nulls from other tools in their tools or calls{first}",
        "make the file again with tools and answers as JSON text, or with the Json type of datasets",
    )


@rule("AUD032", "no-tools-offered", severity="warning")
def no_tools_offered(context: LintContext, audit: AuditFacts) -> Iterator[Finding]:
    """Most rows of a function-calling set offer no tool.

    ## What it does
    Counts rows whose list of tools is empty, and fires from half of them, where the recipe is function_calling or
    rows hold calls.

    ## Why it is bad
    There is nothing to call: the model learns to answer `[]`, or calls from memory.

    ## Example
    `{"tools": "[]"}` in every row, because the column was filled before the tools were known.

    ## Fix
    Fill the column, or train these rows as plain chat with the recipe chat.

    ## Evidence
    109 of 300 rows of a public function-calling demonstration set have the tools `"[]"`: harmless as a minority.
    """
    none, some = audit.seen("no_tools"), audit.seen("has_tools")
    recipe = context.config.recipe if context.config else None
    calls = audit.seen("name_first") or audit.seen("arguments_first")
    if none and ("function_calling" in (recipe or "") or calls) and none.rows >= (some.rows if some else 0):
        yield Finding(
            field="data.train",
            message=f"{rows_text(none)} offer no tool{first_text(none)}",
            help="fill the column tools, or train these rows with recipe: chat",
        )


@rule("AUD033", "mixed-conventions", severity="warning")
def mixed_conventions(audit: AuditFacts) -> Iterator[Finding]:
    """The same thing is written in two ways in the data of one run.

    ## What it does
    Counts, row by row, how concepts of several words are joined in graphs, how final answers are marked, how JSON is
    spaced, which key of a call comes first and what code is indented by: in the training rows, those of `data.mix`
    among them, and in each set that is scored (`data.eval`, `evaluate.extra_sets`). Fires if the rarer way has 2 % of
    the training rows or more, or if a scored set is written in a way that the training rows are not.

    ## Why it is bad
    The model learns to toss a coin, and half of its right answers are scored as wrong: text that is compared character
    by character has one right form.

    ## Example
    Graphs with the concept `bi_kich` in one file and `bi kich` in the other.

    ## Fix
    Write all rows, those to train on and those to score, in one form.

    ## Evidence
    measured: in a published Vietnamese AMR data set one file joins words by `_` and the other leaves spaces; gold
    against its own underscored self scores 0.873 Smatch.
    """
    mixed = [seen for key, seen in audit.conventions.items() if key.startswith("data.mix.")]
    scored = {key: seen for key, seen in audit.conventions.items() if not key.startswith("data.mix.")}
    for left, right in [*_PAIRS, *combinations(_FINALS, 2)]:
        trained = {way: _sum_observations([audit.observations, *mixed], way) for way in (left, right)}
        common, rare = sorted(trained, key=lambda way: -trained[way].rows)
        if _matters(trained[rare], trained[common]):
            yield Finding(
                field="data.train",
                message=f"{trained[left].rows:,} rows {_WAYS[left]}, {trained[right].rows:,} {_WAYS[right]}"
                f"{first_text(trained[rare])}",
                help="write all rows in the form in which answers will be compared",
            )
            continue
        for key, seen in scored.items():
            other, same = _sum_observations([seen], rare), _sum_observations([seen], common)
            if trained[common].rows > FEW and _matters(other, same):
                yield Finding(
                    field=key,
                    message=f"{other.rows:,} of its rows {_WAYS[rare]}, and {trained[common].rows:,} rows that are "
                    f"trained on {_WAYS[common]}{first_text(other)}",
                    help="write the rows to train on and those to score in one form",
                )


def _sum_observations(sources: Sequence[Mapping[str, Observation]], name: str) -> Observation:
    """Return an observation of all sources together."""
    found = [seen[name] for seen in sources if name in seen]
    examples = tuple(example for seen in found for example in seen.examples)
    return Observation(sum(seen.rows for seen in found), sum(seen.of for seen in found), examples)


def _matters(rarer: Observation, other: Observation) -> bool:
    return rarer.rows > FEW and rarer.rows >= MINORITY * (rarer.rows + other.rows)


_FINALS = ("final_hashes", "final_letter_a", "final_boxed", "final_sentence")
_PAIRS = (
    ("graph_underscored_concepts", "graph_spaced_concepts"),
    ("json_spaced", "json_compact"),
    ("name_first", "arguments_first"),
    ("code_tabs", "code_spaces"),
)
_WAYS = {
    "graph_underscored_concepts": "join the words of a concept by _",
    "graph_spaced_concepts": "leave spaces between them",
    "json_spaced": "write JSON with a space after the colon",
    "json_compact": "without",
    "name_first": "begin a call with its name",
    "arguments_first": "with its arguments",
    "code_tabs": "indent code by tabs",
    "code_spaces": "by spaces",
    "final_hashes": "mark the final answer by ####",
    "final_letter_a": 'by "A:"',
    "final_boxed": "by \\boxed",
    "final_sentence": 'by "the answer is"',
}


@rule("AUD034", "unparseable-graphs", severity="error")
def unparseable_graphs(audit: AuditFacts) -> Iterator[Finding]:
    """Gold graphs are not PENMAN.

    ## What it does
    Checks parentheses, quotation marks, and that nodes and roles are whole, in answers that look like PENMAN graphs;
    fires from 1 % of them.

    ## Why it is bad
    The official Smatch program crashes on the first graph that it cannot read, and scores no row; a scorer that leaves
    such rows out raises everyone's score. And the model learns the broken form.

    ## Example
    `(w / want-01 :ARG0 (b / boy)`: one parenthesis is missing.

    ## Fix
    Fix or drop those rows; a graph that was cut off points to a length limit.

    ## Evidence
    Half of the graphs in a published baseline output for Vietnamese AMR are malformed; a published report on that task
    left unparseable outputs out of the denominator.
    """
    seen, graphs = audit.seen("graph_unparseable"), audit.seen("graph")
    if seen and graphs and seen.rows >= FREQUENT * graphs.rows:
        yield Finding(
            field="data.train",
            message=f"{seen.rows:,} of {graphs.rows:,} graphs cannot be read{first_text(seen)}",
            help="fix those graphs, or drop their rows",
        )


@rule("AUD035", "wrong-vintage", severity="warning")
def wrong_vintage(audit: AuditFacts) -> Iterator[Finding]:
    """A MovieLens file is not the release it seems to be.

    ## What it does
    Knows ten releases by their users, ratings and first row. Compares them with the name in the path, and finds older
    releases of ml-latest-small, rows after the official end, shifted user numbers and rows that are not ratings.

    ## Why it is bad
    Results are compared with published ones on other data, and nothing fails, because the columns are the same.

    ## Example
    A folder `ml-100k` that holds ml-latest-small: 610 users instead of 943.

    ## Fix
    Download the release again from https://grouplens.org/datasets/movielens/, and name it after the release.

    ## Evidence
    A published recommender's "ML-100k" is ml-latest-small of 2018 (610 users, 100,836 ratings). Copies in public
    repositories are of 2016 (671 users, 100,004 ratings), have 72 rows appended by a web application, or user numbers
    shifted by 1,000.
    """
    kinds = {
        "movielens_other_vintage": "",
        "movielens_appended": "",
        "movielens_shifted_users": "",
        "movielens_corrupt_rows": "{rows} are no ratings{first}",
    }
    for name, text in kinds.items():
        seen = audit.seen(name)
        if seen:
            yield Finding(
                field="data.train",
                message=text.format(rows=rows_text(seen), first=first_text(seen)) if text else seen.detail,
                help="download the release that your results are to be compared on, and name the folder after it",
            )


@rule("AUD036", "mislabelled-benchmark", severity="error")
def mislabelled_benchmark(context: LintContext, audit: AuditFacts) -> Iterator[Finding]:
    """A file holds the questions of a benchmark that it is not named after.

    ## What it does
    Hashes the questions of JSON Lines files and compares them with 23 of GSM8K's test set. Fires where the file's
    name does not say GSM, and where it is trained on.

    ## Why it is bad
    A score on "MATH" or "GPQA" is then a score on GSM8K. And a model that has seen test questions in training cannot be
    tested with them.

    ## Example
    `benchmarks/gpqa.jsonl`, byte for byte GSM8K's test file.

    ## Fix
    Take the file from the benchmark's own repository; keep test questions out of the training rows.

    ## Evidence
    A published distillation project reported wins on MATH and GPQA: both of its files are the GSM8K test set.
    """
    wrong, test = audit.seen("mislabelled_benchmark"), audit.seen("gsm8k_test")
    if wrong:
        yield Finding(
            field="data.train",
            message=f"{wrong.detail}, and is not named after it",
            help="take the file from the benchmark's own repository",
        )
    elif test and context.config:
        yield Finding(
            field="data.train",
            message=f"the training rows are test questions: {test.detail}",
            help="train on GSM8K's training file, gsm8k_train.jsonl",
        )


@rule("AUD037", "single-object-file", severity="warning")
def single_object_file(audit: AuditFacts) -> Iterator[Finding]:
    """A file of rows is one large object.

    ## What it does
    Notices JSON files that hold a single object over several lines.

    ## Why it is bad
    It is read as one row: an index, a table of settings or an export by column, not the rows that were meant.

    ## Example
    `{"simple": ["id_1", "id_2"], "multiple": […]}` among files of one object per line.

    ## Fix
    Name the file with the rows, or write them one per line.

    ## Evidence
    BFCL_v4_format_sensitivity.json is a single object; all files beside it are JSON Lines under the same ending.
    """
    seen = audit.seen("single_object")
    if seen:
        yield Finding(
            field="data.train",
            message=f"{seen.detail}: one row",
            help="name the file that holds the rows, or write them one object per line",
        )


@rule("AUD038", "numbers-written-two-ways", severity="info")
def numbers_written_two_ways(audit: AuditFacts) -> Iterator[Finding]:
    """Final answers of a thousand and more are written with and without separators.

    ## What it does
    Looks at marked final answers (`#### 1,080`), and fires where the rarer way has 2 % of the large numbers.

    ## Why it is bad
    Compared as text, 1080 is not 1,080: right answers are scored as wrong.

    ## Example
    `#### 1,080` in one row, `#### 70000` in the next.

    ## Fix
    Compare numbers without separators, as GSM8K's own scorer does, or write all in one way.

    ## Evidence
    measured: of 4,937 final answers of GSM8K's training set 58 have separators, and 478 as large have none.
    """
    one, other = audit.seen("thousands_separated"), audit.seen("thousands_plain")
    if one and other and min(one.rows, other.rows) > max(FEW, MINORITY * (one.rows + other.rows)):
        yield Finding(
            field="data.train",
            message=f"{one.rows:,} final answers have thousands separators, {other.rows:,} have none{first_text(one)}",
            help="compare answers without separators, or write all numbers in one way",
        )


@rule("AUD039", "user-turns-in-a-row", severity="warning")
def user_turns_in_a_row(audit: AuditFacts) -> Iterator[Finding]:
    """Conversations have several turns of one speaker in a row.

    ## What it does
    Counts conversations in which a user turn follows a user turn, or an answer an answer, and those with a system
    column beside a system turn with another text; fires from 1 %.

    ## Why it is bad
    Chat templates that insist on alternation raise an error (Mistral's, Gemma's, Llama 2's); others run the turns
    together, or show the model a form that it will not see in use. Of two answers in a row the first is learnt with an
    end of its own: in use the model stops there.

    ## Example
    `[{"role": "user", …}, {"role": "user", …}, {"role": "assistant", …}]`.

    ## Fix
    Join the turns with a blank line; put parallel calls into the `tool_calls` of one turn.

    ## Evidence
    vllm-project/vllm#6862 and unslothai/unsloth#334 ("Conversation roles must alternate"); a question of the Berkeley
    Function-Calling Leaderboard has nine user turns in a row.
    """
    yield from rows_found(
        audit,
        "user_turns_in_a_row",
        FREQUENT,
        "{rows} have user turns in a row{first}",
        "join turns that follow each other with a blank line",
    )
    yield from rows_found(
        audit,
        "assistant_turns_in_a_row",
        FREQUENT,
        "{rows} have answers in a row, each learnt with an end of its own{first}",
        "join them into one turn; put several calls into the tool_calls of one turn",
    )
    yield from rows_found(
        audit,
        "two_system_messages",
        FREQUENT,
        "{rows} have two system messages{first}",
        "keep one of them, or join their texts",
    )
