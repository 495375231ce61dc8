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
    """Texts were decoded wrongly, or hold characters that no text should.

    ## What it does
    Looks for UTF-8 that was read as Windows-1252 (`cafÃ©`), for U+FFFD, control characters, lone surrogates,
    and HTML entities (`&amp;`, `&#39;`), and fires from 0.5 % of the rows; for entities from 1 %.

    ## Why it is bad
    The model learns to write them: to a tokenizer `Ã©` is a word like any other. And an answer with the right letters
    does not match a damaged gold answer.

    ## Example
    `{"completion": "Le cafÃ© est fermÃ©."}`.

    ## Fix
    Read the source again with its real encoding; `html.unescape` for entities. What was replaced by U+FFFD is lost:
    drop those rows.

    ## Evidence
    The reference code of a published LLM recommender reads MovieLens' film titles, which are UTF-8, as ISO-8859-1, and
    shows the model titles like `CitÃ© des enfants perdus, La`.
    """
    kinds = {
        "mojibake": "UTF-8 that was decoded as something else",
        "replacement_characters": "U+FFFD, which stands for a byte that could not be decoded",
        "control_characters": "control characters",
        "lone_surrogates": "halves of surrogate pairs",
        "html_entities": "HTML entities",
    }
    for name, damage in kinds.items():
        yield from rows_found(
            audit,
            name,
            FREQUENT if name == "html_entities" else DAMAGED,
            f"{{rows}} hold {damage}{{first}}",
            "unescape them (html.unescape in Python)"
            if name == "html_entities"
            else "make the file again from its source with the right encoding, or drop those rows",
        )


@rule("AUD021", "invisible-characters", severity="warning")
def invisible_characters(audit: AuditFacts) -> Iterator[Finding]:
    """Texts hold invisible characters: zero-width spaces, soft hyphens, direction marks.

    ## What it does
    Counts rows with U+200B, U+2060, U+FEFF, U+00AD, the direction controls, or tag characters, and fires from 1 %.
    Rows in Thai, Lao, Burmese and Khmer, where a zero-width space parts words, are left out, and so are the joiners
    that Persian, Indian scripts and emoji need.

    ## Why it is bad
    They split words into different tokens from the same words without them, and two answers that look alike are not
    equal. Tag characters can carry instructions that a reviewer does not see.

    ## Example
    `hyphen\\u00adation`, copied from a web page.

    ## Fix
    Delete them.

    ## Evidence
    measured: 2 % of the rows of a public corpus of contracts with plain-English summaries hold U+200B.
    """
    yield from rows_found(
        audit, "invisible_characters", FREQUENT, "{rows} hold invisible characters{first}", "delete them from the texts"
    )


@rule("AUD022", "mixed-normalisation", severity="warning")
def mixed_normalisation(audit: AuditFacts) -> Iterator[Finding]:
    """Some rows write accented letters as one character, others as letter and accent.

    ## What it does
    Counts rows in each of the two Unicode forms (NFC and NFD), and fires where both are 0.5 % or more.

    ## Why it is bad
    The two look the same and have different tokens: the model learns every word twice, and an answer in one form never
    equals a gold answer in the other. Vietnamese, where most words carry accents, suffers most.

    ## Example
    `tiếng` in five characters in one file, in seven in another that was written on a Mac.

    ## Fix
    `unicodedata.normalize("NFC", text)` on every text; pretraining data is in NFC.

    ## Evidence
    https://www.unicode.org/reports/tr15/ defines the forms; macOS file names and some keyboards give NFD.
    """
    decomposed, composed = often(audit, "decomposed_letters", DAMAGED), often(audit, "composed_letters", DAMAGED)
    if decomposed and composed:
        yield Finding(
            field="data.train",
            message=f"{rows_text(decomposed)} write accents as characters of their own (NFD), {composed.rows:,} as "
            f"part of the letter (NFC){first_text(decomposed)}",
            help='convert all texts to one form: unicodedata.normalize("NFC", text)',
        )


@rule("AUD023", "carriage-returns", severity="warning")
def carriage_returns(audit: AuditFacts) -> Iterator[Finding]:
    """Answers have Windows line ends.

    ## What it does
    Counts answers that hold a carriage return, and fires from 1 %.

    ## Why it is bad
    The model learns to end lines with `\\r\\n`: tokens that it was not pretrained on, one more per line, and code or
    answers that are compared as text no longer match.

    ## Example
    `"def f(x):\\r\\n    return x"`.

    ## Fix
    `text.replace("\\r\\n", "\\n")`.

    ## Evidence
    measured: in a public copy of MBPP 638 of 639 reference solutions hold carriage returns.
    """
    yield from rows_found(
        audit,
        "carriage_returns",
        FREQUENT,
        "the answers of {rows} have Windows line ends{first}",
        'write line ends as "\\n" alone',
    )


