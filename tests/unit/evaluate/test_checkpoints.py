"""Every checkpoint scored: the same answers as the variants have, kept, claimed, and never deleted."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET

import pytest
import torch
from tests.unit.evaluate.test_runner import LETTERS, RECIPE, examples_of, letters, letters_once, lines_of

from surefit.checkpoint import manager
from surefit.checkpoint.files import WEIGHTS, list_steps
from surefit.core.errors import ConfigError, ModelError
from surefit.core.lock import hold_lock
from surefit.core.rundir import read_json
from surefit.evaluate import inference
from surefit.evaluate.answers import list_scored_variants, read_run, select_tuned_variant
from surefit.evaluate.checkpoints import score_checkpoints
from surefit.evaluate.curve import draw_checkpoint_curve
from surefit.evaluate.runner import score_variants
from surefit.model.saved import load_adapted, load_saved

__all__ = ["letters", "letters_once"]  # fixtures
pytestmark = pytest.mark.usefixtures("one_thread")


def checkpoint(run, step, weights):
    return manager.save_checkpoint(
        run.run.checkpoints, step, manager.CheckpointState(weights, {"step": torch.zeros(1)}, {})
    )


@pytest.fixture
def three(letters):
    """step-10 has learnt nothing, step-20 and step-30 are the adapter that was trained."""
    model = load_adapted(letters.config.model, letters.run.adapter, letters.hardware)
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_" in name}
    fresh = {name: torch.zeros_like(p) if ".lora_B." in name else p for name, p in trained.items()}
    for step, weights in ((10, fresh), (20, trained), (30, trained)):
        checkpoint(letters, step, weights)
    return letters


def scored(run, on_progress=lambda *progress: None, **changes):
    section = run.config.evaluate.model_validate({**run.config.evaluate.model_dump(), **changes})
    config = run.config.model_copy(update={"evaluate": section})
    return score_checkpoints(config, RECIPE, run.hardware, run.run, examples_of(LETTERS), on_progress)


def texts(run, variant):
    return [(line["text"], line["scores"]) for line in lines_of(run, "eval", variant)]


def test_each_checkpoint_answers_as_the_model_it_is(three):
    found = scored(three)
    score_variants(three.config, RECIPE, three.hardware, three.run, {"eval": examples_of(LETTERS)}, ["base", "adapter"])
    assert texts(three, "step-10") == texts(three, "base")
    assert texts(three, "step-20") == texts(three, "step-30") == texts(three, "adapter")
    assert [point["step"] for point in found["checkpoints"]] == [10, 20, 30]
    adapter = read_json(three.run.eval / "eval" / "adapter.json")["metrics"]["exact_match"]
    assert found["checkpoints"][1]["mean"] == adapter["mean"]
    assert found["checkpoints"][1]["ci95"] == adapter["ci95"]
    assert found["base"] is None
    assert scored(three)["base"]["mean"] == 0.0, "scored in between"


def test_the_best_and_whether_its_lead_is_more_than_chance(three):
    best = scored(three)["best"]
    assert best["variant"] == "step-20", "of equals the earlier"
    assert best["confidence"] == pytest.approx(0.975)
    over = {one["variant"]: one for one in best["over"]}
    assert over["step-10"]["more_than_chance"]
    assert over["step-10"]["interval"][0] > 0
    assert (over["step-30"]["difference"], over["step-30"]["more_than_chance"]) == (0.0, False)
    assert best["more_than_chance"] is False, "of all others, or it is not the best"


def test_what_has_been_scored_is_kept_and_everything_else_is_as_before(three, monkeypatch):
    first = scored(three)
    before = {path: path.stat().st_mtime_ns for path in three.run.eval.glob("eval/step-*")}
    monkeypatch.setattr(inference, "generate", None)
    assert scored(three) == first
    assert {path: path.stat().st_mtime_ns for path in three.run.eval.glob("eval/step-*")} == before
    assert read_json(three.run.eval / "checkpoints.json") == {k: v for k, v in first.items() if k != "passed_over"}
    assert len(list_steps(three.run.checkpoints)) == 3


def test_other_settings_ask_again(three, monkeypatch):
    scored(three)
    again = scored(three, max_new_tokens=3)
    assert [point["truncated"] for point in again["checkpoints"]][1] == 8
    monkeypatch.setattr(inference, "generate", None)
    shutil.rmtree(three.run.checkpoints / "step-30")
    left = scored(three, max_new_tokens=3)
    assert [point["there"] for point in left["checkpoints"]] == [True, True, False]


def test_checkpoints_that_go_and_come_while_it_works(three):
    weights = manager.load_checkpoint(three.run.checkpoints / "step-20").weights

    def on_progress(done, total, text):
        if text.startswith("step-10"):
            shutil.rmtree(three.run.checkpoints / "step-20", ignore_errors=True)
            checkpoint(three, 40, weights)

    found = scored(three, on_progress)
    assert [point["step"] for point in found["checkpoints"]] == [10, 30, 40]
    assert found["passed_over"] == [], "it was gone before its turn"


def test_one_that_goes_between_being_taken_and_read(three, monkeypatch):
    load = manager.load_checkpoint

    def late(path):
        if path.name == "step-20":
            shutil.rmtree(path)
        return load(path)

    monkeypatch.setattr(manager, "load_checkpoint", late)
    found = scored(three)
    assert [point["step"] for point in found["checkpoints"]] == [10, 30]
    assert found["passed_over"][0].startswith("step-20: deleted before it was scored")


def test_a_damaged_one_is_named_and_left_where_it_is(three):
    path = three.run.checkpoints / "step-20" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    found = scored(three)
    assert found["passed_over"] == [f"step-20: the content of {WEIGHTS} has changed since it was written"]
    assert path.exists()


def test_two_at_work_do_not_score_the_same_one(three, monkeypatch):
    """Another process, as the lock sees it: the same file opened apart."""
    import fcntl

    claim = three.run.eval / "eval" / ".step-20.lock"
    claim.parent.mkdir(parents=True)
    with open(claim, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = scored(three)
        assert found["passed_over"] == ["step-20: another process is scoring it"]
        assert [point["step"] for point in found["checkpoints"]] == [10, 30]
    assert [point["step"] for point in scored(three)["checkpoints"]] == [10, 20, 30]


def test_the_run_may_be_in_use(three):
    with hold_lock(three.run.lock, "train"):
        assert len(scored(three)["checkpoints"]) == 3


def test_a_checkpoint_of_another_model_is_refused(three):
    checkpoint(three, 40, {"base_model.model.lm_head.lora_A.default.weight": torch.ones(2, 2)})
    with pytest.raises(ModelError, match="in the checkpoint"):
        scored(three)


def test_without_checkpoints(letters):
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        scored(letters)


def test_killed_it_goes_on_with_the_answers_it_had(three, monkeypatch):
    real, asked = inference.generate, []

    def counted(*arguments):
        asked.append(len(arguments[2]))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(inference, "generate", counted)
    monkeypatch.setattr(inference, "PORTION", 1)
    with pytest.raises(KeyboardInterrupt):
        scored(three)
    assert (three.run.eval / "eval" / "step-10.partial.jsonl").exists()
    scored(three)
    assert sum(asked) - asked[1] == 24, "the four answers that were there are not asked for again"
    assert not list(three.run.eval.glob("eval/*.partial*"))


def test_a_whole_model(train_tiny, tiny_tokenizer):
    from tests.helpers.tokens import tokenize_example

    sequences = [tokenize_example(example, tiny_tokenizer).input_ids for example in examples_of(LETTERS)]
    run = train_tiny(sequences, kind="full", steps=20)
    model = load_saved(run.config.model, run.run.model, run.hardware)
    checkpoint(run, 20, dict(model.named_parameters()))
    found = scored(run)
    score_variants(run.config, RECIPE, run.hardware, run.run, {"eval": examples_of(LETTERS)}, ["model"])
    assert texts(run, "step-20") == texts(run, "model")
    assert (found["best"]["variant"], found["best"]["more_than_chance"]) == ("step-20", None)


def test_they_can_be_compared_but_are_not_what_ships(three):
    scored(three)
    score_variants(three.config, RECIPE, three.hardware, three.run, {"eval": examples_of(LETTERS)}, ["base", "adapter"])
    there = list_scored_variants(three.run, "eval")
    assert there == ["base", "step-10", "step-20", "step-30", "adapter"]
    assert select_tuned_variant(there) == "adapter"
    assert select_tuned_variant(["base", "step-10"]) is None
    assert len(read_run(f"{three.run.path}:step-10", "eval").lines) == 8
    assert list(read_json(three.run.eval_summary)["sets"]["eval"]["variants"]) == ["base", "adapter"]


def point(step, mean, there=True):
    ends = [mean - 0.1, mean + 0.1]
    return {"step": step, "variant": f"step-{step}", "mean": mean, "ci95": ends, "there": there}


def test_the_picture():
    points = [point(100 * n, 0.4 + 0.01 * n, there=n != 2) for n in range(1, 40)]
    best = {"variant": "step-3900", "more_than_chance": False}
    found = {"metric": "a<b", "n": 1_200, "checkpoints": points, "best": best}
    found["base"] = {"mean": 0.2, "ci95": [0.1, 0.3]}
    root = ET.fromstring(draw_checkpoint_curve(found))
    inside = "{http://www.w3.org/2000/svg}"
    circles = root.findall(f"{inside}circle")
    assert len(circles) == 39
    assert [circle.get("fill") for circle in circles].count("#ffffff") == 1, "the one that is gone"
    heights = [float(circle.get("cy")) for circle in circles]
    assert heights == sorted(heights, reverse=True)
    written = [text.text for text in root.findall(f"{inside}text")]
    assert written[0] == "a<b by checkpoint: 1,200 rows"
    assert "its lead may be due to chance; dashed: the base" in written[1]
    steps = [text for text in written if text.replace(",", "").isdigit()]
    assert 5 < len(steps) < 20, "so many that they do not touch"
    assert [text for text in written if text.startswith("0.")] == ["0.0", "0.2", "0.4", "0.6", "0.8"], "round"
    ET.fromstring(draw_checkpoint_curve(found | {"checkpoints": points[:1], "base": None}))


@pytest.mark.parametrize(
    ("mean", "labels"),
    [(0.1, ["0.00", "0.05", "0.10", "0.15", "0.20"]), (50.0, ["49.90", "49.95", "50.00", "50.05", "50.10"])],
)
def test_the_lines_across_the_picture_are_at_round_numbers(mean, labels):
    found = {"metric": "m", "n": 2, "checkpoints": [point(1, mean)], "base": None}
    root = ET.fromstring(draw_checkpoint_curve(found | {"best": {"variant": "step-1", "more_than_chance": None}}))
    written = [text.text for text in root.findall("{http://www.w3.org/2000/svg}text")]
    assert [text for text in written if "." in text and text[0].isdigit() and "%" not in text] == labels


def test_one_checkpoint_by_its_name_beside_the_base(three):
    found = score_variants(
        three.config, RECIPE, three.hardware, three.run, {"eval": examples_of(LETTERS)}, ["step-20", "base"]
    )
    assert list(found["sets"]["eval"]["variants"]) == ["base", "step-20"]
    assert texts(three, "step-20") != texts(three, "base")
    (pair,) = (p for p in found["sets"]["eval"]["comparisons"] if p["metric"] == "exact_match")
    assert (pair["a"], pair["b"], pair["wins"]) == ("base", "step-20", 8)


def test_a_checkpoint_that_is_not_there_or_damaged_is_refused(three):
    with pytest.raises(ConfigError) as missing:
        score_variants(three.config, RECIPE, three.hardware, three.run, {"eval": examples_of(LETTERS)}, ["step-25"])
    assert "no checkpoint step-25" in missing.value.message
    assert missing.value.help.startswith("there are step-10, step-20, step-30")
    file = next((three.run.checkpoints / "step-20").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="step-20 cannot be scored"):
        score_variants(three.config, RECIPE, three.hardware, three.run, {"eval": examples_of(LETTERS)}, ["step-20"])
