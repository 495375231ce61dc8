"""A random Llama of a few thousand parameters with its tokenizer, and runs with a really trained adapter.

torch and transformers are imported by the fixtures that need them, so that tests without a model start at once.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefit.config.schema import SureFitConfig
from surefit.core.rundir import RunDir

CPU = SimpleNamespace(kind="cpu", name="test", memory_bytes=None, bf16=True)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|text_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CORPUS = ["call the tool with the city and the day", "what is the weather in Oslo on Monday", "sum 3 and 14 , please"]


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """Every byte, a few merges, a chat template whose turns end with <|end|>; end of sequence is <|text_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|text_end|>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="session")
def make_tiny(tiny_tokenizer):
    """make_tiny(seed=0, **config) → a random two-layer Llama in evaluation mode."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(seed=0, **overrides):
        torch.manual_seed(seed)
        settings = {
            "vocab_size": len(tiny_tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.15,  # wide enough for varied answers
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).eval()

    return make


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory, make_tiny, tiny_tokenizer):
    """A tiny model directory, in several shards, with sampling settings in its generation config."""
    directory = tmp_path_factory.mktemp("base")
    model = make_tiny(seed=2)
    model.generation_config.update(do_sample=True, temperature=0.6, eos_token_id=4)
    model.save_pretrained(directory, max_shard_size="40KB")
    tiny_tokenizer.save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class TrainedRun:
    """A run up to the end of training."""

    config: SureFitConfig
    run: RunDir
    base: Path
    hardware: Any


@pytest.fixture(scope="session")
def train_tiny(tmp_path_factory, tiny_base):
    """train_tiny(sequences, kind, dtype, steps) → a `TrainedRun` of the tiny model on token sequences of one length."""
    import torch
    from peft import PeftModel

    from surefit.model.adapter import add_adapter, lora_modules
    from surefit.model.load import load_model
    from surefit.model.tokenizer import load_tokenizer
    from surefit.train.export import export_trained_model, tensors_to_save

    def train(sequences, kind="lora", dtype="float32", steps=25):
        run = RunDir(tmp_path_factory.mktemp(f"{kind}-{dtype}"))
        config = SureFitConfig.model_validate(
            {
                "model": {"name_or_path": str(tiny_base), "dtype": dtype},
                "lora": {"r": 4, "lora_alpha": 8.0},
                "train": {"method": kind},
                "data": {"train": "unused.jsonl"},
                "evaluate": {"batch_size": 4, "max_new_tokens": 12},
                "output_dir": str(run.path),
            }
        )
        model = load_model(config.model, CPU)
        model = add_adapter(model, config.lora) if kind == "lora" else model
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        ids = torch.tensor(sequences)
        for _ in range(steps):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        modules = lora_modules(model) if isinstance(model, PeftModel) else {}
        export_trained_model(model, load_tokenizer(config.model), config.model, run, tensors_to_save(model), modules)
        return TrainedRun(config, run, tiny_base, CPU)

    return train


@pytest.fixture
def copy_of(tmp_path):
    """copy_of(trained) → a copy of the run and of its base, to be damaged at will."""

    def copy(original):
        run = RunDir(Path(shutil.copytree(original.run.path, tmp_path / "run")))
        base = Path(shutil.copytree(original.base, tmp_path / "base"))
        model = original.config.model.model_copy(update={"name_or_path": str(base)})
        return replace(original, run=run, base=base, config=original.config.model_copy(update={"model": model}))

    return copy
