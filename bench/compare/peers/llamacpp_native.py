"""llama.cpp built on this machine for this machine (llama-cpp-python).

usage: llamacpp_native.py MODEL.gguf THREADS CONTEXT SLOTS
"""

import sys

import llama_cpp
import numpy as np
from protocol import Clock, serve


def log_softmax(row):
    row = row.astype(np.float64)
    row = row - row.max()
    return row - np.log(np.exp(row).sum())


def load():
    path, threads, context, slots = sys.argv[1], *map(int, sys.argv[2:5])
    if slots != 1:
        raise ValueError("one sequence at a time")
    llama = llama_cpp.Llama(
        path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    vocabulary = llama.n_vocab()

    def last_logits():
        pointer = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        return np.ctypeslib.as_array(pointer, shape=(vocabulary,))

    def answer(request):
        if len(request["prompts"]) != 1 or request.get("space") is not None:
            raise ValueError("one prompt, nothing kept")
        clock = Clock()
        llama.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), True)
        llama.eval(request["prompts"][0])
        tokens, log_probs = [], []
        for i in range(request["new"]):
            logits = last_logits()
            tokens.append(int(logits.argmax()))
            clock.token()
            if request.get("check"):
                log_probs.append(float(log_softmax(logits)[tokens[-1]]))
            if i + 1 < request["new"]:
                llama.eval(tokens[-1:])
        return {"tokens": [tokens], "logprobs": [log_probs or None], **clock.timings()}

    system = llama_cpp.llama_print_system_info().decode()
    return {"version": llama_cpp.__version__, "system": system}, answer


serve(load)
