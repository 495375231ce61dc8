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
    """Rows are packed, but this attention needs a dense mask to separate examples.

    ## What it does
    Looks at the attention implementation of packed runs. `eager` and `sdpa` do not support document boundaries.

    ## Why it is bad
    transformers builds a block-diagonal mask from the positions, but only without an attention mask and a cache:
    otherwise the documents silently attend to each other. The mask is dense: compute and memory grow with the square of
    the packed row, which cancels what packing saves.

    ## Example
    `packing: true` with `attn_implementation: sdpa`.

    ## Fix
    Use `flash_attention_2` or `flex_attention`, or do not pack; with SureFit set `speed.attention` to auto.

    ## Evidence
    Measured: in packed rows with positions and an all-ones attention mask, the first document changed the logits of the
    second by 5.4 (Llama, sdpa; 0 without that mask). TRL warns of it; huggingface/transformers#46634 and #39194.
    """
    separated = setup.packing and setup.packing_strategy not in WITHOUT_BORDERS
    if separated and not setup.unsloth and setup.attention in MASKED_ONLY:
        # SureFit's batches have no attention mask, and are audited before the first step.
        is_surefit = setup.tool == "surefit"
        yield Finding(
            field="attention",
            message=f"{setup.name('packing')} with {setup.name('attention')} {setup.attention}: only a dense mask can "
            "separate the examples of a row, at quadratic cost"
            + ("" if is_surefit else ", and an attention mask in the batch disables it"),
            help=f"{'set it to auto' if is_surefit else 'use flash_attention_2 or flex_attention'}, or do not pack",
            fix=ConfigFix("speed.attention", "auto") if is_surefit else None,
        )


@rule("PCK002", "wrapped-packing", severity="warning")
def wrapped_packing(setup: Setup) -> Iterator[Finding]:
    """Examples are concatenated without boundaries.

    ## What it does
    Looks for the packing strategy `wrapped`, and for LLaMA-Factory's `packing` without `neat_packing`.

    ## Why it is bad
    Examples attend to the ones before them. `wrapped` also splits the example at the row boundary: an answer without
    its prompt, a prompt without its answer. This is common in pretraining on long text, but harms conversations.

    ## Example
    `packing_strategy: wrapped`.

    ## Fix
    Use best-fit packing (`bfd`; LLaMA-Factory: `neat_packing: true`), which keeps examples whole and separate, or do
    not pack.

    ## Evidence
    Measured: documents in rows packed by TRL 1.16's `wrapped` attend to each other. huggingface/trl#3067.
    LLaMA-Factory's help for `neat_packing`: "Enable sequence packing without cross-attention".
    """
    strategy = setup.packing_strategy
    if setup.packing is False or strategy not in WITHOUT_BORDERS:
        return
    if strategy == "wrapped":
        effect = "wrapped splits examples at the end of a row, and examples attend to the ones before them"
    else:
        effect = "the examples of a row are not separated, and attend to the ones before them"
    yield Finding(
        field="packing_strategy",
        message=f"{setup.name('packing_strategy')}: {effect}",
        help=f"use {'best-fit packing (bfd)' if strategy == 'wrapped' else 'neat_packing: true'}, or do not pack",
    )


@rule("PCK003", "packing-with-cache", severity="error")
def packing_with_cache(setup: Setup) -> Iterator[Finding]:
    """Rows are packed, but the KV cache is on.

    ## What it does
    Looks for `use_cache` in packed runs.

    ## Why it is bad
    With a cache, transformers treats the batch as the start of a generation and does not derive document boundaries
    from the positions: every document attends to all documents before it.

    ## Example
    `packing: true` with `use_cache: true`.

    ## Fix
    Set `use_cache: false`; training does not need the cache.

    ## Evidence
    Measured: logits of a packed row are off by 0.53 with the cache and by 2e-7 without it (transformers 5.23).
    """
    if setup.packing and setup.use_cache:
        yield Finding(
            field="use_cache",
            message=f"{setup.name('packing')} with {setup.name('use_cache')}: examples of a row attend to each other",
            help="set use_cache to false: training does not need the cache",
        )


