"""What hangs, what Ray itself loses, and more than can be answered: an endpoint under load by real clients. By hand:
the figures are on stderr."""

import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.serve import load as loops
from rtrain.cluster import session
from rtrain.config import Serve
from serve.deployment import start
from tests.test_serve_deployment import openvino_artifact
from tests.test_serve_lossless import tell, wait_for
from tests.test_serve_rollout import ROOT, command, load, replicas

pytestmark = [pytest.mark.slow, pytest.mark.serve]

NAMES = ("rtrain_requests", "rtrain_haproxy_errors")
LONG = "where is my parcel " * 2000
"""A text that takes so long that a client of this machine can ask for more than the engine does."""


@pytest.mark.usefixtures("ray_session")
def test_a_replica_that_hangs_is_passed_by_and_replaced(tmp_path: Path) -> None:
    """What it has in hand is lost at the deadline, which a client meets once: HAProxy passes it by after two questions
    without an answer, 8 s at most, and the 504 comes 2 s after the deadline."""
    with (
        start(openvino_artifact(tmp_path), Serve(ungated=True, port=0, replicas=2, deadline_s=7)) as endpoint,
        load(endpoint.port, pause_s=0.02, again_s=0) as seen,
    ):
        time.sleep(2)
        victim = replicas()[0]
        victim.suspend()
        time.sleep(15)
        late = len(seen.errors)
        victim.wait(60)
        back = 15 + wait_for(2)
        time.sleep(2)
        assert len(seen.errors) == late, "it is not passed by"
    tell("one of two replicas hangs", seen, back_s=round(back, 1))
    assert seen.again == []


@pytest.mark.usefixtures("ray_session")
def test_more_than_can_be_answered_is_refused_at_once_and_what_is_accepted_is_answered(tmp_path: Path) -> None:
    with start(openvino_artifact(tmp_path), Serve(ungated=True, port=0, max_queue_rows=32)) as endpoint:
        url = f"{endpoint.url}/predict"

        def ask_for(seconds: float) -> int:
            give_up, answered = time.monotonic() + seconds, 0
            with httpx.Client(timeout=60, trust_env=False) as client:
                while time.monotonic() < give_up:
                    answered += client.post(url, json={"inputs": LONG}).status_code == 200
            return answered

        with ThreadPoolExecutor(4) as pool:
            most = sum(pool.map(ask_for, [5.0] * 4)) / 5.0
        seen = 0
        for factor in (4, 20):
            before = replicas()[0].memory_info().rss
            found = loops.opened_on(None, url=url, texts=[LONG], rate=factor * most, seconds=8.0, void=False)
            grown = (replicas()[0].memory_info().rss - before) / 1e6
            counts = {status: len(ms) for status, ms in sorted(found.ms.items())}
            times = {status: round(found.percentile(0.99, status)) for status in found.ms}
            told = {"capacity": round(most, 1), "p99_ms": times, "memory_mb": round(grown), "late": found.share_late()}
            sys.stderr.write(f"\n{factor} times the load: {counts}, {told}\n")
            seen += counts[503] + found.again.get(503, 0)
            cut = counts.pop(0, 0)  # refused before their bodies were whole
            assert cut <= 0.01 * found.requests
            assert set(counts) <= {200, 503, 504}
            assert counts[200] > 0
            assert counts[503] > 0
        metrics = httpx.get(f"{endpoint.url}/metrics", trust_env=False).text
        by = {
            name: sum(map(float, re.findall(rf'^{name}_total{{.*status="503"}} (.*)$', metrics, re.M)))
            for name in NAMES
        }
        sys.stderr.write(f"\n{seen} refusals, counted: {by}\n")
        assert seen <= sum(by.values()) <= 1.01 * seen + 50  # some were cut, or asked while the capacity was measured


@pytest.mark.parametrize("told_after_s", [5, None])
def test_an_endpoint_whose_cluster_store_dies_answers_on_and_ends_with_nothing_left(
    tmp_path: Path, told_after_s: float | None
) -> None:
    """Ray's GCS keeps what there is in its memory: Ray waits a minute for another one, and ends its processes then. The
    command is before that, whether it is told to end or not."""
    words = command(str(openvino_artifact(tmp_path)), "--ungated", "--port", "0")
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"serving .* at http://127\.0\.0\.1:(\d+) ", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        started = psutil.Process(process.pid).children(recursive=True)
        [folder] = {Path(word).parent for one in started for word in one.cmdline() if word.endswith("/haproxy.cfg")}
        with load(int(found[1]), pause_s=0.02) as seen:
            time.sleep(2)
            [store] = [one for one in started if one.name().startswith("gcs_server")]
            store.kill()
            time.sleep(told_after_s or session.KEPT_S - 5)
        assert process.poll() is None
        if told_after_s:
            process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=120)[1]
    _, left = psutil.wait_procs(started, timeout=60)
    names = [one.name() for one in left]
    for one in left:
        one.kill()
    tell("the cluster store killed", seen, code=process.returncode, said=err.splitlines()[-1:])
    assert seen.errors == []
    assert (names, folder.exists()) == ([], False)
    assert process.returncode == (143 if told_after_s else 1)
