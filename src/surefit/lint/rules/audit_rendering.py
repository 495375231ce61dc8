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
LEFT_OUT = "the chat template leaves something out of {rows}{first}"
WRITE_IT = "name a template that writes it in model.chat_template, or move the text into a turn that is rendered"


@rule("AUD040", "turns-left-out", severity="error")
def turns_left_out(audit: AuditFacts) -> Iterator[Finding]:
    """The chat template does not write some of the turns.

    ## What it does
    Renders a sample of the rows (an audit renders all) with the model's own chat template and looks for every text of a
    row in the result: the content of a turn, the name and the arguments of a call. Fires from 1 %; below that, AUD041
    does. `check` does the same with `data.mix`, with a file in `data.eval`, and with the prompts of
    `evaluate.extra_sets`. Words that switch reasoning (`/think`, `/no_think`) may be missing: a template reads them.

    ## Why it is bad
    The model never sees what is left out. Without the system message or a tool's result it learns to answer from
    nothing; a call that is not written leaves an empty answer, and the model learns to say nothing.

    ## Example
    Rows with `tool_calls` on a template that only writes `message.content`: the answer that is learnt is
    `<|im_end|>`.

    ## Fix
    Use a model whose template writes such turns, name another one in `model.chat_template`, or write the text into a
    turn that is rendered: the system message before the user's first question, a call into the answer's content.

    ## Evidence
    huggingface/transformers#32130, axolotl-ai-cloud/axolotl#2115. benchmarks/template_rows.py renders 20 kinds of
    rows with 60 published templates and counts what they leave out.
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
    """The chat template writes turns without a part of their text.

    ## What it does
    As AUD040, for parts: text before or between thoughts, some lines of a turn, the description of a tool, and
    the spaces before the first line of an answer. One row is enough. And whole turns, where fewer than 1 % of the rows
    lose one.

    ## Why it is bad
    What is left out is not learnt, or the model learns to work without it. Code whose first line lost its indentation
    does not run.

    ## Example
    `"    y = x\\n    return y\\n"` on Llama 3, whose template trims every turn: learnt as `"y = x\\n    return y"`.

    ## Fix
    Begin such answers with a line that is not indented, put the reasoning first and once, or choose another template.

    ## Evidence
    EleutherAI/lm-evaluation-harness#3126 ("unindent does not match any outer indentation level").
    """
    yield from rows_found(
        audit,
        "part_left_out",
        ANY,
        "the chat template leaves a part out of {rows}{first}",
        "put it where the template writes it, or name another template in model.chat_template",
    )
    yield from rows_found(audit, "turn_left_out", ANY, LEFT_OUT, WRITE_IT, unless=("turn_left_out", FREQUENT))
    yield from rows_found(
        audit,
        "indentation_lost",
        ANY,
        "the chat template takes the spaces before the first line of the answers of {rows}{first}",
        "begin answers with a line that is not indented (a code fence, the function's head)",
    )


@rule("AUD042", "reasoning-never-ends", severity="warning")
def reasoning_never_ends(audit: AuditFacts) -> Iterator[Finding]:
    """Answers begin a thought and do not end it.

    ## What it does
    Counts rows with an answer that is learnt and opens `<think>` (or `<thinking>`, `<reasoning>`, `[THINK]` …) without
    closing it. One row is enough.

    ## Why it is bad
    The reasoning was cut off, usually at the token limit of the model that wrote it. It is learnt as an answer: the
    model learns to stop in the middle of a thought. As gold answers such rows can never be matched.

    ## Example
    `"<think>\\nHmm, let me count them one by one and then"`.

    ## Fix
    Leave those rows out, or generate them again with a higher limit.

    ## Evidence
    huggingface/trl#6361 is about the other half, a closing tag without an opening one.
    """
    yield from rows_found(
        audit,
        "unclosed_thought",
        ANY,
        "the reasoning never ends in {rows}, and counts as the answer{first}",
        "leave those rows out, or generate them again with a higher token limit",
    )


@rule("AUD043", "rendered-already", severity="error")
def rendered_already(audit: AuditFacts) -> Iterator[Finding]:
    """Turns were rendered with a chat template before, and are rendered again.

    ## What it does
    Counts rows with a turn that begins with the BOS token, that is learnt and ends with the token that ends an answer,
    or that contains the header of another turn of this model; rows with a tool's result that already has the tags that
    the template writes around it; and rows with tools in the system message that the template also writes from the
    column `tools`. Fires from 1 %; below that, AUD044 does.

    ## Why it is bad
    The template writes these tokens itself. With both, the model learns to end an answer twice, or is shown a
    conversation inside a user's turn, which it will never see in use. The gold answer keeps the token that decoding
    removes, so right answers are scored as wrong.

    ## Example
    `{"instruction": …, "output": "2<|im_end|>"}`, as notebooks that add `EOS_TOKEN` make it.

    ## Fix
    Give the texts without the template's tokens: `messages`, or `prompt` and `completion`.

    ## Evidence
    unslothai/unsloth#419, OpenRLHF/OpenRLHF#393, deepseek-ai/DeepSeek-R1#151. measured: the same 240 rows with
    `<|end|>` behind every answer score 0.000 instead of 0.750.
    """
    yield from rows_found(
        audit,
        "rendered_already",
        FREQUENT,
        "{rows} are rendered already, and would be rendered again{first}",
        "write the texts alone, without the tokens that the chat template adds",
    )
    yield from rows_found(
        audit,
        "written_twice",
        FREQUENT,
        "{rows} have something that the chat template writes a second time{first}",
        "give the tool's result without the tags around it, and the tools in the column tools alone",
    )


@rule("AUD044", "special-tokens-in-texts", severity="warning")
def special_tokens_in_texts(audit: AuditFacts) -> Iterator[Finding]:
    """Texts hold the tokenizer's own special tokens.

    ## What it does
    Looks for the tokenizer's special tokens in every text of a row; tags of reasoning and of calls are left out. One
    row is enough, unless AUD043 reports it. Plain text may end with the EOS token, and may begin with the BOS token
    unless the tokenizer adds that, too.

    ## Why it is bad
    The tokenizer encodes them as control tokens: an end of turn in the middle of an answer teaches the model to stop
    there, and the beginning of a turn in a user's text speaks in another role.

    ## Example
    An answer that explains ChatML: "a turn ends with <|im_end|>."

    ## Fix
    Write them in another way (`<|im_end |>`, or with a space behind `<`), or leave those rows out.

    ## Evidence
    https://huggingface.co/docs/transformers: special tokens in a text are never split, wherever it comes from.
    """
    yield from rows_found(
        audit,
        "special_tokens",
        ANY,
        "{rows} hold special tokens of the tokenizer{first}",
        "write them in another way, or leave those rows out",
        unless=("rendered_already", FREQUENT),
    )
    yield from rows_found(
        audit,
        "begun_twice",
        ANY,
        "{rows} of plain text begin with the BOS token, and the tokenizer adds it: the model sees it twice{first}",
        "take it out of the texts",
    )


@rule("AUD045", "prompts-in-plain-text", severity="warning")
def prompts_in_plain_text(audit: AuditFacts) -> Iterator[Finding]:
    """Plain texts are whole conversations, and their prompts are learnt too.

    ## What it does
    Looks in rows of `text` for the marks with which chat templates begin turns, the model's own and the usual ones;
    fires from 1 %.

    ## Why it is bad
    Plain text is learnt whole: most of the loss falls on the prompts.

    ## Example
    `{"text": "<|begin_of_text|><|start_header_id|>user…2<|eot_id|>"}`.

    ## Fix
    Give the conversation as `messages`; then the chat template renders it once, and only the answers are learnt.

    ## Evidence
    unslothai/unsloth#2648 (two tokens for the beginning); the rows that notebooks make with a formatting function.
    """
    yield from rows_found(
        audit,
        "rendered_text",
        FREQUENT,
        "{rows} are conversations written as plain text: the loss falls on the prompts too{first}",
        "write them as messages, or as prompt and completion",
    )


@rule("AUD046", "unread-columns", severity="info")
def columns_not_read(audit: AuditFacts) -> Iterator[Finding]:
    """Rows have columns, or their turns have keys, that are not read.

    ## What it does
    Converts some rows and notes which columns are read; names every other one that is not empty, except identifiers.

    ## Why it is bad
    Mostly it is not: sources and dates belong in a data set. It is listed once so that nothing is missed by accident.

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
            message=f"nothing reads {_names(observation.examples)}",
            help="fine, unless it is to be learnt",
        )


