"""A model that reads its weights from its files while it runs: memory for its largest layer instead of for all.

It computes the outputs of the model in memory, bit for bit, at the speed of the disk: for a forward pass over a few
rows, not for generating text.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel

from surefit.config.schema import ModelSection
from surefit.core.errors import ModelError
from surefit.core.reading import library_errors
from surefit.facts.model import read_model_config
from surefit.facts.safetensors import INDEX, read_header, read_weight_index, weight_files
from surefit.model.adapter import adapter_errors, factors_in_compute_dtype
from surefit.model.classes import auto_class
from surefit.model.compat import renamed_in_files
from surefit.model.compile import decoder_layers
from surefit.model.sdpa import start_cuda
from surefit.model.tokenizer import NewTokens, Resized, new_tokens
from surefit.model.vocabulary import vocabulary_modules

NUDGED_AT_ONCE = 2**22
"""Numbers that are perturbed at once: 40 MiB of copies."""


class WeightFiles:
    """The weights of a model directory, read one tensor at a time.

    Attributes:
        files: the safetensors files, in the order of the index; name → tensors' names.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._grown: dict[str, NewTokens | Resized] = {}
        self.files = {file: list(read_header(file)) for file in weight_files(directory)}
        self._place = {name: file for file, names in self.files.items() for name in names}
        for name, file_name in read_weight_index(directory).items():
            if file_name != getattr(self._place.get(name), "name", None):
                raise ModelError(
                    f"{name} is not in {file_name}, contrary to the index",
                    code="E5066",
                    path=directory / INDEX,
                    help="files were exchanged or truncated: download or save the model again",
                )

    def __contains__(self, name: str) -> bool:
        return name in self._place

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._place)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor as it is in its file, on the CPU: a view of the mapped file, which must not be written
        to."""
        with safe_open(self._place[name], framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        return self._grown[name].into(tensor) if name in self._grown else tensor

    def grow(self, names: Collection[str], new: NewTokens | Resized) -> None:
        """Read these tensors with the rows of new tokens from now on, as `model.vocabulary.grow` makes them."""
        self._grown |= dict.fromkeys(names, new)


def empty_model(section: ModelSection, directory: Path, new: NewTokens | Resized | None = None) -> PreTrainedModel:
    """Return the model of a directory's config.json with parameters on the meta device and real buffers, in evaluation
    mode.

    Args:
        new: tokens with rows beyond config.json's vocabulary.

    Raises:
        ModelError: transformers builds no causal language model from it.
    """
    problem = "transformers cannot build a model from its config.json"
    with library_errors(directory, ModelError, problem, "choose a causal language model"):
        read_model_config(directory)
        config = AutoConfig.from_pretrained(directory, trust_remote_code=section.trust_remote_code)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        if new is not None:
            text = config.get_text_config()
            text.vocab_size = new.size(text.vocab_size)
        with init_empty_weights(include_buffers=False):
            model: Any = auto_class(config).from_config(
                config, dtype=getattr(torch, section.dtype), trust_remote_code=section.trust_remote_code
            )
    model.tie_weights()
    built = model.eval()
    assert isinstance(built, PreTrainedModel)
    return built


def names_in_files(model: PreTrainedModel, weights: WeightFiles) -> dict[str, str]:
    """Return parameter name → its name in the files, which may have the decoder's prefix or lack it, or be one that
    transformers renames while it loads.

    Parameters that share their weight with one in the files map to its name. A parameter in no file under either name
    is left out: transformers builds it from several tensors while it loads.
    """
    prefix = f"{model.base_model_prefix}."
    names: dict[str, str] = {}
    by_identity: dict[int, str] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters:
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if candidate in weights:
                names[name] = by_identity[id(parameter)] = candidate
                break
    if len(names) < len(parameters):
        identities = dict(parameters)
        for name, stored in renamed_in_files(model, weights.names - set(names.values())).items():
            names.setdefault(name, stored)
            by_identity.setdefault(id(identities[name]), stored)
    for name, parameter in parameters:
        if name not in names and id(parameter) in by_identity:
            names[name] = by_identity[id(parameter)]
    return names


def cast(model: PreTrainedModel, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the files in the dtype that loading the model gives it."""
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    if not tensor.is_floating_point() or any(part in kept for part in name.split(".")):
        return tensor
    return tensor.to(dtype)


