"""What rtrain does today, by values: order, weights, ledger, int8 files, JSON of the commands, HTTP replies.

`tests/record.json` holds it, and `tests/ray/test_record.py` compares. `python -m tests.record --write` writes it anew,
from two collections: what differs between them is recorded as `*`. A change of a name alone goes into `RENAMED`.
"""

import asyncio
import contextlib
import hashlib
import io
import json
import math
import platform
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from safetensors.torch import load_file

from rtrain import config
from rtrain.cli import app as cli
from rtrain.config import Config, DistillConfig, ServeConfig
from rtrain.core.ragged import Head
from rtrain.core.run_folder import Run
from rtrain.data.order import RowOrder
from rtrain.data.store.store import Store
from rtrain.data.stream import StreamSpec, WorkerBatch, plan_worker_batch
from rtrain.inference.predictor import Predictor
from rtrain.models import builder, precision
from rtrain.parallel import layout
from rtrain.runs import controller, prepare
from rtrain.tasks import base
from rtrain.trainer import imbalance, losses, trainer
from serve.app import build_app
from tests.support.tiny import CORPUS, make_artifact, make_encoder, make_store, make_task_artifact

RECORD = Path(__file__).with_name("record.json")
RENAMED: dict[str, str] = {}
"""Recorded name (a key of JSON, a kind of event, a file, a metric) -> the name that it has now."""
ANY = "*"
"""Stands for a value that depends on the time, the machine or the folder."""
TOLERANCE = 1e-4
SEED = 3
EXACT = re.compile(r"^\.commands\.|\.(weights_sha256|int8_files|int8_logits|metrics|scores|best_step)(\.|$)")
"""Places whose values follow from the last bits of weights: compared on the recorded processor, with its torch."""
FAR = 0.02
"""Tolerance of numbers elsewhere."""
VOLATILE = re.compile(
    r"(^|[._])(s|ms|seconds|train_s|p50|p99|low|high|ratio|speedup|time|host|git|python|rtrain|versions?|made|megabytes"
    r"|bytes|mb|gb|memory|cores|threads|processor|machine|machines|price|cost|latency|mib|noise|model_bytes|peak\w*"
    r"|hours|money|pace|sizes?|path|store|page|run|folder|rivals|baselines|reasons|stages|instance|text|sha256"
    r"|calibration|recipe|parent|began|clean_frees|files|why|source|what|against\.rows\.(name|order))($|[._])"
)
"""Places in the JSON of commands whose values depend on the time or the machine, though two collections may agree."""

# ------------------------------------------------------------------------------------------------- rows of every task

WORDS = {"refund": ("money back", "refund"), "parcel": ("parcel", "delivery"), "login": ("password", "sign in")}
ROWS = 96
SETTINGS: dict[str, Any] = {
    "train.workers": 2,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 16,
    "train.aggregation_frequency": None,
    "train.epochs": 2,
    "train.precision": "fp32",
    "train.seed": SEED,
    "train.log_every": 1,
    "optim.lr": 3e-3,
    "gate.latency_seconds": 0.2,
    "gate.min_speedup": 0.0,
    "quantize.calibration_rows": 16,
}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "classification": ("intent", {"data.label": "topic", "data.slices": ["mood"]}),
    "multi_label": ("intent", {"data.label": "topics", "data.separator": "|"}),
    "multi_head": ("intent", {"data.label": ["topic", "mood"]}),
    "regression": (
        "essay",
        {
            "data.text": "text",
            "data.text_pair": None,
            "data.label": "stars",
            "data.group_column": None,
            "data.max_tokens": 64,
        },
    ),
    "token_tags": ("entities", {"data.max_tokens": 16, "data.stride": 4}),
    "span_qa": ("squad", {"data.window": 48, "data.stride": 12, "data.group_column": None}),
    "extractive_summary": ("summary", {"data.window": 32, "data.stride": 8}),
    "masked_lm": ("domain-adapt", {"data.max_tokens": 48}),
}
"""By task: a recipe and the settings by which it reads the rows."""
HEADS = {
    "classification": Head(("a", "b", "c")),
    "multi_label": Head(("a", "b", "c"), {"thresholds": dict.fromkeys("abc", 0.5)}),
    "multi_head": Head(("intent=buy", "intent=sell", "mood=bad", "mood=good"), {"heads": [["intent", 2], ["mood", 2]]}),
    "regression": Head(("score",), {"mean": 6.0, "std": 1.5, "lowest": 1.0, "highest": 9.0, "step": 0.5}),
    "token_tags": Head(("O", "B-ORG", "B-PER", "I-ORG", "I-PER")),
    "span_qa": Head(("start", "end"), {"no_answer": False}),
    "extractive_summary": Head(("left out", "taken"), {"max_words": 30}),
    "masked_lm": Head((), {"mask": "[MASK]", "mask_id": 4, "special": [0, 1, 2, 3, 4], "vocabulary": 300}),
}


