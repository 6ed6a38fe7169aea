"""Let a script that was written for CUDA and NCCL run on CPUs with gloo, unchanged.

A device "cuda" becomes "cpu" wherever a function of torch gets one, and `torch.cuda` answers as if there were one GPU
for each rank. Whatever the stand-in lacks raises an error; the report says so and does not blame the script.
"""
# ruff: noqa: ANN401  (it passes on the arguments of functions of any kind)

import collections
import functools
import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .settings import Settings
from .trail import note, trail, user_line

CPU = torch.device("cpu")
WAITS = {"item", "cpu", "numpy", "tolist", "__bool__", "__float__", "__int__", "__repr__", "__format__", "nonzero"}
"""functions that make the CPU wait until a GPU has computed the values"""
MEMORY = 80 << 30


def is_cuda(value: object) -> bool:
    """Return whether ``value`` names a GPU."""
    kind = type(value)
    return (kind is torch.device and value.type == "cuda") or (kind is str and value.startswith("cuda"))  # type: ignore[attr-defined]


class Placed:
    """Whether the script has put tensors on a GPU, and whether it takes them to the CPU before it saves them."""

    def __init__(self) -> None:
        self.on_gpu = self.to_cpu = False

    def note(self, name: str, args: tuple, kwargs: dict) -> None:
        """Note what a function of torch does with its tensor."""
        device = kwargs.get("device", args[1] if name == "to" and len(args) > 1 else None)
        self.on_gpu |= name == "cuda" or any(is_cuda(value) for value in (device, *args))
        if name == "cpu" or (name == "to" and str(device) == "cpu"):
            by_user = trail.kind_of(sys._getframe(3).f_code.co_filename)  # and not an optimizer that loads its state
            self.to_cpu |= bool(by_user and args) and isinstance(args[0], torch.Tensor) and args[0].numel() > 1


placed = Placed()


def mark_on_cpu(batch: object) -> None:
    """Remember that the tensors of a batch are on the CPU, until the script moves them to a GPU."""
    for leaf in tree_leaves(batch):
        if type(leaf) is torch.Tensor:
            leaf.__dict__["_rankdoctor_on_cpu"] = True


def is_on_cpu(value: object) -> bool:
    """Return whether a tensor comes from a loader, or was computed from such ones alone, and was not moved."""
    return isinstance(value, torch.Tensor) and "_rankdoctor_on_cpu" in value.__dict__


class Profiling:
    """The trace that a profiler records now."""

    began: ClassVar[tuple[str, int] | None] = None
    """the line that began it, and the updates before"""

    @classmethod
    def note_end(cls) -> None:
        """Log how many updates are in a trace, which ends here."""
        if cls.began:
            note("profiled", at=cls.began[0], updates=trail.step - cls.began[1])
        cls.began = None


class Asked:
    """What the script has asked of its GPUs."""

    count = False
    """whether it has asked how many there are"""
    gpus = 0
    noted: ClassVar[set[tuple[str, int]]] = set()


def visible_gpus() -> int:
    """Return how many GPUs the script sees; it may choose some itself, in CUDA_VISIBLE_DEVICES."""
    chosen = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return min(len(chosen), Asked.gpus) if chosen else Asked.gpus


def see_index(device: Any, by_user: bool = False) -> None:
    """Log the number of a GPU that the script uses, once for each line; there may be no such GPU."""
    index = device if type(device) is int else device.index if isinstance(device, torch.device) else None
    if type(device) is str and device.rpartition(":")[2].isdecimal():
        index = int(device.rpartition(":")[2])
    if index is None or not Asked.gpus or (not by_user and index < visible_gpus()):
        return
    at = user_line()
    if (at, index) not in Asked.noted and len(Asked.noted) < 20:
        Asked.noted.add((at, index))
        note("device", at=at, index=index, gpus=visible_gpus(), asked=Asked.count)


def dump_snapshot(filename: Any = "dump_snapshot.pickle", *_: object, **__: object) -> None:
    """Write a history of memory without entries, as there is no GPU."""
    with open(filename, "wb") as file:
        pickle.dump({"segments": [], "device_traces": []}, file)