class LayerwiseModel:
    """A model that holds its weights only while it runs, one decoder layer at a time.

    Attributes:
        model: the model to wrap with PEFT or to call; its parameters are stubs, its buffers real.
        weights: its files. names: parameter → tensor in them.
    """

    def __init__(self, section: ModelSection, directory: Path, device: str, resized: Resized | None = None) -> None:
        if device.startswith("cuda"):
            start_cuda()
        new = resized or new_tokens(section)
        self.model = empty_model(section, directory, new)
        self.weights = WeightFiles(directory)
        self.names = names_in_files(self.model, self.weights)
        if new is not None:
            matrices = {id(module.weight) for module in vocabulary_modules(self.model)}
            parameters = self.model.named_parameters()
            self.weights.grow([self.names[name] for name, parameter in parameters if id(parameter) in matrices], new)
        self.device = device
        stub_parameters(self.model, device)
        parameters = self.model.named_parameters(remove_duplicate=False)
        # Keyed by the parameters themselves: the id of a deleted one may be reused.
        self._stored = {parameter: self.names[name] for name, parameter in parameters if name in self.names}
        for name, buffer in self.model.named_buffers():
            if name in self.weights:
                buffer.copy_(self.weights.read(name))
            buffer.data = buffer.data.to(device)

    def why_not(self) -> str | None:
        """Return why this model cannot run from its files; None where it can."""
        missing = [name for name, _ in self.model.named_parameters() if name not in self.names]
        return f"{len(missing)} weights, {missing[0]} among them, are stored in another form" if missing else None

    def with_adapter(self, directory: Path, whole: Collection[str] = (), name: str = "default") -> PeftModel:
        """Return the model with a saved adapter beside its weights, in evaluation mode; the factors in the base's
        dtype.

        Args:
            whole: parameters that PEFT reads or writes while it loads the adapter; from then on they are real.
            name: PEFT's name of the adapter.
        """
        whole_ids = {id(self.model.get_parameter(name)) for name in whole}
        self._fill([slot for module in self.model.modules() for slot in _slots(module) if id(slot[2]) in whole_ids])
        with adapter_errors(directory):
            adapted = PeftModel.from_pretrained(
                self.model, str(directory), name, config=config_to_load(directory), autocast_adapter_dtype=False
            )
        assert isinstance(adapted, PeftModel)
        factors_in_compute_dtype(adapted)
        return adapted.eval()

    @contextlib.contextmanager
    def running(self, model: torch.nn.Module, nudge: float = 0.0) -> Iterator[None]:
        """Give every decoder layer, and every module outside of them, its weights only while it runs.

        Args:
            model: `self.model`, or a PEFT model around it, whose factors are real.
            nudge: share of itself by which each weight is changed, up or down: `perturb_weights`.
        """
        hooks = []
        layers = decoder_layers(model)
        layer_module_ids = {id(module) for layer in layers for module in layer.modules()}
        other_modules = [module for module in model.modules() if id(module) not in layer_module_ids]
        # PEFT's layers read the weight of the layer they wrap outside of its forward pass: DoRA does, for its norms.
        base_layer_of = {
            module: module.get_submodule("base_layer") for module in other_modules if isinstance(module, BaseTunerLayer)
        }
        base_layers = set(base_layer_of.values())
        units = [
            (module, [module, base_layer_of[module]] if module in base_layer_of else [module])
            for module in other_modules
            if module not in base_layers
        ]
        for unit, modules in [*((layer, list(layer.modules())) for layer in layers), *units]:
            slots = [slot for module in modules for slot in _slots(module) if slot[2] in self._stored]
            if slots:
                hooks.append(unit.register_forward_pre_hook(functools.partial(self._fill, slots, nudge)))
                hooks.append(unit.register_forward_hook(functools.partial(_empty, slots)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _fill(self, slots: list[Slot], nudge: float = 0.0, *_: Any) -> None:
        for module, attribute, parameter in slots:
            name = self._stored[parameter]
            tensor = cast(self.model, name, self.weights.read(name), parameter.dtype).to(self.device)
            if nudge:
                tensor = tensor.clone()
                perturb_weights(tensor, nudge, name)
            setattr(module, attribute, torch.nn.Parameter(tensor, requires_grad=False))


def config_to_load(directory: Path) -> PeftConfig:
    """Return the settings of a saved adapter, without the initialization of its factors: MiCA's decomposes every
    weight, for values that the file's then replace."""
    config: Any = PeftConfig.from_pretrained(str(directory))
    if config.init_lora_weights == "mica":
        config.init_lora_weights = False
    return config  # type: ignore[no-any-return]


def perturb_weights(tensor: torch.Tensor, share: float, name: str) -> None:
    """Multiply every number by 1 + share or 1 - share, at random but always the same for a name, in place."""
    table = _factors(share)
    start = -zlib.crc32(name.encode()) % NUDGED_AT_ONCE
    flat = tensor.view(-1)
    size = min(len(flat), NUDGED_AT_ONCE)
    factors = torch.cat([table[start : start + size], table[: max(0, start + size - NUDGED_AT_ONCE)]])
    factors = factors.to(tensor.device)
    for chunk in torch.split(flat, NUDGED_AT_ONCE):
        chunk.copy_(chunk.float().mul_(factors[: len(chunk)]))


@functools.lru_cache(maxsize=1)
def _factors(share: float) -> torch.Tensor:
    """Return random factors, shared by every tensor from different starts: drawing one for every weight would take
    longer than the forward pass."""
    bits = torch.empty(NUDGED_AT_ONCE).random_(0, 2, generator=torch.Generator().manual_seed(0))
    return bits.mul_(2).sub_(1).mul_(share).add_(1)


def stub_parameters(model: torch.nn.Module, device: str, only_meta: bool = False) -> None:
    """Replace every parameter, or every one on the meta device, by one number expanded to its shape, in place: PEFT,
    unlike with meta, treats that as a real weight."""
    stubs: dict[int, torch.nn.Parameter] = {}
    zeros: dict[torch.dtype, torch.Tensor] = {}
    for module in model.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if only_meta and not parameter.is_meta:
                continue
            if id(parameter) not in stubs:
                if parameter.dtype not in zeros:
                    zeros[parameter.dtype] = torch.zeros((), dtype=parameter.dtype, device=device)
                stub = zeros[parameter.dtype].expand(parameter.shape)
                stubs[id(parameter)] = torch.nn.Parameter(stub, requires_grad=False)
            setattr(module, attribute, stubs[id(parameter)])


Slot = tuple[torch.nn.Module, str, torch.nn.Parameter]
"""(module, attribute, the stub parameter)."""


def _slots(module: torch.nn.Module) -> list[Slot]:
    return [(module, attribute, parameter) for attribute, parameter in module.named_parameters(recurse=False)]


def _empty(slots: list[Slot], *_: Any) -> None:
    for module, attribute, parameter in slots:
        setattr(module, attribute, parameter)
