"""What answering takes, by arithmetic, beside what transformers' `generate` allocates on tensors that are real."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from surefit.config.load import load_config
from surefit.config.resolve import resolve_config
from surefit.config.schema import SureFitConfig
from surefit.core.units import GIB, KIB
from surefit.facts.generation import estimate_generation_memory, eval_batch_chooser, largest_fitting_eval_batch
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts
from surefit.plan.cuda import HIDDEN_TEMPORARIES, emulate_cuda_operators
from surefit.plan.trace import Recorder


def config_of(model: str, dtype: str = "bfloat16", max_length: int = 2048, **evaluate: Any) -> SureFitConfig:
    return SureFitConfig.model_validate(
        {
            "model": {"name_or_path": model, "dtype": dtype},
            "data": {"train": "unused", "max_length": max_length},
            "evaluate": {"batch_size": 16, "max_new_tokens": 256} | evaluate,
            "output_dir": "runs/x",
        }
    )


def allocated(model: LlamaForCausalLM, rows: int, prompt: int, answer: int, chunk: int | None, t4: bool = False) -> int:
    """Bytes at the fullest moment, the weights not counted; `t4`: with the attention of one."""
    ids = torch.randint(1, 64, (rows, prompt))
    mask = torch.ones_like(ids)
    mask[0, : prompt // 2] = 0
    settings = GenerationConfig(
        max_new_tokens=answer, do_sample=False, eos_token_id=None, pad_token_id=0, prefill_chunk_size=chunk
    )
    recorder = Recorder(hidden=HIDDEN_TEMPORARIES)
    with emulate_cuda_operators((7, 5)) if t4 else nullcontext(), recorder, torch.no_grad():
        recorder.start("answering")
        recorder.tag(model.parameters(), "weights")
        model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    live = most = 0
    for event in recorder.trace.events:
        size = recorder.trace.allocations[abs(event) - 1].bytes
        live += size if event > 0 else -size
        most = max(most, live)
    return most - sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("rows", "prompt", "answer", "chunk", "shape"),
    [
        (4, 256, 32, None, {}),
        (4, 64, 512, None, {}),
        (8, 512, 64, None, {"vocab_size": 8192}),
        (8, 512, 64, 128, {}),
        (2, 128, 16, None, {"intermediate_size": 2048}),
        (6, 200, 100, None, {"num_key_value_heads": 4}),
    ],
)
def test_it_is_what_generate_allocates(
    tmp_path: Path, rows: int, prompt: int, answer: int, chunk: int | None, shape: dict[str, int]
) -> None:
    sizes = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**(sizes | shape))).eval()
    model.save_pretrained(tmp_path)
    wanted = config_of(str(tmp_path), "float32", prompt, batch_size=rows, max_new_tokens=answer, prefill_chunk=chunk)
    found = estimate_generation_memory(wanted, model_facts(str(tmp_path)), "cpu")
    assert found is not None
    assert found.weights == sum(p.numel() for p in model.parameters()) * 4
    real = allocated(model, rows, prompt, answer, chunk)
    assert real <= found.cache + found.beside <= 1.25 * real, (found, real)


@pytest.mark.parametrize(
    ("rows", "prompt", "answer", "chunk"), [(4, 512, 16, None), (6, 512, 64, 128), (1, 600, 8, None)]
)
def test_a_gpu_without_a_kernel_for_bfloat16_holds_all_logits(
    tmp_path: Path, rows: int, prompt: int, answer: int, chunk: int | None
) -> None:
    """The operators are the math kernel's own, on tensors that are real: only which kernel runs is a T4's."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval().bfloat16()
    model.save_pretrained(tmp_path)
    wanted = config_of(str(tmp_path), "bfloat16", prompt, batch_size=rows, max_new_tokens=answer, prefill_chunk=chunk)
    facts = model_facts(str(tmp_path))
    t4, l4 = (
        estimate_generation_memory(wanted, facts, "cuda", capability=capability) for capability in ((7, 5), (8, 9))
    )
    assert t4 is not None
    assert l4 is not None
    real = allocated(model, rows, prompt, answer, chunk, t4=True)
    assert l4.cache + l4.beside < real <= t4.cache + t4.beside <= 1.3 * real, (t4, real)


