"""Injection into one pod template: every step puts in what is missing and notes how to take it out again.

What was there before is recorded in an annotation of the template, so that taking the sidecar out restores it exactly.
Each step may run again on its own result and changes nothing then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sidecar.core import injection_parts as parts
from sidecar.core.injection_flags import add_flags, missing_flags, remove_flags, will_not_work
from sidecar.core.injection_parts import ENGINE, GRACE_SECONDS, INJECTED, POOL_LABEL, PORT, SIDECAR, Json, Options
from sidecar.core.vllm_args import RUNTIME_UPDATING, VllmArgs, find_engines, vllm_args

Note = Callable[[str], None]


class InjectionRefused(ValueError):
    """The sidecar can't work there. The text names the workload, every reason and the way out."""


def named(items: Any, name: str) -> Json | None:
    """The entry of a list with that name."""
    return next((item for item in items or () if isinstance(item, dict) and item.get("name") == name), None)


def child(parent: Json, key: str, made: Any) -> Any:
    """`parent[key]`, put there as `made` if it is missing or null."""
    if parent.get(key) is None:
        parent[key] = made
    return parent[key]


def engine_of(template: Json, wanted: str) -> Json | None:
    """The container of the vLLM server: the one called `wanted`, or that an annotation of the template names, or that
    looks like one. None if there is none. Raises InjectionRefused if it can't be told."""
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    containers = [c for c in template["spec"].get("containers") or () if isinstance(c, dict)]
    if wanted or annotations.get(ENGINE):
        return named(containers, wanted or annotations[ENGINE])
    engines = [containers[i] for i in find_engines(containers)]
    if len(engines) > 1:
        names = ", ".join(str(c.get("name")) for c in engines)
        raise InjectionRefused(
            f"several containers look like a vLLM server ({names}); choose one with --container NAME, or in the"
            f" annotation {ENGINE} of the pod template"
        )
    return engines[0] if engines else None


