"""PRC: number formats that the device cannot compute, or that are too coarse for their use."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.schema import SureFitConfig
from surefit.facts.all_linear import CONV1D
from surefit.facts.hardware import HardwareFacts
from surefit.facts.model import ModelFacts
from surefit.facts.setup import Setup
from surefit.lint.rule import ConfigFix, Finding, rule

HALF = {"bfloat16": 2**9, "float16": 2**12}
"""16-bit type → ratio of weight to step from which the step is rounded away: rounding loses a step below half the
distance to the next number, which is at least 2^-9 of a bfloat16 and 2^-12 of a float16."""
FP8_CAPABILITY = (8, 9)
TYPICAL_WEIGHT = 0.02
"""Standard deviation with which most language models' weights are initialized, and which they roughly keep."""


@rule(
    "PRC001",
    "bf16-is-emulated",
    severity="warning",
)
def bf16_is_emulated(config: SureFitConfig, hardware: HardwareFacts) -> Iterator[Finding]:
    """bfloat16 is set on a GPU that only emulates it.

    ## What it does
    Compares `model.dtype: bfloat16` with the GPU's compute capability; native support begins at 8.0 (Ampere).

    ## Why it is bad
    PyTorch silently converts back and forth in software: a step can take many times longer than in float16 or float32.

    ## Example
    `dtype: bfloat16` on a T4 (7.5) or a Quadro RTX 6000 (7.5).

    ## Fix
    Set `model.dtype` to auto, float16 or float32, or use an Ampere or newer GPU.

    ## Evidence
    A published report on LLM ranking on two T4 with "bf16 compute" took 16 seconds per iteration.
    """
    if config.model.dtype == "bfloat16" and hardware.kind == "cuda" and not hardware.bf16:
        major, minor = hardware.compute_capability or (0, 0)
        yield Finding(
            field="model.dtype",
            message=f"{hardware.name} (compute capability {major}.{minor}) has no bfloat16 arithmetic and emulates it",
            help="set model.dtype to auto, float16 or float32",
            fix=ConfigFix("model.dtype", "auto"),
        )


@rule("PRC002", "fp16-without-loss-scaling", severity="warning")
def fp16_without_loss_scaling(setup: Setup) -> Iterator[Finding]:
    """The run trains in float16 without loss scaling.

    ## What it does
    Looks, in another tool's config, for float16 as the dtype of the whole run without `fp16: true`, which enables the
    loss scaler. SureFit always scales the loss if `model.dtype` is float16.

    ## Why it is bad
    float16 has no numbers below 6e-8. Gradients in fine-tuning reach that range and become zero, so the layers stop
    learning; large activations overflow to infinity.

    ## Example
    Axolotl's `float16: true` because the GPU has no bfloat16.

    ## Fix
    Write `fp16: true` on GPUs older than Ampere, `bf16: true` on newer ones.

    ## Evidence
    Micikevicius et al. 2018 (arXiv 1710.03740): a detection network (Multibox SSD) does not train in float16 without
    loss scaling, and reaches the float32 result with it.
    """
    if setup.tool != "surefit" and setup.dtype == "float16" and not setup.fp16 and not setup.bf16:
        yield Finding(
            field="dtype",
            message=f"{setup.name('dtype')}: float16 without loss scaling, so gradients below 6e-8 become zero",
            help="write fp16: true, which scales the loss, or bf16: true on an Ampere or newer GPU",
        )


def _compute_dtype(setup: Setup) -> str | None:
    """Return the type that the run computes in, from its switches or else its dtype; None if both switches are on."""
    if setup.bf16 and setup.fp16:
        return None
    return "bfloat16" if setup.bf16 else "float16" if setup.fp16 else setup.dtype


