"""Values as JSON: what goes in comes out, and nothing else is made (tier: no process)."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch

from hyperslab.checkpoint.state import Tensors, decode_value, encode_value
from hyperslab.errors import CheckpointError

LISTED: list[Any] = []
LISTED.append(LISTED)


def there_and_back(value: object) -> object:
    tensors: Tensors = {}
    text = json.dumps(encode_value(value, "x", tensors), allow_nan=False)
    return decode_value(json.loads(text), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -(1 << 90),
        0.1,
        -0.0,
        float("-inf"),
        1e-320,
        complex(float("inf"), -0.0),
        "",
        "a\0\ud800 é",
        b"\0\xff",
        bytearray(b"ab"),
        [],
        (),
        (1, [2, (3,)]),
        {1, 2},
        frozenset({"a"}),
        {},
        {"a": {"b": (None,)}},
        {0: "a", "0": "b", (1, 2): "c", None: "d", True: "e"},
        {"$tensor": "x", "$": {"$tuple": []}},
        OrderedDict([("b", 1), ("a", 2)]),
        Counter("abca"),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda", 1),
    ],
    ids=repr,
)
def test_comes_back_as_it_was(value: object) -> None:
    again = there_and_back(value)
    assert type(again) is type(value)
    assert repr(again) == repr(value)


def test_not_a_number_comes_back() -> None:
    again = there_and_back([float("nan")])
    assert repr(again) == "[nan]"


def test_tensors_are_beside_under_names_that_say_where_they_were() -> None:
    value = {"a": [torch.ones(2), torch.zeros(())], "a/0": torch.arange(3), 7: torch.ones(1)}
    tensors: Tensors = {}
    again = decode_value(json.loads(json.dumps(encode_value(value, "", tensors))), tensors)
    assert sorted(tensors) == ["7", "a/0", "a/0+", "a/1"]
    assert again["a"][0] is value["a"][0]
    assert again["a/0"] is value["a/0"]
    assert again[7] is value[7]


@pytest.mark.parametrize("value", [object(), {"a": [lambda: 0]}, slice(1), range(3), LISTED])
def test_what_nobody_could_make_again_is_refused(value: object) -> None:
    with pytest.raises((CheckpointError, RecursionError), match=r"cannot hold|recursion"):
        encode_value(value, "position", {})


@pytest.mark.parametrize(
    "text",
    [
        '{"$import": "os"}',
        '{"$tuple": [], "$list": []}',
        '{"$tuple": 3}',
        '{"$tensor": "missing"}',
        '{"$tensor": []}',
        '{"$dtype": "load"}',
        '{"$dtype": "__class__"}',
        '{"$device": "x:y"}',
        '{"$bytes": "?"}',
        '{"$complex": ["1"]}',
        '{"$float": []}',
        '{"$dict": [[[], 1]]}',
        '{"$set": [[]]}',
        '{"$size": ["a"]}',
        '{"$dict": [1, 2]}',
        '{"$counter": {"a": 1}}',
    ],
)
def test_what_nobody_wrote_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode_value(json.loads(text), {})
