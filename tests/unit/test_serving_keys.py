"""Who may ask: keys are kept as hashes, a public address needs them, and each has its limits."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config import QuotaConfig
from pipelines.errors import ConfigError
from pipelines.serving.faults import ApiError
from pipelines.serving.keys import VARIABLE, Client, Keys, hash_of, new_key
from pipelines.serving.quotas import Quotas
from tests.unit.conftest import HandClock
from tests.unit.serving import KEY, Endpoint, config_of


def keys_in(tmp_path: Path, text: str, *overrides: str) -> Keys:
    path = tmp_path / "keys.txt"
    path.write_text(text, encoding="utf-8")
    return Keys(config_of(f"serve.keys_file={path}", *overrides).serve, {})


def test_a_new_key_opens_the_door_and_its_file_does_not_hold_it(tmp_path: Path) -> None:
    key, line = new_key("alice")
    assert key not in line and len(key) > 40
    keys = keys_in(
        tmp_path, f"# who may ask\n\n{line} requests_per_minute=3 tokens_per_minute=null\n", "serve.quota.tokens_per_minute=9"
    )
    client = keys.client(f"Bearer {key}")
    assert client == Client("alice", QuotaConfig(requests_per_minute=3, tokens_per_minute=None, requests_at_once=None))
    assert keys.client(f"bearer  {key}") == client
    assert [keys.client(one) for one in (None, "", "Bearer ", f"Bearer {key}x", f"Basic {key}", line)] == [None] * 6


@pytest.mark.parametrize(("text", "message"), [
    (KEY, "line 1 does not begin with a SHA-256"),
    (f"{'0' * 64}", "a name has letters"),
    (f"{'0' * 64} anonymous", "is not anonymous"),
    (f"{'0' * 64} a b=1", "b is no limit"),
    (f"{'0' * 64} a requests_per_minut=1", "did you mean requests_per_minute?"),
    (f"{'0' * 64} a requests_per_minute=-1", "must be a whole number above 0, or null"),
    (f"{'0' * 64} a requests_per_minute=0", "limits must be above 0"),
    (f"{'0' * 64} a\n{'0' * 64} b", "line 2: b has the same key as a"),
])  # fmt: skip
def test_a_bad_line_is_refused_and_a_key_in_it_not_shown(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        keys_in(tmp_path, text)
    assert message in str(caught.value)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n# all of them revoked\n"])
def test_a_file_without_keys_does_not_open_the_door_to_everybody(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"serve\.keys_file=.* holds no key"):
        keys_in(tmp_path, text)


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Keys(config_of("serve.keys_file=/nowhere/keys.txt").serve, {})


def test_keys_may_come_from_the_environment() -> None:
    keys = Keys(config_of().serve, {VARIABLE: f"alice:{KEY}, bob:{KEY}2"})
    names = [client and client.name for client in map(keys.client, (f"Bearer {KEY}", f"Bearer {KEY}2", "Bearer x"))]
    assert names == ["alice", "bob", None]
    with pytest.raises(ConfigError, match="entry 2 must be name:key, with a key of 20 characters") as caught:
        Keys(config_of().serve, {VARIABLE: f"alice:{KEY},bob:hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org", "192.168.1.2"])
def test_a_public_address_without_keys_is_refused(host: str) -> None:
    settings = config_of(f"serve.host='{host}'").serve
    with pytest.raises(ConfigError, match="can be reached from other machines, and there are no API keys"):
        Keys(settings, {VARIABLE: " "})
    assert Keys(settings, {VARIABLE: f"alice:{KEY}"}).are_needed


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "::1", "localhost", "[::1]"])
def test_this_machines_own_addresses_need_none(host: str) -> None:
    assert not Keys(config_of(f"serve.host='{host}'").serve, {}).are_needed


def quota(**limits: int) -> QuotaConfig:
    return QuotaConfig.model_validate(
        {"requests_per_minute": None, "tokens_per_minute": None, "requests_at_once": None, **limits}
    )


def test_requests_above_a_minute_s_limit_wait_until_the_oldest_is_a_minute_old() -> None:
    clock = HandClock()
    quotas, client = Quotas(1, clock), Client("alice", quota(requests_per_minute=2))
    for _ in range(2):
        with quotas.admitted(client):
            clock.now += 10
    with pytest.raises(ApiError) as caught, quotas.admitted(client):
        pass
    assert (caught.value.status, caught.value.retry_after_s) == (429, pytest.approx(40))
    with quotas.admitted(Client("bob", client.quota)):
        pass
    clock.now += 40
    with quotas.admitted(client):
        pass


def test_tokens_are_paid_with_the_next_requests() -> None:
    clock = HandClock()
    quotas, client = Quotas(1, clock), Client("alice", quota(tokens_per_minute=100))
    with quotas.admitted(client):
        quotas.spent(client, 250)
    with pytest.raises(ApiError, match="alice may use 100 tokens a minute"), quotas.admitted(client):
        pass
    clock.now += 60
    with quotas.admitted(client):
        pass


def test_requests_at_once_are_counted_until_each_has_ended() -> None:
    endpoint = Endpoint("serve.quota.requests_at_once=1")
    assert [endpoint.chat(stream=is_stream).status_code for is_stream in (False, True, False)] == [200] * 3
    quotas, client = Quotas(1), Client("alice", quota(requests_at_once=1))
    with quotas.admitted(client), pytest.raises(ApiError, match=r"1 request\(s\) at once"), quotas.admitted(client):
        pass


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), max_size=30), st.integers(1, 100))
def test_no_minute_holds_more_requests_than_its_limit_and_who_waits_as_told_gets_in(
    steps: list[tuple[float, int]], limit: int
) -> None:
    clock = HandClock()
    quotas, client = Quotas(1, clock), Client("alice", quota(tokens_per_minute=limit))
    admitted: list[tuple[float, int]] = []
    for pause, tokens in steps:
        clock.now += pause
        try:
            with quotas.admitted(client):
                quotas.spent(client, tokens)
        except ApiError as refusal:
            assert sum(spent for at, spent in admitted if at > clock.now - 60) >= limit
            assert refusal.retry_after_s is not None
            clock.now += refusal.retry_after_s + 1e-6  # the header is in whole seconds, rounded up
            with quotas.admitted(client):
                quotas.spent(client, tokens)
        admitted.append((clock.now, tokens))


def test_a_client_over_its_limit_is_told_so_and_when_to_come_again() -> None:
    endpoint = Endpoint("serve.quota.requests_per_minute=1")
    assert endpoint.chat().status_code == 200
    response = endpoint.chat()
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    assert 1 <= int(response.headers["retry-after"]) <= 61


def test_a_hash_is_what_other_tools_make_of_a_key() -> None:
    assert hash_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(("host", "url"), [
    ("127.0.0.1", "http://127.0.0.1:8000"), ("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000"),
    ("[::1]", "http://[::1]:8000"), ("10.0.0.7", "http://10.0.0.7:8000"),
])  # fmt: skip
def test_this_machine_reaches_whatever_address_it_listens_at(host: str, url: str) -> None:
    assert config_of(f"serve.host='{host}'").serve.url == url


def test_the_rows_of_a_batch_leave_the_limits_of_its_owner_alone() -> None:
    clock = HandClock()
    limits = quota(requests_per_minute=1, tokens_per_minute=10, requests_at_once=1)
    quotas, batch = Quotas(1, clock), Client("alice", limits, is_background=True)
    with quotas.admitted(batch), quotas.admitted(batch):
        quotas.spent(batch, 1000)
        with quotas.admitted(Client("alice", limits)):
            pass
