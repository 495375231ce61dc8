"""EVL: scoring the model, and the gate."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist

from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import SureFitConfig, decided
from surefit.core.errors import did_you_mean
from surefit.core.units import plural, truncate_text
from surefit.facts.answering_time import checkpoints_against_training
from surefit.facts.dataset import DatasetFacts
from surefit.facts.eval_prompts import EvalPromptFacts, EvalPromptSet
from surefit.facts.free_text import LIKELIHOOD, SHORT_ANSWER
from surefit.facts.gpus import find_gpu
from surefit.facts.hardware import HardwareFacts
from surefit.facts.model import ModelFacts
from surefit.facts.setup import Setup
from surefit.lint.rule import Finding, LintContext, rule
from surefit.lint.rules.data import SMALL_EVALUATION

GENEROUS = 8
"""Upper bound on the characters per token, averaged over an answer. English prose has four to five with any current
vocabulary, JSON and code have fewer."""
TRUNCATED_SHARE = 0.05


@rule("EVL001", "sampled-scores", severity="warning")
def sampled_scores(setup: Setup) -> Iterator[Finding]:
    """The scored answers are sampled at random.

    ## What it does
    Looks at `do_sample` and `temperature` of the generation that is scored. A temperature with `do_sample: false` is
    ignored. In SureFit's own config: `evaluate.temperature` with one answer per prompt; with several
    `evaluate.samples`, sampling is part of the metric.

    ## Why it is bad
    The same model gets a different score each time. The difference is larger than the usual one between two
    checkpoints, and the mean is lower than with greedy decoding.

    ## Example
    `temperature: 0.7` for ROUGE.

    ## Fix
    Write `do_sample: false`, or a temperature of 0. If sampling is part of the metric (pass@k), average over many
    samples.

    ## Evidence
    A published report on summarizing legal documents compared checkpoints by ROUGE at temperature 0.7.
    kubeedge/ianvs#990: four runs of one model scored 0.6, 0.7, 0.8 and 0.9 because its generation_config.json samples
    at 0.7.
    """
    sampled = setup.do_sample is True and setup.temperature != 0
    if not sampled and not (setup.do_sample is None and setup.temperature):
        return
    suffix = f" at temperature {truncate_text(str(setup.temperature))}" if setup.temperature else ""
    yield Finding(
        field="do_sample" if setup.do_sample else "temperature",
        message=f"the scored answers are sampled at random{suffix}: the same model gets a different score each time",
        help="write do_sample: false" if setup.do_sample else "write a temperature of 0",
    )


@rule("EVL002", "answers-longer-than-limit", severity="warning")
def answers_longer_than_limit(config: SureFitConfig, dataset: DatasetFacts) -> Iterator[Finding]:
    """The gold answers are longer than `evaluate.max_new_tokens`.

    ## What it does
    If the held-out rows are a share of the training rows, compares the characters of their answers with
    `evaluate.max_new_tokens`. It assumes eight characters per token, more than any vocabulary reaches on ordinary text,
    so every reported answer is certainly too long; others may be too. It fires from one row in twenty.

    ## Why it is bad
    The answer is truncated and scored as wrong, however good the model is.

    ## Example
    Summaries of 6,000 characters with `max_new_tokens: 256`.

    ## Fix
    Raise `evaluate.max_new_tokens` above the longest answer.

    ## Evidence
    EleutherAI/lm-evaluation-harness#2798: the default of 256 tokens is far too short for several of its tasks, and the
    scores look as if the model were weak.
    """
    limit = config.evaluate.max_new_tokens
    if not config.data.share or not dataset.target_lengths:
        return
    too_long = sum(length > GENEROUS * limit for length in dataset.target_lengths)
    if too_long >= TRUNCATED_SHARE * len(dataset.target_lengths):
        longest = max(dataset.target_lengths)
        yield Finding(
            field="evaluate.max_new_tokens",
            message=f"{too_long} of {len(dataset.target_lengths)} sampled answers do not fit into {limit:,} tokens; "
            f"the longest has {longest:,} characters",
            help=f"raise max_new_tokens, to about {longest // 3:,} for ordinary text",
        )


@rule("EVL003", "scored-on-training-rows", severity="error")
def scored_on_training_rows(config: SureFitConfig) -> Iterator[Finding]:
    """The held-out rows are among the training rows.

    ## What it does
    Looks for a `data.eval` file in the directory of `data.train`, and for the same hub data set and split in both. (Two
    local files with the same content raise an error when they are read: DAT001.)

    ## Why it is bad
    The model has seen the answers. Scores, the held-out loss and the gate measure memorization.

    ## Example
    `train: data` with `eval: data/heldout.jsonl`: all .jsonl files of a directory are read.

    ## Fix
    Move the file out of the directory, or name the training file; with a hub data set, name another split
    (`owner/name@test`) or hold out a share.

    ## Evidence
    A test shows that SureFit's own loader reads such a file as training rows. Kapoor & Narayanan 2023 (arXiv
    2207.07048) collected published results from 17 fields that leakage inflated.
    """
    train, held_out = config.data.train, config.data.eval
    if not isinstance(held_out, str):
        return
    if os.path.isfile(os.path.expanduser(held_out)):
        if _holds(os.path.expanduser(train), os.path.expanduser(held_out)):
            yield Finding(
                field="data.eval",
                message=f"{held_out} is in {train}, and every data file in that directory is used for training",
                help="move it out of the directory, or name the training file in data.train",
            )
    elif "/" in held_out and not held_out.startswith("surefit/") and not os.path.exists(os.path.expanduser(held_out)):
        split = config.data.split
        if _hub_set(train, split) == _hub_set(held_out, split):
            yield Finding(
                field="data.eval",
                message=f"data.train and data.eval are both the {_hub_set(train, split)[1]} split of {held_out}",
                help=f"name another split, such as {held_out.partition('@')[0]}@test, or hold out a share",
            )


def _holds(directory: str, file: str) -> bool:
    return os.path.isdir(directory) and os.path.samefile(directory, os.path.dirname(file) or ".")


def _hub_set(name: str, split: str) -> tuple[str, str]:
    """Return (owner/name:configuration, split) of `owner/name:configuration@split`; `split` is the default."""
    base, _, named_split = name.partition("@")
    return base, named_split or split


@rule("EVL004", "gate-on-a-handful", severity="warning")
def gate_on_a_handful(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """The gate has too few rows to decide on.

    ## What it does
    With a gate, looks for an `evaluate.max_examples` or a file in `data.eval` with fewer than 10 rows; with
    `not_worse_than`, with fewer than could rule out a loss of `margin` if both models scored the same on every row. (If
    a share holds out too few rows, see DAT006.)

    ## Why it is bad
    One row changes the score by more than ten points, and the 95 % interval is very wide: unless the tuned model is far
    better, the gate cannot decide, and `surefit evaluate` ends with exit code 5.

    ## Example
    `max_examples: 5`, left over from a first try in a config that a pipeline uses.

    ## Fix
    Remove `max_examples`, or score a few hundred rows.

    ## Evidence
    The binomial interval: 6 of 9 correct means anything from 30 % to 93 %. The paired interval of n rows that all tie
    is ± 1.96 √2 / (n + 2) (Bonett & Price 2012): 54 rows for the default margin of 0.05.
    """
    rows, gate, field = config.evaluate.max_examples, config.evaluate.gate, "evaluate.max_examples"
    rows_in_file = context.scored.held_out.prompts if context.scored and isinstance(config.data.eval, str) else None
    if rows_in_file is not None and (rows is None or rows_in_file < rows):
        rows, field = rows_in_file, "data.eval"
    if gate is None or not rows:
        return
    z = NormalDist().inv_cdf((1 + gate.confidence) / 2)
    rows_for_ties = z * math.sqrt(2) / max(gate.margin, 1e-9) - 2
    ties = math.ceil(rows_for_ties) if gate.not_worse_than and gate.margin else 0
    if rows < max(SMALL_EVALUATION, ties):
        suffix = f"; with fewer than {ties} rows, all ties cannot rule out a loss of {100 * gate.margin:g} points"
        yield Finding(
            field=field,
            message=f"the gate decides on {plural(rows, 'row')}, and each is worth {100 / rows:.2g} points"
            + (suffix if ties else ""),
            help=("name a file of" if field == "data.eval" else "remove max_examples, or score")
            + " a few hundred rows",
        )


@rule("EVL005", "best-metric-never-measured", severity="error")
def best_metric_never_measured(config: SureFitConfig, setup: Setup) -> Iterator[Finding]:
    """The best checkpoint is chosen by a metric that is not measured during training.

    ## What it does
    Looks for a `checkpoint.metric_for_best_model` other than `eval_loss` and `eval_perplexity` (for pairs
    `eval_rewards/accuracies` and `eval_rewards/margins`, for labelled answers `eval_rewards/auc` and the latter) while
    `evaluate.in_training` is off.

    ## Why it is bad
    Task metrics need generated answers. Without them no checkpoint has a score, so none is the best, and early stopping
    never stops the run.

    ## Example
    `metric_for_best_model: exact_match` without `in_training: true`.

    ## Fix
    Write `evaluate.in_training: true`, or `metric_for_best_model: eval_loss`, which costs nothing extra.

    ## Evidence
    By design: only the held-out loss is measured at a checkpoint unless answers are generated. transformers stops at
    such a config only at the first checkpoint, with "The `metric_for_best_model` training argument is set to …, which
    is not found in the evaluation metrics".
    """
    metric = config.checkpoint.metric_for_best_model
    known = config.objective.always_measured
    if setup.tool == "surefit" and metric not in (None, *known) and not config.evaluate.in_training:
        yield Finding(
            field="checkpoint.metric_for_best_model",
            message=f"the best checkpoint is chosen by {metric}, which is not measured during training",
            help=f"write evaluate.in_training: true, or metric_for_best_model: {' or '.join(known)}",
        )


@rule("EVL006", "more-answers-than-examples", severity="info")
def more_answers_than_examples(
    config: SureFitConfig, resolved: ResolvedConfig, dataset: DatasetFacts
) -> Iterator[Finding]:
    """With `evaluate.in_training`, the run generates more answers than it trains on examples.

    ## What it does
    If the held-out rows are a share of the training rows, multiplies them (at most `evaluate.max_examples`) by the
    checkpoints of the run, and compares the product with the examples that the run trains on.

    ## Why it is bad
    Answers are generated token by token: an answer takes far longer than a training step on an example of its length.
    The run spends most of its time generating.

    ## Example
    2,000 rows, `eval: 0.2` and `in_training: true` with a checkpoint every 4 of 100 steps: 10,000 answers.

    ## Fix
    Set `evaluate.max_examples`, write fewer checkpoints, or score after training (`surefit evaluate`).

    ## Evidence
    LLaMA-Factory's author advises against generating during training for this reason (hiyouga/LlamaFactory#1110).
    """
    total, save_steps = resolved.total_steps, resolved.config.checkpoint.save_steps
    share = config.data.share
    if not config.evaluate.in_training or not share or not total or not isinstance(save_steps, int):
        return
    held_out = min(round(share * dataset.rows), config.evaluate.max_examples or dataset.rows)
    answers, examples = held_out * -(-total // save_steps), total * decided(resolved.config.train.global_batch_size)
    if answers > examples:
        yield Finding(
            field="evaluate.in_training",
            message=f"training generates about {answers:,} answers at {-(-total // save_steps):,} "
            f"checkpoints, and trains on {examples:,} examples",
            help="set evaluate.max_examples, or a larger checkpoint.save_steps",
        )


@rule("EVL007", "metric-unknown", severity="error", suppressible=False)
def metric_unknown(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """The config names a metric that the recipe does not have.

    ## What it does
    Compares `evaluate.gate.metric` and, with `evaluate.in_training`, `checkpoint.metric_for_best_model` with the
    recipe's metrics. pass@k needs at least k `evaluate.samples`. Recipes of other packages that do not list their
    metrics are skipped.

    ## Why it is bad
    The name is looked up only when there are scores: the gate's after training, merging and scoring the first set, the
    best checkpoint's after the first measurement. Then the run stops.

    ## Example
    `gate: {metric: exact_macht, min: 0.6}`.

    ## Fix
    Write one of the names that the finding lists; without `metric` the gate uses the recipe's primary metric.

    ## Evidence
    SureFit's own `evaluate` used to stop this late. transformers reports such a name at the first checkpoint;
    huggingface/transformers#31450 improved the message, because metric names are not obvious.
    """
    gate, known = config.evaluate.gate, config.objective.always_measured
    metric_by_field = {"evaluate.gate.metric": gate.metric if gate else None}
    if config.evaluate.in_training and config.checkpoint.metric_for_best_model not in known:
        metric_by_field["checkpoint.metric_for_best_model"] = config.checkpoint.metric_for_best_model
    samples = config.evaluate.samples
    for field, name in metric_by_field.items():
        if name is None or not context.metrics:
            continue
        k = name.removeprefix("pass@")
        if name not in context.metrics:
            yield Finding(
                field=field,
                message=f"the recipe {config.recipe} has no metric {name!r}{did_you_mean(name, context.metrics)}",
                help=f"choose from {', '.join(context.metrics)}",
            )
        elif k != name and k.isdecimal() and int(k) > samples:
            yield Finding(
                field=field,
                message=f"{name} needs {k} answers per prompt, but evaluate.samples is {samples}",
                help=f"set evaluate.samples: {k} with a temperature, or name another metric",
            )


@rule("EVL008", "scoring-outlasts-training", severity="warning")
def scoring_outlasts_training(
    resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts, scored: EvalPromptFacts
) -> Iterator[Finding]:
    """With `evaluate.in_training`, generating answers may take longer than training.

    ## What it does
    On a GPU whose data sheet is known, estimates the time of generating `evaluate.max_new_tokens` tokens for every
    held-out prompt at every checkpoint, and compares it with the training time. It assumes that training rows are as
    long as held-out rows and, without a tokenizer on this machine, that a token has four bytes. The formula and a
    worked example are in `facts/answering_time.py`. For other devices, see `surefit plan`.

    ## Why it is bad
    Every generated token reads all weights and the whole KV cache. The GPU reaches only a small share of its compute
    speed, and the run takes more than twice as long.

    ## Example
    1,000 held-out prompts with answers of up to 1,024 tokens at 20 checkpoints of a run of 200 steps.

    ## Fix
    Lower `evaluate.max_examples` or `max_new_tokens`, raise `checkpoint.save_steps`, or score after training (`surefit
    evaluate --all-checkpoints`).

    ## Evidence
    Pope et al. 2022 (arXiv 2211.05102): decoding is memory-bound. LLaMA-Factory's author advises against generating
    during training for this reason (hiyouga/LlamaFactory#1110).
    """
    config, gpu = resolved.config, find_gpu(hardware.name) if hardware.kind == "cuda" else None
    if not config.evaluate.in_training or gpu is None or scored.ranked:
        return
    estimate = checkpoints_against_training(resolved, model, gpu, scored.held_out)
    if estimate is None or estimate[1] <= 1:
        return
    yield Finding(
        field="evaluate.in_training",
        message=f"answers of up to {config.evaluate.max_new_tokens:,} tokens to {scored.held_out.prompts:,} prompts at "
        f"{plural(estimate[0], 'checkpoint')} take up to {estimate[1]:.1f} times the training time on "
        f"{hardware.name}",
        help="lower evaluate.max_examples or max_new_tokens, raise checkpoint.save_steps, or score after training: "
        "surefit evaluate --all-checkpoints",
    )


@rule("EVL009", "scored-set-without-answers", severity="error")
def scored_set_without_answers(config: SureFitConfig, scored: EvalPromptFacts) -> Iterator[Finding]:
    """Scores are requested for a set without gold answers.

    ## What it does
    Looks at a sample of each evaluation set. Plain text, tokens, and conversations that end with a question or with a
    bare tool call have no gold answer. It fires if `evaluate.gate` or `evaluate.in_training` needs scores, or if
    another set has answers.

    ## Why it is bad
    `surefit evaluate` stops at such a set, after training and merging; scoring during training stops before training.

    ## Example
    `data.eval: notes.txt` with `gate: {min: 0.6}`.

    ## Fix
    Name a set with prompts and answers, or remove the gate.

    ## Evidence
    SureFit's own `run` on plain text with a gate trained and merged, and then stopped at the first row of the
    evaluation.
    """
    scoring_settings = {"evaluate.gate": config.evaluate.gate, "evaluate.in_training": config.evaluate.in_training}
    setting = next((key for key, value in scoring_settings.items() if value), None)
    if scored.nothing_to_score and setting is None:
        return
    for prompt_set in scored.sets:
        if prompt_set.has_no_answer:
            yield Finding(
                field=_key_of(prompt_set),
                message=f"none of the {prompt_set.looked_at:,} sampled rows has a gold answer"
                + (f", and {setting} needs scores" if setting else ""),
                help="name a set with prompts and answers" + (f", or remove {setting}" if setting else ""),
            )


@rule("EVL010", "rows-not-scored", severity="info")
def rows_not_scored(config: SureFitConfig, scored: EvalPromptFacts) -> Iterator[Finding]:
    """Rows of the evaluation sets have no gold answer and are not scored.

    ## What it does
    Counts them in a sample of each set: plain text, tokens, and conversations that end with a question or with a bare
    tool call.

    ## Why it is bad
    It may be fine: the loss on these rows is measured at every checkpoint. But only the other rows are scored. If no
    row of any set has an answer, `surefit run` skips the stage `evaluate`, and says so.

    ## Example
    Continued pretraining on a directory of text with `data.eval: 0.01`.

    ## Fix
    None is needed for the loss; for scores, name a set of rows with prompts and answers.

    ## Evidence
    Before this rule existed, the first such row stopped `surefit evaluate`, after training and merging.
    """
    scores_needed = config.evaluate.gate or config.evaluate.in_training
    for prompt_set in scored.sets:
        if prompt_set.has_no_answer and scored.nothing_to_score and not scores_needed:
            message = "no sampled row has a gold answer: only the loss is measured"
        elif prompt_set.unanswered and not prompt_set.has_no_answer:
            counts = f"{prompt_set.unanswered:,} of {prompt_set.looked_at:,} sampled rows"
            message = f"{counts} have no gold answer and are not scored"
        else:
            continue
        yield Finding(
            field=_key_of(prompt_set), message=message, help="to get scores, name rows with a prompt and an answer"
        )


@rule("EVL031", "nothing-held-out", severity="info")
def no_held_out_rows(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """All rows are used for training, and none is held out.

    ## What it does
    Looks for `data.eval: 0` (or `null`), in SureFit's own config.

    ## Why it is bad
    It may be intended. But no held-out loss is measured during training, so nothing shows when the model begins to
    memorize, no checkpoint can be selected as the best, and no score shows whether training helped. Sets in
    `evaluate.extra_sets` are still scored. The merged model is compared with base and adapter on training rows.

    ## Example
    `eval: 0` in a config that `surefit import` converted from one with `val_set_size: 0`.

    ## Fix
    None, if that is intended; otherwise set a share such as `eval: 0.02`, or a file of rows.

    ## Evidence
    Axolotl, LLaMA-Factory, TRL and ms-swift hold nothing out by default.
    """
    if context.is_foreign or not (config.data.holds_nothing_out and context.is_set("data.eval")):
        return
    if _needing_held_out_rows(config):
        return  # EVL032 reports it
    extra_sets = config.evaluate.extra_sets
    scores_text = (
        f"only {', '.join(extra_sets)} will be scored" if extra_sets else "no score will show whether training helped"
    )
    yield Finding(
        field="data.eval",
        message=f"no rows are held out: no held-out loss is measured, and {scores_text}",
        help="fine if intended; otherwise set data.eval to a share such as 0.02, or to a file of rows",
    )
    if config.train.eval_steps is not None:
        yield Finding(
            field="train.eval_steps",
            message=f"there are no held-out rows to measure every {plural(config.train.eval_steps, 'step')}",
            help="remove it, or hold out rows with data.eval",
        )


@rule("EVL032", "held-out-rows-needed", severity="error", suppressible=False)
def held_out_rows_needed(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """A setting needs held-out rows, but none are held out.

    ## What it does
    With `data.eval: 0`, looks for `checkpoint.metric_for_best_model`, `train.early_stopping_patience`,
    `evaluate.in_training` and `evaluate.gate`.

    ## Why it is bad
    All of them depend on held-out rows. Without any, no checkpoint is the best, the run never stops early, and the gate
    has no scores.

    ## Example
    `eval: 0` with `metric_for_best_model: eval_loss`.

    ## Fix
    Hold out rows (`eval: 0.02`, or a file), or remove the setting.

    ## Evidence
    transformers' Trainer does not start either: "You have set `args.eval_strategy` to steps but you didn't pass an
    `eval_dataset` to `Trainer`".
    """
    if context.is_foreign or not config.data.holds_nothing_out:
        return
    for field, purpose in _needing_held_out_rows(config).items():
        yield Finding(
            field=field,
            message=f"{purpose} held-out rows, but none are held out (data.eval is 0)",
            help=f"set data.eval to a share such as 0.02 or to a file of rows, or remove {field}",
        )


def _needing_held_out_rows(config: SureFitConfig) -> dict[str, str]:
    """Return the keys that are set and need held-out rows, each with a phrase that says what the rows are for."""
    settings: dict[str, tuple[object, str]] = {
        "checkpoint.metric_for_best_model": (
            config.checkpoint.metric_for_best_model,
            "the best checkpoint is chosen on",
        ),
        "train.early_stopping_patience": (config.train.early_stopping_patience, "early stopping needs the loss on"),
        "evaluate.in_training": (config.evaluate.in_training, "answers are scored on"),
        "evaluate.gate": (config.evaluate.gate, "the gate needs scores on"),
    }
    return {field: purpose for field, (value, purpose) in settings.items() if value}


@rule("EVL033", "gate-reference-unknown", severity="error")
def gate_reference_unknown(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """The gate refers to a model or a run that does not exist.

    ## What it does
    Checks that `evaluate.gate.not_worse_than` is `base`, one of the recipe's baselines, or a run on this machine (a run
    directory, or RUN:VARIANT).

    ## Why it is bad
    `surefit evaluate` looks the name up and stops, after training and merging.

    ## Example
    `gate: {not_worse_than: bse}`.

    ## Fix
    Write `base`, one of the baselines that the finding lists, or the directory of a run. If that run will exist by
    then, accept the finding in `lint.ignore`.

    ## Evidence
    SureFit's own `evaluate` used to stop this late.
    """
    gate, names = config.evaluate.gate, ("base", *context.baselines)
    reference = gate.not_worse_than if gate else None
    if not reference or reference in names:
        return
    paths = [Path(text).expanduser() for text in dict.fromkeys((reference, reference.partition(":")[0])) if text]
    if any(path.is_dir() for path in paths):
        return
    yield Finding(
        field="evaluate.gate.not_worse_than",
        message=f"{reference!r} is neither {' nor '.join(names)} nor an existing run directory"
        f"{did_you_mean(reference, names)}",
        help=f"write {' or '.join(names)}, or the directory of a run that was scored on the same rows",
    )


LOOSE_MARGIN = 0.5
"""Margin from which a gate accepts a model that is clearly worse."""


@rule("EVL034", "gate-decides-nothing", severity="warning")
def gate_decides_nothing(config: SureFitConfig) -> Iterator[Finding]:
    """The gate accepts nearly every model.

    ## What it does
    Looks for `not_worse_than` with a `margin` of 0.5 or more, and for a `min` that is not above `margin`: the interval
    must not reach below `min` - `margin`, and no score is below 0. (For a gate with neither condition, see CFG002.)

    ## Why it is bad
    The exit code of `surefit evaluate` means nothing, although a pipeline may rely on it: a margin of 1 allows a loss
    of 100 points, and with a `min` of 0.03 and the default margin of 0.05, one right answer in thirty rows passes.

    ## Example
    `gate: {not_worse_than: base, margin: 1}`.

    ## Fix
    Set a margin of a few points (0.05 is the default) that is below `min`.

    ## Evidence
    The arithmetic of `evaluate.gate`: see `margin` in the reference.
    """
    gate = config.evaluate.gate
    if gate is None:
        return
    if gate.not_worse_than is not None and gate.margin >= LOOSE_MARGIN:
        yield Finding(
            field="evaluate.gate.margin",
            message=f"a margin of {gate.margin:g} accepts a loss of {100 * gate.margin:g} points",
            help="write the largest acceptable loss, such as 0.05",
        )
    if gate.min is not None and gate.min <= gate.margin:
        yield Finding(
            field="evaluate.gate.min",
            message=f"a min of {gate.min:g} is not above the margin of {gate.margin:g}: a score that reaches it "
            "by chance passes with any number of rows",
            help="write a higher min, or a smaller evaluate.gate.margin",
        )


@rule("EVL035", "exact-match-of-long-answers", severity="warning")
def exact_match_of_long_answers(
    context: LintContext, config: SureFitConfig, scored: EvalPromptFacts
) -> Iterator[Finding]:
    """The gate or the best checkpoint is decided by exact match, but the answers are too long for it.

    ## What it does
    For a recipe with free-text answers, looks for `exact_match` in `evaluate.gate.metric` and, with
    `evaluate.in_training`, in `checkpoint.metric_for_best_model`, and for a gate without a metric where
    `evaluate.server` answers. It fires where the median held-out answer, in a sample, has more than 8 words.

    ## Why it is bad
    A sentence can be said in many ways, and exact match counts only one: it stays near 0 for good models, too, unless
    all answers follow one pattern. A gate with `min` does not pass, one with `not_worse_than` cannot tell or passes
    whatever training did, and all checkpoints tie.

    ## Example
    Support answers of 20 words with `gate: {metric: exact_match, min: 0.5}`.

    ## Fix
    Write `metric: answer_likelihood`, or leave `metric` out: then the answers' length decides. For the best checkpoint,
    write `metric_for_best_model: eval_loss`. A server gives no likelihood of a given answer: remove `evaluate.server`.

    ## Evidence
    A run on 240 support answers took the held-out loss from 1.95 to 0.71, and exact match from 0 of 20 to 2 of 20.
    A model that finds each word with probability 0.9 writes 8 words exactly with 0.9^8 = 0.43, and 20 with 0.12.
    """
    words, gate = scored.held_out.answer_words, config.evaluate.gate
    exact = next((name for name in context.metrics if name == "exact_match"), None)
    if not scored.free_text or exact is None or words is None or words <= SHORT_ANSWER:
        return
    length = f"the median answer has {words:g} words, and above {SHORT_ANSWER} exact match hardly moves"
    if gate is not None and gate.metric == exact:
        yield Finding(
            field="evaluate.gate.metric",
            message=f"the gate is decided by {exact}, but {length}",
            help=f"write metric: {LIKELIHOOD}, or leave metric out",
        )
    elif gate is not None and gate.metric is None and config.evaluate.server:
        yield Finding(
            field="evaluate.server",
            message=f"a server gives no likelihoods, so {exact} decides the gate, but {length}",
            help="remove evaluate.server, so that the run's own models are scored",
        )
    if config.evaluate.in_training and config.checkpoint.metric_for_best_model == exact:
        yield Finding(
            field="checkpoint.metric_for_best_model",
            message=f"the best checkpoint is chosen by {exact}, but {length}",
            help="write metric_for_best_model: eval_loss",
        )


def _key_of(scored: EvalPromptSet) -> str:
    return "data.eval" if scored.name == "eval" else f"evaluate.extra_sets.{scored.name}"
