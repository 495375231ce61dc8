"""Packing: how full the rows are, and how fast rows are tokenised and packed; TRL's packing beside it.

    python benchmarks/packing.py [--rows 100000] [--max-length 512] [--json]

Rows are synthetic: words with log-normal lengths (median 150 tokens, sigma 0.9), which is how conversation data is
spread. They are tokenised with surefit/nano's tokenizer. `step` packs the examples of each optimizer step by
themselves, as a run does, so that packing changes nothing that is learnt; `global` packs all examples together, as
others do. Efficiency: tokens / (bins × capacity). `ranks`: how busy eight ranks are that share a step, where bins are
filled to the brim and where evenly. Where trl is installed, its best-fit-decreasing packs the same tokens; it also lays
them one after the other, which is a part of its time. Seconds are of CPU time: set OMP_NUM_THREADS=1 and
RAYON_NUM_THREADS=1, or tokenizers uses every core.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
from tokenizers import Tokenizer

from surefit import nano
from surefit.data.tokens.pack import best_fit_decreasing, distribute_bins, pack_for

MEDIAN, SIGMA = 150, 0.9
STEPS = (8, 16, 32, 64, 128, 256)
"""Global batch sizes."""
RANKS = 8
BATCH = 1000
"""Texts tokenised at a time, as the pipeline does."""
TEXT = "a call for the weather in Oslo on Monday gives rain wind and seven degrees to those who ask it early"


def made_texts(rows: int, seed: int = 0) -> list[str]:
    """Texts whose number of words is log-normal; nano's tokenizer makes about two tokens of a word."""
    draw = np.random.default_rng(seed)
    lengths = np.maximum(1, draw.lognormal(np.log(MEDIAN / 2), SIGMA, rows)).astype(int)
    words = np.array(TEXT.split())
    return [" ".join(words[draw.integers(0, len(words), length)]) for length in lengths]


def timed(function: Callable[[], Any], runs: int = 3) -> tuple[Any, float]:
    """(what it gives, the fewest CPU seconds of some runs)."""
    best, result = float("inf"), None
    for _ in range(runs):
        start = time.process_time()
        result = function()
        best = min(best, time.process_time() - start)
    return result, best


