"""llama.cpp as xllamacpp ships it. usage: llamacpp.py MODEL.gguf THREADS CONTEXT SLOTS"""

import sys
import threading

import xllamacpp
from protocol import Clock, serve


def ask(server, prompt, request, log_probs, on_token):
    """Streams one completion; (ids, log-probabilities), both null without
    `log_probs`: asking for them costs time."""
    pieces = []

    def piece(chunk):
        choices = chunk.get("choices") or [{}]
        if choices[0].get("finish_reason") is None:
            on_token()
            pieces.append((choices[0].get("logprobs") or {}).get("content") or [])
        return False  # go on

    server.handle_completions(
        {
            "prompt": prompt,
            "max_tokens": request["new"],
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": request.get("space") is not None,
            "stream": True,
            **({"n_probs": 1} if log_probs else {}),
        },
        piece,
    )
    if not log_probs:
        return None, None
    entries = [entry for content in pieces for entry in content]
    return [entry["id"] for entry in entries], [entry["logprob"] for entry in entries]


def load():
    path, threads, context, slots = sys.argv[1], *map(int, sys.argv[2:5])
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = context * slots
    params.n_parallel = slots
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def answer(request):
        prompts = request["prompts"]
        clock = Clock(len(prompts))
        found = [None] * len(prompts)

        def run(row):
            found[row] = ask(
                server, prompts[row], request, request.get("check"), lambda: clock.token(row)
            )

        others = [threading.Thread(target=run, args=(row,)) for row in range(1, len(prompts))]
        for thread in others:
            thread.start()
        run(0)
        for thread in others:
            thread.join()
        return {
            "tokens": [tokens for tokens, _ in found],
            "logprobs": [log_probs for _, log_probs in found],
            **clock.timings(),
        }

    import importlib.metadata

    system = xllamacpp.get_system_info()
    return {"version": importlib.metadata.version("xllamacpp"), "system": system}, answer


serve(load)
