"""What `quantization: "int8"` costs in quality: SmolLM2's perplexity."""

from octavo import Engine, SamplingParams
from octavo.quant.int8 import Int8
from perplexity import MODEL, load, read, windows


def test_perplexity_is_within_two_percent_of_bfloat16() -> None:
    texts = windows(6)
    plain, quantised = read(*load(), texts).perplexity, read(*load(Int8()), texts).perplexity
    assert plain < 30  # the model reads English
    assert quantised <= 1.02 * plain, f"{quantised:.3f} in int8, {plain:.3f} in bfloat16"


def test_an_engine_answers_in_int8() -> None:
    engine = Engine({"model": MODEL, "quantization": "int8", "dtype": "bfloat16", "max_model_len": 64})
    try:
        (completion,) = engine.generate(
            ["The capital of France is"], SamplingParams(temperature=0, max_tokens=8), progress=False
        )
    finally:
        engine.close()
    assert "Paris" in completion.outputs[0].text