class Injection:
    """The injection into one template; `note` gets one sentence for each thing done."""

    def __init__(self, template: Json, options: Options, pool: str, note: Note) -> None:
        self.template = template
        self.spec: Json = template["spec"]
        self.options = options
        self.pool = pool
        self.note = note
        self.record = read_record(template)

    def run(self) -> None:
        """Put in everything that is missing. Raises InjectionRefused, with the template unchanged."""
        engine = engine_of(self.template, self.options.container)
        if engine is None:
            raise InjectionRefused("no vLLM container")
        said = vllm_args(engine)
        reasons = will_not_work(said) + self._pod_reasons(engine)
        if reasons:
            raise InjectionRefused("; ".join(reasons))
        self._label()
        mounted = self._volume(engine)
        self._flags(engine, said)
        self._env(engine)
        self._pre_stop(engine)
        self._grace()
        self._sidecar(engine, said, mounted)
        write_record(self.template, self.record)

    def _pod_reasons(self, engine: Json) -> list[str]:
        reasons = []
        for container in self.spec.get("containers") or ():
            for port in container.get("ports") or ():
                if port.get("containerPort") == PORT:
                    reasons.append(f"container {container.get('name')} has port {PORT} already, which the agent needs")
        hook = (engine.get("lifecycle") or {}).get("preStop")
        if hook is not None and hook != parts.pre_stop() and not is_sleep(hook):
            reasons.append(
                f"container {engine.get('name')} has a preStop hook of its own, and there can be only one; let it call"
                f" http://127.0.0.1:{PORT}/v1/drained at its end and put the sidecar in by hand, or take it away"
            )
        mount = mount_at(engine, self.options.adapters_dir)
        if mount is not None and (mount.get("subPath") or mount.get("subPathExpr")):
            reasons.append(
                f"container {engine.get('name')} mounts a subPath at {self.options.adapters_dir}, and the agent's"
                " directory is a whole volume; mount one or choose --adapters-dir"
            )
        return reasons

    def _label(self) -> None:
        labels = child(child(self.template, "metadata", {}), "labels", {})
        if labels.get(POOL_LABEL) != self.pool:
            self.record.setdefault("pool", labels.get(POOL_LABEL))
            labels[POOL_LABEL] = self.pool
            self.note(f"label {POOL_LABEL}: {self.pool} on the pod template")

    def _volume(self, engine: Json) -> str:
        """Mount the adapters into the engine; the name of their volume."""
        path = self.options.adapters_dir
        mount = mount_at(engine, path)
        if mount is not None:
            name = str(mount["name"])
            volume = named(self.spec.get("volumes"), name) or {}
            if name != parts.ADAPTERS and "emptyDir" not in volume and "ephemeral" not in volume:
                self.note(f"warning: volume {name} at {path} is used as it is; it must not be shared by several pods")
            return name
        self._add_volume(parts.adapters_volume())
        child(engine, "volumeMounts", []).append({"name": parts.ADAPTERS, "mountPath": path, "readOnly": True})
        self.record["mount"] = True
        self.note(f"volume {parts.ADAPTERS} at {path}, read-only for container {engine['name']}")
        return parts.ADAPTERS

    def _add_volume(self, volume: Json) -> None:
        volumes = child(self.spec, "volumes", [])
        if named(volumes, volume["name"]) is None:
            volumes.append(volume)
            self.record.setdefault("volumes", []).append(volume["name"])

    def _flags(self, engine: Json, said: VllmArgs) -> None:
        flags = missing_flags(said, self.options)
        if flags:
            change = add_flags(engine, flags, self.options)
            if change is None:
                raise InjectionRefused(
                    f"the script of container {engine['name']} does more than to start vLLM, so that it can't be told"
                    f" where its flags go; add {' '.join(flags)} to it yourself"
                )
            self.record.setdefault("flags", []).append(change)
            self.note(f"arguments {' '.join(flags)} of container {engine['name']}")
        after = vllm_args(engine)
        if after.capacity is None and not after.config_file:
            self.note(
                "warning: neither --max-loras nor --max-cpu-loras is given, so each worker holds one adapter; give"
                " one of them to inject or to vLLM"
            )
        if after.config_file:
            self.note(f"warning: --config {after.config_file} can't be read here; LoRA flags in it are not known")
        for name in sorted({"--port", "--max-loras", "--max-cpu-loras"} & set(after.unresolved)):
            self.note(f"warning: the value of {name} is only known inside the container; the agent takes its default")

    def _env(self, engine: Json) -> None:
        if vllm_args(engine).runtime_updating:
            return
        env = child(engine, "env", [])
        entry = named(env, RUNTIME_UPDATING)
        if entry is None:
            env.append({"name": RUNTIME_UPDATING, "value": "True"})
            self.record["env"] = None
        else:
            self.record["env"] = entry.get("value")
            entry["value"] = "True"
        self.note(f"variable {RUNTIME_UPDATING}=True of container {engine['name']}")

    def _pre_stop(self, engine: Json) -> None:
        lifecycle = child(engine, "lifecycle", {})
        hook = lifecycle.get("preStop")
        if hook == parts.pre_stop():
            return
        self.record["preStop"] = hook
        lifecycle["preStop"] = parts.pre_stop()
        self.note(
            f"preStop hook of container {engine['name']}"
            + (", in place of the sleep that was there" if hook is not None else "")
        )

    def _grace(self) -> None:
        before = self.spec.get("terminationGracePeriodSeconds")
        if before is None or before < GRACE_SECONDS:
            self.record["grace"] = before
            self.spec["terminationGracePeriodSeconds"] = GRACE_SECONDS
            self.note(f"terminationGracePeriodSeconds: {GRACE_SECONDS}")

    def _sidecar(self, engine: Json, said: VllmArgs, volume: str) -> None:
        self._add_volume(parts.gossip_volume(self.options.gossip_secret))
        env = [{"name": "LORA_SIDECAR_GOSSIP_KEY_FILE", "value": f"{parts.GOSSIP_DIR}/key"}]
        mounts: list[Json] = [
            {"name": volume, "mountPath": self.options.adapters_dir},
            {"name": parts.GOSSIP, "mountPath": parts.GOSSIP_DIR, "readOnly": True},
        ]
        if self.options.adapters_dir != "/adapters":
            env.append({"name": "LORA_SIDECAR_ADAPTERS_DIR", "value": self.options.adapters_dir})
        if (url := engine_url(said)) != "http://127.0.0.1:8000":
            env.append({"name": "LORA_SIDECAR_ENGINE_URL", "value": url})
        if said.api_key_secret is not None:
            self._add_volume(parts.api_key_volume(*said.api_key_secret))
            mounts.append({"name": parts.API_KEY, "mountPath": parts.API_KEY_DIR, "readOnly": True})
            env.append({"name": "LORA_SIDECAR_ENGINE_API_KEY_FILE", "value": f"{parts.API_KEY_DIR}/key"})
        if self.spec.get("automountServiceAccountToken") is False:
            self._add_volume(parts.token_volume())
            mounts.append({"name": parts.TOKEN, "mountPath": parts.TOKEN_DIR, "readOnly": True})
        self._put(parts.sidecar_container(self.options.image, env, mounts))

    def _put(self, made: Json) -> None:
        """The sidecar as the last init container: whatever prepares the pod comes first, the engine after it."""
        containers = child(self.spec, "initContainers", [])
        existing = named(containers, SIDECAR)
        if existing is None:
            containers.append(made)
            self.note(f"native sidecar {SIDECAR}, image {made['image']}")
            return
        if existing.get("image") != made["image"]:
            self.note(f"image of {SIDECAR}: {existing.get('image')} becomes {made['image']}")
            existing["image"] = made["image"]
        for key, value in made.items():
            child(existing, key, value)
        for key in ("env", "volumeMounts"):
            for entry in made[key]:
                if named(existing[key], entry["name"]) is None:
                    existing[key].append(entry)


