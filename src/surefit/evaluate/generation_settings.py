"""Generation settings of a run's variants: everything that answers depend on besides model and rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surefit.config.schema import SureFitConfig
from surefit.data.rows.shorten import prompt_limit
from surefit.evaluate.answers import GRAMMAR
from surefit.generate.engine import DecodingConfig
from surefit.task import TaskRecipe


@dataclass(frozen=True)
class GenerationSettings:
    """Settings with which every variant generates its answers.

    Attributes:
        decoding: settings of the generation engine.
        samples: answers per row.
        constrained: whether answers follow the recipe's grammar.
        ranked: whether the row's labels are ranked instead of generating text.
        prompt_limit: largest number of tokens of a prompt with a document, which is cut to fit; None for no limit.
        switches: keyword arguments of the chat template that differ from its defaults.
    """

    decoding: DecodingConfig
    samples: int = 1
    constrained: bool = False
    ranked: bool = False
    prompt_limit: int | None = None
    switches: Mapping[str, Any] = field(default_factory=dict)

    def of(self, variant: str) -> str:
        """Return a variant's name in files and summaries under these settings."""
        return variant + GRAMMAR * self.constrained

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that answers depend on, as JSON: results with equal settings are comparable."""
        rendered = {"chat_template_kwargs": dict(sorted(self.switches.items()))} if self.switches else {}
        if self.ranked:
            return {"strategy": "labels ranked"} | rendered
        decoding = self.decoding
        is_sampled, is_beam_search = decoding.temperature > 0, decoding.num_beams > 1
        values: dict[str, Any] = {
            "strategy": "sampled" if is_sampled else "beam search" if is_beam_search else "greedy"
        }
        values["max_new_tokens"] = decoding.max_new_tokens
        if is_beam_search:
            values["num_beams"] = decoding.num_beams
        if is_sampled:
            values |= {"temperature": decoding.temperature, "seed": decoding.seed, "samples": self.samples}
        if self.prompt_limit is not None:
            values["prompt_limit"] = self.prompt_limit
        if decoding.stop:
            values["stop"] = list(decoding.stop)
        return values | rendered | ({"constrained": True} if self.constrained else {})

    @property
    def costs(self) -> dict[str, Any]:
        """Settings that time and memory depend on, but answers do not."""
        chunk = self.decoding.prefill_chunk
        return {"batch_size": self.decoding.batch_size} | ({"prefill_chunk": chunk} if chunk else {})


def list_generation_settings(config: SureFitConfig, recipe: TaskRecipe) -> list[GenerationSettings]:
    """List the settings that `evaluate` configures, without a grammar first; no setting of the config is "auto"."""
    section = config.evaluate
    assert isinstance(section.batch_size, int)
    decoding = DecodingConfig(
        section.max_new_tokens,
        section.batch_size,
        num_beams=section.num_beams,
        temperature=section.temperature,
        seed=config.train.seed,
        stop=tuple(recipe.stop),
        prefill_chunk=section.prefill_chunk,
    )
    constrained = {"none": (False,), "only": (True,), "both": (False, True)}[section.constrained]
    ranked = recipe.choices is not None
    limit, switches = prompt_limit(config), config.answering.chat_template_kwargs
    return [
        GenerationSettings(decoding, section.samples, use_grammar, ranked, limit, switches)
        for use_grammar in constrained
    ]
