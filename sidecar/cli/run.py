"""`lora-sidecar run`: the agent. Every flag can be given as an environment variable LORA_SIDECAR_<FLAG> as well."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sidecar.settings import Settings

ENV_PREFIX = "LORA_SIDECAR_"
TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class BadValue(ValueError):
    """A flag's value that can't be understood; the text names what was expected."""


def size(text: str) -> int:
    """Bytes, with an optional unit as in Kubernetes: 500M, 20Gi."""
    match = re.fullmatch(r"(\d+)([kKmMgGtT]?i?)[bB]?", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise BadValue(f"{text!r} is no size; write bytes, or a number with k, M, G, T, Ki, Mi, Gi or Ti: 20Gi")
    return int(match[1]) * _UNITS[match[2].lower()]


def switch(text: str) -> bool:
    """true or false, in the usual spellings."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("", "0", "false", "no", "off"):
        return False
    raise BadValue(f"{text!r} is neither true nor false")


def names(text: str) -> tuple[str, ...]:
    """A comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def labels(text: str) -> dict[str, str]:
    """key=value,key=value"""
    pairs = [part.partition("=") for part in names(text)]
    if any(not sep or not key.strip() for key, sep, _ in pairs):
        raise BadValue(f"{text!r} is no list of labels; write key=value,key=value")
    return {key.strip(): value.strip() for key, _, value in pairs}


def whole(text: str) -> int:
    """A number that isn't negative."""
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()):
        raise BadValue(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def seconds(text: str) -> float:
    """Seconds, not negative."""
    try:
        value = float(text.strip().removesuffix("s"))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise BadValue(f"{text!r} is no number of seconds")
    return value


def told(limit: int) -> Callable[[str], str]:
    """Text that the other agents are told: they take no longer one, and it stands in logs and on pages."""

    def read(text: str) -> str:
        if len(text) > limit or not text.isprintable():
            raise BadValue(f"{text[:40]!r} has {len(text)} characters; at most {limit} printable ones are allowed")
        return text

    return read


def one_of(*words: str) -> Callable[[str], str]:
    """One of these words."""

    def read(text: str) -> str:
        if text not in words:
            raise BadValue(f"{text!r} is none of {', '.join(words)}")
        return text

    return read


# Field of Settings, how to read it, the argument's name in the help (None for a switch), what it does.
FLAGS: tuple[tuple[str, Callable[[str], Any], str | None, str], ...] = (
    ("backend", one_of("kubernetes", "standalone"), "NAME", "kubernetes or standalone (default: kubernetes in a pod)"),
    ("manifests", str, "DIR", "standalone: the directory with Adapter manifests (YAML or JSON), watched"),
    ("seeds", names, "HOST:PORT,…", "standalone: the other agents; a DNS name may stand for several"),
    ("name", told(253), "NAME", "this worker's stable name, which placement hashes (default: the advertised address)"),
    ("zone", told(253), "ZONE", "standalone: where this worker is; adapters spread over zones"),
    ("labels", labels, "K=V,…", "standalone: what spec.workers selects by"),
    ("pool", told(253), "NAME", "the pool's name; agents of another pool are no peers (default: default)"),
    ("listen", str, "HOST:PORT", "where this agent's HTTP server listens (default: 0.0.0.0:8790)"),
    ("advertise", told(253), "HOST:PORT", "where peers reach it (default: --listen, or this host's name)"),
    ("engine_url", str, "URL", "the vLLM server (default: http://127.0.0.1:8000)"),
    ("engine_api_key_file", str, "FILE", "a file with vLLM's API key; read again when it changes"),
    ("adapters_dir", str, "DIR", "adapters' files, at the same path for vLLM; one agent each (default: /adapters)"),
    ("base_model", told(512), "NAME", "a further name of the base model (default: what the engine says)"),
    ("capacity", whole, "N", "adapters that fit here (default: the engine's --max-cpu-loras, else 1)"),
    ("max_lora_rank", whole, "N", "the engine's --max-lora-rank (default: what the engine says)"),
    ("disk_quota", size, "SIZE", "bytes of adapters to keep, as 20Gi; unused ones go first (default: no quota)"),
    ("allow_pickle", switch, None, "accept .bin and .pt weights, which can run code when they are loaded"),
    ("allow_http", switch, None, "accept http:// sources, which anybody on the way can change"),
    ("gossip_key_file", str, "FILE", "keys that authenticate the agents to each other, one a line"),
    ("insecure_gossip", switch, None, "gossip without a key: anybody who reaches the port can lie"),
    ("service", str, "NAME", "Kubernetes: the pool's headless Service (default: the pod's pool label)"),
    ("namespace", str, "NAME", "Kubernetes: where the adapters are (default: the pod's own)"),
    ("ready_timeout", seconds, "SECONDS", "ready at last so long after the engine's first answer; 0: at once (120)"),
    ("crd_grace", seconds, "SECONDS", "Kubernetes: missing adapters stay so long after their CRD was away (600)"),
    ("fetch_concurrency", whole, "N", "adapters fetched at a time (default: 4)"),
    ("log_format", one_of("json", "console"), "FORMAT", "json or console (default: json)"),
    (
        "log_level",
        one_of("debug", "info", "warning", "error"),
        "LEVEL",
        "debug, info, warning or error (default: info)",
    ),
)


def add_parser(commands: Any) -> None:
    """Register `run` on the subparsers of the main parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="run the agent beside one vLLM server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field, _, metavar, text in FLAGS:
        flag = "--" + field.replace("_", "-")
        if metavar is None:
            parser.add_argument(flag, dest=field, nargs="?", const="true", metavar="BOOL", help=text)
        else:
            parser.add_argument(flag, dest=field, metavar=metavar, help=text)
    parser.add_argument("--config", action="store_true", help="print what is in force, and exit")


def settings_from(given: Mapping[str, str | None], environment: Mapping[str, str]) -> Settings:
    """Settings from flags, then environment variables, then defaults. Raises BadValue naming the flag."""
    values: dict[str, Any] = {}
    for field, read, _, _ in FLAGS:
        flag, variable = "--" + field.replace("_", "-"), ENV_PREFIX + field.upper()
        text = given.get(field)
        where = flag
        if text is None and variable in environment:
            text, where = environment[variable], variable
        if text is None:
            continue
        try:
            values[field] = read(text)
        except BadValue as error:
            raise BadValue(f"{where}: {error}") from error
    values.setdefault("backend", "kubernetes" if TOKEN.exists() else "standalone")
    settings = Settings(**values)
    _check(settings, environment)
    return settings


def _check(settings: Settings, environment: Mapping[str, str]) -> None:
    known = {ENV_PREFIX + field.upper() for field, *_ in FLAGS}
    unknown = sorted(
        name
        for name, value in environment.items()
        if name.startswith(ENV_PREFIX) and name not in known and not _is_service_link(name, value)
    )
    unknown = [v for v in unknown if v != f"{ENV_PREFIX}REQUIRE"]
    if unknown:
        raise BadValue(f"{unknown[0]}: no such setting; see lora-sidecar run --help")
    if settings.backend == "standalone" and not settings.manifests:
        raise BadValue("--manifests: the standalone backend needs a directory of Adapter manifests")
    if settings.fetch_concurrency < 1:
        raise BadValue("--fetch-concurrency: at least 1")
    if settings.backend == "standalone" and settings.listen.endswith(":0") and not settings.advertise:
        raise BadValue(f"--listen {settings.listen}: peers couldn't know the port; name one, or give --advertise")


def _is_service_link(name: str, value: str) -> bool:
    """Kubernetes sets NAME_SERVICE_HOST, NAME_PORT and the like for each Service of the namespace: those of one called
    lora-sidecar, or lora-sidecar-web, are no flags."""
    link = re.fullmatch(
        rf"{ENV_PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)", name
    )
    return link is not None or (name.endswith("_PORT") and re.match("(tcp|udp|sctp)://", value) is not None)


def run(options: argparse.Namespace) -> int:
    """Run the agent until it is told to end. 0 after SIGTERM, 2 for settings or surroundings that can't work."""
    try:
        settings = settings_from(vars(options), os.environ)
    except BadValue as error:
        print(f"lora-sidecar run: {error}", file=sys.stderr)
        return 2
    if options.config:
        for field in Settings.__struct_fields__:
            print(f"{field}: {msgspec.json.encode(getattr(settings, field)).decode()}")
        return 0
    from sidecar.app import run_agent
    from sidecar.edges.logging import configure
    from sidecar.ports import EdgeError

    configure(settings.log_format, settings.log_level)
    try:
        asyncio.run(run_agent(settings))
    except (EdgeError, ValueError) as error:
        print(f"lora-sidecar run: {error}", file=sys.stderr)
        return 2
    return 0
