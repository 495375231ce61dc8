"""The parts of the report: curves, timeline, settings, texts, colours, the vendored library."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from pathlib import Path

import pytest
import yaml

import surefit.report
from surefit.config.resolve import ResolvedConfig, ValueOrigin, iter_config_values, write_resolved
from surefit.config.schema import SureFitConfig
from surefit.core.rundir import RunDir
from surefit.core.sampling import evenly_spaced_indices
from surefit.report.artefacts import read_artefacts, read_settings
from surefit.report.build import embed_json
from surefit.report.curves import MAX_POINTS, build_training_curves, thin_points
from surefit.report.shapes import Event, Metrics
from surefit.report.text import percent, points, shorten_text, signed, utc
from surefit.report.timeline import attempts
from surefit.report.verdict import describe_training

ROOM = Path(surefit.report.__file__).parent


# Curves


def test_thinning_keeps_the_ends_and_every_peak() -> None:
    draw = random.Random(1)
    curve = [(step, draw.gauss(0, 1)) for step in range(1, 100_001)]
    curve[77_777] = (77_778, 50.0)
    curve[33_333] = (33_334, -50.0)
    kept = thin_points(curve)
    assert len(kept) <= MAX_POINTS
    assert kept == sorted(set(kept))
    assert {curve[0], curve[-1], curve[77_777], curve[33_333]} <= set(kept)
    assert set(kept) <= set(curve)


def test_thinning_keeps_the_extremes_of_every_stretch() -> None:
    curve = [(step, float((step * 7919) % 1009)) for step in range(10_000)]
    kept = set(thin_points(curve, limit=100))
    inner = curve[1:-1]
    for i in range(49):
        stretch = inner[i * len(inner) // 49 : (i + 1) * len(inner) // 49]
        values = [value for step, value in stretch if (step, value) in kept]
        assert min(values) == min(value for _, value in stretch)
        assert max(values) == max(value for _, value in stretch)


@pytest.mark.parametrize("count", [0, 1, 2, MAX_POINTS])
def test_short_curves_are_left_alone(count: int) -> None:
    curve = [(step, float(step)) for step in range(count)]
    assert thin_points(curve) == curve


def test_the_totals_are_sums_over_the_steps() -> None:
    lines = [
        Metrics(step=1, loss=3.0, seconds=2.0, tokens=100, memory_bytes=5),
        Metrics(step=2, loss=2.0, seconds=3.0, tokens=200, memory_bytes=9),
        Metrics(step=2, eval_loss=2.5),
        Metrics(step=3, rejected=True, seconds=1.0, tokens=50),
    ]
    found = build_training_curves(lines, [Event(time=0, stage="train", event="resumed", step=2)])
    assert found is not None
    assert (found.steps, found.last_step, found.seconds, found.tokens, found.peak_memory) == (3, 3, 6.0, 350.0, 9.0)
    assert found.rejected == [3]
    assert [(mark.step, mark.kind) for mark in found.marks] == [(2, "resumed"), (3, "rejected")]
    assert [(row.step, row.eval_loss) for row in found.table] == [(1, None), (2, 2.5), (3, None)]
    assert build_training_curves([Metrics(step=2, eval_loss=2.5)], []) is None


def test_of_two_lines_for_a_step_the_later_one_counts() -> None:
    found = build_training_curves([Metrics(step=2, loss=9.0), Metrics(step=1, loss=3.0), Metrics(step=2, loss=2.0)], [])
    assert found is not None
    assert found.charts[0].data()["x"] == [1, 2]
    assert found.charts[0].curves[0].points == [(1, 3.0), (2, 2.0)]


# Timeline


def timeline(*events: tuple[str, str]) -> list[tuple[str, str, int | None]]:
    lines = [
        Event(time=i, stage=stage, event=event, step=100 if event == "resumed" else None)
        for i, (stage, event) in enumerate(events)
    ]
    return [(a.stage, a.outcome, a.resumed_at) for a in attempts(lines)]


def test_each_attempt_has_an_outcome() -> None:
    assert timeline(
        ("train", "started"), ("train", "started"), ("train", "resumed"), ("train", "interrupted"),
        ("train", "started"), ("train", "resumed"), ("train", "finished"),
        ("merge", "started"), ("merge", "failed"), ("evaluate", "started"),
    ) == [
        ("train", "ended without a record", None), ("train", "interrupted", 100), ("train", "finished", 100),
        ("merge", "failed", None), ("evaluate", "no end recorded", None),
    ]  # fmt: skip


def test_an_end_without_a_beginning_and_unknown_events_do_no_harm() -> None:
    assert timeline(("merge", "finished"), ("train", "sneezed"), ("report", "started")) == [("merge", "finished", None)]


def test_the_time_taken_is_logged_or_else_the_difference() -> None:
    found = attempts([
        Event(time=10, stage="check", event="started"), Event(time=14, stage="check", event="finished"),
        Event(time=20, stage="plan", event="started"), Event(time=30, stage="plan", event="finished", seconds=9.5),
    ])  # fmt: skip
    assert [a.seconds for a in found] == [4, 9.5]


# Settings


def test_the_settings_are_those_that_resolve_wrote(tmp_path: Path) -> None:
    config = SureFitConfig.model_validate({
        "model": {"name_or_path": "a # b: 'c'", "dtype": "float32"},
        "lora": {"target_modules": ["q_proj", "v_proj"]},
        "data": {"train": "ü, [x].jsonl"},
        "evaluate": {"extra_sets": {"old": "old.jsonl"}},
        "output_dir": "runs/a",
    })  # fmt: skip
    origins = [
        ValueOrigin("user", "run.yaml:3"),
        ValueOrigin("--set"),
        ValueOrigin("default"),
        ValueOrigin("auto", "it # fits: 2 × 2"),
    ]
    provenance = {key: origins[i % 4] for i, (key, _) in enumerate(iter_config_values(config))}
    run = RunDir(tmp_path)
    write_resolved(ResolvedConfig(config, provenance, 1, None), run.resolved)
    found = read_artefacts(run)
    assert found.problems == {}
    assert found.settings is not None
    origins_found = {setting.key: (setting.origin, setting.detail) for setting in found.settings}
    written = {key for key in provenance if not key.startswith("objective.") or key == "objective.name"}
    assert origins_found == {key: (provenance[key].kind, provenance[key].detail) for key in written}
    values = [value for key, value in iter_config_values(config) if key in written]
    for setting, value in zip(found.settings, values, strict=True):
        assert yaml.safe_load(setting.text) == value
    assert found.value("model.name_or_path") == "a # b: 'c'"
    assert found.value("model.revision") is None
    assert found.value("data.train") == "ü, [x].jsonl"


def test_a_comment_of_another_kind_is_an_unknown_origin() -> None:
    (setting,) = read_settings("seed: 1  # because")
    assert (setting.origin, setting.detail) == ("unknown", "because")


# Texts


def test_scores_and_differences() -> None:
    texts = [percent(0.0), percent(1.0), percent(12.5), signed(-0.0), signed(0.0004), points(0.05), points(-3.0)]
    expected = ["0.0 %", "100.0 %", "12.5", "0.0", "0.0", "+5.0 points", "\u22123"]
    assert [text.replace("\N{NO-BREAK SPACE}", " ") for text in texts] == expected


@pytest.mark.parametrize("text", ["a" * 5_000, "&" * 700, "\U0001f600" * 900, "<'>" * 400 + "x" * 10_000])
def test_shortened_text_keeps_both_ends_within_its_bytes(text: str) -> None:
    short = shorten_text(text, 600)
    head, _, tail = short.partition(" [… ")
    assert text.startswith(head)
    assert text.endswith(tail.partition("] ")[2])
    left_out = re.search(r"([\d,]+) characters left out", short)
    assert left_out
    assert len(short) - len(left_out[0]) - len(" […  …] ") + int(left_out[1].replace(",", "")) == len(text)


def test_times_that_are_no_dates_do_no_harm() -> None:
    assert utc(0) == "1970-01-01 00:00:00"
    assert utc(1e18) == "1e+18"


def test_embedded_json_is_the_same_json_and_cannot_end_the_script() -> None:
    value = {"a": ["</script>", "<!--", "&amp;", "\u2028", 1.5, None]}
    text = str(embed_json(value))
    assert json.loads(text) == value
    assert not set("<>&\u2028") & set(text)


def test_a_choice_of_examples_is_even_and_deterministic() -> None:
    gaps = {b - a for a, b in itertools.pairwise(evenly_spaced_indices(178, 5))}
    assert gaps <= {35, 36}


# Colours


def palettes() -> list[dict[str, str]]:
    """The light and the dark custom properties of page.css."""
    css = (ROOM / "page.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in css.split("@media screen", 1))
    return [light, light | dark]


def contrast(one: str, two: str) -> float:
    """WCAG 2.2's contrast ratio of two sRGB colours."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
