"""What must not pass in a run on pairs: answers that were swapped under it, other tokens, a damaged merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from safetensors.torch import load_file, save_file

from surefit.core.errors import ConfigError, GateError
from surefit.core.rundir import RunDir
from surefit.merge.merge import merge_and_certify

pytestmark = pytest.mark.usefixtures("one_thread")
DPO = {"name": "dpo", "beta": 0.1}
SEQUENCES = [[5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_base(tmp_path_factory.mktemp("model") / "base")


def settings(base: Path, out: Path) -> Any:
    return tiny_run.config(base, out, objective=DPO, max_steps=4, every=2)


def swapped(rows: list[tiny_run.Row]) -> list[tiny_run.Row]:
    """The same answers, each pair's in the other order."""
    return [row for pair in zip(rows[1::2], rows[::2], strict=True) for row in pair]


def other_tokens(rows: list[tiny_run.Row]) -> list[tiny_run.Row]:
    """The same rows as another tokenizer would number them."""
    renamed = np.random.default_rng(0).permutation(tiny_run.VOCABULARY)
    return [(renamed[ids], np.where(labels == -100, -100, renamed[ids])) for ids, labels in rows]


@pytest.mark.parametrize("change", [swapped, other_tokens])
def test_a_run_is_not_resumed_on_pairs_that_changed_under_it(base: Path, tmp_path: Path, change: Any) -> None:
    config = settings(base, tmp_path)
    tiny_run.training(config).fit()
    stored = (tmp_path / "reference.safetensors").read_bytes()
    with pytest.raises(ConfigError) as error:
        tiny_run.training(config, change(tiny_run.pairs())).fit(resume=True)
    assert error.value.field == "data.train"
    assert "data.train: content was" in str(error.value)
    assert (tmp_path / "reference.safetensors").read_bytes() == stored


@pytest.mark.parametrize("change", [swapped, other_tokens])
def test_a_store_of_other_pairs_is_computed_again(base: Path, tmp_path: Path, change: Any) -> None:
    """Swapped answers have the same log-probabilities, on the other side: taken over, they would turn the rule."""
    rows = change(tiny_run.pairs())
    tiny_run.training(settings(base, tmp_path / "first")).fit()
    (tmp_path / "second").mkdir()
    file = tmp_path / "second" / "reference.safetensors"
    file.write_bytes((tmp_path / "first" / "reference.safetensors").read_bytes())
    result = tiny_run.training(settings(base, tmp_path / "second"), rows).fit()
    assert any("reference.safetensors is of another run: computed again" in note for note in result.notes)
    from safetensors.numpy import load_file as numbers

    before, after = (numbers(tmp_path / name / "reference.safetensors")["train"] for name in ("first", "second"))
    if change is swapped:
        known = ~np.isnan(before).any(axis=1) & ~np.isnan(after).any(axis=1)
        assert np.allclose(before[known], after[known][:, ::-1], atol=1e-4)
    assert not np.array_equal(before, after, equal_nan=True)


def test_the_merge_of_a_run_on_pairs_is_certified_and_a_damaged_one_is_not(base: Path, tmp_path: Path) -> None:
    config, run = settings(base, tmp_path), RunDir(tmp_path)
    tiny_run.training(config).fit()
    assert merge_and_certify(config, tiny_run.CPU, run, SEQUENCES)["passed"]
    from surefit.merge.merge import MergeJob, certify_merged

    file = min(run.merged.glob("*.safetensors"))
    merged, original = load_file(file), load_file(min(base.glob("*.safetensors")))
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(merged[name], original[name]), "the run taught this layer nothing"
    save_file(merged | {name: original[name]}, file, {"format": "pt"})
    job = MergeJob(config.model, run.adapter, run.merged, run.certificate, config.adapter)
    found = certify_merged(job, tiny_run.CPU, SEQUENCES)
    assert not found["passed"]
    assert found["reason"]


def test_a_damaged_adapter_of_a_run_on_pairs_is_not_merged(base: Path, tmp_path: Path) -> None:
    """A factor that is not finite."""
    config, run = settings(base, tmp_path), RunDir(tmp_path)
    tiny_run.training(config).fit()
    file = run.adapter / "adapter_model.safetensors"
    factors = load_file(file)
    name = next(name for name in factors if "lora_B" in name)
    factors[name][0, 0] = float("nan")
    save_file(factors, file, {"format": "pt"})
    with pytest.raises(GateError):
        merge_and_certify(config, tiny_run.CPU, run, SEQUENCES)
    assert not run.merged.exists()
