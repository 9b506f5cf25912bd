"""Check and measure rtrain on a GPU in 40 minutes: `python -m benchmarks.gpu [--json] [FOLDER]`. It needs no Ray or
network.

1. Prepare, where the data and all of rtrain are: `python -m benchmarks.gpu --prepare DATA FOLDER`. DATA holds
   `banking77` and `squadshifts`; FOLDER gets their token stores and the packaged model in half precision, under 64 MB.
2. Carry the checkout and FOLDER to the machine that has the GPU (inside the checkout, say as `.gpu`, which is where the
   command looks by itself). It needs Python 3.11 or later with torch, transformers, numpy, scipy, pyarrow, pydantic,
   PyYAML, tokenizers, safetensors and regex. The peer is HF Trainer if `accelerate` is installed too, or else a plain
   loop. `--only needs` says what is missing. Wheels can be carried beside FOLDER (for pydantic those of pydantic,
   pydantic-core, typing-inspection and annotated-types).
3. Run `python -m benchmarks.gpu --json --out gpu.json`. The most important sections come first. Each runs in its own
   process with a share of the minutes, and is cut off when they are over; minutes that it leaves go to the sections
   after it. The file is complete after every line. If a command may take only ten minutes, run several, each with its
   own file: `--only needs right resume --minutes 9`, then `--only speed --minutes 9`, and so on. With less time,
   shorten the timed stretches: `--seconds 1`.
4. Read the file. A line stands by itself: its key, a value with its unit (with rounds, their median and spread), its
   bounds (`most`, `floor`, `goal`), whether it met them, and the circumstances under `about`. Read `right` and
   `resume` first: a line that is not met there counts for more than any speed. A line with `error` failed alone. Then
   read `speed`: `mfu` is 6 x weights x tokens + attention, of real tokens, over the device's peak. If it misses its
   bound, `profile` names the kernels and the gaps between them, and `pays` what would be faster.

needs    versions, the device, what is missing
right    attention's kernels against plain attention, packed against padded, dropout's rate, fp16 with a forced
         overflow, recomputed layers, the same training in float64 by different passes, the pass size chosen for the
         real memory
resume   whether a run killed at update 20 of 40 resumes bit for bit; if not, which tensor differs first, and what torch
         says
speed    tokens a second and share of the peak, side by side with HF Trainer, both at their largest pass
profile  the ten largest kernels of an update and the gaps between kernels
pays     compiled encoders, the fused optimizer, CUDA graphs, larger passes
score    seconds to an accuracy of 0.90 and 0.93 on banking77
memory   the peak of a pass against its forecast, and what recomputation costs
serving  texts a second and milliseconds by batch, on the GPU and on the processor beside it
serving_peers  the same by clients in flight, beside sentence-transformers in half precision
flattened  tags and masked words beside HF Trainer without padding (DataCollatorWithFlattening)
start    seconds of each stage of a worker's start

Without a GPU all of this runs at a tiny size, in seconds, as a test of itself.
"""

import argparse
import contextlib
import gc
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import prepare, report, runner
from benchmarks.gpu.bench import Bench

FOLDER = Path(".gpu")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, formatter_class=form)
    parser.add_argument("folder", nargs="?", type=Path, help=f"what --prepare made; default {FOLDER}")
    parser.add_argument("--prepare", type=Path, metavar="DATA", help="make FOLDER from DATA, and end")
    parser.add_argument("--model", default="minilm", help="of --prepare: the model to carry")
    parser.add_argument("--json", action="store_true", help="print the document on stdout; the table goes to stderr")
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--seconds", type=float, help="length of a timed stretch; default 3, and less without a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/gpu.json"), help="file of the results")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(runner.SHARES)}")
    parser.add_argument("--plant", metavar="NAME", choices=runner.SHARES, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.folder is None and chosen.only and chosen.only[-1] not in runner.SHARES:
        chosen.folder = Path(chosen.only.pop())  # argparse took the folder, written after the names, as a name
    if chosen.folder is None:
        chosen.folder = FOLDER
    if unknown := [name for name in chosen.only or () if name not in runner.SHARES]:
        parser.error(f"--only: no such section: {', '.join(unknown)}; there are {', '.join(runner.SHARES)}")
    if not chosen.prepare and not (chosen.folder / "texts.json").is_file():
        parser.error(f"{chosen.folder} is not what --prepare makes; write --prepare DATA {chosen.folder} first")
    return chosen


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def about(folder: Path) -> dict[str, Any]:
    return {
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "folder": str(folder),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parse(arguments)
    if chosen.prepare:
        sizes = prepare.prepare(chosen.prepare, chosen.folder, chosen.model)
        print(f"{chosen.folder}: " + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items()))
        return
    # SIGTERM acts as Ctrl-C does: the section ends too, and the file says so.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Nothing may be loaded from the network. Before the forks, torch must look for a GPU without starting CUDA.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # HF Trainer would take all GPUs
    _import()
    out = chosen.out.absolute()
    scratch = out.parent / f"{out.stem}-work"
    scratch.mkdir(parents=True, exist_ok=True)
    model = scratch / "model"
    with contextlib.suppress(ImportError):
        prepare.widened(chosen.folder.absolute() / "model", model)
    start = next((way for way in ("fork", "spawn") if (found := runner.in_child(_gpu, way)) is not None), None)
    if start is None:
        raise SystemExit("torch cannot use the device; see above")
    bench = Bench(chosen.folder.absolute(), model, scratch, found, start, chosen.seconds)
    names = [name for name in runner.SHARES if name in (chosen.only or runner.SHARES)]
    plan = runner.Plan(names, 60 * chosen.minutes, out, scratch, bench, chosen.plant)
    try:
        document = runner.run(plan, {**about(chosen.folder), "gpu": bench.gpu}, say)
    except KeyboardInterrupt:
        say(f"stopped; what was found is in {out}")
        raise SystemExit(130) from None
    print(report.table(document), file=sys.stderr if chosen.json else sys.stdout)
    if chosen.json:
        print(json.dumps(document))


def _import() -> None:
    """Import what every section needs, once, before the forks. The section `needs` says what is missing."""
    with contextlib.suppress(ImportError):
        import transformers

        transformers.utils.logging.set_verbosity_error()
        for name in ("AutoModelForSequenceClassification", "BertForSequenceClassification", "Trainer"):
            getattr(transformers, name)  # naming it imports it, which takes seconds
    gc.freeze()  # garbage collections of the sections need not visit all of that


def _gpu() -> bool:
    """Whether there is a GPU. Ends this process with an error if the processes that it starts cannot use the GPU."""
    try:
        import torch
    except ImportError:
        return False
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        return True
    return False


if __name__ == "__main__":
    main()