def test_contrasts_reach_wcag_aa(palette: dict[str, str]) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for ground in ("bg", "surface", "sunken"):
        for ink in ("ink", "muted", "accent"):
            assert contrast(palette[ink], palette[ground]) >= 4.5, (ink, ground)
    for tone in ("good", "warning", "bad", "neutral"):
        for ink in (tone, "ink", "bad") if tone == "bad" else (tone, "ink"):
            assert contrast(palette[ink], palette[f"{tone}-bg"]) >= 4.5, (ink, tone)
    for tone in ("good", "warning", "bad", "neutral"):  # the signs of the conditions, on whatever the answer is
        for ground in ("good", "warning", "bad", "neutral"):
            assert contrast(palette[tone], palette[f"{ground}-bg"]) >= 3, (tone, ground)
    assert contrast(palette["ink"], palette["mark"]) >= 4.5
    series = [f"series-{number}" for number in range(1, 9)]
    for mark in ("base", "adapter", "baseline", "tuned", *series, "rejected", "resumed"):
        assert contrast(palette[mark], palette["surface"]) >= 3, mark


def test_every_colour_of_the_style_sheet_is_a_known_token() -> None:
    """So that no text escapes the contrasts above."""
    css = (ROOM / "page.css").read_text()
    rules = re.sub(r"--[\w-]+: #\w{6};", "", css)
    assert set(re.findall(r"#[0-9a-f]{3,6}\b", rules)) <= {"#fff"}  # paper
    assert not re.findall(r"\brgba?\(|\bhsl", rules)
    tokens = {*palettes()[0], "tone", "tone-bg"}
    assert set(re.findall(r"var\(--([\w-]+)\)", rules)) <= tokens
    assert palettes()[0].keys() == palettes()[1].keys()


