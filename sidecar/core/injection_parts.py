"""What injection adds to a pod and beside it: the same parts as deploy/component and deploy/policy add.

Everything here is built anew at each call, as plain dicts in the order in which a person would write them.
"""

from __future__ import annotations

from typing import Any

from sidecar.model import LABEL_PREFIX, Frozen

Json = dict[str, Any]

SIDECAR = "lora-sidecar"
IMAGE = "lora-sidecar/lora-sidecar"
ROLE = "lora-sidecar"
POOL_LABEL = f"{LABEL_PREFIX}/pool"
INJECTED = f"{LABEL_PREFIX}/injected"
ENGINE = f"{LABEL_PREFIX}/container"
PORT = 8790
GRACE_SECONDS = 90
ADAPTERS = "lora-adapters"
GOSSIP = "lora-sidecar-gossip"
API_KEY = "lora-sidecar-api-key"
TOKEN = "lora-sidecar-token"  # noqa: S105 -- the name of a volume
GOSSIP_DIR = "/var/run/lora-sidecar/gossip"
API_KEY_DIR = "/var/run/lora-sidecar/api-key"
TOKEN_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 -- a path
USER = 65532


class Options(Frozen, frozen=True, kw_only=True):
    """What a person may ask of the injection. 0 leaves a vLLM flag as it is."""

    pool: str = ""
    container: str = ""
    image: str = ""
    adapters_dir: str = "/adapters"
    gossip_secret: str = "lora-sidecar-gossip"  # noqa: S105 -- a name
    max_loras: int = 0
    max_cpu_loras: int = 0
    max_lora_rank: int = 0


def sidecar_container(image: str, env: list[Json], mounts: list[Json]) -> Json:
    """The native sidecar: an init container that goes on running, started before the engine and ended after it."""
    return {
        "name": SIDECAR,
        "image": image,
        "restartPolicy": "Always",
        "args": ["run"],
        "env": env,
        "ports": [
            {"name": "lora-sidecar", "containerPort": PORT, "protocol": "TCP"},
            {"name": "lora-gossip", "containerPort": PORT, "protocol": "UDP"},
        ],
        "startupProbe": _probe("/healthz", 1, 60),
        "livenessProbe": _probe("/healthz", 10, 6),
        "readinessProbe": _probe("/readyz", 2, 1),
        # Measured: 80 MiB with S3 and 160 adapters in a small pool; with a thousand adapters and peers 101 MiB and
        # 0.7 % of a core at rest with a gossip key, 105 to 108 MiB and 4 % without one.
        "resources": {"requests": {"cpu": "20m", "memory": "96Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": mounts,
    }


def _probe(path: str, period: int, failures: int) -> Json:
    return {
        "httpGet": {"path": path, "port": PORT},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def pre_stop() -> Json:
    """The engine's preStop hook: the agent answers when the pod's adapters are loaded elsewhere."""
    return {"httpGet": {"path": "/v1/drained", "port": PORT}}


def adapters_volume() -> Json:
    """One directory a pod for the adapters' files."""
    return {"name": ADAPTERS, "emptyDir": {}}


def gossip_volume(secret: str) -> Json:
    """The gossip key, which switches gossip on; without the Secret everything works, more slowly."""
    return {"name": GOSSIP, "secret": {"secretName": secret, "optional": True}}


def api_key_volume(secret: str, key: str) -> Json:
    """The engine's API key, where the engine has it from a Secret."""
    return {"name": API_KEY, "secret": {"secretName": secret, "items": [{"key": key, "path": "key"}]}}


def token_volume() -> Json:
    """The pod's own token, for pods that switch its automatic mount off."""
    sources: list[Json] = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]
    return {"name": TOKEN, "projected": {"sources": sources}}


def service(pool: str, namespace: str | None) -> Json:
    """The pool's headless Service, through which the workers find each other before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(pool, namespace),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {POOL_LABEL: pool},
            "ports": [
                {"name": "lora-sidecar", "port": PORT, "protocol": "TCP"},
                {"name": "lora-gossip", "port": PORT, "protocol": "UDP"},
            ],
        },
    }


def role_binding(account: str, namespace: str | None) -> Json:
    """Binds deploy/base's Role to the pods' service account: the agent's token is the pod's own."""
    subject = {"kind": "ServiceAccount", "name": account} | ({"namespace": namespace} if namespace else {})
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": _metadata(f"{ROLE}-{account}", namespace),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ROLE},
        "subjects": [subject],
    }


def _metadata(name: str, namespace: str | None) -> Json:
    made: Json = {"name": name}
    if namespace:
        made["namespace"] = namespace
    return made | {"annotations": {INJECTED: "true"}}
