"""Search for changes after which a run fits: settings, then a larger card, more devices, a smaller model. Every one is
tried by the formula, whose upper end must fit. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from surefit.config.capabilities import require_compatible_settings
from surefit.config.load import LoadedConfig
from surefit.config.oom_ladder import lowest_rung
from surefit.config.resolve import ResolvedConfig, resolve_config, with_changes
from surefit.config.schema import ModelSection, SureFitConfig
from surefit.core.errors import SureFitError
from surefit.facts.fit_advice import CARDS, PROPOSED_MODELS, FitAdvice, FitOption
from surefit.facts.generation import eval_batch_chooser
from surefit.facts.hardware import HardwareFacts, hardware_facts
from surefit.facts.model import ModelFacts, model_facts
from surefit.facts.vocabulary import with_new_tokens
from surefit.plan.memory_interval import closed_form_estimate, closed_form_upper_bound, judge_fit

Fits = Callable[[ResolvedConfig, ModelFacts, HardwareFacts], bool]

ROOMY = 0.9
"""Share of the card's memory within which a smaller model is proposed."""
COUNTS = (2, 4, 8)
LENGTH_MARGIN, LENGTH_STEP = 1.25, 64
"""Rows outside a sample may be longer than its longest; a proposed `max_length` is a multiple of the step."""


def fits_by_formula(resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts) -> bool:
    """Return whether the upper end of the formula's interval fits, with rows of `data.max_length`."""
    estimate = closed_form_estimate(resolved, model, hardware)
    return estimate is not None and judge_fit(estimate, hardware.memory_bytes) == "fits"


def find_advice(
    loaded: LoadedConfig,
    model: ModelFacts,
    hardware: HardwareFacts,
    longest: int | None = None,
    confirm: Fits | None = None,
    counted: tuple[int | None, float] = (None, 0.0),
) -> FitAdvice:
    """Return the changes after which a run fits.

    Args:
        loaded: the config with its "auto".
        model, hardware: of the run, which may not fit.
        longest: tokens of the longest row, where it is known.
        confirm: a second opinion on changes of settings, such as a simulation.
        counted: examples of `data.train` and of `data.mix`, which decide an automatic batch.
    """
    trial = _Trial(loaded, model, hardware, longest, counted)
    settings = next((changes for changes in trial.ladder() if trial.fits(changes, confirm=confirm)), None)
    options = [FitOption("settings", settings)] if settings else []
    if hardware.kind == "cuda":
        options += [option for option in (trial.card(bool(settings)), trial.devices()) if option]
    if not settings and (smaller := trial.smaller_model()):
        options.append(smaller)
    return FitAdvice(tuple(options), cards=hardware.kind == "cuda")


