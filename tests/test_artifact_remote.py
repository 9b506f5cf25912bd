"""Artefacts by address: from an HTTP server and an S3 server on this machine, into a cache of whole ones."""

import hashlib
import http.server
import io
import json
import lzma
import random
import shutil
import tarfile
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rtrain import artifact, manifest, remote
from rtrain.artifact import ArtifactError
from rtrain.cli import app as cli
from rtrain.errors import UserError
from tests.conftest import write_rows
from tests.test_checkpoints_replica import s3  # noqa: F401
from tests.test_serve_deployment import openvino_artifact
from tests.tiny import CORPUS, make_artifact


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("made") / "artifact")


@dataclass
class Web:
    """An HTTP server of files, and what it was asked for."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def put(self, name: str, data: bytes) -> str:
        """The address of these bytes, with their digest."""
        self.files[f"/{name}"] = data
        return f"{self.url}/{name}#sha256={hashlib.sha256(data).hexdigest()}"


@pytest.fixture
def web() -> Iterator[Web]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            here.asked.append(self.path)
            if self.path.startswith("/away"):
                self.send_response(302)
                self.send_header("Location", "http://example.com/artifact.tar.gz")
                self.end_headers()
                return
            if self.path.startswith("/parts"):
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"9\r\nhalf")
                return
            data = here.files.get(self.path)
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if data and "cut" in self.path else data or b"")

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    here = Web(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield here
    server.shutdown()
    server.server_close()
    thread.join()


def packed(folder: Path, top: str = "", mode: str = "w:gz") -> bytes:
    """An archive of a folder's files, in a folder of that name."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as tar:  # type: ignore[call-overload]
        tar.add(folder, arcname=top or ".")
    return data.getvalue()


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


@pytest.mark.parametrize(("name", "top", "mode"), [("a.tar.gz", "", "w:gz"), ("b.tar", "intent", "w")])
def test_an_archive_is_fetched_once_and_again_where_its_copy_is_damaged(
    web: Web, made: Path, tmp_path: Path, name: str, top: str, mode: str
) -> None:
    address, said = web.put(name, packed(made, top, mode)), list[str]()
    found = remote.fetch(address, tmp_path, said.append)
    assert artifact.read(found) == artifact.read(made)
    assert remote.fetch(address, tmp_path, said.append) == found
    assert (len(web.asked), len(said)) == (1, 1)
    weights = found / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert remote.fetch(address, tmp_path) == found
    assert len(web.asked) == 2
    assert manifest.damage(found) is None
    assert left(tmp_path) == [address[-64:]]


def test_a_signed_address_is_fetched_and_its_secrets_are_not_said(web: Web, made: Path, tmp_path: Path) -> None:
    data = packed(made)
    address, said = web.put("a.tar.gz?signature=abc", data), list[str]()
    remote.fetch(address, tmp_path, said.append)
    assert said == [f"fetching {web.url}/a.tar.gz"]
    with pytest.raises(UserError, match="cannot be fetched") as refused:
        remote.fetch(f"http://127.0.0.1:9/a.tar.gz?signature=abc#sha256={'0' * 64}", tmp_path)
    assert "signature" not in str(refused.value)


def test_a_file_of_export_is_taken_as_it_is(web: Web, made: Path, tmp_path: Path) -> None:
    from rtrain.inventory import sending
    from rtrain.run import Run

    run = Run(tmp_path / "intent")
    run.folder.mkdir()
    run.config.write_text("name: intent\n")
    run.append("created")
    shutil.copytree(made, run.artifact)
    sent = sending.send(run, "intent", tmp_path / "intent.tar")
    found = remote.fetch(web.put("intent.tar", sent.file.read_bytes()), tmp_path / "cache")
    assert artifact.read(found) == artifact.read(made)


def evil(name: str, kind: bytes = tarfile.REGTYPE) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    return data.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("up.tar", evil("../up"), "leads out of the folder"),
        ("root.tar", evil("/tmp/up"), "leads out of the folder"),
        ("link.tar", evil("model.safetensors", tarfile.SYMTYPE), "is a link or a device"),
        ("empty.tar", evil("readme"), "holds no artefact"),
        ("text.tar.gz", b"<html>sign in</html>", "is no archive that can be read"),
    ],
)
def test_an_archive_of_something_else_leaves_nothing(
    web: Web, tmp_path: Path, name: str, data: bytes, told: str
) -> None:
    with pytest.raises(ArtifactError, match=told):
        remote.fetch(web.put(name, data), tmp_path / "cache")
    assert left(tmp_path / "cache") == []
    assert left(tmp_path) == ["cache"]


