"""The model card: front matter that the hub reads, facts against the model, and nothing that must not leave."""

from __future__ import annotations

import json

import pytest
import yaml
from huggingface_hub import ModelCard

from surefit.config.schema import ModelSection
from surefit.core.rundir import RunDir, read_json, write_json
from surefit.merge.origin import hub_id, license_of
from surefit.recipes.function_calling import RECIPE
from surefit.report.model_card import CardContext, render_model_card

SECRET = "hf_" + "a" * 30
RESOLVED = """
model:
  name_or_path: /home/me/models/base  # user run.yaml:1
  dtype: bfloat16  # default
train:
  method: lora  # default
data:
  train: /srv/private data/rows.jsonl  # user run.yaml:2
  eval: ../rows/eval.jsonl  # user run.yaml:3
telemetry:
  mlflow_uri: http://tracker.internal:5000  # user run.yaml:4
output_dir: /home/me/runs/one  # user run.yaml:5
"""


def estimate(mean):
    return {"mean": mean, "ci95": [mean - 0.05, mean + 0.05], "n": 40}


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    run.resolved.write_text(RESOLVED)
    sets, paired = {}, {"metric": "exact_match", "wins": 1, "losses": 9, "ties": 30}
    for name, base, tuned, low, high in (("eval", 0.2, 0.7, 0.4, 0.6), ("old_tools", 0.7, 0.5, -0.3, -0.1)):
        sets[name] = {
            "n": 40,
            "variants": {"base": {"exact_match": estimate(base)}, "merged": {"exact_match": estimate(tuned)}},
            "comparisons": [paired | {"a": "base", "b": "merged", "difference": tuned - base, "ci95": [low, high]}],
        }
        record = {"set": name, "variant": "merged", "n": 40, "metrics": {"exact_match": estimate(tuned)},
                  "truncated": 3, "unparsed": 0, "decoding": {"max_new_tokens": 96}}  # fmt: skip
        write_json(run.eval / name / "merged.json", record)
        lines = json.dumps({"index": 0, "prompt": "the private prompt", "text": "the answer", "gold": "the gold row"})
        (run.eval / name / "merged.predictions.jsonl").write_text(lines + "\n")
    write_json(run.eval_summary, {"primary_metric": "exact_match", "sets": sets, "gate": None, "left_out": []})
    seen = {"rows": 4, "of": 100, "examples": ["the private prompt"], "detail": "the private prompt"}
    passport = {"source": "/srv/private/rows.jsonl", "sha256": "c" * 64, "rows": 100, "audited": 100, "usable": 98,
                "observations": {"exact_duplicates": seen}}  # fmt: skip
    write_json(run.passport, passport)
    return run


CERTIFICATE = {
    "passed": True,
    "reason": "every check passed",
    "prompts": 32,
    "base": {"name": "/home/me/models/base"},
    "checks": [{"name": "base_identity", "value": "ab" * 32, "threshold": "ab" * 32, "comparison": "==",
                "passed": True, "why": f"trained from /home/me/models/base, {SECRET}"}],
}  # fmt: skip


def about(**changes):
    known = {"name": "one", "recipe": RECIPE, "base": "Qwen/Qwen3-4B", "base_name": "Qwen/Qwen3-4B",
             "license": "apache-2.0", "datasets": ["Salesforce/xlam"], "format": "hub"}  # fmt: skip
    return CardContext(**{**known, **changes})


def test_the_hub_reads_the_front_matter(run):
    card = ModelCard(render_model_card(run, about(), CERTIFICATE, run.path))
    data = card.data
    assert (data.base_model, data.license, data.datasets) == ("Qwen/Qwen3-4B", "apache-2.0", ["Salesforce/xlam"])
    assert data.library_name == "transformers"
    assert data.base_model_relation == "finetune"
    results = {(r.dataset_type, r.metric_type): (r.metric_value, r.metric_name) for r in data.eval_results}
    assert results["eval", "exact_match"] == (0.7, "exact_match (95 % interval 0.650 to 0.750)")
    assert results["old_tools", "exact_match"][0] == 0.5


def test_no_base_on_the_hub_no_base_in_the_front_matter(run):
    text = render_model_card(run, about(base=None, base_name="base", license=None, datasets=[]), CERTIFICATE, run.path)
    front = yaml.safe_load(text.split("---")[1])
    assert not {"base_model", "license", "datasets"} & front.keys()
    assert "`base` (not on the hub)" in text


