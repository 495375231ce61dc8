"""A published project, its failures one by one: Vietnamese AMR on one 24 GB Turing card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.config.load import load_config
from surefit.core.units import GIB
from surefit.recipes import get_recipe
from surefit.task import Prediction

ON_TURING = """
recipe: chat
model: {name_or_path: Qwen/Qwen2.5-7B-Instruct, dtype: DTYPE}
data: {train: rows.jsonl, max_length: LENGTH}
train: {global_batch_size: 16, per_device_train_batch_size: MICRO}
hardware: {gpu: rtx6000-turing}
output_dir: runs/amr
"""


def on_turing(dtype: str = "bfloat16", length: int = 256, micro: int = 1) -> str:
    filled = ON_TURING.replace("DTYPE", dtype).replace("LENGTH", str(length)).replace("MICRO", str(micro))
    return filled


def test_out_of_memory_from_the_logits(check) -> None:
    """8 rows of 2,048 tokens of a vocabulary of 152,064: 28 GiB for the loss alone, on a card with 24.

    SureFit's own loss is chunked and never has them. In bfloat16 attention has logits of its own on this card, whose
    efficient kernel knows float16 (`facts/sdpa.py`).
    """
    assert "MEM002" in check(on_turing("float16", 2048, 8) + "speed: {chunked_loss: false}\n")
    assert "MEM002" not in check(on_turing("float16", 2304, 8))
    assert "MEM002" in check(on_turing("bfloat16", 2304, 8))
    assert "MEM002" not in check(on_turing(length=256, micro=1))


def test_out_of_memory_before_the_first_token(check) -> None:
    assert "MEM001" in check(on_turing(dtype="float32"))
    assert "MEM001" not in check(on_turing())


THEIRS = Path(__file__).parents[2] / "configs" / "amr-parsing-qwen2.5-7b-fp16.yaml"


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many rows as the team had."""
    path = tmp_path_factory.mktemp("amr") / "train.jsonl"
    rows = ({"sentence": f"Câu số {n}.", "graph": f"(c / câu :quant {n})"} for n in range(15_000))
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def plan_of_theirs(sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """plan_of_theirs(*changes) → the plan of the team's own config on their card, by arithmetic."""
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def planned(*changes: str) -> dict[str, Any]:
        given = [part for change in (f"data.train={sentences}", *changes) for part in ("--set", change)]
        result = CliRunner().invoke(app, ["plan", str(THEIRS), "--quick", "--json", *given])
        answer: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
        return answer

    return planned


def test_the_teams_own_config_is_what_they_wrote() -> None:
    config = load_config(THEIRS).config
    assert (config.model.dtype, config.model.quantization) == ("float16", "none")
    assert (config.lora.r, config.data.max_length, config.train.num_train_epochs) == (128, 512, 15)
    assert (config.train.per_device_train_batch_size, config.train.global_batch_size) == (1, 16)
    assert (config.train.gradient_checkpointing, config.hardware.gpu) == (True, "rtx6000-turing")


def test_the_teams_own_config_fits_their_card(check, plan_of_theirs) -> None:
    """They reckoned with about 20.0 GB of 24, and with 15 passes of 937 steps.

    15,000 rows × 15 passes / 16 rows = 14,062.5 steps; theirs leave out the half step at the end of each pass. Their
    table has 2.0 GB for the optimizer. AdamW's moments of 322,961,408 LoRA parameters take 2 × 4 bytes each,
    2.41 GiB, and their float32 copies, which float16 needs, 1.20 GiB more.
    """
    assert check(THEIRS.read_text(encoding="utf-8")) == set()
    plan = plan_of_theirs()
    assert plan["does_not_fit"] == []
    assert plan["steps"]["total_steps"] == 14_063
    assert plan["steps"]["gradient_accumulation_steps"] == 16
    terms = {term["term"]: term["bytes"] / GIB for term in plan["memory"]}
    assert terms["weights"] == pytest.approx(14.185, abs=0.001)
    assert terms["optimizer"] == pytest.approx(2 * 4 * 322_961_408 / GIB)
    assert terms["masters"] == pytest.approx(4 * 322_961_408 / GIB)
    assert 19 * GIB < plan["memory_total_bytes"] < 22 * GIB


def test_what_the_team_changed_was_needed_only_with_the_usual_loss(plan_of_theirs) -> None:
    """512 tokens in place of 2,048: without the logits in memory the longer rows fit as well, one at a time.

    The rows are taken to be as long as they may be: on the hub they are unread.
    """
    unread = "data.train=theirs/sentences", "data.max_length=2048"
    assert plan_of_theirs(*unread)["does_not_fit"] == []
    usual = *unread, "train.per_device_train_batch_size=8", "speed.chunked_loss=false"
    assert plan_of_theirs(*usual)["does_not_fit"]


def test_a_device_map_with_offloading_cannot_train(judge) -> None:
    """ "expected device meta but got cuda:0": weights that were moved away have no gradient path."""
    faulty = {"tool": "axolotl", "device_map": "auto", "cpu_offload": True, "gradient_checkpointing": True}
    assert judge(**faulty) == {"MEM003"}
    assert judge(**faulty | {"device_map": None, "cpu_offload": None}) == set()


def test_no_bf16_on_turing(check) -> None:
    assert "PRC001" in check(on_turing())
    assert "PRC001" not in check(on_turing().replace("rtx6000-turing", "rtx3090"))


def test_fp16_without_loss_scaling(check) -> None:
    """SureFit scales the loss; a tool that is told to compute in float16 throughout does not."""
    assert "PRC002" not in check(on_turing(dtype="float16"))
    axolotl = "base_model: Qwen/Qwen2.5-7B-Instruct\ndatasets: [{path: rows.jsonl, type: alpaca}]\nadapter: lora\n"
    assert "PRC002" in check(axolotl + "float16: true\n", "axolotl.yml")
    assert "PRC002" not in check(axolotl + "fp16: true\n", "axolotl.yml")
    small = on_turing(dtype="float32").replace("Qwen2.5-7B-Instruct", "Qwen2.5-0.5B-Instruct")
    assert check(small) == set()


def test_unparseable_outputs_stay_in_the_denominator() -> None:
    """An answer that does not parse scores 0 in every metric of the recipe; none leaves the row out."""
    recipe = get_recipe("function_calling")
    tools = [{"name": "ring", "description": "Call", "parameters": {"who": {"description": "Name", "type": "str"}}}]
    answers = json.dumps([{"name": "ring", "arguments": {"who": "Ann"}}])
    example = recipe.to_example({"query": "Ring Ann", "tools": json.dumps(tools), "answers": answers})
    good, broken = answers, '[{"name": "ring", "argum'
    scores = [recipe.score(example, Prediction(text, parsed=recipe.parse(text))) for text in (good, broken)]
    assert recipe.parse(broken) is None
    assert scores[1].keys() == scores[0].keys()
    assert recipe.aggregate(scores)[recipe.primary_metric] == 0.5


def test_concepts_joined_by_underscores_in_one_file_and_by_spaces_in_another(audit) -> None:
    """Gold against its own underscored self scores 0.873."""
    rows = []
    for n in range(60):
        joined = "bi_kịch" if n % 2 else "bi kịch"
        rows.append({"sentence": f"Câu số {n}.", "graph": f"(b / {joined} :quant {n} :domain (c / câu_{n}))"})
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    assert "AUD033" in audit("train.jsonl", text)
    assert "AUD033" not in audit("one.jsonl", text.replace("bi kịch", "bi_kịch"))


def test_label_masks_that_trained_on_nothing(tmp_path) -> None:
    """The batch that reaches the loss is decoded before step 1; tests/unit/train/test_preflight.py stops a real run."""
    from surefit.facts.audit import Observation
    from surefit.facts.batch import BatchFacts
    from surefit.lint.engine import run_rules
    from surefit.lint.rule import LintContext

    def codes(dead: int) -> set[str]:
        seen = {"dead": Observation(rows=dead, of=8)} if dead else {}
        batch = BatchFacts(
            micro_batches=1, examples=8, tokens=800, supervised_tokens=0 if dead else 80, longest=100, observations=seen
        )
        return {finding.code for finding in run_rules(LintContext(None, tmp_path / "run.yaml", batch=batch)).findings}

    assert codes(8) == {"LAB006"}
    assert codes(0) == set()
