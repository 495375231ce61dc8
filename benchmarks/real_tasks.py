"""The tasks of benchmarks/real.py: which real rows each trains on and is scored on, and with which config.

Every task keeps to one budget: about 50,000 tokens of training at most and about 100 answers, so that it ends within 25
minutes on two quiet cores. `limits` says in words what was left out for that. Rows are chosen by hash, never by hand,
and the rows of one question, contract or user are wholly trained on or wholly held out.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefit import samples
from surefit.core.rundir import read_jsonl, write_atomic
from surefit.core.sampling import evenly_spaced_indices
from surefit.evaluate.answers import PREDICTIONS
from surefit.evaluate.stats import paired_bootstrap
from surefit.metrics.bfcl_files import read_category, row_from_question, score_bfcl_answer

Row = dict[str, Any]
Rows = Sequence[Row]
SHORT = 1_000
"""Characters of tools and question that a function-calling row may have: about 270 tokens."""
BFCL = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as `--task` takes it.
        files: of the data directory, without which it cannot be run.
        prepare: (data directory, task directory, quick) → set name → rows; "train" and "eval" among the names.
        config: what differs from `COMMON`, by section.
        limits: what was left out, in words.
        rejudge: (rows by set, run directory) → more scored sets, for rules that look at more than the recipe's row.
        retrieve: arguments of `surefit retrieve` that make the rows, run before `prepare`.
        baseline: what the tuned model is compared with beside the base.
        metric: where the table shows another than the recipe's primary metric.
    """

    name: str
    files: tuple[str, ...]
    prepare: Callable[[Path, Path, bool], dict[str, Rows]]
    config: Mapping[str, Mapping[str, Any]]
    limits: str
    rejudge: Callable[[Mapping[str, Rows], Path], dict[str, Any]] | None = None
    retrieve: tuple[str, ...] = ()
    baseline: str | None = None
    metric: str | None = None


def share(key: str) -> float:
    """Where a key stands between 0 and 1: the same on every machine."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) / 2**32


def chosen(rows: Iterable[Row], count: int, key: Callable[[Row], str]) -> list[Row]:
    """`count` rows, those whose keys hash lowest."""
    return sorted(rows, key=lambda row: share(key(row)))[:count]


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


# Function calling


def groups(rows: Rows) -> list[list[Row]]:
    """Rows in groups that share no question and no tool with one another, the largest first."""
    parent = list(range(len(rows)))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    first: dict[tuple[str, str], int] = {}
    for place, row in enumerate(rows):
        names = [tool["name"] for tool in json.loads(row["tools"])]
        for key in (("question", " ".join(row["query"].lower().split())), *(("tool", name) for name in names)):
            parent[root(place)] = root(first.setdefault(key, place))
    found = defaultdict(list)
    for place, row in enumerate(rows):
        found[root(place)].append(row)
    return sorted(found.values(), key=len, reverse=True)


def split_calls(rows: Rows, held_out: float = 0.33) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows without a question or a tool in common. The largest group, a quarter of all rows that
    hang together by their tools, is trained on; of the others a share by hash is held out."""
    largest, *others = groups(rows)
    train, held = list(largest), []
    for group in others:
        (held if share(min(row["id"] for row in group)) < held_out else train).extend(group)
    return train, held


def category(row: Row) -> str:
    """The leaderboard's category of a row, which its id begins with."""
    return next(name for name in ("live_simple", "live_irrelevance", *sorted(BFCL, key=len, reverse=True))
                if str(row["id"]).startswith(name))  # fmt: skip


def prepare_calls(data: Path, out: Path, quick: bool) -> dict[str, Rows]:
    """xLAM-shaped rows, split; and users' own requests of the leaderboard's live categories, none of which is trained
    on."""
    train, held = split_calls(read(data / "function_calling/xlam/xlam_shape_from_bfcl.jsonl"))
    known = {tool["name"] for row in train for tool in json.loads(row["tools"])}
    counts = {"simple_python": 20, "multiple": 12, "parallel": 10, "parallel_multiple": 8, "irrelevance": 14}
    if quick:
        counts = dict.fromkeys(counts, 1)
    held = _short(held)
    scored = [
        row for name, count in counts.items() for row in chosen((r for r in held if category(r) == name), count, _id)
    ]
    live = []
    for name, count in (("live_simple", 1 if quick else 24), ("live_irrelevance", 0 if quick else 8)):
        found = read_category(data / "function_calling/bfcl", name).values()
        new = [row for row in found if not {tool["name"] for tool in row["function"]} & known]
        rows = [row_from_question(row) for row in new if len(row["question"]) == 1]
        live += chosen(_short(rows), count, _id)
    return {"train": chosen(_short(train), 8 if quick else 200, _id), "eval": scored, "users": live}


def _id(row: Row) -> str:
    return str(row["id"])


