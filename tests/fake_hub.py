"""As much of the Hugging Face hub's interface as uploads and downloads of a model talk to."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


class Hub(ThreadingHTTPServer):
    """A hub with one repository, ``me/parts``; its commit is the hash of its files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repo: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.before: dict[str, dict[str, bytes]] = {}  # earlier commits
        self.tokens: set[str] = set()
        self.asked: list[str] = []
        self.refuse = 0

    def commit(self) -> str:
        """Return the name of the newest commit."""
        content = sorted((name, hashlib.sha1(text).hexdigest()) for name, text in self.files.items())
        found = hashlib.sha1(json.dumps(content).encode()).hexdigest()
        self.before[found] = dict(self.files)
        return found

    def at(self, revision: str) -> dict[str, bytes] | None:
        """Return the files of a revision."""
        newest = self.commit()
        return self.before.get(newest if revision == "main" else revision)


class Answer(BaseHTTPRequestHandler):
    """Answers to one connection."""

    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if found := re.match(r"/api/models/me/parts/(tree|revision)/([^/?]+)", self.path):
            files = self.server.at(found[2])
            if files is None:
                self.missing("RevisionNotFound")
            elif found[1] == "tree":
                kinds = [(name, len(text), hashlib.sha1(text).hexdigest()) for name, text in files.items()]
                self.say([{"type": "file", "path": n, "size": size, "oid": oid} for n, size, oid in kinds])
            else:
                commit = next(commit for commit, kept in self.server.before.items() if kept == files)
                self.say({"id": "me/parts", "sha": commit, "siblings": [{"rfilename": n} for n in files]})
        elif found := re.match(r"/me/parts/resolve/([^/]+)/(.+)", self.path):
            self.file(found[1], found[2])
        elif self.path.startswith("/api/models/me/parts"):
            self.say({"id": "me/parts"})
        else:
            self.missing("RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers["Authorization"])
        if self.server.refuse and "/create" not in self.path:
            self.say({"error": "you may not write here"}, self.server.refuse)
        elif self.path == "/api/repos/create":
            self.server.repo = json.loads(body)
            self.say({"url": f"http://{self.headers['Host']}/me/parts", "id": "me/parts"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            self.say({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    self.server.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
                if item["key"] == "deletedFile":
                    del self.server.files[item["value"]["path"]]
            self.say({"commitUrl": f"http://{self.headers['Host']}/me/parts/commit/1", "commitOid": "1" * 40})
        else:
            self.say({}, 200)

    def file(self, revision: str, name: str) -> None:
        files = self.server.at(revision)
        if files is None or name not in files:
            self.missing("RevisionNotFound" if files is None else "EntryNotFound")
            return
        self.send(
            files[name],
            200,
            **{"X-Repo-Commit": revision, "ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"'},
        )

    def missing(self, code: str) -> None:
        self.send(b"{}", 404, **{"X-Error-Code": code, "X-Error-Message": "not there"})

    def say(self, values: Any, status: int = 200) -> None:
        self.send(json.dumps(values).encode(), status, **{"Content-Type": "application/json"})

    def send(self, content: bytes, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """Yield a hub on this machine, with a token for it and an empty cache of downloads."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
