"""Our own code with one mistake in it, to show that a test notices.

As a pytest plugin (`-p mutants`, with `OCTAVO_MUTANT` set to a mutant's name) this module puts the mistake
into the code while it is imported; nothing on disk changes. `test_mutants` runs pytest so.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

VARIABLE = "OCTAVO_MUTANT"


@dataclass(frozen=True)
class Mutant:
    """`right`, which stands once in the module's source, becomes `wrong`; then `caught_by` has to fail."""

    name: str
    module: str
    right: str
    wrong: str
    caught_by: str


MUTANTS = (
    Mutant(
        "the sender swallows the final flag",
        "octavo.serving.sender",
        "final=last.request_finished)",
        "final=False)",
        "tests/serving/test_sender.py::test_what_comes_after_the_final_response_is_dropped",
    ),
    Mutant(
        "the final flag never reaches Triton",
        "octavo.serving.tritonserver",
        "if not final:",
        "if True:",
        "tests/serving/test_tritonserver.py::test_a_request_without_streaming_gets_exactly_one_response",
    ),
    Mutant(
        "a cancelled sequence leaks a block",
        "octavo.engine.scheduler",
        "self._blocks.free(seq)",
        "seq.num_tokens < seq.max_length and seq.block_table.pop(); self._blocks.free(seq)",
        "tests/engine/test_scheduler.py"
        "::test_update_ignores_a_sequence_that_was_aborted_while_its_step_was_in_flight",
    ),
    Mutant(
        "tenants find each other's cached prompts",
        "octavo.engine.block_manager",
        '_root_hash(salt or "")',
        '_root_hash("")',
        "tests/engine/test_block_manager.py::test_salts_keep_prefixes_apart",
    ),
    Mutant(
        "a step overwrites what it reads of the host's memory",
        "octavo.engine.host_blocks",
        "if slot in self._held:",
        "if False:",
        "tests/engine/test_host_blocks.py::test_a_slot_that_is_read_is_not_written_in_the_same_plan",
    ),
    Mutant(
        "a step that failed leaves blocks on the host that it never copied",
        "octavo.engine.host_blocks",
        "for digest, _ in self._written.values():",
        "for digest, _ in ():",
        "tests/engine/test_host_blocks.py::test_a_step_that_fails_leaves_nothing_that_was_not_copied",
    ),
    Mutant(
        "a NaN lives on in the host's memory",
        "octavo.engine.block_manager",
        "self.host.discard(seq.block_hashes)",
        "pass",
        "tests/engine/test_host_blocks.py::test_a_row_of_nan_takes_its_blocks_out_of_the_host_too",
    ),
    Mutant(
        "an error is sent twice",
        "octavo.serving.sender",
        "self._channel.send_error(request, last.error)",
        "[self._channel.send_error(request, last.error) for _ in range(2)]",
        "tests/serving/test_sender.py::test_everyone_is_asked_in_turn_and_the_cancelled_are_ended_once",
    ),
    Mutant(
        "a request that is done is not forgotten",
        "octavo.serving.outbox",
        "self._open.pop(request.id, None)",
        "pass",
        "tests/serving/test_sender.py::test_what_comes_after_the_final_response_is_dropped",
    ),
    Mutant(
        "a response goes to the oldest request",
        "octavo.serving.outbox",
        "self._waiting.append((request, deltas))",
        "self._waiting.append((next(iter(self._open.values())), deltas))",
        "tests/serving/test_sender.py::test_streams_take_turns_while_the_sender_is_behind",
    ),
    Mutant(
        "a cancellation ends others too",
        "octavo.serving.intake",
        "for request in self._outbox.named(client_id) if request is not asking]",
        "for request in self._outbox.requests() if request is not asking]",
        "tests/serving/test_tritonserver.py::test_requests_are_cancelled_by_the_id_that_their_client_set",
    ),
)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        return importlib.util.spec_from_loader(name, _Loader(self._mutant, spec.origin))


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, mutant: Mutant, path: str) -> None:
        super().__init__(mutant.module, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        """Never from a cache, nor into one."""
        return compile(mutated(self._mutant, Path(self.path).read_text()), self.path, "exec")


def mutated(mutant: Mutant, source: str) -> str:
    assert source.count(mutant.right) == 1, f"{mutant.module} has {mutant.right!r} not once"
    return source.replace(mutant.right, mutant.wrong)


if VARIABLE in os.environ:
    sys.meta_path.insert(0, _Finder({mutant.name: mutant for mutant in MUTANTS}[os.environ[VARIABLE]]))
