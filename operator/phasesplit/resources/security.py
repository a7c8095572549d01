"""What every pod of ours has in common: user, file system, pull secrets, scrape annotations."""

from phasesplit.api import names
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.context import BuildContext

USER_ID = 65532

POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
TMP_VOLUME: Manifest = {"name": "tmp", "emptyDir": {}}
TMP_MOUNT: Manifest = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 - an emptyDir of the pod's own


def build_pull_secrets(context: BuildContext) -> list[Manifest]:
    """The user's pull secrets, then the operator's, each once."""
    user = [reference.name for reference in context.spec.engine.image_pull_secrets]
    unique = dict.fromkeys([*user, *context.settings.image_pull_secrets])
    return [{"name": name} for name in unique]


def build_scrape_annotations(port: int) -> dict[str, str]:
    """The customary annotations by which a Prometheus finds a pod's metrics."""
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "prometheus.io/path": names.PATH_METRICS,
    }