@rule("PRC003", "adapter-in-float32", severity="info")
def adapter_in_float32(setup: Setup) -> Iterator[Finding]:
    """The adapter is in float32 while the base computes in 16 bits.

    ## What it does
    Compares the adapter's dtype with the compute dtype of the run.

    ## Why it is bad
    Every adapted layer makes a float32 copy of its input, which is kept until the backward pass. It does not reduce
    quality: float32 is PEFT's default because an optimizer that updates 16-bit factors directly rounds small steps
    away. But code that casts by hand can fail with mismatched dtypes in a matrix product.

    ## Example
    QLoRA with `bf16: true` and PEFT's `autocast_adapter_dtype=True`.

    ## Fix
    If the optimizer keeps float32 master weights (as SureFit's and DeepSpeed's do), hold the adapter in the base's
    dtype: `autocast_adapter_dtype=False`. Otherwise keep float32, which costs only memory.

    ## Evidence
    A published report on function calling with QLoRA stopped at "float != bfloat16" until the adapter was cast to
    bfloat16. AgileRL/AgileRL#623 measured 20 to 24 % less peak memory without the copies, and identical gradients.
    """
    compute_dtype = _compute_dtype(setup)
    if setup.tool == "surefit" or setup.adapter == "full":  # SureFit holds the adapter in the base's type
        return
    if setup.adapter_dtype == "float32" and compute_dtype in HALF:
        yield Finding(
            field="adapter_dtype",
            message=f"the adapter is in float32, but the base computes in {compute_dtype}: "
            "every adapted layer keeps a float32 copy of its input",
            help=f"use {compute_dtype} for the adapter (PEFT: autocast_adapter_dtype=False) "
            "if the optimizer keeps float32 master weights; otherwise keep float32",
        )


@rule("PRC004", "bf16-and-fp16", severity="error")
def bf16_and_fp16(setup: Setup) -> Iterator[Finding]:
    """`bf16` and `fp16` are both on.

    ## What it does
    Looks at the tool's two switches.

    ## Why it is bad
    The run does not start, or it depends on the tool's version which of the two is used.

    ## Example
    `bf16: true`, added to a config for a T4 with `fp16: true`.

    ## Fix
    Keep `bf16` on Ampere and newer GPUs, `fp16` on older ones.

    ## Evidence
    transformers 5.23, `TrainingArguments`: "At most one of fp16 and bf16 can be True, but not both".
    """
    if setup.bf16 and setup.fp16:
        yield Finding(
            field="fp16",
            message=f"{setup.name('bf16')} and {setup.name('fp16')} are both on, but a run can use only one of them",
            help=f"keep {setup.name('bf16')} on Ampere and newer GPUs, {setup.name('fp16')} on older ones",
        )


@rule("PRC005", "compute-type-mismatch", severity="warning")
def compute_type_mismatch(setup: Setup) -> Iterator[Finding]:
    """The 4-bit layers compute in a different dtype than the rest of the run.

    ## What it does
    Compares `bnb_4bit_compute_dtype` with the 16-bit dtype of the run.

    ## Why it is bad
    Every 4-bit layer casts its input and its output. In float32 it also dequantizes into twice the memory and does not
    use the tensor cores; in float16 the activations of a bfloat16 run can overflow.

    ## Example
    `load_in_4bit: true` and `bf16: true` with `bnb_4bit_compute_dtype: float32`, which is its default.

    ## Fix
    Write the dtype of the run.

    ## Evidence
    bitsandbytes' documentation (https://huggingface.co/docs/bitsandbytes/v0.43.0/integrations): the default is float32
    for backward compatibility, and bfloat16 is the one to set. The library itself warns of "slow inference or training
    speed" when float16 meets float32.
    """
    compute_dtype, layer_dtype = _compute_dtype(setup), setup.quant_compute_dtype
    if (
        setup.quantization in ("nf4", "fp4")
        and compute_dtype in HALF
        and layer_dtype is not None
        and layer_dtype != compute_dtype
    ):
        yield Finding(
            field="quant_compute_dtype",
            message=f"{setup.name('quant_compute_dtype')} is {layer_dtype}, but the run trains in {compute_dtype}: "
            "every 4-bit layer casts its input and output",
            help=f"write {compute_dtype}",
        )


