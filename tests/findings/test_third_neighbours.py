"""What a third tester's neighbours brought out, beside rows: adapters, tables, cards, gates and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.data.read import columnar
from surefit.data.read.load import load_rows
from surefit.facts.lora_settings import CONVERTIBLE


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))


def surefit(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a verb with `--json`, and the object on its last line."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    return result.exit_code, json.loads(result.stdout.strip().splitlines()[-1])


def write_adapter(**settings: Any) -> None:
    Path("adapter").mkdir(exist_ok=True)
    config = {"base_model_name_or_path": "surefit/nano", "target_modules": ["q_proj"], **settings}
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    Path("adapter/adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")


@pytest.mark.parametrize(
    ("kind", "converts"),
    [
        pytest.param("IA3", False, id="T5-IA3"),
        pytest.param("ADALORA", False, id="T5-ADALORA"),
        pytest.param("PROMPT_TUNING", False, id="T5-PROMPT_TUNING"),
        pytest.param("LOHA", True, id="T5-LOHA"),
        pytest.param("OFT", False, id="T13-OFT"),
    ],
)
def test_what_can_be_done_with_another_kind_of_adapter(kind: str, converts: bool) -> None:
    write_adapter(peft_type=kind, r=0 if kind == "OFT" else 8)
    code, error = surefit("merge", "adapter", "-o", "merged")
    assert (code, error["code"]) == (1, "E6002")
    assert (kind in error["message"], "convert_to_lora" in error["help"]) == (True, converts), error


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(CONVERTIBLE))
def test_t5_kinds_that_convert_do(kind: str) -> None:
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **sizes))
    settings = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)](target_modules=["q_proj"], task_type="CAUSAL_LM")
    config, tensors = peft.convert_to_lora(peft.get_peft_model(model, settings), 4)
    assert (config.peft_type, len(tensors)) == ("LORA", 4)


def test_t6b_a_parquet_file_with_maps_is_read() -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    maps = pa.array([[("a", "t" * n), ("b", "u")] for n in range(60)], pa.map_(pa.string(), pa.string()))
    nested = pa.array([[[("k", ["x", "y"])]]] * 60, pa.list_(pa.map_(pa.string(), pa.list_(pa.string()))))
    texts = [f"text {n}" for n in range(60)]
    table = pa.table({"prompt": texts, "completion": texts, "meta": maps, "nested": nested})
    parquet.write_table(table, "rows.parquet")
    assert load_rows("rows.parquet")[7]["meta"] == [("a", "t" * 7), ("b", "u")]
    batch = table.select(["meta"]).to_batches()[0]
    halves = [columnar._batch_bytes(batch.slice(start, 30), "rows.parquet") for start in (0, 30)]
    assert sum(halves) == columnar._batch_bytes(batch, "rows.parquet")
    assert halves[1] - halves[0] == 30 * 30  # every text of the second half has 30 characters more


def test_t18_bytes_are_named_as_such() -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"text {n}" for n in range(60)]
    parquet.write_table(pa.table({"prompt": texts, "completion": [text.encode() for text in texts]}), "rows.parquet")
    Path("run.yaml").write_text(
        "recipe: chat\nmodel: {name_or_path: surefit/nano}\ndata: {train: rows.parquet}\noutput_dir: run\n"
    )
    code, document = surefit("check", "run.yaml")
    assert code == 1
    assert "E4600" in {found["error"] for found in document["findings"] if found["severity"] == "error"}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("A100", ["a100-40", "a100-80"], id="T14-A100"),
        pytest.param("NVIDIA A100 PCIe", ["a100-40", "a100-80"], id="T14-A100-PCIe"),
        pytest.param("v100", ["v100-16", "v100-32"], id="T14-V100"),
        pytest.param("NVIDIA A100-SXM4-80GB", None, id="T14-with-memory"),
        pytest.param("H100", None, id="T14-H100"),
    ],
)
def test_a_card_of_several_sizes_is_asked_about(name: str, sizes: list[str] | None) -> None:
    from surefit.core.errors import ConfigError
    from surefit.facts.hardware import hardware_facts

    if sizes is None:
        assert hardware_facts(name).memory_bytes
        return
    with pytest.raises(ConfigError) as raised:
        hardware_facts(name)
    assert raised.value.code == "E2400"
    assert all(size in (raised.value.help or "") for size in sizes)


@pytest.mark.parametrize(
    ("column", "by"),
    [pytest.param("index", "index", id="T17-index"), pytest.param("custom_id", "custom_id", id="T17-custom_id")],
)
def test_answers_in_another_order_are_matched(column: str, by: str) -> None:
    rows = [{"prompt": f"Say {n}", "completion": str(n), "custom_id": f"row-{n}"} for n in range(8)]
    answers = [{"index": n, "custom_id": f"row-{n}", "text": str(n)} for n in reversed(range(8))]
    kept = ("prompt", "completion", *(["custom_id"] if column == "custom_id" else []))
    gold = [{key: row[key] for key in kept} for row in rows]
    Path("gold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gold))
    Path("answers.jsonl").write_text("".join(json.dumps({k: a[k] for k in (column, "text")}) + "\n" for a in answers))
    code, found = surefit("score", "--recipe", "chat", "--predictions", "answers.jsonl", "--references", "gold.jsonl")
    assert (code, found["matched_by"], found["metrics"]["exact_match"]["mean"]) == (0, by, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [("adapter", "base"), ("base", "adapter")], ids=["T7-adapter-base", "T7-base-adapter"]
)
def test_the_gate_is_judged_once_both_are_scored(order: tuple[str, str]) -> None:
    rows = [{"prompt": f"Say {n}", "completion": str(n)} for n in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.yaml").write_text(
        "recipe: chat\nmodel: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl, eval: 0.2}\n"
        "train: {max_steps: 1, global_batch_size: 2}\n"
        "evaluate: {max_new_tokens: 4, gate: {not_worse_than: base}}\noutput_dir: run\n"
    )
    assert surefit("train", "run.yaml")[0] == 0
    codes = [surefit("evaluate", "run", "--variant", variant) for variant in order]
    assert codes[-1][0] == 5
    assert "not been scored" not in codes[-1][1]["gate"]["reason"]


CONFIG = """recipe: chat
model: {name_or_path: surefit/nano}
data: {train: rows.jsonl, eval: 0.2, max_length: 64}
train: {global_batch_size: 4}
output_dir: run
"""


@pytest.mark.parametrize(
    ("too_long", "said"),
    [pytest.param("drop", True, id="T20-left-out"), pytest.param("truncate", False, id="T20-cut")],
)
def test_the_plan_says_that_rows_are_left_out(too_long: str, said: bool) -> None:
    rows = [{"prompt": f"Say {n}", "completion": "word " * (100 if n % 2 else 2)} for n in range(60)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.yaml").write_text(CONFIG)
    code, plan = surefit("plan", "run.yaml", "--quick", "--gpu", "t4", "--set", f"data.too_long={too_long}")
    assert code == 0
    assert any("data.max_length, about 50 %" in line for line in plan["left_out"]) is said


@pytest.mark.parametrize(
    ("passes", "code"),
    [
        pytest.param(0.001, "E4025", id="T21-none"),
        pytest.param(0.5, None, id="T21-some"),
        pytest.param(1, None, id="T21-all"),
    ],
)
def test_a_share_that_takes_no_row_is_an_error_of_check(passes: float, code: str | None) -> None:
    for name, count in (("rows", 60), ("more", 12)):
        rows = [{"prompt": f"{name} {n}", "completion": str(n)} for n in range(count)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.yaml").write_text(CONFIG)
    _, document = surefit("check", "run.yaml", "--set", f"data.mix={{more.jsonl: {passes}}}")
    errors = [(found["error"], found["field"]) for found in document["findings"] if found["severity"] == "error"]
    assert errors == ([(code, "data.mix.more.jsonl")] if code else [])
