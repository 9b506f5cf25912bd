"""Rows of databases and of lake tables: rows in are rows out, once; and no password is written."""

import datetime
import json
import os
import shutil
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rtrain import config
from rtrain.config import Config, DataConfig
from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run
from rtrain.data import row_reader
from rtrain.runs import prepare, run_folders

QUERY = "SELECT text, label, paid FROM tickets WHERE text LIKE '%:%' AND text <> ' :x' ORDER BY id"
ROWS = [(number, f"ticket:{number} ä€", f"l{number % 3}", number / 4) for number in range(2500)]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE tickets (id INTEGER, text TEXT, label TEXT, paid REAL)")
        connection.executemany("INSERT INTO tickets VALUES (?, ?, ?, ?)", ROWS)
        connection.execute("INSERT INTO tickets VALUES (9999, 'x:' || CAST(x'41' AS TEXT), NULL, NULL)")
    connection.close()
    return path


def config_of(address: str, query: str | None = QUERY, **settings: Any) -> Config:
    overrides = {f"data.{name}": value for name, value in settings.items()}
    return config.load_config("intent", {"data.path": address, "data.query": query, **overrides})


def read(data: DataConfig) -> list[tuple[str, str]]:
    return [
        (row.text, row.label)
        for file in row_reader.inspect_source(data).files
        for row in row_reader.read_rows(file, data)
        if row.reason is None
    ]


def refused(settings: Config, root: Path) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        prepare.resolve_run_folder(settings, root / "run", "refuse")
    assert "s3cret" not in json.dumps(caught.value.to_document())
    return [(problem.field, problem.code) for problem in caught.value.problems]


def test_rows_of_a_database_are_those_of_the_query(database: Path) -> None:
    settings = config_of(f"sqlite:///{database}", where="paid < 500")
    assert read(settings.recipe.data) == [(text, label) for _, text, label, paid in ROWS if paid < 500]


def test_a_run_keeps_the_rows_of_its_start(database: Path, tmp_path: Path) -> None:
    settings, root = config_of(f"sqlite:///{database}"), tmp_path / "runs"
    folder, started = prepare.resolve_run_folder(settings, root / "run", "refuse")
    file = Path(str(started.recipe.data.path))
    assert file.is_relative_to(root)
    assert started.recipe.data.query is None
    rows = read(started.recipe.data)
    assert len(rows) == len(ROWS)
    source = json.loads((file.parent / "source.json").read_text())
    assert (source["address"], source["query"]) == (f"sqlite:///{database}", QUERY)

    folder.mkdir(parents=True)
    run_folders.write_frozen_config(Run(folder), started)
    with sqlite3.connect(database) as connection:
        connection.execute("DELETE FROM tickets WHERE id < 1000")
    connection.close()
    _, resumed = prepare.resolve_run_folder(settings, folder, "resume")
    assert read(resumed.recipe.data) == rows
    assert resumed.recipe.recipe_digest() == started.recipe.recipe_digest()
    _, other = prepare.resolve_run_folder(settings, folder, "new")
    assert len(read(other.recipe.data)) == len(ROWS) - 1000
    _, same = prepare.resolve_run_folder(settings, root / "another", "refuse")
    assert same.recipe.data.path == other.recipe.data.path  # equal rows are copied once
    assert len(list(file.parent.parent.iterdir())) == 2


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT text FROM nothing", ("data.query", "invalid_query")),
        ("SELEC text", ("data.query", "invalid_query")),
        ("SELECT text, label AS text FROM tickets", ("data.query", "duplicate_columns")),
        ("SELECT text, label FROM tickets WHERE id < 0", ("data.query", "no_rows")),
        ("DELETE FROM tickets", ("data.query", "invalid_query")),
    ],
)
def test_a_query_that_gives_no_rows_is_refused(
    database: Path, tmp_path: Path, query: str, expected: tuple[str, str]
) -> None:
    assert refused(config_of(f"sqlite:///{database}", query), tmp_path / "runs") == [expected]
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM tickets").fetchone() == (len(ROWS) + 1,)
    connection.close()


def test_addresses_that_cannot_be_read_are_refused_by_name(database: Path, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"postgresql://ann:s3cret@127.0.0.1:{unused.getsockname()[1]}/shop?connect_timeout=5"
        assert refused(config_of(address), tmp_path) == [("data.path", "unreachable")]
    assert refused(config_of("sqlite:////nowhere/shop.db"), tmp_path) == [("data.path", "not_found")]
    for scheme in ("snowflake", "bigquery", "databricks"):
        assert refused(config_of(f"{scheme}://ann:s3cret@host/shop"), tmp_path) == [("data.path", "not_installed")]
    for scheme in ("delta", "iceberg"):
        assert refused(config_of(f"{scheme}://{tmp_path}/nothing.json", None), tmp_path) == [
            ("data.path", "unreadable")
        ]


def test_settings_of_databases_are_checked_before_anything_is_read() -> None:
    address = "postgresql://ann:s3cret@host/shop"
    cases: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
        ({"data.path": address}, [("data.query", "missing")]),
        ({"data.path": "rows.csv", "data.query": QUERY}, [("data.query", "conflicting_settings")]),
        ({"data.path": address, "data.query": QUERY, "data.test": address}, [("data.test", "unsupported")]),
        ({"data.path": "delta://a", "data.format": "csv"}, [("data.format", "conflicting_settings")]),
    ]
    for overrides, expected in cases:
        with pytest.raises(ConfigError) as caught:
            config.load_config("intent", overrides)
        assert [(problem.field, problem.code) for problem in caught.value.problems] == expected
        assert "s3cret" not in str(caught.value)


