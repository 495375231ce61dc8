"""Hub data sets: the rows of a real `datasets` table, and its exceptions in our words."""

from __future__ import annotations

import os
import subprocess
import sys

import datasets
import pytest
from datasets import exceptions

from surefit.core.errors import DataError, MachineError
from surefit.data.read.load import load_rows

TOOLS = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "x"}}]


@pytest.fixture
def hub(monkeypatch):
    """hub(result) lets `datasets.load_dataset` return or raise it; returns the list of calls."""
    calls = []

    def install(result):
        def load_dataset(*args, **kwargs):
            calls.append((args, kwargs))
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    return install


def test_rows_of_a_table_without_its_filled_nulls(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    table = datasets.Dataset.from_list([{"text": "x", "tools": TOOLS}, {"text": None, "tools": []}])
    assert table[0]["tools"][0]["arguments"] == {"a": 1, "b": None}, "the fault is there"
    calls = hub(table)
    rows = load_rows("owner/name:main", split="test")
    assert list(rows) == [{"text": "x", "tools": TOOLS}, {"text": None, "tools": []}]
    assert calls == [(("owner/name", "main"), {"split": "test", "token": "hf_secretsecretsecret"})]
    assert rows.where(1) == "owner/name:main@test row 2"
    assert rows.files == ()
    assert len(rows.sha256) == 64


def test_a_split_in_the_name_wins(hub):
    calls = hub(datasets.Dataset.from_list([{"text": "x"}]))
    load_rows("owner/name@validation", split="train")
    assert calls[0] == (("owner/name", None), {"split": "validation", "token": calls[0][1]["token"]})


@pytest.mark.parametrize(
    ("raised", "kind", "field", "expected"),
    [
        (exceptions.DatasetNotFoundError("Dataset 'o/n' doesn't exist on the Hub"), DataError, None, "neither a file"),
        (exceptions.DatasetNotFoundError("'o/n' is a gated dataset on the Hub."), DataError, None, "is gated"),
        (ConnectionError("Couldn't reach 'o/n' on the Hub"), MachineError, None, "cannot be reached"),
        (ValueError('Unknown split "tain". Should be one of [train].'), DataError, "data.split", "Unknown split"),
        (ValueError("Config name is missing.\nPick one among: ['main']"), DataError, None, "['main']"),
        (RuntimeError("Dataset scripts are no longer supported, but found n.py"), DataError, None, "scripts"),
        (exceptions.DatasetGenerationError("An error occurred"), DataError, None, "cannot read it"),
        (OSError(28, "No space left on device"), MachineError, None, "No space left"),
    ],
)
def test_failures_say_what_to_do(hub, raised, kind, field, expected):
    hub(raised)
    with pytest.raises(kind) as caught:
        load_rows("o/n")
    assert type(caught.value) is kind
    assert caught.value.field == field
    assert expected in caught.value.message
    assert caught.value.help


def test_an_unforeseen_failure_is_said_with_the_data_set(hub):
    hub(KeyError("a bug"))
    with pytest.raises(DataError, match="o/n: datasets cannot read it: KeyError: 'a bug'") as caught:
        load_rows("o/n")
    assert isinstance(caught.value.__cause__, KeyError), "the cause is there for whoever looks"


def test_gated_names_the_page_and_the_token(hub):
    hub(exceptions.DatasetNotFoundError("Dataset 'o/n' is a gated dataset on the Hub."))
    with pytest.raises(DataError) as caught:
        load_rows("o/n:main@train")
    assert "https://huggingface.co/datasets/o/n," in caught.value.help
    assert "HF_TOKEN" in caught.value.help


def test_a_token_in_a_message_is_not_repeated(hub):
    hub(ConnectionError("no route for hf_" + "abcd" * 5))
    with pytest.raises(MachineError) as caught:
        load_rows("o/n")
    assert "hf_abc" not in str(caught.value)


def test_offline_for_real(tmp_path):
    code = (
        "from surefit.data.read.load import load_rows\n"
        "from surefit.core.errors import MachineError\n"
        "try:\n load_rows('owner/nothing')\n"
        "except MachineError as error:\n print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "the hub cannot be reached for owner/nothing" in out.stdout
    assert "copy the data set's files to this machine" in out.stdout
