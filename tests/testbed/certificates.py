"""The certificates and kubeconfigs of one cluster, made by openssl for 30 days.

Knows who takes part in a cluster; starts nothing.
"""

import base64
import json
from pathlib import Path

from testbed.processes import run
from testbed.spec import API_SERVICE_IP, API_URL, CLUSTER_DOMAIN, HOST_IP, ClusterSpec

_DAYS = "30"
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_SERVICE_NAMES = (
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    f"kubernetes.default.svc.{CLUSTER_DOMAIN}",
)

# Client of the API server -> the subject that its certificate carries.
_CLIENTS = {
    "admin": "/O=system:masters/CN=admin",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "proxy": "/CN=system:kube-proxy",
    "dns": "/O=system:masters/CN=testbed-dns",
}


class Pki:
    """The files under `<root>/pki` and `<root>/kubeconfig`."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "pki"
        self._kubeconfigs = root / "kubeconfigs"

    def path(self, name: str) -> Path:
        return self.folder / name

    def kubeconfig(self, client: str) -> Path:
        return self._kubeconfigs / client

    def create(self, spec: ClusterSpec) -> None:
        self.folder.mkdir(parents=True, mode=0o700)
        self._kubeconfigs.mkdir(mode=0o700)
        self._openssl(
            "req",
            "-x509",
            *_CURVE,
            "-days",
            _DAYS,
            "-subj",
            "/CN=testbed-ca",
            "-keyout",
            "ca.key",
            "-out",
            "ca.crt",
        )
        names = ",".join(
            [
                *(f"DNS:{name}" for name in (*_SERVICE_NAMES, "localhost")),
                f"IP:{HOST_IP}",
                f"IP:{API_SERVICE_IP}",
                "IP:127.0.0.1",
            ]
        )
        self._issue("apiserver", "/CN=kube-apiserver", names)
        self._issue("apiserver-kubelet", "/O=system:masters/CN=kube-apiserver-kubelet")
        for client, subject in _CLIENTS.items():
            self._issue(client, subject)
            self._write_kubeconfig(client)
        for node in spec.nodes:
            self._issue(
                node.name, f"/O=system:nodes/CN=system:node:{node.name}", f"DNS:{node.name},IP:{node.ip}"
            )
            self._write_kubeconfig(node.name)
        self._openssl("genrsa", "-out", "service-account.key", "2048")
        self._openssl("rsa", "-in", "service-account.key", "-pubout", "-out", "service-account.pub")

    def _issue(self, name: str, subject: str, alternative_names: str = "") -> None:
        self._openssl("req", *_CURVE, "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        extensions = "extendedKeyUsage=serverAuth,clientAuth\n"
        if alternative_names:
            extensions += f"subjectAltName={alternative_names}\n"
        self.path(f"{name}.ext").write_text(extensions)
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", _DAYS, "-out", f"{name}.crt", "-extfile", f"{name}.ext"),
        )

    def _write_kubeconfig(self, client: str) -> None:
        path = self.kubeconfig(client)
        path.write_text(
            json.dumps(
                kubeconfig(
                    *(self.path(name).read_bytes() for name in ("ca.crt", f"{client}.crt", f"{client}.key"))
                ),
                indent=1,
            )
        )
        path.chmod(0o600)

    def _openssl(self, *arguments: str) -> None:
        run("openssl", *arguments, cwd=self.folder)


def kubeconfig(authority: bytes, certificate: bytes, key: bytes) -> dict[str, object]:
    """A kubeconfig that holds everything in itself; JSON is YAML, so it is written as JSON."""

    def encode(data: bytes) -> str:
        return base64.b64encode(data).decode()

    name = "phasesplit-testbed"
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [
            {"name": name, "cluster": {"server": API_URL, "certificate-authority-data": encode(authority)}}
        ],
        "users": [
            {
                "name": name,
                "user": {"client-certificate-data": encode(certificate), "client-key-data": encode(key)},
            }
        ],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
    }
