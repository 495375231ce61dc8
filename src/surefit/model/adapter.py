"""LoRA: adding the factors to a model, and the check that a trained adapter is complete."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surefit.config.schema import LoraSection, ModelSection
from surefit.core.errors import ConfigError, GateError, did_you_mean
from surefit.core.reading import library_errors, read_json_file
from surefit.core.units import shell_quote, truncate_text
from surefit.facts.all_linear import closed_to_lora, ends_with, is_product, without_gradient
from surefit.facts.experts import experts_of, wrappers
from surefit.facts.lora_settings import (
    MERGE_IT,
    PREFIX,
    find_non_lora_setting,
    find_setting_blocking_training,
    matching_exactly,
    rename_problem,
)
from surefit.facts.validate_model_files import require_sound_adapter
from surefit.model.experts import Stacks, expert_stacks, find_expert_problems, of_each, router_stacks, wrapped_stacks
from surefit.model.identity import RECORD, base_directory, base_identity, describe_base, read_record
from surefit.model.tokenizer import tokens_with_rows
from surefit.model.vocabulary import compute_rows_apart, token_rows

FIELD = "lora.target_modules"
START = "lora.start_from"
SWITCHES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "use_rslora": lambda peft: bool(peft.get("use_rslora")),
    "use_dora": lambda peft: bool(peft.get("use_dora")),
    "experts": lambda peft: experts_of(peft.get("target_parameters")),
}
"""Settings of the config that an adapter must have been trained with → their values in PEFT's settings."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PICKLED = "adapter_model.bin"
TOKENIZER = "tokenizer_config.json"
TOKENS = ".token_adapter.base_layer"
"""Ending of PEFT's name for a matrix of which single rows are trained."""
ROWS = ".token_adapter.trainable_tokens_delta"
"""Suffix of PEFT's name for the trained rows of such a matrix."""


