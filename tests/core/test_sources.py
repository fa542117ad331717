"""Source URIs: every documented form parses, every mistake is named, and no secret is repeated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.sources import (
    FileSource,
    HttpSource,
    HubSource,
    InvalidSource,
    S3Source,
    is_archive,
    parse_source,
    refused_address,
    shown,
)

GOOD = [
    ("s3://bucket/loras/1", S3Source(bucket="bucket", key="loras/1")),
    ("s3://bucket/loras/1/", S3Source(bucket="bucket", key="loras/1")),
    ("s3://bucket/a b/ü?#%20.tar.gz", S3Source(bucket="bucket", key="a b/ü?#%20.tar.gz")),
    ("s3://bucket", S3Source(bucket="bucket", key="")),
    ("hf://org/repo", HubSource(repo="org/repo")),
    ("hf://org/repo@v1.0", HubSource(repo="org/repo", revision="v1.0")),
    ("hf://org/repo/sub/folder/", HubSource(repo="org/repo", subfolder="sub/folder")),
    ("hf://org/repo@main/sub", HubSource(repo="org/repo", revision="main", subfolder="sub")),
    ("hf://org/repo@refs/pr/3/sub", HubSource(repo="org/repo", revision="refs/pr/3", subfolder="sub")),
    ("hf://org/repo@refs%2Fpr%2F3/sub", HubSource(repo="org/repo", revision="refs/pr/3", subfolder="sub")),
    ("hf://org/repo@feature%2Fx", HubSource(repo="org/repo", revision="feature/x")),
    (
        "https://h.example:8443/a/x%20y.tgz?sig=1",
        HttpSource(url="https://h.example:8443/a/x%20y.tgz?sig=1", host="h.example", name="x y.tgz"),
    ),
    ("file:///data/lora", FileSource(path="/data/lora")),
    ("file:///data/my%20lora/", FileSource(path="/data/my lora")),
    ("file://localhost/data/x.zip", FileSource(path="/data/x.zip")),
]


@pytest.mark.parametrize(("uri", "parsed"), GOOD)
def test_every_documented_form_parses(uri: str, parsed: object) -> None:
    assert parse_source(uri) == parsed


def test_plain_http_only_when_allowed() -> None:
    with pytest.raises(InvalidSource, match="--allow-http"):
        parse_source("http://h/x.zip")
    assert parse_source("http://h/x.zip", allow_http=True) == HttpSource(url="http://h/x.zip", host="h", name="x.zip")


BAD = [
    ("", "0 characters"),
    ("s3://bucket/" + "x" * 2100, "2048"),
    (" s3://bucket/x", "leading"),
    ("s3://bucket/x\n", "trailing"),
    ("/data/lora", "file:///data/lora"),
    ("org/repo", "hf://org/repo"),
    ("bucket", "no scheme"),
    ("gs://bucket/x", "unknown scheme 'gs'"),
    ("S3://bucket/x", "did you mean s3://"),
    ("huggingface://org/repo", "did you mean hf://"),
    ("s3:///x", "no bucket name"),
    ("s3://b/x", "'b' is no bucket name"),
    ("s3://bucket/p/../../x", "'..'"),
    ("hf://repo", "repository name"),
    ("hf://datasets/org/repo", "model repositories"),
    ("hf://org/re..po", "'re..po'"),
    ("hf://org/repo@", "after '@'"),
    ("hf://org/repo@main/../x", "'..'"),
    ("hf://org/repo@a%2F..%2Fb", "'..'"),
    ("hf://org/repo/%2E%2E/x", "'..'"),
    ("file://data/lora", "'data' would be a host"),
    ("file:///", "no directory"),
    ("file:///a/../b", "'..'"),
    ("file:///a%00b", "zero byte"),
    ("https:///x.zip", "no host"),
    ("https://h/x", ".tar.gz"),
    ("https://h/", ".zip"),
    ("https://h/x.zip#part", "%23"),
    ("https://h:99999/x.zip", "ort"),
    ("https://[::1/x.zip", "IPv6"),
    ("https://169.254.169.254/x.zip", "link-local"),
    ("https://[fe80::1]/x.zip", "link-local"),
]


@pytest.mark.parametrize(("uri", "fault"), BAD)
def test_each_mistake_is_named(uri: str, fault: str) -> None:
    with pytest.raises(InvalidSource) as raised:
        parse_source(uri)
    assert fault in str(raised.value)
    assert "source URI" in str(raised.value)


@pytest.mark.parametrize(
    "uri",
    [
        "https://joe:hunter2@h/x.zip",
        "https://hunter2@h/x.zip",
        "s3://AKIA:hunter2@bucket/x",
        "hf://hunter2@org/repo",
        "https://h/x?X-Amz-Signature=hunter2",
        "gs://hunter2@bucket/x",
    ],
)
def test_no_message_repeats_a_secret(uri: str) -> None:
    with pytest.raises(InvalidSource) as raised:
        parse_source(uri)
    assert "hunter2" not in str(raised.value)


def test_what_is_shown_has_no_query() -> None:
    source = parse_source("https://h/x.zip?X-Amz-Signature=hunter2")
    assert str(source) == shown("https://h/x.zip?X-Amz-Signature=hunter2") == "https://h/x.zip"


@pytest.mark.parametrize("name", ["x.tar.gz", "X.TGZ", "a/b.tar", "b.zip"])
def test_archives(name: str) -> None:
    assert is_archive(name)


@pytest.mark.parametrize("name", ["x.gz", "x.tar.bz2", "zip", "x.zip/"])
def test_no_archives(name: str) -> None:
    assert not is_archive(name)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "::ffff:169.254.169.254",
        "2002:a9fe:a9fe::1",
        "64:ff9b::a9fe:a9fe",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "100.100.100.200",
        "168.63.129.16",
        "0.0.0.0",
        "224.0.0.1",
        "[fe80::1]",
    ],
)
def test_refused_addresses(address: str) -> None:
    assert refused_address(address)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "::1", "93.184.216.34", "h.example", ""])
def test_other_addresses_pass(address: str) -> None:
    assert not refused_address(address)


@given(st.text(max_size=60) | st.from_regex(r"(s3|hf|https?|file)://.{0,40}", fullmatch=True))
def test_any_text_parses_or_is_refused_and_what_parses_is_contained(uri: str) -> None:
    try:
        source = parse_source(uri, allow_http=True)
    except InvalidSource:
        return
    if isinstance(source, FileSource):
        assert source.path.startswith("/")
    path = getattr(source, "path", "") or getattr(source, "key", "") or getattr(source, "subfolder", "")
    assert ".." not in path.split("/")
