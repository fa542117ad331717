"""A real S3 server on a free loopback port: versitygw where the machine has it, moto's server otherwise.

Only versitygw checks signatures; `S3Server.checks_signatures` tells the tests which one they got.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.ports import free_port

ACCESS_KEY = "test"
SECRET_KEY = "testtesttest"
PROGRAM = "versitygw"
START_SECONDS = 15


def versitygw() -> str | None:
    """The program, from KUBEBUILDER_ASSETS or the PATH."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    return shutil.which(PROGRAM, path=assets) if assets and Path(assets, PROGRAM).exists() else shutil.which(PROGRAM)


class S3Server:
    """`with S3Server() as s3: s3.put("bucket", "key", b"…")`; buckets are made when they are first put into."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self.checks_signatures = versitygw() is not None
        self.endpoint = ""
        self._directory = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._moto: Any = None
        self._client: Any = None

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment to use this server by the AWS chain."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for a proxy in between."""
        split = urlsplit(self.endpoint)
        return str(split.hostname), int(split.port or 0)

    @property
    def client(self) -> Any:
        """A boto3 client of the test's own."""
        if self._client is None:
            import boto3
            from botocore.config import Config

            self._client = boto3.client(
                "s3",
                endpoint_url=self.endpoint,
                aws_access_key_id=ACCESS_KEY,
                aws_secret_access_key=SECRET_KEY,
                region_name="us-east-1",
                config=Config(s3={"addressing_style": "path"}, signature_version="s3v4"),
            )
        return self._client

    def start(self) -> S3Server:
        """Returns when the server answers."""
        program = versitygw()
        if program is None:
            import logging

            from moto.server import ThreadedMotoServer

            logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
            self._moto = ThreadedMotoServer(ip_address=self._host, port=0)
            self._moto.start()
            host, port = self._moto.get_host_and_port()
            self.endpoint = f"http://{host}:{port}"
            return self
        port = free_port()
        self._directory = tempfile.mkdtemp(prefix="s3server-")
        self._process = subprocess.Popen(
            [program, "--port", f"{self._host}:{port}", "--quiet", "--keep-alive", "posix", self._directory],
            env={**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.endpoint = f"http://{self._host}:{port}"
        self._wait_until_it_answers()
        return self

    def stop(self) -> None:
        """Ends the server and deletes its objects."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._moto is not None:
            self._moto.stop()
            self._moto = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Store an object, replacing one that is there."""
        from botocore.exceptions import ClientError

        try:
            self.client.put_object(Bucket=bucket, Key=key, Body=data)
        except ClientError as error:
            if error.response["Error"]["Code"] != "NoSuchBucket":
                raise
            self.client.create_bucket(Bucket=bucket)
            self.client.put_object(Bucket=bucket, Key=key, Body=data)

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object."""
        self.client.delete_object(Bucket=bucket, Key=key)

    def __enter__(self) -> S3Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(self.endpoint, timeout=1)
                return
            except urllib.error.HTTPError as answer:
                answer.close()
                return
            except OSError:
                if self._process.poll() is not None:
                    raise RuntimeError(f"{PROGRAM} ended with {self._process.returncode} at its start") from None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
