"""AUD029 to AUD039: findings of an audit in tool calls, writing conventions, graphs and well-known files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from surefit.facts.audit import AuditFacts, Observation
from surefit.lint.rule import Finding, LintContext, rule
from surefit.lint.rules.audit import ANY, first_text, rows_found, rows_text
from surefit.lint.rules.audit_texts import DAMAGED, FREQUENT

MINORITY = 0.02
"""Share of the rarer of two conventions from which the rows count as mixed."""
FEW = 2
"""Number of rows of the rarer convention that may be single mistakes."""


@rule("AUD029", "tools-contradict-answers", severity="warning")
def tools_contradict_answers(audit: AuditFacts) -> Iterator[Finding]:
    """Answers call tools, or give arguments, that the row's tools do not have.

    ## What it does
    Checks every call against the row's own tools: the name, the arguments, the required parameters. Fires from
    0.5 % of the rows.

    ## Why it is bad
    The model learns that it may invent tools. By the schema, such a gold answer is itself wrong.

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
    for name, problem in kinds.items():
        yield from rows_found(
            audit,
            name,
            DAMAGED,
            f"the answers of {{rows}} {problem}{{first}}",
            "fix the schema or the answer, or drop those rows",
        )


@rule("AUD030", "unwinnable-rows", severity="warning")
def unwinnable_rows(audit: AuditFacts) -> Iterator[Finding]:
    """No answer can pass some of the rows.

    ## What it does
    Scores each gold answer by the metric that will score the model, and looks for parameters whose list of acceptable
    values is empty, or that the schema requires and the answer rules out. One row is enough.

    ## Why it is bad
    The score stays below 100 % without a visible cause; and if the rows are trained on, their answers are wrong by
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
    without_tools, with_tools = audit.seen("no_tools"), audit.seen("has_tools")
    recipe = context.config.recipe if context.config else None
    calls = audit.seen("name_first") or audit.seen("arguments_first")
    if (
        without_tools
        and ("function_calling" in (recipe or "") or calls)
        and without_tools.rows >= (with_tools.rows if with_tools else 0)
    ):
        yield Finding(
            field="data.train",
            message=f"{rows_text(without_tools)} offer no tool{first_text(without_tools)}",
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
    The model learns to choose at random, and half of its right answers are scored as wrong: text that is compared
    character by character has one right form.

    ## Example
    Graphs with the concept `bi_kich` in one file and `bi kich` in the other.

    ## Fix
    Write all rows, those to train on and those to score, in one form.

    ## Evidence
    measured: in a published Vietnamese AMR data set one file joins words by `_` and the other leaves spaces; gold
    against its own underscored self scores 0.873 Smatch.
    """
    mix_sources = [source for key, source in audit.conventions.items() if key.startswith("data.mix.")]
    scored_sources = {key: source for key, source in audit.conventions.items() if not key.startswith("data.mix.")}
    for left, right in [*_PAIRS, *combinations(_FINALS, 2)]:
        training_rows = {way: _sum_observations([audit.observations, *mix_sources], way) for way in (left, right)}
        common_way, rare_way = sorted(training_rows, key=lambda way: -training_rows[way].rows)
        if _matters(training_rows[rare_way], training_rows[common_way]):
            yield Finding(
                field="data.train",
                message=f"{training_rows[left].rows:,} rows {_WAYS[left]}, {training_rows[right].rows:,} {_WAYS[right]}"
                f"{first_text(training_rows[rare_way])}",
                help="write all rows in the form in which answers will be compared",
            )
            continue
        for key, source in scored_sources.items():
            scored_rare, scored_common = _sum_observations([source], rare_way), _sum_observations([source], common_way)
            if training_rows[common_way].rows > FEW and _matters(scored_rare, scored_common):
                yield Finding(
                    field=key,
                    message=f"{scored_rare.rows:,} of its rows {_WAYS[rare_way]}, and "
                    f"{training_rows[common_way].rows:,} rows that are trained on "
                    f"{_WAYS[common_way]}{first_text(scored_rare)}",
                    help="write the rows to train on and those to score in one form",
                )


def _sum_observations(sources: Sequence[Mapping[str, Observation]], name: str) -> Observation:
    """Return the sum of one observation over all sources; zero rows if none has it."""
    matches = [source[name] for source in sources if name in source]
    examples = tuple(example for match in matches for example in match.examples)
    return Observation(sum(match.rows for match in matches), sum(match.of for match in matches), examples)


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
    observation, graphs = audit.seen("graph_unparseable"), audit.seen("graph")
    if observation and graphs and observation.rows >= FREQUENT * graphs.rows:
        yield Finding(
            field="data.train",
            message=f"{observation.rows:,} of {graphs.rows:,} graphs cannot be read{first_text(observation)}",
            help="fix those graphs, or drop their rows",
        )


@rule("AUD035", "wrong-vintage", severity="warning")
def wrong_vintage(audit: AuditFacts) -> Iterator[Finding]:
    """A MovieLens file is not the release it seems to be.

    ## What it does
    Recognizes ten releases by their users, ratings and first row. Compares them with the name in the path, and finds
    older releases of ml-latest-small, rows after the official end, shifted user numbers and rows that are not ratings.

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
        observation = audit.seen(name)
        if observation:
            yield Finding(
                field="data.train",
                message=text.format(rows=rows_text(observation), first=first_text(observation))
                if text
                else observation.detail,
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
    mislabeled, test_questions = audit.seen("mislabelled_benchmark"), audit.seen("gsm8k_test")
    if mislabeled:
        yield Finding(
            field="data.train",
            message=f"{mislabeled.detail}, and is not named after it",
            help="take the file from the benchmark's own repository",
        )
    elif test_questions and context.config:
        yield Finding(
            field="data.train",
            message=f"the training rows are test questions: {test_questions.detail}",
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
    observation = audit.seen("single_object")
    if observation:
        yield Finding(
            field="data.train",
            message=f"{observation.detail}: one row",
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
    separated, plain = audit.seen("thousands_separated"), audit.seen("thousands_plain")
    if separated and plain and min(separated.rows, plain.rows) > max(FEW, MINORITY * (separated.rows + plain.rows)):
        yield Finding(
            field="data.train",
            message=f"{separated.rows:,} final answers have thousands separators, {plain.rows:,} have "
            f"none{first_text(separated)}",
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
