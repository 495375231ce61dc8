"""`surefit plan`: what it says to a person and to a script, what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.cli.conftest import Surefit, row

from surefit import nano


def test_a_plan_says_whether_it_fits_and_what_it_leaves_out(surefit: Surefit, config: Path) -> None:
    planned = surefit("plan", config, "--gpu", "t4", "--json")
    assert planned.code == 0, planned.text
    assert planned.json["device"]["name"] == "T4"
    estimate = planned.json["estimate"]
    assert (estimate["how"], estimate["verdict"]) == ("simulation", "fits")
    names = [phase["name"] for phase in estimate["phases"]]
    assert names[:3] == ["load", "first step", "step"]
    assert len(names) == len(set(names))
    assert {"save", "eval", "merge"} <= set(names)
    assert sum(term["bytes"] for term in estimate["peak"]["terms"]) <= estimate["peak_bytes"]
    assert estimate["low_bytes"] < estimate["peak_bytes"] + 2**28 < estimate["high_bytes"]
    assert planned.json["left_out"]

    assert planned.json["headline"].startswith("Fits: ")
    assert planned.json["advice"] is None

    text = surefit("plan", config, "--gpu", "t4").stdout
    assert text.splitlines()[0] == planned.json["headline"]
    assert [line.split()[0] for line in text.splitlines()[1:]] == [
        "run", "memory", "time", "disk", "rows", "--verbose", "Next:",
    ]  # fmt: skip
    text = surefit("plan", config, "--gpu", "t4", "--verbose").stdout
    assert text.splitlines()[0] == planned.json["headline"]
    for part in (
        "Peak memory by phase",
        "The fullest moment of a step",
        "A activations",
        "Fits: ",
        "of 14.75 GiB",
        "Not counted:",
    ):
        assert part in text, part


@pytest.mark.parametrize("columns", [40, 80])
def test_the_answer_fits_a_terminal(surefit: Surefit, config: Path, monkeypatch, columns: int) -> None:
    """The longest case: a size for the card, a model that does not fit, and what to change."""
    from rich.console import Console

    monkeypatch.setattr(Console, "is_terminal", property(lambda console: True))
    monkeypatch.setattr(Console, "width", property(lambda console: columns))
    model = ("--set", "model.name_or_path=Qwen/Qwen2.5-7B-Instruct", "--gpu", "12GB")
    lines = surefit("plan", config, "--quick", *model).stdout.splitlines()
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert plain.pop().startswith("Next: surefit plan "), "a command is not broken, to be copied"
    assert max(map(len, plain)) <= columns
    assert plain[0].startswith("Does not fit: needs ")
    if columns == 80:
        assert len(plain) <= 12
    change = " ".join(" ".join(plain).partition("change ")[2].split())
    assert change.startswith("set model.quantization: nf4; or a 24 GB card (--gpu rtx4090)")


@pytest.mark.parametrize("gpu", ["0GB", "12MB", "9999", "rtx4082", "3080"])
def test_a_card_that_cannot_be_planned_for_is_an_error(surefit: Surefit, config: Path, gpu: str) -> None:
    refused = surefit("plan", config, "--quick", "--gpu", gpu, "--json")
    assert (refused.code, refused.json["field"]) == (2, "hardware.gpu")
    in_file = surefit("check", config, "--set", f"hardware.gpu={gpu}", "--json")
    assert in_file.code == 1
    assert "hardware.gpu" in [finding["field"] for finding in in_file.json["findings"]]


def test_a_size_can_be_compared_with_cards(surefit: Surefit, config: Path) -> None:
    answer = surefit("plan", config, "--compare", "12GB,4090", "--price", "4090=0.4", "--json")
    assert answer.code == 0, answer.text
    size, card = answer.json["gpus"]
    assert (size["gpu"], size["verdict"], size["seconds"]) == ("a 12 GB card", "fits", None)
    assert card["cost"] > 0


@pytest.mark.slow
def test_a_plan_for_several_processes_is_that_of_the_fullest_and_says_what_they_exchange(
    surefit: Surefit, config: Path
) -> None:
    alone = surefit("plan", config, "--quick", "--gpu", "t4", "--json").json
    planned = surefit("plan", config, "--quick", "--gpu", "t4", "--gpus", "2", "--json")
    assert planned.code == 0, planned.text
    ranks = planned.json["ranks"]
    assert (ranks["mode"], ranks["processes"]) == ("ddp", 2)
    assert ranks["exchanged_bytes_per_step"] > 0
    assert alone["ranks"] is None
    assert planned.json["left_out"] == alone["left_out"]

    text = surefit("plan", config, "--gpu", "t4", "--gpus", "2", "--plot", "memory.svg", "--verbose").stdout
    assert text.splitlines()[0].partition(",")[0].endswith("on each of 2 GPUs")
    assert "Peak memory by phase, of one of 2 GPUs" in text
    assert "one of 2 × T4" in Path("memory.svg").read_text(encoding="utf-8")

    on_cpu = surefit("plan", config, "--quick", "--gpus", "2", "--verbose").stdout
    assert "Per process of 2 processes, ddp" in " ".join(on_cpu.split())
    assert "GPU" not in on_cpu, "the config asks for a CPU"


def test_a_quick_plan_needs_no_torch(config: Path) -> None:
    arguments = ["-X", "importtime", "-m", "surefit", "plan", str(config), "--quick", "--gpu", "h100"]
    done = subprocess.run([sys.executable, *arguments], cwd=config.parent, capture_output=True, text=True, check=False)
    assert "by the formula" in done.stdout, done.stderr[-2000:]
    assert not [line for line in done.stderr.splitlines() if line.rpartition("|")[2].strip() == "torch"]


def test_a_plot_is_valid_svg(surefit: Surefit, config: Path) -> None:
    assert surefit("plan", config, "--gpu", "l4", "--plot", "memory.svg").code == 0
    drawn = ElementTree.fromstring(Path("memory.svg").read_text(encoding="utf-8"))
    assert drawn.tag.endswith("svg")
    assert "L4" in "".join(drawn.itertext())
    refused = surefit("plan", config, "--plot", "memory.png")
    assert refused.code == 2
    assert "--plot memory.svg" in refused.text


@pytest.mark.slow
def test_fused_kernels_keep_less_and_are_no_disagreement(config: Path, surefit: Surefit) -> None:
    Path("long.jsonl").write_text("".join(json.dumps(row(f"{n} " + "Ada " * 900)) + "\n" for n in range(40)))
    length = ("--set", "data.train=long.jsonl", "--set", "data.max_length=8192")
    common = ("--gpu", "h100", "--json", *length, "--set", "speed.kernels=")
    without, fused = (surefit("plan", config, *common[:-1], f"{common[-1]}{on}").json for on in ("false", "true"))
    assert fused["estimate"]["peak_bytes"] < 0.97 * without["estimate"]["peak_bytes"]
    assert without["estimate"]["disagreement"] is None
    assert fused["estimate"]["disagreement"] is None


def test_compare_says_what_each_costs(surefit: Surefit, config: Path) -> None:
    answer = surefit("plan", config, "--compare", "h100,h200", "--price", "h200=3.6", "--json")
    assert answer.code == 0, answer.text
    h100, h200 = answer.json["gpus"]
    assert (h100["gpu"], h100["cost"], h100["verdict"]) == ("H100 80 GB", None, "fits")
    assert h200["cost"] == pytest.approx(h200["seconds"] / 1000)


@pytest.mark.slow
def test_optimize_prints_the_lines_to_write(surefit: Surefit, config: Path) -> None:
    answer = surefit("plan", config, "--gpu", "h100", "--optimize", "--set", "train.global_batch_size=2")
    assert answer.code == 0, answer.text
    assert "per_device_train_batch_size: 2  # × 1 = the same global batch" in answer.stdout
    assert "gradient_checkpointing: false" in answer.stdout


def test_solve_answers_how_long_the_context_can_be(surefit: Surefit, config: Path) -> None:
    answer = surefit("plan", config, "--gpu", "t4", "--solve", "max_length", "--json")
    assert answer.code == 0, answer.text
    assert answer.json["value"] % 64 == 0
    assert answer.json["high_bytes"] <= 14.75 * 2**30


def test_plan_against_a_run_that_was_trained(surefit: Surefit, config: Path) -> None:
    assert surefit("train", config).code == 0
    answer = surefit("plan", config, "--against", "runs/one", "--json")
    assert answer.code == 0, answer.text
    rows = {row["what"]: row for row in answer.json["rows"]}
    assert rows["optimizer steps"]["actual"] == 3
    assert abs(rows["one checkpoint"]["error"]) < 0.01
    assert abs(rows["adapter on disk"]["error"]) < 0.01
    assert any("measured on CUDA only" in note for note in answer.json["notes"])
    assert "They part most in" in surefit("plan", config, "--against", "runs/one").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "h1000"], "there is no GPU named 'h1000'"),
        (["--set", "train.global_batch_size=0"], "global_batch_size"),
        (["--set", "train.per_device_train_batch_size=0"], "per_device_train_batch_size"),
        (["--set", "lora.r=10000"], "rank 10,000 exceeds the hidden size of surefit/nano"),
        (["--compare", "t4,none"], "there is no GPU named 'none'"),
        (["--compare", ","], "no GPU is named"),
        (["--compare", "t4", "--price", "tee4=1"], "no GPU named 'tee4' is known"),
        (["--compare", "t4", "--price", "t4=-1"], "is not NAME=PRICE"),
        (["--compare", "t4", "--price", "t4=cheap"], "is not NAME=PRICE"),
        (["--solve", "max_lenght"], "did you mean"),
        (["--solve", "rank", "--against", "runs/one"], "cannot be combined"),
        (["--against", "runs/none"], "no training steps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_planned_is_said_clearly(
    surefit: Surefit, config: Path, arguments: list[str], said: str
) -> None:
    answer = surefit("plan", config, *arguments)
    assert answer.code == 2, answer.text
    assert said in answer.text
    assert "Traceback" not in answer.text


def test_a_model_without_layers(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 99, '
        '"num_attention_heads": 4, "num_hidden_layers": 0}'
    )
    answer = surefit("plan", config, "--set", f"model.name_or_path={tmp_path / 'empty'}")
    assert answer.code == 2, answer.text
    assert "num_hidden_layers" in answer.text


@pytest.mark.parametrize("where", ["directory", "hub"])
def test_a_model_of_no_catalogue_is_planned_from_its_config(
    surefit: Surefit, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / "hub/models--org--unknown"
    place = tmp_path / "base" if where == "directory" else repository / "snapshots/c0ffee"
    place.mkdir(parents=True)
    (place / "config.json").write_bytes((nano.PATH / "config.json").read_bytes())
    if where == "hub":
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text("c0ffee")
    name = str(place) if where == "directory" else "org/unknown"
    plan = surefit("plan", config, "--quick", "--json", "--set", f"model.name_or_path={name}")
    assert plan.code == 0, plan.text
    same = surefit("plan", config, "--quick", "--json").json
    kept = ("weights", "adapter", "optimizer", "gradients")
    found, expected = ([each for each in one["memory"] if each["term"] in kept] for one in (plan.json, same))
    assert found == expected != []
