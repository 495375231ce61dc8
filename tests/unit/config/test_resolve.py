"""Autos are decided with a reason, and resolved.yaml runs again and gives the same config."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from surefit.config.load import LoadedConfig, load_config, parse_yaml
from surefit.config.memory import CHECKPOINTING, MICRO, TILED, Needed
from surefit.config.resolve import (
    KERNEL_PACKAGES,
    iter_config_values,
    missing_for_kernels,
    one_line_yaml,
    resolve_config,
    total_steps,
    with_changes,
    with_decisions,
    write_resolved,
)
from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError
from surefit.core.units import GIB
from surefit.lint.engine import find_rule, run_rules
from surefit.lint.rule import LintContext


@dataclass
class Model:
    parameters: int | None = 3_212_749_824
    vocab_size: int = 128_256
    packing_obstacle: str | None = None
    padded_attention: str = "sdpa"
    router_loss: bool = False
    shares_prompts: bool = False


@dataclass
class Hardware:
    kind: str = "cuda"
    name: str = "NVIDIA H100"
    memory_bytes: int | None = 80 * GIB
    bf16: bool = True
    source: str = "detected"


CPU = Hardware("cpu", "CPU", None, True)
NANO = Model(1_500_000, 1024)


def loaded(tmp_path: Path, *overrides: str) -> LoadedConfig:
    path = tmp_path / "run.yaml"
    path.write_text("model: {name_or_path: x}\ndata:\n  train: rows.jsonl\noutput_dir: 'runs/a: b # c'\n")
    return load_config(path, overrides)


def test_no_auto_is_left_and_each_has_a_reason(tmp_path: Path) -> None:
    resolved = resolve_config(loaded(tmp_path), Model(), Hardware(), 3000)
    unread = ("data.format", "hardware.gpu", "objective.beta")
    assert "auto" not in [value for key, value in iter_config_values(resolved.config) if key not in unread]
    autos = {key: str(origin) for key, origin in resolved.provenance.items() if origin.kind == "auto"}
    assert set(autos) == {
        "model.dtype",
        "data.packing",
        "train.per_device_train_batch_size",
        "train.gradient_checkpointing",
        "speed.attention",
        "speed.fused_lora",
        "speed.kernels",
        "speed.shared_prompts",
        "speed.tiled_mlp",
        "checkpoint.save_steps",
        "evaluate.batch_size",
        "hardware.count",
        "parallel.mode",
    }
    assert all(len(reason) > len("auto: ") for reason in autos.values())


@pytest.mark.parametrize("overrides", [[], ["hardware.count=4"], ["train.method=full", "hardware.count=2"]])
@pytest.mark.parametrize("hardware", [Hardware(), CPU, Hardware(name="Tesla T4", memory_bytes=16 * GIB, bf16=False)])
def test_decisions_are_valid_values(tmp_path: Path, hardware: Hardware, overrides: list[str]) -> None:
    config = resolve_config(loaded(tmp_path, *overrides), Model(), hardware, 3000).config
    assert SureFitConfig.model_validate(config.model_dump()) == config


def test_a_decision_changes_its_key_alone(tmp_path: Path) -> None:
    config = loaded(tmp_path).config
    changes = {"train.max_steps": 7, "train.optim": "adamw_8bit", "speed.tiled_mlp": True, "output_dir": "other"}
    assert with_decisions(config, changes) == with_changes(config, changes)
    assert with_decisions(config, {}) == config


@pytest.mark.parametrize(
    ("model", "hardware", "dtype", "micro", "checkpointing"),
    [
        (Model(), Hardware(), "bfloat16", 4, True),
        (Model(), Hardware(name="Tesla T4", memory_bytes=16 * GIB, bf16=False), "float16", 4, True),
        (NANO, CPU, "float32", 4, False),
        (NANO, Hardware(), "bfloat16", 4, False),
    ],
)
def test_decisions_where_nobody_knows_what_a_step_takes(
    tmp_path: Path, model: Model, hardware: Hardware, dtype: str, micro: int, checkpointing: bool
) -> None:
    resolved = resolve_config(loaded(tmp_path), model, hardware, 3000)
    config = resolved.config
    assert config.model.dtype == dtype
    assert config.train.per_device_train_batch_size == micro
    assert config.train.gradient_checkpointing is checkpointing
    assert resolved.gradient_accumulation_steps * micro == 64


@pytest.mark.parametrize(
    ("hardware", "missing", "overrides", "reason"),
    [
        (Hardware(), None, [], None),
        (CPU, None, [], "need a GPU"),
        (Hardware(name="Tesla T4", bf16=False), None, [], "Tesla T4 is older"),
        (Hardware(), "triton", [], "triton is not installed"),
        (Hardware(), None, ["speed.compile=true"], "the compiler"),
        (Hardware(), None, ["parallel.mode=zero2", "hardware.count=2"], "not been proved"),
    ],
)
def test_kernels_are_taken_where_they_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardware: Hardware, missing: str | None, overrides: list[str],
    reason: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr("surefit.config.resolve.missing_for_kernels", lambda: missing)
    resolved = resolve_config(loaded(tmp_path, *overrides), Model(), hardware, 3000)
    assert resolved.config.speed.kernels is (reason is None)
    assert (reason or "in fewer passes") in resolved.provenance["speed.kernels"].detail


@pytest.mark.parametrize(
    ("installed", "missing"),
    [
        ({"liger-kernel": "0.8.5", "triton": "3.9.0"}, None),
        ({"liger-kernel": "0.8.9", "triton": "3.6.0+git1"}, None),
        ({"liger-kernel": "0.7.0", "triton": "3.9.0"}, "liger-kernel>=0.8.5,<0.9"),
        ({"triton": "3.9.0"}, "liger-kernel>=0.8.5,<0.9"),
    ],
)
def test_kernels_need_the_releases_that_the_extra_names(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], missing: str | None
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr("surefit.config.resolve.version", version)
    assert missing_for_kernels() == missing
    extra = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    named = extra["project"]["optional-dependencies"]["kernels"]
    assert {package + wanted for package, wanted in KERNEL_PACKAGES.items()} == set(named)


@pytest.mark.parametrize(("missing", "mode"), [(None, "ddp"), ("triton", "fsdp")])
def test_a_way_to_share_is_judged_with_the_kernels_it_will_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str | None, mode: str
) -> None:
    monkeypatch.setattr("surefit.config.resolve.missing_for_kernels", lambda: missing)

    def needed(config: SureFitConfig, micro_batches: int) -> int:
        assert config.speed.kernels != "auto"
        return (90 - 20 * (config.speed.kernels is True) - 20 * (config.parallel.mode == "fsdp")) * GIB

    resolved = resolve_config(loaded(tmp_path, "hardware.count=2"), Model(), Hardware(), 3000, 0, needed)
    assert (resolved.config.parallel.mode, resolved.config.speed.kernels) == (mode, missing is None)


def test_whole_logits_limit_the_micro_batch(tmp_path: Path) -> None:
    """Twelve bytes × 128,256 × 2,048 tokens: two examples within a tenth of 80 GiB."""
    resolved = resolve_config(loaded(tmp_path, "speed.chunked_loss=false"), Model(), Hardware(), 3000)
    assert resolved.config.train.per_device_train_batch_size == 2


def _grows(base: int, kept: dict[Any, float]) -> Needed:
    """A model that takes `base` GiB, and for each example of a micro batch what is kept for it."""

    def needed(config: SureFitConfig, micro_batches: int) -> int:
        rows = config.train.per_device_train_batch_size
        assert rows * micro_batches == config.train.global_batch_size
        each = 0.5 if config.speed.tiled_mlp else kept[config.train.gradient_checkpointing]
        return round((base + rows * each) * GIB)

    return needed


@pytest.mark.parametrize(
    ("memory", "overrides", "expected"),
    [
        (200, [], (False, 4, False)),
        (80, [], (False, 2, False)),
        (40, [], (False, 1, False)),
        (30, [], ("selective", 2, False)),
        (20, [], (True, 1, False)),
        (17, [], (True, 2, True)),
        (8, [], (True, 1, True)),
        (40, ["train.gradient_checkpointing=false"], (False, 1, False)),
        (80, ["train.per_device_train_batch_size=8"], ("selective", 8, False)),
        (80, ["train.global_batch_size=2", "data.max_length=64"], (False, 2, False)),
    ],
)
def test_what_fits_decides(tmp_path: Path, memory: int, overrides: list[str], expected: tuple[Any, int, bool]) -> None:
    """From 8,192 tokens on a larger micro batch is of no use: 4 × 2,048."""
    needed = _grows(16, {False: 20, "selective": 7, True: 3})
    resolved = resolve_config(
        loaded(tmp_path, *overrides), Model(), Hardware(memory_bytes=memory * GIB), 3000, 0, needed
    )
    train = resolved.config.train
    found = (train.gradient_checkpointing, train.per_device_train_batch_size, resolved.config.speed.tiled_mlp)
    assert found == expected
    reasons = [str(resolved.provenance[key]) for key in (CHECKPOINTING, MICRO, TILED)]
    assert all(f"of {memory}.00 GiB" in reason or reason.startswith("--set") for reason in reasons)


def test_where_nothing_fits_it_is_the_fastest_of_those_that_take_least(tmp_path: Path) -> None:
    """The update of all weights takes the same whatever is recomputed before it."""

    def needed(config: SureFitConfig, micro_batches: int) -> int:
        return round(max(27 * GIB, _grows(20, {False: 8, "selective": 1, True: 0.5})(config, micro_batches) or 0))

    resolved = resolve_config(loaded(tmp_path), Model(), Hardware(memory_bytes=24 * GIB), 3000, 0, needed)
    train = resolved.config.train
    assert (train.gradient_checkpointing, train.per_device_train_batch_size) == ("selective", 4)
    assert resolved.config.speed.tiled_mlp is False
    assert "the smallest option, but still up to 27.00 GiB of 24.00 GiB" in str(resolved.provenance[MICRO])


def test_the_reason_names_what_did_not_fit(tmp_path: Path) -> None:
    needed = _grows(16, {False: 20, "selective": 7, True: 3})
    resolved = resolve_config(loaded(tmp_path), Model(), Hardware(memory_bytes=20 * GIB), 3000, 0, needed)
    reason = str(resolved.provenance[CHECKPOINTING])
    assert "nothing recomputed would need 36.00 GiB; all but attention recomputed would need 23.00 GiB" in reason


def test_where_nobody_knows_rules_of_thumb_decide(tmp_path: Path) -> None:
    known = resolve_config(loaded(tmp_path), Model(), Hardware(), 3000, 0, lambda config, micro_batches: None)
    assert known == resolve_config(loaded(tmp_path), Model(), Hardware(), 3000)


@pytest.mark.parametrize(
    ("overrides", "rows", "steps"),
    [
        (["train.num_train_epochs=2"], 3000, 92),
        (["train.num_train_epochs=0.001"], 3000, 1),
        (["train.max_steps=10"], 3000, 10),
        (["data.eval=other.jsonl"], 640, 10),
        ([], None, None),
        (["train.max_steps=7"], None, 7),
    ],
)
def test_total_steps(tmp_path: Path, overrides: list[str], rows: int | None, steps: int | None) -> None:
    assert total_steps(loaded(tmp_path, *overrides).config, rows) == steps


def test_micro_batch_must_divide(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="64 is not a multiple of the micro batch 5"):
        resolve_config(loaded(tmp_path, "train.per_device_train_batch_size=5"), Model(), Hardware(), 100)


def test_resolved_yaml_says_where_values_come_from_and_runs_again(tmp_path: Path) -> None:
    resolved = resolve_config(
        loaded(tmp_path, "train.num_train_epochs=2", "evaluate.extra_sets.old=rows.jsonl"), Model(), Hardware(), 3000
    )
    path = tmp_path / "resolved.yaml"
    write_resolved(resolved, path)
    text = path.read_text()
    assert "  train: rows.jsonl  # user run.yaml:3\n" in text
    assert "  num_train_epochs: 2.0  # --set\n" in text
    assert "  r: 16  # default\n" in text
    assert "  dtype: bfloat16  # auto: NVIDIA H100 computes bfloat16 natively\n" in text
    assert "    old: rows.jsonl  # --set\n" in text
    assert load_config(path).config == resolved.config


def test_resolved_yaml_holds_texts_of_several_lines(tmp_path: Path) -> None:
    config = loaded(tmp_path, 'lint.ignore={SCH001: "one\\n\\n  two: 3 # four\\n"}')
    resolved = resolve_config(config, Model(), Hardware(), 3000)
    path = tmp_path / "resolved.yaml"
    write_resolved(resolved, path)
    again = load_config(path).config
    assert again.lint.ignore == {"SCH001": "one\n\n  two: 3 # four\n"}
    assert again == resolved.config


@pytest.mark.parametrize(
    "value",
    [
        "2e-4", "1e3", "0o17", "0x10", "1_000", "yes", "Off", "null", "~", "", ".inf", "-.5e1", "2026-01-01", "<<", "=",
        "one\ntwo", "line\n", "a\u2028b", "a # b", "a: b", "it's", "- x", "#", ["2e-4", 2e-4, "one\ntwo", None, True],
        {"2e-4": ["no", "on"]}, 2e-4, 1e-5, 1e300, 10, -3, True, None, 0.0, 1.0, "plain text", "org/model-3B",
    ],
)  # fmt: skip
def test_a_value_in_one_line_reads_back_as_it_was(value: object) -> None:
    """The dumper would quote by the rules of YAML 1.1 only; SureFit reads by those of 1.2, where 2e-4 is a number."""
    line = f"key: {one_line_yaml(value)}"
    assert "\n" not in line
    (got,) = parse_yaml(line, Path("value"))[0].values()
    assert got == value
    assert type(got) is type(value)


def test_a_plain_text_stays_plain() -> None:
    assert one_line_yaml("org/model-3B") == "org/model-3B"


def test_no_secret_is_written_down_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC001 stops such a run; one that is told to go on all the same keeps it out of resolved.yaml."""
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    path = tmp_path / "run.yaml"
    path.write_text("model: {name_or_path: surefit/nano}\ndata: {train: d}\noutput_dir: run\n")
    secrets = ["telemetry.wandb_project=0123456789abcdef0123456789abcdef01234567",
               "evaluate.server=http://host/v1?api_key=planted1", "data.split=hf_abcdefghijklmnopqrstuvwx"]  # fmt: skip
    found = load_config(path, secrets)
    context = LintContext(found.config, path, found.lines)
    findings = {each.field for each in run_rules(context, [find_rule("SEC001")]).findings}
    assert findings == {"data.split", "evaluate.server", "telemetry.wandb_project"}
    write_resolved(resolve_config(found, NANO, CPU, 100), tmp_path / "resolved.yaml")
    text = (tmp_path / "resolved.yaml").read_text()
    assert not [one for one in ("0123456789abcdef", "planted1", "hf_abc") if one in text]
    assert parse_yaml(text, path)[0]["evaluate"]["server"] == "http://host/v1?api_key=***"
