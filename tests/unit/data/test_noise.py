"""Noise on words: the same everywhere, of training rows only, and of the shares asked for."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from rtrain.data.augment.noise import TextNoise, add_noise, add_noise_to_tokens

SOME = TextNoise(typo=0.1, swap=0.1, drop=0.1, mask=0.1)
TEXT = "please send the refund for order 1234 back\n\nto my old account today"


def test_the_same_text_everywhere() -> None:
    """Written down: a change of these is another data set for the same seed."""
    noisy = [add_noise(TEXT, SOME, seed=1, copy=copy, row=2**64 - 1) for copy in (0, 1, 2)]
    assert noisy == [
        "send the reund forr order 1234 [MASK]\n\nto my old account today",
        "please snd [MASK] [MASK] for [MASK] 1234 [MASK]\n\not my account old today",
        "please send refund for 1234 back\n\nmy today",
    ]


def test_another_process_gives_the_same() -> None:
    script = (
        "from rtrain.data.augment.noise import TextNoise, add_noise; "
        f"print(repr(add_noise({TEXT!r}, TextNoise(0.2, 0.2, 0.2, 0.2), 3, 4, 5)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr(add_noise(TEXT, TextNoise(0.2, 0.2, 0.2, 0.2), 3, 4, 5))


def test_each_kind_by_hand() -> None:
    assert add_noise("a bb ccc", TextNoise(mask=1.0, mask_token="<mask>"), 0, 0, 0) == "<mask> <mask> <mask>"
    assert add_noise("a bb ccc", TextNoise(swap=1.0), 0, 0, 0) == "bb ccc a"  # a moves with each swap
    assert add_noise("a bb", TextNoise(drop=1.0), 0, 0, 0) == "a bb"  # never empty
    assert add_noise(" \n", TextNoise(drop=1.0), 0, 0, 0) == " \n"
    assert add_noise("", SOME, 0, 0, 0) == ""


@pytest.mark.parametrize("word", ["1234", "A4", "$5.00", "a", "?!"])
def test_words_with_digits_or_one_letter_have_no_typos(word: str) -> None:
    assert {add_noise(word, TextNoise(typo=1.0), 0, copy, 0) for copy in range(50)} == {word}


def test_typos_of_a_word_are_the_three_kinds() -> None:
    counts = Counter(add_noise("cat.", TextNoise(typo=1.0), 0, copy, 0) for copy in range(3000))
    assert set(counts) == {"act.", "cta.", "at.", "ct.", "ca.", "ccat.", "caat.", "catt."}
    # Changing places is not possible at the last letter: there it is left out instead. Each pair (how, where) is 1/9.
    assert counts["ca."] == pytest.approx(3000 * 2 / 9, rel=0.15)
    assert counts["act."] == pytest.approx(3000 / 9, rel=0.2)


def test_shares_are_those_asked_for() -> None:
    tokens = ["word"] * 20_000
    noisy = add_noise_to_tokens(tokens, TextNoise(typo=0.2, swap=0.1, drop=0.1, mask=0.3), 0, 0, 0)
    assert len(noisy) == len(tokens)
    assert noisy.count("[MASK]") / 20_000 == pytest.approx(0.3, abs=0.015)
    assert sum(token not in ("word", "[MASK]") for token in noisy) / 20_000 == pytest.approx(0.2, abs=0.015)
    left = add_noise(" ".join(tokens), TextNoise(drop=0.25), 0, 0, 0).split()
    assert len(left) / 20_000 == pytest.approx(0.75, abs=0.015)


noises = st.builds(TextNoise, *[st.floats(0, 0.25)] * 4)


@settings(deadline=None)
@given(st.text(max_size=60), noises, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_any_text_keeps_its_words_and_is_never_empty(text: str, noise: TextNoise, seed: int, row: int) -> None:
    noisy = add_noise(text, noise, seed, 0, row)
    assert noisy == add_noise(text, noise, seed, 0, row)
    assert bool(noisy.split()) == bool(text.split())
    assert len(noisy.split()) <= len(text.split())
    tokens = text.split()
    changed = add_noise_to_tokens(tokens, noise, seed, 0, row)
    assert len(changed) == len(tokens)
    assert all(changed)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["cat", "dog", "owl"]), min_size=1, max_size=12), st.integers(0, 99))
def test_swaps_only_reorder_and_drops_only_remove(words: list[str], copy: int) -> None:
    text = " ".join(words)
    assert Counter(add_noise(text, TextNoise(swap=0.5), 0, copy, 0).split()) == Counter(words)
    rest = iter(words)
    assert all(word in rest for word in add_noise(text, TextNoise(drop=0.5), 0, copy, 0).split())  # in their order
