"""Workload identity as EKS gives it to pods: a token file is traded at STS, here on loopback, for S3 credentials."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from sidecar.edges.origins import Origins
from sidecar.ports import OriginDenied
from sidecar.settings import Settings

ROLE = "arn:aws:iam::123456789012:role/adapters"
TRADED = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>KEY-{number}</AccessKeyId>
<SecretAccessKey>secret</SecretAccessKey><SessionToken>SESSION-{number}</SessionToken><Expiration>{until}</Expiration>
</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""
REFUSED = """<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error><Type>Sender</Type>
<Code>InvalidIdentityToken</Code><Message>the token is of nobody</Message></Error></ErrorResponse>"""


LISTED = """<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>false</IsTruncated>
<Contents><Key>a/adapter_config.json</Key><Size>2</Size><ETag>"e"</ETag></Contents></ListBucketResult>"""


class Aws(ThreadingHTTPServer):
    """STS's AssumeRoleWithWebIdentity, and an S3 that lists one object to whom it gave a session.

    The real S3 server of the other tests refuses every session token.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.tokens: set[str] = set()
        self.traded: list[dict[str, str]] = []
        self.listed_for: list[tuple[str, str]] = []
        # Below 15 minutes botocore renews with every request.
        self.lifetime = 3600

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Aws

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        asked = {name: values[0] for name, values in parse_qs(body).items()}
        self.server.traded.append(asked)
        if asked["WebIdentityToken"] in self.server.tokens:
            until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.server.lifetime))
            self._answer(200, TRADED.format(number=len(self.server.traded), until=until))
        else:
            self._answer(400, REFUSED)

    def do_GET(self) -> None:
        signed = self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
        self.server.listed_for.append((signed, self.headers.get("X-Amz-Security-Token", "")))
        self._answer(200, LISTED)

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def aws() -> Iterator[Aws]:
    server = Aws()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def token(aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The token's file, in an environment as the pod identity webhook makes it: no keys at all."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "token"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(path))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", aws.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", aws.url)
    return path


async def test_the_token_is_traded_for_credentials_and_read_again_for_the_next(aws: Aws, token: Path) -> None:
    aws.tokens, aws.lifetime = {"first", "second"}, 60
    token.write_text("first")
    origins = Origins(Settings())
    assert (await origins.open("s3://identity/a").listing()).files
    assert {(asked["RoleArn"], asked["WebIdentityToken"]) for asked in aws.traded} == {(ROLE, "first")}
    token.write_text("second")
    aws.tokens, trades = {"second"}, len(aws.traded)
    assert (await origins.open("s3://identity/a").listing()).files
    assert {asked["WebIdentityToken"] for asked in aws.traded[trades:]} == {"second"}
    (first, second) = aws.listed_for
    assert first[0].startswith("KEY-")
    assert first[1] == first[0].replace("KEY", "SESSION")
    assert second == (f"KEY-{len(aws.traded)}", f"SESSION-{len(aws.traded)}")
    await origins.close()


async def test_credentials_that_last_are_traded_once(aws: Aws, token: Path) -> None:
    aws.tokens = {"first"}
    token.write_text("first")
    origins = Origins(Settings())
    for _ in range(3):
        assert (await origins.open("s3://identity/a").listing()).files
    assert (len(aws.traded), len(set(aws.listed_for)), len(aws.listed_for)) == (1, 1, 3)
    await origins.close()


async def test_a_token_that_is_refused_is_a_denial_without_the_token(aws: Aws, token: Path) -> None:
    token.write_text("to-be-kept-to-ourselves")
    origins = Origins(Settings())
    with pytest.raises(OriginDenied, match="InvalidIdentityToken") as raised:
        await origins.open("s3://identity/a").listing()
    assert "to-be-kept" not in str(raised.value)
    aws.tokens = {"to-be-kept-to-ourselves"}
    assert (await origins.open("s3://identity/a").listing()).files
    await origins.close()


async def test_the_credentials_of_an_adapters_secret_go_before_the_identity(aws: Aws, token: Path) -> None:
    token.write_text("never-sent")
    origins = Origins(Settings())
    own = {"AWS_ACCESS_KEY_ID": "AKIA-OF-THE-SECRET", "AWS_SECRET_ACCESS_KEY": "x"}
    assert (await origins.open("s3://identity/a", own).listing()).files
    assert (aws.traded, aws.listed_for) == ([], [("AKIA-OF-THE-SECRET", "")])
    await origins.close()