def add_adapter(
    model: PreTrainedModel, section: LoraSection, seed: int = 0, new_tokens: Sequence[int] = ()
) -> PeftModel:
    """Freeze `model` and add LoRA factors beside its linear layers, in place; with DoRA also a magnitude per output,
    and with `experts` factors beside the stacks of routed experts, or beside the routers too. In the vocabulary's
    matrices the rows `new_tokens`, which are consecutive, are trained.

    The factors are in the dtype the base computes in, also where its weights are quantized: PEFT's own default, float32
    factors, would make a float32 copy of every layer's input. The optimizer keeps float32 masters of them
    (train/optim.py). The initial values depend on `seed` alone, and drawing them leaves torch's global random state as
    it was.

    Raises:
        ConfigError: an entry of `target_modules` matches no linear layer; `experts` is set, and there is no stack of
            them; the head has factors together with trained rows or a bias.
    """
    targets = adapted_modules(model, section.target_modules)
    stacks = adapted_stacks(model, section)
    rows = token_rows(model, new_tokens) if new_tokens else {}
    if conflicting := sorted(rows.keys() & targets.keys()):
        raise ConfigError(
            f"{conflicting[0]} cannot have factors: the new tokens' rows in it are trained",
            code="E5022",
            field=FIELD,
            help="remove it, or write all-linear",
        )
    config = LoraConfig(
        r=section.r,
        lora_alpha=section.lora_alpha,  # type: ignore[arg-type] # PEFT only divides by r, so a fraction is fine
        lora_dropout=section.lora_dropout,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        target_modules=_for_peft(model, section.target_modules, targets),
        target_parameters=sorted({".".join(name.split(".")[-3:]) for name in stacks}) or None,
        trainable_token_indices=rows or None,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT 0.21 uses deprecated names of transformers 5.23
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    assert isinstance(adapted, PeftModel)
    factors_in_compute_dtype(adapted)
    compute_rows_apart(adapted)
    assert lora_modules(adapted) == targets | stacks, "PEFT adapted other layers than SureFit planned"
    # PEFT keeps sets, whose order changes from process to process; the saved config should not.
    config.target_modules = sorted(config.target_modules or ())
    config.target_parameters = sorted(config.target_parameters or ()) or None
    return adapted


def _for_peft(model: PreTrainedModel, asked: str | list[str], targets: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the `target_modules` for PEFT: the config's endings, or full names where its all-linear or an ending would
    match more layers than these."""
    endings = () if asked == "all-linear" else tuple(asked)
    matches = {name for name, _ in model.named_modules() if any(ends_with(name, ending) for ending in endings)}
    return list(endings) if matches == targets.keys() else sorted(targets)


def load_initial_adapter(model: PeftModel, directory: Path, base: ModelSection) -> list[str]:
    """Replace the fresh factors by a trained adapter's, in place.

    Args:
        model: from `add_adapter`.
        directory: the trained adapter: a run's adapter/, or one that PEFT saved.
        base: the base model; a run's adapter records the one it was trained on, and this must be the same.

    Returns:
        Sentences where no record names the base model it was trained on, and where that had tokens that the base lacks.

    Raises:
        ConfigError: it has another rank, scale or kind, adapts other layers, or was trained on another base model.
        GateError: it is not complete.
    """
    _require_like(model, directory)
    tensors = load_file(directory / WEIGHTS)
    with torch.no_grad():
        for name, tensor in tensors.items():
            model.get_parameter(f"{name.removesuffix('.weight')}.{model.active_adapter}.weight").copy_(tensor)
    if not (directory / RECORD).exists():
        note = f"{directory} does not record its base model; this is right only if it was this one"
        return [note, *_tokens_left_out(model, directory, base)]
    trained_on = read_record(directory)["base"]
    if trained_on["sha256"] != base_identity(base_directory(base)):
        raise ConfigError(
            f"it was trained on {describe_base(trained_on)}, whose files differ from {base.name_or_path}",
            code="E5023",
            path=directory,
            field=START,
            help="name the model that the adapter was trained on, or start a new adapter",
        )
    return []


def _tokens_left_out(model: Any, directory: Path, base: ModelSection) -> list[str]:
    """Return a sentence where the tokenizer beside an adapter has tokens for which the base has no rows."""
    if not (directory / TOKENIZER).is_file():
        return []
    rows = len(model.get_input_embeddings().weight)
    tokens = tokens_with_rows(base, str(directory), rows)
    if tokens <= rows:
        return []
    return [
        f"the tokenizer in {directory} has {tokens:,} tokens, but {base.name_or_path} has rows for {rows:,}: the "
        "training continues without the other tokens"
    ]


def _require_like(model: PeftModel, directory: Path) -> None:
    """Raise unless an adapter has the shapes and settings of the fresh one."""
    try:
        saved = require_sound_adapter(read_json_file(directory / CONFIG), directory / CONFIG)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the adapter cannot be read: {error}",
            code="E5024", path=directory, field=START, help="name a directory that has "
            f"{CONFIG} and {WEIGHTS} in it",
        ) from error  # fmt: skip
    fresh = model.active_peft_config.to_dict()
    for key, name in (("r", "lora.r"), ("lora_alpha", "lora.lora_alpha")):
        if saved.get(key) != fresh[key]:
            raise ConfigError(
                f"the adapter has {name} {saved.get(key)}, but the config has {fresh[key]:g}",
                code="E5025",
                path=directory,
                field=name,
                help=f"set {name}: {saved.get(key)}",
            )
    for setting, read_setting in SWITCHES.items():
        saved_value, fresh_value = (str(read_setting(values)).lower() for values in (saved, fresh))
        if saved_value != fresh_value:
            raise ConfigError(
                f"the adapter has {setting} {saved_value}, but the config has {fresh_value}",
                code="E5026",
                path=directory,
                field=f"lora.{setting}",
                help=f"set lora.{setting}: {saved_value}",
            )
    if (problem := find_non_lora_setting(saved)) is not None:
        raise ConfigError(
            f"training cannot continue from the adapter: {problem.reason}",
            code="E5400",
            path=directory / CONFIG,
            field=START,
            help=f"{problem.help}; or start a new adapter",
        )
    if unsupported := find_setting_blocking_training(saved):
        raise ConfigError(
            f"the adapter has {unsupported}, which SureFit does not train",
            code="E5027",
            path=directory,
            field=START,
            help="merge it and name the merged model, without start_from; or start from a plain LoRA adapter",
        )
    if saved.get("trainable_token_indices"):
        raise ConfigError(
            "the adapter has rows of new tokens, but only factors can be trained further",
            code="E5028",
            path=directory,
            field=START,
            help="merge it, and name the merged model, which has the tokens, without start_from",
        )
    layers, tensors = lora_modules(model), _names_in(directory)
    require_readable_names(tensors, directory)
    if other_tensors := [name.removeprefix(PREFIX) for name in tensors if ".lora_" not in name]:
        raise ConfigError(
            f"the adapter has {other_tensors[0]} as a full tensor, but only factors can be trained further",
            code="E5750",
            path=directory,
            field=START,
            help="merge it and name the merged model, without start_from",
        )
    names = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors}
    if differing := sorted(names ^ set(_peft_modules(layers).values())):
        raise ConfigError(
            f"the adapter and the config differ in {len(differing)} layers, {differing[0]} among them",
            code="E5029",
            path=directory,
            field=FIELD,
            help=_way_on(model, names, layers),
        )
    require_complete_adapter(directory, layers)


def _way_on(model: PeftModel, had: set[str], layers: Mapping[str, tuple[int, ...]]) -> str:
    """Return the help: the `target_modules` that match the adapter's factors, or to merge it, where none do."""
    head = model.get_output_embeddings()
    shared = head is not None and head.weight is model.get_input_embeddings().weight
    shapes = _linear_shapes(model)
    linear = {
        name.removeprefix(PREFIX).removesuffix(".base_layer")
        for name, module in model.named_modules()
        if name in shapes and ".lora_" not in name and not (shared and module is head)
    }
    stacks = {wrapper for name, wrapper in _peft_modules(layers).items() if len(layers[name]) == 3}
    had_linear = had - stacks
    endings = matching_exactly(had_linear, linear) if had_linear and had_linear <= linear else None
    if endings and not any(closed_to_lora(model.config.model_type, name) for name in had_linear):
        return f"set {FIELD}: [{', '.join(endings)}]"
    return f"no {FIELD} selects all of its factors: {MERGE_IT}"


def require_weights_file(directory: Path) -> None:
    """Require adapter_model.safetensors in a directory.

    Raises:
        GateError: only a pickled adapter_model.bin is there, with the command that converts it.
    """
    if (directory / WEIGHTS).exists() or not (directory / PICKLED).is_file():
        return
    raise GateError(
        f"there is no {WEIGHTS}, only {PICKLED}, a pickle, which SureFit does not read because it can run code",
        code="E5401",
        path=directory / PICKLED,
        help=f"convert it once, weights only: {_convert(directory, 'k', PICKLED)}",
    )


def require_readable_names(names: Iterable[str], directory: Path) -> None:
    """Require tensor names that PEFT finds in its model.

    Raises:
        GateError: other names, such as a compiled or wrapped model's, with the command that renames them.
    """
    if (fault := rename_problem(names)) is None:
        return
    problem, expression = fault
    command = f", or rename them in place: {_convert(directory, expression, WEIGHTS)}" if expression else ""
    raise GateError(
        f"the adapter's tensors do not have PEFT's names: {problem}, so PEFT would load only the base",
        code="E5402",
        path=directory / WEIGHTS,
        help=f"save it again with PeftModel.save_pretrained of the unwrapped model{command}",
    )


def _convert(directory: Path, expression: str, source: str) -> str:
    """Return the command that writes an adapter's tensors under other names, or a pickle's as safetensors."""
    reader = "from safetensors.torch import load_file as read, save_file"
    if source == PICKLED:
        reader = "from functools import partial; from safetensors.torch import save_file; from torch import load; "
        reader += "read = partial(load, map_location='cpu', weights_only=True)"
    code = (
        f"{reader}; t = {{{expression}: v.contiguous() for k, v in read('{source}').items()}}; "
        f"save_file(t, '{WEIGHTS}', metadata={{'format': 'pt'}})"
    )
    return f'cd {shell_quote(directory)} && python -c "{code}"'


def require_values(tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Require that every tensor of an adapter has values, and only finite ones.

    Raises:
        GateError: a tensor is empty or has other values; names the first.
    """
    empty = [name for name, tensor in tensors.items() if not tensor.numel()]
    if empty:
        shape = tuple(tensors[empty[0]].shape)
        raise GateError(
            f"the adapter is not complete: {empty[0]} has shape {shape} and no values, like {len(empty)} of "
            f"{len(tensors)} tensors: it was saved while DeepSpeed ZeRO-3 or FSDP sharded it",
            code="E5403",
            path=directory / WEIGHTS,
            help="save it again with its parameters gathered (stage3_gather_16bit_weights_on_model_save: true, or "
            "trainer.save_model), or take the weights of a checkpoint with its zero_to_fp32.py; these files have none",
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise GateError(
                f"the adapter is not complete: {name} has values that are not finite",
                code="E6001",
                path=directory / WEIGHTS,
                help="do not use it; train again, and check the loss in metrics.jsonl",
            )


def _names_in(directory: Path) -> list[str]:
    require_weights_file(directory)
    try:
        with safe_open(directory / WEIGHTS, framework="pt") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"its weights cannot be read: {error}",
            code="E5030",
            path=directory / WEIGHTS,
            field=START,
            help="copy the adapter again",
        ) from error


def factors_in_compute_dtype(model: PeftModel) -> None:
    """Cast the LoRA factors to the dtype of the embeddings, which are never quantized.

    PEFT uses the dtype of the layer's own weights, which over 4-bit ones leaves float32, over float8 ones gives float8,
    and on meta leaves float32.
    """
    dtype = model.get_input_embeddings().weight.dtype
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(dtype)


def adapted_modules(model: PreTrainedModel, target_modules: str | list[str]) -> dict[str, tuple[int, int]]:
    """Return the linear layers that get factors: full dotted name → (outputs, inputs).

    Args:
        model: the base model, without an adapter.
        target_modules: "all-linear" (all but the output head and layers closed to PEFT), or name endings such as
            `q_proj`. Neither includes routers and layers that learn nothing from text (facts/all_linear.py).

    Raises:
        ConfigError: an ending matches no linear layer, a head that shares its weight with the embedding, or is
            closed to PEFT (facts/all_linear.py).
    """
    layers, kind = _linear_shapes(model), model.config.model_type
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    heads = {name for name, module in model.named_modules() if module is head}
    if target_modules == "all-linear":
        return {name: shape for name, shape in layers.items() if name not in heads and not closed_to_lora(kind, name)}
    for ending in target_modules:
        if closed_to_lora(kind, ending):
            raise ConfigError(
                f"{ending!r} of a {kind} cannot have factors",
                code="E5031",
                field=FIELD,
                help="remove it; `surefit explain ADP008` says why",
            )
    for ending in target_modules:
        if not any(ends_with(name, ending) for name in layers):
            last_names = sorted({name.rpartition(".")[2] for name in layers})
            raise ConfigError(
                f"no linear layer's name ends in {ending!r}{did_you_mean(ending, last_names)}",
                code="E5032",
                field=FIELD,
                help=f"choose from {', '.join(last_names)}, or all-linear",
            )
    chosen = {name: shape for name, shape in layers.items() if any(ends_with(name, e) for e in target_modules)}
    shared = head is not None and head.weight is model.get_input_embeddings().weight
    if shared and heads & chosen.keys():
        raise ConfigError(
            f"the output head {', '.join(sorted(heads))} shares its weight with the input embedding",
            code="E5033",
            field=FIELD,
            help="remove it: merged into the shared weight, the adapter would also change the embedding",
        )
    return chosen


def adapted_stacks(model: PreTrainedModel, section: LoraSection) -> Stacks:
    """Return the stacks of experts that get factors, and the routers, as stacks of one.

    Raises:
        ConfigError: the config requires them, and the model has none that PEFT can adapt.
    """
    stacks = expert_stacks(model) if section.experts else {}
    if section.experts and not stacks:
        raise ConfigError(
            f"a {model.config.model_type} has no experts that can have factors",
            code="E5034",
            field="lora.experts",
            help="set lora.experts: false",
        )
    routers = router_stacks(model) if section.experts == "with_router" else {}
    if section.experts == "with_router" and not routers:
        raise ConfigError(
            f"a {model.config.model_type} has no routers that can have factors",
            code="E5035",
            field="lora.experts",
            help="set lora.experts: true, which leaves routers as they are",
        )
    return stacks | routers


def lora_modules(model: PeftModel) -> dict[str, tuple[int, ...]]:
    """Return the modules of `model` with LoRA factors: full dotted name in the base model → (outputs, inputs) of a
    layer, (experts, outputs, inputs) of a stack of experts."""
    layers = {name: shape for name, shape in _linear_shapes(model).items() if not name.endswith(TOKENS)}
    wrapped = {name: shape for name, shape in layers.items() if name.endswith(".base_layer")}
    stacks = {name.removeprefix(PREFIX): shape for name, shape in wrapped_stacks(model).items()}
    routers = {name.removesuffix(".weight") for name in stacks}  # which may be linear layers as well
    shapes: dict[str, tuple[int, ...]] = {
        name.removeprefix(PREFIX).removesuffix(".base_layer"): shape for name, shape in wrapped.items()
    }
    return {name: shape for name, shape in shapes.items() if name not in routers} | stacks


@contextmanager
def adapter_errors(directory: Path) -> Iterator[None]:
    """Raise PEFT's error with the adapter's directory, after its settings passed `facts/validate_model_files.py`."""
    advice = "it belongs to another base, or is damaged: name the base it was trained with, or copy it again"
    with library_errors(directory, GateError, "the adapter cannot be loaded", advice):
        require_sound_adapter(read_json_file(directory / CONFIG), directory / CONFIG)
        try:
            yield
        except RuntimeError as error:
            _, *reasons = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
            if not reasons:
                raise
            remainder = f" and {len(reasons) - 2} more" if len(reasons) > 2 else ""
            first_reasons = truncate_text("; ".join(reasons[:2]), 400)
            raise GateError(
                f"the adapter cannot be loaded: {first_reasons}{remainder}", code="E5404", path=directory, help=advice
            ) from error


def trainable_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return the numbers of trained and of all parameters, shared ones counted once."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def _peft_modules(modules: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return adapted layer or stack → the module in which PEFT keeps its factors."""
    return {name: name for name in modules} | wrappers(name for name, shape in modules.items() if len(shape) == 3)


def require_complete_adapter(directory: Path, modules: Mapping[str, tuple[int, ...]]) -> None:
    """Check, between training and every later stage, that the saved adapter is complete and trained.

    Args:
        directory: an adapter as PEFT saves it.
        modules: full dotted name → shape of every layer and stack it must adapt, from `lora_modules`.

    Raises:
        GateError: files missing or damaged; a layer without factors, or factors for no layer; wrong shapes; values that
            are not finite; a `lora_B` that is still all zero, its initial value; an expert without factors; rows of new
            tokens missing for a token.
    """
    try:
        config = require_sound_adapter(read_json_file(directory / CONFIG), directory / CONFIG)
        rank, dora = int(config["r"]), bool(config.get("use_dora"))
        tensors = load_file(directory / WEIGHTS)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise GateError(
            f"the adapter cannot be read: {error}", code="E5036", path=directory, help="train again"
        ) from error
    expected: dict[str, tuple[int, ...]] = {}
    wrapper = _peft_modules(modules)
    for name, (*experts, outputs, inputs) in modules.items():
        ranks = rank * math.prod(experts)
        expected[f"{PREFIX}{wrapper[name]}.lora_A.weight"] = (ranks, inputs)
        expected[f"{PREFIX}{wrapper[name]}.lora_B.weight"] = (outputs, ranks)
        if dora:
            expected[f"{PREFIX}{name}.lora_magnitude_vector"] = (outputs,)
    for name, ids in (config.get("trainable_token_indices") or {}).items():
        key = f"{PREFIX}{name}{ROWS}"
        expected[key] = (len(ids), *(tensors[key].shape[1:] if key in tensors else ()))
    problems = [
        _fault(name, tensors.get(name), expected.get(name)) for name in sorted(expected.keys() | tensors.keys())
    ]
    if not any(problems):
        factors = {}
        for name in (name for name, shape in modules.items() if len(shape) == 3):
            a, b = (tensors[f"{PREFIX}{wrapper[name]}.lora_{half}.weight"] for half in "AB")
            factors[name] = of_each(a, b, modules[name][0])
        problems += find_expert_problems(factors)
    if faults := [problem for problem in problems if problem]:
        remainder = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise GateError(
            f"the adapter is not complete: {'; '.join(faults[:3])}{remainder}",
            code="E5037",
            path=directory / WEIGHTS,
            help="do not use it; train again, and check the loss in metrics.jsonl",
        )


def _fault(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...] | None) -> str | None:
    if tensor is None:
        return f"{name} is missing"
    if shape is None:
        return f"{name} belongs to no layer of the model"
    if tuple(tensor.shape) != shape:
        return f"{name} has shape {tuple(tensor.shape)}, expected {shape}"
    if not bool(torch.isfinite(tensor).all()):
        return f"{name} has values that are not finite"
    if ".lora_B." in name and not bool(tensor.any()):
        return f"{name} is all zeros: this layer was not trained"
    return None


def _linear_shapes(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    shapes = {}
    for name, module in model.named_modules():
        if not is_product(name) or without_gradient(name):
            continue
        if isinstance(module, torch.nn.Linear):
            shapes[name] = (module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape  # GPT-2's layers hold their weight transposed
            shapes[name] = (outputs, inputs)
    return shapes
