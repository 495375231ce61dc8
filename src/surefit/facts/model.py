"""Facts about a base model, from its config.json and the headers of its weight files: no weights, no torch.

A name is looked up where it is cheapest: the built-in model, a GGUF file, a local directory, the Hugging Face cache,
the packaged catalogue of well-known models (so that a gated model can be checked and planned before access is granted),
the hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from surefit import nano
from surefit.core import env
from surefit.core.errors import MachineError, ModelError, did_you_mean
from surefit.core.units import truncate_text
from surefit.facts.all_linear import is_expert, is_product
from surefit.facts.architecture import Structure, architecture_of, dimensions, structure, text_section
from surefit.facts.attention import attention_needs, packing_obstacle, shares_prompts
from surefit.facts.experts import NO_STACKS, find_expert_stacks, lone_numbers, routers
from surefit.facts.gguf import read_gguf
from surefit.facts.gguf_model import config_of
from surefit.facts.gguf_source import GgufSource, gguf_source, require_reader
from surefit.facts.low_bits import (
    dequantization_obstacle,
    dequantized_config,
    dequantized_headers,
    detect_low_bit_format,
)
from surefit.facts.named_templates import DEFAULT, TOOL_USE, templates_in
from surefit.facts.safetensors import TensorHeader, read_weights
from surefit.facts.validate_model_files import read_json_object, require_sound_config, template_of

NANO = "surefit/nano"
_FOLDER = "name the folder that holds config.json and *.safetensors"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
CATALOGUE = Path(__file__).parent / "catalogue"
_UNSLOTH_4BIT = re.compile(r"(-unsloth)?-bnb-4bit$", re.IGNORECASE)
_STORED = {"-bnb-4bit": "bitsandbytes", "-bnb-8bit": "bitsandbytes", "-gptq": "gptq", "-awq": "awq"}
_NF4_OF_BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "consolidated*.pth")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_HEADER_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
ModelSource = Literal["local", "gguf", "cache", "catalogue", "hub"]


@dataclass(frozen=True)
class ModelFacts:
    """A base model in numbers.

    Attributes:
        name: name or path as the user wrote it.
        path: the local folder of its files; None where they are not on this machine, or not converted yet.
        gguf: its GGUF file; None for any other model, and where only its conversion is on this machine.
        architecture: the model class in config.json; empty where it names none.
        intermediate_size: the MLP's width; None where config.json has no such number.
        max_position_embeddings: the context length in tokens; None where config.json does not state one.
        tied_embeddings: the output head is the embedding matrix.
        parameters: trainable parameters, a tied head counted once; from the weight files where they can be read, else
            from the closed form; None for an architecture the closed form does not cover.
        expected_parameters: the closed form's count, None where there is none; differs from `parameters` only where the
            weight files do not belong to the config.json.
        linear_modules: dotted name → (out features, in features) of every linear layer, the output head included
            unless it is tied; empty where they are not known. Routed experts and routers are none
            (facts/all_linear.py).
        expert_parameters: number of the parameters that are routed experts'; None where it is not known.
        expert_stacks: name → (experts, outputs, inputs) of the stacks that transformers makes of them.
        lone_expert_parameters: number of experts' parameters stored as matrices of their own in the files.
        routers: name → (1, experts, inputs) of the matrices that choose among them.
        router_loss: config.json sets the routers' auxiliary loss (`output_router_logits`).
        dtype: the dtype the weights are stored in, as torch names it; None where neither config.json nor a header
            states it.
        weight_bytes: the size of the weights as stored; None where it is not known.
        has_weights: safetensors files with all weights are in `path`.
        pickle_only: there are weights, but only in formats that can run code when they are loaded.
        source: where the facts come from.
        chat_template: the template's text; None where there is none or (see `has_chat_template`) it was not read.
        tool_template: the template for conversations with tools, where the model has one beside `chat_template`.
        other_template: a template that other programs may use in its place: tokenizer_config.json's beside a
            chat_template.jinja, or the model's own where the config names another.
        has_chat_template: None where it is not known.
        gated: access has to be granted by the owner; None where it is not known.
        custom_code: config.json points to Python code that comes with the model; code_files: its files.
        quantization: the method the stored weights are quantized with, or None; stored_nf4: bitsandbytes' NF4.
        dequantized_from: how files in FP8 or MXFP4 are stored; all other fields describe the dequantized weights.
        unreadable: why such files cannot be dequantized (facts/low_bits.py), or None.
        packing_obstacle: why examples of this model cannot be packed (facts/attention.py), or None.
        shares_prompts: two answers behind one prompt are known to be exact (facts/attention.py).
        written_by: the transformers release that wrote config.json, where it says so.
        padded_attention: transformers' attention code for padded batches: sdpa, or eager where sdpa does not support
            the model (a softcap, sinks).
        new_tokens: tokens the config adds to the vocabulary; `vocab_size` already counts them (facts/vocabulary.py).
        activation: the function in the MLPs, as `hidden_act` of config.json names it; None where it does not.
    """

    name: str
    path: Path | None
    architecture: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int | None
    vocab_size: int
    max_position_embeddings: int | None
    tied_embeddings: bool
    parameters: int | None
    linear_modules: dict[str, tuple[int, int]] = field(repr=False)
    dtype: str | None
    weight_bytes: int | None
    has_weights: bool
    source: ModelSource
    chat_template: str | None = field(default=None, repr=False)
    tool_template: str | None = field(default=None, repr=False)
    other_template: str | None = field(default=None, repr=False)
    has_chat_template: bool | None = None
    expected_parameters: int | None = None
    expert_parameters: int | None = None
    expert_stacks: dict[str, tuple[int, int, int]] = field(default_factory=dict, repr=False)
    lone_expert_parameters: int = 0
    routers: dict[str, tuple[int, int, int]] = field(default_factory=dict, repr=False)
    router_loss: bool = False
    pickle_only: bool = False
    gated: bool | None = None
    custom_code: bool = False
    code_files: tuple[str, ...] = ()
    quantization: str | None = None
    stored_nf4: bool = False
    packing_obstacle: str | None = None
    shares_prompts: bool = False
    padded_attention: str = "sdpa"
    gguf: Path | None = None
    written_by: str | None = None
    new_tokens: int = 0
    activation: str | None = None
    dequantized_from: str | None = None
    unreadable: str | None = None


def model_facts(name_or_path: str, revision: str | None = None, patience: float | None = None) -> ModelFacts:
    """Return the facts about a base model.

    Args:
        name_or_path: `surefit/nano`, a directory, a GGUF file, or a hub id.
        revision: the hub revision. The catalogue knows one revision of each model and is used for all of them: a
            published model's shape does not change.
        patience: seconds to wait for the hub's first answer (facts/hub.py); None leaves it to huggingface_hub.

    Raises:
        ModelError: there is no such model, or it is incomplete, damaged or gated.
        MachineError: the hub is needed and cannot be reached, or a GGUF file needs a package.
    """
    if name_or_path == NANO:
        return directory_facts(nano.PATH, NANO)
    source = gguf_source(name_or_path)
    if source is not None:
        return gguf_facts(source)
    path = _as_path(name_or_path)
    if path.is_dir():
        return directory_facts(path, name_or_path)
    _refuse_what_is_no_hub_id(name_or_path, path)
    snapshot = cached_snapshot(name_or_path, revision)
    cached = directory_facts(snapshot, name_or_path, "cache") if snapshot else None
    if cached and cached.parameters is not None:
        return cached
    entry = known_model(name_or_path)
    if entry:
        return _catalogue_facts(name_or_path, entry)
    try:
        return _hub_facts(name_or_path, revision, patience)
    except MachineError:
        if cached:
            return cached
        raise


def _as_path(name: str) -> Path:
    try:
        path = Path(name).expanduser()
        path.stat()
    except FileNotFoundError:
        return path
    except (OSError, ValueError, RuntimeError):
        raise ModelError(
            f"{name[:80]!r} is neither a readable directory nor a hub id",
            code="E2080",
            field="model.name_or_path",
            help="give a folder that you may read, a hub id such as Qwen/Qwen3-0.6B, or surefit/nano",
        ) from None
    return path


def _refuse_what_is_no_hub_id(name: str, path: Path) -> None:
    if path.is_file():
        advice = "name the folder that holds config.json and *.safetensors, or a GGUF file"
        raise ModelError("a file, not a model directory", code="E2081", path=path, help=advice)
    if HUB_ID.fullmatch(name) and not (name.count("/") == 0 and "." in name):
        return
    siblings = [str(entry) for entry in path.parent.glob("*/")]
    raise ModelError(
        f"no such model directory{did_you_mean(str(path), siblings)}",
        code="E2082",
        path=name,
        help="give a folder with config.json and *.safetensors, a hub id such as Qwen/Qwen3-0.6B, or surefit/nano",
    )


def gguf_facts(source: GgufSource) -> ModelFacts:
    """Return the facts about a GGUF file: from its conversion where that exists, else predicted from the header."""
    directory = source.converted()
    if directory is not None:
        return replace(directory_facts(directory, source.name, "gguf"), gguf=source.file)
    file = source.require_file()
    require_reader()
    header = read_gguf(file)
    template = header.metadata.get("tokenizer.chat_template")
    facts = build_facts(
        source.name,
        config_of(header),
        {name: TensorHeader("F32", tensor.shape, 4 * tensor.elements) for name, tensor in header.tensors.items()},
        where=header.path,
        source="gguf",
        chat_template=template if isinstance(template, str) else None,
        has_chat_template=isinstance(template, str),
    )
    return replace(facts, gguf=header.path)


def directory_facts(directory: Path, name: str, source: ModelSource = "local") -> ModelFacts:
    """Return the facts about a model in a folder."""
    config = read_model_config(directory)
    tensors = read_weights(directory)
    problem = dequantization_obstacle(config, tensors or {})
    stored = detect_low_bit_format(config) if tensors and problem is None else None
    if stored and tensors:
        config, tensors = dequantized_config(config), dequantized_headers(stored, tensors)
    templates = templates_in(directory)
    facts = build_facts(
        name,
        config,
        tensors,
        where=directory / "config.json",
        source=source,
        path=directory,
        chat_template=templates.get(DEFAULT),
        pickle_only=tensors is None and any(next(directory.glob(pattern), None) for pattern in PICKLES),
    )
    other_template = _template_beside(directory) if facts.chat_template else None
    stored_as = stored.method if stored else None
    return replace(
        facts,
        dequantized_from=stored_as,
        unreadable=problem,
        other_template=other_template,
        tool_template=templates.get(TOOL_USE),
    )


def read_model_config(directory: Path) -> dict[str, Any]:
    """Read a model folder's config.json. Without a sound one, the ModelError says what the folder is."""
    path = directory / "config.json"
    if not path.is_file():
        if (directory / "adapter_config.json").is_file():
            raise ModelError(
                "a LoRA adapter, not a base model",
                code="E2083",
                path=directory,
                help="name its base model, and continue training it with lora.start_from; to train a new adapter "
                "on top, merge this one first and name the merged model",
            )
        files = sorted(str(file) for file in directory.glob("*.gguf"))
        advice = f"name the GGUF file itself: {files[0]}" if files else _FOLDER
        raise ModelError("no config.json in it", code="E2084", path=directory, help=advice)
    if (directory / "adapter_config.json").is_file():
        raise ModelError(
            "the model directory also contains an adapter: transformers would silently load both",
            code="E2085",
            path=directory / "adapter_config.json",
            help="move adapter_config.json and adapter_model.safetensors to a separate directory; "
            "lora.start_from continues training them",
        )
    config = read_json_object(path)
    require_sound_config(config, path)
    return config


