"""Mutated configs and data files through the real `surefit check`: a message each, within 2 s of CPU and 500 MB.

    python benchmarks/fuzz_inputs.py [--n 300] [--seed 0] [--only 17] [--hostile] [--json]

A third of the cases are hostile: a deleted directory, a full stdout, an encoding without the character, long paths,
deep JSON, tampered shards, tokenizers that panic or never end, templates that never end, Parquet and Arrow bombs,
headers of weights. Those that SureFit tries in a process of two seconds may take that much more. --hostile runs no
others.

Every case is a folder with a config and its data, of which one file is damaged: wrong types, truncated UTF-8, huge
numbers, deep nesting, anchors that expand, byte-order marks, CRLF, NULs, duplicate keys, long lines, flipped bytes. It
runs in a process of its own, forked from one that has checked a good file before, so that 300 cases take a minute; the
CPU seconds of that start are added to each case's own. A failure is a traceback, an exit code that is not 0 to 3, a
rule that failed, silence, or more than the limits; it is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CPU_LIMIT = 2.0
MEMORY_LIMIT = 500 * 1000 * 1000
TRIAL_SECONDS, TRIAL_MEMORY = 3.5, 1200 * 1000 * 1000
"""What a trial of a template, a tokenizer or an Arrow file in a process of its own adds (core/limited.py)."""
BRAKE_SECONDS = 20
"""CPU seconds after which a case is killed: well above the limit, so that the excess is measured."""
BRAKE_BYTES = 6 * 1024**3

CONFIG = """\
recipe: {recipe}
model: {{name_or_path: surefit/nano}}
data:
  train: {data}
  eval: 0.3   # a third
  max_length: 256
train:
  max_steps: 30
  learning_rate: 5e-3
  warmup_steps: 0.03
  global_batch_size: 8
lora: {{r: 8, target_modules: [q_proj, v_proj]}}
checkpoint: {{save_steps: auto, save_total_limit: 2}}
evaluate:
  max_new_tokens: 24
  gate: {{metric: exact_match, not_worse_than: base}}
lint: {{ignore: {{}}}}
output_dir: runs/fuzz
"""
OTHERS = {
    "axolotl.yml": "base_model: NousResearch/Llama-3.2-1B\nload_in_4bit: true\nadapter: qlora\nlora_r: 16\n"
    "lora_alpha: 32\nlora_target_linear: true\ndatasets:\n  - path: rows.jsonl\n    type: chat_template\n"
    "sequence_len: 4096\nsample_packing: true\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nnum_epochs: 1\n"
    "optimizer: adamw_bnb_8bit\nlearning_rate: 0.0002\nwarmup_steps: 10\nbf16: auto\nflash_attention: true\n",
    "llamafactory.yaml": "model_name_or_path: meta-llama/Llama-3.2-3B-Instruct\nstage: sft\ndo_train: true\n"
    "finetuning_type: lora\nlora_rank: 8\nlora_target: all\ndataset: identity\ntemplate: llama3\ncutoff_len: 2048\n"
    "output_dir: saves\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\n"
    "num_train_epochs: 3.0\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\nbf16: true\n",
    "accelerate.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
    "  fsdp_state_dict_type: SHARDED_STATE_DICT\nmachine_rank: 0\nmixed_precision: bf16\nnum_machines: 2\n"
    "num_processes: 8\nuse_cpu: false\n",
    "deepspeed.json": '{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "offload_param": {"device": '
    '"cpu"}}, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "train_batch_size": 32}\n',
    "adapter_config.json": '{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "a/b", '
    '"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}\n',
    "job.slurm": "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n"
    "#SBATCH --time=1-00:00:00\nsrun torchrun --nnodes 2 --nproc_per_node 4 \\\n  train.py --bf16\n",
}
"""Other tools' files, small and whole."""


