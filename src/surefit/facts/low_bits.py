"""Base models published in 8-bit or 4-bit floats with scales: which can be dequantized, and the resulting tensors.

    fp8 (DeepSeek-V3, Qwen's FP8)    W = weight · weight_scale_inv, one scale per block of 128 × 128 weights
    compressed-tensors, 8-bit floats W = weight · weight_scale, one per block, output or tensor
    mxfp4 (gpt-oss)                  W = e2m1 · 2^(scale - 127), two weights in a byte, one scale per 32

Such a release is read as the plain model that it encodes: it is dequantized once, into the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefit.core import env
from surefit.facts.safetensors import TensorHeader, weight_files

METHODS = ("fp8", "compressed-tensors", "mxfp4")
"""`quant_method` values that can be dequantized."""
FLOATS = "float-quantized"
"""compressed-tensors' format of 8-bit floats; its others pack integers."""
FLOAT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
SCALES = ("_scale_inv", "_scale")
"""Suffixes of the name of a matrix, or of a stack of experts, for its scales."""
OF_ACTIVATIONS = (".input_scale", ".output_scale", ".activation_scale", ".k_scale", ".v_scale")
"""Suffixes of scales of activations in serving engines, which are no part of the weights."""
BLOCKS = ("_blocks", "_scales")
PER_SCALE, BYTES = 32, 16
"""Weights that share a scale in MXFP4, and their bytes."""
ALONGSIDE = (".json", ".jinja", ".model", ".txt", ".md", ".py")
CONVERTER = 1
"""Version of the converter, incremented when the same files would be dequantized to something else."""


@dataclass(frozen=True)
class LowBitFormat:
    """Storage format of a release's matrices.

    Attributes:
        method: `quant_method` of its config.json: fp8, compressed-tensors or mxfp4.
        block: (rows, columns) of weights per scale in a grid; None where each scale is an output's or a tensor's.
        dtype: dtype it is dequantized to, in safetensors' names: the dtype that its config.json computes in.
    """

    method: str
    block: tuple[int, int] | None
    dtype: str


def detect_low_bit_format(config: Mapping[str, Any]) -> LowBitFormat | None:
    """Return the storage format that a config.json states; None where it is not one of the three."""
    entry = config.get("quantization_config")
    if not isinstance(entry, Mapping):
        return None
    method = entry.get("quant_method")
    if method == "compressed-tensors":
        if entry.get("format") != FLOATS:
            return None
        block = _block_of_groups(entry.get("config_groups"))
    elif method in ("fp8", "mxfp4"):
        block = _pair(entry.get("weight_block_size")) if method == "fp8" else None
    else:
        return None
    stated = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return LowBitFormat(str(method), block, NAMES.get(stated, "BF16"))


def _block_of_groups(groups: Any) -> tuple[int, int] | None:
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            size = weights.get("group_size")
            return _pair(weights.get("block_structure")) or ((1, size) if type(size) is int and size > 0 else None)
    return None


def _pair(value: Any) -> tuple[int, int] | None:
    is_valid = isinstance(value, (list, tuple)) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)
    return (value[0], value[1]) if is_valid else None


