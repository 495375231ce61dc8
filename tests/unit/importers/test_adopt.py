"""A user's own Accelerate or DeepSpeed file: what it changes, what contradicts it, what is left over."""

import json
from pathlib import Path

import pytest

from surefit.config.load import LoadedConfig, load_config
from surefit.config.resolve import resolve_config, write_resolved
from surefit.core.errors import ConfigError
from surefit.importers import read_tool_config
from surefit.importers.adopt import AdoptedConfig, apply_launcher_files

CONFIG = """\
model: {{name_or_path: surefit/nano}}
data: {{train: surefit/function_calling}}
output_dir: runs/one
{more}
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 2
num_processes: 8
mixed_precision: bf16
main_process_port: 29501
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
  gradient_accumulation_steps: auto
  gradient_clipping: 0.5
"""
ZERO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.3,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1, "betas": "auto"}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "none"}},
    "wall_clock_breakdown": True,
}


def load(tmp_path: Path, more: str, *overrides: str) -> LoadedConfig:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(more=more))
    return load_config(path, overrides)


@pytest.fixture
def zero(tmp_path):
    """Writes a DeepSpeed file and a config that names it, and adopts it."""

    def make(more: str = "", *overrides: str, parallel: str = "", **changes) -> AdoptedConfig:
        tree = {key: value for key, value in (ZERO | changes).items() if value is not None}
        (tmp_path / "ds.json").write_text(json.dumps(tree, indent=1))
        named = f"parallel: {{deepspeed_config: {tmp_path}/ds.json{parallel}}}\n{more}"
        return apply_launcher_files(load(tmp_path, named, *overrides))

    return make


def test_without_a_file_nothing_changes(tmp_path) -> None:
    loaded = load(tmp_path, "")
    assert apply_launcher_files(loaded) == AdoptedConfig(loaded)


def test_a_deepspeed_file_fills_what_is_open_and_says_so(zero) -> None:
    found = zero("train: {global_batch_size: 8}")
    config = found.loaded.config
    assert (config.parallel.mode, config.model.dtype, config.parallel.offload) == ("zero2", "bfloat16", False)
    assert (config.train.learning_rate, config.train.weight_decay, config.train.max_grad_norm) == (1e-4, 0.1, 0.3)
    assert config.train.per_device_train_batch_size == 2
    lines = list(found.lines())
    assert any(line == "parallel.mode: zero2, from ds.json:18 zero_optimization.stage (was auto)" for line in lines), (
        lines
    )
    assert "train.max_grad_norm: 0.3, from ds.json:5 gradient_clipping (was 1.0)" in lines
    assert (
        lines[-1] == "ds.json: 2 keys without an equivalent in SureFit, ignored: optimizer.type, wall_clock_breakdown"
    )


def test_tuning_reaches_deepspeed(zero) -> None:
    from surefit.parallel import zero as engine

    found = zero("train: {global_batch_size: 8}")
    assert not any("overlap_comm" in lost.key for _, lost in found.unplaced)
    assert engine.read_deepspeed_tuning(found.loaded.config.parallel.deepspeed_config) == {"overlap_comm": True}
    assert engine.read_deepspeed_tuning(None) == {}


