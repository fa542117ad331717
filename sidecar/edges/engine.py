"""The vLLM server on this worker, over its HTTP API (`ports.Engine`).

Every call opens a connection of its own: vLLM closes idle ones after five seconds, and a load that was written into a
connection just being closed could not be told from one that killed the engine. It also lets several API servers behind
one port show themselves (`VllmEngine.contradiction`). `load_inplace` is never used: it makes vLLM read the adapter's
files again at every step.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial

import aiohttp
import structlog
from yarl import URL

from sidecar.core.contradiction import Contradictions
from sidecar.core.dialect_vllm import (
    Answer,
    Limits,
    Models,
    Verdict,
    clean,
    engine_died,
    parse_limits,
    parse_models,
    parse_success,
    parse_version,
    read_load,
    read_unload,
)
from sidecar.core.metrics_vllm import Metrics, Traffic, busy_names, idle_between, parse_metrics, traffic
from sidecar.edges.engine_key import EngineKey
from sidecar.edges.engine_url import base_url
from sidecar.edges.former import FormerHolders
from sidecar.edges.turns import Shared, Turns
from sidecar.model import EngineView
from sidecar.ports import (
    REASON_ALREADY_LOADED,
    REASON_BASE_MODEL,
    REASON_NOT_VISIBLE,
    REASON_OUT_OF_MEMORY,
    REASON_REFUSED,
    REASON_RUNTIME_DISABLED,
    REASON_UNAUTHORIZED,
    Clock,
    EngineDisconnected,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
)
from sidecar.settings import MIB, Settings

log = structlog.get_logger()

# An engine counts as up for 3 s after an answer, so a look has to be over before.
LOOK_TIMEOUT = 2.5
# Beside a look: who answered. Short, because the look waits for it.
IDENTIFY_TIMEOUT = 1.0
# How often to ask for the process although nothing hints at a restart.
IDENTIFY_INTERVAL = 10.0
CONNECT_TIMEOUT = 2.0
RESET_TIMEOUT = 10.0
# Whose requests are in flight: worth waiting for an engine that has no time, since the next load depends on it.
METRICS_TIMEOUT = 5.0
# One token of the base model, behind whatever waits.
OVERTAKE_TIMEOUT = 10.0
# One load after the other: each is quicker then, and it is plain which one kills the engine. But one that hangs must
# not keep the others out until its timeout.
LOADS_ALONE = 5.0
# vLLM gathers what it knows about the machine for its first answer to /server_info: seconds.
INFO_TIMEOUT = 10.0
# 20,000 adapters in /v1/models are 12 MB; vLLM's own metrics 50 KB and a line per combination of adapters.
MAX_BODY = 32 * MIB
MAX_ANSWER = 64 * 1024


class VllmEngine:
    """`ports.Engine` for one vLLM server.

    Safe for concurrent use: at a time one call per name, and one load in all as long as it is answered in good time.
    """

    def __init__(self, session: aiohttp.ClientSession, settings: Settings, clock: Clock, api_key: str = "") -> None:
        """`api_key` serves where no file is named. Raises ValueError for an unusable `settings.engine_url`."""
        self._session = session
        self._settings = settings
        self._clock = clock
        self._url = base_url(settings.engine_url)
        self._key = EngineKey(settings.engine_api_key_file, api_key)
        self._turns = Turns()
        self._contradictions = Contradictions()
        self._listed: Models | None = None
        self._process: str | None = None
        self._version = ""
        self._identified = 0.0
        self._former = FormerHolders(self._traffic)
        self._metrics = Shared(partial(self._read_metrics, METRICS_TIMEOUT))
        # Set while the present process is in doubt: at first, and after a look that failed.
        self._doubt = True

    @property
    def contradiction(self) -> str | None:
        """What to tell people when the engine's lists contradict each other, else None."""
        names = self._contradictions.names(self._clock())
        if not names:
            return None
        return (
            f"{self._url} contradicts itself about {clean(', '.join(names[:5]), 200)}: several API servers behind one "
            "address, each with a list of its own? Start vLLM with --api-server-count 1 and give --engine-url the "
            "address of one server"
        )

    async def look(self) -> EngineView:
        """One look at /v1/models.

        `process` is the start time of the API server's process. It is None while it can't be told: /metrics doesn't
        hold it (several API servers do that, and proxies), or doesn't answer after a sign of a restart.
        Raises EngineUnavailable, EngineRefused (wrong API key).
        """
        try:
            models = await self._models()
            if await self._identify(models):
                models = await self._models()
        except (EngineUnavailable, EngineRefused):
            self._doubt = True
            self._contradictions.forget()
            raise
        self._listed = models
        self._contradictions.saw(models.adapters, self._clock())
        return EngineView(
            process=self._process,
            version=self._version,
            base_models=models.base_models,
            adapters=models.adapters,
            at=self._clock(),
        )

    async def load(self, name: str, path: str) -> None:
        """Load the adapter in directory `path` under `name`.

        A name that is already loaded from this very path is success; one that was given up is loaded when the requests
        of its former holder have ended. Raises EngineRefused with its reason, EngineTimeout (it may still take effect),
        EngineDisconnected (sent, and the connection broke), EngineUnavailable (never sent).
        """
        wait = self._settings.load_timeout
        async with self._turns.hold(f"name {name}", wait):
            if name in self._former.names or not self._serves(name):
                await self._former.ended(name)
            async with self._turns.hold("load", wait, LOADS_ALONE):
                status, body = await self._post(
                    "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, wait, name
                )
                answer = read_load(status, body)
                if answer.verdict is Verdict.ALREADY_LOADED:
                    self._contradictions.answered(name, True, self._clock())
                    await self._require_root(name, path)
                elif answer.verdict is not Verdict.OK:
                    raise await self._load_error(answer, name, path)
                self._contradictions.called(name)

    async def unload(self, name: str) -> None:
        """Forget `name`; a name that isn't there is success. vLLM drains nothing: requests of that adapter go on,
        queued ones may still read its files. Raises as `load`."""
        async with self._turns.hold(f"name {name}", self._settings.unload_timeout):
            status, body = await self._post(
                "/v1/unload_lora_adapter", {"lora_name": name}, self._settings.unload_timeout, name
            )
            answer = read_unload(status, body)
            if answer.verdict is Verdict.ABSENT:
                self._contradictions.answered(name, False, self._clock())
            elif answer.verdict is not Verdict.OK:
                raise self._error(answer, f"unloading {name!r}")
            self._contradictions.called(name)
            self._former.gave_up(name)

    async def reset_prefix_cache(self) -> bool:
        """True if the engine dropped its prefix cache, False if it can't (not in dev mode).

        Blocks of running requests can't be dropped: those requests are preempted then, and compute their prompt again.
        Requests that still run with old weights would fill the cache again under the same name: unload, wait until none
        is in flight, reset, load. vLLM before 0.30 answers 200 whether it dropped anything or not; there only an engine
        that was idle before and after counts. Raises EngineUnavailable (try again later), EngineTimeout.
        """
        before = await self._metrics()
        for query in ("", "?reset_running_requests=true"):
            status, body = await self._reset(query)
            if status in (404, 405):
                return False
            said = parse_success(body) if status == 200 else False
            if said or (said is None and idle_between(before, await self._metrics())):
                return True
        text = clean(body.decode("utf-8", "replace"), 100)
        raise EngineUnavailable(
            f"{self._url}: the prefix cache could not be dropped: {status} {text!r}; requests are running"
        )

    async def _reset(self, query: str) -> tuple[int, bytes]:
        try:
            return await self._call("POST", f"/reset_prefix_cache{query}", RESET_TIMEOUT, MAX_ANSWER)
        except TimeoutError:
            raise EngineTimeout(f"{self._url}: no answer to POST /reset_prefix_cache in {RESET_TIMEOUT:g} s") from None

    async def traffic(self, name: str) -> Traffic:
        """Whether requests of `name`, which isn't loaded, are in flight.

        The metrics follow the engine's steps, of which one may take seconds, and name no request before its first
        token. So the engine is asked for a token of its base model before: requests have their turns in the order in
        which they came, except that one whose adapter has no slot lets others pass.
        """
        return await self._traffic(name, True)

    async def _traffic(self, name: str, surely: bool) -> Traffic:
        overtaken = await self._overtake() if surely else None
        return traffic(await self._metrics(), name, overtaken)

    async def _overtake(self) -> bool | None:
        """True when one token has been generated, False if it takes too long, None if the engine generates none."""
        if self._listed is None or not self._listed.base_models:
            return None
        document = {"model": self._listed.base_models[0].id, "prompt": [1], "max_tokens": 1, "temperature": 0}
        try:
            status, _ = await self._call("POST", "/v1/completions", OVERTAKE_TIMEOUT, MAX_ANSWER, document)
        except TimeoutError:
            return False
        except (EngineUnavailable, EngineRefused):
            return None
        return True if status == 200 else None

    async def in_flight(self) -> frozenset[str] | None:
        """Names with requests that have produced a token, as far as the metrics tell; None when they don't."""
        metrics = await self._metrics()
        served = frozenset(self._listed.adapters) if self._listed is not None else frozenset()
        return busy_names(metrics, served | self._former.names) if metrics is not None else None

    def _serves(self, name: str) -> bool:
        """As far as is known: yes before the first look."""
        return self._listed is None or name in self._listed.adapters

    async def limits(self) -> Limits | None:
        """max_loras, max_cpu_loras and max_lora_rank, which vLLM tells only in its dev mode; None without."""
        body = await self._optional("/server_info?config_format=json", INFO_TIMEOUT, MIB)
        return parse_limits(body) if body is not None else None

    async def _models(self) -> Models:
        try:
            status, body = await self._call("GET", "/v1/models", LOOK_TIMEOUT, MAX_BODY)
        except TimeoutError:
            raise EngineUnavailable(f"{self._url}: no answer to GET /v1/models in {LOOK_TIMEOUT:g} s") from None
        if status in (401, 403):
            raise self._error(Answer(Verdict.UNAUTHORIZED), "GET /v1/models")
        models = parse_models(body) if status == 200 else None
        # vLLM always lists its base model: a list that all at once lacks it says nothing about adapters either.
        if models is None or (not models.base_models and self._listed is not None and self._listed.base_models):
            text = clean(body[:400].decode("utf-8", "replace"), 100)
            hint = "" if status >= 500 else "; is --engine-url right?"
            raise EngineUnavailable(f"{self._url}: GET /v1/models: {status}, not a list of models ({text!r}){hint}")
        return models

    async def _identify(self, models: Models) -> bool:
        """Find out which process answered, where that may have changed; True if it has, since `models` was read."""
        now = self._clock()
        vanished = self._listed is not None and not self._listed.adapters.keys() <= models.adapters.keys()
        suspicious = self._doubt or vanished
        if not suspicious and now - self._identified < IDENTIFY_INTERVAL:
            return False
        self._identified = now
        metrics = await self._read_metrics(IDENTIFY_TIMEOUT)
        if metrics is None:
            # Nothing speaks for a restart: the last answer stands. Else it isn't known, and asked at the next look.
            if suspicious:
                self._process, self._doubt = None, True
            return False
        changed = metrics.process != self._process
        known = self._process is not None
        self._process = metrics.process
        if changed or suspicious or not self._version:
            body = await self._optional("/version", IDENTIFY_TIMEOUT, MAX_ANSWER)
            self._version = parse_version(body) if body is not None else ""
        self._doubt = False
        if changed and known:
            self._contradictions.forget()
            self._former.forget()
        return changed and known

    async def _read_metrics(self, timeout: float) -> Metrics | None:
        body = await self._optional("/metrics", timeout, MAX_BODY)
        return parse_metrics(body.decode("utf-8", "replace")) if body is not None else None

    async def _optional(self, path: str, timeout: float, limit: int) -> bytes | None:
        """The body of a 200, None for anything else."""
        try:
            status, body = await self._call("GET", path, timeout, limit)
        except (EngineUnavailable, EngineRefused, TimeoutError):
            return None
        return body if status == 200 else None

    async def _post(self, path: str, document: dict[str, str], timeout: float, name: str) -> tuple[int, bytes]:
        try:
            return await self._call("POST", path, timeout, MAX_ANSWER, document)
        except TimeoutError:
            self._contradictions.called(name)
            raise EngineTimeout(
                f"{self._url}: no answer to POST {path} for {name!r} in {timeout:g} s; it may still take effect"
            ) from None
        except EngineDisconnected:
            self._contradictions.called(name)
            self._doubt = True
            raise

    async def _call(
        self, method: str, path: str, timeout: float, limit: int, document: Mapping[str, object] | None = None
    ) -> tuple[int, bytes]:
        """One request. Raises TimeoutError, EngineUnavailable, EngineDisconnected, EngineRefused (bad key file)."""
        headers = {"Connection": "close", "Accept-Encoding": "identity", **self._key.header()}
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, CONNECT_TIMEOUT))
        try:
            async with self._session.request(
                method,
                URL(f"{self._url}{path}", encoded=True),
                json=document,
                headers=headers,
                timeout=limits,
                allow_redirects=False,  # another host must not get the key
            ) as response:
                return response.status, await self._read(response, limit, path)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise EngineUnavailable(f"{self._url}: no connection: {clean(str(error), 200)}") from None
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDisconnected(
                f"{self._url}: the connection broke during {method} {path}: {clean(str(error) or repr(error), 200)}"
            ) from None

    async def _read(self, response: aiohttp.ClientResponse, limit: int, path: str) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > limit:
                raise EngineUnavailable(f"{self._url}: the answer to {path} is longer than {limit} bytes")
            parts.append(part)
        return b"".join(parts)

    async def _require_root(self, name: str, path: str) -> None:
        """Accept "already loaded" only if the engine serves the name from `path`."""
        root = (await self._models()).adapters.get(name)
        if root == path:
            return
        where = f"from {root}" if root else "from another place (it isn't listed)"
        raise EngineRefused(
            f"the engine already serves {name!r} {where}: unload it there or choose another spec.servedName",
            REASON_ALREADY_LOADED,
        )

    async def _load_error(self, answer: Answer, name: str, path: str) -> EngineUnavailable | EngineRefused:
        if answer.verdict is not Verdict.NO_FILES:
            return self._error(answer, f"loading {name!r}")
        config = os.path.join(path, "adapter_config.json")
        if await asyncio.to_thread(os.path.isfile, config):
            return EngineRefused(
                f"the engine finds no adapter where {config} exists here: mount the same volume at the same path in "
                "the engine's container",
                REASON_NOT_VISIBLE,
            )
        return EngineRefused(f"loading {name!r}: {config} doesn't exist; {answer.message}", REASON_REFUSED)

    def _error(self, answer: Answer, doing: str) -> EngineUnavailable | EngineRefused:
        """The port's error for a verdict that isn't success. The engine's own words never carry the API key."""
        message = self._key.redact(answer.message)
        match answer.verdict:
            case Verdict.UNAVAILABLE:
                self._doubt = True
                died = EngineDisconnected if engine_died(message) else EngineUnavailable
                return died(f"{self._url}: {doing}: {message}")
            case Verdict.UNAUTHORIZED:
                return EngineRefused(f"{self._url}: {doing}: unauthorized. {self._key.advice()}", REASON_UNAUTHORIZED)
            case Verdict.RUNTIME_DISABLED:
                return EngineRefused(
                    f"{self._url}: {doing}: this vLLM doesn't take adapters at run time; start it with --enable-lora "
                    "and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment",
                    REASON_RUNTIME_DISABLED,
                )
            case Verdict.OUT_OF_MEMORY:
                return EngineRefused(f"{doing}: the engine has no memory for it: {message}", REASON_OUT_OF_MEMORY)
            case Verdict.BASE_MODEL:
                return EngineRefused(f"{doing}: {message} Choose another spec.servedName", REASON_BASE_MODEL)
            case _:
                return EngineRefused(f"{doing}: {message}", REASON_REFUSED)
