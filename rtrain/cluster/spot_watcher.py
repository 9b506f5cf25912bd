"""Listens for the notice that a spot node is about to be taken away, and drains the node until then.

    python -m rtrain.cluster.spot_watcher aws|gcp|azure [--address HOST:PORT] [--on-rebalance drain]
    python -m rtrain.cluster.spot_watcher now --seconds 60 [--wait]

A background line of a cluster's file starts it on each spot node, each time that Ray is started there. It ends the one
that it finds, which `ray stop` leaves running and which may know the address of a head that is gone.

Where a node is drained, a run writes a checkpoint after its coming update and goes on without it, so that no update is
lost. `now` drains at once: for what ends a node by other means, such as a pod's preStop.

Until the notice nothing is imported but this module and the standard library: it runs beside a training for days.
"""

import argparse
import fcntl
import json
import os
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

LINK_LOCAL = "http://169.254.169.254"
ANSWER_S = 2.0
"""Seconds for an answer of the metadata service, which is on the machine itself."""
DRAIN_S = 10.0
"""Seconds for an answer of the head."""
RETRY_S = 1.0
GONE_S = 5.0
"""Seconds in which the processes of a pod's node may still come up, where it is told to go as it starts."""
TAKE_S = 10.0
"""Seconds in which a watcher that is there must end."""
TOKEN_S = 21600


class Notice(NamedTuple):
    """What a cloud has said about this machine."""

    what: str
    deadline: float
    """Seconds since 1970."""
    is_final: bool = True
    """Whether the machine will be taken away. Else it only may be, some time."""


Look = Callable[[], Notice | None]
"""Asks a cloud's metadata service once. Raises OSError where it does not answer."""


class Service:
    """A metadata service at `base`. No proxy is asked: the address is the machine's own."""

    def __init__(self, base: str = LINK_LOCAL):
        self._base = base.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """The answer's text; None where there is nothing at that path (404)."""
        request = urllib.request.Request(f"{self._base}{path}", headers=dict(headers), method=method)
        try:
            with self._opener.open(request, timeout=ANSWER_S) as answer:
                return str(answer.read(1 << 20).decode("utf-8"))
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
            raise


@dataclass
class Aws:
    """EC2, by version 2 of its metadata service: two minutes' notice, and a recommendation to leave before that."""

    service: Service
    _token: str | None = field(default=None, init=False)

    def __call__(self) -> Notice | None:
        if (told := self._get("/latest/meta-data/spot/instance-action")) is not None:
            action = json.loads(told)
            return Notice(f"spot {action['action']}", _iso(action["time"]))
        if (told := self._get("/latest/meta-data/events/recommendations/rebalance")) is not None:
            return Notice("rebalance recommended", _iso(json.loads(told)["noticeTime"]), is_final=False)
        return None

    def _get(self, path: str) -> str | None:
        for last in (False, True):
            if self._token is None:
                life = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
                self._token = self.service.ask("/latest/api/token", life, method="PUT")
            try:
                return self.service.ask(path, {"X-aws-ec2-metadata-token": self._token or ""})
            except urllib.error.HTTPError as error:
                if error.code != 401 or last:
                    raise
                self._token = None  # it has run out
        raise AssertionError("the second answer is given or raised")


@dataclass
class Gcp:
    """Compute Engine: it says that it has begun to end the machine, 30 seconds before it is gone."""

    service: Service
    seconds: float = 30.0

    def __call__(self) -> Notice | None:
        told = self.service.ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return Notice("preempted", time.time() + self.seconds) if told and told.strip() == "TRUE" else None


@dataclass
class Azure:
    """Scheduled events of a virtual machine: a spot eviction is told 30 seconds before."""

    service: Service
    seconds: float = 30.0
    _name: str | None = field(default=None, init=False)

    def __call__(self) -> Notice | None:
        told = self._get("/metadata/scheduledevents?api-version=2020-07-01")
        for event in json.loads(told or "{}").get("Events", []):
            if event.get("EventType") in ("Preempt", "Terminate") and self._is_ours(event.get("Resources") or []):
                before = event.get("NotBefore")
                deadline = parsedate_to_datetime(before).timestamp() if before else time.time() + self.seconds
                return Notice(f"scheduled event {event['EventType']}", deadline)
        return None

    def _is_ours(self, resources: Sequence[str]) -> bool:
        if self._name is None:
            self._name = self._get("/metadata/instance/compute/name?api-version=2021-02-01&format=text")
        return not resources or self._name is None or self._name in resources

    def _get(self, path: str) -> str | None:
        return self.service.ask(path, {"Metadata": "true"})


