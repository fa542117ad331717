"""The vLLM flags that runtime LoRA needs: which are missing, which rule it out, how they get into the container."""

from __future__ import annotations

import re

from sidecar.core.injection_parts import PORT, Json, Options
from sidecar.core.vllm_args import VllmArgs, server_command, vllm_args

# In a shell's script: the server's command up to where flags may stand, behind the model if that is its first word.
_GAP = r"(?:[ \t]|\\\n)+"
_SERVER = re.compile(
    rf"(?:\bvllm{_GAP}serve(?:{_GAP}(?!-)[^\s;&|<>#\\]+)?|-m{_GAP}vllm\.entrypoints\.openai\.api_server)(?=\s)"
)


def will_not_work(said: VllmArgs) -> list[str]:
    """Why this server can't take adapters at run time, each with the way out."""
    reasons = []
    if said.api_servers > 1 and said.api_servers_given:
        reasons.append(
            f"--api-server-count {said.api_servers}: each API server would have a list of adapters of its own, and vLLM"
            " refuses to start with runtime LoRA updating; use --api-server-count 1"
        )
    if said.api_servers == 0:
        reasons.append(
            "--headless or --api-server-count 0: this container has no API server; inject into the one that has"
        )
    if said.enable_lora is False:
        reasons.append("--no-enable-lora switches LoRA off; take the flag away")
    if said.socket:
        reasons.append(f"--uds {said.socket}: the agent reaches the engine by TCP only; use --host and --port")
    if said.tls:
        reasons.append("--ssl-keyfile: the agent speaks plain HTTP inside the pod; end TLS in front of it")
    if said.port == PORT:
        reasons.append(f"--port {PORT}: that is the agent's own port in the pod; give the engine another one")
    if said.grpc:
        reasons.append("--grpc: that server has no runtime LoRA API; take the flag away")
    return reasons


def missing_flags(said: VllmArgs, options: Options) -> list[str]:
    """The words to add. A flag that is there in any form is left alone, unless `options` asks for a number."""
    flags = [] if said.enable_lora or "--enable-lora" in said.unresolved else ["--enable-lora"]
    wanted = {
        "--max-loras": (options.max_loras, said.max_loras),
        "--max-cpu-loras": (options.max_cpu_loras, said.max_cpu_loras),
        "--max-lora-rank": (options.max_lora_rank, said.max_lora_rank),
    }
    for name, (number, present) in wanted.items():
        if number and number != present:
            flags += [name, str(number)]
    if said.api_servers > 1 and not said.api_servers_given:
        # vLLM starts one for each data-parallel rank by itself, and then has several lists of adapters.
        flags += ["--api-server-count", "1"]
    return flags


def add_flags(engine: Json, flags: list[str], options: Options) -> Json | None:
    """Give the words to the server's command; what `remove_flags` needs to undo it.

    At its end, or in a shell's script that goes on after it (`vllm serve m && date`) directly behind `vllm serve`. None
    if they reach it neither way.
    """
    command = server_command(engine)
    if command.script is None:
        field = "args" if engine.get("args") is not None or not engine.get("command") else "command"
        if engine.get(field) is None:
            engine[field] = []
        engine[field].extend(flags)
        return {"in": field, "words": flags}
    field, index = command.script
    words = " " + " ".join(flags)
    script = engine[field][index]
    body = script.rstrip()
    changes = [({"suffix": words}, body + words + script[len(body) :])]
    if command.names_server:
        changes += [
            ({"behind": words}, script[: at.end()] + words + script[at.end() :]) for at in _SERVER.finditer(script)
        ]
    for change, text in changes:
        # The same class as before, so that a block scalar stays one.
        engine[field][index] = type(script)(text)
        if not command.names_server or not missing_flags(vllm_args(engine), options):
            return {"in": field, "script": index, **change}
    engine[field][index] = script
    return None


def remove_flags(engine: Json, change: Json) -> None:
    """Undo `add_flags`, as far as the words are still there."""
    field = change["in"]
    words = engine.get(field)
    if words is None:
        return
    if "script" in change:
        script = words[change["script"]]
        if "behind" in change:
            added = change["behind"]
            ends = (at.end() for at in _SERVER.finditer(script) if script.startswith(added, at.end()))
            for end in ends:
                words[change["script"]] = type(script)(script[:end] + script[end + len(added) :])
                break
            return
        body = script.rstrip()
        if body.endswith(change["suffix"]):
            words[change["script"]] = type(script)(body.removesuffix(change["suffix"]) + script[len(body) :])
        return
    added = list(change["words"])
    for start in reversed(range(len(words) - len(added) + 1)):
        if list(words[start : start + len(added)]) == added:
            del words[start : start + len(added)]
            break
    if not words:
        del engine[field]
