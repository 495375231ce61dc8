"""The inputs of the simulated step: the model to train, built without data, and its micro batches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch

from surefit.config.schema import ObjectiveSection
from surefit.core.errors import ModelError
from surefit.facts.activations import TILE
from surefit.model import attention
from surefit.model.adapter import add_adapter
from surefit.model.checkpointing import enable_checkpointing
from surefit.model.classes import auto_class
from surefit.model.fused_lora import fuse_lora
from surefit.model.kernels import use_kernels
from surefit.model.neftune import Neftune
from surefit.model.quantize import BLOCK, frozen_matrix, hidden_tensors, is_four_bit, quantize_meta
from surefit.model.tiling import tile_mlps
from surefit.plan.step_config import StepConfig
from surefit.plan.trace import HOST, Recorder


def build_model(setting: StepConfig, device: str) -> torch.nn.Module:
    """Return the model to train, its adapter included, on "meta" or, with random weights, on a real device.

    Raises:
        ModelError: transformers builds no causal language model from this config.
    """
    dtype = getattr(torch, setting.dtype)
    with torch.device(device):
        try:
            model: Any = auto_class(setting.config).from_config(
                copy.deepcopy(setting.config), dtype=dtype, attn_implementation=_attention(setting)
            )
        except (ValueError, KeyError, AttributeError, ImportError) as error:
            raise ModelError(
                f"transformers cannot build the model from its config.json: {' '.join(str(error).split())[:200]}",
                code="E8001",
                field="model.name_or_path",
                help="SureFit needs a causal language model",
            ) from error
        model.tie_weights()
        model = quantize_meta(model, setting.quantization)
        if setting.adapter is not None:
            tokens = setting.config.get_text_config().vocab_size
            model = add_adapter(model, setting.adapter, new_tokens=range(tokens - setting.new_tokens, tokens))
        if setting.adapter is not None and setting.adapter.use_dora:
            _let_dora_dequantize(model)
    assert isinstance(model, torch.nn.Module)
    return model


def _attention(setting: StepConfig) -> str | None:
    return attention.NAME if setting.packed and setting.attention is None else setting.attention


def apply_training_options(model: Any, setting: StepConfig) -> None:
    """Apply the options that a run switches on before its first step."""
    if setting.fused_lora:
        fuse_lora(model)
    if setting.kernels:
        use_kernels(model)
    enable_checkpointing(model, setting.checkpointing)
    if setting.tiled_mlp:
        tile_mlps(model, TILE)
    if setting.neftune is not None:
        Neftune(model, setting.neftune)


def _let_dora_dequantize(model: torch.nn.Module) -> None:
    """Let PEFT's DoRA dequantize 4-bit weights without data: it recognizes a real one by its class, and calls
    `dequantize` on a layer with `W_q`."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and is_four_bit(layer):
            layer.W_q, layer.dequantize = True, functools.partial(frozen_matrix, layer)  # type: ignore[assignment]