@rule("AUD024", "boilerplate-answers", severity="warning")
def boilerplate_answers(audit: AuditFacts) -> Iterator[Finding]:
    """Answers begin or end with boilerplate of their source.

    ## What it does
    Looks for a short list of phrases ("as an AI language model", "all rights reserved", "this measure has not been
    amended since…") at both ends of the answers, and fires from 1 %.

    ## Why it is bad
    The model learns the phrase first: it is the most predictable part of the answers. It says nothing about the input.

    ## Example
    A summary that begins "(This measure has not been amended since it was introduced.)".

    ## Fix
    Cut the phrase off, or drop the rows.

    ## Evidence
    Summaries of bills in the BillML data set begin with a note of the Congressional Research Service on the summary
    itself.
    """
    yield from rows_found(
        audit,
        "boilerplate",
        FREQUENT,
        "the answers of {rows} hold boilerplate{first}",
        "cut it off, or drop those rows",
    )


@rule("AUD025", "answer-longer-than-source", severity="warning")
def answer_longer_than_source(audit: AuditFacts) -> Iterator[Finding]:
    """Summaries are longer than what they summarize.

    ## What it does
    Compares the characters of a summary column (summary, reference_summary, highlights, abstract) with those of its
    text, and fires from 0.5 % of the rows.

    ## Why it is bad
    The model can only invent what is in the summary but not in the text: such rows teach it to.

    ## Example
    A text of 338 characters with a "summary" of 387.

    ## Fix
    Drop those rows.

    ## Evidence
    The first row of BillML's samples is such a row; so are seven of 446 in a corpus of contract summaries whose
    description says that they were removed.
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
    """Answers are Python values where JSON was meant.

    ## What it does
    Counts answers that Python reads and JSON does not (`{'a': None}`), and fires where they are half of all, or
    stand beside JSON objects.

    ## Why it is bad
    `str(value)` instead of `json.dumps(value)`: the model learns single quotes, `True` and `None`, and no JSON parser
    reads its answers.

    ## Example
    `{"completion": "[{'name': 'f', 'arguments': {}}]"}`.

    ## Fix
    Write the column with `json.dumps`; what is there can be read with `ast.literal_eval`.

    ## Evidence
    Clause tables of CUAD and section lists of BillML are Python lists as text.
    """
    python_answers, json_answers = often(audit, "python_answer", FREQUENT), audit.seen("json_answer")
    if python_answers and (json_answers or python_answers.share >= 0.5):
        json_text = f", {json_answers.rows:,} are JSON" if json_answers else ""
        yield Finding(
            field="data.train",
            message=f"the answers of {rows_text(python_answers)} are Python values, not "
            f"JSON{json_text}{first_text(python_answers)}",
            help="write them with json.dumps (ast.literal_eval reads what is there)",
        )


@rule("AUD027", "answers-in-lists", severity="warning")
def answers_in_lists(audit: AuditFacts) -> Iterator[Finding]:
    """The answers are lists of one string each.

    ## What it does
    Counts answers that are a list with a single string, and fires where they are half of all.

    ## Why it is bad
    Turned into text, the answer gains brackets and quotation marks, `['…']`: they are trained on, and every score
    against such a reference counts them as errors.

    ## Example
    `{"gold": ["The report finds …"]}`.

    ## Fix
    Take the string out of the list.

    ## Evidence
    The GovReport references of a public long-context benchmark are lists of one string.
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
    Counts answers that are nothing but the text None, null, NaN, N/A, undefined, [object Object], a to-do note or a
    dash, and fires from 1 %. Such a text is an answer like any other and is learnt; where a row has no text at all,
    DAT003 says so.

    ## Why it is bad
    A missing value became text on its way through a spreadsheet or a data frame, and the model learns to write it.

    ## Example
    `{"completion": "nan"}`, from a column that pandas read from a CSV file with holes.

    ## Fix
    Fill the answers in, or drop those rows.

    ## Evidence
    `str(float("nan"))` is "nan", and pandas gives NaN for every empty cell of a CSV file:
    https://pandas.pydata.org/docs/reference/api/pandas.read_csv.html
    """
    yield from rows_found(
        audit,
        "placeholder",
        FREQUENT,
        "the answers of {rows} are placeholders{first}",
        "fill them in or take those rows out of the file, unless that word is the right answer",
    )
