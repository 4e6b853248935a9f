"""A stand-in of the Hugging Face hub on this machine, over HTTP: what `huggingface_hub` reads and writes models with.

Without Xet, whose servers speak another protocol: files go by git-LFS, as with `HF_HUB_DISABLE_XET=1`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_stand_in"
COMMIT = "c" * 40
LARGE = (".safetensors", ".bin", "tokenizer.json")


@dataclass
class Repository:
    """One of the hub's models."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """What the stand-in holds and has seen.

    Attributes:
        piece_bytes, seconds: weights are sent in such pieces with such a pause between them. stop_after: bytes of the
            weights after which nothing more is sent.
        requests: method and path of each.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    piece_bytes: int = 1 << 16
    seconds: float = 0.0
    stop_after: int | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, directory: Path) -> None:
        """Serve the files of a directory as a model."""
        files = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
        self.repositories[name] = Repository(files=files)

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """The variables that lead `huggingface_hub` here, with an empty cache."""
        variables = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        return variables if token is None else {**variables, "HF_TOKEN": token}


class Refusal(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str, code: str = "", **more: str) -> None:
        super().__init__(message)
        self.status, self.code, self.more = status, code, more


@contextmanager
def serving() -> Iterator[Hub]:
    """The hub, until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        do_GET = do_POST = do_PUT = do_HEAD

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            try:
                if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                    self._file(*match.groups())
                else:
                    self._json(200, self._api(path, body))
            except Refusal as refusal:
                self._json(refusal.status, {"error": str(refusal), **refusal.more}, {"X-Error-Code": refusal.code})
            except BrokenPipeError:
                pass  # a download that nobody waits for any more

        def _api(self, path: str, body: bytes) -> Any:
            if self.command == "GET" and (match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.+)?", path)):
                files = self._repository(match[1]).files
                return {"id": match[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            if self.command == "GET" and (match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+(/.*)?", path)):
                found = self._repository(match[1]).files
                return [{"type": "file", "path": n, "size": len(d), "oid": _sha1(d)} for n, d in found.items()]
            if path.startswith("/objects/") and self.command == "PUT":
                hub.objects[path.rpartition("/")[2]] = body
                return {}
            if self.headers.get("authorization") != f"Bearer {TOKEN}":
                raise Refusal(401, "Invalid username or password.")
            if path == "/api/whoami-v2":
                return {"type": "user", "name": "someone", "orgs": []}
            if path == "/api/validate-yaml":
                return {"errors": [], "warnings": []}
            if path == "/api/repos/create":
                return self._create(json.loads(body))
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
                files = self._repository(match[1]).files
                return {
                    "files": [
                        {
                            "path": f["path"],
                            "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular",
                            "shouldIgnore": False,
                            "oid": _sha1(files[f["path"]]) if f["path"] in files else None,
                        }
                        for f in json.loads(body)["files"]
                    ]
                }
            if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
                self._repository(match[1])
                return {"transfer": "basic", "objects": [self._upload(o) for o in json.loads(body)["objects"]]}
            if path == "/verify":
                wanted = json.loads(body)
                if len(hub.objects.get(wanted["oid"], b"")) != wanted["size"]:
                    raise Refusal(404, "no such object")
                return {}
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
                return self._commit(match[1], body)
            raise Refusal(404, f"{self.command} {path}", "EntryNotFound")

        def _create(self, wanted: dict[str, Any]) -> Any:
            if wanted["organization"] not in (None, "someone"):
                raise Refusal(403, f"You don't have the rights to create a model under {wanted['organization']}")
            name = f"someone/{wanted['name']}"
            if name in hub.repositories:
                raise Refusal(409, "You already created this model repo", url=f"{hub.url}/{name}")
            private = wanted.get("private") or wanted.get("visibility") == "private"
            hub.repositories[name] = Repository(private=bool(private))
            return {"url": f"{hub.url}/{name}", "name": name, "id": name}

        def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
            known = wanted["oid"] in hub.objects
            upload = {"href": f"{hub.url}/objects/{wanted['oid']}"}
            return wanted | ({} if known else {"actions": {"upload": upload, "verify": {"href": f"{hub.url}/verify"}}})

        def _commit(self, name: str, body: bytes) -> Any:
            repository = self._repository(name)
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    repository.commits.append(value["summary"])
                elif line["key"] == "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    data = hub.objects[value["oid"]]
                    assert hashlib.sha256(data).hexdigest() == value["oid"]
                    repository.files[value["path"]] = data
            return {"success": True, "commitOid": COMMIT, "commitUrl": f"{hub.url}/{name}/commit/{COMMIT}"}

        def _repository(self, name: str) -> Repository:
            if name not in hub.repositories:
                raise Refusal(404, "Repository not found", "RepoNotFound")
            return hub.repositories[name]

        def _file(self, name: str, path: str) -> None:
            data = self._repository(name).files.get(path)
            if data is None:
                raise Refusal(404, "Entry not found", "EntryNotFound")
            start = int(re.sub(r"\D", "", (self.headers.get("range") or "0").partition("-")[0]) or 0)
            self.send_response(206 if start else 200)
            self.send_header("ETag", f'"{_sha1(data)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if self.command == "HEAD":
                return
            slow = path.endswith(".safetensors")
            end = len(data) if not slow or hub.stop_after is None else hub.stop_after
            for at in range(start, end, hub.piece_bytes if slow else 1 << 30):
                self.wfile.write(data[at : min(end, at + hub.piece_bytes) if slow else end])
                if slow:
                    hub.closed.wait(hub.seconds)
            if end < len(data):
                hub.closed.wait()

        def _json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            for header, text in {"X-Repo-Commit": COMMIT, **(headers or {})}.items():
                if text:
                    self.send_header(header, text)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    hub.url = f"http://127.0.0.1:{http.server_port}"
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.closed.set()
        http.shutdown()
        http.server_close()


def _sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
