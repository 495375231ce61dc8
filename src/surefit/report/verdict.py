"""The first screen of the page: what was trained, whether it helped, at what cost, and whether the merge can be
trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefit.core.units import bytes_text, count_text, duration_text, plural
from surefit.evaluate.free_text import SHOW_MORE
from surefit.evaluate.labelled import HeldOutLabels, summarize_held_out_labels
from surefit.evaluate.pairs import HEADLINES, HeldOutPairs, Outcome, summarize_held_out_pairs
from surefit.report.artefacts import Artefacts
from surefit.report.curves import TrainingCurves
from surefit.report.scores import FIT_TONES, HELD_OUT, SetScores, Tone, comparison_tone
from surefit.report.shapes import ComparisonRecord, FitEffectRecord
from surefit.report.text import NBSP, interval, percent, points, readable_metric
from surefit.report.timeline import Attempt, last_attempt

PAIR_TONES: dict[Outcome, Tone] = {"learned": "good", "both fell": "warning", "unclear": "neutral", "reversed": "bad"}


@dataclass(frozen=True)
class Verdict:
    """The headline and the sentences below it."""

    tone: Tone
    headline: str
    sentences: list[str]


@dataclass(frozen=True)
class Effect:
    """Effect of training on the primary metric of one set; base and tuned are means in [0, 1].

    Attributes:
        fit: what training changed in how well the model fits the rows' answers.
        fit_decides: whether that is the verdict; fit_reason: why, or why not.
        show_more: what would let another metric show what the fit shows.
    """

    set: str
    n: int | None
    metric: str
    base: float | None
    tuned: float
    comparison: ComparisonRecord | None
    fit: FitEffectRecord | None = None
    fit_decides: bool = False
    fit_reason: str = ""
    show_more: tuple[str, ...] = ()

    @property
    def tone(self) -> Tone:
        if self.fit is not None and self.fit_decides:
            return FIT_TONES[self.fit.outcome]
        return "neutral" if self.comparison is None else comparison_tone(self.comparison)

    @property
    def beside(self) -> FitEffectRecord | None:
        """Return what the fit shows where the metric that decides shows no clear change."""
        return self.fit if self.fit is not None and self.fit.metric_text else None

    @property
    def fit_phrase(self) -> str:
        """Return what the fit says of the trained model, where it decides or shows more than the metric that does."""
        return lower_first(self.fit.headline) if self.fit is not None and (self.fit_decides or self.beside) else ""

    @property
    def fell(self) -> bool:
        """Return whether training cost something here: a score that fell, or answers that became much less likely."""
        worse = ("worse", "mixed") if self.fit_phrase else ()
        return self.tone == "bad" or (self.fit is not None and self.fit.outcome in worse)

    @property
    def kept(self) -> float | None:
        """Share of the base's score that remains."""
        return self.tuned / self.base if self.base else None


def measure_effects(sets: Sequence[SetScores]) -> list[Effect]:
    """Return the primary metric's change on every set that has a tuned variant."""
    effects = []
    for scores in sets:
        row, tuned = scores.primary, scores.tuned
        if row is None or tuned is None or tuned not in row.scores:
            continue
        base = row.scores["base"].mean if "base" in row.scores else None
        effect = Effect(scores.name, scores.n, row.metric, base, row.scores[tuned].mean, row.comparison)
        if scores.fit is not None:
            effect = replace(
                effect,
                fit=scores.fit_effect,
                fit_decides=scores.fit.decides,
                fit_reason=scores.fit.reason,
                show_more=tuple(scores.fit.show_more),
            )
        effects.append(effect)
    return effects


def judge_run(
    found: Artefacts, training: TrainingCurves | None, changes: Sequence[Effect], tries: Sequence[Attempt]
) -> Verdict:
    """Judge the run by its artefacts alone; unknown facts are reported as unknown."""
    main = next((change for change in changes if change.set == HELD_OUT), None)
    pairs = _held_out_pairs(found)
    if main is None and pairs is None:
        return _without_scores(found, training, tries)
    if pairs is not None:
        headline = HEADLINES[pairs.outcome] if isinstance(pairs, HeldOutPairs) else pairs.headline
        tone, sentences = PAIR_TONES[pairs.outcome], [pairs.text]
        if found.summary and (held_out := found.summary.sets.get(HELD_OUT)) and held_out.pairs:
            sentences += [f"{text[:1].upper()}{text[1:]}." for text in held_out.pairs.sentences]
        if main is not None:
            kind = "chosen" if isinstance(pairs, HeldOutPairs) else "desirable"
            sentences += [f"Their {kind} answers as answers to learn:", *_main_sentences(main)]
    else:
        assert main is not None
        tone, headline, sentences = _judge_scores(main, changes)
    if found.summary and found.summary.gate and not found.summary.gate.passed:
        if found.summary.gate.undecided:
            tone, headline = "warning", f"{headline}, but the score gate is undecided"
        else:
            tone, headline = "bad", f"{headline}, but the score gate did not pass"
    if found.certificate and not found.certificate.passed:
        tone, headline = "bad", f"{headline}, but the weights failed their certificate"
    return Verdict(tone, headline, sentences)


