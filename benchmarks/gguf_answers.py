"""Does llama.cpp, given an exported GGUF file, answer as the merged model does, template and end included?

    pip install llama-cpp-python
    surefit export RUN --format gguf && python benchmarks/gguf_answers.py RUN [FILE.gguf …] [--prompts 50] [--json]

Held-out rows of the run are asked twice, greedily: of merged/ by SureFit, and of the GGUF file by llama.cpp, which gets
the conversation only and renders and tokenises it with what the file holds. Compared are the prompts' token ids, the
answers' texts, and how they ended. Where an answer is another one, the merged model's logits at the first token that
differs say how near it was to llama.cpp's choice: a gap within the error of the format is rounding, a large one is not.

Exits with 1 where a prompt becomes other tokens, or no answer of a file is the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch


class Run:
    """A run's held-out conversations, and what its merged model answers.

    Attributes:
        messages, prompts: of each row, as a chat and as token ids.
        answers: the merged model's.
    """

    def __init__(self, target: Path, count: int) -> None:
        from surefit.config.schema import ModelSection
        from surefit.core.sampling import evenly_spaced_indices
        from surefit.data.rows.layouts import read_splits
        from surefit.data.tokens.tokenize import tokenize_prompt
        from surefit.generate.engine import DecodingConfig, generate
        from surefit.model.load import load_model
        from surefit.model.tokenizer import load_tokenizer
        from surefit.stages.run_context import load_checked_run

        run = load_checked_run(target)
        config = run.resolved.config
        _, held_out = read_splits(config.data, run.recipe, config.train.seed, run.rows, run.mixed)
        examples = [held_out.examples[index] for index in evenly_spaced_indices(len(held_out), count)]
        section = ModelSection(name_or_path=str(run.run.merged), dtype=config.model.dtype)
        self.tokenizer, self.model = load_tokenizer(section), load_model(section, run.hardware)
        self.limit, self.stop, self.exports = config.evaluate.max_new_tokens, run.recipe.stop, run.run.exports
        self.messages = [[dict(turn) for turn in example.prompt] for example in examples]
        self.prompts = [tokenize_prompt(example, self.tokenizer) for example in examples]
        self.answers = generate(
            self.model, self.tokenizer, self.prompts, DecodingConfig(self.limit, 25, stop=tuple(self.stop))
        )

    def gap(self, row: int, other: str) -> float:
        """The merged model's logit of its own token less that of the other answer's, where they part."""
        own, theirs = (
            [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
            for text in (self.answers[row].text, other)
        )
        same = next((at for at, (one, two) in enumerate(zip(own, theirs, strict=False)) if one != two), None)
        if same is None:  # one is cut off where the other goes on
            return float("nan")
        with torch.no_grad():
            logits = self.model(torch.tensor([self.prompts[row] + own[:same]])).logits[0, -1]
        return float(logits[own[same]] - logits[theirs[same]])


def asked(run: Run, file: Path) -> dict[str, Any]:
    """What llama.cpp makes of every row."""
    import llama_cpp

    context = max(map(len, run.prompts)) + run.limit + 8
    began = time.monotonic()
    llama = llama_cpp.Llama(
        str(file), n_ctx=context, verbose=False, n_threads=torch.get_num_threads(), logits_all=False
    )
    metadata = llama.metadata
    written = llama_cpp.llama_chat_format.Jinja2ChatFormatter(
        metadata["tokenizer.chat_template"],
        eos_token=llama.detokenize([llama.token_eos()], special=True).decode(),
        bos_token=llama.detokenize([llama.token_bos()], special=True).decode(),
    )
    tokens, same, ended, others = 0, 0, 0, []
    for row, messages in enumerate(run.messages):
        text = written(messages=messages).prompt
        ids = llama.tokenize(text.encode(), add_bos=False, special=True)
        tokens += ids == run.prompts[row]
        settings = {"temperature": 0.0, "max_tokens": run.limit, "stop": list(run.stop)}
        answer = llama.create_chat_completion(messages, **settings)["choices"][0]
        mine, theirs = run.answers[row], answer["message"]["content"] or ""
        ended += (answer["finish_reason"] == "length") == mine.truncated
        if theirs.strip() == mine.text.strip():
            same += 1
        else:
            others.append({"row": row, "merged": mine.text, "llama.cpp": theirs, "gap": run.gap(row, theirs)})
    return {
        "file": str(file), "bytes": file.stat().st_size, "prompts": len(run.messages), "prompts_same": tokens,
        "answers_same": same, "ends_same": ended, "ended": sum(not answer.truncated for answer in run.answers),
        "others": others, "seconds": time.monotonic() - began,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run with merged/")
    parser.add_argument("files", type=Path, nargs="*", help="by default the run's export/gguf/model.gguf")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    run = Run(options.run, options.prompts)
    files = options.files or [run.exports / "gguf/model.gguf"]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        sys.exit(f"{missing[0]} is not there: `surefit export {options.run} --format gguf` makes one")
    found = [asked(run, file) for file in files]
    print(json.dumps(found) if options.json else "\n".join(map(text, found)))
    sys.exit(any(each["prompts_same"] < each["prompts"] or not each["answers_same"] for each in found))


def text(found: dict[str, Any]) -> str:
    total = found["prompts"]
    lines = [
        f"{found['file']}, {found['bytes'] / 2**20:.0f} MiB: of {total} prompts {found['prompts_same']} are the same "
        f"tokens, {found['answers_same']} have the same answer, {found['ends_same']} end alike "
        f"({found['ended']} of the merged model's end by themselves); {found['seconds']:.0f} s"
    ]
    for other in found["others"]:
        lines.append(f"  row {other['row']}, gap {other['gap']:.3f}")
        lines += [f"    {name:9} {other[name][:200]!r}" for name in ("merged", "llama.cpp")]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
