"""What Weights & Biases wrote offline, read from its own files: protobuf records in blocks of a LevelDB log."""

import importlib
import json
from pathlib import Path
from typing import Any

BLOCK, FILE_HEADER, RECORD_HEADER = 1 << 15, 7, 7


def read_records(path: Path) -> list[Any]:
    """All records of a `run-*.wandb` file."""
    records_of: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")  # untyped
    data, place, parts, records = path.read_bytes(), FILE_HEADER, b"", []
    while place + RECORD_HEADER <= len(data):
        if BLOCK - place % BLOCK < RECORD_HEADER:  # padding at the end of a block
            place += BLOCK - place % BLOCK
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + RECORD_HEADER : place + RECORD_HEADER + length]
        place += RECORD_HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = records_of.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def read_run(folder: Path) -> dict[str, Any]:
    """`ids`, `config`, `history` (step -> values), `summary`, `artifacts` (name -> files) of all offline runs below a
    folder, the earlier first."""
    result: dict[str, Any] = {"ids": [], "config": {}, "history": {}, "summary": {}, "artifacts": {}, "exits": []}
    for path in sorted(folder.rglob("run-*.wandb")):
        for record in read_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                result["ids"].append((record.run.project, record.run.run_id, record.run.display_name))
                result["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                values = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
                }
                result["history"].setdefault(record.history.step.num, {}).update(values)
            elif kind == "summary":
                for item in record.summary.update:
                    result["summary"]["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
            elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
                artifact = record.request.log_artifact.artifact
                result["artifacts"][artifact.name] = artifact
            elif kind == "artifact":
                result["artifacts"][record.artifact.name] = record.artifact
            elif kind == "exit":
                result["exits"].append(record.exit.exit_code)
    return result
