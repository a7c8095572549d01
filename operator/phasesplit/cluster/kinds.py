"""The kinds of objects that the operator reads or writes, with their REST paths.

Known ahead, so that no discovery is needed: nothing is cached on disk and start-up asks nothing.
"""

from dataclasses import dataclass
from typing import Any

from phasesplit.api import names


@dataclass(frozen=True)
class Kind:
    """One kind of the Kubernetes API."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """API version without the group."""
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        """URL path of a collection, an object or its subresource."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        parts = [root]
        if self.namespaced and namespace is not None:
            parts.append(f"namespaces/{namespace}")
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


MODEL = Kind(names.API_VERSION, names.KIND, names.PLURAL)
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
CONTROLLER_REVISION = Kind("apps/v1", "ControllerRevision", "controllerrevisions")
SERVICE = Kind("v1", "Service", "services")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
POD_DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
POD = Kind("v1", "Pod", "pods")
NODE = Kind("v1", "Node", "nodes", namespaced=False)
EVENT = Kind("events.k8s.io/v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
RUNTIME_CLASS = Kind("node.k8s.io/v1", "RuntimeClass", "runtimeclasses", namespaced=False)
PERSISTENT_VOLUME_CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
PERSISTENT_VOLUME = Kind("v1", "PersistentVolume", "persistentvolumes", namespaced=False)
CUSTOM_RESOURCE_DEFINITION = Kind(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)

# What belongs to one object: labelled with its name and owned by it. Secrets are not watched, because
# that would need the right to read all of them: the one of each object is read by name.
CHILD_KINDS: tuple[Kind, ...] = (
    STATEFUL_SET,
    DEPLOYMENT,
    CONTROLLER_REVISION,
    SERVICE,
    SERVICE_ACCOUNT,
    CONFIG_MAP,
    ROLE_BINDING,
    POD_DISRUPTION_BUDGET,
    NETWORK_POLICY,
)

_BY_GVK = {
    (kind.api_version, kind.kind): kind
    for kind in (*CHILD_KINDS, SECRET, MODEL, POD, NODE, EVENT, LEASE, RUNTIME_CLASS, PERSISTENT_VOLUME_CLAIM)
}


def kind_of(manifest: dict[str, Any]) -> Kind:
    """Kind of a manifest. Raises KeyError for one that the operator has no business with."""
    return _BY_GVK[manifest["apiVersion"], manifest["kind"]]
