"""The two pools: StatefulSets without replicas, and the manifest that sets only replicas."""

from phasesplit.api import names
from phasesplit.api.names import Component, Pool
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.context import BuildContext
from phasesplit.resources.hashes import ANNOTATION_SPEC_HASH, pool_spec_hash
from phasesplit.resources.labels import build_labels, build_metadata
from phasesplit.resources.pods import CACHE_VOLUME, build_worker_template

API_VERSION = "apps/v1"
KIND = "StatefulSet"


def build_statefulset(context: BuildContext, pool: Pool) -> Manifest:
    """A pool. OnDelete: the operator alone decides which pod is replaced when."""
    name = names.pool_name(context.name, pool)
    annotations = {
        ANNOTATION_SPEC_HASH: pool_spec_hash(context, pool),
        names.ANNOTATION_OPERATOR_VERSION: context.settings.operator_version,
    }
    spec: Manifest = {
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": names.selector_labels(context.name, Component.WORKER, pool)},
        "template": build_worker_template(context, pool),
    }
    claims = _build_claims(context, pool)
    if claims:
        spec["volumeClaimTemplates"] = claims
        # The cache goes with the object, but survives scaling down and up again.
        spec["persistentVolumeClaimRetentionPolicy"] = {"whenDeleted": "Delete", "whenScaled": "Retain"}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": build_metadata(context, name, Component.WORKER, pool, annotations),
        "spec": spec,
    }


def build_scale(context: BuildContext, pool: Pool, replicas: int) -> Manifest:
    """The least StatefulSet that says only how many; applied as `phasesplit-scaler`."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": names.pool_name(context.name, pool), "namespace": context.namespace},
        "spec": {"replicas": replicas},
    }


def _build_claims(context: BuildContext, pool: Pool) -> list[Manifest]:
    cache = context.spec.model.cache
    if cache is None or context.spec.model.source.hugging_face is None:
        return []
    claim: Manifest = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": cache.storage}},
    }
    if cache.storage_class_name is not None:
        claim["storageClassName"] = cache.storage_class_name
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CACHE_VOLUME, "labels": build_labels(context, Component.WORKER, pool)},
            "spec": claim,
        }
    ]