class _Trial:
    """Tries changes of one run."""

    def __init__(
        self,
        loaded: LoadedConfig,
        model: ModelFacts,
        hardware: HardwareFacts,
        longest: int | None,
        counted: tuple[int | None, float],
    ) -> None:
        self.loaded, self.model, self.hardware, self.counted = loaded, model, hardware, counted
        self.shorter = self._shorter(longest)

    def _shorter(self, longest: int | None) -> dict[str, Any]:
        """Return a `max_length` that holds the longest row, where that is less than the config's."""
        if longest is None:
            return {}
        length = -(-int(longest * LENGTH_MARGIN) // LENGTH_STEP) * LENGTH_STEP
        return {"data.max_length": length} if length < self.loaded.config.data.max_length else {}

    def ladder(self, model: ModelFacts | None = None) -> Iterator[dict[str, Any]]:
        """Yield changes of settings, the least first: those that learn the same, LoRA, 4 bits, then all together."""
        full, facts = self.loaded.config.train.method == "full", model or self.model
        methods: list[dict[str, Any]] = [{}]
        methods += [{"train.method": "lora"}] if full else []
        can_quantize = self.hardware.kind == "cuda" and facts.quantization is None
        if can_quantize and self.loaded.config.model.quantization == "none":
            methods.append(methods[-1] | {"model.quantization": "nf4"})
        tried: list[dict[str, Any]] = []
        for method in methods:
            saving = self._saving(method, facts)
            for changes in (method, method | self.shorter, method | saving, method | self.shorter | saving):
                if changes not in tried:
                    tried.append(changes)
                    yield changes

    def _saving(self, changes: Mapping[str, Any], facts: ModelFacts) -> dict[str, Any]:
        """Return the settings that need less memory and learn the same."""
        resolved = self.resolve(changes, facts, self.hardware)
        return lowest_rung(resolved.config, self.hardware.kind) if resolved else {}

    def resolve(self, changes: Mapping[str, Any], model: ModelFacts, hardware: HardwareFacts) -> ResolvedConfig | None:
        """Return the config with changes and without "auto"; None where they cannot be combined with it."""
        needed, fitting = closed_form_upper_bound(model, hardware), eval_batch_chooser(model, hardware)
        try:
            config = with_changes(self.loaded.config, changes)
            resolved = resolve_config(replace(self.loaded, config=config), model, hardware, *self.counted,
                                      needed=needed, fitting=fitting)  # fmt: skip
            require_compatible_settings(resolved.config)
        except (SureFitError, ValidationError):
            return None
        return resolved

    def fits(
        self,
        changes: Mapping[str, Any],
        model: ModelFacts | None = None,
        hardware: HardwareFacts | None = None,
        confirm: Fits | None = None,
    ) -> bool:
        """Return whether the run fits with these changes; False without any."""
        model, hardware = model or self.model, hardware or self.hardware
        if self._weights_alone(changes, model) > (hardware.memory_bytes or 0):
            return False
        resolved = self.resolve(changes, model, hardware) if changes else None
        return (
            resolved is not None
            and fits_by_formula(resolved, model, hardware)
            and (confirm is None or confirm(resolved, model, hardware))
        )

    def _weights_alone(self, changes: Mapping[str, Any], model: ModelFacts) -> float:
        """Return the fewest bytes that the weights can take on a device, and if all are trained, their gradients."""
        config = self.loaded.config
        in_4_bits = changes.get("model.quantization", config.model.quantization) == "nf4" or model.quantization
        full = changes.get("train.method", config.train.method) == "full"
        width = 0.5 if in_4_bits else 1 if config.model.quantization == "fp8" else 2
        count: int = changes.get("hardware.count", 1)
        return width * (2 if full else 1) * (model.parameters or 0) / count

    def card(self, as_it_is: bool) -> FitOption | None:
        """Return the smallest larger card on which the run fits as it is or, unless `as_it_is`, with a setting."""
        ladder = [{}] if as_it_is else [{}, *self.ladder()]
        for name, size in CARDS.items():
            facts = hardware_facts(name)
            if (facts.memory_bytes or 0) <= (self.hardware.memory_bytes or 0):
                continue
            for changes in ladder:
                if self.fits({**changes, "hardware.gpu": name}, hardware=facts):
                    return FitOption(
                        "card", {**changes, "hardware.gpu": name}, f"{'an' if size == 80 else 'a'} {size} GB card"
                    )
        return None

    def devices(self) -> FitOption | None:
        """Return the fewest of these cards that hold the run together."""
        section = self.loaded.config.hardware
        if section.nodes > 1 or section.count not in ("auto", 1):
            return None
        available = None if self.hardware.is_another_machine else self.hardware.gpu_count
        for count in COUNTS:
            changes = {"hardware.count": count}
            if (available is None or count <= available) and self.fits(changes):
                return FitOption("devices", changes, f"{count} of these cards")
        return None

    def smaller_model(self) -> FitOption | None:
        """Return the largest proposed model that fits, with as few changes of settings as possible."""
        config = self.loaded.config
        if config.lora.start_from is not None or config.data.tokenized is not None:  # both are of the larger model
            return None
        roomy = replace(self.hardware, memory_bytes=int(ROOMY * (self.hardware.memory_bytes or 0)))
        for name, size, _ in PROPOSED_MODELS:
            facts = with_new_tokens(model_facts(name), config.model.add_tokens, None)
            if (facts.parameters or 0) >= (self.model.parameters or 0):
                continue
            renamed = {"model.name_or_path": name, **_settings_of_another_model(config, facts)}
            for changes in self.ladder(facts):
                if self.fits({**changes, **renamed}, model=facts, hardware=roomy):
                    return FitOption("model", {**changes, **renamed}, f"{name} ({size})")
        return None


def _settings_of_another_model(config: SureFitConfig, model: ModelFacts) -> dict[str, Any]:
    """Return the settings that belong to the config's own model, with the values that suit another one.

    Tokens to add belong to the rows and stay. The proposed models have chat templates of their own.
    """
    defaults = ModelSection(name_or_path=model.name)
    changes = {
        f"model.{name}": getattr(defaults, name)
        for name in ("revision", "chat_template", "chat_template_kwargs")
        if getattr(config.model, name) != getattr(defaults, name)
    }
    modules = config.lora.target_modules
    if isinstance(modules, list) and not all(
        any(name == module or name.endswith(f".{module}") for name in model.linear_modules) for module in modules
    ):
        changes["lora.target_modules"] = "all-linear"
    return changes