def _held_out_pairs(found: Artefacts) -> HeldOutPairs | HeldOutLabels | None:
    """Return what a run on preferences did to its held-out pairs or labelled answers; None for another run."""
    if found.value("objective.name") in (None, "sft"):
        return None
    lines = [line.model_dump() for line in found.metrics if line.eval_loss is not None]
    events = [event.model_dump() for event in found.events]
    if found.value("objective.name") == "kto":
        return summarize_held_out_labels(lines, events)
    return summarize_held_out_pairs(lines, events)


def _judge_scores(main: Effect, changes: Sequence[Effect]) -> tuple[Tone, str, list[str]]:
    """Judge the scores of the held-out rows and of the other sets."""
    tone, headline = _helped(main)
    others = [change for change in changes if change.set != HELD_OUT]
    fell, rose = [change for change in others if change.fell], [change for change in others if change.tone == "good"]
    if rose and tone == "neutral" and main.comparison is not None and main.beside is None:
        headline = f"No clear effect on the held-out prompts, but a gain on {rose[0].set}"
    if fell:
        tone = "bad" if tone == "bad" else "warning"
        headline += f", {'but' if main.tone == 'good' or main.beside or rose else 'and'} other scores fell"
    sentences = _main_sentences(main)
    sentences += [_other_sentence(change, "gained") for change in rose]
    sentences += [_other_sentence(change, "lost") for change in others if change.fell or change.beside]
    return tone, headline, sentences


def _helped(main: Effect) -> tuple[Tone, str]:
    if main.base is None:
        return "neutral", "Trained and scored, but the base was not scored"
    if main.comparison is None:
        return "neutral", "Trained and scored, but not compared with the base"
    if main.fit is not None and main.fit_decides:
        return main.tone, main.fit.headline
    if main.beside is not None:
        return "warning" if main.beside.outcome in ("worse", "mixed") else "neutral", main.beside.headline
    headlines: dict[Tone, str] = {
        "good": "Training helped",
        "bad": "Training made it worse",
        "neutral": "No clear effect of training",
    }
    return main.tone, headlines[main.tone]


def _main_sentences(main: Effect) -> list[str]:
    """Return the numbers behind the verdict on the held-out rows, and why it is judged so.

    Where the metric that decides and the likelihood disagree, both are told.
    """
    reason = [f"{upper_first(main.fit_reason)}."] if main.fit_reason else []
    if main.fit is None:
        return [_change_sentence(main), *reason]
    if main.fit_decides:
        return [*_fit_sentences(main), *reason]
    agree = main.fit.outcome == "unclear" or main.tone == FIT_TONES[main.fit.outcome]
    numbers = [_change_sentence(main)] if agree else [*_fit_sentences(main), _change_sentence(main)]
    if main.beside is None and not agree:
        numbers.insert(0, f"{main.fit.headline}.")
    if main.show_more:
        numbers.append(f"{upper_first(SHOW_MORE)}: {'; '.join(main.show_more)}.")
    return numbers + reason


def _fit_sentences(main: Effect) -> list[str]:
    """Return the losses behind the verdict, and what the prompt has to do with them."""
    assert main.fit is not None
    where = f"On {main.fit.n:,} held-out rows: " if main.fit.n is not None else "On the held-out rows: "
    return [f"{text}." for text in (where + main.fit.loss_text, upper_first(main.fit.prompt_text)) if text]


def _change_sentence(main: Effect) -> str:
    where = f"On {main.n:,} held-out prompts" if main.n is not None else "On the held-out prompts"
    if main.base is None:
        return f"{where}, the tuned model's {readable_metric(main.metric)} is {percent(main.tuned)}."
    text = f"{where}, {readable_metric(main.metric)} went from {percent(main.base)} to {percent(main.tuned)}"
    if main.comparison is None:
        return f"{text}."
    low, high = main.comparison.ci95
    text += f": {points(main.comparison.difference)} (95{NBSP}% interval {interval(low, high)})."
    return text if main.tone != "neutral" else f"{text} This difference could be due to chance."


def _other_sentence(change: Effect, verb: str) -> str:
    if change.fit is not None and change.fit_phrase:
        return f"On {change.set}, {change.fit_phrase}: {change.fit.loss_text}."
    base = "unknown" if change.base is None else percent(change.base)
    span = f"{readable_metric(change.metric)} {base} before, {percent(change.tuned)} after"
    return f"On {change.set} the model {verb}: {span}."


