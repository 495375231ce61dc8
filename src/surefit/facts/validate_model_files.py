"""Validation of a model's files before any library reads them: types and bounds, each checked once.

transformers and tokenizers trust files: a layer count of a billion is built, a list in place of a name is an
`AttributeError` three calls later. Only values that some model has in another form are left to them, and an error that
they raise then becomes a message too (`core/reading.py`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from surefit.core.errors import ModelError, os_help
from surefit.core.reading import read_json_file
from surefit.core.units import MIB

MAX_TEMPLATE_BYTES = MIB
"""Largest size of a chat template; the longest of the well-known models has 20 kB."""
BOUNDS = {
    "hidden_size": 2**20, "n_embd": 2**20, "d_model": 2**20, "intermediate_size": 2**24, "n_inner": 2**24,
    "num_hidden_layers": 2_000, "n_layer": 2_000, "n_layers": 2_000, "num_layers": 2_000,
    "num_attention_heads": 2**14, "n_head": 2**14, "n_heads": 2**14, "num_heads": 2**14,
    "num_key_value_heads": 2**14, "head_dim": 2**16, "vocab_size": 2**26, "max_position_embeddings": 2**40,
    "n_positions": 2**40, "max_seq_len": 2**40, "num_experts": 2**16, "num_local_experts": 2**16,
    "n_routed_experts": 2**16,
}  # fmt: skip
"""Key of config.json → the largest number that is accepted; the largest models of 2026 have a hundredth of each."""
MAX_LENGTH = 2**20
"""Largest number of tokens that a tokenizer may pad to by its own file."""
MAX_STEPS = 64
MAX_GROWTH = 4_096
"""Largest factor by which all the replacements of a normalizer, one after another, may lengthen a text."""
_TAKE_AGAIN = "download {} again from the model's own repository"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # false for nan and inf, and defined for any int


def _is_token(value: Any) -> bool:
    return type(value) is int and -1 <= value < 2**31


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is str for item in value)


def _switch(value: Any) -> bool:
    return type(value) is bool


def _name(value: Any) -> bool:
    return type(value) is str and len(value) <= 200


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _tokens(value: Any) -> bool:
    return _is_token(value) or (isinstance(value, list) and all(map(_is_token, value)))


def _rope(value: Any) -> bool:
    """Return whether a value is names, switches and finite numbers, or lists and objects of these."""
    if isinstance(value, dict):
        names_valid = all(_name(value[key]) for key in ("rope_type", "type") if value.get(key) is not None)
        return names_valid and all(map(_rope, value.values()))
    if isinstance(value, list):
        return len(value) <= 65_536 and all(map(_rope, value))
    return value is None or type(value) in (str, bool) or _is_number(value)


SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("model_type", "dtype", "torch_dtype", "hidden_act", "attn_implementation"), (_name, "a name")),
    **dict.fromkeys(("architectures", "layer_types"), (_texts, "a list of names")),
    **dict.fromkeys(("quantization_config", "auto_map", "text_config"), (_object, "an object")),
    **dict.fromkeys(
        ("rope_scaling", "rope_parameters"),
        (lambda value: _object(value) and _rope(value), "an object of names and finite numbers"),
    ),
    **dict.fromkeys(
        (
            "rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "initializer_range",
            "attention_dropout", "hidden_dropout", "partial_rotary_factor", "attn_logit_softcapping",
            "final_logit_softcapping",
        ),
        (_is_number, "a finite number"),
    ),
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), (_tokens, "a token's number, or a list of them")),
    **dict.fromkeys(("tie_word_embeddings", "use_cache", "use_sliding_window", "is_encoder_decoder"),
                    (_switch, "true or false")),
    "sliding_window": (lambda value: type(value) is int and 0 <= value <= 2**40, "a number of tokens"),
}  # fmt: skip
"""Key of config.json → whether a value is valid, and a description of valid ones; null is always valid."""


def require_sound_config(config: Mapping[str, Any], where: object) -> None:
    """Check every value of a config.json whose form is known, including a multimodal model's `text_config`.

    Raises:
        ModelError: the first invalid value, with its key.
    """
    nested = config.get("text_config")
    for prefix, section in (("", config), ("text_config.", nested if isinstance(nested, Mapping) else {})):
        for key, (is_valid, expected) in SHAPES.items():
            if section.get(key) is not None and not is_valid(section[key]):
                raise _invalid_value_error(where, prefix + key, section[key], expected)
        for key, maximum in BOUNDS.items():
            if type(section.get(key)) is int and section[key] > maximum:
                raise _invalid_value_error(where, prefix + key, section[key], f"at most {maximum:,}")


def require_sound_adapter(config: Any, where: object) -> dict[str, Any]:
    """Check PEFT's adapter_config.json in the same way and return it.

    Raises:
        ModelError: it is no object, or a value is invalid.
    """
    if not isinstance(config, dict):
        raise ModelError(
            "not a JSON object", code="E2037", path=str(where), help="copy the adapter again, or train again"
        )
    other_type = config.get("peft_type") not in (None, "LORA")  # types where `r: 0` may be the default: OFT
    for key, (is_valid, expected) in ADAPTER.items():
        if key == "r" and other_type:
            continue
        if config.get(key) is not None and not is_valid(config[key]):
            raise _invalid_value_error(where, key, config[key], expected, "copy the adapter again, or train again")
    for key, problem, help_text in wrong_patterns(config):
        raise ModelError(problem, code="E2038", path=str(where), field=key, help=help_text)
    return config


def wrong_patterns(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, problem, help) of patterns that PEFT matches with every module's name and that are invalid or too
    slow."""
    patterns = [(key, config.get(key)) for key in ("target_modules", "exclude_modules", "layers_pattern")]
    for key in ("rank_pattern", "alpha_pattern"):
        ranks = config.get(key)
        patterns += [(key, pattern) for pattern in ranks] if isinstance(ranks, Mapping) else []
    slow: dict[str, str] = {}
    for key, pattern in patterns:
        if type(pattern) is not str:
            continue
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            yield key, f"{pattern!r:.60} is not a regular expression: {error}", "fix it"
            continue
        if len(pattern) > 20_000 or _REPEATED_GROUP.search(pattern):
            problem = f"{pattern!r:.60} has nested repetitions: matching it may never end"
            yield key, problem, "write the modules as a list of names"
        elif sum(map(pattern.count, "*+{")) >= MANY_REPETITIONS:
            slow[pattern] = key
    if (pattern := _too_slow(list(slow))) is not None:
        problem = f"{pattern!r:.60} needs more than a second to match the name of a module"
        yield slow[pattern], problem, "write the modules as a list of names"


