"""AMR parsing: from a sentence to its meaning as a PENMAN graph.

Two recipes. `amr_parsing` answers with the graph alone; `amr_parsing_two_task` with the skeleton first, which is the
graph without variables, and then the graph. The main metric is strict Smatch: an answer that is no graph matches
nothing, and the gold graph's triples count all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from operator import itemgetter

import numpy as np

from surefit.core.errors import DataError, did_you_mean
from surefit.core.units import truncate_text
from surefit.facts.free_text import LIKELIHOOD
from surefit.metrics.amr_phenomena import PHENOMENA, count_phenomena
from surefit.metrics.assignment import Floats
from surefit.metrics.penman_text import is_well_formed, one_line, repair_graph, with_concepts
from surefit.metrics.penman_tree import concept_skeleton, without_coreference, without_role
from surefit.metrics.smatch import Graph, align, count_matches, f_score, read_graph
from surefit.recipes.amr_grammar import GRAPH_RULES, SKELETON_RULES
from surefit.task import Example, Grammar, Message, Prediction, Row, Scores, TaskRecipe, mean_scores

_COLUMNS_HELP = (
    "a row has the columns sentence and graph (PENMAN), and may have language (vi or en); "
    "a row for prediction only has no column graph"
)
_VIETNAMESE = re.compile("[ăâđêôơưĂÂĐÊÔƠƯ\u1ea0-\u1ef9]")
_HARMFUL = {"around", "parentheses", "variables", "dangling"}
"""Repairs that a gold graph must not need, because it is trained on unrepaired."""


@dataclass(frozen=True)
class _Words:
    """Texts of one language in the prompts and in the two-task answer."""

    instruction: str
    two_task: str
    skeleton: str
    graph: str


_WORDS = {
    "en": _Words(
        "Write the meaning of the sentence as a PENMAN graph.",
        "Write the meaning of the sentence as a PENMAN graph: first its skeleton without variables, then the graph.",
        "Skeleton: ",
        "Graph: ",
    ),
    "vi": _Words(
        "Viết nghĩa của câu dưới dạng đồ thị PENMAN.",
        "Viết nghĩa của câu dưới dạng đồ thị PENMAN: trước hết là khung không có biến, sau đó là đồ thị.",
        "Khung: ",
        "Đồ thị: ",
    ),
}
_MARK = re.compile(rf"(?:^|\n)[ \t]*(?:{'|'.join(words.graph.strip() for words in _WORDS.values())})")


@dataclass(frozen=True)
class GoldGraph:
    """The gold graph as text and as triples."""

    text: str
    graph: Graph


def to_example(row: Row) -> Example:
    """Convert a row to system (instruction), user (sentence), assistant (the graph on one line).

    Raises:
        DataError: no sentence, a graph that is null, unreadable or incomplete, or an unknown language.
    """
    words = _words(row)
    return _example(row, words.instruction, "{graph}")


def to_two_task_example(row: Row) -> Example:
    """Convert a row as in `to_example`, with the skeleton before the graph."""
    words = _words(row)
    return _example(row, words.two_task, f"{words.skeleton}{{skeleton}}\n{words.graph}{{graph}}")


def _example(row: Row, instruction: str, answer: str) -> Example:
    messages: list[Message] = [
        {"role": "system", "content": instruction},
        {"role": "user", "content": _sentence(row)},
    ]
    if "graph" not in row:
        _refuse_misspelt_graph(row)
        return Example(messages=tuple(messages))
    gold = _gold(row)
    line = one_line(gold.text)
    completion = answer.replace("{skeleton}", concept_skeleton(line)).replace("{graph}", line)
    return Example((*messages, {"role": "assistant", "content": completion}), completion=completion, reference=gold)


def to_gold(row: Row) -> Example:
    """Convert a row with a graph and no sentence to its gold answer: any graph that smatch reads, as it reads it."""
    text = _graph_text(row)
    graph = read_graph(text)
    if graph is None:
        raise _not_penman(text)
    return Example(reference=GoldGraph(text, graph))


def _sentence(row: Row) -> str:
    sentence = row.get("sentence")
    if not isinstance(sentence, str) or not sentence.strip():
        problem = f"sentence is {truncate_text(repr(sentence))}" if "sentence" in row else _missing("sentence", row)
        raise DataError(problem, code="E7086", field="sentence", help=_COLUMNS_HELP)
    return " ".join(sentence.split())


def _missing(column: str, row: Row) -> str:
    return f"the row has no column {column!r}, only {', '.join(map(repr, row)) or 'none'}{did_you_mean(column, row)}"


def _words(row: Row) -> _Words:
    language = row.get("language")
    if language is None:
        return _WORDS["vi" if _VIETNAMESE.search(_sentence(row)) else "en"]
    if language not in _WORDS:
        raise DataError(
            f"language is {truncate_text(repr(language))}, not vi or en",
            code="E7087",
            field="language",
            help="remove the column: SureFit detects Vietnamese by its letters",
        )
    return _WORDS[language]


def _refuse_misspelt_graph(row: Row) -> None:
    candidates = [name for name in row if name.lower() in ("amr", "penman")] or get_close_matches(
        "graph", list(row), n=1
    )
    if candidates:
        raise DataError(
            f"the row has a column {candidates[0]!r} but no column 'graph'",
            code="E7088",
            field="graph",
            help=f"rename {candidates[0]!r} to 'graph'; a row for prediction only has neither",
        )


def _graph_text(row: Row) -> str:
    text = row.get("graph")
    if not isinstance(text, str) or not text.strip():
        problem = f"graph is {truncate_text(repr(text))}" if "graph" in row else _missing("graph", row)
        raise DataError(problem, code="E7089", field="graph", help=_COLUMNS_HELP)
    return text


def _gold(row: Row) -> GoldGraph:
    """Return a graph to train on: concepts of several words stay as in the corpus, but it must be complete."""
    text = _graph_text(row)
    graph = read_graph(text)
    if graph is not None and is_well_formed(text):
        return GoldGraph(text, graph)
    repaired = repair_graph(text)
    if graph is None or repaired is None or _HARMFUL & set(repaired.kinds):
        raise _not_penman(text)
    return GoldGraph(text, graph)


def _not_penman(text: str) -> DataError:
    repaired = repair_graph(text)
    return DataError(
        f"the graph is not PENMAN: {truncate_text(one_line(text))}",
        code="E7090",
        field="graph",
        help=f"if this is the intended graph, write {repaired.text}" if repaired else "correct it, or drop the row",
    )


def parse(text: str) -> str | None:
    """Return the unrepaired graph if smatch can read it, else None."""
    return text.strip() if read_graph(text) is not None else None


def parse_two_task(text: str) -> str | None:
    """Return the graph after the last "Graph:" or "Đồ thị:" if smatch can read it, else None."""
    marks = list(_MARK.finditer(text))
    return parse(text[marks[-1].end() :]) if marks else None


def score(example: Example, prediction: Prediction) -> Scores:
    """Return the row's own Smatch and the counts that `aggregate` sums."""
    gold = example.reference
    if not isinstance(gold, GoldGraph):
        raise DataError("the row has no graph to score against", code="E7091", field="graph", help=_COLUMNS_HELP)
    graph = read_graph(prediction.parsed) if prediction.parsed is not None else None
    alignment = align(graph, gold.graph) if graph else None
    matched, size, gold_size = alignment.worth if alignment else 0, len(graph or ()), len(gold.graph)
    answer, needed_repair = _repaired(prediction)
    fixed = read_graph(answer)
    fixed_match = matched if fixed == graph else count_matches(fixed, gold.graph).match if fixed else 0
    plain = count_matches(_glued(graph), _glued(gold.graph)).match if graph else 0
    fixed_size = len(fixed or ())
    counts = {
        "_match": matched,
        "_test": size,
        "_gold": gold_size,
        "_gold_read": gold_size if graph else 0,
        "_match_repaired": fixed_match,
        "_test_repaired": fixed_size,
        "_match_normalised": plain,
    }
    for name, parts in count_phenomena(graph, gold.graph, alignment).items():
        counts |= zip((f"_match_{name}", f"_test_{name}", f"_gold_{name}"), parts, strict=True)
    return {
        "smatch": f_score(matched, size, gold_size)[2],
        "smatch_repaired": f_score(fixed_match, fixed_size, gold_size)[2],
        "smatch_normalised": f_score(plain, size, gold_size)[2],
        "exact_match": float(matched == size == gold_size),
        "valid": float(graph is not None),
        "well_formed": float(graph is not None and is_well_formed(prediction.parsed)),
        "repaired": float(needed_repair and fixed is not None),
        "proven": float(alignment is None or alignment.proven),
    } | {name: float(count) for name, count in counts.items()}


