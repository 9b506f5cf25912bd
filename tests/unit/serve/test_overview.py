"""What `rtrain serve status` prints."""

from typing import Any

from serve.rollout import admin_socket, canary
from serve.rollout.controller import CanaryRun

DRIFT = {"distances": {"tokens": 0.05, "score": 0.31}, "alarm": True, "rows": 100}


def replica(version: str | None, name: int = 1, **fields: Any) -> dict[str, Any]:
    if version is None:
        return {"process": 7, "version": None}
    defaults = {
        "requests": {"200": 1200, "503": 3},
        "inputs": 1300,
        "queue": {"rows": 2, "tokens": 40},
        "ready": True,
        "drift": DRIFT,
        "candidate": None,
    }
    return {"process": 7, "replica": str(name), "version": version, **defaults, **fields}


def test_all_is_told_in_a_line_each() -> None:
    replicas = [replica("old", 1, requests={"200": 1250}), replica("new", 3)]
    standing = CanaryRun(
        "new", canary.CanaryPolicy(0.2, 500, 0.9, 1.25, 600.0), canary.CanaryState(0.0, "weighted", 1, reason="fine")
    )
    standing.stats, standing.ratio = canary.CanaryStats(500, 490, 3, 0, 80, 1), 0.98
    status_text = admin_socket.format_status(
        {
            "address": "http://127.0.0.1:8000",
            "models": [
                {
                    "name": "tiny",
                    "artifact": "/models/old",
                    "canary": standing.to_document(),
                    "replicas": [*replicas, replica(None, 4)],
                }
            ],
        }
    )
    assert status_text.splitlines() == [
        "tiny at http://127.0.0.1:8000",
        "artifact   /models/old",
        "version    old (1 of 3), new (1 of 3), starting (1 of 3)",
        "candidate  new: answers 25% of the requests (fine)",
        "           500 of 500 texts, the same answer to 490, 0.98 times as long",
        "           80 requests answered, 1 of them with 500 or above",
        "replicas   2 of 3 up, 2 ready",
        "queue      4 texts, 80 tokens",
        "requests   2,450 with 200, 3 with 503",
        "drift      unknown input; score 0.31, tokens 0.05",
    ]


def test_without_a_trial_or_a_reference_it_says_less() -> None:
    replicas = [replica("old", requests={}, drift=None)]
    model = {"name": "t", "artifact": "f", "canary": None, "replicas": replicas}
    lines = admin_socket.format_status({"address": "a", "models": [model, {**model, "name": "u"}]}).splitlines()
    assert [lines[0], *lines[7:9]] == ["t at a", "", "u at a"]
    assert lines[3:7] == [
        "replicas   1 of 1 up, 1 ready",
        "queue      2 texts, 40 tokens",
        "requests   none",
        "drift      not measured: the artifact has no baseline",
    ]
