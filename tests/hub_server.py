"""A hub on loopback: as much of the API as publishing, fetching and looking need, with ranges and faults.

    with HubServer() as server:                    # its address is server.url, for HF_ENDPOINT
        server.add("user/model", {"a.gguf": data}) # a repository with a first commit
        server.fail("PUT /lfs/", kind="500", times=1)

Files of 1 kB and more, and those that end in .gguf or .parquet, are large files with a sha256, the others git's own. Storage keeps
what really arrived, so a byte that was lost on the way shows in the listing. Faults:

    500       the answer is an error, nothing is done
    lost      it is done, and the answer is an error
    truncate  the body ends in the middle, with a length that says so
    short     the body ends in the middle, with a length that hides it
    flip      one bit of the body, sent or received, is another one
    norange   ranges are ignored
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_FROM_BYTES = 1024


@dataclass
class Fault:
    """What goes wrong with requests whose method and path match, and how often."""

    pattern: str
    kind: str
    left: int


@dataclass
class Repo:
    """Commits, oldest first: id, message, files by path."""

    commits: list[tuple[str, str, dict[str, bytes]]] = field(default_factory=list)

    @property
    def head(self) -> str:
        return self.commits[-1][0]

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][2]

    def at(self, revision: str) -> dict[str, bytes] | None:
        if revision == "main":
            return self.files
        return next((files for oid, _, files in self.commits if oid == revision), None)

    def add(self, message: str, files: Mapping[str, bytes]) -> str:
        merged = {**(self.files if self.commits else {}), **files}
        oid = hashlib.sha1(f"{len(self.commits)} {message} {sorted(merged)}".encode()).hexdigest()
        self.commits.append((oid, message, merged))
        return oid


class HubServer:
    """The server.

    requests    all of them, `METHOD /path`, in order
    uploads     paths that clients committed, in order
    ranges      path and bytes of every answer with a file's bytes
    on_request  called with each request before it is answered
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.uploads: list[str] = []
        self.ranges: list[tuple[str, int]] = []
        self.on_request: Callable[[str], None] = lambda line: None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, repo_id: str, files: Mapping[str, bytes], message: str = "first") -> str:
        """A commit by somebody else; makes the repository."""
        return self.repos.setdefault(repo_id, Repo()).add(message, files)

    def fail(self, pattern: str, kind: str = "500", times: int = 1) -> None:
        """Let the next requests that match fail."""
        self.faults.append(Fault(pattern, kind, times))

    def take_fault(self, line: str) -> str:
        """The kind of fault for a request; "" for none."""
        for fault in self.faults:
            if fault.left and re.search(fault.pattern, line):
                fault.left -= 1
                return fault.kind
        return ""


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(path: str, data: bytes) -> bool:
    return len(data) >= LARGE_FROM_BYTES or path.endswith((".gguf", ".parquet"))


