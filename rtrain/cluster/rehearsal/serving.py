"""The endpoint of a rehearsal: the run's artefact, served on the cluster and asked while a node with a replica is lost.

Each answer is set beside that of `rtrain predict`. Then the job is stopped, while requests come in: what was accepted
must be answered.
"""

import json
import threading
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from itertools import cycle, islice
from typing import Any, Literal

import numpy as np

from rtrain import artifact
from rtrain.cluster.jobs import naming, upload
from rtrain.cluster.rehearsal import ports
from rtrain.cluster.rehearsal.faults import REPLICA, machines_with
from rtrain.cluster.rehearsal.following import LOOK_EVERY_S, Broken, Follower, Say
from rtrain.cluster.rehearsal.measured import Served
from rtrain.cluster.rehearsal.plan import Plan
from rtrain.cluster.rehearsal.up import Up, free_ports
from rtrain.data.stores.store import Store
from rtrain.predict import Predictor
from rtrain.run import Run
from rtrain.tasks.base import Input

ASKED = 20
"""Requests whose answers are compared."""
WITHIN_S = 60.0
"""Seconds in which a request must be answered that was refused while a node was lost."""
AGAIN_S = 0.2
ANSWER_S = 30.0
STOPPED_WITHIN_S = 120.0
MOST_THREADS = 16
"""Most threads of a replica that takes a node for itself: more would only be in each other's way on this machine."""
TOLERANCE = 1e-5
"""Most that a number of an answer may differ: what it is computed beside, and by how many threads, rounds otherwise."""

Outcome = Literal["answered", "refused", "cut"]
"""`refused`: nobody took the request, or it was told to come again; `cut`: it was taken, and not answered."""


def replicas_of(plan: Plan) -> tuple[int, int]:
    """How many replicas are served, and the threads of each: two, on a node each, where the file allows for that. A
    replica reserves a CPU for each of its threads."""
    cpus = [int(kind.resources.get("CPU", 0)) for kind in plan.kinds for _ in range(kind.most)]
    whole = max(cpus, default=0)
    if not 1 <= whole <= MOST_THREADS:
        return 1, 1
    return min(2, plan.most, sum(number == whole for number in cpus)), whole


def words_of(words: Sequence[str], folder: str, port: int, replicas: int, threads: int) -> list[str]:
    """The command that serves the artefact in `folder`, with what the rehearsed command says of serving; but where it
    listens."""
    settings = [f"serve.replicas={replicas}", f"serve.threads={threads}"]
    settings += [one for one in naming.assignments(words) if one.startswith("serve.")]
    settings += ["serve.host=127.0.0.1", f"serve.port={port}"]
    return ["serve", folder, *(word for setting in settings for word in ("--set", setting))]


def rehearsed(made: Up, words: Sequence[str], run: Run, files: upload.Upload, follower: Follower, say: Say) -> Served:
    """Serve a finished run. Raises `Broken` where the job ends before it answers."""
    [port] = free_ports(1)
    replicas, threads = replicas_of(made.plan)
    follower.expect(port, ports.ENDPOINT)
    inputs, expected = answers_of(run)
    begin = time.monotonic()
    job = made.jobs.submit(
        words_of(words, str(run.artifact), port, replicas, threads), files, lambda text: say(f"endpoint: {text}")
    )
    _await_ready(made, job, follower)
    seconds = time.monotonic() - begin
    on = machines_with(made, REPLICA)
    say(f"endpoint: answers, from {len(on)} nodes")
    lost = min(on) if len(on) > 1 else None
    right, refused, longest = [], 0, 0.0
    for number, one in enumerate(inputs):
        if lost is not None and number == len(inputs) // 2:
            say(f"endpoint: {lost} is cut off")
            made.cloud.cut(lost)
        asked = time.monotonic()
        answer, again = _answered(port, one)
        refused, longest = refused + again, max(longest, time.monotonic() - asked)
        if answer is not None:
            right.append(same(answer, expected[number]))
        follower.look()
    stopped_s, cut = _stopped(made, job, port, inputs[0], follower)
    say("endpoint: stopped")
    return Served(
        seconds=round(seconds, 1),
        replicas=replicas,
        nodes=len(on),
        asked=len(inputs),
        answers=len(right),
        equal=sum(right),
        refused=refused,
        lost=lost,
        longest_s=round(longest, 2),
        stopped_s=round(stopped_s, 1),
        cut=cut,
    )


