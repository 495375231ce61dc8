"""PRC: number formats that the device cannot compute, or that are too coarse for their use."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.schema import Config
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
def bf16_is_emulated(config: Config, hardware: HardwareFacts) -> Iterator[Finding]:
    """bfloat16 is requested on a GPU that only emulates it.

    ## What it does
    Compares `model.dtype: bfloat16` with the GPU's compute capability; native support begins at 8.0 (Ampere).

    ## Why it is bad
    PyTorch accepts it and converts back and forth in software: a step can take many times longer than in float16 or
    float32, without a message.

    ## Example
    `dtype: bfloat16` on a T4 (7.5) or a Quadro RTX 6000 (7.5).

    ## Fix
    Leave `model.dtype` at auto, or write `float16` or `float32`; or use a GPU from Ampere on.

    ## Evidence
    A published report on LLM ranking on two T4 with "bf16 compute" took 16 seconds per iteration.
    """
    if config.model.dtype == "bfloat16" and hardware.kind == "cuda" and not hardware.bf16:
        major, minor = hardware.compute_capability or (0, 0)
        yield Finding(
            field="model.dtype",
            message=f"{hardware.name} (compute capability {major}.{minor}) has no bfloat16 arithmetic and emulates it",
            help="leave model.dtype at auto, or write float16 or float32",
            fix=ConfigFix("model.dtype", "auto"),
        )


@rule("PRC002", "fp16-without-loss-scaling", severity="warning")
def fp16_without_loss_scaling(setup: Setup) -> Iterator[Finding]:
    """The run trains in float16 without loss scaling.

    ## What it does
    Looks, in another tool's config, for float16 as the type of the whole run without the `fp16` switch: only that
    switch brings the scaler. SureFit scales the loss wherever `model.dtype` is float16.

    ## Why it is bad
    float16 has no numbers below 6e-8. Gradients of a fine-tuning run reach that range, become zero, and the layers
    they belong to stop learning; large activations overflow to infinity.

    ## Example
    Axolotl's `float16: true` because the GPU has no bfloat16.

    ## Fix
    Write `fp16: true` on GPUs before Ampere, `bf16: true` on all later ones.

    ## Evidence
    Micikevicius et al. 2018 (arXiv 1710.03740): a detection network (Multibox SSD) does not train in float16 without
    loss scaling, and reaches the float32 result with it.
    """
    if setup.tool != "surefit" and setup.dtype == "float16" and not setup.fp16 and not setup.bf16:
        yield Finding(
            field="dtype",
            message=f"{setup.name('dtype')}: float16 without loss scaling, so gradients below 6e-8 become zero",
            help="write fp16: true, which scales the loss, or bf16: true on a GPU from Ampere on",
        )


def _compute_dtype(setup: Setup) -> str | None:
    """Return the type that the run computes in, from its switches or else its dtype; None if both switches are on."""
    if setup.bf16 and setup.fp16:
        return None
    return "bfloat16" if setup.bf16 else "float16" if setup.fp16 else setup.dtype


@rule("PRC003", "adapter-in-float32", severity="info")
def adapter_in_float32(setup: Setup) -> Iterator[Finding]:
    """The adapter is held in float32 while the base computes in 16 bits.

    ## What it does
    Compares the adapter's type with the one the run computes in.

    ## Why it is bad
    Every adapted layer makes a float32 copy of its input, which stays until the backward pass. The result is not worse:
    float32 is PEFT's default because an optimizer that updates 16-bit factors directly rounds small steps away. And
    code that casts by hand runs into two types in one multiplication.

    ## Example
    QLoRA with `bf16: true` and PEFT's `autocast_adapter_dtype=True`.

    ## Fix
    Where the optimizer keeps float32 masters (SureFit's does; DeepSpeed's too), hold the adapter in the base's type:
    `autocast_adapter_dtype=False`. Otherwise leave it: it costs memory, but no quality.

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
            message=f"the adapter is held in float32 and the base is computed in {compute_dtype}: "
            "every adapted layer keeps a float32 copy of its input",
            help=f"hold the adapter in {compute_dtype} (PEFT: autocast_adapter_dtype=False) "
            "if the optimizer keeps float32 masters; else leave it",
        )


