"""TorchEngine against transformers' static ``generate`` on identical greedy work.

Both get the same fresh random prompts in every round (so the engine's prefix reuse has nothing to reuse), both produce
the same number of tokens because end tokens are off, and rounds alternate so that a slow minute hits both. The ratio is
the median over rounds; above 1 the engine is faster, although it also computes logprobs and ``generate`` does not.

``--deterministic`` measures the deterministic engine too: its share is what equal bits cost.

usage: python benchmarks/engine.py [--model FOLDER_OR_ID] [--new-tokens 64] [--concurrency 1 16 64] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from gymloop.generation.engine import Sampling
from gymloop.generation.torch_engine import TorchEngine
from gymloop.models.load import load_causal_lm
from gymloop.models.resolve import resolve_model


def engine_seconds(engine: TorchEngine, prompts: list[list[int]], new_tokens: int) -> float:
    async def run() -> None:
        calls = [
            engine.generate(prompt, Sampling(new_tokens, temperature=0, slot=index), f"bench-{index}")
            for index, prompt in enumerate(prompts)
        ]
        samples = await asyncio.gather(*calls)
        short = [len(sample.token_ids) for sample in samples if len(sample.token_ids) != new_tokens]
        if short:
            raise SystemExit(f"the engine gave a sample of {short[0]} tokens; {new_tokens} were expected")

    start = time.perf_counter()
    asyncio.run(run())
    return time.perf_counter() - start


def generate_seconds(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    from transformers import GenerationConfig

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    start = time.perf_counter()
    output = model.generate(ids, attention_mask=mask, generation_config=config)
    seconds = time.perf_counter() - start
    if output.shape[1] != longest + new_tokens:
        raise SystemExit(f"generate gave {output.shape[1] - longest} tokens; {new_tokens} were expected")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or Hugging Face id")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(32, 128), metavar=("MIN", "MAX"))
    parser.add_argument("--concurrency", type=int, nargs="+", default=(1, 16, 64))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true", help="measure the deterministic engine too")
    args = parser.parse_args()

    folder = Path(args.model) if Path(args.model).is_dir() else resolve_model(args.model)
    reference = load_causal_lm(folder, "float32", "cpu")
    # The reference must not fall back to sampling settings or end tokens of the folder.
    reference.generation_config.eos_token_id = None
    low, high = args.prompt_tokens
    rows, length = max(args.concurrency), high + args.new_tokens
    engine = TorchEngine(folder, dtype="float32", max_batch_size=rows, max_model_len=length)
    fixed: TorchEngine | None = None
    if args.deterministic:
        fixed = TorchEngine(folder, dtype="float32", max_batch_size=rows, max_model_len=length, deterministic=True)
    rng = random.Random(0)
    vocab = reference.config.vocab_size
    print(f"{folder.name}, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"prompts of {low} to {high} random tokens, {args.new_tokens} new tokens each, {args.rounds} rounds")
    try:
        for concurrency in args.concurrency:
            rates: list[tuple[float, float]] = []
            shares: list[float] = []
            # The first round warms both up and is not counted.
            for _ in range(args.rounds + 1):
                prompts = [[rng.randrange(vocab) for _ in range(rng.randint(low, high))] for _ in range(concurrency)]
                total = concurrency * args.new_tokens
                ours = total / engine_seconds(engine, prompts, args.new_tokens)
                theirs = total / generate_seconds(reference, prompts, args.new_tokens)
                rates.append((ours, theirs))
                if fixed is not None:
                    shares.append(total / engine_seconds(fixed, prompts, args.new_tokens) / ours)
            counted = rates[1:]
            ratio = statistics.median(ours / theirs for ours, theirs in counted)
            ours = statistics.median(rate[0] for rate in counted)
            theirs = statistics.median(rate[1] for rate in counted)
            print(
                f"concurrency {concurrency:3d}: TorchEngine {ours:7.1f} tokens/s, generate {theirs:7.1f} tokens/s, "
                f"ratio {ratio:.2f}",
                flush=True,
            )
            if shares:
                share = statistics.median(shares[1:])
                print(f"                 deterministic: {share:.2f} of TorchEngine's tokens/s", flush=True)
    finally:
        engine.close()
        if fixed is not None:
            fixed.close()


if __name__ == "__main__":
    main()
