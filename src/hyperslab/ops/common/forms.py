"""One rule for several operators that differ in what they compute on a block, not in the scheme."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.tensor import register

Operator = Callable[..., Any]
"""A function of torch or a method of its tensors; torch does not say what it takes."""

Decorator = Callable[[Operator], Operator]

_SPACES = (torch, torch.Tensor, F, torch.special)


def forms_of(name: str) -> tuple[Operator, ...]:
    """An operator's forms: a function of torch, a method of a tensor, and so on.

    >>> forms_of("dropout1d") == (F.dropout1d,)
    True
    """
    found = (getattr(space, name, None) for space in _SPACES)
    return tuple(form for form in found if callable(form))


@functools.cache
def spatial_dims(operator: Operator) -> int:
    """How many spatial dims an operator is for, as its name says.

    >>> spatial_dims(F.conv_transpose2d)
    2
    """
    found = re.search(r"([123])d", operator.__name__)
    assert found is not None
    return int(found[1])


def register_each(
    *operators: str | Operator | tuple[Operator, ...],
    family: str,
    dims: Sequence[str] = (),
    lazy: bool = False,
    merged: bool = False,
) -> Decorator:
    """Decorator: the decorated function is the rule of several operators.

    Its first argument is the operator that was called, the others are the call's. So it says
    ``operator(x.local)`` where a rule of one operator would name it::

        @register_each("amax", "amin", family="reductions", dims=["dim"])
        def rule(operator, input, dim=(), keepdim=False): ...

    Args:
        operators: each a name (for all of its forms), a function, or a tuple of forms; the rule is
            given the first form.
        family: as in `hyperslab.register`.
        dims: as in `hyperslab.register`.
        lazy: as in `hyperslab.register`.
        merged: as in `hyperslab.register`.
    """

    def add(run: Operator) -> Operator:
        line = (run.__doc__ or "").strip().split("\n")[0]
        for operator in operators:
            forms = forms_of(operator) if isinstance(operator, str) else operator
            if not isinstance(forms, tuple):
                forms = (forms,)
            rule = functools.partial(run, forms[0])
            rule.__module__ = run.__module__  # by which the page of operators knows the file
            register(*forms, family=family, doc=line, dims=dims, lazy=lazy, merged=merged)(rule)
        return run

    return add
