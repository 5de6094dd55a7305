"""OpenVINO GenAI reading the GGUF. usage: openvino_worker.py MODEL.gguf THREADS CONTEXT SLOTS

Its pipeline keeps prefixes by itself, so that cold requests must begin with
tokens of their own.
"""

import sys

import numpy as np
import openvino
import openvino_genai
from protocol import serve, timings


def load():
    path, threads = sys.argv[1], int(sys.argv[2])
    pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)

    def answer(request):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request["new"]
        config.ignore_eos = True
        config.do_sample = False
        ids = np.array(request["prompts"], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        result = pipeline.generate(inputs, config)
        raw = result.perf_metrics.raw_metrics
        first = raw.m_times_to_first_token[0] / 1e3  # of us
        gaps = [us / 1e3 for us in raw.m_durations]
        rows = len(request["prompts"])
        steps = request["new"] - 1
        # One entry per token and row, or per step: a step has one time.
        gaps = gaps[-steps * rows :: rows] if len(gaps) >= steps * rows else gaps[-steps:]
        times = [first]
        for gap in gaps if steps else []:
            times.append(times[-1] + gap)
        return {
            "tokens": [list(map(int, tokens)) for tokens in result.tokens],
            "logprobs": None,
            **timings([times] * rows),
        }

    return {"version": openvino_genai.__version__}, answer


serve(load)
