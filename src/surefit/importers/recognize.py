"""Detection of a config's tool, by keys that only this tool has and by the share of keys that it knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from surefit.config.schema import SureFitConfig
from surefit.importers.known import TRAINING_ARGUMENTS, key_set, read_schema

_TABLE = read_schema("recognize.json")
OWN = {tool: key_set(" ".join(lines)) for tool, lines in _TABLE["marks"].items()}
"""Tool → keys that are characteristic of its files."""
NEEDED = {"openai": "training_file", "axolotl": "base_model", "llamafactory": "model_name_or_path", "peft": "peft_type"}
"""Tool → the key that all its files have; a file without it must have several other characteristic keys."""
ENOUGH = 3
"""The number of characteristic keys that make up for the missing one, since that key may be misspelled."""
SHARE = 0.6
"""The least share of a file's keys that its tool must know."""
TRAINS = {"llamafactory": key_set("finetuning_type stage cutoff_len export_dir infer_backend dataset_dir do_train")}
"""Tool → keys of which its files have at least one, unless the tool knows all their keys: other tools' files name a
template, too."""


def _has_key(value: Any, key: str, depth: int = 4) -> bool:
    """Return whether a mapping, or a mapping inside it, has this key."""
    if not isinstance(value, dict) or not depth:
        return False
    return key in value or any(_has_key(inner, key, depth - 1) for inner in value.values())


def _is_nemo(tree: Mapping[str, Any]) -> bool:
    recipe = str(tree.get("recipe", ""))
    return _has_key(dict(tree), "_target_") or recipe.startswith(("TrainFinetune", "KnowledgeDistillation"))


def _is_oumi(tree: Mapping[str, Any]) -> bool:
    model = tree.get("model")
    sections = {"training", "data", "peft", "generation", "engine"} & tree.keys()
    return isinstance(model, dict) and "model_name" in model and bool(sections)


def _is_surogate(tree: Mapping[str, Any]) -> bool:
    precisions = ("bf16", "fp8-hybrid", "nvfp4", "nvfp4-simple", "mxfp8")
    return isinstance(tree.get("model"), str) and tree.get("recipe") in precisions


def _is_unsloth(tree: Mapping[str, Any]) -> bool:
    training = tree.get("training")
    marks = {"use_lora", "training_type", "max_seq_length", "load_in_4bit", "packing"}
    return isinstance(tree.get("model"), str) and isinstance(training, dict) and bool(marks & training.keys())


SWIFT_MARKS = key_set("tuner_type train_type sft_type split_dataset_ratio rlhf_type")
"""Keys of which ms-swift's files have at least one."""


def _is_megatron(tree: Mapping[str, Any]) -> bool:
    return "lr" in tree or any("model_parallel_size" in key or key.startswith("recompute_") for key in tree)


OTHER_SCHEMAS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool]], ...] = (
    (
        "this is LLaMA-Factory's v1 schema; SureFit reads the schema of `llamafactory-cli train`",
        lambda tree: (
            (
                "model" in tree
                and bool(tree.keys() & {"model_class", "dist_config", "kernel_config", "quant_config", "init_config"})
            )
            or ("model" in tree and isinstance(tree.get("peft_config"), dict))
        ),
    ),
    (
        "this is LLaMA-Factory's schema for Megatron; SureFit reads the schema of `llamafactory-cli train`",
        lambda tree: (
            "finetuning_type" in tree
            and bool(
                tree.keys()
                & {"tensor_model_parallel_size", "pipeline_model_parallel_size", "use_distributed_optimizer"}
            )
        ),
    ),
    (
        "this is a config of Megatron-SWIFT; SureFit reads the configs of `swift sft`, `swift pt` and `swift rlhf`",
        lambda tree: "model" in tree and bool(SWIFT_MARKS & tree.keys()) and _is_megatron(tree),
    ),
    ("this is a config of NeMo AutoModel", _is_nemo),
    ("this is a config of torchtune", lambda tree: _has_key(dict(tree), "_component_")),
    (
        "this is a config of Soup",
        lambda tree: isinstance(tree.get("base"), str) and isinstance(tree.get("task"), str),
    ),
    ("this is a config of Oumi", _is_oumi),
    ("this is a config of Surogate", _is_surogate),
    ("this is a config of Unsloth's own command line", _is_unsloth),
)
"""(name, condition) of unsupported schemas that resemble a supported one."""


