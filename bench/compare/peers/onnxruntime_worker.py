"""onnxruntime-genai on a folder that its own builder made.

usage: onnxruntime_worker.py FOLDER THREADS CONTEXT SLOTS
"""

import sys

import onnxruntime_genai
from protocol import Clock, serve


def load():
    folder, threads = sys.argv[1], int(sys.argv[2])
    config = onnxruntime_genai.Config(folder)
    config.overlay(
        '{"model": {"decoder": {"session_options": {"intra_op_num_threads": %d}}}}' % threads
    )
    model = onnxruntime_genai.Model(config)

    def answer(request):
        prompts = request["prompts"]
        if len(prompts) != 1 or request.get("space") is not None:
            raise ValueError("one prompt, nothing kept")
        clock = Clock()
        params = onnxruntime_genai.GeneratorParams(model)
        length = len(prompts[0]) + request["new"]
        # min_length: an end token does not end it.
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(prompts[0])
        tokens = []
        for _ in range(request["new"]):
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
            clock.token()
        return {"tokens": [tokens], "logprobs": None, **clock.timings()}

    return {"version": onnxruntime_genai.__version__}, answer


serve(load)
