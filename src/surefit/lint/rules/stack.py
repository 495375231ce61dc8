"""STK: installed versions, against each other and against what the run requires.

Every rule here judges the environment that the run will use: it reports nothing for a run that is planned for another
machine, or for another tool's config if that tool is not installed. Some rules also judge a requirements file, which is
then the environment.
"""

from __future__ import annotations

from collections.abc import Iterator

from surefit.config.capabilities import BITSANDBYTES
from surefit.config.trackers import TRACKERS
from surefit.core.packaging import install_extra
from surefit.facts.hardware import HardwareFacts
from surefit.facts.setup import Setup
from surefit.facts.stack import StackFacts, UnmetRequirement
from surefit.lint.rule import Finding, LintContext, rule

FIRST_FOR_NUMPY_2 = {
    "pandas": (2, 2, 2), "pyarrow": (16, 0), "scipy": (1, 13), "scikit-learn": (1, 4, 2), "torch": (2, 3),
}  # fmt: skip
"""First releases built for NumPy 2 of the packages that a training run imports: numpy/numpy#26191."""
CORE = ("transformers", "peft", "accelerate", "datasets", "tokenizers", "huggingface-hub")
FAMILY = (*CORE, "trl", "safetensors", "torch", "numpy")
TOOLS = ("axolotl", "llamafactory", "unsloth")
BUILT_UPON = (
    "bitsandbytes",
    "xformers",
    "torchvision",
    "torchao",
    "liger-kernel",
    "deepspeed",
    "triton",
    "unsloth-zoo",
)
"""Packages that `TOOLS` pin beside the libraries of `FAMILY`; compared in requirements files only."""
FLASH = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}
BITS = ("nf4", "fp4", "int8")
MINIMUM_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA → the oldest driver branch that runs it: https://docs.nvidia.com/deploy/cuda-compatibility/."""


def _uses(context: LintContext, setup: Setup, stack: StackFacts) -> bool:
    """Return whether the run would use the packages in `stack`, installed here or pinned in a requirements file."""
    on_this_machine = context.hardware is None or context.hardware.source == "detected"
    return on_this_machine and (setup.tool == "surefit" or setup.package in stack.versions or bool(stack.pinned))


def _unmet_text(unmet: UnmetRequirement, stack: StackFacts) -> str:
    if stack.pinned:
        return f"{stack.said(unmet.package)} requires {unmet.needs}, but the file requires {stack.said(unmet.other)}"
    state = f"{unmet.other} {unmet.version} is installed" if unmet.version else f"{unmet.other} is not installed"
    return f"{unmet.package} {stack.versions[unmet.package]} requires {unmet.needs}, but {state}"


def _unmet_finding(unmet: UnmetRequirement, stack: StackFacts) -> Finding:
    if stack.pinned:
        advice = f"write {unmet.needs}, or use another release of {unmet.package}"
        return Finding(field=unmet.other, message=_unmet_text(unmet, stack), help=advice)
    return Finding(message=_unmet_text(unmet, stack), help=f"pip install '{unmet.needs}' (or a newer {unmet.package})")


