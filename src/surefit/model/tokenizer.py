"""Tokenizers, loaded whole or rejected with the reason, without torch: a process that only tokenizes starts sooner and
needs less memory.

A GGUF file is the exception: torch writes the model directory that it is converted into.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import errors as hub
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from surefit import nano
from surefit.config.schema import ModelSection
from surefit.core.errors import ConfigError, ModelError, SureFitError
from surefit.core.reading import reason_of
from surefit.facts.chat_template import bake_template_defaults, load_chat_templates, require_tokens
from surefit.facts.gguf_source import FIELD, gguf_source
from surefit.facts.low_bits import detect_low_bit_format
from surefit.facts.model import NANO, cached_snapshot, read_model_config
from surefit.facts.named_templates import to_chat_template_attribute
from surefit.facts.tokenizer import catch_tokenizer_panics, require_quick_template, require_sound_tokenizer
from surefit.model.memory_errors import is_out_of_memory

if TYPE_CHECKING:
    import torch

ADDED = "model.add_tokens"


def model_path(name_or_path: str, revision: str | None = None) -> str:
    """Return the path or id for `from_pretrained`: a directory as it is, `surefit/nano` as the packaged directory, for
    a GGUF file the directory that it is converted into, for a model in FP8 or MXFP4 its dequantized copy, or a hub id.

    Args:
        name_or_path: the model; the files of a hub id stored in FP8 or MXFP4 have to be in the Hugging Face cache.
        revision: of a hub id.

    Raises:
        ModelError: a path that does not exist or holds no model, or one that cannot be dequantized.
        MachineError: a GGUF file needs a package, or the disk of the cache is full.
    """
    path = tokenizer_path(name_or_path)
    directory = Path(path) if Path(path).is_dir() else cached_snapshot(path, revision)
    if (
        directory is None
        or not (directory / "config.json").is_file()
        or detect_low_bit_format(read_model_config(directory)) is None
    ):
        return path
    from surefit.model.low_bits import dequantized_directory

    plain = dequantized_directory(directory)
    return path if plain == directory else str(plain)


def tokenizer_path(name_or_path: str) -> str:
    """Return the path as `model_path` does, but a model in FP8 or MXFP4 unconverted: a tokenizer needs no weights.

    Raises:
        ModelError, MachineError: as `model_path`.
    """
    if name_or_path == NANO:
        return str(nano.PATH)
    source = gguf_source(name_or_path)
    if source is not None:
        from surefit.model.gguf import convert_gguf

        return str(convert_gguf(source))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return str(path)
    looks_like_path = name_or_path.startswith((".", "~", "/")) or name_or_path.count("/") != 1
    if path.exists():
        raise ModelError(
            "this is a file",
            code="E5069",
            path=name_or_path,
            field=FIELD,
            help="name the directory that has config.json in it, or a GGUF file",
        )
    if looks_like_path and "/" in name_or_path:
        raise ModelError(
            "no such directory",
            code="E5070",
            path=name_or_path,
            field=FIELD,
            help="name a directory, a hub id or surefit/nano",
        )
    return name_or_path


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, with the tokens that the config adds.

    Raises:
        ModelError: there is none, it is damaged, or the hub does not serve it.
    """
    tokenizer = _own_tokenizer(section)
    add_to_tokenizer(tokenizer, section.add_tokens)
    if section.chat_template is not None:
        require_tokens(section.chat_template, tokenizer.get_vocab(), tokenizer.eos_token)
        tokenizer.chat_template = to_chat_template_attribute(load_chat_templates(section.chat_template))
    return with_template_kwargs(tokenizer, section.chat_template_kwargs)


def new_tokens(section: ModelSection) -> NewTokens | None:
    """Return the tokens of the config that the model's own tokenizer lacks; None where there are none."""
    return add_to_tokenizer(_own_tokenizer(section), section.add_tokens) if section.add_tokens else None


