"""The watch over a worker, and workers that wait for each other: long work is let be, whatever hangs is ended."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from rtrain.checkpoint import saver
from rtrain.checkpoint.remote_copy import RemoteCopy
from rtrain.config import OptimConfig
from rtrain.parallel import collectives, watchdog
from rtrain.parallel.watchdog import Watchdog
from rtrain.trainer import optimizers
from tests.support import workers
from tests.support.processes import end
from tests.support.root import ROOT
from tests.unit.checkpoint.test_format import make_network, train
from tests.unit.checkpoint.test_saver import state

STALL_S = 1.5
GROUP_S = 3.0
"""After which the process group's own calls fail."""
LONG_S = 4.0
BUSY = 4
"""In place of `watchdog.EXTENDED_FACTOR`: longer than the long work, and short enough to see a hang in it end."""

pytestmark = pytest.mark.usefixtures("programs", "groups")
"""All start at once, since they mostly wait."""

# ----------------------------------------------------------------------------------------------------------- one worker

SIGNS = """
import sys, time
from pathlib import Path
from rtrain.parallel import watchdog

watchdog.SETUP_TIMEOUT_S, watchdog.EXTENDED_FACTOR = 0.0, 4
watch = watchdog.Watchdog(Path(sys.argv[1]), 1.0)
"""
HANG_WITH_THE_LOCK = "import ctypes; ctypes.PyDLL(None).sleep(1000)"
LIVES = """
for _ in range(3):
    watch.start_micro_batch()
    time.sleep(0.6)
watch.heartbeat()
with watch.extended_timeout():
    time.sleep(2.5)
    watch.heartbeat()
    with watch.extended_timeout():
        time.sleep(2.5)
    time.sleep(2.5)
watch.stop()
time.sleep(1.5)
print("through")
"""
SCRIPTS = {
    "lives": LIVES,
    "no pass": "time.sleep(1000)",
    "busy": "with watch.extended_timeout(): time.sleep(1000)",
    "busy, with the lock": f"with watch.extended_timeout(): {HANG_WITH_THE_LOCK}",
    "after it": "with watch.extended_timeout(): pass\nprint('out', flush=True); time.sleep(3)\n"
    "print('never', flush=True)",
}
Programs = dict[str, tuple[subprocess.Popen[str], Path]]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """A process for each of `SCRIPTS`, with a watch of one second that leaves its traceback in a file."""
    folder, actual = tmp_path_factory.mktemp("watched"), Programs()
    for name, script in SCRIPTS.items():
        command = [sys.executable, "-c", SIGNS + script, str(folder / name)]
        actual[name] = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True), folder / name
    yield actual
    for process, _ in actual.values():
        end(process)


def outcome(programs: Programs, name: str) -> tuple[int, str, str]:
    """Exit code, output and traceback of a process."""
    process, file = programs[name]
    printed, _ = process.communicate(timeout=60)
    return process.returncode, printed, file.read_text()


def test_signs_of_life_put_the_end_off_and_other_work_needs_fewer(programs: Programs) -> None:
    assert outcome(programs, "lives") == (0, "through\n", "")


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "lives"])
def test_what_hangs_is_ended_also_in_other_work(programs: Programs, name: str) -> None:
    code, printed, traceback = outcome(programs, name)
    assert (code, printed) == (1, "out\n" if name == "after it" else "")
    assert "Timeout" in traceback
    assert "<string>" in traceback


def test_the_setup_may_take_its_time_until_the_first_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda limit, **how: armed.append(limit))
    watch = Watchdog(tmp_path / "stalled", 5.0)
    watch.heartbeat()
    with watch.extended_timeout():
        watch.heartbeat()
    with watch.extended_timeout():
        pass
    watch.start_micro_batch()
    watch.heartbeat()
    with watch.extended_timeout():
        watch.start_micro_batch()  # an evaluation in it
    watch.stop()
    setup, busy = watchdog.SETUP_TIMEOUT_S, max(watchdog.SETUP_TIMEOUT_S, watchdog.EXTENDED_FACTOR * 5.0)
    assert armed == [setup, setup, busy, busy, setup, busy, setup, 5.0, 5.0, 60.0, 60.0, 5.0]


# ---------------------------------------------------------------------------------------------------- several, together


def join_group(rank: int, world: int, folder: Path) -> Watchdog:
    """In a process of its own: a member of a group, with a watch."""
    watchdog.EXTENDED_FACTOR, watchdog.SETUP_TIMEOUT_S = BUSY, STALL_S
    workers.joined(rank, world, folder)
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=GROUP_S), dist.group.WORLD)
    return Watchdog(folder / f"stalled-{rank}", STALL_S)


def long_work(rank: int, world: int, folder: Path) -> list[Any]:
    """One works for longer than a stall and than the group's time-out, and the others wait; then they change places."""
    watch = join_group(rank, world, folder)
    actual: list[Any] = []
    for worker in (0, world - 1):

        @watch.extended_timeout()
        def work(worker: int = worker) -> int:
            time.sleep(LONG_S if rank == worker else 0)
            return 10 * rank

        actual.append(collectives.run_on_all_ranks(watch, work))

    def decide() -> int:
        time.sleep(LONG_S)
        return 42

    actual.append(collectives.decide_on_rank_zero(watch, decide))
    watch.stop()
    return actual


