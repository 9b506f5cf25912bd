"""A line of JSON for each request, where `serve.access_log` names a file. No text of a request is ever in it."""

import json
import logging
import logging.handlers
import sys
import time
from typing import Any

STDERR = "-"


class _File(logging.handlers.WatchedFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Raise what has happened: logging would print a traceback for each line."""
        raise  # it is called where one was caught


class AccessLog:
    def __init__(self, path: str | None):
        """`path`: a file, which is opened anew when another program has moved it away; `STDERR`; None for no log."""
        self._logger: logging.Logger | None = None
        self._failed = False
        if path is None:
            return
        handler = logging.StreamHandler(sys.stderr) if path == STDERR else _File(path, encoding="utf-8", delay=True)
        handler.setFormatter(logging.Formatter("%(message)s"))
        # It belongs to no hierarchy: a program's settings of logging must not send it elsewhere.
        self._logger = logging.Logger("rtrain.access")
        self._logger.addHandler(handler)

    @property
    def kept(self) -> bool:
        return self._logger is not None

    def write(self, **fields: Any) -> None:
        if self._logger is not None:
            made = time.time()
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(made)) + f".{int(made * 1000) % 1000:03d}Z"
            try:
                self._logger.info("%s", json.dumps({"time": stamp, **fields}, ensure_ascii=True))
            except OSError as error:  # its folder is gone, or its disk full: requests are answered all the same
                if not self._failed:
                    sys.stderr.write(f"rtrain: the access log cannot be written: {error}\n")
                self._failed = True
            else:
                self._failed = False

    def close(self) -> None:
        for handler in self._logger.handlers if self._logger else ():
            handler.close()
