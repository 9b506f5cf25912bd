"""Wait for the preemption notice of a spot node, and drain the node before it ends.

python -m rtrain.cluster.spot_watcher aws|gcp|azure [--address HOST:PORT] [--on-rebalance drain]
python -m rtrain.cluster.spot_watcher now --seconds 60 [--wait]

A background command of a cluster file starts it on each spot node whenever Ray starts there. It stops a previous
watcher, which `ray stop` leaves running and which may know the address of a head that is gone. When a node drains, a
run saves a checkpoint after the current step and resumes without the node, so that no step is lost. `now` drains at
once, for other ways to stop a node, such as a pod's preStop hook. Until the notice only this module and the standard
library are imported: it runs beside a training for days.
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
METADATA_TIMEOUT_S = 2.0
"""Timeout in seconds of the metadata service, which is local."""
DRAIN_TIMEOUT_S = 10.0
"""Timeout in seconds of the head."""
RETRY_INTERVAL_S = 1.0
STARTUP_GRACE_S = 5.0
"""Seconds in which a pod's Ray processes may still start, if the drain request comes first."""
LOCK_TIMEOUT_S = 10.0
"""Seconds in which a previous watcher must end."""
TOKEN_TTL_S = 21600


class PreemptionNotice(NamedTuple):
    """A notice of the cloud about this machine."""

    reason: str
    deadline: float
    """Seconds since 1970."""
    is_final: bool = True
    """Whether the machine will be preempted; otherwise it only may be."""


Poller = Callable[[], PreemptionNotice | None]
"""Polls a cloud's metadata service once. Raises OSError if it does not respond."""


