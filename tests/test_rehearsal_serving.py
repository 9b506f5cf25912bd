"""The endpoint of a rehearsal: how it is asked for, asked, and how its answers are compared."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain.cluster.rehearsal import plan as plans, serving
from rtrain.cluster.rehearsal.up import free_ports
from rtrain.run import Run
from tests.tiny import make_artifact

TEXT = (Path(__file__).resolve().parents[1] / "cluster.yaml").read_text(encoding="utf-8")


def plan(**worker: Any) -> plans.Plan:
    document = yaml.safe_load(TEXT)
    document["available_node_types"]["worker"] |= worker
    return plans.of(yaml.safe_dump(document))


def test_a_replica_takes_a_node_for_itself_where_the_file_has_two() -> None:
    assert serving.replicas_of(plan()) == (2, 8)
    assert serving.replicas_of(plan(max_workers=1)) == (1, 8)
    assert serving.replicas_of(plan(resources={"CPU": 64})) == (1, 1)  # 64 threads would stand in each other's way
    small = plan(resources={"CPU": 2})
    [kind] = small.kinds
    mixed = replace(small, kinds=(kind, replace(kind, name="large", resources={"CPU": 4.0}, most=1)))
    assert serving.replicas_of(mixed) == (1, 4)


def test_what_the_command_says_of_serving_is_kept_but_for_where_it_listens() -> None:
    words = ["train", "intent", "--set", "serve.labels={for: answers}", "--set=serve.replicas=3", "--set", "optim.lr=1"]
    made = serving.words_of([*words, "--set", "serve.host=0.0.0.0"], "/run/artifact", 8123, 2, 8)
    assert made[:2] == ["serve", "/run/artifact"]
    assert made[3::2] == [
        *("serve.replicas=2", "serve.threads=8", "serve.labels={for: answers}", "serve.replicas=3"),
        *("serve.host=0.0.0.0", "serve.host=127.0.0.1", "serve.port=8123"),
    ]


def test_answers_are_equal_up_to_rounding() -> None:
    answer = [{"label": "lost", "score": 0.25}, {"label": "found", "score": 1}]
    assert serving.same(json.loads(json.dumps(answer)), answer)
    assert serving.same([{"label": "lost", "score": 0.250001}, {"label": "found", "score": 1.0}], answer)
    for other in (
        [{"label": "lost", "score": 0.2501}, {"label": "found", "score": 1}],
        [{"label": "last", "score": 0.25}, {"label": "found", "score": 1}],
        [{"label": "lost", "score": "0.25"}, {"label": "found", "score": 1}],
        [{"label": "lost"}, {"label": "found", "score": 1}],
        answer[:1],
        None,
    ):
        assert not serving.same(other, answer)


def test_an_artefact_without_rows_is_asked_what_every_artefact_is(tmp_path: Path) -> None:
    make_artifact(tmp_path / "run" / "artifact", ("lost", "found"))
    inputs, expected = serving.answers_of(Run(tmp_path / "run"))
    assert len(inputs) == len(expected) == serving.ASKED
    assert {one["label"] for answer in expected for one in answer} <= {"lost", "found"}


# ------------------------------------------------------------------------------------------------------------- asking


@contextmanager
def endpoint(*replies: tuple[int, Any] | None) -> Iterator[int]:
    """Gives these replies one after another, the last one again and again; None cuts the connection."""
    left = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            reply = left.pop(0) if len(left) > 1 else left[0]
            if reply is None:
                self.connection.close()
                return
            body = json.dumps(reply[1]).encode()
            self.send_response(reply[0])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def test_a_request_is_answered_refused_or_cut() -> None:
    replies = ((200, ["yes"]), (503, {"error": "later"}), (500, {"error": "what"}), None)
    with endpoint(*replies) as port:
        assert serving.ask(port, "a") == ("answered", "yes")
        assert [serving.ask(port, "a")[0] for _ in range(3)] == ["refused", "cut", "cut"]
    [free] = free_ports(1)
    assert serving.ask(free, "a") == ("refused", None)


def test_what_is_not_answered_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "AGAIN_S", 0.01)
    with endpoint(None, (503, {}), (200, ["yes"])) as port:
        assert serving._answered(port, "a") == ("yes", 2)
    monkeypatch.setattr(serving, "WITHIN_S", 0.02)
    with endpoint((503, {})) as port:
        answer, again = serving._answered(port, "a")
    assert answer is None
    assert again >= 1