def failures(rank: int, world: int, folder: Path) -> list[Any]:
    """A rank fails while another works; one fails later; rank 0 fails to decide; a last decision succeeds."""
    watch = join_group(rank, world, folder)
    actual: list[Any] = []

    def fails(which: int, after: float) -> Callable[[], int]:
        @watch.extended_timeout()
        def work() -> int:
            if rank == which:
                time.sleep(after)
                raise ValueError(f"of rank {rank}")
            time.sleep(1.2)
            return rank

        return work

    for work in (fails(1, 0.0), fails(0, 1.8)):
        try:
            actual.append(collectives.run_on_all_ranks(watch, work))
        except (ValueError, collectives.OtherRankFailed) as error:
            actual.append(type(error).__name__)
    try:
        actual.append(collectives.decide_on_rank_zero(watch, fails(0, 0.0)))
    except (ValueError, collectives.OtherRankFailed) as error:
        actual.append(type(error).__name__)
    actual.append(collectives.decide_on_rank_zero(watch, lambda: 7))
    watch.stop()
    return actual


def hang(rank: int, world: int, folder: Path) -> list[Any]:
    """Rank 0 hangs for ever in its work."""

    def decide() -> int:
        time.sleep(1000)
        return 0

    return [collectives.decide_on_rank_zero(join_group(rank, world, folder), decide)]


def stop(rank: int, world: int, folder: Path) -> list[Any]:
    """Rank 0 is stopped in its work, its watch with it."""

    def decide() -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0

    return [collectives.decide_on_rank_zero(join_group(rank, world, folder), decide)]


Case = Callable[[int, int, Path], list[Any]]
Group = tuple[list[Any], Path]
Ended = list[tuple[int | None, str, str]]
"""Exit code of each rank (None: it had to be killed), the result of the case, and the end of its output."""


def _does(rank: int, world: int, folder: Path, case: Case) -> None:
    with (folder / f"errors-{rank}").open("wb") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    (folder / f"said-{rank}").write_text(str(case(rank, world, folder)))
    os._exit(0)  # at once: Gloo aborts a process that is still ending when another member has gone


def start_group(case: Case, world: int, folder: Path) -> Group:
    context = workers.forking()
    processes = [context.Process(target=_does, args=(rank, world, folder, case)) for rank in range(world)]
    for process in processes:
        process.start()
    return processes, folder


def ended(group: Group) -> Ended:
    processes, folder = group
    actual: Ended = []
    for rank, process in reversed([*enumerate(processes)]):  # rank 0 may be stopped
        give_up = time.monotonic() + 90
        while process.is_alive() and time.monotonic() < give_up and not (rank == 0 and _is_stopped(process.pid)):
            process.join(0.1)
        code = process.exitcode
        process.kill()
        process.join()
        message, errors = (folder / f"{what}-{rank}" for what in ("said", "errors"))
        actual.append((code, message.read_text() if message.is_file() else "", errors.read_text()[-2000:]))
    return actual[::-1]


def _is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


CASES: dict[Case, int] = {long_work: 3, failures: 2, hang: 2, stop: 2}
"""And how many processes each takes."""
Groups = dict[Case, Group]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    actual = {case: start_group(case, world, tmp_path_factory.mktemp(case.__name__)) for case, world in CASES.items()}
    yield actual
    for group in actual.values():
        ended(group)


def test_others_wait_for_one_that_works_longer_than_a_stall_and_than_their_group_would(groups: Groups) -> None:
    actual = ended(groups[long_work])
    assert [(code, message) for code, message, _ in actual] == [
        (0, f"[{10 * rank}, {10 * rank}, 42]") for rank in range(3)
    ]


def test_where_one_fails_all_fail_and_its_own_error_is_its_own(groups: Groups) -> None:
    actual = ended(groups[failures])
    assert [(code, message) for code, message, _ in actual] == [
        (0, str(["OtherRankFailed", "ValueError", "ValueError", 7])),
        (0, str(["ValueError", "OtherRankFailed", "OtherRankFailed", 7])),
    ]


def test_a_worker_that_hangs_in_its_work_is_ended_by_its_watch_and_the_others_with_it(groups: Groups) -> None:
    (code, message, _), (other, _, errors) = ended(groups[hang])
    folder = groups[hang][1]
    assert (code, message) == (1, "")
    assert "sleep" in (folder / "stalled-0").read_text() or "hang" in (folder / "stalled-0").read_text()
    assert (other, (folder / "stalled-1").read_text()) == (1, "")
    assert "RuntimeError" in errors


def test_nobody_waits_for_a_worker_that_is_stopped(groups: Groups) -> None:
    (code, _, _), (other, message, _) = ended(groups[stop])
    assert code is None
    assert (other, message) == (1, "")


# ------------------------------------------------------------------------------------------------------- a slow storage


class CountingWatchdog(Watchdog):
    """A watch that ends nothing and counts signs."""

    def __init__(self) -> None:
        super().__init__()
        self.signs, self.has_beat = 0, threading.Event()

    def heartbeat(self) -> None:
        self.signs += 1
        self.has_beat.set()


def test_a_wait_for_a_copy_is_alive_as_long_as_pieces_of_it_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "POLL_INTERVAL_S", 0.01)
    watch, copies, waits = CountingWatchdog(), threading.Event(), threading.Event()

    class Slow(RemoteCopy):
        def push(self, run_folder: Path, checkpoints: Any, on_progress: Callable[[], None] = lambda: None) -> None:
            on_progress()
            copies.set()
            assert waits.wait(30)
            for _ in range(3):
                watch.has_beat.clear()
                on_progress()
                assert watch.has_beat.wait(30)

    network = make_network()
    optimizer = optimizers.build_optimizer(network, OptimConfig())
    train(network, optimizer, 1)
    instance = saver.CheckpointSaver(tmp_path / "checkpoints", 2, Slow("memory://", "run"), watchdog=watch)
    instance.save(network, optimizer, state(1))
    assert copies.wait(30)
    assert watch.signs == 0  # a copy during training sends no heartbeat
    waits.set()
    instance.flush()
    assert watch.signs == 3
