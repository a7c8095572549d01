"""The cables of the testbed: one bridge on the host, one network namespace per node, and their speed.

Knows iproute2 and tc; knows nothing of Kubernetes. The bridge's alias names the state root that it belongs
to, so that a second testbed is noticed and not torn down.
"""

import json
import re
from pathlib import Path

from testbed.errors import TestbedError
from testbed.processes import in_netns, run
from testbed.spec import HOST_IP, ClusterSpec, NodeSpec

BRIDGE = "phasesplit0"
_RATE = re.compile(r"[1-9]\d*(\.\d+)?[kmg]?bit")
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


def create_network(spec: ClusterSpec) -> None:
    _FORWARD.write_text("1")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{HOST_IP}/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    for node in spec.nodes:
        _wire(node)
    for node in spec.nodes:
        run("ip", "route", "add", node.pod_cidr, "via", node.ip)
        for other in spec.nodes:
            if other != node:
                run("ip", "-n", other.netns, "route", "add", node.pod_cidr, "via", node.ip)


def set_owner(root: Path) -> None:
    run("ip", "link", "set", "dev", BRIDGE, "alias", root)


def owner() -> Path | None:
    """The state root whose testbed holds the bridge; None without a bridge or without a name on it."""
    shown = run("ip", "-j", "link", "show", "dev", BRIDGE, check=False)
    if shown.returncode != 0:
        return None
    alias = json.loads(shown.stdout)[0].get("ifalias")
    return Path(alias) if alias else None


def _wire(node: NodeSpec) -> None:
    def inside(*words: str) -> None:
        run("ip", "-n", node.netns, *words)

    run("ip", "netns", "add", node.netns)
    run("ip", "link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", node.netns)
    run("ip", "link", "set", node.link, "master", BRIDGE, "up")
    inside("addr", "add", f"{node.ip}/24", "dev", "eth0")
    inside("link", "set", "eth0", "up")
    inside("link", "set", "lo", "up")
    inside("route", "add", "default", "via", HOST_IP)
    run(*in_netns(node.netns, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.route_localnet=1"))


def shape(node: NodeSpec, rate: str | None) -> None:
    """Limit what a node sends and receives to `rate`, such as `50mbit`; None lifts the limit."""
    if rate is not None and not _RATE.fullmatch(rate):
        raise TestbedError(f"rate {rate}: write it as 50mbit, 1gbit or 800kbit, or `clear`")
    for tc, device in _both_ends(node):
        run(*tc, "qdisc", "del", "dev", device, "root", check=False)
        if rate is not None:
            run(
                *tc,
                "qdisc",
                "add",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "512kb",
                "latency",
                "100ms",
            )


def shaped_rate(node: NodeSpec) -> str | None:
    """The limit on a node's cable as tc shows it, or None."""
    tc, device = _both_ends(node)[0]
    found = re.search(r"rate (\S+)", run(*tc, "qdisc", "show", "dev", device, check=False).stdout)
    return found[1].lower() if found else None


def connect(node: NodeSpec, connected: bool) -> None:
    """Plug a node's cable in or pull it out."""
    run("ip", "link", "set", node.link, "up" if connected else "down")


def _both_ends(node: NodeSpec) -> tuple[tuple[tuple[str, ...], str], ...]:
    return (("tc",), node.link), (("tc", "-n", node.netns), "eth0")


def left_names() -> list[str]:
    """Namespaces, cables and bridges with our names, whatever spec they were made for."""
    return [*_namespaces(), *_links()]


def delete_network() -> None:
    for name in _namespaces():
        run("ip", "netns", "del", name, check=False)
    for name in _links():
        run("ip", "link", "del", name, check=False)


def _namespaces() -> list[str]:
    words = (line.split() for line in run("ip", "netns", check=False).stdout.splitlines())
    return [line[0] for line in words if line and re.fullmatch(r"phasesplit-node\d+", line[0])]


def _links() -> list[str]:
    links = json.loads(run("ip", "-j", "link", check=False).stdout or "[]")
    return [link["ifname"] for link in links if re.fullmatch(rf"psv\d+|{BRIDGE}", link["ifname"])]


def forwarding() -> str:
    """The host's forwarding switch, to be put back by `down`."""
    return _FORWARD.read_text().strip()


def restore_forwarding(value: str) -> None:
    if value in {"0", "1"}:
        _FORWARD.write_text(value)
