"""The router's Deployment."""

from phasesplit.api import names
from phasesplit.api.names import Component
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.context import BuildContext
from phasesplit.resources.hashes import ANNOTATION_SPEC_HASH, router_spec_hash
from phasesplit.resources.labels import build_labels, build_metadata
from phasesplit.resources.pods import GRACE_BEYOND_DRAIN_S
from phasesplit.resources.security import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    TMP_MOUNT,
    TMP_VOLUME,
    build_pull_secrets,
    build_scrape_annotations,
)
from phasesplit.resources.worker_args import API_KEYS_MOUNT, TRANSFER_MOUNT, build_router_args

ROUTER_CONTAINER = "router"
DEFAULT_RESOURCES: Manifest = {
    "requests": {"cpu": "100m", "memory": "128Mi"},
    "limits": {"memory": "512Mi"},
}


def build_router_deployment(context: BuildContext) -> Manifest:
    """Routers. A new one is ready before an old one goes; its readiness never depends on workers."""
    annotations = {
        ANNOTATION_SPEC_HASH: router_spec_hash(context),
        names.ANNOTATION_OPERATOR_VERSION: context.settings.operator_version,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": build_metadata(
            context, names.router_name(context.name), Component.ROUTER, annotations=annotations
        ),
        "spec": {
            "replicas": context.spec.router.replicas,
            "revisionHistoryLimit": 2,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": names.selector_labels(context.name, Component.ROUTER)},
            "template": {
                "metadata": {
                    "labels": build_labels(context, Component.ROUTER),
                    "annotations": build_scrape_annotations(names.ROUTER_API_PORT),
                },
                "spec": _build_pod_spec(context),
            },
        },
    }


def _build_pod_spec(context: BuildContext) -> Manifest:
    pod: Manifest = {
        "serviceAccountName": names.router_name(context.name),
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": context.spec.rollout.drain_seconds + GRACE_BEYOND_DRAIN_S,
        "securityContext": POD_SECURITY,
        "containers": [_build_container(context)],
        "volumes": _build_volumes(context),
    }
    pull_secrets = build_pull_secrets(context)
    if pull_secrets:
        pod["imagePullSecrets"] = pull_secrets
    return pod


def _build_container(context: BuildContext) -> Manifest:
    return {
        "name": ROUTER_CONTAINER,
        "image": context.settings.control_image,
        "imagePullPolicy": context.settings.image_pull_policy,
        "command": ["phasesplit-router"],
        "args": build_router_args(context),
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "HOME", "value": TMP_MOUNT["mountPath"]},
        ],
        "ports": [{"name": "http", "containerPort": names.ROUTER_API_PORT, "protocol": "TCP"}],
        # Importing takes long where processors are short: a slow start is no reason to end it.
        "startupProbe": {
            "httpGet": {"path": names.PATH_HEALTH, "port": "http"},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": 90,
        },
        "livenessProbe": {
            "httpGet": {"path": names.PATH_HEALTH, "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "readinessProbe": {
            "httpGet": {"path": names.PATH_READY, "port": "http"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
        "resources": dict(context.spec.router.resources) or DEFAULT_RESOURCES,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": _build_mounts(context),
    }


def _build_volumes(context: BuildContext) -> list[Manifest]:
    token = {"key": names.SECRET_KEY_ADMIN, "path": names.SECRET_KEY_ADMIN}
    volumes: list[Manifest] = [
        TMP_VOLUME,
        {
            "name": "transfer",
            # The router talks to /admin but never speaks the KV protocol: it gets no transfer key.
            "secret": {
                "secretName": names.transfer_secret_name(context.name, context.uid),
                "items": [token],
                "defaultMode": 0o440,
            },
        },
    ]
    keys = context.spec.router.api_keys_secret_ref
    if keys is not None:
        volumes.append({"name": "api-keys", "secret": {"secretName": keys.name, "defaultMode": 0o440}})
    return volumes


def _build_mounts(context: BuildContext) -> list[Manifest]:
    mounts: list[Manifest] = [
        TMP_MOUNT,
        {"name": "transfer", "mountPath": TRANSFER_MOUNT, "readOnly": True},
    ]
    if context.spec.router.api_keys_secret_ref is not None:
        mounts.append({"name": "api-keys", "mountPath": API_KEYS_MOUNT, "readOnly": True})
    return mounts