@dataclass(frozen=True)
class Case:
    """What happened to one mutated input."""

    number: int
    what: str
    exit_code: int
    cpu_seconds: float
    peak_bytes: int
    said: str
    bug: str
    hostile: bool = False

    @property
    def failure(self) -> str | None:
        """Why this is not how a user's mistake should end; None where it is."""
        if self.exit_code not in (0, 1, 2, 3):
            return f"exit code {self.exit_code}"
        if "Traceback (most recent call last)" in self.said:
            return "a traceback"
        if "INT001" in self.said:
            return "a rule failed"
        if not self.said.strip():
            return "no message"
        if self.cpu_seconds > (CPU_LIMIT + TRIAL_SECONDS * self.hostile) * slowness():
            return f"{self.cpu_seconds:.1f} s of CPU"
        limit = TRIAL_MEMORY if self.hostile else MEMORY_LIMIT
        return f"{self.peak_bytes / 1e6:.0f} MB" if self.peak_bytes > limit else None


@functools.cache
def slowness() -> float:
    """How much slower than the cores on which the limits were set this one is now; at least 1.

    Processor seconds are no constant: on a virtual machine whose host is busy the same loop takes two to four times as
    many. The reference is half a million additions in 0.03 s.
    """

    def once() -> float:
        start, total = time.process_time(), 0
        for number in range(500_000):
            total += number
        return time.process_time() - start

    return max(1.0, min(once() for _ in range(3)) / 0.03)


def rows(draw: random.Random) -> list[dict[str, object]]:
    """Rows of the shapes that the recipes read."""
    kind = draw.choice(["call", "messages", "prompt"])
    made: list[dict[str, object]] = []
    for number in range(draw.randint(3, 60)):
        if kind == "call":
            tools = json.dumps([{"name": "ring", "description": "Call", "parameters": {"who": {"type": "str"}}}])
            answers = json.dumps([{"name": "ring", "arguments": {"who": f"person {number}"}}])
            made.append({"query": f"Ring person {number}", "tools": tools, "answers": answers})
        elif kind == "messages":
            turns = [{"role": "user", "content": f"What is {number} + 1?"}]
            made.append({"messages": [*turns, {"role": "assistant", "content": str(number + 1)}]})
        else:
            made.append({"prompt": f"Say {number} – ünïcode", "completion": f"It is {number}."})
    return made


def write_data(path: Path, records: list[dict[str, object]]) -> None:
    """The rows as .jsonl, .json, .csv or .parquet, written in a process of its own: pyarrow must not stay in ours."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in records), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, ensure_ascii=False, indent=1), encoding="utf-8")
    elif path.suffix == ".csv":
        import csv

        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows({key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}
                             for row in records)  # fmt: skip
    else:
        child = os.fork()
        if child == 0:
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(records), path)
            os._exit(0)
        os.waitpid(child, 0)


VALUES = (
    "[]", "{}", "null", "true", "-1", "0", "1e400", "-1e308", ".nan", ".inf", "9" * 5000, "0x" + "f" * 60, "'256'",
    "256,", "[256]", "!!python/object/apply:os.system [ls]", "!!int x", "&a [*a]", "*nowhere", "\u2028", "'\\0'",
    "x" * 10_000, "~/nowhere", "/dev/zero", "/dev/stdin", "..", "/", "hf_" + "a" * 30, "2 h", "no", "{a: {b: {c: 1}}}",
    "|\n      two\n      lines", '"\\ud800"', "https://user:secret@example.org/x", "surefit/no-such-sample",
)  # fmt: skip


def bomb(levels: int = 12) -> str:
    """Anchors that expand to 10^levels values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def other_value(text: str, draw: random.Random) -> str:
    """One value of a YAML or JSON text replaced."""
    lines = text.split("\n")
    number = draw.choice([n for n, line in enumerate(lines) if ":" in line] or [0])
    head, colon, _ = lines[number].partition(":")
    lines[number] = f"{head}{colon} {draw.choice(VALUES)}"
    return "\n".join(lines)


