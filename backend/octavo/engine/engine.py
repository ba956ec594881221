"""The engine: requests in, text deltas out, one step at a time.

It builds everything below it (checkpoint, tokenizer, executor, scheduler) and turns the scheduler's tokens
into text. Where the executor computes by itself, that happens while it does:

    schedule N+1, submit N+1, deliver N, collect N+1, update

One that computes on this thread does so in `collect`: no token waits for the step after its own.
One thread at a time may call `add`, `abort` and `step`: the loop's thread, or the caller of
`generate`. `make_request`, `stats` and `steps` are for any thread.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig, resolve
from octavo.engine.bad_words import bad_word_ids
from octavo.engine.block_manager import BlockManager
from octavo.engine.delivery import Delivery
from octavo.engine.metrics import EngineStats, StepLog
from octavo.engine.offline import Completion, generate
from octavo.engine.policy import check_priority
from octavo.engine.prefix_reader import PrefixReader
from octavo.engine.recording import Recorder
from octavo.engine.scheduler import Scheduler, SequenceOutput
from octavo.engine.token_choice import check_choice, check_ids
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import Cancelled, DeadlineExceeded, InvalidArgument, OctavoError, PromptTooLong, StepFailed
from octavo.models.model_config import ModelConfig
from octavo.protocol import Executor, StepPlan
from octavo.request import PoolingParams, Request, SamplingParams, Sink
from octavo.weights.loader import open_checkpoint
from octavo.worker.disk_tier import DiskCounts
from octavo.worker.executor import LocalExecutor

log = logging.getLogger("octavo")


class Engine:
    """`Engine("path")`, or with engine arguments: `Engine({"model": "path", "dtype": "float32"})`.

    Raises `ConfigError` or `WeightsError` when it cannot be built.
    """

    def __init__(self, model: str | Mapping[str, Any] | EngineConfig) -> None:
        arguments = {"model": model} if isinstance(model, str) else model
        config = arguments if isinstance(arguments, EngineConfig) else resolve(arguments)
        checkpoint = open_checkpoint(config.model)
        self.model_config = ModelConfig.from_dict(checkpoint.config())
        self.config = config = config.for_model(self.model_config.max_positions)
        self.tokenizer = Tokenizer.load(config.model, config.tokenizer)
        executor = LocalExecutor(config, checkpoint, self.model_config)
        self._kv_limit, self._host_limit = executor.kv_limit, executor.host_limit
        self._executor: Executor = executor
        self.recording: Path | None = None  # where its steps go, if anywhere
        if config.record_steps is not None:
            self._executor = recorder = Recorder(executor, config)
            self.recording = recorder.path
        self._blocks = BlockManager(
            executor.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            executor.num_host_blocks,
            executor.directory is not None,
        )
        self._directory = executor.directory
        self._reader = PrefixReader(self._blocks, executor.directory) if executor.directory else None
        self._is_sound = True
        self._block_bytes = executor.block_bytes
        self._eos = self.tokenizer.eos_token_ids or self.model_config.eos_token_ids
        self._scheduler = Scheduler(config, self._blocks, self._eos)
        self._deliveries: dict[str, Delivery] = {}  # by request id
        self._by_sequence: dict[int, Delivery] = {}
        self._undelivered: list[SequenceOutput] = []  # of the last step
        self._finished: Counter[str] = Counter()
        self.steps = StepLog()
        log.info("%s", self.describe())

    def describe(self) -> str:
        """The one line that tells an operator what fits."""
        num_tokens = self._blocks.num_blocks * self.config.block_size
        assert self.config.max_model_len is not None
        host = ""
        if self._blocks.host.num_blocks or self.config.swap_space:
            host = f"; {self._blocks.host.num_blocks} more in host memory, limited by {self._host_limit}"
        disk = ""
        if self.config.prefix_cache_dir is not None:
            disk = f"; {self.config.prefix_cache_disk_gib} GiB of files in {self.config.prefix_cache_dir}"
        return (
            f"KV cache: {self._blocks.num_blocks} blocks of {self.config.block_size} = {num_tokens} tokens = "
            f"{num_tokens / self.config.max_model_len:.1f} requests at max_model_len "
            f"({self.config.max_model_len}); limited by {self._kv_limit}{host}{disk}"
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Refuses, before seconds are spent on it, a text that no tokens can make short enough.

        Raises `InvalidArgument`, `PromptTooLong`. Any thread.
        """
        assert self.config.max_model_len is not None
        most = self.config.max_model_len * self.tokenizer.most_token_bytes
        if len(text) > most:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters; max_model_len is {self.config.max_model_len} "
                f"tokens, and at most {most} characters fit into so many"
            )
        return self.tokenizer.encode(text, add_special_tokens)

    def make_request(
        self,
        id: str,
        prompt: str | Items[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cumulative_logprob: bool = False,
        cache_salt: str | None = None,
        tenant: str | None = None,
        arrived_s: float | None = None,
        embed: PoolingParams | None = None,
    ) -> Request:
        """Tokenises and checks a prompt, which is embedded instead of continued if `embed` says how.
        `arrived_s`, of `time.monotonic()`, is now if it is None. Any thread.

        Raises `InvalidArgument`, `PromptTooLong`.
        """
        if arrived_s is None:
            arrived_s = time.monotonic()
        params = params or SamplingParams()
        if embed and params != SamplingParams():
            raise InvalidArgument("a prompt that is embedded is not continued: give no sampling parameters")
        check_priority(self.config.scheduling_policy, priority)
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        self._scheduler.check(len(ids), params, embeds=embed is not None)
        vocab_size = self.model_config.vocab_size
        check_ids("input" if embed else "input_ids", ids, params, vocab_size)
        most = self.model_config.hidden_size
        if embed and embed.dimensions is not None and not 1 <= embed.dimensions <= most:
            raise InvalidArgument(f"'dimensions' is {str(embed.dimensions)[:80]}; allowed: 1 to {most}")
        bad_words = bad_word_ids(self.tokenizer, params.bad_words)
        check_choice(params, bad_words, self._eos, vocab_size)
        return Request(
            id,
            tuple(map(int, ids)),
            params,
            priority,
            cumulative_logprob,
            cache_salt,
            tenant,
            arrived_s,
            bad_words,
            embed,
        )

    def expects_stored(self, request: Request) -> bool:
        """Whether `read_stored` is likely to find anything. Any thread."""
        return self._reader is not None and self._reader.expects(request)

    def read_stored(self, request: Request) -> None:
        """Reads what the prefix cache's directory has of a prompt, for a second at most; what it has not is
        computed. Call before `add`, if at all. Any thread that can be kept waiting."""
        if self._reader is not None:
            self._reader.read(request)

    @property
    def has_work(self) -> bool:
        """Whether anyone waits for an answer: tokens to compute, or computed ones to deliver."""
        return bool(self._deliveries)

    def add(self, request: Request, sink: Sink, on_start: Callable[[], None] | None = None) -> None:
        """Puts a request in line. `sink` is called from `step`, must not block, and ends with one delta that
        has `request_finished`; `on_start` is called when the first step begins, if one ever does. Raises
        `InvalidArgument`; then neither is ever called."""
        if request.id in self._deliveries:
            raise InvalidArgument(f"a request with id '{request.id}' is already here")
        seq_ids = [seq.id for seq in self._scheduler.add(request)]
        try:
            delivery = Delivery(request, sink, self.tokenizer, seq_ids, on_start)
        except Exception:
            self._scheduler.finish(*seq_ids)
            raise
        self._deliveries[request.id] = delivery
        self._by_sequence.update((seq_id, delivery) for seq_id in seq_ids)

    def abort(self, request_id: str, error: OctavoError | None = None) -> bool:
        """Ends a request with an error, `Cancelled` if none is given. False when it is not here any more."""
        delivery = self._deliveries.get(request_id)
        if delivery is None:
            return False
        self._forget(delivery)
        gave_up = error is None or isinstance(error, (Cancelled, DeadlineExceeded))
        self._finished["abort" if gave_up else "error"] += 1
        delivery.fail(error or Cancelled("the request was cancelled"))
        return True

    def abort_all(self, error: OctavoError) -> None:
        """Ends every request with an error, except those that the last step finished."""
        self._deliver_outputs()
        for request_id in list(self._deliveries):
            self.abort(request_id, error)

    def answer_all(self, error: OctavoError) -> None:
        """Ends every request without touching the scheduler: for an engine that will not run again."""
        self._is_sound = False
        for delivery in self._deliveries.values():
            delivery.fail(error)
        self._deliveries.clear()

    def step(self) -> bool:
        """Computes once, and delivers what the step before has computed. False when nothing was to compute.

        A step that fails ends its own requests with `StepFailed` and no others. A stop string is found when
        the next step is under way already, whose token of that sequence is then ignored.
        """
        plan = self._scheduler.schedule()
        if plan is None:
            self._deliver_outputs()
            return False
        self._note_entries(plan)
        self.steps.begin(plan.num_tokens, len(plan.slices))
        try:
            self._executor.submit(plan)
            try:
                self._deliver_outputs()
            finally:  # no step stays in flight, whatever interrupts this
                result = self._executor.collect()
        except StepFailed as error:
            self._deliver_outputs()
            self._fail(plan, error)
            return True
        finally:
            self.steps.end()
        self.steps.note_parts(result.forward_s, result.sample_s)
        self._undelivered = self._scheduler.update(plan, result)
        return True

    def stats(self) -> EngineStats:
        counters = self._scheduler.counters
        disk = DiskCounts() if self._directory is None else self._directory.counts()
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_blocks=self._blocks.num_blocks,
            num_used_blocks=self._blocks.num_used_blocks,
            num_cached_blocks=self._blocks.num_cached_blocks,
            num_reusable_blocks=self._blocks.num_reusable_blocks,
            num_shared_blocks=self._blocks.num_shared_blocks,
            block_size=self._blocks.block_size,
            prompt_tokens_total=counters.prompt_tokens,
            cached_prompt_tokens_total=counters.cached_prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            preemptions_total=counters.preemptions,
            prefix_queries_total=counters.prefix_queries,
            prefix_hits_total=counters.prefix_hits,
            block_copies_total=counters.block_copies,
            steps_total=self.steps.num_steps,
            step_s_total=self.steps.duration_s,
            forward_s_total=self.steps.forward_s,
            sample_s_total=self.steps.sample_s,
            requests_finished=dict(self._finished),
            num_host_blocks=self._blocks.host.num_blocks,
            num_used_host_blocks=self._blocks.host.num_used_blocks,
            host_hits_total=self._blocks.host.num_swapped_in * self._blocks.block_size,
            swapped_out_bytes_total=self._blocks.host.num_swapped_out * self._block_bytes,
            swapped_in_bytes_total=self._blocks.host.num_swapped_in * self._block_bytes,
            disk_hits_total=self._blocks.disk.num_loaded * self._blocks.block_size,
            disk_loaded_bytes_total=self._blocks.disk.num_loaded * self._block_bytes,
            disk_saved_bytes_total=disk.saved * self._block_bytes,
            disk_dropped_blocks_total=disk.dropped,
            disk_damaged_files_total=disk.damaged,
        )

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Saves what is in the prefix cache where that has a directory, as far as a few seconds allow."""
        if self._directory is None:
            self._executor.close()
        else:
            keep = self._blocks.cached_blocks() if self._is_sound else ()
            self._executor.close(keep, self._blocks.disk.take_discards())

    def generate(
        self,
        prompts: Iterable[str | Items[int]],
        params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Continues all prompts together and returns them in order. See `octavo.engine.offline`."""
        return generate(self, prompts, params, progress)

    def _deliver_outputs(self) -> None:
        outputs, self._undelivered = self._undelivered, []
        for output in outputs:
            delivery = self._by_sequence.get(output.seq_id)
            if delivery is None:  # the request was aborted, or an earlier output of this step ended it
                continue
            if output.error:
                self.abort(delivery.request.id, StepFailed(output.error))
            else:
                self._deliver(delivery, output)

    def _deliver(self, delivery: Delivery, output: SequenceOutput) -> None:
        try:
            reason = delivery.deliver(output)
        except Exception as error:
            log.exception("request %s: its tokens could not be turned into text", delivery.request.id)
            self.abort(delivery.request.id, OctavoError(f"detokenisation failed: {error!r}"))
            return
        if reason:
            self._scheduler.finish(output.seq_id)
            del self._by_sequence[output.seq_id]
        if reason and delivery.finished:
            self._forget(delivery)
            self._finished[reason] += 1

    def _note_entries(self, plan: StepPlan) -> None:
        """Tells the timelines of those that this step admits. Their slices come last, in the same order."""
        if plan.new:
            for new, piece in zip(plan.new, plan.slices[-len(plan.new) :], strict=True):
                assert new.seq_id == piece.seq_id
                self._by_sequence[new.seq_id].timeline.enter_batch(piece.start)

    def _fail(self, plan: StepPlan, error: StepFailed) -> None:
        log.error("step %d failed: %s", plan.step_id, error, exc_info=error)
        for piece in plan.slices:
            delivery = self._by_sequence.get(piece.seq_id)
            if delivery:
                self.abort(delivery.request.id, error)

    def _forget(self, delivery: Delivery) -> None:
        self._scheduler.finish(*delivery.seq_ids)
        for seq_id in delivery.seq_ids:
            self._by_sequence.pop(seq_id, None)
        del self._deliveries[delivery.request.id]  # last: whoever is in here still gets an answer
