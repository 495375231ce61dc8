"""Writes and checks merged weights file by file: the peak memory is one file of the base and one matrix.

base files ─┐
            ├─ fold ─→ merged files, tensor names and files as in the base
adapter   ──┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surefit.core.errors import GateError
from surefit.core.rundir import write_json
from surefit.facts.experts import is_stack
from surefit.facts.safetensors import INDEX
from surefit.merge.adapter_file import AdapterFile, TokenRows, Update, parameter_of
from surefit.merge.experts import split_expert_updates
from surefit.merge.fold import fold_update, rounding_error
from surefit.model.experts import find_expert_problems, is_transposed
from surefit.model.identity import tensor_sha256
from surefit.model.layerwise_forward import WeightFiles, cast, names_in_files
from surefit.model.tokenizer import Resized
from surefit.model.vocabulary import vocabulary_modules

SAMPLED = 16
"""If a matrix equals the result of `fold_update`, only every 16th row is compared with float64 arithmetic."""
CHANGES_NOTHING = "the adapter changes nothing"
OnFile = Callable[[int, int], None]
"""(files done, files)."""


@dataclass
class FileCheckResult:
    """Findings of the check of the merged files.

    Attributes:
        off_disk: tensors that differ from what was written, or are missing. off_base: tensors without factors that
            differ from their expected value. not_finite: tensors with NaN or infinity.
        rounding: the largest `rounding_error` of a merged matrix, and its name.
    """

    off_disk: list[str] = field(default_factory=list)
    off_base: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    rounding: tuple[float, str] = (0.0, "")


class StreamedMerge:
    """A base model, an adapter, and their sum, computed tensor by tensor.

    Args:
        model: the base, from `model.layerwise_forward.empty_model`.
        weights: the base's files.
        adapter: an adapter that `find_misfits` has checked.
        dtype: dtype of the merged model.
        frozen: returns the weight that the adapter was trained on, for a stored one (`merge.dequantize`); it is called
            for every tensor, with its parameter's name.
        device: device that computes.
        parts: parameter → the updates that the adapter's update must be the sum of, if it combines several adapters;
            the merged weights are compared with that sum.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: WeightFiles,
        adapter: AdapterFile,
        dtype: torch.dtype,
        frozen: Callable[[str, torch.Tensor], torch.Tensor],
        device: str,
        parts: Mapping[str, Sequence[Update]] | None = None,
    ) -> None:
        self.parts = parts or {}
        self.model, self.weights, self.dtype = model, weights, dtype
        self.frozen, self.device = frozen, device
        self.adapter = split_expert_updates(adapter, model, weights)
        self.updates = {parameter_of(name, update): update for name, update in self.adapter.updates.items()}
        self.parameters: dict[str, list[str]] = {
            name: [name] for name in self.updates if name in weights and name not in dict(model.named_parameters())
        }
        for name, stored in names_in_files(model, weights).items():
            self.parameters.setdefault(stored, []).append(name)
        self.adapter = replace(self.adapter, rows=self._rows_of_tied(), base=self._base_of_tied())
        self.transposed = transposed(model, adapter)
        self._names: dict[str, dict[str, str | None]] = {}

    def _rows_of_tied(self) -> dict[str, TokenRows]:
        """Return the trained rows, with the embedding's also for a head that is tied to it, as PEFT trains it."""
        rows = dict(self.adapter.rows)
        for names in self.parameters.values():
            if names[0] in rows:
                rows |= {n: rows[names[0]] for n in names if n not in rows and n not in self.adapter.replaced}
        return rows

    def _base_of_tied(self) -> dict[str, torch.Tensor]:
        """Return the tensors that PEFT loads into the base, also under the names of the parameters tied to them."""
        base = dict(self.adapter.base)
        for names in self.parameters.values():
            base_tensor = next((self.adapter.base[name] for name in names if name in self.adapter.base), None)
            if base_tensor is not None:
                base |= {name: base.get(name, base_tensor) for name in names}
        return base

    @property
    def unties(self) -> bool:
        """Return whether the adapter changes two tied parameters differently, so that they become two tensors."""
        return any(len(self._written_as(stored)) > 1 for stored in self.parameters)

    def write(self, directory: Path, on_file: OnFile) -> dict[str, str]:
        """Write every file of the base with the merged tensors; return each tensor's sha256."""
        hashes: dict[str, str] = {}
        weight_map: dict[str, str] = {}
        size = 0
        for number, (file, names) in enumerate(self.weights.files.items()):
            on_file(number, len(self.weights.files))
            tensors = dict(self._merged(names))
            hashes |= {name: tensor_sha256(tensor) for name, tensor in tensors.items()}
            weight_map |= dict.fromkeys(tensors, file.name)
            size += sum(tensor.nbytes for tensor in tensors.values())
            save_file(tensors, directory / file.name, metadata={"format": "pt"})
        if (self.weights.directory / INDEX).exists():
            write_json(
                directory / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
            )
        return hashes

    def check(self, merged: WeightFiles, written: dict[str, str] | None, on_file: OnFile) -> FileCheckResult:
        """Compare the files of a merged model with the base, the adapter and the written tensors' hashes, tensor by
        tensor."""
        result = FileCheckResult()
        missing = {name for stored in self._stored() for name in self._written_as(stored)} - merged.names
        result.off_disk += sorted(missing)
        for number, names in enumerate(self.weights.files.values()):
            on_file(number, len(self.weights.files))
            for stored in names:
                for name, parameter in self._written_as(stored).items():
                    if name not in missing:
                        self._check(result, stored, name, parameter, merged.read(name), written)
        return result

    def _stored(self) -> Iterator[str]:
        return (name for names in self.weights.files.values() for name in names)

    def _written_as(self, stored: str) -> dict[str, str | None]:
        """Map each tensor name in the merged files to its parameter, None if the model has no such parameter."""
        if stored not in self._names:
            parameters = self.parameters.get(stored, [])
            changed_names = [name for name in parameters if name in self.adapter.changed]
            if changed_names and not all(self._same_change(parameters[0], name) for name in parameters[1:]):
                # Tied in the base, and no longer: one of them keeps the name in the file.
                first = next((n for n in parameters if n.endswith(stored) or stored.endswith(n)), parameters[0])
                self._names[stored] = {(stored if name == first else name): name for name in parameters}
            else:
                self._names[stored] = {stored: next(iter(changed_names or parameters), None)}
        return self._names[stored]

    def _same_change(self, one: str, other: str) -> bool:
        """Return whether the adapter changes two tied parameters in the same way."""
        adapter = self.adapter
        kinds: tuple[Mapping[str, Any], ...] = (
            {**adapter.base, **adapter.replaced},
            adapter.rows,
            adapter.added,
            self.updates,
        )
        return all(_equal(kind.get(one), kind.get(other)) for kind in kinds)

    def _merged(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for stored in names:
            for name, parameter in self._written_as(stored).items():
                tensor = self._base(stored, parameter)
                yield name, (tensor if parameter is None else self._changed(parameter, tensor)).cpu().contiguous()

    def _base(self, stored: str, parameter: str | None) -> torch.Tensor:
        """Return the tensor that the adapter's factors were trained on: the base's, with the rows of single tokens that
        the adapter trains, or the one that the adapter replaces."""
        if parameter is None:
            return self.weights.read(stored)
        full_tensor = next(
            (tensors[parameter] for tensors in (self.adapter.replaced, self.adapter.base) if parameter in tensors), None
        )
        if full_tensor is not None:
            tensor = cast(self.model, parameter, full_tensor, self.dtype).to(self.device, copy=True)
        else:
            stored_tensor = cast(self.model, parameter, self.weights.read(stored), self.dtype)
            tensor = self.frozen(parameter, stored_tensor.to(self.device))
        if parameter in self.adapter.rows:
            ids, rows = self.adapter.rows[parameter]
            tensor = tensor.clone()
            tensor[ids] = rows.to(tensor.device, tensor.dtype)
        return tensor

    def _changed(self, parameter: str, tensor: torch.Tensor) -> torch.Tensor:
        adapter = self.adapter
        if parameter in adapter.added:
            return (tensor.float() + adapter.added[parameter].to(tensor.device)).to(tensor.dtype)
        if parameter in self.updates:
            tensor = tensor.clone()
            fold_update(tensor.mT if parameter in self.transposed else tensor, self.updates[parameter])
        return tensor

    def _check(
        self,
        found: FileCheckResult,
        stored: str,
        name: str,
        parameter: str | None,
        tensor: torch.Tensor,
        written: dict[str, str] | None,
    ) -> None:
        if written is not None and tensor_sha256(tensor) != written.get(name):
            found.off_disk.append(name)
        if tensor.is_floating_point() and not all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor)):
            found.not_finite.append(name)
        base = self._base(stored, parameter)
        if parameter in self.updates:
            error = self._rounding(parameter, base, tensor)
            found.rounding = max(found.rounding, (error if error == error else float("inf"), name))
            return
        expected = base if parameter is None else self._changed(parameter, base)
        if tensor.dtype != expected.dtype or not torch.equal(tensor, expected.cpu()):
            found.off_base.append(name)

    def _rounding(self, parameter: str, base: torch.Tensor, tensor: torch.Tensor) -> float:
        """Return `rounding_error` of a merged matrix. If it is bit for bit the result of `fold_update`, only a sample
        of its rows is checked, since all were computed alike."""
        update = self.updates[parameter]
        if parameter in self.transposed:
            base, tensor = base.mT, tensor.mT
        folded = base.clone()
        fold_update(folded, update)
        step = SAMPLED if torch.equal(folded.cpu(), tensor) else 1
        magnitude = None if update.magnitude is None else update.magnitude[::step]
        rows = Update(update.a, update.b[..., ::step, :], update.scaling, magnitude)
        parts = [replace(part, b=part.b[..., ::step, :]) for part in self.parts.get(parameter, ())]
        return rounding_error(base[..., ::step, :], rows, tensor[..., ::step, :], parts)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two changes are equal: tensors, rows with their ids, factors, or None."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(map(_equal, one, other))
    if isinstance(one, Update) and isinstance(other, Update):
        fields = ("a", "b", "scaling", "magnitude")
        return all(_equal(getattr(one, name), getattr(other, name)) for name in fields)
    return bool(one == other) if type(one) is type(other) else False


