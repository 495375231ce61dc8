"""How well a run's base and merged model read plain English: what benchmarks/real.py says of old abilities.

    python benchmarks/real_text.py RUN --data DIR [--quick]

The mean cross-entropy in nats per token, by the training loop's own loss, of passages of two novels that no task of
real.py trains on. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from surefit.core.env import quiet_libraries
from surefit.data.tokens.cache import MASKED
from surefit.data.tokens.collate import collate
from surefit.data.tokens.tokenize import encode
from surefit.stages.run_context import load_checked_run
from surefit.task import Example

BOOKS = ("The-Time-Machine_35.txt", "Pride-and-Prejudice_1342.txt")
PASSAGE = 2_000
"""Characters: about 450 tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    quiet_libraries()
    print(json.dumps(losses(arguments.run, passages(arguments.data, 1 if arguments.quick else 5))))


def passages(data: Path, each: int) -> list[str]:
    """As many passages of every book, spread evenly; the first and last twentieth are title pages and the like."""
    found = []
    for book in BOOKS:
        text = (data / "text/gutenberg" / book).read_text(encoding="utf-8")
        starts = [len(text) // 20 + place * len(text) * 9 // 10 // each for place in range(each)]
        found += [text[start : start + PASSAGE] for start in starts]
    return found


def losses(run: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Base and merged, on the same tokens."""
    from surefit.evaluate.variants import open_variants
    from surefit.train.step import mean_loss

    prepared = load_checked_run(run)
    found: dict[str, Any] = {}
    for name, model, tokenizer in open_variants(
        prepared.resolved.config, prepared.hardware, prepared.run, ("base", "merged")
    ):
        batches = one_by_one(encode(tokenizer, [Example(text=text) for text in texts]))
        found[name], found["tokens"] = mean_loss(model, batches) or (None, 0)
        del model
    return {"base": found["base"], "tuned": found["merged"], "tokens": found["tokens"], "passages": len(texts)}


def one_by_one(encoded: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> Iterator[Any]:
    for ids, supervised in encoded:
        labels = np.where(np.asarray(supervised), np.asarray(ids), MASKED)
        yield collate([(np.asarray(ids), labels)], 0)


if __name__ == "__main__":
    main()
