"""`surefit prepare`, and training from what it has written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Surefit

from surefit.core.errors import EXIT_FINDINGS, EXIT_OK, EXIT_USAGE
from surefit.core.rundir import file_sha256
from surefit.data.rows.layouts import HELD_OUT
from surefit.data.tokens.cache import ARRAYS
from surefit.data.tokens.shard_manifest import MANIFEST
from surefit.data.tokens.shards import shard_sha256

SHARDS = ("--set", "data.tokenized=shards")


def losses(run: str) -> list[float]:
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines for key in ("loss", "eval_loss") if key in line]


@pytest.mark.slow
def test_training_from_shards_is_training_from_rows(surefit: Surefit, config: Path) -> None:
    assert surefit("prepare", config).code == EXIT_USAGE  # data.tokenized is not set
    answer = surefit("prepare", config, *SHARDS, "--json")
    assert answer.code == EXIT_OK, answer.text
    assert answer.json["manifest"]
    assert surefit("train", config, "--set", "output_dir=runs/rows").code == EXIT_OK
    Path("rows.jsonl").unlink()
    trained = surefit("train", config, *SHARDS, "--json")
    assert trained.code == EXIT_OK, trained.text
    assert trained.json["rows"]["kept"] == answer.json["rows"]
    assert losses("runs/one") == losses("runs/rows")
    assert surefit("merge", "runs/one").code == EXIT_OK
    scored = surefit("evaluate", "runs/one", "--json")
    assert scored.code == EXIT_OK, scored.text


@pytest.mark.slow
def test_a_resumed_run_sees_the_same_shards(surefit: Surefit, config: Path) -> None:
    surefit("prepare", config, *SHARDS)
    assert surefit("train", config, *SHARDS, "--set", "output_dir=runs/whole").code == EXIT_OK
    assert surefit("train", config, *SHARDS, "--set", "output_dir=runs/halves").code == EXIT_OK
    last = Path("runs/halves/checkpoints/step-3")
    for path in (*last.iterdir(), last):
        path.unlink() if path.is_file() else path.rmdir()
    assert surefit("train", "runs/halves", "--resume").code == EXIT_OK
    assert losses("runs/halves") == losses("runs/whole")
    weights = [Path("runs", name, "adapter/adapter_model.safetensors").read_bytes() for name in ("whole", "halves")]
    assert weights[0] == weights[1]

    rows = Path("rows.jsonl")
    rows.write_text(rows.read_text().replace('\\"person ', '\\"nobody '))  # the answers, not the prompts
    surefit("prepare", config, *SHARDS)
    again = surefit("train", "runs/halves", "--resume")
    assert again.code == EXIT_USAGE
    assert "data.train: content was" in again.text


def test_pairs_are_refused_before_anything_is_written(surefit: Surefit, config: Path) -> None:
    """Shards hold single answers: those of pairs would be the chosen ones alone."""
    answer = surefit("prepare", config, *SHARDS, "--set", "objective.name=dpo", "--json")
    assert answer.code == EXIT_USAGE
    assert "writes single answers, not pairs" in answer.text
    assert not Path("shards").exists()


def test_the_check_says_what_is_wrong_with_shards(surefit: Surefit, config: Path) -> None:
    missing = surefit("check", config, *SHARDS)
    assert missing.code == EXIT_FINDINGS
    assert "there is no prepared data" in missing.text
    assert "surefit prepare CONFIG" in missing.text
    surefit("prepare", config, *SHARDS)
    assert surefit("check", config, *SHARDS).code == EXIT_OK
    other = surefit("check", config, *SHARDS, "--set", "data.max_length=128")
    assert other.code == EXIT_FINDINGS
    assert "data.max_length 256 (now 128)" in other.text
    limited = surefit("check", config, *SHARDS, "--set", "data.limit=10")
    assert "data.limit" in limited.text
    assert limited.code == EXIT_FINDINGS
    Path("shards", MANIFEST).unlink()
    assert "unfinished: 1 shards, but no manifest" in surefit("check", config, *SHARDS).text


def test_shards_of_another_tokenizer_are_refused(surefit: Surefit, config: Path) -> None:
    surefit("prepare", config, *SHARDS)
    for name in (MANIFEST, "plan.json"):
        path = Path("shards", name)
        kept = json.loads(path.read_text())
        path.write_text(json.dumps(kept | {"tokenizer": "of another model", "fingerprint": "another"}))
    for verb in ("train", "prepare"):
        answer = surefit(verb, config, *SHARDS)
        assert answer.code == EXIT_USAGE
        assert "another tokenizer" in answer.text
    anew = surefit("prepare", config, *SHARDS, "--overwrite")
    assert anew.code == EXIT_OK, anew.text
    assert surefit("train", config, *SHARDS).code == EXIT_OK


def test_a_damaged_plan_is_named(surefit: Surefit, config: Path) -> None:
    surefit("prepare", config, *SHARDS)
    Path("shards/plan.json").write_text("{")
    answer = surefit("prepare", config, *SHARDS)
    assert answer.code == EXIT_USAGE
    assert "not a shard plan" in answer.text
    Path("shards/plan.json").unlink()
    assert surefit("prepare", config, *SHARDS).code == EXIT_OK


def test_the_plan_counts_what_the_manifest_counts(surefit: Surefit, config: Path) -> None:
    made = surefit("prepare", config, *SHARDS, "--json").json
    answer = surefit("plan", config, *SHARDS, "--set", "train.max_steps=null", "--quick", "--json")
    assert answer.code == EXIT_OK, answer.text
    assert answer.json["steps"]["total_steps"] == -(-made["rows"] // 4)
    assert answer.json["estimate"]["lengths"].startswith("the manifest of the prepared rows")


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b"])
def test_a_group_that_is_none_is_refused(surefit: Surefit, config: Path, shard: str) -> None:
    assert surefit("prepare", config, *SHARDS, "--shard", shard).code == EXIT_USAGE


def test_a_dry_run_writes_nothing(surefit: Surefit, config: Path) -> None:
    answer = surefit("prepare", config, *SHARDS, "--dry-run")
    assert "1 shards from" in answer.stdout
    assert not Path("shards").exists()


BILLION = """
import resource, sys, time
import numpy as np
from pathlib import Path
from surefit.data.tokens.shard_manifest import ShardedTokens
from surefit.train.sampler import batch_rows, fingerprint_training_rows
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.monotonic()
rows = ShardedTokens(Path(sys.argv[1]))
found = fingerprint_training_rows(rows)
longest = found.lengths.max()
seconds = time.monotonic() - start
for step in range(20):
    batch = batch_rows(step, 0, len(rows), 64)
    lengths = found.lengths[batch]
    assert lengths.max() <= longest
    assert [len(rows[row][0]) for row in batch] == lengths.tolist()
