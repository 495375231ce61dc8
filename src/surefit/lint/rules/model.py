"""MOD: base models that cannot be used as the config says."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from surefit.config.schema import SureFitConfig
from surefit.core.errors import ModelError, did_you_mean
from surefit.facts.all_linear import closed_to_lora, ends_with
from surefit.facts.environment import EnvironmentFacts
from surefit.facts.families import family_of
from surefit.facts.hardware import HardwareFacts
from surefit.facts.memory_formula import OUTPUT_HEADS
from surefit.facts.model import ModelFacts, open_copy, original_of
from surefit.facts.module_names import HEADS, layers_of
from surefit.facts.setup import Setup
from surefit.facts.stack import StackFacts
from surefit.facts.tokenizer import known_tokens
from surefit.lint.rule import Finding, LintContext, find_refused_combinations, rule
from surefit.lint.rules.adapter import STORED_QUANTIZED

NAME = "model.name_or_path"
TARGETS = "lora.target_modules"
MISSPELT = 0.8
"""Similarity (difflib) from which a name is a misspelled layer name: q_prj of q_proj, but not in_proj of v_proj."""


@rule("MOD001", "model-unusable", severity="error", suppressible=False)
def model_unusable(context: LintContext) -> Iterator[Finding]:
    """The base model cannot be found or read.

    ## What it does
    Reports errors raised when the model was looked up: no such directory or hub id, no config.json, a damaged weight
    file.

    ## Why it is bad
    Training would stop at the same place, on some machines after a long download.

    ## Example
    `name_or_path: meta-lama/Llama-3.2-3B`.

    ## Fix
    The finding says what to change.

    ## Evidence
    Truncated downloads and Git LFS pointers in place of weights are frequent in transformers' issues.
    """
    for problem in context.problems:
        if isinstance(problem, ModelError):
            yield Finding.of(problem, NAME)


@rule("MOD002", "no-weights", severity="error", suppressible=False)
def no_weights(model: ModelFacts) -> Iterator[Finding]:
    """The model directory has a config.json but no weights.

    ## What it does
    Looks for `model.safetensors`, or the files of `model.safetensors.index.json`, in a local model directory.

    ## Why it is bad
    Training stops at loading.

    ## Example
    A model repository that was cloned without Git LFS.

    ## Fix
    Download the weights: `hf download NAME --local-dir DIRECTORY`.

    ## Evidence
    The most common question about loading a local model: "no file named model.safetensors found in directory".
    """
    if model.source == "local" and not model.has_weights and not model.pickle_only:
        yield Finding(
            field=NAME,
            message=f"{model.path} has a config.json but no weights (model.safetensors)",
            help="download the weights into it: hf download NAME --local-dir DIRECTORY",
        )


@rule("MOD013", "model-type-unknown", severity="error")
def model_type_unknown(
    context: LintContext, config: SureFitConfig, model: ModelFacts, stack: StackFacts
) -> Iterator[Finding]:
    """The installed transformers does not know this type of model.

    ## What it does
    Looks for config.json's `model_type` in the tables of the installed transformers. Skipped for GGUF files, for models
    that bring their own code with `model.trust_remote_code`, and for another tool's config.

    ## Why it is bad
    Training stops at loading, with transformers' advice to install it from source.

    ## Example
    A model that was published last week, with last month's transformers.

    ## Fix
    Install the release that config.json names (`transformers_version`), or a newer one.

    ## Evidence
    "The checkpoint you are trying to load has model type … but Transformers does not recognize this architecture" is
    the usual error for a new model.
    """
    kind, version = model.model_type, stack.versions.get("transformers")
    custom_code = model.custom_code and config.model.trust_remote_code
    if (
        context.is_foreign
        or custom_code
        or model.gguf
        or not kind
        or not stack.model_types
        or kind in stack.model_types
    ):
        return
    if model.custom_code:
        files = ", ".join(model.code_files)
        advice = f"it comes with its own code ({files}): read it, then set model.trust_remote_code: true"
    elif model.written_by and model.written_by != version:
        advice = f"install transformers {model.written_by}, which wrote its config.json"
    else:
        advice = "correct model_type in config.json, or install a newer transformers"
    yield Finding(field=NAME, message=f"transformers {version} does not know the model type {kind!r}", help=advice)


@rule("MOD003", "pickled-weights", severity="error", suppressible=False)
def pickled_weights(model: ModelFacts) -> Iterator[Finding]:
    """The weights are in a format that can execute code on loading.

    ## What it does
    Looks for `pytorch_model*.bin`, `*.pt`, `*.pth` or `*.ckpt` in a model that has no safetensors files.

    ## Why it is bad
    Such files are Python pickles: the author of the file decides what runs on your machine. SureFit does not load them.

    ## Example
    A model uploaded before 2023 with only `pytorch_model.bin`.

    ## Fix
    Use a revision with safetensors (the hub's conversion bot offers it in a pull request), or convert the file on an
    isolated machine.

    ## Evidence
    CVE-2025-32434: arbitrary code ran from a checkpoint even with `torch.load(weights_only=True)`.
    """
    if model.pickle_only:
        yield Finding(
            field=NAME,
            message=f"{model.name} has only pickled weights (.bin, .pt), which can execute code on loading",
            help="use a revision of the model that has .safetensors files",
        )


@rule("MOD004", "trust-remote-code", severity="warning")
def trust_remote_code(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """Python code from the model repository will run on this machine.

    ## What it does
    Flags `model.trust_remote_code: true`, also if the model has no code. In another tool's config, only if the model is
    on this machine.

    ## Why it is bad
    The code runs with your permissions, and unless a revision is pinned, it may have changed since you read it.

    ## Example
    `trust_remote_code: true`, copied from a model card, for an architecture that transformers has long included.

    ## Fix
    Remove it. If the model needs it, read the code, then pin `model.revision` to the commit that you read.

    ## Evidence
    transformers' documentation recommends pinning a revision with this setting.
    """
    section = config.model
    if not section.trust_remote_code or (context.is_foreign and context.model is None):
        return  # it is unknown whether the model brings code
    if context.model is not None and not context.model.custom_code:
        message, advice = "trust_remote_code is on, but this model has no code", "remove it: it is not needed"
    elif section.revision is None:
        message = "the model's own Python code will run, in its latest version on the hub"
        advice = "read that code and pin model.revision to the commit you read"
    else:
        message, advice = (
            f"the model's own Python code of revision {section.revision} will run",
            "make sure you have read it",
        )
    yield Finding(field="model.trust_remote_code", message=message, help=advice)


@rule("MOD005", "gated-without-token", severity="warning")
def gated_without_token(model: ModelFacts, hardware: HardwareFacts, environment: EnvironmentFacts) -> Iterator[Finding]:
    """The model is gated, but no Hugging Face token is set.

    ## What it does
    Looks for a gated model whose weights are not on this machine, without a Hugging Face token. Skipped if the config
    names a GPU that this machine does not have: then the run is planned for another machine.

    ## Why it is bad
    The hub denies the download, and training stops.

    ## Example
    `meta-llama/Llama-3.2-3B-Instruct` on a new machine.

    ## Fix
    Accept the license on the model's page, create a token, and put `HF_TOKEN=…` into the environment or a `.env` file.
    Or use the ungated copy that the finding names, if one is known; the same license applies.

    ## Evidence
    Two of five published reports on fine-tuning stopped at a gated model; one had no fallback.
    """
    absent = not model.has_weights and model.source != "local"
    if model.gated and absent and not environment.hub_token and hardware.source == "detected":
        copy = open_copy(model.name)
        yield Finding(
            field=NAME,
            message=f"{model.name} is gated, but no Hugging Face token is set",
            help=f"accept its license at https://huggingface.co/{model.name} and set HF_TOKEN (environment or .env)"
            + (f"; or use an ungated copy of the model: {copy}" if copy else ""),
        )


@rule(
    "MOD006",
    "no-chat-template",
    severity="error",
)
def no_chat_template(context: LintContext, config: SureFitConfig, model: ModelFacts) -> Iterator[Finding]:
    """The rows are conversations, but the model has no chat template.

    ## What it does
    Looks for a chat template in the tokenizer's files if the recipe or the data's columns yield conversations. In
    another tool's config, only if that tool renders the rows with the model's own template.

    ## Why it is bad
    There is no standard way to turn messages into this model's tokens. A guessed format trains, but other users of the
    model cannot know it.

    ## Example
    A base model (`meta-llama/Llama-3.2-1B`) with data in the format `messages`.

    ## Fix
    Use the model's instruct variant. Or train the base with a template of your choice: `model.chat_template: plain`,
    which writes the roles as words and ends answers with the model's EOS token, or a Jinja file. The template is saved
    with the result.

    ## Evidence
    transformers dropped its default templates in 2024 because they silently did not match the models.
    """
    if model.has_chat_template is False and makes_conversations(context, config):
        yield Finding(
            field=NAME,
            message=f"{model.name} has no chat template, but the rows are conversations",
            help="use the instruct variant, or set model.chat_template: plain (roles in words), chatml, llama3 or a "
            "Jinja file",
        )


def makes_conversations(context: LintContext, config: SureFitConfig) -> bool:
    """Return whether the rows are rendered with a chat template."""
    if context.is_foreign and context.setup is not None:
        # Other tools have their own prompt formats for rows of instructions, and their own chat templates.
        return bool(context.setup.conversations) and context.setup.chat_template is None
    if context.columns or config.data.format in ("messages", "prompt_completion", "alpaca", "sharegpt", "gemini"):
        return True
    if context.examples is not None and config.data.format == "auto":
        return context.examples.conversations > 0
    columns = context.dataset.columns if context.dataset else {}
    return any(name in columns for name in ("messages", "conversations", "contents", "instruction", "prompt"))


@rule(
    "MOD007",
    "longer-than-context",
    severity="warning",
)
def longer_than_context(setup: Setup, model: ModelFacts) -> Iterator[Finding]:
    """Training examples may exceed the model's context length.

    ## What it does
    Compares `data.max_length` with the context length in the model's config.json, including a YaRN extension.

    ## Why it is bad
    The model was not trained on such positions: quality degrades without an error. With learned position embeddings the
    run stops at the first row that is too long.

    ## Example
    `max_length: 8192` for Llama-2, whose context is 4,096.

    ## Fix
    Lower `max_length`, or use a model with a longer context.

    ## Evidence
    Press et al. 2022 (arXiv 2108.12409), figure 1: perplexity explodes beyond the training length.
    """
    limit, max_length = model.max_position_embeddings, setup.max_length
    if limit is not None and max_length is not None and max_length > limit and setup.length_unit != "characters":
        yield Finding(
            field="max_length",
            message=f"{setup.name('max_length').rpartition('.')[2]} {max_length:,} exceeds the context of "
            f"{limit:,} tokens of {model.name}",
            help=f"write {limit} or less",
        )


@rule(
    "MOD008",
    "target-modules-match-nothing",
    severity="error",
)
def target_modules_match_nothing(context: LintContext, setup: Setup, model: ModelFacts) -> Iterator[Finding]:
    """A name in `target_modules` matches no layer of this model.

    ## What it does
    Compares each name with the model's linear layers, as PEFT does: with the full dotted name or its end. In another
    tool's config in which some names match, reports only names that look misspelled, because such lists often serve
    several models. PEFT matches a single string as a regular expression against full module names, and a layer's short
    name matches none.

    ## Why it is bad
    If no name matches, adding the adapter fails. If some match, the run trains fewer factors than intended.

    ## Example
    `target_modules: [q_proj, v_proj]` for Phi-3, whose layer is called `qkv_proj`.

    ## Fix
    Write `all-linear`, or names from the finding's list.

    ## Evidence
    "Target modules … not found in the base model" is the most frequent error in PEFT's issues; the usual cause is names
    copied from a Llama config.
    """
    if setup.target_pattern:
        yield from _one_name(setup.target_pattern, setup, model)
    targets = setup.target_modules or ()
    if setup.adapter not in ("lora", "dora") or set(targets) & {"all-linear", "custom"} or not model.linear_modules:
        return
    layer_names = sorted({name.rpartition(".")[2] for name in model.linear_modules})
    tied_heads = OUTPUT_HEADS if model.tied_embeddings else ()
    missing = [
        target
        for target in targets
        if target not in tied_heads
        and not closed_to_lora(model.model_type, target)  # ADP008 reports it
        and not any(ends_with(name, target) for name in model.linear_modules)
    ]
    some_match = len(missing) < len(targets)
    for target in missing:
        # PEFT accepts a list if some of its names match: in another tool's config, names for other models are no error.
        misspelt = bool(get_close_matches(target, layer_names, n=1, cutoff=MISSPELT))
        if misspelt or not some_match or not context.is_foreign:
            yield Finding(
                field="target_modules",
                message=f"no linear layer of {model.name} is called {target!r}{did_you_mean(target, layer_names)}",
                help=f"write all-linear, or choose from {', '.join(layer_names)}",
            )


def _one_name(target: str, setup: Setup, model: ModelFacts) -> Iterator[Finding]:
    """Yield a finding for a single target name, which PEFT matches as a regular expression against whole names."""
    layer_names = sorted({name.rpartition(".")[2] for name in model.linear_modules})
    if setup.adapter not in ("lora", "dora") or not layer_names or target in (*model.linear_modules, *OUTPUT_HEADS):
        return
    yield Finding(
        field="target_pattern",
        message=f"PEFT reads the string {target!r} as a regular expression for full module names, and it "
        f"matches none of {model.name}{did_you_mean(target, layer_names) if target not in layer_names else ''}",
        help=f"write all-linear, or '.*{target}'"
        if target in layer_names
        else f"write all-linear, or several of {', '.join(layer_names)}",
    )


@rule("MOD028", "target-modules-of-another-model", severity="error")
def target_modules_of_another_model(context: LintContext, setup: Setup) -> Iterator[Finding]:
    """The names in `target_modules` belong to another type of model.

    ## What it does
    If the model is not on this machine, infers its type from its name (Llama, Mistral, Qwen, Gemma, Phi, GPT-2,
    GPT-NeoX and about twenty more), and fires if none of the names is a linear layer of that type. A single plain name
    given as a string matches no layer of any model. For models on this machine, see MOD008.

    ## Why it is bad
    PEFT stops with "Target modules … not found in the base model", after the model has been downloaded and loaded.

    ## Example
    `target_modules: [q_proj, v_proj]` for `EleutherAI/pythia-410m`, whose layer is called `query_key_value`.

    ## Fix
    Write `all-linear`, or names from the finding's list.

    ## Evidence
    The same error as MOD008's; the names come from transformers' modeling files.
    """
    if context.model is not None or setup.adapter not in ("lora", "dora"):
        return
    if setup.base_model and setup.target_pattern and setup.target_pattern not in (*HEADS, *OUTPUT_HEADS):
        yield Finding(
            field="target_pattern",
            message=f"PEFT reads the string {setup.target_pattern!r} as a regular expression for full module "
            "names, and none is exactly this",
            help=f"write all-linear, or '.*{setup.target_pattern}' if the model has layers of this name",
        )
    layers = layers_of(setup.base_model)
    names = [name.rpartition(".")[2] for name in setup.target_modules or ()]
    all_plain = all(name.isidentifier() for name in names) and not {"all-linear", "custom"} & set(
        setup.target_modules or ()
    )
    if layers is not None and names and all_plain and not layers.linear.union(HEADS) & set(names):
        yield Finding(
            field="target_modules",
            message=f"no linear layer of {setup.base_model} is called {' or '.join(map(repr, names))}",
            help=f"write all-linear, or choose from {', '.join(sorted(layers.linear))}",
        )


@rule("MOD029", "tokenizer-of-another-model", severity="warning")
def tokenizer_of_another_model(setup: Setup) -> Iterator[Finding]:
    """The tokenizer belongs to a different model family than the model.

    ## What it does
    Compares the family in the tokenizer's name (Llama 2, Llama 3, Qwen, Mistral, Gemma, Phi…) with the family in the
    model's name, in Axolotl's `tokenizer_config` and in a script that loads one of each and does not resize the
    embedding.

    ## Why it is bad
    A token id stands for different text in the model, or is past the end of its embedding: the run stops with an index
    error, or trains on noise.

    ## Example
    `AutoTokenizer.from_pretrained("Qwen/Qwen2.5-7B")` with a Llama 3.1 model.

    ## Fix
    Load the tokenizer of the model.

    ## Evidence
    The vocabularies have 128,256 (Llama 3.1), 151,936 (Qwen2.5), 32,000 (Llama 2) and 256,000 (Gemma) entries.
    """
    if not setup.tokenizer_name or not setup.base_model:
        return
    tokenizer_family, model_family = family_of(setup.tokenizer_name), family_of(setup.base_model)
    if tokenizer_family and model_family and tokenizer_family != model_family:
        yield Finding(
            field="tokenizer_name",
            message=f"the tokenizer is {setup.tokenizer_name}, of the family {tokenizer_family}, but the model is "
            f"{setup.base_model}, of {model_family}",
            help=f"load the tokenizer of {setup.base_model}",
        )


@rule("MOD030", "embedding-not-resized", severity="warning")
def embedding_not_resized(setup: Setup) -> Iterator[Finding]:
    """Tokens are added to the tokenizer, but the model's embedding is not resized.

    ## What it does
    In a Python script that adds tokens and does not call `resize_token_embeddings`, compares their number with the
    unused embedding rows of this type of model (27 in Pythia, about 270 in Qwen2.5 and Qwen3, none in Llama and GPT-2).
    A padding token counts unless this type of model already has it.

    ## Why it is bad
    The new ids are past the end of the embedding: "index out of range", or a failed assertion on the GPU.

    ## Example
    `tokenizer.add_special_tokens({"pad_token": "[PAD]"})` for GPT-2.

    ## Fix
    Call `model.resize_token_embeddings(len(tokenizer))` afterwards.

    ## Evidence
    transformers' documentation of `add_tokens`: "you should make sure to also resize the token embedding matrix".
    """
    if setup.tokens_past_embedding:
        name = setup.name("tokens_past_embedding")
        yield Finding(
            field="tokens_past_embedding",
            message=f"{name} adds tokens ({setup.tokens_past_embedding}), but the script never calls "
            "resize_token_embeddings",
            help="call model.resize_token_embeddings(len(tokenizer)) afterwards, or use existing tokens",
        )


@rule("MOD009", "model-size-unknown", severity="info")
def model_size_unknown(model: ModelFacts) -> Iterator[Finding]:
    """The model's size is unknown, so memory and disk are not checked.

    ## What it does
    Fires if the weight files are not on this machine and the parameter formula does not cover the architecture.

    ## Why it is bad
    Memory or disk may be too small without a finding.

    ## Example
    A mixture-of-experts model that has not been downloaded yet.

    ## Fix
    Download the model; its weight files contain its size.

    ## Evidence
    A check that passes because it lacked information is misleading.
    """
    if model.parameters is None:
        yield Finding(
            field=NAME,
            message=f"the size of {model.name} ({model.architecture or 'no architecture named'}) is unknown: "
            "memory and disk are not checked",
            help="download the model, and check again",
        )


@rule("MOD010", "weights-do-not-match-config", severity="warning")
def weights_do_not_match_config(model: ModelFacts) -> Iterator[Finding]:
    """The number of parameters in the weight files does not match config.json.

    ## What it does
    Compares the parameters in the headers of the weight files with the number computed from config.json.

    ## Why it is bad
    The files do not belong together: a config of another size, a vocabulary that was enlarged in only one of them, a
    shard of another model. Missing weights would be initialized at random, extra weights dropped.

    ## Example
    Special tokens were added to the embedding, and config.json still has the old `vocab_size`.

    ## Fix
    Take config.json and weights from the same place.

    ## Evidence
    transformers loads such a model with a warning ("newly initialized") that is easy to miss; SureFit raises an error
    at loading.
    """
    stored, expected = model.parameters, model.expected_parameters
    if stored is not None and expected is not None and stored != expected:
        yield Finding(
            field=NAME,
            message=f"the weight files hold {stored:,} parameters, but config.json describes {expected:,}",
            help="take config.json and the weights from the same place",
        )


@rule("MOD012", "base-stored-quantized", severity="error", suppressible=False)
def base_stored_quantised(config: SureFitConfig, model: ModelFacts, setup: Setup) -> Iterator[Finding]:
    """The base model's files are already quantized.

    ## What it does
    Looks, in SureFit's own config, for a `quantization_config` of bitsandbytes, GPTQ or AWQ in the model's config.json.
    For training all weights, see ADP003.

    ## Why it is bad
    Such files hold packed blocks and scales instead of matrices, so an adapter cannot be merged into them. SureFit
    quantizes the original model on loading, trains the adapter on it, and measures the error of the merge.

    ## Example
    `name_or_path: unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit`.

    ## Fix
    Name the original model, and set `model.quantization: nf4`, which needs the same memory.

    ## Evidence
    A published distillation project trained on a 4-bit base and merged: ties against its baseline fell from 70 % to
    28 %. `surefit merge` over such files stopped with a size mismatch, or with bitsandbytes' "Blockwise 4bit
    quantization only supports 16/32-bit floats".
    """
    if setup.tool != "surefit" or model.quantization not in STORED_QUANTIZED or config.train.method == "full":
        return
    original = original_of(config.model.name_or_path)
    yield Finding(
        field=NAME,
        message=f"{model.name} has quantized files ({model.quantization}): an adapter cannot be merged into them",
        help=f"name {original or 'the original model'}, and set model.quantization: nf4",
    )


@rule(
    "MOD011",
    "adapter-on-tied-head",
    severity="error",
)
def adapter_on_tied_head(config: SureFitConfig, model: ModelFacts) -> Iterator[Finding]:
    """LoRA targets an output head that shares its weights with the embedding.

    ## What it does
    Looks for `lm_head` in `target_modules` of a model with tied embeddings.

    ## Why it is bad
    The head and the embedding are the same matrix. Merging the adapter into it would also change the embedding, which
    was not trained that way: the merged model would differ from base and adapter.

    ## Example
    `target_modules: [q_proj, v_proj, lm_head]` for Llama-3.2-1B.

    ## Fix
    Remove the head; `all-linear` does not include it.

    ## Evidence
    PEFT warns about it, "Model with `tie_word_embeddings=True` and the tied_target_modules=… are part of the adapter",
    and continues.
    """
    targets = config.lora.target_modules
    heads = [name for name in targets if name in OUTPUT_HEADS] if isinstance(targets, list) else []
    if config.train.method == "lora" and model.tied_embeddings and heads:
        yield Finding(
            field=TARGETS,
            message=f"{heads[0]} shares its weights with the embedding of {model.name}",
            help=f"remove {heads[0]} from target_modules, or write all-linear",
        )


@rule("MOD014", "new-tokens-not-possible", severity="error", suppressible=False)
def new_tokens_not_possible(context: LintContext, config: SureFitConfig) -> Iterator[Finding]:
    """A token in `model.add_tokens` is not new, or cannot be trained together with another setting.

    ## What it does
    Looks for the tokens in the tokenizer's vocabulary, and for settings that have not been shown to train the new rows
    as one process does: `speed.compile`, and every parallel mode but single and ddp.

    ## Why it is bad
    A token that the tokenizer already has gets no new row, and with LoRA its existing row is not trained.

    ## Example
    `add_tokens: ["<|im_start|>"]` for Qwen2.5, which has it; tokens of an earlier run whose merged model already has
    them.

    ## Fix
    Remove the token from the list. The model learns to use existing tokens through its other layers, or with
    `train.method: full`.

    ## Evidence
    transformers' `add_tokens` returns 0 for a token that already exists, without a warning.
    """
    yield from find_refused_combinations(context, config, "MOD014")
    existing = known_tokens(context.tokenizer, config.model.add_tokens) if context.tokenizer else []
    if existing:
        yield Finding(
            field="model.add_tokens",
            message=f"the tokenizer has {', '.join(existing[:3])}{' and others' if len(existing) > 3 else ''} already",
            help="remove them from the list",
        )
