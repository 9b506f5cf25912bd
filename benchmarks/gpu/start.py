"""Where the seconds of a worker's start go, from a new process to its second update, without Ray."""

import json
import subprocess
import sys

from benchmarks.gpu.bench import Bench

STAGES = """
import time
clock, stages = time.perf_counter, {}
def stage(name, began):
    stages[name] = clock() - began
began = clock(); import torch; stage("import torch", began)
began = clock()
import transformers
from transformers import BertForSequenceClassification
stage("import transformers", began)
began = clock()
from benchmarks.gpu import bench as common, speed
from benchmarks.gpu.report import Report
from pathlib import Path
import rtrain.training.loop, rtrain.strategies.ways
stage("import rtrain", began)
gpu = torch.cuda.is_available()
bench = common.Bench(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), gpu)
began = clock(); torch.zeros(1, device=bench.device); common.synchronize(bench); stage("CUDA context", began)
began = clock()
made = common.network(bench, common.CARRIED)
common.synchronize(bench)
stage("build the network", began)
began = clock(); of = common.texts(bench, "banking77"); stage("open the store", began)
began = clock(); ours = speed.Ours(made, of, 8, 4096, bench.precision); stage("optimizer and exchange", began)
for name in ("first update", "second update", "third update"):
    began = clock(); ours.update(0); common.synchronize(bench); stage(name, began)
print(json.dumps(stages))
"""


def run(bench: Bench) -> None:
    command = [sys.executable, "-c", "import json, sys\n" + STAGES]
    for attempt in ("first process", "second process"):  # the second finds files in the cache
        done = subprocess.run(
            [*command, str(bench.data), str(bench.model), str(bench.scratch)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        stages = json.loads(done.stdout.splitlines()[-1])
        for name, seconds in stages.items():
            bench.report.line(f"{attempt}.{name}", seconds, "s")
        bench.report.line(f"{attempt}.sum", sum(stages.values()), "s")
