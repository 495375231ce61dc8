"""What the objective decides where the config leaves it open, and the keys that it does not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefit.config.load import load_config
from surefit.config.resolve import write_resolved
from surefit.core.errors import ConfigError
from surefit.facts.disk import disk_terms
from surefit.facts.step_shape import micro_batch_shape
from surefit.stages.checking import run_check
from surefit.stages.run_context import RunContext, load_run_context

RUN = """model: {{name_or_path: surefit/nano}}
data: {{train: surefit/shorter-answers, eval: 0.1, max_length: 128{data}}}
objective: {objective}
train: {{global_batch_size: 16, per_device_train_batch_size: 4{train}}}
output_dir: runs/x
"""


def written(folder: Path, objective: str, train: str = "", data: str = "") -> Path:
    path = folder / "run.yaml"
    path.write_text(RUN.format(objective=objective, train=train, data=data), encoding="utf-8")
    return path


def context(folder: Path, objective: str, train: str = "", data: str = "") -> RunContext:
    found = load_run_context(written(folder, objective, train, data))
    assert found.resolved is not None, found.problems
    return found


@pytest.mark.parametrize(
    ("objective", "method", "beta", "rate"),
    [
        ("dpo", "lora", 0.1, 1e-5),
        ("dpo", "full", 0.1, 1e-6),
        ("{name: dpo, loss_type: ipo}", "lora", 0.1, 1e-5),
        ("{name: dpo, loss_type: sigmoid_norm}", "lora", 5.0, 1e-5),
        ("orpo", "lora", 0.1, 8e-5),
        ("simpo", "full", 2.0, 1e-6),
    ],
)
def test_defaults_belong_to_the_objective(
    tmp_path: Path, objective: str, method: str, beta: float, rate: float
) -> None:
    resolved = context(tmp_path, objective, f", method: {method}, num_train_epochs: auto").resolved
    assert resolved is not None
    config, origins = resolved.config, resolved.provenance
    assert (config.objective.beta, config.train.learning_rate, config.train.num_train_epochs) == (beta, rate, 1.0)
    for key in ("objective.beta", "train.learning_rate", "train.num_train_epochs"):
        assert origins[key].kind == "auto"
        assert len(origins[key].detail) > 10
    assert origins["objective.name"].detail == "run.yaml:3"


def test_what_is_set_stays_and_sft_keeps_its_own(tmp_path: Path) -> None:
    resolved = context(tmp_path, "{name: dpo, beta: 0.3}", ", learning_rate: 2e-4, num_train_epochs: 2").resolved
    assert resolved is not None
    assert (resolved.config.objective.beta, resolved.config.train.learning_rate) == (0.3, 2e-4)
    assert resolved.provenance["train.learning_rate"].kind == "user"
    assert resolved.config.train.num_train_epochs == 2


@pytest.mark.parametrize(
    ("objective", "key"),
    [
        ("{name: dpo, gamma_beta_ratio: 0.7}", "gamma_beta_ratio"),
        ("{name: dpo, loss_type: ipo, label_smoothing: 0.1}", "label_smoothing"),
        ("{name: orpo, sft_weight: 0.5}", "sft_weight"),
        ("{name: orpo, loss_type: ipo}", "loss_type"),
        ("{name: simpo, label_smoothing: 0.1}", "label_smoothing"),
        ("{name: sft, beta: 0.1}", "beta"),
        ("{beta: 0.1}", "beta"),
    ],
)
def test_a_key_that_the_objective_does_not_read_is_an_error_with_its_line(
    tmp_path: Path, objective: str, key: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(written(tmp_path, objective))
    assert (error.value.field, error.value.line) == (f"objective.{key}", 3)


def test_on_the_command_line_it_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(written(tmp_path, "dpo"), ["objective.name=simpo", "objective.label_smoothing=0.1"])
    assert error.value.field == "objective.label_smoothing"


@pytest.mark.parametrize("objective", ["dpo", "simpo", "orpo", "sft"])
def test_resolved_yaml_is_a_config_of_the_same_objective(tmp_path: Path, objective: str) -> None:
    data = ", format: prompt_completion, columns: {completion: chosen}" if objective == "sft" else ""
    resolved = context(tmp_path, objective, data=data).resolved
    assert resolved is not None
    write_resolved(resolved, tmp_path / "resolved.yaml")
    again = load_config(tmp_path / "resolved.yaml").config
    assert again.objective == resolved.config.objective
    assert again.train.learning_rate == resolved.config.train.learning_rate


@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_micro_batch_of_pairs_is_twice_as_many_sequences(tmp_path: Path, packing: str) -> None:
    found = context(tmp_path, "dpo", data=f", packing: {packing}")
    assert found.resolved is not None
    assert found.model is not None
    shape = micro_batch_shape(found.resolved)
    assert (shape.rows, shape.length, shape.micro_batches) == (8, 128, 4)
    half = micro_batch_shape(found.resolved, 64)
    assert (half.tokens, half.micro_batches) == ((1024, 2) if packing == "true" else (512, 4))
    odd = micro_batch_shape(found.resolved, 98)  # 10.4 sequences of that length fill a packed micro batch
    assert odd.rows == (12 if packing == "true" else 8)
    terms = {term.term: term.bytes for term in disk_terms(found.resolved, found.model)}
    assert found.resolved.total_steps is not None
    assert terms["reference"] == 2 * 8 * 16 * found.resolved.total_steps


def test_check_has_nothing_against_the_defaults(tmp_path: Path) -> None:
    report = run_check(context(tmp_path, "dpo"))
    assert [finding for finding in report["findings"] if finding["severity"] == "error"] == []
    assert "SCH006" not in {finding["code"] for finding in report["findings"]}


def test_a_file_written_from_a_whole_config_is_read(tmp_path: Path) -> None:
    path = tmp_path / "whole.yaml"
    path.write_text(json.dumps(load_config(written(tmp_path, "sft")).config.model_dump()), encoding="utf-8")
    assert load_config(path).config.objective.name == "sft"


@pytest.mark.parametrize(
    ("objective", "metric", "measured"),
    [
        ("dpo", "eval_rewards/accuracies", True),
        ("dpo", "eval_perplexity", False),
        ("sft", "eval_perplexity", True),
        ("sft", "eval_rewards/accuracies", False),
    ],
)
def test_the_best_checkpoint_is_chosen_by_what_the_objective_measures(
    tmp_path: Path, objective: str, metric: str, measured: bool
) -> None:
    path = written(tmp_path, objective)
    path.write_text(path.read_text() + f"checkpoint: {{metric_for_best_model: {metric}}}\n", encoding="utf-8")
    codes = {finding["code"] for finding in run_check(load_run_context(path))["findings"]}
    assert ("EVL005" not in codes) is measured


def test_an_option_on_the_command_line_goes_beside_the_short_form(tmp_path: Path) -> None:
    objective = load_config(written(tmp_path, "dpo"), ["objective.beta=0.2"]).config.objective
    assert (objective.name, objective.beta) == ("dpo", 0.2)
