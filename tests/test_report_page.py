"""The page as a whole: what it says of a run, what it does with any run, and with texts that are meant to break it."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import cli, config
from rtrain.errors import UserError
from rtrain.report import collect, events, html, predictions
from rtrain.report.blocks import Cards, Figure, Section, Table
from rtrain.report.sections import answers, certificate, curves, data, hardest, labels, overview, slices, terms, timing
from rtrain.training import driver
from tests.conftest import labelled_rows
from tests.reports import answers_of, make_run, write_predictions, write_scores

LABELS = ("login", "parcel", "refund")
LIMIT = 3_000_000


class Page(HTMLParser):
    """Tags, attributes and visible text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attributes]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(run: Path) -> Page:
    return Page(html.write(run).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained classifier with its answers."""
    run = make_run(tmp_path_factory.mktemp("finished"))
    targets, found = answers_of(LABELS, 200, right=0.8)
    language = ["de" if row % 4 else "en" for row in range(200)]
    found = [("login" if code == "en" else said) for said, code in zip(found, language, strict=True)]
    write_predictions(run, targets, found, language=language, serial=[str(row) for row in range(200)])
    return run


@pytest.fixture(scope="module")
def known(finished: Path) -> collect.Run:
    return collect.read(finished)


def table(section: Section | None, title: str) -> Table:
    assert section is not None
    (found,) = (block for block in section.blocks if isinstance(block, Table) and block.title.startswith(title))
    return found


# ----------------------------------------------------------------------------------------------------- what it tells


def test_every_section_of_a_finished_run_is_there(finished: Path) -> None:
    page = page_of(finished)
    headings = ("What was run", "Data", "Training", "Answers", "Slices", "Hardest rows", "Time")
    assert all(heading in page.words for heading in headings)
    assert "Drill certificate" not in page.words
    assert f"rtrain train {finished}/config.yaml --out NEW_FOLDER" in page.text


def test_every_chart_has_a_title_a_sentence_and_named_axes(known: collect.Run) -> None:
    sections = [data.section(known), curves.section(known), answers.section(known), slices.section(known)]
    figures = [block for section in sections if section for block in section.blocks if isinstance(block, Figure)]
    assert len(figures) >= 10
    for figure in figures:
        assert figure.title
        assert figure.note.strip().endswith("."), figure.title
        assert 'class="label"' in figure.chart, figure.title


def test_settings_that_differ_from_the_defaults(known: collect.Run) -> None:
    rows = {str(row[0]): row[1:] for row in table(overview.section(known), "Settings").rows}
    assert rows["train.epochs"] == ("2", "3")
    assert rows["train.save_every"] == ("5", "none")
    assert "train.seed" not in rows


def test_digests_and_versions(known: collect.Run) -> None:
    digests = {row[0]: row[1] for row in table(overview.section(known), "Digests").rows}
    assert known.store is not None
    assert digests["digest of the rows"] == known.store.manifest.digest
    assert digests["digest of the order"] == "cd"
    assert table(overview.section(known), "Versions").rows == [("ray", "2.60")]


def test_rows_of_each_split(known: collect.Run) -> None:
    rows = {str(row[0]): row[1] for row in table(data.section(known), "Rows and tokens").rows}
    assert known.store is not None
    assert rows == {name: known.store.rows(split) for split, name in data.NAMES.items()}


def test_set_aside_rows_have_file_line_and_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path, [*labelled_rows(100), ("", "parcel"), ("no label", " ")], trained=False)
    found = table(data.section(collect.read(run)), "Rows that were set aside")
    assert [row[:2] for row in found.rows] == [("rows.csv", 102), ("rows.csv", 103)]
    assert "column 'text' is empty" in str(found.rows[0][2])


def test_frequent_words_and_those_of_a_label(known: collect.Run) -> None:
    found = data.section(known)
    frequent = [block.title for block in found.blocks if isinstance(block, Figure) and "frequent word" in block.title]
    assert len(frequent) == 1
    words = {row[0]: row[1] for row in table(found, "Words that set each label apart").rows}
    assert "password" in str(words["login"])
    assert "password" not in str(words["parcel"])


def test_a_row_in_several_windows_is_one_row_of_words(tmp_path: Path) -> None:
    """Its words are those of all windows; counted by windows, words would stand beside other rows' labels."""
    rows = [(" ".join([text] * (1 + row % 7)), label) for row, (text, label) in enumerate(labelled_rows(90))]
    windows: dict[str, Any] = {"data.window": 16, "data.stride": 4}
    run = collect.read(make_run(tmp_path, rows, **windows))
    assert run.store is not None
    assert (run.store.read("train", np.arange(run.store.rows("train"))).windows > 1).any()
    every = np.arange(run.store.rows("train"))
    encoder = tmp_path / "encoder" / "tokenizer.json"
    assert len(terms.texts(run.store, encoder, every)) == run.store.rows("train")
    words = {row[0]: row[1] for row in table(data.section(run), "Words that set each label apart").rows}
    assert "password" in str(words["login"])


def test_words_before_an_apostrophe_are_no_words_of_their_own() -> None:
    assert terms.WORD.findall("don ' t use it, isn't doesn \u2019 t; the don of dont") == ["use", "the", "don", "dont"]


def test_curve_of_repeated_updates_is_drawn_once_and_the_crash_is_marked(known: collect.Run) -> None:
    assert [event["update"] for event in curves.newest(known.of("progress"))] == list(range(1, 21))
    assert [(mark.x, mark.kind) for mark in curves.marks(known)] == [(10, "epoch"), (20, "epoch"), (10, "crash")]
    assert curves.saves(known) == [5, 10, 15, 20]
    stops = table(curves.section(known), "What interrupted the run")
    assert [row[1:] for row in stops.rows] == [("crashed", "crash: Worker died; went on from update 10")]


def test_an_interrupted_start_says_where_the_next_one_went_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    log = [json.loads(line) for line in (run / events.NAME).read_text().splitlines()]
    changed = [{**event, "kind": "interrupted"} if event["kind"] == "crashed" else event for event in log]
    (run / events.NAME).write_text("".join(json.dumps(event) + "\n" for event in changed))
    stops = table(curves.section(collect.read(run)), "What interrupted the run")
    assert [row[1:] for row in stops.rows] == [("interrupted", "went on from update 10")]


def test_a_score_that_never_changes_has_no_curve(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for update in (10, 20):
        scores = {"answered": 1.0, "f1": update / 40, "rows": 30}
        events.append(run, "evaluated", split="valid", update=update, scores=scores)
    found = curves.section(collect.read(run))
    names = [block.title for block in found.blocks if isinstance(block, Figure)]
    assert any(name.startswith("Validation F1") for name in names)
    assert not any("answered" in name for name in names)
    assert ("validation", 20, "answered", "1.0000") in table(found, "Scores").rows


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({}, "Rows are split by a hash of their text, so that the split never changes and equal texts never straddle"),
        ({"data.folds": 5, "data.fold": 2}, "The test rows are fold 2 of 5, counted from 0."),
        (
            {"data.split_by": "label"},
            "split by a hash of their column label, so that the split never changes and equal v",
        ),
    ],
)
def test_how_the_rows_were_split(overrides: dict[str, Any], said: str, known: collect.Run) -> None:
    chosen = config.with_overrides(known.config, overrides)
    assert said in data.section(replace(known, config=chosen)).intro