def build_facts(
    name: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorHeader] | None,
    *,
    where: object,
    source: ModelSource,
    path: Path | None = None,
    chat_template: str | None = None,
    has_chat_template: bool | None = None,
    pickle_only: bool = False,
    gated: bool | None = None,
) -> ModelFacts:
    """Combine config.json and the headers (None where there are none) into facts."""
    dims = dimensions(config, where)
    formula = structure(config, dims)
    needs = attention_needs(config)
    quantization = _quantization(config)
    stored = None if tensors is None or quantization else _stored(tensors, dims.tied_embeddings)
    if tensors is not None and stored is not None and formula is not None:
        _require_shapes(formula, dims.vocab_size, dims.hidden_size, tensors, where)
    may_have_experts = stored is not None and config.get("model_type") not in NO_STACKS
    shapes = {name: tensor.shape for name, tensor in (tensors or {}).items()} if may_have_experts else {}
    parameters = stored.parameters if stored else formula.parameters if formula else None
    linears = formula or stored
    dtype = _dtype(config, tensors)
    return ModelFacts(
        name=name,
        path=path,
        architecture=architecture_of(config),
        model_type=str(config.get("model_type") or ""),
        **asdict(dims),
        parameters=parameters,
        expected_parameters=formula.parameters if formula else None,
        expert_parameters=0 if formula else stored.experts if stored else None,
        expert_stacks=find_expert_stacks(shapes),
        lone_expert_parameters=lone_numbers(shapes),
        routers=routers(shapes),
        router_loss=text_section(config).get("output_router_logits") is True,
        linear_modules=linears.linear_modules if linears else {},
        dtype=dtype,
        weight_bytes=_weight_bytes(tensors, parameters, dtype),
        has_weights=tensors is not None and path is not None,
        source=source,
        chat_template=chat_template,
        has_chat_template=chat_template is not None if path is not None else has_chat_template,
        pickle_only=pickle_only,
        gated=gated,
        custom_code=bool(config.get("auto_map")),
        code_files=code_files(config),
        quantization=quantization,
        stored_nf4=quantization == "bitsandbytes" and config["quantization_config"].get("bnb_4bit_quant_type") == "nf4",
        packing_obstacle=packing_obstacle(config),
        shares_prompts=shares_prompts(config),
        written_by=version if isinstance(version := config.get("transformers_version"), str) else None,
        padded_attention="eager" if needs.softcap or needs.sinks else "sdpa",
        activation=activation if isinstance(activation := text_section(config).get("hidden_act"), str) else None,
    )


