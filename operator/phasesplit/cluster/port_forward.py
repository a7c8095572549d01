"""HTTP GET to a pod's port through the API server, as `kubectl port-forward` does.

For the command line, which runs where cluster addresses are not reachable. Blocking.
"""

import http.client
import json
import socket
from typing import Any

from kubernetes import client
from kubernetes.stream import portforward

from phasesplit.cluster.errors import ClusterError


class _ForwardedConnection(http.client.HTTPConnection):
    """An HTTP connection over a socket that is already connected to the pod."""

    def __init__(self, forwarded: socket.socket) -> None:
        super().__init__("pod", timeout=10)
        self._forwarded = forwarded

    def connect(self) -> None:
        self.sock = self._forwarded


def get_json(core: client.CoreV1Api, namespace: str, pod: str, *, port: int, path: str, token: str) -> Any:
    """GET `path` of a pod and parse the JSON answer.

    Raises `ClusterError` with one sentence when the pod cannot be reached or answers with an error.
    """
    try:
        forward = portforward(core.connect_get_namespaced_pod_portforward, pod, namespace, ports=str(port))
        raw = forward.socket(port)
        raw.settimeout(10)
        connection = _ForwardedConnection(raw)
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}", "Connection": "close"})
        response = connection.getresponse()
        body = response.read(16 << 20)
    except (OSError, http.client.HTTPException, client.ApiException) as error:
        raise ClusterError(f"pod {namespace}/{pod} cannot be reached on port {port}: {error}") from error
    finally:
        if "forward" in locals():
            forward.close()
    if response.status == 404:
        raise ClusterError(_message_of(body) or f"{path} is not known to pod {pod}")
    if response.status >= 400:
        raise ClusterError(f"pod {pod} answered {path} with {response.status}: {_message_of(body)}")
    return json.loads(body)


def _message_of(body: bytes) -> str:
    """The message of an OpenAI error body, or the start of whatever it is."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
