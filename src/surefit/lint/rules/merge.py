"""MRG: whether the trained adapter can be merged without loss."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from surefit.core.units import shell_quote
from surefit.facts.model import original_of, stored_by_name
from surefit.facts.setup import Setup
from surefit.lint.rule import Finding, LintContext, rule
from surefit.lint.rules.adapter import FROZEN_STORAGE, STORED_QUANTIZED

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
ABSOLUTE = re.compile(r"[/~\\]|\.{1,2}[/\\]|[A-Za-z]:[/\\]")
"""Beginnings of paths that cannot be hub ids: /, ~, ./, ../, and C:\\ on Windows."""


@rule("MRG001", "merge-into-quantized", severity="error")
def merge_into_quantised(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The adapter will be merged into 4-bit or 8-bit weights.

    ## What it does
    Checks whether the adapter is merged into a quantized base, or into one whose files are quantized.

    ## Why it is bad
    The sum of weight and update is rounded to one of 16 or 256 values. Most of an adapter's update is smaller than the
    distance between two of them, so the merged model is not the one that was trained and scored.

    ## Example
    LoRA on `load_in_4bit: true`, then `merge_and_unload()` on the same model.

    ## Fix
    Merge into the dequantized base: the weights the adapter was trained on, written out in 16 bits.

    ## Evidence
    A published report on distillation saw its ties with the baseline fall from 70 % to 28 % after such a merge.
    Measured: logit error 0.52 in place, 0.027 into the dequantized base (standard deviation of the logits 1.1).
    huggingface/transformers#31293, huggingface/peft#2321.
    """
    if setup.adapter == "full":
        return
    stored_as = _base_quantization(context)
    if setup.merge_into == "quantized":
        field, target = "merge_into", f"the {_bits(setup)} base it was trained on"
    elif setup.merge_into == "original" and stored_as in STORED_QUANTIZED and setup.tool != "surefit":
        # MOD012 reports this in a config of SureFit
        field, target = "base_model", f"{setup.base_model or 'a base'}, whose files are quantized ({stored_as})"
    else:
        return
    yield Finding(
        field=field,
        message=f"the adapter will be merged into {target}: rounding loses most of the update",
        help="merge into the dequantized base, or serve base and adapter side by side",
    )


def _base_quantization(context: LintContext) -> str | None:
    """Return the quantization method of the base's own files; None if they are not quantized or not known."""
    return context.model.quantization if context.model else None


def _bits(setup: Setup) -> str:
    return setup.quantization if setup.quantization in FROZEN_STORAGE else "quantized"


