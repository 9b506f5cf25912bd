"""What a user reads where Ray's memory monitor ended a worker: Ray 2.60's own words in, two sentences out."""

from pathlib import Path

import pytest

from rtrain import events
from rtrain.errors import UserError
from rtrain.run import Run
from rtrain.runs import driver
from rtrain.runs.recovery import Recovery, memory_told

OTHER = "python -m jupyter lab --notebook-dir=/home/someone/a/folder/with/a/long/name"
NODE = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: "
    "7e4ea81b540f81cbe17373bd0a7a0e654401015498543e3413b88ac5) was 22.47GB used / 23.54GB limit (0.954546)\n"
)
REASON = "OOM kill reason: Memory usage 24127202099B exceeded threshold of 24012676915B (95.0% of 25276502016B limit)\n"
KILLED = (
    "Object store memory usage: [- objects spillable: 0\n- bytes spillable: 0\n\nEviction Stats:\n"
    "(global lru) capacity: 80000000\n(global lru) bytes evicted: 0]\n"
    "Ray killed 1 worker(s) based on the killing policy\nConsidered workers: [\n"
    "Selected to kill: (Actor(55f5ce2569177a80e180281301000000): job ID=01000000, lease ID=00000000c3e1bf5ee8a2f3ea38"
    "edfda29bdf598a3ff09d4fc3364f8ec040368e, task name=RayTrainWorker.__init__, required resources={CPU: 1}, "
    "pid=21945, actual memory used=9.52GB, worker ID=616d3410cdb48aa692dd7501f8a1f4630add94073780d4f4a62ad586)\n]\n"
    "Total non-selected idle workers: 1\nTotal non-selected idle workers USS bytes: 0.04GB\n"
    "To see more information about memory usage on this node, use `ray logs raylet.out -ip 192.0.2.2`\n"
)
USERS = (
    "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n21945\t9.52\tray::RayTrainWorker\n21946\t8.90\tray::RayTrainWorker\n"
    f"21741\t1.09\t{OTHER}\n"
    "21872\t0.07\tray::DashboardAgent\n"
)
HELP = (
    "Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/en/latest/"
    "ray-observability/user-guides/debug-apps/debug-memory.html. Consider provisioning more memory on this node or "
    "reducing task parallelism by requesting more CPUs per task. Set max_restarts to enable retry. "
)
SETTINGS = (
    "Lower train.tokens_per_pass or data.max_tokens, take fewer train.workers on a node, or nodes with more memory"
)
TOLD = (
    "node 192.0.2.2 ran out of memory: 22.47 of 23.54 GB were used, above 95 %; Ray ended process 21945 with 9.52 GB. "
    "The largest processes there: 9.52 GB ray::RayTrainWorker (21945); 8.90 GB ray::RayTrainWorker (21946); "
    f"1.09 GB {OTHER[:60]} (21741). {SETTINGS}"
)


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([NODE + REASON + KILLED + USERS + HELP], TOLD),
        (["Training failed due to worker errors:", "died", NODE + REASON + KILLED + USERS + HELP], TOLD),
        (
            [NODE + REASON + KILLED + KILLED.replace("21945", "7").replace("9.52", "0.11") + 2 * USERS + 2 * HELP],
            TOLD.replace("9.52 GB. The", "9.52 GB and 1 more. The"),
        ),
        ([NODE + HELP], f"node 192.0.2.2 ran out of memory: 22.47 of 23.54 GB were used. {SETTINGS}"),
        (["MemoryError"], None),
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."], None),
        ([HELP], None),
        ([], None),
    ],
)
def test_who_used_how_much_and_what_to_set(errors: list[str], told: str | None) -> None:
    assert memory_told(errors) == told


def test_the_run_s_log_and_the_last_error_say_so(tmp_path: Path) -> None:
    failure, cause = RuntimeError("Training failed"), RuntimeError(NODE + REASON + KILLED + USERS + HELP)
    failure.worker_failures = {0: cause}  # type: ignore[attr-defined]
    driver._recover(Run(tmp_path), failure, Recovery(max_crashes=1))
    [crashed] = events.read(tmp_path)
    assert (crashed["cause"], crashed["error"]) == ("memory", TOLD)
    with pytest.raises(UserError) as caught:
        driver._recover(Run(tmp_path), failure, Recovery(max_crashes=0))
    first, second = str(caught.value).splitlines()
    assert first == f"training failed: {TOLD}"
    assert Path(second.rsplit(" ", 1)[-1]).is_file()