def test_a_test_file_of_its_own_is_not_said_to_be_split(known: collect.Run) -> None:
    own = config.with_overrides(known.config, {"data.test": "test.csv"})
    found = data.section(replace(known, config=own)).intro
    assert "The test rows have files of their own. The others are split by a hash of their text" in found


def test_rows_that_are_read_in_windows_are_not_said_to_be_cut(known: collect.Run) -> None:
    windows = config.with_overrides(known.config, {"data.window": 16, "data.stride": 4})
    found = data.section(replace(known, config=windows))
    assert table(found, "Rows and tokens").note == (
        "Longer rows are read in windows of 16 tokens, of which neighbours share 4; none was cut."
    )
    assert not any("cut at" in block.chart for block in found.blocks if isinstance(block, Figure))
    assert table(data.section(known), "Rows and tokens").note == "No row was cut: all fit data.max_tokens = 64."


def test_labels_that_are_all_alike_are_said_to_be() -> None:
    figure = labels._bars(["a", "b"], np.array([7, 7]))
    assert figure.title == "2 labels of 7 rows each"
    assert "rarest" not in figure.note
    assert labels._bars(["a", "b"], np.array([6, 3])).title == "2 labels: a has 6 rows, 2.0 times the rarest"


def test_columns_of_dashes_are_no_figures() -> None:
    made = Table("", ("a", "b", "c"), [("-", "-", "x"), ("-", "0.5", "1")])
    assert [made.is_figure(column) for column in range(3)] == [False, True, False]