assert len(rows.lengths.longest(8)) == 8
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(len(rows), seconds, grown)
"""


@pytest.mark.slow
def test_a_billion_rows_start_at_once_and_take_no_memory(surefit: Surefit, config: Path) -> None:
    """10,000 shards of 100,000 rows, all of them links to one: more than a billion rows by the manifest."""
    import numpy as np

    surefit("prepare", config, *SHARDS)
    manifest = json.loads(Path("shards", MANIFEST).read_text())
    arrays = {name: np.load(f"shards/shard-000000/{name}.npy") for name in ("input_ids", "supervised", "offsets")}
    times = 100_000 // (len(arrays["offsets"]) - 1) + 1
    ends = np.concatenate([arrays["offsets"][1:] + n * arrays["offsets"][-1] for n in range(times)])
    large = Path("shards/large")
    large.mkdir()
    np.save(large / "offsets.npy", np.concatenate([[0], ends]))
    for name in ("input_ids", "supervised"):
        np.save(large / f"{name}.npy", np.tile(arrays[name], times))
    shutil.copy(f"shards/shard-000000/{HELD_OUT}", large)
    shutil.rmtree("shards/shard-000000")
    digests = {name: file_sha256(large / name) for name in (*(f"{name}.npy" for name in ARRAYS), HELD_OUT)}
    one = manifest["shards"][0] | {"rows": len(ends), "tokens": int(ends[-1]), "sha256": shard_sha256(digests)}
    manifest["shards"] = [one] * 10_000
    manifest["stats"]["kept"] = one["rows"] * 10_000
    Path("shards", MANIFEST).write_text(json.dumps(manifest))
    for number in range(10_000):
        Path(f"shards/shard-{number:06d}").symlink_to("large")
    program = subprocess.run([sys.executable, "-c", BILLION, "shards"], capture_output=True, text=True, check=True)
    count, _, grown = map(float, program.stdout.split())
    assert count > 1e9
    assert grown < 100


def write_kind(kind: str, folder: Path) -> Path:
    """40 documents, as text or as the tokens that the text becomes."""
    from surefit.config.schema import ModelSection
    from surefit.model.tokenizer import load_tokenizer

    texts = [f"document {n} " + "goes on " * (n % 9 + 1) for n in range(40)]
    path = folder / ("rows.txt" if kind == "text" else "tokens.jsonl")
    if kind == "text":
        path.write_text("\n".join(texts) + "\n")
        return path
    tokenizer = load_tokenizer(ModelSection(name_or_path="surefit/nano"))
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in (one.strip() for one in texts)]
    rows = [{"input_ids": one, "labels": [-100, *one[1:]]} for one in ids]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_documents_and_tokens_are_trained_on_from_memory_and_from_shards(surefit: Surefit, config: Path) -> None:
    found = {}
    for kind in ("text", "tokens"):
        path = write_kind(kind, Path())
        more = (
            "--set",
            "recipe=chat",
            "--set",
            f"data.train={path}",
            "--set",
            "data.eval=0.2",
            "--set",
            "evaluate.gate=null",
        )
        shards = ("--set", f"data.tokenized=shards-{kind}")
        checked = surefit("check", config, *more)
        assert checked.code == EXIT_OK, checked.text
        made = surefit("prepare", config, *more, *shards, "--json")
        assert made.code == EXIT_OK, made.text
        for name, where in (("memory", ()), ("shards", shards)):
            answer = surefit("train", config, *more, *where, "--set", f"output_dir=runs/{kind}-{name}", "--json")
            assert answer.code == EXIT_OK, answer.text
            assert answer.json["rows"]["kept"] == made.json["rows"]
        assert losses(f"runs/{kind}-memory") == losses(f"runs/{kind}-shards")
        found[kind] = made.json["tokens"] / made.json["rows"]
    assert found["text"] == pytest.approx(found["tokens"], rel=0.1)  # other rows are held out


def test_a_row_of_other_tokens_is_named_by_its_line(surefit: Surefit, config: Path) -> None:
    Path("tokens.jsonl").write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [1, 70000]}\n' * 10)
    more = ("--set", "recipe=chat", "--set", "data.train=tokens.jsonl", "--set", "data.eval=surefit/requests-eval")
    answer = surefit("prepare", config, *more, *SHARDS)
    assert answer.code == EXIT_USAGE
    assert "] input_ids: token id 70,000 is outside the tokenizer's vocabulary of" in answer.text
    assert "made with another tokenizer" in answer.text


TOKENS = ("--set", "recipe=chat", "--set", "data.train=tokens.jsonl", "--set", "data.eval=0.2", "--set", "evaluate={}")


def test_check_names_rows_of_other_tokens(surefit: Surefit, config: Path) -> None:
    Path("tokens.jsonl").write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [1, 70000]}\n' * 25)
    checked = surefit("check", config, *TOKENS)
    assert checked.code == EXIT_FINDINGS
    assert "25 of 50 rows cannot be used" in checked.text
    said = " ".join(checked.text.split())
    assert (
        "tokens.jsonl:2: error[DAT001] input_ids: token id 70,000 is outside the tokenizer's vocabulary of 1,536"
        in said
    )


def typed_tokens(bad: str | None = None, bad_rows: int = 1) -> Path:
    """A config whose rows are tokens, wherever it names some; in the file `bad` a few are another tokenizer's."""
    for n, name in enumerate(("train", "more", "held")):
        rows = [{"input_ids": [100 * n + row, 2, 3], "labels": [-100, 2, 3]} for row in range(20)]
        for row in rows[1 : 1 + bad_rows] if name == bad else ():
            row["input_ids"][0] = 70000
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("tokens.yaml").write_text("""\
recipe: chat
model: {name_or_path: surefit/nano}
data: {train: train.jsonl, mix: {more.jsonl: 1}, eval: held.jsonl, format: tokens, max_length: 64}
train: {max_steps: 2, global_batch_size: 4}
hardware: {gpu: cpu}
output_dir: out
""")
    return Path("tokens.yaml")


