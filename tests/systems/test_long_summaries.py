"""A published project, its failures one by one: summaries of 200,000-token legal documents on four cards."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.config.schema import DataSection, ModelSection
from surefit.data.rows.layouts import read_splits
from surefit.data.tokens.dataset import build_dataset
from surefit.model.tokenizer import load_tokenizer
from surefit.recipes import get_recipe

RUN = """
recipe: chat
model: {name_or_path: surefit/nano}
data: {train: rows.jsonl, max_length: 256}
train: {learning_rate: 1e-3, global_batch_size: 8}
output_dir: runs/summaries
"""
TRL = """
model_name_or_path: surefit/nano
dataset_name: rows.jsonl
max_length: 256
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 86
learning_rate: 2.0e-4
use_peft: true
save_total_limit: 2
save_steps: 40
output_dir: out
"""


def test_max_seq_length_was_a_tuple(check) -> None:
    """`MAX_SEQ_LENGTH = 262144,` makes a list of one."""
    (said,) = check(RUN.replace("max_length: 256", "max_length: [262144]"))
    assert "data.max_length" in said
    assert check(TRL.replace("max_length: 256", "max_length: [262144]"), "trl.yaml") & {"CFG004"}
    assert check(RUN) == set()


def test_invalid_trainer_arguments(check) -> None:
    assert "ARG001" in check(TRL + "evaluation_strategy: 'no'\n", "trl.yaml")
    assert "ARG002" in check(TRL + "gradient_acumulation: 4\n", "trl.yaml")
    assert check(TRL, "trl.yaml") == set()


def test_filter_by_characters_instead_of_tokens(judge) -> None:
    assert judge(tool="trl", max_length=4096, length_unit="characters") == {"LAB005"}
    assert judge(tool="trl", max_length=4096, length_unit="tokens") == set()


LONG = """
recipe: chat
model: {name_or_path: Qwen/Qwen3-4B}
data: {train: rows.jsonl, max_length: LENGTH}
train: {global_batch_size: 4, per_device_train_batch_size: MICRO}
hardware: {gpu: a100-80}
output_dir: runs/long
"""


WHOLE_LOGITS = "speed: {chunked_loss: false}\n"


def test_batch_4_out_of_memory(check) -> None:
    assert "MEM002" in check(LONG.replace("LENGTH", "32768").replace("MICRO", "4") + WHOLE_LOGITS)
    assert "MEM002" not in check(LONG.replace("LENGTH", "4096").replace("MICRO", "1") + WHOLE_LOGITS)


def test_the_plan_left_out_the_logits(check) -> None:
    """262,144 × 151,936 logits are 80 GB in bfloat16 alone; the plan said 59 GB per GPU."""
    assert "MEM002" in check(LONG.replace("LENGTH", "262144").replace("MICRO", "1") + WHOLE_LOGITS)


def test_longer_than_the_models_context(check) -> None:
    assert "MOD007" in check(LONG.replace("LENGTH", "262144").replace("MICRO", "1"))


def test_text_generation_inside_the_training_loop(check) -> None:
    trainer = "model_name_or_path: surefit/nano\nstage: sft\ndo_train: true\ndataset: rows\nfinetuning_type: lora\n{}"
    trainer += "learning_rate: 2.0e-4\nsave_total_limit: 2\ncutoff_len: 256\noutput_dir: out\neval_strategy: epoch\n"
    assert "MEM005" in check(trainer.format("predict_with_generate: true\n"), "llamafactory.yaml")
    assert "MEM005" not in check(trainer.format(""), "llamafactory.yaml")


def test_loss_on_the_whole_document_instead_of_the_summary(judge) -> None:
    faulty = {"tool": "axolotl", "conversations": True, "loss_on": "all"}
    assert judge(**faulty) == {"LAB001"}
    assert judge(**faulty | {"loss_on": "completion"}) == set()


def test_right_truncation_cut_the_summary_off(judge, check, tmp_path) -> None:
    """Elsewhere it is a finding; SureFit never cuts an answer: it leaves the example out, and counts it."""
    assert judge(tool="trl", max_length=512, truncation_side="right", loss_on="completion") == {"LAB004"}
    check(RUN)
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()[:40]]
    rows[0]["prompt"] = "A very long document. " * 400
    Path("long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, _ = read_splits(DataSection(train="long.jsonl", eval=0.25), get_recipe("chat"), seed=0)
    data = build_dataset(
        train, load_tokenizer(ModelSection(name_or_path="surefit/nano")), max_length=256, cache=tmp_path
    )
    assert data.stats.kept + data.stats.dropped_too_long == len(train)
    assert data.stats.longest <= 256


def test_only_a_document_can_be_cut(check) -> None:
    """Where rows are to be cut after all, the recipe says which part may go; without one, the check says so."""
    asked = RUN.replace("max_length: 256", "max_length: 256, too_long: truncate")
    assert "DAT001" in check(asked)
    rows = [{"document": "The tower of Oslo is named. " * 90, "summary": f"Names tower {n}."} for n in range(40)]
    Path("bills.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summaries = asked.replace("recipe: chat", "recipe: long_summarization").replace("rows.jsonl", "bills.jsonl")
    assert not {"DAT001", "LAB003", "LAB010"} & check(summaries)
    assert "LAB010" in check(summaries.replace("too_long: truncate", "too_long: drop"))


def test_the_limit_removed_every_answer(check) -> None:
    assert "LAB010" in check(RUN.replace("max_length: 256", "max_length: 8"))


def test_dropout_is_not_an_argument_of_loraconfig(check) -> None:
    adapter = {
        "peft_type": "LORA",
        "base_model_name_or_path": "org/model",
        "revision": "abc",
        "r": 64,
        "lora_alpha": 64,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    assert "ARG002" in check(json.dumps(adapter | {"dropout": 0.05}), "adapter_config.json")
    assert check(json.dumps(adapter | {"lora_dropout": 0.05}), "adapter_config.json") == set()
    (said,) = check(RUN + "lora: {dropout: 0.05}\n")
    assert "lora.dropout" in said


def test_warmup_longer_than_the_run(check) -> None:
    assert "SCH001" in check(TRL + "warmup_steps: 100\n", "trl.yaml")
    assert check(TRL + "warmup_steps: 8\n", "trl.yaml") == set()
    assert "SCH001" in check(RUN.replace("global_batch_size: 8}", "max_steps: 86, warmup_steps: 100}"))


def test_no_evaluation_ever_ran(check) -> None:
    """Every 200 steps, in a run of 86."""
    assert "SCH005" in check(TRL + "eval_strategy: steps\neval_steps: 200\n", "trl.yaml")
    assert check(TRL + "eval_strategy: steps\neval_steps: 40\n", "trl.yaml") == set()
    late = RUN.replace("global_batch_size: 8}", "max_steps: 86}") + "checkpoint: {save_steps: 200}\n"
    assert "SCH002" in check(late)


def test_the_collator_overwrote_the_masked_labels(judge) -> None:
    """Elsewhere a finding; in SureFit the very tensors are compared before step 1 (LAB007)."""
    collator = "DataCollatorForLanguageModeling"
    assert judge(tool="trl", loss_on="completion", collator=collator) == {"LAB002"}
    assert judge(tool="trl", loss_on="completion", collator="DataCollatorForSeq2Seq") == set()


def test_each_rank_tokenised_the_data_again(check, tmp_path, monkeypatch) -> None:
    """14 minutes, four times: here the second reader finds what the first one wrote, by its content."""
    from surefit.data.tokens import dataset as token_dataset

    check(RUN)
    train, _ = read_splits(DataSection(train="rows.jsonl", eval=0.25), get_recipe("chat"), seed=0)
    tokenizer = load_tokenizer(ModelSection(name_or_path="surefit/nano"))
    first = build_dataset(train, tokenizer, max_length=256, cache=tmp_path / "cache")

    def again(*arguments: object, **options: object) -> None:
        raise AssertionError("tokenised a second time")

    monkeypatch.setattr(token_dataset, "encode_turns", again)
    second = build_dataset(train, tokenizer, max_length=256, cache=tmp_path / "cache")
    assert len(second) == len(first)


def test_sampling_at_temperature_0_7_for_rouge(judge) -> None:
    assert judge(tool="llamafactory", do_sample=True, temperature=0.7) == {"EVL001"}
    assert judge(tool="llamafactory", do_sample=False) == set()


def test_one_card_is_advised_to_share_the_tokens(check) -> None:
    """The project trained on four cards: the advice is the mode that makes the length fit, not only a shorter one."""
    check(LONG.replace("LENGTH", "262144").replace("MICRO", "1") + WHOLE_LOGITS)
    answer = json.loads(CliRunner().invoke(app, ["check", "run.yaml", "--json"]).stdout.splitlines()[-1])
    (advice,) = (found["help"] for found in answer["findings"] if found["code"] == "MEM002")
    assert "or split the tokens of each example across devices: --gpus 8 with parallel: {mode: cp, cp: 8}" in advice
