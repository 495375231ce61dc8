"""Whether packed pairs share their prompts: `speed.shared_prompts`, decided and checked."""

from __future__ import annotations

from typing import Protocol

from surefit.config.capabilities import conflict_with_trait
from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError

FIELD = "speed.shared_prompts"
MEASURED = "the same gradients, and on a CPU 1.3 to 1.9 times as fast where prompts are as long as answers"


class _ModelFacts(Protocol):
    """The part of `facts.model.ModelFacts` that the decision needs."""

    @property
    def router_loss(self) -> bool: ...
    @property
    def shares_prompts(self) -> bool: ...


def shared_prompts_obstacle(config: SureFitConfig, model: _ModelFacts) -> str | None:
    """Return why the pairs of a run cannot share their prompts, but for conflicts (`config.capabilities`); None where
    they can.

    Args:
        config: with packing and attention decided.
    """
    name, attention = config.objective.name, config.speed.attention
    if not config.objective.paired:
        return f"{name} trains on single answers"
    if config.data.packing is not True:
        return "padded pairs have a row for each answer"
    if attention not in ("auto", "torch_varlen"):
        return f"with {attention} every example is one document"
    if model.router_loss:
        return "the router loss is a mean over all tokens of a micro batch, and each prompt would count once"
    return None


def decide_shared_prompts(config: SureFitConfig, model: _ModelFacts, kind: str) -> tuple[bool, str]:
    """Return the value of `speed.shared_prompts: auto` on a device of this kind, and the reason."""
    if obstacle := shared_prompts_obstacle(config, model):
        return False, obstacle
    if conflict := conflict_with_trait(config, "shared prompts"):
        return False, conflict.why
    if not model.shares_prompts:
        return False, "not tested with this type of model; true tests it before training"
    if kind != "cpu":
        return False, "not measured on a GPU yet; true shares them there, too"
    return True, MEASURED


def require_shared_prompts(config: SureFitConfig, model: _ModelFacts) -> None:
    """Raise where the config sets shared prompts and they are impossible.

    Raises:
        ConfigError: with the reason.
    """
    if config.speed.shared_prompts is True and (obstacle := shared_prompts_obstacle(config, model)):
        raise ConfigError(
            f"prompts cannot be shared: {obstacle}",
            code="E2620",
            field=FIELD,
            help="leave speed.shared_prompts at auto",
        )
