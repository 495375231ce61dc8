"""Objectives of other tools' preference configs (DPO, IPO, ORPO, SimPO, KTO, reward models) in SureFit's terms."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import ValidationError

from surefit.config.schema import ObjectiveName, ObjectiveSection
from surefit.facts.setup import COMPARED
from surefit.importers import convert as c
from surefit.importers.config_mapping import ConfigDraft

DPO_LOSSES = get_args(ObjectiveSection.model_fields["loss_type"].annotation)
"""The losses of dpo that SureFit has, by TRL's names."""
TRAINED = get_args(ObjectiveName)
"""The objectives that SureFit trains."""
NOT_YET = {
    "reward": "SureFit does not train reward models yet: train it with this tool, or use objective: dpo on its pairs",
}
OTHERWISE = "SureFit trains sft, dpo, orpo, simpo and kto, not on rewards or on text that the model writes"
OTHER_LOSSES = "SureFit's dpo has the losses sigmoid, ipo and sigmoid_norm"
OTHER_KTO = "SureFit's kto has the loss kto, not one without a baseline"
OWN_REFERENCE = "SureFit's reference is the model as training begins"
TURNED_OFF = "the tool turns dropout off while it trains on preferences, and SureFit's objective dpo takes none"


@dataclass(frozen=True)
class ToolNumber:
    """A number that a tool's config may set.

    Attributes:
        keys: the keys that set it; the first that is set counts.
        default: its value where none is set; None if that is unknown.
    """

    keys: tuple[str, ...]
    default: float | None = None

    def key_in(self, values: Mapping[str, Any]) -> str | None:
        """Return the key that sets it, or None."""
        return next((key for key in self.keys if values.get(key) is not None), None)

    def value_in(self, values: Mapping[str, Any]) -> float | None:
        """Return its value, the default included; None if it is no number."""
        key = self.key_in(values)
        if key is None:
            return self.default
        with suppress(c.InvalidValue):
            return c.to_float(values[key])
        return None


@dataclass(frozen=True)
class ToolObjective:
    """What a tool's config optimizes.

    Attributes:
        name: dpo, orpo, simpo, cpo, kto or reward.
        key: the key that says so.
        loss: the form of dpo's loss, by TRL's names.
        loss_key: the key that sets the form.
        desirable, undesirable: for kto, the weights of the two kinds of answers.
        sft_weight_why: what the tool's likelihood term has that SureFit's has not.
        likelihood_on: for orpo, the tokens of the likelihood term: all or completion.
        defaults: dotted SureFit key → (the tool's key, its default for this objective).
    """

    name: str
    key: str
    loss: str = "sigmoid"
    loss_key: str | None = None
    beta: ToolNumber = ToolNumber(())
    margin: ToolNumber = ToolNumber(())
    smoothing: ToolNumber = ToolNumber((), 0.0)
    sft_weight: ToolNumber = ToolNumber((), 0.0)
    sft_weight_why: str = ""
    likelihood_on: str = "completion"
    desirable: ToolNumber = ToolNumber((), 1.0)
    undesirable: ToolNumber = ToolNumber((), 1.0)
    defaults: Mapping[str, tuple[str, Any]] = field(default_factory=dict)


def split_losses(losses: Any, weights: Any) -> tuple[str, float]:
    """Return (dpo's loss, weight of the likelihood term) of TRL's `loss_type` and `loss_weights`; several losses that
    are no such sum are returned as one text, which names no loss.

    >>> split_losses(["sigmoid", "sft"], [1.0, 0.2]), split_losses(None, None), split_losses(["sigmoid", "bco_pair"], 1)
    (('sigmoid', 0.2), ('sigmoid', 0.0), ('sigmoid + bco_pair', 0.0))
    """
    names = losses if isinstance(losses, list) and losses else [losses or "sigmoid"]
    numbers = weights if isinstance(weights, list) and len(weights) == len(names) else [1.0] * len(names)
    parts = {str(name): number for name, number in zip(names, numbers, strict=True)}
    likelihood = parts.pop("sft", 0.0)
    if len(parts) == 1 and next(iter(parts.values())) == 1 and isinstance(likelihood, int | float):
        return next(iter(parts)), float(likelihood)
    return " + ".join(map(str, names)), 0.0


def map_objective(draft: ConfigDraft, objective: ToolObjective) -> None:
    """Record the objective in the setup, and in SureFit's config where SureFit trains it."""
    draft.say("preferences", True, objective.key)
    draft.say("objective", objective.name, objective.key)
    if objective.name == "dpo":
        draft.say("objective_loss", objective.loss, objective.loss_key or objective.key)
    if objective.name == "orpo":
        draft.say("likelihood_on", objective.likelihood_on, objective.key)
    for attribute, number in (("beta", objective.beta), ("target_margin", objective.margin)):
        value, key = number.value_in(draft.flat), number.key_in(draft.flat)
        if value is not None and key not in draft.refused:
            draft.say(attribute, value, key or objective.key)
    if objective.name == "kto":
        _say_weights(draft, objective)
    smoothing, key = objective.smoothing.value_in(draft.flat), objective.smoothing.key_in(draft.flat)
    if key is not None and key not in draft.refused:
        draft.say("label_smoothing", smoothing, key)
    reason = _why_not(objective)
    if reason is not None:
        draft.whole_run = False
        by_loss = reason in (OTHER_LOSSES, OTHER_KTO)
        key = (objective.loss_key or objective.key) if by_loss else objective.key
        draft.lose(key, reason)
        return
    _carry(draft, objective)


