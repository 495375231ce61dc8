"""A model's chat template without transformers: `surefit check` and `surefit plan` render rows with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefit.config.schema import SureFitConfig
from surefit.data.rows.rendered_turns import Segments
from surefit.data.tokens.turns import Rendering, build_template_refusal, plan_renderings, split_segments
from surefit.facts.chat_template import TEMPLATE_DATE, bake_template_defaults
from surefit.facts.template import TemplateRefused, render_chat_template
from surefit.facts.thinking import message_as_template_reads, probe_template_reasoning
from surefit.facts.tokenizer import TokenizerFacts
from surefit.facts.turn_end import ends_of_turn
from surefit.task import Example


class LightTemplate:
    """A model's chat template with the switches of a run.

    Args:
        facts: the tokenizer, with its template.
        switches: `model.chat_template_kwargs`.
    """

    def __init__(self, facts: TokenizerFacts, switches: Mapping[str, Any]) -> None:
        assert facts.chat_template is not None
        tokens = {"bos_token": facts.bos_token, "eos_token": facts.eos_token, "pad_token": facts.pad_token}
        self.special = {name: text for name, text in tokens.items() if text is not None}
        self.template = bake_template_defaults(facts.chat_template, switches)
        self.tools_template = (
            bake_template_defaults(facts.tool_template, switches) if facts.tool_template else self.template
        )
        self.added = facts.added

    def segments(self, example: Example) -> Segments:
        """Return the token examples of a conversation, like `tokenize.conversation_segments`.

        Raises:
            DataError: the template cannot render the conversation, or it does not fit.
        """
        ends = ends_of_turn(self._template_for(example), self.special, lambda: self.added)
        return split_segments(example, self._texts(example, plan_renderings(example)), ends)

    def whole(self, example: Example) -> str:
        """Return the text of a whole conversation, with the generation prompt if it does not end with an answer.

        Raises:
            DataError: the template cannot render the conversation.
        """
        (text,) = self._texts(example, plan_renderings(example)[:1]).values()
        return text

    def question(self) -> tuple[str, str] | None:
        """Return a question without and with the generation prompt; None if the template cannot render it."""
        question = [
            message_as_template_reads({"role": "user", "content": "?"}, probe_template_reasoning(self.template))
        ]
        try:
            before, after = (
                render_chat_template(self.template, question, add_generation_prompt=add_prompt, special=self.special)
                for add_prompt in (False, True)
            )
        except TemplateRefused:
            return None
        return before, after

    def _template_for(self, example: Example) -> str:
        return self.tools_template if example.tools else self.template

    def _texts(self, example: Example, wanted: list[Rendering]) -> dict[Rendering, str]:
        template = self._template_for(example)
        reads = probe_template_reasoning(template)
        turns = [
            message_as_template_reads({key: value for key, value in turn.items() if key != "weight"}, reads)
            for turn in example.messages
        ]
        try:
            return {
                (count, asks): render_chat_template(
                    template,
                    turns[:count],
                    tools=example.tools,
                    add_generation_prompt=asks,
                    special=self.special,
                    switches={"date_string": TEMPLATE_DATE},
                )
                for count, asks in wanted
            }
        except TemplateRefused as error:
            raise build_template_refusal(error) from None


def light_template(tokenizer: TokenizerFacts | None, config: SureFitConfig) -> LightTemplate | None:
    """Return the chat template of a run; None if the tokenizer has none, or is not on this machine."""
    if tokenizer is None or not tokenizer.chat_template:
        return None
    return LightTemplate(tokenizer, config.model.chat_template_kwargs)