def tokens_with_rows(section: ModelSection, place: str, rows: int) -> int:
    """Count the tokens of another tokenizer for a model, all of which should have rows in its vocabulary.

    The tokenizers of some models have more tokens than rows (Gemma 3 1B's has a mark for images); where the model's own
    has at least the tokens of the other one, those beyond its rows do not count.

    Args:
        place: the directory or id of the other tokenizer.
        rows: rows of the model's vocabulary.
    """
    count = len(_own_tokenizer(section.model_copy(update={"name_or_path": place})))
    if count <= rows:
        return count
    try:
        model_count = len(_own_tokenizer(section))
    except ModelError:  # a base without a tokenizer is merged with the adapter's
        return count
    return rows if model_count >= count else count


def _own_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    path = tokenizer_path(section.name_or_path)
    if Path(path).is_dir():
        require_sound_tokenizer(Path(path))
    with catch_tokenizer_panics(path), explain_loading_errors(section, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    if (downloaded := cached_snapshot(path, section.revision)) is not None:
        require_sound_tokenizer(downloaded)
    require_quick_template(tokenizer.chat_template, path)
    return tokenizer


def with_template_kwargs(
    tokenizer: PreTrainedTokenizerBase, switches: Mapping[str, bool | int | str]
) -> PreTrainedTokenizerBase:
    """Return the tokenizer with its chat template's variables set to other values than the template's own."""
    template: Any = tokenizer.chat_template
    if not switches or not template:
        return tokenizer
    copied = copy.copy(tokenizer)
    by_name = isinstance(template, dict)  # several templates by name
    changed = {
        name: bake_template_defaults(text, switches) for name, text in (template if by_name else {"": template}).items()
    }
    copied.chat_template = changed if by_name else changed[""]
    return copied


@dataclass(frozen=True)
class NewTokens:
    """Tokens that were added to a tokenizer.

    Attributes:
        first: the id of the first; the others follow.
        pieces: for each, the ids that its text was tokenized into before.
    """

    first: int
    pieces: tuple[tuple[int, ...], ...]

    @property
    def ids(self) -> list[int]:
        return list(range(self.first, self.first + len(self.pieces)))

    def size(self, rows: int) -> int:
        """Return the new number of rows of a matrix that had `rows`: some models have more of them than tokens."""
        return max(rows, self.first + len(self.pieces))

    def into(self, old: torch.Tensor) -> torch.Tensor:
        """Return the matrix (vocabulary, width) with the new tokens' rows in it; a copy. Means are computed in float32.
        Rows between the old ones and the new ones belong to no text: they get the mean of all."""
        rows = old.new_empty((self.size(len(old)), *old.shape[1:]))
        rows[: len(old)] = old
        if self.first > len(old):
            rows[len(old) : self.first] = old.float().mean(0).to(old.dtype)
        for number, pieces in zip(self.ids, self.pieces, strict=True):
            rows[number] = (old[list(pieces)] if pieces else old).float().mean(0).to(old.dtype)
        return rows


@dataclass(frozen=True)
class Resized:
    """A vocabulary of another size than in the base's files, whose rows are in the adapter.

    Attributes:
        rows: rows of the embedding and the head.
    """

    rows: int

    def size(self, _: int) -> int:
        """Return the new number of rows of a matrix, which does not depend on the old one."""
        return self.rows

    def into(self, old: torch.Tensor) -> torch.Tensor:
        """Return the matrix (vocabulary, width) truncated, or extended by the mean of its rows; a copy."""
        rows = old.new_empty((self.rows, *old.shape[1:]))
        kept = min(self.rows, len(old))
        rows[:kept], rows[kept:] = old[:kept], old.float().mean(0).to(old.dtype)
        return rows


def add_to_tokenizer(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> NewTokens | None:
    """Add the tokens that a tokenizer lacks, in place; return None where it has all.

    They are ordinary tokens: matched in the text exactly as they are written, and not removed from decoded text.

    Raises:
        ConfigError: their ids do not follow all others, one after the other.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    new = [token for token in tokens if token not in vocabulary]
    if not new:
        return None
    pieces = tokenizer(new, add_special_tokens=False).input_ids
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in new])
    ids: list[int] = tokenizer.convert_tokens_to_ids(new)  # type: ignore[assignment]
    if ids != list(range(ids[0], ids[0] + len(new))) or ids[0] <= max(vocabulary.values()):
        raise ConfigError(
            "this tokenizer does not append new tokens at the end",
            code="E5071",
            field=ADDED,
            help="choose another base model",
        )
    return NewTokens(ids[0], tuple(map(tuple, pieces)))


@contextlib.contextmanager
def explain_loading_errors(section: ModelSection, what: str) -> Iterator[None]:
    """Turn the libraries' errors about files and the hub into ours."""
    try:
        yield
    except Exception as error:  # the exception type depends on the file (core/reading.py)
        if isinstance(error, SureFitError) or is_out_of_memory(error):
            raise
        problem, advice = _explain(error, section, what)
        model_directory = model_path(section.name_or_path, section.revision)
        path = _damaged_file(model_directory) if isinstance(error, SafetensorError) else section.name_or_path
        raise ModelError(problem, code="E5072", path=path, field=FIELD, help=advice) from error


def _explain(error: Exception, section: ModelSection, what: str) -> tuple[str, str]:
    """Return (problem, help) for an error; transformers wraps the hub's errors in its own, so the causes are
    searched."""
    causes = _causes(error)
    for kind, problem, advice in _HUB_ERRORS:
        if any(isinstance(cause, kind) for cause in causes):
            if kind is hub.HTTPError and (status := _hub_denied_status(causes)):  # type: ignore[attr-defined]
                problem, advice = (
                    f"is private, or the hub rejected the token ({status})",
                    _TOKEN,
                )
            return problem.format(revision=section.revision), advice.format(name=section.name_or_path)
    if isinstance(error, SafetensorError):
        return (
            f"the weights are damaged: {error}",
            "download the model again: the file is truncated or has another format",
        )
    text = " ".join(reason_of(error).split())
    if "trust_remote_code" in str(error):
        return "comes with Python code of its own", "read that code, then set model.trust_remote_code: true"
    return (
        f"the {what} cannot be loaded: {text[:400]}",
        "SureFit needs a causal language model's config.json, tokenizer and .safetensors files",
    )


_TOKEN = (
    "set HF_TOKEN in the environment or in .env to a token with read access; accept its license at "
    "https://huggingface.co/{name}"
)


def _hub_denied_status(causes: Sequence[BaseException]) -> int | None:
    """Return 401 or 403, where the hub answered so."""
    statuses = [getattr(getattr(cause, "response", None), "status_code", None) for cause in causes]
    return next((status for status in statuses if status in (401, 403)), None)


_HUB_ERRORS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str, str], ...] = (
    (
        hub.GatedRepoError,
        "is gated: its owner requires you to accept a license first",
        "accept it at https://huggingface.co/{name}, then set HF_TOKEN in the environment or in .env",
    ),
    (hub.RevisionNotFoundError, "has no revision {revision!r} on the hub", "correct model.revision"),
    (
        hub.RepositoryNotFoundError,
        "is not on the hub, or is private",
        "check the spelling and whether it was renamed; for a private model set HF_TOKEN in the environment or in .env",
    ),
    (
        (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled),
        "is not in the local cache, and the hub cannot be reached or HF_HUB_OFFLINE is set",
        "go online once, or name a local directory; surefit/nano is always there",
    ),
    (
        hub.HFValidationError,
        "is neither a directory here nor a valid hub id",
        "name a directory, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or surefit/nano",
    ),
    (
        hub.HTTPError,  # type: ignore[attr-defined]  # httpx's or httpx2's, see facts/hub.py
        "cannot be fetched: the hub returned an unexpected response",
        "check the network and try again, or name a local directory",
    ),
)


def _damaged_file(place: str) -> str:
    for file in sorted(Path(place).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except SafetensorError:
            return str(file)
    return place


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return chain