@rule("PCK004", "packing-mixes-documents", severity="error")
def packing_mixes_documents(setup: Setup, model: ModelFacts) -> Iterator[Finding]:
    """Rows are packed, but this architecture cannot separate their examples.

    ## What it does
    Looks up the model type in a list of types whose code in transformers mixes the documents of a packed row, even with
    restarting positions and without a cache. Axolotl and LLaMA-Factory replace some of that code; for them, only the
    types that remain wrong are reported. docs/packing.md lists the models that SureFit's own attention does not
    support.

    ## Why it is bad
    A recurrent layer carries its state from one document into the next; attention with ALiBi or absolute positions
    ignores boundaries entirely. The logits are wrong from the second document on, and the loss still falls.

    ## Example
    `packing: true` with a Mamba model.

    ## Fix
    Do not pack with this model.

    ## Evidence
    Measured with transformers 5.23 on small random models: a different first document changed the logits of the second
    by 1.3 to 6.6 (their standard deviation is 1.2) in bloom, mpt, xglm, biogpt, opt, rwkv, mamba, mamba2, falcon_mamba,
    recurrent_gemma, jamba, bamba, zamba2, lfm2, falcon_h1, granitemoehybrid, nemotron_h and qwen3_next; and by 0 in
    llama, qwen3, gemma2 and gpt2.
    """
    if setup.tool == "surefit":
        if setup.packing and model.packing_obstacle:
            yield Finding(
                field="packing",
                message=f"{model.name} cannot be packed: {model.packing_obstacle}",
                help="set data.packing to auto, which pads this model",
                fix=ConfigFix("data.packing", "auto"),
            )
        return
    blind_types = BLIND if setup.tool in PATCHING else BLIND | BLIND_UNPATCHED
    if setup.packing and model.model_type in blind_types:
        yield Finding(
            field="packing",
            message=f"{setup.name('packing')} with {model.name}: the code of {model.model_type} models leaks each "
            "example of a row into the next",
            help="do not pack with this model",
        )


@rule("PCK005", "examples-run-together", severity="error")
def examples_run_together(batch: BatchFacts) -> Iterator[Finding]:
    """Examples share a row of the batch, but are not separated.

    ## What it does
    Finds the examples in the tensors of the first micro batches. If several share a row, the batch must separate them
    by boundaries (`cu_seq_lens_q`), by a mask for every pair of tokens, or by positions that restart at each example,
    without an attention mask that overrides them. Positions that do not count up from 0 are reported too.

    ## Why it is bad
    Every example attends to all earlier examples in its row, and its positions are wrong.

    ## Example
    A collator that concatenates rows and passes an attention mask of ones.

    ## Fix
    Pass the boundaries, or positions without an attention mask.

    ## Evidence
    See the measurements of PCK001 and PCK003. huggingface/transformers#46634.
    """
    for name, problem in (("run_together", "are not separated in their row"), ("positions", "have wrong positions")):
        if observation := batch.seen(name):
            example = f" ({observation.examples[0]})" if observation.examples else ""
            yield Finding(
                field="data.train",
                message=f"{observation.rows} of {plural(observation.of, 'example')} in the first batches "
                f"{problem}{example}",
                help="this is a bug in SureFit's batching: please report it, with batch_audit.json",
            )


@rule("PCK006", "varlen-without-packing", severity="error")
def varlen_without_packing(setup: Setup) -> Iterator[Finding]:
    """The attention for packed rows is set, but rows are padded.

    ## What it does
    Looks for `speed.attention: torch_varlen` without packing.

    ## Why it is bad
    This attention separates documents by their boundaries and has no mask, so it would treat padding as text. SureFit
    stops with an error at the start.

    ## Example
    `packing: false` with `attention: torch_varlen`.

    ## Fix
    Set `speed.attention` to auto.

    ## Evidence
    Measured: an attention function registered with transformers without a mask function silently ignored the padding
    mask; the logits were off by 0.60.
    """
    if setup.packing is False and setup.attention == "torch_varlen":
        yield Finding(
            field="attention",
            message=f"{setup.name('attention')} is torch_varlen, which supports packed rows only, but rows are padded",
            help="set it to auto",
            fix=ConfigFix("speed.attention", "auto"),
        )
