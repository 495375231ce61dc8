"""PRF: objectives that learn from preferences (DPO, IPO, ORPO, SimPO, KTO): their numbers, and their reference."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from surefit.facts.families import size_in_name
from surefit.facts.setup import COMPARED, Setup
from surefit.lint.rule import Finding, LintContext, rule

TINY = 20_000_000
"""Parameters below which a model tolerates rates that ruin a large one (SCH003)."""
EPOCHS = 2
"""Passes over the pairs after which held-out accuracy no longer rises in published runs of DPO."""
INERT = 0.8
"""Share of the gradient that is left at a lead of one nat per token from which on the margin does nothing."""


@dataclass(frozen=True)
class KnownRange:
    """The values of a setting that are known to work, and where they come from."""

    least: float
    most: float
    source: str

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}"


_LORA_DPO = KnownRange(1e-6, 1e-4, "LLaMA-Factory's example has 5e-6, Tinker's cookbook 1e-5, ms-swift's example 1e-4")
_LORA_OTHERS = KnownRange(1e-6, 1e-4, "ten times the papers' rates for all weights")
_FULL_DPO = KnownRange(1e-7, 1e-5, "the paper and TRL have 1e-6, Zephyr and Tülu 3 5e-7")
RATES: dict[tuple[str, str], KnownRange] = {
    ("dpo", "lora"): _LORA_DPO,
    ("dpo", "full"): _FULL_DPO,
    ("kto", "lora"): _LORA_DPO,
    ("kto", "full"): KnownRange(1e-7, 1e-5, "TRL recommends 5e-7 to 5e-6 at beta 0.1"),
    ("simpo", "lora"): _LORA_OTHERS,
    ("simpo", "full"): KnownRange(1e-7, 5e-6, "its authors have 3e-7 to 1e-6, and report that 1e-5 ruins the model"),
    ("orpo", "lora"): KnownRange(1e-6, 5e-4, "ten times the paper's 8e-6 for all weights"),
    ("orpo", "full"): KnownRange(5e-7, 5e-5, "the paper has 8e-6"),
}
"""(objective, method) → learning rates that are known to work."""
START_RATES = {("orpo", "lora"): "8e-5", ("orpo", "full"): "8e-6"}
"""(objective, method) → a learning rate to begin with, where it is not 1e-5 for LoRA and 1e-6 for all weights."""
BETAS: dict[str, KnownRange] = {
    "sigmoid": KnownRange(0.005, 1, "the paper has 0.1 and 0.5, Zephyr 0.01"),
    "ipo": KnownRange(0.005, 1, "the paper's τ is 0.1 to 1"),
    "sigmoid_norm": KnownRange(0, 25, "Tülu 3 has 5"),
    "simpo": KnownRange(0, 25, "the paper has 2 to 2.5, and its authors recommend 10"),
    "orpo": KnownRange(0.01, 1, "the paper has 0.1 to 0.25, Zephyr's ORPO 0.05"),
    "kto": KnownRange(0.005, 1, "the paper has 0.1"),
}
"""dpo's loss, or the objective → values of beta that are known to work."""
START_BETAS = {"sigmoid_norm": "5", "simpo": "2"}
_UNTUNED = re.compile(
    r"(?:.*/)?(?:(?:meta-)?llama-[23](?:\.\d)?-\d+b(?:-hf)?|qwen(?:1\.5|2|2\.5)-(?:math-|coder-)?[\d.]+b"
    r"|mistral-7b-v0\.\d|mixtral-8x\d+b-v0\.1|gemma(?:-2)?-\d+b|gemma-3-\d+b-pt|smollm2?-[\d.]+[mb]|gpt2(?:-\w+)?"
    r"|pythia-[\d.]+[mb]|phi-2|olmo-(?:2-)?[\w-]*\d+b|.*-base)",
    re.IGNORECASE,
)
"""Names of models that were trained on text only."""


def remaining_gradient(beta: float, margin: float, lead: float = 1.0) -> float:
    """Return the share of a pair's gradient that is left once the chosen answer leads by `lead` nats per token.

    SimPO's loss (Meng et al. 2024, arXiv 2405.14734) is -log sigmoid(beta * lead - gamma), where the lead is
    the difference of both answers' mean log-probabilities; its gradient is weighted with sigmoid(gamma - beta * lead).
    Length-normalized DPO is the same with gamma = 0.

    >>> round(remaining_gradient(0.1, 0.5), 3), round(remaining_gradient(2.5, 1.375), 3)
    (0.962, 0.307)
    """
    return _sigmoid(margin - beta * lead) / _sigmoid(margin)


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(min(700.0, max(-700.0, -value))))


