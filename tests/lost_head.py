"""A script: what lives when the head of a cluster is lost, with a Redis beside it or without. Prints JSON.

    python -m tests.lost_head CASE FOLDER [redis]

`CASE` is `gcs`, the head's control service alone is killed and started again; `processes`, all processes of the head
are, and the file's start commands run again; `machine`, the head's machine is gone, and another one takes its place.
A run of two workers and an endpoint go on meanwhile, on a cluster that is made by cluster.yaml's own commands. Where
the run's driver has ended, the same job is submitted again. A control service without its Redis comes back as another
cluster's, whom nobody of the old one speaks to: then the head's start commands run again before that.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from rtrain import env
from rtrain.cluster.jobs import naming, upload
from rtrain.cluster.rehearsal import faults, plan as plans, serving
from rtrain.cluster.rehearsal.machines import commands
from rtrain.cluster.rehearsal.machines.network import Network
from rtrain.cluster.rehearsal.machines.up import Up, await_head, free_ports, head_tags, up
from rtrain.run import Run
from tests.conftest import labelled_rows, write_rows
from tests.machines import DRIVER, SAVE_EVERY, processes, say, stored, until, words
from tests.tiny import make_artifact, make_encoder

ROOT = Path(__file__).resolve().parents[1]
PORT = 8000
AGAIN_S = 10.0
"""Between two times that a job is asked for."""
WATCHED_S = 60.0
"""Seconds for which it is seen whether the run goes on by itself."""


def redis(stack: ExitStack, folder: Path, made: Network) -> Mapping[str, str]:
    """A Redis on this machine, which is none of the cluster's; returns what the head must know of it."""
    [port] = free_ports(1)
    words = ["redis-server", "--bind", made.gateway, "--port", str(port), "--save", "", "--dir", str(folder)]
    log = stack.enter_context((folder / "redis.log").open("wb"))
    server = stack.enter_context(
        subprocess.Popen([*words, "--protected-mode", "no"], stdout=log, stderr=subprocess.STDOUT)
    )
    stack.callback(server.terminate)
    return {"RAY_REDIS_ADDRESS": f"{made.gateway}:{port}"}


def everywhere(made: Up, sign: str) -> set[int]:
    return {pid for name in made.book.up() for pid in processes(made, name, sign)}


def first_of(made: Up, machine: str) -> psutil.Process:
    """The first process inside of a machine's namespaces."""
    [outer] = psutil.Process(made.book.all()[machine].pid).children()
    [inner] = outer.children()
    return inner


