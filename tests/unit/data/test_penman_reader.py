"""Blocks of PENMAN in the ways they are written, and every refusal with its line."""

from __future__ import annotations

import pytest

from surefit import samples
from surefit.core.errors import DataError
from surefit.data.read.load import load_rows
from surefit.data.read.sources import list_data_files

TEXT = """\ufeff# AMR release; generated on a day
# a note

# ::id a.1 ::date 2020 ::annotator X
# ::snt The boy :: sleeps.
# ::save-date today
(s / sleep-01
    :ARG0 (b / boy))

#::snt Bi kịch là chó.
(b / bi kịch
\t:domain(c / chó))
#::snt Không có dòng trắng.

(k / không)


# ::id z
# ::snt Only a sentence.

# ::id y
# ::snt Another.
"""


def test_blocks_in_all_their_ways(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(TEXT, encoding="utf-8", newline="\r\n")
    rows = load_rows(str(path))
    assert list(rows) == [
        {"id": "a.1", "sentence": "The boy :: sleeps.", "graph": "(s / sleep-01\n:ARG0 (b / boy))"},
        {"sentence": "Bi kịch là chó.", "graph": "(b / bi kịch\n:domain(c / chó))"},
        {"sentence": "Không có dòng trắng.", "graph": "(k / không)"},
        {"id": "z", "sentence": "Only a sentence."},
        {"id": "y", "sentence": "Another."},
    ]
    assert [rows.place(n)[1] for n in range(5)] == [4, 10, 13, 18, 21]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("# ::snt A.\n(a / b)\n\n(c / d)\n", 4, "a graph without its sentence"),
        ("\nDear reader,\n", 2, "neither a comment nor the beginning of a graph: 'Dear reader,'"),
        ("# ::snt A.\n(a / b)\n\n# ::id x\n(c / d)\n", 4, "a graph without its sentence"),
        ("# ::snt\n(c / d)\n", 1, "a graph without its sentence"),
        ("# ::id lonely\n", 1, "a block without a sentence"),
    ],
)
def test_refusals_with_their_line(tmp_path, text, line, message):
    path = tmp_path / "train.penman"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_rows(str(path))
    assert caught.value.message == message
    assert caught.value.line == line
    assert caught.value.help


def test_only_comments_are_no_rows(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("# nothing here\n", encoding="utf-8")
    with pytest.raises(DataError, match="no rows"):
        load_rows(str(path))


def test_in_a_directory_text_files_are_not_data(tmp_path):
    for name in ("a.penman", "LICENSE.txt"):
        (tmp_path / name).write_text("# ::snt A.\n(a / b)\n", encoding="utf-8")
    assert [path.name for path in list_data_files(tmp_path)] == ["a.penman"]


def test_the_samples_are_found_by_name():
    assert {"surefit/amr-train", "surefit/amr-eval"} <= samples.list_samples().keys()
