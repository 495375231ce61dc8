"""Tokenized data on disk: flat memory-mapped arrays, in a directory named by the hash of all that they depend on.

CACHE/tokens/KEY/input_ids.npy   int32, all examples one after the other
                 supervised.npy  uint8, 1 where the loss falls
                 offsets.npy     int64, where example i starts; one more than there are examples
                 desirable.npy   bool, the label of each example; only of labelled answers
                 meta.json       the counts, and the sizes by which a damaged file is noticed
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from surefit.core import env
from surefit.core.errors import MachineError
from surefit.core.rundir import directory_atomic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefit.data.rows.layouts import Examples

CODE_VERSION = 3
"""Version of tokenization, incremented when its result changes; tests/unit/data/test_code_version.py notices."""
ARRAYS = ("input_ids", "supervised", "offsets")
LABELS = "desirable.npy"
MASKED = -100
"""The label that the loss ignores."""

Encoded = tuple[list[int], list[bool]]
"""The ids of an example, and for each whether the loss falls on it."""


@dataclass(frozen=True)
class TokenizationStats:
    """Counts of the rows by outcome.

    Attributes:
        rows: rows of the source: `kept` + `skipped` + dropped ones - `split`.
        kept: examples in the data set.
        skipped: rows that could not be used (`data.bad_rows: skip`).
        dropped_too_long: examples over `max_length`.
        dropped_unsupervised: examples without any supervised token.
        cut: rows whose document was cut.
        split: examples that rows made beyond their first, because the chat template rewrites earlier turns.
        tokens: tokens of the kept examples.
        supervised_tokens: tokens of the kept examples on which the loss falls.
        longest: tokens of the longest kept example.
    """

    rows: int
    kept: int
    dropped_too_long: int
    dropped_unsupervised: int
    tokens: int
    supervised_tokens: int
    longest: int
    skipped: int = 0
    cut: int = 0
    split: int = 0


class TokenDataset(Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]):
    """Tokenized examples, read from disk as they are used.

    Attributes:
        path: directory of the arrays.
        stats: counts of the rows by outcome.
        refused: source examples that cannot be tokenized: number → why.
        lengths: tokens of each example, int64.
        desirable: the label of each labelled answer; None for other examples.
    """

    def __init__(self, path: Path, stats: TokenizationStats, refused: Mapping[int, str] | None = None) -> None:
        self.path = path
        self.stats = stats
        self.refused = refused or {}
        self._ids, self._supervised, self._offsets = (np.load(path / f"{name}.npy", mmap_mode="r") for name in ARRAYS)
        self.lengths: npt.NDArray[np.int64] = np.diff(self._offsets)
        labels = path / LABELS
        self.desirable: npt.NDArray[np.bool_] | None = np.load(labels) if labels.exists() else None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        """Return (input_ids, labels) of one example, int64; labels are -100 where the loss does not fall."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        start = int(self._offsets[index % len(self)])
        end = start + int(self.lengths[index])
        ids = self._ids[start:end].astype(np.int64)
        return ids, np.where(self._supervised[start:end] == 1, ids, MASKED)

    def counting_skipped(self, skipped: int) -> TokenDataset:
        """Return the same data, with the skipped rows counted in its `stats`."""
        stats = dataclasses.replace(self.stats, rows=self.stats.rows + skipped, skipped=skipped)
        return TokenDataset(self.path, stats, self.refused)