def inside(made: Up, machine: str, command: list[str], environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """A command in a machine's namespaces."""
    entered = ["nsenter", "-t", str(first_of(made, machine).pid), "-n", "-m", "-p", "-u", "-i", "--"]
    return subprocess.Popen([*entered, *command], env=dict(environ), stdin=subprocess.DEVNULL)


# --------------------------------------------------------------------------------------------------------- three losses


def lose_gcs(made: Up, stack: ExitStack) -> None:
    [pid] = processes(made, made.head, "gcs_server")
    one = psutil.Process(pid)
    command, environ = one.cmdline(), one.environ()
    one.kill()
    one.wait()
    time.sleep(2)
    server = inside(made, made.head, command, environ)
    stack.callback(server.wait)
    stack.callback(server.kill)


def lose_processes(made: Up, stack: ExitStack) -> None:
    first, own = first_of(made, made.head), made.site.own
    assert own is not None
    environ = first.environ()
    for one in first.children(recursive=True):
        with suppress(psutil.Error):
            one.kill()
    until("their end", lambda: not [one for one in first.children() if one.status() != psutil.STATUS_ZOMBIE])
    home = str(own.home(made.head))
    for text in own.commands[made.plan.head.name].start:
        done = inside(made, made.head, ["bash", "-c", f"cd ~; {text.replace(own.file.home, home)}"], environ).wait()
        assert done == 0, text


def lose_machine(made: Up, stack: ExitStack) -> None:
    made.cloud.cut(made.head)
    until("its end", lambda: made.head not in made.book.up())
    head = made.plan.head
    made.head = made.book.ask(head.name, head.resources, head.labels, head_tags(made.plan))


CASES = {"gcs": lose_gcs, "processes": lose_processes, "machine": lose_machine}


# -------------------------------------------------------------------------------------------------------------- watched


class Asking:
    """Asks the endpoint again and again: when it has answered."""

    def __init__(self, port: int):
        self.answered: list[float] = []
        self._port, self._done = port, threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._done.wait(0.2):
            if serving.ask(self._port, "where is my parcel", 5.0)[0] == "answered":
                self.answered.append(time.time())

    def end(self) -> None:
        self._done.set()
        self._thread.join()


def main(case: str, folder: Path, with_redis: bool) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.csv", labelled_rows(403))
    make_encoder(folder / "encoder")
    make_artifact(folder / "artifact", ("lost", "found"))
    text = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
    plan, file = plans.of(text), commands.of(plans.read(text))
    run = Run(folder / "runs" / "lost")
    command = words(folder, "lost", 2, "train.epochs=4000")
    endpoint_command = ["serve", str(folder / "artifact"), "--set", "serve.replicas=1"]
    files = upload.of(ROOT, 20_000_000)
    with ExitStack() as stack:
        beside = (lambda network: redis(stack, folder, network)) if with_redis else lambda network: {}
        made = stack.enter_context(up(plan, folder / "machines", say, (file, ROOT), beside))
        own = made.site.own
        assert own is not None
        endpoint = stack.enter_context(own.forwarded(PORT))
        serves = made.jobs.submit(endpoint_command, files, say)
        made.jobs.await_line(serves, "serving ")
        trains = made.jobs.submit(command, files, say)
        until("three checkpoints", lambda: stored(folder) >= 3 * SAVE_EVERY)
        asking = Asking(endpoint)
        until("an answer", lambda: asking.answered)
        before = {sign: everywhere(made, sign) for sign in (DRIVER, faults.WORKER, faults.REPLICA)}
        say(f"{case}: {before}")
        lost = time.time()
        CASES[case](made, stack)
        back = time.time()
        say("the head is there again")
        anew = None if with_redis or case != "gcs" else lambda: lose_processes(made, stack)
        found = seen(made, run, folder, command, files, before, lost, back, anew)
        if found["submitted_again"]:
            asked = time.time()
            made.jobs.submit(endpoint_command, files, say)
            again = until("an answer", lambda: [at for at in asking.answered if at > asked])
            found["endpoint_again_s"] = round(again[0] - asked, 1)
        asking.end()
        answers = [at - lost for at in asking.answered if at > lost]
        found |= {"case": case, "redis": with_redis, "endpoint_answers": len(answers)}
        found["endpoint_last_s"] = round(answers[-1], 1) if answers else None
        found["endpoint_longest_gap_s"] = gap([0.0, *answers])
        made_jobs = made.jobs.all()
        for job in (serves, trains):
            if job in made_jobs and made_jobs[job].status not in naming.ENDED:
                made.jobs.stop(job)
    return found | {"left": made.left}


def gap(times: list[float]) -> float | None:
    return max((round(two - one, 1) for one, two in pairwise(times)), default=None)


def seen(
    made: Up,
    run: Run,
    folder: Path,
    command: list[str],
    files: upload.Upload,
    before: Mapping[str, set[int]],
    lost: float,
    back: float,
    anew: Callable[[], None] | None,
) -> dict[str, Any]:
    """What lives, and when the run goes on: by itself, or as it is submitted again, once the head was started `anew`
    where it has to be."""
    reached = max((event["update"] for event in run.events("progress") if event["time"] <= lost), default=0)

    def next_update() -> dict[str, Any] | None:
        """The first update that was not there before the loss and has come since; a worker that does not know of the
        loss may make some more at once."""
        new = [one for one in run.events("progress") if one["time"] > back and one["update"] > reached]
        return new[0] if new and everywhere(made, DRIVER) else None

    give_up = time.monotonic() + WATCHED_S
    while time.monotonic() < give_up and everywhere(made, DRIVER) & before[DRIVER]:
        time.sleep(0.5)
    lives = {sign: bool(everywhere(made, sign) & before[sign]) for sign in before}
    say(f"lives: {lives}")
    found: dict[str, Any] = {
        "driver": lives[DRIVER],
        "workers": lives[faults.WORKER],
        "replicas": lives[faults.REPLICA],
        "back_s": round(back - lost, 1),
        "seconds_to_next_update": None,
    }
    if lives[DRIVER] and (event := next_update()) is not None:
        found |= {"submitted_again": False, "seconds_to_next_update": round(event["time"] - lost, 1)}
        lost_updates = [reached - one["update"] for one in run.events("started") if one["time"] > lost]
        return found | {"updates_lost": max([0, *lost_updates])}
    newest = stored(folder)
    if anew is not None:
        anew()
    made.jobs = await_head(made.cloud, made.book, made.head, made.jobs.address, say)
    asked, times = time.time(), 0

    def ask_again() -> list[dict[str, Any]]:
        """With a Redis the head believes for a while that the job goes on, whose supervisor went with it."""
        nonlocal times
        if time.time() > asked + times * AGAIN_S:
            times += 1
            made.jobs.submit(command, files, say)
        return [one for one in run.events("started") if one["time"] > asked]

    started = until("a start", ask_again)[0]
    event = until("an update", lambda: [one for one in run.events("progress") if one["time"] > started["time"]])[0]
    went = [(one["kind"], one["time"]) for one in run.events() if one["time"] > asked and one["kind"] != "progress"]
    went += [(f"{one.name} asked for", one.asked) for one in made.book.all().values() if one.asked > asked - 30]
    return found | {
        "submitted_again": True,
        "submitted_s": round(asked - lost, 1),
        "submitted_times": times,
        "seconds_to_next_update": round(event["time"] - asked, 1),
        "updates_lost": max(0, newest - started["update"]),
        "went": [(what, round(at - asked, 1)) for what, at in sorted(went, key=lambda one: one[1])][:20],
    }


if __name__ == "__main__":
    env.prepare()
    sys.stdout.write(json.dumps(main(sys.argv[1], Path(sys.argv[2]), "redis" in sys.argv[3:])))