def _has_masters(setup: Setup) -> bool | None:
    """Return whether the optimizer updates float32 copies; None if neither the tool nor its file says so."""
    if setup.float32_masters is not None:
        return setup.float32_masters
    whole_run = setup.tool in ("axolotl", "llamafactory")  # with TRL, an Accelerate file may still enable FSDP
    sharded = (setup.parallel or "").startswith(("zero", "fsdp"))  # both keep float32 shards
    return False if whole_run and setup.weights_dtype in HALF and not sharded else None


@rule("PRC006", "updates-rounded-away", severity="warning")
def updates_rounded_away(setup: Setup) -> Iterator[Finding]:
    """All weights are trained in pure 16 bits, and the learning rate is too small for that.

    ## What it does
    If all weights are trained in 16 bits without float32 master weights, compares the size of a step (with AdamW about
    the learning rate) with the distance between neighboring numbers around 0.02, a typical weight. Covers configs of
    Axolotl and LLaMA-Factory, which keep float32 master weights only with FSDP and DeepSpeed.

    ## Why it is bad
    A step below half that distance is rounded away every time: most weights never move, whatever the number of steps.
    The loss still falls, because small weights do change.

    ## Example
    Full training with `pure_bf16: true` and `learning_rate: 1e-5`.

    ## Fix
    Keep float32 master weights (mixed precision, DeepSpeed's bf16, SureFit), or train an adapter.

    ## Evidence
    Measured: of a million weights sampled from normal(0, 0.02), 84 % had not changed after 100 steps of AdamW at 1e-5
    in bfloat16, 12 % at 1e-4. vllm-project/speculators#765: every norm weight of released models was exactly 1.0;
    NVIDIA-NeMo/Automodel#3444 added float32 master weights to a recipe at 6e-6 for the same reason.
    """
    compute_dtype, rate = _compute_dtype(setup), setup.learning_rate
    if setup.adapter != "full" or _has_masters(setup) is not False or compute_dtype not in HALF or not rate:
        return
    threshold = HALF[compute_dtype] * rate
    if 0 < threshold < TYPICAL_WEIGHT:
        yield Finding(
            field="learning_rate",
            message=f"at learning rate {rate:g}, {compute_dtype} rounds the step away for every weight above "
            f"{threshold:.2g}, and a typical weight is {TYPICAL_WEIGHT:g}; the run has no float32 master weights",
            help="use float32 master weights (mixed precision instead of pure 16 bits), or train an adapter",
        )


@rule("PRC007", "float16-weights-under-scaling", severity="error")
def float16_weights_under_scaling(setup: Setup) -> Iterator[Finding]:
    """The trained weights are float16, but `fp16` training needs them in float32.

    ## What it does
    With `fp16: true`, looks at the dtype of the trained weights: the adapter, or with full training the base.

    ## Why it is bad
    fp16 training scales the loss, and PyTorch's scaler cannot unscale float16 gradients: the first step fails.

    ## Example
    `fp16: true` for a base loaded with `torch_dtype: float16` and trained in full.

    ## Fix
    Load the trained weights in float32; `fp16` casts them where possible.

    ## Evidence
    Measured: torch 2.13's GradScaler raises "Attempting to unscale FP16 gradients". It is the first entry on PEFT's
    troubleshooting page: https://huggingface.co/docs/peft/developer_guides/troubleshooting.
    """
    field = "weights_dtype" if setup.adapter == "full" else "adapter_dtype"
    if setup.fp16 and not setup.bf16 and setup.adapter and getattr(setup, field) == "float16":
        yield Finding(
            field=field,
            message=f"{setup.name('fp16')} scales the loss, but the trained weights are float16: "
            "unscaling their gradients fails at the first step",
            help="load the trained weights in float32",
        )


