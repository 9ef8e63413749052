"""The only module that touches what PyTorch and Keras do not promise to keep.

Tested with the versions of :mod:`keras_remat.backends.versions`. From PyTorch: fake tensors, the
stack of dispatch modes, the node of autograd that runs, the profiler's memory events; from Keras:
the functions in which its PyTorch backend leaves tensors (generators of random numbers, branches,
Nadam's products), and the value of a variable. When a new version moves one of these, this is the
file to mend: one file, though long.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import torch
from keras.src.backend.common import global_state, name_scope
from keras.src.backend.torch import core as keras_core
from keras.src.backend.torch import random as keras_random
from keras.src.backend.torch.optimizers import torch_nadam
from keras.src.random.seed_generator import draw_seed
from keras.src.utils import traceback_utils
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from keras_remat.backends.keras_private import GLOBAL_SEED_GENERATOR, layers, replaced
from keras_remat.errors import UnsupportedModelError

#: Raised while recording if the step asks for a tensor's value, or for a shape that follows from
#: one.
ASKS_FOR_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
#: Texts in errors of a call with tensors of two devices; PyTorch 2.11 writes the first.
OF_TWO_DEVICES = (
    "two different devices",
    "tensors to be on the same device",
    "is not on the expected device",
)
#: Seeds of the generators that stand in while a step is recorded count from this number.
_MAGIC_SEED = 0x6B725F0000000
_MASK = 0xFFFFFFFF
#: Lines that PyTorch writes about a session of its profiler.
_OF_PROFILER = re.compile(rb"^USDT:|before the profiling started")

DispatchMode = TorchDispatchMode
without_modes = _disable_current_modes


def fake_mode() -> Any:
    """Returns a mode in which tensors have shapes and no memory. A number that is read from such a
    tensor is a symbol."""
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)


def is_fake(tensor: Any) -> bool:
    """Returns whether a tensor has no memory."""
    return isinstance(tensor, FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a key that differs between the storages of any two living tensors."""
    return int(tensor.untyped_storage()._cdata)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors with memory that a tensor consists of: itself, or a sparse one's
    parts."""
    if tensor.layout == torch.strided:
        return [tensor]
    return [tensor._indices(), tensor._values()] if tensor.layout == torch.sparse_coo else []


def share_hooks(tensor: torch.Tensor, stand_in: torch.Tensor) -> None:
    """Gives a weight's stand-in the hooks that autograd calls with the weight's gradient."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name, None)
        if hooks:
            setattr(stand_in, name, OrderedDict(hooks))


def in_backward() -> bool:
    """Returns whether autograd runs a node of its graph."""
    return torch._C._current_autograd_node() is not None


def callable_of(overload: Any) -> Callable[..., Any]:
    """Returns the function that runs an operator with the least Python around it."""
    run: Callable[..., Any] = overload._op
    return run


def schema_name(overload: Any) -> str:
    """Returns an operator's name, such as ``add_`` of ``aten::add_.Tensor``."""
    return str(overload._schema.name).partition("::")[2]


def overload_like(overload: Any, name: str) -> Any:
    """Returns the operator of another name with the same overload and arguments, whether they are
    written or not; ``None`` if there is none."""
    packet = getattr(getattr(torch.ops, overload.namespace), name, None)
    other = getattr(packet, overload._overloadname, None)
    if other is None:
        return None
    return other if _arguments(other) == _arguments(overload) else None


@functools.cache
def view_like(overload: Any) -> Any:
    """Returns the operator that returns a view such as another one makes of its first argument in
    place (``transpose`` for ``transpose_``); ``None`` if there is none."""
    if not (overload._schema.is_mutable and schema_name(overload).endswith("_")):
        return None
    if overload is torch.ops.aten.transpose_.default:
        return torch.ops.aten.transpose.int  # whose overload has another name
    other = overload_like(overload, schema_name(overload)[:-1])
    return other if other is not None and other.is_view else None


def _arguments(overload: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type).replace("(a!)", "")) for a in overload._schema.arguments]