def _repaired(prediction: Prediction) -> tuple[str, bool]:
    """Return the graph in the answer, truncated or not, and whether it had to be repaired."""
    marks = list(_MARK.finditer(prediction.text))
    text = prediction.parsed or prediction.text[marks[-1].end() if marks else 0 :]
    if is_well_formed(text) and read_graph(text):
        return text, False
    repaired = repair_graph(text)
    return (repaired.text, True) if repaired else (text, False)


def _glued(graph: Graph) -> Graph:
    """Return the graph without underscores in concepts; smatch's reader has already dropped their spaces."""
    return replace(graph, concepts=tuple(concept.replace("_", "") for concept in graph.concepts))


_MEANS = ("exact_match", "valid", "well_formed", "repaired", "proven", "smatch")
_COUNTS = (
    *("_match", "_test", "_gold", "_gold_read", "_match_repaired", "_test_repaired", "_match_normalised"),
    *(f"_{count}_{name}" for name in PHENOMENA for count in ("match", "test", "gold")),
)
_numbers = itemgetter(*_MEANS, *_COUNTS)
_KEPT = 50_000


_vectors: dict[int, tuple[Scores, Floats]] = {}


def _vector(row: Scores) -> Floats:
    """Return the row's scores as one array, cached because resampling sums the same rows thousands of times."""
    cached = _vectors.get(id(row))
    if cached is None or cached[0] is not row:
        if len(_vectors) >= _KEPT:
            _vectors.clear()
        cached = _vectors[id(row)] = row, np.array(_numbers(row))
    return cached[1]


