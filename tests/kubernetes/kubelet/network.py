"""Pod networks: a namespace each, joined to the cluster's by a routed veth pair."""

from __future__ import annotations

import ipaddress
import subprocess
from pathlib import Path

from tests.kubernetes.netns import NetworkNamespace

POD_NETWORK = ipaddress.ip_network("10.244.128.0/17")
# A gateway that no interface has: the far end of the pair answers for it by its hardware address.
GATEWAY = "169.254.1.1"
GATEWAY_MAC = "ee:ee:ee:ee:ee:ee"


def forward() -> None:
    """Let the namespace that we are in route between pods."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


class PodNetwork:
    """One pod's namespace and address; close it when the pod is gone.

    `following` is the next address's number in the pod network: kubelets beside each other begin far from each other.
    """

    following = 1

    def __init__(self) -> None:
        number = PodNetwork.following
        PodNetwork.following += 1
        self.address = str(POD_NETWORK[number])
        self._link = f"pod{number}"
        self.namespace = NetworkNamespace()
        self._batch(
            f"link add {self._link} address {GATEWAY_MAC} type veth peer name eth0 netns {self.namespace.path}",
            f"link set {self._link} up",
            f"route add {self.address}/32 dev {self._link}",
        )
        with self.namespace.entered():
            self._batch(
                f"addr add {self.address}/32 dev eth0",
                "link set eth0 up",
                f"route add {GATEWAY}/32 dev eth0 scope link",
                f"neigh add {GATEWAY} lladdr {GATEWAY_MAC} dev eth0 nud permanent",
                f"route add default via {GATEWAY} dev eth0",
            )

    @staticmethod
    def _batch(*commands: str) -> None:
        subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True, capture_output=True)

    def close(self) -> None:
        """Take the link away; the namespace ends with its last process."""
        subprocess.run(["ip", "link", "del", self._link], check=False, capture_output=True)
        self.namespace.close()
