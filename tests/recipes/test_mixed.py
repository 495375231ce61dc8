"""Several tasks in one run: each row by its own task's rules, one gate."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.cli.conftest import call

from surefit import recipes
from surefit.config.schema import GateSection
from surefit.core.errors import ConfigError, DataError
from surefit.data.read.load import Rows, load_rows
from surefit.data.read.readers import RowWithPlace
from surefit.data.rows.layouts import to_examples, to_prompts
from surefit.evaluate.estimates import compute_estimates
from surefit.evaluate.gate import evaluate_gate
from surefit.evaluate.paired import paired_differences
from surefit.evaluate.stats import mean_of_estimates
from surefit.stages.eval_prompts import load_eval_prompt_facts
from surefit.stages.run_context import load_run_context
from surefit.task import Prediction

MIXED = recipes.get_recipe("math_reasoning + code_generation")
MATH = {"question": "Ann has 3 boxes of 4 figs. How many figs?", "answer": "3 * 4 = 12\n#### 12"}
CODE = {
    "task_id": 1,
    "text": "Write a function double(x).",
    "code": "def double(x):\n    return 2 * x",
    "test_list": ["assert double(3) == 6"],
}
CHAT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}


def rows(*values: dict[str, object]) -> Rows:
    return Rows("rows.jsonl", [RowWithPlace(row, "rows.jsonl", n) for n, row in enumerate(values, start=1)], (), "0")


def test_a_row_is_shown_parsed_and_scored_as_in_a_run_of_its_task_alone() -> None:
    for name, row, answer in (
        ("math_reasoning", MATH, "so\n#### 12"),
        ("math_reasoning", MATH, "twelve"),
        ("code_generation", CODE, "def double(x):\n    return x + x"),
        ("code_generation", CODE, "def double(x):\n    return x"),
    ):
        alone = recipes.get_recipe(name)
        (example,) = to_examples(rows(row), MIXED)
        assert example.part == name
        assert MIXED.of(example) is alone
        own = alone.to_example(row)
        assert (example.messages, example.completion) == (own.messages, own.completion)
        prediction = Prediction(answer, parsed=alone.parse(answer))
        scores = alone.score(own, prediction)
        found = MIXED.score(example, prediction)
        assert found == {f"{name}.{metric}": value for metric, value in scores.items()} | {
            "mean_of_tasks": scores[alone.primary_metric]
        }


def test_many_rows_are_scored_at_once_where_a_task_can() -> None:
    recipe = recipes.get_recipe("long_summarization + math_reasoning")
    document = {"document": "The court grants the appeal. It orders costs.", "summary": "The appeal is granted."}
    examples = to_examples(rows(document, MATH, document), recipe)
    texts = ("The appeal is granted with costs.", "#### 12", "No.")
    pairs = [(e, Prediction(t, parsed=recipe.of(e).parse(t))) for e, t in zip(examples, texts, strict=True)]
    assert recipe.score_many is not None
    assert list(recipe.score_many(pairs)) == [recipe.score(*pair) for pair in pairs]


def test_a_task_with_corpus_scores_keeps_them() -> None:
    recipe, alone = recipes.get_recipe("amr_parsing + math_reasoning"), recipes.get_recipe("amr_parsing")
    graph = {"sentence": "The boy sleeps.", "graph": "(s / sleep-01 :ARG0 (b / boy))"}
    examples = to_examples(rows(graph, MATH, graph), recipe)
    texts = ("(s / sleep-01)", "#### 12", "(")
    pairs = [(e, Prediction(t, parsed=recipe.of(e).parse(t))) for e, t in zip(examples, texts, strict=True)]
    scores, own = [recipe.score(*pair) for pair in pairs], [alone.score(*pairs[n]) for n in (0, 2)]
    found, expected = compute_estimates(scores, recipe), compute_estimates(own, alone)
    assert {name: found[f"amr_parsing.{name}"] for name in expected} == expected
    mean = (expected[alone.primary_metric].mean + 1) / 2
    assert found["mean_of_tasks"].mean == pytest.approx(mean)
    assert recipe.aggregate(scores)["mean_of_tasks"] == pytest.approx(mean)


def test_general_formats_are_the_task_of_rows_that_are_no_others() -> None:
    recipe = recipes.get_recipe("math_reasoning+chat")
    assert recipe.name == "math_reasoning + chat"
    alpaca = {"instruction": "Say hi", "output": "hi"}
    assert [e.part for e in to_examples(rows(CHAT, MATH, alpaca), recipe)] == ["chat", "math_reasoning", "chat"]
    question = {"question": MATH["question"]}
    assert [e.part for e in to_prompts(rows(question, CHAT), recipe)] == ["math_reasoning", "chat"]


def test_a_row_of_no_task_or_of_two_is_named() -> None:
    with pytest.raises(DataError, match=r"no task of this run: document, summary") as caught:
        to_examples(rows(MATH, {"document": "a", "summary": "b"}), MIXED)
    assert (caught.value.path, caught.value.line) == ("rows.jsonl", 2)
    assert "code_generation: task_id" in caught.value.help
    with pytest.raises(DataError, match="the columns of two tasks"):
        to_examples(rows(MATH | CODE), MIXED)
    assert to_examples(rows({**MATH, "task_id": None}), MIXED)[0].part == "math_reasoning", "a null column is none"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chat + chat", "named twice"),
        ("chat + rec_ranking", "rec_ranking ranks labels"),
        ("chat + maths", "no recipe 'maths'"),
        ("chat +", "no recipe ''"),
    ],
)
def test_what_cannot_be_mixed(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        recipes.get_recipe(name)
    assert caught.value.field == "recipe"


def test_the_mean_of_tasks_weighs_tasks_and_not_rows() -> None:
    """90 of 100 problems and 1 of 10 programs: (0.9 + 0.1) / 2, and each interval is that of the task alone."""
    right, wrong = {"exact_match": 1.0}, {"exact_match": 0.0}
    alone = [right] * 90 + [wrong] * 10
    scores = [{"math_reasoning.exact_match": row["exact_match"]} for row in alone]
    scores += [{"code_generation.pass@1": 1.0}] + [{"code_generation.pass@1": 0.0}] * 9
    found = compute_estimates(scores, MIXED)
    assert found["mean_of_tasks"].mean == pytest.approx(0.5)
    assert found["mean_of_tasks"].n == 110
    assert (
        found["math_reasoning.exact_match"]
        == compute_estimates(alone, recipes.get_recipe("math_reasoning"))["exact_match"]
    )
    low, high = (found["mean_of_tasks"].low, found["mean_of_tasks"].high)
    below = [0.9 - found["math_reasoning.exact_match"].low, 0.1 - found["code_generation.pass@1"].low]
    assert low == pytest.approx(0.5 - math.hypot(*below) / 2)
    assert 0 <= low < 0.5 < high <= 1


def test_the_interval_of_the_mean_holds_the_truth_as_often_as_it_says() -> None:
    """Two tasks of 60 and 40 rows, 1,000 times: 95 % within three standard errors (0.7 points)."""
    import numpy as np

    rng, held = np.random.default_rng(0), 0
    for _ in range(1_000):
        tasks = []
        for share, n in ((0.8, 60), (0.3, 40)):
            value = rng.binomial(n, share) / n
            half = 1.96 * math.sqrt(share * (1 - share) / n)
            tasks.append((value, value - half, value + half))
        _, low, high = mean_of_estimates(tasks)
        held += low <= 0.55 <= high
    assert 0.929 <= held / 1_000 <= 0.971


def test_one_gate_asks_every_task() -> None:
    """Far better at mathematics and surely worse at code: the mean rises, and the gate fails."""

    def scored(right_math: int, right_code: int) -> list[dict[str, float]]:
        return [{"math_reasoning.exact_match": float(n < right_math)} for n in range(100)] + [
            {"code_generation.pass@1": float(n < right_code)} for n in range(100)
        ]

    base, tuned = scored(10, 60), scored(90, 30)
    assert paired_differences("base", "model", base, tuned, MIXED)["mean_of_tasks"].low > 0.15
    variants = {"base": base, "model": tuned}
    verdict = evaluate_gate(GateSection(not_worse_than="base"), MIXED, variants, None)
    assert not verdict["passed"]
    assert "code_generation.pass@1 -0.300" in verdict["reason"]
    metric = GateSection(metric="math_reasoning.exact_match", not_worse_than="base")
    assert evaluate_gate(metric, MIXED, variants, None)["passed"]
    assert evaluate_gate(GateSection(not_worse_than="base"), MIXED, {"base": base, "model": scored(90, 60)}, None)[
        "passed"
    ]


CONFIG = """
recipe: math_reasoning + code_generation
model: {name_or_path: surefit/nano}
data: {train: rows, eval: held-out, max_length: 256}
train: {max_steps: 2, num_train_epochs: 10, global_batch_size: 4}
evaluate: {max_new_tokens: 12, gate: {not_worse_than: base}}
output_dir: run
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config as a user types it, and directories with a file of each task."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    for place, count, first in (("rows", 12, 0), ("held-out", 4, 50)):
        (tmp_path / place).mkdir()
        for name in ("math-reasoning", "code-generation"):
            chosen = load_rows(f"surefit/{name}-train")[first : first + count]
            text = "".join(json.dumps(row) + "\n" for row in chosen)
            (tmp_path / place / f"{name}.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_a_run_of_two_tasks(folder: Path) -> None:
    answer = call("run", "run.yaml", "--json", "--set", "data.max_length=320")
    assert answer.code in (0, 1, 5), answer.text  # the gate, on eight rows
    summary = json.loads((folder / "run/eval/summary.json").read_text())
    metrics = summary["sets"]["eval"]["variants"]["merged"]
    assert {"mean_of_tasks", "math_reasoning.exact_match", "code_generation.pass@1"} <= metrics.keys()
    assert summary["sets"]["eval"]["n"] == 8
    assert "code_generation.pass@1" in summary["gate"]["reason"]
    assert "math_reasoning + code_generation" in (folder / "run/report.html").read_text()
    # What was answered to the problems, judged by their task alone, has the same score.
    lines = [json.loads(line) for line in (folder / "run/eval/eval/merged.predictions.jsonl").read_text().splitlines()]
    problems = [{"text": line["text"]} for line in lines if "math_reasoning.exact_match" in line["scores"]]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in problems), encoding="utf-8")
    files = ("--predictions", "answers.jsonl", "--references", "held-out/math-reasoning.jsonl")
    told = call("score", "--recipe", "math_reasoning", *files, "--json")
    alone = told.json["metrics"]["exact_match"]
    assert (alone["mean"], alone["ci95"]) == tuple(metrics["math_reasoning.exact_match"].values())
    compared = call("compare", "run:base", "run:merged", "--json")
    assert compared.code == 0, compared.text
    assert compared.json["metrics"]["code_generation.pass@1"]["mcnemar_p"] == 1.0
    assert compared.json["metrics"]["mean_of_tasks"]["detectable"] > 0


