"""Preference configs of TRL, Axolotl, LLaMA-Factory and ms-swift: checked in their terms, and imported.

The files are written for these tests, in the shape of examples/train_lora/qwen3_lora_dpo.yaml (LLaMA-Factory 0.9.5),
examples/qwen2/dpo.yaml (Axolotl 0.19.0), recipes/zephyr-7b-beta/dpo (alignment-handbook),
llama-3-8b-instruct-simpo.yaml (princeton-nlp/SimPO) and examples/train/rlhf/dpo/lora.sh (ms-swift).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefit.cli.other_tools import run_applicable_rules
from surefit.config.resolve import lookup
from surefit.core.errors import ConfigError
from surefit.importers import ImportedConfig, detect_tool, read_tool_config
from surefit.importers.preferences import split_losses
from surefit.importers.write import to_config_yaml
from surefit.lint.engine import all_rules
from surefit.lint.rules.preference import remaining_gradient

COLLECTION = Path(__file__).parents[4] / "shared/data/foreign_configs"
TRL = """model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: a/pairs
output_dir: out
use_peft: true
"""
AXOLOTL = """base_model: Qwen/Qwen2.5-0.5B-Instruct
datasets: [{path: a/pairs, type: chat_template.default}]
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
adapter: lora
lora_dropout: 0.05
"""
LLAMAFACTORY = """model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
do_train: true
dataset: pairs
template: qwen
finetuning_type: lora
output_dir: out
"""
SWIFT = """model: Qwen/Qwen2.5-0.5B-Instruct
tuner_type: lora
dataset: [a/pairs]
use_hf: true
"""
BASES = {"trl": TRL, "axolotl": AXOLOTL, "llamafactory": LLAMAFACTORY, "swift": SWIFT}


def read(tmp_path: Path, tool: str, more: str, name: str = "run.yaml") -> ImportedConfig:
    path = tmp_path / name
    path.write_text(BASES[tool] + more, encoding="utf-8")
    assert detect_tool(path) == tool
    return read_tool_config(path)


def findings(found: ImportedConfig) -> dict[str, list[str]]:
    """Code → the fields that it is about."""
    codes: dict[str, list[str]] = {}
    for finding in run_applicable_rules(found, all_rules())[0].findings:
        codes.setdefault(finding.code, []).append(finding.field or "")
    return codes


def objective(found: ImportedConfig) -> dict[str, Any]:
    assert found.loaded is not None
    section = found.loaded.config.objective
    return {key: value for key, value in section.model_dump().items() if value != type(section)().model_dump()[key]}


IMPORTED = [
    ("trl", "beta: 0.2\n", {"name": "dpo", "beta": 0.2}),
    ("trl", "beta: 0.2\nloss_type: ipo\n", {"name": "dpo", "loss_type": "ipo", "beta": 0.2}),
    ("trl", "beta: 4\nloss_type: [sigmoid_norm]\n", {"name": "dpo", "loss_type": "sigmoid_norm", "beta": 4.0}),
    ("trl", "loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.5]\n", {"name": "dpo", "beta": 0.1, "sft_weight": 0.5}),
    ("axolotl", "rl: dpo\n", {"name": "dpo", "beta": 0.1}),
    ("axolotl", "rl: ipo\nrl_beta: 0.3\n", {"name": "dpo", "loss_type": "ipo", "beta": 0.3}),
    ("axolotl", "rl: dpo\ndpo_loss_type: [ipo]\n", {"name": "dpo", "loss_type": "ipo", "beta": 0.1}),
    ("axolotl", "rl: orpo\norpo_alpha: 0.2\n", {"name": "orpo", "beta": 0.2}),
    (
        "axolotl",
        "rl: simpo\nrl_beta: 2.0\nsimpo_gamma: 0.6\ncpo_alpha: 0.0\n",
        {"name": "simpo", "beta": 2.0, "gamma_beta_ratio": 0.3},
    ),
    (
        "axolotl",
        "rl: simpo\nrl_beta: 0.1\nsimpo_gamma: 1.5\ncpo_alpha: 0.0\n",
        {"name": "simpo", "beta": 0.1, "gamma_beta_ratio": 15.0},
    ),
    ("llamafactory", "stage: dpo\npref_ftx: 0.2\n", {"name": "dpo", "beta": 0.1, "sft_weight": 0.2}),
    (
        "llamafactory",
        "stage: dpo\ndpo_label_smoothing: 0.1\n",
        {"name": "dpo", "beta": 0.1, "label_smoothing": 0.1},
    ),
    ("llamafactory", "stage: dpo\npref_loss: orpo\n", {"name": "orpo", "beta": 0.1}),
    ("llamafactory", "stage: dpo\npref_loss: simpo\n", {"name": "simpo", "beta": 0.1, "gamma_beta_ratio": 5.0}),
    ("swift", "rlhf_type: dpo\nrpo_alpha: 0.1\n", {"name": "dpo", "beta": 0.1, "sft_weight": 0.1}),
    ("swift", "rlhf_type: simpo\n", {"name": "simpo", "beta": 2.0, "sft_weight": 1.0}),
    ("swift", "rlhf_type: orpo\nbeta: 0.3\n", {"name": "orpo", "beta": 0.3}),
    ("swift", "", {}),
    ("trl", "desirable_weight: 1.3\n", {"name": "kto", "beta": 0.1, "desirable_weight": 1.3}),
    ("trl", "loss_type: kto\nbeta: 0.2\n", {"name": "kto", "beta": 0.2}),
    (
        "axolotl",
        "rl: kto\nremove_unused_columns: false\nkto_undesirable_weight: 2.0\nrl_beta: 0.3\n",
        {"name": "kto", "beta": 0.3, "undesirable_weight": 2.0},
    ),
    (
        "llamafactory",
        "stage: kto\nkto_chosen_weight: 1.5\nkto_rejected_weight: 0.5\n",
        {"name": "kto", "beta": 0.1, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    ),
    ("swift", "rlhf_type: kto\ndesirable_weight: 1.2\n", {"name": "kto", "beta": 0.1, "desirable_weight": 1.2}),
]


@pytest.mark.parametrize(("tool", "more", "wanted"), IMPORTED)
def test_the_objective_is_imported(tool: str, more: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    assert objective(read(tmp_path, tool, more)) == pytest.approx(wanted)


def test_the_likelihood_term_of_llamafactory_is_a_mean_per_answer(tmp_path: Path) -> None:
    parts = read(tmp_path, "llamafactory", "stage: dpo\npref_ftx: 0.2\n").parts
    assert any(one.key == "pref_ftx" and "mean loss of each chosen answer" in one.why for one in parts)


@pytest.mark.parametrize(
    ("tool", "more", "reason"),
    [
        ("trl", "beta: 0.1\nloss_type: hinge\n", "sigmoid, ipo and sigmoid_norm"),
        ("trl", "desirable_weight: 1.3\nloss_type: apo_zero_unpaired\n", "not one without a baseline"),
        ("trl", "center_rewards_coefficient: 0.01\n", "does not train reward models yet"),
        ("axolotl", "reward_model: true\n", "does not train reward models yet"),
        ("axolotl", "rl: grpo\n", "not on rewards"),
        ("axolotl", "rl: simpo\nrl_beta: 0.01\nsimpo_gamma: 1.5\n", "gamma_beta_ratio would be 150"),
        ("llamafactory", "stage: dpo\npref_loss: simpo\npref_beta: 0.001\n", "gamma_beta_ratio would be 500"),
        ("llamafactory", "stage: rm\n", "does not train reward models yet"),
        ("llamafactory", "stage: dpo\npref_loss: hinge\n", "sigmoid, ipo and sigmoid_norm"),
        ("llamafactory", "stage: ppo\nreward_model: a/b\n", "not on rewards"),
        ("swift", "rlhf_type: grpo\n", "not on rewards"),
    ],
)
def test_what_surefit_does_not_train_is_said(tool: str, more: str, reason: str, tmp_path: Path) -> None:
    found = read(tmp_path, tool, more)
    assert found.loaded is None
    assert found.setup.preferences is True
    assert any(reason in lost.why for lost in (*found.lost, *found.judged))


def test_dropout_is_not_carried_into_dpo(tmp_path: Path) -> None:
    """The other tools turn it off while they compare with a reference; SureFit's dpo takes none."""
    found = read(tmp_path, "axolotl", "rl: dpo\n")
    assert found.loaded is not None
    assert lookup(found.loaded.config, "lora.lora_dropout") == 0
    assert "# lora_dropout: 0.05" in to_config_yaml(found)


