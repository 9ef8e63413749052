"""Splits calls over lists of tensors into calls over shorter lists.

An optimizer updates all weights by a dozen calls, each of which makes a tensor for every weight. As
long as such a call is one op, no schedule can hold less than several copies of all weights. In
chunks, a gradient dies once its own weights are updated. The kernels, and so the bits, are the
same. A chunk is as large as the largest tensor, so that there are few of them: on a GPU each is
some kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from keras_remat.backends.torch import private
from keras_remat.backends.torch.recorder import Call, Layout, Ref

#: Calls over lists that are not elementwise: their computation depends on the list.
_NOT_ELEMENTWISE = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


def chunks(call: Call, layouts: Sequence[Layout], storage_bytes: Sequence[int]) -> list[Call]:
    """Returns the chunks of a call over lists; the call itself if it cannot be split.

    Args:
        layouts: layout of every tensor, by its number.
        storage_bytes: bytes of every storage.
    """
    name = private.schema_name(call.operator)
    lists = [one for one in call.args if _is_list_of_tensors(one)]
    if not name.startswith("_foreach_") or name in _NOT_ELEMENTWISE or not lists:
        return [call]
    length = len(lists[0])
    fits = all(len(one) == length for one in call.args if isinstance(one, (list, tuple)))
    if not fits or any(len(of) not in (0, length) for of in (call.outputs, call.writes)):
        return [call]
    sizes = [storage_bytes[layouts[ref.number].storage] for ref in lists[0]]
    ends = _ends(sizes)
    if len(ends) == 2:
        return [call]
    return [_part(call, slice(start, stop)) for start, stop in pairwise(ends)]


def _is_list_of_tensors(argument: Any) -> bool:
    is_list = isinstance(argument, (list, tuple)) and len(argument) > 0
    return is_list and all(isinstance(one, Ref) for one in argument)


def _ends(sizes: Sequence[int]) -> list[int]:
    """Returns the borders of chunks that are no larger than the largest tensor."""
    most, held, ends = max(sizes), 0, [0]
    for at, size in enumerate(sizes):
        if held and held + size > most:
            ends.append(at)
            held = 0
        held += size
    return [*ends, len(sizes)]


def _part(call: Call, part: slice) -> Call:
    def cut(argument: Any) -> Any:
        return argument[part] if isinstance(argument, (list, tuple)) else argument

    args = tuple(map(cut, call.args))
    return replace(call, args=args, outputs=call.outputs[part], writes=call.writes[part])