@rule("AUD047", "unread-prompts", severity="warning")
def unread_prompts(audit: AuditFacts) -> Iterator[Finding]:
    """Columns or keys that sound like a part of the prompt, or of how a row is trained on, are not read.

    ## What it does
    As AUD046, for text under names such as context, history, reasoning or rejected that stands in no turn of its row,
    for chat_template_kwargs, and for marks such as mask or train_on_turn.

    ## Why it is bad
    The model is trained to answer without the document, to give the answer without its reasoning, or to repeat what the
    data set calls a bad answer.

    ## Example
    `{"prompt": "Who wrote it?", "context": "…", "completion": "…"}`: the context is not part of the prompt.

    ## Fix
    Join the column to the text that it belongs to, rename it to a name that is read (docs/data.md), or delete it.

    ## Evidence
    modelscope/ms-swift#2314, #5431.
    """
    if observation := audit.seen("unread_prompts"):
        reasoning = all(_REASONING.search(name) for name in observation.examples)
        advice = (
            "write it into the answer's text as <think>…</think>, or give the rows as messages with reasoning_content "
            "in the assistant's message, or delete it"
        )
        yield Finding(
            field="data.train",
            message=f"nothing reads {_names(observation.examples)}: the model is trained without",
            help=advice
            if reasoning
            else "join it to the text that it belongs to, rename it to a name that is read "
            "(docs/data.md), or delete it",
        )
    if observation := audit.seen("unread_marks"):
        yield Finding(
            field="data.train",
            message=f"{_names(observation.examples)} are marks that are not read: all answers are learnt alike",
            help='write "weight": 0 in each turn that is not to be learnt, and leave out rows of which nothing is',
        )


