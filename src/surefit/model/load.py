"""Base models and tokenizers, loaded whole or refused with the reason.

transformers loads what it can: weights that a checkpoint lacks are drawn at random with a warning, and a run then
"works". Here they are an error.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors as hub
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from surefit import nano
from surefit.config.resolve import HardwareLike
from surefit.config.schema import ModelSection
from surefit.core import env
from surefit.core.errors import MachineError, ModelError, SureFitError
from surefit.core.reading import reason_of
from surefit.facts.chat_template import require_tokens, template_text, with_defaults
from surefit.facts.gguf_source import gguf_source
from surefit.facts.hardware import cpu_count
from surefit.facts.model import NANO, PICKLES, read_config
from surefit.facts.threads import cpu_threads
from surefit.facts.tokenizer import require_sound_tokenizer
from surefit.model.classes import auto_class
from surefit.model.compat import without_allocator_warmup
from surefit.model.gguf import FIELD, converted_directory
from surefit.model.memory_errors import is_out_of_memory
from surefit.model.quantize import finish_loading, quantization_config
from surefit.model.sdpa import start_cuda
from surefit.model.vocabulary import NewTokens, add_to_tokenizer, grow


def model_path(name_or_path: str) -> str:
    """What `from_pretrained` is given: a directory as it is, `surefit/nano` as the packaged directory, of a GGUF file
    the directory that it is converted into, or a hub id.

    Raises:
        ModelError: a path that is not there or no model.
        MachineError: a GGUF file needs a package, or room in the cache.
    """
    if name_or_path == NANO:
        return str(nano.PATH)
    source = gguf_source(name_or_path)
    if source is not None:
        return str(converted_directory(source))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return str(path)
    looks_like_path = name_or_path.startswith((".", "~", "/")) or name_or_path.count("/") != 1
    if path.exists():
        raise ModelError(
            "this is a file",
            path=name_or_path,
            field=FIELD,
            help="name the directory that has config.json in it, or a GGUF file",
        )
    if looks_like_path and "/" in name_or_path:
        raise ModelError(
            "no such directory", path=name_or_path, field=FIELD, help="name a directory, a hub id or surefit/nano"
        )
    return name_or_path


def fetch_model(section: ModelSection) -> Path:
    """The directory of a model's files: its own, or the one in the cache, with every file fetched into it.

    Raises:
        ModelError: no such directory, or the hub does not give it.
    """
    place = Path(model_path(section.name_or_path))
    if place.is_dir():
        return place
    wanted = ["*.json", "*.safetensors", "*.model", "*.jinja", *(["*.py"] if section.trust_remote_code else [])]
    with _reading(section, "model"):
        return Path(snapshot_download(section.name_or_path, revision=section.revision, allow_patterns=wanted))


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the tokens that the config adds.

    Raises:
        ModelError: there is none, it is damaged, or the hub does not give it.
    """
    tokenizer = _own_tokenizer(section)
    add_to_tokenizer(tokenizer, section.add_tokens)
    if section.chat_template is not None:
        require_tokens(section.chat_template, tokenizer.get_vocab(), tokenizer.eos_token)
        tokenizer.chat_template = template_text(section.chat_template)
    return with_switches(tokenizer, section.chat_template_kwargs)


def new_tokens(section: ModelSection) -> NewTokens | None:
    """The tokens of the config that the model's own tokenizer does not know; None where there are none."""
    return add_to_tokenizer(_own_tokenizer(section), section.add_tokens) if section.add_tokens else None


