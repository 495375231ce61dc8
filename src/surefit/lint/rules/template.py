"""TPL: the tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surefit.config.schema import SureFitConfig
from surefit.core.errors import did_you_mean
from surefit.core.units import truncate_text
from surefit.facts.audit import AuditFacts
from surefit.facts.chat_template import bake_template_defaults
from surefit.facts.families import END_TOKENS, family_of, family_of_template, foreign_end_token
from surefit.facts.model import ModelFacts
from surefit.facts.setup import Setup
from surefit.facts.template import TemplateRefused, render_chat_template, variables_of
from surefit.facts.thinking import message_as_template_reads, probe_template_reasoning
from surefit.facts.tokenizer import TokenizerFacts
from surefit.lint.rule import Finding, LintContext, rule
from surefit.lint.rules.audit import ANY, rows_found
from surefit.lint.rules.model import makes_conversations

OVERWRITING_COLLATORS = ("DataCollatorForLanguageModeling", "DataCollatorForCompletionOnlyLM")
"""Collators that make labels from the ids and mask every token that equals the padding token."""
PATCHED_BY_TRL = ("cohere", "deepseek", "gemma", "glm", "gpt_oss", "idefics", "lfm2", "llama", "phi3", "qwen")
"""Prefixes of the model types for which TRL may replace the template by a marked one of its own."""


def class_name(collator: str | None) -> str:
    """Return a collator's class name; empty if none is stated, and for TRL's own class of the same name."""
    if not collator or collator.startswith("trl.trainer.sft_trainer"):
        return ""
    return collator.rpartition(".")[2]


@rule("TPL001", "no-generation-marks", severity="error")
def no_generation_marks(context: LintContext, setup: Setup, tokenizer: TokenizerFacts) -> Iterator[Finding]:
    """The loss should fall on the assistant's turns only, but the chat template does not mark them.

    ## What it does
    Looks for `{% generation %}` in the chat template if the tool relies on it to find the assistant's tokens, as TRL
    does with `assistant_only_loss`. SureFit does not need it. TRL replaces the templates of a few known families with
    marked ones; those families are skipped.

    ## Why it is bad
    transformers returns a mask of zeros: there is no supervised token. Depending on the version the run stops, or
    trains on nothing with a loss of 0.

    ## Example
    `assistant_only_loss: true` with the template of Mistral-7B-Instruct.

    ## Fix
    Use rows of prompt and completion with `completion_only_loss`, or a template with `{% generation %}` around the
    assistant's text.

    ## Evidence
    huggingface/transformers#34172 and QwenLM/Qwen3#1522 (the error under TRL 0.19); huggingface/trl#4201 added a
    warning for it.
    """
    if setup.tool not in ("trl", "python") or setup.loss_on != "assistant" or not tokenizer.chat_template:
        return
    family = context.model.model_type if context.model else ""
    if not tokenizer.marks_generation and not family.startswith(PATCHED_BY_TRL):
        yield Finding(
            field="loss_on",
            message=f"{setup.name('loss_on')} needs a chat template with {{% generation %}} tags, but that of "
            f"{_model(context)} has none",
            help="train on rows of prompt and completion, or add the tags around the assistant's text",
        )


def _model(context: LintContext) -> str:
    return context.model.name if context.model else "the model"


@rule("TPL002", "end-of-turn-not-trained", severity="warning")
def end_of_turn_not_trained(context: LintContext, setup: Setup, tokenizer: TokenizerFacts) -> Iterator[Finding]:
    """The assistant's turns do not end with a stop token of generation.

    ## What it does
    Renders a question and an answer with the model's chat template, and checks whether a special token follows the
    answer that is a stop token in generation_config.json or the tokenizer. SureFit adds the end-of-turn token to the
    generation config that it writes, and trains on the next turn's first token if that ends a turn (GLM). In SureFit's
    own config, only a template without any such token is a finding.

    ## Why it is bad
    The model learns to end its turns with a token at which generation does not stop, or with none: after a right answer
    it continues until the token limit.

    ## Example
    Chat data on the base model Qwen2.5-7B: turns end with `<|im_end|>`, but its generation config stops at
    `<|endoftext|>` only.

    ## Fix
    Set the tool's EOS token to the end-of-turn token, or start from the instruct model.

    ## Evidence
    QwenLM/Qwen3#927, hiyouga/LlamaFactory#7454 (a tuned base model "doesn't stop generating").
    """
    if tokenizer.turn_end is None or not tokenizer.file or (context.examples and not context.examples.conversations):
        return
    if tokenizer.end_of_turn is None:
        next_mark_trained = setup.tool == "surefit" and tokenizer.ends_with_next
        if not next_mark_trained and not (tokenizer.eos_token and tokenizer.eos_token in tokenizer.turn_end):
            yield Finding(
                field="base_model",
                message=f"the chat template of {_model(context)} writes {tokenizer.turn_end!r} after an answer: "
                "no special token ends it",
                help="use a chat template that ends the assistant's turns with a special token",
            )
    elif setup.tool != "surefit" and setup.eos_token != tokenizer.end_of_turn:
        stops = {*tokenizer.stop_ids, tokenizer.eos_id} - {None}
        if stops and tokenizer.end_of_turn_id not in stops:
            yield Finding(
                field="base_model",
                message=f"the turns of {_model(context)} end with {tokenizer.end_of_turn!r} (id "
                f"{tokenizer.end_of_turn_id}), but generation stops at id "
                f"{', '.join(map(str, sorted(s for s in stops if s is not None)))} only",
                help=f"set the tool's EOS token to {tokenizer.end_of_turn}",
            )


@rule("TPL003", "pad-is-eos", severity="error")
def pad_is_eos(setup: Setup, tokenizer: TokenizerFacts) -> Iterator[Finding]:
    """The padding token is the end-of-turn token, and the collator masks every padding token.

    ## What it does
    Compares the two ids if the config names a collator that masks all tokens equal to the padding token. SureFit masks
    by position, so with SureFit the two may be the same.

    ## Why it is bad
    The end of every answer is masked with the padding. The model never learns to stop.

    ## Example
    `tokenizer.pad_token = tokenizer.eos_token` with `DataCollatorForLanguageModeling`.

    ## Fix
    Use a separate padding token (a reserved one, or `<unk>`), or a collator that masks by position.

    ## Evidence
    huggingface/transformers#23530, huggingface/trl#976.
    """
    end = tokenizer.end_of_turn_id if setup.conversations and tokenizer.end_of_turn_id is not None else tokenizer.eos_id
    if class_name(setup.collator) in OVERWRITING_COLLATORS and tokenizer.pad_id is not None and tokenizer.pad_id == end:
        yield Finding(
            field="collator",
            message=f"{class_name(setup.collator)} masks every {tokenizer.pad_token!r} (id {tokenizer.pad_id}), "
            "which is also the end-of-turn token: the model never learns to stop",
            help="give the tokenizer a separate padding token, or use a collator that masks by position",
        )


@rule("TPL025", "pad-made-eos", severity="warning")
def pad_made_eos(setup: Setup) -> Iterator[Finding]:
    """The script pads with the EOS token, and its collator masks every padding token.

    ## What it does
    Looks in a Python script for `pad_token = eos_token` together with a collator that masks all tokens equal to the
    padding token, which before TRL 0.16 was SFTTrainer's default. If the tokenizer on this machine already has the same
    token for both, TPL003 reports it.

    ## Why it is bad
    The EOS token at the end of each text is masked like padding: the model does not learn to stop.

    ## Example
    `tokenizer.pad_token = tokenizer.eos_token` with `DataCollatorForLanguageModeling(tokenizer, mlm=False)`.

    ## Fix
    Use a separate padding token (a reserved one, or `<unk>`), or a collator that masks by position.

    ## Evidence
    huggingface/transformers#23530, huggingface/trl#976.
    """
    if setup.pad_is_eos and class_name(setup.collator) in OVERWRITING_COLLATORS:
        yield Finding(
            field="pad_is_eos",
            message=f"the padding token is set to the EOS token, and {class_name(setup.collator)} masks "
            "every padding token: the model does not learn to stop",
            help="give the tokenizer a separate padding token, or use a collator that masks by position",
        )


@rule("TPL004", "no-pad-token", severity="error")
def no_pad_token(context: LintContext, setup: Setup, tokenizer: TokenizerFacts) -> Iterator[Finding]:
    """The tokenizer has no padding token, but the collator needs one.

    ## What it does
    Looks at the tokenizer if the config names one of transformers' collators and the micro batch is larger than 1.
    SureFit needs no padding token: it masks padding by position.

    ## Why it is bad
    The first batch with rows of different lengths stops the run: "Asking to pad but the tokenizer does not have a
    padding token".

    ## Example
    Llama-2-7b with `DataCollatorForLanguageModeling`.

    ## Fix
    Set a padding token that is not the EOS token (see TPL003).

    ## Evidence
    huggingface/transformers#22312.
    """
    needs_padding = class_name(setup.collator) in (
        *OVERWRITING_COLLATORS,
        "DataCollatorForSeq2Seq",
        "DataCollatorWithPadding",
    )
    if needs_padding and tokenizer.file and tokenizer.pad_token is None and setup.micro_batch != 1:
        yield Finding(
            field="collator",
            message=f"{class_name(setup.collator)} needs a padding token, but the tokenizer of "
            f"{_model(context)} has none",
            help="set pad_token to a reserved token that is not the EOS token",
        )


@rule("TPL005", "template-ignores-tools", severity="error")
def template_ignores_tools(context: LintContext, audit: AuditFacts) -> Iterator[Finding]:
    """The rows have tools, but the chat template does not render them.

    ## What it does
    Renders a sample of the rows (an audit renders all) with the model's own chat template (of several, the one for rows
    with tools), and looks for the names of the tools in the result.

    ## Why it is bad
    The template silently omits them. The model is trained to call functions that are not in its prompt: it memorizes
    the names, and fails with every other tool.

    ## Example
    Rows with `messages` and `tools` on a model whose template does not support tools.

    ## Fix
    Use a model whose template renders tools, or a recipe that puts them into the system message (`function_calling`).

    ## Evidence
    axolotl-ai-cloud/axolotl#2115 (tools not passed to the template); huggingface/transformers#32130 (a template that
    omits them).
    """
    yield from rows_found(
        audit,
        "tools_left_out",
        ANY,
        f"the chat template of {_model(context)} does not render the tools of {{rows}}: the model would not see them"
        "{first}",
        "use a model whose template renders tools, or a recipe that puts them into the system message",
    )


@rule("TPL006", "vocabulary-larger-than-embedding", severity="error")
def vocabulary_larger_than_embedding(
    context: LintContext, model: ModelFacts, tokenizer: TokenizerFacts
) -> Iterator[Finding]:
    """The tokenizer has tokens for which the model has no embedding.

    ## What it does
    Compares the ids of the plain vocabulary, and of the special tokens that texts contain (padding, BOS, EOS, and the
    chat template's tokens), with `vocab_size`. Other special tokens do no harm: Gemma 3's text models have one for
    images whose id is beyond the embedding.

    ## Why it is bad
    The first such token stops the run with an index error; on a GPU the message ("device-side assert") does not name
    the cause.

    ## Example
    A `[PAD]` token that was added to a Llama-2 tokenizer with id 32000, without resizing the embedding.

    ## Fix
    Use an existing reserved token, or save the model with a resized embedding.

    ## Evidence
    huggingface/transformers#12763 and #11102 ("index out of range" after adding tokens).
    """
    size = model.vocab_size
    used_tokens = {tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token, tokenizer.end_of_turn}
    template = tokenizer.chat_template or ""
    out_of_range = {t: n for t, n in tokenizer.added.items() if n >= size and (t in used_tokens or t in template)}
    largest_id = tokenizer.largest_plain_id
    if largest_id is not None and largest_id >= size:
        out_of_range["the plain vocabulary"] = largest_id
    if out_of_range:
        listed = ", ".join(
            f"{truncate_text(token, 40)} (id {number:,})" for token, number in list(out_of_range.items())[:3]
        )
        yield Finding(
            field="base_model" if context.setup else "model.name_or_path",
            message=f"the tokenizer has ids beyond the {size:,} embeddings of {model.name}: {listed}",
            help="use a reserved token instead, or save the model with a resized embedding",
        )


@rule("TPL007", "no-such-template-switch", severity="error")
def no_such_template_switch(
    context: LintContext, config: SureFitConfig, tokenizer: TokenizerFacts
) -> Iterator[Finding]:
    """A `chat_template_kwargs` entry is set that the chat template does not use.

    ## What it does
    Reads the chat template's source for the variables that it uses without setting them itself, and compares them with
    `model.chat_template_kwargs` and `evaluate.chat_template_kwargs`.

    ## Why it is bad
    A template silently ignores variables that it does not use: the prompts are the same as without the setting, and the
    model reasons, or does not, as before.

    ## Example
    `chat_template_kwargs: {enable_thinking: false}` on Qwen2.5, or on Qwen3-4B-Instruct-2507, which never reasons.

    ## Fix
    Write the name that the template uses, or remove the setting.

    ## Evidence
    modelscope/ms-swift#4276 (`enable_thinking` is not used by the template, and the model still reasons); for Jinja, an
    unknown variable is not an error.
    """
    template = tokenizer.chat_template
    if not template:
        return
    try:
        variables = variables_of(template)
    except TemplateRefused:  # rendering the rows reports the error
        return
    for section, switches in (("model", config.model), ("evaluate", config.evaluate)):
        for name in switches.chat_template_kwargs:
            if name not in variables:
                yield Finding(
                    field=f"{section}.chat_template_kwargs",
                    message=f"the chat template of {_model(context)} does not use {name!r}, so it has no effect"
                    f"{did_you_mean(name, sorted(variables))}",
                    help="write a name that the template uses, or remove the entry",
                )


@rule("TPL011", "template-refuses", severity="error")
def template_refuses(context: LintContext, config: SureFitConfig, tokenizer: TokenizerFacts) -> Iterator[Finding]:
    """The chat template raises an error for a simple conversation.

    ## What it does
    If the rows are conversations, renders a user's question and an assistant's answer with the chat template. Skipped
    for another tool's config.

    ## Why it is bad
    No row can be rendered: training stops at the first one.

    ## Example
    A template that was truncated when it was copied: `Unexpected end of template`.

    ## Fix
    Use the template from the model's repository, or set `model.chat_template`.

    ## Evidence
    Templates call `raise_exception` for unknown roles, and a copied one may be incomplete. Before this rule existed,
    the run stopped after the model was loaded.
    """
    if not tokenizer.chat_template or context.is_foreign or not makes_conversations(context, config):
        return
    tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "pad_token": tokenizer.pad_token}
    special_tokens = {role: text for role, text in tokens.items() if text is not None}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    try:
        probe = probe_template_reasoning(
            bake_template_defaults(tokenizer.chat_template, config.model.chat_template_kwargs)
        )
        messages = [message_as_template_reads(turn, probe) for turn in turns]
        render_chat_template(
            tokenizer.chat_template, messages, special=special_tokens, switches=config.model.chat_template_kwargs
        )
    except TemplateRefused as error:
        yield Finding(
            field="model.chat_template" if config.model.chat_template else "model.name_or_path",
            message=f"the chat template of {_model(context)} raises an error for a question and its answer: "
            f"{truncate_text(' '.join(str(error).split()), 120)}",
            help="use the template from the model's repository, or set model.chat_template",
        )


@rule("TPL008", "asked-in-another-way-than-trained", severity="warning")
def asked_in_another_way(context: LintContext, config: SureFitConfig, tokenizer: TokenizerFacts) -> Iterator[Finding]:
    """Evaluation prompts are rendered differently from training prompts.

    ## What it does
    Renders a prompt with the chat template, once with the training settings (`model.chat_template_kwargs`) and once
    with the evaluation settings (`evaluate.chat_template_kwargs` instead).

    ## Why it is bad
    The model is evaluated on prompts that it was not trained on. With `enable_thinking: false`, Qwen3's template puts
    an empty `<think></think>` into the prompt; with true, the model generates it. A model that was trained with it in
    its answers then writes it twice, and one that was trained without it begins to reason.

    ## Example
    `evaluate: {chat_template_kwargs: {enable_thinking: false}}` for a run that trains without this setting.

    ## Fix
    Set it in `model.chat_template_kwargs`: training, evaluation and the merged model then agree.

    ## Evidence
    hiyouga/LlamaFactory#9765 (trained without reasoning, but the merged model reasons), #9092.
    """
    template, train_switches = tokenizer.chat_template, config.model.chat_template_kwargs
    if not template or not config.evaluate.chat_template_kwargs:
        return
    tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "pad_token": tokenizer.pad_token}
    special_tokens = {role: text for role, text in tokens.items() if text is not None}
    question = [{"role": "user", "content": "?"}]
    try:
        train_prompt, scoring_prompt = (
            render_chat_template(
                template, question, add_generation_prompt=True, special=special_tokens, switches=switches
            )
            for switches in (train_switches, config.answering.chat_template_kwargs)
        )
    except TemplateRefused:
        return
    if train_prompt != scoring_prompt:
        position = _first_difference(train_prompt, scoring_prompt)
        yield Finding(
            field="evaluate.chat_template_kwargs",
            message=f"training prompts end with {_end(train_prompt, position)}, evaluation prompts with "
            f"{_end(scoring_prompt, position)}",
            help="set it in model.chat_template_kwargs, which applies to both; or give the reason in lint.ignore",
        )


@rule("TPL012", "two-chat-templates", severity="warning")
def two_chat_templates(
    context: LintContext, config: SureFitConfig, model: ModelFacts, tokenizer: TokenizerFacts
) -> Iterator[Finding]:
    """The model has a chat template that differs from the one used in training.

    ## What it does
    Renders a short conversation (with a tool if the rows have tools) with both templates: `model.chat_template` and the
    model's own, or chat_template.jinja and the entry in tokenizer_config.json if a model has both. Templates that
    render the same text are fine.

    ## Why it is bad
    SureFit and transformers use chat_template.jinja, and SureFit saves only the training template. But a server of base
    and adapter renders prompts with the base's own, and older tools read tokenizer_config.json: the model gets prompts
    that differ from its training.

    ## Example
    `model.chat_template: plain` for an instruct model.

    ## Fix
    Remove `model.chat_template` if the model has a template. Otherwise serve `merged/`, or pass
    `adapter/chat_template.jinja` to the server, as in the commands of `surefit serve-check`. If a directory has two
    templates, delete the unintended one.

    ## Evidence
    transformers' `PreTrainedTokenizerBase.save_pretrained` writes chat_template.jinja beside tokenizer_config.json;
    models that were saved earlier keep their entry.
    """
    template, other_template = tokenizer.chat_template, model.other_template
    if not template or not other_template or template.strip() == other_template.strip() or context.is_foreign:
        return
    if not makes_conversations(context, config):
        return
    tools = TOOLS if context.examples and context.examples.with_tools else None
    train_text, other_text = (_conversation(source, tokenizer, tools) for source in (template, other_template))
    if train_text is None or train_text == other_text:
        return
    position = _first_difference(train_text, other_text or "")
    rendering = "raises an error" if other_text is None else f"renders {_end(other_text, position)}"
    if config.model.chat_template:
        field, first, second = "model.chat_template", config.model.chat_template, "own template"
        advice = "remove it, or pass adapter/chat_template.jinja to the server"
    else:
        field, first, second = "model.name_or_path", "chat_template.jinja", "tokenizer_config.json"
        advice = "delete the unintended one: other tools may use it"
    message = (
        f"training uses {first}, which renders {_end(train_text, position)}; {_model(context)}'s {second} {rendering}"
    )
    yield Finding(field=field, message=message, help=advice)


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
]


def _conversation(template: str, tokenizer: TokenizerFacts, tools: list[dict[str, Any]] | None) -> str | None:
    """Return a question, an answer and the next prompt, rendered with the template; None if it raises an error."""
    tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "pad_token": tokenizer.pad_token}
    special_tokens = {role: text for role, text in tokens.items() if text is not None}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}, {"role": "user", "content": "?"}]
    try:
        messages = [message_as_template_reads(turn, probe_template_reasoning(template)) for turn in turns]
        return render_chat_template(template, messages, tools=tools, add_generation_prompt=True, special=special_tokens)
    except TemplateRefused:
        return None


def _first_difference(first: str, second: str) -> int:
    """Return the position of the first character in which two texts differ."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _end(text: str, same: int) -> str:
    """Return an excerpt of a text from 20 characters before the first difference on, in quotation marks."""
    return repr(truncate_text(text[max(0, same - 20) :], 80))


@rule("TPL028", "template-of-another-family", severity="warning")
def template_of_another_family(setup: Setup) -> Iterator[Finding]:
    """The config uses the chat template of a different model family.

    ## What it does
    In another tool's config, compares the family in the template's name (`llama3`, `qwen`, `mistral`…) with the family
    in the model's name. Generic templates such as `chatml`, and models of unknown family, are ignored.

    ## Why it is bad
    The other family's special tokens are not in this vocabulary: they are split into pieces, the model's end-of-turn
    token is missing, and a server that uses the model's own template renders other prompts than in training.

    ## Example
    `template: llama3` for `Qwen/Qwen2.5-7B-Instruct` in LLaMA-Factory.

    ## Fix
    Use the template of the model's family, or the tokenizer's own.

    ## Evidence
    LLaMA-Factory's README: "make sure to use the corresponding template for the instruct/chat models". A published
    project trains DeepSeek-R1-Distill-Qwen-7B with `template: qwen`.
    """
    if setup.tool in ("axolotl", "llamafactory") and setup.base_model and setup.chat_template:
        family, template_family = family_of(setup.base_model), family_of_template(setup.chat_template)
        if family and template_family and family != template_family:
            yield Finding(
                field="chat_template",
                message=f"{setup.name('chat_template')} {setup.chat_template} is for {template_family}, but "
                f"{setup.base_model} is a {family} model",
                help=f"use {family}'s template",
            )


@rule("TPL029", "end-token-of-another-family", severity="warning")
def end_token_of_another_family(setup: Setup) -> Iterator[Finding]:
    """The EOS token belongs to a different model family.

    ## What it does
    Compares the EOS token in another tool's config with the end tokens of the model's family, which it infers from the
    name. `<|im_end|>`, which is often added on purpose, is ignored.

    ## Why it is bad
    The token is not in the vocabulary: it is added with an untrained embedding, or split into pieces. The model learns
    to end its answers with it, but servers stop at the model's original token.

    ## Example
    `special_tokens: {eos_token: "</s>"}` for `meta-llama/Llama-3.1-8B`.

    ## Fix
    Remove it, or write one of the family's end tokens.

    ## Evidence
    `</s>` is copied from configs for Llama 2 into those for Llama 3, whose tokens are `<|eot_id|>` and
    `<|end_of_text|>`.
    """
    if setup.base_model and setup.eos_token and (other_family := foreign_end_token(setup.base_model, setup.eos_token)):
        end_tokens = ", ".join(sorted(END_TOKENS[family_of(setup.base_model) or ""]))
        yield Finding(
            field="eos_token",
            message=f"{setup.name('eos_token')} {setup.eos_token} is {other_family}'s; {setup.base_model} uses "
            f"{end_tokens}",
            help="remove it: the tokenizer has one",
        )
