"""What becomes of a request that arrives: it is refused, or made into sequences. Owned by the scheduler.

`check` reads configuration only, so any thread may call it; `receive` is for the engine's. Torch-free.
"""

import random
from array import array
from collections.abc import Collection

from octavo.config import EngineConfig
from octavo.engine.beam_search import BeamGroup, check_room
from octavo.engine.block_manager import BlockManager
from octavo.engine.policy import precedence
from octavo.engine.row_sampling import ask_for_prompt_logprobs, row_sampling
from octavo.engine.sequence import Sequence
from octavo.errors import InvalidArgument, PromptTooLong
from octavo.request import Request, SamplingParams

_NONE: frozenset[int] = frozenset()
_SEED_STRIDE = 0x9E3779B97F4A7C15  # sets the seeds of a request's sequences apart


class Reception:
    def __init__(
        self, config: EngineConfig, block_manager: BlockManager, eos_token_ids: Collection[int]
    ) -> None:
        assert config.max_model_len is not None
        self._max_model_len = config.max_model_len
        self._max_num_seqs = config.max_num_seqs
        self._policy = config.scheduling_policy
        self._blocks = block_manager
        self._eos = frozenset(eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._num_sequences = self._num_requests = 0

    def check(self, num_prompt_tokens: int, params: SamplingParams, *, embeds: bool = False) -> None:
        """Refuses what could never be served; a prompt that `embeds` needs no room for a new token."""
        if num_prompt_tokens == 0:
            raise InvalidArgument("the prompt is empty: it has no tokens; give at least one")
        most = self._max_model_len if embeds else self._max_model_len - 1
        if num_prompt_tokens > most:
            beside = "" if embeds else f", so at most {most} fit beside one new token"
            raise PromptTooLong(
                f"the prompt has {num_prompt_tokens} tokens; max_model_len is {self._max_model_len}{beside}"
            )
        if params.num_sequences > self._max_num_seqs:
            name = "best_of" if params.num_sequences > params.n else "n"
            name = "beam_width" if params.beam_width is not None else name
            raise InvalidArgument(
                f"'{name}' is {params.num_sequences}; this server runs at most {self._max_num_seqs} sequences"
            )
        if params.use_beam_search:
            check_room(num_prompt_tokens, params, self._max_model_len, self._blocks)

    def receive(self, request: Request, clock_tokens: int) -> list[Sequence]:
        """The request's `num_sequences`; the others are children of the first. Raises like `check`.

        `clock_tokens`: how many tokens the engine has computed by now.
        """
        params, num_prompt_tokens = request.params, len(request.prompt_token_ids)
        self.check(num_prompt_tokens, params, embeds=request.embed is not None)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        self._num_requests += 1
        sequences = []
        stop_ids = _NONE if params.ignore_eos else self._eos  # one object for all stays in the CPU's caches
        if params.stop_token_ids:
            stop_ids = stop_ids.union(params.stop_token_ids)
        masked = tuple(sorted(stop_ids)) if params.min_tokens else ()
        for index in range(params.num_sequences):
            self._num_sequences += 1
            sequences.append(
                Sequence(
                    id=self._num_sequences,
                    request=request,
                    index=index,
                    arrival=self._num_requests,
                    sampling=row_sampling(request, (seed + index * _SEED_STRIDE) % 2**64, masked),
                    stop_ids=stop_ids,
                    min_length=num_prompt_tokens + params.min_tokens,
                    max_length=min(num_prompt_tokens + params.max_tokens, self._max_model_len),
                    token_ids=array("i", request.prompt_token_ids),
                    is_sampled=request.embed is None,
                )
            )
        first = sequences[0]
        if params.prompt_logprobs is not None:
            ask_for_prompt_logprobs(first, params.prompt_logprobs)
        if params.use_beam_search:
            BeamGroup.form(sequences)
        first.children = tuple(sequences[1:])
        uncomputed = num_prompt_tokens - self._blocks.num_cached_tokens(first)
        before = precedence(self._policy, request.priority, uncomputed, clock_tokens)
        for seq in sequences:
            seq.precedence = before
        return sequences