def test_check_finds_a_task_without_rows_and_advises_the_mixture(folder: Path) -> None:
    (folder / "held-out/code-generation.jsonl").unlink()
    answer = call("check", "run.yaml")
    assert answer.code == 1
    assert "run.yaml:4: error[DAT001] data.eval: code_generation has no rows held out" in answer.text
    answer = call("check", "run.yaml", "--set", "data.train=rows/math-reasoning.jsonl", "--set", "data.eval=0.2")
    assert "data.train: code_generation has no rows to train on" in answer.text
    only = ("--set", "recipe=math_reasoning", "--set", "data.train=rows/math-reasoning.jsonl", "--set", "data.eval=0.2")
    answer = call("check", "run.yaml", *only, "--set", "data.mix={rows/code-generation.jsonl: 1}")
    assert "write recipe: math_reasoning + code_generation" in answer.text


def test_a_share_is_held_out_of_every_source(folder: Path) -> None:
    mixed = ("data.train=rows/math-reasoning.jsonl", "data.mix={rows/code-generation.jsonl: 1}", "data.eval=0.3")
    settings = [word for one in mixed for word in ("--set", one)]
    assert call("check", "run.yaml", *settings).code == 0
    answer = call("evaluate", "run.yaml", *settings, "--variant", "base", "--json")
    assert answer.code == 0, answer.text
    metrics = json.loads((folder / "run/eval/summary.json").read_text())["sets"]["eval"]["variants"]["base"]
    assert {"math_reasoning.exact_match", "code_generation.pass@1"} <= metrics.keys()