class MetadataService:
    """A metadata service at `base_url`, without proxy: the address is local."""

    def __init__(self, base_url: str = LINK_LOCAL):
        self._base_url = base_url.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def fetch(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """The response text; None for status 404."""
        request = urllib.request.Request(f"{self._base_url}{path}", headers=dict(headers), method=method)
        try:
            with self._opener.open(request, timeout=METADATA_TIMEOUT_S) as response:
                return str(response.read(1 << 20).decode("utf-8"))
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
            raise


@dataclass
class AwsPoller:
    """EC2 instance metadata, version 2: two minutes' notice, and an earlier rebalance recommendation."""

    service: MetadataService
    _token: str | None = field(default=None, init=False)

    def __call__(self) -> PreemptionNotice | None:
        if (body := self._get("/latest/meta-data/spot/instance-action")) is not None:
            action = json.loads(body)
            return PreemptionNotice(f"spot {action['action']}", datetime.fromisoformat(action["time"]).timestamp())
        if (body := self._get("/latest/meta-data/events/recommendations/rebalance")) is not None:
            noticed_at = datetime.fromisoformat(json.loads(body)["noticeTime"]).timestamp()
            return PreemptionNotice("rebalance recommended", noticed_at, is_final=False)
        return None

    def _get(self, path: str) -> str | None:
        for is_first_try in (True, False):
            if self._token is None:
                ttl_header = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
                self._token = self.service.fetch("/latest/api/token", ttl_header, method="PUT")
            try:
                return self.service.fetch(path, {"X-aws-ec2-metadata-token": self._token or ""})
            except urllib.error.HTTPError as error:
                if error.code != 401 or not is_first_try:
                    raise
                self._token = None  # the token expired
        raise AssertionError("the second answer is given or raised")


@dataclass
class GcpPoller:
    """Compute Engine: reports a preemption 30 seconds before the machine is gone."""

    service: MetadataService
    notice_s: float = 30.0

    def __call__(self) -> PreemptionNotice | None:
        body = self.service.fetch("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return PreemptionNotice("preempted", time.time() + self.notice_s) if body and body.strip() == "TRUE" else None


@dataclass
class AzurePoller:
    """Azure scheduled events: a spot eviction is announced 30 seconds before."""

    service: MetadataService
    notice_s: float = 30.0
    _instance_name: str | None = field(default=None, init=False)

    def __call__(self) -> PreemptionNotice | None:
        body = self._get("/metadata/scheduledevents?api-version=2020-07-01")
        for event in json.loads(body or "{}").get("Events", []):
            is_final = event.get("EventType") in ("Preempt", "Terminate")
            if is_final and self._names_this_instance(event.get("Resources") or []):
                not_before = event.get("NotBefore")
                deadline = parsedate_to_datetime(not_before).timestamp() if not_before else time.time() + self.notice_s
                return PreemptionNotice(f"scheduled event {event['EventType']}", deadline)
        return None

    def _names_this_instance(self, resources: Sequence[str]) -> bool:
        if self._instance_name is None:
            self._instance_name = self._get("/metadata/instance/compute/name?api-version=2021-02-01&format=text")
        return not resources or self._instance_name is None or self._instance_name in resources

    def _get(self, path: str) -> str | None:
        return self.service.fetch(path, {"Metadata": "true"})


POLLERS: dict[str, tuple[Callable[[MetadataService], Poller], float]] = {
    "aws": (AwsPoller, 2.0),
    "gcp": (GcpPoller, 1.0),
    "azure": (AzurePoller, 1.0),
}
"""The poller of each cloud, and its interval in seconds: a small fraction of the notice period."""


def poll_until_notice(
    poll: Poller, interval_s: float, log: Callable[[str], None], is_final: Callable[[PreemptionNotice], bool]
) -> PreemptionNotice:
    """Poll until a notice satisfies `is_final`; other notices and failures of the service are logged once."""
    logged_messages: set[str] = set()

    def log_once(text: str) -> None:
        if text not in logged_messages:
            logged_messages.add(text)
            log(text)

    while True:
        try:
            notice = poll()
        except Exception as error:  # of any kind: nobody would restart the watcher
            log_once(f"the metadata service failed ({type(error).__name__}: {error}); retrying")
        else:
            if notice is not None and is_final(notice):
                return notice
            if notice is not None:
                log_once(f"{notice.reason}: ignored until the notice")
        time.sleep(interval_s)


def drain_node(
    notice: PreemptionNotice, address: str | None, log: Callable[[str], None], startup_grace_s: float | None = None
) -> list[str]:
    """Drain this machine's node, with retries until the deadline. Returns the node ids. With `startup_grace_s` it gives
    up after that time if no Ray process runs here: there is nothing to drain."""
    from rtrain import ray_internals  # the first heavy import: Ray

    start_time = time.monotonic()
    while True:
        try:
            head_address = address or ray_internals.local_cluster_address()
            instance_id = os.environ.get("RAY_CLOUD_INSTANCE_ID")
            node_ids = []
            if head_address:
                node_ids = ray_internals.drain_local_nodes(
                    head_address, instance_id, notice.reason, notice.deadline, DRAIN_TIMEOUT_S
                )
            failure = "no Ray node runs on this machine"
        except Exception as error:  # of any kind: retry until the deadline
            node_ids, failure = [], f"{type(error).__name__}: {error}"
        if node_ids:
            end_time = time.strftime("%H:%M:%S UTC", time.gmtime(notice.deadline))
            log(f"drained until {end_time}: {', '.join(node_ids)}")
            return node_ids
        has_waited = startup_grace_s is not None and time.monotonic() - start_time >= startup_grace_s
        is_gone = has_waited and not ray_internals.local_node_ids()
        if is_gone or time.time() + RETRY_INTERVAL_S > notice.deadline:
            log(f"not drained: {failure}")
            return []
        time.sleep(RETRY_INTERVAL_S)


def acquire_lock(lock: IO[str], log: Callable[[str], None]) -> bool:
    """Lock the file and write this process's id into it, after stopping the process that holds it. Returns whether that
    succeeded."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder_pid = lock.read().strip()
            if time.monotonic() > deadline or not holder_pid.isdigit():
                log(f"another watcher does not stop: process {holder_pid or 'unknown'} holds {lock.name}")
                return False
            with suppress(ProcessLookupError):
                os.kill(int(holder_pid), signal.SIGTERM)
            time.sleep(0.1)
        else:
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            return True


def wait_for_node_exit(notice: PreemptionNotice) -> None:
    """Wait until the drained node's processes have ended, or until the deadline."""
    from rtrain import ray_internals

    while time.time() < notice.deadline and ray_internals.local_node_ids():
        time.sleep(RETRY_INTERVAL_S)


def _log(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} rtrain spot: {text}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Exit with 0 once the node is drained, else with 1."""
    prog = "python -m rtrain.cluster.spot_watcher"
    parser = argparse.ArgumentParser(prog=prog, description="Drain a spot node in time.")
    parser.add_argument("cloud", choices=[*POLLERS, "now"])
    parser.add_argument("--address", help="HOST:PORT of the head; default: the local node's")
    parser.add_argument("--metadata", default=LINK_LOCAL, help="address of the metadata service")
    parser.add_argument("--every", type=float, help="polling interval in seconds")
    parser.add_argument("--seconds", type=float, default=60.0, help="now: seconds until the node is gone")
    parser.add_argument(
        "--on-rebalance", choices=["log", "drain"], default="log", help="AWS: action on a rebalance recommendation"
    )
    parser.add_argument("--lock", type=Path, default=Path(tempfile.gettempdir()) / "rtrain-spot.lock")
    parser.add_argument(
        "--wait", action="store_true", help="now: exit once the node's processes have ended, or at the deadline"
    )
    options = parser.parse_args(arguments)
    if options.cloud == "now":
        notice = PreemptionNotice("the node is ended", time.time() + options.seconds)
        drained_nodes = drain_node(notice, options.address, _log, STARTUP_GRACE_S)
        if options.wait and drained_nodes:
            wait_for_node_exit(notice)
        sys.exit(0 if drained_nodes else 1)
    options.lock.parent.mkdir(parents=True, exist_ok=True)
    with options.lock.open("a+") as lock:
        if not acquire_lock(lock, _log):
            sys.exit(1)
        make_poller, default_interval_s = POLLERS[options.cloud]
        poll, interval_s = make_poller(MetadataService(options.metadata)), options.every or default_interval_s
        _log(f"asking {options.metadata} each {interval_s:g} s")
        drains_early = options.on_rebalance == "drain"
        notice = poll_until_notice(poll, interval_s, _log, lambda notice: notice.is_final or drains_early)
        seconds_left = notice.deadline - time.time()
        _log(f"{notice.reason}: {seconds_left:.0f} s from now" if notice.is_final else notice.reason)
        if not notice.is_final:  # the time of the recommendation, not of an end
            notice = notice._replace(deadline=time.time() + options.seconds)
        sys.exit(0 if drain_node(notice, options.address, _log) else 1)


if __name__ == "__main__":
    main()
