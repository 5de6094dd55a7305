"""Speed of Hugging Face transformers on a GGUF model, one JSON line a measurement.

usage: transformers_decode.py MODEL.gguf [--dtype bfloat16 ...] [--cache dynamic ...]
                              [--context 512 ...] [--new 48] [--repeat 2] [--threads 2]
"""

import argparse
import json
import os
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache


def parse_arguments():
    parser = argparse.ArgumentParser(description="Speed of transformers, JSON lines.")
    add = parser.add_argument
    add("model", help="a GGUF file")
    add("--dtype", nargs="+", default=["bfloat16", "float32"])
    add("--cache", nargs="+", default=["dynamic", "static"])
    add("--context", nargs="+", type=int, default=[512, 2000])
    add("--new", type=int, default=48, help="tokens decoded for a measurement")
    add("--repeat", type=int, default=2)
    add("--threads", type=int, default=2)
    return parser.parse_args()


def load(path: str, dtype: str):
    """With transformers' default attention, which is its fastest here (SDPA)."""
    folder, name = os.path.split(os.path.abspath(path))
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=getattr(torch, dtype)
    ).eval()


def make_cache(kind: str, model, tokens: int):
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=tokens)


@torch.inference_mode()
def measure(model, kind: str, context: int, new: int) -> dict:
    """Greedy, batch 1, logits of the last position only. The first decoded token
    is the prefill's, so `new` forwards follow."""
    ids = torch.tensor([[(i * 7919) % 40000 + 100 for i in range(context)]])
    cache = make_cache(kind, model, context + new + 1)
    start = time.perf_counter()
    out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    prefilled = time.perf_counter()
    for _ in range(new):
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        out = model(token, past_key_values=cache, use_cache=True)
    decoded = time.perf_counter()
    return {
        "prefill_tokens_per_second": context / (prefilled - start),
        "decode_tokens_per_second": new / (decoded - prefilled),
    }


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for dtype in options.dtype:
        model = load(options.model, dtype)
        measure(model, "dynamic", 64, 4)  # warm-up: pages, thread pool, primitives
        for _ in range(options.repeat):
            for context in options.context:
                for kind in options.cache:
                    row = {
                        "who": f"transformers {kind}",
                        "dtype": dtype,
                        "context": context,
                        **measure(model, kind, context, options.new),
                    }
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