def test_rows_of_all_sources_count(folder: Path) -> None:
    """12 rows of each task: a batch of 20 and a half held out are fine; of 12 rows neither would be."""
    mixed = ("data.train=rows/math-reasoning.jsonl", "data.mix={rows/code-generation.jsonl: 1}", "data.eval=0.5")

    def found(*more: str) -> dict[str, str]:
        settings = [word for one in (*mixed, *more) for word in ("--set", one)]
        answer = call("check", "run.yaml", *settings, "--json")
        return {one["code"]: one["message"] for one in answer.json["findings"] if one["code"] in ("BAT002", "DAT006")}

    assert found("train.global_batch_size=20") == {}
    few = found("train.global_batch_size=30", "data.eval=0.3")
    assert few["BAT002"].startswith(
        "the global batch of 30 exceeds the 24 rows in rows/math-reasoning.jsonl and data.mix"
    )
    assert few["DAT006"].startswith("0.3 of 24 rows holds out about 7")
    twice = found("train.global_batch_size=30", "data.mix={rows/code-generation.jsonl: 2}")
    assert twice == {}, "an epoch sees 36"
    only = found("recipe=math_reasoning", "data.mix={}", "train.global_batch_size=20")
    assert "the 12 rows in rows/math-reasoning.jsonl:" in only["BAT002"]
    assert "0.5 of 12 rows" in only["DAT006"]
    asked = scored_facts_of(folder / "run.yaml", mixed)
    assert asked == 12, "half of both"


def scored_facts_of(path: Path, settings: tuple[str, ...]) -> int | None:
    """Prompts that are held out, as `plan` counts them."""
    found = load_run_context(path, settings)
    facts, _ = load_eval_prompt_facts(found.loaded.config, found.recipe, found.rows, None, None, found.mixed)
    assert facts is not None
    return facts.sets[0].prompts


def test_audit_reads_each_row_by_its_task(folder: Path) -> None:
    answer = call("audit", "run.yaml", "--json")
    assert answer.code == 0, answer.text
    assert answer.json["usable"] == 24
