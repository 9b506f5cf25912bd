"""API keys: the key file, its changes, and authorization."""

import asyncio
import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serve.auth import api_keys
from serve.auth.api_keys import (
    ApiKey,
    Authenticator,
    KeyStore,
    RateLimiter,
    add_key,
    find_key,
    read_keys,
    required_scope,
    revoke_key,
)
from serve.schemas.predict import RequestError
from tests.support.refusals import refused_with


def bearer(plain: str) -> list[bytes]:
    return [f"Bearer {plain}".encode()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


# ----------------------------------------------------------------------------------------------------------- the file


def test_the_file_has_the_hash_of_a_key_and_is_its_owner_s_alone(path: Path) -> None:
    plain = add_key(path, "shop", ("predict", "metrics"), "100/minute")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    [key] = read_keys(path)
    assert (key.name, key.scopes, key.rate) == ("shop", ("predict", "metrics"), "100/minute")
    assert key.sha256 == hashlib.sha256(plain.encode()).hexdigest()
    assert plain.split("_")[:2] == ["rtrain", key.id]
    assert plain.split("_", 2)[2] not in path.read_text()
    assert len({add_key(path, f"key-{number}") for number in range(20)}) == 20
    assert len(read_keys(path)) == 21
    assert os.listdir(path.parent) == [path.name], "a draft was left behind"


def test_a_revoked_key_is_gone_and_the_others_stay(path: Path) -> None:
    add_key(path, "shop")
    before = add_key(path, "desk")
    revoke_key(path, "shop")
    [left] = read_keys(path)
    assert left.name == "desk"
    assert find_key({left.id: left}, bearer(before)) == left
    with refused_with("unknown_name"):
        revoke_key(path, "shop")


@pytest.mark.parametrize(
    ("name", "rate", "code"),
    [
        *((name, None, "invalid_name") for name in ("", "a b", "x" * 65, "shop\n")),
        *(("shop", rate, "invalid") for rate in ("fast", "0/minute", "5/0minute", "5/minute;1/second", "5/fortnight")),
        ("shop", f"1{40 * '0'}/second", "invalid"),
        ("twin", None, "already_exists"),
    ],
)
def test_what_cannot_be_a_key_is_refused_and_changes_nothing(
    path: Path, name: str, rate: str | None, code: str
) -> None:
    add_key(path, "twin")
    before = path.read_bytes()
    with refused_with(code):
        add_key(path, name, rate=rate)
    assert path.read_bytes() == before


def test_keys_that_are_added_at_a_time_are_all_there(path: Path) -> None:
    threads = [threading.Thread(target=add_key, args=(path, f"key-{number}")) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_keys(path)} == {f"key-{number}" for number in range(12)}


@pytest.mark.parametrize("rate", ["1/second", "100/2 minutes", "5 per hour", "5/10hours", "999999999/year"])
def test_a_rate_is_one_number_and_one_span(rate: str) -> None:
    assert api_keys.parse_rate(rate).amount == int(rate.replace("/", " ").split()[0])


def test_a_file_that_another_user_has_or_anyone_may_replace_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_key(path, "shop")
    path.parent.chmod(0o777)
    with refused_with("open_to_others"):
        read_keys(path)
    path.parent.chmod(0o1777)  # as /tmp is: there only its owner replaces a file
    assert len(read_keys(path)) == 1
    fstat = os.fstat

    def foreign(file: int) -> os.stat_result:
        facts = [*fstat(file)]
        facts[stat.ST_UID] = os.getuid() + 1
        return os.stat_result(facts)

    monkeypatch.setattr(os, "fstat", foreign)
    with refused_with("open_to_others"):
        read_keys(path)


def test_a_link_to_the_file_stays_a_link(path: Path) -> None:
    link = path.with_name("link.json")
    link.symlink_to(path)
    add_key(link, "shop")
    assert link.is_symlink()
    assert [key.name for key in read_keys(path)] == ["shop"]


RECORD = {"id": "0" * 8, "name": "a", "sha256": "0" * 64, "scopes": ["predict"], "created": ""}
WRONG = ({"id": "../../etc"}, {"sha256": "short"}, {"scopes": ["all"]}, {"rate": "often"}, {"plain": "secret"})
BAD_FILES: list[object] = [
    *(b"", b'{"version": 1, "keys": [{"id"', b"\x80\x81", [], {"version": 2, "keys": []}),
    *({"keys": [{**RECORD, **wrong}]} for wrong in WRONG),
    *({"keys": [RECORD, {**RECORD, **other}]} for other in ({"id": "1" * 8}, {"name": "b"})),
]


@pytest.mark.parametrize("content", BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_file_is_refused(path: Path, content: object) -> None:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    path.chmod(0o600)
    with refused_with("invalid_file"):
        read_keys(path)


def test_a_file_that_others_may_write_is_refused(path: Path) -> None:
    add_key(path, "shop")
    path.chmod(0o644)
    assert len(read_keys(path)) == 1, "a mounted secret can be read by others"
    path.chmod(0o620)
    with refused_with("open_to_others"):
        read_keys(path)


# ----------------------------------------------------------------------------------------------------- while it changes


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def names(key_store: KeyStore) -> set[str]:
    return {key.name for key in key_store.current().values()}


def test_a_change_is_seen_after_a_second_and_the_file_is_looked_at_no_sooner(path: Path) -> None:
    add_key(path, "shop")
    clock = Clock()
    key_store = KeyStore(path, clock)
    add_key(path, "desk")
    clock.now = 0.99
    assert names(key_store) == {"shop"}
    clock.now = 1.0
    assert names(key_store) == {"shop", "desk"}
    revoke_key(path, "shop")
    clock.now = 1.99
    assert names(key_store) == {"shop", "desk"}
    clock.now = 2.0
    assert names(key_store) == {"desk"}
    revoke_key(path, "desk")
    clock.now = 3.0
    assert names(key_store) == set(), "a file without keys is a good one: it lets nobody in"


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def open_to_others(path: Path) -> None:
    data = json.loads(path.read_text())
    data["keys"].append({**RECORD, "name": "intruder"})
    path.write_text(json.dumps(data))
    path.chmod(0o666)


@pytest.mark.parametrize("spoil", [torn, Path.unlink, open_to_others])
def test_a_file_gone_bad_changes_nothing_and_is_told_once(
    path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, api_keys.__name__)  # whatever a library has made of the root's
    add_key(path, "shop")
    good, clock = path.read_bytes(), Clock()
    key_store = KeyStore(path, clock)
    spoil(path)
    for now in range(1, 4):
        clock.now = now
        assert names(key_store) == {"shop"}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    path.write_bytes(good)
    path.chmod(0o600)
    add_key(path, "desk")
    clock.now = 4
    assert names(key_store) == {"shop", "desk"}
    spoil(path)
    clock.now = 5
    assert names(key_store) == {"shop", "desk"}
    assert len(caplog.records) == 2, "a second fault is logged again"


def test_readers_see_whole_files_alone_while_it_is_written(path: Path) -> None:
    """A thousand looks of a reader beside a writer: each sees the standing key, and none finds the file torn."""
    plain, done = add_key(path, "standing"), threading.Event()

    def write() -> None:
        for number in range(30):
            add_key(path, f"key-{number}")
            revoke_key(path, f"key-{number}")
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    looks = 0
    while not done.is_set() or looks < 1000:
        assert find_key({key.id: key for key in read_keys(path)}, bearer(plain))
        looks += 1
    writer.join()


# ------------------------------------------------------------------------------------------------------- who is let in


def admitted(path: Path, scope: api_keys.KeyScope, authorization: list[bytes]) -> ApiKey:
    return asyncio.run(Authenticator(KeyStore(path), RateLimiter()).authorize(scope, authorization))


def test_a_key_opens_what_its_scopes_say(path: Path) -> None:
    shop, watch = add_key(path, "shop"), add_key(path, "watch", ("metrics",))
    assert admitted(path, "predict", bearer(shop)).name == "shop"
    assert admitted(path, "metrics", bearer(watch)).name == "watch"
    assert admitted(path, "predict", [f"bEARER   {shop}".encode()]).name == "shop"
    refused: tuple[tuple[str, api_keys.KeyScope], ...] = ((shop, "metrics"), (watch, "predict"))
    for plain, scope in refused:
        with pytest.raises(RequestError) as caught:
            admitted(path, scope, bearer(plain))
        assert caught.value.status == 403


def wrong_keys(plain: str) -> list[list[bytes]]:
    right, other = plain.encode(), "rtrain_" + "0" * 8 + "_" + "A" * 43
    last = b"A" if right[-1:] != b"A" else b"B"
    return [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [right],
        [b"Basic " + right],
        [b"Bearer " + right[:-1]],
        [b"Bearer " + right[:-1] + last],
        [b"Bearer " + right + b"A"],
        [b"Bearer " + right + b" "],
        [b"Bearer " + right + b"\n"],
        [b"Bearer " + right.upper()],
        [b"Bearer " + right + b", Bearer " + right],
        [b"Bearer " + right, b"Bearer " + right],
        [b"Bearer " + other.encode()],
        [b"Bearer " + right[:16] + b"A" * 43],
        [b"Bearer \xff\xfe"],
        [b"Bearer " + b"x" * 100_000],
    ]


@pytest.mark.parametrize("number", range(18))
def test_a_wrong_key_is_refused(path: Path, number: int) -> None:
    wrong = wrong_keys(add_key(path, "shop"))
    assert len(wrong) == 18
    with pytest.raises(RequestError) as caught:
        admitted(path, "predict", wrong[number])
    assert caught.value.status == 401
    assert caught.value.headers == {"www-authenticate": 'Bearer realm="rtrain"'}


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("/", None),
        ("/v2/health/live", None),
        ("/v2/health/ready", None),
        ("/metrics", "metrics"),
        ("/predict", "predict"),
        ("/v2", "predict"),
        ("/v2/models/tiny/infer", "predict"),
        ("/openapi.json", "predict"),
        ("/docs", "predict"),
        ("/nowhere", "predict"),
        ("", "predict"),
        ("//", "predict"),
        ("/v2/health/live/", "predict"),
        ("/v2/health/../../predict", "predict"),
        ("/V2/HEALTH/LIVE", "predict"),
        ("/metrics/", "predict"),
    ],
)
def test_every_path_asks_for_a_key_but_these(path: str, scope: str | None) -> None:
    assert required_scope(path) == scope


