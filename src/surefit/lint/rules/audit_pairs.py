"""AUD082 to AUD088: findings of an audit in pairs of a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.facts.audit import AuditFacts
from surefit.lint.rule import Finding, rule
from surefit.lint.rules.audit import first_text, one_sided, rows_text

ALIKE_SHARE = 0.1
"""Share of the pairs from which nearly identical answers are a finding."""
FEW_PAIRS = 50
"""Pairs from which shares of them are judged."""
ONE_SIDED = 0.65
"""Share of the pairs from which it is a finding that the chosen answer is the longer one, or the shorter."""
FEW_PROMPTS = 0.8
"""Share of the pairs with an earlier pair's prompt from which there are few prompts."""


@rule("AUD082", "identical-answers", severity="warning")
def identical_answers(audit: AuditFacts) -> Iterator[Finding]:
    """The chosen and the rejected answer of pairs are the same.

    ## What it does
    Compares the texts of both answers without white space at their ends, their calls and their reasoning.

    ## Why it is bad
    Both log-probabilities are the same, so that the gradient of the preference is zero: the pair costs time, and counts
    half in the accuracy.

    ## Example
    `{"prompt": "2 + 2?", "chosen": "4", "rejected": "4 "}`.

    ## Fix
    Remove those rows.

    ## Evidence
    The gradient of DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7) is a multiple of the difference of the two
    answers' gradients.
    """
    observation = audit.seen("pair_identical")
    if observation:
        yield Finding(
            field="data.train",
            message=f"{rows_text(observation)} have the same chosen and rejected answer{first_text(observation)}",
            help="remove those rows: nothing is learned from them",
        )


@rule("AUD083", "nearly-identical-answers", severity="warning")
def nearly_identical_answers(audit: AuditFacts) -> Iterator[Finding]:
    """The answers of many pairs differ in a few words only.

    ## What it does
    Counts the pairs whose answers have 95 % of their words in common, in one order, whatever their case and
    punctuation. It fires from 10 % of at least 50 pairs.

    ## Why it is bad
    The preference rests on a few tokens, and the rest of the answer cancels out. DPO then often lowers the
    log-probability of the chosen answer as well.

    ## Example
    Two answers of sixty words, of which one ends with another number.

    ## Fix
    Where the few words are the point, as with wrong results, add an SFT term (`objective.sft_weight: 1`); otherwise
    remove those rows.

    ## Evidence
    Pal et al. 2024 (arXiv 2402.13228): on pairs with a small edit distance, DPO lowers the likelihood of the chosen
    answers; a term that keeps it up mends that.
    """
    observation = audit.seen("pair_near_identical")
    if observation and observation.of >= FEW_PAIRS and observation.share >= ALIKE_SHARE:
        yield Finding(
            field="data.train",
            message=f"the two answers of {rows_text(observation)} ({observation.share:.0%}) have 95 % of their words "
            f"in common{first_text(observation)}",
            help="add an SFT term (objective.sft_weight: 1) if the few words are the point, or remove those rows",
        )


@rule("AUD084", "contradictory-pairs", severity="warning")
def contradictory_pairs(audit: AuditFacts) -> Iterator[Finding]:
    """Pairs prefer the answer that another pair with the same prompt rejects.

    ## What it does
    Compares the prompts and both answers of all pairs, and counts those that are an earlier pair the other way round.

    ## Why it is bad
    The two gradients point in opposite directions, and cancel out but for noise.

    ## Example
    Two annotators who disagree about the same two answers, both written down.

    ## Fix
    Keep the majority's pair, or neither. If many annotators disagree, set `objective.label_smoothing` to the share.

    ## Evidence
    Researchers who compared summaries agreed with each other on about 73 % of the pairs (Stiennon et al. 2020, arXiv
    2009.01325, section 3.3).
    """
    observation = audit.seen("pair_contradiction")
    if observation:
        yield Finding(
            field="data.train",
            message=f"{rows_text(observation)} are an earlier pair the other way round{first_text(observation)}",
            help="keep one of each two, or neither",
        )


