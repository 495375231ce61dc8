"""What the rules get to see of other tools' files, and what they say of it: each from a file as its tool takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefit.cli.other_tools import build_lint_context
from surefit.importers import read_tool_config
from surefit.importers.result import ImportedConfig
from surefit.lint.engine import run_rules

TRL = "model_name_or_path: surefit/nano\ndataset_name: rows.jsonl\nreport_to: none\noutput_dir: out\n"
AXOLOTL = (
    "base_model: surefit/nano\nmicro_batch_size: 2\noutput_dir: out\ndatasets: [{path: a/b, type: chat_template}]\n"
)
FACTORY = "model_name_or_path: surefit/nano\nstage: sft\ndataset: mine\ncutoff_len: 64\noutput_dir: out\n"
ACCELERATE = "compute_environment: LOCAL_MACHINE\nnum_machines: 1\nnum_processes: 1\n"
QUESTION = {"role": "user", "content": "How many?"}
ANSWER = {"role": "assistant", "content": "Three."}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def reading(text: str) -> ImportedConfig:
    path = Path("run.yaml")
    path.write_text(text, encoding="utf-8")
    return read_tool_config(path)


def found_in(text: str) -> dict[str, str]:
    """Code → the key its finding points to."""
    context, _ = build_lint_context(reading(text))
    return {finding.code: finding.field for finding in run_rules(context).findings}


def write_rows(*rows: dict[str, Any]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_four_bit_weights_in_bytes_under_fsdp() -> None:
    text = TRL + "load_in_4bit: true\nuse_peft: true\nfsdp: full_shard\ndtype: bfloat16\nbnb_4bit_quant_storage: "
    assert reading(text + "uint8\n").setup.quant_storage == "uint8"
    assert found_in(text + "uint8\n")["PAR001"] == "bnb_4bit_quant_storage"
    assert "PAR001" not in found_in(text + "bfloat16\n")
    (problem,) = reading(text + "int4\n").problems
    assert problem.message == "expected one of bfloat16, float16, float32, float64, int8, uint8, got the string 'int4'"


@pytest.mark.parametrize(
    ("line", "gpus", "parallel"),
    [
        ('gpu_ids: "0,1"\ndistributed_type: "NO"\n', 2, "dp"),
        ('gpu_ids: "0"\ndistributed_type: "NO"\n', 1, "none"),
        ('gpu_ids: 0\ndistributed_type: "NO"\n', 1, "none"),
        ('gpu_ids: all\ndistributed_type: "NO"\n', None, "none"),
        ("gpu_ids: 0,1\ndistributed_type: MULTI_GPU\n", 2, "ddp"),
        ('gpu_ids: "0,1"\ndistributed_type: "NO"\nuse_cpu: true\n', 2, "none"),
    ],
)
def test_one_process_that_sees_several_gpus(line: str, gpus: int | None, parallel: str) -> None:
    setup = reading(ACCELERATE + line).setup
    assert (setup.gpus, setup.parallel) == (gpus, parallel)
    assert ("BAT004" in found_in(ACCELERATE + line)) == (parallel == "dp")


def test_gpu_ids_that_are_a_list_are_wrong() -> None:
    (problem,) = reading(ACCELERATE + "distributed_type: MULTI_GPU\ngpu_ids: [0, 1]\n").problems
    assert problem.field == "gpu_ids"


def test_a_renamed_key_is_gone_and_means_what_it_meant() -> None:
    text = TRL + "evaluation_strategy: steps\neval_steps: 200\nmax_steps: 86\nwarmup_ratio: 0.1\n"
    text += "max_seq_length: 512\ntorch_dtype: bfloat16\nno_cuda: false\nuse_liger: true\nper_gpu_train_batch_size: 2\n"
    found = reading(text)
    setup = found.setup
    assert set(setup.gone) == {
        "evaluation_strategy", "warmup_ratio", "max_seq_length", "torch_dtype", "no_cuda", "use_liger",
        "per_gpu_train_batch_size",
    }  # fmt: skip
    assert (setup.eval_strategy, setup.warmup_share, setup.max_length) == ("steps", 0.1, 512)
    assert (setup.weights_dtype, setup.on_cpu, setup.liger, setup.micro_batch) == ("bfloat16", False, True, 2)
    assert not setup.ignored
    assert setup.name("eval_strategy") == "evaluation_strategy"
    assert found.loaded is not None
    assert (found.loaded.config.train.warmup_steps, found.loaded.config.data.max_length) == (0.1, 512)
    findings = found_in(text)
    assert findings["SCH005"] == "eval_steps"
    assert "ARG003" not in findings


def test_the_warmup_is_judged_beside_a_renamed_key() -> None:
    findings = found_in(TRL + "warmup_steps: 100\nmax_steps: 86\nevaluation_strategy: steps\neval_steps: 20\n")
    assert findings["SCH001"] == "warmup_steps"
    assert findings["ARG001"] == "evaluation_strategy"


@pytest.mark.parametrize("order", [1, -1])
def test_the_new_name_counts_where_both_are_there(order: int) -> None:
    lines = ["max_length: 128", "max_seq_length: 512"][::order]
    setup = reading(TRL + "\n".join(lines) + "\n").setup
    assert (setup.max_length, setup.name("max_length")) == (128, "max_length")


def test_a_renamed_key_with_a_wrong_value_is_only_gone() -> None:
    found = reading(TRL + "max_seq_length: [512]\n")
    assert found.problems == ()
    assert found.setup.max_length is None
    assert set(found.setup.gone) == {"max_seq_length"}


def test_axolotl_s_renamed_key() -> None:
    setup = reading(AXOLOTL + "evaluation_strategy: steps\neval_steps: 200\n").setup
    assert (setup.eval_strategy, setup.eval_steps) == ("steps", 200)


EXPORT = "model_name_or_path: surefit/nano\nadapter_name_or_path: saves/a\ntemplate: qwen\nexport_dir: merged\n"


def test_an_export_is_a_merge() -> None:
    assert reading(EXPORT).tool == "llamafactory"
    assert reading(EXPORT).setup.merge_into == "original"
    assert reading(EXPORT + "quantization_bit: 4\n").setup.merge_into == "quantized"
    assert found_in(EXPORT + "quantization_bit: 4\n")["MRG001"] == "export_dir"
    assert "MRG001" not in found_in(EXPORT)
    assert reading(FACTORY + "quantization_bit: 4\n").setup.merge_into is None


@pytest.mark.parametrize(
    ("text", "packing", "strategy"),
    [
        (FACTORY + "packing: true\n", True, "joined"),
        (FACTORY + "packing: true\nneat_packing: true\n", True, None),
        (FACTORY + "neat_packing: true\n", True, None),
        (FACTORY + "packing: false\n", False, None),
        (FACTORY, None, None),
        (FACTORY.replace("sft", "pt"), True, None),
    ],
)
def test_packing_of_llamafactory(text: str, packing: bool | None, strategy: str | None) -> None:
    setup = reading(text).setup
    assert (setup.packing, setup.packing_strategy) == (packing, strategy)
    assert ("PCK002" in found_in(text)) == (strategy == "joined")


def test_the_help_is_in_the_tool_s_own_words() -> None:
    context, _ = build_lint_context(reading(FACTORY + "packing: true\n"))
    (finding,) = (finding for finding in run_rules(context).findings if finding.code == "PCK002")
    assert finding.message.startswith("packing: the examples of a row are not separated")
    assert "neat_packing: true" in str(finding.help)


def test_sampling_counts_where_answers_are_scored() -> None:
    sampling = "do_sample: true\ntemperature: 0.7\n"
    assert reading(FACTORY + sampling).setup.temperature is None
    assert "EVL001" not in found_in(FACTORY + sampling)
    scored = reading(FACTORY + sampling + "do_predict: true\npredict_with_generate: true\n").setup
    assert (scored.do_sample, scored.temperature, scored.generates_in_loop) == (True, 0.7, None)
    text = FACTORY + sampling + "do_train: true\npredict_with_generate: true\n"
    assert {"EVL001", "MEM005"} <= set(found_in(text))


def test_what_llamafactory_derives_itself_is_no_key_of_it() -> None:
    """Its ModelArguments mark them init=False, and its parser refuses them."""
    assert set(reading(FACTORY + "compute_dtype: bfloat16\ndevice_map: auto\n").setup.unknown) == {
        "compute_dtype", "device_map",
    }  # fmt: skip


def test_llamafactory_trains_in_float32_unless_it_is_told_not_to() -> None:
    assert reading(FACTORY + "bf16: true\n").setup.float32_masters is True
    assert reading(FACTORY + "pure_bf16: true\n").setup.float32_masters is None
    text = FACTORY + "finetuning_type: full\nlearning_rate: 1.0e-5\n"
    assert "PRC006" not in found_in(text + "bf16: true\n")
    assert "PRC006" in found_in(text + "pure_bf16: true\n")


@pytest.mark.parametrize(
    ("line", "device_map", "offload"),
    [
        ("max_memory: {0: 20GiB, cpu: 60GiB}\n", "auto", True),
        ("max_memory: {0: 20GiB}\n", None, None),
        ("max_memory: {0: 20GiB, cpu: 0}\n", None, None),
        ("max_memory: {0: 20GiB, cpu: 60GiB}\ndevice_map: balanced\n", "balanced", True),
        ("device_map: {model.embed_tokens: 0, model.layers: cpu}\n", "custom", True),
        ("device_map: {model.embed_tokens: 0, model.layers: 1}\n", "custom", None),
        ('device_map: {"": cpu}\n', "custom", None),
        ("device_map: auto\n", "auto", None),
    ],
)
def test_weights_kept_in_ram(line: str, device_map: str | None, offload: bool | None) -> None:
    found = reading(AXOLOTL + line)
    assert (found.setup.device_map, found.setup.cpu_offload) == (device_map, offload)
    assert found.problems == ()
    assert ("MEM003" in found_in(AXOLOTL + line)) == bool(offload)


def test_the_type_that_four_bit_layers_compute_in() -> None:
    qlora = AXOLOTL + "adapter: qlora\nload_in_4bit: true\nbf16: true\n"
    assert "PRC005" not in found_in(qlora)
    kwargs = "bnb_config_kwargs: {bnb_4bit_compute_dtype: float32, llm_int8_threshold: 5.0}\n"
    assert found_in(qlora + kwargs)["PRC005"] == "bnb_config_kwargs.bnb_4bit_compute_dtype"
    assert reading(qlora + kwargs).setup.unknown == ()
    text = TRL + "use_peft: true\nload_in_4bit: true\nbf16: true\n"
    assert found_in(text + "dtype: float32\n")["PRC005"] == "dtype"
    assert "PRC005" not in found_in(text + "dtype: bfloat16\n")
    assert reading(text).setup.quant_compute_dtype is None


def test_axolotl_trains_16_bit_weights_without_copies() -> None:
    text = AXOLOTL + "learning_rate: 1.0e-5\nbf16: true\n"
    assert "PRC006" in found_in(text)
    assert "PRC006" not in found_in(text + "fsdp: [full_shard]\n")
    assert "PRC006" not in found_in(text + "adapter: lora\n")


def test_trl_learns_whole_conversations() -> None:
    write_rows(*[{"messages": [QUESTION, ANSWER]}] * 3)
    assert found_in(TRL)["LAB001"] == "dataset_name"
    assert found_in(TRL + "assistant_only_loss: false\n")["LAB001"] == "assistant_only_loss"
    assert "LAB001" not in found_in(TRL + "assistant_only_loss: true\n")
    write_rows(*[{"prompt": [QUESTION], "completion": [ANSWER]}] * 3)
    assert "LAB001" not in found_in(TRL)
    assert "LAB001" not in found_in(TRL.replace("rows.jsonl", "org/not-here"))


def test_a_share_that_the_file_does_not_say_is_not_judged() -> None:
    write_rows(*({"prompt": f"What is {n}?", "completion": str(n)} for n in range(120)))
    assert "DAT006" not in found_in(TRL)
    assert found_in(TRL + "test_split_size: 0.02\n")["DAT006"] == "test_split_size"


def test_the_token_that_ends_an_answer() -> None:
    assert reading(TRL + "eos_token: <|im_end|>\n").setup.eos_token == "<|im_end|>"
    found = reading(AXOLOTL + "special_tokens: {eos_token: <|im_end|>, pad_token: <pad>}\n")
    assert found.setup.eos_token == "<|im_end|>"
    assert found.setup.places["eos_token"].name == "special_tokens.eos_token"
    assert "special_tokens.pad_token" in {lost.key for lost in found.lost}


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    """A local folder whose template ends turns with a token that its generation does not stop at."""
    folder = tmp_path / "base"
    folder.mkdir()
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    added = [{"id": n, "content": token} for n, token in enumerate(("<|end|>", "<|im_start|>", "<|im_end|>"), 2)]
    files: dict[str, Any] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 5, "eos_token_id": 2,
        },
        "tokenizer.json": {"added_tokens": added, "model": {"vocab": {"a": 0, "b": 1}}},
        "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": template},
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_the_tokenizer_is_judged_where_its_template_is_used(base_model: Path) -> None:
    write_rows(*[{"messages": [QUESTION, ANSWER]}] * 3)
    text = TRL.replace("surefit/nano", str(base_model))
    assert "TPL002" in found_in(text)
    assert "TPL002" not in found_in(text + "eos_token: <|im_end|>\n")
    assert "TPL002" not in found_in(text + "chat_template_path: other.jinja\n")
    write_rows(*[{"prompt": "How many?", "completion": "Three."}] * 3)
    assert "TPL002" not in found_in(text)
    axolotl = AXOLOTL.replace("surefit/nano", str(base_model))
    assert "TPL002" in found_in(axolotl)
    assert "TPL002" in found_in(axolotl + "chat_template: tokenizer_default\n")
    assert "TPL002" not in found_in(axolotl + "chat_template: chatml\n")
    context, _ = build_lint_context(reading(FACTORY.replace("surefit/nano", str(base_model)) + "template: qwen\n"))
    assert context.tokenizer is not None
    assert (context.tokenizer.eos_token, context.tokenizer.end_of_turn) == ("<|end|>", None)


def test_check_names_the_line_of_an_expression_that_never_ends(tmp_path: Path) -> None:
    """As PEFT writes the file; `merge` would match it against every module."""
    text = (
        '{\n  "base_model_name_or_path": "surefit/nano",\n  "lora_alpha": 16,\n  "peft_type": "LORA",\n  "r": 8,\n'
        f'  "rank_pattern": {{"q_proj[": 4}},\n  "target_modules": "{".*" * 15}Z",\n  "task_type": "CAUSAL_LM"\n}}'
    )
    (tmp_path / "adapter_config.json").write_text(text)
    context, _ = build_lint_context(read_tool_config(tmp_path / "adapter_config.json"))
    wrong = [(one.line, one.field, one.severity) for one in run_rules(context).findings]
    assert wrong == [(6, "rank_pattern", "error"), (7, "target_modules", "error")]