def test_the_section_parallel_gives_way_and_the_command_line_does_not(zero) -> None:
    found = zero("train: {global_batch_size: 8}", parallel=", mode: fsdp")
    assert found.loaded.config.parallel.mode == "zero2"
    assert any("was fsdp" in line for line in found.lines())
    with pytest.raises(ConfigError, match=r"fsdp on the command line, but zero2 in ds.json:18"):
        zero("train: {global_batch_size: 8}", "parallel.mode=fsdp")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("train: {global_batch_size: 8, per_device_train_batch_size: 4}", r": 4 here, but 2 in ds.json:3 train_micro"),
        ("train: {global_batch_size: 8, learning_rate: 0.1}", r"0\.1 here, but 0\.0001 in ds.json:12"),
        ("train: {global_batch_size: 64}", r"4 micro batches × 2 examples .*global_batch_size is 64, on 1 device"),
        ("hardware: {count: 3}\ntrain: {global_batch_size: 8}", r"global_batch_size is 8, on 3 devices"),
    ],
)
def test_contradictions_are_errors_with_both_values(zero, more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        zero(more)
    assert caught.value.field is not None
    assert caught.value.line is not None


def test_the_micro_batch_follows_from_the_accumulation(zero) -> None:
    found = zero("hardware: {count: 2}\ntrain: {global_batch_size: 64}", train_micro_batch_size_per_gpu="auto")
    assert found.loaded.config.train.per_device_train_batch_size == 8
    with pytest.raises(ConfigError, match=r"4 micro batches per device .* is 6, on 1 device"):
        zero("train: {global_batch_size: 6}", train_micro_batch_size_per_gpu="auto")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_optimisation": {"stage": 2}}, r"zero_optimisation: deepspeed has no such key"),
        ({"zero_optimization": {"stage": 7}}, r"expected a whole number from 0 to 3, got 7"),
        ({"optimizer": {"params": {"lr": 20}}}, r"SureFit cannot use 20.0 of ds.json:\d+ optimizer.params.lr"),
    ],
)
def test_what_the_file_gets_wrong_is_an_error(zero, changes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zero("train: {global_batch_size: 8}", **changes)


def test_stage_one_has_no_place(zero) -> None:
    found = zero("train: {global_batch_size: 8}", zero_optimization={"stage": 1})
    assert found.loaded.config.parallel.mode == "auto"
    assert any("stage 2" in lost.why for _, lost in found.unplaced)


def test_an_accelerate_file(tmp_path) -> None:
    (tmp_path / "acc.yaml").write_text(ACCELERATE)
    found = apply_launcher_files(load(tmp_path, f"parallel: {{accelerate_config: {tmp_path}/acc.yaml}}"))
    config = found.loaded.config
    assert (config.hardware.count, config.hardware.nodes) == (4, 2)
    assert (config.parallel.mode, config.parallel.offload, config.model.dtype) == ("zero3", True, "bfloat16")
    assert config.train.max_grad_norm == 0.5
    assert {lost.key for _, lost in found.unplaced} == {"compute_environment", "main_process_port"}


SHARDED = """\
distributed_type: FSDP
num_processes: 8
fsdp_config: {fsdp_version: 2}
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: 2
  parallelism_config_cp_comm_strategy: allgather
"""


def test_accelerates_shared_tokens_within_shards(tmp_path) -> None:
    (tmp_path / "acc.yaml").write_text(SHARDED)
    found = apply_launcher_files(load(tmp_path, f"parallel: {{accelerate_config: {tmp_path}/acc.yaml}}"))
    parallel = found.loaded.config.parallel
    assert (parallel.mode, parallel.cp, parallel.dp_replicate, parallel.tp) == ("fsdp", 2, 2, 1)
    lines = list(found.lines())
    key = "parallelism_config.parallelism_config_cp_size"
    assert f"parallel.cp: 2, from acc.yaml:8 {key} (was 1)" in lines
    assert [lost.key for _, lost in found.unplaced] == ["parallelism_config.parallelism_config_cp_comm_strategy"]
    setup = read_tool_config(tmp_path / "acc.yaml", "accelerate").setup
    assert (setup.world_size, setup.processes) == (4, 8)


def test_sizes_that_do_not_make_up_the_processes(tmp_path) -> None:
    (tmp_path / "acc.yaml").write_text(SHARDED.replace("cp_size: 2", "cp_size: 4"))
    with pytest.raises(ConfigError, match="expected sizes whose product is num_processes, 8, got 4"):
        apply_launcher_files(load(tmp_path, f"parallel: {{accelerate_config: {tmp_path}/acc.yaml}}"))


def test_an_accelerate_file_may_name_the_deepspeed_file(tmp_path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.7}))
    (tmp_path / "acc.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    )
    config = apply_launcher_files(load(tmp_path, f"parallel: {{accelerate_config: {tmp_path}/acc.yaml}}")).loaded.config
    assert (config.parallel.mode, config.train.max_grad_norm) == ("zero2", 0.7)
    assert config.parallel.deepspeed_config == str(tmp_path / "ds.json")


def test_two_files_that_differ_are_an_error(tmp_path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (tmp_path / "acc.yaml").write_text(ACCELERATE)
    both = f"parallel: {{accelerate_config: {tmp_path}/acc.yaml, deepspeed_config: {tmp_path}/ds.json}}"
    with pytest.raises(ConfigError, match=r"parallel.mode is zero3 in acc.yaml:8 .* but zero2 in ds.json:1"):
        apply_launcher_files(load(tmp_path, both))


def test_processes_that_machines_cannot_share(tmp_path) -> None:
    (tmp_path / "acc.yaml").write_text(ACCELERATE.replace("num_processes: 8", "num_processes: 7"))
    with pytest.raises(ConfigError, match="7 processes cannot be divided evenly among 2 machines"):
        apply_launcher_files(load(tmp_path, f"parallel: {{accelerate_config: {tmp_path}/acc.yaml}}"))


def test_a_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        apply_launcher_files(load(tmp_path, f"parallel: {{accelerate_config: {tmp_path}/none.yaml}}"))


def test_a_file_that_is_not_there_is_told_with_the_key_that_names_it(tmp_path) -> None:
    (tmp_path / "acc.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\nnum_machines: 1\n"
        "deepspeed_config:\n  deepspeed_config_file: gone.json\n"
    )
    for named, place in (("gone.yaml", ""), ("acc.yaml", "named in acc.yaml:6 deepspeed_config.")):
        with pytest.raises(ConfigError) as caught:
            apply_launcher_files(load(tmp_path, f"parallel: {{accelerate_config: {tmp_path / named}}}"))
        key = "deepspeed" if place else "accelerate"
        assert (caught.value.field, caught.value.path) == (f"parallel.{key}_config", str(tmp_path / "run.yaml"))
        assert place in caught.value.message


def test_json_that_ends_early_is_called_json(tmp_path) -> None:
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 0.3,\n"zero_optimization": {"stage": 2}')
    with pytest.raises(ConfigError, match="not valid JSON") as caught:
        read_tool_config(tmp_path / "ds.json", "deepspeed")
    assert "indentation" not in (caught.value.help or "")


def test_resolved_yaml_says_where_it_came_from_and_runs_as_it_is(zero, tmp_path, monkeypatch) -> None:
    class Model:
        parameters, vocab_size, packing_obstacle, padded_attention = 10**6, 512, None, "sdpa"
        router_loss = shares_prompts = False

    class Hardware:
        kind, name, memory_bytes, bf16 = "cpu", "cpu", None, False

    found = zero("train: {global_batch_size: 8}")
    resolved = resolve_config(found.loaded, Model(), Hardware(), 100)
    write_resolved(resolved, tmp_path / "resolved.yaml")
    text = (tmp_path / "resolved.yaml").read_text()
    assert "mode: zero2  # file ds.json:18 zero_optimization.stage" in text
    assert "learning_rate: 0.0001  # file ds.json:12 optimizer.params.lr" in text
    again = apply_launcher_files(load_config(tmp_path / "resolved.yaml"))
    assert again.overrides == ()
    assert again.loaded.config == resolved.config