def doubled_line(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    line = draw.choice(lines)
    return "\n".join([*lines[: draw.randrange(len(lines))], line, *lines])


def reindented(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    number = draw.randrange(len(lines))
    lines[number] = draw.choice(["\t", " ", "   ", "- ", "? ", "---\n", "%YAML 9.9\n"]) + lines[number]
    return "\n".join(lines)


TEXT_CHANGES: dict[str, Callable[[str, random.Random], str]] = {
    "another value": other_value,
    "a line twice": doubled_line,
    "another indent": reindented,
    "an anchor bomb before": lambda text, draw: bomb() + text,
    "an anchor bomb alone": lambda text, draw: bomb(9),
    "nested lists": lambda text, draw: f"{text}\nx: " + "[" * draw.choice([50, 500, 5_000, 50_000]),
    "nested mappings": lambda text, draw: "{a: " * draw.choice([90, 5_000]) + "1" + "}" * 90,
    "nested blocks": lambda text, draw: "\n".join(" " * n + "a:" for n in range(draw.choice([100, 700]))),
    "long keys": lambda text, draw: text + "k" * draw.choice([1_000, 200_000]) + ": 1\n",
    "many keys": lambda text, draw: text + "".join(f"k{n}: {n}\n" for n in range(draw.choice([500, 20_000]))),
    "many items": lambda text, draw: f"{text}\nmany: [{', '.join(['1'] * 60_000)}]\n",
    "a long text": lambda text, draw: f"{text}\nlong: '{'lorem ipsum ' * 15_000}'\n",
    "CRLF": lambda text, draw: text.replace("\n", "\r\n"),
    "CR": lambda text, draw: text.replace("\n", "\r"),
    "a suppression": lambda text, draw: text + f"lint: {{ignore: {{{draw.choice(['SCH001', 'X', '1', '~'])}: why}}}}\n",
    "no line breaks": lambda text, draw: text.replace("\n", " "),
    "quotes": lambda text, draw: text.replace(draw.choice([":", " ", "{", "1"]), '"', 1),
}


def flipped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 4, 40])):
        if changed:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def with_inserted(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice([b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b[31m"]) + data[at:]


BYTE_CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped bits": flipped,
    "cut off": lambda data, draw: data[: draw.randrange(len(data) + 1)],
    "cut inside a character": lambda data, draw: data + "ü".encode()[:1],
    "odd bytes inside": with_inserted,
    "empty": lambda data, draw: b"",
    "blank": lambda data, draw: b"\n \n",
    "a byte-order mark": lambda data, draw: b"\xef\xbb\xbf" + data,
    "UTF-16": lambda data, draw: data.decode("utf-8", "replace").encode("utf-16"),
    "Latin-1": lambda data, draw: data.decode("utf-8", "replace").encode("latin-1", "replace"),
    "NULs": lambda data, draw: data.replace(b" ", b"\0"),
    "nothing but NULs": lambda data, draw: b"\0" * 100_000,
    "compressed": lambda data, draw: b"\x1f\x8b\x08" + data,
    "random bytes": lambda data, draw: draw.randbytes(2_000),
}
ROWS = (
    "[]", "null", "1", '"text"', "{}", "[[[]]]", '{"messages": null}', '{"messages": {"role": "user"}}',
    '{"messages": [{"role": "assistant"}]}', '{"messages": [1, "a"]}', '{"messages": []}', '{"query": 1}',
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": 7}]}',
    '{"query": "a", "tools": "[{", "answers": "[]"}', '{"query": "a", "tools": [null], "answers": [null]}',
    '{"query": "a", "tools": "[' + "[" * 900 + '", "answers": "[]"}', '{"prompt": NaN, "completion": Infinity}',
    '{"prompt": 1e999, "completion": -0}', '{"prompt": "a", "prompt": "b", "completion": "c"}',
    '{"prompt": "\\ud800", "completion": "x"}', '{"prompt": "a", "completion": ' + "9" * 6_000 + "}",
    "[" * 5_000 + "]" * 5_000, '{"a": ' * 3_000 + "1" + "}" * 3_000,
    '{"prompt": "a", "completion": "' + "long " * 400_000 + '"}',
    '{"prompt": "a"} {"prompt": "b"}', "{'prompt': 'a'}", '{"": "", " ": null}',
    "{" + ", ".join(f'"k{n}": {n}' for n in range(20_000)) + "}",
)  # fmt: skip


def with_rows(text: str, draw: random.Random) -> str:
    """Rows that no recipe can read, among the good ones or instead of them."""
    chosen = [draw.choice(ROWS) for _ in range(draw.choice([1, 5, 40]))]
    lines = [line for line in text.split("\n") if line] if draw.random() < 0.7 else []
    for row in chosen:
        lines.insert(draw.randrange(len(lines) + 1), row)
    return "\n".join(lines)


def inputs(draw: random.Random, folder: Path) -> tuple[Path, str]:
    """A folder with a config and data of which one is damaged; the file to check and what was done to it."""
    data = folder / f"rows{draw.choice(['.jsonl', '.jsonl', '.json', '.csv', '.parquet'])}"
    write_data(data, rows(draw))
    target = folder / "run.yaml"
    recipe = draw.choice(["function_calling", "chat"])
    target.write_text(CONFIG.format(recipe=recipe, data=data.name), encoding="utf-8")
    victim = draw.choice(["config", "config", "data", "data", "other"])
    if victim == "other":
        target = folder / draw.choice(list(OTHERS))
        target.write_text(OTHERS[target.name], encoding="utf-8")
    broken = data if victim == "data" else target
    if broken.suffix != ".parquet" and draw.random() < 0.6:
        changes = {"odd rows": with_rows} if victim == "data" else TEXT_CHANGES
        name = draw.choice(list(changes))
        text = changes[name](broken.read_text(encoding="utf-8"), draw)
        broken.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        name = draw.choice(list(BYTE_CHANGES))
        broken.write_bytes(BYTE_CHANGES[name](broken.read_bytes(), draw))
    return target, f"{broken.name}: {name}"


TEMPLATES = (
    "{{ ('x '*10000000)|wordwrap(1) }}", "{{ strftime_now('%Y'*10000000) }}", "{{ lipsum(100000) }}",
    "{% set x = 'ab ' * 10000000 %}{{ x|list|sort|join|urlize }}", "{% for i in range(99999) %}{{ i }}{% endfor %}" * 9,
    "{% set x = 'x' * 60000000 %}{{ x.replace('', 'y' * 100000) }}", "{{ ('{0}' * 60000).format('x' * 9000000) }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "{{ messages",
    "{{ 9 ** 99999999 }}", "{{ 'a' * 10 ** 12 }}",
)  # fmt: skip
PATTERNS = (
    "(a|a|aa|e|e|ee|.|.)*(?=ZZZZ)$", "(a+)+$", r"(\w+\s?)+$", "(x+x+)+y", "(.*)*(.*)*(.*)*z", "(", "[", "\\p{Nope}",
    "(?=(a+))+b", r"(\s*\S*)*$",
)  # fmt: skip


def _nano(folder: Path, **changes: str) -> Path:
    """A copy of surefit/nano, and the config that names it; file → its content."""
    from surefit.nano import PATH

    copy = Path(shutil.copytree(PATH, folder / "model"))
    for name, text in changes.items():
        (copy / name.replace("__", ".")).write_text(text, encoding="utf-8")
    target = folder / "run.yaml"
    target.write_text(target.read_text(encoding="utf-8").replace("surefit/nano", "model"), encoding="utf-8")
    return copy


def slow_template(folder: Path, draw: random.Random) -> None:
    _nano(folder, chat_template__jinja=draw.choice(TEMPLATES))


def odd_tokenizer(folder: Path, draw: random.Random) -> None:
    copy = _nano(folder)
    content = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    kind = draw.choice(["pattern", "pattern", "empty", "negative"])
    if kind == "pattern":
        pattern = {"Regex": draw.choice(PATTERNS)}
        content["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    elif kind == "empty":
        content["model"]["vocab"] = {}
    else:
        content["model"]["vocab"][next(iter(content["model"]["vocab"]))] = -1
    (copy / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def odd_header(folder: Path, draw: random.Random) -> None:
    copy = _nano(folder)
    file = next(copy.glob("*.safetensors"))
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = draw.choice([key for key in header if key != "__metadata__"])
    changes: list[tuple[str, object]] = [
        ("dtype", draw.choice(["Q9", None, "F64"])), ("shape", [1, 1]), ("shape", [2**62, 2**62]), ("shape", "x"),
        ("data_offsets", [0, 8]), ("data_offsets", [8, 0]), ("data_offsets", [0, 2**63]),
    ]  # fmt: skip
    key, value = draw.choice(changes)
    header[name][key] = value
    if draw.random() < 0.2:
        header["__metadata__"] = draw.choice([[1], {"a": 1}, "x"])
    raw = json.dumps(header).encode()
    rest = content[8 + length :] + bytes(draw.choice([0, 0, 9]))
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + rest)


def bomb_of_columns(folder: Path, draw: random.Random) -> None:
    name = draw.choice(["bomb.parquet", "bomb.arrow"])
    rows_, size = draw.choice([(3000, 1_000_000), (200, 1_000_000), (50, 9_000_000), (2_000_000, 10)])
    child = os.fork()
    if child == 0:
        import pyarrow as pa
        from pyarrow import parquet

        values = pa.DictionaryArray.from_arrays(pa.array([0] * rows_, pa.int32()), ["w" * size])
        table = pa.table({"prompt": values, "completion": values})
        if name.endswith(".parquet"):
            parquet.write_table(table, folder / name)
        else:
            options = pa.ipc.IpcWriteOptions(compression=draw.choice([None, "zstd", "lz4"]))
            with pa.ipc.new_file(folder / name, table.schema, options=options) as file:
                file.write_table(table)
        os._exit(0)
    os.waitpid(child, 0)
    (folder / "run.yaml").write_text(CONFIG.format(recipe="chat", data=name), encoding="utf-8")


def deep_json(folder: Path, draw: random.Random) -> None:
    deep = draw.choice(["[", '{"a":']) * draw.choice([200, 100_000])
    where = draw.choice(["rows.json", "config.json", "tokenizer_config.json"])
    if where == "rows.json":
        (folder / where).write_text(deep, encoding="utf-8")
        (folder / "run.yaml").write_text(CONFIG.format(recipe="chat", data=where), encoding="utf-8")
    else:
        (_nano(folder) / where).write_text(deep, encoding="utf-8")


def tampered_shards(folder: Path, draw: random.Random) -> None:
    made = Path(os.environ["SUREFIT_CACHE"]) / "shards-made"
    shutil.copytree(made, folder, dirs_exist_ok=True)
    manifest = folder / "shards" / "manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    place = draw.choice([content, content["shards"][0], content["stats"]])
    values: list[object] = [None, -1, "x", float("nan"), 10**15, [], {}, {"x": "y"}, 1.5, True]
    place[draw.choice(list(place))] = draw.choice(values)
    manifest.write_text(json.dumps(content), encoding="utf-8")
    if draw.random() < 0.3:
        file = draw.choice(sorted((folder / "shards").glob("shard-*/*")))
        file.write_bytes(flipped(file.read_bytes(), draw)[: draw.choice([None, 100, 0])])


HOSTILE: dict[str, Callable[[Path, random.Random], None]] = {
    "slow template": slow_template, "odd tokenizer": odd_tokenizer, "odd header": odd_header,
    "bomb of columns": bomb_of_columns, "deep JSON": deep_json, "tampered shards": tampered_shards,
    "a deleted directory": lambda folder, draw: None, "a full stdout": lambda folder, draw: None,
    "an encoding without the character": lambda folder, draw: None, "a long path": lambda folder, draw: None,
}  # fmt: skip


def hostile_inputs(draw: random.Random, folder: Path) -> tuple[Path, str]:
    """A folder with a sound config of which one thing is hostile."""
    write_data(folder / "rows.jsonl", rows(random.Random(0)))
    (folder / "run.yaml").write_text(CONFIG.format(recipe="function_calling", data="rows.jsonl"), encoding="utf-8")
    kind = draw.choice(list(HOSTILE))
    HOSTILE[kind](folder, draw)
    return folder / "run.yaml", kind


def run_case(number: int, seed: int, startup: float, hostile: bool = False) -> Case:
    """Build case `number` of `seed` and check it in a forked process."""
    draw = random.Random(f"{seed}/{number}")
    hostile = hostile or number % 3 == 2
    with tempfile.TemporaryDirectory(prefix="surefit-fuzz-") as name, tempfile.TemporaryDirectory() as beside:
        folder = Path(name)
        target, what = (hostile_inputs if hostile else inputs)(draw, folder)
        said = Path(beside) / "said.log"
        child = os.fork()
        if child == 0:
            _check(target, said, what if hostile else "")
        folder.mkdir(exist_ok=True)
        _, status, used = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        text = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
        bugs = [path.read_text(encoding="utf-8") for path in folder.glob("surefit-bug-*.txt")]
    return Case(
        number, what, code, startup + used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, text, "\n".join(bugs),
        hostile,
    )  # fmt: skip


def _check(target: Path, said: Path, what: str = "") -> None:
    """`surefit check` in this process, which ends with its exit code."""
    from surefit.cli.app import app

    resource.setrlimit(resource.RLIMIT_CPU, (BRAKE_SECONDS, BRAKE_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (BRAKE_BYTES, BRAKE_BYTES))
    signal.alarm(120)  # for what waits without computing
    os.chdir(target.parent)
    tempfile.tempdir = str(target.parent)
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    name = target.name
    if what == "a deleted directory":
        shutil.rmtree(target.parent)
    elif what == "a full stdout":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    elif what == "an encoding without the character":
        for stream_ in (sys.stdout, sys.stderr):
            stream_.reconfigure(encoding="ascii")  # type: ignore[union-attr]
    elif what == "a long path":
        name = "x/" * 3_000
    code = 70
    try:
        app(["check", name], standalone_mode=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 70
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def prepared() -> Iterator[float]:
    """Check a good file once, so that what every check imports is there, without a network or a cache.

    Yields the CPU seconds that this took: what a process that is not forked spends before its own work, and more.
    """
    os.environ.update(HF_HUB_OFFLINE="1", COLUMNS="200")
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(HF_HOME=cache, SUREFIT_CACHE=cache)
        from surefit.cli.app import app

        data, config = Path(cache) / "rows.jsonl", Path(cache) / "run.yaml"
        write_data(data, rows(random.Random(0)))
        config.write_text(CONFIG.format(recipe="function_calling", data=data), encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            app(["check", str(config)], standalone_mode=False)
        startup = time.process_time()
        made = Path(cache) / "shards-made"
        made.mkdir()
        turns = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n)}] for n in range(30)]
        write_data(made / "rows.jsonl", [{"messages": one} for one in turns])
        shards = CONFIG.format(recipe="chat", data="rows.jsonl\n  tokenized: shards")
        (made / "run.yaml").write_text(shards, encoding="utf-8")
        command = [sys.executable, "-m", "surefit", "prepare", "run.yaml"]
        subprocess.run(command, cwd=made, check=True, capture_output=True)
        yield startup


def fuzz(count: int, seed: int, only: int | None = None, hostile: bool = False) -> list[Case]:
    """Run the cases one after another."""
    with prepared() as startup:
        return [run_case(number, seed, startup, hostile) for number in (range(count) if only is None else [only])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone and show all it says")
    parser.add_argument("--hostile", action="store_true", help="hostile inputs alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    cases = fuzz(options.n, options.seed, options.only, options.hostile)
    failed = [case for case in cases if case.failure]
    summary = {
        "cases": len(cases), "failed": len(failed), "seed": options.seed,
        "exit_4": sum(case.exit_code == 4 for case in cases),
        "tracebacks": sum("Traceback (most recent call last)" in case.said for case in cases),
        "hostile": dict(sorted(Counter(case.what for case in cases if case.hostile).items())),
        "exit_codes": dict(sorted(Counter(case.exit_code for case in cases).items())),
        "cpu_seconds_max": round(max(case.cpu_seconds for case in cases), 2),
        "megabytes_max": round(max(case.peak_bytes for case in cases) / 1e6),
        "wall_seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip
    if options.json:
        print(json.dumps(summary | {"failures": [[case.number, case.what, case.failure] for case in failed]}))
    else:
        if options.only is not None:
            print(cases[0].said)
        for case in failed:
            print(f"FAILED {case.number} ({case.what}): {case.failure}")
            print(f"  again: python benchmarks/fuzz_inputs.py --seed {options.seed} --only {case.number}")
            print("  " + (case.bug or case.said).strip()[-1500:].replace("\n", "\n  "))
        print(", ".join(f"{key} {value}" for key, value in summary.items()))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