def test_the_worked_example() -> None:
    model = model_facts("meta-llama/Llama-3.1-8B")
    found = estimate_generation_memory(config_of("meta-llama/Llama-3.1-8B"), model, "cuda")
    assert found is not None
    assert found.cache == 16 * (2048 + 256) * 128 * KIB
    assert found.cache / GIB == 4.5
    assert round(found.weights / GIB, 2) == 14.96
    t4 = estimate_generation_memory(config_of("meta-llama/Llama-3.1-8B"), model, "cuda", capability=(7, 5))
    assert t4 is not None
    assert round((t4.bytes - found.bytes) / GIB) == 26


def test_nothing_goes_beyond_the_context() -> None:
    model = dataclasses.replace(model_facts("meta-llama/Llama-3.1-8B"), max_position_embeddings=2000)
    found = estimate_generation_memory(config_of("x", max_new_tokens=256), model, "cuda", 1900)
    assert found is not None
    assert (found.prompt, found.answer, found.cache) == (1900, 100, 16 * 2000 * 128 * KIB)


def test_beams_are_rows_and_a_server_needs_nothing() -> None:
    model = model_facts("meta-llama/Llama-3.1-8B")
    one, four = (estimate_generation_memory(config_of("x", num_beams=beams), model, "cuda") for beams in (1, 4))
    assert one is not None
    assert four is not None
    assert (four.rows, four.cache) == (4 * one.rows, 4 * one.cache)
    assert estimate_generation_memory(config_of("x", server="http://localhost:8000/v1"), model, "cuda") is None
    assert estimate_generation_memory(config_of("x"), dataclasses.replace(model, parameters=None), "cuda") is None


def test_the_largest_batch_that_fits(tmp_path: Path) -> None:
    model, h100 = model_facts("meta-llama/Llama-3.1-8B"), hardware_facts("h100", tmp_path)
    long = config_of("x", max_length=65_536, batch_size=64)
    few = largest_fitting_eval_batch(long, model, h100, 79 * GIB)
    for count, fits in ((few, True), (few + 1, False)):
        found = estimate_generation_memory(config_of("x", max_length=65_536, batch_size=count), model, "cuda")
        assert found is not None
        assert (found.bytes <= 79 * GIB) is fits
    assert largest_fitting_eval_batch(long, model, h100, 15 * GIB) == 0


def test_auto_asks_no_more_prompts_at_a_time_than_fit(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {name_or_path: meta-llama/Llama-3.1-8B}\ndata: {train: rows.jsonl, max_length: 65536}\n"
        "hardware: {gpu: h100}\noutput_dir: runs/x\n"
    )
    model, hardware = model_facts("meta-llama/Llama-3.1-8B"), hardware_facts("h100", tmp_path)
    fitting = eval_batch_chooser(model, hardware)
    long = resolve_config(load_config(file), model, hardware, None, fitting=fitting)
    short = resolve_config(load_config(file, ["data.max_length=512"]), model, hardware, None, fitting=fitting)
    given = resolve_config(load_config(file, ["evaluate.batch_size=64"]), model, hardware, None, fitting=fitting)
    assert isinstance(long.config.evaluate.batch_size, int)
    assert hardware.memory_bytes is not None
    assert 1 <= long.config.evaluate.batch_size < 16
    found = estimate_generation_memory(long.config, model, "cuda")
    assert found is not None
    assert found.bytes <= hardware.memory_bytes
    assert "65,536 tokens may not fit" in str(long.provenance["evaluate.batch_size"])
    assert (short.config.evaluate.batch_size, given.config.evaluate.batch_size) == (64, 64)