def _own_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    place = model_path(section.name_or_path)
    if Path(place).is_dir():
        require_sound_tokenizer(Path(place))
    with _reading(section, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            place, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def with_switches(
    tokenizer: PreTrainedTokenizerBase, switches: Mapping[str, bool | int | str]
) -> PreTrainedTokenizerBase:
    """The tokenizer, its chat template's switches set to other values than the template's own."""
    template: Any = tokenizer.chat_template
    if not switches or not template:
        return tokenizer
    own = copy.copy(tokenizer)
    named = isinstance(template, dict)  # several templates by name
    changed = {name: with_defaults(text, switches) for name, text in (template if named else {"": template}).items()}
    own.chat_template = changed if named else changed[""]
    return own


def load_model(
    section: ModelSection, hardware: HardwareLike, device: str | None = None, placed: Mapping[str, int] | None = None
) -> PreTrainedModel:
    """The base model with every weight from its files, and the rows of the config's new tokens, in evaluation mode, on
    the device. On a CPU this process has
    the threads for it from then on (facts/threads.py).

    Attention is torch's `scaled_dot_product_attention` wherever the model supports it; transformers falls back to its
    own code for those that do not (a softcap inside the attention, attention sinks).

    Args:
        section: its `dtype` decided.
        hardware: `kind` is "cpu" or "cuda".
        device: another place than that device: "cpu" for a model of which it gets a part only.
        placed: which GPU holds which module, where one does not hold all (model/layers.py).

    Raises:
        ModelError: no weights, some missing, of other shapes or damaged; a gated or unknown hub id; an architecture
            this transformers does not know.
        MachineError: no GPU where one was asked for, or the model does not fit it.
    """
    place = model_path(section.name_or_path)
    if hardware.kind == "cuda" and not torch.cuda.is_available():
        raise MachineError(
            "this build of torch finds no GPU",
            field="hardware.gpu",
            help="set hardware.gpu: cpu, or ask `surefit doctor`",
        )
    if hardware.kind == "cuda":
        start_cuda()
    if Path(place).is_dir():
        _require_files(Path(place))
        read_config(Path(place))
    dtype, device = getattr(torch, section.dtype), device or hardware.kind
    # Only what quantises needs a device at this point: the others are read on the CPU and moved as a whole.
    quantized = quantization_config(section, dtype)
    options = {} if quantized is None else {"quantization_config": quantized, "device_map": {"": device}}
    if placed is not None:
        options["device_map"] = dict(placed)
    warmed = without_allocator_warmup() if quantized is not None else contextlib.nullcontext()
    with _reading(section, "model"), _on_the_device(section), warmed:
        origin: Any = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
        loaded: Any = auto_class(AutoConfig.from_pretrained(place, **origin)).from_pretrained(
            place,
            **origin,
            dtype=dtype,
            use_safetensors=True,
            # Reported by us, in one message with the missing ones, instead of raised by transformers without the names.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    model, report = loaded
    _require_complete(section, report)
    assert isinstance(model, PreTrainedModel)
    model = finish_loading(model, section.quantization)
    if (new := new_tokens(section)) is not None:
        grow(model, new)
    if hardware.kind == "cpu":
        torch.set_num_threads(_threads_for(model))
    with _on_the_device(section):
        there = model if placed is not None else model.to(device)  # type: ignore[arg-type]
    return there.eval()  # type: ignore[no-any-return]


def _threads_for(model: PreTrainedModel) -> int:
    _, _, _, here = env.process_place()
    return cpu_threads(model.num_parameters(), cpu_count(), here, env.threads_asked())


@contextlib.contextmanager
def _on_the_device(section: ModelSection) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MachineError(
            f"the weights of {section.name_or_path} do not fit the GPU's memory",
            field=FIELD,
            help="`surefit plan` shows what the model needs; choose a smaller model or a larger GPU",
        ) from error


def _require_files(directory: Path) -> None:
    """Say what a local model lacks before transformers does in its own words."""
    pickled = sorted(file.name for pattern in PICKLES for file in directory.glob(pattern))
    if not (directory / "config.json").is_file():
        problem, advice = "has no config.json", "name the directory of a model as `save_pretrained` writes it"
    elif any(directory.glob("*.safetensors")):
        return
    elif pickled:
        problem = f"the weights are pickled ({pickled[0]}), a format that can run code when it is read"
        advice = "convert them to safetensors, or take a revision of the model that has them"
    else:
        problem = "has no weights (no .safetensors file)"
        advice = "copy the weights there; a clone without git-lfs leaves them behind"
    raise ModelError(problem, path=directory, field=FIELD, help=advice)


def _require_complete(section: ModelSection, report: dict[str, Any]) -> None:
    """Refuse a model of which transformers drew weights at random."""
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{len(missing)} weights are not in the model's files: {_some(missing)}",
            path=section.name_or_path,
            field=FIELD,
            help="a shard is missing or config.json belongs to another model; fetch the model again",
        )
    if mismatched := sorted(report["mismatched_keys"]):
        shapes = [
            f"{name} is {tuple(file)} in the file, {tuple(config)} by config.json" for name, file, config in mismatched
        ]
        raise ModelError(
            f"{len(mismatched)} weights have another shape than the config says: {_some(shapes)}",
            path=section.name_or_path,
            field=FIELD,
            help="config.json belongs to another model, or was edited; fetch the model again",
        )


def _some(names: list[str], limit: int = 3) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


@contextlib.contextmanager
def _reading(section: ModelSection, what: str) -> Iterator[None]:
    """Turn the libraries' errors about files and the hub into ours."""
    try:
        yield
    except Exception as error:  # each file makes the libraries raise something else (core/reading.py)
        if isinstance(error, SureFitError) or is_out_of_memory(error):
            raise
        problem, advice = _explain(error, section, what)
        place = model_path(section.name_or_path)
        path = _damaged_file(place) if isinstance(error, SafetensorError) else section.name_or_path
        raise ModelError(problem, path=path, field=FIELD, help=advice) from error


def _explain(error: Exception, section: ModelSection, what: str) -> tuple[str, str]:
    """(problem, help) for an error; transformers wraps the hub's errors in its own, so look through the causes."""
    causes = _causes(error)
    for kind, problem, advice in _HUB_ERRORS:
        if any(isinstance(cause, kind) for cause in causes):
            if kind is hub.HTTPError and (status := _refused(causes)):  # type: ignore[attr-defined]
                problem, advice = (
                    f"is refused by the hub ({status}): it is private, or the token is not accepted",
                    _TOKEN,
                )
            return problem.format(revision=section.revision), advice.format(name=section.name_or_path)
    if isinstance(error, SafetensorError):
        return f"the weights are damaged: {error}", "fetch the model again: the file was cut short or is something else"
    text = " ".join(reason_of(error).split())
    if "trust_remote_code" in str(error):
        return "comes with Python code of its own", "read that code, then set model.trust_remote_code: true"
    return (
        f"the {what} cannot be loaded: {text[:400]}",
        "it takes a causal language model's config.json, tokenizer and .safetensors files",
    )


_TOKEN = (
    "set HF_TOKEN in the environment or in .env to a token that may read it; a licence is accepted at "
    "https://huggingface.co/{name}"
)


def _refused(causes: Sequence[BaseException]) -> int | None:
    """401 or 403, where that is what the hub said."""
    statuses = [getattr(getattr(cause, "response", None), "status_code", None) for cause in causes]
    return next((status for status in statuses if status in (401, 403)), None)


_HUB_ERRORS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str, str], ...] = (
    (
        hub.GatedRepoError,
        "is gated: its owner asks you to accept a licence first",
        "accept it at https://huggingface.co/{name}, then set HF_TOKEN in the environment or in .env",
    ),
    (hub.RevisionNotFoundError, "has no revision {revision!r} on the hub", "correct model.revision"),
    (
        hub.RepositoryNotFoundError,
        "is not on the hub, or is private",
        "check the spelling and whether it was renamed; for a private model set HF_TOKEN in the environment or in .env",
    ),
    (
        (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled),
        "is not in the local cache, and the hub cannot be reached or HF_HUB_OFFLINE is set",
        "go online once, or name a local directory; surefit/nano is always there",
    ),
    (
        hub.HFValidationError,
        "is neither a directory here nor a valid hub id",
        "name a directory, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or surefit/nano",
    ),
    (
        hub.HTTPError,  # type: ignore[attr-defined]  # httpx's or httpx2's, see facts/hub.py
        "cannot be fetched: the hub does not answer as it should",
        "check the network and try again, or name a local directory",
    ),
)


def _damaged_file(place: str) -> str:
    for file in sorted(Path(place).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except SafetensorError:
            return str(file)
    return place


def _causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = [error]
    while (cause := found[-1].__cause__ or found[-1].__context__) is not None:
        found.append(cause)
    return found
