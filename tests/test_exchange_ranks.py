"""The watch over a worker, and workers that wait for each other: long work is let be, whatever hangs is ended."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rtrain.checkpoints import saver
from rtrain.checkpoints.replica import Replica
from rtrain.config import Optim
from rtrain.exchange import alive, ranks
from rtrain.exchange.alive import Watch
from rtrain.training import optim
from tests.test_checkpoints_checkpoint import make_network, train
from tests.test_checkpoints_saver import state

ROOT = Path(__file__).resolve().parents[1]
STALL_S = 2.0
GROUP_S = 4.0
"""After which the process group's own calls fail."""
LONG_S = 6.0
BUSY = 4
"""In place of `alive.BUSY`: longer than the long work, and short enough to see a hang in it end."""

# ----------------------------------------------------------------------------------------------------------- one worker

SIGNS = """
import sys, time
from pathlib import Path
from rtrain.exchange import alive

alive.SETUP_S, alive.BUSY = 0.0, 4
watch = alive.Watch(Path(sys.argv[1]), 1.0)
"""
HANG_WITH_THE_LOCK = "import ctypes; ctypes.PyDLL(None).sleep(1000)"


def watched(tmp_path: Path, script: str) -> tuple[int, str, str]:
    """Exit code of a process with a watch of one second, what it printed, and the traceback that the watch left."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNS + script, str(tmp_path / "stalled")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, (tmp_path / "stalled").read_text()


def test_signs_of_life_put_the_end_off_and_other_work_needs_fewer(tmp_path: Path) -> None:
    script = """
for _ in range(3):
    watch.passes()
    time.sleep(0.6)
watch.alive()
with watch.busy():
    time.sleep(2.5)
    watch.alive()
    with watch.busy():
        time.sleep(2.5)
    time.sleep(2.5)
watch.stop()
time.sleep(1.5)
print("through")
"""
    assert watched(tmp_path, script) == (0, "through\n", "")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("time.sleep(1000)", ""),
        ("with watch.busy(): time.sleep(1000)", ""),
        (f"with watch.busy(): {HANG_WITH_THE_LOCK}", ""),
        ("with watch.busy(): pass\nprint('out', flush=True); time.sleep(3)\nprint('never', flush=True)", "out\n"),
    ],
    ids=["no pass", "busy", "busy, with the lock", "after it"],
)
def test_what_hangs_is_ended_also_in_other_work(tmp_path: Path, script: str, said: str) -> None:
    code, printed, traceback = watched(tmp_path, script)
    assert (code, printed) == (1, said)
    assert "Timeout" in traceback
    assert "<string>" in traceback


def test_the_setup_may_take_its_time_until_the_first_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[float] = []
    monkeypatch.setattr(Watch, "_arm", lambda watch: armed.append(watch._limit))
    watch = Watch(tmp_path / "stalled", 5.0)
    watch.alive()
    with watch.busy():
        watch.alive()
    with watch.busy():
        pass
    watch.passes()
    watch.alive()
    with watch.busy():
        watch.passes()  # an evaluation in it
    watch.stop()
    setup, busy = alive.SETUP_S, max(alive.SETUP_S, alive.BUSY * 5.0)
    assert armed == [setup, setup, busy, busy, setup, busy, setup, 5.0, 5.0, 60.0, 60.0, 5.0]


# ---------------------------------------------------------------------------------------------------- several, together


def joined(rank: int, world: int, folder: Path) -> Watch:
    """In a process of its own: a member of a group, with a watch."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    alive.BUSY, alive.SETUP_S = BUSY, STALL_S
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=60)  # the processes start one after another on a busy machine
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=limit)
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=GROUP_S), dist.group.WORLD)
    return Watch(folder / f"stalled-{rank}", STALL_S)


def long_work(rank: int, world: int, folder: Path) -> list[Any]:
    """One works for longer than a stall and than the group's time-out, and the others wait; then they change places."""
    watch = joined(rank, world, folder)
    found: list[Any] = []
    for worker in (0, world - 1):

        @watch.busy()
        def work(worker: int = worker) -> int:
            time.sleep(LONG_S if rank == worker else 0)
            return 10 * rank

        found.append(ranks.together(watch, work))

    def decide() -> int:
        time.sleep(LONG_S)
        return 42

    found.append(ranks.decided(watch, decide))
    watch.stop()
    return found