@rule("AUD085", "length-tells-the-answer", severity="warning")
def length_tells_the_answer(audit: AuditFacts) -> Iterator[Finding]:
    """The chosen answer is nearly always the longer one, or the shorter one.

    ## What it does
    Counts the pairs whose chosen answer has more characters, among those whose answers differ in length, and computes
    the area under the curve (AUC) of length alone. It fires where 65 % of at least 50 pairs agree.

    ## Why it is bad
    A model can win the preference by its length alone: it learns to write longer answers (or shorter ones), and the
    accuracy on held-out pairs looks good without anything else learned.

    ## Example
    Answers of a large model, preferred to those of a small one that writes less.

    ## Fix
    If length is not what you want to teach, remove pairs until both kinds are about as frequent, or use an objective
    that divides by the length (`objective: simpo`, or `objective.loss_type: sigmoid_norm`). Compare the length of the
    answers before and after.

    ## Evidence
    Park et al. 2024 (arXiv 2403.19159) and Singhal et al. 2023 (arXiv 2310.03716): much of what DPO and reward models
    gain on common data is length.
    """
    observation = audit.observations.get("pair_longer")
    if observation and (side := one_sided(observation, FEW_PAIRS, ONE_SIDED)):
        word, share = side
        yield Finding(
            field="data.train",
            message=f"the chosen answer is the {word} one in {share:.0%} of {observation.of:,} pairs: length alone "
            "tells it",
            help="balance the pairs by length, or use an objective that divides by the length (objective: simpo)",
            evidence=observation.detail,
        )


@rule("AUD086", "scores-say-the-opposite", severity="warning")
def scores_say_the_opposite(audit: AuditFacts) -> Iterator[Finding]:
    """By the rows' own scores the rejected answer of pairs is the better one.

    ## What it does
    Compares the columns with a judge's scores where the rows have them: `score_chosen` and `score_rejected`,
    `chosen_score` and `rejected_score`, or `chosen_rating` and `rejected_rating`.

    ## Why it is bad
    The sides were swapped, or the scores belong to other answers: the model learns the opposite of what the judge
    meant.

    ## Example
    `{"chosen": "…", "rejected": "…", "score_chosen": 3.0, "score_rejected": 8.5}`.

    ## Fix
    Swap the two answers of those rows (for all rows: `data.columns: {chosen: rejected, rejected: chosen}`), or find out
    which of the two columns is wrong.

    ## Evidence
    UltraFeedback's first release had some two thousand answers with a wrong overall score: 10 stood where the critique
    meant 1 (Argilla's ultrafeedback-binarized-preferences, 2023).
    """
    observation = audit.seen("pair_swapped")
    if observation:
        yield Finding(
            field="data.train",
            message=f"the scores of {rows_text(observation)} say that the rejected answer is better"
            f"{first_text(observation)}",
            help="swap the answers of those rows; for all rows: data.columns: {chosen: rejected, rejected: chosen}",
        )


@rule("AUD087", "few-prompts", severity="warning")
def few_prompts(audit: AuditFacts) -> Iterator[Finding]:
    """Most pairs share their prompt with another pair.

    ## What it does
    Counts the pairs with the prompt of an earlier pair: system message, turns and tools. It fires above 80 % of at
    least 50 pairs.

    ## Why it is bad
    The preference is learned on a handful of prompts, and whether it holds on others is unknown. Equal prompts stay
    together when rows are held out, so that few prompts are held out as well.

    ## Example
    Every pair that can be made of the ranked answers to thirty prompts.

    ## Fix
    Collect answers to more prompts; of ranked answers, the best against the worst says most.

    ## Evidence
    Ouyang et al. 2022 (arXiv 2203.02155, section 3.5): pairs of one prompt are so alike that a single pass over them,
    shuffled, overfits.
    """
    observation = audit.seen("pair_same_prompt")
    if observation and observation.of >= FEW_PAIRS and observation.share > FEW_PROMPTS:
        yield Finding(
            field="data.train",
            message=f"{rows_text(observation)} ({observation.share:.0%}) have the prompt of an earlier pair: "
            f"{observation.of - observation.rows:,} different prompts",
            help="collect answers to more prompts",
            evidence=observation.detail,
        )


@rule("AUD088", "answers-equal-after-truncation", severity="warning")
def answers_equal_after_truncation(audit: AuditFacts) -> Iterator[Finding]:
    """Up to `data.max_length` the two conversations of pairs are the same.

    ## What it does
    `surefit audit` compares the tokens of both conversations up to `data.max_length` where both are longer.

    ## Why it is bad
    A tool that truncates would train on two equal answers, of which nothing is learned. SureFit leaves such pairs out,
    so that they are missing.

    ## Example
    A document of 4,000 tokens before both answers, with `max_length: 2048`.

    ## Fix
    Raise `data.max_length`, or shorten the prompts.

    ## Evidence
    TRL truncates conversations from the right by default (`truncation_mode: keep_start`), and does not compare them.
    """
    observation = audit.seen("pair_equal_truncated")
    if observation:
        yield Finding(
            field="data.max_length",
            message=f"the answers of {rows_text(observation)} begin to differ only beyond max_length"
            f"{first_text(observation)}",
            help="raise data.max_length, or shorten the prompts: these pairs are left out",
        )
