"""What trackers are told when a stage after training has ended: names, rows, and nothing that could harm the stage."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from scored_run import certificate, scored_run, summary

from surefit.config.trackers import TelemetrySection
from surefit.core.errors import DataError, GateError
from surefit.core.rundir import RunDir, read_json, write_json
from surefit.stages import concluding
from surefit.stages.concluding import certificate_metrics, report_stage_to_trackers, score_metrics, select_example_rows
from surefit.stages.progress_listener import LineListener, ProgressListener
from surefit.telemetry import conclusion
from surefit.telemetry.conclusion import FinalReport, send_final_report

ASKED = TelemetrySection(mlflow_uri="http://127.0.0.1:1")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return scored_run(tmp_path / "run")


def test_scores_have_their_set_and_variant_and_the_ends_of_their_interval() -> None:
    found = score_metrics(summary())
    assert found["eval/merged/exact_match"] == 0.75
    assert (found["eval/merged/exact_match_low"], found["eval/merged/exact_match_high"]) == (0.5, 1.0)
    assert found["old_tools/base/exact_match"] == 0.5
    assert found["eval/merged_minus_base/exact_match"] == 0.25
    assert found["eval/merged_minus_base/exact_match_low"] == 0.125
    assert len(found) == 2 * 3 * 3


def test_a_gate_is_a_number_too() -> None:
    assert score_metrics(summary() | {"gate": {"passed": False}})["gate/passed"] == 0.0
    undecided = {"passed": False, "outcome": "cannot tell"}
    assert "gate/passed" not in score_metrics(summary() | {"gate": undecided})


def test_under_a_grammar_the_tuned_model_stands_against_the_base_under_one() -> None:
    found = summary()
    for scored in found["sets"].values():
        scored["variants"] = {f"{name}+grammar": value for name, value in scored["variants"].items()}
        (pair,) = scored["comparisons"]
        pair |= {"a": "base+grammar", "b": "merged+grammar"}
    assert "eval/merged+grammar_minus_base+grammar/exact_match" in score_metrics(found)


def test_the_certificate_is_whether_it_passed_and_what_was_measured() -> None:
    assert certificate_metrics(certificate()) == {
        "certificate/passed": 1.0,
        "certificate/reloaded_kl_max": 2e-6,
        "certificate/reloaded_argmax_agreement": 1.0,
    }
    assert certificate_metrics(certificate(passed=False))["certificate/passed"] == 0.0


def test_examples_are_the_question_both_answers_and_who_won(run: RunDir) -> None:
    found = select_example_rows(run, read_json(run.eval_summary))
    assert [row["outcome"] for row in found] == ["won", "lost", "same"] * 2
    assert found[1] == {
        "question": "Question 1", "expected": "gold 1", "base": "base says 1", "tuned": "merged says 1",
        "outcome": "lost",
    }  # fmt: skip


def test_at_most_twenty_from_all_over_the_set(tmp_path: Path) -> None:
    run = scored_run(tmp_path / "run", rows=100)
    assert [row["expected"] for row in select_example_rows(run, summary())] == [f"gold {5 * i}" for i in range(20)]


def test_secrets_go_before_texts_are_cut(tmp_path: Path) -> None:
    secret = "hf_" + "a1B2" * 10
    text = "x" * (concluding.LONGEST - 8) + " " + secret
    found = select_example_rows(
        scored_run(tmp_path / "run", text=text, prompt=f"<|user|>{secret}\nx<|end|>"), summary()
    )
    assert "hf_" not in str(found)
    assert found[0]["tuned"].endswith(" ***")
    assert found[0]["question"] == "*** x"


def test_long_texts_are_cut_and_half_characters_replaced(tmp_path: Path) -> None:
    found = select_example_rows(
        scored_run(tmp_path / "run", text="\ud800" + "y" * 9_000, prompt="word " * 9_000), summary()
    )
    assert found[0]["tuned"] == "?" + "y" * (concluding.LONGEST - 2) + "…"
    assert len(found[0]["question"]) == concluding.LONGEST + 2
    assert found[0]["question"].startswith("… ")


def test_no_examples_without_the_base_or_without_its_answers(run: RunDir) -> None:
    found = summary()
    (run.eval / "eval" / "base.predictions.jsonl").unlink()
    assert select_example_rows(run, found) == []
    for scored in found["sets"].values():
        del scored["variants"]["base"]
    assert select_example_rows(run, found) == []


# --- when it is sent ---


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[FinalReport]:
    found: list[FinalReport] = []

    def keep(one: FinalReport, section: TelemetrySection, run: RunDir) -> dict[str, str]:
        found.append(one)
        return {}

    monkeypatch.setattr(concluding, "send_final_report", keep)
    return found


def ended(run: RunDir, section: TelemetrySection | None = ASKED, first: bool = True, stage: str = "evaluate") -> str:
    """What is said while a stage ends."""
    said: list[str] = []
    with report_stage_to_trackers(run, stage, LineListener(said.append), section, first):
        pass
    return "\n".join(said)


def test_every_stage_sends_all_there_is(run: RunDir, sent: list[FinalReport]) -> None:
    run.report.write_text("page")
    assert ended(run) == ""
    (one,) = sent
    assert list(one.files) == [run.certificate, run.eval_summary, run.report]
    assert {"certificate/passed", "eval/merged/exact_match"} <= one.numbers.keys()
    assert len(one.examples) == 6


def test_nothing_is_sent_where_nobody_asked_or_nothing_is_trained_or_by_other_processes(
    run: RunDir, sent: list[FinalReport]
) -> None:
    ended(run, TelemetrySection())
    ended(run, None)  # resolved.yaml names none
    ended(run, first=False)
    run.adapter.rmdir()
    ended(run)
    assert sent == []


def test_the_trackers_are_those_of_the_run_where_a_stage_reads_no_config(
    tmp_path: Path, sent: list[FinalReport]
) -> None:
    ended(scored_run(tmp_path / "run", telemetry="{tensorboard: true}"), None)
    assert len(sent) == 1


def test_a_damaged_config_is_for_others_to_say(run: RunDir, sent: list[FinalReport]) -> None:
    run.resolved.write_text("][")
    assert ended(run, None) == ""
    assert sent == []


@pytest.mark.parametrize(
    ("error", "sent_then"), [(DataError("broken"), []), (GateError("not the same model"), [0.0])], ids=["broke", "gate"]
)
def test_what_did_not_pass_is_sent_and_what_broke_is_not(
    run: RunDir, sent: list[FinalReport], error: Exception, sent_then: list[float]
) -> None:
    def stage() -> None:
        with report_stage_to_trackers(run, "merge", ProgressListener(), ASKED):
            write_json(run.certificate, certificate(passed=False))
            raise error

    with pytest.raises(type(error)):
        stage()
    assert [one.numbers["certificate/passed"] for one in sent] == sent_then


def test_a_recipe_without_scores_of_single_rows_has_no_outcomes(run: RunDir) -> None:
    assert {row["outcome"] for row in select_example_rows(run, summary() | {"primary_metric": "corpus_score"})} == {""}


def test_a_damaged_summary_is_one_line(run: RunDir) -> None:
    run.eval_summary.write_text("{}")
    assert ended(run).startswith("the results could not be sent to the trackers (KeyError")


# --- sinks that hang, break or are not installed ---


class Hanging:
    released = threading.Event()

    def conclude(self, *given: Any) -> None:
        self.released.wait(30)


class Good:
    def __init__(self) -> None:
        self.given: tuple[Any, ...] = ()

    def conclude(self, *given: Any) -> None:
        self.given = given


class Broken:
    def conclude(self, *given: Any) -> None:
        raise RuntimeError("https://me:hunter2@host/ said no\nand more")


def test_one_that_hangs_or_breaks_costs_the_others_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    good = Good()
    sinks = [("Slow", Hanging()), ("Good", good), ("Bad", Broken())]
    monkeypatch.setattr(conclusion, "final_report_sinks", lambda config, run: iter(sinks))
    start = time.monotonic()
    faults = send_final_report(FinalReport({"a": 1.0}, [], []), ASKED, run, patience=0.5)
    Hanging.released.set()
    assert time.monotonic() - start < 5
    assert faults == {"Slow": "no answer within 0.5 s", "Bad": "RuntimeError: https://***@host/ said no"}
    assert good.given == ({"a": 1.0}, [], [])


def test_a_missing_package_is_said_and_prometheus_is_not_asked(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mlflow", "prometheus_client"):
        monkeypatch.setitem(sys.modules, module, None)
    section = TelemetrySection(mlflow_uri="http://127.0.0.1:1", prometheus_port=0)
    faults = send_final_report(FinalReport({}, [], []), section, run)
    assert list(faults) == ["MLflow"]
    assert "'.[mlflow]'" in faults["MLflow"]