def test_a_key_of_some_models_opens_no_other(path: Path) -> None:
    limited = add_key(path, "shop", ("predict", "metrics"), models=("topic",))
    door = Authenticator(KeyStore(path), RateLimiter())
    with pytest.raises(RequestError) as refused:
        asyncio.run(door.authorize("predict", bearer(limited), "mood"))
    assert refused.value.status == 403
    assert asyncio.run(door.authorize("predict", bearer(limited), "topic")).name == "shop"
    assert asyncio.run(door.authorize("metrics", bearer(limited), "mood")).name == "shop"  # of no model


def test_a_rate_counts_each_key_by_itself_and_says_when_to_come_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time() // 60 * 60
    monkeypatch.setattr(time, "time", lambda: now)
    shop = add_key(path, "shop", rate="3/minute")
    desk = add_key(path, "desk", rate="3/minute")
    free = add_key(path, "free")
    door = Authenticator(KeyStore(path), RateLimiter())
    for _ in range(3):
        asyncio.run(door.authorize("predict", bearer(shop)))
    with pytest.raises(RequestError) as caught:
        asyncio.run(door.authorize("predict", bearer(shop)))
    wait_s = int(caught.value.headers["retry-after"])
    assert (caught.value.status, 1 <= wait_s <= 60) == (429, True)
    for _ in range(3):
        asyncio.run(door.authorize("predict", bearer(desk)))
    for _ in range(50):
        asyncio.run(door.authorize("predict", bearer(free)))
    now += 121
    asyncio.run(door.authorize("predict", bearer(shop)))


