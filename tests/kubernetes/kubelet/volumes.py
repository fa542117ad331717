"""A pod's volumes as directories, and its containers' variables: what a kubelet gets from the API for them."""

from __future__ import annotations

import base64
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.kubernetes.kubelet.api import Api

Json = dict[str, Any]
_VARIABLE = re.compile(r"\$\(([A-Za-z_][\w.-]*)\)")


class NotYet(Exception):
    """Something that the pod needs is not there yet; the text is the reason that the status shows."""


class Volumes:
    """The volumes of one pod below `directory`, and where their content comes from."""

    def __init__(self, api: Api, pod: Json, directory: Path) -> None:
        self.api = api
        self.pod = pod
        self.directory = directory
        self._namespace = pod["metadata"]["namespace"]
        self._written: dict[str, dict[str, bytes]] = {}
        self._token: tuple[float, bytes] | None = None

    def path(self, name: str) -> Path:
        """The directory of a volume."""
        return self.directory / name

    async def refresh(self) -> None:
        """Make every volume, and renew what has changed in those with content. Raises NotYet, aiohttp.ClientError."""
        for volume in self.pod["spec"].get("volumes", ()):
            path = self.path(volume["name"])
            if not path.exists():
                path.mkdir(parents=True)
                path.chmod(0o777)
            files = await self._files(volume)
            if files is not None and files != self._written.get(volume["name"]):
                _write_atomically(path, files)
                self._written[volume["name"]] = files

    async def _files(self, volume: Json) -> dict[str, bytes] | None:
        """The content of a volume by relative path; None for volumes without content of the API's."""
        if "secret" in volume:
            return await self._keys("secrets", volume["secret"], volume["secret"]["secretName"])
        if "configMap" in volume:
            return await self._keys("configmaps", volume["configMap"], volume["configMap"]["name"])
        if "downwardAPI" in volume:
            return self._downward(volume["downwardAPI"])
        if "projected" in volume:
            files: dict[str, bytes] = {}
            for source in volume["projected"]["sources"]:
                files |= await self._projected(source)
            return files
        if "emptyDir" in volume:
            return None
        raise NotYet(f"volume {volume['name']}: this kubelet knows no {', '.join(sorted(set(volume) - {'name'}))}")

    async def _projected(self, source: Json) -> dict[str, bytes]:
        if "serviceAccountToken" in source:
            return {source["serviceAccountToken"]["path"]: await self._account_token(source["serviceAccountToken"])}
        if "configMap" in source:
            return await self._keys("configmaps", source["configMap"], source["configMap"]["name"])
        if "secret" in source:
            return await self._keys("secrets", source["secret"], source["secret"]["name"])
        return self._downward(source["downwardAPI"])

    async def _keys(self, resource: str, source: Json, name: str) -> dict[str, bytes]:
        try:
            found = await self.api.get(f"/api/v1/namespaces/{self._namespace}/{resource}/{name}")
        except aiohttp.ClientResponseError as error:
            if error.status == 404 and source.get("optional"):
                return {}
            if error.status == 404:
                raise NotYet(f"{resource} {name} is not there") from None
            raise
        content = data_of(found)
        if "items" not in source:
            return content
        return {item["path"]: content[item["key"]] for item in source["items"] if item["key"] in content}

    def _downward(self, source: Json) -> dict[str, bytes]:
        return {i["path"]: field_of(self.pod, i["fieldRef"]["fieldPath"]).encode() for i in source["items"]}

    async def _account_token(self, source: Json) -> bytes:
        """A token bound to the pod, renewed when 80 % of its time is over."""
        lifetime = source.get("expirationSeconds", 3600)
        if self._token is None or time.time() > self._token[0] + 0.8 * lifetime:
            metadata = self.pod["metadata"]
            bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
            spec: Json = {"boundObjectRef": bound, "expirationSeconds": lifetime}
            if "audience" in source:
                spec["audiences"] = [source["audience"]]
            account = self.pod["spec"].get("serviceAccountName", "default")
            answer = await self.api.request(
                "POST", f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token", {"spec": spec}
            )
            self._token = (time.time(), answer["status"]["token"].encode())
        return self._token[1]

    async def environment(self, container: Json, address: str, host: str) -> dict[str, str]:
        """The container's variables. Raises NotYet, aiohttp.ClientError."""
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            resource = "secrets" if "secretRef" in source else "configmaps"
            reference = source.get("secretRef") or source["configMapRef"]
            content = await self._keys(resource, {"optional": reference.get("optional")}, reference["name"])
            found |= {key: value.decode() for key, value in content.items()}
        for entry in container.get("env", ()):
            if "valueFrom" in entry:
                value = await self._value_from(entry["valueFrom"], address, host)
                if value is not None:
                    found[entry["name"]] = value
            else:
                found[entry["name"]] = expanded(entry.get("value", ""), found)
        return found

    async def _value_from(self, source: Json, address: str, host: str) -> str | None:
        if "fieldRef" in source:
            known = {"status.podIP": address, "status.hostIP": host}
            path = source["fieldRef"]["fieldPath"]
            return known.get(path) or field_of(self.pod, path)
        kind = "secrets" if "secretKeyRef" in source else "configmaps"
        reference = source.get("secretKeyRef") or source.get("configMapKeyRef")
        if reference is None:
            raise NotYet(f"this kubelet knows no variable from {', '.join(source)}")
        content = await self._keys(kind, {"optional": reference.get("optional")}, reference["name"])
        if reference["key"] not in content and not reference.get("optional"):
            raise NotYet(f"{kind} {reference['name']} has no {reference['key']}")
        value = content.get(reference["key"])
        return None if value is None else value.decode()


def data_of(found: Json) -> dict[str, bytes]:
    """The content of a Secret or a ConfigMap."""
    if found["kind"] == "Secret":
        return {key: base64.b64decode(value) for key, value in found.get("data", {}).items()}
    return {key: value.encode() for key, value in found.get("data", {}).items()}


def field_of(pod: Json, path: str) -> str:
    """A downward API field: `metadata.name`, `metadata.labels['x']`, `spec.nodeName` and the like."""
    if keyed := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(pod["metadata"].get(keyed[1], {}).get(keyed[2], ""))
    value: Any = pod
    for part in path.split("."):
        value = value.get(part, {})
    return str(value)


def expanded(text: str, variables: dict[str, str]) -> str:
    """`$(NAME)` replaced by a known variable."""
    return _VARIABLE.sub(lambda m: variables.get(m[1], m[0]), text)


def _write_atomically(path: Path, files: dict[str, bytes]) -> None:
    """As a kubelet: a dated directory, the link `..data` switched to it in one step, a link for each file."""
    fresh = path / f"..{time.time_ns()}"
    fresh.mkdir()
    for name, content in files.items():
        target = fresh / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(0o644)
    old = os.readlink(path / "..data") if (path / "..data").is_symlink() else None
    link = path / "..data_tmp"
    link.symlink_to(fresh.name)
    link.rename(path / "..data")
    for name in {Path(name).parts[0] for name in files}:
        if not (path / name).is_symlink():
            (path / name).symlink_to(f"..data/{name}")
    for entry in path.iterdir():
        if not entry.name.startswith("..") and not (fresh / entry.name).exists():
            entry.unlink()
    if old is not None:
        shutil.rmtree(path / old)
