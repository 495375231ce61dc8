"""The ways in which a run asks its models: everything that their answers depend on beside model and rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surefit.config.schema import Config
from surefit.data.rows.shorten import prompt_limit
from surefit.evaluate.answers import GRAMMAR
from surefit.generate.engine import DecodingConfig
from surefit.task import TaskRecipe


@dataclass(frozen=True)
class GenerationSettings:
    """How every variant is asked.

    Attributes:
        decoding: for the engine.
        samples: answers per row.
        constrained: answers are held to the recipe's grammar.
        ranked: nothing is generated, the row's labels are ranked.
        prompt_limit: tokens that prompts with a document are cut to, if they are.
        switches: of the chat template, where they are not its own.
    """

    decoding: DecodingConfig
    samples: int = 1
    constrained: bool = False
    ranked: bool = False
    prompt_limit: int | None = None
    switches: Mapping[str, Any] = field(default_factory=dict)

    def of(self, variant: str) -> str:
        """What a variant that is asked in this way is called in files and summaries."""
        return variant + GRAMMAR * self.constrained

    @property
    def settings(self) -> dict[str, Any]:
        """All that answers depend on, as JSON: what differs in none of these can be compared."""
        rendered = {"chat_template_kwargs": dict(sorted(self.switches.items()))} if self.switches else {}
        if self.ranked:
            return {"strategy": "labels ranked"} | rendered
        decoding = self.decoding
        drawn, beams = decoding.temperature > 0, decoding.num_beams > 1
        found: dict[str, Any] = {"strategy": "sampled" if drawn else "beam search" if beams else "greedy"}
        found["max_new_tokens"] = decoding.max_new_tokens
        if beams:
            found["num_beams"] = decoding.num_beams
        if drawn:
            found |= {"temperature": decoding.temperature, "seed": decoding.seed, "samples": self.samples}
        if self.prompt_limit is not None:
            found["prompt_limit"] = self.prompt_limit
        if decoding.stop:
            found["stop"] = list(decoding.stop)
        return found | rendered | ({"constrained": True} if self.constrained else {})

    @property
    def costs(self) -> dict[str, Any]:
        """What time and memory depend on, but no answer."""
        chunk = self.decoding.prefill_chunk
        return {"batch_size": self.decoding.batch_size} | ({"prefill_chunk": chunk} if chunk else {})


def list_generation_settings(config: Config, recipe: TaskRecipe) -> list[GenerationSettings]:
    """The ways that `evaluate` asks for, without a grammar first; nothing in the config is "auto"."""
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
    return [GenerationSettings(decoding, section.samples, each, ranked, limit, switches) for each in constrained]
