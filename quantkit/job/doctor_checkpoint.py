"""What stands in a base's place: a Hugging Face checkpoint, a part of one, or a folder; and the command that converts it.

Only names and `config.json` are looked at. Nothing of a checkpoint is loaded, and nothing in it is run.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.core.errors import GgufError
from quantkit.spec.gguf_header import GgufHeader, read_header

_LARGEST_CONFIG = 4 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
# A checkpoint's own type to the converter's: none of them loses a bit.
_OUT_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def read_base(path: Path) -> GgufHeader:
    """The header of a base; a checkpoint in its place is refused with the command that makes a GGUF of it.

    Raises:
        GgufError: no GGUF, or one that is damaged.
    """
    if refusal := _explain(path):
        raise GgufError(refusal)
    return read_header(path)


def _explain(path: Path) -> str | None:
    """Why a path is no GGUF, as far as its name and its neighbours tell; None where the header must tell."""
    is_folder = path.is_dir()
    if not is_folder and not path.name.endswith((*_WEIGHTS, ".safetensors.index.json")):
        return None
    folder = path if is_folder else path.parent
    if (folder / "adapter_config.json").is_file():
        return f"{path}: expected a GGUF file, got an adapter: merge it into its model first, then convert that"
    if (folder / "config.json").is_file() and _has_weights(folder):
        return f"{path}: expected a GGUF file, got {_describe(folder)}: convert it first with `{conversion_command(folder)}`"
    if is_folder:
        files = sorted(p.name for p in folder.glob("*.gguf"))
        named = f": give one of its files ({', '.join(files[:3])}{', ...' if len(files) > 3 else ''})" if files else \
            ": give a GGUF file, or a checkpoint's folder with its config.json"
        return f"{path}: expected a GGUF file, got a folder{named}"
    return (f"{path}: expected a GGUF file, got a part of a checkpoint without its config.json, or a reference pack, which goes "
            "with `quantkit audit --ref`: fetch the whole checkpoint, then give its folder")


def conversion_command(folder: Path) -> str:
    """The line that makes a GGUF of a checkpoint with llama.cpp's script, in the checkpoint's own type, so that no bit is lost."""
    dtype = _OUT_TYPES.get(_dtype(_read_config(folder)), "bf16")
    name = folder.resolve().name or "model"
    return (f"python convert_hf_to_gguf.py {shlex.quote(str(folder))} --outtype {dtype} "
            f"--outfile {shlex.quote(f'{name}-{dtype.upper()}.gguf')}")


def _has_weights(folder: Path) -> bool:
    return any(p.name.endswith((*_WEIGHTS, ".safetensors.index.json")) for p in folder.iterdir())


def _describe(folder: Path) -> str:
    config = _read_config(folder)
    named = config.get("architectures")
    names = [n for n in named if isinstance(n, str) and re.fullmatch(r"\w{1,80}", n)] if isinstance(named, list) else []
    facts = [*names[:1], *filter(None, [_dtype(config)])]
    method = config.get("quantization_config")
    if isinstance(method, dict):
        kind = method.get("quant_method")
        facts.append(f"quantized by {kind}" if isinstance(kind, str) and re.fullmatch(r"[\w.-]{1,40}", kind) else "quantized")
    return "a Hugging Face checkpoint" + (f" ({', '.join(facts)})" if facts else "")


def _dtype(config: Mapping[str, Any]) -> str:
    """The type of the checkpoint's weights, "" where its config does not say; a model of several parts says it in one of them."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            for key in ("dtype", "torch_dtype"):
                if isinstance(value := part.get(key), str) and value.removeprefix("torch.") in _OUT_TYPES:
                    return value.removeprefix("torch.")
    return ""


def _read_config(folder: Path) -> Mapping[str, Any]:
    try:
        with (folder / "config.json").open("rb") as file:
            value = json.loads(file.read(_LARGEST_CONFIG))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
