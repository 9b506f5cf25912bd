"""Names that look like globs but are not: existing files, and web addresses with a query."""

import functools
import gzip
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.config import DataConfig
from rtrain.core.errors import ConfigError
from rtrain.data import row_reader, sources
from rtrain.data.sources import file_suffix, is_glob
from rtrain.runs import run_folders
from tests.support.causes import caused_by

CONTENT = b"text,label\na,b\nc,d\n"
QUERY = "X-Amz-Signature=" + "5f" * 200 + "&list[]=*&name=other.parquet"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *values: Any) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A folder of files on a server of loopback; its address."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "rows.csv").write_bytes(CONTENT)
    (folder / "rows.csv.gz").write_bytes(gzip.compress(CONTENT))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def texts(path: str) -> list[str]:
    data = DataConfig(path=path)
    return [row.text for file in row_reader.inspect_source(data).files for row in row_reader.read_rows(file, data)]


@pytest.mark.parametrize("name", ["rows [final].csv", "rows*.csv", "what?.csv", "rows [ab].csv.gz"])
def test_a_file_that_is_called_like_a_glob_is_that_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(CONTENT) if name.endswith(".gz") else CONTENT)
    (tmp_path / "rows f.csv").write_bytes(b"text,label\nx,y\n")
    assert texts(str(tmp_path / name)) == ["a", "c"]


def test_a_glob_is_still_one(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / f"rows {name}.csv").write_bytes(CONTENT)
    assert texts(str(tmp_path / "rows [12].csv")) == ["a", "c"] * 2
    assert texts(str(tmp_path / "*.csv")) == ["a", "c"] * 2


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_a_presigned_address_is_one_file(web: str, name: str) -> None:
    assert texts(f"{web}/{name}?{QUERY}") == ["a", "c"]
    assert texts(f"{web}/{name}") == ["a", "c"]
    assert (
        len(
            row_reader.DataSource(
                row_reader.inspect_source(DataConfig(path=f"{web}/{name}?{QUERY}")).files, ()
            ).digest()
        )
        == 64
    )


def test_what_is_said_of_an_address_has_no_signature(web: str) -> None:
    with pytest.raises(ConfigError) as caught:
        row_reader.inspect_source(DataConfig(path=f"{web}/rows.csv?{QUERY}", text="message"))
    assert [(problem.field, problem.code) for problem in caught.value.problems] == [("data.text", "unknown_column")]
    assert QUERY not in str(caught.value)


def test_an_address_that_is_not_there_is_a_problem(web: str) -> None:
    with pytest.raises(ConfigError, check=caused_by("not_found")):
        row_reader.inspect_source(DataConfig(path=f"{web}/gone.csv?{QUERY}"))


def test_a_suffix_is_that_of_the_path() -> None:
    assert file_suffix(f"https://bucket/a/rows.jsonl.gz?{QUERY}") == ".jsonl"
    assert file_suffix("/data/what?.csv") == ".csv"
    assert sources.has_format_suffix(f"https://bucket/rows.parquet?{QUERY}")
    assert [is_glob(uri) for uri in ("https://bucket/*.csv?a", "s3://bucket/*.csv", "/data/a.csv")] == [0, 1, 0]


def test_addresses_stay_and_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address longer than a file's name may be was a crash: the folder was asked for such a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows [final].csv").write_bytes(CONTENT)
    address = f"https://bucket.example/rows.csv?{QUERY}"
    result = run_folders.resolve_paths(
        config.load_config("intent", {"data.path": "rows [final].csv", "data.test": address})
    ).recipe.data
    assert (result.path, result.test) == (str(tmp_path / "rows [final].csv"), address)


class Refusing(Quiet):
    """Answers as the path says: /403.csv with 403."""

    def do_GET(self) -> None:
        self.send_error(int(Path(self.path.partition("?")[0]).stem))

    do_HEAD = do_GET


@pytest.fixture
def refusing() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("status", [401, 403, 500])
def test_an_address_that_is_refused_is_a_problem_of_its_setting(refusing: str, status: int) -> None:
    with pytest.raises(ConfigError) as refused:
        row_reader.inspect_source(DataConfig(path=f"{refusing}/{status}.csv?{QUERY}"))
    [problem] = refused.value.problems
    assert problem.field == "data.path"
    assert f"the server answers {status}" in problem.reason
    assert "Signature" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("http://127.0.0.1:9/rows.csv", "unreachable"),  # the port to discard, where nobody listens
        ("nothing://rows.csv", "unknown_protocol"),
        ("smb://host/rows.csv", "not_installed"),
    ],
)
def test_an_address_that_cannot_be_asked_is_a_problem_too(address: str, code: str) -> None:
    with pytest.raises(ConfigError, check=caused_by(code)):
        row_reader.inspect_source(DataConfig(path=address))
