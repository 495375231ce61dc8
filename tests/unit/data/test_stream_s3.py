"""S3 through s3fs, against a server of moto's on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyarrow import parquet

from surefit.core.errors import DataError
from surefit.data.read.stream import read_range, split_into_ranges, stream_rows

boto3, s3fs, moto = (pytest.importorskip(name) for name in ("boto3", "s3fs", "moto.server"))
ROWS = [{"text": f"row {n}"} for n in range(2_000)]


@pytest.fixture
def bucket(monkeypatch) -> Iterator[object]:
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    for name, value in (settings | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="rows")
    yield client
    server.stop()


def test_rows_in_a_bucket(bucket, tmp_path) -> None:
    half = len(ROWS) // 2
    for number, part in enumerate((ROWS[:half], ROWS[half:])):
        body = "".join(json.dumps(row) + "\n" for row in part).encode()
        bucket.put_object(Bucket="rows", Key=f"d/{number}.jsonl", Body=body)
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=500)
    bucket.upload_file(str(tmp_path / "a.parquet"), "rows", "a.parquet")
    for source in ("s3://rows/d/*.jsonl", "s3://rows/d", "s3://rows/a.parquet"):
        assert [placed.row for placed in stream_rows(source)] == ROWS
    cut = split_into_ranges("s3://rows/a.parquet", range_bytes=1)
    assert len(cut) == 4
    assert [placed.row for placed in read_range(cut[2])] == ROWS[1000:1500]
    assert next(read_range(cut[2])).path == "s3://rows/a.parquet row 1001"
    with pytest.raises(DataError, match="no such file"):
        list(stream_rows("s3://rows/missing.jsonl"))
    with pytest.raises(DataError, match="it matches no file"):
        list(stream_rows("s3://rows/x/*.jsonl"))
