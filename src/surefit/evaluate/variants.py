"""The models of a run that can be evaluated: base, adapter and merged (LoRA), or base and model (full fine-tune), and
each of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefit.checkpoint import manager
from surefit.checkpoint.files import checkpoint_weights_sha256, find_checkpoint_damage, list_steps
from surefit.config.resolve import HardwareLike
from surefit.config.schema import SureFitConfig
from surefit.core.env import redact
from surefit.core.errors import ConfigError, GateError, did_you_mean
from surefit.core.rundir import RunDir, read_json
from surefit.evaluate.answers import checkpoint_step
from surefit.model.adapter import add_adapter
from surefit.model.identity import adapter_identity, base_directory, base_identity
from surefit.model.layers import load_for_generation
from surefit.model.saved import load_adapted, load_run_tokenizer, load_saved
from surefit.model.tokenizer import load_tokenizer, new_tokens

VARIANTS = {"lora": ("base", "adapter", "merged"), "full": ("base", "model")}
"""Variants by `train.method`, in the order of training; the last is the one for deployment."""
SERVED = "served"
"""The tuned model behind `evaluate.server`."""


def known_variants(config: SureFitConfig) -> tuple[str, ...]:
    """Return every variant that a run can have, in the order of training."""
    return (*VARIANTS[config.train.method], SERVED)


def select_variants(config: SureFitConfig, run: RunDir, wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Return the wanted variants, or all of the run's training method, in the order of training. With `evaluate.server`
    the default is the base and the served model, which replaces the tuned one. A checkpoint is included only if
    `wanted` names it.

    Raises:
        ConfigError: a variant that this training method does not have, or that does not exist yet.
        GateError: merged/ has no certificate, or another model's.
    """
    server = config.evaluate.server is not None
    possible = known_variants(config)[: None if server else -1]
    steps = sorted({name for name in wanted or () if checkpoint_step(name) is not None}, key=checkpoint_sort_key)
    for name in steps:
        _require_checkpoint(run, name)
    for name in wanted or ():
        if name in steps:
            continue
        if name == SERVED and not server:
            raise ConfigError(
                "no server is named",
                code="E7043",
                field="evaluate.server",
                help="write its URL: http://localhost:8000/v1",
            )
        if name not in possible:
            raise ConfigError(
                f"a {config.train.method} run has no variant {name!r}",
                code="E7044",
                help=f"choose from {', '.join(possible)}, or a checkpoint: step-N",
            )
    default = ("base", SERVED) if server else possible
    selected = tuple(name for name in possible if name in (wanted or default))
    for name in selected:
        _require_there(run, name, possible)
    after_base = int("base" in selected)
    return (*selected[:after_base], *steps, *selected[after_base:])


def checkpoint_sort_key(variant: str) -> int:
    """Return the step of a checkpoint as sort key; 0 for every other variant."""
    return checkpoint_step(variant) or 0


def _require_checkpoint(run: RunDir, variant: str) -> None:
    checkpoints = [path.name for _, path in list_steps(run.checkpoints)]
    if variant not in checkpoints:
        raise ConfigError(
            f"this run has no checkpoint {variant}{did_you_mean(variant, checkpoints)}",
            code="E7045",
            path=run.checkpoints,
            help=f"there are {', '.join(checkpoints)}; checkpoint.save_total_limit sets how many are kept"
            if checkpoints
            else "`surefit train` writes checkpoints; checkpoint.save_total_limit sets how many are kept",
        )
    if fault := find_checkpoint_damage(run.checkpoints / variant, hashes=True):
        raise ConfigError(f"the checkpoint {variant} cannot be scored: {fault}",
        code="E7046", path=run.checkpoints / variant,
                          help="choose another checkpoint")  # fmt: skip


def _require_there(run: RunDir, variant: str, known: Sequence[str]) -> None:
    if variant in ("base", SERVED):
        return
    path = {"adapter": run.adapter, "merged": run.merged, "model": run.model}[variant]
    if not path.is_dir():
        available = [name for name in known if name in ("base", SERVED) or (run.path / name).is_dir()]
        raise ConfigError(
            f"this run has no {path.name}/ yet",
            code="E7047",
            path=run.path,
            help=f"`surefit {'merge' if variant == 'merged' else 'train'}` writes it; "
            f"without it: {' '.join(f'--variant {name}' for name in available)}",
        )
    if variant == "merged" and _certified(run) != base_identity(run.merged):
        raise GateError(
            "merged/ has changed since its certificate was written",
            code="E7048",
            path=run.certificate,
            help="`surefit merge` writes and certifies it again",
        )


