"""What every builder needs to know about one object: its spec, its identity, the operator's settings.

Knows nothing of what exists in the cluster beyond the facts named here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from phasesplit.api.names import Pool
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec


@dataclass(frozen=True)
class ImageSettings:
    """The operator's settings that reach children."""

    worker_image: str
    control_image: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    router_cluster_role: str = "phasesplit-router"
    operator_version: str = "0.1.0"


@dataclass(frozen=True)
class BuildContext:
    """One object as the builders see it."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: DisaggregatedModelSpec
    settings: ImageSettings
    # A RuntimeClass named `nvidia` exists (k3s needs it, elsewhere naming it is fatal).
    has_nvidia_runtime_class: bool = False
    # Pools whose pods are born behind the scheduling gate.
    gated: Mapping[Pool, bool] = field(default_factory=dict)

    @property
    def model_name(self) -> str:
        """Name of the model in the OpenAI API."""
        return self.spec.model.name or self.name

    def worker_image(self) -> str:
        """The worker image: the user's, else the operator's."""
        return self.spec.engine.image or self.settings.worker_image
