"""What of a Secret reaches which origin, and what is said about one that doesn't fit."""

from __future__ import annotations

import pytest

from sidecar.core.credentials import MAX_VALUE, UnusableSecret, credentials_of, without_secrets
from sidecar.core.sources import parse_source

S3 = "s3://models/a"
HUB = "hf://org/repo"
WEB = "https://files.example.com/a.tgz"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "hunter2"}
OPTIONS = {"AWS_SESSION_TOKEN": "t", "AWS_REGION": "eu-west-1", "AWS_ENDPOINT_URL": "http://minio.storage:9000"}


def taken(uri: str, data: dict[str, str]) -> dict[str, str]:
    return credentials_of(parse_source(uri, allow_http=True), {name: value.encode() for name, value in data.items()})


@pytest.mark.parametrize(
    ("uri", "data", "expected"),
    [
        (S3, KEYS, KEYS),
        (S3, KEYS | OPTIONS | {"other": "x", "HF_TOKEN": "y"}, KEYS | OPTIONS),
        (S3, {name: f"{value}\n" for name, value in KEYS.items()}, KEYS),
        (S3, KEYS | {"AWS_SESSION_TOKEN": ""}, KEYS),
        (HUB, {"HF_TOKEN": "hf_x", "token": "y"}, {"HF_TOKEN": "hf_x"}),
        (HUB, {"token": "hf_x"}, {"HF_TOKEN": "hf_x"}),
        (WEB, {"host": "Files.Example.com", "token": "t"} | KEYS, {"token": "t"}),
        (WEB, {"host": "files.example.com:443", "username": "u", "password": "p"}, {"username": "u", "password": "p"}),
        ("https://h.example:8443/a.zip", {"host": "h.example:8443", "token": "t"}, {"token": "t"}),
        ("https://[2001:db8::1]:8443/a.zip", {"host": "[2001:db8::1]:8443", "token": "t"}, {"token": "t"}),
        ("file:///models/a", KEYS, {}),
    ],
)
def test_an_origin_gets_its_own_keys_and_no_others(uri: str, data: dict[str, str], expected: dict[str, str]) -> None:
    assert taken(uri, data) == expected


@pytest.mark.parametrize(
    ("uri", "data", "said"),
    [
        (S3, {}, "no key 'AWS_ACCESS_KEY_ID' and no key 'AWS_SECRET_ACCESS_KEY'"),
        (S3, {"AWS_ACCESS_KEY_ID": "a"}, "has no key 'AWS_SECRET_ACCESS_KEY'"),
        # The agent's own credentials never go to an endpoint that a Secret names.
        (S3, {"AWS_ENDPOINT_URL": "https://elsewhere.example"}, "no key 'AWS_ACCESS_KEY_ID'"),
        (S3, KEYS | {"AWS_ENDPOINT_URL": "minio:9000"}, "no http:// or https:// URL under 'AWS_ENDPOINT_URL'"),
        (S3, KEYS | {"AWS_ENDPOINT_URL": "http://[::1"}, "no http:// or https:// URL under 'AWS_ENDPOINT_URL'"),
        (S3, KEYS | {"AWS_ENDPOINT_URL_S3": "http://169.254.169.254/"}, "metadata address under 'AWS_ENDPOINT_URL_S3'"),
        (S3, KEYS | {"AWS_REGION": "a\nb"}, "control characters under 'AWS_REGION'"),
        (S3, KEYS | {"AWS_REGION": "\n"}, "nothing under 'AWS_REGION'"),
        (S3, KEYS | {"AWS_SESSION_TOKEN": "x" * (MAX_VALUE + 1)}, f"{MAX_VALUE + 1} bytes under 'AWS_SESSION_TOKEN'"),
        (HUB, {"hf_token": "x"}, "no key 'HF_TOKEN'"),
        (HUB, {"token": "x\r\nHost: y"}, "control characters under 'token'"),
        (WEB, {"token": "t"}, "has no key 'host'"),
        (WEB, {"host": "example.com", "token": "t"}, "is for the server 'example.com'.*names 'files.example.com'"),
        (WEB, {"host": "files.example.com:8443", "token": "t"}, "is for the server 'files.example.com:8443'"),
        (WEB, {"host": "files.example.com:x", "token": "t"}, "names no server under 'host'"),
        (WEB, {"host": "files.example.com"}, "neither a key 'token' nor"),
        (WEB, {"host": "files.example.com", "username": "u"}, "no key 'password'"),
        ("http://files.example.com/a.tgz", {"host": "files.example.com", "token": "t"}, "not sent over plain http"),
    ],
)
def test_what_does_not_fit_is_named_and_no_value_is_shown(uri: str, data: dict[str, str], said: str) -> None:
    with pytest.raises(UnusableSecret, match=said) as raised:
        taken(uri, data)
    assert "hunter2" not in str(raised.value)


def test_what_is_no_text_is_said() -> None:
    with pytest.raises(UnusableSecret, match="no text under 'HF_TOKEN'"):
        credentials_of(parse_source(HUB), {"HF_TOKEN": b"\xff"})


def test_what_a_server_repeats_is_blotted_out_but_not_where_it_is() -> None:
    said = "no such token t0ken for u at http://minio.storage:9000, said hunter2"
    found = KEYS | OPTIONS | {"token": "t0ken", "username": "u", "AWS_SESSION_TOKEN": ""}
    assert without_secrets(said, found) == "no such token *** for u at http://minio.storage:9000, said ***"