def test_nothing_private_is_in_it(run):
    text = render_model_card(run, about(), CERTIFICATE, run.path)
    assert "| data.eval | eval.jsonl |" in text
    for private in ("/home/me", "/srv", "private data/", "the private prompt", "the gold row", "the answer",
                    "tracker.internal", "output_dir", SECRET, str(run.path)):  # fmt: skip
        assert private not in text, private


def test_the_facts_against_it_are_said(run):
    text = render_model_card(run, about(), CERTIFICATE, run.path)
    limits = text.partition("## Limitations")[2].partition("## How")[0]
    assert "On `eval`, 3 of 40 answers were truncated at the limit of 96 new tokens" in limits
    assert "-20.0 [-30.0, -10.0] points" in limits
    assert "no clear difference" not in limits


def test_it_names_the_metric_that_decided(run):
    assert "The primary metric is exact match." in render_model_card(run, about(), CERTIFICATE, run.path)
    summary = read_json(run.eval_summary)
    summary["sets"]["eval"]["primary_metric"] = "answer_likelihood"
    write_json(run.eval_summary, summary)
    assert "The primary metric is answer likelihood." in render_model_card(run, about(), CERTIFICATE, run.path)


def test_scores_certificate_and_passport_are_tables(run):
    text = render_model_card(run, about(), CERTIFICATE, run.path)
    assert "| **exact_match** | 0.200 [0.150, 0.250] | 0.700 [0.650, 0.750] |" in text
    assert "| base identity | abababababab… | == | abababababab… |" in text
    assert "| exact duplicates | 4 | 100 |" in text
    assert "100 rows of `rows.jsonl`" in text


def test_a_conversion_says_what_it_is(run):
    measured = {"positions": 900, "top1_agreement": 0.97, "kl_mean": 0.01, "logit_error_mean": 0.1,
                "logit_error_max": 2.0, "logit_deviation": 3.0}  # fmt: skip
    own = {"against": "merged", "how": "bitsandbytes, NF4", "prompts": 32, "measured": measured, "merge": CERTIFICATE}
    text = render_model_card(run, about(format="nf4"), own, run.path)
    front = yaml.safe_load(text.split("---")[1])
    assert front["base_model_relation"] == "quantized"
    assert "| top1 agreement | 0.97 |" in text
    assert "predicts the same next token in 97.0 % of cases. Its task metric was not measured" in text
    lines = [{"metric": "exact_match", "score": "0.690 [0.6, 0.7]", "difference": "-0.010 [-0.02, +0.00]"}]
    scored = render_model_card(run, about(format="nf4", score={"n": 40, "lines": lines}), own, run.path)
    assert "| exact_match | 0.690 [0.6, 0.7] | -0.010 [-0.02, +0.00] |" in scored


def test_an_empty_run_has_a_card(tmp_path):
    text = render_model_card(RunDir(tmp_path), about(), CERTIFICATE, tmp_path)
    assert "It has not been scored" in text
    assert "`surefit audit` was not run" in text


def test_where_the_base_comes_from(tmp_path):
    (tmp_path / "config.json").write_text('{"license": "mit"}')
    local = ModelSection(name_or_path=str(tmp_path))
    assert (hub_id(local), license_of(local)) == (None, "mit")
    (tmp_path / "README.md").write_text("---\nlicense: gemma\n---\n# base\n")
    assert license_of(local) == "gemma"
    nano = ModelSection(name_or_path="surefit/nano")
    assert (hub_id(nano), license_of(nano)) == (None, "apache-2.0")
    assert hub_id(ModelSection(name_or_path="Qwen/Qwen3-4B")) == "Qwen/Qwen3-4B"


def test_html_in_a_name_is_shown_and_not_run(run):
    """The hub renders HTML in a card; names of runs, sets and models are whatever somebody wrote."""
    text = render_model_card(
        run, about(name="<img src=x onerror=alert(1)>", base_name="</code><script>1</script>"), CERTIFICATE, run.path
    )
    assert "<img" not in text
    assert "<script" not in text
    assert "</code>" not in text
    assert "&lt;img src=x" in text