def aggregate(rows: Sequence[Scores]) -> Scores:
    """Return corpus scores: triples are summed before dividing, as smatch does. Phenomena that the gold graphs lack are
    left out.
    """
    sums = dict(zip((*_MEANS, *_COUNTS), np.sum([_vector(row) for row in rows], axis=0).tolist(), strict=True))
    matched, test, gold = sums["_match"], sums["_test"], sums["_gold"]
    precision, recall, f1 = f_score(matched, test, gold)
    means = {name: sums[name] / len(rows) for name in _MEANS}
    return {
        "smatch": f1,
        "smatch_precision": precision,
        "smatch_recall": recall,
        "smatch_lenient": f_score(matched, test, sums["_gold_read"])[2],
        "smatch_repaired": f_score(sums["_match_repaired"], sums["_test_repaired"], gold)[2],
        "smatch_normalised": f_score(sums["_match_normalised"], test, gold)[2],
        "smatch_macro": means.pop("smatch"),
        **means,
        **_by_phenomenon(sums),
        **mean_scores([{LIKELIHOOD: row[LIKELIHOOD]} for row in rows if LIKELIHOOD in row]),
    }


def _by_phenomenon(sums: Mapping[str, float]) -> Scores:
    return {
        name: f_score(sums[f"_match_{name}"], sums[f"_test_{name}"], sums[f"_gold_{name}"])[2]
        for name in PHENOMENA
        if sums[f"_gold_{name}"]
    }


def grammar(example: Example) -> Grammar:
    """Return the grammar of one whole PENMAN graph on one line."""
    return Grammar("ebnf", "root ::= node\n" + GRAPH_RULES)


def two_task_grammar(example: Example) -> Grammar:
    """Return the grammar of a skeleton and a graph, with the labels of the row's language."""
    instruction = example.messages[0]["content"]
    words = next(words for words in _WORDS.values() if words.two_task == instruction)
    root = f'root ::= "{words.skeleton}" bare "\\n{words.graph}" node\n'
    return Grammar("ebnf", root + SKELETON_RULES + GRAPH_RULES)


def _oracle(text: str) -> Prediction:
    return Prediction(text, parsed=parse(text))


def _gold_text(example: Example) -> str:
    assert isinstance(example.reference, GoldGraph)
    return one_line(example.reference.text)


METRICS = (
    *(f"smatch{form}" for form in ("", "_precision", "_recall", "_lenient", "_repaired", "_normalised", "_macro")),
    *(name for name in _MEANS if name != "smatch"),
    *PHENOMENA,
    LIKELIHOOD,
)
BASELINES = {
    "gold-without-wiki": lambda example: _oracle(without_role(_gold_text(example), ":wiki")),
    "gold-without-coreference": lambda example: _oracle(without_coreference(_gold_text(example))),
    "gold-underscored": lambda example: _oracle(with_concepts(_gold_text(example), "_")),
    "gold-glued": lambda example: _oracle(with_concepts(_gold_text(example), "")),
}
"""Ceilings: the scores of a parser that is perfect except for one thing."""

RECIPE = TaskRecipe(
    name="amr_parsing",
    purpose="Turns a sentence into its meaning as a graph (AMR).",
    version=3,
    citation=(
        "AMR: Banarescu et al. 2013; Smatch: Cai & Knight 2013, triples as smatch 1.0.4 reads them; phenomena: "
        "Damonte, Cohen & Satta, arXiv:1608.06111; Vietnamese data format: VLSP 2025 semantic parsing"
    ),
    columns=("sentence", "graph"),
    to_example=to_example,
    parse=parse,
    score=score,
    primary_metric="smatch",
    metrics=METRICS,
    grammar=grammar,
    aggregate=aggregate,
    baselines=BASELINES,
    to_gold=to_gold,
)

TWO_TASK = replace(
    RECIPE,
    name="amr_parsing_two_task",
    purpose="Turns a sentence into its AMR graph in two steps: first the concepts, then the graph.",
    to_example=to_two_task_example,
    parse=parse_two_task,
    grammar=two_task_grammar,
)
