"""The config file: read by YAML 1.2 rules, every problem with file, line, field and a way out, all at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefit.config.load import expected_text, load_config
from surefit.core.errors import ConfigError, SureFitError

MINIMAL = "model: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl}\noutput_dir: runs/x\n"


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def problems(error: ConfigError) -> list[SureFitError]:
    return [error, *error.also]


def failing(tmp_path: Path, text: str | bytes, overrides: tuple[str, ...] = ()) -> list[SureFitError]:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), overrides)
    return problems(caught.value)


def test_defaults_lines_and_overrides(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, MINIMAL), ["train.num_train_epochs=3", "lora.r=8", "train.learning_rate=1e-4"])
    assert loaded.config.train.num_train_epochs == 3
    assert loaded.config.lora.r == 8
    assert loaded.config.train.learning_rate == 1e-4
    assert loaded.config.data.max_length == 2048
    assert loaded.lines["data.train"] == 2
    assert loaded.overridden == {"train.num_train_epochs", "lora.r", "train.learning_rate"}


@pytest.mark.parametrize(
    ("written", "value"), [("2e-4", 2e-4), ("2E-4", 2e-4), ("0.0002", 2e-4), (".5", 0.5), ("1", 1.0), ("0x1", 1.0)]
)
def test_numbers_mean_what_they_look_like(tmp_path: Path, written: str, value: float) -> None:
    """YAML 1.1 loaders read 2e-4 as a text: the classic silent fault of training configs."""
    assert load_config(write(tmp_path, MINIMAL), [f"train.learning_rate={written}"]).config.train.learning_rate == value


def test_no_is_a_text_and_not_false(tmp_path: Path) -> None:
    (problem,) = failing(tmp_path, MINIMAL + "train:\n  gradient_checkpointing: no\n")
    assert (problem.line, problem.field) == (5, "train.gradient_checkpointing")
    assert "true or false" in problem.message


def test_every_problem_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    text = MINIMAL + "train:\n  learnig_rate: 1.0\n  num_train_epochs: many\n  method: lra\n"
    found = {problem.field: (problem.line, problem.message) for problem in failing(tmp_path, text)}
    assert found["train.learnig_rate"] == (5, "unknown key; did you mean 'learning_rate'?")
    assert found["train.num_train_epochs"] == (
        6,
        "expected 'auto' or a number (above 0, at most 1,000,000), got the string 'many'",
    )
    assert found["train.method"] == (7, "expected 'lora' or 'full', got the string 'lra'")


def test_a_key_in_the_wrong_section_is_pointed_to_the_right_one(tmp_path: Path) -> None:
    (problem,) = failing(tmp_path, MINIMAL + "train: {max_length: 5}\n")
    assert "belongs under 'data'" in problem.message


def test_the_tuple_of_the_long_context_system(tmp_path: Path) -> None:
    """`MAX_SEQ_LENGTH = 262144,`, from a published report, as a list and as a trailing comma."""
    (listed,) = failing(tmp_path, MINIMAL.replace("rows.jsonl", "rows.jsonl, max_length: [262144]"))
    assert listed.field == "data.max_length"
    assert listed.help == "write 262144 without the brackets"
    (comma,) = failing(tmp_path, MINIMAL + "train:\n  global_batch_size: 64,\n")
    assert (comma.line, comma.help) == (5, "remove the comma at the end: it turns the number into a string")


def test_missing_sections_and_names_that_cannot_be_folders(tmp_path: Path) -> None:
    found = failing(tmp_path, "model: {}\noutput_dir: x\nevaluate: {extra_sets: {'../up': a}}\n")
    assert [p.field for p in found] == ["model.name_or_path", "data", "evaluate"]
    assert "cannot be used" in found[2].message


@pytest.mark.parametrize("field", ["output_dir", "data.eval", "lora.start_from", "parallel.deepspeed_config"])
@pytest.mark.parametrize(("path", "needle"), [("é" * 128, "255 bytes"), ("a/" * 2048, "4,095"), ("a\0b", "NUL")])
def test_a_path_that_no_file_system_takes_is_refused_here(tmp_path: Path, field: str, path: str, needle: str) -> None:
    (problem,) = failing(tmp_path, MINIMAL, (f"{field}={json.dumps(path)}",))
    assert problem.field == field
    assert needle in problem.message


@pytest.mark.parametrize(
    ("text", "needle", "line"),
    [
        ("", "is empty", None),
        ("- a\n- b\n", "is a list", None),
        ("model: {name_or_path: x\n", "not valid YAML", None),
        ("model:\n\tname_or_path: x\n", "not valid YAML", 2),
        ("output_dir: a\noutput_dir: b\n", "set twice; the first time on line 1", 2),
        ("output_dir: !!python/object/apply:os.system ['true']\n", "tag", 1),
        ("output_dir: !!int x\n", "not usable as a whole number", 1),
        (b"output_dir: \xff\n", "not UTF-8", 1),
        ("a: " + "[" * 5000, "nested too deeply", 1),
        ("a: &a [*a]", "nested too deeply", None),
        (f"a: [{', '.join('1' * 30_000)}]", "more than 5,000 keys and values", 1),
        ("output_dir: " + "9" * 1000, "not usable as a whole number", 1),
        ("x" * 300_000, "larger than 256 KiB", None),
    ],
)
def test_unusable_files(tmp_path: Path, text: str | bytes, needle: str, line: int | None) -> None:
    (problem, *_) = failing(tmp_path, text)
    assert any(part in problem.message for part in needle.split("|")), problem.message
    assert line is None or problem.line == line
    assert problem.path


def test_a_bomb_of_anchors_is_refused_quickly(tmp_path: Path) -> None:
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    (problem, *_) = failing(tmp_path, "a0: &a0 [x]\n" + levels)
    assert "anchors" in problem.message


def test_bom_and_crlf_are_no_problem(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_config(path).config.output_dir == "runs/x"


def test_missing_file_suggests_a_near_name(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL)
    with pytest.raises(ConfigError, match=r"did you mean '.*run\.yaml'"):
        load_config(tmp_path / "runn.yaml")
    with pytest.raises(ConfigError, match="directory"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "train.num_train_epochs",
        "=3",
        "train.num_train_epochs=[",
        "nope=1",
        "output_dir.x=1",
        "train=3",
        "train.num_train_epochs=.inf",
    ],
)
def test_bad_overrides_name_themselves(tmp_path: Path, text: str) -> None:
    (problem, *_) = failing(tmp_path, MINIMAL, (text,))
    assert "--set" in str(problem)


def test_expected_text() -> None:
    assert expected_text("train.warmup_steps") == "a number (at least 0, at most 1,000,000,000)"
    assert expected_text("lora.target_modules") == "'all-linear' or a list of strings"
    assert expected_text("data.eval") == "a number (at least 0, below 1) or text"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["recipe", "model", "adapter", "data", "train", "checkpoint", "evaluate", "output_dir", "extra"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=st.dictionaries(keys, values))
def test_any_tree_is_accepted_or_explained(tmp_path: Path, tree: dict[str, object]) -> None:
    import yaml

    path = write(tmp_path, yaml.safe_dump(tree))
    caught: list[SureFitError] = []
    try:
        load_config(path)
    except ConfigError as error:
        caught = problems(error)
    assert all(problem.message and problem.path for problem in caught)


@pytest.mark.parametrize("reason", ["''", "'  '", '"\\n"'])
def test_a_suppression_needs_a_reason(tmp_path: Path, reason: str) -> None:
    path = tmp_path / "run.yaml"
    text = "model: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl}\noutput_dir: runs/x\n"
    path.write_text(f"{text}lint:\n  ignore:\n    SCH001: {reason}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert (caught.value.line, caught.value.field) == (5, "lint.ignore")
    assert "ignoring SCH001 needs a reason" in caught.value.message
