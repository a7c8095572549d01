"""The pod template of a pool."""

from phasesplit.api import names
from phasesplit.api.names import Component, Pool
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.affinity import build_affinity
from phasesplit.resources.context import BuildContext
from phasesplit.resources.hashes import template_hash
from phasesplit.resources.labels import build_labels
from phasesplit.resources.overlay import merge_overlay
from phasesplit.resources.security import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    TMP_MOUNT,
    TMP_VOLUME,
    build_pull_secrets,
    build_scrape_annotations,
)
from phasesplit.resources.worker_args import CACHE_MOUNT, MODEL_MOUNT, TRANSFER_MOUNT, build_worker_args

WORKER_CONTAINER = "worker"
NVIDIA_RUNTIME_CLASS = "nvidia"
CACHE_VOLUME = "cache"

# Loading a large model from a slow disk may take 20 minutes before a probe may kill the pod.
LOAD_LIMIT_S = 1200
STARTUP_PERIOD_S = 3
# Between the end of the drain and the kill.
GRACE_BEYOND_DRAIN_S = 10


def build_worker_template(context: BuildContext, pool: Pool) -> Manifest:
    """Metadata and spec of the pool's pods, with the user's overlay applied."""
    pool_spec = context.spec.pool(pool)
    template: Manifest = {
        "metadata": {
            "labels": build_labels(context, Component.WORKER, pool),
            "annotations": {
                **build_scrape_annotations(names.WORKER_API_PORT),
                names.ANNOTATION_TEMPLATE_HASH: template_hash(context, pool),
            },
        },
        "spec": _build_pod_spec(context, pool),
    }
    return merge_overlay(template, pool_spec.template)


def _build_pod_spec(context: BuildContext, pool: Pool) -> Manifest:
    spec = context.spec
    pool_spec = spec.pool(pool)
    pod: Manifest = {
        "serviceAccountName": names.worker_account_name(context.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.rollout.drain_seconds + GRACE_BEYOND_DRAIN_S,
        "securityContext": POD_SECURITY,
        "containers": [_build_container(context, pool)],
        "volumes": _build_volumes(context),
    }
    optional: Manifest = {
        "schedulingGates": [{"name": names.PLACEMENT_GATE}] if context.gated.get(pool) else [],
        "runtimeClassName": _runtime_class(context, pool),
        "imagePullSecrets": build_pull_secrets(context),
        "nodeSelector": dict(pool_spec.node_selector),
        "tolerations": list(pool_spec.tolerations),
        "affinity": build_affinity(context, pool),
        "topologySpreadConstraints": list(pool_spec.topology_spread_constraints),
    }
    return pod | {key: value for key, value in optional.items() if value}


def _build_container(context: BuildContext, pool: Pool) -> Manifest:
    container: Manifest = {
        "name": WORKER_CONTAINER,
        "image": context.worker_image(),
        "imagePullPolicy": context.settings.image_pull_policy,
        "command": ["phasesplit-worker"],
        "args": build_worker_args(context, pool),
        "env": _build_env(context),
        "ports": [
            {"name": "http", "containerPort": names.WORKER_API_PORT, "protocol": "TCP"},
            {"name": "transfer", "containerPort": names.WORKER_TRANSFER_PORT, "protocol": "TCP"},
        ],
        "startupProbe": {
            **_probe(names.PATH_READY),
            "periodSeconds": STARTUP_PERIOD_S,
            "timeoutSeconds": 2,
            "failureThreshold": LOAD_LIMIT_S // STARTUP_PERIOD_S,
        },
        "livenessProbe": {
            **_probe(names.PATH_HEALTH),
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "readinessProbe": {
            **_probe(names.PATH_READY),
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
        # A failed load leaves its sentence here, and the operator shows it in Ready=False.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": _build_mounts(context),
    }
    resources = build_worker_resources(context, pool)
    if resources:
        container["resources"] = resources
    return container


def build_worker_resources(context: BuildContext, pool: Pool) -> Manifest:
    """The user's requests and limits plus the GPUs; an extended resource needs both to be equal."""
    pool_spec = context.spec.pool(pool)
    resources = {key: value for key, value in pool_spec.resources.items() if value}
    if pool_spec.gpu.count > 0:
        gpus = {pool_spec.gpu.resource_name: str(pool_spec.gpu.count)}
        for key in ("requests", "limits"):
            resources[key] = {**(resources.get(key) or {}), **gpus}
    return resources


def _build_env(context: BuildContext) -> list[Manifest]:
    env: list[Manifest] = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        # The root file system is read-only: whatever looks for a home writes here.
        {"name": "HOME", "value": TMP_MOUNT["mountPath"]},
    ]
    hub = context.spec.model.source.hugging_face
    if hub is not None:
        env.append({"name": "HF_HOME", "value": CACHE_MOUNT})
        if hub.token_secret_ref is not None:
            reference = {"name": hub.token_secret_ref.name, "key": hub.token_secret_ref.key}
            env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    return env


def _build_volumes(context: BuildContext) -> list[Manifest]:
    model = context.spec.model
    volumes: list[Manifest] = [
        TMP_VOLUME,
        {
            "name": "transfer",
            "secret": {
                "secretName": names.transfer_secret_name(context.name, context.uid),
                "defaultMode": 0o440,
            },
        },
    ]
    if model.source.volume is not None:
        claim = {"claimName": model.source.volume.claim_name, "readOnly": True}
        volumes.append({"name": "model", "persistentVolumeClaim": claim})
    if model.source.hugging_face is not None and model.cache is None:
        volumes.append({"name": CACHE_VOLUME, "emptyDir": {}})
    return volumes


def _build_mounts(context: BuildContext) -> list[Manifest]:
    source = context.spec.model.source
    mounts: list[Manifest] = [
        TMP_MOUNT,
        {"name": "transfer", "mountPath": TRANSFER_MOUNT, "readOnly": True},
    ]
    if source.volume is not None:
        mounts.append({"name": "model", "mountPath": MODEL_MOUNT, "readOnly": True})
    if source.hugging_face is not None:
        mounts.append({"name": CACHE_VOLUME, "mountPath": CACHE_MOUNT})
    return mounts


def _runtime_class(context: BuildContext, pool: Pool) -> str | None:
    pool_spec = context.spec.pool(pool)
    if pool_spec.runtime_class_name is not None:
        return pool_spec.runtime_class_name
    wants_nvidia = pool_spec.gpu.count > 0 and context.has_nvidia_runtime_class
    return NVIDIA_RUNTIME_CLASS if wants_nvidia else None


def _probe(path: str) -> Manifest:
    return {"httpGet": {"path": path, "port": "http"}}