def processes(number: int) -> list[RateLimiter]:
    """The rates of so many processes that answer side by side."""
    limiters: list[RateLimiter] = []

    def besides(index: int) -> api_keys.FetchOtherCounts:
        async def fetch_other_counts(key: str, rate: str) -> list[int]:
            await asyncio.sleep(0)
            return [rates.count_used(key, rate) for place, rates in enumerate(limiters) if place != index]

        return fetch_other_counts

    limiters += [RateLimiter(besides(index)) for index in range(number)]
    return limiters


@pytest.mark.parametrize("number", [1, 2, 4, 7])
def test_a_client_gets_its_rate_whole_from_one_process_of_several(path: Path, number: int) -> None:
    """Over gRPC a connection stays with one replica."""
    add_key(path, "shop", rate="100/hour")
    [key] = read_keys(path)
    rates, *_ = processes(number)

    async def main() -> list[bool]:
        return [await rates.acquire_or_retry_after(key) == 0 for _ in range(110)]

    assert asyncio.run(main()) == [True] * 100 + [False] * 10


@pytest.mark.parametrize("rate", [1, 3, 10, 100])
@pytest.mark.parametrize("at_once", [False, True])
def test_processes_together_let_in_no_more_than_a_rate(path: Path, rate: int, at_once: bool) -> None:
    add_key(path, "shop", rate=f"{rate}/hour")
    [key] = read_keys(path)
    limiters = processes(4)

    async def main() -> int:
        if not at_once:
            return sum([await limiters[turn % 4].acquire_or_retry_after(key) == 0 for turn in range(300)])
        waits = await asyncio.gather(*(rates.acquire_or_retry_after(key) for _ in range(75) for rates in limiters))
        return sum(wait_s == 0 for wait_s in waits)

    let_in = asyncio.run(main())
    if at_once:  # a remainder below one per process may be taken by all at the same moment
        assert rate - rate % 4 <= let_in <= rate + 3
    else:
        assert let_in == rate


