"""Builds and loads the C attention routine. Optional: without it plain torch code is used.

Looks for a library built beforehand next to this file (images are built so), then for one in the
cache directory, then compiles one there when a C compiler is present. Never raises: says in the log
why it is not used. The library is called through ctypes, which also releases the interpreter lock.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("paged_attention.c")
SYMBOL = "phasesplit_paged_decode_f32"
COMPILE_TIMEOUT_S = 120.0
# Reassociation lets the compiler vectorise sums; the flags below do not change the FPU's mode of
# the whole process as -ffast-math would.
FLAGS = (
    "-O3", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros", "-fassociative-math",
)  # fmt: skip

PagedDecode = Callable[..., None]


def library_name() -> str:
    """File name that changes with the source and the processor's kind."""
    digest = hashlib.blake2b(SOURCE.read_bytes(), digest_size=6).hexdigest()
    return f"paged_attention-{platform.machine()}-{digest}.so"


def build(directory: Path, *, portable: bool) -> Path:
    """Compile the routine into `directory`; raises OSError or CalledProcessError.

    `portable`: for an image that runs on other machines of the same kind; else for this processor.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc or clang) on the path")
    target = directory / library_name()
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        output = Path(scratch) / "out.so"
        command = [compiler, *FLAGS, *_machine_flags(portable), "-o", str(output), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)  # noqa: S603
        output.replace(target)  # atomic: another worker may be loading it
    return target


def _machine_flags(portable: bool) -> tuple[str, ...]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return () if portable else ("-mcpu=native",)
    return ("-march=x86-64-v3",) if portable else ("-march=native",)


def load(cache: Path | None = None) -> PagedDecode | None:
    """The routine, or None with the reason in the log."""
    prebuilt = SOURCE.with_name(library_name())
    try:
        if prebuilt.exists() and _runs_portable_build():
            return _open(prebuilt)
        directory = cache or Path(tempfile.gettempdir()) / f"phasesplit-{os.getuid()}"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid != os.getuid():
            logger.info("native attention is off: %s belongs to somebody else", directory)
            return None
        library = directory / library_name()
        return _open(library if library.exists() else build(directory, portable=False))
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        logger.info("native attention is off, plain torch code is used: %s", error)
        return None


def _runs_portable_build() -> bool:
    """Portable x86 builds need AVX2; a processor without it must not load them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def _open(path: Path) -> PagedDecode:
    function = getattr(ctypes.CDLL(str(path)), SYMBOL)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [
        pointer, number, pointer, number, number, number, pointer, number, pointer, pointer, pointer,
        number, number, number, number, number, ctypes.c_float,
    ]  # fmt: skip
    function.restype = None
    logger.info("native attention is on: %s", path)
    routine: PagedDecode = function
    return routine


def main() -> None:
    """Build the portable library next to the source, for an image: `python -m …model.native`."""
    logging.basicConfig(level=logging.INFO)
    logger.info("built %s", build(SOURCE.parent, portable=True))


if __name__ == "__main__":
    main()
