"""AUD040 to AUD049, AUD080 and AUD081: findings in rows as the chat template renders them, and columns that nothing
reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from surefit.facts.audit import AuditFacts
from surefit.lint.rule import Finding, rule
from surefit.lint.rules.audit import ANY, rows_found
from surefit.lint.rules.audit_texts import FREQUENT

_REASONING = re.compile(r"reason|think|thought|cot(?![a-z])|rationale", re.IGNORECASE)
"""Matches names of columns with reasoning. Renaming one does not help: no layout with one answer has such a column."""
OFTEN = 0.1
"""Share of rows from which another template's marks are no longer explained by texts that quote them."""
NAMED = 8
"""Number of columns that a finding names; further ones are counted."""
LEFT_OUT = "the chat template omits turns of {rows}{first}"
WRITE_IT = "set model.chat_template to a template that renders them, or move the text into a turn that is rendered"


@rule("AUD040", "turns-left-out", severity="error")
def turns_left_out(audit: AuditFacts) -> Iterator[Finding]:
    """The chat template does not render some of the turns.

    ## What it does
    Renders a sample of the rows (an audit renders all) with the model's own chat template and looks for every text of a
    row in the result: the content of a turn, the name and the arguments of a call. Fires from 1 %; below that, AUD041
    does. `check` also covers `data.mix`, a file in `data.eval`, and the prompts of `evaluate.extra_sets`. Switches for
    reasoning (`/think`, `/no_think`) may be missing, because the template reads them.

    ## Why it is bad
    The model never sees the omitted text. Without the system message or a tool's result it learns to hallucinate; if a
    call is omitted, the answer is empty, and the model learns to return nothing.

    ## Example
    Rows with `tool_calls` on a template that only renders `message.content`: the model is trained on the answer
    `<|im_end|>`.

    ## Fix
    Use a model whose template renders such turns, set another one in `model.chat_template`, or move the text into a
    turn that is rendered: the system message before the user's first question, a call into the answer's content.

    ## Evidence
    huggingface/transformers#32130, axolotl-ai-cloud/axolotl#2115. benchmarks/template_rows.py renders 20 kinds of rows
    with 60 published templates and counts what they omit.
    """
    yield from rows_found(
        audit,
        "turn_left_out",
        FREQUENT,
        LEFT_OUT,
        WRITE_IT,
    )


@rule("AUD041", "parts-left-out", severity="warning")
def parts_left_out(audit: AuditFacts) -> Iterator[Finding]:
    """The chat template omits a part of some turns.

    ## What it does
    Like AUD040, for parts of a turn: text before or between thoughts, some lines of a turn, the description of a tool,
    and the indentation of an answer's first line. One row is enough. Reports whole turns too, if fewer than 1 % of the
    rows lose one.

    ## Why it is bad
    The model does not learn the omitted text, or learns to answer without it. Code whose first line lost its
    indentation does not run.

    ## Example
    `"    y = x\\n    return y\\n"` on Llama 3, whose template trims every turn: the model is trained on
    `"y = x\\n    return y"`.

    ## Fix
    Begin such answers with a line that is not indented, put all reasoning at the beginning, or choose another template.

    ## Evidence
    EleutherAI/lm-evaluation-harness#3126 ("unindent does not match any outer indentation level").
    """
    yield from rows_found(
        audit,
        "part_left_out",
        ANY,
        "the chat template omits a part of {rows}{first}",
        "move it to where the template renders it, or set another template in model.chat_template",
    )
    yield from rows_found(audit, "turn_left_out", ANY, LEFT_OUT, WRITE_IT, unless=("turn_left_out", FREQUENT))
    yield from rows_found(
        audit,
        "indentation_lost",
        ANY,
        "the chat template strips the indentation of the answers' first line in {rows}{first}",
        "begin answers with a line that is not indented (a code fence, the function's head)",
    )