def _too_slow(patterns: list[str]) -> str | None:
    """Return a pattern that is too slow, by trying them: the time of consecutive repetitions depends on their
    contents."""
    if not patterns:
        return None
    text = json.dumps(patterns)
    result = subprocess.run([sys.executable, "-I", "-S", "-c", _TRY], input=text, capture_output=True, text=True)
    return None if result.returncode == 0 else patterns[result.stdout.count("\n") - 1]


def _rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 2**16


def _by_module(sound: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and len(value) <= 100_000 and all(map(sound, value.values()))


def _names(value: Any) -> bool:
    return type(value) is str or (_texts(value) and len(value) <= 100_000)


ADAPTER: dict[str, tuple[Callable[[Any], bool], str]] = {
    "peft_type": (_name, "a name"),
    "task_type": (_name, "a name"),
    "base_model_name_or_path": (lambda value: type(value) is str and len(value) < 4096, "a path or a name"),
    "revision": (_name, "a name"),
    "r": (_rank, "a rank from 1 to 65,536"),
    "lora_alpha": (_is_number, "a finite number"),
    "lora_dropout": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "rank_pattern": (_by_module(_rank), "an object of ranks"),
    "alpha_pattern": (_by_module(_is_number), "an object of finite numbers"),
    **dict.fromkeys(("target_modules", "modules_to_save", "exclude_modules"), (_names, "a name or a list of names")),
    "target_parameters": (_texts, "a list of names"),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias", "inference_mode"),
                    (_switch, "true or false")),
    "bias": (_name, "none, all or lora_only"),
    "layers_to_transform": (_tokens, "a layer's number, or a list of them"),
    "trainable_token_indices": (
        lambda value: _tokens(value) or _by_module(_tokens)(value), "token numbers, or an object of them"),
    "auto_mapping": (_object, "an object"),
}  # fmt: skip

MANY_REPETITIONS = 3
"""Consecutive repetitions in a pattern; with fewer, a match needs at most the square of a name's length."""
_TRY = """
import json, re, resource, sys
patterns = json.load(sys.stdin)
seconds = 1 + len(patterns) // 1000
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
for pattern in patterns:
    print(flush=True)
    for name in ("self_attn.q_proj", "mlp.experts.gate_up_proj"):
        re.fullmatch(pattern, "base_model.model.model.language_model.layers.100." + name)
"""
_REPEATED_GROUP = re.compile(r"[+*}][^()]*\)[+*{]|\)[+*{][^()]*\)[+*{]")
"""A repetition inside a repeated group: the expressions that need exponential time are of this form."""


