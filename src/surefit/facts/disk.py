"""Disk space that a run directory needs at its largest, and that the base model's download needs.

A safetensors file is 8 bytes, a JSON header that names every tensor, and the tensors; the header is built here as the
library writes it, so small models are as exact as large ones (a test compares with the files of real runs).

Worked example, Llama-3.1-8B with LoRA r = 8 on all linear layers, in bfloat16: 20,971,520 factors in 448 tensors. The
adapter file is 2 × 20,971,520 bytes and a header of 59,536: 42.0 MB. A checkpoint holds that, and in float32 the
masters and AdamW's two moments, 12 × 20,971,520 bytes: 293.9 MB in all. Three are on the
disk while one is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from surefit.config.optimizers import OPTIMIZERS
from surefit.config.resolve import ResolvedConfig, with_decisions
from surefit.config.schema import decided
from surefit.config.world import count_processes
from surefit.core import env
from surefit.core.units import bytes_text, count_text
from surefit.facts.activations import FLOAT32
from surefit.facts.hardware import HardwareFacts, nearest_existing
from surefit.facts.memory_formula import (
    EIGHT_BIT_BLOCK,
    MIN_8BIT,
    MemoryTerm,
    TrainableParameters,
    count_trainable_parameters,
)
from surefit.facts.model import DTYPE_BYTES, ModelFacts
from surefit.facts.named_templates import template_files
from surefit.facts.tensors import Shape, adapter_parameters, base_parameters

CHECKPOINT_FILES = 1515
"""Bytes of manifest.json and trainer.json, measured; a few bytes more or less with the config."""
MANIFEST_ENTRY = 160
"""Bytes of a file's entry in manifest.json."""
ADAPTER_FILES, MODEL_FILES = 1840, 1200
"""Bytes of adapter_config.json and surefit.json; of config.json, generation_config.json and surefit.json, measured."""
LOG_BYTES = 351
"""Bytes of a step's line in metrics.jsonl, measured."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TOKENIZER_ENTRY = 100
"""Approximate bytes of tokenizer files per vocabulary entry, where they are not on this machine."""
REFERENCE_BYTES, REFERENCE_COPIES = 8, 2
"""Bytes of an example in the stored reference; copies of the file while a new one replaces it."""
_DTYPES = {2: "BF16", 4: "F32"}
_WIDTHS = {"U8": 1, "F32": 4, "I64": 8}


def disk_terms(resolved: ResolvedConfig, model: ModelFacts) -> list[MemoryTerm]:
    """Return the terms of a run directory at its largest; empty where the model's size is not known.

    One checkpoint more than are kept: the new one is complete before the oldest is deleted.
    """
    config = resolved.config
    part = count_trainable_parameters(model, config.adapter, config.model.dtype)
    if model.parameters is None or part is None:
        return []
    number, lora = DTYPE_BYTES[config.model.dtype], config.train.method == "lora"
    shapes = list(adapter_parameters(model, config.adapter) if config.adapter else base_parameters(model))
    weights = _file_bytes(shapes, number, part.parameters)
    optimizer = _optimizer_bytes(resolved, shapes, part)
    if not lora and config.parallel.mode == "fsdp" and (writing := count_processes(config)) > 1:
        # Each process writes two files, whose headers also list its shard of every tensor.
        headers = weights + optimizer - _content(shapes, number, part)
        weights += (2 * writing - 1) * headers + 2 * writing * MANIFEST_ENTRY
    copies = copies_at_once(resolved)
    masters = ", masters" if part.master_bytes else ""
    n = count_text(part.parameters)
    terms = [
        MemoryTerm(
            "checkpoints",
            copies * (weights + optimizer + CHECKPOINT_FILES),
            f"{copies} at a time, the one being written included, {n} trained parameters each: weights{masters} and "
            "AdamW's moments",
        )
    ]
    if lora:
        adapter_tensors = [(_as_saved(name), shape) for name, shape in shapes]
        adapter = _file_bytes(adapter_tensors, number, part.parameters, _METADATA) + ADAPTER_FILES
        terms.append(MemoryTerm("adapter", adapter, f"the result of training, in {config.model.dtype}"))
    merged_bytes = _file_bytes(base_parameters(model), number, model.parameters, _METADATA) + MODEL_FILES
    result = "the base with the adapter merged in" if lora else "the result of training"
    terms.append(MemoryTerm("merged" if lora else "model", merged_bytes, f"{result}, in {config.model.dtype}"))
    terms.append(_tokenizer_term(model, 2 if lora else 1))
    if resolved.total_steps is not None and config.objective.has_reference:
        pairs = resolved.total_steps * decided(config.train.global_batch_size)
        what = config.objective.examples_name
        why = f"two float32 numbers of at most {pairs:,} {what}, twice while they are written"
        terms.append(MemoryTerm("reference", REFERENCE_COPIES * REFERENCE_BYTES * pairs, why))
    if resolved.total_steps is not None:
        terms.append(
            MemoryTerm("log", LOG_BYTES * resolved.total_steps, f"{resolved.total_steps:,} lines of metrics.jsonl")
        )
    return terms


def download_term(model: ModelFacts, hardware: HardwareFacts, directory: Path) -> MemoryTerm | None:
    """Return the term of the base model's files that are still to be fetched: by a download, or by a copy to the
    machine of another GPU. None where they are on this machine already, or go to another disk of it.

    Args:
        model: facts about the base model.
        hardware: the device.
        directory: directory that the run writes to.
    """
    size = model.weight_bytes
    if not size or (model.source == "local" and model.path is None):
        return None
    if hardware.is_another_machine:
        return MemoryTerm("base model", size, "its files on the training machine: the Hugging Face cache, or a folder")
    disks = {nearest_existing(path).stat().st_dev for path in (directory, env.hub_cache())}
    if model.source not in ("catalogue", "hub") or len(disks) > 1:
        return None
    return MemoryTerm("base model", size, "the download into the Hugging Face cache, which is on the same disk")


def _as_saved(name: str) -> str:
    """Return the name that PEFT gives a factor, DoRA magnitude or row of new tokens in an adapter's file."""
    plain = name.replace(".default.", ".").removesuffix(".default")
    return plain.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def _optimizer_bytes(resolved: ResolvedConfig, shapes: list[tuple[str, Shape]], part: TrainableParameters) -> int:
    """Return the bytes of the optimizer state's file, with tensors named as in `train/optim.py`."""
    masters = ["master"] if part.master_bytes else []
    row = OPTIMIZERS[resolved.config.train.optim]
    if not (row.eight_bit or row.paged):
        states = (*row.state, *masters)
        state = [(f"{key}.{name}", shape) for key in states for name, shape in shapes]
        state += [(f"step.{name}", ()) for name, _ in shapes]
        return _file_bytes(state, FLOAT32, len(states) * part.parameters + len(shapes))
    tensors: dict[str, tuple[str, Shape]] = {}
    for name, shape in shapes:
        numbers = math.prod(shape)
        eight = row.eight_bit and numbers >= MIN_8BIT and "embed" not in name
        tensors |= {f"{key}.{name}": ("F32", shape) for key in masters} | {f"step.{name}": ("I64", ())}
        tensors |= {f"state{which}.{name}": ("U8" if eight else "F32", shape) for which in (1, 2)}
        if eight:
            blocks = (-(-numbers // EIGHT_BIT_BLOCK),)
            tensors |= {f"absmax{which}.{name}": ("F32", blocks) for which in (1, 2)}
            tensors |= {f"qmap.{code}": ("F32", (256,)) for code in ("dynamic", "udynamic")}
    sizes = [_WIDTHS[dtype] * math.prod(shape) for dtype, shape in tensors.values()]
    ends = list(accumulate(sizes, initial=0))
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
        for (name, (dtype, shape)), start, end in zip(sorted(tensors.items()), ends, ends[1:], strict=False)
    }
    # The library sorts by type first; the offsets take as many digits, give or take a few.
    return 8 + -(-len(json.dumps(header, separators=(",", ":"))) // 8) * 8 + ends[-1]


def _content(shapes: list[tuple[str, Shape]], number: int, part: TrainableParameters) -> int:
    """Return the bytes of the numbers themselves in the files of weights and of AdamW's state."""
    states = 3 if part.master_bytes else 2
    return (number + FLOAT32 * states) * part.parameters + FLOAT32 * len(shapes)


_METADATA = {"__metadata__": {"format": "pt"}}


def _file_bytes(
    tensors: Iterable[tuple[str, Shape]], number: int, elements: int, metadata: dict[str, dict[str, str]] | None = None
) -> int:
    """Return the bytes of a safetensors file of `elements` numbers; `tensors` are the ones listed in its header."""
    header: dict[str, object] = dict(metadata or {})
    end = 0
    for name, shape in sorted(tensors):
        start, end = end, end + number * math.prod(shape)
        header[name] = {"dtype": _DTYPES[number], "shape": shape, "data_offsets": (start, end)}
    text = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-text // 8) * 8 + number * elements


def disk_advice(resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts) -> str:
    """Return what makes a run fit the disk that it does not: fewer checkpoints, if that is enough, or the space it
    lacks."""
    free, limit = hardware.disk_free_bytes or 0, resolved.config.checkpoint.save_total_limit
    lacking = bytes_text(run_disk_bytes(resolved, model, hardware) - free)
    more = f"free {lacking} more" if hardware.disk_source != "config" else f"take a disk with {lacking} more"
    for kept in range((limit or 1) - 1, 0, -1):
        fewer = with_decisions(resolved.config, {"checkpoint.save_total_limit": kept})
        if run_disk_bytes(replace(resolved, config=fewer), model, hardware) <= free:
            return f"set checkpoint.save_total_limit: {kept}, or {more}"
    return more


def run_disk_bytes(resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts) -> int:
    """Return the bytes that a run writes, with the base model's download where that goes to the same disk; 0 where the
    model's size is not known."""
    terms = disk_terms(resolved, model)
    download = download_term(model, hardware, Path(resolved.config.output_dir)) if terms else None
    return sum(term.bytes for term in terms) + (download.bytes if download else 0)


def copies_at_once(resolved: ResolvedConfig) -> int:
    """Return the largest number of checkpoints that are on the disk together."""
    limit, interval = resolved.config.checkpoint.save_total_limit, resolved.config.checkpoint.save_steps
    assert isinstance(interval, int)
    written = limit + 1 if resolved.total_steps is None else math.ceil(resolved.total_steps / interval)
    return min(limit + 1, written)


def _tokenizer_term(model: ModelFacts, copies: int) -> MemoryTerm:
    files = {model.path / name for name in TOKENIZER_FILES} if model.path is not None else set()
    files |= set(template_files(model.path).values()) if model.path is not None else set()
    sizes = [_size(path) for path in files]
    if any(sizes):
        return MemoryTerm("tokenizer", copies * sum(sizes), "the base model's, beside each result")
    estimate = copies * TOKENIZER_ENTRY * model.vocab_size
    return MemoryTerm("tokenizer", estimate, f"beside each result, about {TOKENIZER_ENTRY} bytes per vocabulary entry")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