@rule("AUD042", "reasoning-never-ends", severity="warning")
def reasoning_never_ends(audit: AuditFacts) -> Iterator[Finding]:
    """Answers open a reasoning block and do not close it.

    ## What it does
    Counts rows with a supervised answer that opens `<think>` (or `<thinking>`, `<reasoning>`, `[THINK]` …) without
    closing it. One row is enough.

    ## Why it is bad
    The reasoning was truncated, usually at the token limit of the model that wrote it. It counts as the answer: the
    model learns to stop in the middle of its reasoning. As gold answers such rows can never be matched.

    ## Example
    `"<think>\\nHmm, let me count them one by one and then"`.

    ## Fix
    Remove those rows, or generate them again with a higher limit.

    ## Evidence
    huggingface/trl#6361 is about the opposite, a closing tag without an opening one.
    """
    yield from rows_found(
        audit,
        "unclosed_thought",
        ANY,
        "the reasoning of {rows} never ends and counts as the answer{first}",
        "remove those rows, or generate them again with a higher token limit",
    )


@rule("AUD043", "rendered-already", severity="error")
def rendered_already(audit: AuditFacts) -> Iterator[Finding]:
    """Turns already contain a chat template's tokens and would be rendered a second time.

    ## What it does
    Counts rows with a turn that begins with the BOS token, that is supervised and ends with the end-of-turn token, or
    that contains another turn's header of this model; rows with a tool's result that already has the tags that the
    template adds; and rows with tools in the system message that the template also renders from the column `tools`.
    Fires from 1 %; below that, AUD044 does.

    ## Why it is bad
    The template adds these tokens itself. With both, the model learns to end an answer twice, or sees a conversation
    inside a user's turn, which never occurs at inference. The gold answer contains a token that decoding removes, so
    right answers are scored as wrong.

    ## Example
    `{"instruction": …, "output": "2<|im_end|>"}`, as notebooks that add `EOS_TOKEN` make it.

    ## Fix
    Use texts without the template's tokens: `messages`, or `prompt` and `completion`.

    ## Evidence
    unslothai/unsloth#419, OpenRLHF/OpenRLHF#393, deepseek-ai/DeepSeek-R1#151. Measured: the same 240 rows with
    `<|end|>` after every answer score 0.000 instead of 0.750.
    """
    yield from rows_found(
        audit,
        "rendered_already",
        FREQUENT,
        "{rows} already contain the chat template's tokens and would be rendered twice{first}",
        "remove the tokens that the chat template adds",
    )
    yield from rows_found(
        audit,
        "written_twice",
        FREQUENT,
        "{rows} contain text that the chat template adds again{first}",
        "remove the tags around the tool's result, and keep the tools in the column tools only",
    )


@rule("AUD044", "special-tokens-in-texts", severity="warning")
def special_tokens_in_texts(audit: AuditFacts) -> Iterator[Finding]:
    """Texts contain the tokenizer's special tokens.

    ## What it does
    Looks for the tokenizer's special tokens in every text of a row; tags of reasoning and calls are ignored. One row is
    enough, unless AUD043 reports it. Plain text may end with the EOS token, and may begin with the BOS token unless the
    tokenizer also adds it.

    ## Why it is bad
    The tokenizer encodes them as control tokens: an end-of-turn token in the middle of an answer teaches the model to
    stop there, and a turn header in a user's text switches the role.

    ## Example
    An answer that explains ChatML: "a turn ends with <|im_end|>."

    ## Fix
    Write them differently (`<|im_end |>`, or with a space after `<`), or remove those rows.

    ## Evidence
    https://huggingface.co/docs/transformers: special tokens in a text are never split, whatever the text's source.
    """
    yield from rows_found(
        audit,
        "special_tokens",
        ANY,
        "{rows} contain special tokens of the tokenizer{first}",
        "write them differently, or remove those rows",
        unless=("rendered_already", FREQUENT),
    )
    yield from rows_found(
        audit,
        "begun_twice",
        ANY,
        "{rows} of plain text begin with the BOS token, which the tokenizer adds again{first}",
        "remove it from the texts",
    )


