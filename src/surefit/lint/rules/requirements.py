"""STK: rules for requirements files alone, whatever is installed on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from surefit.facts.setup import Setup
from surefit.facts.stack import PACKAGES, StackFacts
from surefit.lint.rule import Finding, rule

OFTEN_USED = frozenset({
    "sentencepiece", "tiktoken", "einops", "evaluate", "tensorboard", "sentence-transformers", "huggingface-hub",
    "matplotlib", "seaborn", "requests", "gradio", "openai", "jsonlines", "optimum", "auto-gptq", "autoawq", "ninja",
})  # fmt: skip
"""Packages that training projects require beside `PACKAGES`."""
REAL = frozenset({
    "dataset", "torchdata", "torchtune", "torchtext", "torchao", "torchrl", "torchmetrics", "pytorch", "triton-windows",
    "pytorch-triton", "outline", "kernel", "vllm-flash-attn", "flash-attention", "tensorboardx", "evaluator", "request",
    "nvidia-triton", "accelerator", "scikit-learn-extra", "transformer", "jsonline", "panda", "peft-utils", "openapi",
    "sentence-transformer", "axolotl-contribs-lgpl", "cupy", "numba", "protobuf3", "tokenizer", "vllm-omni",
})  # fmt: skip
"""Other packages whose names are as similar to these as a misspelled one."""
ALIKE = 0.86
"""Similarity (difflib) from which a name counts as misspelled."""


@rule("STK015", "numpy-left-open", severity="warning")
def numpy_left_open(setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """The requirements pin PyTorch to a release built for NumPy 1, but allow NumPy 2.

    ## What it does
    Looks, in a requirements file, for torch below 2.3 together with numpy that may be 2 or newer.

    ## Why it is bad
    Such a torch release does not mention numpy in its metadata. A new environment gets the newest numpy, unless another
    package limits it: torch then warns at import, and `tensor.numpy()` stops with "Numpy is not available".

    ## Example
    `torch==2.1.2` and `numpy>=1.26.0`.

    ## Fix
    Write `numpy<2`, or torch 2.3 or newer.

    ## Evidence
    Two of five published reports on fine-tuning pinned numpy below 2 after such a failure; pytorch/pytorch#107302.
    """
    old_torch = "torch" in stack.pinned and not stack.allows("torch", ">=2.3")
    if old_torch and "numpy" in stack.pinned and stack.allows("numpy", ">=2") and stack.allows("numpy", "<2"):
        yield Finding(
            field="numpy",
            message=f"{stack.said('torch')} was built for NumPy 1, but {stack.said('numpy')} may install NumPy 2",
            help="write numpy<2, or torch>=2.3",
        )


@rule("STK016", "requirement-is-compiled", severity="warning")
def requirement_is_compiled(setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """The requirements contain flash-attn, which has to be compiled.

    ## What it does
    Looks for flash-attn in a requirements file or in a shell script that installs it, without a URL or an extra index
    for its wheel.

    ## Why it is bad
    The package index has only its source. Compiling takes 20 to 40 minutes, hours without ninja; and its build needs
    torch, which pip's build isolation hides: `pip install -r` stops with "No module named 'torch'".

    ## Example
    `flash-attn` or `flash-attn==2.5.8` among the requirements.

    ## Fix
    Remove it and use sdpa, which has PyTorch's own flash kernel; or name a wheel by its URL (`flash-attn @ https://…`),
    for this Python, torch and CUDA.

    ## Evidence
    A published report on distilling a model to math and code needed 20 to 40 minutes for it, or failed;
    Dao-AILab/flash-attention#1038.
    """
    if "flash-attn" in stack.pinned and "flash-attn" not in stack.wheels:
        yield Finding(
            field="flash-attn",
            message=f"{stack.said('flash-attn')} has no wheels on the package index: compiling takes 20 to 40 "
            f"minutes{'' if 'flash-attn' in stack.in_place else ', and its build does not find torch'}",
            help="remove it and use sdpa, or name a wheel by its URL",
        )


@rule("STK029", "package-misspelt", severity="warning")
def package_misspelt(setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """A requirement looks like a misspelled package name.

    ## What it does
    Compares the names in a requirements file, or in a shell script that installs packages, with the packages that
    fine-tuning projects use. Real packages with similar names are ignored.

    ## Why it is bad
    Usually there is no such package and the installation stops; sometimes somebody else has registered the name, and
    their code runs with your permissions.

    ## Example
    `transfomers==4.51.3`.

    ## Fix
    Correct the name.

    ## Evidence
    https://docs.pypi.org/project_metadata: anybody may register an unused name.
    """
    known_names = {*PACKAGES, *OFTEN_USED}
    for name in stack.pinned:
        matches = get_close_matches(name, known_names, n=1, cutoff=ALIKE) if name not in known_names | REAL else []
        if matches and name.replace("-", "") != matches[0].replace("-", ""):
            yield Finding(
                field=name,
                message=f"{name} is not a known package; did you mean {matches[0]!r}?",
                help=f"write {matches[0]}",
            )
