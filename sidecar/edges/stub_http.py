"""The HTTP side of the stub engine: routes and what they answer.

Part of the stub engine (`stub_engine`), which stands in for vLLM in the demo and in tests.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from sidecar.edges.stub_faults import Faults, hit
from sidecar.edges.stub_lora import LoraError, LoraNotFound
from sidecar.edges.stub_model import EngineDead, Lora, StubModel, StubOptions
from sidecar.edges.stub_shapes import ApiError, Plain, card, completion, drop_type, escaped, read_json, shown, token_ids

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")


@dataclass(frozen=True)
class Call:
    """A load or unload that was answered: for tests to look at."""

    kind: str
    name: str
    path: str
    status: int
    at: float


class StubServer:
    """One API server process. `loras`: name -> what is served under it."""

    def __init__(self, options: StubOptions, *, faults: Faults | None = None, calls: list[Call] | None = None) -> None:
        self.options = options
        self.model = StubModel(options)
        self.faults = faults or Faults()
        self.loras: dict[str, Lora] = {}
        self.calls: list[Call] = calls if calls is not None else []
        self.requests: dict[str, int] = defaultdict(int)
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._numbers = 0
        self._late: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Load --lora-modules. Raises LoraError."""
        for name, path in self.options.lora_modules:
            self._add(name, path, inplace=False)

    def app(self) -> web.Application:
        """The routes, as many as the options open."""
        app = web.Application(middlewares=[self._envelope])
        app.on_response_prepare.append(drop_type)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.get("/stub/calls", self._get_calls),
                web.post("/stub/faults", self._set_faults),
                web.delete("/stub/faults", self._clear_faults),
            ]
        )
        if self.options.runtime_updating:
            app.router.add_post("/v1/load_lora_adapter", self._load)
            app.router.add_post("/v1/unload_lora_adapter", self._unload)
        if self.options.dev_mode:
            app.router.add_post("/reset_prefix_cache", self._reset)
            app.router.add_get("/server_info", self._server_info)
        return app

    @web.middleware
    async def _envelope(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests[request.path] += 1
        if not self._allowed(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            return web.json_response({"detail": error.reason}, status=error.status)
        except ApiError as error:
            return self._error(error)
        except EngineDead as error:
            return self._error(ApiError(500, "InternalServerError", str(error)))

    def _allowed(self, request: web.Request) -> bool:
        if not self.options.api_keys or not request.path.startswith(_GUARDED):
            return True
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and token in self.options.api_keys

    def _error(self, error: ApiError) -> web.Response:
        inner = {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
        document: dict[str, Any] = {"error": inner}
        if self.options.release < (0, 10):
            document = {"object": "error", **inner}
        return web.json_response(document, status=error.status)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.model.dead.is_set() else 200)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.options.version})

    async def _models(self, request: web.Request) -> web.Response:
        if self.faults.models_status or self.faults.models_body:
            return web.Response(status=self.faults.models_status or 200, text=self.faults.models_body)
        base = self.options.names[0]
        cards = [card(name, self.options.model, None, self.options.max_model_len) for name in self.options.names]
        cards += [card(lora.name, lora.path, base, None) for lora in self.loras.values()]
        return web.json_response({"object": "list", "data": cards})

    async def _load(self, request: web.Request) -> web.Response:
        body = await read_json(request, "lora_name", "lora_path")
        name, path = body["lora_name"], body["lora_path"]
        response: web.Response | None = None
        try:
            if self.faults.load_status:
                response = web.Response(status=self.faults.load_status, text=self.faults.load_body)
            else:
                await self._do_load(name, path, bool(body.get("load_inplace")))
                response = Plain(f"Success: LoRA adapter '{name}' added successfully.")
        except ApiError as error:
            response = self._error(error)
        finally:
            self.calls.append(Call("load", name, path, response.status if response else 500, time.time()))
        return response

    async def _do_load(self, name: str, path: str, inplace: bool) -> None:
        async with self._locks[name]:
            inplace = inplace and self.options.release >= (0, 16)
            self._check_load(name, path, inplace)
            while hit(self.faults.hang_load, name):
                await self.faults.changed()
            await asyncio.sleep(self.options.load_seconds)
            await self._die_if(hit(self.faults.die_on_load, name))
            if self.model.dead.is_set():
                raise EngineDead
            if hit(self.faults.lie_on_load, name):
                return
            self._load_files(name, path, inplace)
            for key, seconds in self.faults.die_after_load.items():
                if key in (name, "*"):
                    self._later(seconds)

    def _check_load(self, name: str, path: str, inplace: bool) -> None:
        if not name or not path:
            raise ApiError(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.options.names:
            raise ApiError(400, "InvalidUserInput", f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self.loras and not inplace:
            hint = " If you want to load the adapter in place, set 'load_inplace' to True."
            message = f"The lora adapter '{name}' has already been loaded."
            raise ApiError(400, "InvalidUserInput", message + (hint if self.options.release >= (0, 16) else ""))

    def _load_files(self, name: str, path: str, inplace: bool) -> None:
        old = self.options.release < (0, 20)
        try:
            if any(path.startswith(prefix) for prefix in self.faults.hide):
                raise LoraNotFound
            for key, message in self.faults.refuse.items():
                if key in (name, "*"):
                    raise LoraError(message)
            self._add(name, path, inplace)
        except LoraNotFound:
            message = f"Loading lora {name} failed: No adapter found for {shown(path)}"
            raise ApiError(404, "NotFoundError", message) from None
        except LoraError as error:
            message = (
                f"Call to add_lora method failed: Worker failed with error '{error}', please check the stack trace "
                "above for the root cause"
            )
            status, kind = (400, "BadRequestError") if old else (500, "InternalServerError")
            raise ApiError(status, kind, message) from None

    def _add(self, name: str, path: str, inplace: bool) -> None:
        known = self.loras.get(name)
        if known is None:
            self._numbers += 1
        lora = Lora(name=name, number=known.number if known else self._numbers, path=path, inplace=inplace)
        self.model.add(lora)
        self.loras[name] = lora

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await read_json(request, "lora_name"))["lora_name"]
        response: web.Response | None = None
        try:
            async with self._locks[name]:
                while hit(self.faults.hang_unload, name):
                    await self.faults.changed()
                if not name:
                    message = "'lora_name' needs to be provided to unload a LoRA adapter."
                    raise ApiError(400, "InvalidUserInput", message)
                if name not in self.loras:
                    raise ApiError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
                del self.loras[name]
            response = Plain(f"Success: LoRA adapter '{name}' removed successfully.")
        except ApiError as error:
            response = self._error(error)
        finally:
            self.calls.append(Call("unload", name, "", response.status if response else 500, time.time()))
        return response

    async def _completions(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        model = body.get("model") or self.options.names[0]
        lora = self.loras.get(model)
        if lora is None and model not in self.options.names:
            aliases = ", ".join(self.options.names)
            message = f"The model `{model}` does not exist. Valid aliases: {aliases}."
            raise ApiError(404, "NotFoundError", message, "model")
        prompt = token_ids(body.get("prompt") or "")
        if not prompt:
            message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
            raise ApiError(400, "BadRequestError", message, "prompt")
        room = self.options.max_model_len - len(prompt)
        if room <= 0:
            message = f"This model's maximum context length is {self.options.max_model_len} tokens."
            raise ApiError(400, "BadRequestError", message, "input_tokens")
        await self._die_if(lora is not None and hit(self.faults.die_on_use, model))
        tokens = await self.model.generate(prompt, lora, min(room, int(body.get("max_tokens", 16))))
        # An alias of the base model is answered under its first name.
        name = model if lora is not None else self.options.names[0]
        return web.json_response(completion(name, prompt, tokens, ids=bool(body.get("return_token_ids"))))

    async def _metrics(self, request: web.Request) -> web.Response:
        engine = f'{{engine="0",model_name="{escaped(self.options.names[0])}"}}'
        lines = [
            "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.",
            "# TYPE process_start_time_seconds gauge",
            f"process_start_time_seconds {self.model.started!r}",
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{engine} {float(self.model.running)}",
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{engine} {float(self.model.waiting)}",
            "# TYPE vllm:num_requests_waiting_by_reason gauge",
            # Nothing but the slots of adapters is ever short here.
            f'vllm:num_requests_waiting_by_reason{engine[:-1]},reason="capacity"}} 0.0',
            f'vllm:num_requests_waiting_by_reason{engine[:-1]},reason="deferred"}} {float(self.model.waiting)}',
            "# TYPE vllm:prompt_tokens_total counter",
            f"vllm:prompt_tokens_total{engine} {float(self.model.prompt_tokens)}",
            "# HELP vllm:lora_requests_info Running stats on lora requests.",
            "# TYPE vllm:lora_requests_info gauge",
        ]
        for names, at in self.model.lora_series().items():
            both = ",".join(f'{kind}_lora_adapters="{escaped(names)}"' for kind in ("running", "waiting"))
            lines.append(f'vllm:lora_requests_info{{max_lora="{self.options.max_loras}",{both}}} {at!r}')
        # Set as it is: aiohttp would have the charset before the version.
        exposition = {"Content-Type": "text/plain; version=1.0.0; charset=utf-8"}
        return web.Response(body=("\n".join(lines) + "\n").encode(), headers=exposition)

    async def _reset(self, request: web.Request) -> web.Response:
        preempt = request.query.get("reset_running_requests") == "true" and self.options.release >= (0, 30)
        success = self.model.reset_prefix_cache(preempt=preempt)
        if self.options.release < (0, 30):
            return web.Response()
        return web.json_response({"success": success})

    async def _server_info(self, request: web.Request) -> web.Response:
        if request.query.get("config_format") != "json":
            return web.json_response({"vllm_config": f"model='{self.options.model}'"})
        lora = {
            "max_lora_rank": self.options.max_lora_rank,
            "max_loras": self.options.max_loras,
            "max_cpu_loras": self.options.max_cpu_loras or self.options.max_loras,
            "target_modules": None,
        }
        return web.json_response({"vllm_config": {"model_config": {"model": self.options.model}, "lora_config": lora}})

    async def _get_calls(self, request: web.Request) -> web.Response:
        return web.json_response([vars(call) for call in self.calls])

    async def _set_faults(self, request: web.Request) -> web.Response:
        try:
            self.faults.set(**json.loads(await request.text()))
        except (ValueError, TypeError, KeyError) as error:
            raise ApiError(400, "Bad Request", f"not a fault: {error}") from None
        return web.json_response(vars(self.faults) | {"_changed": None})

    async def _clear_faults(self, request: web.Request) -> web.Response:
        self.faults.clear()
        return web.Response()

    async def _die_if(self, condition: bool) -> None:
        if condition:
            await self.model.die()
            raise EngineDead

    def _later(self, seconds: float) -> None:
        async def die() -> None:
            await asyncio.sleep(seconds)
            await self.model.die()

        task = asyncio.create_task(die())
        self._late.add(task)
        task.add_done_callback(self._late.discard)