@rule("PRC004", "bf16-and-fp16", severity="error")
def bf16_and_fp16(setup: Setup) -> Iterator[Finding]:
    """Both 16-bit types are switched on.

    ## What it does
    Looks at the tool's two switches.

    ## Why it is bad
    The run does not start, or the tool's version decides which of the two is used.

    ## Example
    `bf16: true` in a config that was copied from one for a T4 with `fp16: true`.

    ## Fix
    Keep `bf16` on GPUs from Ampere on, `fp16` on older ones.

    ## Evidence
    transformers 5.23, `TrainingArguments`: "At most one of fp16 and bf16 can be True, but not both".
    """
    if setup.bf16 and setup.fp16:
        yield Finding(
            field="fp16",
            message=f"{setup.name('bf16')} and {setup.name('fp16')} are both on, and a run computes in one of them",
            help=f"keep {setup.name('bf16')} on GPUs from Ampere on, {setup.name('fp16')} on older ones",
        )


@rule("PRC005", "compute-type-mismatch", severity="warning")
def compute_type_mismatch(setup: Setup) -> Iterator[Finding]:
    """The 4-bit layers compute in a different type from the rest of the run.

    ## What it does
    Compares `bnb_4bit_compute_dtype` with the 16-bit type the run trains in.

    ## Why it is bad
    Every 4-bit layer casts its input and its output. In float32 it also dequantizes into twice the memory and
    multiplies outside the tensor cores; in float16 the activations of a bfloat16 run can overflow.

    ## Example
    `load_in_4bit: true` and `bf16: true` with `bnb_4bit_compute_dtype: float32`, which is its default.

    ## Fix
    Write the type the run trains in.

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
            message=f"{setup.name('quant_compute_dtype')} is {layer_dtype} and the run trains in {compute_dtype}: "
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
    """All weights are trained in 16 bits, and the learning rate is too small for them.

    ## What it does
    Where all weights are trained in 16 bits without float32 copies, compares a step (AdamW's are about the learning
    rate) with the distance between neighboring numbers of that type around 0.02, a usual weight. It judges
    Axolotl's and LLaMA-Factory's files, where weights loaded in 16 bits have such copies only with FSDP and DeepSpeed.

    ## Why it is bad
    A step below half that distance is rounded away every time: most weights never move, whatever the number of steps.
    The loss still falls, carried by the small weights.

    ## Example
    Full training with `pure_bf16: true` and `learning_rate: 1e-5`.

    ## Fix
    Keep float32 masters (mixed precision, DeepSpeed's bf16, SureFit), or train an adapter.

    ## Evidence
    measured: of a million weights drawn from normal(0, 0.02), 84 % had not moved after 100 steps of AdamW at 1e-5 in
    bfloat16, 12 % at 1e-4. vllm-project/speculators#765: every norm weight of released models was exactly 1.0;
    NVIDIA-NeMo/Automodel#3444 added float32 masters to a recipe at 6e-6 for the same reason.
    """
    compute_dtype, rate = _compute_dtype(setup), setup.learning_rate
    if setup.adapter != "full" or _has_masters(setup) is not False or compute_dtype not in HALF or not rate:
        return
    threshold = HALF[compute_dtype] * rate
    if 0 < threshold < TYPICAL_WEIGHT:
        yield Finding(
            field="learning_rate",
            message=f"at {rate:g} a step is lost in {compute_dtype} on every weight above {threshold:.2g}, "
            f"and weights are usually about {TYPICAL_WEIGHT:g}; nothing keeps float32 copies of them",
            help="train with float32 masters (mixed precision instead of pure 16 bits), or train an adapter",
        )


@rule("PRC007", "float16-weights-under-scaling", severity="error")
def float16_weights_under_scaling(setup: Setup) -> Iterator[Finding]:
    """The trained weights are float16, but fp16 training needs them in float32.

    ## What it does
    With the fp16 switch on, looks at the type of the trained weights: the adapter, or with full training the base.

    ## Why it is bad
    fp16 training scales the loss, and PyTorch's scaler cannot unscale float16 gradients: the first step fails.

    ## Example
    `fp16: true` for a base loaded with `torch_dtype: float16` and trained in full.

    ## Fix
    Load the trained weights in float32; `fp16` casts them where possible.

    ## Evidence
    measured: torch 2.13's GradScaler raises "Attempting to unscale FP16 gradients". PEFT's troubleshooting page has it
    first: https://huggingface.co/docs/peft/developer_guides/troubleshooting.
    """
    field = "weights_dtype" if setup.adapter == "full" else "adapter_dtype"
    if setup.fp16 and not setup.bf16 and setup.adapter and getattr(setup, field) == "float16":
        yield Finding(
            field=field,
            message=f"{setup.name('fp16')} scales the loss, and the weights that are trained are float16: "
            "the first step fails at unscaling their gradients",
            help="hold what is trained in float32",
        )


@rule("PRC008", "float16-beside-bfloat16", severity="warning")
def float16_beside_bfloat16(config: Config, hardware: HardwareFacts) -> Iterator[Finding]:
    """float16 is requested where bfloat16 is as fast, or on a CPU.

    ## What it does
    Looks for `model.dtype: float16` on a GPU with native bfloat16 (compute capability 8.0 and above) and on a CPU.

    ## Why it is bad
    float16 ends at 65,504. Activations beyond it become infinite, the loss has to be scaled, and a step is skipped
    every time the scale turns out too large. bfloat16 has float32's range at the same speed; and a CPU gains nothing.

    ## Example
    `dtype: float16` from a config for a T4, on an A100.

    ## Fix
    Leave `model.dtype` at auto.

    ## Evidence
    Micikevicius et al. 2018 (arXiv 1710.03740) on why float16 needs scaling; Kalamkar et al. 2019 (arXiv 1905.12322):
    bfloat16 trains the same models without it. huggingface/transformers#5651: an activation of T5 is 66,246, which
    float16 cannot represent; google-research/text-to-text-transfer-transformer#539: it was trained in bfloat16.
    """
    if config.model.dtype == "float16" and (hardware.kind == "cpu" or hardware.bf16):
        better = "float32 is exact there" if hardware.kind == "cpu" else "bfloat16 is as fast and cannot overflow"
        yield Finding(
            field="model.dtype",
            message=f"float16 on {hardware.name}: {better}",
            help="leave model.dtype at auto",
            fix=ConfigFix("model.dtype", "auto"),
        )


@rule("PRC009", "fp8-without-fp8-arithmetic", severity="info")
def fp8_without_fp8_arithmetic(config: Config, hardware: HardwareFacts) -> Iterator[Finding]:
    """The base is stored in FP8, but the device cannot multiply it.

    ## What it does
    Compares `model.quantization: fp8` with the device's compute capability; float8 products begin at 8.9 (Ada).

    ## Why it is bad
    The memory is saved anyway. But every layer's weights are converted back to `model.dtype` for each product, so a
    step takes longer than without quantization.

    ## Example
    `quantization: fp8` on an A100 (8.0).

    ## Fix
    Write `none` if the model fits, `nf4` if memory decides; or use an Ada, Hopper or newer GPU.

    ## Evidence
    NVIDIA's table of tensor-core types: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities.
    A test shows that SureFit's float8 layer multiplies dequantized weights elsewhere.
    """
    if config.model.quantization != "fp8" or (hardware.compute_capability or (0, 0)) >= FP8_CAPABILITY:
        return
    yield Finding(
        field="model.quantization",
        message=f"{hardware.name} does not multiply float8: the weights take half the memory, and are turned back into "
        "16 bits or more for every product",
        help="write none if the model fits, nf4 if memory decides",
    )


@rule("PRC010", "nothing-to-quantise", severity="error")
def nothing_to_quantise(config: Config, model: ModelFacts) -> Iterator[Finding]:
    """The base has no linear layers that could be quantized.

    ## What it does
    Looks, with `model.quantization: nf4` or `fp8`, for a model whose matrices are of another kind than
    `torch.nn.Linear`: GPT-2 and the first GPT, which have transformers' `Conv1D`.

    ## Why it is bad
    Nothing would be saved. bitsandbytes turns such matrices into its own layers all the same, and a merge would then
    start from other weights than those that the adapter was trained on.

    ## Example
    `quantization: nf4` with `openai-community/gpt2`.

    ## Fix
    Write `quantization: none`: the largest of these models has 1.5 billion parameters.

    ## Evidence
    `replace_with_bnb_linear` of transformers 5.23. benchmarks/families.py, 24 November 2026: GPT-2 trained over
    NF4, merged into its weights as they were stored, was off by 3 % of a logit where rounding explains 0.0002 %.
    """
    if config.model.quantization != "none" and model.model_type in CONV1D:
        yield Finding(
            field="model.quantization",
            message=f"{config.model.quantization} quantises linear layers, and a {model.model_type} model has none",
            help="set model.quantization: none",
            fix=ConfigFix("model.quantization", "none"),
        )
