"""Names that more than one process must agree on: labels, ports, paths, headers, child objects.

Knows no behaviour: constants and functions from names to names only.
"""

import hashlib
from enum import StrEnum

GROUP = "phasesplit.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DisaggregatedModel"
PLURAL = "disaggregatedmodels"
SINGULAR = "disaggregatedmodel"
SHORT_NAME = "dm"

# Child names are `<object name>-<suffix>`; StatefulSet pods add a 10-character revision label,
# hence the limit of 44 characters on the object's name.
MAX_NAME_LENGTH = 44

FIELD_MANAGER = "phasesplit"
SCALER_FIELD_MANAGER = "phasesplit-scaler"
PLACEMENT_GATE = f"{GROUP}/placement"

LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_PART_OF = "app.kubernetes.io/part-of"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_MODEL = f"{GROUP}/model"
LABEL_POOL = f"{GROUP}/pool"
PART_OF = "phasesplit"

ANNOTATION_TEMPLATE_HASH = f"{GROUP}/template-hash"
ANNOTATION_OPERATOR_VERSION = f"{GROUP}/operator-version"

HOSTNAME_LABEL = "kubernetes.io/hostname"
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU_MEMORY_LABEL = "nvidia.com/gpu.memory"  # MiB, as set by GPU feature discovery
DEFAULT_GPU_RESOURCE = "nvidia.com/gpu"


class Pool(StrEnum):
    """What hardware and template a worker pod has. Fixed for the pod's life."""

    PREFILL = "prefill"
    DECODE = "decode"


class Role(StrEnum):
    """What a worker does now. Changed by the routing table, without a restart."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class Component(StrEnum):
    """Value of the component label on children."""

    WORKER = "worker"
    ROUTER = "router"
    PROMETHEUS = "prometheus"
    OPERATOR = "operator"


# Worker ports. The API port serves OpenAI, admin, probes and metrics; the transfer port serves KV.
WORKER_API_PORT = 8000
WORKER_TRANSFER_PORT = 8100
ROUTER_API_PORT = 8080
OPERATOR_HEALTH_PORT = 8081
OPERATOR_METRICS_PORT = 8082

# Paths served by a worker.
PATH_HEALTH = "/health"  # liveness: the engine loop's heartbeat is fresh
PATH_READY = "/ready"  # readiness: the model is loaded and the worker takes requests
PATH_METRICS = "/metrics"
PATH_ADMIN_STATE = "/admin/state"  # GET -> WorkerReport
PATH_ADMIN_ROLE = "/admin/role"  # POST RoleAssignment -> WorkerReport
PATH_ADMIN_PROBE = "/admin/probe"  # POST ProbeRequest -> ProbeResult
PATH_ADMIN_CANCEL = "/admin/cancel"  # POST CancelRequest -> {"cancelled": bool}
PATH_ADMIN_DRAIN = "/admin/drain"  # POST -> 202; finish what runs, take nothing new
PATH_KV = "/v1/kv"  # GET /v1/kv/{request_id} -> KVManifest (worker); KVTrace (router)
# Paths served by a router.
PATH_ROUTER_STATUS = "/v1/phasesplit/status"  # GET -> RouterReport
PATH_ROUTER_TRACE = "/v1/phasesplit/trace"  # GET ?epoch=&after= -> TraceBatch

# Request headers between client, router and worker.
HEADER_REQUEST_ID = "x-request-id"
HEADER_SLO_CLASS = "x-slo-class"
HEADER_MODE = "x-phasesplit-mode"
HEADER_PAIR = "x-phasesplit-pair"  # "<prefill pod>,<decode pod>", or one pod when served locally
HEADER_ROLE = "x-phasesplit-role"  # router -> worker: the role this worker has
HEADER_ROLE_VERSION = "x-phasesplit-role-version"  # routing table version that says so

# Keys of the Secret `<name>-transfer-<hash of the uid>`.
SECRET_KEY_TRANSFER = "transfer-key"  # noqa: S105 - HMAC key of the KV protocol
SECRET_KEY_ADMIN = "admin-token"  # noqa: S105 - bearer token of /admin and /v1/kv

# Key of the ConfigMap `<name>-routing`.
ROUTING_KEY = "routing.json"


def pool_name(name: str, pool: Pool) -> str:
    """StatefulSet and headless Service of a pool."""
    return f"{name}-{pool}"


def router_name(name: str) -> str:
    """Deployment, Service and ServiceAccount of the router."""
    return f"{name}-router"


def worker_account_name(name: str) -> str:
    """ServiceAccount of the workers (no rights, no token mounted)."""
    return f"{name}-worker"


def routing_name(name: str) -> str:
    """ConfigMap that holds the routing table."""
    return f"{name}-routing"


def transfer_secret_name(name: str, uid: str) -> str:
    """Secret with the transfer key and the admin token of the one object with this uid.

    A node keeps a Secret for a while after it was deleted: an object made anew must not find the old one's.
    """
    return f"{name}-transfer-{hashlib.sha256(uid.encode()).hexdigest()[:8]}"


def selector_labels(name: str, component: Component, pool: Pool | None = None) -> dict[str, str]:
    """Immutable labels that select one component of one object."""
    labels = {LABEL_PART_OF: PART_OF, LABEL_MODEL: name, LABEL_COMPONENT: str(component)}
    if pool is not None:
        labels[LABEL_POOL] = str(pool)
    return labels