def test_a_restart_without_a_crash_is_marked_as_such(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    log = [json.loads(line) for line in (run / events.NAME).read_text().splitlines()]
    kept = [event for event in log if event["kind"] != "crashed"]
    (run / events.NAME).write_text("".join(json.dumps(event) + "\n" for event in kept))
    assert [(mark.x, mark.kind) for mark in curves.marks(collect.read(run))][2:] == [(10, "restart")]


def test_scores_have_intervals_that_hold_them(known: collect.Run) -> None:
    assert known.predictions is not None
    value, (low, high) = known.predictions.right.mean(), answers.intervals(known)["accuracy"]
    assert low < value < high
    rows = {row[0]: row[1:] for row in table(answers.section(known), "Scores").rows}
    assert rows["accuracy"] == (f"{value:.4f}", f"{low:.4f} to {high:.4f}")
    assert rows["AUC"][1] == "-"  # no sum over rows
    assert f"95 % interval {low:.3f} to {high:.3f}" in page_of(known.folder).text


def test_most_confused_pair_is_named(known: collect.Run) -> None:
    assert known.predictions is not None
    pairs = list(zip(known.predictions.target, known.predictions.prediction, strict=True))
    rows = table(answers.section(known), "Most confused").rows
    for true, said, count in rows:
        assert pairs.count((true, said)) == count
    assert sum(int(row[2]) for row in rows) == (~known.predictions.right).sum()


def test_worst_slice_is_the_planted_one(known: collect.Run) -> None:
    """English rows were all answered `login`; serial numbers make no slices: all of them together are all rows."""
    section = slices.section(known)
    assert table(section, "The same in figures").rows[0][0] == "language: en"
    assert table(section, "The same in figures").rows[0][4] == "worse"
    assert not any("serial" in str(row[0]) for row in table(section, "The same in figures").rows)


def test_hardest_rows_are_those_of_the_largest_loss(known: collect.Run) -> None:
    section = hardest.section(known)
    assert section is not None
    (cards,) = (block.cards for block in section.blocks if isinstance(block, Cards))
    assert known.predictions is not None
    largest = np.argsort(-known.predictions.loss)[:20]
    assert [card.where for card in cards] == [f"rows.csv:{row + 2}" for row in largest]
    assert cards[0].text == f"text number {largest[0]}"


def test_seconds_and_what_is_left_of_the_total(known: collect.Run) -> None:
    rows = {str(row[0]): row[2] for row in table(timing.section(known), "Seconds").rows}
    assert rows["train"] == "20.0"
    assert rows["input_wait"] == "0.2"
    shown = ("setup", "first_batch", "train", "evaluate", "checkpoint", "input_wait", "rest")
    assert set(rows) - {timing.LOST} == set(shown)


def test_seconds_of_a_start_without_an_end_are_told_and_not_shared_out(tmp_path: Path) -> None:
    """The second start of `reports.train` computed 10 of the 20 updates; the first one ran for a while and crashed."""
    run = make_run(tmp_path)
    log = [json.loads(line) for line in (run / events.NAME).read_text().splitlines()]
    times = {"created": 0.0, "tokenised": 1.0}
    begun = 0
    for event in log:
        begun += event["kind"] == "started"
        event["time"] = times.get(event["kind"], 100.0 * begun)
        if event["kind"] == "crashed":
            event["time"] = 130.0
    (run / events.NAME).write_text("".join(json.dumps(event) + "\n" for event in log))
    assert timing.lost(log) == 30.0
    assert timing.measured_updates(log) == 10
    rows = {str(row[0]): row[2:] for row in table(timing.section(collect.read(run)), "Seconds").rows}
    assert rows["train"] == ("20.0", "2,000.0")
    assert rows[timing.LOST] == ("30.0", "-")
    assert timing.lost(log[:-3]) >= 30.0  # the second one has no end, either


def test_drill_certificate(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fault = {"name": "a dead worker", "at_update": 20, "resumed_from": 16, "recomputed_updates": 4, "passed": True}
    found: dict[str, Any] = {"passed": True, "weights_identical": True, "order_identical": True, "rows_lost": 0}
    found |= {"rows_repeated": 0, "updates": 48, "workers": 2, "save_every": 8, "seconds": 99.0}
    found["faults"] = [{**fault, "seconds_to_next_update": 12.5}]
    events.append(run, "drilled", certificate=found)
    section = certificate.section(collect.read(run))
    assert table(section, "Each fault").rows == [("a dead worker", 20, 16, 4, "12.5", "passed")]
    assert "Passed: 1 faults in 48 updates of 2 workers" in page_of(run).text


# --------------------------------------------------------------------------------------------------- other kinds of run


def test_a_run_that_was_only_created(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path, trained=False)).text
    assert "The run has logged no update yet." in text
    assert "The run has left no predictions" in text
    assert "its seconds are not known" in text


def test_a_run_whose_store_is_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / ".tokens").rename(tmp_path / "elsewhere")
    assert "token store is no longer where the run left it" in page_of(run).text


