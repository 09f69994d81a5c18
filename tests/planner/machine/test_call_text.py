"""The text of a call (tier: no process)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperslab.kernels.memory_format import strides_in
from hyperslab.planner.calls import parse_call, read_call, write_call
from hyperslab.planner.records import Call, TensorSpec

NAMES = st.from_regex(r"aten\.[a-z_]{1,12}\.(default|out|int)", fullmatch=True)
DTYPES = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
)
EXTENTS = st.lists(st.integers(0, 300), max_size=5).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    shape = draw(EXTENTS)
    some = st.tuples(*(st.integers(0, 10**6) for _ in shape))
    strides = draw(st.just(strides_in(shape)) | some)
    return TensorSpec(shape, strides, draw(DTYPES))


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | DTYPES
    | st.sampled_from([torch.channels_last_3d, torch.strided, torch.device("cpu")])
    | st.sampled_from([torch.device("cuda", 1), 1 - 2j])
)
VALUES = st.recursive(PLAIN | specs(), lambda inner: st.lists(inner, max_size=4).map(tuple))
OPTIONS = st.dictionaries(st.sampled_from(["dtype", "memory_format", "out"]), VALUES, max_size=2)


@given(NAMES, st.lists(VALUES, max_size=5).map(tuple), OPTIONS)
def test_what_was_written_is_read(
    name: str, arguments: tuple[object, ...], options: dict[str, object]
) -> None:
    call = Call(name, arguments, tuple(options.items()))
    text = write_call(call)
    assert "\n" not in text
    assert read_call(text) == call
    assert write_call(read_call(text)) == text


@given(EXTENTS)
def test_contiguous_is_what_torch_calls_so(shape: tuple[int, ...]) -> None:
    assert strides_in(shape) == torch.empty(shape, device="meta").stride()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f(",
        "f",
        "aten.f.default(x)",
        "aten.f.default(f32[1.5])",
        "a.b(torch.load)",
        "a.b(f32[-1])",
        "a.b(f32[2,3](1))",
        "a.b(device('gpu'))",
        f"a.b({'-' * 100_000}1)",
    ],
)
def test_no_call(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no|not an argument"):
        parse_call(text)


def test_names_may_be_words_of_python() -> None:
    assert read_call("aten.random_.from(f32[2], 0, None)").name == "aten.random_.from"


def test_nothing_is_run() -> None:
    with pytest.raises(ValueError, match="not an argument"):
        read_call("aten.f.default(open('x', 'w'))")


def test_an_argument_without_text() -> None:
    with pytest.raises(ValueError, match="Generator"):
        write_call(Call("aten.f.default", (torch.Generator(),)))
    with pytest.raises(ValueError, match="float8_e5m2"):
        write_call(Call("aten.f.default", (TensorSpec((2,), (1,), torch.float8_e5m2),)))
