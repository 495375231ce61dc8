"""The models of a run that can be asked: base, adapter and merged (LoRA), or base and model (full fine-tune), and each
of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefit.checkpoint import manager
from surefit.checkpoint.manager import checkpoint_weights_sha256
from surefit.config.resolve import HardwareLike
from surefit.config.schema import Config
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
"""By `train.method`, in the order of training; the last is what ships."""
SERVED = "served"
"""The tuned model, answering behind `evaluate.server`."""


def known_variants(config: Config) -> tuple[str, ...]:
    """Every variant that a run can have, in the order of training."""
    return (*VARIANTS[config.train.method], SERVED)


def select_variants(config: Config, run: RunDir, wanted: Sequence[str] | None) -> tuple[str, ...]:
    """The wanted variants, or all of the run's kind, in the order of training. With `evaluate.server` these are the
    base and what is served: that stands for the tuned model. A checkpoint is asked only where it is wanted by its name.

    Raises:
        ConfigError: one that this kind of run does not have, or that is not there yet.
        GateError: merged/ has no certificate, or another model's.
    """
    server = config.evaluate.server is not None
    known = known_variants(config)[: None if server else -1]
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
        if name not in known:
            raise ConfigError(
                f"a {config.train.method} run has no variant {name!r}",
                code="E7044",
                help=f"choose from {', '.join(known)}, or a checkpoint: step-N",
            )
    usual = ("base", SERVED) if server else known
    chosen = tuple(name for name in known if name in (wanted or usual))
    for name in chosen:
        _require_there(run, name, known)
    after_base = int("base" in chosen)
    return (*chosen[:after_base], *steps, *chosen[after_base:])


def checkpoint_sort_key(variant: str) -> int:
    """The step of a checkpoint, to sort by; 0 of every other variant."""
    return checkpoint_step(variant) or 0


def _require_checkpoint(run: RunDir, variant: str) -> None:
    found = [path.name for _, path in manager.list_steps(run.checkpoints)]
    if variant not in found:
        raise ConfigError(
            f"there is no checkpoint {variant} in this run{did_you_mean(variant, found)}",
            code="E7045",
            path=run.checkpoints,
            help=f"there are {', '.join(found)}; checkpoint.save_total_limit says how many are kept"
            if found
            else "`surefit train` writes checkpoints; checkpoint.save_total_limit says how many are kept",
        )
    if fault := manager.find_checkpoint_damage(run.checkpoints / variant, hashes=True):
        raise ConfigError(f"the checkpoint {variant} cannot be scored: {fault}",
        code="E7046", path=run.checkpoints / variant,
                          help="take another one")  # fmt: skip


def _require_there(run: RunDir, variant: str, known: Sequence[str]) -> None:
    if variant in ("base", SERVED):
        return
    path = {"adapter": run.adapter, "merged": run.merged, "model": run.model}[variant]
    if not path.is_dir():
        there = [name for name in known if name in ("base", SERVED) or (run.path / name).is_dir()]
        raise ConfigError(
            f"there is no {path.name}/ in this run yet",
            code="E7047",
            path=run.path,
            help=f"`surefit {'merge' if variant == 'merged' else 'train'}` writes it; "
            f"without it: {' '.join(f'--variant {name}' for name in there)}",
        )
    if variant == "merged" and _certified(run) != base_identity(run.merged):
        raise GateError(
            "merged/ is not the model that its certificate was given for",
            code="E7048",
            path=run.certificate,
            help="`surefit merge` makes and certifies it again",
        )


def _certified(run: RunDir) -> str | None:
    certificate = read_json(run.certificate) if run.certificate.exists() else {}
    sha256: str | None = certificate.get("merged_sha256") if certificate.get("passed") else None
    return sha256


def open_variants(
    config: Config, hardware: HardwareLike, run: RunDir, chosen: Sequence[str]
) -> Iterator[tuple[str, Any, PreTrainedTokenizerBase]]:
    """(name, model, tokenizer), one after the other; base and adapter are one model with the factors off and on.

    What ships is opened with the tokenizer that ships with it. Let go of a model before asking for the next: this
    function does not hold it either.
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
        at_step = CheckpointModel(config, hardware, run)
        if not at_step.become(run.checkpoints / name):
            raise ConfigError(f"the checkpoint {name} was deleted meanwhile", code="E7049", path=run.checkpoints,
                              help="raise checkpoint.save_total_limit, or score it when training is done")  # fmt: skip
        yield name, at_step.model, at_step.tokenizer
        del at_step
    for name, path in (("merged", run.merged), ("model", run.model)):
        if name in chosen:
            own = load_tokenizer(
                section.model_copy(update={"name_or_path": str(path), "revision": None, "chat_template": None})
            )
            yield name, load_saved(section, path, hardware), own


class CheckpointModel:
    """The run's model, which becomes that of one checkpoint after the other.

    A checkpoint has all that was trained, and everything else is the base's: nothing is left of the one before.
    """

    def __init__(self, config: Config, hardware: HardwareLike, run: RunDir) -> None:
        self.tokenizer = load_run_tokenizer(config.model, run, config.answering)
        base, adapter = load_for_generation(config.model, hardware), config.adapter
        model: PreTrainedModel | PeftModel = base
        if adapter is not None:
            new = new_tokens(config.model)
            model = add_adapter(base, adapter, new_tokens=new.ids if new else ())
        self.model = model.eval()
        self._trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def become(self, path: Path) -> bool:
        """Take a checkpoint's weights; returns whether it was still there.

        Raises:
            ModelError: it is there, and not one of this model.
        """
        try:
            state = manager.load_checkpoint(path)
        except (OSError, SafetensorError):
            if path.is_dir():
                raise
            return False
        manager.restore_weights(state, self._trained, path)
        return True


def variant_location(config: Config, run: RunDir, variant: str) -> str:
    """Where a variant lies: a path in the run, the base model's name, or a server's URL."""
    if variant == SERVED:
        return redact(str(config.evaluate.server))
    if checkpoint_step(variant) is not None:
        return str(run.checkpoints / variant)
    return config.model.name_or_path if variant == "base" else str(run.path / variant)


def variant_sha256(config: Config, run: RunDir, variant: str) -> str | None:
    """The sha256 of the model that a score belongs to; None where it is no longer there, or behind a server."""
    if variant == "base":
        return base_identity(base_directory(config.model))
    if checkpoint_step(variant) is not None:
        return checkpoint_weights_sha256(run.checkpoints / variant)
    if variant == SERVED or not (run.path / variant).is_dir():
        return None
    return adapter_identity(run.adapter) if variant == "adapter" else base_identity(run.path / variant)