def damaged(mode: str) -> bytes:
    """An archive of a large file that cannot be unpacked from somewhere in its midst on."""
    data, text = io.BytesIO(), bytes(random.Random(0).choices(b"0123456789abcdef", k=600_000))
    with tarfile.open(fileobj=data, mode="w") as tar:
        member = tarfile.TarInfo("artifact.json")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    if mode == "gz":
        packer = zlib.compressobj(wbits=31)
        half = packer.compress(data.getvalue()[:300_000]) + packer.flush(zlib.Z_FULL_FLUSH)
        return half + b"\x07" * 64  # begins a block of a kind that there is not
    made = bytearray(lzma.compress(data.getvalue()))
    made[20_000:20_100] = bytes(100)
    return bytes(made)


@pytest.mark.parametrize(("mode", "reason"), [("gz", "Error -3 while decompressing"), ("xz", "Corrupt input data")])
def test_a_damaged_archive_with_its_own_digest_is_told_without_a_traceback(
    web: Web, tmp_path: Path, mode: str, reason: str
) -> None:
    """Each way of packing has errors of its own, which tarfile passes on."""
    with pytest.raises(ArtifactError, match=rf"is no archive that can be read \({reason}.*\); pack it with tar"):
        remote.fetch(web.put("damaged.tar.gz", damaged(mode)), tmp_path)
    assert left(tmp_path) == []


def test_what_is_not_what_its_digest_says_is_not_kept(web: Web, made: Path, tmp_path: Path) -> None:
    address, other = web.put("a.tar.gz", packed(made)), "0" * 64
    with pytest.raises(ArtifactError, match=f"has the SHA-256 {address[-64:]}, and not {other}"):
        remote.fetch(address.replace(address[-64:], other), tmp_path)
    assert left(tmp_path) == []


def test_a_fetch_that_breaks_off_says_so_and_not_that_it_is_something_else(
    web: Web, made: Path, tmp_path: Path
) -> None:
    data = packed(made)
    with pytest.raises(UserError, match=f"cut.tar.gz ended after {len(data) // 2:,} of {len(data):,} bytes; try again"):
        remote.fetch(web.put("cut.tar.gz", data), tmp_path)
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("{url}/none.tar.gz#sha256={zeros}", "answers 404 Not Found"),
        ("{url}/a.tar.gz", "an archive without a digest.*#sha256=HEX"),
        ("{url}/a.tar.gz#sha256=12", "write sha256= and 64 hexadecimal digits"),
        ("{url}/folder", "names no archive"),
        ("http://example.com/a.tar.gz#sha256={zeros}", "http is for this machine alone"),
        ("{url}/away.tar.gz#sha256={zeros}", "http is for this machine alone"),
        ("http://127.0.0.1:9/a.tar.gz#sha256={zeros}", "cannot be fetched"),
        ("{url}/parts.tar.gz#sha256={zeros}", "parts.tar.gz cannot be fetched: IncompleteRead"),
        ("{url}/my file.tar.gz?signature=abc#sha256={zeros}", "my file.tar.gz cannot be fetched: .*blank as %20$"),
        (
            "https://me:word@localhost/a.tar.gz#sha256={zeros}",
            "https://localhost/a.tar.gz: .* no user's name .* leave it out",
        ),
        ("nothing://bucket/artifact", "cannot be fetched"),
    ],
)
def test_an_address_that_gives_nothing_says_why(web: Web, tmp_path: Path, address: str, told: str) -> None:
    """And nothing that may be secret."""
    with pytest.raises(UserError, match=rf"^(?!.*\b(?:word|abc)\b).*{told}"):
        remote.fetch(address.format(url=web.url, zeros="0" * 64), tmp_path)
    assert left(tmp_path) == []


# ------------------------------------------------------------------------------------------------------------- folders


