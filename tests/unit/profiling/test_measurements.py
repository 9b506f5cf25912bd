"""The figures of a profile, its tables, its page and its trace: of workers whose updates can be added up by hand."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rtrain.core.errors import UserError
from rtrain.parallel import profiler
from rtrain.parallel.profiler import STEP_PARTS
from rtrain.profiling import profile, tables
from tests.support.profiles import LENGTH, document, row, worker


def test_the_parts_of_a_worker_add_up_to_its_update() -> None:
    (profile_row,) = row()["worker_summaries"]
    expected = {"get_batch": 5, "forward": 30, "backward": 40, "gradient_sync": 5, "optimizer": 10, "idle": 10}
    assert profile_row["parts"] == pytest.approx({name: expected.get(name, 0) / 1e3 for name in STEP_PARTS})
    assert sum(profile_row["parts"].values()) == pytest.approx(profile_row["step_s"])
    assert (profile_row["step_s"], profile_row["hidden"], profile_row["cores_busy"]) == pytest.approx((0.1, 0.02, 0.5))
    assert [step["step"] for step in profile_row["steps"]] == [
        2,
        3,
        4,
        5,
    ]  # neither the warm-up nor the last, which saves


def test_rates_are_of_all_workers_and_a_checkpoint_is_spread_over_the_updates_between_two() -> None:
    profile_row = row(2, save_every=25)
    assert (profile_row["rows_per_second"], profile_row["real_tokens_per_second"]) == pytest.approx((160, 4000))
    assert (profile_row["micro_batches_per_step"], profile_row["median_step_s"]) == pytest.approx((2, 0.1))
    assert profile_row["checkpoint"] == pytest.approx({"seconds": 0.05, "every": 25, "per_step": 0.002})


def test_rows_and_tokens_of_a_replica_on_several_workers_count_once() -> None:
    """Each of its workers has all of them."""
    profile_row = row(4, workers_per_replica=2)
    assert (profile_row["rows_per_second"], profile_row["real_tokens_per_second"]) == pytest.approx((160, 4000))
    assert (profile_row["workers"], profile_row["micro_batches_per_step"]) == (4, 2)


def test_a_start_that_was_interrupted_is_no_profile() -> None:
    full = worker()
    part = replace(full, steps=full.steps[3:])
    facts = {key: row()[key] for key in ("name", "settings", "precision", "device", "global_batch_size")}
    known_values = profile.ProfiledRunInfo(**facts, order_digest="", save_every=1, run_steps=1)
    with pytest.raises(UserError) as error:
        profile.summarize_row(known_values, [part], LENGTH)
    assert error.value.code == "interrupted"


def test_scaling_is_told_beside_the_fewest_workers_with_the_digest_of_the_order() -> None:
    lines = tables.scaling_rows([row(2), row(1, slower=3), row(4, order_digest="cd" * 32)])
    assert [line["workers"] for line in lines] == [1, 2, 4]
    assert [line["speedup"] for line in lines] == pytest.approx([1, 3, 3])
    assert [line["efficiency"] for line in lines] == pytest.approx([1, 1.5, 0.75])
    assert [line["gradient_sync"] for line in lines] == pytest.approx([0.015, 0.005, 0.005])
    assert lines[0]["run_seconds"] == pytest.approx(300)
    assert [line["same_order"] for line in lines] == [True, True, False]


def test_workers_that_share_cores_are_told_and_so_is_another_order() -> None:
    assert tables.scaling_warnings([row(1), row(2)]) == []
    (crowded,) = tables.scaling_warnings([row(1), row(4)])
    assert "4 workers" in crowded
    assert len(tables.scaling_warnings([row(1), row(2, order_digest="cd")])) == 1


def test_rows_that_differ_otherwise_are_no_scaling() -> None:
    other = row(2, settings={"train.workers": 2, "train.precision": "bf16"})
    assert tables.scaling_rows([row(1), other]) == tables.scaling_rows([row(1)]) == []


def test_the_terminal_shows_every_part_that_took_time() -> None:
    text = tables.format_profile(document(row(1), row(2)))
    head = next(line for line in text.splitlines() if line.startswith("row ") and "worker" in line)
    sync = tables.part_label(profiler.GRADIENT_SYNC)
    shown = f"row worker get batch forward backward {sync} optimizer idle step hidden cores busy"
    assert " ".join(head.split()) == shown
    assert "2 cores of a processor, whose load was 0.5 and 2.5 before and after" in text
    first = next(line for line in text.splitlines() if line.startswith("workers=1"))
    assert " ".join(first.split()) == "workers=1 0 5.00 30.0 40.0 5.00 10.0 10.0 100.0 20.0 0.50"
    assert "efficiency" in text
    assert "abababababab" in text


class Words(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.data: list[str] = []
        self.bars = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.bars += tag == "rect" and str(dict(attrs).get("class", "")).startswith("s")

    def handle_data(self, data: str) -> None:
        self.data.append(data)


def test_the_page_has_a_bar_of_parts_for_each_worker() -> None:
    words = Words()
    words.feed(tables.render_profile(document(row(1), row(2))))
    text = " ".join(words.data)
    assert "workers=2, worker 1, forward: 30, 30.0 %" in text
    assert all(name in text for name in ("Where the time goes", "Scaling", "get batch"))
    parts = 6
    assert words.bars >= 3 * parts


def test_two_profiles_stand_on_one_page_on_one_scale() -> None:
    documents = [document(row()), document(row(slower=2), name="other")]
    table = tables.comparison_table(documents, ["one", "other"])
    result = {line[1]: line[2:] for line in table.rows}
    assert result["forward"] == ("30.0", "60.0", "2.00")
    assert result["step"] == ("100.0", "200.0", "2.00")
    words = Words()
    words.feed(tables.render_comparison(documents, ["one", "other"]))
    text = " ".join(words.data)
    assert "one: workers=1, worker 0, forward: 30, 30.0 %" in text
    assert "other: workers=1, worker 0, forward: 60, 30.0 %" in text


def test_rows_that_have_none_beside_them_are_told() -> None:
    documents = [document(row(), row(workers=2), row(workers=4)), document(row(), name="other")]
    (note,) = tables.unpaired_notes(documents, ["one", "other"])
    assert tables.unpaired_notes([documents[1], documents[1]], ["one", "other"]) == []
    words = Words()
    words.feed(tables.render_comparison(documents, ["one", "other"]))
    assert note in " ".join(words.data)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "not_found"),
        ("{", "other_version"),
        ('{"kind": "other"}', "other_version"),
        (json.dumps(document(version=99)), "other_version"),
        (json.dumps({**document(rows=[]), "name": None}), "incomplete"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str | None, code: str) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError) as error:
        profile.read_profile(tmp_path / "a.json")
    assert error.value.code == code


# --------------------------------------------------------------------------------------------------------------- trace


def test_a_trace_nests_on_the_main_thread_and_pairs_what_goes_beside_it() -> None:
    """What Perfetto asks of the format: complete events of a thread nest, asynchronous ones come in pairs."""
    trace_events = profile.build_trace_events("workers=2", 1, [worker(0), worker(1)])
    json.dumps(trace_events)
    assert {item["pid"] for item in trace_events} == {1000, 1001}
    names = {item["args"]["name"] for item in trace_events if item["name"] == "process_name"}
    assert names == {"workers=2, worker 0 on here", "workers=2, worker 1 on here"}
    for process in (1000, 1001):
        own_part = [item for item in trace_events if item["pid"] == process]
        spans = sorted((item for item in own_part if item["ph"] == "X"), key=lambda item: (item["ts"], -item["dur"]))
        assert len([span for span in spans if span["cat"] == "step"]) == LENGTH.total_steps
        open_until: list[float] = []
        for item in spans:
            while open_until and open_until[-1] <= item["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or item["ts"] + item["dur"] <= open_until[-1] + 1e-6, item
            open_until.append(item["ts"] + item["dur"])
        started_at = {item["id"]: item["ts"] for item in own_part if item["ph"] == "b"}
        ended = {item["id"]: item["ts"] for item in own_part if item["ph"] == "e"}
        assert started_at.keys() == ended.keys()
        assert len(started_at) == 2 * LENGTH.total_steps
        assert all(started_at[item] <= ended[item] for item in started_at)


def test_the_clocks_of_workers_are_set_to_the_same_time() -> None:
    """Worker 1's clock began a second later: its first update is a second after worker 0's."""
    trace_events = profile.build_trace_events("row", 0, [worker(0), worker(1)])
    first = [
        next(
            trace_event["ts"]
            for trace_event in trace_events
            if trace_event["pid"] == rank and trace_event["name"] == "step 0"
        )
        for rank in (0, 1)
    ]
    assert first == pytest.approx([0.0, 1e6])
