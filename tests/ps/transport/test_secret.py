import base64
import os
import stat
import threading

import pytest

from torchstrategy.ps.transport.secret import Secret, default_path, find_secret, make_secret

HEX = "00112233445566778899aabbccddeeff"


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TORCHSTRATEGY_SECRET", raising=False)
    monkeypatch.delenv("TORCHSTRATEGY_SECRET_FILE", raising=False)


def test_the_same_secret_in_any_form():
    raw = bytes.fromhex(HEX)
    forms = [
        HEX,
        HEX.upper() + "\n",
        base64.b64encode(raw).decode(),
        base64.urlsafe_b64encode(raw).decode().rstrip("="),
    ]
    assert len({Secret(form).key_pair("server") for form in forms}) == 1


def test_keys_differ_by_owner_and_secret():
    pairs = [Secret(text).key_pair(owner) for text in (HEX, make_secret()) for owner in ("server", "client")]
    assert len({key for pair in pairs for key in pair}) == 8


def test_made_secrets_are_random_and_long():
    assert make_secret() != make_secret()
    assert len(bytes.fromhex(make_secret())) == 32


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "empty"),
        ("00112233445566", "56 bits"),
        ("pass word!", "neither hex nor base64"),
        ("correct horse battery staple?", "neither hex nor base64"),
        ("0" * 64, "not random"),
        ("secret", "bits|neither"),
    ],
)
def test_weak_secrets_are_refused(text, what):
    with pytest.raises(ValueError, match=f"(?s)at least 128 random bits.*({what}).*torchstrategy keys"):
        Secret(text)


def test_the_secret_is_not_shown():
    assert HEX not in repr(Secret(HEX))
    assert Secret(HEX).fingerprint == Secret(HEX).fingerprint != Secret(make_secret()).fingerprint
    assert Secret(HEX).fingerprint not in HEX


def test_environment_comes_first(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text(make_secret())
    file.chmod(0o600)
    monkeypatch.setenv("TORCHSTRATEGY_SECRET_FILE", str(file))
    assert find_secret(is_loopback=False).key_pair("client") == Secret(file.read_text()).key_pair("client")
    monkeypatch.setenv("TORCHSTRATEGY_SECRET", HEX)
    assert find_secret(is_loopback=True).key_pair("client") == Secret(HEX).key_pair("client")
    monkeypatch.setenv("TORCHSTRATEGY_SECRET", "")
    with pytest.raises(ValueError, match="TORCHSTRATEGY_SECRET must be"):
        find_secret(is_loopback=True)


def test_a_file_that_cannot_be_read(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHSTRATEGY_SECRET_FILE", str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="can't be read from TORCHSTRATEGY_SECRET_FILE"):
        find_secret(is_loopback=True)


def test_elsewhere_a_secret_must_be_configured():
    with pytest.raises(ValueError, match=r"No secret is configured.*torchstrategy keys"):
        find_secret(is_loopback=False)
    assert not default_path().exists()


def test_the_users_own_secret():
    made = find_secret(is_loopback=True)
    assert stat.S_IMODE(default_path().stat().st_mode) == 0o600
    assert find_secret(is_loopback=True).key_pair("server") == made.key_pair("server")
    assert os.listdir(default_path().parent) == ["secret"]


def test_others_can_read_the_users_own_secret():
    find_secret(is_loopback=True)
    default_path().chmod(0o644)
    with pytest.raises(ValueError, match="Others can read the secret"):
        find_secret(is_loopback=True)


def test_a_directory_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "config").write_text("a file")
    with pytest.raises(ValueError, match=r"can't be kept in .*TORCHSTRATEGY_SECRET"):
        find_secret(is_loopback=True)


def test_those_that_start_at_once_agree(monkeypatch, tmp_path):
    for attempt in range(20):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / str(attempt)))
        barrier, found = threading.Barrier(8), []

        def find(barrier=barrier, found=found):
            barrier.wait()
            found.append(find_secret(is_loopback=True).fingerprint)

        threads = [threading.Thread(target=find) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len(set(found)) == 1
