"""Parameter counts and linear layers of dense decoders, from the numbers in config.json alone.

Every architecture in `TRAITS` is a Llama block with a few differences, so one formula serves all of them; the tests
compare it, exactly, with the modules transformers builds. Worked example, Llama-3.1-8B (hidden 4,096, 32 layers, 32
heads and 8 key-value heads of 128, MLP 14,336, vocabulary 128,256, head not tied):

    attention   4,096 × (4,096 + 1,024 + 1,024) + 4,096 × 4,096     =    41,943,040
    MLP         3 × 4,096 × 14,336                                  =   176,160,768
    norms       2 × 4,096                                           =         8,192
    32 layers of 218,112,000                                        = 6,979,584,000
    embeddings  2 × 128,256 × 4,096, final norm 4,096               = 1,050,677,248
    total                                                           = 8,030,261,248
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from surefit.core.errors import ModelError

FlagKey = bool | str
"""Whether a layer has a bias: always, never, or by the named key of config.json."""
GATED = ("gate_proj", "up_proj", "down_proj")
FUSED_GATE = ("gate_up_proj", "down_proj")
PLAIN = ("up_proj", "down_proj")


@dataclass(frozen=True)
class ArchitectureTraits:
    """Differences of one architecture from a Llama block.

    Attributes:
        qkv_bias, o_bias, mlp_bias: which linear layers have a bias.
        fused_qkv: query, key and value are one layer, `qkv_proj`.
        o_name: the attention's output layer.
        mlp: the MLP's layers; the last one maps back to the hidden size.
        norms: norms over the hidden state per layer.
        norm_terms: parameters per norm and hidden unit: 0 none, 1 weight, 2 weight and bias.
        qk_norm: norms on queries and keys, over one head or over the whole width.
        head_bias: the output head has a bias.
        tied: the output head shares the embedding where config.json does not state it.
        unless: config.json keys that, when true, change the block in a way this formula does not know.
    """

    qkv_bias: FlagKey = False
    o_bias: FlagKey = False
    mlp_bias: FlagKey = False
    fused_qkv: bool = False
    o_name: str = "o_proj"
    mlp: tuple[str, ...] = GATED
    norms: int = 2
    norm_terms: int = 1
    qk_norm: Literal["none", "head", "width"] = "none"
    head_bias: bool = False
    tied: bool = False
    unless: tuple[str, ...] = ()


_ATTENTION_BIAS = "attention_bias"
TRAITS: dict[str, ArchitectureTraits] = {
    "LlamaForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, _ATTENTION_BIAS, "mlp_bias"),
    "MistralForCausalLM": ArchitectureTraits(),
    "Qwen2ForCausalLM": ArchitectureTraits(qkv_bias=True),
    "Qwen3ForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="head"),
    "GemmaForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, _ATTENTION_BIAS, tied=True),
    "Gemma2ForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, _ATTENTION_BIAS, norms=4, tied=True),
    "Gemma3ForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, _ATTENTION_BIAS, norms=4, qk_norm="head", tied=True),
    "Phi3ForCausalLM": ArchitectureTraits(fused_qkv=True, mlp=FUSED_GATE),
    "PhiForCausalLM": ArchitectureTraits(
        True,
        True,
        True,
        o_name="dense",
        mlp=("fc1", "fc2"),
        norms=1,
        norm_terms=2,
        head_bias=True,
        unless=("qk_layernorm",),
    ),
    "SmolLM3ForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, _ATTENTION_BIAS, "mlp_bias", tied=True),
    "OlmoForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, _ATTENTION_BIAS, norm_terms=0),
    "Olmo2ForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="width"),
    "Olmo3ForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, _ATTENTION_BIAS, qk_norm="width"),
    "GraniteForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, _ATTENTION_BIAS, "mlp_bias"),
    "Starcoder2ForCausalLM": ArchitectureTraits(
        "use_bias", "use_bias", "use_bias", mlp=("c_fc", "c_proj"), norm_terms=2, tied=True
    ),
    "CohereForCausalLM": ArchitectureTraits(
        _ATTENTION_BIAS, _ATTENTION_BIAS, norms=1, tied=True, unless=("use_qk_norm",)
    ),
    "Cohere2ForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, _ATTENTION_BIAS, norms=1, tied=True),
    "GlmForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, mlp=FUSED_GATE),
    "Glm4ForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, mlp=FUSED_GATE, norms=4),
    "StableLmForCausalLM": ArchitectureTraits(
        "use_qkv_bias", norm_terms=2, unless=("qk_layernorm", "use_parallel_residual")
    ),
    "Exaone4ForCausalLM": ArchitectureTraits(qk_norm="head"),
    "NemotronForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, _ATTENTION_BIAS, "mlp_bias", mlp=PLAIN, norm_terms=2),
    "ArceeForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, _ATTENTION_BIAS, "mlp_bias", mlp=PLAIN),
    "SeedOssForCausalLM": ArchitectureTraits(_ATTENTION_BIAS, "attention_out_bias", "mlp_bias"),
}


@dataclass(frozen=True)
class Dimensions:
    """The sizes in config.json, under one name each."""

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int | None
    vocab_size: int
    max_position_embeddings: int | None
    tied_embeddings: bool


LAYER_LISTS = ("layers_block_type",)
"""Settings with an entry for each layer, in models that do not state the number of layers (Nemotron H)."""
_ALIASES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", *LAYER_LISTS),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "vocab_size": ("vocab_size",),
}
TWICE = frozenset({"longcat_flash"})
"""Model types whose layers attend twice. `num_layers` counts the layers, and `num_hidden_layers`, which transformers
5.17 writes beside it, counts each layer twice; from 5.18 on it is not written."""


def dimensions(config: Mapping[str, Any], where: object) -> Dimensions:
    """Return the dimensions in a config.json.

    Raises:
        ModelError: the model is no decoder; a dimension that every decoder has is missing, or is not a whole number
            above zero.
    """
    require_decoder(config, where)
    section = text_section(config)
    if section.get("model_type") in WITHOUT_ATTENTION:
        section = {"num_attention_heads": 1} | dict(section)
    if section.get("model_type") in TWICE and "num_layers" in section:
        section = dict(section) | {"num_hidden_layers": section["num_layers"]}
    sizes = {name: _required(section, keys, where) for name, keys in _ALIASES.items()}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    return Dimensions(
        **sizes,
        num_key_value_heads=_optional(section, "num_key_value_heads", where) or heads,
        head_dim=_optional(section, "head_dim", where) or hidden // heads,
        intermediate_size=_optional(section, "intermediate_size", where) or _optional(section, "n_inner", where),
        max_position_embeddings=_context(section, where),
        tied_embeddings=_tied(config, section),
    )


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json that describes the language model: all of it, except in multimodal models."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) and "hidden_size" not in config else config


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the model class that config.json names, or the empty string."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


READ_AHEAD = frozenset(
    {
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
        "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
"""Encoders, which become decoders by `is_decoder` alone. Measured: a changed token changes the logits before it."""
READ_AHEAD_ALWAYS = frozenset({"cpmant", "xlm", "xlnet"})
"""Encoders with any value of `is_decoder`."""

WITHOUT_ATTENTION = frozenset({"mamba", "falcon_mamba"})
"""Model types whose config.json has no attention heads, because their layers have none."""
KEEP_A_STATE = frozenset({"rwkv"})
"""Model types whose layers carry a state from token to token and accept no mask to keep padding out of it."""


def require_decoder(config: Mapping[str, Any], where: object) -> None:
    """Check that a model predicts each token from the tokens before it alone, and that its batches can be padded.

    Raises:
        ModelError: it does not, or they cannot.
    """
    kind = config.get("model_type")
    if config.get("is_encoder_decoder"):
        problem = f"{kind}: an encoder reads the prompt and a decoder writes the answer"
    elif "num_hidden_layers" not in config and ("decoder_layers" in config or "num_decoder_layers" in config):
        problem = f"{kind}: a decoder that reads an encoder's output"
    elif kind in KEEP_A_STATE:
        problem = f"{kind}: its layers keep a state that padding would change, and accept no mask"
    elif kind in READ_AHEAD_ALWAYS or (kind in READ_AHEAD and not config.get("is_decoder")):
        problem = f"{kind}: it predicts each token from the tokens after it, too"
    else:
        return
    raise ModelError(problem, code="E2026", path=str(where), help="choose a decoder, such as Qwen/Qwen3-0.6B")


def _required(section: Mapping[str, Any], keys: tuple[str, ...], where: object) -> int:
    for key in keys:
        value = _optional(section, key, where)
        if value is not None:
            return value
    raise ModelError(
        f"{keys[0]} is missing",
        code="E2027",
        path=str(where),
        help="this config.json does not describe a complete language model",
    )


def _optional(section: Mapping[str, Any], key: str, where: object) -> int | None:
    value = section.get(key)
    if value is None:
        return None
    if isinstance(value, list) and key in LAYER_LISTS:
        value = len(value)
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        value = max(value)  # one for each layer (Gemma 3n)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        problem = f"{key} is {value!r}; a whole number above zero is needed"
        raise ModelError(
            problem, code="E2028", path=str(where), help="download config.json again from the model's own repository"
        )
    return value


def _context(section: Mapping[str, Any], where: object) -> int | None:
    """Return the context length in tokens. YaRN's extension counts: Qwen2.5 states 32,768 beside a factor 4, so
    131,072. Other scalings do not: Llama 3.2 states 131,072, although its factor times its original
    length is twice that."""
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        stated = _optional(section, key, where)
        if stated is not None:
            break
    else:
        return None
    scaling = section.get("rope_scaling") or section.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return stated
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    yarn = "yarn" in (scaling.get("rope_type"), scaling.get("type"))
    if yarn and isinstance(factor, (int, float)) and isinstance(original, int):
        return max(stated, int(factor * original))
    return stated


def _tied(config: Mapping[str, Any], section: Mapping[str, Any]) -> bool:
    for source in (config, section):
        if isinstance(source.get("tie_word_embeddings"), bool):
            return bool(source["tie_word_embeddings"])
    traits = TRAITS.get(architecture_of(config))
    # Other classes inherit True from transformers' base config, and config.json leaves inherited values out.
    return traits.tied if traits else True


@dataclass(frozen=True)
class Structure:
    """Parameters and linear layers of a model, from the closed form or the weight files: `parameters`, `linear_modules`
    as name → (out features, in features), and how many of the parameters are routed experts'."""

    parameters: int
    linear_modules: dict[str, tuple[int, int]]
    experts: int = 0