def failures(rank: int, world: int, folder: Path) -> list[Any]:
    """One fails at once while another works, one fails after it, rank 0 fails to decide; and then all goes on."""
    watch = joined(rank, world, folder)
    found: list[Any] = []

    def fails(which: int, after: float) -> Callable[[], int]:
        @watch.busy()
        def work() -> int:
            if rank == which:
                time.sleep(after)
                raise ValueError(f"of rank {rank}")
            time.sleep(1.2)
            return rank

        return work

    for work in (fails(1, 0.0), fails(0, 1.8)):
        try:
            found.append(ranks.together(watch, work))
        except (ValueError, ranks.Elsewhere) as error:
            found.append(f"{type(error).__name__}: {error}")
    try:
        found.append(ranks.decided(watch, fails(0, 0.0)))
    except (ValueError, ranks.Elsewhere) as error:
        found.append(type(error).__name__)
    found.append(ranks.decided(watch, lambda: 7))
    watch.stop()
    return found


def hang(rank: int, world: int, folder: Path) -> list[Any]:
    """Rank 0 hangs for ever in its work."""

    def decide() -> int:
        time.sleep(1000)
        return 0

    return [ranks.decided(joined(rank, world, folder), decide)]


def stop(rank: int, world: int, folder: Path) -> list[Any]:
    """Rank 0 is stopped in its work, its watch with it."""

    def decide() -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0

    return [ranks.decided(joined(rank, world, folder), decide)]


def started(case: Callable[..., Any], world: int, folder: Path) -> list[tuple[int | None, str, str]]:
    """By rank: exit code (None: it had to be killed), what the case returned, and the end of what it wrote."""
    script = (
        f"import os; from pathlib import Path; from {case.__module__} import {case.__name__} as case; "
        f"print(case({{}}, {world}, Path({str(folder)!r})), flush=True); "
        "os._exit(0)"  # at once: Gloo aborts a process that is still ending when another member has gone
    )
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([sys.executable, "-c", script.format(rank)], cwd=ROOT, **pipes) for rank in range(world)
    ]
    found: list[tuple[int | None, str, str]] = []
    for process in reversed(processes):  # rank 0 is the one that may hang
        try:
            said, errors = process.communicate(timeout=90 if process is not processes[0] else 30)
            found.append((process.returncode, said.strip(), errors[-2000:]))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            found.append((None, "", ""))
    return found[::-1]


def test_others_wait_for_one_that_works_longer_than_a_stall_and_than_their_group_would(tmp_path: Path) -> None:
    found = started(long_work, 3, tmp_path)
    assert [(code, said) for code, said, _ in found] == [(0, f"[{10 * rank}, {10 * rank}, 42]") for rank in range(3)]


def test_where_one_fails_all_fail_and_its_own_error_is_its_own(tmp_path: Path) -> None:
    elsewhere = "Elsewhere: another worker failed; its own error says why"
    found = started(failures, 2, tmp_path)
    assert [(code, said) for code, said, _ in found] == [
        (0, str([elsewhere, "ValueError: of rank 0", "ValueError", 7])),
        (0, str(["ValueError: of rank 1", elsewhere, "Elsewhere", 7])),
    ]


def test_a_worker_that_hangs_in_its_work_is_ended_by_its_watch_and_the_others_with_it(tmp_path: Path) -> None:
    (code, said, _), (other, _, errors) = started(hang, 2, tmp_path)
    assert (code, said) == (1, "")
    assert "sleep" in (tmp_path / "stalled-0").read_text() or "hang" in (tmp_path / "stalled-0").read_text()
    assert (other, (tmp_path / "stalled-1").read_text()) == (1, "")
    assert "RuntimeError" in errors


def test_nobody_waits_for_a_worker_that_is_stopped(tmp_path: Path) -> None:
    (code, _, _), (other, said, _) = started(stop, 2, tmp_path)
    assert code is None
    assert (other, said) == (1, "")


# ------------------------------------------------------------------------------------------------------- a slow storage


class Told(Watch):
    """A watch that ends nothing and counts signs."""

    def __init__(self) -> None:
        super().__init__()
        self.signs, self.told = 0, threading.Event()

    def alive(self) -> None:
        self.signs += 1
        self.told.set()


def test_a_wait_for_a_copy_is_alive_as_long_as_pieces_of_it_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "LOOK_S", 0.01)
    watch, copies, waits = Told(), threading.Event(), threading.Event()

    class Slow(Replica):
        def push(self, run: Path, checkpoints: Any, moved: Callable[[], None] = lambda: None) -> None:
            moved()
            copies.set()
            assert waits.wait(30)
            for _ in range(3):
                watch.told.clear()
                moved()
                assert watch.told.wait(30)

    network = make_network()
    optimizer = optim.build(network, Optim())
    train(network, optimizer, 1)
    made = saver.Saver(tmp_path / "checkpoints", 2, Slow("memory://", "run"), watch=watch)
    made.save(network, optimizer, state(1))
    assert copies.wait(30)
    assert watch.signs == 0  # what is copied while the training goes on is no sign that it does
    waits.set()
    made.flush()
    assert watch.signs == 3
