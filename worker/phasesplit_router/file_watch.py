"""Discovery from a file: `{"table": RoutingTable, "endpoints": [...]}`, read again when it changes.

For running without Kubernetes. A file that cannot be read leaves the last snapshot in place.
"""

import asyncio
import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from phasesplit.api import names
from phasesplit.api.names import Pool
from phasesplit.api.routing import RoutingTable
from phasesplit_router.snapshot import Address, Publish, Snapshot

logger = logging.getLogger(__name__)

CHECK_S = 0.1


class _FileEndpoint(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    pod: str
    node: str = ""
    pool: Pool
    host: str = "127.0.0.1"
    port: int = Field(default=names.WORKER_API_PORT, gt=0, lt=65536)
    transfer_port: int = Field(default=names.WORKER_TRANSFER_PORT, gt=0, lt=65536)
    ready: bool = True
    terminating: bool = False


class _RoutingFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    table: RoutingTable
    endpoints: tuple[_FileEndpoint, ...] = ()

    @field_validator("endpoints")
    @classmethod
    def _pods_are_named_once(cls, value: tuple[_FileEndpoint, ...]) -> tuple[_FileEndpoint, ...]:
        if len({item.pod for item in value}) < len(value):
            raise ValueError("a pod is named twice; leave one of its endpoints out")
        return value


class FileWatch:
    """Watches one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def run(self, publish: Publish) -> None:
        """Publish whenever the file has changed, until cancelled."""
        seen: tuple[int, int, int] | None = None
        told = ""
        while True:
            try:
                stat = self._path.stat()
                now = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                if now != seen:
                    publish(read_routing_file(self._path))
                    seen = now
                    told = ""
            except (OSError, ValidationError) as error:
                # Half-written files are read again at the next look.
                if str(error) != told:
                    told = str(error)
                    logger.warning("the routing file %s cannot be used: %s", self._path, told)
            await asyncio.sleep(CHECK_S)


def read_routing_file(path: Path) -> Snapshot:
    """One snapshot. Raises `OSError` or `pydantic.ValidationError`."""
    content = _RoutingFile.model_validate_json(path.read_bytes())
    addresses = tuple(Address(**item.model_dump()) for item in content.endpoints)
    return Snapshot(content.table, addresses)
