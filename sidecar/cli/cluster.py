"""How the command line reaches a cluster: the flags of kubectl, and its configuration."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

# What talks to a cluster is imported where it is needed: it takes longer than a command that needs none.
if TYPE_CHECKING:
    from sidecar.edges.kubernetes.api import Api

AGENT_PORT = 8790


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """-n, --context and --kubeconfig, as kubectl has them."""
    parser.add_argument("-n", "--namespace", default="", metavar="NAME", help="(default: the context's)")
    parser.add_argument("--context", default="", metavar="NAME", help="of the kubeconfig (default: the current one)")
    parser.add_argument("--kubeconfig", default="", metavar="FILE", help="(default: $KUBECONFIG, else ~/.kube/config)")


async def connect(args: argparse.Namespace) -> tuple[Api, str]:
    """The API server and the namespace to look at. Raises NoAccount."""
    from sidecar.edges.kubernetes.api import ACCOUNT, from_kubeconfig, in_cluster

    chosen = args.kubeconfig or args.context or os.environ.get("KUBECONFIG")
    if not chosen and not (Path.home() / ".kube/config").exists() and (ACCOUNT / "token").exists():
        api, me = await in_cluster()
        return api, args.namespace or me.namespace
    api, namespace = await from_kubeconfig(args.kubeconfig, args.context)
    return api, args.namespace or namespace


async def ask_an_agent(args: argparse.Namespace, path: str) -> tuple[int, bytes]:
    """Status and body of a GET to an agent of the namespace, through the API server.

    Every agent of a pool answers the same, so the first that answers will do. Raises ApiError, NoAccount.
    """
    import msgspec

    from sidecar.core.annotations import POOL
    from sidecar.edges.kubernetes.api import ApiError
    from sidecar.edges.kubernetes.objects import PodList

    api, namespace = await connect(args)
    try:
        body = await api.request("GET", f"/api/v1/namespaces/{namespace}/pods", query={"labelSelector": POOL})
        pods = sorted(p.metadata.name for p in msgspec.json.decode(body, type=PodList).items)
        if not pods:
            raise ApiError(404, f"no pod in namespace {namespace} has the label {POOL}; -n names another namespace")
        failure: ApiError | None = None
        for pod in pods:
            try:
                proxy = f"/api/v1/namespaces/{namespace}/pods/{pod}:{AGENT_PORT}/proxy{path}"
                return 200, await api.request("GET", proxy, timeout=args.timeout)
            except ApiError as error:
                if error.body.startswith(b'{"error"') or b'"known"' in error.body:
                    return error.code, error.body
                failure = error
        assert failure is not None
        raise failure
    finally:
        await api.close()
