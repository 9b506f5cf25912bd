"""Answers on their way to a file: portions in a hidden folder beside it, joined at the end.

.<name>.portions/manifest.json      what is answered by what: another input or artefact is refused by name
                 portions.jsonl     a line per portion, behind the portion's file: rows, size, SHA-256
                 000000.csv ...     a portion's rows, written whole or not at all
                 writer.lock        held by the process that writes
<name>                              the whole, moved there once every row is in it

A killed job loses the portions that it was at. `--resume` verifies the others, and goes on.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import fsspec
import fsspec.utils

from rtrain.config import Data
from rtrain.core import atomic_write, manifest
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.data.row_reader import Source
from rtrain.data.sources import paths
from rtrain.inference.batch import formats
from rtrain.inference.batch.chunks import Portion
from rtrain.inference.batch.columns import Layout
from rtrain.inference.batch.formats import Format
from rtrain.inference.batch.pipeline import Answered, Counts

Reuse = Literal["refuse", "resume", "overwrite"]
SCHEMA_VERSION = 1
MANIFEST, LOG, LOCK = "manifest.json", "portions.jsonl", "writer.lock"
WORDS = {"input": "rows", "artifact": "artefact", "settings": "settings", "schema_version": "version of rtrain"}
"""What a key of the manifest binds the portions to."""


class Folder:
    """The portions of one output file, which this process alone writes. Use as a context manager."""

    def __init__(self, out: Path, format: Format, binding: Mapping[str, Any], reuse: Reuse):
        self.out, self._format, self._reuse = out, format, reuse
        self._binding = {"schema_version": SCHEMA_VERSION, **binding}
        self.path = out.with_name(f".{out.name}.portions")
        self.done: dict[int, Counts] = {}
        """By the portion's number."""
        self._lock = -1

    def __enter__(self) -> "Folder":
        """Raises `ConfigError` where the output is there already, `UserError` where it cannot be written or resumed."""
        self._refuse()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}); name another place with --out", code="not_writable"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UserError(
                f"another process is writing {self.out}; wait for its end, or name another --out",
                code="already_running",
            ) from None
        except OSError:
            pass  # storage without locks
        try:
            with self._writing():
                self._begin()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.done:
            shutil.rmtree(self.path, ignore_errors=True)  # there is nothing to go on from
        os.close(self._lock)

    def _refuse(self) -> None:
        refuse_existing(self.out, self._reuse != "refuse")
        if self._reuse == "refuse" and (self.path / MANIFEST).exists():
            fix = "go on with --resume, or begin anew with --overwrite"
            problem = Problem(
                "--out", str(self.out), "a job that was to write it has not ended", fix, code="unfinished_job"
            )
            raise ConfigError([problem])

    def _begin(self) -> None:
        known = self._known()
        if self._reuse != "resume" or known is None:
            for path in self.path.iterdir():
                if path.name != LOCK:
                    path.unlink()
            _write_whole(self.path / MANIFEST, json.dumps(self._binding, indent=1).encode())
            return
        if other := [WORDS[key] for key, value in self._binding.items() if known.get(key) != value]:
            raise UserError(
                f"--resume: {self.out.name} was begun with other {' and '.join(other)} ({self.path}); "
                "give what it was begun with, or begin anew with --overwrite",
                code="other_job",
            )
        found = self._lines()
        for line in found:
            entry: manifest.Entry = {"size": line["size"], "sha256": line["sha256"]}
            if manifest.flaw(self._file(line["number"]), entry) is None:
                self.done[line["number"]] = Counts(*line["counts"])
        # Written anew: a killed process may have left half a line at its end, to which the next would be added.
        _write_whole(self.path / LOG, b"".join(_line(line) for line in found))

    def _known(self) -> dict[str, Any] | None:
        """What portions that are here already were made of."""
        path = self.path / MANIFEST
        if not path.exists():
            return None
        known = _document(path.read_bytes())
        if known is None and self._reuse == "resume":
            raise UserError(f"--resume: {path} cannot be read; begin anew with --overwrite", code="unreadable")
        return known

    def _lines(self) -> list[dict[str, Any]]:
        """The lines of the log that are whole: a killed process leaves half of its last one, and a machine that stopped
        may leave zeros in any. Each is proven by its portion's file, so that a lost one costs its portion alone."""
        path = self.path / LOG
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        found = [_document(line) for line in lines]
        return [line for line in found if line is not None and line.keys() >= {"number", "counts", "size", "sha256"}]

    def _file(self, number: int) -> Path:
        return self.path / f"{number:06d}.{self._format}"

    def add(self, answered: Answered) -> None:
        """Keep a portion: its file, whole, and then its line in the log."""
        path = self._file(answered.number)
        with self._writing():
            _write_whole(path, answered.body)
            line = {"number": answered.number, "counts": list(answered.counts), **manifest.entry(path)}
            with (self.path / LOG).open("ab") as log:
                log.write(_line(line))
                log.flush()
                os.fsync(log.fileno())
        self.done[answered.number] = answered.counts

    def join(self, layout: Layout, portions: Sequence[Portion]) -> None:
        """Put the whole file in its place, and remove the portions."""
        wrong = [one.number for one in portions if self.done.get(one.number, Counts(0, 0, 0)).rows != one.rows]
        assert not wrong, f"portions {wrong[:5]} have other rows than the input"
        whole = self.path / f"whole.{self._format}"
        with self._writing():
            with whole.open("wb") as file:
                formats.join(self._format, layout, (self._file(one.number) for one in portions), file)
            atomic_write.sync(whole)
            whole.replace(self.out)
            atomic_write.sync(self.out.parent)
        shutil.rmtree(self.path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}); once it can, --resume goes on from what is there",
                code="not_writable",
            ) from None


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise `ConfigError` where a file would be replaced that nobody has given up."""
    if out.is_dir():
        raise ConfigError([Problem("--out", str(out), "is a folder", "name a file in it", code="is_a_folder")])
    if out.exists() and not overwrite:
        fix = "name another, or write it anew with --overwrite"
        raise ConfigError([Problem("--out", str(out), "there is such a file already", fix, code="already_exists")])


def refuse_among_rows(source: Source, data: Data, out: Path) -> None:
    """Raise `ConfigError` where the answers would be read as rows by the next call."""
    place, named = out.resolve(), Path(fsspec.core.strip_protocol(str(data.path))).resolve()
    own = any(Path(piece.uri.removeprefix("file://")).resolve() == place for piece in source.pieces)
    # By fsspec's own rule, which finds the rows: to Python 3.11 and 3.12 `**` is one folder, to fsspec any number.
    matched = paths.is_glob(str(data.path)) and re.match(fsspec.utils.glob_translate(str(named)), str(place))
    if own or matched or (named.is_dir() and place.is_relative_to(named)):
        reason, fix = "it is among the rows that --data names", "write the answers to another folder"
        raise ConfigError([Problem("--out", str(out), reason, fix, code="among_the_rows")])


def _document(body: bytes) -> dict[str, Any] | None:
    """A JSON object; None where these bytes are none."""
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _line(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _write_whole(path: Path, body: bytes) -> None:
    """Write a file whole or not at all."""
    with atomic_write.replacement(path) as draft:
        draft.write_bytes(body)