def cache_key(examples: Examples, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> str:
    """Return the hash of everything that the tokens depend on.

    It covers the examples themselves, not the file and the recipe that they came from: so an edited recipe is noticed
    even if its version was not raised, and a reordered config is not.
    """
    digest = hashlib.sha256()
    for part in (CODE_VERSION, settings, _tokenizer_state(tokenizer)):
        digest.update(json.dumps(part, sort_keys=True, default=str).encode() + b"\n")
    for example in examples:
        # Keys are not sorted: templates write them in their order.
        content: list[Any] = [example.messages, example.tools, example.text]
        content += [part for part in (example.document, example.tokens, example.rejected) if part]
        content += [] if example.desirable is None else [example.desirable]
        digest.update(json.dumps(content, default=str).encode() + b"\n")
    return digest.hexdigest()[:40]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the hash of all that the tokens of a given text depend on: vocabulary, template, versions of the
    packages."""
    return hashlib.sha256(json.dumps(_tokenizer_state(tokenizer), sort_keys=True, default=str).encode()).hexdigest()


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the hash of the vocabulary alone: losses per token are comparable only where it is the same."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    import tokenizers
    import transformers

    # A call without options resets padding that an earlier call may have left in the backend.
    tokenizer("", add_special_tokens=False)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else tokenizer.get_vocab()
    template = tokenizer.chat_template
    return {
        "class": type(tokenizer).__name__,
        "vocabulary": vocabulary,
        "special": tokenizer.special_tokens_map,
        "template": template,
        # Such a template writes today's date, so tomorrow's tokens differ.
        "today": str(date.today()) if "strftime_now" in str(template) and "date_string" not in str(template) else None,
        "packages": [tokenizers.__version__, transformers.__version__],
        **_remote_code_hashes(tokenizer),
    }


def _remote_code_hashes(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the hash of the Python files of a tokenizer's custom code; empty if transformers has the class."""
    module = sys.modules[type(tokenizer).__module__]
    if module.__name__.partition(".")[0] == "transformers" or module.__file__ is None:
        return {}
    digest = hashlib.sha256()
    for path in sorted(Path(module.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return {"code": digest.hexdigest()}


def _directory(key: str, cache: Path | None) -> Path:
    return (cache if cache is not None else env.cache_dir()) / "tokens" / key


def open_cached(key: str, cache: Path | None) -> TokenDataset | None:
    """Open the data set stored under `key`; None if there is none, or only a damaged one."""
    path = _directory(key, cache)
    try:
        meta = json.loads((path / "meta.json").read_bytes())
        if any((path / name).stat().st_size != size for name, size in meta["sizes"].items()):
            return None
        refused = {int(number): why for number, why in meta.get("refused", {}).items()}
        return TokenDataset(path, TokenizationStats(**meta["stats"]), refused)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def store_dataset(
    key: str,
    cache: Path | None,
    kept: Sequence[tuple[Any, Any]],
    stats: TokenizationStats,
    refused: Mapping[int, str] | None = None,
    desirable: Sequence[bool] | None = None,
) -> TokenDataset:
    """Write a data set in full or not at all.

    Args:
        key: from `cache_key`.
        cache: the cache directory, or None for the user's.
        kept: (int32 ids, uint8 mask) of each example.
        stats: their counts.
        refused, desirable: as in `TokenDataset`.

    Raises:
        MachineError: the directory cannot be written.
    """
    if (existing := open_cached(key, cache)) is not None:  # another process was faster: the same key is the same tokens
        return existing
    path = _directory(key, cache)
    offsets = np.cumsum([0, *(len(ids) for ids, _ in kept)], dtype=np.int64)
    ids, masks = np.empty(0, np.int32), np.empty(0, np.uint8)  # `np.concatenate` needs at least one array
    arrays = (np.concatenate([ids, *(part for part, _ in kept)]), np.concatenate([masks, *(part for _, part in kept)]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with directory_atomic(path) as temporary:
            for name, array in zip(ARRAYS, (*arrays, offsets), strict=True):
                np.save(temporary / f"{name}.npy", array)
            if desirable is not None:
                np.save(temporary / LABELS, np.array(desirable, np.bool_))
            sizes = {file.name: file.stat().st_size for file in temporary.iterdir()}
            meta = {"sizes": sizes, "stats": dataclasses.asdict(stats), "refused": refused or {}}
            (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    except (MachineError, OSError) as error:
        if (existing := open_cached(key, cache)) is not None:  # another process stored it in the meantime
            return existing
        reason = error.message if isinstance(error, MachineError) else f"cannot write: {error.strerror}"
        help_text = "set SUREFIT_CACHE to a directory you may write to, with space for the tokenized data"
        raise MachineError(reason, code="E4005", path=path, help=help_text) from error
    return TokenDataset(path, stats, refused)