# The vendored library


def test_the_vendored_files_are_those_of_the_pinned_package() -> None:
    vendor = ROOM / "vendor"
    version = json.loads((vendor / "package.json").read_text())["dependencies"]["uplot"]
    locked = json.loads((vendor / "package-lock.json").read_text())["packages"]["node_modules/uplot"]
    readme = (vendor / "README.md").read_text()
    script = (vendor / "uplot" / "uPlot.iife.min.js").read_bytes()
    assert (vendor / "uplot" / "VERSION").read_text().strip() == version == locked["version"]
    assert f"(v{version})".encode() in script[:100]
    for name in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE"):
        assert hashlib.sha256((vendor / "uplot" / name).read_bytes()).hexdigest() in readme
    assert b"MIT License" in (vendor / "uplot" / "LICENSE").read_bytes()
    # It stands inside a script element, and its hash is that of the element's text.
    assert b"</script" not in script.lower()
    assert b"<!--" not in script
    assert b"\r" not in script


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        ({}, "LoRA, r 16"),
        ({"use_dora": True}, "DoRA, r 16"),
        ({"use_rslora": True}, "LoRA, rank-stabilized, r 16"),
        ({"use_dora": True, "use_rslora": True}, "DoRA, rank-stabilized, r 16"),
    ],
)
def test_what_is_trained_is_read_from_the_switches_as_they_are_written(
    tmp_path: Path, switches: dict[str, bool], said: str
) -> None:
    config = SureFitConfig.model_validate(
        {"model": {"name_or_path": "m"}, "data": {"train": "rows.jsonl"}, "lora": switches, "output_dir": "runs/r"}
    )  # fmt: skip
    run = RunDir(tmp_path)
    write_resolved(
        ResolvedConfig(config, dict.fromkeys(dict(iter_config_values(config)), ValueOrigin("user")), 1, None),
        run.resolved,
    )
    facts = dict(describe_training(read_artefacts(run), None, []))
    assert facts["What is trained"].startswith(said)


def test_rewards_of_both_answers_are_curves_of_their_own():
    values = {"rewards/chosen": -0.1, "rewards/rejected": -0.4, "rewards/margins": 0.3}
    values |= {"logps/chosen": -30.0, "logps/rejected": -50.0}
    lines = [Metrics.model_validate({"step": step, "loss": 0.6, **values}) for step in (1, 2)]
    charts = {chart.name: chart for chart in build_training_curves(lines, []).charts}
    assert [curve.label for curve in charts["rewards"].curves] == ["chosen", "rejected", "margin"]
    assert charts["logps"].curves[1].points == [(1, -50.0), (2, -50.0)]
    plain = build_training_curves([Metrics(step=1, loss=1.0)], [])
    assert not {"rewards", "logps"} & {chart.name for chart in plain.charts}
