"""`data.mix`: how often an epoch sees the rows of further sources, and which of them it may not see."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from surefit import recipes
from surefit.config.load import load_config
from surefit.config.resolve import iter_config_values, total_steps
from surefit.config.schema import DataSection
from surefit.core.errors import DataError
from surefit.data.read.load import load_rows
from surefit.data.rows.layouts import load_mixed, read_splits
from surefit.stages.run_context import count_training_rows

SFT = recipes.get_recipe("chat")


def rows(name: str, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{name} {i}", "completion": "x"} for i in range(count)]


@pytest.fixture
def split(write):
    """split({source: passes}, …) → (training prompts, held-out prompts, what was skipped)."""

    def make(mix, *, eval=0.2, seed=0, **options):
        section = DataSection(train=str(write("train.jsonl", rows("own", 40))), eval=eval, mix=mix, **options)
        train, held_out = read_splits(section, SFT, seed)
        return prompts(train), prompts(held_out), train.skipped

    return make


def prompts(examples) -> list[str]:
    return [example.prompt[-1]["content"] for example in examples]


def test_whole_passes_are_counted_copies(write, split):
    twice = str(write("twice.jsonl", rows("b", 5)))
    train, held_out, skipped = split({str(write("once.jsonl", rows("a", 5))): 1, twice: 2})
    assert Counter(train)["a 3"] == 1
    assert Counter(train)["b 3"] == 2
    assert len(train) + len(held_out) == 40 + 5 + 10
    assert not any(prompt.startswith(("a", "b")) for prompt in held_out)
    assert skipped == []


def test_a_share_is_fixed_by_row_and_seed(write, split):
    source = str(write("more.jsonl", rows("m", 400)))

    def taken(passes, seed=0):
        return Counter(p for p in split({source: passes}, seed=seed)[0] if p.startswith("m"))

    quarter = taken(0.25)
    assert 70 <= len(quarter) <= 130  # 100 ± 3.5 standard deviations of 8.7
    assert set(quarter.values()) == {1}
    assert taken(0.25) == quarter
    assert taken(0.25, seed=1) != quarter
    assert set(quarter) < set(taken(0.5)), "a larger share keeps what was taken before"
    assert taken(2.25) == quarter + Counter({f"m {i}": 2 for i in range(400)})


def test_rows_added_later_change_no_old_row(write, split):
    source = write("more.jsonl", rows("m", 100))
    before = split({str(source): 0.5})[0]
    write("more.jsonl", rows("m", 150))
    assert set(before) <= set(split({str(source): 0.5})[0])


def test_a_held_out_prompt_is_not_trained_on(write, split):
    held = str(write("held.jsonl", [{"prompt": "m 3", "completion": "gold"}]))
    source = str(write("more.jsonl", rows("m", 6)))
    train, held_out, skipped = split({source: 2}, eval=held)
    assert held_out == ["m 3"]
    assert "m 3" not in train
    assert skipped == [f"{source}:4: its prompt is held out"]
    own = str(write("own.jsonl", rows("own", 40)))
    train, held_out, skipped = split({own: 1})
    assert not set(train) & set(held_out)
    assert len(skipped) == len(held_out)


def test_what_leaves_nothing_to_train_on_is_refused(write, split):
    held = str(write("held.jsonl", rows("h", 3)))
    with pytest.raises(DataError, match=r"the same rows as data\.eval") as refused:
        split({held: 1}, eval=held)
    assert refused.value.field == f"data.mix.{held}"
    with pytest.raises(DataError, match="every prompt of its 3 examples is held out"):
        split({str(write("copy.jsonl", rows("h", 3))): 1}, eval=held)
    with pytest.raises(DataError, match=r"0\.001 of 2 examples selects none") as refused:
        split({str(write("two.jsonl", rows("two", 2))): 0.001})
    enough = float(refused.value.help.split()[1])
    assert any(prompt.startswith("two") for prompt in split({str(write("two.jsonl", rows("two", 2))): enough})[0])


def test_bad_rows_of_a_source_are_named(write, split):
    source = str(write("bad.jsonl", [*rows("m", 2), {"prompt": "m", "completion": ""}]))
    with pytest.raises(DataError) as refused:
        split({source: 1})
    assert (refused.value.path, refused.value.line) == (source, 3)
    _, _, skipped = split({source: 1}, bad_rows="skip")
    assert skipped == [f"{source}:3: completion: empty"]
    with pytest.raises(DataError) as refused:
        split({f"{source}x": 1})
    assert refused.value.field == f"data.mix.{source}x"


def test_the_steps_count_the_mixed_rows(write):
    source = str(write("more.jsonl", rows("m", 10)))
    path = write("run.yaml", "")
    text = f"{{model: {{name_or_path: surefit/nano}}, data: {{train: x.jsonl, eval: y.jsonl, mix: {{{source}: 2.5}}}}, "
    path.write_text(text + "train: {global_batch_size: 5}, output_dir: out}")
    config = load_config(path).config
    own = load_rows(str(write("train.jsonl", rows("own", 40))))
    mixed = {source: load_mixed(source, config.data)}
    assert count_training_rows(config, own, mixed) == (40, 25)
    assert count_training_rows(config, own, {}) == (None, 0)
    assert total_steps(config, 40, 25) == 13
    assert dict(iter_config_values(config))["data.mix"] == {source: 2.5}, "a path's dots are not taken for sections"


def test_check_names_the_source_that_cannot_be_used(write, monkeypatch, tmp_path):
    from surefit.stages.checking import run_check
    from surefit.stages.run_context import load_run_context

    monkeypatch.chdir(tmp_path)
    write("train.jsonl", rows("own", 400))
    write("good.jsonl", rows("m", 30))
    write("bad.jsonl", [{"prompt": "m", "completion": ""}])
    config = (
        "model: {name_or_path: surefit/nano}\ndata:\n  train: train.jsonl\n  eval: 0.1\n  mix:\n"
        "    good.jsonl: 2\n    bad.jsonl: 1\n    missing.jsonl: 1\noutput_dir: out\nhardware: {gpu: cpu}\n"
    )
    found = load_run_context(write("run.yaml", config))
    assert list(found.mixed) == ["good.jsonl", "bad.jsonl"]
    assert found.resolved.total_steps is None, "not all rows are counted"
    wrong = [finding for finding in run_check(found)["findings"] if finding["code"] == "DAT001"]
    assert {(Path(one["path"]).name, one["field"]) for one in wrong} == {
        ("run.yaml", "data.mix.missing.jsonl"),
        ("bad.jsonl", "completion"),
    }
    fine = config.replace("    bad.jsonl: 1\n    missing.jsonl: 1\n", "")
    assert load_run_context(write("run.yaml", fine)).resolved.total_steps == 7  # ⌈(360 + 60) / 64⌉
