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
    """The requirements pin PyTorch to a release for NumPy 1, and leave NumPy open.

    ## What it does
    Looks, in a requirements file, for a torch below 2.3 beside a numpy that may be 2 or newer.

    ## Why it is bad
    Such a torch does not mention numpy in its metadata. A fresh environment gets the newest numpy, unless another
    package holds it back: torch then warns at import, and `tensor.numpy()` stops with "Numpy is not available".

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
            message=f"{stack.said('torch')} was built for NumPy 1 and does not say so, and {stack.said('numpy')} may "
            "become NumPy 2",
            help="write numpy<2, or torch>=2.3",
        )


@rule("STK016", "requirement-is-compiled", severity="warning")
def requirement_is_compiled(setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """The requirements contain flash-attn, which has to be compiled.

    ## What it does
    Looks for flash-attn in a requirements file or in a shell script that installs it, without a URL or an index of its
    own for its wheel.

    ## Why it is bad
    The package index has only its source. Compiling takes 20 to 40 minutes, hours without ninja; and its build needs
    torch, which pip's build isolation hides from it: `pip install -r` stops with "No module named 'torch'".

    ## Example
    `flash-attn` or `flash-attn==2.5.8` among the requirements.

    ## Fix
    Take it out and use sdpa, which has a flash kernel of its own in PyTorch; or name a wheel by its URL
    (`flash-attn @ https://…`), one for this Python, torch and CUDA.

    ## Evidence
    A published report on distilling a model to math and code waited 20 to 40 minutes for it, or failed;
    Dao-AILab/flash-attention#1038.
    """
    if "flash-attn" in stack.pinned and "flash-attn" not in stack.wheels:
        yield Finding(
            field="flash-attn",
            message=f"{stack.said('flash-attn')} has no wheels on the package index: it is compiled for 20 to 40 "
            f"minutes{'' if 'flash-attn' in stack.in_place else ', and its build does not find torch'}",
            help="take it out and use sdpa, or name a wheel by its URL",
        )


@rule("STK029", "package-misspelt", severity="warning")
def package_misspelt(setup: Setup, stack: StackFacts) -> Iterator[Finding]:
    """A requirement is a letter or two off the name of a package for training.

    ## What it does
    Compares the names in a requirements file, or in a shell script that installs packages, with those of the packages
    that a fine-tuning project uses. Names of other packages that lie as near are left alone.

    ## Why it is bad
    Usually there is no such package and the installation stops; sometimes somebody else has registered the name, and
    what is installed runs with your rights.

    ## Example
    `transfomers==4.51.3`.

    ## Fix
    Correct the name.

    ## Evidence
    https://docs.pypi.org/project_metadata: anybody may register a free name.
    """
    known_names = {*PACKAGES, *OFTEN_USED}
    for name in stack.pinned:
        matches = get_close_matches(name, known_names, n=1, cutoff=ALIKE) if name not in known_names | REAL else []
        if matches and name.replace("-", "") != matches[0].replace("-", ""):
            yield Finding(
                field=name,
                message=f"{name} is no package that is known here; did you mean {matches[0]!r}?",
                help=f"write {matches[0]}",
            )
