"""Pairs packed as two documents and with their prompt once, on the same model: seconds, memory and differences.

python benchmarks/shared_prompts.py [--model surefit/nano] [--prompts 64,256,1000] [--answers 50,200] [--pairs 1]
                                    [--device cpu] [--dtype float32] [--repeat 1] [--json FILE]

Forward and backward of dpo with LoRA (rank 8 on all linear layers, random factors) on a micro batch of random tokens.
On a CPU the seconds are of the processor, on one thread; each measurement has a process of its own, so that its peak
memory is its own. "off by" are the largest differences of the answers' log-probabilities, in nats, and of the
gradient, as a share of its largest number.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from surefit.config.schema import ModelSection, ObjectiveSection
from surefit.data.tokens.collate import Item, collate_packed, describe_pairs
from surefit.data.tokens import prompt_share
from surefit.data.tokens.shared_prompts import collate_shared
from surefit.model.attention import use_varlen
from surefit.model.load import load_model
from surefit.train.objectives.pairs import PairObjective

LAYOUTS = ("two documents", "shared prompt")


def random_pairs(pairs: int, prompt: int, answer: int, vocabulary: int) -> list[Item]:
    """Return pairs of random tokens, all with these lengths."""
    rng = np.random.default_rng(0)
    items = []
    for _ in range(pairs):
        start = rng.integers(3, vocabulary, prompt)
        for _ in range(2):
            ids = np.concatenate([start, rng.integers(3, vocabulary, answer)])
            items.append((ids, np.where(np.arange(len(ids)) < prompt, -100, ids)))
    return items


def measure_layout(args: argparse.Namespace) -> dict[str, Any]:
    """Run one layout in this process; its log-probabilities and gradients go to `args.tensors`."""
    torch.set_num_threads(1)
    prompt_share.LEAST_SHARE = 0.0  # every prompt is shared, however short: the rule comes from these numbers
    cuda = args.device == "cuda"
    base = load_model(ModelSection(name_or_path=args.model, dtype=args.dtype), SimpleNamespace(kind=args.device))
    torch.manual_seed(0)
    model: Any = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    model.to(args.device).train()
    use_varlen(model)
    items = random_pairs(args.pairs, args.prompt, args.answer, base.config.get_text_config().vocab_size)
    batch = collate_shared(items) if args.layout == LAYOUTS[1] else collate_packed(items)
    batch |= describe_pairs(items, np.full((args.pairs, 2), -10.0 * args.answer, np.float32))
    objective = PairObjective(ObjectiveSection(name="dpo", beta=0.1))
    start_bytes = peak_bytes(cuda)
    seconds = []
    for _ in range(args.repeat + cuda):  # a GPU's first time chooses kernels
        model.zero_grad()
        sums: list[torch.Tensor] = []
        begin = clock(cuda)
        loss = objective.loss_of(objective.totals([batch]), True, [], sums)(model, batch)
        loss.backward()
        seconds.append(clock(cuda) - begin)
    used = peak_bytes(cuda) - (0 if cuda else start_bytes)
    tensors = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    torch.save(tensors | {"log_probs": sums[-1][4:6].cpu() / args.pairs}, args.tensors)
    return {
        "layout": args.layout, "prompt": args.prompt, "answer": args.answer, "pairs": args.pairs,
        "tokens": batch["input_ids"].numel(), "seconds per pair": min(seconds) / args.pairs, "peak bytes": used,
    }  # fmt: skip


def clock(cuda: bool) -> float:
    """Return seconds: of the processor, or of the wall once the GPU is done."""
    if not cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes(cuda: bool) -> int:
    return torch.cuda.max_memory_allocated() if cuda else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_layout(args: argparse.Namespace, layout: str, prompt: int, answer: int, tensors: Path) -> dict[str, Any]:
    """Measure one layout in a process of its own; this one has imported what it needs, and no GPU yet."""
    own = argparse.Namespace(**vars(args) | {"layout": layout, "prompt": prompt, "answer": answer, "tensors": tensors})
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure_layout, (own,))


def differences(one: Path, other: Path) -> tuple[float, float]:
    """Return the largest difference of log-probabilities, and of gradients as a share of the largest number."""
    first, second = torch.load(one), torch.load(other)
    log_probs = float((first.pop("log_probs") - second.pop("log_probs")).abs().max())
    largest = max(float(tensor.abs().max()) for tensor in first.values())
    return log_probs, max(float((first[name] - second[name]).abs().max()) for name in first) / largest


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure both layouts for all lengths, and print a line for each."""
    found = []
    columns = ("prompt", "answer", "saved", *(f"{name}: s/pair, MiB" for name in LAYOUTS), "faster", "off by")
    print(" | ".join(columns), flush=True)
    for prompt in args.prompts:
        for answer in args.answers:
            with tempfile.TemporaryDirectory() as folder:
                places = [Path(folder) / f"{number}.pt" for number in range(2)]
                two, once = (
                    run_layout(args, layout, prompt, answer, place)
                    for layout, place in zip(LAYOUTS, places, strict=True)
                )
                log_probs, gradient = differences(*places)
            line = {
                "prompt": prompt, "answer": answer, "saved tokens": 1 - once["tokens"] / two["tokens"],
                "two documents": two, "shared prompt": once,
                "speedup": two["seconds per pair"] / once["seconds per pair"],
                "log-probabilities off by": log_probs, "gradient off by": gradient,
            }  # fmt: skip
            found.append(line)
            sides = [f"{side['seconds per pair']:.3f}, {side['peak bytes'] / 2**20:,.0f}" for side in (two, once)]
            print(
                f"{prompt} | {answer} | {line['saved tokens']:.1%} | {sides[0]} | {sides[1]} | "
                f"{line['speedup']:.2f} × | {log_probs:.1e}, {gradient:.1e}",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="surefit/nano")
    parser.add_argument("--prompts", type=lambda text: [int(n) for n in text.split(",")], default=[64, 256, 1000])
    parser.add_argument("--answers", type=lambda text: [int(n) for n in text.split(",")], default=[50, 200])
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = compare(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
