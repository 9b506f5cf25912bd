"""A search whose driver is killed at random moments and resumed, beside the same search that nothing disturbs."""

import random
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks import rows
from benchmarks.search import commands, figures
from benchmarks.search.parts import Work
from rtrain.run import Run
from tune.known.history import read_journal, replay

ROWS, LABELS, WORDS = 320, 8, 12
VALUES: dict[str, Any] = {
    "train.epochs": 2,
    "train.precision": "fp32",
    "train.log_every": 1,
    "tune.trials": 6,
    "tune.concurrent": 1,  # with several at once, what the sampler knows at an ask depends on which ended first
    "tune.final_rows": 0,
}
SOONEST_S = 3.0


def made_up(folder: Path) -> list[str]:
    """Messages of words, of which one says what the label is."""
    draw, found = random.Random(0), dict[str, str]()
    while len(found) < ROWS:
        label = draw.randrange(LABELS)
        text = [f"topic{label}"] * 2 + [f"word{draw.randrange(200)}" for _ in range(WORDS)]
        draw.shuffle(text)
        found[" ".join(text)] = f"label {label}"
    folder.mkdir(parents=True, exist_ok=True)
    lines = list(found.items())
    train = rows.write(folder / "train.csv", lines[: ROWS * 4 // 5])
    return ["--data", str(train), "--test", str(rows.write(folder / "test.csv", lines[ROWS * 4 // 5 :]))]


def measure(work: Work, keep: Any) -> dict[str, Any]:
    place = work.folder / "kills"
    files, straight = made_up(place), place / "straight"
    begun = commands.tune(straight, "intent", files, VALUES)
    whole = (commands.cost_of(straight) or {"seconds": 60.0})["seconds"]
    disturbed = place / "disturbed"
    shutil.rmtree(disturbed, ignore_errors=True)  # the kills of an earlier call are no part of this one's
    moments, missing, left = list[float](), 0, 0
    draw = random.Random(0)
    for _ in range(work.kills):
        known = read_journal(Run(disturbed).trials)
        with commands.started(commands.words("tune", "intent", files, VALUES, disturbed), place / "disturbed.log") as (
            process,
            mark,
        ):
            time.sleep(draw.uniform(SOONEST_S, max(2 * SOONEST_S, whole / 2)))
            if process.poll() is not None:
                break
            process.kill()
            process.wait()
        left += commands.left(mark)
        after = read_journal(Run(disturbed).trials)
        missing += figures.lost(known, after)
        moments.append(len(after))
        keep({"kills": len(moments), "events_at_the_kills": moments})
    known = read_journal(Run(disturbed).trials)
    ended = commands.tune(disturbed, "intent", files, VALUES)
    after = read_journal(ended.trials)
    missing += figures.lost(known, after)
    logs = {one.number: ended.trial(one.number).events() for one in replay(after).trials}
    one, two = figures.told(read_journal(begun.trials)), figures.told(after)
    return {
        "kills": len(moments),
        "events_at_the_kills": moments,
        "rungs_twice": figures.twice(after, logs),
        "history_lost": missing,
        "same_as_undisturbed": one == two,
        "differing_events": [pair for pair in zip(one, two, strict=False) if pair[0] != pair[1]][:3],
        "processes_left_by_kills": left,
        "cost_of_the_last_start": commands.cost_of(disturbed),
    }