def require_sound_special(config: Mapping[str, Any], where: Path) -> None:
    """Check that the special tokens of a tokenizer_config.json or special_tokens_map.json are texts.

    Raises:
        ModelError: the first that is none.
    """
    for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        entry = config.get(f"{role}_token")
        text = entry.get("content") if isinstance(entry, Mapping) else entry
        if entry is not None and not (type(text) is str and len(text) <= 1_000):
            raise _invalid_value_error(where, f"{role}_token", entry, "a token's text")
    shapes: dict[str, Callable[[Any], bool]] = {
        "additional_special_tokens": lambda value: isinstance(value, list),
        "added_tokens_decoder": lambda value: _object(value) and all(map(_object, value.values())),
        "tokenizer_class": _name,
        "model_max_length": lambda value: type(value) in (int, float) and value > 0,
        "chat_template": lambda value: isinstance(value, (str, list, dict)),
        "auto_map": _object,
    }
    for key, is_valid in shapes.items():
        if config.get(key) is not None and not is_valid(config[key]):
            raise _invalid_value_error(where, key, config[key], "what tokenizers write there")


def require_sound_steps(text: str, where: Path) -> None:
    """Check the parts of a tokenizer.json that can make a short text long: consecutive replacements, and padding.

    Args:
        text: the whole file.

    Raises:
        ModelError: a text would grow beyond the limits.
    """
    growth, steps = 1, 0
    for step in _steps(_part(text, "normalizer")):
        steps += 1
        added = step.get("content") if step.get("type") == "Replace" else step.get("prepend")
        growth *= max(1, len(added)) if isinstance(added, str) else 1
    if steps > MAX_STEPS or growth > MAX_GROWTH:
        problem = f"its normalizer makes a text up to {growth:,} times longer in {steps} steps"
        raise ModelError(problem, code="E2039", path=where, field="normalizer", help=_TAKE_AGAIN.format(where.name))
    processor = _part(text, "post_processor")
    template = processor.get("single") if isinstance(processor, Mapping) else None
    padding = _part(text, "padding")
    strategy = padding.get("strategy") if isinstance(padding, Mapping) else None
    fixed = strategy.get("Fixed") if isinstance(strategy, Mapping) else None
    multiple = padding.get("pad_to_multiple_of") if isinstance(padding, Mapping) else None
    sizes = {"padding": fixed, "pad_to_multiple_of": multiple}
    sizes["post_processor"] = len(template) if isinstance(template, list) else None
    for field, size in sizes.items():
        if isinstance(size, int) and size > (MAX_STEPS if field == "post_processor" else MAX_LENGTH):
            problem = f"it makes every text {size:,} tokens long"
            raise ModelError(problem, code="E2040", path=where, field=field, help=_TAKE_AGAIN.format(where.name))


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a normalizer and all normalizers in it."""
    pending = [part]
    while pending:
        step = pending.pop()
        if isinstance(step, Mapping):
            yield step
            inner = step.get("normalizers")
            pending += inner if isinstance(inner, list) else []


def _part(text: str, name: str) -> Any:
    """Parse one of the first parts of a tokenizer.json, without parsing its vocabulary."""
    match = re.compile(rf'"{name}"\s*:\s*').search(text)
    try:
        return json.JSONDecoder().raw_decode(text, match.end())[0] if match else None
    except (ValueError, RecursionError):
        return None


def _invalid_value_error(where: object, key: str, value: Any, wanted: str, help: str | None = None) -> ModelError:
    name = Path(str(where)).name
    return ModelError(
        f"{key} is {value!r:.60}; it must be {wanted}",
        code="E2041",
        path=str(where),
        help=help or _TAKE_AGAIN.format(name),
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a model's JSON file; raise a `ModelError` if it cannot be read, is damaged or holds no object."""
    try:
        value = read_json_file(path)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", code="E2042", path=path, help=os_help(error)) from None
    except ValueError as error:
        line = getattr(error, "lineno", None)
        raise ModelError("not valid JSON", code="E2043", path=path, line=line, help="download the file again") from None
    if not isinstance(value, dict):
        raise ModelError("not a JSON object", code="E2044", path=path, help="download the file again")
    return value


def templates_of(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of `chat_template` in a tokenizer_config.json by name; a text alone is `default`."""
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, list):
        entry = {item.get("name"): item.get("template") for item in entry if isinstance(item, Mapping)}
    templates = entry if isinstance(entry, Mapping) else {"default": entry}
    return {name: text for name, text in templates.items() if isinstance(name, str) and isinstance(text, str)}


def template_of(tokenizer_config: Mapping[str, Any]) -> str | None:
    """Return the default template of a tokenizer_config.json."""
    return templates_of(tokenizer_config).get("default")
