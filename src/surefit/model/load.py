"""Base models, loaded whole or rejected with the reason.

transformers loads as much as it can: weights that a checkpoint lacks are drawn at random with a warning, and a run then
"works". Here they are an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, PreTrainedModel

from surefit.config.resolve import HardwareLike
from surefit.config.schema import ModelSection
from surefit.core import env
from surefit.core.errors import MachineError, ModelError
from surefit.core.reading import library_errors
from surefit.facts.gguf_source import FIELD
from surefit.facts.hardware import cpu_count
from surefit.facts.model import PICKLES, read_model_config
from surefit.facts.threads import cpu_threads
from surefit.model.classes import auto_class
from surefit.model.compat import without_allocator_warmup
from surefit.model.memory_errors import is_out_of_memory
from surefit.model.quantize import finish_loading, quantization_config
from surefit.model.sdpa import start_cuda
from surefit.model.tokenizer import explain_loading_errors, model_path, new_tokens
from surefit.model.vocabulary import resize_vocabulary

PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files with the image preprocessing of a model that also accepts images."""


def fetch_model(section: ModelSection) -> Path:
    """Return the directory of a model's files: its own, or the one in the cache, with every file fetched into it.

    Raises:
        ModelError: no such directory, or the hub does not serve it.
    """
    path = Path(model_path(section.name_or_path, section.revision))
    if path.is_dir():
        return path
    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", *(["*.py"] if section.trust_remote_code else [])]
    with explain_loading_errors(section, "model"):
        return Path(snapshot_download(section.name_or_path, revision=section.revision, allow_patterns=patterns))


def load_model(
    section: ModelSection, hardware: HardwareLike, device: str | None = None, placed: Mapping[str, int] | None = None
) -> PreTrainedModel:
    """Return the base model with every weight from its files, and the rows of the config's new tokens, in evaluation
    mode, on the device. On a CPU this also sets the process's thread count for the model (facts/threads.py).

    Attention is torch's `scaled_dot_product_attention` wherever the model supports it; transformers falls back to its
    own code for those that do not (a softcap inside the attention, attention sinks).

    Args:
        section: its `dtype` decided.
        hardware: `kind` is "cpu" or "cuda".
        device: another device than that: "cpu" for a model of which the device gets only a part.
        placed: which GPU holds which module, where one does not hold all (model/layers.py).

    Raises:
        ModelError: no weights, some missing, of other shapes or damaged; a gated or unknown hub id; an architecture
            this transformers does not know.
        MachineError: the config requires a GPU and there is none, or the model does not fit it.
    """
    path = model_path(section.name_or_path, section.revision)
    if hardware.kind == "cuda" and not torch.cuda.is_available():
        raise MachineError(
            "this build of torch finds no GPU",
            code="E5057",
            field="hardware.gpu",
            help="set hardware.gpu: cpu, or run `surefit doctor`",
        )
    if hardware.kind == "cuda":
        start_cuda()
    if Path(path).is_dir():
        _require_files(Path(path))
        read_model_config(Path(path))
    dtype, device = getattr(torch, section.dtype), device or hardware.kind
    options: dict[str, Any] = {} if placed is None else {"device_map": dict(placed)}
    if section.quantization == "nf4":
        # Only quantization needs a device at this point: other models are read on the CPU and moved as a whole.
        options = {
            "quantization_config": quantization_config(dtype, build_meta_model(section)),
            "device_map": {"": device},
        }
    warmup = without_allocator_warmup() if section.quantization == "nf4" else contextlib.nullcontext()
    with explain_loading_errors(section, "model"), _on_the_device(section), warmup:
        origin: Any = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
        config = AutoConfig.from_pretrained(path, **origin)
        if hasattr(config, "vision_config") and not Path(path).is_dir():  # nothing else fetches them
            snapshot_download(path, revision=section.revision, allow_patterns=list(PROCESSOR))
        loaded: Any = auto_class(config).from_pretrained(
            path,
            **origin,
            dtype=dtype,
            use_safetensors=True,
            # Reported here, in one message with the missing ones, instead of raised by transformers without the names.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    model, report = loaded
    _require_complete(section, report)
    assert isinstance(model, PreTrainedModel)
    model = finish_loading(model, section.quantization)
    if (new := new_tokens(section)) is not None:
        resize_vocabulary(model, new)
    if hardware.kind == "cpu":
        torch.set_num_threads(_threads_for(model))
    with _on_the_device(section):
        moved = model if placed is not None else model.to(device)  # type: ignore[arg-type]
    return moved.eval()  # type: ignore[no-any-return]


def build_meta_model(section: ModelSection) -> PreTrainedModel:
    """Return the model without its weights, on the meta device."""
    path = model_path(section.name_or_path, section.revision)
    remote = section.trust_remote_code
    problem = "transformers cannot build a model from its config.json"
    with library_errors(path, ModelError, problem, "choose a causal language model"):
        config = AutoConfig.from_pretrained(path, revision=section.revision, trust_remote_code=remote)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=getattr(torch, section.dtype), trust_remote_code=remote)
    assert isinstance(model, PreTrainedModel)
    return model


def _threads_for(model: PreTrainedModel) -> int:
    _, _, _, local_processes = env.distributed_env()
    return cpu_threads(model.num_parameters(), cpu_count(), local_processes, env.threads_asked())


@contextlib.contextmanager
def _on_the_device(section: ModelSection) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MachineError(
            f"the weights of {section.name_or_path} do not fit the GPU's memory",
            code="E5058",
            field=FIELD,
            help="`surefit plan` shows what the model needs; choose a smaller model or a larger GPU",
        ) from error


def _require_files(directory: Path) -> None:
    """Raise where a local model lacks files, before transformers raises its own error."""
    pickled = sorted(file.name for pattern in PICKLES for file in directory.glob(pattern))
    if not (directory / "config.json").is_file():
        problem, advice = "has no config.json", "name a model directory written by `save_pretrained`"
    elif any(directory.glob("*.safetensors")):
        return
    elif pickled:
        problem = f"the weights are pickled ({pickled[0]}), a format that can run code when it is read"
        advice = "convert them to safetensors, or use a revision of the model that has them"
    else:
        problem = "has no weights (no .safetensors file)"
        advice = "copy the weights there; a clone without git-lfs does not download them"
    raise ModelError(problem, code="E5059", path=directory, field=FIELD, help=advice)


def _require_complete(section: ModelSection, report: dict[str, Any]) -> None:
    """Raise where transformers drew weights at random."""
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{len(missing)} weights are not in the model's files: {_some(missing)}",
            code="E5060",
            path=section.name_or_path,
            field=FIELD,
            help="a shard is missing or config.json belongs to another model; download the model again",
        )
    if mismatched := sorted(report["mismatched_keys"]):
        shapes = [
            f"{name} is {tuple(file)} in the file, {tuple(config)} by config.json" for name, file, config in mismatched
        ]
        raise ModelError(
            f"{len(mismatched)} weights have another shape than in the config: {_some(shapes)}",
            code="E5061",
            path=section.name_or_path,
            field=FIELD,
            help="config.json belongs to another model, or was edited; download the model again",
        )


def _some(names: list[str], limit: int = 3) -> str:
    remainder = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {remainder} more" if remainder > 0 else "")
