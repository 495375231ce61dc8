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
    """Answers call tools or pass arguments that are not in the row's tools.

    ## What it does
    Checks every call against the row's own tools: the name, the arguments, the required parameters. Fires from
    0.5 % of the rows.

    ## Why it is bad
    The model learns to invent tools and arguments. By the schema, such a gold answer is itself wrong.

    ## Example
    A call with `{"city": …}` for a tool whose only parameter is `location`.

    ## Fix
    Fix the schema or the answer, or drop the row.

    ## Evidence
    Two questions of the Berkeley Function-Calling Leaderboard (parallel_multiple 12 and 26) list answers with
    parameters that their schema lacks.
    """
    kinds = {
        "unknown_tool": "call a tool that is not among the row's tools",
        "unknown_parameter": "pass an argument that the tool does not have",
        "missing_required": "omit a required parameter",
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
    """In some rows, no answer can be scored as right.

    ## What it does
    Scores each gold answer by the metric that will score the model, and looks for parameters whose list of acceptable
    values is empty, or that the schema requires and the answer rules out. One row is enough.

    ## Why it is bad
    The score stays below 100 % without a visible cause. If the rows are also trained on, their answers are wrong by
    their own metric.

    ## Example
    `{"record": {"start": []}}`: every value of `start` is wrong, and so is omitting it.

    ## Fix
    Drop those rows, or fix the gold answers.

    ## Evidence
    Four rows of the Berkeley Function-Calling Leaderboard cannot be passed (live_simple_106-63-0 and 112-68-0,
    live_multiple_862-181-3 and 964-207-0).
    """
    yield from rows_found(
        audit,
        "unwinnable",
        ANY,
        "in {rows} no answer can be scored as right{first}",
        "drop those rows, or fix their gold answers",
    )


@rule("AUD031", "merged-schemas", severity="error")
def merged_schemas(audit: AuditFacts) -> Iterator[Finding]:
    """Tools or calls carry nulls that come from other tools.

    ## What it does
    Counts rows whose tool schemas have parameters set to null (or null where a type, items or properties belong), and
    calls with null for an argument that the tool does not have; fires from 1 %.

    ## Why it is bad
    A table column gives all its objects the same keys. So every tool has the parameters of all others, and the model
    learns to write arguments full of nulls.

    ## Example
    `{"name": "weather", "arguments": {"city": "Hue", "amount": null, "currency": null}}`.

    ## Fix
    Store tools and calls as JSON text, or give the columns the type Json:
    `Features({"messages": List(Json()), "tools": List(Json())})`.

    ## Evidence
    huggingface/datasets#7617; Measured: `Dataset.from_list` of two tools with different arguments gives each tool the
    arguments of both.
    """
    yield from rows_found(
        audit,
        "merged_schema",
        FREQUENT,
        "the tools or calls of {rows} have null keys that belong to other tools{first}",
        "write the file again with tools and answers as JSON text, or with the Json type of datasets",
    )


@rule("AUD032", "no-tools-offered", severity="warning")
def no_tools_offered(context: LintContext, audit: AuditFacts) -> Iterator[Finding]:
    """Most rows of a function-calling data set have no tools.

    ## What it does
    Counts rows with an empty list of tools, and fires from half of them, if the recipe is function_calling or rows
    contain calls.

    ## Why it is bad
    There is nothing to call: the model learns to answer `[]`, or to call tools from memory.

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
            message=f"{rows_text(without_tools)} have no tools{first_text(without_tools)}",
            help="fill the column tools, or train these rows with recipe: chat",
        )


@rule("AUD033", "mixed-conventions", severity="warning")
def mixed_conventions(audit: AuditFacts) -> Iterator[Finding]:
    """The data of one run mixes two ways of writing the same thing.

    ## What it does
    Counts, row by row, how graphs join the words of a concept, how final answers are marked, how JSON is spaced, which
    key of a call comes first and how code is indented: in the training rows, including `data.mix`, and in each
    evaluation set (`data.eval`, `evaluate.extra_sets`). Fires if 2 % of the training rows or more use the rarer way, or
    if an evaluation set uses a way that the training rows do not.

    ## Why it is bad
    The model learns to choose at random, and half of its right answers are scored as wrong if they are compared
    character by character.

    ## Example
    Graphs with the concept `bi_kich` in one file and `bi kich` in the other.

    ## Fix
    Write all training and evaluation rows in the same form.

    ## Evidence
    Measured: in a published Vietnamese AMR data set one file joins words by `_` and the other leaves spaces; the gold
    graphs score 0.873 Smatch against themselves with underscores.
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
                    message=f"{scored_rare.rows:,} of its rows {_WAYS[rare_way]}, but "
                    f"{training_rows[common_way].rows:,} training rows "
                    f"{_WAYS[common_way]}{first_text(scored_rare)}",
                    help="write training and evaluation rows in the same form",
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
    """Gold graphs are not valid PENMAN.

    ## What it does
    Checks parentheses, quotation marks, and that nodes and roles are complete, in answers that look like PENMAN graphs;
    fires from 1 % of them.

    ## Why it is bad
    The official Smatch program crashes on the first graph that it cannot parse, and scores no row; a scorer that skips
    such rows inflates every score. And the model learns the broken form.

    ## Example
    `(w / want-01 :ARG0 (b / boy)`: one parenthesis is missing.

    ## Fix
    Fix or drop those rows; truncated graphs point to a length limit.

    ## Evidence
    Half of the graphs in a published baseline output for Vietnamese AMR are malformed; a published report on that task
    left unparseable outputs out of the denominator.
    """
    observation, graphs = audit.seen("graph_unparseable"), audit.seen("graph")
    if observation and graphs and observation.rows >= FREQUENT * graphs.rows:
        yield Finding(
            field="data.train",
            message=f"{observation.rows:,} of {graphs.rows:,} graphs cannot be parsed{first_text(observation)}",
            help="fix those graphs, or drop their rows",
        )


@rule("AUD035", "wrong-vintage", severity="warning")
def wrong_vintage(audit: AuditFacts) -> Iterator[Finding]:
    """A MovieLens file is not the release that its name says.

    ## What it does
    Recognizes ten releases by their users, ratings and first row. Compares them with the name in the path, and finds
    older releases of ml-latest-small, rows after the official end, shifted user numbers and rows that are not ratings.

    ## Why it is bad
    Results are compared with published results on different data, and no error shows it, because the columns are the
    same.

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
        "movielens_corrupt_rows": "{rows} are not ratings{first}",
    }
    for name, text in kinds.items():
        observation = audit.seen(name)
        if observation:
            yield Finding(
                field="data.train",
                message=text.format(rows=rows_text(observation), first=first_text(observation))
                if text
                else observation.detail,
                help="download the release that you want to compare results on, and name the folder after it",
            )


@rule("AUD036", "mislabelled-benchmark", severity="error")
def mislabelled_benchmark(context: LintContext, audit: AuditFacts) -> Iterator[Finding]:
    """A file contains another benchmark's questions than its name says.

    ## What it does
    Hashes the questions of JSON Lines files and compares them with 23 of GSM8K's test set. Fires if the file's name
    does not contain GSM, and if the file is trained on.

    ## Why it is bad
    A score on "MATH" or "GPQA" is then a score on GSM8K. And a model that has seen test questions in training cannot be
    tested with them.

    ## Example
    `benchmarks/gpqa.jsonl`, byte for byte GSM8K's test file.

    ## Fix
    Take the file from the benchmark's own repository; keep test questions out of the training rows.

    ## Evidence
    A published distillation project reported wins on MATH and GPQA: both files are the GSM8K test set.
    """
    mislabeled, test_questions = audit.seen("mislabelled_benchmark"), audit.seen("gsm8k_test")
    if mislabeled:
        yield Finding(
            field="data.train",
            message=f"{mislabeled.detail}, but its name does not say so",
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
    """A file that should hold rows is one large JSON object.

    ## What it does
    Finds JSON files that contain a single object over several lines.

    ## Why it is bad
    It is read as one row: it is probably an index, a settings file or a column-wise export, not a file of rows.

    ## Example
    `{"simple": ["id_1", "id_2"], "multiple": […]}` among files of one object per line.

    ## Fix
    Name the file with the rows, or write them one per line.

    ## Evidence
    BFCL_v4_format_sensitivity.json is a single object; all files beside it are JSON Lines with the same extension.
    """
    observation = audit.seen("single_object")
    if observation:
        yield Finding(
            field="data.train",
            message=f"{observation.detail}: it is read as one row",
            help="name the file that holds the rows, or write them one object per line",
        )


@rule("AUD038", "numbers-written-two-ways", severity="info")
def numbers_written_two_ways(audit: AuditFacts) -> Iterator[Finding]:
    """Final answers of a thousand and more are written with and without separators.

    ## What it does
    Looks at marked final answers (`#### 1,080`), and fires if the rarer way has 2 % of the large numbers.

    ## Why it is bad
    Compared as text, 1080 is not 1,080: right answers are scored as wrong.

    ## Example
    `#### 1,080` in one row, `#### 70000` in the next.

    ## Fix
    Compare numbers without separators, as GSM8K's own scorer does, or write all in one way.

    ## Evidence
    Measured: of 4,937 final answers of GSM8K's training set 58 have separators, and 478 equally large ones have none.
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
    """Conversations have consecutive turns of the same role.

    ## What it does
    Counts conversations in which a user turn follows a user turn, or an answer an answer, and conversations with a
    system column and a system turn that differ; fires from 1 %.

    ## Why it is bad
    Chat templates that require alternating roles raise an error (Mistral's, Gemma's, Llama 2's); others concatenate the
    turns, or render a form that does not occur at inference. Of two consecutive answers the first gets its own
    end-of-turn token: at inference the model stops there.

    ## Example
    `[{"role": "user", …}, {"role": "user", …}, {"role": "assistant", …}]`.

    ## Fix
    Join the turns with a blank line; put parallel calls into the `tool_calls` of one turn.

    ## Evidence
    vllm-project/vllm#6862 and unslothai/unsloth#334 ("Conversation roles must alternate"); a question of the Berkeley
    Function-Calling Leaderboard has nine consecutive user turns.
    """
    yield from rows_found(
        audit,
        "user_turns_in_a_row",
        FREQUENT,
        "{rows} have consecutive user turns{first}",
        "join consecutive turns with a blank line",
    )
    yield from rows_found(
        audit,
        "assistant_turns_in_a_row",
        FREQUENT,
        "{rows} have consecutive answers, each with its own end-of-turn token{first}",
        "join them into one turn; put several calls into the tool_calls of one turn",
    )
    yield from rows_found(
        audit,
        "two_system_messages",
        FREQUENT,
        "{rows} have two system messages{first}",
        "keep one of them, or join their texts",
    )
