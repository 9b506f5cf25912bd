"""The figures of a profile, its tables, its page and its trace: of workers whose updates can be added up by hand."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rtrain.core.errors import UserError
from rtrain.profiling import measurements, page, profile, tables
from rtrain.trainer.step_timing import PARTS
from tests.profiles import LENGTH, document, row, worker


def test_the_parts_of_a_worker_add_up_to_its_update() -> None:
    (one,) = row()["of_workers"]
    expected = {"get_batch": 5, "forward": 30, "backward": 40, "exchange": 5, "optimizer": 10, "idle": 10}
    assert one["parts"] == pytest.approx({name: expected.get(name, 0) / 1e3 for name in PARTS})
    assert sum(one["parts"].values()) == pytest.approx(one["update"])
    assert (one["update"], one["hidden"], one["cores_busy"]) == pytest.approx((0.1, 0.02, 0.5))
    assert [each["update"] for each in one["each"]] == [2, 3, 4, 5]  # neither the warm-up nor the last, which saves


def test_rates_are_of_all_workers_and_a_checkpoint_is_spread_over_the_updates_between_two() -> None:
    found = row(2, save_every=25)
    assert (found["rows_per_second"], found["real_tokens_per_second"]) == pytest.approx((160, 4000))
    assert (found["passes_per_update"], found["median"]) == pytest.approx((2, 0.1))
    assert found["checkpoint"] == pytest.approx({"seconds": 0.05, "every": 25, "per_update": 0.002})


def test_rows_and_tokens_of_a_replica_on_several_workers_count_once() -> None:
    """Each of its workers has all of them."""
    found = row(4, within=2)
    assert (found["rows_per_second"], found["real_tokens_per_second"]) == pytest.approx((160, 4000))
    assert (found["workers"], found["passes_per_update"]) == (4, 2)


def test_a_start_that_was_interrupted_is_no_profile() -> None:
    whole = worker()
    part = replace(whole, updates=whole.updates[3:])
    facts = {key: row()[key] for key in ("name", "settings", "precision", "device", "rows_per_update")}
    known = measurements.Facts(**facts, order_digest="", save_every=1, run_updates=1)
    with pytest.raises(UserError) as error:
        measurements.of_row(known, [part], LENGTH)
    assert error.value.code == "interrupted"


def test_scaling_is_told_beside_the_fewest_workers_with_the_digest_of_the_order() -> None:
    lines = tables.scaling([row(2), row(1, slower=3), row(4, order_digest="cd" * 32)])
    assert [line["workers"] for line in lines] == [1, 2, 4]
    assert [line["speedup"] for line in lines] == pytest.approx([1, 3, 3])
    assert [line["efficiency"] for line in lines] == pytest.approx([1, 1.5, 0.75])
    assert [line["exchange"] for line in lines] == pytest.approx([0.015, 0.005, 0.005])
    assert lines[0]["run_seconds"] == pytest.approx(300)
    assert [line["same_order"] for line in lines] == [True, True, False]


def test_workers_that_share_cores_are_told_and_so_is_another_order() -> None:
    assert tables.warnings([row(1), row(2)]) == []
    (crowded,) = tables.warnings([row(1), row(4)])
    assert "4 workers" in crowded
    assert len(tables.warnings([row(1), row(2, order_digest="cd")])) == 1


def test_rows_that_differ_otherwise_are_no_scaling() -> None:
    other = row(2, settings={"train.workers": 2, "train.precision": "bf16"})
    assert tables.scaling([row(1), other]) == tables.scaling([row(1)]) == []


def test_the_terminal_shows_every_part_that_took_time() -> None:
    text = tables.text(document(row(1), row(2)))
    head = next(line for line in text.splitlines() if line.startswith("row ") and "worker" in line)
    shown = "row worker get batch forward backward exchange optimizer idle update hidden cores busy"
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
    words.feed(page.page(document(row(1), row(2))))
    text = " ".join(words.data)
    assert "workers=2, worker 1, forward: 30, 30.0 %" in text
    assert all(name in text for name in ("Where the time goes", "Scaling", "get batch"))
    parts = 6
    assert words.bars >= 3 * parts


def test_two_profiles_stand_on_one_page_on_one_scale() -> None:
    documents = [document(row()), document(row(slower=2), name="other")]
    table = tables.beside(documents, ["one", "other"])
    found = {line[1]: line[2:] for line in table.rows}
    assert found["forward"] == ("30.0", "60.0", "2.00")
    assert found["update"] == ("100.0", "200.0", "2.00")
    words = Words()
    words.feed(page.beside(documents, ["one", "other"]))
    text = " ".join(words.data)
    assert "one: workers=1, worker 0, forward: 30, 30.0 %" in text
    assert "other: workers=1, worker 0, forward: 60, 30.0 %" in text


def test_rows_that_have_none_beside_them_are_told() -> None:
    documents = [document(row(), row(workers=2), row(workers=4)), document(row(), name="other")]
    (note,) = tables.unpaired(documents, ["one", "other"])
    assert tables.unpaired([documents[1], documents[1]], ["one", "other"]) == []
    words = Words()
    words.feed(page.beside(documents, ["one", "other"]))
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
        profile.read(tmp_path / "a.json")
    assert error.value.code == code


# --------------------------------------------------------------------------------------------------------------- trace


def test_a_trace_nests_on_the_main_thread_and_pairs_what_goes_beside_it() -> None:
    """What Perfetto asks of the format: complete events of a thread nest, asynchronous ones come in pairs."""
    found = profile.trace_events("workers=2", 1, [worker(0), worker(1)])
    json.dumps(found)
    assert {one["pid"] for one in found} == {1000, 1001}
    names = {one["args"]["name"] for one in found if one["name"] == "process_name"}
    assert names == {"workers=2, worker 0 on here", "workers=2, worker 1 on here"}
    for process in (1000, 1001):
        own = [one for one in found if one["pid"] == process]
        spans = sorted((one for one in own if one["ph"] == "X"), key=lambda one: (one["ts"], -one["dur"]))
        assert len([one for one in spans if one["cat"] == "update"]) == LENGTH.until
        open_until: list[float] = []
        for one in spans:
            while open_until and open_until[-1] <= one["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or one["ts"] + one["dur"] <= open_until[-1] + 1e-6, one
            open_until.append(one["ts"] + one["dur"])
        begun = {one["id"]: one["ts"] for one in own if one["ph"] == "b"}
        ended = {one["id"]: one["ts"] for one in own if one["ph"] == "e"}
        assert begun.keys() == ended.keys()
        assert len(begun) == 2 * LENGTH.until
        assert all(begun[one] <= ended[one] for one in begun)


def test_the_clocks_of_workers_are_set_to_the_same_time() -> None:
    """Worker 1's clock began a second later: its first update is a second after worker 0's."""
    found = profile.trace_events("row", 0, [worker(0), worker(1)])
    first = [next(one["ts"] for one in found if one["pid"] == rank and one["name"] == "update 0") for rank in (0, 1)]
    assert first == pytest.approx([0.0, 1e6])