def _require_shapes(
    formula: Structure, vocabulary: int, width: int, tensors: Mapping[str, TensorHeader], where: object
) -> None:
    """Check that the matrices have the shapes that config.json gives.

    Raises:
        ModelError: a matrix has another shape than config.json says.
    """
    expected = {f"{name}.weight": shape for name, shape in formula.linear_modules.items()}
    expected["model.embed_tokens.weight"] = (vocabulary, width)
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is not None and tensor.shape != tuple(shape):
            raise ModelError(
                f"{truncate_text(name, 100)} has the shape {list(tensor.shape)}, but config.json says {list(shape)}",
                code="E2654",
                path=str(where),
                help="config.json and the weights are of different models: download both again",
            )


def code_files(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the files that `auto_map` points to: "modeling_x.XModel", or "owner/name--modeling_x.XModel" of another
    repository; a tokenizer's entry is a list."""
    entries = [entry for value in (config.get("auto_map") or {}).values()
               for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, str)]  # fmt: skip
    references = {entry.rpartition("--")[::2] for entry in entries}
    files = {
        f"{reference.rpartition('.')[0]}.py" + (f" of {owner}" if owner else "") for owner, reference in references
    }
    return tuple(sorted(files))


def _stored(tensors: Mapping[str, TensorHeader], tied: bool) -> Structure:
    """Return the parameters and linear layers that the headers list.

    A tied head that is saved nevertheless is not counted twice (Qwen3-0.6B: 751,632,384 in the file, 596,049,920
    parameters), nor are buffers that old checkpoints carry (Llama-2-7b-hf: 2,048 rotary frequencies).
    """
    kept_tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith("rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    }
    linears = {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in kept_tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 2 and not _is_embedding(name)
        if not is_expert(name, 2) and is_product(name.removesuffix(".weight"))
    }
    experts = sum(tensor.elements for name, tensor in kept_tensors.items() if is_expert(name, len(tensor.shape)))
    return Structure(sum(tensor.elements for tensor in kept_tensors.values()), linears, experts)


def _is_embedding(name: str) -> bool:
    return any(part in ("wte", "wpe") or "embed" in part for part in name.split("."))


def _quantization(config: Mapping[str, Any]) -> str | None:
    entry = config.get("quantization_config")
    return str(entry.get("quant_method") or "unknown") if isinstance(entry, Mapping) else None


def stored_by_name(name: str) -> str | None:
    """Guess the quantization method of a hub model's files from the ending of its name, where the hub cannot be read.

    >>> stored_by_name("unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit"), stored_by_name("org/model")
    ('bitsandbytes', None)
    """
    return next((kind for ending, kind in _STORED.items() if name.lower().endswith(ending)), None)


def original_of(name: str) -> str | None:
    """Return the model that a quantized copy was made from, where known: unsloth's, and local folders of such names.

    >>> original_of("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit")
    'unsloth/Meta-Llama-3.1-8B-Instruct'
    >>> original_of("somebody/their-model-bnb-4bit")
    """
    plain = _UNSLOTH_4BIT.sub("", name.rstrip("/"))
    is_known = plain != name.rstrip("/") and (known_model(plain) is not None or Path(plain).is_dir())
    return plain if is_known else None


def _dtype(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader] | None) -> str | None:
    section = text_section(config)
    stated = next((c[key] for c in (config, section) for key in ("dtype", "torch_dtype") if c.get(key)), None)
    if stated:
        return str(stated).removeprefix("torch.")
    if not tensors:
        return None
    largest = max(tensors.values(), key=lambda tensor: tensor.bytes)
    return _HEADER_DTYPES.get(largest.dtype)


