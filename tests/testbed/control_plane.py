"""etcd, API server, controller manager and scheduler: processes in the host's own network namespace.

Knows their flags. The API server answers on the bridge's address only; etcd keeps nothing safe from a power
cut, because a testbed has nothing to keep.
"""

import json
import socket
from pathlib import Path

from testbed.binaries import binary
from testbed.certificates import Pki
from testbed.errors import TestbedError
from testbed.kubectl import Kubectl
from testbed.processes import URGENT, Daemons
from testbed.spec import API_PORT, HOST_IP, SERVICE_CIDR

ETCD_PORT = 23790
_ETCD_PEER_PORT = 23800
_START_TIMEOUT_S = 120.0
_AUDIT_FILE_MIB = 64
_AUDIT_OLD_FILES = 3

# Everything that users and service accounts do, without bodies; what Kubernetes does for itself is left out.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:nodes"]},
        {
            "level": "None",
            "users": [
                "system:apiserver",
                "system:kube-controller-manager",
                "system:kube-scheduler",
                "system:kube-proxy",
                "testbed-dns",
                "kube-apiserver-kubelet",
            ],
        },
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "None", "nonResourceURLs": ["/readyz*", "/livez*", "/healthz*", "/metrics"]},
        {"level": "Metadata"},
    ],
}


def audit_log(root: Path) -> Path:
    return root / "audit" / "audit.log"


def start_control_plane(root: Path, daemons: Daemons, pki: Pki, kubectl: Kubectl) -> None:
    for address, port in (("127.0.0.1", ETCD_PORT), ("127.0.0.1", _ETCD_PEER_PORT), (HOST_IP, API_PORT)):
        _refuse_taken_port(address, port)
    _start_etcd(root, daemons)
    _start_api_server(root, daemons, pki)
    daemons.wait_for(kubectl.is_serving, _START_TIMEOUT_S, "the API server", needs=("etcd", "apiserver"))
    common = ("--leader-elect=false", "--bind-address=127.0.0.1")
    daemons.spawn(
        "controller-manager",
        *URGENT,
        binary("kube-controller-manager"),
        *common,
        *_client(pki, "controller-manager"),
        "--use-service-account-credentials",
        f"--service-account-private-key-file={pki.path('service-account.key')}",
        f"--root-ca-file={pki.path('ca.crt')}",
        "--node-monitor-period=2s",
        "--node-monitor-grace-period=24s",
    )
    daemons.spawn("scheduler", *URGENT, binary("kube-scheduler"), *common, *_client(pki, "scheduler"))


def _client(pki: Pki, name: str) -> tuple[str, ...]:
    """Who the component is, also when it asks the API server about those who call it."""
    return tuple(
        f"--{flag}kubeconfig={pki.kubeconfig(name)}" for flag in ("", "authentication-", "authorization-")
    )


def _refuse_taken_port(address: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise TestbedError(
                f"port {port} on {address} is taken by another program ({error.strerror})"
            ) from None


def _start_etcd(root: Path, daemons: Daemons) -> None:
    daemons.spawn(
        "etcd",
        *URGENT,
        binary("etcd"),
        f"--data-dir={root}/etcd",
        f"--listen-client-urls=http://127.0.0.1:{ETCD_PORT}",
        f"--advertise-client-urls=http://127.0.0.1:{ETCD_PORT}",
        f"--listen-peer-urls=http://127.0.0.1:{_ETCD_PEER_PORT}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{_ETCD_PEER_PORT}",
        f"--initial-cluster=default=http://127.0.0.1:{_ETCD_PEER_PORT}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    )


def _start_api_server(root: Path, daemons: Daemons, pki: Pki) -> None:
    audit_log(root).parent.mkdir()
    policy = root / "audit-policy.json"
    policy.write_text(json.dumps(_AUDIT_POLICY, indent=1))
    daemons.spawn(
        "apiserver",
        *URGENT,
        binary("kube-apiserver"),
        f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}",
        f"--bind-address={HOST_IP}",
        f"--advertise-address={HOST_IP}",
        f"--secure-port={API_PORT}",
        f"--tls-cert-file={pki.path('apiserver.crt')}",
        f"--tls-private-key-file={pki.path('apiserver.key')}",
        f"--client-ca-file={pki.path('ca.crt')}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        f"--service-account-key-file={pki.path('service-account.pub')}",
        f"--service-account-signing-key-file={pki.path('service-account.key')}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged",
        f"--kubelet-client-certificate={pki.path('apiserver-kubelet.crt')}",
        f"--kubelet-client-key={pki.path('apiserver-kubelet.key')}",
        f"--kubelet-certificate-authority={pki.path('ca.crt')}",
        # Without this `logs` and `exec` look the nodes' names up in the host's DNS.
        "--kubelet-preferred-address-types=InternalIP",
        f"--audit-policy-file={policy}",
        f"--audit-log-path={audit_log(root)}",
        "--audit-log-mode=blocking",
        # A soak run writes for hours; what a reader looks back at is minutes old.
        f"--audit-log-maxsize={_AUDIT_FILE_MIB}",
        f"--audit-log-maxbackup={_AUDIT_OLD_FILES}",
    )