def test_validation_answers_do_where_there_is_no_test(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_predictions(run, *answers_of(LABELS, 30, 0.5), split="valid")
    assert "answered on the 30 validation rows" in page_of(run).text


def test_answers_without_confidence_or_scores(tmp_path: Path) -> None:
    """As versions left them that measured no scores in full."""
    run, nothing = make_run(tmp_path), [float("nan")] * 30
    write_predictions(run, *answers_of(LABELS, 30, 0.5), score=nothing, measured=False)
    text = page_of(run).text
    assert "The run has left no scores-test.json" in text
    assert "calibration" not in text
    assert "confidence" not in text
    assert "Worst slice" not in text


def test_a_file_of_other_columns_is_refused_by_name(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    run = make_run(tmp_path, trained=False)
    path = predictions.path_of(run, "test")
    pyarrow.parquet.write_table(pa.table({"text": ["a"], "target": ["b"]}), path)
    with pytest.raises(UserError, match=rf"{path} lacks the columns position, row_id, source"):
        html.write(run)
    path.write_bytes(b"no parquet")
    with pytest.raises(UserError, match=rf"{path} cannot be read"):
        html.write(run)
    assert not (run / html.NAME).exists()


def test_a_report_that_fails_is_said_and_does_not_fail_the_run(tmp_path: Path) -> None:
    run, said = make_run(tmp_path), list[str]()
    predictions.path_of(run, "test").write_bytes(b"no parquet")
    driver._report(run, lambda event: said.append(event["text"]))
    (kept,) = run.glob("report-*.txt")
    assert "Traceback" in kept.read_text()
    assert said[-1].startswith(f"no report.html: {run}/predictions-test.parquet cannot be read")
    assert str(kept) in said[-1]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no run \(no config.yaml\)"):
        html.write(tmp_path)


def test_the_verb_prints_where_the_page_is(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["report", str(finished)])
    assert capsys.readouterr().out.strip() == str(finished / "report.html")


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
    events.append(run, "crashed", cause="crash", resumes_from=10, error=ATTACKS[0], stalled=[])
    events.append(run, "created", versions={ATTACKS[1]: ATTACKS[2]})
    targets, found = answers_of(ATTACKS[:6], 200, 0.5)
    text = [ATTACKS[row % 7] for row in range(200)]
    more: dict[str, Any] = {ATTACKS[1]: [ATTACKS[row % 5] for row in range(200)]}
    write_predictions(run, targets, found, text=text, source=ATTACKS[3], **more)
    raw = html.write(run).read_text(encoding="utf-8")
    page = Page(raw)
    drawn = {"svg", "text", "title", "rect", "line", "polyline", "circle"}
    blocks = {
        "html",
        "head",
        "meta",
        "style",
        "body",
        "header",
        "main",
        "footer",
        "section",
        "nav",
        "figure",
        "figcaption",
    }
    inline = {"h1", "h2", "h3", "p", "a", "div", "span", "b", "table", "tr", "th", "td", "pre", "article", "blockquote"}
    assert set(page.tags) <= drawn | blocks | inline | {"dl", "dt", "dd", "wbr"}
    assert [name for name, _ in page.attributes if name.startswith("on")] == []
    links = {value for name, value in page.attributes if name in ("href", "src")}
    assert links == {f"#{anchor}" for anchor in ("run", "data", "curves", "answers", "slices", "hardest", "time")}
    assert "<script>alert(1)</script>" in page.text  # to be read, not to be run
    assert "{{ 7 * 7 }}" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", raw)


def test_the_page_forbids_itself_scripts_and_requests(finished: Path) -> None:
    page = page_of(finished)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    raw = (finished / html.NAME).read_text(encoding="utf-8")
    assert "http://" not in raw
    assert "https://" not in raw
    assert "url(" not in raw
    assert "prefers-color-scheme: dark" in raw


def test_a_huge_run_makes_a_page_of_bounded_size(tmp_path: Path) -> None:
    """100,000 updates, 300 labels of 200 characters, 20,000 answers with texts of 2,000, ten columns of slices."""
    run = make_run(tmp_path, trained=False)
    lines = [{"time": 1.0, "kind": "started", "update": 0, "of": 100_000, "workers": 2, "precision": "fp32"}]
    for update in range(1, 100_001):
        lines.append({"time": float(update), "kind": "progress", "update": update, "of": 100_000, "loss": 1.0 / update})
        lines[-1] |= {"rows": 64 * update, "real_tokens": 640 * update}
    for update in range(50, 100_001, 50):
        many = {f"score_{place}": 0.5 for place in range(50)}
        lines.append({"time": 1.0, "kind": "evaluated", "split": "valid", "update": update, "scores": many})
    lines += [{"time": 1.0, "kind": "yielded", "reason": "x" * 5000, "update": 5}] * 1000
    with (run / events.NAME).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    labels = [f"{code} " + "long label " * 18 for code in range(300)]
    columns: dict[str, Any] = {f"c{n}": [f"{row % 30} " + "v" * 300 for row in range(20_000)] for n in range(10)}
    write_predictions(
        run, *answers_of(labels, 20_000, 0.3), text=["<&> word " * 222] * 20_000, measured=False, **columns
    )
    write_scores(run, *answers_of(labels, 20_000, 0.3), c0=columns["c0"])
    page = html.write(run)
    assert 100_000 < page.stat().st_size < LIMIT