def _weight_bytes(tensors: Mapping[str, TensorHeader] | None, parameters: int | None, dtype: str | None) -> int | None:
    if tensors is not None:
        return sum(tensor.bytes for tensor in tensors.values())
    return parameters * DTYPE_BYTES[dtype] if parameters is not None and dtype in DTYPE_BYTES else None


def _template_beside(directory: Path) -> str | None:
    """Return tokenizer_config.json's chat template."""
    config = directory / "tokenizer_config.json"
    return template_of(read_json_object(config)) if config.is_file() else None


def cached_snapshot(name: str, revision: str | None = None) -> Path | None:
    """Return the folder in the Hugging Face cache that holds this model's config.json, or None."""
    folder = env.hub_cache() / f"models--{name.replace('/', '--')}"
    ref = revision or "main"
    reference = folder / "refs" / ref
    commit = reference.read_text(encoding="ascii").strip() if reference.is_file() else ref
    snapshot = folder / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() else None


@lru_cache(maxsize=1)
def catalogue() -> dict[str, dict[str, Any]]:
    """Return the packaged models: hub id → `{"gated", "chat_template", "config"}`, and `weight_bytes` where `config`
    does not determine it. Numbers only, no texts; scripts/catalogue.py writes them."""
    entries = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(CATALOGUE.glob("*.json")))
    return {entry["name"]: entry for entry in entries}