@pytest.mark.parametrize(
    ("file", "key"), [("train", "data.train"), ("more", "data.mix.more.jsonl"), ("held", "data.eval")]
)
def test_check_names_rows_of_other_tokens_wherever_they_are(file: str, key: str, surefit: Surefit) -> None:
    answer = surefit("check", typed_tokens(bad=file), "--json")
    assert answer.code == EXIT_FINDINGS
    (found,) = [each for each in answer.json["findings"] if each["severity"] == "error"]
    assert [found[name] for name in ("code", "path", "line", "field")] == ["DAT001", f"{file}.jsonl", 2, "input_ids"]
    assert "token id 70,000 is outside the tokenizer's vocabulary of 1,536" in found["message"]
    assert "tokenize them with this model's tokenizer" in found["help"]
    several = surefit("check", typed_tokens(bad=file, bad_rows=7), "--json").json["findings"]
    (head,) = [each for each in several if "7 of 20 rows cannot be used" in each["message"]]
    assert (head["path"], head["field"]) == (f"{file}.jsonl", key)
    if file != "held":  # whose rows an audit compares, and does not train on
        assert f"{file}.jsonl:2: " in surefit("audit", typed_tokens(bad=file)).text


def test_check_has_nothing_against_tokens_of_the_model(surefit: Surefit) -> None:
    answer = surefit("check", typed_tokens(), "--json")
    assert [each for each in answer.json["findings"] if each["severity"] == "error"] == []


def test_the_vocabulary_ends_where_check_says(surefit: Surefit, config: Path) -> None:
    for last, more, outside in ((1535, (), False), (1536, (), True), (1536, ("model.add_tokens=[<new>]",), False)):
        Path("tokens.jsonl").write_text("".join(f'{{"input_ids": [{n}, 2, {last}]}}\n' for n in range(50)))
        said = surefit("check", config, *TOKENS, *(f"--set={one}" for one in more)).text
        assert ("outside the tokenizer's vocabulary" in " ".join(said.split())) is outside, said


def test_text_beside_the_ids_of_another_tokenizer_is_trained_on(surefit: Surefit, config: Path) -> None:
    rows = [{"text": f"Once upon {n} times", "input_ids": [n, 70000]} for n in range(20)]
    Path("tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "ce upon 0 times" in surefit("check", config, *TOKENS, "--show", "1").stdout
    assert "outside" not in surefit("check", config, *TOKENS).text
    assert "outside" in surefit("check", config, *TOKENS, "--set", "data.format=tokens").text