def is_sleep(hook: Json) -> bool:
    """A preStop that only waits: what the agent's own hook does better."""
    if "sleep" in hook:
        return True
    words = " ".join(str(w) for w in (hook.get("exec") or {}).get("command") or ()).split()
    while words and words[0].rpartition("/")[2] in ("sh", "bash", "-c", "exec"):
        words = words[1:]
    return len(words) == 2 and words[0].rpartition("/")[2] == "sleep"


def mount_at(container: Json, path: str) -> Json | None:
    """What the container mounts at `path`."""
    mounts = container.get("volumeMounts") or ()
    return next((m for m in mounts if str(m.get("mountPath", "")).rstrip("/") == path.rstrip("/")), None)


def engine_url(said: VllmArgs) -> str:
    """Where the agent reaches the engine inside the pod."""
    host = said.host if said.host not in ("", "0.0.0.0", "::", "localhost") else "127.0.0.1"  # noqa: S104 -- vLLM's
    return f"http://{f'[{host}]' if ':' in host else host}:{said.port}"


def read_record(template: Json) -> Json:
    """What an earlier injection noted; empty if there was none."""
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    try:
        record = json.loads(annotations.get(INJECTED) or "{}")
    except ValueError:
        record = {}
    return record if isinstance(record, dict) else {}


def write_record(template: Json, record: Json) -> None:
    """Keep the notes on the template."""
    annotations = child(child(template, "metadata", {}), "annotations", {})
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    if annotations.get(INJECTED) != text:
        annotations[INJECTED] = text


def restore(template: Json, note: Note) -> bool:
    """Take out what `Injection` put in; False if it was never there. Raises InjectionRefused."""
    spec: Json = template["spec"]
    metadata = template.get("metadata") or {}
    if INJECTED not in (metadata.get("annotations") or {}):
        if named(spec.get("initContainers"), SIDECAR) is not None:
            raise InjectionRefused(
                f"the sidecar is there, but not the annotation {INJECTED}, which says what was before it; take it"
                " out by hand"
            )
        return False
    record = read_record(template)
    for container in spec.get("containers") or ():
        if mount_at_injected(container) or (container.get("lifecycle") or {}).get("preStop") == parts.pre_stop():
            _restore_engine(container, record)
    _drop(spec, "initContainers", lambda c: c.get("name") == SIDECAR)
    _drop(spec, "volumes", lambda v: v.get("name") in record.get("volumes", ()))
    _put_back(spec, "terminationGracePeriodSeconds", record, "grace")
    labels = metadata.get("labels") or {}
    _put_back(labels, POOL_LABEL, record, "pool")
    _prune(metadata, "labels")
    del metadata["annotations"][INJECTED]
    _prune(metadata, "annotations")
    _prune(template, "metadata")
    note("took the sidecar out")
    return True


def mount_at_injected(container: Json) -> bool:
    """Whether this is the container that injection mounted the adapters into."""
    return named(container.get("volumeMounts"), parts.ADAPTERS) is not None


def _restore_engine(engine: Json, record: Json) -> None:
    for change in reversed(record.get("flags", ())):
        remove_flags(engine, change)
    if "env" in record and (entry := named(engine.get("env"), RUNTIME_UPDATING)) is not None:
        if record["env"] is None:
            _drop(engine, "env", lambda e: e is entry)
        else:
            entry["value"] = record["env"]
    if "preStop" in record:
        _put_back(engine["lifecycle"], "preStop", record, "preStop")
        _prune(engine, "lifecycle")
    if record.get("mount"):
        _drop(engine, "volumeMounts", lambda m: m.get("name") == parts.ADAPTERS)


def _put_back(parent: Json, key: str, record: Json, noted: str) -> None:
    if noted not in record:
        return
    if record[noted] is None:
        parent.pop(key, None)
    else:
        parent[key] = record[noted]


def _drop(parent: Json, key: str, unwanted: Callable[[Json], bool]) -> None:
    items = parent.get(key)
    if items is None:
        return
    for index in reversed(range(len(items))):
        if unwanted(items[index]):
            del items[index]
    _prune(parent, key)


def _prune(parent: Json, key: str) -> None:
    """An empty part that injection may have made is not left behind."""
    if key in parent and not parent[key]:
        del parent[key]
