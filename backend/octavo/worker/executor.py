"""The in-process executor: step plans in, step results out. The only thing of the worker the engine sees."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from torch import Tensor

from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError, StepFailed
from octavo.models.model_config import ModelConfig
from octavo.models.registry import build_model
from octavo.protocol import BlockFile, SequenceResult, StepPlan, StepResult
from octavo.quant.base import Scheme, Unquantised
from octavo.quant.int8 import Int8
from octavo.weights.loader import Checkpoint, load_weights, open_checkpoint
from octavo.worker.cores import usable_cores
from octavo.worker.disk_pool import open_disk_pool
from octavo.worker.disk_tier import DiskTier
from octavo.worker.gpu import check_gpu, open_gpu
from octavo.worker.host_pool import HostPool, host_size
from octavo.worker.kv_cache import KVCache, block_bytes, cache_size
from octavo.worker.memory import readable
from octavo.worker.model_input import Step
from octavo.worker.model_runner import open_runner, run_largest_step
from octavo.worker.pooling import Pooler, PoolPart
from octavo.worker.rows import Rows
from octavo.worker.sampler import Drawn, Samples
from octavo_kernels import ops

log = logging.getLogger("octavo")

# By `quantization`. All else is unquantised, a GGUF file too once it is read.
_SCHEMES: dict[str | None, Scheme] = {"int8": Int8()}

# By `kv_cache_dtype`. All else is the model's own type.
_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}

_UNUSABLE = "the model gave no usable probabilities for this sequence's next token (a NaN, or none allowed)"


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step whose tokens the device may still be at work on."""

    plan: StepPlan
    step: Step
    pool_parts: Sequence[PoolPart]
    hidden: Tensor  # [R + P + E, H]
    drawn: Drawn | None
    forward_s: float
    sample_s: float
    swap_s: float


class LocalExecutor:
    """Loads the model, sizes the cache, and runs steps. Implements `Executor`.

    A GPU gets its step in `submit`, and `collect` waits for it. On a CPU a step runs in `collect`, on the
    calling thread. A thread of its own was measured there and brought nothing: the forward takes all cores,
    and what could overlap is 0.2 ms of 33 (32 sequences, 2 cores).
    After a step that failed it goes on: the scheduler drops the step's sequences with its next plan. Only a
    GPU that refuses all further work ends it, with an `OctavoError` that is no `StepFailed`.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, model_config: ModelConfig) -> None:
        """`config` is complete (`for_model`). Sets how many threads the native kernels and torch use, in the
        whole process.

        Raises `ConfigError` (no such device, one that cannot compute this or has no room for it, or a cache
        too small for one sequence) and `WeightsError`.
        """
        device = resolve_device(config.device)
        check_gpu(config, model_config, device)
        self._gpu = open_gpu(device)
        try:
            with self._on_device():
                self._open(config, checkpoint, model_config, device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the GPU has no room for the weights and the largest step: {error}; lower "
                "max_num_batched_tokens or max_num_seqs, or have others leave it more"
            ) from error

    def _open(
        self, config: EngineConfig, checkpoint: Checkpoint, model_config: ModelConfig, device: torch.device
    ) -> None:
        dtype = resolve_dtype(config.dtype, model_config.torch_dtype, device)
        kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
        num_threads = _num_threads(config.num_threads)
        torch.set_num_threads(num_threads)  # for loading
        model = build_model(model_config, dtype, device, scheme=resolve_scheme(config.quantization))
        load_weights(model.weight_map(), checkpoint)
        model.finish_loading()
        ops.set_num_threads(num_threads, dtype)

        def cache_of(num_blocks: int) -> KVCache:
            return KVCache(model_config, num_blocks, config.block_size, kv_dtype, device)

        def profile() -> int:
            with torch.inference_mode():
                return run_largest_step(model, cache_of, config, self._gpu)

        self.block_bytes = block_bytes(model_config, config.block_size, kv_dtype)
        size = cache_size(config, self.block_bytes, device, profile)
        self.num_blocks = size.num_blocks
        self.kv_limit = size.limit
        try:
            cache = cache_of(size.num_blocks)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"the KV cache of {readable(size.num_blocks * self.block_bytes)} ({size.limit}) cannot be "
                f"allocated: {error}; lower kv_cache_memory_bytes or num_gpu_blocks_override"
            ) from error
        host = host_size(config, self.block_bytes, device)
        self.num_host_blocks = host.num_blocks
        self.host_limit = host.limit
        pool = HostPool(cache, host.num_blocks) if host.num_blocks else None
        with torch.inference_mode():
            self._runner = open_runner(model, cache, config, self._gpu, pool)
        self._disk = open_disk_pool(config, checkpoint, cache, self.block_bytes, dtype, kv_dtype, device)
        self._pooler = Pooler()
        self._rows = Rows()
        self._submitted: StepPlan | _Begun | None = None

    @property
    def directory(self) -> DiskTier | None:
        """Of the prefix cache. `load`, `has` and `counts` are for any thread."""
        return None if self._disk is None else self._disk.tier

    def submit(self, plan: StepPlan) -> None:
        """On a CPU only remembers the step."""
        assert self._submitted is None, "a step is in flight already"
        if self._gpu is None:
            self._submitted = plan
        else:
            with self._step(plan):
                self._submitted = self._begin(plan)

    def collect(self) -> StepResult:
        submitted, self._submitted = self._submitted, None
        assert submitted is not None, "no step was submitted"
        if isinstance(submitted, _Begun):
            with self._step(submitted.plan):
                return self._finish(submitted)
        with self._step(submitted):
            return self._finish(self._begin(submitted))

    def close(self, keep: Iterable[BlockFile] = (), discards: Iterable[str] = ()) -> None:
        """Lets go of the model and the cache."""
        with self._on_device():
            if self._disk is not None:
                self._disk.close(keep, discards)
            del self._disk, self._runner, self._rows, self._pooler

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """What is done inside is queued on the GPU's stream, if there is a GPU."""
        if self._gpu is None:
            yield
        else:
            with self._gpu.stream():
                yield

    @contextmanager
    def _step(self, plan: StepPlan) -> Iterator[None]:
        try:
            with self._on_device(), torch.inference_mode():
                yield
        except Exception as error:
            reason = f"step {plan.step_id} failed: {type(error).__name__}: {error}"
            if self._gpu is not None and self._gpu.is_lost():
                raise OctavoError(f"the GPU is lost to this process; {reason}") from error
            raise StepFailed(reason) from error

    def _begin(self, plan: StepPlan) -> _Begun:
        """Waits for no device, unless the plan swaps."""
        begin = time.perf_counter()
        self._rows.apply(plan)
        moves_begin = time.perf_counter()
        if self._disk is not None:
            self._disk.save(plan)
        swap_s = self._runner.move_blocks(plan)
        if self._disk is not None:
            self._disk.load(plan)
        moves_s = time.perf_counter() - moves_begin
        self._pooler.apply(plan)
        pool_parts = self._pooler.parts(plan.slices)
        step = self._runner.prepare(self._rows, plan, pool_parts)
        hidden = self._runner.run(step.inputs)
        forward_end = time.perf_counter()
        drawn = self._runner.draw(hidden, step)
        sample_s = time.perf_counter() - forward_end
        return _Begun(plan, step, pool_parts, hidden, drawn, forward_end - begin - moves_s, sample_s, swap_s)

    def _finish(self, begun: _Begun) -> StepResult:
        begin = time.perf_counter()
        step = begun.step
        samples = self._runner.read(begun.drawn)
        usable = samples.usable
        self._rows.append(step.row_to_sequence[usable], samples.token_ids[usable])
        results = results_of(step, samples)
        prompt = self._runner.prompt_logprobs(begun.hidden, step)
        pooled = self._pooler.pool(begun.hidden, begun.pool_parts)
        forward_s, sample_s = begun.forward_s, begun.sample_s + time.perf_counter() - begin
        if self._gpu is not None and begun.drawn is None and not prompt and not pooled:
            # Nothing was waited for, so that nobody knows how long it takes; the next step's time has it.
            forward_s = sample_s = 0.0
        return StepResult(begun.plan.step_id, results, forward_s, sample_s, prompt, pooled, begun.swap_s)


