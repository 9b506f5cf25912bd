"""What the workers of a run decide once."""

from pathlib import Path

from rtrain.exchange.alive import Watch
from rtrain.run import Run
from rtrain.runs import decisions


def test_a_run_keeps_the_threads_of_its_first_start_and_says_where_a_machine_has_fewer(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert [decisions.threads(Watch(), run, available) for available in (2, 4, 2)] == [2, 2, 2]
    assert run.events("threads") == []
    assert decisions.threads(Watch(), run, 1) == 1
    [event] = run.events("threads")
    assert (event["kept"], event["available"], event["short"]) == ([2], [1], [0])
