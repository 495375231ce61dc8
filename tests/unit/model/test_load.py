"""Models are loaded whole, or refused with the reason and a way out."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_run
import torch
from huggingface_hub import errors as hub
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from surefit.config.schema import ModelSection
from surefit.core.errors import MachineError, ModelError
from surefit.model.load import load_model
from surefit.model.tokenizer import load_tokenizer
from surefit.nano import PATH as NANO

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def directory(good: Path, tmp_path: Path) -> Path:
    """A copy to harm."""
    return Path(shutil.copytree(good, tmp_path / "base"))


def section(name: str | Path, **changes: Any) -> ModelSection:
    return ModelSection(name_or_path=str(name), **({"dtype": "float32"} | changes))


def load(name: str | Path, **changes: Any) -> Any:
    return load_model(section(name, **changes), tiny_run.CPU)


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors: dict[str, Any] = load_file(directory / WEIGHTS) | {key.replace("__", "."): t for key, t in changes.items()}
    save_file({name: t for name, t in tensors.items() if t is not None}, directory / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_arrive_in_the_dtype_asked_for(good: Path, dtype: str) -> None:
    model = load(good, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert model.config._attn_implementation == "sdpa"
    assert not model.training
    reference = tiny_run.llama().to(getattr(torch, dtype))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.usefixtures("one_thread")  # which puts the number back
@pytest.mark.parametrize(("asked", "threads"), [(None, 2), ("1", 1)])
def test_a_small_model_has_two_threads_unless_the_user_asks_for_others(
    good: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("surefit.model.load.cpu_count", lambda: 8)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    torch.set_num_threads(3)
    load(good)
    assert torch.get_num_threads() == threads


def test_a_large_model_has_the_cores(good: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("surefit.model.load.cpu_count", lambda: 4)
    monkeypatch.setattr("surefit.facts.threads.SMALL_MODEL", 1)
    load(good)
    assert torch.get_num_threads() == 4


def test_the_tokenizer_comes_along(good: Path) -> None:
    assert load_tokenizer(section(good)).pad_token_id == 0


@pytest.mark.skipif(not (NANO / WEIGHTS).is_file(), reason="the embedded model is not built here")
def test_the_embedded_model() -> None:
    assert load("surefit/nano").num_parameters() > 1_000_000
    assert load_tokenizer(section("surefit/nano")).chat_template


def test_missing_weights_are_not_drawn_at_random(directory: Path) -> None:
    rewrite(directory, model__layers__1__mlp__up_proj__weight=None, model__norm__weight=None)
    with pytest.raises(ModelError, match=r"2 weights are not in the model's files: model\.layers\.1\.mlp\.up_proj"):
        load(directory)


def test_weights_of_another_shape(directory: Path) -> None:
    rewrite(directory, model__norm__weight=torch.ones(33))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \(33,\) in the file, \(32,\) by config\.json"):
        load(directory)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", None])
def test_a_damaged_file_is_named(directory: Path, content: bytes | None) -> None:
    file = directory / WEIGHTS
    file.write_bytes(file.read_bytes()[:5000] if content is None else content)
    with pytest.raises(ModelError, match="the weights are damaged") as caught:
        load(directory)
    assert caught.value.path == str(file)


def test_a_directory_that_is_no_model(directory: Path, tmp_path: Path) -> None:
    (directory / WEIGHTS).unlink()
    with pytest.raises(ModelError, match="has no weights") as caught:
        load(directory)
    assert "git-lfs" in str(caught.value.help)
    (directory / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"pickled \(pytorch_model\.bin\)"):
        load(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(directory)
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        load_tokenizer(section(tmp_path))


def test_configs_transformers_cannot_use(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "gpt99"}))
    with pytest.raises(ModelError, match="model type `gpt99`"):
        load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load(directory)


@pytest.mark.parametrize("name", ["./no/such", "/no/such/dir", "a/b/c"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match="no such directory") as caught:
        load(name)
    assert caught.value.path == name
    assert caught.value.field == "model.name_or_path"


def test_a_file_where_a_directory_is_meant(good: Path) -> None:
    with pytest.raises(ModelError, match="this is a file"):
        load(good / WEIGHTS)


@pytest.mark.parametrize(
    ("kind", "words", "advice"),
    [
        (hub.GatedRepoError, "is gated", "HF_TOKEN"),
        (hub.RepositoryNotFoundError, "not on the hub", "spelling"),
        (hub.RevisionNotFoundError, "no revision 'v9'", "model.revision"),
        (hub.LocalEntryNotFoundError, "cannot be reached", "surefit/nano"),
        (hub.HFValidationError, "nor a valid hub id", "Qwen/"),
    ],
)
@pytest.mark.parametrize("loader", [load_tokenizer, lambda part: load_model(part, tiny_run.CPU)])
def test_what_the_hub_refuses(monkeypatch: pytest.MonkeyPatch, loader, kind, words: str, advice: str) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        try:
            raise kind.__new__(kind)  # made without the response that its constructor wants
        except Exception as inner:
            raise OSError("transformers' own words") from inner  # this is how transformers passes it on

    for auto in (AutoTokenizer, AutoConfig, AutoModelForCausalLM):
        monkeypatch.setattr(auto, "from_pretrained", refuse)
    with pytest.raises(ModelError, match=words) as caught:
        loader(section("someone/model", revision="v9"))
    assert advice in str(caught.value.help)
    assert caught.value.path == "someone/model"


def test_code_of_its_own_is_not_run_unasked(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM"}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "own.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(ModelError, match="Python code of its own") as caught:
        load(directory)
    assert "trust_remote_code" in str(caught.value.help)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(good: Path) -> None:
    with pytest.raises(MachineError, match="finds no GPU"):
        load_model(section(good), SimpleNamespace(kind="cuda"))  # type: ignore[arg-type]