@rule("MRG002", "merge-into-another-base", severity="info")
def merge_into_another_base(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The adapter is trained on a quantized base, but merged into the original one.

    ## What it does
    Compares the quantization during training with the base of the merge.

    ## Why it is bad
    The adapter also learned to correct quantization errors, which the original base does not have. The merged model is
    usually as good, but it is not the model that was trained: score it again.

    ## Example
    QLoRA (`load_in_4bit: true`), merged into the 16-bit weights from the hub.

    ## Fix
    Merge into the dequantized base, or also score the merged model.

    ## Evidence
    Measured: logit error 0.41 into the original base, 0.027 into the dequantized one (standard deviation of the logits
    1.1), with the same loss on the task.
    """
    if setup.tool == "surefit":  # SureFit measures the difference that its merge makes, and decides by it
        return
    into_original = setup.merge_into == "original" and _base_quantization(context) not in STORED_QUANTIZED
    if setup.adapter != "full" and into_original and setup.quantization in FROZEN_STORAGE:
        yield Finding(
            field="merge_into",
            message=f"the adapter is trained on a base in {setup.quantization}, but merged into the original one: "
            "the merged model is not the one that was trained",
            help="merge into the dequantized base, or also score the merged model",
        )


@rule("MRG005", "adapter-of-quantized-files", severity="warning")
def adapter_of_quantised_files(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The adapter's base model has quantized files.

    ## What it does
    For an adapter_config.json, looks at `quantization_config` in the base's config.json; if that cannot be read, at the
    suffix of the base's name (`-bnb-4bit`, `-GPTQ`, `-AWQ`).

    ## Why it is bad
    Served with that base, the adapter behaves as trained. But it cannot be merged into that base's files, which hold
    packed blocks, not matrices. `merge_and_unload` rounds the sum to 16 values per block; loading the base in 16 bits
    stops with a size mismatch.

    ## Example
    `"base_model_name_or_path": "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit"`.

    ## Fix
    Serve the adapter with its base. If the base is in bitsandbytes' NF4, the adapter can be merged into the original
    model: `surefit merge ADAPTER --base ORIGINAL --trained-on nf4` measures the difference. The measurement is not
    exact for bases that keep some layers in 16 bits (unsloth's "dynamic" ones).

    ## Evidence
    A published distillation project trained on a 4-bit base and merged: ties against its baseline fell from 70 % to
    28 %.
    """
    model, name = context.model, setup.base_model or "the base"
    quantization = model.quantization if model else stored_by_name(name)
    if setup.tool != "peft" or quantization not in STORED_QUANTIZED:
        return
    merge_command = (
        f", or `surefit merge ADAPTER --base {shell_quote(original_of(name) or 'ORIGINAL')} --trained-on nf4`"
    )
    nf4 = model.stored_nf4 if model else name.lower().endswith("-bnb-4bit")
    yield Finding(
        field="base_model",
        message=f"{name} has quantized files ({quantization}): the adapter cannot be merged into them",
        help=f"serve the adapter with its base{merge_command if nf4 else ''}",
    )


@rule("MRG003", "adapter-without-revision", severity="info")
def adapter_without_revision(setup: Setup) -> Iterator[Finding]:
    """The adapter names its base model, but not the revision.

    ## What it does
    Looks at `base_model_name_or_path` and `revision` in an adapter_config.json. Only hub names are checked.

    ## Why it is bad
    An adapter is a difference from its base. When the base on the hub changes, the new version is loaded silently, and
    the result is a model that was never trained.

    ## Example
    `"base_model_name_or_path": "org/model", "revision": null`.

    ## Fix
    Set `revision` to the base's commit.

    ## Evidence
    PEFT's documentation of `get_peft_model`: "If this isn't set, the saved peft model will load the `main` revision for
    the base model".
    """
    base = setup.base_model
    if setup.tool != "peft" or not base or setup.base_revision or os.path.isdir(base):
        return
    if HUB_ID.fullmatch(base) and not base.startswith("surefit/"):
        yield Finding(
            field="base_model",
            message=f"the adapter does not name the revision of {base} that it was trained on",
            help=f"set revision to the commit of {base} that it was trained on",
        )


@rule("MRG004", "adapter-base-is-a-path", severity="info")
def adapter_base_is_a_path(setup: Setup) -> Iterator[Finding]:
    """The adapter names its base model by a local path.

    ## What it does
    Looks for a path in `base_model_name_or_path` of an adapter_config.json.

    ## Why it is bad
    The adapter cannot be loaded elsewhere, and on another machine the path may contain a different model.

    ## Example
    `"base_model_name_or_path": "/data/models/llama"`.

    ## Fix
    Write the base's hub name, and its commit into `revision`.

    ## Evidence
    Loaders mistake the path for a hub id and fail with "Repo id must be in the form 'repo_name' or
    'namespace/repo_name'": huggingface/text-generation-inference#1334, predibase/lorax#311 for a base that was moved.
    """
    base = setup.base_model
    if setup.tool == "peft" and base and (ABSOLUTE.match(base) or os.path.isdir(base)):
        yield Finding(
            field="base_model",
            message=f"the adapter's base is {base}, a path on the machine it was trained on",
            help="write the base's hub name, and its commit into revision",
        )
