"""Faults that a review of gates, merges, plans and serving found: each by its number, from the smallest input."""

from __future__ import annotations

import importlib.util
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import surefit
from surefit import recipes
from surefit.config.schema import GateSection
from surefit.core.errors import ConfigError, GateError, ModelError
from surefit.core.rundir import RunDir, file_sha256, read_json, write_json
from surefit.core.units import MIB
from surefit.evaluate.gate import evaluate_gate
from surefit.evaluate.stats import aggregate_intervals, paired_aggregates, paired_bootstrap, rows_to_rule_out
from surefit.facts.named_templates import TEMPLATE_DIR
from surefit.merge.adapter_file import Update, read_adapter
from surefit.merge.combine import AdapterCombination, _factors, combine_adapters
from surefit.merge.export import _finish
from surefit.merge.export_manifest import read_export
from surefit.merge.fold import fold_update, rounding_error
from surefit.merge.serving import ServedAdapter, adapter_commands, card_commands, model_commands
from surefit.merge.stream import find_misfits
from surefit.model.finite import explain_non_finite
from surefit.model.layerwise_forward import LayerwiseModel
from surefit.model.quantize import Float8Linear
from surefit.plan.process import ASSUMED, planning_for_new_process, process_overhead_bytes
from surefit.report.model_card import CardContext, render_model_card
from surefit.task import mean_scores

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = Path(__file__).parents[2] / "benchmarks/adapter_matrix.py"
_spec = importlib.util.spec_from_file_location("adapter_matrix", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
matrix = sys.modules.get("adapter_matrix") or importlib.util.module_from_spec(_spec)
if "adapter_matrix" not in sys.modules:
    sys.modules["adapter_matrix"] = matrix
    _spec.loader.exec_module(matrix)

Rows = list[dict[str, float]]


def scored(*values: float) -> Rows:
    return [{"exact_match": float(value)} for value in values]


def verdict(base: Rows, tuned: Rows, **gate: Any) -> dict[str, Any]:
    return evaluate_gate(GateSection(**gate), recipes.get_recipe("chat"), {"base": base, "merged": tuned}, None)


def binary(won: int, lost: int, tied: int) -> tuple[list[float], list[float]]:
    return [0.0] * won + [1.0] * (lost + tied), [1.0] * won + [0.0] * lost + [1.0] * tied


def graded(n: int) -> tuple[list[float], list[float]]:
    rng = np.random.default_rng(1)
    before = rng.random(n).round(2)
    return list(before), list((before + rng.normal(0, 0.2, n)).clip(0, 1).round(2))


@pytest.mark.parametrize(
    ("before", "after", "margin"),
    [
        pytest.param(*binary(0, 0, 20), 0.05, id="W3-twenty ties"),
        pytest.param(*binary(0, 0, 40), 0.05, id="W3-forty ties"),
        pytest.param(*binary(0, 0, 4), 0.01, id="W3-ties, another margin"),
        pytest.param(*binary(10, 12, 78), 0.05, id="W3-a little worse"),
        pytest.param(*binary(5, 5, 40), 0.05, id="W3-equal, with rows won and lost"),
        pytest.param(*binary(30, 32, 38), 0.1, id="W3-many differ"),
        pytest.param(*graded(40), 0.04, id="W3-scores between 0 and 1"),
        pytest.param([0.5] * 30, [0.49] * 30, 0.05, id="W3-all rows lose the same"),
    ],
)
def test_the_rows_that_a_gate_asks_for_are_enough(before: list[float], after: list[float], margin: float) -> None:
    needed = rows_to_rule_out(scored(*before), scored(*after), "exact_match", mean_scores, margin)
    assert needed is not None

    def low(n: float) -> float:
        """The interval of about n rows of which as many differ as of these."""
        times = ((np.arange(round(n)) + 0.5) * len(before) / round(n)).astype(int)
        return paired_bootstrap(np.array(before)[times], np.array(after)[times]).low

    assert low(1.15 * needed) >= -margin > low(0.85 * needed)
    said = verdict(scored(*before), scored(*after), not_worse_than="base", margin=margin)
    assert (said["outcome"], f" {needed:,} " in said["reason"]) == ("cannot tell", True)


@pytest.mark.parametrize("n", [20, 40], ids=["W3-20", "W3-40"])
def test_fewer_rows_do_not_ask_for_more(n: int) -> None:
    assert rows_to_rule_out(scored(*[1] * n), scored(*[1] * n), "exact_match", mean_scores, 0.05) == 54


@pytest.mark.parametrize(
    ("won", "lost", "tied"), [(2, 7, 91), (1, 5, 4), (0, 1, 19)], ids=["W3-5 points", "W3-40", "W3-one of 20"]
)
def test_no_number_of_rows_rules_out_what_these_rows_show(won: int, lost: int, tied: int) -> None:
    before, after = binary(won, lost, tied)
    assert rows_to_rule_out(scored(*before), scored(*after), "exact_match", mean_scores, 0.05) is None
    said = verdict(scored(*before), scored(*after), not_worse_than="base")
    assert (said["outcome"], "about" in said["reason"]) == ("cannot tell", False)


def share(rows: Sequence[Any]) -> dict[str, float]:
    return {"f": sum(row["m"] for row in rows) / sum(row["s"] for row in rows)}


def test_w3_corpus_scores() -> None:
    rng = np.random.default_rng(11)
    sizes = rng.integers(4, 13, 60).astype(float)
    old, new = (
        [{"m": float(m), "s": float(s)} for m, s in zip(sizes * (rng.random(60) < 0.8), sizes, strict=True)]
        for _ in range(2)
    )
    needed = rows_to_rule_out(old, new, "f", share, 0.05)
    assert needed is not None
    three, four = (paired_aggregates(old * times, new * times, share)["f"][1] for times in (3, 4))
    assert three < -0.05 <= four
    assert 3 * 60 < needed <= 4 * 60


@pytest.mark.parametrize(
    ("right", "n", "least", "outcome"),
    [
        pytest.param(7, 10, 0.8, "cannot tell", id="W26-0.7 of ten rows"),
        pytest.param(79, 100, 0.8, "cannot tell", id="W26-0.79 of a hundred"),
        pytest.param(70, 100, 0.8, "failed", id="W26-0.7 of a hundred"),
        pytest.param(81, 100, 0.8, "cannot tell", id="W26-0.81 of a hundred, as before"),
        pytest.param(90, 100, 0.8, "passed", id="W26-0.9 of a hundred"),
        pytest.param(0, 4, 0.8, "failed", id="W26-none of four"),
    ],
)
def test_a_score_below_min_fails_where_its_interval_does(right: int, n: int, least: float, outcome: str) -> None:
    rows = scored(*[1] * right, *[0] * (n - right))
    assert verdict(rows, rows, min=least)["outcome"] == outcome


def correlation(rows: Sequence[Any]) -> dict[str, float]:
    return {"r": statistics.correlation([row["x"] for row in rows], [row["y"] for row in rows])}


def mcc(rows: Sequence[Any]) -> dict[str, float]:
    """Matthews' correlation: 0 for any one row."""
    gold, said = (np.array([row[key] for row in rows]) for key in "xy")
    if len({*gold}) < 2 or len({*said}) < 2:
        return {"r": 0.0}
    return {"r": float(np.corrcoef(gold, said)[0, 1])}


def bleu(rows: Sequence[Any]) -> dict[str, float]:
    return {"bleu": statistics.fmean(row["b"] for row in rows)}


def test_w13_an_aggregate_that_needs_two_rows() -> None:
    rng = np.random.default_rng(0)
    x = rng.random(30)
    low, high = aggregate_intervals([{"x": a, "y": a + rng.random()} for a in x], correlation)["r"]
    assert -1 < low < high < 1


def test_w13_a_score_that_is_the_same_of_any_one_row_is_resampled() -> None:
    rng = np.random.default_rng(0)
    gold = rng.random(2000) < 0.5
    rows = [{"x": float(g), "y": float(g if rng.random() < 0.8 else not g)} for g in gold]
    (low, high), whole = aggregate_intervals(rows, mcc)["r"], mcc(rows)["r"]
    half = 1.96 * np.sqrt((1 - whole**2) / len(rows))
    assert (whole - low, high - whole) == pytest.approx((half, half), rel=0.15)


@pytest.mark.parametrize("wrong", [0, 1], ids=["W13-all right", "W13-all but one"])
def test_rows_that_are_alike_are_still_found(wrong: int) -> None:
    sizes = np.random.default_rng(4).integers(4, 13, 20).astype(float)
    rows = [{"m": s * (n >= wrong), "s": s} for n, s in enumerate(sizes)]
    low, high = aggregate_intervals(rows, share)["f"]
    assert low <= share(rows)["f"] - 0.16 * (1 - wrong / 10)
    assert high <= 1


@pytest.mark.parametrize(
    ("score", "bounds"),
    [
        pytest.param(50.0, (25.5, 74.5), id="W14-BLEU of 50"),
        pytest.param(0.8, (0.408, 0.898), id="W14-Smatch"),
        pytest.param(-0.5, (-0.745, 0.235), id="W14-a correlation"),
        pytest.param(150.0, (76.5, 223.5), id="W14-no known scale"),
    ],
)
def test_four_equal_rows_prove_little_on_any_scale(score: float, bounds: tuple[float, float]) -> None:
    assert aggregate_intervals([{"b": score}] * 4, bleu)["bleu"] == pytest.approx(bounds, abs=0.05)


def exact_fold(base: torch.Tensor, update: Update) -> float:
    merged = base.clone()
    fold_update(merged, update)
    return rounding_error(base, update, merged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["W10-float32", "W10-bfloat16"])
def test_a_negative_alpha_has_the_same_bound(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Factors so large beside the weight that the rounding of the sum is nearly all there is.
    base, a, b = 1e-6 * torch.randn(32, 32), torch.randn(4, 32), torch.randn(32, 4)
    same = [exact_fold(sign * base.to(dtype), Update(a, sign * b, 8.0)) for sign in (1.0, -1.0)]
    negated = exact_fold(base.to(dtype), Update(a, -b, -8.0))
    assert negated == pytest.approx(same[0])
    assert max(*same, negated) <= 1


def adapter_of(folder: Path, change: Any = None, seed: int = 1, base: str = "llama", **settings: Any) -> Any:
    """An adapter as PEFT's `save_pretrained` writes it, with trained factors, and what its model answers."""
    place = folder.parent / f"base of {base}"
    if not place.exists():
        matrix.made_base(base, place.parent / f"made {base}")[0].rename(place)
    with matrix.quiet():
        saved = matrix.train(base, place, matrix.Option(settings, change=change), folder, seed=seed)
    return place, saved


def test_w10_an_adapter_with_a_negative_alpha_is_merged(tmp_path: Path) -> None:
    place, saved = adapter_of(tmp_path / "a", lora_alpha=-8)
    with matrix.quiet():
        found = matrix.merged(place, saved.adapter, tmp_path / "out")
    torch.testing.assert_close(found, saved.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("base", ["llama", "llama tied", "gpt2 tied"], ids=lambda base: f"W9-{base}")
def test_adapters_of_the_embedding_as_peft_saves_them_are_summed(tmp_path: Path, base: str) -> None:
    place, first = adapter_of(tmp_path / "a", base=base, target_modules=["{q}", "{embed}"])
    _, second = adapter_of(tmp_path / "b", base=base, seed=2, target_modules=["{embed}"], r=2, use_rslora=True)
    if "gpt2" not in base:
        assert any("base_layer" in name for name in load_file(first.adapter / matrix.WEIGHTS)), "the base's, too"
    parts = ((first.adapter, 1.0), (second.adapter, -0.5))
    with matrix.quiet():
        found = matrix.merged(place, Path(), tmp_path / "out", AdapterCombination("cat", parts))
        wanted = matrix.both_active(place, parts)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert read_json(tmp_path / "out/certificate.json")["passed"]


def test_w9_an_embedding_that_is_not_the_bases_is_still_an_error(tmp_path: Path) -> None:
    def moved(directory: Path) -> None:
        tensors = load_file(directory / matrix.WEIGHTS)
        name = next(name for name in tensors if "base_layer" in name)
        tensors[name][3, 4] += 2**-10
        matrix.save_file(tensors, directory / matrix.WEIGHTS, metadata={"format": "pt"})

    place, first = adapter_of(tmp_path / "a", moved, target_modules=["{embed}"])
    both = AdapterCombination("cat", ((first.adapter, 1.0), (first.adapter, 0.5)))
    with pytest.raises(GateError) as caught:
        combine_adapters(LayerwiseModel(matrix.section_of(place), place, "cpu"), both, tmp_path)
    assert caught.value.code == "E6400"


def zeroed(*parts: str) -> Any:
    def change(directory: Path) -> None:
        tensors = load_file(directory / matrix.WEIGHTS)
        tensors = {k: torch.zeros_like(v) if any(part in k for part in parts) else v for k, v in tensors.items()}
        matrix.save_file(tensors, directory / matrix.WEIGHTS, metadata={"format": "pt"})

    return change


def test_w11_a_layer_without_an_update_is_merged_and_noted(tmp_path: Path) -> None:
    place, saved = adapter_of(tmp_path / "a", zeroed("layers.1.self_attn.v_proj.lora_B"))
    _, other = adapter_of(tmp_path / "b", seed=2)
    both = AdapterCombination("cat", ((saved.adapter, 1.0), (other.adapter, 0.5)))
    with matrix.quiet():
        found = matrix.merged(place, saved.adapter, tmp_path / "out")
        wanted = matrix.both_active(place, ((saved.adapter, 1.0),))
        matrix.merged(place, Path(), tmp_path / "sum", both)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    certificate = read_json(tmp_path / "out/certificate.json")
    assert (certificate["passed"], certificate["not_trained"]) == (True, ["model.layers.1.self_attn.v_proj"])


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(["lora_B"], id="W11-all zero"),
        pytest.param(["layers.1.self_attn.v_proj.lora_"], id="W11-both factors of one are lost"),
    ],
)
def test_an_adapter_without_any_update_is_an_error(tmp_path: Path, parts: list[str]) -> None:
    place, saved = adapter_of(tmp_path / "a", zeroed(*parts))
    with matrix.quiet(), pytest.raises(GateError) as caught:
        matrix.merged(place, saved.adapter, tmp_path / "out")
    assert caught.value.code == "E6019"
    assert not (tmp_path / "out/merged").exists()


def test_w11_a_run_expects_every_layer_to_be_trained(tmp_path: Path) -> None:
    place, saved = adapter_of(tmp_path / "a", zeroed("layers.1.self_attn.v_proj.lora_B"))
    model = LayerwiseModel(matrix.section_of(place), place, "cpu").model
    layers = {f"model.layers.{n}.self_attn.{name}" for n in (0, 1) for name in ("q_proj", "v_proj")}
    adapter = read_adapter(saved.adapter)
    assert (len(find_misfits(adapter, model, layers)), len(find_misfits(adapter, model))) == (1, 0)


@pytest.mark.parametrize("way", ["cat", "svd", "linear"], ids=lambda way: f"W29-{way}")
def test_adapters_that_cancel_out_are_an_error(tmp_path: Path, way: str) -> None:
    place, saved = adapter_of(tmp_path / "a")
    base = LayerwiseModel(matrix.section_of(place), place, "cpu")
    with pytest.raises(ConfigError) as caught:
        combine_adapters(base, AdapterCombination(way, ((saved.adapter, 1.0), (saved.adapter, -1.0))), tmp_path)
    assert caught.value.field == "--with"
    assert combine_adapters(
        base, AdapterCombination(way, ((saved.adapter, 1.0), (saved.adapter, -0.5))), tmp_path
    ).is_dir()


@pytest.mark.parametrize("ranks", [(4, 4), (2, 7), (40, 4)], ids=lambda ranks: f"W12-{ranks}")
def test_svd_is_the_best_approximation_of_the_sum(ranks: tuple[int, int]) -> None:
    """Also where the ranks together are more than the layer has inputs."""
    torch.manual_seed(0)
    parts = [(Update(torch.randn(r, 40), torch.randn(64, r), 2.0), w) for r, w in zip(ranks, (0.5, -0.7), strict=True)]
    a, b = _factors("svd", parts)
    total = sum(weight * 2.0 * (part.b.double() @ part.a.double()) for part, weight in parts)
    left, values, right = torch.linalg.svd(total, full_matrices=False)
    rank = max(ranks)
    wanted = (left[:, :rank] * values[:rank]) @ right[:rank]
    assert len(a) == rank
    torch.testing.assert_close(b.double() @ a.double(), wanted, rtol=1e-5, atol=1e-4)


class Peak(TorchDispatchMode):
    """The most numbers that any tensor has."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return found


def test_w12_svd_never_makes_the_sum() -> None:
    parts = [(Update(torch.randn(4, 3000), torch.randn(5000, 4), 2.0), 1.0)] * 2
    with Peak() as peak:
        _factors("svd", parts)
    assert peak.most <= 8 * 5000


@pytest.mark.parametrize(
    ("value", "where"), [(float("nan"), "scale"), (float("inf"), "scale"), (-float("inf"), "scale")],
    ids=["W7-NaN", "W7-infinity", "W7-minus infinity"],
)  # fmt: skip
def test_a_float8_weight_that_is_not_finite_is_named(value: float, where: str) -> None:
    layer = torch.nn.Linear(16, 16)
    layer.weight.data[3, 5] = value
    error = explain_non_finite(torch.nn.Sequential(Float8Linear.of(layer)), "bfloat16")
    assert error.code == "E5353"
    assert "of 0." in error.message
    sound = torch.nn.Sequential(Float8Linear.of(torch.nn.Linear(16, 16)))
    assert explain_non_finite(sound, "bfloat16").code == "E5352"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["W7-e4m3", "W7-e5m2"])
def test_a_model_stored_in_float8(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(4, 4)
    layer.weight = torch.nn.Parameter(torch.tensor([[float("nan")] + [1.0] * 3] * 4).to(dtype), requires_grad=False)
    error = explain_non_finite(layer, "bfloat16")
    assert (error.code, "4 of 16 values of weight" in error.message) == ("E5353", True)


def test_w7_the_scales_of_nf4() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = torch.ones(64, 64)
    weight[0, 0] = float("nan")
    for nested in (False, True):
        data, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
        layer = torch.nn.Linear(4, 4, bias=False)
        layer.weight = torch.nn.Parameter(data, requires_grad=False)
        layer.weight.quant_state = state
        assert explain_non_finite(layer, "bfloat16").code == "E5353", nested


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param("chat_template.jinja", None, id="W8-a file"),
        pytest.param("additional_chat_templates/tool_use.jinja", None, id="W8-a named template"),
        pytest.param("../outside.json", "E6015", id="W8-above"),
        pytest.param("additional_chat_templates/../../outside.json", "E6015", id="W8-above, by a folder"),
        pytest.param("{outside}", "E6015", id="W8-absolute"),
        pytest.param("link.json", "E6015", id="W8-a link"),
        pytest.param("linked/outside.json", "E6015", id="W8-a linked folder"),
        pytest.param("additional_chat_templates", "E6015", id="W8-a folder"),
        pytest.param("missing.json", "E6015", id="W8-missing"),
    ],
)
def test_an_export_is_files_below_its_folder(tmp_path: Path, name: str, code: str | None) -> None:
    export, outside = tmp_path / "export", tmp_path / "outside.json"
    (export / "additional_chat_templates").mkdir(parents=True)
    outside.write_text("x")
    (export / "link.json").symlink_to(outside)
    (export / "linked").symlink_to(tmp_path)
    for file in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (export / file).write_text("x")
    about = {"bytes": 1, "sha256": file_sha256(outside)}
    write_json(export / "export.json", {"files": {name.format(outside=outside): about}})
    if code is None:
        assert read_export(export)["files"].keys() == {name}
        return
    with pytest.raises(ModelError) as caught:
        read_export(export)
    assert caught.value.code == code


def test_w8_what_is_exported_with_a_named_template_is_read_again(tmp_path: Path) -> None:
    source = SimpleNamespace(certificate={"passed": True, "merged_sha256": "a"})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    manifest = _finish(tmp_path, "hub", source, source.certificate, lambda certificate, directory: "a card")
    assert "additional_chat_templates/tool_use.jinja" in manifest["files"]
    assert read_export(tmp_path) == manifest


class Held:
    """A program's own data."""

    def __init__(self, mib: int) -> None:
        self.pages = bytearray(mib * MIB)
        for start in range(0, len(self.pages), 4096):
            self.pages[start] = 1


def test_w15_a_plan_does_not_count_what_the_program_that_plans_has() -> None:
    importlib.import_module("peft")
    before = process_overhead_bytes()
    held = Held(900)
    in_this_process = process_overhead_bytes()
    with planning_for_new_process():
        in_another = process_overhead_bytes()
    assert len(held.pages) > 0
    assert in_this_process[0] >= before[0] + 850 * MIB, "surefit.train runs beside it"
    assert in_another[:2] == ASSUMED
    assert "as measured" in in_this_process[2]
    assert "as measured" not in in_another[2]
    assert process_overhead_bytes()[2] == "as measured"


def test_w15_the_python_interface_plans_for_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def planned_run(run: Any, **options: Any) -> Any:
        held = Held(900)
        seen.append(process_overhead_bytes()[:2] if held.pages else None)
        return {"estimate": None, "time": None, "disk_total_bytes": None, "does_not_fit": []}

    monkeypatch.setattr("surefit.stages.planning.build_run_plan", planned_run)
    monkeypatch.setattr("surefit.api.load_checked_run", lambda target: None)
    monkeypatch.setattr("surefit.api._target", lambda target: target)
    surefit.plan("c.yaml")
    assert seen == [ASSUMED]


@pytest.mark.parametrize("place", ["a run", "it's", "$HOME/x", "plain"], ids=lambda place: f"W21-{place}")
def test_commands_survive_a_shell(place: str) -> None:
    beside = ServedAdapter({"r": 8}, f"{place}/b", f"{place}/a", stops=[2], generation=f"{place}/g", neutral=False,
                    template=f"{place}/t")  # fmt: skip
    found, _ = adapter_commands(beside)
    vllm, sglang = (shlex.split(lines[0]) for lines in found.values())
    for words, option in ((vllm, "--lora-modules"), (sglang, "--lora-paths")):
        assert words[words.index(option) + 1] == f"adapter={place}/a"
        assert words[words.index("--chat-template") + 1] == f"{place}/t"
        assert f"{place}/b" in words
    assert vllm[vllm.index("--generation-config") + 1] == f"{place}/g"
    assert json.loads(vllm[vllm.index("--override-generation-config") + 1])["temperature"] == 0
    assert shlex.split(model_commands(f"{place}/m", {})["vLLM"][0])[2] == f"{place}/m"


@pytest.mark.parametrize(
    ("kind", "said"), [("hub", 1), ("adapter", 1), ("gguf", 0)], ids=["W16-whole", "W16-adapter", "W16-GGUF"]
)
def test_the_card_prints_the_notes_of_its_commands(tmp_path: Path, kind: str, said: int) -> None:
    export = tmp_path / "export"
    (export / TEMPLATE_DIR).mkdir(parents=True)
    for file in ("chat_template.jinja", f"{TEMPLATE_DIR}/tool_use.jinja"):
        (export / file).write_text("{{ messages }}")
    if kind == "adapter":
        settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "base_model_name_or_path": "org/base"}
        write_json(export / "adapter_config.json", settings)
    else:
        write_json(export / "config.json", {"architectures": ["LlamaForCausalLM"]})
    _, notes = card_commands(export, "org/base")
    about = CardContext("one", recipes.get_recipe("chat"), "org/base", "org/base", None, [], kind)
    card = render_model_card(RunDir(tmp_path / "run"), about, {"passed": True, "reason": "", "checks": []}, export)
    assert len(notes) == 1
    assert sum(note in card for note in notes) == said