@pytest.fixture(params=["s3", "file"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "mounted").as_uri()
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def put(folder: Path, url: str) -> None:
    import fsspec

    files, place = fsspec.core.url_to_fs(url)
    for path in folder.rglob("*"):
        if path.is_file():
            target = f"{place}/{path.relative_to(folder).as_posix()}"
            files.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            files.put_file(str(path), target)


def test_a_folder_is_fetched_anew_where_its_manifest_has_changed(made: Path, storage: str, tmp_path: Path) -> None:
    root, said = tmp_path / "cache", list[str]()
    put(made, f"{storage}/run/artifact")
    first = remote.fetch(f"{storage}/run/artifact", root, said.append)
    assert remote.fetch(f"{storage}/run", root, said.append) == first  # the run that holds it
    assert artifact.read(first) == artifact.read(made)
    assert len(said) == 1
    digest = hashlib.sha256((made / manifest.NAME).read_bytes()).hexdigest()
    assert remote.fetch(f"{storage}/run#sha256={digest}", root) == first

    other = make_artifact(tmp_path / "other", seed=1)
    put(other, f"{storage}/run/artifact")
    with pytest.raises(ArtifactError, match=f"and not {digest}"):
        remote.fetch(f"{storage}/run#sha256={digest}", root)
    assert artifact.read(remote.fetch(f"{storage}/run", root)) == artifact.read(other)
    assert len(left(root)) == 2


def test_a_folder_that_is_none_or_torn_leaves_nothing(made: Path, storage: str, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with pytest.raises(ArtifactError, match="is no artefact, and no run that has one"):
        remote.fetch(f"{storage}/nothing", root)
    torn = shutil.copytree(made, tmp_path / "torn")
    (torn / "tokenizer.json").write_text("{}")
    put(torn, f"{storage}/torn")
    with pytest.raises(ArtifactError, match=r"is damaged, .*tokenizer\.json"):
        remote.fetch(f"{storage}/torn", root)
    document = json.loads((torn / manifest.NAME).read_text())
    document["files"]["../up"] = document["files"]["config.json"]
    (torn / manifest.NAME).write_text(json.dumps(document))
    put(torn, f"{storage}/evil")
    with pytest.raises(ArtifactError, match="leads out of the folder"):
        remote.fetch(f"{storage}/evil", root)
    for name, text in (("deep", "[" * 200_000), ("numbers", '{"files": [1, 2]}')):
        (torn / manifest.NAME).write_text(text)
        put(torn, f"{storage}/{name}")
        with pytest.raises(ArtifactError, match="cannot be read"):
            remote.fetch(f"{storage}/{name}", root)
    assert left(root) == []


# ----------------------------------------------------------------------------------------------------------- the verbs


def test_verbs_take_an_address(
    web: Web, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = web.put("a.tar.gz", packed(made))
    cli.main(["predict", str(made), "where is my parcel"])
    expected = capsys.readouterr().out
    cli.main(["predict", address, "where is my parcel"])
    told = capsys.readouterr()
    assert told.out == expected
    assert f"fetching {address.split('#')[0]}" in told.err
    cli.main(["inspect", address, "--json"])
    assert json.loads(capsys.readouterr().out)["version"] == artifact.read(made).version
    assert len(web.asked) == 1
    with pytest.raises(SystemExit) as refused:
        cli.main(["predict", f"{web.url}/a.tar.gz", "where is my parcel"])
    assert refused.value.code == 1
    assert "without a digest" in capsys.readouterr().err


class Begun(Exception):
    """The command went on to start Ray."""


def test_what_was_fetched_is_served_and_its_verdict_stays_as_it_was_made(
    web: Web, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = web.put("a.tar.gz", packed(make_artifact(tmp_path / "other", seed=1)))

    def begun(*given: object, **named: object) -> None:
        raise Begun

    with monkeypatch.context() as patch:
        patch.setattr("serve.starting.session", begun)
        with pytest.raises(Begun):
            cli.main(["serve", address])
    rows = write_rows(tmp_path / "rows.csv", [(text, "abc"[at % 3]) for at, text in enumerate(CORPUS)])
    words = ["--against", str(made), "--data", str(rows), "--set", "gate.seconds=0.5"]
    with pytest.raises(SystemExit) as held:  # on so few rows
        cli.main(["gate", address, *words])
    assert held.value.code == 1
    assert "the verdict is not written" in capsys.readouterr().out
    folder = remote.fetch(address)
    assert artifact.read(folder).gate is None
    assert len(web.asked) == 1


def test_a_smaller_one_in_storage_is_served_by_its_verdict_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"{request.getfixturevalue('s3')}/{tmp_path.name}/int8"
    folder = openvino_artifact(tmp_path / "int8")
    put(folder, url)

    def begun(*given: object, **named: object) -> None:
        raise Begun

    monkeypatch.setattr("serve.starting.session", begun)
    with pytest.raises(SystemExit) as refused:
        cli.main(["serve", url])
    assert refused.value.code == 1
    said = "no gate has looked at it; it is a copy: gate it where it is made, and publish it with its verdict"
    assert said in capsys.readouterr().err
    with pytest.raises(Begun):
        cli.main(["serve", url, "--ungated"])
    cli.main(["inspect", url])
    assert "gate: none has looked at it; serve asks for one" in capsys.readouterr().out
    cli.main(["predict", url, "where is my parcel"])  # answers, as any artefact does: nobody depends on it yet

    artifact.judged(folder, {"version": artifact.read(folder).version, "verdict": "refuse", "reasons": ["too slow"]})
    put(folder, url)
    with pytest.raises(SystemExit):
        cli.main(["serve", url])
    assert "was refused by the gate: too slow" in capsys.readouterr().err


def test_a_cache_that_cannot_be_made_is_told_with_its_setting(made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"file/artifacts cannot be written .*; set XDG_CACHE_HOME to a folder that can"
    ):
        remote.fetch(made.as_uri(), tmp_path / "file" / "artifacts")