def upper_first(text: str) -> str:
    """Return the text with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]


def lower_first(text: str) -> str:
    """Return the text with a small letter at its beginning."""
    return text[:1].lower() + text[1:]


def _without_scores(found: Artefacts, training: TrainingCurves | None, tries: Sequence[Attempt]) -> Verdict:
    scoring, train = last_attempt(tries, "evaluate"), last_attempt(tries, "train")
    trained = has_trained_model(found, tries)
    unknown = "Whether training helped is unknown: the held-out set has no scores to compare."
    if has_no_held_out(found):
        unknown = "Whether training helped is unknown: no rows were held out (data.eval is 0)."
    if trained and scoring is not None and scoring.outcome == "failed":
        return Verdict("bad", "Trained; scoring failed", [unknown])
    if trained:
        headline = "Trained on all rows" if has_no_held_out(found) else "Trained, not yet scored"
        return Verdict("neutral", headline, [unknown])
    if train is not None and train.outcome == "failed":
        return Verdict("bad", "Training failed", [train.detail or "No reason is recorded.", unknown])
    if training is not None or train is not None:
        progress = f"{plural(training.last_step, 'step')} logged." if training else "No step has been logged yet."
        return Verdict("neutral", "Training has not finished", [progress])
    return Verdict("neutral", "Nothing has been trained yet", ["The train stage has not run."])


def has_trained_model(found: Artefacts, tries: Sequence[Attempt]) -> bool:
    """Return whether the training finished, or has left a result."""
    train = last_attempt(tries, "train")
    finished = train is not None and train.outcome == "finished"
    return finished or found.run.adapter.is_dir() or found.run.model.is_dir()


def has_no_held_out(found: Artefacts) -> bool:
    """Return whether the run trained on all rows and has no held-out rows."""
    return found.value("data.eval") in ("0", "0.0")


def describe_training(
    found: Artefacts, training: TrainingCurves | None, scores: Sequence[SetScores]
) -> list[tuple[str, str]]:
    """Describe what was trained, as (name, text) pairs; unknown facts are omitted."""
    plan, value = found.plan, found.value
    rows: list[tuple[str, str | None]] = [
        ("Base model", value("model.name_or_path") or (plan.model.name if plan else None)),
        ("What is trained", _what(found)),
        ("Training data", _data(found)),
        ("Recipe", _recipe(found, scores)),
        ("Steps", _steps(found, training)),
        ("Time", _time(training)),
        ("Device", _device(found)),
    ]
    return [(name, text) for name, text in rows if text]


def _what(found: Artefacts) -> str | None:
    value, kind = found.value, found.value("train.method")
    text = "all weights" if kind == "full" else kind
    if kind == "lora":
        kind = "DoRA" if found.is_on("lora.use_dora") else "LoRA"
        kind += ", rank-stabilized" if found.is_on("lora.use_rslora") else ""
        text = f"{kind}, r {value('lora.r')}, alpha {value('lora.lora_alpha')}, on {value('lora.target_modules')}"
    model = found.plan.model if found.plan else None
    if text and model and model.trainable and model.parameters:
        share = f"{percent(model.trainable / model.parameters)} of {count_text(model.parameters)}"
        text += f": {count_text(model.trainable)} parameters ({share})"
    return text


def _data(found: Artefacts) -> str | None:
    rows = found.plan.steps.rows if found.plan else None
    parts = [found.value("data.train"), f"{rows:,} rows" if rows is not None else None]
    mixed = [setting.key.removeprefix("data.mix.") for setting in found.settings or [] if "data.mix." in setting.key]
    parts += [f"with {source}" for source in mixed]
    parts += ["nothing held out"] if has_no_held_out(found) else []
    return ", ".join(part for part in parts if part) or None


def _recipe(found: Artefacts, scores: Sequence[SetScores]) -> str | None:
    evaluations = [
        evaluation for set_scores in scores for evaluation in set_scores.evaluations.values() if evaluation.recipe
    ]
    if evaluations and evaluations[0].recipe_version is not None:
        return f"{evaluations[0].recipe}, version {evaluations[0].recipe_version}"
    return found.value("recipe")


def _steps(found: Artefacts, training: TrainingCurves | None) -> str | None:
    planned = found.plan.steps.total_steps if found.plan else None
    batch = found.value("train.global_batch_size")
    size = f", {batch} examples each" if batch else ""
    if training is None:
        return f"{planned:,} planned{size}" if planned is not None else None
    of = f" of {planned:,} planned" if planned is not None else ""
    rejected = f"; {len(training.rejected)} rejected" if training.rejected else ""
    return f"{training.last_step:,}{of}{size}{rejected}"


def _time(training: TrainingCurves | None) -> str | None:
    if training is None or training.seconds is None:
        return None
    text = f"{duration_text(training.seconds)} in training steps"
    if training.tokens and training.seconds > 0:
        text += f", {training.tokens:,.0f} tokens, {training.tokens / training.seconds:,.0f} per second"
    return text


def _device(found: Artefacts) -> str | None:
    device = found.plan.device if found.plan else None
    if device is None:
        return None
    return f"{device.name}, {bytes_text(device.memory_bytes)}" if device.memory_bytes else device.name
