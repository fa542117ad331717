"""A real API server that has forgotten the version from which a watch goes on: one new list, and nothing is lost."""

from __future__ import annotations

import base64
import http.client
import json
from collections import Counter
from pathlib import Path

from tests.kubernetes.controlplane import ControlPlane, wait_until
from tests.kubernetes.workers import ACCOUNT, backend_of, drop_adapter, make_adapter, make_pod, prepare

# Before a deletion is believed, a list shows that the definition is still there.
CONFIRMATION = 1


def etcd(path: str, body: dict[str, object]) -> dict[str, dict[str, str]]:
    """One call of etcd's JSON gateway."""
    connection = http.client.HTTPConnection("127.0.0.1", 2379, timeout=10)
    try:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        data = response.read()
        assert response.status == 200, data
        answer: dict[str, dict[str, str]] = json.loads(data)
        return answer
    finally:
        connection.close()


def forget_history() -> None:
    """Move etcd on by a hundred revisions that are nobody's objects, and drop everything before the last."""
    key = base64.b64encode(b"/elsewhere").decode()
    for _ in range(100):
        revision = etcd("/v3/kv/put", {"key": key, "value": key})["header"]["revision"]
    etcd("/v3/kv/compaction", {"revision": revision, "physical": True})


async def test_a_version_that_etcd_has_forgotten_is_listed_anew(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    prepare(cluster, namespace)
    pod = make_pod(cluster, namespace, "w-0", "10.244.1.1")
    make_adapter(cluster, namespace, "a")
    make_adapter(cluster, namespace, "b")
    user = f"system:serviceaccount:{namespace}:{ACCOUNT}"

    def answers() -> Counter[tuple[str, int]]:
        """(verb, status code) of what was asked about adapters and is over."""
        events = (e for e in cluster.audit(user) if e["objectRef"]["resource"] == "adapters")
        return Counter((e["verb"], e["responseStatus"]["code"]) for e in events)

    async with backend_of(cluster, namespace, pod, tmp_path) as seen:
        await seen.until(lambda v: v.adapters_fresh and v.members_fresh and len(v.adapters or ()) == 2, "all is seen")
        wait_until(lambda: answers()["list", 200] == 1, "the list stands in the audit log")
        cluster.stop_api_server()
        try:
            await seen.until(lambda v: not v.adapters_fresh and not v.members_fresh, "nothing is known")
            forget_history()
        finally:
            cluster.start_api_server()
            cluster.start_controllers()
        view = await seen.until(lambda v: v.adapters_fresh and v.members_fresh, "all is current again", 60)
        assert {a.name for a in view.adapters or ()} == {"a", "b"}
        # The API server takes the old version, and says in the watch that it is gone.
        await seen.until(lambda _: answers()["list", 200] == 2, "one new list")
        make_adapter(cluster, namespace, "c")
        await seen.until(lambda v: {a.name for a in v.adapters or ()} == {"a", "b", "c"}, "a change comes through")
        drop_adapter(cluster, namespace, "a")
        await seen.until(lambda v: {a.name for a in v.adapters or ()} == {"b", "c"}, "a deletion comes through")
        assert answers()["list", 200] == 2 + CONFIRMATION
