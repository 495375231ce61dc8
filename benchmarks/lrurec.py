"""LRURec, alone and blended with counts, beside its baselines on a data set, over several seeds.

    python benchmarks/lrurec.py --data DIR [--seeds 3] [--numbering published] [--threads N] [--keep DIR] [--json]

Prints what the data set came to after the 5-core, the baselines, the test scores of each seed and their mean with its
interval, seconds, and the difference to the best baseline (window5): bootstraps over users, where a user's score is the
mean of the seeds'. Steps, weights and the blend are selected on the validation items, whose scores are printed too.
"published" numbers the items as LlamaRec's code does, which decides ties in time. Seconds are wall-clock; cpu_seconds
are those of all threads, for a machine that others use too. With --keep, a seed that was stopped goes on where it was
when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from surefit.core import env
from surefit.core.errors import SureFitError
from surefit.evaluate.stats import bootstrap_mean, paired_bootstrap
from surefit.metrics.ranking import mean_ranking, ranking_scores
from surefit.retrieval.blend import select_blend
from surefit.retrieval.fitting import FitSettings, build_manifest_settings, fit_lrurec
from surefit.retrieval.interactions import Interactions, build_interactions
from surefit.retrieval.ranking import Retriever, rank_items
from surefit.retrieval.retrievers import BASELINES, BLENDED
from surefit.retrieval.sources import detect_movielens_release, read_events

COMPARED = ("recall@10", "ndcg@10", "recall@20", "ndcg@20")
SHOWN = ("recall@5", "mrr@5", "ndcg@5", "recall@10", "mrr@10", "ndcg@10", "recall@20", "ndcg@20")


def ranks_of(retriever: Retriever, interactions: Interactions, split: Literal["valid", "test"]) -> list[int]:
    ranks: list[int] = rank_items(retriever, *interactions.questions(split), k=1).ranks.tolist()
    return ranks


def trained(
    interactions: Interactions, fitting: FitSettings, folder: Path, device: str
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """One seed: what is printed of it, and the ranks of all users' test items with LRURec and with the blend."""

    def told(done: int, total: int, text: str) -> None:
        resumed.setdefault("at", done - 1)
        if done % fitting.every == 0:
            left = (time.perf_counter() - started) / (done - resumed["at"]) * (total - done)
            print(f"  step {done} of at most {total}, {text}, at most {left:,.0f} s more", file=sys.stderr)

    resumed: dict[str, int] = {}
    started, cpu = time.perf_counter(), time.process_time()
    checkpoint = folder / f"lrurec-{fitting.seed}.pt"
    fitted = fit_lrurec(interactions, fitting, device=device, checkpoint=checkpoint, on_progress=told)
    blend, _ = select_blend(interactions, fitted.retriever, BASELINES[BLENDED](interactions))
    retrievers: dict[str, Retriever] = {"lrurec": fitted.retriever, "blend": blend}
    ranks = {name: ranks_of(retriever, interactions, "test") for name, retriever in retrievers.items()}
    record = {
        "seed": fitting.seed,
        "seconds": fitted.seconds,
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "best_step": fitted.steps,
        "steps": fitted.log[-1]["step"],
        "valid": {
            name: mean_ranking(ranks_of(retriever, interactions, "valid")) for name, retriever in retrievers.items()
        },
        "test": {name: mean_ranking(places) for name, places in ranks.items()},
        "share_of_counts": blend.share,
        "settings": build_manifest_settings(fitted),
    }
    return record, ranks


def per_user(seeds: list[list[int]], metric: str) -> list[float]:
    """Ranks of all users, once per seed → each user's mean."""
    return [statistics.fmean(ranking_scores(place)[metric] for place in places) for places in zip(*seeds, strict=True)]


def intervals(seeds: list[list[int]]) -> dict[str, list[float]]:
    """Metric → the 95 % interval of its mean."""
    means = {metric: bootstrap_mean(per_user(seeds, metric)) for metric in SHOWN}
    return {metric: [mean.low, mean.high] for metric, mean in means.items()}


def difference(ours: list[list[int]], theirs: list[int]) -> dict[str, dict[str, Any]]:
    """Metric → mean difference to the baseline, interval, users that were won and lost."""
    found = {}
    for metric in COMPARED:
        pair = paired_bootstrap(per_user([theirs], metric), per_user(ours, metric))
        found[metric] = {
            "difference": pair.difference,
            "ci95": [pair.low, pair.high],
            "users_won": pair.wins,
            "users_lost": pair.losses,
        }
    return found


