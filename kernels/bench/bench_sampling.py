"""Drawing tokens and log-probabilities against the reference, at SmolLM2's vocabulary, or Llama 3's on a GPU
where there is one.

OMP_WAIT_POLICY=passive python kernels/bench/bench_sampling.py --dtype bfloat16 --threads 2

Without that setting torch's threads, which wait for the reference's next turn, take cores from ours.
"""

from collections.abc import Callable

import torch
from _bench import DEVICES, arguments, compare, reference
from torch import Tensor

from octavo_kernels import ops

VOCAB = {"cpu": 49152, "cuda": 128256}
ROWS = {"cpu": (1, 32), "cuda": (1, 32, 256)}
COPIES = 5  # calls timed together
# Temperature, top-k, top-p, min-p.
SETTINGS = {
    "plain": (1.0, 0, 1.0, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9, 0.0),
    "top-p 0.9, flat": (10.0, 0, 0.9, 0.0),
}


def kernels(rows: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[int], Tensor]]:
    """What is compared is the logits of the tokens, as equals may stand for one another."""
    vocab = VOCAB[device]
    logits = [(torch.randn(rows, vocab, device=device) * 4).to(dtype) for _ in range(COPIES)]
    uniforms = torch.rand(rows, dtype=torch.float64, device=device)
    chosen = torch.randint(vocab, (rows,), device=device)

    def draw(settings: tuple[float, int, float, float]) -> Callable[[int], Tensor]:
        columns = [torch.full((rows,), setting, device=device) for setting in settings]

        def run(index: int) -> Tensor:
            return logits[index].gather(1, ops.sample(logits[index], *columns, uniforms)[:, None])

        return run

    runs = {name: draw(settings) for name, settings in SETTINGS.items()}
    runs["log-probabilities"] = lambda index: ops.token_logprobs(logits[index], chosen, 0)[0]
    runs["log-probabilities of 5 best"] = lambda index: ops.token_logprobs(logits[index], chosen, 5)[3]
    return runs


def main() -> None:
    args = arguments(__doc__, device=DEVICES)
    for rows in ROWS[args.device]:
        for name, run in kernels(rows, getattr(torch, args.dtype), args.device).items():
            with torch.inference_mode():
                compare(
                    f"{name}, {rows} rows", run, reference(run), COPIES, args.turns, 1e-3 * rows, "ktoken"
                )


if __name__ == "__main__":
    main()
