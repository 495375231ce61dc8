"""A simulation is read from the cache only where everything that it depends on is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from surefit.config.schema import LoraSection
from surefit.plan import simulation_cache
from surefit.plan.simulate import SimulatedMemory, simulate_memory
from surefit.plan.simulation_cache import simulate_or_load, simulation_key
from surefit.plan.step_config import CacheKey, StepConfig

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
SETTING = StepConfig(CONFIG, "float32", LoraSection(r=2), 1, 8, cuda=False)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that were simulated."""
    keys: list[str] = []

    def simulate(known: CacheKey) -> SimulatedMemory:
        keys.append(known.text)
        return simulate_memory(known.setting)

    monkeypatch.setattr(simulation_cache, "simulate_memory_cached", simulate)
    return keys


def test_another_process_finds_the_same_memory(tmp_path: Path, simulated: list[str]) -> None:
    first, second = simulate_or_load(SETTING, tmp_path), simulate_or_load(SETTING, tmp_path)
    assert first == second
    assert len(simulated) == 1


def test_whatever_it_depends_on_is_simulated_anew(
    tmp_path: Path, simulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_or_load(SETTING, tmp_path)
    simulate_or_load(replace(SETTING, length=16), tmp_path)
    simulate_or_load(replace(SETTING, adapter=LoraSection(r=4)), tmp_path)
    simulate_or_load(replace(SETTING, config=LlamaConfig(**CONFIG.to_dict() | {"vocab_size": 128})), tmp_path)
    assert len(simulated) == 4
    monkeypatch.setattr(simulation_cache, "code_sha256", lambda: "edited")
    simulate_or_load(SETTING, tmp_path)
    assert len(simulated) == 5


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"phases": 1}', '{"phases": [{"name": 1}]}'])
def test_a_damaged_file_is_written_again(tmp_path: Path, simulated: list[str], content: str) -> None:
    simulate_or_load(SETTING, tmp_path)
    (path,) = (tmp_path / "simulations").iterdir()
    whole = path.read_bytes()
    path.write_text(content)
    simulate_or_load(SETTING, tmp_path)
    assert len(simulated) == 2
    assert path.read_bytes() == whole


def test_code_whose_version_is_not_known_is_always_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnConfig(LlamaConfig):
        pass

    assert simulation_key(SETTING) is not None
    assert simulation_key(replace(SETTING, config=OwnConfig(**CONFIG.to_dict()))) is None
    remote = LlamaConfig(**CONFIG.to_dict() | {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}})
    assert simulation_key(replace(SETTING, config=remote)) is None
    monkeypatch.setattr(simulation_cache, "_has_unversioned_code", lambda package: package == "peft")
    assert simulation_key(SETTING) is None
