"""Answers to the mistakes of a first hour, as a stranger reads them: what is asserted is what would mislead."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Surefit

from surefit.cli.plan import say_plan
from surefit.cli.render import Output
from surefit.cli.train import describe_run
from surefit.config.by_rows import decide_by_rows
from surefit.config.load import load_config
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts
from surefit.plan.find_advice import find_advice
from surefit.stages.planning import build_run_plan
from surefit.stages.run_context import load_checked_run

B7 = "Qwen/Qwen2.5-7B-Instruct"


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]


# Checks that were skipped


def test_what_was_skipped_has_a_reason_of_its_own(
    config: Path, surefit: Surefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread = surefit("check", config, "--set", "recipe=instruct")
    assert "the dataset was not looked at" in unread.stdout, "the rows are here and in order"
    away = surefit("check", config, "--set", "data.train=owner/name", "--set", "hardware.gpu=h1000")
    assert "the dataset is not on this machine" in away.stdout
    assert "the run's GPU could not be read" in away.stdout
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    absent = surefit("check", config, "--set", "model.name_or_path=owner/name")
    assert "the model and the tokenizer are not on this machine" in absent.stdout
    refused = surefit("check", config, "--set", "hardware.count=4", "--set", "parallel.mode=single")
    assert refused.code == 1
    assert "describes no whole run" not in refused.stdout


def test_a_fix_is_offered_for_the_config_that_was_checked(config: Path, surefit: Surefit) -> None:
    given = surefit("check", config, "--set", "train.method=full", "--set", "lora.r=8")
    assert "--fix" not in given.text, "nothing in the file is wrong"
    config.write_text(config.read_text() + "lora: {r: 8}\n")
    answer = surefit("check", config, "--set", "train.method=full")
    assert "check run.yaml --set train.method=full --fix" in answer.text.replace(str(config), "run.yaml")


# Places and examples


@pytest.mark.parametrize(
    ("key", "line"), [("data.train", 3), ("data.eval", 3), ("model.name_or_path", 2)], ids=["rows", "held out", "model"]
)
def test_a_missing_file_is_mended_in_the_config(config: Path, surefit: Surefit, key: str, line: int) -> None:
    before = {"data.train": "rows.jsonl", "data.eval": "0.5", "model.name_or_path": "surefit/nano"}[key]
    config.write_text(config.read_text().replace(before, "./gone/it.jsonl"))
    found = next(found for found in surefit("check", config, "--json").json["findings"] if found["field"] == key)
    assert (Path(found["path"]).name, found["line"]) == ("run.yaml", line)
    assert "gone/it.jsonl" in found["message"]


def test_no_name_is_proposed_for_its_ending_alone(config: Path, surefit: Surefit) -> None:
    far, near = (surefit("check", config, "--set", f"data.train={name}.jsonl").stdout for name in ("nowhere", "row"))
    assert ("did you mean" in far, "'rows.jsonl'" in near) == (False, True)


def test_a_number_is_shown_by_the_keys_own_default(config: Path, surefit: Surefit) -> None:
    answer = surefit("check", config, "--set", "train.num_train_epochs=three", "--json").json
    assert answer["help"].endswith("such as 1")
    answer = surefit("check", config, "--set", "train.learning_rate=three", "--json").json
    assert answer["help"].endswith("such as 0.0002")


def test_an_empty_key_in_a_block_is_no_comma_in_braces(config: Path, surefit: Surefit) -> None:
    text = config.read_text()
    block = text.replace("train: {max_steps: 3, global_batch_size: 4, learning_rate: 5e-3}", "train:\n  lr:")
    config.write_text(block)
    answer = surefit("check", config, "--json").json
    assert answer["field"] == "train.lr"
    assert "train.learning_rate" in answer["message"]
    assert "{ }" not in str(answer["help"])
    config.write_text(
        text.replace("data: {train: rows.jsonl", "lora: {target_modules: q_proj,v_proj}\ndata: {train: rows.jsonl")
    )
    problems = surefit("check", config, "--json").json
    assert any("{ }" in str(problem["help"]) for problem in [problems, *problems["also"]])


def test_an_open_brace_is_named_with_its_line(config: Path, surefit: Surefit) -> None:
    config.write_text(config.read_text().replace("surefit/nano}", "surefit/nano"))
    answer = surefit("check", config, "--json").json
    assert answer["code"] == "E2012"
    assert "{ of line 2" in answer["message"]


def test_a_key_without_its_section_gets_the_whole_option(config: Path, surefit: Surefit) -> None:
    answer = surefit("check", config, "--set", "seed=7", "--json").json
    assert (answer["code"], answer["help"]) == ("E2017", "write --set train.seed=7")


def test_a_run_in_a_misspelled_directory(config: Path, surefit: Surefit) -> None:
    Path("runs/one").mkdir(parents=True)
    answer = surefit("merge", "run/one", "--json").json
    assert "'runs/one'" in answer["message"]
    assert "--model" not in answer["help"], "it is no model of the hub"


def test_a_port_is_a_number(surefit: Surefit) -> None:
    assert "Input should be" not in surefit("ui", "--port", "abc").text


# Commands that follow


def test_verbose_is_offered_where_it_exists(config: Path, surefit: Surefit, capsys: pytest.CaptureFixture[str]) -> None:
    planned = build_run_plan(load_checked_run(config), quick=True)
    say_plan(Output(), planned)
    assert "--verbose" in capsys.readouterr().out
    say_plan(Output(), planned, verbose=None)
    assert "--verbose" not in capsys.readouterr().out
    assert "only `surefit plan`" in surefit("train", config, "--verbose").stderr


def test_the_next_command_keeps_cards_and_their_number(config: Path, surefit: Surefit) -> None:
    fits = surefit("plan", config, "--quick", "--gpu", "24GB", "--gpus", 2).stdout
    assert last_line(fits).replace(str(config), "run.yaml") == "Next: surefit train run.yaml --gpus 2"
    small = surefit("plan", config, "--quick", "--gpu", "1GB", "--set", f"model.name_or_path={B7}").stdout
    assert last_line(small).endswith("--gpu 1GB --optimize")


def test_nothing_is_resumed_in_silence(config: Path, surefit: Surefit) -> None:
    first = surefit("train", config, "--resume", "--set", "train.max_steps=1")
    assert (first.code, "no checkpoint to resume from" in first.text) == (0, True)
    again = surefit("train", config, "--resume", "--set", "train.max_steps=1")
    assert (again.code, "nothing was left to train" in again.text) == (0, True)
    shown = surefit("runs", "show", "runs/one").stdout
    assert "Scores" not in shown, "there are none"


def test_rows_that_nothing_reads_are_not_called_in_order(surefit: Surefit) -> None:
    Path("faq.csv").write_text("question,Our reply\n" + "".join(f"How {n}?,So {n}.\n" for n in range(30)))
    answer = surefit("audit", "faq.csv").stdout
    assert "no problems found" not in answer
    assert "question, Our reply" in answer
    assert "Next: surefit init" not in answer, "init does not read them either"


# What a run is said to do


@pytest.mark.usefixtures("surefit")  # which goes to the config's directory
def test_rows_of_data_mix_are_counted(config: Path) -> None:
    more = config.with_name("more.jsonl")
    more.write_text(config.with_name("rows.jsonl").read_text() * 2)
    run = load_checked_run(config, ["train.max_steps=null", f'data.mix={{"{more}": 0.5}}'])
    _, steps = describe_run(run)
    assert "about 60 rows (40 of data.mix, 20 held out) × 1 epoch = 15 optimizer steps" in steps


def test_no_rows_are_not_uncounted_rows(config: Path) -> None:
    auto = load_config(config, ["train.global_batch_size=auto", "train.per_device_train_batch_size=3"]).config
    for rows, reason in ((0, "no row is left to train on"), (None, "the rows are not counted")):
        value, why = decide_by_rows(auto, rows, 1)["train.global_batch_size"]
        assert reason in why
        assert value % 3 == 0, "the micro batch divides a default too"


# Advice


def test_a_smaller_model_gets_settings_of_its_own(config: Path) -> None:
    large = "meta-llama/Llama-3.3-70B-Instruct"
    changes = ["model.revision=abc", "model.chat_template=llama3", 'lora.target_modules=["c_attn"]']
    loaded = load_config(config, [f"model.name_or_path={large}", *changes])
    options = {o.kind: o for o in find_advice(loaded, model_facts(large), hardware_facts("12GB")).options}
    smaller = options["model"].changes
    assert (smaller["model.revision"], smaller["model.chat_template"]) == (None, None)
    assert smaller["lora.target_modules"] == "all-linear"
    adapter = load_config(config, [f"model.name_or_path={large}", "lora.start_from=runs/old/adapter"])
    kinds = {option.kind for option in find_advice(adapter, model_facts(large), hardware_facts("12GB")).options}
    assert "model" not in kinds, "an adapter of the larger model"


def test_advice_is_for_the_batch_that_the_rows_decide(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def remember(resolved, model, hardware):
        tried.append(resolved.config.train.global_batch_size)
        return False

    loaded = load_config(config, [f"model.name_or_path={B7}", "train.global_batch_size=auto"])
    monkeypatch.setattr("surefit.plan.find_advice.fits_by_formula", remember)
    find_advice(loaded, model_facts(B7), hardware_facts("12GB"), counted=(240, 0.0))
    assert tried
    assert 64 not in tried, "the default of rows that nobody counted"


def test_no_card_is_proposed_for_a_cpu(config: Path) -> None:
    large = "meta-llama/Llama-3.3-70B-Instruct"
    loaded = load_config(config, [f"model.name_or_path={large}", "hardware.gpu=cpu", "lora.start_from=a"])
    assert "card" not in find_advice(loaded, model_facts(large), hardware_facts("cpu")).text()


def test_a_path_in_a_note_is_not_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = Output()
    out.err = type(out.err)(force_terminal=True, width=40, stderr=True, color_system=None)
    path = "/a/directory/" + "/".join(["of", "many", "parts"] * 4) + "/rows.jsonl"
    out.note(f"not looked at: {path}")
    assert path in capsys.readouterr().err
