"""The header of GGUF files: what it says, and every way in which it can be damaged."""

import struct
import time
from pathlib import Path

import pytest
from gguf_files import KINDS, write_gguf
from hypothesis import given
from hypothesis import strategies as st

from surefit import nano
from surefit.core.errors import ModelError
from surefit.facts.gguf import is_gguf, read_gguf
from surefit.facts.gguf_model import KNOWN_SPLITS, config_of, shortest
from surefit.facts.gguf_tokenizer import SPLITS
from surefit.facts.model import directory_facts, model_facts
from surefit.facts.tokenizer import facts_of_tokenizer, tokenizer_facts

pytest.importorskip("gguf", reason="llama.cpp's library gguf is not installed")


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "Q4_1")


@pytest.fixture
def damaged(file, tmp_path):
    """A copy with other bytes at a place, or cut there."""

    def make(at: int, new: bytes | None) -> Path:
        content = file.read_bytes()
        (tmp_path / "damaged.gguf").write_bytes(content[:at] + (b"" if new is None else new + content[at + len(new) :]))
        return tmp_path / "damaged.gguf"

    return make


def place(file: Path, text: bytes) -> int:
    """Behind a text of the header."""
    return file.read_bytes().index(text) + len(text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_header_agrees_with_llama_cpps_own_reader(kind, tmp_path):
    from gguf import GGUFReader

    path = write_gguf(tmp_path / "tiny.gguf", kind)
    header, theirs = read_gguf(path), GGUFReader(path)
    assert header.quantization == kind
    assert {name: (t.kind, list(reversed(t.shape))) for name, t in header.tensors.items()} == {
        t.name: (t.tensor_type.name, t.shape.tolist()) for t in theirs.tensors
    }
    assert header.tokens == theirs.fields["tokenizer.ggml.tokens"].contents()
    assert header.metadata["tokenizer.ggml.merges"] == theirs.fields["tokenizer.ggml.merges"].contents()
    assert header.of_model("rope.freq_base") == 10000.0


def test_facts_before_the_conversion_are_those_of_the_model(file):
    found, nanos = model_facts(str(file)), directory_facts(nano.PATH, "nano")
    assert found.path is None
    assert found.gguf == file
    assert (found.source, found.has_weights, found.dtype) == ("gguf", False, "float32")
    same = "architecture", "num_layers", "head_dim", "vocab_size", "parameters", "linear_modules", "tied_embeddings"
    assert [getattr(found, name) for name in same] == [getattr(nanos, name) for name in same]
    assert found.weight_bytes == 4 * found.parameters
    assert found.chat_template == nanos.chat_template


def test_the_tokenizers_facts_are_those_of_the_tokenizer(file):
    found, nanos = facts_of_tokenizer(model_facts(str(file))), tokenizer_facts(nano.PATH)
    assert found is not None
    same = "tokens", "largest_id", "added", "pad_id", "eos_id", "bos_id", "chat_template", "turn_end", "end_of_turn_id"
    assert [getattr(found, name) for name in same] == [getattr(nanos, name) for name in same]


def test_a_file_is_one_by_its_name_or_its_first_bytes(file, tmp_path):
    assert is_gguf(tmp_path / "not-there.gguf")
    assert is_gguf(file.rename(file.with_name("blob")))
    file.with_name("blob").rename(file)
    assert not is_gguf(Path(__file__))


def test_a_header_is_cut_short_wherever_it_is_cut(file, damaged):
    header = place(file, b"output_norm.weight")
    for at in range(4, header, header // 60):
        with pytest.raises(ModelError, match="ends within its header"):
            read_gguf(damaged(at, None))
    with pytest.raises(ModelError, match="bytes, but its header describes") as caught:
        read_gguf(damaged(file.stat().st_size - 1, None))
    assert "download the file again" in str(caught.value.help)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file: it has 0 B"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04 and more", "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1; SureFit reads 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "GGUF version 4"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "list of 1,152,921,504,606,846,976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "list of 1,152,921,504,606,846,976 settings"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63), "ends within its header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**62), "list of 4,611"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1) + bytes(16), "type 9"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77) + bytes(8), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xfe" + bytes(9), "not UTF-8"),
    ],
)
def test_what_is_no_gguf_file_is_refused_at_once(content, message, tmp_path):
    (tmp_path / "x.gguf").write_bytes(content)
    started = time.process_time()
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(tmp_path / "x.gguf")
    assert caught.value.path == str(tmp_path / "x.gguf")
    assert caught.value.help
    assert time.process_time() - started < 1


def test_damage_to_the_list_of_tensors(file, damaged):
    at = place(file, b"blk.0.attn_q.weight")
    for where, new, message in (
        (at, struct.pack("<I", 1000), "has 1000 dimensions"),
        (at + 4, struct.pack("<Q", 2**62), "its header describes"),
        (at + 4, struct.pack("<Q", 161), "cannot be Q4_1"),
        (at + 4, struct.pack("<Q", 0), "cannot be Q4_1"),
        (at + 20, struct.pack("<I", 99), "is of ggml's type 99, which cannot be dequantized"),
        (at + 24, struct.pack("<Q", 2**63), "its header describes|does not start where it must"),
        (at + 24, struct.pack("<Q", 7), "does not start where it must"),
        (at - 8, b"k", "occurs twice"),
    ):
        with pytest.raises(ModelError, match=message):
            config_of(read_gguf(damaged(where, new)))


@given(st.data())
def test_a_changed_byte_is_read_or_refused_and_nothing_else(file, tmp_path_factory, data):
    """No other exception, and no allocation of what a damaged count promises."""
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 2000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("changed") / "x.gguf"
    path.write_bytes(content)
    try:
        config_of(read_gguf(path))
    except ModelError as error:
        assert error.help  # noqa: PT017 (either is right)


def test_an_architecture_or_a_tokenizer_that_is_not_converted(tmp_path):
    path = tmp_path / "tiny.gguf"
    for options, message in (
        ({"architecture": "mamba"}, "does not convert the architecture 'mamba'"),
        ({"tokenizer": False}, "has no tokenizer"),
        ({"pre": "whoever"}, r"cannot rebuild its tokenizer \(gpt2 / whoever\)"),
        ({"pre": None}, r"its tokenizer \(gpt2 / None\)"),
        ({"also": lambda writer: writer.add_uint16("split.count", 3)}, "one part of 3 of a split model"),
        ({"also": lambda writer: writer.add_string("llama.rope.scaling.type", "yarn")}, "positions are scaled .yarn"),
        ({"without": ("token_embd.weight",)}, "1,536 tokens, but its embedding has 0 rows"),
    ):
        path.unlink(missing_ok=True)
        write_gguf(path, **options)
        with pytest.raises(ModelError, match=message) as caught:
            config_of(read_gguf(path))
        assert caught.value.help


def test_the_splits_that_are_accepted_are_those_that_are_known():
    assert set(KNOWN_SPLITS) == set(SPLITS)


def test_numbers_are_written_as_they_were_meant():
    assert shortest(9.999999747378752e-06) == 1e-5
    assert shortest(9.999999974752427e-07) == 1e-6
    assert shortest(0.0) == 0.0


def test_paths_that_are_no_file(tmp_path, file):
    with pytest.raises(ModelError, match="no such GGUF file; did you mean"):
        model_facts(str(file.with_name("tinny.gguf")))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match=r"no config.json in it") as caught:
        model_facts(str(tmp_path))
    assert caught.value.help == f"name the GGUF file itself: {tmp_path / 'model.gguf'}"
