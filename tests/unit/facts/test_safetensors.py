"""Headers of real files, and of files that are damaged in every way a download can damage them."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from surefit.core.errors import ModelError
from surefit.facts.safetensors import INDEX, SINGLE, TensorHeader, read_header, read_weights


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / SINGLE
    save_file(
        {"a.weight": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7), "scalar": torch.tensor(1.0)},
        path,
        metadata={"format": "pt"},
    )
    return path


def test_a_real_file(weights: Path) -> None:
    assert read_header(weights) == {
        "a.weight": TensorHeader("BF16", (3, 5), 30),
        "b": TensorHeader("F32", (7,), 28),
        "scalar": TensorHeader("F32", (), 4),
    }
    assert read_header(weights)["scalar"].elements == 1


@pytest.mark.parametrize("keep", [0, 5, 8, 40])
def test_a_file_that_ends_within_its_header(weights: Path, keep: int) -> None:
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ModelError, match="not a safetensors file") as caught:
        read_header(weights)
    assert caught.value.path == str(weights)


def test_a_file_that_ends_within_its_data(weights: Path) -> None:
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=f"has {size - 1:,} bytes, but its header describes {size:,}"):
        read_header(weights)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        b'"text"',
        b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}}',
        b'{"a": null}',
        b"[" * 100_000,
    ],
)
def test_a_header_that_breaks_the_format(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / SINGLE
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ModelError, match="header is damaged"):
        read_header(path)


def test_a_length_field_of_nonsense(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="not a safetensors file"):
        read_header(path)


def test_a_git_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(ModelError, match="Git LFS pointer") as caught:
        read_header(path)
    assert "git lfs pull" in str(caught.value.help)


def test_shards_are_added_up_and_a_missing_one_is_named(tmp_path: Path) -> None:
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    save_file({"a": torch.zeros(4)}, tmp_path / names[0])
    save_file({"b": torch.zeros(6)}, tmp_path / names[1])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    found = read_weights(tmp_path)
    assert found is not None
    assert sum(t.elements for t in found.values()) == 10
    (tmp_path / names[1]).unlink()
    with pytest.raises(ModelError, match=f"1 of 2 weight files are missing: {names[1]}"):
        read_weights(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelError, match="not a valid index"):
        read_weights(tmp_path)


def test_an_index_may_name_what_no_file_can_be_called(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x" * 100_000}}))
    with pytest.raises(ModelError, match="1 of 1 weight files are missing: xxx") as caught:
        read_weights(tmp_path)
    assert len(caught.value.message) < 200


def test_a_pipe_is_no_weight_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="not a regular file"):
        read_header(tmp_path / "a.safetensors")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert read_weights(tmp_path) is None
