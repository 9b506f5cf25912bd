"""Files that the pages on places name: the image's file against the pins, the batch script
against programs that stand in for Slurm's, each a few lines of shell."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray._common.utils import load_class
from ray.scripts.scripts import start as ray_start

from rtrain.cluster import connection
from rtrain.core.errors import TemporaryFailureError
from tests.e2e.test_wheel import SOURCES
from tests.support.root import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))

# -------------------------------------------------------------------------------------------------------- the image

DOCKERFILE = ROOT / "docs" / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(word, the rest) of each instruction; a backslash continues a line."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    full = "\n".join(lines).replace("\\\n", "")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in full.splitlines() if line.strip())]


def instruction_values(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def arguments() -> dict[str, str]:
    """The values that `--build-arg` changes."""
    return {name: value.strip('"') for name, _, value in (rest.partition("=") for rest in instruction_values("ARG"))}


def test_its_python_is_one_that_the_project_supports_and_its_tests_check_types_for() -> None:
    result = re.fullmatch(r"python:(3\.\d+)-slim-\w+", arguments()["BASE"])
    assert result
    low, high = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    assert int(low) <= int(result[1].removeprefix("3.")) < int(high)
    assert f"python{result[1]}" in MAKEFILE


def test_what_it_installs_are_the_project_s_dependencies(tmp_path: Path) -> None:
    [install] = [rest for rest in instruction_values("RUN") if "wanted.txt" in rest]
    script = re.search(r"python -c '([^']*)'", install)
    assert script
    extras = arguments()["EXTRAS"].split()
    done = subprocess.run(
        [sys.executable, "-c", script[1], *extras], cwd=ROOT, capture_output=True, text=True, check=True
    )
    optional = [name for extra in extras for name in PROJECT["optional-dependencies"][extra]]
    assert done.stdout.splitlines() == ["setuptools", *PROJECT["dependencies"], *optional]
    names = {re.split(r"[\[=><]", line)[0] for line in done.stdout.splitlines()}
    assert names <= PINS.keys()


def test_the_context_is_what_is_copied_and_small() -> None:
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    sent = {line.removeprefix("!") for line in rules if line.startswith("!")}
    copies = {
        name for rest in instruction_values("COPY") if not rest.startswith("--from") for name in rest.split()[:-1]
    }
    assert sent == copies == {*SOURCES, "constraints.txt"}
    files = [path for name in sent for path in [ROOT / name, *(ROOT / name).rglob("*")] if path.is_file()]
    assert len(files) > 100
    assert sum(path.stat().st_size for path in files if "__pycache__" not in path.parts) < 4 << 20


# --------------------------------------------------------------------------------------------------- the batch script

SCRIPT = ROOT / "docs" / "slurm" / "train.sbatch"
TEXT = SCRIPT.read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "running" / "slurm.md").read_text(encoding="utf-8")

STAND_INS = {
    # One node; its processes end with it, like a job step.
    "srun": 'shift 2; export SLURM_NODEID=0; exec "$@"',
    "ray": """
test "$RAY" = up || exit 1
cat "$RAY_AUTH_TOKEN_PATH" > "$LOG.token"
echo "ray $*" >> "$LOG"
exec sleep 300""",
    # Ray's address, and how many of its nodes are there.
    "python": """
case "$2" in *get_node_ip_address*) echo 10.0.0.7 ;; *) grep -c "^ray" "$LOG" ;; esac""",
    "rtrain": """
