"""PRC: number formats the device cannot compute, or that lose what they are used for."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.schema import Config
from surefit.facts.hardware import HardwareFacts
from surefit.lint.rule import Finding, LintContext, rule


@rule(
    "PRC001",
    "bf16-is-emulated",
    severity="warning",
    needs=(
        Config,
        HardwareFacts,
    ),
)
def bf16_is_emulated(context: LintContext, config: Config, hardware: HardwareFacts) -> Iterator[Finding]:
    """bfloat16 is asked for on a GPU that only emulates it.

    ## What it does
    Compares `model.dtype: bfloat16` with the GPU's compute capability; native support begins at 8.0 (Ampere).

    ## Why it is bad
    PyTorch accepts it and converts back and forth in software: a step can take many times longer than in float16 or
    float32, with nothing that says why.

    ## Example
    `dtype: bfloat16` on a T4 (7.5) or a Quadro RTX 6000 (7.5).

    ## Fix
    Leave `model.dtype` at auto, or write `float32`; or use a GPU from Ampere on.

    ## Evidence
    A published report on LLM ranking on two T4 with "bf16 compute" took 16 seconds per iteration.
    """
    if config.model.dtype == "bfloat16" and hardware.kind == "cuda" and not hardware.bf16:
        major, minor = hardware.compute_capability or (0, 0)
        yield Finding(
            field="model.dtype",
            message=f"{hardware.name} (compute capability {major}.{minor}) has no bfloat16 arithmetic and emulates it",
            help="leave model.dtype at auto, or write float32",
        )


@rule("PRC002", "fp16-without-loss-scaling", severity="warning", needs=(Config,))
def fp16_without_loss_scaling(context: LintContext, config: Config) -> Iterator[Finding]:
    """float16 training without loss scaling.

    ## What it does
    Flags `model.dtype: float16`: SureFit's training step does not scale the loss.

    ## Why it is bad
    float16 has no numbers below 6e-8. Gradients of a fine-tuning run reach that range, become zero, and the layers
    they belong to stop learning; large activations overflow to infinity.

    ## Example
    `dtype: float16` because the GPU has no bfloat16.

    ## Fix
    Write `float32` on GPUs before Ampere, `bfloat16` on all later ones, or leave it at auto.

    ## Evidence
    Micikevicius et al. 2018 (arXiv 1710.03740): a detection network (Multibox SSD) does not train in float16 without
    loss scaling, and reaches the float32 result with it.
    """
    if config.model.dtype == "float16":
        yield Finding(
            field="model.dtype",
            message="float16 without loss scaling: gradients below 6e-8 become zero",
            help="write float32 where the GPU has no bfloat16, or leave it at auto",
        )