def write_rows(task: str, folder: Path) -> Path:
    """A file of rows for a task; every value is a function of the row's number."""
    if task == "token_tags":
        words = ("please", "send", "it", "to", "anna", "berg", "in", "london")
        tags = ("O", "O", "O", "O", "B-PER", "I-PER", "O", "B-LOC")
        sentences = (
            [
                f"{word}\t{tag}"
                for word, tag in zip((f"n{number}", *words[number % 4 :]), ("O", *tags[number % 4 :]), strict=True)
            ]
            for number in range(ROWS)
        )
        return _written(folder / "rows.conll", "\n\n".join("\n".join(lines) for lines in sentences) + "\n")
    if task == "span_qa":
        return _written(folder / "rows.json", json.dumps({"version": "v2.0", "data": [*map(_article, range(ROWS))]}))
    if task == "extractive_summary":
        documents = (
            {
                "text": f"Number {n} is here. "
                + " ".join(f"{CORPUS[(n + k) % 9].capitalize()}." for k in range(2 + n % 4)),
                "summary": CORPUS[(n + 1) % 9],
            }
            for n in range(ROWS)
        )
        return _written(folder / "rows.jsonl", "\n".join(map(json.dumps, documents)))
    lines = ["text,topic,mood,topics,stars"]
    for number in range(ROWS):
        topic = sorted(WORDS)[number % 3]
        both = f"{topic}|urgent" if number % 4 == 0 else topic
        text = f"please help with {WORDS[topic][number // 3 % 2]} {'again and ' * (number % 5)}number {number}"
        lines.append(f"{text},{topic},{('good', 'bad')[number % 2]},{both},{1 + number % 7}")
    return _written(folder / "rows.csv", "\n".join(lines) + "\n")


def _article(number: int) -> dict[str, Any]:
    context = f"number {number}. the parcel was due on monday, and {CORPUS[number % 9]}."
    answers = [] if number % 3 == 2 else [{"text": "monday", "answer_start": context.index("monday")}]
    question = {"id": str(number), "question": f"when {number}?", "answers": answers, "is_impossible": not answers}
    return {"title": f"t{number}", "paragraphs": [{"context": context, "qas": [question]}]}


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def settings(task: str, folder: Path) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    recipe, columns = TASKS[task]
    data = {"task": task, "data.path": str(write_rows(task, folder)), "data.max_bad_rows": 0.5}
    return config.load_config(
        recipe, {**SETTINGS, **data, **columns, "model.name": str(make_encoder(folder / "encoder"))}
    )


# --------------------------------------------------------------------------------------------------- order and stores


def order() -> dict[str, Any]:
    """Which rows make which update, for a few sizes; the last has more rows than are shuffled as a whole."""
    made = {}
    for rows, batch, epochs, seed in ((1, 1, 1, 0), (100, 16, 2, 0), (1003, 32, 3, 7), (300_000, 256, 1, 1)):
        each = RowOrder("0" * 16, rows, batch, epochs, seed)
        first = [each.positions(number).tolist()[:12] for number in range(min(3, each.num_steps))]
        last = each.positions(each.num_steps - 1).tolist()[:12]
        facts = {"steps": each.num_steps, "per_epoch": each.steps_per_epoch, "identity": each.planned_digest}
        made[f"{rows} rows by {batch}, {epochs} epochs, seed {seed}"] = {**facts, "first": first, "last": last}
    return made