def _iso(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


class Cloud(NamedTuple):
    look: Callable[[Service], Look]
    every_s: float
    """How long after a look the next one comes: a small part of the notice."""


CLOUDS = {"aws": Cloud(Aws, 2.0), "gcp": Cloud(Gcp, 1.0), "azure": Cloud(Azure, 1.0)}


def wait(look: Look, every_s: float, say: Callable[[str], None], final: Callable[[Notice], bool]) -> Notice:
    """Look until there is a notice that counts as `final`; others are said once, as are failures of the service."""
    said: set[str] = set()

    def once(text: str) -> None:
        if text not in said:
            said.add(text)
            say(text)

    while True:
        try:
            notice = look()
        except Exception as error:  # whatever it answers: nobody would start the watcher again
            once(f"the metadata service does not answer as expected ({type(error).__name__}: {error}); asking on")
        else:
            if notice is not None and final(notice):
                return notice
            if notice is not None:
                once(f"{notice.what}: nothing is done before the notice itself")
        time.sleep(every_s)


def drain(notice: Notice, address: str | None, say: Callable[[str], None], gone_s: float | None = None) -> list[str]:
    """Have this machine's node drained, trying again until the deadline. Returns the ids of the nodes. With `gone_s` it
    tries no longer than so many seconds where no process of a node is here: nothing is left to drain."""
    from rtrain import ray_internals  # the first heavy import: Ray

    began = time.monotonic()
    while True:
        try:
            head = address or ray_internals.running_here()
            instance = os.environ.get("RAY_CLOUD_INSTANCE_ID")
            found = ray_internals.drain(head, instance, notice.what, notice.deadline, DRAIN_S) if head else []
            why = "no node of a cluster runs here"
        except Exception as error:  # whatever it is: there is a deadline, and nothing else to do
            found, why = [], f"{type(error).__name__}: {error}"
        if found:
            say(f"drained until {_clock(notice.deadline)}: {', '.join(found)}")
            return found
        is_gone = gone_s is not None and time.monotonic() - began >= gone_s and not ray_internals.nodes_here()
        if is_gone or time.time() + RETRY_S > notice.deadline:
            say(f"not drained: {why}")
            return []
        time.sleep(RETRY_S)


def take_over(lock: IO[str], say: Callable[[str], None]) -> bool:
    """Lock the file and write this process's id into it, after the process that holds it has been ended. Returns
    whether that was possible."""
    end = time.monotonic() + TAKE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip()
            if time.monotonic() > end or not holder.isdigit():
                say(f"another watcher runs here and does not end: process {holder or 'unknown'} holds {lock.name}")
                return False
            with suppress(ProcessLookupError):
                os.kill(int(holder), signal.SIGTERM)
            time.sleep(0.1)
        else:
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            return True


def await_end(notice: Notice) -> None:
    """Wait until the drained node's processes have ended, or its deadline has come."""
    from rtrain import ray_internals

    while time.time() < notice.deadline and ray_internals.nodes_here():
        time.sleep(RETRY_S)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(seconds))


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} rtrain spot: {text}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Ends with 0 when the node has been drained, else with 1."""
    parser = argparse.ArgumentParser(
        prog="python -m rtrain.cluster.spot_watcher", description="Drain a spot node in time."
    )
    parser.add_argument("cloud", choices=[*CLOUDS, "now"])
    parser.add_argument("--address", help="HOST:PORT of the head; default: that of the node that runs here")
    parser.add_argument("--metadata", default=LINK_LOCAL, help="address of the metadata service")
    parser.add_argument("--every", type=float, help="seconds from one look to the next")
    parser.add_argument("--seconds", type=float, default=60.0, help="now: seconds until the node is gone")
    parser.add_argument(
        "--on-rebalance", choices=["log", "drain"], default="log", help="AWS: what a recommendation does"
    )
    parser.add_argument("--lock", type=Path, default=Path(tempfile.gettempdir()) / "rtrain-spot.lock")
    parser.add_argument("--wait", action="store_true", help="now: end when the node's processes have, or at its end")
    given = parser.parse_args(arguments)
    if given.cloud == "now":
        notice = Notice("the node is ended", time.time() + given.seconds)
        drained = drain(notice, given.address, _say, GONE_S)
        if given.wait and drained:
            await_end(notice)
        sys.exit(0 if drained else 1)
    given.lock.parent.mkdir(parents=True, exist_ok=True)
    with given.lock.open("a+") as lock:
        if not take_over(lock, _say):
            sys.exit(1)
        cloud = CLOUDS[given.cloud]
        look, every = cloud.look(Service(given.metadata)), given.every or cloud.every_s
        _say(f"asking {given.metadata} each {every:g} s")
        notice = wait(look, every, _say, lambda one: one.is_final or given.on_rebalance == "drain")
        seconds = notice.deadline - time.time()
        _say(f"{notice.what}: {seconds:.0f} s from now" if notice.is_final else notice.what)
        if not notice.is_final:  # it names the time at which it was given, not an end
            notice = notice._replace(deadline=time.time() + given.seconds)
        sys.exit(0 if drain(notice, given.address, _say) else 1)


if __name__ == "__main__":
    main()