def transposed(model: PreTrainedModel, adapter: AdapterFile) -> set[str]:
    """Return the parameters that are stored as inputs × outputs, or for which the adapter's factors are transposed."""
    modules = dict(model.named_modules())
    columns = {
        f"{name}.weight"
        for name, update in adapter.updates.items()
        if update.magnitude is not None and isinstance(modules.get(name), torch.nn.Embedding)
    }
    return columns | {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if isinstance(module := model.get_submodule(name.rpartition(".")[0]), Conv1D)
        or (is_stack(name, parameter.ndim) and is_transposed(module))
    }


def find_misfits(
    adapter: AdapterFile,
    model: PreTrainedModel,
    expected: set[str] | None = None,
    rows: Mapping[str, list[int]] | None = None,
) -> list[str]:
    """Return the parts of an adapter that do not fit this model, or were never trained.

    Args:
        expected: the layers that must have trained factors, if known. Otherwise a layer without an update is no
            problem, unless no layer has one.
        rows: embedding or head → ids of the new tokens that it must have rows for.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    swapped = transposed(model, adapter)
    problems = [f"{name} has no factors" for name in sorted((expected or set()) - adapter.updates.keys())]
    if expected is not None:
        problems += [f"{name} has factors but should have none" for name in sorted(adapter.updates.keys() - expected)]
    for name, update in adapter.updates.items():
        parameter = parameter_of(name, update)
        weight = parameters.get(parameter)
        shape = (*update.b.shape[:-1], update.a.shape[-1])
        if weight is None:
            problems.append(f"{name} is not a layer of the model")
        elif tuple(weight.mT.shape if parameter in swapped else weight.shape) != shape:
            problems.append(f"{name} has factors for shape {shape}, but the layer has {tuple(weight.shape)}")
    untrained = find_untrained_layers(adapter)
    if expected is not None:
        problems += [f"{name}: lora_B is all zeros: this layer was not trained" for name in untrained]
    elif untrained and len(untrained) == len(adapter.changed):
        problems.append(f"{CHANGES_NOTHING}: B·A is zero in each of its {len(untrained)} layers")
    problems += [
        f"{name}: lora_A and lora_B are all zeros: their values are lost"
        for name in untrained
        if not (adapter.updates[name].a.any() or adapter.updates[name].b.any())
    ]
    problems += find_expert_problems({name: (u.a, u.b) for name, u in adapter.updates.items() if u.a.ndim == 3})
    for name in (*adapter.replaced, *adapter.base, *adapter.rows):
        if name not in parameters:
            problems.append(f"{name} belongs to no layer of the model")
    for name in adapter.added:
        if name not in parameters:
            problems.append(f"{name} is a trained bias (lora_bias), but the layer has no bias to add it to")
    for name, tensor in (*adapter.replaced.items(), *adapter.base.items(), *adapter.added.items()):
        if name in parameters and parameters[name].shape != tensor.shape:
            model_shape = tuple(parameters[name].shape)
            problems.append(f"{name} has shape {tuple(tensor.shape)} in the adapter, but {model_shape} in the model")
    problems += _find_unsaved_weights(adapter, model)
    for name, (ids, tensor) in adapter.rows.items():
        if name in parameters and (len(ids), parameters[name].shape[1]) != tuple(tensor.shape):
            problems.append(f"{name} has rows of shape {tuple(tensor.shape)} for {len(ids)} tokens")
        elif name in parameters and max(ids) >= len(parameters[name]):
            problems.append(f"{name} has a row for token {max(ids)}, but the model has {len(parameters[name])} tokens")
    for module, ids in (rows or {}).items():
        if adapter.rows.get(f"{module}.weight", ([],))[0] != ids:
            problems.append(f"{module} does not have the rows of all {len(ids)} new tokens")
    return problems


def find_untrained_layers(adapter: AdapterFile) -> list[str]:
    """Return the layers with an update of zero, because lora_B (or lora_A, for tools that initialize it to zero) still
    has its initial value: such as a vision tower's, if an adapter of all linear layers was trained on text alone."""
    plain = {name: update for name, update in adapter.updates.items() if update.magnitude is None}
    return [name for name, update in plain.items() if not (bool(update.a.any()) and bool(update.b.any()))]


