"""What a person should do about an answer of the API server."""

from __future__ import annotations

from sidecar.core.injection_parts import ROLE
from sidecar.edges.kubernetes.api import ApiError, PodIdentity
from sidecar.model import Problem
from sidecar.ports import EdgeError

CRD = "adapters.lora-sidecar.io"


def problem(where: str, error: EdgeError, me: PodIdentity, namespace: str, *, crd: bool = False) -> Problem:
    """`error` as a problem, with the way out; `crd` if `where` is the custom resource."""
    code = error.code if isinstance(error, ApiError) else 0
    if code == 403:
        message = f"forbidden: {error}. {binding(me, namespace)}"
    elif code == 401:
        message = f"the API server doesn't accept the pod's token: {error}"
    elif code == 404 and crd:
        message = (
            f"the CustomResourceDefinition {CRD} is missing; adapters stay as they were last known. "
            "Install it: kubectl apply -k crds"
        )
    else:
        message = f"{error}; what was known last stays in force" + (f" (HTTP {code})" if code else "")
    return Problem(where=where, message=message)


def binding(me: PodIdentity, namespace: str) -> str:
    """The commands that give this pod's service account what the agent needs."""
    return (
        f"The service account {me.account} needs the Role {ROLE}: kubectl apply -n {namespace} -k deploy/base && "
        f"kubectl create rolebinding {ROLE}-{me.account} -n {namespace} --role={ROLE} "
        f"--serviceaccount={me.namespace}:{me.account}"
    )