def _names(names: tuple[str, ...]) -> str:
    suffix = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(repr, names[:NAMED])) + suffix


@rule("AUD048", "rows-left-out", severity="info")
def rows_left_out(audit: AuditFacts) -> Iterator[Finding]:
    """Rows cannot be used and are left out, as the config says.

    ## What it does
    Counts rows that cannot be converted, or that the chat template cannot render, where `data.bad_rows` is `skip`.

    ## Why it is bad
    They are not a random sample: all rows of one kind may be missing.

    ## Example
    Rows with a system message on Gemma 2, whose template accepts none.

    ## Fix
    Repair the rows, if what they teach is needed.

    ## Evidence
    hiyouga/LlamaFactory#8217 (Gemma 2 and the system role).
    """
    yield from rows_found(
        audit,
        "skipped_row",
        ANY,
        "{rows} are left out{first}",
        "mend them, if what they teach is needed",
        field="data.bad_rows",
    )


@rule("AUD049", "plain-text-without-bos", severity="warning")
def plain_text_without_bos(audit: AuditFacts) -> Iterator[Finding]:
    """Plain texts begin without the tokenizer's BOS token.

    ## What it does
    Counts rows of `text` that do not begin with the tokenizer's BOS token, where its tokenizer.json does not add it.
    Tokenizers whose BOS token is also another special token are left out, and those whose chat template does not begin
    a conversation with it.

    ## Why it is bad
    The model has seen its texts begin with that token in pretraining, and is used with it afterwards.
    `add_bos_token: true` in tokenizer_config.json changes nothing in transformers 5, which follows tokenizer.json.

    ## Example
    `{"text": "Once upon a time"}` on a base model whose tokenizer has `<bos>` and a post-processor without it.

    ## Fix
    Begin each text with the token, or add it in the tokenizer, in a copy of the model's directory:
    `tokenizer.add_bos_token = True` and `tokenizer.save_pretrained(directory)`.

    ## Evidence
    unslothai/unsloth#10312 (Gemma 4's base model: the output degrades).
    """
    yield from rows_found(
        audit,
        "no_begin",
        ANY,
        "{rows} of plain text begin without the BOS token, which the tokenizer has and does not add{first}",
        "begin the texts with it, or add it in the tokenizer: tokenizer.add_bos_token = True, then save_pretrained "
        "into a copy of the model's directory",
    )


@rule("AUD080", "prompts-of-another-template", severity="warning")
def prompts_of_another_template(audit: AuditFacts) -> Iterator[Finding]:
    """Prompts are written out in another template, and are rendered again.

    ## What it does
    Counts rows with a user or system message that marks its question as Alpaca, Vicuna, OpenChat or Anthropic's HH do
    ("### Instruction:", "USER:", "Human:") and ends with their mark for the answer ("### Response:", "Assistant:").
    Fires from 10 %: a few rows may ask about such a text.

    ## Why it is bad
    The model learns to answer behind both templates, and is used with one. A conversation written like that becomes a
    single user turn, and its earlier answers the user's words.

    ## Example
    `{"prompt": "### Instruction:\\nName a color.\\n\\n### Response:\\n", "completion": "red"}`.

    ## Fix
    Give the question alone, and conversations as `messages`.

    ## Evidence
    https://huggingface.co/datasets/Anthropic/hh-rlhf: conversations in one text, "Human:" and "Assistant:" before each
    turn.
    """
    yield from rows_found(
        audit,
        "prompt_of_another_template",
        OFTEN,
        "the prompts of {rows} are written out in another template, and are rendered again{first}",
        "give what is asked alone, and conversations as messages: the chat template writes the marks",
    )


@rule("AUD081", "end-tokens-in-answers", severity="warning")
def end_tokens_in_answers(audit: AuditFacts) -> Iterator[Finding]:
    """Answers end with another model's token for the end of a turn.

    ## What it does
    Counts rows whose last answer, or whose plain text, ends with a token such as `<|eot_id|>`, `</s>` or
    `<end_of_turn>` that is not a special token of this tokenizer. Fires from 10 %. For the tokenizer's own, see AUD043
    and AUD044.

    ## Why it is bad
    For this tokenizer it is ordinary text: the model learns to write it behind every answer, before its own end. The
    gold answers have it too, so that right answers without it are scored as wrong.

    ## Example
    `{"prompt": "…", "completion": "2<|eot_id|>"}` on Qwen, from a script for Llama 3 that adds `EOS_TOKEN`.

    ## Fix
    Take it out of the rows: the chat template writes the model's own.

    ## Evidence
    unslothai/unsloth's notebooks add `EOS_TOKEN = tokenizer.eos_token` to every row; rows saved that way keep it
    when the model is changed.
    """
    yield from rows_found(
        audit,
        "end_of_another_model",
        OFTEN,
        "the answers of {rows} end with another model's token for the end{first}",
        "take the token out of the rows: the chat template writes the model's own",
    )