def _short(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if len(row["tools"]) + len(row["query"]) <= SHORT]


def judged_by_leaderboard(data: Path) -> Callable[[Mapping[str, Rows], Path], dict[str, Any]]:
    """Base and merged by the AST checker, with every value that the leaderboard accepts, by category.

    Where no tool fits the leaderboard takes any answer without a call for right, so a base that only ever writes prose
    is right on all of those rows, and on no other: they are counted apart.
    """

    def rejudge(sets: Mapping[str, Rows], run: Path) -> dict[str, Any]:
        names = {category(row) for name in ("eval", "users") for row in sets[name]}
        gold = {name: read_category(data / "function_calling/bfcl", name) for name in names}
        verdicts: dict[str, list[list[float]]] = defaultdict(lambda: [[], []])
        for name in ("eval", "users"):
            answered = [read_jsonl(run / "eval" / name / f"{variant}{PREDICTIONS}") for variant in ("base", "merged")]
            for pair in zip(*answered, strict=True):
                row = sets[name][pair[0]["index"]]
                values = [
                    score_bfcl_answer(gold[category(row)][row["id"]], line["text"], category(row)) for line in pair
                ]
                called = "rows with a call" if json.loads(row["answers"]) else "rows without"
                for label in (category(row), called, "all rows"):
                    for variant, value in enumerate(values):
                        verdicts[label][variant].append(value)
        return {f"BFCL {name}": compared("AST", *pair) for name, pair in verdicts.items()}

    return rejudge


def compared(metric: str, base: Sequence[float], tuned: Sequence[float]) -> dict[str, Any]:
    """A scored set as the results have it."""
    found = paired_bootstrap(base, tuned)
    return {
        "metric": metric, "base": sum(base) / len(base), "tuned": sum(tuned) / len(tuned),
        "difference": found.difference, "ci95": [found.low, found.high], "wins": found.wins, "losses": found.losses,
        "n": len(base),
    }  # fmt: skip


# The others


def prepare_math(data: Path, out: Path, quick: bool) -> dict[str, Rows]:
    """GSM8K: short problems to learn from, problems of its test set to solve."""
    rows = [row for row in read(data / "math_code/gsm8k/gsm8k_train.jsonl") if len(str(row)) < 600]
    scored = read(data / "math_code/gsm8k/gsm8k_test.jsonl")
    question = lambda row: row["question"]  # noqa: E731
    return {"train": chosen(rows, 8 if quick else 80, question), "eval": chosen(scored, 4 if quick else 24, question)}


def prepare_code(data: Path, out: Path, quick: bool) -> dict[str, Rows]:
    """MBPP by its own split: tasks 601 to 974 to learn from, 11 to 510 to solve."""
    rows = [
        # Its lines end in \r\n and some are indented by tabs: `surefit check` says so, and a tokenizer sees two styles.
        {**row, "task_id": str(row["task_id"]), "code": row["code"].replace("\r\n", "\n").expandtabs(4)}
        for row in read(data / "math_code/mbpp/mbpp.jsonl")
        if len(row["code"]) + len("".join(row["test_list"])) < 700
    ]
    number = lambda row: row["task_id"]  # noqa: E731
    train = [row for row in rows if 601 <= int(row["task_id"]) <= 974]
    scored = [row for row in rows if 11 <= int(row["task_id"]) <= 510]
    return {"train": chosen(train, 8 if quick else 80, number), "eval": chosen(scored, 4 if quick else 24, number)}


def prepare_ranking(data: Path, out: Path, quick: bool) -> dict[str, Rows]:
    """What `surefit retrieve` found, with the newest ten films of each history."""
    folder = out / "retrieved"
    cut = lambda row: {**row, "history": row["history"][-10:]}  # noqa: E731
    rows = [cut(row) for row in read(folder / "train.jsonl")]
    train = [rows[place] for place in evenly_spaced_indices(len(rows), 8 if quick else 64)]
    # A user whose film is not among the candidates keeps the retriever's place whatever a ranker says.
    found = [cut(row) for row in read(folder / "test.jsonl") if row["answer"]]
    return {"train": train, "eval": [found[place] for place in evenly_spaced_indices(len(found), 4 if quick else 40)]}


def prepare_summaries(data: Path, out: Path, quick: bool) -> dict[str, Rows]:
    """Contracts in plain English, whole documents held out; and bills, of which there are too few to learn from."""
    folder = data / "legal_summarization"
    rows = [
        {name: row[name] for name in ("uid", "doc", "original_text", "reference_summary")}
        for row in read(folder / "manor_plain_english_contracts_all_v1.jsonl")
        if len(row["reference_summary"]) < len(row["original_text"]) < 1_500
    ]
    held = [row for row in rows if share(row["doc"]) < 0.3]
    train = [row for row in rows if share(row["doc"]) >= 0.3]
    bills = [
        {"document": row["text"], "summary": row["summary"]}
        for row in read(folder / "billml_bill_summary_us_10.jsonl")
        if row.get("summary")
    ]
    uid = lambda row: row["uid"]  # noqa: E731
    return {
        "train": chosen(train, 8 if quick else 176, uid),
        "eval": chosen(held, 4 if quick else 48, uid),
        "bills": bills[: 1 if quick else None],
    }


