"""A published project, its failures one by one: Vietnamese AMR on one 24 GB Turing card."""

from __future__ import annotations

import json

from surefit.recipes import get
from surefit.task import Prediction

ON_TURING = """
recipe: sft
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
    assert "MEM002" not in check(on_turing("float16", 2048, 8))
    assert "MEM002" in check(on_turing("bfloat16", 2048, 8))
    assert "MEM002" not in check(on_turing(length=256, micro=1))


def test_out_of_memory_before_the_first_token(check) -> None:
    assert "MEM001" in check(on_turing(dtype="float32"))
    assert "MEM001" not in check(on_turing())


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
    recipe = get("function_calling")
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