def test_defaults_are_the_objective_s(tmp_path: Path) -> None:
    found = read(tmp_path, "trl", "beta: 0.1\n")
    assert found.loaded is not None
    assert found.loaded.config.train.learning_rate == 1e-6
    supervised = read_tool_config(_written(tmp_path / "sft.yaml", TRL))
    assert supervised.loaded is not None
    assert supervised.loaded.config.train.learning_rate == 2e-5


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


FAULTS = [
    ("trl", "beta: 0.1\npadding_free: true\n", "ARG003", "padding_free"),
    ("trl", "beta: 0.1\nlabel_smoothing: 0.1\n", "ARG003", "label_smoothing"),
    ("trl", "beta: 0.1\nloss_type: [ipo]\nlabel_smoothing: 0.1\n", "ARG003", "label_smoothing"),
    ("trl", "beta: 0.1\nmax_prompt_length: 512\n", "ARG001", "max_prompt_length"),
    ("trl", "beta: 0.1\nprecompute_ref_log_probs: true\nsync_ref_model: true\n", "CFG004", "sync_ref_model"),
    ("trl", "precompute_ref_log_probs: true\ndataset_streaming: true\n", "CFG004", "dataset_streaming"),
    ("trl", "desirable_weight: 1.0\nper_device_train_batch_size: 1\n", "CFG004", "per_device_train_batch_size"),
    ("trl", "desirable_weight: 1.0\ntrain_sampling_strategy: random\n", "CFG004", "train_sampling_strategy"),
    ("trl", "beta: 0.1\ndisable_dropout: false\n", "PRF007", "disable_dropout"),
    ("axolotl", "rl: dpo\ndpo_padding_free: true\n", "ARG003", "dpo_padding_free"),
    ("axolotl", "rl: kto\nremove_unused_columns: false\nprecompute_ref_log_probs: true\n", "ARG003",
     "precompute_ref_log_probs"),
    ("axolotl", "rl: kto\nremove_unused_columns: false\n", "PRF012", "micro_batch_size"),
    ("swift", "rlhf_type: kto\nper_device_train_batch_size: 1\n", "PRF011", "per_device_train_batch_size"),
    ("axolotl", "rl: dpo\ndpo_label_smoothing: 0.1\n", "ARG003", "dpo_label_smoothing"),
    ("axolotl", "rl: dpo\ndpo_use_liger_kernel: true\nprecompute_ref_log_probs: true\n", "CFG004",
     "precompute_ref_log_probs"),
    ("axolotl", "rl: simpo\n", "CFG004", "rl"),
    ("axolotl", "rl: simpo\nsimpo_gamma: 0.5\n", "PRF003", "rl"),
    ("axolotl", "rl: orpo\n", "PRF008", "rl"),
    ("llamafactory", "stage: dpo\npref_loss: simpo\n", "PRF003", "pref_loss"),
    ("llamafactory", "stage: dpo\nadapter_name_or_path: saves/sft\n", "PRF006", "adapter_name_or_path"),
    ("llamafactory", "stage: dpo\npref_loss: orpo\nref_model: a/b\n", "ARG003", "ref_model"),
    ("swift", "rlhf_type: dpo\nadapters: [saves/sft]\n", "PRF006", "adapters"),
    ("swift", "rlhf_type: orpo\nref_model: a/b\n", "CFG004", "ref_model"),
    ("swift", "rlhf_type: dpo\ntrain_type: lora\n", "ARG001", "train_type"),
    ("swift", "rlhf_type: dpo\nwarmup_ratio: 0.1\nwarmup_steps: 5\n", "CFG004", "warmup_steps"),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "more", "code", "field"), FAULTS)