class ToCpu(TorchFunctionMode):
    """Replaces GPUs in the arguments of all functions of torch."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        on_cpu = bool(tensors) and all(is_on_cpu(tensor) for tensor in tensors)
        if name in WAITS and not on_cpu:
            note_wait(name, args)
        if on_cpu:
            is_moved = name == "cuda" or any(is_cuda(value) for value in (*args[1:], kwargs.get("device")))
            is_moved |= name == "to" and len(args) > 1 and type(args[1]) is int
            out = self.on_cpu(func, name, args, kwargs)
            if isinstance(out, torch.Tensor):
                out.__dict__.pop("_rankdoctor_on_cpu", None)
                if not is_moved:
                    out.__dict__["_rankdoctor_on_cpu"] = True
            return out
        return self.on_cpu(func, name, args, kwargs)

    def on_cpu(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function of torch with the CPU in place of GPUs."""
        placed.note(name, args, kwargs)
        for value in (kwargs.get("device"), *args[1:2]):
            if is_cuda(value) or (name in ("cuda", "to") and type(value) is int):
                see_index(value)
        if name in ("cuda", "pin_memory") and args and isinstance(args[0], torch.Tensor):
            return args[0]
        device = kwargs.get("device")
        if device is not None and (is_cuda(device) or type(device) is int):
            kwargs = kwargs | {"device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        if name == "to" and len(args) > 1 and type(args[1]) is int:
            args = (args[0], CPU, *args[2:])
        elif any(is_cuda(value) for value in args):
            args = tuple(CPU if is_cuda(value) else value for value in args)
        return func(*args, **kwargs)


class SeeWaits(TorchFunctionMode):
    """Counts the operations that make the CPU wait, where CUDA itself runs."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITS and args and isinstance(args[0], torch.Tensor) and args[0].is_cuda:
            note_wait(name, args)
        return func(*args, **(kwargs or {}))


def note_wait(name: str, args: tuple) -> None:
    """Count, with its line, an operation of the training loop that would make the CPU wait for a GPU."""
    from .observe.common import optimizers, state

    busy = state.observing or state.loading or state.depth or state.in_backward
    if not state.training or busy or not trail.kind_of(sys._getframe(2).f_code.co_filename):
        return
    if not args or not isinstance(args[0], torch.Tensor) or type(args[0]) is nn.Parameter:
        return
    if args[0].numel() == 1 or args[0].requires_grad:  # others may be on the CPU in truth, such as indices
        key = f"{user_line()} {name.strip('_')}"
        optimizers.waits[key] = optimizers.waits.get(key, 0) + 1


class Generator(torch.Generator):
    """A source of random numbers, on the CPU whatever the device."""

    def __new__(cls, device: object = None) -> "Generator":
        """Return a new one."""
        return super().__new__(cls, CPU)


class Nothing:
    """A substitute for a stream, an event or a graph: accepts all calls, and does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def elapsed_time(self, _: object) -> float:
        """Return a time in milliseconds."""
        return 1.0

    def query(self) -> bool:
        """Return that all is done."""
        return True

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def changed(target: Any, name: str, change: Callable[[tuple, dict], tuple[tuple, dict]], *others: Any) -> None:
    """Let ``target.name``, and the same name in ``others``, get the arguments that ``change`` makes."""
    own = getattr(target, name)

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = change(args, dict(kwargs))
        return own(*args, **kwargs)

    for place in (target, *others):
        setattr(place, name, call)


def without(*names: str, keep: int | None = None) -> Callable[[tuple, dict], tuple[tuple, dict]]:
    """Return a change that leaves out named arguments, and positional ones after the first ``keep``."""
    return lambda args, kwargs: (args[:keep], {key: value for key, value in kwargs.items() if key not in names})


def install(config: Settings) -> None:
    """Replace what needs a GPU."""
    _compile_nothing()
    _profile_quietly(config.standin)
    if config.null:
        SeeWaits().__enter__()
    if not config.standin:
        return
    torch.Generator = Generator
    Asked.gpus = config.gpus
    _answer_as_gpu(config.gpus)
    _compute_on_cpu()
    _wrap_models()
    if dist.is_available():
        _communicate_with_gloo()
    ToCpu().__enter__()


def _compile_nothing() -> None:
    def compile_nothing(model: Any = None, **_: object) -> Any:
        note("compiled", at=user_line())
        if isinstance(model, nn.Module):  # what a compiled model has, but no submodule of itself
            object.__setattr__(model, "_orig_mod", model)
        return compile_nothing if model is None else model

    torch.compile = compile_nothing
    nn.Module.compile = lambda *_, **__: None


def _profile_quietly(on_cpu: bool) -> None:
    """Leave out of profilers what there is not: kernels on CPUs. Stacks end the process here (SIGSEGV)."""
    import torch.profiler.profiler as profiler

    own_init = profiler._KinetoProfile.__init__

    @functools.wraps(own_init)
    def init(self: Any, *, activities: Any = None, with_stack: bool = False, **kwargs: Any) -> None:
        note("profiler", at=user_line(), stacks=with_stack)
        if on_cpu:
            activities = [profiler.ProfilerActivity.CPU]
        own_init(self, activities=activities, with_stack=False, **kwargs)

    profiler._KinetoProfile.__init__ = init
    own_start, own_stop = profiler._KinetoProfile.start_trace, profiler._KinetoProfile.stop_trace

    @functools.wraps(own_start)
    def start(self: Any) -> None:
        Profiling.began = user_line(), trail.step
        own_start(self)

    @functools.wraps(own_stop)
    def stop(self: Any) -> None:
        Profiling.note_end()
        own_stop(self)

    profiler._KinetoProfile.start_trace, profiler._KinetoProfile.stop_trace = start, stop

    def without_gpu(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        gone = ("use_cuda", "use_device") if on_cpu else ()
        return args, {key: value for key, value in kwargs.items() if key not in gone} | {"with_stack": False}

    changed(torch.autograd.profiler.profile, "__init__", without_gpu)


def _answer_as_gpu(gpus: int) -> None:
    cuda, accelerator = torch.cuda, torch.accelerator
    mine = {"device": int(os.environ.get("LOCAL_RANK", 0))}

    def set_device(device: Any) -> None:
        see_index(device, by_user=True)
        mine["device"] = device if isinstance(device, int) else torch.device(device).index or 0

    def device_count() -> int:
        Asked.count |= trail.user_calls_library()
        return visible_gpus()

    def properties(device: object = 0) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name="stand-in",
            total_memory=MEMORY,
            major=9,
            minor=0,
            multi_processor_count=132,
            gcnArchName="",
            uuid=f"stand-in {device}",
        )

    answers: dict[str, Any] = {
        "is_available": True,
        "is_bf16_supported": True,
        "get_device_name": "stand-in",
        "get_device_capability": (9, 0),
        "mem_get_info": (MEMORY, MEMORY),
        "memory_summary": "",
        "utilization": 0,
        "is_current_stream_capturing": False,
        "is_initialized": True,
        "get_arch_list": ["sm_90"],
    }
    answers |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0)
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    for name in [
        "synchronize",
        "empty_cache",
        "ipc_collect",
        "reset_peak_memory_stats",
        "init",
        "set_per_process_memory_fraction",
        "reset_max_memory_allocated",
        "reset_accumulated_memory_stats",
        "reset_max_memory_cached",
        # The numbers of "GPU" tensors come from the generator of the CPU, which the script has seeded on its own.
        "manual_seed",
        "manual_seed_all",
        "seed",
        "seed_all",
    ]:
        setattr(cuda, name, lambda *_, **__: None)  # one function each: torch._dynamo keeps rules by function
    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
        setattr(cuda.random, name, getattr(cuda, name))  # torch.manual_seed and torch.seed call these
    cuda.device_count = device_count
    cuda.memory._record_memory_history = lambda *_, **__: None
    cuda.memory._snapshot = cuda.memory.memory_snapshot = cuda.memory_snapshot = lambda *_, **__: {"segments": []}
    cuda.memory._dump_snapshot = dump_snapshot
    cuda.cudart, cuda.check_error = Nothing, lambda _: None
    cuda.profiler.start = cuda.profiler.stop = lambda: None
    torch.autograd.profiler.emit_nvtx = Nothing
    cuda.initial_seed = cuda.random.initial_seed = torch.initial_seed
    cuda.memory_stats = lambda *_, **__: collections.defaultdict(int)
    cuda.get_device_properties = properties
    cuda.set_device = set_device
    accelerator.set_device_index = lambda device: set_device(device)
    cuda.current_device = lambda: mine["device"]
    accelerator.current_device_index = lambda: mine["device"]
    accelerator.is_available = lambda: True
    accelerator.device_count = device_count
    accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    accelerator.synchronize = lambda *_, **__: None
    accelerator.empty_cache = lambda *_, **__: None
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]

    def set_rng_state(new: torch.Tensor, *_: object, **__: object) -> None:
        if new.numel() == torch.get_rng_state().numel():  # it was got here, where "GPU" tensors have CPU numbers
            torch.default_generator.set_state(new)

    cuda.set_rng_state = cuda.random.set_rng_state = set_rng_state
    cuda.set_rng_state_all = cuda.random.set_rng_state_all = lambda states: set_rng_state(states[0])
    for name in ("device", "stream", "Stream", "Event", "CUDAGraph", "current_stream", "default_stream", "graph"):
        setattr(cuda, name, Nothing)
    accelerator.current_stream = Nothing