def known_model(name: str) -> dict[str, Any] | None:
    """Return the catalogue's entry of a hub id: by its own name, by an earlier one, or by the name of unsloth's copy.
    The hub accepts a name in any case, and unsloth writes its names in lower case into the adapters that it trains.

    >>> known_model("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit")["config"]["quantization_config"]["quant_method"]
    'bitsandbytes'
    """
    name = name.lower()
    entries = {full.lower(): entry for full, entry in catalogue().items()}
    if name in entries:
        return entries[name]
    owner, _, repository = name.partition("/")
    plain = _UNSLOTH_4BIT.sub("", repository)
    short = plain.removeprefix("meta-") if plain.startswith("meta-llama-3.") else plain
    if owner == "meta-llama":
        return entries.get(f"{owner}/{short}") if plain == repository else None
    if owner != "unsloth":
        return None
    entry = next((entry for full, entry in entries.items() if full.partition("/")[2] == short), None)
    if entry is None:
        return None
    config = entry["config"] if plain == repository else entry["config"] | {"quantization_config": _NF4_OF_BITSANDBYTES}
    return entry | {"gated": False, "config": config}


def open_copy(name: str) -> str | None:
    """Return the copy of a gated model that unsloth publishes without the gate, under the same license; None where none
    is known.

    >>> open_copy("meta-llama/Llama-3.2-1B-Instruct"), open_copy("meta-llama/Meta-Llama-3.1-8B")
    ('unsloth/Llama-3.2-1B-Instruct', 'unsloth/Llama-3.1-8B')
    >>> open_copy("meta-llama/Llama-2-7b-hf"), open_copy("Qwen/Qwen3-0.6B")
    (None, None)
    """
    entry = known_model(name)
    repository = entry["name"].partition("/")[2] if entry and entry["gated"] else ""
    return f"unsloth/{repository}" if repository.startswith("Llama-3.") else None


def _catalogue_facts(name: str, entry: Mapping[str, Any]) -> ModelFacts:
    facts = build_facts(
        name,
        entry["config"],
        None,
        where=f"the catalogue's {name}",
        source="catalogue",
        has_chat_template=entry["chat_template"],
        gated=entry["gated"],
    )
    return replace(facts, weight_bytes=facts.weight_bytes or entry.get("weight_bytes"))


def _hub_facts(name: str, revision: str | None, patience: float | None) -> ModelFacts:
    from surefit.facts.hub import fetch

    answer = fetch(name, revision, list(catalogue()), patience)
    facts = build_facts(
        name,
        answer.config,
        answer.tensors,
        where=f"{name}/config.json",
        source="hub",
        chat_template=answer.templates.get(DEFAULT),
        has_chat_template=DEFAULT in answer.templates,
        pickle_only=answer.pickle_only,
        gated=answer.gated,
    )
    return replace(
        facts,
        unreadable=dequantization_obstacle(answer.config, answer.tensors or {}),
        tool_template=answer.templates.get(TOOL_USE),
    )
