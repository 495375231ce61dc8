"""Pushing, against a server on this machine that speaks the hub's endpoints: the commit, and large files by LFS."""

from __future__ import annotations

import base64
import json
import re
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import HfApi

from surefit.core.errors import ConfigError, GateError, MachineError, ModelError
from surefit.core.rundir import file_sha256, write_json
from surefit.merge.push import prepare_push, push_to_hub


class Hub(ThreadingHTTPServer):
    """Repositories in memory: their visibility and files. `refuses` has the status of a path that fails.

    Files of `large` bytes or more go to `store` (sha256 → content), in parts of `part` bytes where that is set; `puts`
    counts the bytes that came. No address of a PUT takes the token: at the hub they are another company's, signed.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.private, self.files, self.refuses, self.tokens, self.commits = {}, {}, {}, set(), 0
        self.large, self.part, self.store, self.parts, self.puts = 2**20, None, {}, {}, 0

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def mode(self, file):
        return "lfs" if file["size"] >= self.large else "regular"

    def upload(self, oid, size):
        """What the LFS batch says of one object: nothing to do, or where to put it."""
        if oid in self.store:
            return {"oid": oid, "size": size}
        action = {"href": f"{self.address}/put/{oid}"}
        if self.part:
            pages = range(1, -(-size // self.part) + 1)
            urls = {str(page): f"{self.address}/part/{oid}/{page}" for page in pages}
            action = {"href": f"{self.address}/complete/{oid}", "header": {"chunk_size": str(self.part), **urls}}
        return {"oid": oid, "size": size, "actions": {"upload": action}}


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_):
        pass

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.tokens.add(self.headers.get("Authorization"))
        for part, status in self.server.refuses.items():
            if part in self.path:
                return self.answer({"error": "no"}, status)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization')}/{asked['name']}"
            existed = name in self.server.private
            private = asked["visibility"] == "private" if "visibility" in asked else asked.get("private")
            self.server.private.setdefault(name, private)
            return self.answer({"url": f"https://huggingface.co/{name}", "error": "exists"}, 409 if existed else 200)
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": self.server.mode(f), "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if self.path.endswith(".git/info/lfs/objects/batch"):
            objects = [self.server.upload(one["oid"], one["size"]) for one in json.loads(body)["objects"]]
            return self.answer({"transfer": "multipart" if self.server.part else "basic", "objects": objects})
        if self.path.startswith("/complete/"):
            oid, parts = self.path.rpartition("/")[2], self.server.parts
            known = [parts[f"/part/{oid}/{each['partNumber']}"] for each in json.loads(body)["parts"]]
            self.server.store[oid] = b"".join(known)
            return self.answer({})
        if "/commit/" in self.path:
            name = re.match(r"/api/models/(.+)/commit/", self.path)[1]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files.setdefault(name, {})[line["value"]["path"]] = content
                if line["key"] == "lfsFile":
                    content = self.server.store[line["value"]["oid"]]
                    self.server.files.setdefault(name, {})[line["value"]["path"]] = content
            self.server.commits += 1
            return self.answer(
                {"success": True, "commitOid": "0" * 40, "commitUrl": f"https://huggingface.co/{name}/commit/0"}
            )
        return self.answer({})  # validate-yaml

    def do_GET(self):
        if "/repos/create" in self.server.refuses:  # a token that may not create may not look either
            return self.answer({"error": "no"}, self.server.refuses["/repos/create"])
        return self.answer({"sha": "0" * 40, "id": "me/one", "siblings": []})

    do_HEAD = do_GET

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.puts += len(body)
        for part, status in self.server.refuses.items():
            if part in self.path:
                return self.answer({"error": "no"}, status)
        if self.headers.get("Authorization"):
            return self.answer({"error": "the token went to a third party"}, 400)
        place = self.server.store if self.path.startswith("/put/") else self.server.parts
        place[self.path.removeprefix("/put/")] = body
        self.send_response(200)
        self.send_header("ETag", f'"{len(body)}"')
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    api = partial(HfApi, endpoint=server.address)
    monkeypatch.setattr("surefit.merge.push.HfApi", api)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "t" * 30)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


def listed(directory):
    names = [path for path in directory.iterdir() if path.name not in ("export.json", ".env", "notes.txt")]
    files = {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in names}
    write_json(directory / "export.json", {"format": "hub", "merged_sha256": "m", "files": files})


@pytest.fixture
def export(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 10)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("---\nlibrary_name: transformers\n---\n# one\n")
    write_json(tmp_path / "certificate.json", {"passed": True, "merged_sha256": "m"})
    (tmp_path / ".env").write_text("HF_TOKEN=secret")
    (tmp_path / "notes.txt").write_text("private")
    listed(tmp_path)
    return tmp_path


def test_the_export_and_nothing_else_arrives_private(export, hub):
    prepared = prepare_push(export, "me/one")
    assert prepared.left_behind == [".env", "notes.txt"]
    push_to_hub(prepared)
    assert hub.private == {"me/one": True}
    expected = {name: (export / name).read_bytes() for name in prepared.files}
    assert hub.files["me/one"] == expected
    assert set(expected) == {"model.safetensors", "config.json", "README.md", "certificate.json", "export.json"}
    assert hub.tokens == {"Bearer hf_" + "t" * 30}
    assert hub.commits == 1


def test_public_is_asked_for(export, hub):
    push_to_hub(prepare_push(export, "me/one", private=False))
    assert hub.private == {"me/one": False}


def test_a_push_that_was_cut_off_is_pushed_again(export, hub):
    hub.refuses = {"/commit/": 507}
    with pytest.raises(MachineError, match="did not accept me/one") as found:
        push_to_hub(prepare_push(export, "me/one"))
    assert "push again" in found.value.help
    assert not hub.files
    hub.refuses = {}
    push_to_hub(prepare_push(export, "me/one"))
    assert len(hub.files["me/one"]) == 5


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_may_not_write(export, hub, status):
    hub.refuses = {"/repos/create": status}
    with pytest.raises(ConfigError, match="does not let this token write"):
        push_to_hub(prepare_push(export, "me/one"))


def test_no_token_and_offline(export, hub, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MachineError, match="HF_HUB_OFFLINE"):
        push_to_hub(prepare_push(export, "me/one"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path_factory.mktemp("none") / "token"))
    with pytest.raises(ConfigError, match="no token"):
        push_to_hub(prepare_push(export, "me/one"))
    assert not hub.private


@pytest.mark.parametrize("name", ["one", "me/one/two", "me/-one", "me/o ne"])
def test_a_name_that_the_hub_does_not_take(export, name):
    with pytest.raises(ConfigError, match="is not a valid hub name"):
        prepare_push(export, name)


def test_without_a_certificate_nothing_is_pushed(export):
    for certificate in ({"passed": False, "merged_sha256": "m"}, {"passed": True, "merged_sha256": "other"}):
        write_json(export / "certificate.json", certificate)
        listed(export)
        with pytest.raises(GateError, match="no passing certificate"):
            prepare_push(export, "me/one")
    (export / "certificate.json").unlink()
    listed(export)
    with pytest.raises(GateError, match="no passing certificate"):
        prepare_push(export, "me/one")


def test_a_secret_and_a_changed_file_stay_here(export):
    (export / "config.json").write_text('{"key": "hf_' + "a" * 30 + '"}')
    with pytest.raises(ModelError, match=r"config\.json has changed since the export"):
        prepare_push(export, "me/one")
    listed(export)
    with pytest.raises(GateError, match="looks like a secret"):
        prepare_push(export, "me/one")


def test_a_list_that_points_elsewhere_is_refused(export):
    outside = export.parent / "outside.json"
    outside.write_text("{}")
    (export / "link.json").symlink_to(outside)
    listed(export)
    with pytest.raises(ModelError, match=r"link\.json is listed in export\.json but is not a file here"):
        prepare_push(export, "me/one")


@pytest.fixture
def large(export, hub, monkeypatch):
    """The export with weights of twelve megabytes, which the hub takes by LFS."""
    monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
    hub.large = 10_000_000
    (export / "model.safetensors").write_bytes(bytes(range(256)) * 46_875)
    listed(export)
    return export


@pytest.mark.parametrize("part", [None, 5_000_000], ids=["whole", "in parts"])
def test_a_large_file_goes_by_lfs(large, hub, capfd, part):
    hub.part = part
    push_to_hub(prepare_push(large, "me/one"))
    weights = large / "model.safetensors"
    assert hub.files["me/one"]["model.safetensors"] == weights.read_bytes()
    assert list(hub.store) == [file_sha256(weights)], "the small files came with the commit"
    assert hub.puts == 12_000_000
    assert hub.private == {"me/one": True}
    assert hub.commits == 1
    said = "".join(capfd.readouterr())
    assert "hf_" not in said


def test_large_files_that_have_arrived_are_not_sent_again(large, hub):
    hub.refuses = {"/commit/": 507}
    with pytest.raises(MachineError, match="did not accept me/one"):
        push_to_hub(prepare_push(large, "me/one"))
    assert hub.puts == 12_000_000
    assert not hub.files
    hub.refuses = {}
    push_to_hub(prepare_push(large, "me/one"))
    assert hub.puts == 12_000_000
    assert len(hub.files["me/one"]) == 5


def test_a_store_that_refuses_is_said_without_the_token(large, hub, capfd):
    hub.refuses = {"/put/": 403}
    with pytest.raises((ConfigError, MachineError)) as found:
        push_to_hub(prepare_push(large, "me/one"))
    assert "me/one" in found.value.message
    assert not hub.files
    assert "hf_" not in f"{found.value.message}{found.value.help}{''.join(capfd.readouterr())}"