def find_unsupported_schema(tree: Mapping[str, Any]) -> str | None:
    """Return the name of a file's schema if it is not supported, or None."""
    return next((name for name, matches in OTHER_SCHEMAS if matches(tree)), None)


FLAT: dict[str, str] = _TABLE["flat"]
"""Keys that users guess at the top level of a SureFit config → their place in it."""
GUESSED = frozenset(FLAT) - TRAINING_ARGUMENTS - key_set("model_name_or_path lora_r lora_alpha lora_dropout packing "
    "load_in_4bit max_length lora_target_modules dtype recipe output_dir")  # fmt: skip
"""The guessed keys that TRL does not have: a file without any of them may be TRL's."""


def flat_keys(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return key → its place in a SureFit config, for a file that is a SureFit config without its sections."""
    is_flat = all(not isinstance(value, dict) for value in tree.values())
    looks_guessed = (
        bool(GUESSED & tree.keys()) and not {"model_name_or_path", "base_model"} & tree.keys() and len(tree) >= ENOUGH
    )
    return {key: FLAT[key] for key in tree} if is_flat and looks_guessed and tree.keys() <= FLAT.keys() else {}


def recognize_tool(tree: Mapping[str, Any], knows: Callable[[str, str], bool]) -> str | None:
    """Return the tool that knows most of the keys, among the tools with characteristic keys in the file.

    Args:
        tree: the file's values.
        knows: (tool, top-level key) → whether the tool knows it, or did in an earlier release.
    """
    if _is_surefits(tree):
        return "surefit"
    counts = {
        tool: sum(knows(tool, key) for key in tree) for tool in ("peft", "deepspeed", "accelerate", "axolotl", "openai")
    }
    counts |= {tool: sum(knows(tool, key) for key in tree) for tool in ("llamafactory", "swift", "trl", "openai")}
    fit = [tool for tool, count in counts.items() if _fits(tool, tree, count)]
    return max(fit, key=counts.__getitem__, default=None)


def _fits(tool: str, tree: Mapping[str, Any], count: int) -> bool:
    if tool == "trl":
        # Its keys are transformers' with a few more: a file with other keys must also have several of the Trainer's.
        knows_all = count == len(tree) and count > 1
        return knows_all or (count >= SHARE * len(tree) and len(TRAINING_ARGUMENTS & tree.keys()) > 1)
    if tool == "peft" and "peft_type" in tree:
        return True  # each adapter type has its own keys
    if tool == "swift" and not ({"model", "model_id_or_path"} & tree.keys() and SWIFT_MARKS & tree.keys()):
        return False
    marks = OWN[tool] & tree.keys()
    if not marks or count < SHARE * len(tree):
        return False
    if tool in TRAINS and count < len(tree) and not TRAINS[tool] & tree.keys():
        return False
    required = NEEDED.get(tool)
    return required is None or required in tree or len(marks) >= ENOUGH


def _is_surefits(tree: Mapping[str, Any]) -> bool:
    """Return whether a file is SureFit's: its sections are mappings, so a plain value under their name is another
    tool's; an objective may be its name alone."""
    sections = [key for key in tree if key in SureFitConfig.model_fields and key != "output_dir"]
    if any(isinstance(tree[key], str) for key in sections if key not in ("recipe", "objective")):
        return False
    return (
        "recipe" in sections
        or len(sections) >= SHARE * len(tree) > 0
        or any(_has_field(key, tree[key]) for key in sections)
    )


def _has_field(section: str, value: Any) -> bool:
    """Return whether a mapping has a field of a section of SureFit's config."""
    kind = SureFitConfig.model_fields[section].annotation
    fields = kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}
    return isinstance(value, dict) and bool(fields.keys() & value.keys())
