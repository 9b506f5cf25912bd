"""Rows in memory -> a Parquet file below the root of the runs, named by the digest of its content.

<root>/.rows/<digest>/rows.parquet     equal rows have the same bytes, so that later calls and resumes find the file

A DataFrame of pandas, a list of dictionaries, a table or reader of Arrow (also of polars and DuckDB), a data set of
`datasets`, or a data set of Ray Data, which streams: at most `ROWS_PER_GROUP` rows and one batch are in memory.
"""

import hashlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.api.keywords import ROW_SETTINGS
from rtrain.core import atomic_write
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.run_folder import ROWS_FOLDER

if TYPE_CHECKING:
    import pyarrow

FILE_NAME = "rows.parquet"
ROWS_PER_GROUP = 65_536
"""Rows of a row group. Fixed, since the bytes of the file depend on it."""
DIGEST_LETTERS = 32
CLASS_NAMES_KEY = b"huggingface"
"""Key of a schema's metadata in which `datasets` keeps the names of classes."""
SUPPORTED_TYPES = (
    "a path, a URL, a pandas DataFrame, a list of dictionaries, an Arrow or polars table, or a Dataset of `datasets` "
    "or of Ray Data"
)


def has_rows(value: Any) -> bool:
    """Whether a setting's value is rows rather than an address."""
    return value is not None and not isinstance(value, str)


def with_placeholders(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace rows by the name of a file, to check the other settings before the rows are written."""
    return {name: FILE_NAME if name in ROW_SETTINGS and has_rows(value) else value for name, value in overrides.items()}


def find_problems(overrides: Mapping[str, Any]) -> list[Problem]:
    """Return the settings whose values are neither addresses nor rows of a supported type."""
    return [
        problem
        for name in ROW_SETTINGS
        if has_rows(value := overrides.get(name)) and (problem := _find_type_problem(name, value)) is not None
    ]


def store_rows(overrides: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Write the rows among the settings' values, and return the settings with the paths of the files.

    Raises:
        ConfigError: a type is not supported, a value does not fit into its column, or there are no rows.
    """
    if problems := find_problems(overrides):
        raise ConfigError(problems)
    paths = {
        name: str(write_rows(name, value, root))
        for name, value in overrides.items()
        if name in ROW_SETTINGS and has_rows(value)
    }
    # The recipe, or an artifact's training rows, may have another format.
    return {**({"data.format": None} if paths else {}), **overrides, **paths}


def write_rows(field: str, data: Any, root: Path) -> Path:
    """Write rows to `<root>/.rows`, unless equal rows are there; return the path of the file. `field`: the setting."""
    folder = root / ROWS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write.remove_stale_drafts(folder / "rows")
    draft = atomic_write.Draft(folder / "rows")
    try:
        staging_folder = draft.folder / "inside"
        staging_folder.mkdir()
        num_rows = _write_parquet(field, data, staging_folder / FILE_NAME)
        if not num_rows:
            fix = "pass at least one row"
            raise ConfigError([Problem(field, type(data).__name__, "it has no rows", fix, code="empty_file")])
        with (staging_folder / FILE_NAME).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_LETTERS]
        if not (folder / digest / FILE_NAME).is_file():
            with suppress(OSError):  # another process was faster
                atomic_write.publish_folder(staging_folder, folder / digest)
        return folder / digest / FILE_NAME
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()


def _write_parquet(field: str, data: Any, path: Path) -> int:
    """Write the rows in row groups of `ROWS_PER_GROUP`, however the batches are cut; return their number."""
    import pyarrow as pa
    import pyarrow.parquet

    writer, pending, num_pending, num_rows = None, list[Any](), 0, 0
    try:
        for table in _iter_tables(field, data):
            if writer is None:
                schema = _make_plain_schema(table.schema)
                writer = pyarrow.parquet.ParquetWriter(path, schema, compression="zstd")
            pending.append(_cast(field, table, schema))
            num_pending, num_rows = num_pending + len(table), num_rows + len(table)
            while num_pending >= ROWS_PER_GROUP:
                joined_table = pa.concat_tables(pending)
                writer.write_table(joined_table.slice(0, ROWS_PER_GROUP).combine_chunks(), ROWS_PER_GROUP)
                pending, num_pending = [joined_table.slice(ROWS_PER_GROUP)], num_pending - ROWS_PER_GROUP
        if writer is not None and num_pending:
            writer.write_table(pa.concat_tables(pending).combine_chunks(), ROWS_PER_GROUP)
    finally:
        if writer is not None:
            writer.close()
    return num_rows