# --------------------------------------------------------------------------------------------------------- lake tables


TABLE = pa.table(
    {
        "text": [text for _, text, _, _ in ROWS],
        "label": [label for _, _, label, _ in ROWS],
        "at": pa.array([datetime.datetime(2024, 1, 1) + datetime.timedelta(hours=n) for n in range(len(ROWS))]),
    }
)
EXPECTED = [(text, label) for _, text, label, _ in ROWS]


def test_a_delta_table_gives_its_rows_at_each_version(tmp_path: Path) -> None:
    import deltalake

    deltalake.write_deltalake(tmp_path / "table", TABLE.slice(0, 1500))
    deltalake.write_deltalake(tmp_path / "table", TABLE.slice(1500), mode="append")
    deltalake.DeltaTable(tmp_path / "table").delete("label = 'l2'")
    for version, expected in (("@0", EXPECTED[:1500]), ("@1", EXPECTED), ("", [r for r in EXPECTED if r[1] != "l2"])):
        settings = config_of(f"delta://{tmp_path}/table{version}", None)
        _, pinned = prepare.resolve_run_folder(settings, tmp_path / "runs" / "run", "refuse")
        assert sorted(read(pinned.recipe.data)) == sorted(expected)
    by_time = config_of(f"delta://{tmp_path}/table@1", None, split_time={"column": "at"}).recipe.data
    assert len(read(by_time)) == len(ROWS)


def test_an_iceberg_table_gives_its_rows(tmp_path: Path) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("local", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.tickets", schema=TABLE.schema)
    table.append(TABLE.slice(0, 1000))
    table.append(TABLE.slice(1000))
    catalog.close()
    data = config_of(f"iceberg://{table.metadata_location.removeprefix('file://')}", None).recipe.data
    assert sorted(read(data)) == sorted(EXPECTED)


# -------------------------------------------------------------------------------------------------------------- server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a PostgreSQL server of this test, with a password."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not programs:
        pytest.skip("no PostgreSQL server is installed (apt-get install postgresql)")
    # A server refuses to run as root.
    user: list[str | Path] = (
        ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.getuid() == 0 else []
    )
    home = tmp_path / "server"
    home.mkdir()
    (home / "password").write_text("s3cret\n")
    if user:
        for path in (home, home / "password"):
            shutil.chown(path, "postgres", "postgres")
        for parent in home.parents:
            if parent.is_relative_to("/tmp") and parent != Path("/tmp"):
                parent.chmod(parent.stat().st_mode | 0o011)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    authentication = ["-A", "scram-sha-256", "-U", "ann", f"--pwfile={home}/password"]
    result = subprocess.run([*user, programs[-1], "-D", home / "db", *authentication], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    options = ["-c", f"port={port}", "-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={home}"]
    with (home.parent / "server.log").open("wb") as log:
        command: list[str | Path] = [*user, programs[-1].with_name("postgres"), "-D", home / "db", *options]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            ready: list[str | Path] = [
                programs[-1].with_name("pg_isready"),
                "-h",
                "127.0.0.1",
                "-p",
                str(port),
                "-t",
                "1",
            ]
            for _ in range(100):
                if subprocess.run(ready, capture_output=True, check=False).returncode == 0:
                    break
            yield f"postgresql://ann:s3cret@127.0.0.1:{port}/postgres"
        finally:
            process.terminate()
            process.wait(20)


@pytest.mark.slow
def test_a_postgresql_server_gives_its_rows_and_no_file_has_the_password(server: str, tmp_path: Path) -> None:
    import psycopg

    with psycopg.connect(server) as connection:
        connection.execute(
            "CREATE TABLE tickets (id int, text text, label text, paid numeric, at timestamptz, raw bytea)"
        )
        with connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO tickets VALUES (%s, %s, %s, %s, '2024-05-01T12:00:00Z', 'abc')",
                [(number, text, label, paid) for number, text, label, paid in ROWS],
            )
    condition = "text LIKE '%:%' AND text <> ' :x' AND at::date = '2024-05-01'"
    query = f"SELECT *, paid::float AS score FROM tickets WHERE {condition} ORDER BY id"
    folder, started = prepare.resolve_run_folder(config_of(server, query), tmp_path / "runs" / "run", "refuse")
    assert read(started.recipe.data) == [(text, label) for _, text, label, _ in ROWS]
    folder.mkdir()
    run_folders.write_frozen_config(Run(folder), started)
    times = config_of(server, query, split_time={"column": "at"}, features=["raw"]).recipe.data
    assert read(times)[0] == (f"raw: abc\n{ROWS[0][1]}", "l0")
    _, resumed = prepare.resolve_run_folder(config_of(server, query), folder, "resume")
    assert resumed.recipe.data.path == started.recipe.data.path
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
    with psycopg.connect(server) as connection, pytest.raises(psycopg.errors.DuplicateTable):
        connection.execute("CREATE TABLE tickets (id int)")
    assert refused(config_of(server, "DROP TABLE tickets"), tmp_path) == [("data.query", "invalid_query")]
    assert refused(config_of(server.replace("s3cret", "s3cret2"), query), tmp_path) == [("data.path", "unreachable")]
    with psycopg.connect(server) as connection:
        assert connection.execute("SELECT count(*) FROM tickets").fetchone() == (len(ROWS),)
