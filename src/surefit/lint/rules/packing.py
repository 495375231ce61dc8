"""PCK: packing, which puts several examples into one row."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.core.units import plural
from surefit.facts.batch import BatchFacts
from surefit.facts.model import ModelFacts
from surefit.facts.setup import Setup
from surefit.lint.rule import ConfigFix, Finding, rule

MASKED_ONLY = ("eager", "sdpa")
"""Attention implementations that separate documents only by a mask."""
WITHOUT_BORDERS = ("wrapped", "joined")
"""Packing strategies that let the examples of a row attend to each other with every attention implementation."""
BLIND = frozenset({"mpt", "bloom", "xglm", "rwkv", "mamba", "mamba2", "falcon_mamba", "recurrent_gemma", "biogpt"})
"""Model types whose code ignores document boundaries, or carries a state across them, with every attention."""
BLIND_UNPATCHED = frozenset(
    {"opt", "jamba", "bamba", "zamba2", "lfm2", "falcon_h1", "granitemoehybrid", "nemotron_h", "qwen3_next"}
)
"""Model types whose code does so in transformers itself; some tools replace that code."""
PATCHING = ("axolotl", "llamafactory")


@rule("PCK001", "packing-needs-a-mask", severity="warning")
def packing_needs_a_mask(setup: Setup) -> Iterator[Finding]:
    """Rows are packed, and the attention needs a dense mask to keep examples apart.

    ## What it does
    Looks at the attention implementation where rows are packed. `eager` and `sdpa` see no document boundaries.

    ## Why it is bad
    transformers builds a block-diagonal mask from the positions, but only if no attention mask and no cache come with
    them: otherwise the documents attend to each other, silently. If the mask is built, it is dense: work and memory
    grow with the square of the packed row, and what packing saves is lost again.

    ## Example
    `packing: true` with `attn_implementation: sdpa`.

    ## Fix
    Use `flash_attention_2` or `flex_attention`, or do not pack; with SureFit leave `speed.attention` at auto.

    ## Evidence
    measured: in packed rows with an all-ones attention mask beside their positions, the first document changed the
    logits of the second by 5.4 (Llama, sdpa; 0 without that mask). TRL warns of it; huggingface/transformers#46634 and
    #39194.
    """
    separated = setup.packing and setup.packing_strategy not in WITHOUT_BORDERS
    if separated and not setup.unsloth and setup.attention in MASKED_ONLY:
        # SureFit's batches have no attention mask, and are audited before the first step.
        is_surefit = setup.tool == "surefit"
        yield Finding(
            field="attention",
            message=f"{setup.name('packing')} with {setup.name('attention')} {setup.attention}: only a dense mask can "
            "keep the examples of a row apart, at quadratic cost"
            + ("" if is_surefit else ", and any attention mask in the batch switches it off"),
            help=f"{'leave it at auto' if is_surefit else 'use flash_attention_2 or flex_attention'}, or do not pack",
            fix=ConfigFix("speed.attention", "auto") if is_surefit else None,
        )


@rule("PCK002", "wrapped-packing", severity="warning")
def wrapped_packing(setup: Setup) -> Iterator[Finding]:
    """Examples are concatenated, and nothing keeps them apart.

    ## What it does
    Looks for the packing strategy `wrapped`, and for LLaMA-Factory's `packing` without `neat_packing`.

    ## Why it is bad
    Examples attend to the ones before them. `wrapped` also cuts the ones at the boundary in two: an answer without its
    prompt, a prompt without its answer. For pretraining on long text that is usual; it harms conversations.

    ## Example
    `packing_strategy: wrapped`.

    ## Fix
    Use best-fit packing (`bfd`; LLaMA-Factory: `neat_packing: true`), which keeps examples whole and apart, or do not
    pack.

    ## Evidence
    measured: documents in rows packed by TRL 1.16's `wrapped` attend to each other. huggingface/trl#3067.
    LLaMA-Factory's help for `neat_packing`: "Enable sequence packing without cross-attention".
    """
    strategy = setup.packing_strategy
    if setup.packing is False or strategy not in WITHOUT_BORDERS:
        return
    if strategy == "wrapped":
        effect = "wrapped cuts examples at the end of a row and lets them read the ones before them"
    else:
        effect = "the examples of a row are not kept apart, and read the ones before them"
    yield Finding(
        field="packing_strategy",
        message=f"{setup.name('packing_strategy')}: {effect}",
        help=f"use {'best-fit packing (bfd)' if strategy == 'wrapped' else 'neat_packing: true'}, or do not pack",
    )


@rule("PCK003", "packing-with-cache", severity="error")
def packing_with_cache(setup: Setup) -> Iterator[Finding]:
    """Rows are packed, and the forward pass caches keys and values.

    ## What it does
    Looks for `use_cache` where rows are packed.

    ## Why it is bad
    With a cache, transformers treats the batch as the start of a generation and does not look for document boundaries
    in the positions: every document attends to all those before it.

    ## Example
    `packing: true` with `use_cache: true`.

    ## Fix
    Set `use_cache: false`; a cache is of no use in training.

    ## Evidence
    measured: logits of a packed row are off by 0.53 with the cache and by 2e-7 without it (transformers 5.23).
    """
    if setup.packing and setup.use_cache:
        yield Finding(
            field="use_cache",
            message=f"{setup.name('packing')} with {setup.name('use_cache')}: examples of a row attend to each other",
            help="set use_cache to false: it is of no use in training",
        )


@rule("PCK004", "packing-mixes-documents", severity="error")
def packing_mixes_documents(setup: Setup, model: ModelFacts) -> Iterator[Finding]:
    """Rows are packed, and the architecture cannot keep their examples apart.

    ## What it does
    Compares the model type with those whose code in transformers was found to mix the documents of a packed row, with
    positions that restart and no cache. Axolotl and LLaMA-Factory replace some of that code; for them, only the types
    that remain wrong are reported. docs/packing.md lists what SureFit's own attention cannot serve.

    ## Why it is bad
    A recurrent layer carries its state from one document into the next; attention with ALiBi or absolute positions
    ignores boundaries entirely. The logits are wrong from the second document on, and the loss still falls.

    ## Example
    `packing: true` with a Mamba model.

    ## Fix
    Do not pack with this model.

    ## Evidence
    measured with transformers 5.23 on small random models: a different first document changed the logits of the second
    by 1.3 to 6.6 (their standard deviation is 1.2) in bloom, mpt, xglm, biogpt, opt, rwkv, mamba, mamba2, falcon_mamba,
    recurrent_gemma, jamba, bamba, zamba2, lfm2, falcon_h1, granitemoehybrid, nemotron_h and qwen3_next; and by 0 in
    llama, qwen3, gemma2 and gpt2.
    """
    if setup.tool == "surefit":
        if setup.packing and model.packing_obstacle:
            yield Finding(
                field="packing",
                message=f"{model.name} cannot be packed: {model.packing_obstacle}",
                help="leave data.packing at auto, which pads this model",
                fix=ConfigFix("data.packing", "auto"),
            )
        return
    blind_types = BLIND if setup.tool in PATCHING else BLIND | BLIND_UNPATCHED
    if setup.packing and model.model_type in blind_types:
        yield Finding(
            field="packing",
            message=f"{setup.name('packing')} with {model.name}: the code of {model.model_type} models carries each "
            "example of a row into the next",
            help="do not pack with this model",
        )


@rule("PCK005", "examples-run-together", severity="error")
def examples_run_together(batch: BatchFacts) -> Iterator[Finding]:
    """Examples share a row of the batch, and nothing keeps them apart.

    ## What it does
    Finds the examples in the tensors of the first micro batches. If several share a row, something has to keep them
    apart: boundaries (`cu_seq_lens_q`), a mask for every pair of tokens, or positions that restart at each example with
    no attention mask to override them. Positions that do not count up from 0 are reported too.

    ## Why it is bad
    Every example attends to all those before it in its row, and its positions are those of a longer text.

    ## Example
    A collator that joins rows and passes an attention mask of ones.

    ## Fix
    Pass the boundaries, or positions without an attention mask.

    ## Evidence
    measured: see PCK001 and PCK003. huggingface/transformers#46634.
    """
    for name, problem in (("run_together", "are not kept apart in their row"), ("positions", "have wrong positions")):
        if observation := batch.seen(name):
            example = f" ({observation.examples[0]})" if observation.examples else ""
            yield Finding(
                field="data.train",
                message=f"{observation.rows} of {plural(observation.of, 'example')} in the first batches "
                f"{problem}{example}",
                help="this is a bug in what makes the batches: please report it, with batch_audit.json",
            )


@rule("PCK006", "varlen-without-packing", severity="error")
def varlen_without_packing(setup: Setup) -> Iterator[Finding]:
    """The attention for packed rows is requested, but rows are padded.

    ## What it does
    Looks for `speed.attention: torch_varlen` where examples are not packed.

    ## Why it is bad
    That attention separates documents by their boundaries and takes no mask, so it could not tell padding from text.
    SureFit stops with an error at the start.

    ## Example
    `packing: false` with `attention: torch_varlen`.

    ## Fix
    Leave `speed.attention` at auto.

    ## Evidence
    measured: an attention registered with transformers without a mask of its own silently ignored the padding; the
    logits were off by 0.60.
    """
    if setup.packing is False and setup.attention == "torch_varlen":
        yield Finding(
            field="attention",
            message=f"{setup.name('attention')} is torch_varlen, which reads packed rows only, and rows are padded",
            help="leave it at auto",
            fix=ConfigFix("speed.attention", "auto"),
        )