@rule("AUD045", "prompts-in-plain-text", severity="warning")
def prompts_in_plain_text(audit: AuditFacts) -> Iterator[Finding]:
    """Plain texts are whole conversations, so the loss falls on their prompts too.

    ## What it does
    Looks in rows of `text` for the markers with which chat templates begin turns, the model's own and the usual ones;
    fires from 1 %.

    ## Why it is bad
    In plain text every token is supervised: most of the loss falls on the prompts.

    ## Example
    `{"text": "<|begin_of_text|><|start_header_id|>user…2<|eot_id|>"}`.

    ## Fix
    Provide the conversation as `messages`; then the chat template renders it once, and only the answers are supervised.

    ## Evidence
    unslothai/unsloth#2648 (two BOS tokens); rows that notebooks make with a formatting function.
    """
    yield from rows_found(
        audit,
        "rendered_text",
        FREQUENT,
        "{rows} are conversations in plain text: the loss falls on the prompts too{first}",
        "convert them to messages, or to prompt and completion",
    )


@rule("AUD046", "unread-columns", severity="info")
def columns_not_read(audit: AuditFacts) -> Iterator[Finding]:
    """Columns of the rows, or keys of their turns, are not read.

    ## What it does
    Converts some rows, records which columns are read, and names all others that are not empty, except identifiers.

    ## Why it is bad
    It is usually fine: many data sets have columns for sources and dates. They are listed once so that nothing is
    missed by accident.

    ## Example
    `{"messages": […], "source": "forum", "quality": 4}`.

    ## Fix
    Nothing to do, if that is intended.

    ## Evidence
    modelscope/ms-swift#2314 and #5431: columns that were not read and not named.
    """
    if observation := audit.seen("unread_columns"):
        yield Finding(
            field="data.train",
            message=f"not read: {_names(observation.examples)}",
            help="fine, unless the model should learn it",
        )


@rule("AUD047", "unread-prompts", severity="warning")
def unread_prompts(audit: AuditFacts) -> Iterator[Finding]:
    """Columns or keys are not read, although their names suggest a part of the prompt or a loss mask.

    ## What it does
    Like AUD046, for text under names such as context, history, reasoning or rejected that is in no turn of its row, for
    chat_template_kwargs, and for masks such as mask or train_on_turn.

    ## Why it is bad
    The model is trained to answer without the document, to answer without the reasoning, or to repeat what the data set
    marks as a bad answer.

    ## Example
    `{"prompt": "Who wrote it?", "context": "…", "completion": "…"}`: the context is not part of the prompt.

    ## Fix
    Append the column to the text that it belongs to, rename it to a name that is read (docs/data.md), or delete it.

    ## Evidence
    modelscope/ms-swift#2314, #5431.
    """
    if observation := audit.seen("unread_prompts"):
        reasoning = all(_REASONING.search(name) for name in observation.examples)
        advice = (
            "write it into the answer's text as <think>…</think>, or convert the rows to messages with "
            "reasoning_content in the assistant's message, or delete it"
        )
        yield Finding(
            field="data.train",
            message=f"not read: {_names(observation.examples)}; the model is trained without this text",
            help=advice
            if reasoning
            else "append it to the text that it belongs to, rename it to a name that is read "
            "(docs/data.md), or delete it",
        )
    if observation := audit.seen("unread_marks"):
        yield Finding(
            field="data.train",
            message=f"the masks {_names(observation.examples)} are not read: the loss falls on all answers",
            help='write "weight": 0 in each turn without loss, and remove rows in which no turn has loss',
        )


def _names(names: tuple[str, ...]) -> str:
    suffix = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(repr, names[:NAMED])) + suffix


@rule("AUD048", "rows-left-out", severity="info")
def rows_left_out(audit: AuditFacts) -> Iterator[Finding]:
    """Rows cannot be used and are skipped, as configured.

    ## What it does
    With `data.bad_rows: skip`, counts rows that cannot be converted or that the chat template cannot render.

    ## Why it is bad
    They are not a random sample: all rows of one kind may be missing.

    ## Example
    Rows with a system message on Gemma 2, whose template accepts none.

    ## Fix
    Repair the rows if they matter.

    ## Evidence
    hiyouga/LlamaFactory#8217 (Gemma 2 and the system role).
    """
    yield from rows_found(
        audit,
        "skipped_row",
        ANY,
        "{rows} cannot be used and are skipped{first}",
        "repair them if they matter",
        field="data.bad_rows",
    )


