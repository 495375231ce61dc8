"""Every printed serving command has rank, stop tokens and template, and none is printed that cannot work."""

from __future__ import annotations

import json
import shlex

import pytest

from surefit.core.rundir import RunDir, write_json
from surefit.facts.named_templates import TEMPLATE_DIR
from surefit.merge.serving import ServedAdapter, adapter_commands, build_serving_commands, card_commands

SETTINGS = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "base_model_name_or_path": "B"}
STOPS = [151643, 151645]


def options(line):
    """`--name value` of a command as a shell reads it."""
    words = shlex.split(line)
    return {
        word: words[place + 1] if place + 1 < len(words) else "" for place, word in enumerate(words) if word[:2] == "--"
    }


def commands(**settings):
    beside = ServedAdapter(SETTINGS | settings, "B", "A", stops=STOPS, generation="G", template="T")
    found, notes = adapter_commands(beside)
    return {name.partition(",")[0]: options(lines[0]) for name, lines in found.items()}, notes


@pytest.mark.parametrize(
    ("rank", "allowed"),
    [(1, "1"), (2, "8"), (8, "8"), (32, "32"), (33, "64"), (200, "256"), (300, "320"), (512, "512")],
)
def test_r10_the_rank_is_one_that_vllm_allows(rank, allowed):
    found, _ = commands(r=rank)
    assert found["vLLM"]["--max-lora-rank"] == allowed
    assert found["SGLang"]["--max-lora-rank"] == str(rank)


@pytest.mark.parametrize(
    ("settings", "servers"),
    [
        ({}, {"vLLM", "SGLang"}),
        ({"use_dora": True}, set()),
        ({"trainable_token_indices": {"embed_tokens": [9]}}, set()),
        ({"use_rslora": True}, {"vLLM"}),
        ({"r": 513}, {"SGLang"}),
        ({"modules_to_save": None, "bias": "none", "rank_pattern": {}}, {"vLLM", "SGLang"}),
    ],
)
def test_r10_no_command_for_a_server_that_refuses_or_leaves_something_out(settings, servers):
    found, notes = commands(**settings)
    assert found.keys() == servers
    assert len(notes) == 2 - len(servers)
    for server in {"vLLM", "SGLang"} - servers:
        assert any(note.startswith(server) for note in notes)


def test_d13_the_adapter_beside_its_base_has_the_stop_tokens_and_the_template():
    found, _ = commands()
    assert found["vLLM"]["--generation-config"] == "G"
    assert json.loads(found["SGLang"]["--json-model-override-args"]) == {"eos_token_id": STOPS}
    assert found["vLLM"]["--chat-template"] == found["SGLang"]["--chat-template"] == "T"


@pytest.fixture
def run(tmp_path):
    """A run as `merge` leaves it, by the files that are read to serve it."""
    run = RunDir(tmp_path / "a run")
    for directory in (run.adapter, run.merged):
        directory.mkdir(parents=True)
    run.resolved.write_text("model: {name_or_path: B}\n")
    write_json(run.adapter / "adapter_config.json", SETTINGS | {"r": 32})
    (run.adapter / "chat_template.jinja").write_text("{{ messages }}")
    write_json(run.merged / "config.json", {"max_position_embeddings": 4096, "dtype": "bfloat16"})
    write_json(run.merged / "generation_config.json", {"eos_token_id": STOPS, "temperature": 0.6})
    (run.merged / "model.safetensors").write_bytes(b"")
    return run


def test_d13_serve_check_of_a_run_takes_stop_tokens_from_the_merged_model_and_stays_greedy(run):
    found = build_serving_commands(run.path).commands
    beside = options(next(lines[0] for name, lines in found.items() if name.startswith("vLLM,")))
    assert beside["--generation-config"] == str(run.merged)
    assert json.loads(beside["--override-generation-config"])["temperature"] == 0
    assert beside["--max-lora-rank"] == "32"
    assert (beside["--dtype"], beside["--max-model-len"]) == ("bfloat16", "4096")
    assert beside["--lora-modules"] == f"adapter={run.adapter}"
    assert options(found["vLLM"][0])["--generation-config"] == "vllm"


def test_r10_the_card_of_an_exported_adapter_prints_the_same_command(run, tmp_path):
    export = tmp_path / "export"
    export.mkdir()
    write_json(export / "adapter_config.json", SETTINGS | {"r": 32})
    write_json(export / "generation_config.json", {"eos_token_id": STOPS})
    (export / "chat_template.jinja").write_text("{{ messages }}")
    found, notes = card_commands(export, "org/base model")
    card = options(next(lines[0] for name, lines in found.items() if name.startswith("vLLM")))
    assert card["--max-lora-rank"] == "32"
    assert card["--generation-config"] == "REPOSITORY"
    assert "--override-generation-config" not in card, "the file holds stop tokens alone"
    assert card["--chat-template"] == "REPOSITORY/chat_template.jinja"
    assert shlex.split(found[next(iter(found))][0])[2] == "org/base model"
    assert notes == []


def with_tool_template(directory, as_list=False):
    """Add the template for requests with tools as transformers writes it now, or as older releases did."""
    if as_list:
        named = [{"name": name, "template": "{{ messages }}"} for name in ("default", "tool_use")]
        write_json(directory / "tokenizer_config.json", {"chat_template": named})
    else:
        (directory / TEMPLATE_DIR).mkdir()
        (directory / TEMPLATE_DIR / "tool_use.jinja").write_text("{{ tools }}")


def about_tools(notes):
    return [note for note in notes if "tool_use" in note]


def test_a_template_for_tools_that_chat_template_replaces_is_named(run):
    assert about_tools(build_serving_commands(run.path).notes) == []
    with_tool_template(run.adapter)
    (note,) = about_tools(build_serving_commands(run.path).notes)
    assert str(run.adapter / TEMPLATE_DIR / "tool_use.jinja") in note
    write_json(run.adapter / "adapter_config.json", SETTINGS | {"use_dora": True})
    assert about_tools(build_serving_commands(run.path).notes) == [], "no command has --chat-template"


@pytest.mark.parametrize("as_list", [False, True])
def test_a_whole_model_with_a_template_for_tools_says_what_each_server_does(run, as_list):
    with_tool_template(run.merged, as_list)
    (note,) = about_tools(build_serving_commands(run.path).notes)
    assert "--hf-chat-template-name tool_use" in note
    assert about_tools(card_commands(run.merged, "B")[1]) == [note]
    assert all("--chat-template" not in line for line in build_serving_commands(run.path).commands["vLLM"]), (
        "vLLM chooses itself"
    )


def test_the_card_of_an_adapter_names_its_template_for_tools(tmp_path):
    write_json(tmp_path / "adapter_config.json", SETTINGS)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with_tool_template(tmp_path)
    (note,) = about_tools(card_commands(tmp_path, "B")[1])
    assert f"REPOSITORY/{TEMPLATE_DIR}/tool_use.jinja" in note


def test_ollama_is_given_the_modelfile_of_the_export_and_no_other(run):
    def ollama(place):
        return build_serving_commands(place).commands["Ollama"]

    write = f"surefit export '{run.path}' --for ollama"
    made = f"ollama create surefit-model -f '{run.exports / 'ollama' / 'Modelfile'}'"
    assert ollama(run.path)[:2] == [write, made]
    folder = run.exports / "ollama"
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(b"GGUF")
    assert ollama(folder)[:2] == [write, made]
    (folder / "Modelfile").write_text("FROM ./model.gguf\n")
    assert ollama(folder)[0] == ollama(run.path)[0] == made
