"""The routing table: what the operator tells routers, as JSON in the ConfigMap `<name>-routing`.

Routers join it with the EndpointSlices of the two headless Services, which say which pods exist,
where, and on which node. Written by the operator only; a higher `version` replaces a lower one.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from phasesplit.api.names import Pool, Role


class ServedMode(StrEnum):
    """How requests are served now."""

    SPLIT = "Split"
    COLOCATED = "Colocated"


class WhenInfeasible(StrEnum):
    """What happens to a request that cannot meet its class target even on an idle system."""

    SERVE = "Serve"
    REJECT = "Reject"


class _Message(BaseModel):
    """Unknown fields are ignored, so that an old router reads a newer operator's table."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class LatencyClass(_Message):
    """One class of requests with its targets."""

    name: str
    priority: int = 0
    ttft_s: Annotated[float, Field(gt=0)]
    tpot_s: Annotated[float, Field(gt=0)]
    percentile: Annotated[float, Field(gt=0, lt=100)] = 95.0
    when_infeasible: WhenInfeasible = WhenInfeasible.SERVE


class LinkEstimate(_Message):
    """Believed bandwidth from one node (prefill side) to another (decode side)."""

    from_node: str
    to_node: str
    bytes_per_s: Annotated[float, Field(gt=0)]


class TrialTable(_Message):
    """Both modes at once, each on workers of its own: routers draw which one a request is tried in."""

    id: str  # another one begins the draw anew
    split_share: Annotated[float, Field(gt=0, lt=1)] = 0.5  # of the requests, as of the workers


class RoutingTable(_Message):
    """Everything a router needs to know beyond the endpoints themselves."""

    version: Annotated[int, Field(ge=0)] = 0
    namespace: str = "default"
    name: str = ""
    model: str = ""  # name in the OpenAI API
    mode: ServedMode = ServedMode.COLOCATED
    reason: str = ""
    # False: a Split object must not serve colocated; when the split cannot serve, answer 503 with
    # `reason` instead.
    colocated_allowed: bool = True
    # Role by pod name; pods not named have `default_roles[pool]`.
    roles: dict[str, Role] = Field(default_factory=dict)
    default_roles: dict[Pool, Role] = Field(default_factory=dict)
    classes: Annotated[tuple[LatencyClass, ...], Field(min_length=1)] = (
        LatencyClass(name="default", ttft_s=2.0, tpot_s=0.1),
    )
    max_model_length: int | None = None
    # Prompt tokens per step of a colocated worker; None: the worker derives it from the seconds of a step.
    colocated_max_batched_tokens: int | None = None
    # Predicted seconds of such a step, as the last replay found best; None: the tightest TPOT target.
    colocated_max_step_s: Annotated[float, Field(gt=0)] | None = None
    transfer_deadline_s: float | None = None
    links: tuple[LinkEstimate, ...] = ()
    trial: TrialTable | None = None  # `roles` then name workers of both modes

    def role_of(self, pod: str, pool: Pool) -> Role:
        """Role of a pod: its own entry, else its pool's default, else colocated."""
        return self.roles.get(pod, self.default_roles.get(pool, Role.COLOCATED))

    def max_step_s(self, role: Role) -> float:
        """Longest predicted step that carries prompt tokens: the tightest TPOT target, or what was tuned."""
        tuned_s = self.colocated_max_step_s if role is Role.COLOCATED else None
        return tuned_s or min(item.tpot_s for item in self.classes)
