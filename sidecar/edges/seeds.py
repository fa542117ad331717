"""Gossip seeds (`--seeds host:port,…`) -> the addresses of a pool's members, with names resolved again for ever.

A name may stand for many workers: each address is a member. What can't be resolved keeps its last known addresses,
also over a restart, and a name that never could is a member by its name: nobody takes the pool for smaller than it is.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import re
import socket
from collections.abc import Callable, Iterable, Mapping

from sidecar.core.retry import Backoff
from sidecar.edges.threads import in_thread
from sidecar.model import Problem

DEFAULT_PORT = 8790
RESOLVE_SECONDS = 30.0
RESOLVE_TIMEOUT = 10.0
CONCURRENT = 8
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+))(?::([0-9]{1,5}))?")
# Soon at first: in a pool that starts together, names appear one by one.
_BACKOFF = Backoff(first=1.0, cap=RESOLVE_SECONDS)


def split_address(text: str) -> tuple[str, int]:
    """`host:port`, `host`, `[v6]:port` or a bare IPv6 address -> host and port. Raises ValueError."""
    found = _ADDRESS.fullmatch(text)
    ipv6, name, port = found.groups() if found else (text, None, None)
    number = int(port or DEFAULT_PORT)
    if not 0 < number < 65536 or not (name or _is_ip(ipv6)):
        raise ValueError(f"{text!r} is no address; write host:port, with a port from 1 to 65535")
    return name or ipv6, number


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Seeds:
    """The members behind a list of seeds, the own address left out."""

    def __init__(
        self,
        seeds: Iterable[str],
        own: str,
        saved: Mapping[str, Iterable[str]] | None = None,
        resolve: Callable[[str], Iterable[str]] | None = None,
    ) -> None:
        """`own` is this agent's advertised address, `saved` what was remembered. Raises ValueError for a bad seed.

        `resolve` gives the IP addresses of a host name on a thread, or raises OSError; by default `addresses_of`.
        """
        self._resolver = resolve or addresses_of
        wanted = [seed.strip() for seed in seeds if seed.strip()]
        self._own = join_address(*split_address(own))
        self._names: dict[str, tuple[str, int]] = {}
        self._fixed: set[str] = set()
        for seed in (*wanted, own):
            host, port = split_address(seed)
            if _is_ip(host):
                self._fixed.add(join_address(str(ipaddress.ip_address(host)), port))
            else:
                self._names[join_address(host, port)] = (host, port)
        known = saved or {}
        self._found: dict[str, tuple[str, ...]] = {name: tuple(known[name]) for name in self._names if known.get(name)}
        self._failed: dict[str, str] = {}
        self._failures = 0
        self._attempted = not (self._names.keys() - {self._own})

    @property
    def members(self) -> tuple[str, ...]:
        """host:port of every other member that is known, sorted."""
        found = set(self._fixed)
        for name in self._names:
            found.update(self._found.get(name, (name,)))
        mine = {self._own, *self._found.get(self._own, ())}
        return tuple(sorted(found - mine))

    @property
    def fresh(self) -> bool:
        """False until every name was tried once, and while one that never had an address can't be asked for."""
        return self._attempted and not any(
            name not in self._found and name != self._own and not _is_unknown(reason)
            for name, reason in self._failed.items()
        )

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The names that can't be resolved now."""
        return tuple(
            Problem(
                where=f"seed {name}",
                message=f"can't be resolved: {reason}; "
                + (
                    f"last known as {', '.join(self._found[name])}"
                    if name in self._found
                    else "correct --seeds, or start that worker"
                ),
            )
            for name, reason in sorted(self._failed.items())
            if name != self._own
        )

    async def run(
        self, changed: Callable[[], None], remember: Callable[[Mapping[str, tuple[str, ...]]], object]
    ) -> None:
        """Resolve the names for ever. Returns only if there is none.

        `changed` is called when members, freshness or problems differ, `remember` on a thread of its own with what
        to hand over as `saved` after a restart, when that differs.
        """
        while self._names:
            before, known = (self.members, self.fresh, self.problems), dict(self._found)
            await self._resolve_all()
            if before != (self.members, self.fresh, self.problems):
                changed()
            if known != self._found:
                await in_thread(lambda: remember(dict(self._found)))
            self._failures = self._failures + 1 if self._failed else 0
            wait = _BACKOFF.delay(self._failures, random.random()) if self._failed else RESOLVE_SECONDS
            await asyncio.sleep(wait * random.uniform(0.8, 1.2))

    async def _resolve_all(self) -> None:
        gate = asyncio.Semaphore(CONCURRENT)

        async def one(name: str, host: str, port: int) -> None:
            async with gate:
                await self._resolve(name, host, port)

        await asyncio.gather(*(one(name, *place) for name, place in self._names.items()))
        self._attempted = True

    async def _resolve(self, name: str, host: str, port: int) -> None:
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT):
                hosts = await in_thread(lambda: self._resolver(host))
        except TimeoutError:
            self._failed[name] = f"no answer within {RESOLVE_TIMEOUT:.0f} s"
        except (OSError, UnicodeError) as error:
            self._failed[name] = _reason(error)
        else:
            self._failed.pop(name, None)
            self._found[name] = tuple(sorted({join_address(found, port) for found in hosts}))


def addresses_of(host: str) -> list[str]:
    """The IP addresses of a host name, by the system's resolver. Blocks; raises OSError or UnicodeError.

    IPv6 addresses only if there are no others: agents listen on IPv4 unless told otherwise, and one worker that has
    both must not count twice.
    """
    answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    ipv4 = [str(answer[4][0]) for answer in answers if answer[0] == socket.AF_INET]
    return ipv4 or [str(answer[4][0]) for answer in answers]


# The resolver's word that a name does not exist, as opposed to no word at all.
_UNKNOWN = "no such name"


def _reason(error: OSError | UnicodeError) -> str:
    if isinstance(error, socket.gaierror) and error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)):
        return _UNKNOWN
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)


def _is_unknown(reason: str) -> bool:
    return reason == _UNKNOWN


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
