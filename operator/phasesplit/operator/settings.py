"""Settings of the operator process, from the environment (prefix `PHASESPLIT_`)."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from phasesplit.api.names import OPERATOR_HEALTH_PORT, OPERATOR_METRICS_PORT
from phasesplit.resources.context import ImageSettings


class OperatorSettings(BaseSettings):
    """One field per variable: `PHASESPLIT_WORKER_IMAGE`, `PHASESPLIT_TICK_SECONDS`, ..."""

    model_config = SettingsConfigDict(env_prefix="PHASESPLIT_", frozen=True, extra="ignore")

    worker_image: str = "ghcr.io/phasesplit/worker:0.1.0"
    """Image of workers whose object names none."""

    control_image: str = "ghcr.io/phasesplit/control:0.1.0"
    """Image of the routers."""

    image_pull_policy: str = "IfNotPresent"
    """Pull policy of both images: Always, IfNotPresent or Never."""

    image_pull_secrets: str = ""
    """Names of pull secrets for both images, separated by commas; they must exist beside each object."""

    router_cluster_role: str = "phasesplit-router"
    """ClusterRole that the chart ships for routers; bound in each object's namespace."""

    prometheus_address: str | None = None
    """Base URL of the Prometheus for objects that name none. Absent: no metrics but the routers' own."""

    prometheus_timeout_seconds: float = Field(default=5.0, gt=0)
    """For one query. An answer that takes longer counts as an outage."""

    metrics_seconds: float = Field(default=10.0, gt=0)
    """Between two rounds of queries while any object has traffic; three times that when none has."""

    watch_namespace: str | None = None
    """The only namespace whose objects are served; absent: all namespaces."""

    tick_seconds: float = Field(default=2.0, gt=0)
    """Between two looks at the routers of an object with traffic, and at one that is changing."""

    idle_seconds: float = Field(default=30.0, gt=0)
    """Between two looks at an object without traffic. Changes in the cluster are noticed at once anyway."""

    probe_seconds: float = Field(default=7.0, gt=0)
    """Age of the newest measurement of a link after which it is probed, while its speed decides the mode."""

    workers: int = Field(default=4, ge=1, le=64)
    """How many objects are reconciled at the same time."""

    namespace: str = "default"
    """Namespace of the operator itself, for its Lease. The chart sets it from the pod."""

    lease_name: str = "phasesplit-operator"
    """Lease that keeps a second copy from writing."""

    lease_seconds: float = Field(default=30.0, ge=5)
    """How long a copy that stopped renewing blocks the next one. A copy that ends well gives it back."""

    health_port: int = OPERATOR_HEALTH_PORT
    """Port of the liveness endpoint `/healthz`; 0 turns it off."""

    metrics_port: int = OPERATOR_METRICS_PORT
    """Port of `/metrics`, and of `/targets`, the list of pods for a Prometheus; 0 turns it off."""

    stale_seconds: float = Field(default=60.0, gt=0)
    """The liveness endpoint fails when the work queue has not moved for so long."""

    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""

    def images(self, operator_version: str) -> ImageSettings:
        """The part that the builders need."""
        secrets = tuple(name.strip() for name in self.image_pull_secrets.split(",") if name.strip())
        return ImageSettings(
            worker_image=self.worker_image,
            control_image=self.control_image,
            image_pull_policy=self.image_pull_policy,
            image_pull_secrets=secrets,
            router_cluster_role=self.router_cluster_role,
            operator_version=operator_version,
        )