def _why_not(objective: ToolObjective) -> str | None:
    if objective.name not in TRAINED:
        return NOT_YET.get(objective.name, OTHERWISE)
    if objective.name == "kto":
        return None if objective.loss in ("kto", "sigmoid") else OTHER_KTO
    return OTHER_LOSSES if objective.name == "dpo" and objective.loss not in DPO_LOSSES else None


def _say_weights(draft: ConfigDraft, objective: ToolObjective) -> None:
    """Record the weights of kto."""
    weights = {"desirable_weight": objective.desirable, "undesirable_weight": objective.undesirable}
    for attribute, number in weights.items():
        value, key = number.value_in(draft.flat), number.key_in(draft.flat)
        if value is not None and key not in draft.refused:
            draft.say(attribute, value, key or objective.key)


def _carry(draft: ConfigDraft, objective: ToolObjective) -> None:
    """Write the section `objective` of SureFit's config."""
    _put(draft, "objective.name", objective.name, objective.key)
    if objective.name == "dpo" and objective.loss != "sigmoid":
        _put(draft, "objective.loss_type", objective.loss, objective.loss_key or objective.key)
    elif objective.loss_key:
        draft.reach(objective.loss_key)
    beta = objective.beta.value_in(draft.flat)
    if beta is not None:
        _put(draft, "objective.beta", beta, objective.beta.key_in(draft.flat) or objective.beta.keys[0])
    margin = objective.margin.value_in(draft.flat)
    if objective.name == "simpo" and margin is not None and beta:
        key = objective.margin.key_in(draft.flat) or objective.beta.key_in(draft.flat) or objective.margin.keys[0]
        _put(draft, "objective.gamma_beta_ratio", margin / beta, key)
    smoothing = objective.smoothing.value_in(draft.flat)
    if objective.name == "dpo" and objective.loss == "sigmoid" and smoothing:
        _put(draft, "objective.label_smoothing", smoothing, objective.smoothing.keys[0])
    for dotted, number in (("desirable_weight", objective.desirable), ("undesirable_weight", objective.undesirable)):
        named, value = number.key_in(draft.flat), number.value_in(draft.flat)
        if objective.name == "kto" and named is not None and value is not None:
            _put(draft, f"objective.{dotted}", value, named)
    weight = objective.sft_weight.value_in(draft.flat)
    if objective.name in ("dpo", "simpo") and weight:
        keys = (*objective.sft_weight.keys, objective.loss_key or objective.key)
        _put(draft, "objective.sft_weight", weight, objective.sft_weight.key_in(draft.flat) or keys[0])
        if objective.sft_weight_why:
            key = objective.sft_weight.key_in(draft.flat) or keys[0]
            draft.lose_part(key, "", draft.flat.get(key), objective.sft_weight_why)
    for dotted, (key, value) in objective.defaults.items():
        if dotted not in draft.config and not draft.says(key):
            draft.config[dotted] = value
            draft.names[dotted] = key
    if objective.name in COMPARED:
        _drop_dropout(draft)
    if objective.name == "orpo" and objective.likelihood_on == "all":
        why = "its likelihood term covers the prompts too; SureFit's covers the answers"
        draft.lose_part(objective.key, "", draft.flat.get(objective.key), why)


def _put(draft: ConfigDraft, dotted: str, value: Any, key: str) -> None:
    """Write a value of the section `objective`, whether the file sets its key or not; without a value that the schema
    rejects there is no SureFit config, as training with the default would be another objective."""
    try:
        ObjectiveSection.model_validate({dotted.removeprefix("objective."): value})
    except ValidationError as error:
        draft.whole_run = False
        draft.lose(key, f"{dotted} would be {value:g}: {error.errors()[0]['msg']}")
        return
    draft.carry(dotted, value, key)
    draft.reach(key)


def _drop_dropout(draft: ConfigDraft) -> None:
    """Leave out `lora.lora_dropout`, which the tool does not use while it compares with a reference."""
    key = draft.names.get("lora.lora_dropout", "lora_dropout")
    draft.config["lora.lora_dropout"] = 0.0
    draft.names["lora.lora_dropout"] = key
    if draft.says(key):
        draft.lose(key, TURNED_OFF)


def note_reference(draft: ConfigDraft, text: str, is_start: bool, key: str) -> None:
    """Record what the objective compares the model with, if it compares it with anything."""
    if draft.setup.get("objective") in COMPARED:
        draft.say("reference", text, key)
        draft.say("reference_is_start", is_start, key)