def test_a_share_that_is_not_used_is_the_others_after_a_moment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    add_key(path, "shop", rate="8/hour")
    [key] = read_keys(path)
    first, second = processes(2)

    async def main() -> list[int]:
        async def let_in() -> int:
            return sum([await second.acquire_or_retry_after(key) == 0 for _ in range(20)])

        nonlocal now
        assert await first.acquire_or_retry_after(key) == 0  # the first one has taken four
        counts = [await let_in()]
        now += api_keys.SHARE_LIFETIME_S
        return [*counts, await let_in()]

    assert asyncio.run(main()) == [4, 3]


@pytest.mark.parametrize("now", [1_000_000.0, 1_000_000.25, 1_763_925_533.9])
def test_whoever_comes_back_when_told_is_let_in(path: Path, monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    monkeypatch.setattr(time, "time", lambda: now)
    add_key(path, "shop", rate="6/minute")
    [key] = read_keys(path)
    rates, refused = RateLimiter(), 0
    for _ in range(50):
        if wait_s := asyncio.run(rates.acquire_or_retry_after(key)):
            refused, now = refused + 1, now + wait_s
            assert asyncio.run(rates.acquire_or_retry_after(key)) == 0
    assert refused > 10


def test_a_key_whose_rate_is_changed_has_the_new_one_at_once(path: Path) -> None:
    add_key(path, "shop", rate="1/hour")
    [key] = read_keys(path)
    rates = RateLimiter()
    assert asyncio.run(rates.acquire_or_retry_after(key)) == 0
    assert asyncio.run(rates.acquire_or_retry_after(key)) > 0
    assert asyncio.run(rates.acquire_or_retry_after(key.model_copy(update={"rate": "2/hour"}))) == 0
