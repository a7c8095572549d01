"""A model's files: where they are, what the weights' headers say, and the model's fingerprint.

Reads headers and small files only, never the weights themselves.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from phasesplit_worker.config import WorkerConfig
from phasesplit_worker.errors import ModelLoadError, ModelUnreachableError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
_ALLOWED_DOWNLOADS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_MAX_HEADER_BYTES = 100 << 20


def find_model(config: WorkerConfig) -> Path:
    """Directory with the model's files; downloads a repository first."""
    if config.model_path is None:
        return _download(config)
    directory = config.model_path
    if not directory.is_dir():
        raise ModelLoadError(f"model path {directory} is not a directory; give one that holds config.json")
    return directory


def _download(config: WorkerConfig) -> Path:
    repository = config.model_repository or ""
    try:
        return Path(
            snapshot_download(
                repository,
                revision=config.model_revision,
                cache_dir=config.model_cache,
                token=config.hf_token,
                allow_patterns=_ALLOWED_DOWNLOADS,
            )
        )
    except GatedRepoError as error:
        message = f"model {repository} is gated; accept its terms and give a token that may read it"
        raise ModelLoadError(message) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        message = f"model repository {repository} does not exist or needs a token; check the name"
        raise ModelLoadError(message) from error
    except RevisionNotFoundError as error:
        message = f"model {repository} has no revision {config.model_revision}; check the revision"
        raise ModelLoadError(message) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        message = f"model {repository} could not be downloaded ({_first_line(error)}); check the network"
        raise ModelUnreachableError(message) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the model, or ModelLoadError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path.name} is missing in {path.parent}; is it a model directory?") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return value


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files, in order; those that an index names must all be there."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise ModelLoadError(f"weights file {missing[0]} is missing in {directory}; download it again")
        return [directory / name for name in names]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{directory} holds no *.safetensors weights; convert the model first")
    return files


def read_header(path: Path) -> bytes:
    """The raw header of a safetensors file: names, types, shapes and offsets of its tensors."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ModelLoadError(f"weights file {path} is damaged: its header is too long")
            header = file.read(length)
    except (OSError, struct.error) as error:
        raise ModelLoadError(f"weights file {path} cannot be read: {_first_line(error)}") from error
    if len(header) != length:
        raise ModelLoadError(f"weights file {path} is cut short; download it again")
    return header


def count_parameters(files: list[Path]) -> int:
    """Elements of all tensors, from the headers."""
    total = 0
    for path in files:
        try:
            tensors = json.loads(read_header(path))
        except ValueError as error:
            raise ModelLoadError(f"weights file {path} is damaged: its header is not JSON") from error
        for name, tensor in tensors.items():
            if name != "__metadata__":
                elements = 1
                for size in tensor["shape"]:
                    elements *= size
                total += elements
    return total


def model_fingerprint(directory: Path, dtype: str, block_size: int, attention_kind: str) -> str:
    """Hash of what must agree for two workers to share KV: same weights, tokenizer and layout.

    Weights are identified by their headers and sizes, not their bytes; so equal fingerprints are
    certain only for files from one source.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(label: str, content: bytes) -> None:
        digest.update(f"{label}:{len(content)}:".encode())
        digest.update(content)

    config = {k: v for k, v in read_json(directory / "config.json").items() if k != "_name_or_path"}
    add("config", json.dumps(config, sort_keys=True).encode())
    for path in weight_files(directory):
        add(f"weights {path.name} {path.stat().st_size}", read_header(path))
    for name in TOKENIZER_FILES:
        if (directory / name).exists():
            add(f"tokenizer {name}", (directory / name).read_bytes())
    add("layout", f"{dtype} {block_size} {attention_kind}".encode())
    return digest.hexdigest()
