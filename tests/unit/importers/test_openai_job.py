"""OpenAI's fine-tuning jobs: what is carried over, what is said of the rest, and which are no supervised runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefit.importers import read_tool_config
from surefit.importers.write import to_config_yaml

SUPERVISED = {"n_epochs": 4, "batch_size": 8, "learning_rate_multiplier": 1.8}
JOB: dict[str, Any] = {
    "object": "fine_tuning.job",
    "id": "ftjob-abc123",
    "model": "gpt-4o-mini-2024-07-18",
    "created_at": 1721764800,
    "fine_tuned_model": "ft:gpt-4o-mini:org:faq:abc",
    "organization_id": "org-123",
    "result_files": ["file-abc"],
    "status": "succeeded",
    "validation_file": None,
    "training_file": "file-abc123",
    "trained_tokens": 5768,
    "hyperparameters": SUPERVISED,
    "method": {"type": "supervised", "supervised": {"hyperparameters": SUPERVISED}},
    "seed": 683058546,
    "user_provided_suffix": "faq bot",
    "integrations": [],
    "metadata": {"team": "support"},
}


def read(tmp_path: Path, job: dict[str, Any]):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job, indent=1), encoding="utf-8")
    return read_tool_config(path)


def test_epochs_batch_and_seed_are_carried(tmp_path):
    found = read(tmp_path, JOB)
    assert (found.tool, found.problems) == ("openai", ())
    assert found.loaded is not None
    config = yaml.safe_load(to_config_yaml(found))
    assert config["train"] == {"num_train_epochs": 4.0, "global_batch_size": 8, "seed": 683058546}
    assert config["output_dir"] == "runs/faq-bot"
    said = {key.key: key.why for key in (*found.lost, *found.judged, *found.parts)}
    assert "not comparable" in said["method.supervised.hyperparameters.learning_rate_multiplier"]
    assert "data.train" in said["training_file"]
    assert "model" in said
    assert "fine_tuned_model" in said
    assert found.setup.unknown == ()


@pytest.mark.parametrize("place", ["hyperparameters", "method"])
def test_a_request_with_auto(tmp_path, place):
    values = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
    inside = values if place == "hyperparameters" else {"type": "supervised", "supervised": {"hyperparameters": values}}
    found = read(tmp_path, {"model": "gpt-4.1-nano", "training_file": "rows.jsonl", "suffix": "x", place: inside})
    assert found.loaded is not None
    config = found.loaded.config
    assert (config.train.num_train_epochs, config.train.global_batch_size) == ("auto", "auto")
    assert config.data.train == "rows.jsonl"
    assert not [part for part in found.parts if part.key == "training_file"], "a file that is here needs no word"


@pytest.mark.parametrize("method", ["dpo", "reinforcement"])
@pytest.mark.parametrize("named", [True, False])
def test_other_methods_are_no_supervised_runs(tmp_path, method, named):
    inside = {method: {"hyperparameters": {"beta": 0.1}}} | ({"type": method} if named else {})
    found = read(tmp_path, {"model": "gpt-4o", "training_file": "file-a", "method": inside})
    assert found.loaded is None
    (problem,) = found.problems
    assert method in problem.message
    assert str(problem.field).startswith("method.")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hyperparameters": {"n_epochs": "many"}}, "hyperparameters.n_epochs"),
        ({"hyperparameters": {"batch_size": [3]}}, "hyperparameters.batch_size"),
        ({"training_file": 3}, "training_file"),
        ({"validation_file": ["file-a"]}, "validation_file"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_values_that_are_none(tmp_path, changes, field):
    job = {key: value for key, value in JOB.items() if key not in ("method", "hyperparameters")} | changes
    assert [problem.field for problem in read(tmp_path, job).problems] == [field]


def test_a_job_as_the_api_returns_it_is_told_once(tmp_path):
    """The API repeats the hyperparameters, gives the other methods as null, and its ids may have hyphens."""
    job = JOB | {"training_file": "file-5cf2-ab", "user_provided_suffix": None}
    job["method"] = {"dpo": None, "reinforcement": None, "supervised": {"hyperparameters": SUPERVISED}}
    found = read(tmp_path, job)
    assert found.problems == ()
    keys = [key.key for key in (*found.lost, *found.judged)]
    assert [key for key in keys if key.endswith("learning_rate_multiplier")] == [
        "method.supervised.hyperparameters.learning_rate_multiplier"
    ]
    text = to_config_yaml(found)
    config = yaml.safe_load(text)
    assert config["train"]["num_train_epochs"] == 4.0
    assert config["data"]["train"] == "train.jsonl"
    comment = next(line for line in text.splitlines() if line.startswith("output_dir")).partition("#")[2]
    assert "default of" not in comment
    assert "\n# hyperparameters.n_epochs" not in text


def test_hyperparameters_that_differ_are_both_read(tmp_path):
    found = read(tmp_path, JOB | {"hyperparameters": SUPERVISED | {"learning_rate_multiplier": 2.5}})
    lost = {key.key: key.value for key in (*found.lost, *found.judged)}
    assert lost["hyperparameters.learning_rate_multiplier"] == 2.5
    assert lost["method.supervised.hyperparameters.learning_rate_multiplier"] == 1.8


@pytest.mark.parametrize("newer_first", [False, True])
def test_a_contradicted_value_is_named_and_the_newer_section_counts(tmp_path, newer_first):
    sections = {
        "hyperparameters": SUPERVISED | {"n_epochs": 2},
        "method": {"type": "supervised", "supervised": {"hyperparameters": SUPERVISED}},
    }
    names = list(sections)[::-1] if newer_first else list(sections)
    rest = {key: value for key, value in JOB.items() if key not in sections}
    found = read(tmp_path, rest | {name: sections[name] for name in names})
    assert yaml.safe_load(to_config_yaml(found))["train"]["num_train_epochs"] == 4.0
    said = {part.key: part for part in found.parts}
    assert "is 4" in said["hyperparameters.n_epochs"].why
    assert "hyperparameters.batch_size" not in said
