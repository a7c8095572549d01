"""What the judgement of metrics is given and what it returns. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from phasesplit.api.conditions import ConditionStatus, Reason
from phasesplit.api.names import Pool


class QueryError(StrEnum):
    """Why a query of Prometheus failed."""

    REFUSED = "connection refused"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timed out"
    SERVER_ERROR = "server error"
    TLS = "TLS verification failed"
    UNAUTHORIZED = "token rejected"
    BAD_ANSWER = "answer not understood"


class Quantity(StrEnum):
    """What a series says, whatever it is called; decides the sensible range."""

    RATE_PER_S = "rate"
    SECONDS = "seconds"
    TOKENS = "tokens"
    SHARE = "share"  # 0 to 1
    COUNT = "count"
    COUNTER = "counter"  # ever growing but for restarts


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value of one series as it arrived."""

    name: str  # series name, one of api.metric_names or an alias of it
    quantity: Quantity
    value: float | None  # None: the query returned nothing; may be NaN
    age_s: float | None = None  # time() - timestamp(series); None: unknown
    class_name: str | None = None
    pool: Pool | None = None  # None: about the router, needed by both pools
    previous: float | None = None  # the counter's value before, for COUNTER
    interval_s: float | None = None  # between previous and value, for COUNTER


@dataclass(frozen=True, slots=True)
class MetricsInput:
    """Answers of one round of queries."""

    configured: bool
    samples: tuple[MetricSample, ...] = ()
    error: QueryError | None = None
    error_detail: str = ""
    failing_s: float = 0.0  # for how long every query has failed
    scrape_interval_s: float = 15.0
    # What routers say themselves; None: no router answered.
    router_flowing: bool | None = None
    router_idle_s: float | None = None


@dataclass(frozen=True, slots=True)
class Permission:
    """What scaling may do with one pool."""

    may_grow: bool = True
    may_shrink: bool = True

    @property
    def holds(self) -> bool:
        """Neither up nor down."""
        return not (self.may_grow or self.may_shrink)


@dataclass(frozen=True, slots=True)
class UsableMetric:
    """A value that may be used; rates and shares are never negative, counters have become rates."""

    name: str  # canonical
    value: float
    class_name: str | None = None
    pool: Pool | None = None


@dataclass(frozen=True, slots=True)
class MetricsVerdict:
    """The condition `MetricsAvailable`, what may be used, and what each pool may do."""

    status: ConditionStatus
    reason: Reason
    message: str
    usable: tuple[UsableMetric, ...] = ()
    permissions: Mapping[Pool, Permission] = field(default_factory=dict)
    idle: bool = False
    use_router_reports: bool = False
    aliases: tuple[str, ...] = ()  # "seen -> canonical"

    def value(self, name: str, class_name: str | None = None, pool: Pool | None = None) -> float | None:
        """A usable value by canonical name."""
        for metric in self.usable:
            if (metric.name, metric.class_name, metric.pool) == (name, class_name, pool):
                return metric.value
        return None

    def permission(self, pool: Pool) -> Permission:
        """What a pool may do; everything when nothing restricts it."""
        return self.permissions.get(pool, Permission())
