"""The page of any run: unfinished, damaged, huge, and of texts that are meant to break it."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from rtrain.core import events
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.report import html
from rtrain.runs import controller
from tests.support.reports import Page, answers_of, make_answered, make_run, page_of, write_predictions, write_scores

LABELS = ("login", "parcel", "refund")
LIMIT = 3_000_000


# --------------------------------------------------------------------------------------------------- other kinds of run


def test_a_run_whose_store_is_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / ".tokens").rename(tmp_path / "elsewhere")
    assert "token store of the run is missing" in page_of(run).text


def test_a_file_of_other_columns_is_refused_by_name(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    run = make_run(tmp_path, trained=False)
    path = Run(run).predictions("test")
    pyarrow.parquet.write_table(pa.table({"text": ["a"], "target": ["b"]}), path)
    with pytest.raises(UserError) as refused:
        html.write_report(Run(run))
    assert refused.value.code == "missing_columns"
    path.write_bytes(b"no parquet")
    with pytest.raises(UserError) as refused:
        html.write_report(Run(run))
    assert refused.value.code == "unreadable"
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("name", ["scores-test.json", "artifact/artifact.json"])
def test_a_file_that_is_cut_off_is_refused_by_name(tmp_path: Path, name: str) -> None:
    run = make_answered(tmp_path, "classification")
    (run / name).write_text('{"schema_version": 1,\n')
    with pytest.raises(UserError):
        html.make_report(Run(run))


def test_what_is_cut_off_and_can_be_measured_again_is(tmp_path: Path) -> None:
    run = Run(make_answered(tmp_path, "classification"))
    html.make_report(run)
    full = run.baselines.read_text()
    run.baselines.write_text(full[:50])
    html.make_report(run)
    assert run.baselines.read_text() == full


def test_a_page_that_does_not_fit_on_the_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, trained=False)

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # of a write, which names no file

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError) as refused:
        html.make_report(Run(run))
    assert refused.value.code == "unwritable"
    assert not [path for path in run.iterdir() if "report" in path.name]


def test_a_report_that_fails_is_said_and_does_not_fail_the_run(tmp_path: Path) -> None:
    run, messages = make_run(tmp_path), list[str]()
    Run(run).predictions("test").write_bytes(b"no parquet")
    controller.write_report(Run(run), lambda event: messages.append(event["text"]))
    (remaining,) = run.glob("report-*.txt")
    assert "Traceback" in remaining.read_text()
    assert messages[-1].startswith(f"no report.html: {run}/predictions-test.parquet cannot be read")
    assert str(remaining) in messages[-1]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        html.write_report(Run(tmp_path))
    assert refused.value.code == "not_a_run"


# ------------------------------------------------------------------------------------------------------- hostile, large

ATTACKS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></style></svg><svg onload=alert(1)>",
    "</blockquote><iframe src=javascript:alert(1)>",
    "{{ 7 * 7 }}{% raw %}&lt;b&gt;",
    "'><a href='https://example.org/steal'>here</a>",
    "<!-- -->]]>\u202e\x00\x1b[2J",
)


def test_hostile_rows_stay_text(tmp_path: Path) -> None:
    """In texts, labels, slices and their names, sources, errors: whatever the data may hold."""
    rows = [(f"{ATTACKS[row % 7]} number {row}", ATTACKS[row % 3]) for row in range(200)]
    run = make_run(tmp_path, rows)
    events.append_event(run, "crashed", cause="crash", resumes_from=10, error=ATTACKS[0], stalled=[])
    events.append_event(run, "created", versions={ATTACKS[1]: ATTACKS[2]})
    targets, result = answers_of(ATTACKS[:6], 200, 0.5)
    text = [ATTACKS[row % 7] for row in range(200)]
    more: dict[str, Any] = {ATTACKS[1]: [ATTACKS[row % 5] for row in range(200)]}
    write_predictions(run, targets, result, text=text, source=ATTACKS[3], **more)
    raw = html.write_report(Run(run)).read_text(encoding="utf-8")
    page = Page(raw)
    samples = "svg text title rect line polyline circle"
    blocks = "html head meta style body header main footer section nav figure figcaption article blockquote div"
    inline = "h1 h2 h3 p a span b table tr th td pre ol li dl dt dd wbr"
    assert set(page.tags) <= set(f"{samples} {blocks} {inline}".split())
    assert [name for name, _ in page.attributes if name.startswith("on")] == []
    links = {value for name, value in page.attributes if name in ("href", "src")}
    parts = ("outcome", "data", "curves", "answers", "slices", "time", "settings")
    assert links == {f"#{anchor}" for anchor in parts}
    assert "<script>alert(1)</script>" in page.text  # to be read, not to be run
    assert "{{ 7 * 7 }}" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", raw)


def test_the_page_forbids_itself_scripts_and_requests(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_predictions(run, *answers_of(LABELS, 200, 0.8))
    page = page_of(run)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    raw = (run / "report.html").read_text(encoding="utf-8")
    assert "http://" not in raw
    assert "https://" not in raw
    assert "url(" not in raw
    assert "prefers-color-scheme: dark" in raw


def test_a_huge_run_makes_a_page_of_bounded_size(tmp_path: Path) -> None:
    """20,000 updates, 300 labels of 200 characters, 5,000 answers with texts of 2,000, ten columns of slices."""
    run = make_run(tmp_path, trained=False)
    lines = [{"time": 1.0, "kind": "started", "step": 0, "total_steps": 20_000, "workers": 2, "precision": "fp32"}]
    for update in range(1, 20_001):
        lines.append(
            {"time": float(update), "kind": "progress", "step": update, "total_steps": 20_000, "loss": 1.0 / update}
        )
        lines[-1] |= {"rows": 64 * update, "real_tokens": 640 * update}
    for update in range(50, 20_001, 50):
        many = {f"score_{place}": 0.5 for place in range(50)}
        lines.append({"time": 1.0, "kind": "evaluated", "split": "valid", "step": update, "scores": many})
    lines += [{"time": 1.0, "kind": "restart_requested", "reason": "x" * 5000, "step": 5}] * 1000
    with (run / events.FILE_NAME).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    labels = [f"{code} " + "long label " * 18 for code in range(300)]
    columns: dict[str, Any] = {f"c{n}": [f"{row % 30} " + "v" * 300 for row in range(5_000)] for n in range(10)}
    write_predictions(run, *answers_of(labels, 5_000, 0.3), text=["<&> word " * 222] * 5_000, measured=False, **columns)
    write_scores(run, *answers_of(labels, 5_000, 0.3), c0=columns["c0"])
    page = html.write_report(Run(run))
    assert 100_000 < page.stat().st_size < LIMIT