def result_of(name: str, bins: int, lengths: Sequence[int], capacity: int, seconds: float) -> dict[str, Any]:
    tokens = int(sum(lengths))
    return {
        "name": name,
        "capacity": capacity,
        "bins": bins,
        "fewest": -(-tokens // capacity),
        "efficiency": tokens / (bins * capacity),
        "seconds": seconds,
        "rows_per_second": len(lengths) / seconds,
        "tokens_per_second": tokens / seconds,
    }


def per_step(lengths: Sequence[int], size: int, capacity: int) -> int:
    """Bins where the examples of each step are packed by themselves; a last incomplete step is left out."""
    whole = len(lengths) - len(lengths) % size
    return sum(len(best_fit_decreasing(lengths[start : start + size], capacity)) for start in range(0, whole, size))


def padded(lengths: Sequence[int], size: int, micro: int) -> tuple[float, int]:
    """(efficiency, micro batches) of the same steps padded, `micro` rows of similar length at a time."""
    whole = len(lengths) - len(lengths) % size
    held = batches = 0
    for start in range(0, whole, size):
        ordered = sorted(lengths[start : start + size], reverse=True)
        parts = [ordered[at : at + micro] for at in range(0, size, micro)]
        held, batches = held + sum(part[0] * len(part) for part in parts), batches + len(parts)
    return sum(lengths[:whole]) / held, batches


def tokenised(texts: list[str]) -> list[npt.NDArray[np.int32]]:
    tokenizer = Tokenizer.from_file(str(nano.PATH / "tokenizer.json"))
    parts = (texts[start : start + BATCH] for start in range(0, len(texts), BATCH))
    return [np.asarray(one.ids, np.int32) for part in parts for one in tokenizer.encode_batch_fast(part)]


def trl_bins(encoded: list[npt.NDArray[np.int32]], capacity: int) -> tuple[int, float] | None:
    """(bins, seconds) of TRL's `pack_dataset`, strategy bfd; None where it is not installed."""
    if importlib.util.find_spec("trl") is None:
        return None
    from datasets import Dataset, disable_caching, disable_progress_bars
    from trl import pack_dataset

    disable_caching()
    disable_progress_bars()
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    column = pyarrow.ListArray.from_arrays(offsets, np.concatenate(encoded))
    dataset = Dataset(pyarrow.table({"input_ids": column}))
    # TRL packs each of datasets' map batches by itself; one batch is its best.
    packed, seconds = timed(
        lambda: pack_dataset(dataset, capacity, strategy="bfd", map_kwargs={"batch_size": len(encoded)})
    )
    return len(packed), seconds


def measure(rows: int, max_length: int) -> dict[str, Any]:
    texts = made_texts(rows)
    whole, seconds = timed(lambda: tokenised(texts), runs=1)
    encoded = [ids[:max_length] for ids in whole]
    lengths = [len(ids) for ids in encoded]
    found = {
        "rows": rows,
        "max_length": max_length,
        "tokens": sum(lengths),
        "mean_length": sum(lengths) / rows,
        "tokenising": {
            "seconds": seconds,
            "rows_per_second": rows / seconds,
            "tokens_per_second": sum(map(len, whole)) / seconds,
        },
        "packing": packings(encoded, lengths, max_length),
    }
    steps = [(size, micro) for size in STEPS for micro in (1, 4) if micro * RANKS <= size]
    found["ranks"] = [busy(lengths, size, micro, max_length) for size, micro in steps]
    return found


def busy(lengths: Sequence[int], size: int, micro: int, max_length: int) -> dict[str, Any]:
    """The share of the time that ranks work while the one with the most tokens does, over the steps of an epoch."""
    tokens, brim, even = 0, 0, 0
    capacity = micro * max_length
    for start in range(0, len(lengths) - len(lengths) % size, size):
        step = lengths[start : start + size]
        tokens += sum(step)
        brim += most(best_fit_decreasing(step, capacity), step)
        even += most(pack_for(RANKS, step, capacity), step)
    shares = {"to_the_brim": tokens / RANKS / brim, "evenly": tokens / RANKS / even}
    return {"global_batch_size": size, "micro_batch": micro} | shares


def most(bins: list[list[int]], lengths: Sequence[int]) -> int:
    """Tokens of the rank that has the most."""
    return max(sum(lengths[item] for bin_ in rank for item in bin_) for rank in distribute_bins(bins, lengths, RANKS))


def packings(encoded: list[npt.NDArray[np.int32]], lengths: list[int], max_length: int) -> list[dict[str, Any]]:
    """Global packing, ours and TRL's, then step by step for each global batch, and the same steps padded."""
    bins, seconds = timed(lambda: len(best_fit_decreasing(lengths, max_length)))
    results = [result_of("global", bins, lengths, max_length, seconds)]
    if peer := trl_bins(encoded, max_length):
        results.append(result_of("global, trl bfd", peer[0], lengths, max_length, peer[1]))
    for size in STEPS:
        whole = lengths[: len(lengths) - len(lengths) % size]
        for micro in (1, 4):
            if micro < size:
                capacity = micro * max_length
                bins, seconds = timed(lambda size=size, capacity=capacity: per_step(lengths, size, capacity))
                result = result_of(f"step of {size}, micro batch {micro}", bins, whole, capacity, seconds)
                share, batches = padded(lengths, size, micro)
                results.append({**result, "padded_efficiency": share, "padded_batches": batches})
    return results


def show(found: dict[str, Any]) -> None:
    speed = found["tokenising"]
    print(f"{found['rows']:,} rows, {found['tokens']:,} tokens, mean {found['mean_length']:.0f}")
    print(f"tokenising {speed['rows_per_second']:,.0f} rows/s, {speed['tokens_per_second']:,.0f} tokens/s\n")
    head = ("", "capacity", "bins", "fewest", "efficiency", "padded", "batches padded", "rows/s", "tokens/s")
    print("{:<32}{:>9}{:>9}{:>9}{:>11}{:>8}{:>15}{:>11}{:>13}".format(*head))
    for line in found["packing"]:
        padding = f"{line['padded_efficiency']:.1%}" if "padded_efficiency" in line else ""
        batches = f"{line['padded_batches']:,}" if padding else ""
        print(
            f"{line['name']:<32}{line['capacity']:>9,}{line['bins']:>9,}{line['fewest']:>9,}{line['efficiency']:>11.2%}"
            f"{padding:>8}{batches:>15}{line['rows_per_second']:>11,.0f}{line['tokens_per_second']:>13,.0f}"
        )
    print(f"\n{RANKS} ranks work, of the time that the last one does: filled to the brim, and evenly")
    for line in found["ranks"]:
        print(
            f"step of {line['global_batch_size']}, micro batch {line['micro_batch']}: {line['to_the_brim']:.1%}, "
            f"{line['evenly']:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.rows, arguments.max_length)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