@rule("STK001", "built-for-numpy-1", severity="error")
def built_for_numpy_1(context: LintContext, setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """NumPy 2 is installed together with a package that was compiled for NumPy 1.

    ## What it does
    Compares the installed releases of pandas, pyarrow, SciPy, scikit-learn and PyTorch, or the ones that a requirements
    file pins, with their first release built for NumPy 2.

    ## Why it is bad
    Importing such a package stops with "A module that was compiled using NumPy 1.x cannot be run in NumPy 2" or
    "numpy.dtype size changed". datasets and transformers import all of these if they are installed.

    ## Example
    pandas 2.1.4 with numpy 2.4.6.

    ## Fix
    Upgrade the package that the finding names; pin numpy below 2 only if it has no newer release.

    ## Evidence
    The authors of two of five published reports on fine-tuning lost time to it; numpy/numpy#26191 lists the first
    compatible releases.
    """
    if not _uses(context, setup, stack) or "numpy" not in stack.versions or stack.allows("numpy", "<2"):
        return
    state = "required" if stack.pinned else "installed"
    for package, first_release in FIRST_FOR_NUMPY_2.items():
        minimum = ".".join(map(str, first_release))
        if package in stack.versions and not stack.allows(package, f">={minimum}"):
            yield Finding(
                field=package if stack.pinned else None,
                message=f"{stack.said('numpy')} is {state}, but {stack.said(package)} was "
                f"built for NumPy 1 (the first release for NumPy 2 is {minimum})",
                help=f"write {package}>={minimum}, or numpy<2"
                if stack.pinned
                else f"pip install '{package}>={minimum}'",
            )


@rule("STK002", "protobuf-conflict", severity="warning")
def protobuf_conflict(context: LintContext, setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """The tracker's generated code does not match the installed protobuf.

    ## What it does
    Compares protobuf with the requirements of the run's trackers; in a requirements file, with the requirements of the
    pinned tensorboard.

    ## Why it is bad
    Importing the tracker stops with "Descriptors cannot be created directly", which does not name the packages.

    ## Example
    tensorboard 2.10, which requires protobuf<3.20, with protobuf 5.29.

    ## Fix
    Install the protobuf that the finding names, or a newer tracker. `PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python`
    avoids the error, but parsing is slow.

    ## Evidence
    A published report on LLM ranking lists protobuf among its dependency conflicts; tensorflow/tensorboard#5817.
    """
    trackers = {"all"} if stack.pinned else set(setup.trackers or ())
    packages = [package for name in TRACKERS if trackers & {name, "all"} for package in TRACKERS[name].packages[-1:]]
    for unmet in stack.unmet(packages, ("protobuf",)) if _uses(context, setup, stack) else ():
        yield _unmet_finding(unmet, stack)


@rule("STK003", "flash-attention-not-there", severity="error")
def flash_attention_not_there(context: LintContext, setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """The run uses flash-attention, but the package is not installed.

    ## What it does
    Looks for flash-attn (flash-attn-3 for version 3), or for `kernels`, through which transformers loads a substitute.
    SureFit does not use the substitute, because it would be downloaded silently.

    ## Why it is bad
    Loading the model stops with an ImportError. Installing the package is not a quick fix: it has no wheels on PyPI,
    and compiling it takes 20 to 40 minutes, hours without ninja.

    ## Example
    `attn_implementation: flash_attention_2` in a fresh environment.

    ## Fix
    Use sdpa, which has PyTorch's own flash kernel, or `pip install kernels` for a compiled one.

    ## Evidence
    A published report on distilling a model to math and code needed 20 to 40 minutes for it, or failed;
    Dao-AILab/flash-attention#1038.
    """
    package, is_surefit = FLASH.get(setup.attention or ""), setup.tool == "surefit"
    alternatives = {package} if is_surefit else {package, "kernels"}
    no_gpu = context.is_foreign and context.hardware is None  # such a run needs a GPU, and this machine has none
    if package and not no_gpu and _uses(context, setup, stack) and not alternatives & stack.versions.keys():
        yield Finding(
            field="attention",
            message=f"{setup.name('attention')} is {setup.attention}, but {package} is not installed; it has no "
            "wheels, and compiling takes 20 to 40 minutes",
            help="set it to auto: torch has its own flash kernel"
            if is_surefit
            else "write sdpa, or pip install kernels for a compiled substitute",
        )


@rule("STK004", "torch-trio-mismatch", severity="warning")
def torch_trio_mismatch(context: LintContext, setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """torchvision or torchaudio was built for a different torch.

    ## What it does
    Compares the torch that their metadata require, and the build tags (+cpu, +cu130) if both have one. In a
    requirements file: torchvision 0.N belongs to torch 2.(N-15), torchaudio 2.N to torch 2.N.

    ## Why it is bad
    Their compiled operators do not load: "operator torchvision::nms does not exist". Older releases of transformers
    import torchvision if it is installed, and then fail; newer ones continue without it.

    ## Example
    Only torch was upgraded, to 2.13.0, but torchvision 0.20.1 requires torch==2.5.1.

    ## Fix
    Install the three together from one index, or uninstall torchvision and torchaudio: text models need neither.

    ## Evidence
    meta-llama/llama-cookbook#710, pytorch/vision#8985. Measured: transformers 5.23 treats a torchvision that fails to
    import as not installed.
    """
    if not _uses(context, setup, stack):
        return
    for unmet in stack.unmet(("torchvision", "torchaudio"), ("torch",)):
        advice = f"pip install --upgrade {unmet.package} torch, or pip uninstall {unmet.package}"
        if stack.pinned:
            advice = f"write versions that match, or remove {unmet.package}: text models do not need it"
        yield Finding(field=unmet.package if stack.pinned else None, message=_unmet_text(unmet, stack), help=advice)
    for package in ("torchvision", "torchaudio"):
        tags = stack.build("torch"), stack.build(package)
        if all(tags) and tags[0] != tags[1]:
            yield Finding(
                field=package if stack.pinned else None,
                message=f"torch {stack.versions['torch']} and {package} {stack.versions[package]} are different builds",
                help=f"install both from one index, or pip uninstall {package}",
            )


@rule("STK005", "library-skew", severity="warning")
def library_skew(context: LintContext, setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """The installed libraries have incompatible versions.

    ## What it does
    Compares transformers, peft, accelerate, datasets, tokenizers and huggingface-hub (and trl, where another tool is
    used) with the versions that each requires of the others. For a requirements file, compares the pinned releases of
    these and of Axolotl, LLaMA-Factory and Unsloth with their requirements on the package index.

    ## Why it is bad
    transformers raises an error at import; the others fail later, at an argument or an import that moved.

    ## Example
    Only transformers was upgraded, to 5.23, but peft 0.9 requires huggingface_hub<1.

    ## Fix
    Install the release that the finding names. `pip check` reports the same for every package.

    ## Evidence
    The authors of three of five published reports on fine-tuning had to fix deprecated imports and changed arguments
    before training.
    """
    packages: tuple[str, ...] = CORE if setup.tool == "surefit" else (*CORE, "trl")
    requirements: tuple[str, ...] = FAMILY
    if stack.pinned:
        packages, requirements = (*packages, *TOOLS), (*FAMILY, *BUILT_UPON)
    for unmet in stack.unmet(packages, requirements) if _uses(context, setup, stack) else ():
        yield _unmet_finding(unmet, stack)


@rule("STK006", "quantization-without-bitsandbytes", severity="error")
def quantization_without_bitsandbytes(context: LintContext, setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """The run loads the base in 4 or 8 bits, but bitsandbytes is not installed.

    ## What it does
    Looks for bitsandbytes when the quantization is nf4, fp4 or int8.

    ## Why it is bad
    Loading the model stops with "No package metadata was found for bitsandbytes".

    ## Example
    `load_in_4bit: true` in an environment made for full training.

    ## Fix
    `pip install bitsandbytes` (for SureFit, in its clone: `pip install -c constraints.txt '.[quant]'`), or do not
    quantize.

    ## Evidence
    huggingface/diffusers#3194, and a frequent first error in QLoRA notebooks.
    """
    if setup.quantization in BITS and _uses(context, setup, stack) and "bitsandbytes" not in stack.versions:
        yield Finding(
            field="quantization",
            message=f"the base is loaded as {setup.quantization}, but bitsandbytes is not installed",
            help=_install_bitsandbytes(setup),
        )


def _install_bitsandbytes(setup: Setup) -> str:
    return install_extra("quant") if setup.tool == "surefit" else "pip install bitsandbytes"


@rule("STK007", "quantized-cpu-forward-corrupts", severity="error")
def quantized_cpu_forward_corrupts(
    context: LintContext, setup: Setup, stack: StackFacts, hardware: HardwareFacts
) -> Iterator[Finding]:
    """On this CPU, bitsandbytes repacks 4-bit weights, which corrupts a later merge.

    ## What it does
    Looks for a 4-bit base on a CPU with AVX512-BF16 whose weights are read again for a merge. SureFit disables the
    repacking.

    ## Why it is bad
    The first forward pass in eval mode repacks the weights for the CPU kernel. `dequantize()` and merging read the
    bytes in the old layout: the merged model is noise, without an error.

    ## Example
    QLoRA on an Intel Sapphire Rapids machine, evaluated, then merged in the same process.

    ## Fix
    Merge from a newly loaded model, before any forward pass, into the original base, or set `support_avx512bf16_for_cpu
    = False` on every Linear4bit before the first forward pass.

    ## Evidence
    Measured with bitsandbytes 0.50.2: the merged logits are off by up to 9.9, at a standard deviation of 1.1. Moving
    such a model corrupts it the same way: bitsandbytes-foundation/bitsandbytes#2078.
    """
    on_cpu = setup.on_cpu or hardware.kind == "cpu"
    read_again = setup.merge_into in ("dequantized", "quantized")
    affected = "avx512_bf16" in stack.cpu_flags and "bitsandbytes" in stack.versions
    if setup.tool == "surefit":
        return
    if setup.quantization in ("nf4", "fp4") and on_cpu and read_again and affected and _uses(context, setup, stack):
        yield Finding(
            field="quantization",
            message=f"{setup.quantization} on {hardware.name}, which has AVX512-BF16: bitsandbytes "
            f"{stack.versions['bitsandbytes']} repacks the weights at the first forward pass, which corrupts the merge",
            help="merge from a newly loaded model into the original base, in a separate process",
        )


@rule("STK008", "liger-on-cpu", severity="error")
def liger_on_cpu(setup: Setup, hardware: HardwareFacts) -> Iterator[Finding]:
    """Liger's kernels are enabled on a CPU.

    ## What it does
    Looks for Liger in a run on the CPU.

    ## Why it is bad
    The kernels are Triton code for GPUs, and they replace the model's classes in the whole process: the first forward
    pass stops with "Pointer argument cannot be accessed from Triton (cpu tensor?)", even in models without Liger.

    ## Example
    `use_liger_kernel: true`, tried on a laptop.

    ## Fix
    Turn it off for runs without a GPU.

    ## Evidence
    Measured: with liger 0.8.5 a Llama on the CPU fails after the patch; linkedin/Liger-Kernel#401.
    """
    if setup.liger and (setup.on_cpu or (hardware.kind == "cpu" and hardware.source == "detected")):
        yield Finding(
            field="liger",
            message=f"{setup.name('liger')} is on, but the run is on a CPU ({hardware.name})",
            help="turn it off for a run on a CPU",
        )


@rule("STK009", "mlflow-twin-missing", severity="error")
def mlflow_twin_missing(context: LintContext, setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """The installed mlflow-skinny does not match the installed mlflow.

    ## What it does
    If the run logs to MLflow, compares mlflow-skinny with the version that the installed mlflow requires.

    ## Why it is bad
    Importing mlflow fails, or mixes code of two releases, when the run starts to log.

    ## Example
    mlflow 3.18.0, whose mlflow-skinny was never published; it installs only with `--no-deps`.

    ## Fix
    `pip install 'mlflow!=3.18.0'`.

    ## Evidence
    Measured: pip cannot resolve mlflow 3.18.0; 3.17.2 installs and works.
    """
    if {"mlflow", "all"} & set(setup.trackers or ()) and _uses(context, setup, stack):
        for unmet in stack.unmet(("mlflow",), ("mlflow-skinny",)):
            yield Finding(field="trackers", message=_unmet_text(unmet, stack), help="pip install 'mlflow!=3.18.0'")


@rule("STK010", "vllm-beside-training", severity="info")
def vllm_beside_training(context: LintContext, setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """vLLM is installed in the training environment.

    ## What it does
    Looks for vllm, and names the torch and transformers that it requires.

    ## Why it is bad
    vLLM pins one torch release exactly. Installing either of vLLM and the training stack replaces the other's torch,
    and the other then fails to import.

    ## Example
    `pip install vllm`, which replaces torch 2.10 with 2.9.1.

    ## Fix
    Install vLLM in a separate environment; it reads the merged model from disk.

    ## Evidence
    vllm-project/vllm#34224. Measured: vLLM 0.33 pins torch 2.14 and requires transformers below 5.21.
    """
    if "vllm" in stack.versions and not stack.pinned and _uses(context, setup, stack):
        unmet = stack.unmet(("vllm",), ("torch", "transformers"))
        broken = "".join(f"; {_unmet_text(requirement, stack)}" for requirement in unmet)
        yield Finding(
            message=f"vllm {stack.versions['vllm']} is installed in the training environment{broken}",
            help="install vLLM in a separate environment; it reads the merged model from disk",
        )


@rule("STK011", "decoding-library-unfit", severity="info")
def decoding_library_unfit(context: LintContext, setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """An installed library for constrained decoding is broken or incomplete.

    ## What it does
    Looks for lm-format-enforcer up to 0.11.3 with transformers 5, and for outlines; skipped if vllm is installed, which
    depends on them.

    ## Why it is bad
    The first stops with "transformers is not installed". The second ignores integer bounds in a schema, so its answers
    may be invalid.

    ## Example
    A notebook's `pip install lm-format-enforcer`, and transformers 5.23.

    ## Fix
    Use xgrammar, and still validate every answer against the schema.

    ## Evidence
    noamgat/lm-format-enforcer#175. Measured: it does not import on transformers 5; outlines accepts integers out of
    range.
    """
    if "vllm" in stack.versions or stack.pinned or not _uses(context, setup, stack):
        return
    advice = "use xgrammar, and validate every answer against the schema"
    if (0,) < stack.release("lm-format-enforcer") <= (0, 11, 3) and stack.release("transformers") >= (5,):
        version = stack.versions["lm-format-enforcer"]
        yield Finding(message=f"lm-format-enforcer {version} does not import on transformers 5", help=advice)
    if "outlines" in stack.versions:
        yield Finding(message=f"outlines {stack.versions['outlines']} ignores integer bounds in a schema", help=advice)


@rule("STK012", "outside-the-tested-range", severity="info")
def outside_the_tested_range(context: LintContext, setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """A package's version is outside the range that SureFit was tested with.

    ## What it does
    Compares the installed versions with the ranges that SureFit itself requires.

    ## Why it is bad
    It may work, but it is untested: a renamed argument would stop the run, and a changed default would silently alter
    it.

    ## Example
    torch 2.15, while the tests ran with up to 2.13.

    ## Fix
    `pip install -c constraints.txt '.[train]'` installs the versions that passed the test suite.

    ## Evidence
    transformers 5 removed `warmup_ratio`, `group_by_length` and `logging_dir` from TrainingArguments.
    """
    if setup.tool == "surefit" and _uses(context, setup, stack):
        for unmet in stack.unmet(("surefit",), stack.versions.keys()):
            yield Finding(message=_unmet_text(unmet, stack), help=f"pip install '{unmet.needs}'")


@rule("STK013", "driver-too-old", severity="warning")
def driver_too_old(context: LintContext, setup: Setup, stack: StackFacts, hardware: HardwareFacts) -> Iterator[Finding]:
    """The NVIDIA driver is too old for the CUDA version of the installed PyTorch.

    ## What it does
    Compares the kernel module's version with the oldest driver branch that supports the CUDA version of the PyTorch
    build.

    ## Why it is bad
    PyTorch finds no GPU and says "The NVIDIA driver on your system is too old". A data-center GPU with NVIDIA's
    compatibility package is the exception.

    ## Example
    torch built for CUDA 13.0 on a machine with driver 550.

    ## Fix
    Update the driver, or install a PyTorch for an older CUDA (https://pytorch.org/get-started/locally/).

    ## Evidence
    NVIDIA's table of minor version compatibility, https://docs.nvidia.com/deploy/cuda-compatibility/.
    """
    cuda = (stack.torch_cuda or "").partition(".")[0]
    needed = MINIMUM_DRIVER.get(int(cuda)) if cuda.isdecimal() else None
    branch = (stack.driver or "").partition(".")[0]
    if hardware.kind != "cuda" or not needed or not branch.isdecimal() or not _uses(context, setup, stack):
        return
    if int(branch) < needed:
        yield Finding(
            message=f"torch {stack.versions.get('torch', '')} is built for CUDA {stack.torch_cuda}, which needs driver "
            f"{needed} or newer; the installed one is {stack.driver}",
            help="update the NVIDIA driver, or install a torch for an older CUDA",
        )


@rule("STK014", "optimizer-without-bitsandbytes", severity="error")
def optimizer_without_bitsandbytes(context: LintContext, setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """An 8-bit or paged optimizer is set, but bitsandbytes is not installed.

    ## What it does
    Looks for bitsandbytes if the optimizer is one of bitsandbytes'.

    ## Why it is bad
    The run stops when the optimizer is created, after the model has been loaded.

    ## Example
    `optim: adamw_8bit` after `pip install '.[train]'` in the clone of SureFit.

    ## Fix
    `pip install bitsandbytes` (for SureFit, in its clone: `pip install -c constraints.txt '.[quant]'`), or train with
    `adamw`.

    ## Evidence
    transformers 5.23, trainer_optimizer.py, stops at the same place: "You need to install `bitsandbytes` in order to
    use bitsandbytes optimizers".
    """
    if setup.optimizer in BITSANDBYTES and _uses(context, setup, stack) and "bitsandbytes" not in stack.versions:
        yield Finding(
            field="optimizer",
            message=f"{setup.name('optimizer')} {setup.optimizer} needs bitsandbytes, which is not installed",
            help=f"{_install_bitsandbytes(setup)}, or train with adamw",
        )