def measure(data: Path, seeds: int, numbering: Any, folder: Path) -> dict[str, Any]:
    started, cpu = time.perf_counter(), time.process_time()
    events = read_events(data)
    interactions = build_interactions(events, numbering=numbering)
    print(f"{detect_movielens_release(data) or events.name} → {interactions.counts()}", file=sys.stderr)
    made = {name: baseline(interactions) for name, baseline in BASELINES.items()}
    ranks = {name: ranks_of(retriever, interactions, "test") for name, retriever in made.items()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs, ours = [], []
    for seed in range(seeds):
        record, places = trained(interactions, replace(FitSettings(), seed=seed), folder, device)
        found = ", ".join(f"{name} recall@10 {scores['recall@10']:.4f}" for name, scores in record["test"].items())
        print(f"seed {seed}: {found}, {record['seconds']:.0f} s", file=sys.stderr)
        runs.append(record)
        ours.append(places)
    return {
        "data": events.name,
        "vintage": detect_movielens_release(data),
        "notes": list(events.notes),
        "numbering": numbering,
        "counts": {**interactions.counts(), "items_without_title_dropped": interactions.without_title},
        "baselines": {name: mean_ranking(places) for name, places in ranks.items()},
        "baselines_valid": {
            name: mean_ranking(ranks_of(retriever, interactions, "valid")) for name, retriever in made.items()
        },
        "seeds": runs,
        "mean": {
            name: {metric: statistics.fmean(run["test"][name][metric] for run in runs) for metric in scores}
            for name, scores in runs[0]["test"].items()
        },
        "ci95": {name: intervals([places[name] for places in ours]) for name in ours[0]},
        "against": BLENDED,
        "difference": {name: difference([places[name] for places in ours], ranks[BLENDED]) for name in ours[0]},
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "device": device,
        "threads": torch.get_num_threads(),
    }


def say(result: dict[str, Any]) -> None:
    print(f"{result['vintage'] or result['data']}")
    for note in result["notes"]:
        print(f"note: {note}")
    print(", ".join(f"{name} {value:,}" for name, value in result["counts"].items()))
    print(f"{'':12}" + "".join(f"{metric:>11}" for metric in SHOWN))
    lines = dict(result["baselines"])
    for name, mean in result["mean"].items():
        lines |= {f"{name} {run['seed']}": run["test"][name] for run in result["seeds"]} | {f"{name} mean": mean}
    for name, scores in lines.items():
        print(f"{name:12}" + "".join(f"{scores[metric]:11.4f}" for metric in SHOWN))
    for name, found in result["ci95"].items():
        print(
            f"{name}, 95 %: " + ", ".join(f"{metric} [{low:.4f}, {high:.4f}]" for metric, (low, high) in found.items())
        )
    for run in result["seeds"]:
        print(
            f"seed {run['seed']}: {run['seconds']:,.0f} s ({run['cpu_seconds']:,.0f} s of CPU time), "
            f"best at step {run['best_step']:,} of {run['steps']:,}, {run['share_of_counts']:.0%} counts in the blend; "
            f"validation ndcg@10 {run['valid']['lrurec']['ndcg@10']:.4f}, blend {run['valid']['blend']['ndcg@10']:.4f}"
        )
    print(f"in all {result['seconds']:,.0f} s, {result['cpu_seconds']:,.0f} s of CPU time")
    for name, metrics in result["difference"].items():
        for metric, line in metrics.items():
            low, high = line["ci95"]
            print(f"{name} minus {result['against']}, {metric}: {line['difference']:+.4f} [{low:+.4f}, {high:+.4f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--numbering", choices=("sorted", "published"), default="sorted")
    parser.add_argument("--threads", type=int, help="of the CPU; default: all")
    parser.add_argument("--keep", type=Path, help="keep checkpoints here, and go on from them")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    env.quiet_libraries()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(options.data, options.seeds, options.numbering, options.keep or Path(folder))
    except SureFitError as error:
        sys.exit(f"error: {error}")
    if options.json:
        print(json.dumps(result))
    else:
        say(result)


if __name__ == "__main__":
    main()