def _make_plain_schema(schema: "pyarrow.Schema") -> "pyarrow.Schema":
    """Return a schema without dictionaries, views and metadata, which differ between equal rows. Class names stay."""
    import pyarrow as pa

    def plain_type(kind: Any) -> Any:
        if pa.types.is_dictionary(kind):
            return plain_type(kind.value_type)
        is_text = pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
        return pa.string() if is_text else kind

    features = (schema.metadata or {}).get(CLASS_NAMES_KEY, b"")
    metadata = {CLASS_NAMES_KEY: features} if b"ClassLabel" in features else None
    return pa.schema([pa.field(field.name, plain_type(field.type)) for field in schema], metadata=metadata)


def _cast(field: str, table: "pyarrow.Table", schema: "pyarrow.Schema") -> "pyarrow.Table":
    """Cast a batch to the columns of the first one."""
    import pyarrow as pa

    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, KeyError) as error:
        raise _make_value_error(field, error) from None


def _make_value_error(field: str, error: Exception) -> ConfigError:
    reason = f"rows have other columns, or values of another type ({' '.join(map(str, error.args)).splitlines()[0]})"
    return ConfigError([Problem(field, None, reason, "convert each column to one type, e.g. str", code="wrong_type")])


# ------------------------------------------------------------------------------------------------------------- types


def _is_instance(value: Any, module: str, name: str) -> bool:
    """Whether a value is of a class of a library, which is imported already if there is such a value."""
    library = sys.modules.get(module)
    return library is not None and isinstance(value, getattr(library, name, ()))


def _is_list_of_rows(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(row, Mapping) for row in value)


def _find_type_problem(field: str, value: Any) -> Problem | None:
    is_supported = (
        _is_instance(value, "pandas", "DataFrame")
        or _is_instance(value, "datasets", "Dataset")
        or _is_instance(value, "ray.data", "Dataset")
        or (hasattr(value, "__arrow_c_stream__") and not _is_instance(value, "pandas", "Series"))
        or _is_list_of_rows(value)
    )
    if is_supported:
        return None
    kind, fix = (
        f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins."),
        f"pass {SUPPORTED_TYPES}",
    )
    if _is_instance(value, "datasets", "DatasetDict"):
        fix = 'write data=splits["train"], valid=splits["validation"] and test=splits["test"]'
    return Problem(field, kind, "rows of this type are not supported", fix, code="unsupported_type")


def _iter_tables(field: str, data: Any) -> Iterator["pyarrow.Table"]:
    """Yield the rows as tables of Arrow."""
    import pyarrow as pa

    try:
        if _is_instance(data, "pandas", "DataFrame"):
            yield pa.Table.from_pandas(data, preserve_index=False)
        elif _is_instance(data, "datasets", "Dataset"):
            yield from data.with_format("arrow").iter(ROWS_PER_GROUP)
        elif _is_instance(data, "ray.data", "Dataset"):
            yield from _iter_ray_tables(data)
        elif hasattr(data, "__arrow_c_stream__"):
            reader = pa.RecordBatchReader.from_stream(data)
            for batch in reader:
                yield pa.Table.from_batches([batch], reader.schema)
        else:
            columns = dict.fromkeys(name for row in data for name in row)
            yield pa.table({str(name): [row.get(name) for row in data] for name in columns})
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise _make_value_error(field, error) from None


def _iter_ray_tables(dataset: Any) -> Iterator["pyarrow.Table"]:
    """Yield the batches in the order of the rows, which Ray Data does not keep by default."""
    options = dataset.context.execution_options
    keeps_order, options.preserve_order = options.preserve_order, True
    try:
        yield from dataset.iter_batches(batch_size=ROWS_PER_GROUP, batch_format="pyarrow", prefetch_batches=1)
    finally:
        options.preserve_order = keeps_order