trap "exit 75" USR1
echo "rtrain $*" >> "$LOG"
for _ in $(seq $PASSES); do sleep 0.05; done
exit $CODE""",
    # Slurm ends the script while it requeues the job.
    "scontrol": 'echo "scontrol $*" >> "$LOG"; kill -KILL $PPID',
}


@dataclass(frozen=True)
class Batch:
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "intent"

    def start(self, **inputs: str) -> subprocess.Popen[str]:
        environ = {
            **{"PATH": f"{self.folder}:{os.environ['PATH']}", "LOG": str(self.folder / "log"), "RAY": "up"},
            **{"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "4"},
            **{"PASSES": "2", "CODE": "0", **inputs},
        }
        command = ["bash", str(SCRIPT), str(self.run), "intent", "--data", "two words.csv"]
        return subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.is_file() else []

    def await_line(self, start: str) -> None:
        give_up = time.monotonic() + 30
        while not any(line.startswith(start) for line in self.log()):
            assert time.monotonic() < give_up, self.log()
            time.sleep(0.02)

    def tokens(self) -> list[str]:
        return [path.name for path in self.run.parent.iterdir() if "token" in path.name]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return Batch(tmp_path)


def ended(process: subprocess.Popen[str]) -> int:
    """Its exit code; nothing that it has started is left."""
    try:
        code = process.wait(timeout=30)
        give_up = time.monotonic() + 10
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < give_up:
                os.killpg(process.pid, 0)
                time.sleep(0.02)
            raise AssertionError("something still runs")
        return code
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_script_is_shell_that_a_batch_system_can_spool() -> None:
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "<<" not in TEXT
    directives = re.findall(r"^#SBATCH (\S+)$", TEXT, re.M)
    assert {"--requeue", "--exclusive", "--signal=B:TERM@120", "--open-mode=append"} <= set(directives)
    assert re.search(r"\b120 seconds\b", PAGE)


def test_ray_knows_the_options_of_its_nodes_and_the_hook_closes_its_client_s_port() -> None:
    ray_options = {option for parameter in ray_start.params for option in parameter.opts}
    used = set(re.findall(r"--[a-z-]+", " ".join(re.findall(r'(?:place=|ray start )(.*?)"?(?:;|\'|$)', TEXT, re.M))))
    assert {"--head", "--address", "--port"} <= used <= ray_options
    [hook] = re.findall(r"RAY_START_HOOK=(\S+)", TEXT)
    assert load_class(hook) is connection.on_node_start


def test_a_training_ends_and_with_it_the_nodes_and_the_token(batch: Batch) -> None:
    assert ended(batch.start()) == 0
    [nodes, training] = batch.log()
    assert nodes.startswith("ray start --head --port=6379 --include-dashboard=false --num-cpus=4 --num-gpus=0 ")
    assert training == f"rtrain train intent --data two words.csv --out {batch.run} --address 10.0.0.7:6379"
    assert re.fullmatch("[0-9a-f]{64}", (batch.folder / "log.token").read_text())
    assert batch.tokens() == []


def test_the_token_is_its_owner_s_alone_while_the_job_runs(batch: Batch) -> None:
    process = batch.start(PASSES="600")
    batch.await_line("rtrain")
    [token] = batch.tokens()
    assert (batch.run.parent / token).stat().st_mode & 0o777 == 0o600
    process.terminate()
    ended(process)


def test_near_the_time_limit_it_asks_for_a_checkpoint_and_another_turn(batch: Batch) -> None:
    assert "75" in re.findall(r'"\$code" = (\d+)', TEXT)
    assert TemporaryFailureError.exit_code == 75
    process = batch.start(PASSES="600")
    batch.await_line("rtrain")
    process.terminate()
    ended(process)
    assert batch.log()[-1] == "scontrol requeue 7"
    assert batch.tokens() == []


def test_a_run_that_is_there_goes_on(batch: Batch) -> None:
    batch.run.mkdir(parents=True)
    (batch.run / "config.yaml").touch()
    assert ended(batch.start()) == 0
    assert batch.log()[-1] == f"rtrain train --resume --out {batch.run} --address 10.0.0.7:6379"


@pytest.mark.parametrize("code", [1, 2])
def test_an_error_is_the_job_s_and_is_not_tried_again(batch: Batch, code: int) -> None:
    assert ended(batch.start(CODE=str(code))) == code
    assert [line for line in batch.log() if line.startswith("scontrol")] == []
    assert batch.tokens() == []


def test_a_job_whose_ray_cannot_start_ends(batch: Batch) -> None:
    assert ended(batch.start(RAY="down")) == 1
    assert [line for line in batch.log() if line.startswith("rtrain")] == []
    assert batch.tokens() == []


def test_the_page_s_files_are_there() -> None:
    pages = [ROOT / "docs" / "where.md", *sorted((ROOT / "docs" / "running").glob("*.md"))]
    assert len(pages) >= 5
    paths = {name for page in pages for name in re.findall(r"\bdocs/[\w/.-]+\w", page.read_text(encoding="utf-8"))}
    assert {"docs/docker/Dockerfile", "docs/slurm/train.sbatch"} <= paths
    assert [name for name in paths if not (ROOT / name).is_file()] == []
