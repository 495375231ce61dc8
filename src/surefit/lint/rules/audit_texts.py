"""AUD020 to AUD028: findings of an audit in the texts and the answers."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.facts.audit import AuditFacts
from surefit.lint.rule import Finding, rule
from surefit.lint.rules.audit import first_text, often, rows_found, rows_text

DAMAGED = 0.005
"""Share of the rows from which damaged text is a finding."""
FREQUENT = 0.01
"""Share of the rows from which a pattern that is sometimes right is a finding; sound data sets have at most 0.002."""


@rule("AUD020", "encoding-damage", severity="warning")
def encoding_damage(audit: AuditFacts) -> Iterator[Finding]:
    """Texts were decoded wrongly, or contain characters that do not belong in text.

    ## What it does
    Looks for UTF-8 that was read as Windows-1252 (`cafÃ©`), for U+FFFD, control characters, lone surrogates,
    and HTML entities (`&amp;`, `&#39;`), and fires from 0.5 % of the rows; for entities from 1 %.

    ## Why it is bad
    The model learns to write them, and a right answer does not match a damaged gold answer.

    ## Example
    `{"completion": "Le cafÃ© est fermÃ©."}`.

    ## Fix
    Read the source again with its real encoding; `html.unescape` for entities. Characters replaced by U+FFFD are lost:
    drop those rows.

    ## Evidence
    The reference code of a published LLM recommender reads MovieLens' film titles, which are UTF-8, as ISO-8859-1, and
    so trains on titles like `CitÃ© des enfants perdus, La`.
    """
    kinds = {
        "mojibake": "UTF-8 that was decoded with another encoding",
        "replacement_characters": "U+FFFD in place of bytes that could not be decoded",
        "control_characters": "control characters",
        "lone_surrogates": "halves of surrogate pairs",
        "html_entities": "HTML entities",
    }
    for name, damage in kinds.items():
        yield from rows_found(
            audit,
            name,
            FREQUENT if name == "html_entities" else DAMAGED,
            f"{{rows}} contain {damage}{{first}}",
            "unescape them (html.unescape in Python)"
            if name == "html_entities"
            else "convert the file again from its source with the right encoding, or drop those rows",
        )


@rule("AUD021", "invisible-characters", severity="warning")
def invisible_characters(audit: AuditFacts) -> Iterator[Finding]:
    """Texts contain invisible characters: zero-width spaces, soft hyphens, direction marks.

    ## What it does
    Counts rows with U+200B, U+2060, U+FEFF, U+00AD, the direction controls, or tag characters, and fires from 1 %. Rows
    in Thai, Lao, Burmese and Khmer, which separate words with zero-width spaces, are ignored, and so are the joiners in
    Persian, Indian scripts and emoji.

    ## Why it is bad
    They change how words are tokenized, and two answers that look the same are not equal. Tag characters can carry
    instructions that a reviewer does not see.

    ## Example
    `hyphen\\u00adation`, copied from a web page.

    ## Fix
    Delete them.

    ## Evidence
    Measured: 2 % of the rows of a public corpus of contracts with plain-English summaries contain U+200B.
    """
    yield from rows_found(
        audit,
        "invisible_characters",
        FREQUENT,
        "{rows} contain invisible characters{first}",
        "remove them from the texts",
    )


@rule("AUD022", "mixed-normalization", severity="warning")
def mixed_normalisation(audit: AuditFacts) -> Iterator[Finding]:
    """Some rows encode an accented letter as one character, others as letter plus accent.

    ## What it does
    Counts rows in each of the two Unicode forms (NFC and NFD), and fires where both are 0.5 % or more.

    ## Why it is bad
    The two forms look the same but have different tokens: the model has to learn every word twice, and an answer in one
    form never equals a gold answer in the other. Vietnamese, where most words carry accents, suffers most.

    ## Example
    `tiếng` has five characters in one file, and seven in another that was written on a Mac.

    ## Fix
    `unicodedata.normalize("NFC", text)` on every text; pretraining data is in NFC.

    ## Evidence
    https://www.unicode.org/reports/tr15/ defines the forms; macOS file names and some keyboards give NFD.
    """
    decomposed, composed = often(audit, "decomposed_letters", DAMAGED), often(audit, "composed_letters", DAMAGED)
    if decomposed and composed:
        yield Finding(
            field="data.train",
            message=f"{rows_text(decomposed)} encode accents as separate characters (NFD), {composed.rows:,} as "
            f"part of the letter (NFC){first_text(decomposed)}",
            help='convert all texts to one form: unicodedata.normalize("NFC", text)',
        )


@rule("AUD023", "carriage-returns", severity="warning")
def carriage_returns(audit: AuditFacts) -> Iterator[Finding]:
    """Answers have Windows line endings.

    ## What it does
    Counts answers with a carriage return, and fires from 1 %.

    ## Why it is bad
    The model learns to end lines with `\\r\\n`: tokens that were rare in pretraining, one more per line, and answers
    that are compared as text no longer match.

    ## Example
    `"def f(x):\\r\\n    return x"`.

    ## Fix
    `text.replace("\\r\\n", "\\n")`.

    ## Evidence
    Measured: in a public copy of MBPP 638 of 639 reference solutions contain carriage returns.
    """
    yield from rows_found(
        audit,
        "carriage_returns",
        FREQUENT,
        "the answers of {rows} have Windows line endings{first}",
        'use "\\n" as line ending',
    )


@rule("AUD024", "boilerplate-answers", severity="warning")
def boilerplate_answers(audit: AuditFacts) -> Iterator[Finding]:
    """Answers begin or end with boilerplate text.

    ## What it does
    Looks for a short list of phrases ("as an AI language model", "all rights reserved", "this measure has not been
    amended since…") at both ends of the answers, and fires from 1 %.

    ## Why it is bad
    The model learns the phrase first: it is the most predictable part of the answers, and it does not depend on the
    input.

    ## Example
    A summary that begins "(This measure has not been amended since it was introduced.)".

    ## Fix
    Remove the phrase, or drop the rows.

    ## Evidence
    Summaries of bills in the BillML data set begin with a note of the Congressional Research Service on the summary
    itself.
    """
    yield from rows_found(
        audit,
        "boilerplate",
        FREQUENT,
        "the answers of {rows} contain boilerplate{first}",
        "remove it, or drop those rows",
    )


@rule("AUD025", "answer-longer-than-source", severity="warning")
def answer_longer_than_source(audit: AuditFacts) -> Iterator[Finding]:
    """Summaries are longer than the text that they summarize.

    ## What it does
    Compares the characters of a summary column (summary, reference_summary, highlights, abstract) with the characters
    of its text, and fires from 0.5 % of the rows.

    ## Why it is bad
    Such a summary contains things that are not in the text: the model learns to hallucinate.

    ## Example
    A text of 338 characters with a "summary" of 387.

    ## Fix
    Drop those rows.

    ## Evidence
    The first row of BillML's samples is such a row; so are seven of 446 in a corpus of contract summaries whose
    description says that such rows were removed.
    """
    yield from rows_found(
        audit,
        "summary_longer_than_source",
        DAMAGED,
        "the summary is longer than its text in {rows}{first}",
        "drop those rows",
    )


@rule("AUD026", "python-instead-of-json", severity="warning")
def python_instead_of_json(audit: AuditFacts) -> Iterator[Finding]:
    """Answers are Python literals instead of JSON.

    ## What it does
    Counts answers that Python can parse and JSON cannot (`{'a': None}`), and fires if they are half of all, or if other
    answers are JSON objects.

    ## Why it is bad
    They come from `str(value)` instead of `json.dumps(value)`: the model learns single quotes, `True` and `None`, and
    no JSON parser accepts its answers.

    ## Example
    `{"completion": "[{'name': 'f', 'arguments': {}}]"}`.

    ## Fix
    Write the column with `json.dumps`; `ast.literal_eval` reads the present values.

    ## Evidence
    Clause tables of CUAD and section lists of BillML are Python lists written as text.
    """
    python_answers, json_answers = often(audit, "python_answer", FREQUENT), audit.seen("json_answer")
    if python_answers and (json_answers or python_answers.share >= 0.5):
        json_text = f", {json_answers.rows:,} are JSON" if json_answers else ""
        yield Finding(
            field="data.train",
            message=f"the answers of {rows_text(python_answers)} are Python literals, not "
            f"JSON{json_text}{first_text(python_answers)}",
            help="write them with json.dumps (ast.literal_eval reads the present values)",
        )


@rule("AUD027", "answers-in-lists", severity="warning")
def answers_in_lists(audit: AuditFacts) -> Iterator[Finding]:
    """The answers are lists of one string each.

    ## What it does
    Counts answers that are a list with a single string, and fires if they are half of all.

    ## Why it is bad
    Converted to text, the answer has brackets and quotation marks, `['…']`: the model learns them, and scores against
    such references count their absence as errors.

    ## Example
    `{"gold": ["The report finds …"]}`.

    ## Fix
    Take the string out of the list.

    ## Evidence
    The GovReport references in a public long-context benchmark are lists of one string.
    """
    yield from rows_found(
        audit,
        "list_of_one",
        0.5,
        "the answers of {rows} are lists of one string{first}",
        "take the string out of the list",
    )


@rule("AUD028", "placeholder-answers", severity="warning")
def placeholder_answers(audit: AuditFacts) -> Iterator[Finding]:
    """Answers are placeholders such as "N/A" or "nan".

    ## What it does
    Counts answers that are only the text None, null, NaN, N/A, undefined, [object Object], a to-do note or a dash, and
    fires from 1 %. Such a text is trained on like any other answer; rows without any text are DAT003.

    ## Why it is bad
    A spreadsheet or data frame turned a missing value into text, and the model learns to write it.

    ## Example
    `{"completion": "nan"}`, from a CSV file with empty cells that pandas read.

    ## Fix
    Fill in the answers, or drop those rows.

    ## Evidence
    `str(float("nan"))` is "nan", and pandas gives NaN for every empty cell of a CSV file:
    https://pandas.pydata.org/docs/reference/api/pandas.read_csv.html
    """
    yield from rows_found(
        audit,
        "placeholder",
        FREQUENT,
        "the answers of {rows} are placeholders{first}",
        "fill them in or remove those rows, unless that word is the right answer",
    )
