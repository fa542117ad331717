"""How a container becomes a process on this machine: its root, its mounts, its user, its command."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from tests.kubernetes.kubelet.volumes import Volumes, expanded

Json = dict[str, Any]
REPOSITORY = Path(__file__).resolve().parents[3]
VLLM = [sys.executable, str(Path(__file__).with_name("vllm.py"))]
# The entry point of an image by the last component of its name; others have none, so their containers need a command.
ENTRY_POINTS = {"lora-sidecar": [sys.executable, "-m", "sidecar"], "vllm-openai": VLLM}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def command_of(container: Json, variables: dict[str, str]) -> list[str]:
    """The words to run. Raises ValueError for an image without a known entry point."""
    image = container["image"].rpartition("/")[2].partition("@")[0].partition(":")[0]
    command = container.get("command") or ENTRY_POINTS.get(image)
    if command is None:
        raise ValueError(f"image {container['image']} has no entry point here; give the container a command")
    return [expanded(word, variables) for word in [*command, *container.get("args", ())]]


def marker(container: Json) -> str:
    """The file beside the pod's volumes that says: everything is mounted, the command comes next."""
    return f".{container['name']}-is-mounted"


def script_of(pod: Json, container: Json, volumes: Volumes, scratch: Path, command: list[str]) -> str:
    """A shell script that, in a new mount namespace, becomes the container's process.

    The root is an overlay over this machine's with its writes on a tmpfs; volumes are bound into it; a read-only root
    is read-only. Its user may pass through the folders that the interpreter and the repository lie in.
    """
    root = f"{scratch}/root"
    quoted = shlex.quote
    lines = [
        "set -e",
        f"mkdir -p {quoted(str(scratch))}",
        f"mount -t tmpfs -o mode=755 tmpfs {quoted(str(scratch))}",
        f"cd {quoted(str(scratch))}",
        "mkdir upper work root",
        "mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root",
        *(f"mount --rbind /{name} {root}/{name}" for name in ("proc", "dev")),
        *_visible(root),
        f"mkdir -p {root}/.volumes",
        f"mount --bind {quoted(str(volumes.directory))} {root}/.volumes",
        f"cat > {root}/usr/local/bin/vllm <<'SCRIPT'",
        "#!/bin/sh",
        f'exec {shlex.join(VLLM)} "$@"',
        "SCRIPT",
        f"chmod 755 {root}/usr/local/bin/vllm",
        f"exec chroot {root} /bin/sh -c {quoted(_inside(pod, container, command))}",
    ]
    return "\n".join(lines)


def _visible(root: str) -> list[str]:
    """Bind what the overlay doesn't show because it lies on another file system, and let every user pass to it."""
    lines = []
    device = os.stat("/").st_dev
    for path in {REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)}:
        if os.stat(path).st_dev != device:
            lines += [f"mkdir -p {root}{path}", f"mount --rbind {path} {root}{path}"]
        for parent in path.parents:
            if not os.stat(parent).st_mode & 0o001:
                lines.append(f"chmod o+x {root}{parent}")
    return lines


def _inside(pod: Json, container: Json, command: list[str]) -> str:
    """What happens after the change of root, where links are resolved as the container sees them."""
    lines = ["set -e"]
    for mount in container.get("volumeMounts", ()):
        source = shlex.quote(f"/.volumes/{mount['name']}/{mount.get('subPath', '')}".rstrip("/"))
        target = shlex.quote(mount["mountPath"])
        lines += [f"mkdir -p {target}", f"mount --bind {source} {target}"]
        if mount.get("readOnly"):
            lines.append(f"mount -o remount,bind,ro {target}")
    security = pod["spec"].get("securityContext", {}) | container.get("securityContext", {})
    if security.get("readOnlyRootFilesystem"):
        lines.append("mount -o remount,ro /")
    user, group = security.get("runAsUser", 0), security.get("runAsGroup", 0)
    groups = f"--groups {security['fsGroup']}" if "fsGroup" in security else "--clear-groups"
    # A change of the user clears the signal that the kernel sends when the kubelet dies, so it is set after it.
    become = f"--reuid {user} --regid {group} {groups}" if user or group else ""
    private = "--no-new-privs" if security.get("allowPrivilegeEscalation") is False else ""
    directory = shlex.quote(container.get("workingDir", "/"))
    lines += [
        f": > /.volumes/{marker(container)}",
        f"cd {directory}",
        f"exec setpriv {become} {private} --pdeathsig KILL {shlex.join(command)}",
    ]
    return "\n".join(lines)
