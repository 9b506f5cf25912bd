"""Check and measure rtrain on a GPU: `python -m benchmarks.gpu [--json] [FOLDER]`. It needs no Ray or network.

1. Prepare, where the data and all of rtrain are: `python -m benchmarks.gpu --prepare DATA FOLDER`. DATA holds
   `banking77` and `squadshifts`; FOLDER gets their token stores and the packaged model in half precision, under 64 MB.
2. Carry the checkout and FOLDER to the machine that has the GPU (inside the checkout, say as `.gpu`, which is where the
   command looks by itself). It needs Python 3.11 or later with torch, transformers, accelerate, numpy, scipy, pyarrow,
   pydantic, PyYAML, tokenizers, safetensors and regex; sentence-transformers for `serving_peers`.
3. Run `python -m benchmarks.gpu --json --out gpu.json`. Each section runs in its own process. If a command may take
   only ten minutes, run several, each with its own file: `--only right --only resume --minutes 9`, then `--only speed`.
   With less time, shorten the timed stretches: `--seconds 1`.
4. Read the file. A line stands by itself: its key, a value with its unit (with rounds, their median and spread), its
   bounds (`most`, `floor`, `goal`), whether it met them, and the circumstances under `about`. Read `right` and
   `resume` first: a line that is not met there counts for more than any speed. A line with `error` failed alone.

right    attention's kernels against plain attention, packed against padded, dropout's rate, fp16 with a forced
         overflow, recomputed layers, the same training in float64 by different passes, the pass size chosen for the
         real memory
resume   whether a run killed at update 20 of 40 resumes bit for bit; if not, which tensor differs first, and what torch
         says
speed    tokens a second and share of the peak, side by side with HF Trainer, both at their largest pass
memory   the peak of a pass against its forecast, and what recomputation costs
local    local attention by flash attention: errors, and speed beside padded chunks and full attention
serving_peers  texts a second by clients in flight, beside sentence-transformers in half precision

Without a GPU all of this runs at a tiny size, as a test of itself.
"""

import argparse
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import prepare, report
from benchmarks.gpu.bench import Bench, run_section

FOLDER = Path(".gpu")
SECTIONS = ("right", "resume", "speed", "memory", "local", "serving_peers")
"""Most important first. Each is a module here with a function `run`."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, formatter_class=form)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help=f"what --prepare made; default {FOLDER}")
    parser.add_argument("--prepare", type=Path, metavar="DATA", help="make FOLDER from DATA, and end")
    parser.add_argument("--model", default="minilm", help="of --prepare: the model to carry")
    parser.add_argument("--json", action="store_true", help="print the document on stdout; the table goes to stderr")
    parser.add_argument("--minutes", type=float, default=40, help="of all sections together")
    parser.add_argument("--seconds", type=float, help="length of a timed stretch; default 3, and less without a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/gpu.json"), help="file of the results")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="a section; repeatable (default: all)")
    options = parser.parse_args(arguments)
    if not options.prepare and not (options.folder / "texts.json").is_file():
        parser.error(f"{options.folder} is not what --prepare makes; write --prepare DATA {options.folder} first")
    return options


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(name: str, bench: Bench) -> dict[str, Any]:
    """The lines of a section, which runs in its own process until it is done or its time is over."""
    started_at, lines = time.monotonic(), bench.scratch / f"{name}.jsonl"
    lines.unlink(missing_ok=True)
    process = multiprocessing.get_context("spawn").Process(
        target=run_section, args=(name, replace(bench, report=report.Report(lines, name)))
    )
    process.start()
    try:
        process.join(max(1.0, bench.left))
        status = "cut off" if process.is_alive() else "failed" if process.exitcode else "done"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
    return {"status": status, "seconds": round(time.monotonic() - started_at, 1), "lines": report.lines(lines)}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.prepare:
        sizes = prepare.prepare(options.prepare, options.folder, options.model)
        print(f"{options.folder}: " + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items()))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the section ends too
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # HF Trainer would take all GPUs
    out, folder = options.out.absolute(), options.folder.absolute()
    scratch = out.parent / f"{out.stem}-work"
    scratch.mkdir(parents=True, exist_ok=True)
    prepare.widened(folder / "model", scratch / "model")
    bench = Bench(folder, scratch / "model", scratch, options.seconds, time.monotonic() + 60 * options.minutes)
    about = {"measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": platform.platform()}
    document: dict[str, Any] = {"about": about, "sections": {}}
    for name in SECTIONS:
        if name in (options.only or SECTIONS):
            document["sections"][name] = section = measure(name, bench)
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            say(f"{name}: {section['status']}, {section['seconds']:.0f} s, {len(section['lines'])} lines")
    print(report.table(document), file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(document))


if __name__ == "__main__":
    main()
