"""The commands of vLLM, SGLang and Ollama that serve a run's result.

`serve-check` and the model card print what `model_commands` and `adapter_commands` return. The servers' support follows
their source code in November 2026: vLLM 0.12 (config/lora.py, lora/peft_helper.py, config/model.py) and SGLang 0.5
(srt/lora/lora_config.py, lora.py, srt/configs/model_config.py, srt/managers/template_manager.py).
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefit.core.errors import ConfigError
from surefit.core.rundir import RunDir, read_json
from surefit.core.units import shell_quote
from surefit.facts.lora_settings import is_off
from surefit.facts.named_templates import DEFAULT, TOOL_USE, template_files, templates_in
from surefit.facts.tokenizer import GENERATION_CONFIG
from surefit.merge.export_manifest import MANIFEST
from surefit.merge.modelfile import MODELFILE
from surefit.model.tokenizer import model_path

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank; the default is 16."""
PLACE = "REPOSITORY"
"""Placeholder in a model card for the path or id of the files."""
NAME = "surefit-model"
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0}
"""Generation settings of a run's scores, for a server that would otherwise sample by a generation config."""
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ServingCommands:
    """Facts, commands and notes for serving a model.

    Attributes:
        facts: the facts that the commands follow from, as text.
        commands: server → command lines.
        notes: limits and advice beside the commands.
        run: the run that the model belongs to; None for an export elsewhere.
    """

    facts: dict[str, str]
    commands: dict[str, list[str]]
    notes: list[str] = field(default_factory=list)
    run: RunDir | None = None


def build_serving_commands(target: Path) -> ServingCommands:
    """Build the commands for a run, an export, or a model's directory.

    Raises:
        ConfigError: `target` holds nothing to serve.
    """
    directory, run = _place(target)
    if any(directory.glob("*.gguf")):
        return _gguf(directory, run)
    config = read_json(directory / "config.json")
    facts = _facts(directory, config)
    quantised = (config.get("quantization_config") or {}).get("quant_method")
    commands = model_commands(str(directory), facts)
    notes = _notes(directory, facts, quantised)
    if quantised is None:
        commands["Ollama"] = _ollama(directory, run)
    if run is not None and run.adapter.is_dir() and not target.joinpath(MANIFEST).exists():
        adapter_lines, adapter_notes = adapter_commands(_of_run(run, directory, config, facts))
        commands, notes = commands | adapter_lines, notes + adapter_notes
    return ServingCommands(facts, commands, notes, run)


