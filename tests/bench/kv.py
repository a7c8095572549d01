"""KV pulls between two processes against a raw socket, in turns: unshaped, and over a 1gbit link.

    make bench-kv

The link is a veth pair between two network namespaces of this run, shaped by tc's token bucket;
that part needs root, ip and tc, and is left out with a word where they are missing. A pull is the
whole thing: request, manifest, blocks, checksums of every block, confirmation. The raw socket moves
the same bytes with sendall and recv_into and checks nothing. Both keep their connection. CPU time
of both ends is given beside the speed, since it holds on a busy machine as well.
"""

import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers_transfer import MemoryPool, PlayedEngine, eventually
from phasesplit.api.legs import KVTransferParams
from phasesplit.api.manifest import KVLayout
from phasesplit_worker.transfer.manager import TransferManager, TransferSettings

# SmolLM2-135M in float32: 46 KB per token.
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
NUM_TOKENS = 1024
NUM_BLOCKS = NUM_TOKENS // LAYOUT.block_size
NUM_BYTES = NUM_BLOCKS * LAYOUT.bytes_per_block
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "12"))
KEY = b"only for this benchmark, 32 byte"
RATE = "1gbit"
TIMEOUT_S = 60


class Side:
    """One process of the benchmark: answers commands, one JSON line each."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.pool = MemoryPool(NUM_BLOCKS, LAYOUT)
        self.engine = PlayedEngine(self.pool)
        self.manager = TransferManager(
            TransferSettings(
                pod=host, node=host, advertised_host=host, host=host, model_fingerprint="bench", ttl_s=60
            ),
            KEY,
            self.pool,
            release=self.engine.release_held,
        )
        self.engine.manager = self.manager
        self.raw_socket: socket.socket | None = None

    async def serve(self) -> None:
        for block_id in range(NUM_BLOCKS):
            self.pool.fill(block_id, seed=block_id)
        await self.manager.start()
        listener = socket.create_server((self.host, 0))
        threading.Thread(target=self._serve_raw, args=(listener,), daemon=True).start()
        answer({"raw_port": listener.getsockname()[1]})
        for line in iter(sys.stdin.readline, ""):
            command = json.loads(line)
            answer(await getattr(self, command.pop("do"))(**command))
        await self.manager.stop()

    async def export(self, request_id: str) -> dict:
        """A finished prefill with its checksums, ready to be pulled."""
        eventually(lambda: self.engine.allocator.num_used == 0)
        tokens = list(range(NUM_TOKENS))
        prefill = self.engine.accept(request_id, tokens)
        self.manager.hooks.on_blocks_ready(request_id, NUM_TOKENS, prefill.block_ids)
        self.engine.finish(prefill)
        eventually(lambda: len(self.manager.manifest(request_id).checksums) == NUM_BLOCKS)
        return self.manager.offer(request_id, NUM_TOKENS).model_dump()

    async def pull(self, params: dict) -> dict:
        result = await self.manager.pull(
            KVTransferParams.model_validate(params),
            range(NUM_TOKENS),
            range(NUM_BLOCKS),
            deadline_s=TIMEOUT_S,
        )
        return {"s": result.transfer_s, "bytes": result.num_bytes, "streams": result.num_streams}

    async def cpu(self) -> dict:
        return {"s": time.process_time()}

    async def raw(self, host: str, port: int) -> dict:
        if self.raw_socket is None:
            self.raw_socket = socket.create_connection((host, port), timeout=TIMEOUT_S)
        whole = self.pool.read_whole()
        started = time.perf_counter()
        self.raw_socket.sendall(b"g")
        while whole:
            whole = whole[self.raw_socket.recv_into(whole) :]
        return {"s": time.perf_counter() - started, "bytes": NUM_BYTES}

    def _serve_raw(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        whole = self.pool.read_whole()
        while connection.recv(1):
            connection.sendall(whole)


def answer(value: dict) -> None:
    print(json.dumps(value), flush=True)


class Process:
    """A side in a process of its own, possibly in a namespace."""

    def __init__(self, host: str, prefix: list[str]) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "bench.kv", "side", host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.host = host
        self.raw_port = self._read()["raw_port"]

    def ask(self, **command: object) -> dict:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the side on {self.host} ended with {self._process.wait(5)}")
        return json.loads(line)


def compare(name: str, hosts: tuple[str, str], prefixes: tuple[list[str], list[str]]) -> dict:
    """Pull and raw in turns; bytes/s of both, and the median ratio of neighbours."""
    prefill, decode = (Process(host, prefix) for host, prefix in zip(hosts, prefixes, strict=True))
    pulls, raws, pull_cpu, raw_cpu, streams = [], [], [], [], 0

    def cpu_s() -> float:
        return prefill.ask(do="cpu")["s"] + decode.ask(do="cpu")["s"]

    try:
        for number in range(ROUNDS + 1):
            params = prefill.ask(do="export", request_id=f"r{number}")
            before_s = cpu_s()
            pulled = decode.ask(do="pull", params=params)
            between_s = cpu_s()
            raw = decode.ask(do="raw", host=prefill.host, port=prefill.raw_port)
            after_s = cpu_s()
            if number == 0:
                continue  # connections and buffers are being made
            pulls.append(pulled["bytes"] / pulled["s"])
            raws.append(raw["bytes"] / raw["s"])
            pull_cpu.append((between_s - before_s) / NUM_BYTES * 1e9)
            raw_cpu.append((after_s - between_s) / NUM_BYTES * 1e9)
            streams = pulled["streams"]
            print(
                f"{name}: pull {pulls[-1] / 1e9:.3f} GB/s, raw socket {raws[-1] / 1e9:.3f} GB/s", flush=True
            )
    finally:
        prefill.close()
        decode.close()
    ratio = statistics.median(pull / raw for pull, raw in zip(pulls, raws, strict=True))
    return {
        "pull": statistics.median(pulls),
        "best": max(pulls),
        "raw": statistics.median(raws),
        "raw_best": max(raws),
        "ratio": ratio,
        "pull_cpu": statistics.median(pull_cpu),
        "raw_cpu": statistics.median(raw_cpu),
        "streams": streams,
    }


@contextmanager
def shaped_namespaces(rate: str) -> Iterator[tuple[tuple[str, str], tuple[list[str], list[str]]]]:
    """Two namespaces joined by a veth pair, the first one's sending side shaped."""
    names = [f"psbench-{os.getpid()}-{side}" for side in "pd"]
    links = [f"psb{os.getpid() % 100000}{side}" for side in "pd"]
    hosts = ("10.231.0.1", "10.231.0.2")
    try:
        for name in names:
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1],
           "netns", names[1])  # fmt: skip
        for name, link, host in zip(names, links, hosts, strict=True):
            sh("ip", "-n", name, "addr", "add", f"{host}/24", "dev", link)
            sh("ip", "-n", name, "link", "set", link, "up")
            sh("ip", "-n", name, "link", "set", "lo", "up")
        sh("tc", "-n", names[0], "qdisc", "add", "dev", links[0], "root", "tbf", "rate", rate,
           "burst", "256kb", "latency", "50ms")  # fmt: skip
        yield hosts, (["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]])
    finally:
        for name in names:  # the links go with them
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


def measure() -> list[dict]:
    loopback = compare("unshaped", ("127.0.0.1", "127.0.0.1"), ([], []))
    results = [
        result("pull_unshaped", loopback["pull"], "B/s", loopback["raw"], 2e9),
        result("pull_unshaped_best", loopback["best"], "B/s", loopback["raw_best"], None),
        result("pull_unshaped_cpu", loopback["pull_cpu"], "CPU s/GB", loopback["raw_cpu"], None),
        result("pull_unshaped_streams", loopback["streams"], "streams", None, None),
        result("pull_unshaped_over_raw", loopback["ratio"], "ratio", 1.0, None),
    ]
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print(f"{RATE}: left out, it needs root, ip and tc")
        return results
    with shaped_namespaces(RATE) as (hosts, prefixes):
        shaped = compare(RATE, hosts, prefixes)
    return [
        *results,
        result(f"pull_{RATE}", shaped["pull"], "B/s", shaped["raw"], None),
        result(f"pull_{RATE}_over_raw", shaped["ratio"], "ratio", 1.0, 0.9),
    ]


def result(name: str, value: float, unit: str, against: float | None, bar: float | None) -> dict:
    """One entry of the last line; `against` is the raw socket, `bar` a lower bound."""
    holds = None if bar is None else value >= bar
    return {"name": name, "value": value, "unit": unit, "against": against, "bar": bar, "holds": holds}


def describe_machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def main() -> None:
    if sys.argv[1:2] == ["side"]:
        asyncio.run(Side(sys.argv[2]).serve())
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    machine = describe_machine()
    results = measure()
    print(
        json.dumps(
            {
                "bench": "kv",
                "commit": commit.stdout.strip(),
                "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "machine": machine,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
