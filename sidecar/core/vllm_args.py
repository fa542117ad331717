"""What a vLLM container's command line says: pure reading of a pod's container, shared by the agent and `inject`.

vLLM's own rules, as far as they matter here (its FlexibleArgumentParser and `vllm serve`): underscores and dashes are
the same in a flag's name, `--flag value` and `--flag=value` too, the last one wins, `--no-flag` turns a switch off.
Kubernetes replaces `$(NAME)` by the container's variables, a shell `$NAME` and `${NAME:-default}`. A value that still
depends on something else is unknown, which is never the same as absent.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sidecar.model import Frozen

DEFAULT_PORT = 8000
RUNTIME_UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
API_KEY = "VLLM_API_KEY"

_SHELLS = {"sh", "bash", "dash", "ash", "zsh"}
_SERVER_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")
_ALIASES = {
    "-asc": "--api-server-count",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
}
_ABBREVIATED = ("--max-cpu-loras", "--max-loras", "--max-lora-rank", "--api-server-count", "--served-model-name")
_SEPARATORS = set(";&|\n")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_KUBERNETES_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_SHELL_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_UNKNOWN = re.compile(r"\$[({A-Za-z_]|`")
_TRUE = {"1", "true"}
# Parts of image names that have vllm in them and are something else.
_NOT_SERVERS = ("router", "exporter", "proxy", "gateway", "bench")


class VllmArgs(Frozen, frozen=True, kw_only=True):
    """What is known of one vLLM server from its container. None is unknown or unset; `unresolved` tells which flags
    are set to something that the container alone does not say (a shell's work, a config file)."""

    model: str = ""
    served_names: tuple[str, ...] = ()
    host: str = ""
    port: int = DEFAULT_PORT
    enable_lora: bool | None = None
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None
    # As vLLM would count: its own default is applied, 0 with --headless.
    api_servers: int = 1
    api_servers_given: bool = False
    data_parallel: int = 1
    tls: bool = False
    socket: str = ""
    grpc: bool = False
    config_file: str = ""
    # Keys in clear (arguments or a plain variable), and where the key lies otherwise: (Secret, key in it).
    api_keys: tuple[str, ...] = ()
    api_key_secret: tuple[str, str] | None = None
    runtime_updating: bool | None = None
    unresolved: tuple[str, ...] = ()

    @property
    def capacity(self) -> int | None:
        """Adapters that it keeps at once: --max-cpu-loras, else --max-loras; None if neither is told."""
        return self.max_cpu_loras if self.max_cpu_loras is not None else self.max_loras

    @property
    def base_models(self) -> tuple[str, ...]:
        """Names under which the base model is known: the served names, else the model itself."""
        return self.served_names or ((self.model,) if self.model else ())


class Command(Frozen, frozen=True, kw_only=True):
    """The words of the server's own command, with the variables put in that the container itself defines.

    `script` is where they were found: ("args" or "command", index) of a shell's script, None for a plain command.
    `last` is whether nothing follows the command in that script. `variables` are the container's, and the script's own.
    """

    words: tuple[str, ...]
    script: tuple[str, int] | None = None
    last: bool = True
    variables: dict[str, str] = {}

    @property
    def names_server(self) -> bool:
        """Whether vLLM's server is named in it; an image's own entry point may be it all the same."""
        return any(_names_server(word) for word in self.words)


def vllm_args(container: Mapping[str, Any]) -> VllmArgs:
    """What a container of a pod's spec says of its vLLM server; never raises on what a person may have written."""
    command = server_command(container)
    arguments = _arguments(command.words)
    first = arguments[0] if arguments and (command.names_server or not container.get("command")) else ""
    model = first if first and not first.startswith("-") and not _UNKNOWN.search(first) else ""
    return _read(dict(_flags(arguments)), model, container, command.variables)


def find_engines(containers: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Indexes of the containers that run a vLLM server: those whose command names it, else those whose image does."""
    named = tuple(i for i, c in enumerate(containers) if server_command(c).names_server)
    return named or tuple(i for i, c in enumerate(containers) if _image_is_vllm(str(c.get("image") or "")))


def _image_is_vllm(image: str) -> bool:
    name = image.rpartition("/")[2].partition("@")[0].partition(":")[0].lower()
    return "vllm" in name and not any(other in name for other in _NOT_SERVERS)


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    """The container's variables with a plain value."""
    entries = container.get("env") or ()
    return {
        str(entry["name"]): str(entry["value"])
        for entry in entries
        if isinstance(entry, Mapping) and "name" in entry and entry.get("value") is not None
    }


def server_command(container: Mapping[str, Any]) -> Command:
    """The command of the vLLM server, taken out of a shell's script if it is in one."""
    variables = environment(container)
    command = [_substitute(word, variables) for word in _strings(container, "command")]
    args = [_substitute(word, variables) for word in _strings(container, "args")]
    words = command + args
    at = _script_index(words)
    if at is None:
        return Command(words=tuple(words), variables=variables)
    place = ("command", at) if at < len(command) else ("args", at - len(command))
    parts = list(_split_script(words[at], variables))
    for number, part in enumerate(parts):
        if any(_names_server(word) for word in part):
            return Command(words=tuple(part), script=place, last=number == len(parts) - 1, variables=variables)
    return Command(words=(), script=place, last=False, variables=variables)


def _strings(container: Mapping[str, Any], field: str) -> list[str]:
    value = container.get(field)
    return [str(word) for word in value] if isinstance(value, Sequence) and not isinstance(value, str) else []


def _substitute(word: str, variables: Mapping[str, str]) -> str:
    return _KUBERNETES_VARIABLE.sub(lambda m: variables.get(m[1], m[0]), word)


def _script_index(words: Sequence[str]) -> int | None:
    """Where the script of `sh -c SCRIPT` stands, for any shell and its bundled options (`-lc`, `-euxc`)."""
    if not words or words[0].rpartition("/")[2] not in _SHELLS:
        return None
    for index, word in enumerate(words[1:-1], start=1):
        if not word.startswith("-"):
            return None
        if re.fullmatch(r"-[a-z]*c", word):
            return index + 1
    return None


def _split_script(script: str, variables: dict[str, str]) -> Iterator[list[str]]:
    """The simple commands of a shell script, split into words, with the known variables put in.

    Assignments (alone, exported or before a command) are added to `variables`.
    """
    lexer = shlex.shlex(script.replace("\\\n", " "), posix=True, punctuation_chars=";&|\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    part: list[str] = []
    try:
        for token in lexer:
            if set(token) <= _SEPARATORS:
                if part:
                    yield part
                part = []
            elif (assigned := _ASSIGNMENT.fullmatch(token)) and set(part) <= {"export", "env", "exec"}:
                variables[assigned[1]] = " ".join(_expanded(assigned[2], variables))
            else:
                part.extend(_expanded(token, variables))
    except ValueError:  # an unbalanced quote: what was read so far is all that can be told
        pass
    if part:
        yield part


def _expanded(token: str, variables: Mapping[str, str]) -> list[str]:
    """A word with its variables put in; a word that is one variable alone may be several words, as in a shell."""

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[3])
        if known is None:
            return match[2] if match[2] is not None else match[0]
        return known

    if whole := _SHELL_VARIABLE.fullmatch(token):
        return value(whole).split()
    return [_SHELL_VARIABLE.sub(value, token)]


def _names_server(word: str) -> bool:
    return word.rpartition("/")[2] == "vllm" or word in _SERVER_MODULES


def _arguments(words: Sequence[str]) -> list[str]:
    """The words after the program, `python -m module` or `vllm serve`; all of them for an image's own entry point."""
    for index, word in enumerate(words):
        if _names_server(word):
            rest = list(words[index + 1 :])
            return rest[1:] if rest[:1] == ["serve"] else rest
    return list(words)


def _flag_name(word: str) -> str:
    if not word.startswith("--"):
        return _ALIASES.get(word, word)
    name = word.replace("_", "-")
    # argparse takes a beginning that fits one flag alone: --max-cpu-lora is --max-cpu-loras.
    meant = [flag for flag in _ABBREVIATED if flag.startswith(name)]
    return meant[0] if len(meant) == 1 and len(name) > len("--max-cpu") else name


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(flag, its values) in order; `--no-x` gives ("--x", ("false",))."""
    name: str | None = None
    values: list[str] = []
    for word in [*arguments, "--"]:
        if not re.match(r"--|-[A-Za-z]", word):
            values.append(word)
            continue
        if name is not None:
            yield name, tuple(values)
        key, equals, value = word.partition("=")
        name, values = _flag_name(key), [value] if equals else []
        if name.startswith("--no-") and not values:
            yield "--" + name.removeprefix("--no-"), ("false",)
            name = None


def _read(
    flags: Mapping[str, tuple[str, ...]], model: str, container: Mapping[str, Any], variables: Mapping[str, str]
) -> VllmArgs:
    unresolved: list[str] = [name for name, values in flags.items() if any(_UNKNOWN.search(v) for v in values)]

    def text(name: str) -> str:
        values = flags.get(name, ())
        return values[0] if values and name not in unresolved else ""

    def number(name: str) -> int | None:
        return int(text(name)) if text(name).isdecimal() else None

    def switch(name: str) -> bool | None:
        if name not in flags or name in unresolved:
            return None
        return not flags[name] or flags[name][0].lower() in _TRUE

    given = number("--api-server-count")
    updating = variables.get(RUNTIME_UPDATING)
    keys, secret = _api_key(flags, container, variables)
    return VllmArgs(
        model=text("--model") or model,
        served_names=flags.get("--served-model-name", ()) if "--served-model-name" not in unresolved else (),
        host=text("--host"),
        port=number("--port") or DEFAULT_PORT,
        enable_lora=switch("--enable-lora"),
        max_loras=number("--max-loras"),
        max_cpu_loras=number("--max-cpu-loras"),
        max_lora_rank=number("--max-lora-rank"),
        api_servers=_api_servers(flags, given, number),
        api_servers_given=given is not None,
        data_parallel=number("--data-parallel-size") or 1,
        tls=bool(flags.get("--ssl-keyfile") or flags.get("--ssl-certfile")),
        socket=text("--uds"),
        grpc=bool(switch("--grpc")),
        config_file=text("--config"),
        api_keys=keys,
        api_key_secret=secret,
        runtime_updating=None if updating is None else updating.strip().lower() in _TRUE,
        unresolved=tuple(unresolved),
    )


def _api_servers(flags: Mapping[str, tuple[str, ...]], given: int | None, number: Any) -> int:
    """How many API servers `vllm serve` starts: as told, none with --headless, else one a rank that it balances."""
    if "--headless" in flags:
        return 0
    if given is not None:
        return given
    outside = ("--data-parallel-external-lb", "--data-parallel-rank", "--data-parallel-multi-port-external-lb")
    if any(name in flags for name in outside):
        return 1
    if "--data-parallel-hybrid-lb" in flags or "--data-parallel-start-rank" in flags:
        return number("--data-parallel-size-local") or 1
    return number("--data-parallel-size") or 1


def _api_key(
    flags: Mapping[str, tuple[str, ...]], container: Mapping[str, Any], variables: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, str] | None]:
    """Keys in clear and the Secret that holds one. The argument wins over the variable, as in vLLM."""
    secrets = {
        str(entry.get("name")): (str(reference.get("name", "")), str(reference.get("key", "")))
        for entry in container.get("env") or ()
        if isinstance(entry, Mapping)
        and isinstance(entry.get("valueFrom"), Mapping)
        and isinstance(reference := entry["valueFrom"].get("secretKeyRef"), Mapping)
    }
    values = flags.get("--api-key", ())
    for value in values:
        named = _KUBERNETES_VARIABLE.fullmatch(value) or _SHELL_VARIABLE.fullmatch(value)
        if named and (found := secrets.get(next((g for g in named.groups() if g), ""))):
            return (), found
    known = tuple(value for value in values if not _UNKNOWN.search(value))
    if known:
        return known, None
    if variables.get(API_KEY):
        return (variables[API_KEY],), None
    return (), secrets.get(API_KEY)