def structure(config: Mapping[str, Any], dims: Dimensions) -> Structure | None:
    """Return the structure by the closed form; None for an architecture that it does not cover."""
    traits = TRAITS.get(architecture_of(config))
    if traits is None or dims.intermediate_size is None or any(config.get(key) for key in traits.unless):
        return None
    attention, mlp = _layer_linears(traits, dims, dims.intermediate_size)
    linears = {f"self_attn.{name}": shape for name, shape in attention.items()}
    linears |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    modules = {f"model.layers.{n}.{name}": shape for n in range(dims.num_layers) for name, shape in linears.items()}
    if not dims.tied_embeddings:
        modules["lm_head"] = (dims.vocab_size, dims.hidden_size)
    layer = sum(math.prod(shape) for shape in linears.values())
    layer += _biases(traits, config, attention, mlp) + _norms(traits, dims)
    ends = (
        dims.vocab_size * dims.hidden_size * (1 if dims.tied_embeddings else 2) + traits.norm_terms * dims.hidden_size
    )
    ends += dims.vocab_size if traits.head_bias else 0
    return Structure(dims.num_layers * layer + ends, modules)


def _layer_linears(
    traits: ArchitectureTraits, dims: Dimensions, inner: int
) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    hidden = dims.hidden_size
    query, key = dims.num_attention_heads * dims.head_dim, dims.num_key_value_heads * dims.head_dim
    if traits.fused_qkv:
        attention = {"qkv_proj": (query + 2 * key, hidden)}
    else:
        attention = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden)}
    attention[traits.o_name] = (hidden, query)
    *up, down = traits.mlp
    mlp = {name: (2 * inner if name == "gate_up_proj" else inner, hidden) for name in up}
    mlp[down] = (hidden, inner)
    return attention, mlp


def _biases(
    traits: ArchitectureTraits,
    config: Mapping[str, Any],
    attention: Mapping[str, tuple[int, int]],
    mlp: Mapping[str, tuple[int, int]],
) -> int:
    def on(switch: FlagKey) -> bool:
        return bool(config.get(switch)) if isinstance(switch, str) else switch

    count = sum(shape[0] for shape in mlp.values()) if on(traits.mlp_bias) else 0
    for name, (out, _) in attention.items():
        count += out if on(traits.o_bias if name == traits.o_name else traits.qkv_bias) else 0
    return count


def _norms(traits: ArchitectureTraits, dims: Dimensions) -> int:
    count = traits.norms * traits.norm_terms * dims.hidden_size
    if traits.qk_norm == "head":
        return count + 2 * dims.head_dim
    if traits.qk_norm == "width":
        return count + (dims.num_attention_heads + dims.num_key_value_heads) * dims.head_dim
    return count