def answers_of(run: Run) -> tuple[list[Input], list[Any]]:
    """What the endpoint is asked, rows that the run has held back, and what `rtrain predict` answers."""
    predictor = Predictor.load(run.artifact)
    store = Store(run.store) if run.store else None
    texts = list[str]()
    for split in ("test", "valid"):
        if store is not None and not texts:
            rows = store.texts(split, np.arange(min(ASKED + 1, store.rows(split))))
            texts = [one[0] for one in rows if one and one[0].strip()]
    own = predictor.task.asks(texts or artifact.GOLDEN_INPUTS, predictor.head)
    inputs = list(islice(cycle(own or predictor.task.asks(artifact.GOLDEN_INPUTS, predictor.head)), ASKED))
    return inputs, [answer for one in inputs for answer in json.loads(json.dumps(predictor([one])))]


def same(found: object, expected: object) -> bool:
    """Whether two answers are equal, their numbers up to rounding."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in found)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, float) or isinstance(expected, float):
        return (
            isinstance(found, int | float) and isinstance(expected, int | float) and abs(found - expected) <= TOLERANCE
        )
    return found == expected


def ask(port: int, value: Input, timeout_s: float = ANSWER_S) -> tuple[Outcome, Any]:
    """One request, and the answer to it."""
    connection = HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.connect()
    except OSError:
        return "refused", None
    try:
        connection.request("POST", "/predict", json.dumps({"inputs": [value]}), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        document = json.loads(reply.read() or b"null")
    except (OSError, HTTPException, ValueError):
        return "cut", None
    finally:
        connection.close()
    if reply.status == 200:
        return "answered", document[0]
    return ("refused" if reply.status == 503 else "cut"), document


def _answered(port: int, value: Input) -> tuple[Any, int]:
    """The answer to a request that is asked again where it gets none; and how often it was. None where there is none in
    time."""
    again, give_up = 0, time.monotonic() + WITHIN_S
    while True:
        outcome, answer = ask(port, value)
        if outcome == "answered":
            return answer, again
        if time.monotonic() > give_up:
            return None, again
        again += 1
        time.sleep(AGAIN_S)


def _await_ready(made: Up, job: str, follower: Follower) -> None:
    while not any(line.startswith("serving ") for line in made.jobs.logs(job).splitlines()):
        follower.look()
        if (status := follower.status(job)) in naming.ENDED:
            raise follower.failed(job, "the endpoint", status)
        time.sleep(LOOK_EVERY_S)


def _stopped(made: Up, job: str, port: int, value: Input, follower: Follower) -> tuple[float, int]:
    """Stop the job while requests come in, one after another; the seconds until it has ended, and how many of them were
    cut."""
    counts: dict[Outcome, int] = {"answered": 0, "refused": 0, "cut": 0}
    begun = threading.Event()

    def client() -> None:
        while counts["refused"] == 0 and counts["cut"] == 0:
            counts[ask(port, value)[0]] += 1
            begun.set()

    thread = threading.Thread(target=client, name="rtrain-client", daemon=True)
    thread.start()
    begun.wait()
    begin = time.monotonic()
    made.jobs.stop(job)
    give_up = begin + STOPPED_WITHIN_S
    while follower.status(job) not in naming.ENDED:
        if time.monotonic() > give_up:
            raise Broken(f"the endpoint's job {job} has not ended {STOPPED_WITHIN_S:.0f} s after it was told to")
        follower.look()
        time.sleep(LOOK_EVERY_S)
    seconds = time.monotonic() - begin
    thread.join(ANSWER_S)
    return seconds, counts["cut"]
