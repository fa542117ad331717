"""The log as it arrives on stderr."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from sidecar.edges.logging import configure


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def events(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_is_one_object_a_line_with_time_and_level() -> None:
    stream = io.StringIO()
    configure("json", "info", stream)
    structlog.get_logger().info("adapter_loaded", adapter="ns/a", text="two\nlines")
    (event,) = events(stream)
    assert event["event"] == "adapter_loaded"
    assert event["level"] == "info"
    assert event["adapter"] == "ns/a"
    assert event["text"] == "two\nlines"
    assert str(event["time"]).endswith("Z")


def test_a_logger_made_before_configuring_obeys_it() -> None:
    log = structlog.get_logger()
    stream = io.StringIO()
    configure("json", "info", stream)
    log.info("late")
    assert [event["event"] for event in events(stream)] == ["late"]


def test_less_than_the_level_is_left_out() -> None:
    stream = io.StringIO()
    configure("json", "warning", stream)
    log = structlog.get_logger()
    log.info("quiet")
    log.warning("loud")
    assert [event["event"] for event in events(stream)] == ["loud"]


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_an_exception_stays_in_its_line(log_format: str) -> None:
    stream = io.StringIO()
    configure("json" if log_format == "json" else "console", "info", stream)
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        structlog.get_logger().exception("it_broke", value="a\nb")
    assert stream.getvalue().count("\n") == 1
    assert "ValueError" in stream.getvalue()
    assert "test_logging.py" in stream.getvalue()


@pytest.mark.parametrize(
    "key",
    [
        "token",
        "session_token",
        "api_key",
        "apikey",
        "api-key",
        "Authorization",
        "aws_secret_access_key",
        "password",
        "gossip_key",
        "credentials",
    ],
)
def test_values_of_secret_keys_are_hidden(key: str) -> None:
    stream = io.StringIO()
    configure("json", "info", stream)
    structlog.get_logger().info("starting", **{key: "hunter2"}, headers={key: "hunter2"}, many=[{key: "hunter2"}])
    assert "hunter2" not in stream.getvalue()
    assert events(stream)[0][key] == "***"


def test_names_of_secrets_and_files_are_shown() -> None:
    stream = io.StringIO()
    configure("json", "info", stream)
    structlog.get_logger().info("starting", gossip_key_file="/etc/key", secret_name="s3", key="ns/a", token="")
    (event,) = events(stream)
    assert (event["gossip_key_file"], event["secret_name"], event["key"], event["token"]) == (
        "/etc/key",
        "s3",
        "ns/a",
        "",
    )


def test_the_user_part_of_a_url_is_hidden() -> None:
    stream = io.StringIO()
    configure("json", "info", stream)
    structlog.get_logger().info("fetching", uri="https://me:hunter2@host/a@b", mail="a@b")
    (event,) = events(stream)
    assert (event["uri"], event["mail"]) == ("https://***@host/a@b", "a@b")


def test_what_libraries_log_comes_in_the_same_lines_from_warning_on() -> None:
    stream = io.StringIO()
    configure("json", "info", stream)
    logging.getLogger("aiohttp.server").warning("odd %s", "request")
    logging.getLogger("aiohttp.server").info("chatter")
    (event,) = events(stream)
    assert (event["event"], event["logger"], event["level"]) == ("odd request", "aiohttp.server", "warning")


def test_configuring_again_replaces_and_doesn_t_repeat() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("json", "info", first)
    configure("json", "info", second)
    logging.getLogger("x").warning("once")
    structlog.get_logger().info("also_once")
    assert first.getvalue() == ""
    assert [event["event"] for event in events(second)] == ["once", "also_once"]
