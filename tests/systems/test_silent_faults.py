"""What gives a wrong result without a word, measured on this stack: a rule names it, or SureFit cannot do it."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from surefit.data.read.load import load_rows
from surefit.data.tokens.collate import collate
from surefit.train.step import loss_sum

RUN = "recipe: chat\nmodel: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl}\noutput_dir: runs/x\n"
TINY = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)


def test_1_fsdp_on_cpu_becomes_ddp(judge) -> None:
    assert judge(tool="accelerate", parallel="fsdp", on_cpu=True) == {"PAR005"}
    assert judge(tool="accelerate", parallel="ddp", on_cpu=True) == set()


def test_2_an_eval_forward_on_avx512_bf16_corrupts_4_bit_weights(judge) -> None:
    faulty = {"tool": "trl", "quantization": "nf4", "merge_into": "dequantized", "on_cpu": True, "gpu": "cpu"}
    assert "STK007" in judge(**faulty, cpu_flags={"avx512_bf16"})
    assert "STK007" not in judge(**faulty, cpu_flags=set())


def test_3_argument_dicts_of_different_tools_are_not_merged(tmp_path, audit) -> None:
    """SureFit's reader keeps every row's own keys; rows that were merged elsewhere are named."""
    calls = [{"name": "ring", "arguments": {"who": "Ann"}}, {"name": "buy", "arguments": {"item": "tea", "n": 2}}]
    rows = [{"query": f"Do {n}", "tools": [], "answers": [calls[n % 2]]} for n in range(40)]
    file = tmp_path / "sound.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert [row["answers"][0]["arguments"] for row in load_rows(str(file))][:2] == [c["arguments"] for c in calls]
    merged = [
        {**calls[n % 2], "arguments": {"who": None, "item": None, "n": None} | calls[n % 2]["arguments"]}
        for n in (0, 1)
    ]
    tool = {"name": "ring", "description": "", "parameters": {"who": {"type": "str"}, "item": None, "n": None}}
    faulty = [{"query": f"Do {n}", "tools": [tool], "answers": [merged[n % 2]]} for n in range(40)]
    assert "AUD031" in audit("merged.jsonl", "".join(json.dumps(row) + "\n" for row in faulty))


def test_4_packing_with_a_cache(judge) -> None:
    assert "PCK003" in judge(tool="trl", packing=True, packing_strategy="bfd", use_cache=True)
    assert judge(tool="trl", packing=True, packing_strategy="bfd", use_cache=False) == set()


def test_5_wrapped_packing(judge) -> None:
    assert judge(tool="trl", packing=True, packing_strategy="wrapped", use_cache=False) == {"PCK002"}


def test_6_a_checkpoint_that_is_not_atomic(judge) -> None:
    """Named for other tools; SureFit's own are complete or not there (tests/unit/checkpoint kills real saves)."""
    assert judge(tool="trl", resume=True) == {"CKP004"}
    assert judge(tool="surefit", resume=True) == set()


def test_7_max_length_that_removes_everything(check) -> None:
    assert "LAB010" in check(RUN.replace("rows.jsonl", "rows.jsonl, max_length: 8"))


def test_8_the_whole_chat_is_trained_on(judge) -> None:
    assert judge(tool="trl", conversations=True, loss_on="all") == {"LAB001"}


def test_9_fp32_factors(judge) -> None:
    assert judge(tool="trl", adapter="lora", dtype="bfloat16", adapter_dtype="float32") == {"PRC003"}


def test_10_decoding_libraries_that_do_not_hold_their_grammar(check, installed) -> None:
    installed({"transformers": "5.23.0", "lm-format-enforcer": "0.11.3"})
    assert "STK011" in check(RUN)
    installed({"transformers": "5.23.0"})
    assert check(RUN) == set()


@pytest.mark.parametrize("chunked", [False, True])
def test_11_padding_is_not_seen(chunked: bool) -> None:
    """The loss of a row is the same alone and beside a longer one."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(TINY)
    short, long = ([1, 2, 3, 4], [-100, 2, 3, 4]), ([5, 6, 7, 8, 9, 10, 11, 12], [-100, 6, 7, 8, 9, 10, 11, 12])
    together = loss_sum(model, collate([short, long], 0), chunked).item()
    apart = sum(loss_sum(model, collate([row], 0), chunked).item() for row in (short, long))
    assert abs(together - apart) < 1e-4


def test_12_the_collator_keeps_masked_labels(judge) -> None:
    batch = collate([([1, 2, 3, 4], [-100, -100, 3, 4]), ([5, 6], [-100, 6])], 0)
    assert batch["labels"].tolist() == [[-100, -100, 3, 4], [-100, 6, -100, -100]]
    assert judge(tool="trl", loss_on="completion", collator="DataCollatorForLanguageModeling") == {"LAB002"}


def test_13_liger_on_a_cpu(judge) -> None:
    assert "STK008" in judge(tool="trl", liger=True, on_cpu=True, gpu="cpu")
    assert "STK008" not in judge(tool="trl", liger=False, on_cpu=True, gpu="cpu")
