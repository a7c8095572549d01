"""Reads for the command line: objects, their router's report, traces of requests. Blocking, no writes."""

import base64
from collections.abc import Callable
from typing import Any

import urllib3
import yaml
from kubernetes import client, config

from phasesplit.api import names
from phasesplit.api.reports import KVTrace, RouterReport
from phasesplit.cluster.errors import ClusterError
from phasesplit.cluster.port_forward import get_json

_TIMEOUT_S = 10
# What the Kubernetes client raises for a file that is absent, no YAML, no mapping, or holds no readable key.
_BAD_KUBECONFIG = (config.ConfigException, yaml.YAMLError, OSError, AttributeError, TypeError, ValueError)


class Inspector:
    """One kube context, seen by a person at a terminal."""

    def __init__(self, context: str | None = None) -> None:
        try:
            config.load_kube_config(context=context)
        except _BAD_KUBECONFIG as error:
            problem = " ".join(str(error).split()).rstrip(".")
            raise ClusterError(
                f"no usable kubeconfig: {problem}; set KUBECONFIG to a file that works, or pass --context"
            ) from error
        settings = client.Configuration.get_default_copy()
        settings.retries = False  # a person waits: say at once that nobody answers
        api = client.ApiClient(settings)
        self._core = client.CoreV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        contexts, active = config.list_kube_config_contexts()
        chosen = next((item for item in contexts if item["name"] == context), active)
        self.default_namespace: str = chosen["context"].get("namespace", "default")

    def models(self, namespace: str | None) -> list[dict[str, Any]]:
        """All objects of a namespace, or of every namespace when it is None."""
        kind = (names.GROUP, names.VERSION)
        if namespace is None:
            listed = _read(
                "the list of DisaggregatedModels",
                lambda: self._custom.list_cluster_custom_object(
                    *kind, names.PLURAL, _request_timeout=_TIMEOUT_S
                ),
            )
        else:
            listed = _read(
                f"the list of DisaggregatedModels in {namespace}",
                lambda: self._custom.list_namespaced_custom_object(
                    *kind, namespace, names.PLURAL, _request_timeout=_TIMEOUT_S
                ),
            )
        items: list[dict[str, Any]] = listed["items"]
        return items

    def model(self, namespace: str, name: str) -> dict[str, Any]:
        """One object."""
        found: dict[str, Any] = _read(
            f"DisaggregatedModel {namespace}/{name}",
            lambda: self._custom.get_namespaced_custom_object(
                names.GROUP, names.VERSION, namespace, names.PLURAL, name, _request_timeout=_TIMEOUT_S
            ),
        )
        return found

    def router_report(self, namespace: str, name: str) -> RouterReport:
        """What the router of an object says now."""
        answer = self._from_a_router(namespace, name, names.PATH_ROUTER_STATUS)
        return RouterReport.model_validate(answer)

    def trace(self, namespace: str, name: str, request_id: str) -> KVTrace:
        """One recent request as the router saw it; `last` is the newest one."""
        answer = self._from_a_router(namespace, name, f"{names.PATH_KV}/{request_id}")
        return KVTrace.model_validate(answer)

    def _from_a_router(self, namespace: str, name: str, path: str) -> Any:
        """Ask each ready router pod until one knows the answer."""
        token = self._admin_token(namespace, name)
        problems = []
        for pod in self._router_pods(namespace, name):
            try:
                return get_json(
                    self._core, namespace, pod, port=names.ROUTER_API_PORT, path=path, token=token
                )
            except ClusterError as error:
                problems.append(str(error))
        raise ClusterError("; ".join(problems) or f"no router pod of {namespace}/{name} is running")

    def _router_pods(self, namespace: str, name: str) -> list[str]:
        labels = names.selector_labels(name, names.Component.ROUTER)
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        pods = _read(
            f"the router pods of {namespace}/{name}",
            lambda: self._core.list_namespaced_pod(
                namespace, label_selector=selector, _request_timeout=_TIMEOUT_S
            ),
        )
        return [pod.metadata.name for pod in pods.items if pod.status.phase == "Running"]

    def _admin_token(self, namespace: str, name: str) -> str:
        uid = self.model(namespace, name)["metadata"]["uid"]
        secret_name = names.transfer_secret_name(name, uid)
        secret = _read(
            f"Secret {namespace}/{secret_name} with the admin token",
            lambda: self._core.read_namespaced_secret(secret_name, namespace, _request_timeout=_TIMEOUT_S),
        )
        encoded = (secret.data or {}).get(names.SECRET_KEY_ADMIN, "")
        if isinstance(encoded, bytes):
            encoded = encoded.decode()
        return base64.b64decode(encoded).decode()


def _read(what: str, call: Callable[[], Any]) -> Any:
    """The answer of one read. Raises `ClusterError` with a sentence for what a person meets."""
    try:
        return call()
    except client.ApiException as error:
        if error.status == 404:
            sentence = f"{what} was not found; is the name right and phasesplit installed?"
        elif error.status in {401, 403}:
            sentence = f"you may not read {what}: {error.reason}"
        else:
            sentence = f"{what} could not be read: {error.status} {error.reason}"
        raise ClusterError(sentence) from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ClusterError(
            f"the API server cannot be reached: {error}; is the cluster up, and is it the context you mean?"
        ) from error