def _certified(run: RunDir) -> str | None:
    certificate = read_json(run.certificate) if run.certificate.exists() else {}
    sha256: str | None = certificate.get("merged_sha256") if certificate.get("passed") else None
    return sha256


def open_variants(
    config: SureFitConfig, hardware: HardwareLike, run: RunDir, chosen: Sequence[str]
) -> Iterator[tuple[str, Any, PreTrainedTokenizerBase]]:
    """Yield (name, model, tokenizer), one after the other; base and adapter are one model with the factors off and on.

    merged/ and model/ are opened with their own tokenizers. Drop a model before the next one is requested: this
    function keeps no reference to it either.
    """
    section = config.answering
    tokenizer = load_run_tokenizer(config.model, run, section)
    if "adapter" in chosen:
        model: Any = load_adapted(section, run.adapter, hardware)
        if "base" in chosen:
            with model.disable_adapter():
                yield "base", model, tokenizer
        yield "adapter", model, tokenizer
        del model
    elif "base" in chosen:
        yield "base", load_for_generation(section, hardware), tokenizer
    for name in filter(checkpoint_step, chosen):
        checkpoint_model = CheckpointModel(config, hardware, run)
        if not checkpoint_model.become(run.checkpoints / name):
            raise ConfigError(f"the checkpoint {name} was deleted in the meantime", code="E7049", path=run.checkpoints,
                              help="raise checkpoint.save_total_limit, or score it after training")  # fmt: skip
        yield name, checkpoint_model.model, checkpoint_model.tokenizer
        del checkpoint_model
    for name, path in (("merged", run.merged), ("model", run.model)):
        if name in chosen:
            saved_tokenizer = load_tokenizer(
                section.model_copy(update={"name_or_path": str(path), "revision": None, "chat_template": None})
            )
            yield name, load_saved(section, path, hardware), saved_tokenizer


class CheckpointModel:
    """The run's model, which loads the weights of one checkpoint after the other.

    A checkpoint has all trained weights, and the others are the base's, so nothing remains of the previous one.
    """

    def __init__(self, config: SureFitConfig, hardware: HardwareLike, run: RunDir) -> None:
        self.tokenizer = load_run_tokenizer(config.model, run, config.answering)
        base, adapter = load_for_generation(config.model, hardware), config.adapter
        model: PreTrainedModel | PeftModel = base
        if adapter is not None:
            added_tokens = new_tokens(config.model)
            model = add_adapter(base, adapter, new_tokens=added_tokens.ids if added_tokens else ())
        self.model = model.eval()
        self._trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def become(self, path: Path) -> bool:
        """Load a checkpoint's weights; return whether it still existed.

        Raises:
            ModelError: the checkpoint belongs to another model.
        """
        try:
            state = manager.load_checkpoint(path)
        except (OSError, SafetensorError):
            if path.is_dir():
                raise
            return False
        manager.restore_weights(state, self._trained, path)
        return True


def variant_location(config: SureFitConfig, run: RunDir, variant: str) -> str:
    """Return the location of a variant: a path in the run, the base model's name, or a server's URL."""
    if variant == SERVED:
        return redact(str(config.evaluate.server))
    if checkpoint_step(variant) is not None:
        return str(run.checkpoints / variant)
    return config.model.name_or_path if variant == "base" else str(run.path / variant)


def variant_sha256(config: SureFitConfig, run: RunDir, variant: str) -> str | None:
    """Return the sha256 of the model that a score belongs to; None if it no longer exists, or is behind a server."""
    if variant == "base":
        return base_identity(base_directory(config.model))
    if checkpoint_step(variant) is not None:
        return checkpoint_weights_sha256(run.checkpoints / variant)
    if variant == SERVED or not (run.path / variant).is_dir():
        return None
    return adapter_identity(run.adapter) if variant == "adapter" else base_identity(run.path / variant)