def open_executor(config: EngineConfig) -> LocalExecutor:
    """For a complete configuration, without an engine: to run plans that one has made before. Raises like
    `LocalExecutor` and `open_checkpoint`."""
    checkpoint = open_checkpoint(config.model)
    return LocalExecutor(config, checkpoint, ModelConfig.from_dict(checkpoint.config()))


def _num_threads(wanted: int | None) -> int:
    """Of the forward. By default all cores, or what OMP_NUM_THREADS says. The threads of the server need none
    for themselves: kernels hand their work out in small pieces, so a core that is taken away does fewer."""
    usable = usable_cores()
    if wanted is None:
        return min(ops.num_threads(), usable)
    if wanted > usable:
        log.warning(
            "'num_threads' is %d, but this process may use %d cores: the forward will be slower than with %d",
            wanted,
            usable,
            usable,
        )
    return wanted


def resolve_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one. Raises `ConfigError` when a GPU is asked for and there is none."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("'device' is 'cuda', but torch finds no CUDA device; use 'cpu' or 'auto'")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def resolve_scheme(quantization: str | None) -> Scheme:
    """How linear layers store their weights."""
    return _SCHEMES.get(quantization, Unquantised())


def resolve_dtype(name: str, published: str, device: torch.device) -> torch.dtype:
    """`auto` is the type the weights were published in, but never float16 on a CPU: CPUs have fast bfloat16
    products, and float16 ones only in software."""
    if name == "auto":
        name = "bfloat16" if published == "float16" and device.type == "cpu" else published
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def resolve_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What the KV cache of a model that computes in `dtype` holds, by `kv_cache_dtype`."""
    return _KV_DTYPES.get(name, dtype)


def results_of(step: Step, samples: Samples) -> tuple[SequenceResult, ...]:
    """One for each of the step's sequences, in order."""
    token_ids = samples.token_ids.tolist()
    if samples.usable.all() and not samples.logprobs:
        # All in C, without the constructor's detour.
        columns = zip(step.seq_ids, zip(token_ids, strict=True), repeat(()), repeat(None))
        return tuple(map(partial(tuple.__new__, SequenceResult), columns))
    results = []
    for index, (seq_id, token_id, usable) in enumerate(
        zip(step.seq_ids, token_ids, samples.usable.tolist(), strict=True)
    ):
        if usable:
            logprobs = samples.logprobs.get(index)
            results.append(SequenceResult(seq_id, (token_id,), () if logprobs is None else (logprobs,)))
        else:
            results.append(SequenceResult(seq_id, error=_UNUSABLE))
    return tuple(results)