def written_arguments(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that a call writes."""
    given = arguments_of(overload, args, kwargs)
    infos = {argument.name: argument.alias_info for argument in overload._schema.arguments}
    return [one for name, one in given.items() if infos[name] and infos[name].is_write]


def arguments_of(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, with defaults for those not given."""
    found = {}
    for at, argument in enumerate(overload._schema.arguments):
        if at < len(args) and not argument.kwarg_only:
            found[argument.name] = args[at]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


def placed(overload: Any, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call's arguments by place and by name, from all of them by name."""
    by_name = {a.name for a in overload._schema.arguments if a.kwarg_only}
    args = tuple(given for name, given in arguments.items() if name not in by_name)
    return args, {name: given for name, given in arguments.items() if name in by_name}


def convolution_kernel(images: Any, weights: Any, options: Sequence[Any]) -> str:
    """Returns the name of the kernels that run a convolution on a CPU with the current threads.

    The names of PyTorch's own begin with "Slow"; the others are oneDNN's.

    Args:
        images, weights: with shape and dtype.
        options: strides, paddings, dilations, whether it is transposed, output paddings, groups.
    """
    x, kernel = (torch.empty((), dtype=one.dtype).expand(one.shape) for one in (images, weights))
    if x.ndim == 3:  # as PyTorch does; it copies the images here, too
        x, kernel = x.unsqueeze(2), kernel.unsqueeze(2)
        one = ([1], [0], [1], None, [0], None)
        options = [o if i is None else [*i, *o] for i, o in zip(one, options, strict=True)]
    # oneDNN's for transposed ones has no name in Python
    return str(torch._C._select_conv_backend(x, kernel, None, *options).name)


def returns_list(overload: Any) -> bool:
    """Returns whether an operator returns a list of tensors."""
    returns = overload._schema.returns
    return len(returns) == 1 and str(returns[0].type).startswith("List")


def python_of(expression: Any) -> str:
    """Returns the text of a number that is read from tensors, to the last bit.

    Raises:
        UnsupportedModelError: it takes more than one operation on one such number.
    """
    if expression.is_Symbol:
        return str(expression)
    if (expression.is_Mul or expression.is_Add) and len(expression.args) == 2:
        number, symbol = expression.args
        if number.is_number and symbol.is_Symbol:
            exact = int(number) if number.is_Integer else float(number)
            return f"{exact!r} {'*' if expression.is_Mul else '+'} {symbol}"
    raise UnsupportedModelError(
        f"The step computes {expression} in Python from numbers that it reads of tensors. Compute "
        "it with tensors."
    )


# -------------------------------------------------------------------- Keras


def global_seed_state() -> list[Any]:
    """Returns the variable of Keras's global seed generator, if there is one."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return [] if generator is None else [generator.state]


class Seeds:
    """Holds the seeds of generators that are made while a step is recorded.

    Keras seeds a ``torch.Generator`` with the number in a tensor. While recording, the generator
    gets a number that stands for the tensor, so a call that draws from it can be given that tensor.
    """

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []

    def generator(self, seed: Any) -> torch.Generator | None:
        """Stands in for Keras's ``torch_seed_generator``."""
        device = keras_core.get_device()
        if device == "meta":
            return None
        first, second = draw_seed(seed)
        made = torch.Generator(device=device)
        made.manual_seed(_MAGIC_SEED + len(self._tensors))
        self._tensors.append(first + second)
        return made

    def tensor(self, generator: torch.Generator) -> torch.Tensor | None:
        """Returns the tensor with a generator's seed; ``None`` for any other generator."""
        at = generator.initial_seed() - _MAGIC_SEED
        return self._tensors[at] if 0 <= at < len(self._tensors) else None


def seeded(seed: torch.Tensor, device: torch.device) -> torch.Generator:
    """Returns the generator that Keras makes of a seed."""
    made = torch.Generator(device=device)
    made.manual_seed(int(seed) & _MASK)
    return made


class _Divisor:
    """Stands for the tensor that Nadam subtracts from one: the number is read when a step runs."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def __rsub__(self, other: float) -> Any:
        return (other - self._tensor).item()


class _NadamCore:
    """Keras's core for Nadam, which reads two numbers of tensors."""

    def __getattr__(self, name: str) -> Any:
        return getattr(keras_core, name)

    @staticmethod
    def convert_to_numpy(tensor: torch.Tensor) -> _Divisor:
        """Returns a stand-in from which a number of the tensor is read later."""
        return _Divisor(tensor)


@contextmanager
def _own_tracebacks() -> Iterator[None]:
    """Keeps Keras from rewriting tracebacks inside, because their lines are shown."""
    before = traceback_utils.is_traceback_filtering_enabled()
    global_state.set_global_attribute("traceback_filtering", False)
    try:
        yield
    finally:
        global_state.set_global_attribute("traceback_filtering", before)


@contextmanager
def recordable(seeds: Seeds, cond: Callable[..., Any]) -> Iterator[None]:
    """Makes Keras leave decisions that depend on a tensor's value to the recorder.

    It also refuses the weights of a layer that the step would build.

    Args:
        seeds: makes generators.
        cond: stands in for ``keras.ops.cond``.
    """
    with ExitStack() as stack:
        stack.enter_context(_own_tracebacks())
        stack.enter_context(replaced(keras_random, "torch_seed_generator", seeds.generator))
        stack.enter_context(replaced(keras_core, "cond", cond))
        stack.enter_context(replaced(torch_nadam, "core", _NadamCore()))
        stack.enter_context(replaced(keras.layers.Layer, "add_weight", _refuse_weight))
        yield


def _refuse_weight(layer: Any, *_: Any, **__: Any) -> None:
    """Raises in the place of ``add_weight``, before anything is kept. A layer cannot be built again
    once it holds weights without memory."""
    raise UnsupportedModelError(
        f"The layer {layer.name!r} has no weights yet, and the step would make them when it first "
        "runs. Call it on a batch, or build it, before fit."
    )


def scope() -> str:
    """Returns the layers that are being called, the outermost first, as a path."""
    return str(name_scope.current_path())


def is_symbolic_call() -> bool:
    """Returns whether Keras infers shapes and computes nothing."""
    return str(keras_core.get_device()) == "meta"


def device() -> torch.device:
    """Returns the device that Keras puts tensors on."""
    return torch.device(keras_core.get_device())


def value_of(variable: Any) -> torch.Tensor | None:
    """Returns the tensor of a Keras variable."""
    value: torch.Tensor | None = variable._value
    return value


def set_value(variable: Any, tensor: torch.Tensor) -> None:
    """Gives a Keras variable another tensor."""
    variable._value = tensor


def modules(model: Any) -> list[torch.nn.Module]:
    """Returns all torch modules of a model, including those of layers that a functional model does
    not register."""
    return list(dict.fromkeys(module for layer in layers(model) for module in layer.modules()))


# -------------------------------------------------------------------- memory events


#: What each of our running sessions has noted, the outermost first. PyTorch has one profiler for a
#: whole process.
_sessions: list[list[tuple[int, int]]] = []


def profiler_runs() -> bool:
    """Returns whether a profiler session of somebody else runs: there is one at a time."""
    return bool(torch.autograd._profiler_enabled()) and not _sessions


def notes_memory() -> bool:
    """Returns whether a session of :func:`memory_events` is under way."""
    return bool(_sessions)


@contextmanager
def memory_events() -> Iterator[list[tuple[int, int]]]:
    """Notes the CPU's allocations inside, including those of kernels for themselves.

    The list that it yields is complete afterwards. Each event holds the time in nanoseconds, and
    the bytes that were taken, or given back as a negative number, in order of time. No ops are
    noted, so it costs next to nothing while it runs. A session inside another notes for both.
    """
    noted: list[tuple[int, int]] = []
    with _without_profiler_lines():
        if _sessions:
            _end_session()
        else:
            _free_what_was_there()
        _sessions.append(noted)
        _begin_session()
    try:
        yield noted
    finally:
        with _without_profiler_lines():
            _end_session()
            _sessions.pop()
            if _sessions:
                _begin_session()


def _end_session() -> None:
    """Ends the profiler's session, and adds its events to all of our running sessions."""
    events = torch.autograd._disable_profiler().events()
    memory = [event for event in events if event.name() == "[memory]"]
    for noted in _sessions:
        noted.extend(sorted((event.start_ns(), event.nbytes()) for event in memory))


def _begin_session() -> None:
    """Begins a session of the profiler that notes memory, but no ops."""
    profiler = torch._C._profiler
    options = profiler._ExperimentalConfig()
    config = profiler.ProfilerConfig(
        profiler.ProfilerState.KINETO, False, True, False, False, False, options
    )
    activities = {torch.profiler.ProfilerActivity.CPU}
    torch.autograd._prepare_profiler(config, activities)
    torch.autograd._enable_profiler(
        config, activities, {profiler.RecordScope.LITE_INTERPRETER}
    )  # a scope in which nothing runs


@functools.cache
def _free_what_was_there() -> None:
    """Frees memory that a session finds, so that PyTorch prints its warning about such memory here.
    It prints it only once."""
    before = torch.empty(1)
    _begin_session()
    del before
    torch.autograd._disable_profiler()


@contextmanager
def _without_profiler_lines() -> Iterator[None]:
    """Keeps PyTorch's lines about a profiler session off the terminal. Other lines that are written
    meanwhile come afterwards."""
    with ExitStack() as files:
        try:
            written = files.enter_context(tempfile.TemporaryFile())
            terminal = os.dup(2)
        except OSError:  # there is no terminal, or no file can be made
            yield
            return
        if sys.stderr is not None:
            sys.stderr.flush()
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            written.seek(0)
            for line in written:
                if not _OF_PROFILER.search(line):
                    os.write(2, line)


def cuda_in_use_bytes() -> int:
    """Returns the bytes that the CUDA allocator has handed out, at little cost."""
    statistics = torch._C._cuda_memoryStats(torch.cuda.current_device())
    return int(statistics["allocated_bytes"]["all"]["current"])


def cuda_peak_bytes() -> int:
    """Returns the most bytes that the CUDA allocator had handed out since the last call."""
    at = torch.cuda.current_device()
    peak = int(torch._C._cuda_memoryStats(at)["allocated_bytes"]["all"]["peak"])
    torch._C._cuda_resetPeakMemoryStats(at)
    return peak