def materialize_parameters(
    model: torch.nn.Module, recorder: Recorder, weights: bool = True, quantises: bool = False
) -> None:
    """Give every parameter and buffer a fake storage of its own size; shared ones stay shared. Without `weights` the
    frozen ones stay as they are. `quantises`: 4-bit weights are made on the device, one after the other in the order of
    their names, from 16 bits, as transformers loads them there."""
    fakes: dict[int, torch.Tensor] = {}
    storages: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            storage = tensor.untyped_storage()
            # A tensor may be a view of a larger one, and keeps its whole storage alive.
            if storage._cdata not in storages:
                elements = storage.nbytes() // tensor.element_size()
                storages[storage._cdata] = torch.empty(elements, dtype=tensor.dtype, device="cpu")
            fakes[id(tensor)] = storages[storage._cdata].as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
        return fakes[id(tensor)]

    parameters: dict[int, torch.nn.Parameter] = {}

    def fake_parameter(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            return fake(tensor)
        if id(tensor) not in parameters:
            parameters[id(tensor)] = new = torch.nn.Parameter(fake(tensor), tensor.requires_grad)
            if hasattr(tensor, "quant_state"):  # bitsandbytes computes with any tensor that has this attribute
                new.quant_state = tensor.quant_state  # type: ignore[attr-defined]
        return parameters[id(tensor)]

    # An adapter comes after the model it is added to.
    for trained in (False, True):
        modules = list(model.named_modules())
        if quantises:
            modules.sort(key=lambda item: _natural_sort_key(item[0]))
        for name, module in modules:
            four_bit = not trained and "weight" in module._parameters and is_four_bit(module)
            with recorder.inside(name):
                unquantized = _unquantized_weight(module) if four_bit and quantises else None
                for store in (module._parameters, module._buffers):
                    for key, tensor in store.items():
                        if tensor is None or (isinstance(tensor, torch.nn.Parameter) and not weights | trained):
                            continue
                        if tensor.requires_grad == trained:
                            store[key] = fake_parameter(tensor)
                if four_bit:
                    scales = _scales(unquantized) if unquantized is not None else None
                    for _, owner, attribute, tensor in list(hidden_tensors(module)):
                        setattr(owner, attribute, fake(tensor))
                    del scales
                del unquantized


def _natural_sort_key(name: str) -> list[tuple[bool, int, str]]:
    """Return the key that transformers sorts weights by before it loads them (`dot_natural_key`)."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _unquantized_weight(layer: Any) -> torch.Tensor:
    """Return a 4-bit layer's weights in the dtype they are read in."""
    state = layer.weight.quant_state
    return torch.empty(tuple(state.shape), dtype=state.dtype, device="cpu")


def _scales(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the temporaries of bitsandbytes' quantization (`functional.quantize_4bit`) besides its result: the scales
    of every 64 weights in float32, and these minus their mean."""
    return [torch.empty(weight.numel() // BLOCK, dtype=torch.float32, device="cpu") for _ in range(2)]


def build_micro_batch(setting: StepConfig, recorder: Recorder) -> Mapping[str, Any]:
    """Return a micro batch as data/tokens/collate.py makes it, of token 1; where some rows are padded, only the last
    position of the last row is padding.

    For a GPU it is in the host's memory, and its copies on the device exist while they are used.
    """
    with torch.device(HOST if setting.cuda else "cpu"):
        batch = _packed(setting) if setting.packed else _padded(setting)
        mismatched = batch | _mismatched(setting) if setting.objective and setting.objective.labelled else None
    if mismatched is not None:
        batch |= {"mismatched": (_placed(mismatched, setting, recorder),)}
    return _placed(batch, setting, recorder)


def _placed(batch: dict[str, Any], setting: StepConfig, recorder: Recorder) -> Mapping[str, Any]:
    return _OnHost(batch, recorder) if setting.cuda else _tag_batch(batch, recorder)


def _padded(setting: StepConfig) -> dict[str, Any]:
    shape = (setting.rows, setting.length)
    batch = {key: torch.ones(shape, dtype=torch.long) for key in ("input_ids", "attention_mask", "labels")}
    if setting.padded:
        batch["attention_mask"][-1, -1:].zero_()
    return batch | {"padded": setting.padded} | _supervision(setting)


def _packed(setting: StepConfig) -> dict[str, Any]:
    if setting.shared:
        return _shared(setting)
    ids = torch.ones((1, setting.tokens), dtype=torch.long)
    positions = torch.arange(setting.length).repeat(setting.rows)[None]
    ends = torch.arange(0, setting.tokens + 1, setting.length, dtype=torch.int32)
    boundaries = {f"cu_seq_lens_{side}": ends for side in "qk"} | {
        f"max_length_{side}": setting.length for side in "qk"
    }
    batch = {"input_ids": ids, "position_ids": positions, "labels": torch.ones_like(ids), **boundaries}
    # Boundaries in tensors without data cannot be read back.
    return batch | {"document_lengths": (setting.length,) * setting.rows} | _supervision(setting)


def _shared(setting: StepConfig) -> dict[str, Any]:
    """Return pairs that share their prompts, as `collate_shared` makes them."""
    pairs, first, second = setting.rows // 2, setting.length, setting.length - setting.shared
    ids = torch.ones((1, setting.tokens), dtype=torch.long)
    positions = torch.cat([torch.arange(first), torch.arange(setting.shared, first)]).repeat(pairs)[None]
    begins = torch.arange(pairs)[:, None] * (first + second)
    read = torch.cat([torch.arange(first), torch.arange(setting.shared), torch.arange(first, first + second)])
    batch: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "labels": torch.ones_like(ids)}
    for side, lengths in (("q", (first, second) * pairs), ("k", (first, first) * pairs)):
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        batch |= {f"cu_seq_lens_{side}": ends, f"max_length_{side}": first}
    places = {"document_lengths": (first, second) * pairs, "key_lengths": (first,) * setting.rows}
    return batch | places | {"key_order": (begins + read).flatten()} | _supervision(setting)


def _supervision(setting: StepConfig) -> dict[str, Any]:
    batch = {"loss_rows": torch.arange(setting.targets), "targets": torch.ones(setting.targets, dtype=torch.long)}
    if setting.objective is not None and setting.objective.labelled:
        labels = tuple(row % 2 == 0 for row in range(setting.rows))
        return batch | _targets(setting) | {"desirable": labels, "reference_log_probs": torch.zeros(setting.rows, 2)}
    return batch if setting.objective is None else batch | _pairs(setting, setting.objective)


def _mismatched(setting: StepConfig) -> dict[str, Any]:
    """Return what the mismatched answers of a micro batch have otherwise; they are as long as its answers."""
    return {"reference_log_probs": torch.zeros(setting.rows)}


def _targets(setting: StepConfig) -> dict[str, Any]:
    """Return the numbers of supervised tokens of each example."""
    each, more = divmod(setting.targets, setting.rows)
    return {"answer_targets": tuple(each + (answer < more) for answer in range(setting.rows))}


def _pairs(setting: StepConfig, objective: ObjectiveSection) -> dict[str, Any]:
    """Return what an objective of pairs reads, as `describe_pairs` of data/tokens/collate.py makes it."""
    counts = _targets(setting)
    return counts | ({"reference_log_probs": torch.zeros(setting.rows // 2, 2)} if objective.has_reference else {})


def _tag_batch(batch: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    recorder.tag((value for value in batch.values() if isinstance(value, torch.Tensor)), "batch")
    return batch


class _OnHost(Mapping[str, Any]):
    """A micro batch in host memory: `items()` moves its tensors to the device; access by key returns the host tensors
    that a step reads."""

    def __init__(self, host: dict[str, Any], recorder: Recorder) -> None:
        self._host = host
        self._recorder = recorder

    def __getitem__(self, key: str) -> Any:
        if key == "attention_mask":  # a step only counts its values, which a fake tensor lacks
            raise KeyError(key)
        return self._host[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._host)

    def __len__(self) -> int:
        return len(self._host)

    def items(self) -> Any:
        moved = {
            key: torch.empty_like(value, device="cpu") if isinstance(value, torch.Tensor) else value
            for key, value in self._host.items()
            if key != "labels"
        }
        return _tag_batch(moved, self._recorder).items()
