"""How much memory a model's weights and KV cache may take. Knows cgroups, /proc and CUDA."""

from pathlib import Path

import torch

# Without a container limit a CPU worker shares the machine with others: no more KV than this
# unless `--kv-cache-bytes` says otherwise.
MAX_UNLIMITED_CPU_KV_BYTES = 4 << 30
ACTIVATION_BYTES = 256 << 20
_CGROUP = Path("/sys/fs/cgroup")


def container_limit_bytes() -> int | None:
    """Memory limit of this container, None when there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = _read_int(_CGROUP / name)
        if limit is not None and limit < 1 << 60:
            return limit
    return None


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on this device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = _meminfo_available_bytes()
    limit = container_limit_bytes()
    if limit is None:
        return available
    used = _read_int(_CGROUP / "memory.current") or _read_int(_CGROUP / "memory/memory.usage_in_bytes") or 0
    return min(available, max(limit - used, 0))


def kv_budget_bytes(
    device: torch.device, fraction: float, asked_bytes: int | None, weights_bytes: int = 0
) -> int:
    """Bytes for the KV cache when the weights have been read but not yet been put into their final form.

    That takes up to a second copy for a while, and steps need room for activations.
    """
    if asked_bytes is not None:
        return asked_bytes
    free_bytes = available_bytes(device) - weights_bytes - ACTIVATION_BYTES
    budget = max(0, int(free_bytes * fraction))
    if device.type == "cpu" and container_limit_bytes() is None:
        return min(budget, MAX_UNLIMITED_CPU_KV_BYTES)
    return budget


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # absent in this cgroup version, or "max"
        return None


def _meminfo_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