def _find_unsaved_weights(adapter: AdapterFile, model: PreTrainedModel) -> list[str]:
    """Return the weights that an adapter's settings list as trained and its file lacks: PEFT 0.19 and older dropped the
    biases (huggingface/peft#3306), and a conversion to plain LoRA drops all but the factors."""
    kind, copied = adapter.config.get("bias"), adapter.config.get("modules_to_save") or ()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    biases = [name for name in parameters if name.endswith(".bias")]
    if kind == "lora_only":
        biases = [name for name in biases if name.removesuffix(".bias") in adapter.updates]
    missing = [name for name in biases if name not in adapter.base] if kind in ("all", "lora_only") else []
    problems = []
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        problems.append(f"bias is {kind}, but the file does not have {missing[0]}{others}")
    ends = (copied,) if isinstance(copied, str) else tuple(copied)
    saved_modules = [name for name, _ in model.named_modules() if ends and name.endswith(ends)]
    lost_weights = [
        name
        for name in parameters
        if name not in adapter.replaced and any(name.startswith(f"{module}.") for module in saved_modules)
    ]
    return problems + [f"modules_to_save names {name}, but the file does not have it" for name in lost_weights[:1]]


def resized_vocabulary(adapter: AdapterFile, model: PreTrainedModel, tokens: int = 0) -> Resized | None:
    """Return the size of an adapter's vocabulary, if it brings every row that the base's files lack.

    Args:
        tokens: number of rows that the adapter's tokenizer needs.

    Raises:
        GateError: it has rows for tokens that the base lacks, but not for all of them.
    """
    matrices = [module.weight for module in vocabulary_modules(model)]
    rows = len(matrices[0])
    tied_names = [
        [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is matrix]
        for matrix in matrices
    ]
    new_weights: dict[str, tuple[torch.Tensor | None, list[int]]] = {}
    for names in tied_names:
        base_tensor = next((adapter.base[name] for name in names if name in adapter.base), None)
        ids = next((adapter.rows[name][0] for name in names if name in adapter.rows), [])
        new_weights |= {name: (adapter.replaced.get(name, base_tensor), ids) for name in names}
    sizes = [len(tensor) for tensor, _ in new_weights.values() if tensor is not None and tensor.ndim == 2]
    size = max([*(sizes or [rows]), *(max(ids) + 1 for _, ids in new_weights.values() if ids), tokens])
    if size == rows or (not sizes and size < rows):
        return None
    affected = next(
        (
            name
            for name, (tensor, ids) in new_weights.items()
            if (tensor is None or len(tensor) != size) and not (size > rows and {*range(rows, size)} <= {*ids})
        ),
        None,
    )
    if affected is None:
        return Resized(size)
    raise GateError(
        f"the adapter was made for a vocabulary of {size:,} tokens, but the base has {rows:,}; the rows of {affected} "
        "for the others are not in the adapter",
        code="E6401",
        path=adapter.directory,
        help="name the base from training, with its new rows: --base. On the training machine, "
        "model.save_pretrained of the resized base writes it. If these tokens never had rows, remove the tokenizer "
        "from the adapter's folder",
    )


def require_in_files(merge: StreamedMerge) -> None:
    """Raise if the files hold a changed parameter in another form than the model, such as the experts of some mixtures.

    Raises:
        GateError: names the first such parameter.
    """
    stored_parameters = {name for names in merge.parameters.values() for name in names}
    missing = sorted(merge.adapter.changed - stored_parameters)
    if missing:
        raise GateError(
            f"{missing[0]} is stored in another form than in the model, so the adapter cannot be merged into it",
            code="E6038",
            path=merge.weights.directory,
            help="serve the adapter with its base model, or convert the base with save_pretrained of this version of "
            "transformers first",
        )