def test_known_faults_of_the_tools_are_said(tool: str, more: str, code: str, field: str, tmp_path: Path) -> None:
    found = read(tmp_path, tool, more)
    codes = {
        (finding.code, found.setup.name(finding.field or ""), finding.line)
        for finding in run_applicable_rules(found, all_rules())[0].findings
    } | {(code_of(problem), problem.field or "", problem.line) for problem in found.problems}
    lines = [line for found_code, name, line in codes if (found_code, name) == (code, field)]
    assert lines == [found.line(field)], codes


def code_of(problem: Any) -> str:
    return "CFG004" if problem.code in ("E3016", "E3017") else str(problem.code)


@pytest.mark.parametrize(
    ("tool", "more"),
    [
        ("trl", "beta: 0.1\nlearning_rate: 1e-5\nnum_train_epochs: 1\n"),
        ("trl", "beta: 0.1\nloss_type: robust\nlabel_smoothing: 0.1\nnum_train_epochs: 1\nlearning_rate: 1e-5\n"),
        ("trl", "desirable_weight: 1.0\nper_device_train_batch_size: 4\nnum_train_epochs: 1\nlearning_rate: 5e-6\n"),
        ("axolotl", "rl: dpo\nlora_model_dir: saves/sft\n"),
        (
            "llamafactory",
            "stage: dpo\nadapter_name_or_path: saves/sft\ncreate_new_adapter: true\nnum_train_epochs: 1\n",
        ),
        ("llamafactory", "stage: kto\nper_device_train_batch_size: 1\nnum_train_epochs: 1\n"),
        ("llamafactory", "stage: dpo\npref_loss: simpo\npref_beta: 10\nsimpo_gamma: 5\nnum_train_epochs: 1\n"),
        ("swift", "rlhf_type: dpo\nadapters: [saves/sft]\nref_adapters: [saves/sft]\nnum_train_epochs: 1\n"),
        ("swift", "rlhf_type: simpo\nnum_train_epochs: 1\n"),
    ],
)
def test_sound_configs_have_no_finding_about_preferences(tool: str, more: str, tmp_path: Path) -> None:
    codes = findings(read(tmp_path, tool, more))
    assert not [code for code in codes if code.startswith("PRF") or code in ("ARG001", "ARG003", "CFG004", "ADP005")]