def _compute_on_cpu() -> None:
    own_autocast = torch.amp.autocast_mode.autocast.__init__

    def autocast(
        self: Any,
        device_type: str = "cuda",
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        self._rankdoctor_half = device_type == "cuda" and enabled and dtype in (None, torch.float16)
        if device_type == "cuda":  # bf16 for fp16, in which the backward of a convolution takes 200 times as long
            device_type, dtype = "cpu", torch.bfloat16 if dtype in (None, torch.float16) else dtype
        own_autocast(self, device_type, dtype, enabled, cache_enabled)

    torch.amp.autocast_mode.autocast.__init__ = autocast
    changed(
        torch.amp.GradScaler,
        "__init__",
        lambda args, kwargs: (
            (args[0], "cpu", *args[2:]),
            {key: value for key, value in kwargs.items() if key != "device"},
        ),
    )
    changed(torch, "load", lambda args, kwargs: (args[:1], kwargs | {"map_location": "cpu"}), torch.serialization)


def _wrap_models() -> None:
    parallel = nn.parallel
    changed(parallel.DistributedDataParallel, "__init__", without("device_ids", "output_device", keep=2))
    own_init = parallel.DataParallel.__init__

    def init(self: nn.DataParallel, module: nn.Module, *_: object, **__: object) -> None:
        own_init(self, module)
        self.device_ids, self.module = [], module  # without devices it calls the module itself

    parallel.DataParallel.__init__ = init

    parallel.DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None  # it refuses CPUs, too
    _synchronize_norms()


def _synchronize_norms() -> None:
    """Let SyncBatchNorm compute on CPUs: mean and variance over all ranks, also in backward."""
    own_all_reduce = dist.all_reduce  # as it was before it is observed: NCCL would do this inside of the layer

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
            context.group, out = group, values.clone()
            own_all_reduce(out, group=group)
            return out

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            gradient = gradient.contiguous().clone()
            own_all_reduce(gradient, group=context.group)
            return gradient, None

    def forward(self: nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1
        if not self.training or not several:
            return own_forward(self, input)
        from .observe.models import models

        models.random_layers += 1  # it computes with statistics of the batch
        channels, shape = input.shape[1], [1, -1] + [1] * (input.dim() - 2)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        values = input.double()
        count = values.new_tensor([input.numel() / channels])
        sums = Summed.apply(torch.cat([values.sum(dims), (values * values).sum(dims), count]), self.process_group)
        mean, number = sums[:channels] / sums[-1], float(sums[-1].detach())
        variance = sums[channels:-1] / sums[-1] - mean * mean
        if self.track_running_stats and self.running_mean is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            with torch.no_grad():
                unbiased = variance * number / max(number - 1, 1)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        scale = (variance + self.eps).rsqrt().view(shape)
        out = ((values - mean.view(shape)) * scale).to(input.dtype)
        return out if self.weight is None else out * self.weight.view(shape) + self.bias.view(shape)

    own_forward = nn.modules.batchnorm._BatchNorm.forward
    nn.SyncBatchNorm.forward = forward


def _communicate_with_gloo() -> None:
    c10d = dist.distributed_c10d
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True

    def gloo(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device_id", "pg_options")}
        return (("gloo", *args[1:]), kwargs) if args else ((), kwargs | {"backend": "gloo"})

    import torch.distributed.device_mesh as device_mesh

    changed(dist, "init_process_group", gloo, c10d, device_mesh)
    changed(dist, "new_group", without("backend", "pg_options", "device_id", keep=2), c10d, device_mesh)
    changed(dist, "barrier", without("device_ids", keep=2), c10d)
    _average_with_gloo(c10d)

    def on_cpu(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return (("cpu", *args[1:]), kwargs) if args else (args, kwargs | {"device_type": "cpu"})

    changed(dist, "init_device_mesh", on_cpu, device_mesh)


def _average_with_gloo(c10d: Any) -> None:
    """Gloo has no ReduceOp.AVG."""
    own = dist.all_reduce

    @functools.wraps(own)
    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op != dist.ReduceOp.AVG:
            return own(tensor, op, group, async_op)
        own(tensor, dist.ReduceOp.SUM, group)
        tensor.div_(dist.get_world_size(group))
        return Nothing() if async_op else None

    dist.all_reduce = c10d.all_reduce = all_reduce
