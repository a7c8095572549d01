"""What the transfer side is told once, when the model is loaded."""

import os
import uuid
from dataclasses import dataclass, field

from phasesplit_worker.transfer.stripes import choose_max_streams
from phasesplit_worker.transfer.tcp_session import ServerLimits


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """Names, bounds and times of one worker process."""

    pod: str
    node: str
    advertised_host: str  # where peers reach this worker
    model_fingerprint: str
    host: str = "0.0.0.0"  # noqa: S104 a pod's own network
    port: int = 0  # 0: any free one
    ttl_s: float = 30.0
    transfer_deadline_s: float | None = None  # of the transfer itself; None: from size and link
    whole_deadline_s: float = 600.0  # of a pull, waiting for a prefill that lives included
    max_streams: int = field(default_factory=lambda: choose_max_streams(os.cpu_count() or 1))
    max_pulls: int = 64  # most of them wait for a prefill that computes
    silence_s: float = 2.0
    engine_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # changes with every start
    server_limits: ServerLimits = field(default_factory=ServerLimits)