SCRIPT = """from trl import {kind}
args = {kind}({arguments})
"""


@pytest.mark.parametrize(
    ("kind", "arguments", "wanted", "absent"),
    [
        ("DPOConfig", "'out', beta=5.0", {"PRF002"}, {"PRF003"}),
        ("DPOConfig", "'out', padding_free=True, max_prompt_length=8", {"ARG003", "ARG001"}, set()),
        ("CPOConfig", "'out', loss_type='simpo'", {"PRF003"}, set()),
        ("CPOConfig", "'out', loss_type='simpo', beta=2.5, simpo_gamma=1.375", set(), {"PRF003"}),
        ("CPOConfig", "'out', loss_type='simpo', beta=compute()", set(), {"PRF003"}),
        ("ORPOConfig", "'out'", {"PRF008"}, set()),
        ("KTOConfig", "'out', num_train_epochs=5", {"PRF004"}, set()),
        ("RewardConfig", "'out', num_train_epochs=5", set(), {"PRF004"}),
        ("DPOConfig", "'out', **settings()", set(), {"PRF002", "PRF004"}),
    ],
)
def test_scripts(kind: str, arguments: str, wanted: set[str], absent: set[str], tmp_path: Path) -> None:
    path = _written(tmp_path / "train.py", SCRIPT.format(kind=kind, arguments=arguments))
    codes = set(findings(read_tool_config(path)))
    assert wanted <= codes
    assert not absent & codes


def test_an_older_trl_used_padding_free(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("trl==0.20.0\n")
    path = _written(tmp_path / "train.py", SCRIPT.format(kind="DPOConfig", arguments="'out', padding_free=True"))
    assert "ARG003" not in findings(read_tool_config(path))


@pytest.mark.parametrize("more", ["rlhf_type: dpoo\n", "rlhf_type: []\n", "rlhf_type: dpo\nbeta: abc\n"])
def test_a_value_that_ms_swift_cannot_use(more: str, tmp_path: Path) -> None:
    found = read(tmp_path, "swift", more)
    assert [problem.line for problem in found.problems] == [4 + more.count("\n")]


def test_a_broken_objective_does_not_become_a_supervised_run(tmp_path: Path) -> None:
    assert read(tmp_path, "swift", "rlhf_type: dpoo\n").loaded is None


@pytest.mark.parametrize("text", ["model: a/b\ntuner_type: lora\nlr: 1e-4\nexpert_model_parallel_size: 4\n"])
def test_megatron_swift_is_another_schema(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        detect_tool(_written(tmp_path / "run.yaml", text))
    assert caught.value.code == "E3002"
    assert "Megatron-SWIFT" in caught.value.message


@pytest.mark.parametrize(
    ("beta", "margin", "share"),
    [(0.1, 0.5, 0.962), (2.5, 1.375, 0.307), (2.0, 1.0, 0.368), (10.0, 5.0, 0.0067), (0.1, 0.0, 0.95)],
)
def test_the_share_of_the_gradient_that_is_left(beta: float, margin: float, share: float) -> None:
    assert remaining_gradient(beta, margin) == pytest.approx(share, rel=0.01)
    assert 0 <= remaining_gradient(1e9, -1e9) <= 1


def test_losses_that_are_summed() -> None:
    assert split_losses("ipo", None) == ("ipo", 0.0)
    assert split_losses(["sigmoid", "sft"], [1.0, 0.5]) == ("sigmoid", 0.5)
    assert split_losses(["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0])[0] == "sigmoid + bco_pair + sft"
    assert split_losses(["sigmoid", "sft"], [0.5, 0.5])[0] == "sigmoid + sft"


@pytest.mark.skipif(not COLLECTION.is_dir(), reason="the collection of other tools' configs is not beside")
def test_maintained_preference_configs_have_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    entries = [json.loads(line) for line in (COLLECTION / "index.jsonl").read_text(encoding="utf-8").splitlines()]
    checked = 0
    for entry in entries:
        if entry["tool"] not in ("trl", "axolotl", "llamafactory") or "$" in (COLLECTION / entry["file"]).read_text():
            continue
        try:
            found = read_tool_config(COLLECTION / entry["file"])
        except ConfigError:  # another schema of the same tool: test_collection.py judges that
            continue
        if found.setup.objective is None:
            continue
        checked += 1
        result = run_applicable_rules(found, all_rules())[0]
        assert not result.errors, (entry["file"], result.errors)
    assert checked >= 12
