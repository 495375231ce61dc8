"""TPL: reasoning in the rows, and its rendering by the chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from surefit.config.schema import SureFitConfig
from surefit.core.units import plural
from surefit.facts.audit import AuditFacts
from surefit.facts.chat_template import bake_template_defaults
from surefit.facts.examples import ExampleFacts
from surefit.facts.template import TemplateRefused, variables_of
from surefit.facts.thinking import TemplateReasoning, probe_template_reasoning
from surefit.facts.tokenizer import TokenizerFacts
from surefit.lint.rule import Finding, LintContext, rule
from surefit.lint.rules.audit import ANY, rows_found

SWITCHES = ("enable_thinking", "thinking")
"""Names of the template variables that switch reasoning on or off."""


def _reads(config: SureFitConfig, tokenizer: TokenizerFacts) -> TemplateReasoning | None:
    """Return how the template treats reasoning with the switches of the run; None without a template."""
    if not tokenizer.chat_template:
        return None
    return probe_template_reasoning(bake_template_defaults(tokenizer.chat_template, config.model.chat_template_kwargs))


def _switch(tokenizer: TokenizerFacts) -> str | None:
    """Return the name of the template's switch for reasoning, or None."""
    try:
        variables = variables_of(tokenizer.chat_template or "")
    except TemplateRefused:
        return None
    return next((name for name in SWITCHES if name in variables), None)


def _model(context: LintContext) -> str:
    return context.model.name if context.model else "the model"


@rule("TPL009", "reasoning-left-out", severity="warning")
def reasoning_left_out(context: LintContext, audit: AuditFacts) -> Iterator[Finding]:
    """The rows have reasoning, but the chat template omits it.

    ## What it does
    Renders a sample of the rows (an audit renders all) with the model's own chat template and the switches of the run,
    and looks for the reasoning of every answer in the supervised text: reasoning in `reasoning_content`, `reasoning` or
    `thinking`, or in the content before `</think>`.

    ## Why it is bad
    A template silently omits fields that it does not know. The model is trained on the answers without the reasoning,
    which is the most expensive part of the data.

    ## Example
    Rows with `reasoning_content` on Llama 3, whose template has no such field; or on DeepSeek-V3.1 without
    `chat_template_kwargs: {thinking: true}`.

    ## Fix
    Set the template's switch, write the reasoning into the content as `<think>…</think>`, or drop it with
    `data.thinking: drop`.

    ## Evidence
    QwenLM/Qwen3#1398 and modelscope/ms-swift#4030 (frequent questions about reasoning in fine-tuning). Measured: of 147
    published templates (docs/chat-templates.md) most have no field for reasoning.
    """
    switch = _switch(context.tokenizer) if context.tokenizer else None
    advice = (
        f"set model.chat_template_kwargs: {{{switch}: true}}"
        if switch
        else "write it into the content as <think>…</think>"
    )
    yield from rows_found(
        audit,
        "reasoning_left_out",
        ANY,
        f"the chat template of {_model(context)} omits the reasoning of {{rows}}: the model is trained on the answers "
        "only{first}",
        f"{advice}, or data.thinking: drop if that is intended",
    )


@rule("TPL010", "learns-not-to-think", severity="warning")
def learns_not_to_think(
    context: LintContext, config: SureFitConfig, examples: ExampleFacts, tokenizer: TokenizerFacts
) -> Iterator[Finding]:
    """The answers have no reasoning, so the model learns to write empty reasoning.

    ## What it does
    Renders an answer without reasoning, and checks whether `<think></think>` is in the supervised text. Counts such
    rows in a sample, and fires if most are like that. Such a template does not recognize reasoning in another tag
    (`<thinking>`, `<thought>`); the finding names the tag.

    ## Why it is bad
    The prompt tells the model to reason, but every row teaches it to stop at once. After a few hundred steps it no
    longer reasons. With the switch for answers without reasoning, the empty tags are part of the prompt: nothing is
    unlearned, and the served model can still reason when prompted.

    ## Example
    Questions and answers on Qwen3-8B without `chat_template_kwargs`.

    ## Fix
    Set `model.chat_template_kwargs: {enable_thinking: false}`, or train on rows with reasoning. If the model should
    stop reasoning, accept the finding in `lint.ignore`.

    ## Evidence
    ms-swift's `--loss_scale ignore_empty_think`, made to avoid "losing the think capability"; Together's guide to
    reasoning fine-tuning (training without reasoning degrades it).
    """
    probe = _reads(config, tokenizer)
    unclosed = context.audit.seen("unclosed_thought") if context.audit else None  # AUD042 reports these
    rows_without = examples.conversations - examples.in_fields - examples.in_tags - (unclosed.rows if unclosed else 0)
    if probe is None or not probe.empties or 2 * rows_without <= examples.conversations:
        return
    switch = _switch(tokenizer)
    switch_advice = f"set model.chat_template_kwargs: {{{switch}: false}}, or " if switch else ""
    tag, count = Counter(examples.other_tags).most_common(1)[0] if examples.other_tags else ("", 0)
    empty = (
        f"the chat template of {_model(context)} makes the model write empty reasoning before their answers: it "
        "learns not to reason"
    )
    sampled = plural(examples.conversations, "sampled conversation")
    rows = rows_without
    if 2 * count > rows_without:
        rows = count
        reason = f"have their reasoning in {tag}, which the template treats as the answer, and {empty}"
        help_text = "write the reasoning as <think>…</think>, or as reasoning_content of the assistant's message"
    elif config.data.thinking == "drop":
        reason = f"have no reasoning (data.thinking: drop leaves none), and {empty}"
        help_text = f"{switch_advice}set data.thinking: keep if the rows have reasoning"
    else:
        reason = f"have no reasoning, and {empty}"
        help_text = f"{switch_advice}train on rows with reasoning (reasoning_content of the assistant's message)"
    yield Finding(field="data.train", message=f"{rows} of {sampled} {reason}", help=help_text)
