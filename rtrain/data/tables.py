"""Rows of databases and of lake tables -> a file beside the token store, which a run reads instead.

    postgresql://ann@host/shop, sqlite:///shop.db   `data.query` gives the rows; any dialect of SQLAlchemy
    delta://PATH, delta://PATH@VERSION              a Delta table, also at a URL of object storage
    iceberg://PATH/metadata.json                    an Iceberg table, by its metadata
    iceberg://CATALOG.NAMESPACE.TABLE               an Iceberg table, by the catalogs of pyiceberg

A run reads its rows more than once, and a query may answer differently tomorrow. So a new run copies them once, in
bounded memory, to <root>/.data/rows-<digest of the rows>/, and its settings name that file: a resume reads the same
rows, and no password reaches a file. `source.json` there has the address without its password, the query and the time.
"""

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from rtrain.config import DataConfig
from rtrain.config.data import is_database, is_table
from rtrain.core import atomic_write, hub
from rtrain.core.errors import ConfigError, Problem
from rtrain.data.readers.tabular import to_string
from rtrain.data.sources import hash_file, make_config_error

BATCH_ROWS = 1000
"""Rows in memory at a time."""
DRIVERS = {
    **{"postgresql": "rtrain[sql]", "mysql": "pymysql", "mssql": "pyodbc", "oracle": "oracledb"},
    **{"snowflake": "snowflake-sqlalchemy", "bigquery": "sqlalchemy-bigquery", "databricks": "databricks-sqlalchemy"},
    **{"redshift": "sqlalchemy-redshift", "duckdb": "duckdb-engine", "clickhouse": "clickhouse-sqlalchemy"},
}
"""The package with the dialect or the driver of a database, for messages."""
_PARAMETER = re.compile(r"(?<![:\w\\]):(?=\w)")
"""Colons that SQLAlchemy would take for the beginning of a parameter. A query has none."""
RowWriter = Callable[[Path], Path]
"""Writes rows to a file of the folder, and returns the file."""


def copy_tables(data: DataConfig, root: Path) -> dict[str, str | None]:
    """Copy the rows of each table that the settings name; returns the changed settings, by dotted name.

    Raises `ConfigError` with every problem.
    """
    changes: dict[str, str | None] = {}
    problems: list[Problem] = []
    for name in ("path", "valid", "test"):
        if is_table(address := getattr(data, name)):
            try:
                changes[f"data.{name}"] = str(copy_rows(f"data.{name}", address, data.query, root))
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return {**changes, "data.query": None} if changes else {}


@lru_cache(8)
def copy_temporarily(field: str, address: str, query: str | None) -> Path:
    """`copy_rows` for a verb without a run; the copy lives as long as the process."""
    return copy_rows(field, address, query, Path(_temporary_folder().name))


@lru_cache(1)
def _temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="rtrain-rows-", ignore_cleanup_errors=True)