def prepare_graphs(data: Path, out: Path, quick: bool) -> dict[str, Rows]:
    """SureFit's own sentences, as no corpus may be passed on, and the sentences that smatch's tests come with."""
    folder = Path(samples.__file__).parent
    template, hand = read(folder / "amr-tiny-train.jsonl"), penman_rows(folder / "amr-train.txt")
    english = [row for row in template if row["sentence"].isascii()]
    spare = lambda row: row["sentence"]  # noqa: E731
    train = [*(row for row in hand if row["sentence"].isascii()), *chosen(english, 8 if quick else 80, spare)]
    scored = [row for row in read(folder / "amr-tiny-eval.jsonl") if row["sentence"].isascii()]
    by_hand = [row for row in penman_rows(folder / "amr-eval.txt") if row["sentence"].isascii()]
    return {
        "train": train,
        "eval": chosen(scored, 4 if quick else 24, spare),
        "by_hand": by_hand[: 1 if quick else None],
        "smatch_tests": penman_rows(data / "amr/smatch/test_input1.txt"),
    }


def penman_rows(path: Path) -> list[Row]:
    """The graphs of a PENMAN file with their sentences."""
    found = []
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        sentence = next((line[8:] for line in block.splitlines() if line.startswith("# ::snt ")), None)
        graph = "\n".join(line for line in block.splitlines() if not line.startswith("#"))
        if sentence and graph.strip():
            found.append({"sentence": sentence, "graph": graph})
    return found


# All of them

COMMON: dict[str, dict[str, Any]] = {
    "model": {"dtype": "float32"},
    "lora": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    "data": {"max_length": 384},
    # Two rows of the greatest length in a micro batch: larger ones are no faster on a CPU and take more memory.
    "train": {"num_train_epochs": 1, "learning_rate": 1e-3, "global_batch_size": 8, "per_device_train_batch_size": 2,
              "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "seed": 0},
    "hardware": {"gpu": "cpu"},
    "checkpoint": {"save_steps": 1_000},
    "evaluate": {"batch_size": 32},
    "lint": {"ignore": {"SCH002": "a run of minutes: its checkpoint and held-out loss come at its end"}},
}  # fmt: skip
"""What the configs of all tasks share. A checkpoint, and with it the held-out loss, comes at the end only."""


def tasks(data: Path) -> dict[str, Task]:
    """Every task, the most important first."""
    found = [
        Task(
            "function_calling", ("function_calling/xlam", "function_calling/bfcl"), prepare_calls,
            {"evaluate": {"max_new_tokens": 96}},
            f"tools and question within {SHORT:,} characters, 200 training rows, no question or tool in both parts",
            judged_by_leaderboard(data),
        ),
        Task(
            "math_reasoning", ("math_code/gsm8k",), prepare_math, {"evaluate": {"max_new_tokens": 128}},
            "80 of GSM8K's training problems, those within 600 characters; 24 of its test problems",
        ),
        Task(
            "code_generation", ("math_code/mbpp",), prepare_code, {"evaluate": {"max_new_tokens": 128}},
            "MBPP's own split, 80 short tasks to learn from, 24 to solve, one greedy answer each",
        ),
        Task(
            "rec_ranking", ("recommendation/ml-latest-small",), prepare_ranking, {"data": {"max_length": 640}},
            "64 training rows; 40 users whose film is among the retriever's twenty; histories of ten films",
            retrieve=("recommendation/ml-latest-small", "--retriever", "window5", "--train-rows", "2000"),
            baseline="retriever",
        ),
        Task(
            "long_summarization", ("legal_summarization",), prepare_summaries,
            {"data": {"too_long": "truncate"}, "evaluate": {"max_new_tokens": 64}},
            "contracts within 1,500 characters, whole documents held out; bills cut to the same 384 tokens",
        ),
        Task(
            "amr_parsing", ("amr/smatch",), prepare_graphs, {"evaluate": {"max_new_tokens": 128}},
            "no corpus may be passed on: sentences of SureFit's own, and the three of smatch's tests",
        ),
    ]  # fmt: skip
    return {task.name: task for task in found}


def write_rows(sets: Mapping[str, Rows], folder: Path) -> dict[str, Path]:
    """Each set as JSON Lines."""
    paths = {name: folder / f"{name}.jsonl" for name in sets}
    for name, path in paths.items():
        write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in sets[name]))
    return paths
