"""`python -m rtrain`, the entry point of a Ray job, where no console script is on PATH; and what that script calls."""

import os
import signal


def main() -> None:
    """Import the command line, and run it."""
    before = signal.getsignal(signal.SIGINT)
    alone = before is signal.default_int_handler  # else it is ignored, as in the background of a script, or caught
    if alone:
        signal.signal(signal.SIGINT, _end)
    from rtrain.cli import app

    if alone:
        signal.signal(signal.SIGINT, before)
    app.main()


def _end(number: int, frame: object) -> None:
    """Nothing has been started yet, and an exception in the midst of an import would be shown whole, or be taken for a
    missing module."""
    os._exit(128 + number)


if __name__ == "__main__":
    main()