def copy_rows(field: str, address: str, query: str | None, root: Path) -> Path:
    """Copy the rows of a table to a file under `root`, once for equal rows; `field` is the setting with the address.

    Raises `ConfigError` if a package is missing, the table cannot be read, or it has no rows.
    """
    if is_database(address):
        source, write_rows = _open_database(field, address, query or "")
    else:
        source, write_rows = address, _open_lake_table(field, address)
    parent = root / hub.COPY_FOLDERS["dataset"]
    parent.mkdir(parents=True, exist_ok=True)
    draft = atomic_write.Draft(parent / "rows")
    try:
        file = write_rows(draft.folder)
        final = parent / f"rows-{hash_file(str(file))[:16]}"
        document = {"address": source, "query": query, "read_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        atomic_write.write_text(draft.folder / "source.json", json.dumps(document, indent=1, ensure_ascii=False))
        (draft.folder / atomic_write.LOCK_FILE).unlink()
        with suppress(OSError):  # the same rows have been copied before
            atomic_write.publish_folder(draft.folder, final)
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()
    return final / file.name


@contextmanager
def _wrap_errors(field: str, value: str, code: str, fix: str, secret: str = "") -> Iterator[None]:
    """Convert the errors of a client, which share no base class, to `ConfigError`, without the password `secret`."""
    try:
        yield
    except ConfigError:
        raise
    except ImportError as error:
        reason = f"a package that reads it is not installed ({error})"
        raise make_config_error(field, value, reason, fix, "not_installed") from None
    except Exception as error:
        cause = str(getattr(error, "orig", None) or error)
        reason = " ".join(cause.replace(secret, "***").split() if secret else cause.split())[:300]
        raise make_config_error(field, value, reason or type(error).__name__, fix, code) from None


# ----------------------------------------------------------------------------------------------------------- databases


def _open_database(field: str, address: str, query: str) -> tuple[str, RowWriter]:
    """Connect to a database once; returns its address without credentials, and the writer of the query's rows."""
    scheme = address.partition(":")[0].partition("+")[0]
    package = DRIVERS.get(scheme, "rtrain[sql]")
    with _wrap_errors(field, f"{scheme}://...", "unknown_protocol", f"install it: pip install sqlalchemy {package}"):
        import sqlalchemy

        url = sqlalchemy.engine.make_url(address)
        if url.drivername in ("postgresql", "postgres"):
            url = url.set(drivername="postgresql+psycopg")
        try:
            engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.pool.NullPool)
        except sqlalchemy.exc.NoSuchModuleError as error:
            raise ImportError(str(error)) from None
    source = url.set(password=None, query={}).render_as_string()
    if scheme == "sqlite" and not Path(url.database or "").is_file():
        raise make_config_error(field, source, "no such file", "write sqlite:///FILE", "not_found")
    fix = "check host, user and password; a password may also be in PGPASSWORD or ~/.pgpass"
    with _wrap_errors(field, source, "unreachable", fix, url.password or ""):
        engine.connect().close()

    def write_rows(folder: Path) -> Path:
        fix = "correct the statement, or the rights of the user"
        with (
            _wrap_errors("data.query", query, "invalid_query", fix, url.password or ""),
            engine.connect().execution_options(stream_results=True, max_row_buffer=BATCH_ROWS) as connection,
            (folder / "rows.jsonl").open("w", encoding="utf-8", errors="surrogateescape") as file,
        ):
            # Nothing is committed: a statement that writes is rolled back.
            result = connection.execute(sqlalchemy.text(_PARAMETER.sub(r"\\:", query)))
            columns = list(result.keys())
            if duplicates := sorted({name for name in columns if columns.count(name) > 1}):
                reason, fix = f"two columns are called {', '.join(duplicates)}", "name one of them: SELECT a AS b"
                raise make_config_error("data.query", query, reason, fix, "duplicate_columns")
            for rows in result.partitions(BATCH_ROWS):
                lines = (json.dumps(dict(zip(columns, row, strict=True)), default=to_string) for row in rows)
                file.writelines(f"{line}\n" for line in lines)
            is_empty = file.tell() == 0
        if is_empty:
            raise make_config_error("data.query", query, "it selects no row", "write another condition", "no_rows")
        return folder / "rows.jsonl"

    return source, write_rows


# --------------------------------------------------------------------------------------------------------- lake tables


def _open_lake_table(field: str, address: str) -> RowWriter:
    scheme, _, location = address.partition("://")

    def write_rows(folder: Path) -> Path:
        import pyarrow.parquet

        fix = f"name a table that exists; its reader is in the extra {scheme}: pip install rtrain[{scheme}]"
        with _wrap_errors(field, address, "unreadable", fix):
            schema, batches = _read_delta(location) if scheme == "delta" else _read_iceberg(location)
            num_rows = 0
            with pyarrow.parquet.ParquetWriter(folder / "rows.parquet", schema) as writer:
                for batch in batches:
                    num_rows += batch.num_rows
                    writer.write_batch(batch)
        if not num_rows:
            raise make_config_error(field, address, "it has no rows", "name another table or version", "no_rows")
        return folder / "rows.parquet"

    return write_rows


def _read_delta(location: str) -> tuple[Any, Iterator[Any]]:
    """The Arrow schema and the batches of a Delta table."""
    import deltalake

    path, _, version = location.rpartition("@")
    has_version = bool(path) and version.isdigit()
    table = deltalake.DeltaTable(path if has_version else location, version=int(version) if has_version else None)
    dataset = table.to_pyarrow_dataset()
    return dataset.schema, dataset.to_batches(batch_size=BATCH_ROWS)


def _read_iceberg(location: str) -> tuple[Any, Iterator[Any]]:
    """The Arrow schema and the batches of an Iceberg table."""
    import pyiceberg.catalog
    import pyiceberg.table

    if location.endswith(".json"):
        table: Any = pyiceberg.table.StaticTable.from_metadata(location)
    else:
        catalog, _, identifier = location.partition(".")
        table = pyiceberg.catalog.load_catalog(catalog).load_table(identifier)
    reader = table.scan().to_arrow_batch_reader()
    return reader.schema, iter(reader)
