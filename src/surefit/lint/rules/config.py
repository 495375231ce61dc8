"""CFG: settings that contradict each other, or have no effect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from surefit.config.inputs import overwritten_inputs
from surefit.config.resolve import KERNEL_PACKAGES
from surefit.config.schema import LoraSection, SureFitConfig
from surefit.core.errors import DataError, MachineError, ModelError, did_you_mean
from surefit.core.packaging import install_extra
from surefit.core.rundir import RunDir
from surefit.facts.hardware import HardwareFacts
from surefit.facts.setup import Setup
from surefit.facts.stack import StackFacts
from surefit.lint.engine import all_rules
from surefit.lint.rule import ConfigFix, Finding, LintContext, find_refused_combinations, rule


@rule("CFG001", "output-is-input", severity="error")
def output_is_input(config: SureFitConfig) -> Iterator[Finding]:
    """The run would write into the directory of its data or its model.

    ## What it does
    Compares `output_dir` with `data.train`, `data.eval` and `model.name_or_path` where those are directories, and what
    the run writes there (`model/`, `eval/`, `checkpoints/`, …) with every path in the config.

    ## Why it is bad
    All .jsonl files of a data directory are read, so the next stage would read `metrics.jsonl` as rows. In a model
    directory the files of two models would mix, and `--overwrite` would delete the base model.

    ## Example
    `data.train: data` with `output_dir: data`.

    ## Fix
    Choose a separate `output_dir`, for example `runs/NAME`.

    ## Evidence
    SureFit's loader reads every .jsonl file of a directory; a test shows it.
    """
    inputs = {
        "data.train": config.data.train,
        "data.eval": config.data.eval,
        "model.name_or_path": config.model.name_or_path,
    }
    for key, value in inputs.items():
        if isinstance(value, str) and _same_directory(config.output_dir, value):
            yield Finding(
                field="output_dir",
                message=f"output_dir {config.output_dir} is also {key}",
                help="choose a separate output_dir, for example runs/NAME",
            )
            return
    for key, path in overwritten_inputs(config, RunDir(Path(config.output_dir))).items():
        yield Finding(
            field="output_dir",
            message=f"the run would overwrite {key} ({path}) with its own files",
            help="choose a separate output_dir, for example runs/NAME",
        )


def _same_directory(one: str, other: str) -> bool:
    paths = [os.path.expanduser(text) for text in (one, other)]
    return all(map(os.path.isdir, paths)) and os.path.samefile(*paths)


@rule("CFG002", "gate-without-condition", severity="warning")
def gate_without_condition(config: SureFitConfig) -> Iterator[Finding]:
    """The gate has no condition, so it can never fail.

    ## What it does
    Looks for `evaluate.gate` with neither `min` nor `not_worse_than`.

    ## Why it is bad
    The gate turns scores into an exit code for a pipeline. Without a condition it always passes.

    ## Example
    `gate: {metric: exact_match}`.

    ## Fix
    Add `min: 0.6`, or `not_worse_than: base`, or remove the gate.

    ## Evidence
    Silently ignored settings were among the pitfalls found in existing training tools when SureFit was designed.
    """
    gate = config.evaluate.gate
    if gate is not None and gate.min is None and gate.not_worse_than is None:
        yield Finding(
            field="evaluate.gate",
            message="the gate has no condition: neither min nor not_worse_than is set, so it always passes",
            help="add min: 0.6 or not_worse_than: base, or remove the gate",
        )


@rule("CFG003", "lora-settings-without-lora", severity="warning")
def lora_settings_without_lora(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """LoRA settings are set although all weights are trained.

    ## What it does
    With `train.method: full`, looks for settings of the section `lora`: `r`, `lora_alpha`, `use_dora`…

    ## Why it is bad
    They have no effect. Either the settings are left over, or LoRA was intended; full training needs far more memory
    and a lower learning rate.

    ## Example
    `train: {method: full}` with `lora: {r: 16}`.

    ## Fix
    Remove the settings, or write `train.method: lora`.

    ## Evidence
    Silently ignored settings were among the pitfalls found in existing training tools when SureFit was designed.
    """
    if config.train.method != "full":
        return
    for name in LoraSection.model_fields:
        if context.is_set(f"lora.{name}"):
            yield Finding(
                field=f"lora.{name}",
                message=f"{name} has no effect: train.method is full",
                help="remove it, or write train.method: lora",
                fix=ConfigFix(f"lora.{name}", None),
            )


@rule("CFG004", "config-unusable", severity="error", suppressible=False)
def config_unusable(context: LintContext) -> Iterator[Finding]:
    """A value in the config names something that does not exist.

    ## What it does
    Reports the errors raised when the config was resolved: an unknown recipe or GPU, for example.

    ## Why it is bad
    No stage can start.

    ## Example
    `recipe: function_caling`, or `hardware.gpu: h1000`.

    ## Fix
    The finding says what to change.

    ## Evidence
    A misspelled name that falls back to a default gives an unintended run; in SureFit it is an error.
    """
    for problem in context.problems:
        # A micro batch that does not divide the batch stops the resolution; BAT001 reports it where both are numbers.
        both_given = context.config is not None and isinstance(context.config.train.global_batch_size, int)
        reported_elsewhere = isinstance(problem, (DataError, ModelError, MachineError)) or (
            problem.code == "E2019" and both_given
        )
        if not reported_elsewhere:
            yield Finding.of(problem)


@rule("CFG005", "suppression-without-effect", severity="warning", suppressible=False)
def suppression_without_effect(config: SureFitConfig) -> Iterator[Finding]:
    """`lint.ignore` names a rule that finds nothing, or one that cannot be ignored.

    ## What it does
    Compares `lint.ignore` with the findings. Rules that were skipped do not count, nor do rules about the machine,
    which may find nothing here and something on another machine. The engine makes these findings itself, after all
    others.

    ## Why it is bad
    A leftover suppression hides the rule's next finding, which may be about something else. A rule about an unusable
    input (DAT001, MOD001, BAT001 …) cannot be ignored, because the run cannot start.

    ## Example
    `lint: {ignore: {SCH001: "the warmup is intended"}}` with `warmup_steps: 0.03`.

    ## Fix
    Remove the code from `lint.ignore`; `surefit check --fix` does.

    ## Evidence
    Other linters report unused suppressions for the same reason: ruff as RUF100
    (https://docs.astral.sh/ruff/rules/unused-noqa/), ESLint as `--report-unused-disable-directives`.
    """
    yield from ()


@rule("CFG006", "suppression-unknown", severity="error", suppressible=False)
def suppression_unknown(config: SureFitConfig) -> Iterator[Finding]:
    """`lint.ignore` names a rule that does not exist.

    ## What it does
    Compares the codes in `lint.ignore` with the codes of all rules.

    ## Why it is bad
    The finding still stops the run, although the config looks as if it were accepted.

    ## Example
    `lint: {ignore: {SHC001: "the warmup is intended"}}`.

    ## Fix
    Write the code as `surefit check` prints it, such as SCH001.

    ## Evidence
    Silently ignored settings were among the pitfalls found in existing training tools when SureFit was designed.
    """
    codes = [rule.code for rule in all_rules()]
    for code in config.lint.ignore:
        if code not in codes:
            yield Finding(
                field=f"lint.ignore.{code}",
                message=f"there is no rule {code!r}{did_you_mean(code.upper(), codes)}",
                help="write the code as `surefit check` prints it; `surefit explain --all` lists all",
            )


@rule("CFG007", "setting-without-effect", severity="warning")
def setting_without_effect(context: LintContext, config: SureFitConfig, setup: Setup) -> Iterator[Finding]:
    """A setting has no effect, because another setting disables it.

    ## What it does
    Looks for `train.decay_steps` without warmup_stable_decay, `train.warmup_steps` with `constant`,
    `checkpoint.best_total_limit` without `metric_for_best_model`, `speed.fused_lora: true` with `train.method: full`,
    and, on a CPU, `speed.kernels: true` and `gradient_checkpointing: offload`.

    ## Why it is bad
    Readers of the config believe that the setting is in force, and tuning it compares identical runs.

    ## Example
    `lr_scheduler_type: cosine` with `decay_steps: 0.1`.

    ## Fix
    Remove the setting, or change the setting that disables it.

    ## Evidence
    Silently ignored settings were among the pitfalls found in existing training tools when SureFit was designed.
    """
    if setup.tool != "surefit":
        return
    train, on_cpu = config.train, context.hardware is not None and context.hardware.kind == "cpu"
    causes = {
        "train.decay_steps": train.lr_scheduler_type != "warmup_stable_decay"
        and f"train.lr_scheduler_type is {train.lr_scheduler_type}, but only warmup_stable_decay has a decay phase",
        "train.warmup_steps": train.lr_scheduler_type == "constant"
        and train.warmup_steps > 0
        and "train.lr_scheduler_type is constant; only constant_with_warmup has a warmup",
        "checkpoint.best_total_limit": config.checkpoint.metric_for_best_model is None
        and "checkpoint.metric_for_best_model is not set",
        "speed.fused_lora": config.speed.fused_lora is True and config.train.method == "full" and "there is no adapter",
        "speed.kernels": config.speed.kernels is True and on_cpu and "fused kernels need a GPU",
        "train.gradient_checkpointing": train.gradient_checkpointing == "offload"
        and on_cpu
        and "on a CPU there is nothing to offload; it does the same as true",
    }
    for dotted, cause in causes.items():
        if cause and context.is_set(dotted):
            yield Finding(
                field=dotted,
                message=f"{dotted.partition('.')[2]} has no effect: {cause}",
                help="write true" if dotted == "train.gradient_checkpointing" else "remove it",
                fix=ConfigFix(dotted, True if dotted == "train.gradient_checkpointing" else None),
            )


@rule("CFG008", "fused-kernels-not-there", severity="error")
def fused_kernels_not_there(
    config: SureFitConfig, setup: Setup, hardware: HardwareFacts, stack: StackFacts
) -> Iterator[Finding]:
    """Fused kernels are enabled, but the GPU or the installed packages do not support them.

    ## What it does
    Looks for `speed.kernels: true` with a GPU older than Ampere, for which Triton does not compile. On a machine with a
    GPU, also checks that Liger and Triton are installed in the releases that the extra `kernels` requires: SureFit
    calls private functions of Liger.

    ## Why it is bad
    Training stops once the model is loaded.

    ## Example
    `speed.kernels: true` on a T4, or after `pip install '.[train]'` in the clone with a Liger release that another tool
    has installed.

    ## Fix
    `pip install -c constraints.txt '.[kernels]'` in the clone, or set it to auto, which uses the kernels only where
    they run.

    ## Evidence
    `auto` requires the same releases; `surefit doctor` names the installed ones.
    """
    requested = setup.tool == "surefit" and config.speed.kernels is True
    if not requested or hardware.kind != "cuda":
        return
    if not hardware.bf16:
        yield Finding(
            field="speed.kernels",
            message=f"fused kernels need an Ampere or newer GPU, but {hardware.name} is older",
            help="set it to auto, which trains without them on this GPU",
            fix=ConfigFix("speed.kernels", "auto"),
        )
    if hardware.source != "detected":
        return
    for package, specifier in KERNEL_PACKAGES.items():
        version = stack.versions.get(package)
        # Nightly builds of torch for GPUs install Triton under another name.
        if stack.allows(package, specifier) if version else package == "triton":
            continue
        state = f"{package} {version} is" if version else "it is not"
        yield Finding(
            field="speed.kernels",
            message=f"fused kernels need {package}{specifier}, but {state} installed",
            help=f"{install_extra('kernels')}; or set it to auto",
        )


@rule("CFG009", "objective-excludes-setting", severity="error", suppressible=False)
def objective_excludes_setting(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """The objective cannot be combined with another setting.

    ## What it does
    With an objective of pairs (dpo, orpo, simpo) or of labelled answers (kto), looks for documents that are cut
    (`data.too_long: truncate`) and for `data.tokenized`; with kto for a parallel mode other than ddp; with dpo and kto,
    which have a reference, for `lora.lora_dropout` above 0 and for `train.neftune_noise_alpha`; with
    `speed.shared_prompts: true` for dropout, noise, flash attention, compiled layers and a mode other than ddp.

    ## Why it is bad
    A document that is cut for the longer answer is not the prompt of the shorter one; kto sets each answer behind
    another row's prompt, too. `surefit prepare` writes single answers without labels. Dropout and noise change the
    model's log-probabilities, and not the reference's: the rewards are then not 0 at the start, so that nothing shows
    whether the reference is right; two answers with one prompt would share its random numbers. Flash attention reads a
    document as one sequence. The other modes have not been shown to train such rows as one process does.

    ## Example
    `objective: dpo` with `lora: {lora_dropout: 0.05}`.

    ## Fix
    The finding says what to change.

    ## Evidence
    `config/capabilities.py` has a reason for each row. TRL's `DPOConfig.disable_dropout` turns dropout off, too; the
    DPO paper's closed form of the first loss, ln 2, holds only without it.
    """
    yield from find_refused_combinations(context, config, "CFG009")
