"""How to serve what a run made: the commands of vLLM, SGLang and Ollama for exactly this artefact."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefit.core.errors import ConfigError
from surefit.core.rundir import RunDir, read_json
from surefit.merge.export import MANIFEST
from surefit.model.tokenizer import model_path

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's --max-lora-rank may be."""
NAME = "surefit-model"
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Served:
    """An artefact as a server needs to know it.

    Attributes:
        facts: in words, what the commands follow from.
        commands: server → lines to type.
        notes: what the commands cannot say.
        run: the run it belongs to; None for an export elsewhere.
    """

    facts: dict[str, str]
    commands: dict[str, list[str]]
    notes: list[str] = field(default_factory=list)
    run: RunDir | None = None


def served(target: Path) -> Served:
    """The commands for a run, an export, or a model's directory.

    Raises:
        ConfigError: nothing to serve is there.
    """
    directory, run = _place(target)
    if any(directory.glob("*.gguf")):
        return _gguf(directory, run)
    config = read_json(directory / "config.json")
    facts = _facts(directory, config)
    length = facts["context length"]
    quantised = (config.get("quantization_config") or {}).get("quant_method")
    dtype = facts["dtype"]
    place = shlex.quote(str(directory))
    vllm = f"vllm serve {place} --dtype {dtype} --max-model-len {length} --generation-config vllm"
    sglang = f"python -m sglang.launch_server --model-path {place} --dtype {dtype} --context-length {length}"
    commands = {"vLLM": [vllm], "SGLang": [sglang]}
    notes = _notes(directory, facts, quantised)
    if quantised is None:
        commands["Ollama"] = _ollama(directory, length, [name for name, _ in _stops(directory, config) if name])
        notes.append(
            "Ollama does not run Jinja: where it does not know the chat template, add TEMPLATE to the Modelfile"
        )
    if run is not None and run.adapter.is_dir() and not target.joinpath(MANIFEST).exists():
        commands |= _with_adapter(run, length, dtype)
    return Served(facts, commands, notes, run)


def _place(target: Path) -> tuple[Path, RunDir | None]:
    """What is served, and the run that knows its prompts."""
    run = RunDir(target)
    if run.resolved.exists():
        directory = run.merged if run.merged.is_dir() else run.model
        if not directory.is_dir():
            raise ConfigError(
                "there is no merged/ in this run yet", code="E6035", path=target, help="`surefit merge` writes it"
            )
        return directory, run
    if any(target.glob("*.gguf")) or ((target / "config.json").is_file() and any(target.glob("*.safetensors"))):
        owner = RunDir(target.absolute().parent.parent)
        return target, owner if owner.exports == target.absolute().parent and owner.resolved.exists() else None
    if (target / "adapter_config.json").is_file():
        raise ConfigError(
            "an adapter is here, without its base", code="E6036", path=target, help="name the run that it was made of"
        )
    raise ConfigError(
        "neither a run, nor an export, nor a model is here", code="E6037", path=target, help="name one of these"
    )


def _facts(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    text = config.get("text_config") or config
    stored = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "auto")
    tokenizer = read_json(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").exists() else {}
    template = (directory / "chat_template.jinja").is_file() or bool(tokenizer.get("chat_template"))
    return {
        "model": str((config.get("architectures") or ["unknown"])[0]),
        "dtype": stored if stored in DTYPES else "auto",
        "context length": str(text.get("max_position_embeddings") or "auto"),
        "chat template": "in the tokenizer" if template else "none",
        "stop tokens": ", ".join(f"{name} ({number})".strip() for name, number in _stops(directory, config)) or "none",
    }


def _stops(directory: Path, config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The tokens that end an answer: text, empty where it is not known, and number."""
    path = directory / "generation_config.json"
    found = (read_json(path) if path.exists() else {}).get("eos_token_id", config.get("eos_token_id"))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    names: dict[int, str] = {}
    if (directory / "tokenizer.json").is_file():
        names = {t["id"]: t["content"] for t in read_json(directory / "tokenizer.json").get("added_tokens", [])}
    return [(names.get(number, ""), number) for number in ids]


def _ollama(place: Path, length: str | None, stops: list[str]) -> list[str]:
    """Greedy, as the run's scores were made."""
    lines = [f"FROM {place.absolute()}", "PARAMETER temperature 0"]
    lines += [f"PARAMETER num_ctx {length}"] if length and length != "auto" else []
    lines += [f"PARAMETER stop {json.dumps(stop)}" for stop in stops]
    written = " ".join(shlex.quote(line) for line in lines)
    return [f"printf '%s\\n' {written} > Modelfile", f"ollama create {NAME}", f"ollama run {NAME}"]


def _notes(directory: Path, facts: Mapping[str, str], quantised: str | None) -> list[str]:
    notes = ["--generation-config vllm: without it vLLM samples as generation_config.json says, and not as the run's "
             "scores were made"]  # fmt: skip
    if facts["chat template"] == "none":
        notes.append("no chat template: ask /v1/completions, or give the server one with --chat-template FILE")
    if facts["stop tokens"] == "none":
        notes.append("no stop token is known: answers run to the limit")
    if quantised:
        notes.append(f"the weights are quantised ({quantised}), which config.json tells the server; Ollama takes GGUF")
    if facts["dtype"] == "float32":
        notes.append("the weights are stored in float32: a server may be told bfloat16, with other answers than here")
    return notes


def _with_adapter(run: RunDir, length: str, dtype: str) -> dict[str, list[str]]:
    """The base with the adapter beside it, for a server that has many adapters of one base."""
    settings = read_json(run.adapter / "adapter_config.json")
    rank = max([settings["r"], *(settings.get("rank_pattern") or {}).values()])
    allowed = next((each for each in RANKS if each >= rank), rank)
    base = shlex.quote(model_path(settings["base_model_name_or_path"]))
    named = shlex.quote(f"adapter={run.adapter}")
    # Servers know one template, the base's, where they are given no other.
    written = run.adapter / "chat_template.jinja"
    template = f" --chat-template {shlex.quote(str(written))}" if written.is_file() else ""
    return {
        f"vLLM, the base with the adapter beside it (rank {rank})": [
            f"vllm serve {base} --enable-lora --max-lora-rank {allowed} --lora-modules {named} --dtype {dtype} "
            f"--max-model-len {length} --generation-config vllm{template}"
        ],
        f"SGLang, the base with the adapter beside it (rank {rank})": [
            f"python -m sglang.launch_server --model-path {base} --enable-lora --max-lora-rank {rank} "
            f"--lora-paths {named} --dtype {dtype} --context-length {length}{template}"
        ],
    }


def _gguf(directory: Path, run: RunDir | None) -> Served:
    file = next(iter(sorted(directory.glob("*.gguf"))))
    place = shlex.quote(str(file))
    length = read_json(directory / "config.json").get("max_position_embeddings") if _has_config(directory) else None
    context = f" -c {length}" if length else ""
    commands = {
        "Ollama": [
            f"printf 'FROM %s\\n' {place} > Modelfile",
            "ollama create surefit-model",
            "ollama run surefit-model",
        ],
        "llama.cpp": [f"llama-server -m {place}{context} --jinja"],
    }
    return Served({"model": f"GGUF, {file.name}", "context length": str(length or "auto")}, commands, [], run)


def _has_config(directory: Path) -> bool:
    return (directory / "config.json").is_file()