@rule("PRC008", "float16-beside-bfloat16", severity="warning")
def float16_beside_bfloat16(config: SureFitConfig, hardware: HardwareFacts) -> Iterator[Finding]:
    """float16 is set on a CPU, or on a GPU on which bfloat16 is as fast.

    ## What it does
    Looks for `model.dtype: float16` on a GPU with native bfloat16 (compute capability 8.0 and above) and on a CPU.

    ## Why it is bad
    The largest float16 number is 65,504. Larger activations become infinite, the loss has to be scaled, and a step is
    skipped every time the scale is too large. bfloat16 has float32's range at the same speed, and on a CPU float16 has
    no advantage.

    ## Example
    A config for a T4 with `dtype: float16`, used on an A100.

    ## Fix
    Set `model.dtype` to auto.

    ## Evidence
    Micikevicius et al. 2018 (arXiv 1710.03740) on why float16 needs scaling; Kalamkar et al. 2019 (arXiv 1905.12322):
    bfloat16 trains the same models without it. huggingface/transformers#5651: an activation of T5 is 66,246, which
    float16 cannot represent; google-research/text-to-text-transfer-transformer#539: it was trained in bfloat16.
    """
    if config.model.dtype == "float16" and (hardware.kind == "cpu" or hardware.bf16):
        better = "float32 is more accurate" if hardware.kind == "cpu" else "bfloat16 is as fast and cannot overflow"
        yield Finding(
            field="model.dtype",
            message=f"float16 on {hardware.name}: {better}",
            help="set model.dtype to auto",
            fix=ConfigFix("model.dtype", "auto"),
        )


@rule("PRC009", "fp8-without-fp8-arithmetic", severity="info")
def fp8_without_fp8_arithmetic(config: SureFitConfig, hardware: HardwareFacts) -> Iterator[Finding]:
    """The base is stored in FP8, but the device has no FP8 arithmetic.

    ## What it does
    Compares `model.quantization: fp8` with the device's compute capability; FP8 matrix products need 8.9 (Ada) or
    newer.

    ## Why it is bad
    It saves memory, but every layer's weights are converted to `model.dtype` for each product, so a step takes longer
    than without quantization.

    ## Example
    `quantization: fp8` on an A100 (8.0).

    ## Fix
    Write `none` if the model fits, `nf4` if memory is short; or use an Ada, Hopper or newer GPU.

    ## Evidence
    NVIDIA's table of tensor-core types: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities. A
    test shows that SureFit's float8 layer multiplies dequantized weights on other devices.
    """
    if config.model.quantization != "fp8" or (hardware.compute_capability or (0, 0)) >= FP8_CAPABILITY:
        return
    yield Finding(
        field="model.quantization",
        message=f"{hardware.name} has no FP8 arithmetic: the weights need half the memory, but are converted to "
        "16 bits or more for every product",
        help="write none if the model fits, nf4 if memory is short",
    )


@rule("PRC010", "nothing-to-quantize", severity="error")
def nothing_to_quantise(config: SureFitConfig, model: ModelFacts) -> Iterator[Finding]:
    """The base has no linear layers to quantize.

    ## What it does
    With `model.quantization: nf4` or `fp8`, looks for a model whose layers are not `torch.nn.Linear`: GPT-2 and the
    first GPT use transformers' `Conv1D`.

    ## Why it is bad
    No memory would be saved. bitsandbytes converts such layers anyway, and a merge would then use different weights
    than the adapter was trained on.

    ## Example
    `quantization: nf4` with `openai-community/gpt2`.

    ## Fix
    Write `quantization: none`: the largest of these models has 1.5 billion parameters.

    ## Evidence
    `replace_with_bnb_linear` of transformers 5.23. benchmarks/families.py, 24 November 2026: GPT-2 trained on NF4 and
    merged into its stored weights was off by 3 % of a logit, while rounding explains 0.0002 %.
    """
    if config.model.quantization != "none" and model.model_type in CONV1D:
        yield Finding(
            field="model.quantization",
            message=f"{config.model.quantization} quantizes linear layers, but a {model.model_type} model has none",
            help="set model.quantization: none",
            fix=ConfigFix("model.quantization", "none"),
        )
