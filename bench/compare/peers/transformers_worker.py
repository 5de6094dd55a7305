"""Hugging Face transformers on the GGUF, dequantised when it is loaded, or on a
folder of safetensors.

usage: transformers_worker.py MODEL THREADS CONTEXT SLOTS DTYPE
`cache` of a request: dynamic or static (not compiled). Attention is
transformers' default (SDPA).
"""

import os
import sys
import time

import torch
import transformers
from protocol import Clock, serve


def make_cache(kind, model, length):
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=length)
    return transformers.DynamicCache(config=model.config)


def step(model, ids, cache):
    out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits = out.logits[:, -1]
    return logits, logits.argmax(-1, keepdim=True)


@torch.inference_mode()
def generate(model, request):
    prompts = torch.tensor(request["prompts"])
    rows, length = prompts.shape
    clock = Clock(rows)
    cache = make_cache(request.get("cache", "dynamic"), model, length + request["new"])
    logits, token = step(model, prompts, cache)
    tokens, log_probs = [], []
    for i in range(request["new"]):
        tokens.append(token)
        for row in range(rows):
            clock.token(row)
        if request.get("check"):
            log_probs.append(logits.float().log_softmax(-1).gather(-1, token))
        if i + 1 < request["new"]:
            logits, token = step(model, token, cache)
    answer = {
        "tokens": torch.cat(tokens, 1).tolist(),
        "logprobs": torch.cat(log_probs, 1).tolist() if log_probs else None,
        **clock.timings(),
    }
    if request.get("crop"):
        start = time.perf_counter()
        cache.crop(-request["crop"])
        answer["crop_us"] = (time.perf_counter() - start) * 1e6
    return answer


def load():
    path, threads, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[5]
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder, name = os.path.split(os.path.abspath(path))
    of = (path, {}) if os.path.isdir(path) else (folder, {"gguf_file": name})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        of[0], dtype=getattr(torch, dtype), **of[1]
    ).eval()
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}  # tied ones once
    facts = {"version": transformers.__version__, "weight_bytes": sum(weights.values())}
    return facts, lambda request: generate(model, request)


serve(load)