def _place(target: Path) -> tuple[Path, RunDir | None]:
    """Return the directory that is served, and the run that it belongs to, if any."""
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
            "this is an adapter, without its base",
            code="E6036",
            path=target,
            help="name the run that it was exported from",
        )
    raise ConfigError(
        "this is neither a run, nor an export, nor a model", code="E6037", path=target, help="name one of these"
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
    """Return the tokens that end an answer: (text, empty if unknown, id)."""
    path = directory / "generation_config.json"
    eos = (read_json(path) if path.exists() else {}).get("eos_token_id", config.get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    names: dict[int, str] = {}
    if (directory / "tokenizer.json").is_file():
        names = {t["id"]: t["content"] for t in read_json(directory / "tokenizer.json").get("added_tokens", [])}
    return [(names.get(number, ""), number) for number in ids]


def _ollama(directory: Path, run: RunDir | None) -> list[str]:
    """Return Ollama's commands: by the Modelfile that `export --for ollama` wrote, or after that export.

    Only the export writes a Modelfile: Ollama runs no Jinja, so the chat template has to stand in it in Go's language.
    """
    modelfile = directory / MODELFILE
    lines = []
    if not modelfile.is_file():
        modelfile = (run.exports / "ollama" if run else Path("DIR")) / MODELFILE
        exported = run.path if run else Path("RUN")
        lines = [] if modelfile.is_file() else [f"surefit export {shell_quote(exported)} --for ollama"]
    return [*lines, f"ollama create {NAME} -f {shlex.quote(str(modelfile))}", f"ollama run {NAME}"]


def _notes(directory: Path, facts: Mapping[str, str], quantised: str | None) -> list[str]:
    notes = ["--generation-config vllm: without it vLLM samples by generation_config.json, unlike the run's "
             "scoring"]  # fmt: skip
    if facts["chat template"] == "none":
        notes.append("no chat template: use /v1/completions, or give the server one with --chat-template FILE")
    notes += _named_template_notes(directory)
    if facts["stop tokens"] == "none":
        notes.append("there is no stop token: answers run to the limit")
    if quantised:
        notes.append(f"the weights are quantized ({quantised}), as config.json says; Ollama needs GGUF")
    if facts["dtype"] == "float32":
        notes.append("the weights are stored in float32: a server that runs them in bfloat16 gives other answers")
    return notes


def _named_template_notes(directory: Path) -> list[str]:
    """Return a note about a second chat template, if there is one: vLLM chooses by the request, SGLang uses one for
    all."""
    if TOOL_USE not in templates_in(directory):
        return []
    return [
        f"requests with tools have their own chat template, {TOOL_USE}: vLLM uses it for them, SGLang uses one "
        f"template for every request; add --hf-chat-template-name {TOOL_USE} if every request has tools"
    ]


def model_commands(place: str, facts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the commands that serve a whole model: server → lines.

    Args:
        place: the model's directory.
        facts: `dtype` and `context length`; a missing one is left to the server.
    """
    return {"vLLM": [_vllm(place, facts)], "SGLang": [_sglang(place, facts)]}


def _vllm(
    place: str, facts: Mapping[str, str], adapter: Sequence[str] = (), generation: Sequence[str] = ("vllm",)
) -> str:
    """Return vLLM's command; `adapter` holds its arguments for an adapter, `generation` the arguments of
    --generation-config."""
    limit = _unless_auto("--max-model-len", facts)
    return shlex.join(
        ["vllm", "serve", place, *adapter, "--dtype", facts.get("dtype", "auto"), *limit, "--generation-config",
         *generation]
    )  # fmt: skip


def _sglang(place: str, facts: Mapping[str, str], adapter: Sequence[str] = ()) -> str:
    """Return SGLang's command; `adapter` holds its arguments for an adapter."""
    limit = _unless_auto("--context-length", facts)
    server = ["python", "-m", "sglang.launch_server", "--model-path", place]
    return shlex.join([*server, *adapter, "--dtype", facts.get("dtype", "auto"), *limit])


def _unless_auto(option: str, facts: Mapping[str, str]) -> list[str]:
    length = facts.get("context length", "auto")
    return [] if length == "auto" else [option, length]


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter that a server loads onto its base.

    Attributes:
        settings: content of its adapter_config.json.
        base, adapter: the base's name or directory, and the adapter's directory.
        facts: facts of the merged model, or empty.
        stops: the tokens that end an answer. The base's own files may have fewer.
        generation: a directory whose generation_config.json has these stop tokens.
        neutral: whether that file has no other settings.
        template: path of the chat template.
        tool_template: path of a second template for requests with tools, if there is one.
    """

    settings: Mapping[str, Any]
    base: str
    adapter: str
    facts: Mapping[str, str] = field(default_factory=dict)
    stops: Sequence[int] = ()
    generation: str | None = None
    neutral: bool = True
    template: str | None = None
    tool_template: str | None = None

    @property
    def rank(self) -> int:
        return int(self.settings["r"])

    def arguments(self, largest_rank: int, option: str) -> list[str]:
        """Return a server's arguments for the adapter, under the name that a request gives as `model`."""
        return ["--enable-lora", "--max-lora-rank", str(largest_rank), option, f"adapter={self.adapter}"]

    def template_arguments(self) -> list[str]:
        """Return the chat template's arguments; without them a server uses the base's template."""
        return ["--chat-template", self.template] if self.template else []


def adapter_commands(beside: ServedAdapter) -> tuple[dict[str, list[str]], list[str]]:
    """Return the commands for the base with its adapter, and the servers' limits.

    Returns:
        (server → lines, without servers that do not support this adapter or would answer wrongly; notes about them).
    """
    commands, notes = {}, []
    for server, build_command in (("vLLM", _vllm_beside), ("SGLang", _sglang_beside)):
        reasons = _not_served(server, beside)
        if reasons:
            why = "; ".join(reasons)
            notes.append(f"{server} does not serve this adapter with its base: {why}. Serve the merged model")
        else:
            commands[f"{server}, the base with the adapter (rank {beside.rank})"] = [build_command(beside)]
    if beside.settings.get("target_parameters") and commands:
        notes.append("factors of experts: whether a server supports them depends on its version and the model; check "
                     "with --url")  # fmt: skip
    if beside.template and beside.tool_template and commands:
        notes.append(f"--chat-template is one template for every request, and requests with tools have another: give "
                     f"the server {shlex.quote(beside.tool_template)} if every request has tools, or serve the "
                     "merged model with vLLM, which chooses by the request")  # fmt: skip
    return commands, notes


def _not_served(server: str, beside: ServedAdapter) -> list[str]:
    """Return the reasons why a server does not serve an adapter, or would compute with other weights."""
    settings, reasons = beside.settings, []
    if settings.get("use_dora"):
        reasons.append("it does not support DoRA")
    if not is_off(settings.get("trainable_token_indices")):
        reasons.append("it reads factors only, not token rows; the base's vocabulary lacks the added tokens")
    if server == "vLLM" and beside.rank > RANKS[-1]:
        reasons.append(f"its largest rank is {RANKS[-1]}, but this one's is {beside.rank}")
    if server == "SGLang" and settings.get("use_rslora"):
        weak = math.sqrt(settings["r"])
        reasons.append(f"it ignores use_rslora (sgl-project/sglang#40835): the update would be {weak:.3g} times too "
                       "weak")  # fmt: skip
    return reasons


def _vllm_beside(beside: ServedAdapter) -> str:
    allowed = next(rank for rank in RANKS if rank >= beside.rank)
    generation = ["vllm"]
    if beside.generation is not None:
        # By default the stop tokens are the base's; the sampling settings in this file are not the run's.
        generation = [beside.generation]
        generation += [] if beside.neutral else ["--override-generation-config", json.dumps(GREEDY)]
    adapter = beside.arguments(allowed, "--lora-modules")
    return _vllm(beside.base, beside.facts, adapter, [*generation, *beside.template_arguments()])


def _sglang_beside(beside: ServedAdapter) -> str:
    adapter = beside.arguments(beside.rank, "--lora-paths")
    if beside.stops:
        adapter += ["--json-model-override-args", json.dumps({"eos_token_id": list(beside.stops)})]
    return _sglang(beside.base, beside.facts, [*adapter, *beside.template_arguments()])


def _of_run(run: RunDir, merged: Path, config: Mapping[str, Any], facts: Mapping[str, str]) -> ServedAdapter:
    settings = read_json(run.adapter / "adapter_config.json")
    templates = {name: str(file) for name, file in template_files(run.adapter).items()}
    stops = [number for _, number in _stops(merged, config)]
    return ServedAdapter(
        settings=settings,
        base=model_path(settings["base_model_name_or_path"]),
        adapter=str(run.adapter),
        facts=facts,
        stops=stops,
        generation=str(merged) if stops and (merged / GENERATION_CONFIG).is_file() else None,
        neutral=False,
        template=templates.get(DEFAULT),
        tool_template=templates.get(TOOL_USE),
    )


def card_commands(directory: Path, base: str) -> tuple[dict[str, list[str]], list[str]]:
    """Return the commands for an export's model card, with `PLACE` for the reader's path.

    Args:
        directory: the export; an adapter's generation_config.json holds only the stop tokens.
        base: public name of the base.
    """
    if not (directory / "adapter_config.json").is_file():
        has_config = (directory / "config.json").is_file()
        facts = _facts(directory, read_json(directory / "config.json")) if has_config else {}
        return model_commands(PLACE, facts), _named_template_notes(directory)
    stops = [number for _, number in _stops(directory, {})]
    templates = {name: f"{PLACE}/{file.relative_to(directory)}" for name, file in template_files(directory).items()}
    adapter = ServedAdapter(
        settings=read_json(directory / "adapter_config.json"),
        base=base,
        adapter=PLACE,
        stops=stops,
        generation=PLACE if stops else None,
        template=templates.get(DEFAULT),
        tool_template=templates.get(TOOL_USE),
    )
    return adapter_commands(adapter)


def _gguf(directory: Path, run: RunDir | None) -> ServingCommands:
    file = next(iter(sorted(directory.glob("*.gguf"))))
    quoted_path = shlex.quote(str(file))
    length = read_json(directory / "config.json").get("max_position_embeddings") if _has_config(directory) else None
    context = f" -c {length}" if length else ""
    commands = {
        "Ollama": _ollama(directory, run),
        "llama.cpp": [f"llama-server -m {quoted_path}{context} --jinja"],
    }
    return ServingCommands({"model": f"GGUF, {file.name}", "context length": str(length or "auto")}, commands, [], run)


def _has_config(directory: Path) -> bool:
    return (directory / "config.json").is_file()
