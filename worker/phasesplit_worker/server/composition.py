"""Fits the real engine, tokenizer and transfer to what the server asks for.

The only module of the server that imports torch (through the engine), and only while loading.
"""

import logging
import secrets
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from phasesplit.api.legs import KVTransferParams
from phasesplit.api.manifest import KVManifest
from phasesplit.api.reports import LinkSample, ProbeRequest, ProbeResult
from phasesplit_worker.config import WorkerConfig
from phasesplit_worker.engine.engine import Engine
from phasesplit_worker.engine.tokenizer import Detokenizer, Tokenizer
from phasesplit_worker.model.loader import load_model
from phasesplit_worker.requests import EngineRequest, Reservation
from phasesplit_worker.server.metrics import WorkerMetrics
from phasesplit_worker.server.ports import Parts, Pulled, PullFailedError, TextDecoder
from phasesplit_worker.transfer.auth import read_transfer_key
from phasesplit_worker.transfer.errors import CALLED_OFF, TransferError, TransferFailure
from phasesplit_worker.transfer.manager import TransferManager, TransferSettings

logger = logging.getLogger(__name__)

# Pods are named by ordinal, so there are few; what a request names is not trusted to be.
MAX_COUNTED_PEERS = 256


class ServedTokenizer:
    """The model's tokenizer as the server uses it."""

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int, end_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.vocabulary_size = vocabulary_size
        self.end_token_ids = end_token_ids

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text."""
        return self._tokenizer.encode_text(text)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation."""
        return self._tokenizer.encode_chat(messages)

    def decoder(self, stop: Sequence[str], min_tokens: int) -> TextDecoder:
        """Incremental text up to a stop string."""
        return Detokenizer(self._tokenizer, stop, min_tokens=min_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, for log probabilities."""
        return bytes(self._tokenizer.token_bytes(token_id))


class ServedTransfer:
    """The transfer manager as the server uses it."""

    def __init__(self, manager: TransferManager) -> None:
        self._manager = manager
        self._by_peer: defaultdict[str, Counter[str]] = defaultdict(Counter)

    async def start(self) -> None:
        """Listen for peers."""
        await self._manager.start()

    async def stop(self) -> None:
        """End pulls and exports."""
        await self._manager.stop()

    def offer(self, request_id: str, num_tokens: int) -> KVTransferParams:
        """Where the decode side pulls from."""
        return self._manager.offer(request_id, num_tokens)

    async def pull(
        self, request: EngineRequest, params: KVTransferParams, reservation: Reservation
    ) -> Pulled:
        """Fill and verify the reserved blocks."""
        token_ids = (*request.prompt_token_ids, *request.output_token_ids)
        try:
            result = await self._manager.pull(
                params, token_ids, reservation.block_ids, num_cached_tokens=reservation.num_cached_tokens
            )
        except TransferError as error:
            logger.warning("pull of %s failed (%s): %s", request.request_id, error.reason, error)
            self._count_failure(params.remote_pod or "", error.reason)
            raise PullFailedError(str(error.reason), str(error), error.first_token) from error
        return Pulled(
            first_token=result.first_token,
            num_tokens=result.num_tokens,
            num_bytes=result.num_bytes,
            transport=result.transport,
            seconds=result.transfer_s,
            busy_s=result.busy_s,
            exposed_s=result.exposed_s,
        )

    def _count_failure(self, peer: str, reason: TransferFailure) -> None:
        is_known = peer in self._by_peer or len(self._by_peer) < MAX_COUNTED_PEERS
        if peer and is_known and reason not in CALLED_OFF:
            self._by_peer[peer][str(reason)] += 1

    def manifest(self, request_id: str) -> KVManifest | None:
        """What is known of a prefill's KV."""
        return self._manager.manifest(request_id)

    async def probe(self, request: ProbeRequest) -> ProbeResult:
        """Measure the link from a peer."""
        return await self._manager.probe(request)

    def link_samples(self) -> list[LinkSample]:
        """Recent measurements."""
        return self._manager.link_samples()

    @property
    def transfers_total(self) -> int:
        """Pulls that succeeded."""
        return self._manager.transfers_total

    @property
    def failures_total(self) -> dict[str, int]:
        """Pulls that failed, by reason."""
        return self._manager.failures_total

    @property
    def failures_by_peer(self) -> dict[str, dict[str, int]]:
        """The same by the pod that was pulled from, where the router named it."""
        return {peer: dict(reasons) for peer, reasons in self._by_peer.items()}


def _transfer_key(path: Path | None) -> bytes:
    if path is not None:
        return read_transfer_key(path)
    logger.warning("no --transfer-key-file: no peer can pull KV from this worker, nor this worker from peers")
    return secrets.token_bytes(32)


def load_parts(config: WorkerConfig, engine_id: str, metrics: WorkerMetrics) -> Parts:
    """Load the model and build engine and transfer around it; blocking. Raises ModelLoadError."""
    key = _transfer_key(config.transfer_key_file)
    loaded = load_model(config)
    tokenizer = Tokenizer.load(loaded.directory)
    engine = Engine(config, loaded, on_step=metrics.observe_step)
    settings = TransferSettings(
        engine_id=engine_id,
        pod=config.pod_name,
        node=config.node_name,
        advertised_host=config.pod_ip,
        model_fingerprint=loaded.facts.fingerprint,
        host=config.host,
        port=config.transfer_port,
        ttl_s=config.kv_ttl_s,
        transfer_deadline_s=config.transfer_deadline_s,
    )
    manager = TransferManager(
        settings,
        key,
        engine.kv_cache,
        release=engine.release_held,
        on_expired=metrics.observe_expired_blocks,
    )
    engine.set_hooks(manager.hooks)
    served = ServedTokenizer(tokenizer, loaded.vocabulary_size, loaded.eos_token_ids)
    return Parts(engine=engine, tokenizer=served, transfer=ServedTransfer(manager))
