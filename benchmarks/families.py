"""Every decoder family that transformers knows, through every stage: what passes, is refused by `check`, or is a fault.

PYTHONPATH=src python benchmarks/families.py [--family NAME ...] [--out FILE] [--page FILE [--other FILE]] [--json]

Each family is a random model of some thousand parameters (family_shapes.py), in a process of its own with a limit of
time and memory. First transformers alone: it is made, saved, read back, and one backward pass gives finite gradients;
what fails there is transformers' own, and not counted. Then SureFit, each line a cell of docs/models.md:

    plan       the closed form; the simulation, whose peak is that of the same two steps with numbers in the tensors
    lora, full two optimizer steps on padded rows, interrupted after the first and resumed
    packed     two with `data.packing: true`
    merge      merged with its certificate; a full fine-tune, its certificate
    reload     plain transformers reads merged/, PEFT reads adapter/: the same logits; both generate
    scores     `surefit evaluate` answers with base, adapter and merged model
    nf4        two steps with LoRA over linear layers in NF4, a certified merge into the dequantised weights, reloaded

With --experts LoRA beside the experts too (`lora.experts`), and no full fine-tune; lines in a file of their own.

A cell passes, or is refused by `check`, or by what stands before the first step, in words; everything else is a fault.
--page writes the page from the lines of FILE; --other names those of a run with other versions, such as the oldest that
SureFit takes, which get a column beside them. FILE has a line per family, so a run that was stopped goes on where it
was; --family measures again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import family_shapes
import torch
from families_page import page
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers import logging as transformers_logging

import surefit
from surefit.core.errors import Interrupted
from surefit.facts.all_linear import without_gradient
from surefit.model.classes import auto_class
from surefit.plan.building import build_model
from surefit.plan.simulate import record_training, run_training
from surefit.plan.step_config import StepConfig, build_step_config
from surefit.plan.trace import Recorder
from surefit.stages.checking import CheckFailed, require_no_errors
from surefit.stages.planning import build_run_plan
from surefit.stages.progress_listener import LineListener
from surefit.stages.run_context import load_checked_run
from surefit.stages.training import train_run as train_run

ROOT = Path(__file__).parents[1]
SECONDS, BYTES = 300, 12 * 2**30
STEPS = 2
CELLS = ("plan", "lora", "lora packed", "lora merge", "reload", "scores", "full", "full packed", "full merge", "nf4")
WITH = f"transformers {version('transformers')}, PEFT {version('peft')} and torch {version('torch').partition('+')[0]}"
AS_SIMULATED = 0.01
"""Of the peak: what a router sends to an expert is known with numbers alone."""
MORE_SIMULATED = {"longcat_flash": 0.1}
"""Some of its experts give tokens back as they are; the simulation has all of them compute."""
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, with the ids of `family_shapes`."""
    words = {"<pad>": family_shapes.PAD, "<s>": family_shapes.BOS, "</s>": family_shapes.EOS}
    words |= {byte: len(words) + n for n, byte in enumerate(sorted(ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(words, []))
    bytes_only.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_only, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def rows(count: int = 10, first: int = 3) -> list[dict[str, Any]]:
    """Conversations of some twenty tokens."""
    return [{"prompt": f"{n} + {n}?", "completion": f"{2 * n}" + "." * (n % 4)} for n in range(first, first + count)]


def save_base(family: str, directory: Path) -> Any:
    """The family's random model with its tokenizer, in a folder as transformers saves it; the model.

    Raises:
        Exception: whatever transformers raises where it cannot train this family.
    """
    torch.manual_seed(0)
    config = family_shapes.config(family)
    make: Any = AutoModelForImageTextToText if family.endswith(family_shapes.IMAGES) else AutoModelForCausalLM
    model: Any = make.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # wide enough for logits that differ, whatever the class starts with
        if parameter.ndim > 1 or not parameter.any():  # a scale of zero would keep gradients from what is before it
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.generation_config.max_length = None
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return model


def trains_alone(family: str, directory: Path) -> bool:
    """Make the base, read it back, and see one backward pass of plain transformers; whether each token is predicted
    from those before it alone.

    Raises:
        Exception: it does not work.
    """
    made = save_base(family, directory).eval()
    model = read_back(directory)
    ids = torch.tensor([[5 + (7 * n) % 200 for n in range(24)], [9 + (11 * n) % 200 for n in range(24)]])
    attended = torch.ones_like(ids)
    with torch.no_grad():
        before, after = (each(input_ids=ids, attention_mask=attended).logits for each in (made, model.eval()))
        changed = ids.index_fill(1, torch.tensor([23]), 77)
        later = model(input_ids=changed, attention_mask=attended).logits
    torch.testing.assert_close(before, after, msg="what was saved reads back as another model")
    loss = model.train()(input_ids=ids, attention_mask=attended, labels=ids).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not (torch.isfinite(loss) and gradients and all(torch.isfinite(gradient).all() for gradient in gradients)):
        raise ValueError("the loss or a gradient is not finite")
    return float((later - after)[:, :20].abs().max()) < 1e-4


def settings(
    base: Path, out: Path, kind: str, packed: bool, experts: bool = False, quantization: str = "none"
) -> surefit.Config:
    """The run of one cell."""
    return surefit.Config.from_dict(
        {
            "model": {"name_or_path": str(base), "dtype": "float32", "quantization": quantization},
            "lora": {"r": 4, "lora_alpha": 8} | ({"experts": True} if experts else {}),
            "data": {"train": rows(), "eval": rows(3, 40), "max_length": 64, "packing": packed},
            "train": {
                "method": kind,
                "max_steps": STEPS, "num_train_epochs": 10, "global_batch_size": 4, "per_device_train_batch_size": 2,
                "learning_rate": 1e-2, "warmup_steps": 0,
            },
            "checkpoint": {"save_steps": 1},
            "evaluate": {"max_new_tokens": 4},
            "hardware": {"gpu": "cpu"},
            "output_dir": str(out),
        }
    )  # fmt: skip


class Family:
    """One family's cells, as they are filled."""

    def __init__(self, name: str, work: Path, experts: bool = False) -> None:
        self.name, self.base, self.work, self.experts = name, work / "base", work, experts
        self.cells: dict[str, dict[str, Any]] = {}

    def measure(self) -> dict[str, Any]:
        """The line of this family."""
        began = time.monotonic()
        line: dict[str, Any] = {"family": self.name, "experts": self.experts, "transformers": None, "causal": None}
        line["with"] = WITH
        try:
            line["causal"] = trains_alone(self.name, self.base)
            self._cells()
        except Exception as error:
            line["transformers"] = said(error)
        return line | {"cells": self.cells, "seconds": round(time.monotonic() - began, 1)}

    def _cells(self) -> None:
        lora = settings(self.base, self.work / "lora", "lora", packed=False, experts=self.experts)
        full = settings(self.base, self.work / "full", "full", packed=False)
        self._cell("plan", lambda: self._plan(lora))
        if self._cell("lora", lambda: self._train(lora)):
            self._cell("lora merge", lambda: surefit.merge(lora, quiet=True))
            self._cell("reload", self._reload)
            self._cell("scores", lambda: surefit.evaluate(lora, quiet=True))
        if not self.experts and self._cell("full", lambda: self._train(full)):
            self._cell("full merge", lambda: self._full(full))
        for kind in ("lora",) if self.experts else ("lora", "full"):
            packed = settings(self.base, self.work / f"{kind}-packed", kind, packed=True, experts=self.experts)
            self._cell(f"{kind} packed", lambda packed=packed: self._train(packed))
        if not self.experts:
            self._cell("nf4", self._nf4)

    def _cell(self, name: str, stage: Callable[[], Any]) -> bool:
        began = time.monotonic()
        try:
            stage()
            found = {"state": "passes"}
        except CheckFailed as error:
            first = next(each for each in error.findings if each["severity"] == "error")
            found = {"state": "refused", "rule": first["code"], "why": first["message"]}
        except Exception as error:
            found = {"state": "fault", "why": said(error), "where": origin(error)}
        self.cells[name] = found | {"seconds": round(time.monotonic() - began, 2)}
        return found["state"] == "passes"

    def _plan(self, config: surefit.Config) -> None:
        require_no_errors(surefit.check(config).document)
        if not surefit.plan(config, quick=True).document["memory_total_bytes"]:
            raise ValueError("the closed form has no total")
        document = surefit.plan(config).document
        if document["estimate"] is None or document["estimate"]["not_simulated"]:
            raise ValueError(f"not simulated: {[said for said in document['left_out'] if 'the simulation' in said]}")
        run = load_checked_run(config.loaded)
        setting = build_step_config(run.resolved, run.model, run.hardware)
        simulated, real = record_training(setting).peak()[0], allocated(setting)
        if not -AS_SIMULATED <= simulated / real - 1 <= MORE_SIMULATED.get(self.name, AS_SIMULATED):
            raise ValueError(f"the simulation has a peak of {simulated:,} bytes, and real tensors of {real:,}")

    def _train(self, config: surefit.Config) -> None:
        """Two steps, with an interruption after the first where rows are padded."""
        require_no_errors(surefit.check(config).document)
        run = load_checked_run(config.loaded)
        planned = build_run_plan(run, quick=True)  # training would simulate first
        interrupted = config.settings.data.packing is False

        def interrupt(progress: Any) -> None:
            if interrupted and progress.step == 1:
                signal.raise_signal(signal.SIGINT)

        with contextlib.suppress(Interrupted):
            done = train_run(run, LineListener(ignore, (interrupt,)), planned=planned)
        if interrupted:
            done = train_run(run, LineListener(ignore), resume=True, planned=planned)
        if done["steps"] != STEPS or done["rejected"] or (done["resumed_from"] == 1) != interrupted:
            raise ValueError(f"{done['steps']} steps, resumed from {done['resumed_from']}, {done['rejected']} rejected")

    def _nf4(self) -> None:
        config = settings(self.base, self.work / "nf4", "lora", packed=False, quantization="nf4")
        self._train(config)
        surefit.merge(config, quiet=True)
        self._require_whole(self.work / "nf4/merged")

    def _reload(self) -> None:
        """Plain transformers and PEFT read what was written, and compute the same."""
        run = self.work / "lora"
        merged, base = read_back(run / "merged").eval(), read_back(self.base)
        tuned: Any = PeftModel.from_pretrained(base, run / "adapter").eval()
        ids = torch.tensor([[5 + (7 * n) % 200 for n in range(16)]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            logits = [model(**inputs).logits for model in (merged, tuned)]
            torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
            for model in (merged, tuned):
                if model.generate(**inputs, max_new_tokens=4, do_sample=False).shape[1] <= ids.shape[1]:
                    raise ValueError("nothing was generated")
        self._require_whole(run / "merged")

    def _full(self, config: surefit.Config) -> None:
        surefit.merge(config, quiet=True)
        self._require_whole(self.work / "full/model")

    def _require_whole(self, result: Path) -> None:
        """Everything of the base is there, unless it learns from text as it was, and each class reads it as before."""
        before, after = (tensors_in(directory) for directory in (self.base, result))
        changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
        if before.keys() != after.keys() or any(map(without_gradient, changed)):
            raise ValueError("tensors that are not adapted were lost or changed")
        if not changed:
            raise ValueError("nothing was trained")
        # As transformers reads them: Moshi's own class gives a part of it another width when the file is read.
        was, now = (AutoConfig.from_pretrained(directory).to_dict() for directory in (self.base, result))
        kept = [name for name in was if name.endswith("_config") and name != "text_config"]
        for name in ("architectures", "model_type", *kept):
            if was[name] != now.get(name):
                raise ValueError(f"{name} of config.json was {was[name]} and is {now.get(name)}")
        logits = [logits_of(model) for model in readings(result)]
        if len(logits) != len(list(readings(self.base))):
            raise ValueError("a class that reads the base does not read the result")
        for each in logits[1:]:
            torch.testing.assert_close(each, logits[0], rtol=1e-3, atol=1e-3)


def allocated(setting: StepConfig) -> int:
    """Bytes in tensors at the fullest moment of two steps that are really computed."""
    model, recorder = build_model(setting, "cpu"), Recorder()
    with recorder:
        recorder.start("load")
        recorder.tag((*model.parameters(), *model.buffers()), "weights")
        run_training(model, setting, recorder)
        recorder.start("end")
    peak: int = recorder.trace.peak()[0]
    return peak


def read_back(directory: Path) -> Any:
    """The model as plain transformers reads it."""
    return auto_class(AutoConfig.from_pretrained(directory)).from_pretrained(directory, dtype=torch.float32)


def readings(directory: Path) -> Iterator[Any]:
    """The model by every class of transformers that knows its type.

    Raises:
        ValueError: weights are missing, or the files have some that the class does not know.
    """
    config = AutoConfig.from_pretrained(directory)
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            model, found = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
            beside = {name for name in found["unexpected_keys"] if not without_gradient(name)}
            if found["missing_keys"] or found["mismatched_keys"] or beside:
                raise ValueError(f"{kind.__name__} reads {directory.name} with {found}")
            yield model.eval()


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    """What it answers to sixteen tokens."""
    ids = torch.tensor([[5 + (7 * n) % 200 for n in range(16)]])
    logits: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model's files."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def ignore(text: str) -> None:
    """Who hears what a run says."""


def said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def origin(error: BaseException) -> str:
    """The last line of SureFit's own that the error passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "surefit" in Path(frame.filename).parts]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def child(name: str, experts: bool, answer: Any) -> None:
    """The process of one family."""
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # rows and plans are kept there
        answer.send(Family(name, Path(folder), experts).measure())


def measured(name: str, experts: bool = False) -> dict[str, Any]:
    """The line of one family, whatever becomes of its process."""
    forked = multiprocessing.get_context("fork")  # with all that is imported
    ours, theirs = forked.Pipe(duplex=False)
    process = forked.Process(target=child, args=(name, experts, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(SECONDS):
            return ours.recv()  # type: ignore[no-any-return]
        why = f"over {SECONDS} s"
    except EOFError:
        process.join()
        why = f"its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    died = {"state": "fault", "why": why, "where": "", "seconds": 0.0}
    line = {"family": name, "experts": experts, "transformers": None, "causal": None, "cells": {"plan": died}}
    line["with"] = WITH
    return line | {"seconds": float(SECONDS)}


def complete(line: dict[str, Any]) -> bool:
    """Whether every stage passes."""
    wanted = [name for name in CELLS if not (line["experts"] and name.startswith(("full", "nf4")))]
    return line["causal"] is True and all(line["cells"].get(name, {}).get("state") == "passes" for name in wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", help="only this one, again; may be repeated")
    parser.add_argument("--experts", action="store_true", help="with factors beside the experts")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="write docs/models.md there, from all lines of FILE")
    parser.add_argument("--other", type=Path, help="lines of a run with other versions, for the page")
    parser.add_argument("--json", action="store_true", help="print the lines")
    args = parser.parse_args()
    args.out = args.out or ROOT / ".cache" / ("families-experts.jsonl" if args.experts else "families.jsonl")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = read_lines(args.out) if args.out.exists() else {}
    todo = args.family if args.family is not None else [name for name in family_shapes.families() if name not in lines]
    import_all()
    began = time.monotonic()
    for number, name in enumerate(todo):
        line = lines[name] = measured(name, args.experts)
        with args.out.open("a") as out:
            out.write(json.dumps(line) + "\n")
        left = (time.monotonic() - began) / (number + 1) * (len(todo) - number - 1)
        print(json.dumps(line) if args.json else summary(line), flush=True)
        print(f"{number + 1} of {len(todo)}, {left / 60:.0f} min left", file=sys.stderr, flush=True)
    if args.page:
        other = read_lines(args.other).values() if args.other else ()
        args.page.write_text(page(lines.values(), CELLS, family_shapes.families(), other))
    return 0


def read_lines(file: Path) -> dict[str, dict[str, Any]]:
    """Family → its last line."""
    return {line["family"]: line for line in map(json.loads, file.read_text().splitlines())}


def import_all() -> None:
    """What every family imports, once, before the processes part. To run it here would start threads, which a fork
    leaves behind."""
    for room in ("checkpoint", "data", "evaluate", "generate", "merge", "model", "plan", "stages", "train"):
        place = importlib.import_module(f"surefit.{room}")
        for module in pkgutil.walk_packages(place.__path__, f"{place.__name__}."):
            with contextlib.suppress(ModuleNotFoundError):  # Triton comes with some builds of torch
                importlib.import_module(module.name)


def summary(line: dict[str, Any]) -> str:
    """A family on the terminal."""
    if line["transformers"]:
        return f"{line['family']}: transformers itself: {line['transformers']}"
    if complete(line):
        return f"{line['family']}: passes, {line['seconds']:.0f} s"
    wrong = [
        f"\n  {name}: {cell['state']} {cell.get('rule', '')} {cell.get('why', '')} {cell.get('where', '')}"
        for name, cell in line["cells"].items()
        if cell["state"] != "passes"
    ]
    kind = "" if line["causal"] else ", reads tokens ahead"
    return f"{line['family']}{kind}: {line['seconds']:.0f} s{''.join(wrong)}"


if __name__ == "__main__":
    sys.exit(main())
