"""Names of the linear layers and of the decoder layer's class in well-known models, by the model's name alone.

For models that are not on this machine. A name that matches several entries, or none, has no result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

LLAMA = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
NEOX = "query_key_value dense dense_h_to_4h dense_4h_to_h"
HEADS = frozenset({
    "lm_head", "embed_out", "score", "classifier", "embed_tokens", "embed_in", "wte", "wpe", "out_proj_head",
    "word_embeddings", "shared", "embed_positions", "output",
})  # fmt: skip
"""Names of embeddings and heads, which PEFT adapts as well."""


@dataclass(frozen=True)
class Layers:
    """The linear layers of a type of model, by the last part of their names, and the class of its decoder layers."""

    linear: frozenset[str]
    layer_class: str


def _layers(linear: str, layer_class: str) -> Layers:
    return Layers(frozenset(linear.split()), layer_class)


LAYERS: Mapping[str, Layers] = {
    "llama": _layers(LLAMA, "LlamaDecoderLayer"),
    "mistral": _layers(LLAMA, "MistralDecoderLayer"),
    "qwen2": _layers(LLAMA, "Qwen2DecoderLayer"),
    "qwen3": _layers(LLAMA, "Qwen3DecoderLayer"),
    "gemma": _layers(LLAMA, "GemmaDecoderLayer"),
    "gemma2": _layers(LLAMA, "Gemma2DecoderLayer"),
    "gemma3_text": _layers(LLAMA, "Gemma3DecoderLayer"),
    "smollm3": _layers(LLAMA, "SmolLM3DecoderLayer"),
    "stablelm": _layers(LLAMA, "StableLmDecoderLayer"),
    "cohere": _layers(LLAMA, "CohereDecoderLayer"),
    "mixtral": _layers(f"{LLAMA} w1 w2 w3 gate gate_up_proj", "MixtralDecoderLayer"),
    "phi": _layers("q_proj k_proj v_proj dense fc1 fc2", "PhiDecoderLayer"),
    "phi3": _layers("qkv_proj o_proj gate_up_proj down_proj", "Phi3DecoderLayer"),
    "gpt2": _layers("c_attn c_proj c_fc", "GPT2Block"),
    "gpt_neo": _layers("q_proj k_proj v_proj out_proj c_fc c_proj", "GPTNeoBlock"),
    "gpt_neox": _layers(NEOX, "GPTNeoXLayer"),
    "gptj": _layers("q_proj k_proj v_proj out_proj fc_in fc_out", "GPTJBlock"),
    "falcon": _layers(NEOX, "FalconDecoderLayer"),
    "bloom": _layers(NEOX, "BloomBlock"),
    "opt": _layers("q_proj k_proj v_proj out_proj fc1 fc2 project_in project_out", "OPTDecoderLayer"),
    "mpt": _layers("Wqkv out_proj up_proj down_proj", "MptBlock"),
    "gpt_bigcode": _layers("c_attn c_proj c_fc", "GPTBigCodeBlock"),
    "starcoder2": _layers("q_proj k_proj v_proj o_proj c_fc c_proj", "Starcoder2DecoderLayer"),
    "t5": _layers("q k v o wi wi_0 wi_1 wo", "T5Block"),
    "bert": _layers("query key value dense", "BertLayer"),
    "roberta": _layers("query key value dense out_proj", "RobertaLayer"),
    "distilbert": _layers("q_lin k_lin v_lin out_lin lin1 lin2 pre_classifier vocab_transform", "TransformerBlock"),
    "deberta-v2": _layers("query_proj key_proj value_proj dense", "DebertaV2Layer"),
}
"""`model_type` of a config.json → its layers, as transformers 5.23 names them (compared by tests/findings)."""
NAMES: tuple[tuple[str, str], ...] = (
    ("llama", r"(code)?llama[-_]?([23](?!\d)|\d+b)|tinyllama|vicuna|smollm2|smollm-\d|deepseek-llm|falcon-?3|"
     r"\byi-(1\.5-)?\d+b|hermes-[23]-llama"),
    ("mistral", r"mistral-(7b|nemo|large)|ministral-8b|zephyr-7b|openhermes-2\.5-mistral|mistral-small-2[34]"),
    ("mixtral", r"mixtral-8x"),
    ("qwen2", r"qwen-?(1\.5|2(\.5)?)-|\bqwq-32b"),
    ("qwen3", r"qwen-?3-(\d+(\.\d+)?b(-(base|instruct|thinking)\b|-(fp8|awq|gptq|bnb|unsloth)|$)|"
     r"4b-(instruct|thinking)-\d+)"),
    ("gemma", r"gemma-(1\.1-)?[27]b"),
    ("gemma2", r"gemma-?2-\d"),
    ("gemma3_text", r"gemma-?3-(270m|1b)"),
    ("smollm3", r"smollm3"),
    ("stablelm", r"stablelm-(2|3b|zephyr)"),
    ("cohere", r"command-r(?!.*7b)"),
    ("phi", r"\bphi-(2|1(_5)?)\b"),
    ("phi3", r"\bphi-(3(\.5)?-(mini|medium)|4)\b"),
    ("gpt2", r"^(distil)?gpt2\b|dialogpt"),
    ("gpt_neo", r"gpt-neo-\d"),
    ("gpt_neox", r"pythia-|gpt-neox|dolly-v2|redpajama-incite|stablelm-(base|tuned)-alpha"),
    ("gptj", r"gpt-j-|gpt4all-j"),
    ("falcon", r"falcon-(rw-)?\d+b"),
    ("bloom", r"\bbloomz?-\d"),
    ("opt", r"^opt-\d"),
    ("mpt", r"^mpt-\d+b"),
    ("gpt_bigcode", r"starcoder(base)?($|-\d|plus)|santacoder"),
    ("starcoder2", r"starcoder2-"),
    ("t5", r"\b(flan-)?t5-(small|base|large|xl|xxl|\d+b)|t5-v1_1"),
    ("bert", r"^bert-(base|large)"),
    ("roberta", r"^(xlm-)?roberta-(base|large)"),
    ("distilbert", r"^distilbert-"),
    ("deberta-v2", r"^m?deberta-v[23]-"),
)  # fmt: skip
"""(`model_type`, pattern of its models' names)."""
OTHERS = re.compile(r"vl\b|vision|omni|audio|multimodal|moe|-a\d+b|mamba|distill-(?!qwen|llama)|-onnx|tiny-random")
"""In names of models whose layers differ from what the rest of the name suggests."""
DISTILLED = re.compile(r"distill-(qwen|llama)")
LAYER_CLASSES = frozenset(layers.layer_class for layers in LAYERS.values())


def type_in_name(name: str) -> str | None:
    """Return the `model_type` that a model's name on the hub indicates.

    >>> type_in_name("EleutherAI/pythia-410m"), type_in_name("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")
    ('gpt_neox', 'qwen2')
    >>> type_in_name("Qwen/Qwen2.5-VL-7B-Instruct"), type_in_name("./out/final"), type_in_name("a/b")
    (None, None, None)
    """
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return None  # a folder may hold any model
    leaf = name.rpartition("/")[2].lower()
    if distilled := DISTILLED.search(leaf):
        return "qwen2" if distilled[1] == "qwen" else "llama"
    types = {kind for kind, pattern in NAMES if re.search(pattern, leaf)}
    return types.pop() if len(types) == 1 and not OTHERS.search(leaf) else None


def layers_of(name: str | None, model_type: str | None = None) -> Layers | None:
    """Return the layers of a model, by its type where that is known and by its name otherwise."""
    return LAYERS.get(model_type or (type_in_name(name) if name else None) or "")
