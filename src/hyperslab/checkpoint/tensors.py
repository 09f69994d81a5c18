"""Writes and reads files of tensors, for any reader of safetensors.

They are written here and not by the library: so every byte is hashed on its way, other threads of
Python run meanwhile, and a file that is there, or a link, is never written through.

    8 bytes      length of the header
    header       JSON: name -> dtype, shape, data_offsets; spaces to a multiple of 8
    data         one tensor after the other, the widest type first
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hyperslab.checkpoint.files import write_new
from hyperslab.errors import CheckpointError
from hyperslab.util.documents import value_of_json

HEADER_LIMIT = 16 << 20
"""The header of a file of tensors has at most so much [B], enough for a hundred thousand."""

SUFFIX = ".safetensors"

CHUNK_BYTES = 4 << 20
"""Files are hashed and written in pieces of this size [B]."""

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

SPLIT_COMPLEX = "complex128"
"""The format has no such type: two float64 a number, and the header's metadata names the tensor."""


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor for which the format has no form, on all ranks alike."""
    if (partition := getattr(tensor, "partition", None)) is not None:
        raise CheckpointError(
            f"the tensor {name} is cut ({partition}): it cannot be written\n    what cut "
            "values are written into becomes cut; write x.full() into a buffer"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(
            f"the tensor {name} is sparse, quantized or has no values: it cannot be written"
        )
    if tensor.dtype not in DTYPE_CODES and tensor.dtype != torch.complex128:
        raise CheckpointError(
            f"the tensor {name} has the type {tensor.dtype}, which cannot be written"
        )


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Writes tensors of the CPU into a new file, as `write_new`."""
    header, plain = _layout(tensors)
    return write_new(path, chain([header], *map(_bytes_of, plain)))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Reads all tensors of a file to the CPU, in memory of their own."""
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as head:
            size = int.from_bytes(head.read(8), "little")
        if size > HEADER_LIMIT:
            raise ValueError(f"it claims a header of {size} bytes")
        with safe_open(path, framework="pt") as file:
            split = set(value_of_json((file.metadata() or {}).get(SPLIT_COMPLEX, "[]")))
            found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return {
            name: torch.view_as_complex(tensor) if name in split else tensor
            for name, tensor in found.items()
        }
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a file of tensors: {error}") from None


def _layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[torch.Tensor]]:
    """Return the header, and the tensors as they are stored, in their order."""
    split = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    metadata = {"format": "pt"} | ({SPLIT_COMPLEX: json.dumps(split)} if split else {})
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
    if len(text) > HEADER_LIMIT - 8:  # else nobody could read it
        raise CheckpointError(f"{len(tensors)} tensors are too many for one file")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, stored


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel() == 0:
        return
    flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    for begin in range(0, len(flat), CHUNK_BYTES):
        yield memoryview(flat[begin : begin + CHUNK_BYTES])
