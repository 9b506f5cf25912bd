"""Lines about each class: rare ones are never called good or bad, nor left out."""

from typing import Any

from rtrain.metrics import per_class


def scored(name: str, f1: float, support: int) -> dict[str, Any]:
    return {"class": name, "precision": f1, "recall": f1, "f1": f1, "support": support, "predicted": support}


def class_names(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.startswith(" ") and "F1" not in line]


def test_all_classes_have_a_line_up_to_twenty_and_the_rare_come_first() -> None:
    every = [scored("good", 0.99, 500), scored("bad", 0.4, 20), scored("rare", 0.9, 4), scored("none", 0.0, 0)]
    lines = list(per_class.format_classes(every))
    assert class_names(lines) == ["none", "rare", "bad", "good"]
    assert [per_class.TOO_FEW_ROWS in line for line in lines[1:]] == [True, True, False, False]
    assert "0.4000" in lines[3]
    assert list(per_class.format_classes([])) == []


def test_of_many_classes_the_worst_ten_have_a_line() -> None:
    every = [scored(f"c{place}", place / 100, 10) for place in range(30)] + [scored("rare", 0.0, 2)]
    lines = list(per_class.format_classes(every))
    assert class_names(lines) == [f"c{place}" for place in range(10)]
    assert any("rare (2)" in line and per_class.TOO_FEW_ROWS in line for line in lines)


def test_two_models_stand_beside_each_other() -> None:
    first, other = [scored("a", 0.5, 9), scored("b", 0.9, 8)], [scored("b", 0.7, 8), scored("a", 0.6, 9)]
    combined = per_class.pair_classes(first, other)
    assert [(entry["class"], entry["first"]["recall"], entry["other"]["recall"]) for entry in combined] == [
        ("a", 0.5, 0.6),
        ("b", 0.9, 0.7),
    ]
    assert class_names(list(per_class.format_pairs(combined, ("A", "B")))) == ["a", "b"]