def dequantized_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the loaded model: without a quantization that is undone."""
    return {
        key: value
        for key, value in config.items()
        if key != "quantization_config" or detect_low_bit_format(config) is None
    }


def dequantization_obstacle(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> str | None:
    """Return why files in this config.json's format cannot be dequantized here; None where they can, or their format is
    none of `METHODS`.

    Args:
        tensors: the headers of its weight files; empty where they are not on this machine.
    """
    stored = detect_low_bit_format(config)
    if stored is None:
        return _other_format(config.get("quantization_config"))
    if config["quantization_config"].get("expert_dtype") == "fp4":
        return "its experts are packed in FP4 (expert_dtype: fp4, as DeepSeek-V4 is published)"
    for name, tensor in tensors.items():
        scale = scale_tensor_name(name, tensors) if tensor.dtype == "F8_E4M3" else None
        if scale is not None and tensors[scale].dtype in FLOAT_BYTES:
            if not _fits(tensor.shape, tensors[scale].shape, stored.block):
                shapes = f"{tensors[scale].shape} does not fit a weight of shape {tensor.shape}"
                return f"{scale} {shapes} in blocks of {stored.block}"
        elif is_packed(name, tensors):
            if not _is_mxfp4(tensor, tensors[other_half(name)]):
                return f"{name} {tensor.shape} is not a stack of experts in blocks of {PER_SCALE} weights"
        elif tensor.dtype.startswith(("F8", "F4", "F6", "U", "I8", "I32")) and not is_scale(name, tensors):
            return f"{name} is {tensor.dtype}, with {f'a scale in {tensors[scale].dtype}' if scale else 'no scale'}"
    return None


def _other_format(entry: Any) -> str | None:
    is_known_method = isinstance(entry, Mapping) and entry.get("quant_method") in METHODS
    return f"its format is {entry.get('format')}, not {FLOATS}" if is_known_method else None


def _fits(shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None) -> bool:
    if all(size == 1 for size in scales) or scales == (*shape[:-1], 1):
        return True
    if block is None or len(shape) < 2:
        return False
    return scales == (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _is_mxfp4(blocks: TensorHeader, scales: TensorHeader) -> bool:
    is_valid = blocks.dtype == scales.dtype == "U8" and len(blocks.shape) == 4
    return is_valid and blocks.shape[-1] == BYTES and blocks.shape[:-1] == scales.shape


def scale_tensor_name(name: str, tensors: Mapping[str, TensorHeader]) -> str | None:
    """Return the name of a matrix's scales; None where it has none."""
    return next((name + ending for ending in SCALES if name + ending in tensors), None)


def is_scale(name: str, tensors: Mapping[str, TensorHeader]) -> bool:
    """Return whether a tensor is no weight but a scale of weights or activations."""
    matrices = [tensors.get(name.removesuffix(ending)) for ending in SCALES if name.endswith(ending)]
    return (
        any(matrix is not None and matrix.dtype.startswith("F8") for matrix in matrices)
        or name.endswith(OF_ACTIVATIONS)
        or (name.endswith("_scales") and is_packed(other_half(name), tensors))
    )


def is_packed(name: str, tensors: Mapping[str, TensorHeader]) -> bool:
    """Return whether a tensor is the packed half of an MXFP4 matrix."""
    return name.endswith("_blocks") and other_half(name) in tensors


def other_half(name: str) -> str:
    """Return `x_scales` for `x_blocks`, and the reverse."""
    stem, _, half = name.rpartition("_")
    return f"{stem}_{'scales' if half == 'blocks' else 'blocks'}"


def dequantized_headers(stored: LowBitFormat, tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the tensors of the files once they are dequantized: name → type and shape.

    Raises nothing: `dequantization_obstacle` has checked them.
    """
    headers: dict[str, TensorHeader] = {}
    for name, tensor in tensors.items():
        if is_packed(name, tensors):
            # (experts, outputs, blocks, 16) of bytes; transformers keeps the weights as (experts, inputs, outputs).
            experts, outputs, blocks, _ = tensor.shape
            headers[name.removesuffix("_blocks")] = _of(stored.dtype, (experts, PER_SCALE * blocks, outputs))
        elif not is_scale(name, tensors):
            headers[name] = _of(stored.dtype, tensor.shape) if tensor.dtype == "F8_E4M3" else tensor
    return headers


def _of(dtype: str, shape: tuple[int, ...]) -> TensorHeader:
    return TensorHeader(dtype, shape, FLOAT_BYTES[dtype] * TensorHeader(dtype, shape, 0).elements)


def dequantized_copy_directory(directory: Path) -> Path:
    """Return the path of the dequantized copy of a model directory, whether it exists or not. It depends on the names,
    sizes and times of the files, so that a changed model is dequantized again. Copies of one directory are siblings."""
    small_files = [file for file in directory.iterdir() if file.suffix in ALONGSIDE and file.suffix != ".md"]
    digest = hashlib.sha256()
    for file in sorted({*weight_files(directory), *small_files}):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    directory_hash = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
    return env.cache_dir() / "dequantized" / directory_hash / f"{digest.hexdigest()[:16]}-{CONVERTER}"
