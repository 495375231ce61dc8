"""LAB: the tokens on which the loss falls, by the config and in the batches themselves."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.core.units import plural
from surefit.facts.audit import Observation
from surefit.facts.batch import BatchFacts
from surefit.facts.examples import ExampleFacts
from surefit.facts.setup import Setup
from surefit.lint.rule import Finding, LintContext, rule
from surefit.lint.rules.template import class_name

FEW = 20
"""Number of measured examples below which the whole data set is not judged."""
LOST_SHARE = 0.05


@rule("LAB001", "loss-on-the-prompt", severity="warning")
def loss_on_the_prompt(setup: Setup) -> Iterator[Finding]:
    """The rows are conversations, but the loss falls on the prompts too.

    ## What it does
    Looks at the tokens that the tool's settings compute the loss on. SureFit trains on the assistant's turns only.

    ## Why it is bad
    Most tokens of a conversation are the prompt: the system text, the tools, the document. The model learns to generate
    those; the answers, which are scored, get only a small part of the gradient.

    ## Example
    TRL with `messages` and `tools` and without `assistant_only_loss`; Axolotl with `train_on_inputs: true`.

    ## Fix
    Compute the loss on the completion only, or on the assistant's turns.

    ## Evidence
    A published report on summarizing legal documents computed the loss on 200,000 tokens of document for each summary.
    TRL's documentation: conversational rows train on the whole chat unless `assistant_only_loss` is set.
    """
    if setup.conversations and setup.loss_on == "all":
        yield Finding(
            field="loss_on",
            message=f"the rows are conversations, but with {setup.name('loss_on')} the loss falls on the prompts too",
            help="compute the loss on the completion only, or on the assistant's turns",
        )


@rule("LAB002", "collator-overwrites-labels", severity="error")
def collator_overwrites_labels(setup: Setup) -> Iterator[Finding]:
    """The labels are masked, but the collator replaces them.

    ## What it does
    Looks for transformers' `DataCollatorForLanguageModeling` in runs whose loss should fall on the answers only. (TRL's
    collator of the same name keeps the mask; it is exempt if its module is given.)

    ## Why it is bad
    That collator replaces the labels with a copy of the ids: the mask is lost, and the loss falls on the prompts.

    ## Example
    Labels with -100 over the prompt, and `DataCollatorForLanguageModeling(tokenizer, mlm=False)` "for dynamic padding".

    ## Fix
    Use a collator that pads labels with -100: `DataCollatorForSeq2Seq`, or the tool's own.

    ## Evidence
    A published report on summarizing legal documents masked its prompts and lost the mask this way. The collator's
    source: `labels = batch["input_ids"].clone()`; see also huggingface/transformers#23530.
    """
    if class_name(setup.collator) == "DataCollatorForLanguageModeling" and setup.loss_on in ("completion", "assistant"):
        yield Finding(
            field="collator",
            message=f"{class_name(setup.collator)} replaces the labels with a copy of the ids: the loss falls on the "
            f"prompts too, not only on the {setup.loss_on}",
            help="use a collator that pads the labels with -100, such as DataCollatorForSeq2Seq",
        )


@rule("LAB003", "length-limit-loses-rows", severity="warning")
def length_limit_loses_rows(context: LintContext, setup: Setup, examples: ExampleFacts) -> Iterator[Finding]:
    """Some rows are longer than the limit.

    ## What it does
    Counts, in a sample, the examples with more tokens than `max_length`, and fires from one in twenty. It does not
    count the chat template's own tokens, and counts texts that the template omits or shortens, so the count is not
    exact. If all are too long, LAB010 fires instead; if documents are truncated to fit (`data.too_long: truncate`),
    neither fires, because no row is lost.

    ## Why it is bad
    SureFit drops such rows, other tools truncate them. They are not a random sample: the model does not learn from the
    long rows.

    ## Example
    `max_length: 512` for function calls whose tool descriptions take 900 tokens.

    ## Fix
    Raise the limit as far as the model's context and the memory allow.

    ## Evidence
    huggingface/trl#6668 and #3927: `max_length` truncated the answers, and the run continued with a loss of 0.
    """
    if not examples.max_length or examples.measured < FEW or examples.too_long == examples.measured or _cuts(context):
        return
    if examples.too_long >= LOST_SHARE * examples.measured:
        yield Finding(
            field="max_length",
            message=f"about {examples.too_long} of {plural(examples.measured, 'sampled row')} are longer than "
            f"{setup.name('max_length')} {examples.max_length:,}: {examples.first_too_long}, for example",
            help=f"raise it; the longest of these rows has about {examples.longest:,} tokens, or more",
        )


def _cuts(context: LintContext) -> bool:
    return context.config is not None and context.config.data.cuts


@rule("LAB004", "truncation-cuts-the-answer", severity="warning")
def truncation_cuts_the_answer(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """Rows over the limit are truncated on the right, where the answer is.

    ## What it does
    Looks at the side on which the tool truncates conversations, or rows whose loss falls on the answers only. If the
    rows are available and none is too long, nothing is reported. SureFit never truncates on the right; it can truncate
    the document.

    ## Why it is bad
    Truncation removes the end-of-turn token first, then the answer. Such a row teaches the model never to stop, or has
    no supervised token at all.

    ## Example
    `truncation=True` on a document of 200,000 tokens followed by its summary.

    ## Fix
    Drop rows over the limit, or shorten the prompt before the template is applied (`data.too_long: truncate`).

    ## Evidence
    A published report on summarizing legal documents lost its summaries to right truncation; huggingface/trl#6668.
    """
    masked = setup.loss_on in ("completion", "assistant") or setup.conversations
    rows = context.examples
    harmless = rows is not None and rows.measured == rows.examples and not rows.too_long
    if setup.truncation_side == "right" and masked and not harmless:
        limit = f" over {setup.max_length:,} tokens" if setup.max_length else ""
        yield Finding(
            field="truncation_side",
            message=f"rows{limit} are truncated on the right ({setup.name('truncation_side')}), where the answer is",
            help="drop such rows, or shorten their prompts; truncating on the left at least keeps the answer",
        )


@rule("LAB005", "length-in-characters", severity="warning")
def length_in_characters(setup: Setup) -> Iterator[Finding]:
    """Rows are filtered by their length in characters.

    ## What it does
    Looks at the unit of the length limit: in a Python script, for a filter that compares `len(row["text"])` with the
    variable that is passed as `max_length`.

    ## Why it is bad
    A token has about four characters in English, and one or two in Vietnamese, Chinese, code or numbers. The limit
    keeps rows that do not fit, and drops rows that would.

    ## Example
    `filter(lambda row: len(row["text"]) < 262144)` before training with 262,144 tokens.

    ## Fix
    Filter by the number of tokens after the chat template.

    ## Evidence
    A published report on summarizing legal documents filtered by characters and ran out of memory on the rows it kept.
    """
    if setup.length_unit == "characters":
        limit = f" {setup.max_length:,}" if setup.max_length else ""
        field = "length_unit" if "length_unit" in setup.places else "max_length"
        yield Finding(
            field=field,
            message=f"{setup.name(field)}{limit} counts characters; the model counts tokens",
            help="filter by the number of tokens after the chat template",
        )


def _observation_with_example(batch: BatchFacts, name: str) -> tuple[Observation, str] | None:
    """Return an observation and its first example as the end of a sentence; None if the batches do not show it."""
    observation = batch.seen(name)
    return (observation, f" ({observation.examples[0]})" if observation.examples else "") if observation else None


@rule("LAB006", "labels-dead", severity="error")
def labels_dead(batch: BatchFacts) -> Iterator[Finding]:
    """Examples in the batch have no supervised token.

    ## What it does
    Counts, in the tensors of the first micro batches, the examples all of whose labels are masked.

    ## Why it is bad
    They cost time and contribute no gradient. If all examples are like that, the loss is 0 or NaN, and the run does not
    fail.

    ## Example
    A collator that does not find its response template in the tokens.

    ## Fix
    `surefit check --show 3` shows the supervised text of the rows. If that is right, the collator is wrong.

    ## Evidence
    huggingface/trl#6668: loss 0.0 in every step, because every label was masked. A published report on AMR parsing
    trained with masks that covered everything.
    """
    if result := _observation_with_example(batch, "dead"):
        yield Finding(
            field="data.train",
            message=f"{result[0].rows} of {plural(result[0].of, 'example')} in the first batches have no supervised "
            f"token{result[1]}",
            help="inspect the supervised text with `surefit check --show 3`",
        )


@rule("LAB007", "labels-overwritten", severity="error")
def labels_overwritten(batch: BatchFacts) -> Iterator[Finding]:
    """The labels in the batch differ from the examples' tokenized labels.

    ## What it does
    Finds each example's ids in the tensors of the first micro batches, and compares the labels there with the example's
    own: masked where the example's are, and the token itself elsewhere.

    ## Why it is bad
    Something between tokenization and the loss replaced or shifted them: the loss falls on the prompts, or on the wrong
    tokens.

    ## Example
    A collator that makes labels as a copy of the ids (LAB002).

    ## Fix
    Build the batch from the data set's own labels.

    ## Evidence
    huggingface/transformers#23530; a published report on summarizing legal documents lost its masks in the collator.
    """
    if result := _observation_with_example(batch, "overwritten"):
        yield Finding(
            field="data.train",
            message=f"{result[0].rows} of {plural(result[0].of, 'example')} in the first batches have labels that "
            f"differ from their tokenized ones{result[1]}",
            help="this is a bug in SureFit's batching: please report it, with batch_audit.json",
        )


@rule("LAB008", "mask-starts-inside-the-prompt", severity="error")
def mask_starts_inside_the_prompt(batch: BatchFacts) -> Iterator[Finding]:
    """The supervised tokens do not begin where the prompt ends.

    ## What it does
    Decodes the text before every span of supervised tokens in the first micro batches, and compares it with the
    template's generation prompt. Plain text, in which every token is supervised, is exempt.

    ## Why it is bad
    At inference the model continues from the end of the prompt. If the supervised tokens begin earlier, it learns to
    generate a part of the prompt; if later, it never learns the beginning of the answer.

    ## Example
    A prompt that is tokenized alone and masked by its length, although its last token merges with the answer's first.

    ## Fix
    Inspect the boundaries with `surefit check --show 3`; a template that rewrites earlier turns is the usual cause.

    ## Evidence
    huggingface/trl#4201: the header of the assistant's turn was counted as part of the answer, because there was no
    generation prompt.
    """
    if result := _observation_with_example(batch, "misplaced_mask"):
        yield Finding(
            field="data.train",
            message=f"{result[0].rows} of {plural(result[0].of, 'answer')} in the first batches do not begin where the "
            f"prompt ends{result[1]}",
            help="inspect the boundaries with `surefit check --show 3`",
        )


@rule("LAB009", "padding-supervised", severity="error")
def padding_supervised(batch: BatchFacts) -> Iterator[Finding]:
    """The loss falls on padding.

    ## What it does
    Counts the labels of the first micro batches at positions that belong to no example.

    ## Why it is bad
    The model learns to write padding tokens after an answer, and short rows get more weight than long ones.

    ## Example
    Labels that are padded with the padding token's id instead of -100.

    ## Fix
    Pad the labels with -100.

    ## Evidence
    PyTorch's cross-entropy ignores -100 only; transformers' `DataCollatorWithPadding` does not handle labels, and code
    that pads them by hand uses the same id for both.
    """
    if result := _observation_with_example(batch, "supervised_padding"):
        yield Finding(
            field="data.train",
            message=f"the loss falls on {result[0].rows} of {plural(result[0].of, 'padding token')} in the first "
            "batches" + result[1],
            help="this is a bug in SureFit's batching: please report it, with batch_audit.json",
        )


@rule("LAB010", "length-limit-loses-everything", severity="error")
def length_limit_loses_everything(context: LintContext, setup: Setup, examples: ExampleFacts) -> Iterator[Finding]:
    """Every row is longer than the limit.

    ## What it does
    Like LAB003, but fires if no example of the sample is within `max_length`.

    ## Why it is bad
    SureFit stops because no row is left. A tool that silently drops such rows trains on an empty data set; a tool that
    truncates them trains on prompts without answers.

    ## Example
    `max_length: 64` for conversations of a thousand tokens.

    ## Fix
    Raise the limit.

    ## Evidence
    Measured: TRL 1.16 dropped every row of a set whose answers began after `max_length`, without an error, and trained
    on nothing. This behavior comes from huggingface/trl#6320.
    """
    if examples.measured and examples.too_long == examples.measured and not _cuts(context):
        yield Finding(
            field="max_length",
            message=f"all {plural(examples.measured, 'sampled row')} are longer than {setup.name('max_length')} "
            f"{examples.max_length:,}: no row would be left",
            help=f"raise it; the longest of these rows has at least {examples.longest:,} tokens",
        )


@rule("LAB011", "attention-mask-wrong", severity="error")
def attention_mask_wrong(batch: BatchFacts) -> Iterator[Finding]:
    """The attention mask hides an example's tokens, or exposes padding before them.

    ## What it does
    Compares the attention mask of the first micro batches with the positions of the examples. Padding after an example
    may be unmasked, because attention is causal.

    ## Why it is bad
    The model does not attend to the hidden tokens. It reads exposed padding as text, and the amount depends on the
    other rows of the batch.

    ## Example
    A mask computed as `input_ids != pad_id`, with a padding token that also ends the turns.

    ## Fix
    Compute the mask from the lengths, not from the ids.

    ## Evidence
    Measured: an attention function that was registered without its mask function silently ignored the padding mask, an
    error of 0.60 in the logits.
    """
    if result := _observation_with_example(batch, "attention"):
        yield Finding(
            field="data.train",
            message=f"the attention mask is wrong for {plural(result[0].rows, 'example')} of the first batches"
            + result[1],
            help="this is a bug in SureFit's batching: please report it, with batch_audit.json",
        )


@rule("LAB022", "padding-in-the-labels", severity="warning")
def padding_in_the_labels(setup: Setup) -> Iterator[Finding]:
    """The labels are a copy of the padded ids, including the padding.

    ## What it does
    In a Python script: looks for a function that pads its rows and copies `input_ids` to `labels`, while the collator
    keeps the labels and nothing writes -100.

    ## Why it is bad
    The loss falls on the padding too. In rows that are mostly padding it decreases fast while the model learns little
    else than to write padding.

    ## Example
    `tokenizer(text, padding="max_length")`, `labels = input_ids.copy()`, and `default_data_collator`.

    ## Fix
    Use `DataCollatorForLanguageModeling(tokenizer, mlm=False)` without your own labels, or set labels to -100 where the
    attention mask is 0.

    ## Evidence
    transformers, data/data_collator.py: `default_data_collator` keeps the labels; PyTorch's cross-entropy ignores -100
    only.
    """
    if setup.padding_learnt:
        yield Finding(
            field="padding_learnt",
            message="the labels are a copy of padded ids, so the loss falls on the padding",
            help="leave the labels to DataCollatorForLanguageModeling(tokenizer, mlm=False), or set them to -100 there",
        )
