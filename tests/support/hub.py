"""A model hub of the tests' own on loopback: what `huggingface_hub` and `datasets` ask for, and no more."""

import base64
import hashlib
import json
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

from tests.conftest import labelled_rows

API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<name>[^?]+?)(?:/(?P<what>revision|tree|paths-info)/(?P<rest>[^?]+))?"
)
FILE = re.compile(r"/(?P<kind>datasets/)?(?P<name>[^?]+?)/resolve/(?P<revision>[^/]+)/(?P<file>[^?]+)")


LARGE = (".safetensors", ".bin")
"""Ends of the names of files that go by LFS."""
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""


class Hub:
    """Repositories by kind ("models", "datasets") and name; each has commits, newest last, and the branch `main`.

    `asked` are the paths of all requests so far.
    """

    def __init__(self) -> None:
        self._commits: dict[tuple[str, str], dict[str, Path]] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        """Status and error code by the name of a repository that is not given to everyone."""
        self.asked: list[str] = []
        self.url = ""
        self.tokens: set[str] = set()
        """Tokens of those who may write."""
        self.private: dict[str, bool] = {}
        """Whether a model was made private, by its name."""
        self.bodies: list[bytes] = []
        """The bodies of all uploads."""
        self.root: Path | None = None
        """Folder for the files of commits that were uploaded."""
        self._large: dict[str, bytes] = {}

    def add(self, kind: str, name: str, folder: Path) -> str:
        """A new commit, which is the folder as it stands; returns its hash."""
        commits = self._commits.setdefault((kind, name), {})
        commit = hashlib.sha1(f"{kind} {name} {len(commits)}".encode()).hexdigest()
        commits[commit] = folder
        return commit

    def files(self, name: str) -> dict[str, bytes]:
        """The files of the newest commit of a model."""
        folder = list(self._commits["models", name].values())[-1]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def commits(self, name: str) -> int:
        return len(self._commits["models", name])

    def write(self, path: str, body: bytes, token: str | None) -> Answer:
        """An upload: the repository, which files are large, their bytes, and the commit."""
        path = unquote(path).partition("?")[0]
        self.asked.append(path)
        self.bodies.append(body)
        if path.startswith("/lfs/"):
            self._large[path.removeprefix("/lfs/")] = body
            return 200, {}, b""
        if token not in self.tokens:
            return 401, {}, b"{}"
        document: Any = None if path.endswith("/commit/main") else json.loads(body)
        if path == "/api/validate-yaml":
            metadata = yaml.safe_load(document["content"].split("---\n")[1])
            errors = (
                [] if isinstance(metadata.get("model-index", []), list) else [{"message": "model-index is no list"}]
            )
            return _json({"errors": errors, "warnings": []})
        if path == "/api/repos/create":
            return self._create(f"{document['organization']}/{document['name']}", document["visibility"] == "private")
        if match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            modes = {True: "lfs", False: "regular"}
            files = [
                {"path": file["path"], "uploadMode": modes[file["path"].endswith(LARGE)], "shouldIgnore": False}
                for file in document["files"]
            ]
            return _json({"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**item, "actions": {"upload": {"href": f"{self.url}/lfs/{item['oid']}"}}}
                for item in document["objects"]
                if item["oid"] not in self._large
            ]
            return _json({"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            return self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        return 404, {}, b"{}"

    def _create(self, name: str, private: bool) -> Answer:
        if ("models", name) in self._commits:
            return 409, {}, json.dumps({"url": f"{self.url}/{name}"}).encode()
        folder = Path(tempfile.mkdtemp(dir=self.root))
        (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
        self.add("models", name, folder)
        self.private[name] = private
        return _json({"url": f"{self.url}/{name}", "name": name})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> Answer:
        folder = Path(tempfile.mkdtemp(dir=self.root)) / "files"
        shutil.copytree(list(self._commits["models", name].values())[-1], folder)
        for line in lines:
            value, path = line["value"], folder / line["value"].get("path", "")
            if line["key"] == "deletedFile":
                path.unlink()
            elif line["key"] in ("file", "lfsFile"):
                path.parent.mkdir(parents=True, exist_ok=True)
                content = self._large[value["oid"]] if line["key"] == "lfsFile" else base64.b64decode(value["content"])
                path.write_bytes(content)
        commit = self.add("models", name, folder)
        return _json({"commitUrl": f"{self.url}/{name}/commit/{commit}", "commitOid": commit, "pullRequestUrl": None})

    def answer(self, path: str) -> Answer:
        path = unquote(path)
        self.asked.append(path)
        if found := FILE.fullmatch(path.partition("?")[0]):
            return self._file("datasets" if found["kind"] else "models", **found.groupdict())
        if found := API.fullmatch(path.partition("?")[0]):
            return self._api("recursive=true" in path, **found.groupdict())
        return 404, {}, b"{}"

    def _api(self, deep: bool, kind: str, name: str, what: str | None, rest: str | None) -> Answer:
        revision, _, inside = (rest or "main").partition("/")
        commit, refusal = self._find(kind, name, revision)
        if refusal:
            return refusal
        folder = self._commits[kind, name][commit]
        if what in (None, "revision"):
            siblings = [
                {"rfilename": path.relative_to(folder).as_posix()} for path in folder.rglob("*") if path.is_file()
            ]
            return _json({"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []})
        if what == "paths-info":
            return _json([])
        if not (folder / inside).is_dir():
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        found = sorted((folder / inside).rglob("*") if deep else (folder / inside).iterdir())
        return _json([_entry(folder, path) for path in found])

    def _file(self, where: str, kind: str, name: str, revision: str, file: str) -> Answer:
        commit, refusal = self._find(where, name, revision)
        if refusal:
            return refusal
        path = self._commits[where, name][commit] / file
        if not path.is_file():
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        content = path.read_bytes()
        return 200, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": commit}, content

    def _find(self, kind: str, name: str, revision: str) -> tuple[str, Answer | None]:
        if name in self.refused:
            status, code = self.refused[name]
            return "", (status, {"X-Error-Code": code}, b"{}")
        commits = self._commits.get((kind, name))
        if commits is None:
            return "", (404, {"X-Error-Code": "RepoNotFound"}, b"{}")
        commit = list(commits)[-1] if revision == "main" else revision
        return commit, None if commit in commits else (404, {"X-Error-Code": "RevisionNotFound"}, b"{}")


def make_rows(folder: Path, train: int, test: int = 20) -> Path:
    """A data set as the hub has them: parquet by splits, and labels as numbers with names. Rows that can be learnt."""
    import datasets

    labels = sorted({label for _, label in labelled_rows(3)})
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=labels)})
    (folder / "data").mkdir(parents=True)
    rows = labelled_rows(train + test)
    for split, part in (("train", rows[:train]), ("test", rows[train:])):
        columns = {"text": [text for text, _ in part], "label": [labels.index(label) for _, label in part]}
        made = datasets.Dataset.from_dict(columns, features=features)
        made.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "size": 0, "oid": _oid(name.encode())}
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _oid(path.read_bytes())}


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _json(document: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(document).encode()


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._reply(hub.answer(self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            is_question = "/paths-info/" in self.path
            self._reply(hub.answer(self.path) if is_question else hub.write(self.path, body, token))

        def _reply(self, answer: Answer) -> None:
            status, headers, body = answer
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET
        do_PUT = do_POST

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
