"""The kvcache program on SmolLM2-135M-Instruct, where its weights are there."""

import json
import os
import sys
import unittest
from pathlib import Path

from program import CACHES, ProgramTest, run, run_json, start

SKIPPED = 77
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def weights():
    named = os.environ.get("KVCACHE_TEST_MODEL")
    if named:
        return Path(named)
    cache = os.environ.get("KVCACHE_CACHE_DIR") or (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcache"
    )
    return Path(cache) / "models" / NAME


MODEL = weights()
QUESTION = ("--model", MODEL, "--chat", "--prompt", "What is the capital of France?")


class SmolLm2Test(ProgramTest):
    def test_answers_with_every_cache(self):
        results = {}
        for cache in CACHES:
            _, out, _ = run("generate", *QUESTION, "--cache", cache, check=0)
            self.assertIn("Paris", out.decode())
            results[cache] = run_json("generate", *QUESTION, "--cache", cache)
            self.assertEqual(results[cache]["finish_reason"], "stop")
            self.assertIn("Paris", results[cache]["text"])
            self.assertNotIn("<|im_end|>", results[cache]["text"])
        for key in ("tokens", "logprobs"):
            for cache in CACHES:
                self.assertEqual(results["none"][key], results[cache][key], cache)

    def test_a_window_across_buckets(self):
        # 300 tokens behind a short prompt: windows of 128, 256 and the rest.
        base = ("generate", "--model", MODEL, "--prompt", "Once upon a time",
                "--max-new-tokens", "300", "--ignore-eos")
        wanted = run_json(*base)
        for way in ((), ("--steps-per-replay", "16")):
            got = run_json(*base, "--cache", "window", "--graph", "eager", *way)
            for key in ("tokens", "logprobs", "text"):
                self.assertEqual(got[key], wanted[key], (key, way))

    def test_scores_agree(self):
        text = "The Cache interface stores keys and values of every token once. " * 12
        ids = run_json("tokenize", "--model", MODEL, "--text", text)["tokens"][:140]
        base = ("score", "--model", MODEL, "--tokens", ",".join(map(str, ids)))
        for dtype in ("float32", "bfloat16"):
            wanted = run_json(*base, "--dtype", dtype, "--cache", "none")["logprobs"]
            for cache, chunk in (("concat", 64), ("preallocated", 256), ("preallocated", 33)):
                got = run_json(*base, "--dtype", dtype, "--cache", cache, "--chunk", chunk)
                self.assertEqual(got["logprobs"], wanted, (dtype, cache, chunk))

    def test_a_conversation_reuses_the_cache(self):
        _, out, _ = run(
            "chat", "--model", MODEL, "--max-new-tokens", "30", "--json",
            stdin=b"What is the capital of France?\nAnd of Italy?\n", check=0,
        )
        first, second = (json.loads(line) for line in out.decode().splitlines())
        self.assertIn("Paris", first["text"])
        self.assertGreaterEqual(second["reused_tokens"], len(first["prompt_tokens"]))

    def test_control_c_keeps_the_text_so_far(self):
        process = start("generate", *QUESTION, "--ignore-eos", "--max-new-tokens", "4000")
        first = process.stdout.read(4)
        process.send_signal(2)
        rest, err = process.communicate()
        self.assertEqual(process.returncode, 0, err)
        self.assertIn("cancelled", err.decode())
        text = (first + rest).decode()
        self.assertTrue(text.startswith("The ") and text.endswith("\n"), text)


if __name__ == "__main__":
    if not MODEL.exists():
        print(f"{NAME} is not there: fetch it with scripts/demo or set KVCACHE_TEST_MODEL")
        sys.exit(SKIPPED)
    unittest.main()
