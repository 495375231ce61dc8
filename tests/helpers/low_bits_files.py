"""Tiny models in the formats that low-precision releases are published in: FP8 in blocks, FP8 by output, and MXFP4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from surefit import nano

FILE = "model.safetensors"
LARGEST = 448.0
"""Of float8_e4m3fn."""


def nano_copy(directory: Path) -> Path:
    """`surefit/nano` as a directory."""
    shutil.copytree(nano.PATH, directory, ignore=shutil.ignore_patterns("__*"))
    return directory


def edit(directory: Path, **changes: Any) -> None:
    """Set entries of config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_fp8(directory: Path, block: int = 16) -> dict[str, torch.Tensor]:
    """`surefit/nano` as DeepSeek and Qwen publish FP8; the weights (float32) that its projections stand for.

    Where `block` does not divide a matrix, the last blocks are cut off.
    """
    nano_copy(directory)
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, weight in load_file(nano.PATH / FILE).items():
        stored[name] = weight
        if not name.endswith("proj.weight"):
            continue
        rows, columns = weight.shape
        low, scales = (
            torch.empty_like(weight, dtype=torch.float8_e4m3fn),
            torch.empty(-(-rows // block), -(-columns // block)),
        )
        meant[name] = torch.empty(weight.shape)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                part = (slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block))
                scale = scales[row, column] = weight[part].float().abs().max() / LARGEST
                low[part] = (weight[part].float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
                meant[name][part] = low[part].float() * scale
        stored |= {name: low, f"{name}_scale_inv": scales}
    save_file(stored, directory / FILE, metadata={"format": "pt"})
    entry = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [block, block]}
    edit(directory, quantization_config=entry)
    return meant


def write_compressed_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """`surefit/nano` as llm-compressor writes FP8, a scale for each output; what its projections stand for."""
    nano_copy(directory)
    stored = load_file(nano.PATH / FILE)
    meant: dict[str, torch.Tensor] = {}
    for name in [each for each in stored if each.endswith("proj.weight")]:
        scales = (stored[name].float().abs().amax(1, keepdim=True) / LARGEST).to(torch.bfloat16)
        low = (stored[name].float() / scales.float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        meant[name] = low.float() * scales.float()
        stored |= {name: low, f"{name}_scale": scales}
    save_file(stored, directory / FILE, metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    edit(
        directory,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": groups,
        },
    )
    return meant


def write_gpt_oss(directory: Path) -> None:
    """A gpt-oss of two layers with random experts in MXFP4, beside nano's tokenizer."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=2, num_local_experts=4, vocab_size=1536, hidden_size=64, intermediate_size=64, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, num_experts_per_tok=2, max_position_embeddings=2048,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"], dtype="bfloat16",
    )  # fmt: skip
    stored: dict[str, torch.Tensor] = {}
    for name, weight in GptOssForCausalLM(config).to(torch.bfloat16).state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32)
            stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(118, 123, shape, dtype=torch.uint8)
        else:
            stored[name] = weight.contiguous()
    nano_copy(directory)
    save_file(stored, directory / FILE, metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    entry = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    settings = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": entry}
    (directory / "config.json").write_text(json.dumps(settings))
