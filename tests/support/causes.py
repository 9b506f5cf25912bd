"""What an error of the user's is refused for, whatever its words."""

from collections.abc import Callable

from rtrain.core.errors import ConfigError, UserError


def caused_by(code: str) -> Callable[[UserError], bool]:
    """Whether an error, or one of its problems, has this code."""

    def check(error: UserError) -> bool:
        problems = error.problems if isinstance(error, ConfigError) else ()
        return code in (error.code, *(problem.code for problem in problems))

    return check
