"""`python -m rtrain`, the entry point of a Ray job, where no console script is on PATH; and what that script calls."""

import os
import signal


def main() -> None:
    """Import the command line, and run it."""
    previous_handler = signal.getsignal(signal.SIGINT)
    is_default_handler = (
        previous_handler is signal.default_int_handler
    )  # else it is ignored, as in the background of a script, or caught
    if is_default_handler:
        signal.signal(signal.SIGINT, _exit_on_sigint)
    from rtrain.cli import app

    if is_default_handler:
        signal.signal(signal.SIGINT, previous_handler)
    app.main()


def _exit_on_sigint(signal_number: int, frame: object) -> None:
    """Nothing has been started yet, and an exception in the midst of an import would be shown whole, or be taken for a
    missing module."""
    os._exit(128 + signal_number)


if __name__ == "__main__":
    main()
