"""Files of tensors that any reader of safetensors reads.

Written here and not by the library: so every byte is hashed on its way, other threads of Python run
meanwhile, and a file that is there, or a link, is never written through.

    8 bytes      length of the header
    header       JSON: name -> dtype, shape, data_offsets; spaces to a multiple of 8
    data         one tensor after the other, the widest type first
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hyperslab.errors import CheckpointError

SUFFIX = ".safetensors"

CHUNK_BYTES = 4 << 20
"""What is hashed and written at a time [B]."""

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

SPLIT = "complex128"
"""The format has no such type: two float64 a number, and the header's metadata names the tensor."""


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Refuse what the format has no form for.

    Raises:
        CheckpointError: names the tensor.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(f"the tensor {name} is not a dense one with values: it has no file")
    if tensor.dtype not in DTYPE_CODES and tensor.dtype != torch.complex128:
        raise CheckpointError(f"the tensor {name} is of {tensor.dtype}, which files do not hold")


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write tensors of the CPU into a new file, onto the disk; returns its SHA-256.

    Raises:
        OSError: there is something under this name, or it cannot be written.
    """
    header, plain = _layout(tensors)
    return write_new(path, chain([header], *map(_bytes_of, plain)))


def write_new(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Write a new file, onto the disk; returns its SHA-256.

    Raises:
        OSError: there is something under this name, or it cannot be written.
    """
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "wb", buffering=0) as file:
        for part in parts:
            digest.update(part)
            rest = memoryview(part)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(descriptor)
    return digest.hexdigest()


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file, on the CPU, in memory of their own.

    Raises:
        CheckpointError: it is no such file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            split = set(json.loads((file.metadata() or {}).get(SPLIT, "[]")))
            found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return {
            name: torch.view_as_complex(tensor) if name in split else tensor
            for name, tensor in found.items()
        }
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is no file of tensors: {error}") from None


def _layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[torch.Tensor]]:
    """The header, and the tensors as they are stored, in their order."""
    split = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    metadata = {"format": "pt"} | ({SPLIT: json.dumps(split)} if split else {})
    entries: dict[str, Any] = {"__metadata__": metadata}
    stored: list[torch.Tensor] = []
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name].resolve_conj().resolve_neg()
        plain = torch.view_as_real(tensor) if name in split else tensor
        begin = end
        end += plain.nbytes
        entries[name] = {
            "dtype": DTYPE_CODES[plain.dtype],
            "shape": list(plain.shape),
            "data_offsets": [begin, end],
        }
        stored.append(plain)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, stored


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel() == 0:
        return
    flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    for begin in range(0, len(flat), CHUNK_BYTES):
        yield memoryview(flat[begin : begin + CHUNK_BYTES])