@rule("AUD049", "plain-text-without-bos", severity="warning")
def plain_text_without_bos(audit: AuditFacts) -> Iterator[Finding]:
    """Plain texts begin without the tokenizer's BOS token.

    ## What it does
    Counts rows of `text` that do not begin with the tokenizer's BOS token, where its tokenizer.json does not add it.
    Skipped if the BOS token is also another special token, or if the chat template does not begin a conversation with
    it.

    ## Why it is bad
    In pretraining the model's texts began with that token, and at inference its prompts do. `add_bos_token: true` in
    tokenizer_config.json changes nothing in transformers 5, which follows tokenizer.json.

    ## Example
    `{"text": "Once upon a time"}` on a base model whose tokenizer has `<bos>` and a post-processor without it.

    ## Fix
    Begin each text with the token, or make the tokenizer add it, in a copy of the model's directory:
    `tokenizer.add_bos_token = True` and `tokenizer.save_pretrained(directory)`.

    ## Evidence
    unslothai/unsloth#10312 (Gemma 4's base model: the output degrades).
    """
    yield from rows_found(
        audit,
        "no_begin",
        ANY,
        "{rows} of plain text begin without the BOS token, and the tokenizer does not add it{first}",
        "begin the texts with it, or make the tokenizer add it: tokenizer.add_bos_token = True, then save_pretrained "
        "into a copy of the model's directory",
    )


@rule("AUD080", "prompts-of-another-template", severity="warning")
def prompts_of_another_template(audit: AuditFacts) -> Iterator[Finding]:
    """Prompts already contain another template's markers and would be rendered a second time.

    ## What it does
    Counts rows with a user or system message that has the question marker of Alpaca, Vicuna, OpenChat or Anthropic's HH
    ("### Instruction:", "USER:", "Human:") and ends with the answer marker ("### Response:", "Assistant:"). Fires from
    10 %: a few rows may quote such a text.

    ## Why it is bad
    The model is trained with both templates, but at inference only one is applied. A conversation in this form becomes
    a single user turn, which also contains the earlier answers.

    ## Example
    `{"prompt": "### Instruction:\\nName a color.\\n\\n### Response:\\n", "completion": "red"}`.

    ## Fix
    Use the question alone, and convert conversations to `messages`.

    ## Evidence
    https://huggingface.co/datasets/Anthropic/hh-rlhf: conversations in one text, with "Human:" and "Assistant:" before
    the turns.
    """
    yield from rows_found(
        audit,
        "prompt_of_another_template",
        OFTEN,
        "the prompts of {rows} contain another template's markers and would be rendered twice{first}",
        "keep only the question, and convert conversations to messages: the chat template adds the markers",
    )


@rule("AUD081", "end-tokens-in-answers", severity="warning")
def end_tokens_in_answers(audit: AuditFacts) -> Iterator[Finding]:
    """Answers end with another model's end-of-turn token.

    ## What it does
    Counts rows whose last answer, or whose plain text, ends with a token such as `<|eot_id|>`, `</s>` or
    `<end_of_turn>` that is not a special token of this tokenizer. Fires from 10 %. For the tokenizer's own, see AUD043
    and AUD044.

    ## Why it is bad
    For this tokenizer it is ordinary text: the model learns to write it after every answer, before its own end-of-turn
    token. The gold answers contain it too, so right answers without it are scored as wrong.

    ## Example
    `{"prompt": "…", "completion": "2<|eot_id|>"}` on Qwen, from a script for Llama 3 that adds `EOS_TOKEN`.

    ## Fix
    Remove it from the rows: the chat template adds the model's own.

    ## Evidence
    unslothai/unsloth's notebooks add `EOS_TOKEN = tokenizer.eos_token` to every row; rows saved that way keep it
    when the model is changed.
    """
    yield from rows_found(
        audit,
        "end_of_another_model",
        OFTEN,
        "the answers of {rows} end with another model's end-of-turn token{first}",
        "remove it from the rows: the chat template adds the model's own",
    )