def _method(setup: Setup) -> str | None:
    return {"lora": "lora", "dora": "lora", "full": "full"}.get(setup.adapter or "")


def _form(setup: Setup) -> str:
    """Return the key of `BETAS`: dpo's loss, or the objective."""
    return (setup.objective_loss or "sigmoid") if setup.objective == "dpo" else setup.objective or ""


def _call(setup: Setup) -> str:
    """Return the objective as messages name it."""
    form = _form(setup)
    return {"simpo": "SimPO", "sigmoid": "DPO", "sigmoid_norm": "length-normalized DPO"}.get(form, form.upper())


@rule("PRF001", "preference-learning-rate", severity="warning")
def preference_learning_rate(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The learning rate is outside the range that is known for the objective.

    ## What it does
    Compares the learning rate with those that papers, authors and trainers use for the objective: for DPO and KTO 1e-6
    to 1e-4 with LoRA and 1e-7 to 1e-5 with all weights, for SimPO up to 5e-6 with all weights, for ORPO up to 5e-4 and
    5e-5. Models under 20 million parameters are exempt, and so are those whose size is in neither their files nor their
    name.

    ## Why it is bad
    A preference term has no likelihood that holds the model: at the rate of supervised fine-tuning it lowers the
    probability of both answers, and the rewards' margin still looks fine. Far below the range an adapter hardly leaves
    zero.

    ## Example
    `rl: dpo` with `adapter: lora` and `learning_rate: 0.0002`, which is usual for supervised fine-tuning.

    ## Fix
    Start at 1e-5 for LoRA and at 1e-6 for all weights; ORPO, which has a likelihood term, at 8e-5 and 8e-6.

    ## Evidence
    DPO: Rafailov et al. 2023 (arXiv 2305.18290), TRL 1.16's DPOConfig, Tunstall et al. 2023 (Zephyr, 2310.16944),
    Lambert et al. 2024 (Tülu 3, 2411.15124). SimPO: "a large learning rate (e.g., 1e-5) can significantly degrade
    performance" (princeton-nlp/SimPO, README). ORPO: Hong et al. 2024 (2403.07691). KTO: TRL's documentation.
    """
    method, rate, model = _method(setup), setup.learning_rate, context.model
    known = RATES.get((setup.objective or "", method or ""))
    parameters = (model.parameters if model else None) or size_in_name(setup.base_model or "")
    if known is None or method is None or rate is None or parameters is None or parameters < TINY or rate in known:
        return
    effect = "both answers become less likely" if rate > known.most else "the model hardly changes"
    trained = "LoRA" if method == "lora" else "all weights"
    start = START_RATES.get((setup.objective or "", method), "1e-5" if method == "lora" else "1e-6")
    yield Finding(
        field="learning_rate",
        message=f"{setup.name('learning_rate')} is {rate:g}; known for {_call(setup)} with {trained} are {known} "
        f"({known.source}): {effect}",
        help=f"start at {start}",
    )


@rule("PRF002", "preference-beta", severity="warning")
def preference_beta(setup: Setup) -> Iterator[Finding]:
    """The strength of the preference term is outside the range that is known for the objective.

    ## What it does
    Compares beta with the values of papers and authors: 0.005 to 1 for DPO, IPO and KTO, 0.01 to 1 for ORPO's λ, up to
    25 for SimPO and length-normalized DPO. Too small a beta for the latter two is PRF003.

    ## Why it is bad
    In DPO a small beta lets the model drift far from the reference, a large one holds it there. In ORPO it is the
    weight beside the likelihood, which it drowns above 1.

    ## Example
    `beta: 5` for DPO, which is a value for length-normalized DPO or SimPO.

    ## Fix
    Write 0.1.

    ## Evidence
    Rafailov et al. 2023 (arXiv 2305.18290), Azar et al. 2023 (2310.12036), Hong et al. 2024 (2403.07691), Ethayarajh et
    al. 2024 (2402.01306), Tunstall et al. 2023 (2310.16944), princeton-nlp/SimPO#50.
    """
    form, beta = _form(setup), setup.beta
    known = BETAS.get(form)
    if known is not None and beta is not None and beta not in known:
        yield Finding(
            field="beta",
            message=f"{setup.name('beta')} is {beta:g}; known for {_call(setup)} are {known} ({known.source})",
            help=f"start at {START_BETAS.get(form, '0.1')}",
        )


@rule("PRF003", "margin-inert", severity="warning")
def margin_inert(setup: Setup) -> Iterator[Finding]:
    """The preference term does not notice which answer is more likely.

    ## What it does
    For SimPO and length-normalized DPO: computes from beta and gamma how much of a pair's gradient is left once the
    chosen answer leads by a whole nat per token, which is more than answers of one model usually differ by. A finding
    begins at 80 %.

    ## Why it is bad
    Both compare mean log-probabilities per token, so beta has to be some twenty times what it is in DPO. With DPO's 0.1
    the sigmoid is flat: every pair pulls alike for the whole run, whether the model already prefers the right answer or
    not.

    ## Example
    SimPO at TRL's and LLaMA-Factory's defaults, beta 0.1 and gamma 0.5: 96 % of the gradient is left, and gamma asks
    for a lead of 5 nats per token.

    ## Fix
    SimPO: beta 2 and gamma 1 (a lead of 0.5 nats per token), or 10 and 2.5; length-normalized DPO: beta 5.

    ## Evidence
    Meng et al. 2024 (arXiv 2405.14734) have beta 2 to 2.5 and gamma 0.3 to 1.6; their authors recommend 10 with
    gamma / beta from 0.25 on (princeton-nlp/SimPO#50). Tülu 3 (2411.15124) has beta 5 for length-normalized DPO. At
    2.5 and 1.375 31 % of the gradient is left.
    """
    normalized = setup.objective == "dpo" and setup.objective_loss == "sigmoid_norm"
    margin = 0.0 if normalized else setup.target_margin if setup.objective == "simpo" else None
    if setup.beta is None or setup.beta <= 0 or margin is None:
        return
    share = remaining_gradient(setup.beta, margin)
    if share >= INERT:
        target = f", gamma {margin:g}: a target of {margin / setup.beta:.3g} nats per token" if margin else ""
        advice = "write 5" if normalized else "write beta 2 and a gamma of 1 (gamma / beta 0.5)"
        yield Finding(
            field="beta",
            message=f"beta {setup.beta:g}{target}: where the chosen answer leads by a whole nat per token, {share:.0%} "
            f"of the gradient is left; {_call(setup)} hardly tells the answers apart",
            help=advice,
        )


@rule("PRF004", "preference-epochs", severity="warning")
def preference_epochs(setup: Setup) -> Iterator[Finding]:
    """The pairs are seen more than twice.

    ## What it does
    Looks at the epochs of DPO, IPO, SimPO and KTO. ORPO, whose likelihood term needs the passes of supervised
    fine-tuning, and runs that end with `max_steps` or early stopping are exempt.

    ## Why it is bad
    After the first pass the model tells the answers of the training pairs apart, and further passes lower the
    likelihood of both. Held-out accuracy stops rising, while the training margin grows.

    ## Example
    `stage: dpo` with `num_train_epochs: 3.0`.

    ## Fix
    Write one epoch, or two.

    ## Evidence
    DPO's paper, Tülu 3 and SimPO train one epoch; Zephyr (Tunstall et al. 2023, arXiv 2310.16944) reports that DPO
    overfits after the first, with a training accuracy near 100 %.
    """
    bounded = setup.max_steps is not None or bool(setup.best_model)
    watched = setup.objective in (*COMPARED, "simpo")
    if watched and not bounded and setup.epochs is not None and setup.epochs > EPOCHS:
        yield Finding(
            field="epochs",
            message=f"{setup.name('epochs')} is {setup.epochs:g}: after one or two passes over the pairs "
            f"{_call(setup)} lowers the likelihood of both answers",
            help="write 1",
        )


@rule("PRF005", "preference-without-sft", severity="warning")
def preference_without_sft(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """Preferences are trained into a model that was not fine-tuned on answers before.

    ## What it does
    For DPO, IPO, SimPO and KTO: looks whether the model is known by its name as one trained on text only (a name such
    as Llama-3.1-8B, without Instruct), or has no chat template, and whether neither an adapter is continued nor a
    template given. ORPO is made for such a model.

    ## Why it is bad
    The model would not give either answer by itself: both have a low probability, the preference term moves what is
    left, and the model that comes out cannot hold a conversation.

    ## Example
    `base_model: meta-llama/Llama-3.2-1B` with `rl: dpo`.

    ## Fix
    Fine-tune on the chosen answers first and continue from that adapter or model, start from the instruct model, or use
    ORPO.

    ## Evidence
    DPO's paper starts from a model fine-tuned on the preferred answers (arXiv 2305.18290, section 4); Hong et al. 2024
    (2403.07691) compare.
    """
    if setup.objective not in (*COMPARED, "simpo") or setup.starts_from or not setup.base_model:
        return
    untuned = _UNTUNED.fullmatch(setup.base_model.rstrip("/")) is not None
    tokenizer = context.tokenizer
    without_template = tokenizer is not None and not tokenizer.chat_template and not setup.chat_template
    if untuned or without_template:
        reason = "was trained on text only, by its name" if untuned else "has no chat template"
        yield Finding(
            field="base_model",
            message=f"{setup.base_model} {reason}: {_call(setup)} needs a model that already answers",
            help="train it on the chosen answers first, name the instruct model, or use ORPO",
        )


@rule("PRF006", "reference-not-the-start", severity="warning")
def reference_not_the_start(setup: Setup) -> Iterator[Finding]:
    """The reference is not the model that training starts from.

    ## What it does
    Looks for an adapter that DPO or KTO continues, where the tool takes the base model without any adapter as the
    reference: LLaMA-Factory without `create_new_adapter` and `ref_model`, ms-swift without `ref_adapters`. Axolotl 0.19
    and TRL copy the adapter, and SureFit stores the log-probabilities of the model at the first step.

    ## Why it is bad
    The rewards then measure what supervised fine-tuning changed as well, they do not begin at 0, and the run is pulled
    back to the base model.

    ## Example
    `stage: dpo` with `adapter_name_or_path: saves/sft`.

    ## Fix
    LLaMA-Factory: `create_new_adapter: true` (merges the first adapter, then trains a new one), or the same adapter as
    `ref_model_adapters` with `ref_model`. ms-swift: the same path as `ref_adapters`. Or merge the adapter first.

    ## Evidence
    hiyouga/LlamaFactory#8459 (open since June 2025; 0.9.5, train/dpo/trainer.py: `disable_adapter()`). ms-swift 4.6,
    RLHFArguments: "set both `--adapters` and `--ref_adapters` to the SFT checkpoint path".
    """
    if setup.objective in COMPARED and setup.reference_is_start is False:
        remedy = {
            "llamafactory": "write create_new_adapter: true, which merges the adapter first",
            "swift": "write the same path as ref_adapters",
        }
        yield Finding(
            field="starts_from",
            message=f"training continues {setup.starts_from}, but the reference is {setup.reference}",
            help=remedy.get(setup.tool, "merge the adapter first"),
        )


@rule("PRF007", "dropout-with-reference", severity="warning")
def dropout_with_reference(setup: Setup) -> Iterator[Finding]:
    """Dropout stays on while the model is compared with a reference.

    ## What it does
    Looks for TRL's `disable_dropout: false` with `lora_dropout` above 0. (TRL, LLaMA-Factory and ms-swift turn dropout
    off by default; in SureFit's own configs it is CFG009.)

    ## Why it is bad
    The model's log-probabilities are then noisy and the reference's are not, summed over hundreds of tokens: the
    rewards measure the noise.

    ## Example
    `disable_dropout: false` with `lora_dropout: 0.05` for DPO.

    ## Fix
    Remove `disable_dropout`.

    ## Evidence
    TRL 1.16, trainer/dpo_config.py: `disable_dropout` is true by default, "in the model and reference model".
    """
    if setup.objective in COMPARED and setup.active_dropout:
        yield Finding(
            field="active_dropout",
            message=f"a dropout of {setup.active_dropout:g} changes the model's log-probabilities, not the reference's",
            help="remove disable_dropout, or set lora_dropout to 0",
        )


@rule("PRF008", "orpo-on-prompts", severity="info")
def orpo_on_prompts(setup: Setup) -> Iterator[Finding]:
    """ORPO's likelihood term covers the prompts too.

    ## What it does
    Says which tokens the likelihood term of ORPO covers, where these are not the answer's alone: in TRL, and in
    Axolotl, which uses it. (ms-swift, which uses it too, passes it labels of the answer.)

    ## Why it is bad
    It need not be: but the same config in LLaMA-Factory or SureFit, where the term covers the answer, is another
    objective, and long prompts outweigh the answers.

    ## Example
    `rl: orpo` in Axolotl.

    ## Fix
    Nothing, or train where the term covers the answer.

    ## Evidence
    TRL 1.16, experimental/orpo/orpo_trainer.py: "orpo chosen nll loss is computed over the full prompt and response".
    LLaMA-Factory 0.9.5, train/dpo/trainer.py: `sft_loss = -chosen_logps`. Hong et al. 2024 (arXiv 2403.07691) define
    the term on the answer.
    """
    if setup.objective == "orpo" and setup.likelihood_on == "all":
        yield Finding(
            field="objective",
            message="ORPO's likelihood term covers prompt and answer here; the paper's, LLaMA-Factory's and SureFit's "
            "covers the answer",
            help="compare such runs with care: the objectives differ",
        )
