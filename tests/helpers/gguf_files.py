"""GGUF files for tests: a model directory written as llama.cpp's converter writes it, with llama.cpp's own library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from surefit import nano

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")


def write_gguf(
    out: Path,
    kind: str = "F32",
    *,
    source: Path = nano.PATH,
    architecture: str = "llama",
    pre: str | None = "gpt-2",
    tokenizer: bool = True,
    also: Callable[[Any], None] = lambda writer: None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write a model of the Llama kind.

    Args:
        kind: of the matrices, as ggml names it; what is no matrix stays in float32.
        pre: how the vocabulary splits a text, as the file says it.
        tokenizer: with one.
        also: more metadata.
        without: tensors to leave out, by ggml's names.
    """
    import gguf

    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(out, architecture)
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    if tokenizer:
        _add_tokenizer(writer, source, config, pre)
    also(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(source / "model.safetensors").items():
        for part, count in (("q_proj", heads), ("k_proj", shared)):
            if part in name and architecture == "llama":  # llama.cpp has the halves of a rotation beside each other
                shape = tensor.shape
                tensor = tensor.reshape(count, 2, shape[0] // count // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if short not in without:
            of = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
            writer.add_tensor(short, gguf.quantize(tensor.float().numpy(), of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _add_tokenizer(writer: Any, source: Path, config: dict[str, Any], pre: str | None) -> None:
    saved = json.loads((source / "tokenizer.json").read_text())
    whole = {entry["id"]: entry["content"] for entry in saved["added_tokens"]}
    ids = {number: token for token, number in saved["model"]["vocab"].items()} | whole
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([ids[number] for number in range(len(ids))])
    writer.add_token_types([3 if number in whole else 1 for number in range(len(ids))])
    writer.add_token_merges([" ".join(pair) for pair in saved["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_chat_template((source / "chat_template.jinja").read_text())