def store_facts(store: Store, folder: Path) -> dict[str, Any]:
    manifest = store.manifest
    splits = ("train", "valid", "test")
    ids = {split: store.column(split, "row_id")[:8].tolist() for split in splits}
    tokens = {split: store.read_tokens(split, np.arange(min(3, store.num_rows(split)))) for split in splits}
    return {
        "digest": manifest.digest,
        "rows": dict(manifest.rows),
        "row_ids": ids,
        "labels": list(manifest.labels),
        "facts": manifest.head.facts,
        "quarantined": manifest.quarantined,
        "truncated": manifest.truncated,
        "tokens": {split: _digest(np.ascontiguousarray(found.ids).tobytes()) for split, found in tokens.items()},
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def weights_facts(weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Of float32 weights: a digest, which depends on the processor, and sums, which hardly do."""
    whole = hashlib.sha256()
    for name in sorted(weights):
        whole.update(weights[name].detach().contiguous().numpy().tobytes())
    values = torch.cat([weights[name].detach().double().flatten() for name in sorted(weights)])
    sums = {"sum": round(float(values.sum()), 4), "norm": round(float(values.norm()), 5), "count": len(values)}
    return {"weights_sha256": whole.hexdigest(), **sums}


# ------------------------------------------------------------------------------------------------- one worker, no Ray


@dataclass
class Recorder:
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def score(self, metrics: dict[str, Any]) -> None:
        self.events.append(("score", metrics))

    def stop_requested(self) -> bool:
        return False


def train_alone(task_name: str, folder: Path) -> dict[str, Any]:
    """A run of one worker in this process: its store, and what its training came to."""
    recipe = settings(task_name, folder).recipe
    encoder, task = folder / "encoder", base.get_task(task_name)
    store = make_store(recipe, encoder, folder)
    ordered = RowOrder(
        store.manifest.digest, store.num_rows("train"), recipe.global_batch_size, recipe.train.epochs, SEED
    )
    network = builder.build_network(encoder, task, store.manifest.labels, SEED, recipe.model)
    imbalance.initialize_output_bias(network, recipe, task, store)
    precision.to_fp64_(network, "fp32")
    loss = losses.make_loss(task, DistillConfig(), store.manifest.head)
    job = trainer.TrainingContext(
        recipe, Run(folder / "alone"), store, task, loss, ordered, builder.pad_id(encoder), "fp32", ordered.num_steps
    )
    recorder = Recorder()
    exchange = layout.build_strategy(network, recipe.train, None, recorder.event)
    share = StreamSpec(store.folder, ordered, 1, 0, recipe.train.micro_batch_size)

    def updates(first: int, stop: int) -> Iterator[WorkerBatch]:
        return (plan_worker_batch(store, share, number) for number in range(first, stop))

    outcome = trainer.train(job, exchange, updates, recorder, trainer.Clock())
    ids = store.column("train", "row_id")
    return {
        "store": store_facts(store, folder),
        "identity": recipe.model_copy(
            update={"model": recipe.model.model_copy(update={"name": "minilm"})}
        ).recipe_digest(),
        "first_rows": [ids[ordered.positions(number)].tolist()[:6] for number in range(2)],
        "losses": [fields["loss"] for kind, fields in recorder.events if kind == "progress"],
        "events": event_fields({"kind": kind, **fields} for kind, fields in recorder.events),
        "ledger": outcome.ledger,
        "best_step": outcome.best_step,
        "scores": outcome.scores,
        **weights_facts(network.state_dict()),
    }


def event_fields(events: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Kinds of events and the names of their fields."""
    kinds: dict[str, set[str]] = {}
    for event in events:
        kinds.setdefault(event["kind"], set()).update(event.keys() - {"kind"})
    return {kind: sorted(names) for kind, names in kinds.items()}


# ------------------------------------------------------------------------------------------------ two workers under Ray


def train_under_ray(task: str, folder: Path, workers: Any) -> dict[str, Any]:
    prepared = prepare.prepare_run(settings(task, folder), folder / "run")
    summary = controller.fit(prepared, workers=workers, write_reports=task == "classification")
    run = Run(folder / "run")
    progress = run.events("progress")
    return {
        "losses": [event["loss"] for event in progress],
        "ledger": progress[-1]["ledger"],
        "rows": progress[-1]["rows"],
        "summary_keys": sorted(summary),
        "metrics": summary["metrics"],
        "best_step": summary["best_step"],
        **weights_facts(load_file(folder / "run" / "artifact" / "model.safetensors")),
    }


def command(*words: object) -> dict[str, Any]:
    """Exit code and JSON of a command."""
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main([str(word) for word in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return {"exit_code": code, "stdout": without_wording(json.loads(out.getvalue() or "null"))}


def commands(run: Path, other: Path) -> dict[str, Any]:
    """What is made of two finished runs of one kind of rows, by the commands that print JSON."""
    artifact, rows = run / "artifact", run.parent / "rows.csv"
    encoder = run.parent / "encoder"
    quick = ("--set", "gate.latency_seconds=0.2", "--set", "gate.min_speedup=0")
    answers = other.parent / "answers.jsonl"
    label = ("--label", "parcel", "--steps", 8)
    cluster = Path(__file__).parents[1] / "cluster.yaml"
    own = ("--data", rows, "--model", encoder, "--set", "data.label=topic", "--cluster", cluster)
    made: dict[str, Any] = {
        "quantize": command("quantize", run, *quick, "--set", "quantize.calibration_rows=16", "--json"),
        "quantize onnx": command(
            *("quantize", run, *quick, "--set", "quantize.engine=onnxruntime", "--set", "quantize.calibration_rows=16"),
            *("--out", run / "artifact-onnx", "--json"),
        ),
        "gate": command("gate", run / "artifact-int8", *quick, "--json"),
        "compare": command("compare", run, other, "--json"),
        "plan": command("plan", "intent", *own, "--json"),
        "inspect": command("inspect", artifact, "--json"),
        "evaluate": command("evaluate", artifact, "--data", rows, "--json"),
        "predict": command("predict", artifact, "where is my parcel", "--json"),
        "predict rows": command("predict", artifact, "--data", rows, "--out", answers, "--json"),
        "explain": command("explain", artifact, "where is my parcel", *label, "--json"),
        "verify ledger": command("verify", "--ledger", run, "--json"),
        "runs": command("runs", run.parent, "--json"),
        "refused": command("predict", run / "nothing", "a text", "--json"),
    }
    made["answers of rows"] = [json.loads(line) for line in answers.read_text("utf-8").splitlines()[:3]]
    return made


def artifact_facts(run: Path) -> dict[str, Any]:
    """Names of files and keys of documents of a run's folder, and digests of the int8 files."""
    checkpoint = max((run / "checkpoints").iterdir())
    document = json.loads((run / "artifact" / "artifact.json").read_text("utf-8"))
    return {
        "events": event_fields(Run(run).events()),
        "files_of_the_run": sorted(path.name for path in run.iterdir()),
        "files_of_a_checkpoint": sorted(path.name for path in checkpoint.iterdir()),
        "files_of_the_artifact": sorted(path.name for path in (run / "artifact").iterdir()),
        "files_of_the_int8_artifact": sorted(path.name for path in (run / "artifact-int8").iterdir()),
        "files_of_the_onnx_artifact": sorted(path.name for path in (run / "artifact-onnx").iterdir()),
        "artifact_json": {name: sorted(value) if isinstance(value, dict) else ANY for name, value in document.items()},
        "checkpoint_manifest": sorted(json.loads((checkpoint / "MANIFEST.json").read_text("utf-8"))),
        "checkpoint_state": sorted(json.loads((checkpoint / "state.json").read_text("utf-8"))),
        "int8_files": {
            f"{folder}/{path.name}": f"{path.stat().st_size} {_digest(path.read_bytes())}"
            for folder in ("artifact-int8", "artifact-onnx")
            for path in sorted((run / folder).iterdir())
            if path.suffix in (".bin", ".onnx")  # the graph of OpenVINO names the folder that it was made in
        },
        "int8_logits": {
            folder: np.round(np.stack(Predictor.load(run / folder, threads=1).logits([*CORPUS[:3]])), 4).tolist()
            for folder in ("artifact", "artifact-int8", "artifact-onnx")
        },
    }


def runs(folder: Path, workers: Any) -> dict[str, Any]:
    """All that needs Ray, with worker processes that all runs share."""
    made = {task: train_under_ray(task, folder / task, workers) for task in TASKS}
    run = folder / "classification" / "run"
    changed = config.with_overrides(settings("classification", folder / "classification"), {"optim.lr": 1e-4})
    controller.fit(prepare.prepare_run(changed, run.with_name("other")), workers=workers, write_reports=False)
    return {"two_workers": made, "commands": commands(run, run.with_name("other")), "folders": artifact_facts(run)}


# ------------------------------------------------------------------------------------------------------------ endpoint

TEXT = "where is my parcel"
KEY = "rtrain_3f9c0a1b_" + "A" * 43
HEADERS = ("content-type", "allow", "retry-after", "www-authenticate", "x-frame-options", "content-security-policy")
QUESTIONS = {"span_qa": {"question": "when was it due?", "context": CORPUS[0]}, "masked_lm": "where is my [MASK]"}


def tensor(data: list[Any], datatype: str = "BYTES", shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": "text", "shape": shape or [len(data)], "datatype": datatype, "data": data}


REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "/predict", {"inputs": TEXT}),
    ("POST", "/predict", {"inputs": [TEXT, CORPUS[1]]}),
    ("POST", "/predict", {"inputs": TEXT, "parameters": {"top_k": 1}}),
    ("POST", "/predict", {"inputs": TEXT, "parameters": {"top_k": 0}}),
    ("POST", "/predict", {"inputs": TEXT, "parameters": {"explain": True, "label": "a"}}),
    ("POST", "/predict", {"inputs": TEXT, "parameters": {"explain": True, "label": "z"}}),
    ("POST", "/predict", {"inputs": TEXT, "parameters": {"abstain": True}}),
    ("POST", "/predict", {"inputs": TEXT, "parameters": {"unknown": 1}}),
    ("POST", "/predict", {"inputs": []}),
    ("POST", "/predict", {"inputs": ""}),
    ("POST", "/predict", {"inputs": 5}),
    ("POST", "/predict", {"inputs": [TEXT] * 5}),
    ("POST", "/predict", {"inputs": "word " * 100}),
    ("POST", "/predict", {"inputs": "a" * 900}),
    ("POST", "/predict", {"inputs": "a" * 3000}),
    ("POST", "/predict", {"text": TEXT}),
    ("POST", "/predict", b"{"),
    ("POST", "/predict", b"\xff"),
    ("POST", "/predict", b""),
    ("GET", "/predict", None),
    ("GET", "/v2", None),
    ("GET", "/v2/health/live", None),
    ("GET", "/v2/health/ready", None),
    ("HEAD", "/v2/health/ready", None),
    ("GET", "/v2/models/tiny", None),
    ("GET", "/v2/models/tiny/ready", None),
    ("GET", "/v2/models/other", None),
    ("GET", "/v2/models/tiny/versions/0/ready", None),
    ("POST", "/v2/repository/index", {}),
    ("POST", "/v2/repository/index", {"ready": "no"}),
    ("POST", "/v2/models/tiny/infer", {"inputs": [tensor([TEXT])]}),
    (
        "POST",
        "/v2/models/tiny/infer",
        {"id": "7", "inputs": [tensor([TEXT, CORPUS[2]])], "outputs": [{"name": "scores"}]},
    ),
    ("POST", "/v2/models/tiny/infer", {"inputs": [tensor([TEXT], "FP32")]}),
    ("POST", "/v2/models/tiny/infer", {"inputs": [tensor([TEXT], shape=[2])]}),
    ("POST", "/v2/models/tiny/infer", {"inputs": [tensor([TEXT])], "outputs": [{"name": "nothing"}]}),
    ("POST", "/v2/models/other/infer", {"inputs": [tensor([TEXT])]}),
    ("GET", "/info", None),
    ("GET", "/nothing", None),
    ("GET", "/docs", None),
    ("GET", "/", None),
    ("GET", "/page.js", None),
    ("GET", "/page.css", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
]
KEYED: list[tuple[str, str, str | None]] = [
    ("POST", "/predict", None),
    ("POST", "/predict", f"Bearer {KEY}"),
    ("POST", "/predict", f"Bearer {KEY[:-1]}B"),
    ("GET", "/metrics", f"Bearer {KEY}"),
    ("GET", "/info", None),
    ("GET", "/", None),
    ("GET", "/v2/health/ready", None),
]


async def _ask(app: Any, method: str, path: str, **request: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        reply = await client.request(method, path, **request)
    kept = {name: reply.headers[name] for name in HEADERS if name in reply.headers}
    names = sorted(set(reply.headers) - set(kept))
    body: Any = None
    if path == "/metrics" and reply.status_code == 200:
        body = sorted(set(re.findall(r"^# TYPE (\w+ \w+)", reply.text, re.MULTILINE)))
    elif path == "/openapi.json":
        paths = reply.json()["paths"]
        body = {each: {verb: sorted(it["responses"]) for verb, it in verbs.items()} for each, verbs in paths.items()}
    elif "json" in reply.headers.get("content-type", ""):
        body = without_wording(reply.json()) if reply.content else None
    return {"status": reply.status_code, "headers": kept, "other_headers": names, "body": body}


def without_wording(body: Any) -> Any:
    """A reply without the sentences of its errors, which may be written otherwise, and without versions."""
    match body:
        case {"error": {"message": str(), **rest}}:
            return {"error": {"message": ANY, **rest}}
        case {"error": str(message)}:
            return {"error": f"{message.partition(':')[0]}: {ANY}"}
    return json.loads(re.sub(r'"[0-9a-f]{12}"', f'"{ANY}"', json.dumps(body)))


def endpoint(folder: Path) -> dict[str, Any]:
    """Replies of the application in this process."""
    return asyncio.run(_endpoint(folder))


async def _endpoint(folder: Path) -> dict[str, Any]:
    predictor = Predictor.load(make_artifact(folder / "artifact", ("a", "b", "c")), threads=1)
    app = build_app(predictor, ServeConfig(max_inputs=4, max_text_characters=800, max_body_bytes=2000))
    replies: dict[str, Any] = {}
    for number, (method, path, body) in enumerate(REQUESTS):
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        asked = {} if content is None else {"content": content, "headers": {"content-type": "application/json"}}
        replies[f"{number:02} {method} {path}"] = await _ask(app, method, path, **asked)
    document = {"id": "3f9c0a1b", "name": "shop", "sha256": _digest(KEY.encode()), "scopes": ["predict"]}
    keys = folder / "keys.json"
    keys.touch(mode=0o600)
    created = {"rate": "100/minute", "created": "2026-11-23T10:00:00+00:00"}
    keys.write_text(json.dumps({"version": 1, "keys": [{**document, **created}]}))
    keyed = build_app(predictor, ServeConfig(keys=str(keys)))
    for number, (method, path, key) in enumerate(KEYED):
        headers = {"content-type": "application/json", **({"authorization": key} if key else {})}
        asked = {"headers": headers, **({"content": json.dumps({"inputs": TEXT})} if method == "POST" else {})}
        replies[f"key {number} {method} {path}"] = await _ask(keyed, method, path, **asked)
    for task, head in HEADS.items():
        made = Predictor.load(make_task_artifact(folder / task, task, head, seed=1), threads=1)
        one, question = build_app(made, ServeConfig()), QUESTIONS.get(task, TEXT)
        replies[f"{task} predict"] = await _ask(one, "POST", "/predict", json={"inputs": [question]})
        replies[f"{task} info"] = await _ask(one, "GET", "/info")
        replies[f"{task} metadata"] = await _ask(one, "GET", "/v2/models/tiny")
    return replies


# ---------------------------------------------------------------------------------------------- collect, mask, compare


def machine() -> dict[str, str]:
    names = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    return {"processor": names[0] if names else platform.processor(), "torch": torch.__version__}


def without_ray(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    tasks = {task: train_alone(task, folder / task) for task in TASKS}
    return {"order": order(), "one_worker": tasks, "endpoint": endpoint(folder / "endpoint")}


def flatten(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """(place, leaf) of a document; of an empty container its kind."""
    if isinstance(value, Mapping | list | tuple) and value:
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, each in pairs:
            yield from flatten(each, f"{place}\t{name}" if place else str(name))
    else:
        yield place, value if not isinstance(value, Mapping | tuple) else type(value)()


def masked(document: Any, again: Any, place: str = "") -> Any:
    """The document, with `ANY` where another collection differs, and in `VOLATILE` places of the commands' JSON."""
    if isinstance(document, dict) and isinstance(again, dict) and document:
        names = document.keys() & again.keys()
        return {name: masked(document[name], again[name], f"{place}.{name}") for name in document if name in names}
    if isinstance(document, list | tuple) and isinstance(again, list | tuple) and len(document) == len(again):
        return [masked(one, other, place) for one, other in zip(document, again, strict=True)]
    volatile = place.startswith(".commands") and VOLATILE.search(place.removeprefix(".commands"))
    return ANY if volatile or not same(document, again) else document


def same(one: Any, other: Any, tolerance: float = TOLERANCE) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        return numbers and (math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance) or one != one)
    return bool(one == other)


def renamed(value: Any) -> Any:
    """What is recorded, by the names of today."""
    if isinstance(value, dict):
        return {RENAMED.get(name, name): renamed(each) for name, each in value.items()}
    if isinstance(value, list):
        return [renamed(each) for each in value]
    return RENAMED.get(value, value) if isinstance(value, str) else value


def differences(recorded: Any, current: Any, place: str = "", exact: bool = True) -> Iterator[str]:
    """Where what is there now is not what is recorded. `exact`: whether the machine is the recorded one."""
    if recorded == ANY:
        return
    if isinstance(recorded, dict) and isinstance(current, Mapping):
        for name in sorted(recorded.keys() | current.keys()):
            if name not in current or name not in recorded:
                yield f"{place}.{name}: {'gone' if name in recorded else 'new'}"
            else:
                yield from differences(recorded[name], current[name], f"{place}.{name}", exact)
    elif not exact and EXACT.search(place):
        return
    elif isinstance(recorded, list) and isinstance(current, list | tuple) and len(recorded) == len(current):
        for number, (one, other) in enumerate(zip(recorded, current, strict=True)):
            yield from differences(one, other, f"{place}.{number}", exact)
    elif not same(recorded, current, TOLERANCE if exact else FAR):
        yield f"{place}: {str(recorded)[:120]!r} became {str(current)[:120]!r}"


def read() -> dict[str, Any]:
    recorded: dict[str, Any] = renamed(json.loads(RECORD.read_text("utf-8")))
    return recorded


def plain(document: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(document, default=str))


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.record --write")
    from rtrain.cluster.connection import session
    from rtrain.runs.worker_pool import ReusableWorkerGroup, start_mailbox_server

    collected = []
    with tempfile.TemporaryDirectory() as folder, session(config.load_config("intent"), Path(folder)):
        for name in ("first", "second"):
            workers = ReusableWorkerGroup(Run(Path(folder) / f"workers-{name}"), start_mailbox_server())
            inside = Path(folder) / name
            collected.append(plain({**without_ray(inside / "alone"), **runs(inside / "ray", workers)}))
            workers.shut_down()
    document = {"machine": machine(), **masked(*collected)}
    RECORD.write_text(json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    import tests.conftest  # noqa: F401 - the environment of the tests: one thread, no hub

    main()