def tree_item(path: str, data: bytes) -> dict[str, Any]:
    if not is_large(path, data):
        return {"type": "file", "path": path, "oid": blob_id(data), "size": len(data)}
    sha256 = hashlib.sha256(data).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(data)}\n".encode()
    return {"type": "file", "path": path, "oid": blob_id(pointer), "size": len(data),
            "lfs": {"oid": sha256, "size": len(data), "pointerSize": len(pointer)}}


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1:] if data else data


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # header and body in one packet: two wait 40 ms for each other

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        line = f"{self.command} {unquote(parts.path)}"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(line)
        self.hub.on_request(line)
        fault = self.hub.take_fault(line)
        if fault == "500":
            self._json({"error": "on purpose"}, 500)
            return
        for pattern, method in _ROUTES:
            if match := re.fullmatch(pattern, line):
                getattr(self, method)(*match.groups(), body=flipped(body) if fault == "flip" and body else body, fault=fault)
                return
        self._json({"error": f"no such route: {line}"}, 404)

    def _json(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._answer(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _answer(self, data: bytes, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        if length is not None:
            self.close_connection = True

    def _repo(self, repo_id: str) -> Repo | None:
        repo = self.hub.repos.get(repo_id)
        if repo is None or not repo.commits:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return None
        return repo

    def _files(self, repo_id: str, revision: str) -> dict[str, bytes] | None:
        repo = self._repo(repo_id)
        files = repo.at(revision) if repo else None
        if repo and files is None:
            self._json({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
        return files

    def info(self, repo_id: str, revision: str | None, *, body: bytes, fault: str) -> None:
        """Head of a revision."""
        repo = self._repo(repo_id)
        if repo and self._files(repo_id, revision or "main") is not None:
            oid = revision if revision and revision != "main" else repo.head
            self._json({"id": repo_id, "sha": oid, "siblings": [], "tags": [], "private": False, "downloads": 0, "likes": 0})

    def tree(self, repo_id: str, revision: str, *, body: bytes, fault: str) -> None:
        """All files, folders too, in two pages."""
        files = self._files(repo_id, revision)
        if files is None:
            return
        folders = sorted({"/".join(path.split("/")[:i]) for path in files for i in range(1, path.count("/") + 1)})
        items = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]
        items += [tree_item(path, data) for path, data in sorted(files.items())]
        half, second = len(items) // 2, "cursor" in parse_qs(urlsplit(self.path).query)
        page = items[half:] if second else items[:half]
        query = urlsplit(self.path).query
        link = {} if second else {"Link": f'<{self.hub.url}{urlsplit(self.path).path}?{query}&cursor=2>; rel="next"'}
        self._json(page, 200, link)

    def create(self, *, body: bytes, fault: str) -> None:
        """A new repository with the hub's first commit."""
        value = json.loads(body)
        repo_id = f"{value['organization']}/{value['name']}" if value.get("organization") else value["name"]
        self.hub.add(repo_id, {".gitattributes": b"*.gguf filter=lfs\n"}, "initial commit")
        self._json({"url": f"{self.hub.url}/{repo_id}", "id": repo_id})

    def validate_yaml(self, *, body: bytes, fault: str) -> None:
        """Front matter is always right."""
        self._json({"errors": [], "warnings": []})

    def preupload(self, repo_id: str, revision: str, *, body: bytes, fault: str) -> None:
        """Which files go to large storage."""
        files = self._files(repo_id, revision)
        if files is None:
            return
        ignored = files.get(".gitignore", b"").decode().split()
        out = []
        for item in json.loads(body)["files"]:
            large = item["size"] >= LARGE_FROM_BYTES or item["path"].endswith((".gguf", ".parquet"))
            held = files.get(item["path"])
            out.append({"path": item["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": item["path"] in ignored,
                        "oid": None if held is None else tree_item(item["path"], held)["oid"]})
        self._json({"files": out})

    def lfs_batch(self, repo_id: str, *, body: bytes, fault: str) -> None:
        """Where large files are put; nothing to do for those that are there."""
        objects: list[dict[str, Any]] = []
        for item in json.loads(body)["objects"]:
            there = item["oid"] in self.hub.large
            actions = {} if there else {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}}
            objects.append({"oid": item["oid"], "size": item["size"], **actions})
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str, *, body: bytes, fault: str) -> None:
        """Keep what arrived under the name that was claimed."""
        self.hub.large[oid] = body
        self._json({}, 500 if fault == "lost" else 200)

    def commit(self, repo_id: str, revision: str, *, body: bytes, fault: str) -> None:
        """Add files on top of the parent that was named."""
        repo = self._repo(repo_id)
        if repo is None:
            return
        header, *operations = [json.loads(line) for line in body.splitlines()]
        if header["value"].get("parentCommit", repo.head) != repo.head:
            self._json({"error": "A commit has happened since. Please refresh and try again."}, 412)
            return
        files = {}
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                raise AssertionError(f"a client must never send {operation['key']}")
        oid = repo.add(header["value"]["summary"], files)
        self.hub.uploads += files
        self._json({"commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}", "commitOid": oid}, 500 if fault == "lost" else 200)

    def resolve(self, repo_id: str, revision: str, path: str, *, body: bytes, fault: str) -> None:
        """A file, or a range of it; large ones lie elsewhere, as on the hub."""
        files = self._files(repo_id, revision)
        if files is None:
            return
        if path not in files:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        elif is_large(path, files[path]):
            key = hashlib.sha256(files[path]).hexdigest()
            self.hub.large.setdefault(key, files[path])
            self._answer(b"", 302, {"Location": f"{self.hub.url}/storage/{key}/{path}"})
        else:
            self._send_bytes(path, files[path], fault)

    def storage(self, key: str, path: str, *, body: bytes, fault: str) -> None:
        """A large file by its hash."""
        self._send_bytes(path, self.hub.large[key], fault)

    def _send_bytes(self, path: str, data: bytes, fault: str) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = (int(wanted[1]), min(int(wanted[2]) + 1, len(data))) if wanted else (0, len(data))
        if fault == "norange":
            wanted, start, end = None, 0, len(data)
        piece = data[start:end]
        self.hub.ranges.append((path, len(piece)))
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"} if wanted else {}
        piece = flipped(piece) if fault == "flip" else piece
        if fault in ("truncate", "short"):
            cut = piece[:len(piece) // 2]
            self._answer(cut, 206 if wanted else 200, headers, len(piece) if fault == "truncate" else None)
        else:
            self._answer(piece, 206 if wanted else 200, headers)


_NAME = r"([^/ ]+/[^/ ]+)"
_ROUTES = (
    (rf"GET /api/models/{_NAME}(?:/revision/([^/]+))?", "info"),
    (rf"GET /api/models/{_NAME}/tree/([^/]+)", "tree"),
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate_yaml"),
    (rf"POST /api/models/{_NAME}/preupload/([^/]+)", "preupload"),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", "lfs_batch"),
    (r"PUT /lfs/([0-9a-f]{64})", "lfs_put"),
    (rf"POST /api/models/{_NAME}/commit/([^/]+)", "commit"),
    (r"(?:GET|HEAD) /storage/([0-9a-f]{64})/(.+)", "storage"),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/([^/]+)/(.+)", "resolve"),
)
