"""Labels, owner references and metadata of children. Knows names only."""

from collections.abc import Mapping

from phasesplit.api import names
from phasesplit.api.names import Component, Pool
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.context import BuildContext


def build_labels(context: BuildContext, component: Component, pool: Pool | None = None) -> dict[str, str]:
    """Selector labels plus the recommended ones for people and tools."""
    return {
        **names.selector_labels(context.name, component, pool),
        names.LABEL_NAME: f"{names.PART_OF}-{component}",
        names.LABEL_INSTANCE: context.name,
        names.LABEL_MANAGED_BY: f"{names.PART_OF}-operator",
    }


def build_owner(context: BuildContext) -> Manifest:
    """The controller reference that lets the garbage collector remove children with the object."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": context.name,
        "uid": context.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def build_metadata(
    context: BuildContext,
    name: str,
    component: Component,
    pool: Pool | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """Metadata of a child."""
    metadata: Manifest = {
        "name": name,
        "namespace": context.namespace,
        "labels": build_labels(context, component, pool),
        "ownerReferences": [build_owner(context)],
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return metadata
