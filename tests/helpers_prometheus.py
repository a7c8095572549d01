"""A real Prometheus on this machine, scraping what a test wants routers and workers to have said."""

import http.server
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from helpers_ports import free_port
from phasesplit.api import metric_names as m
from testbed.binaries import ensure_packages
from testbed.processes import wait_for

NAMESPACE = "tests"
SCRAPE_INTERVAL_S = 1.0
BUCKETS_S = (0.1, 1.0, 10.0)
# The hash of the password `test`, as Prometheus' own documentation shows it.
_USERS = "basic_auth_users:\n  reader: $2b$12$hNf2lSsxfm0.i4a.1kVpSOVyBCfIB51VRjgBUyv6kdnyTlgWj81Ay\n"


@dataclass(frozen=True)
class Said:
    """What one object's router and workers say at a scrape. Rates are per second."""

    rate: float | None = 5.0  # of requests; None: the series does not exist
    answered_rate: float | None = 5.0  # of observed first tokens; None: no such histogram
    restart_every_s: float | None = None  # counters begin again at zero
    running: Mapping[str, float] = field(default_factory=lambda: {"prefill": 1.0, "decode": 2.0})
    usage: float = 0.4
    prefix: str = m.PREFIX  # of the workers' gauges
    late_s: float | None = None  # how old the samples are

    def lines(self, model: str, now_s: float) -> list[str]:
        """The exposition at one moment."""
        counted_s = now_s % self.restart_every_s if self.restart_every_s else now_s
        owner = f'namespace="{NAMESPACE}",model="{model}"'
        slo = f'{owner},slo="default"'
        lines = [f"{m.REQUESTS_IN_FLIGHT}{{{owner}}} 1"]
        if self.rate is not None:
            lines.append(f"{m.SLO_REQUESTS_TOTAL}{{{slo}}} {self.rate * counted_s}")
            lines.append(f"{m.SLO_ATTAINED_REQUESTS_TOTAL}{{{slo}}} {self.rate * counted_s}")
        if self.answered_rate is not None:
            count = self.answered_rate * counted_s
            name = m.TIME_TO_FIRST_TOKEN_SECONDS
            lines += [f'{name}_bucket{{{slo},le="{bound}"}} {count}' for bound in (*BUCKETS_S, "+Inf")]
            lines += [f"{name}_sum{{{slo}}} {count / 20}", f"{name}_count{{{slo}}} {count}"]
        for pool, running in self.running.items():
            for metric, value in ((m.NUM_REQUESTS_RUNNING, running), (m.KV_CACHE_USAGE_PERC, self.usage)):
                name = self.prefix + metric.removeprefix(m.PREFIX)
                lines.append(f'{name}{{{owner},pool="{pool}"}} {value}')
        if self.late_s is not None:
            lines = [f"{line} {round((now_s - self.late_s) * 1000)}" for line in lines]
        return lines


class Exporter:
    """Serves `/metrics` for many objects."""

    def __init__(self, objects: Mapping[str, Said]) -> None:
        self._objects = objects
        exporter = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = exporter.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def text(self) -> str:
        """What a scrape gets now."""
        now_s = time.time()
        return (
            "\n".join(line for model, said in self._objects.items() for line in said.lines(model, now_s))
            + "\n"
        )

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


@dataclass
class RealPrometheus:
    """A running server."""

    address: str
    process: subprocess.Popen[bytes]
    ca_pem: str | None = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It accepts connections and answers nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Gone without a word."""
        self.process.kill()
        self.process.wait(10)


@contextmanager
def real_prometheus(
    folder: Path, target_port: int | None, *, tls: bool = False, users: bool = False
) -> Iterator[RealPrometheus]:
    """Start Debian's Prometheus, with a certificate of its own or with users, and wait until it answers."""
    ensure_packages()
    port = free_port()
    job = f"{{job_name: phasesplit, static_configs: [{{targets: ['127.0.0.1:{target_port}']}}]}}"
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: {SCRAPE_INTERVAL_S:g}s, scrape_timeout: {SCRAPE_INTERVAL_S:g}s}}\n"
        + (f"scrape_configs: [{job}]\n" if target_port is not None else "")
    )
    ca_pem = _certificate(folder) if tls else None
    web = "tls_server_config: {cert_file: server.pem, key_file: server.key}\n" if tls else ""
    (folder / "web.yml").write_text(web + (_USERS if users else ""))
    with (folder / "prometheus.log").open("ab") as log:
        process = subprocess.Popen(
            [
                "/usr/bin/prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--web.config.file={folder / 'web.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
    found = RealPrometheus(f"{'https' if tls else 'http'}://127.0.0.1:{port}", process, ca_pem)
    try:
        wait_for(lambda: _listens(port), 60, "Prometheus to listen")
        yield found
    finally:
        process.kill()
        process.wait(10)


def _listens(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        return error.code in {400, 401}  # it wants TLS, or a user
    except OSError:
        return False


def _certificate(folder: Path) -> str:
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=prometheus"
    files = ["-keyout", folder / "server.key", "-out", folder / "server.pem"]
    name = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words.split(), *name, *files], check=True, capture_output=True, timeout=60)
    return (folder / "server.pem").read_text()
