"""--cache window: static steps, recorded or not, give what plain steps give."""

import unittest

from program import TALKER, ProgramTest, run, run_json, tiny

# Samplers, ends and lengths; over 128 keys there is a second bucket.
TEXTS = (
    ("--max-new-tokens", "150", "--ignore-eos"),
    ("--max-new-tokens", "40"),
    ("--max-new-tokens", "60", "--temperature", "0.9", "--top-p", "0.9", "--seed", "3"),
    ("--max-new-tokens", "50", "--temperature", "1.1", "--top-k", "7", "--min-p", "0.01",
     "--repetition-penalty", "1.2", "--seed", "8"),
    ("--max-new-tokens", "30", "--stop", "e"),
)
WAYS = (
    ("--graph", "auto"),
    ("--graph", "eager"),
    ("--graph", "off"),
    ("--graph", "eager", "--steps-per-replay", "8"),
    ("--graph", "off", "--steps-per-replay", "4"),
)


class WindowTest(ProgramTest):
    def test_every_way_gives_the_same_text(self):
        for text in TEXTS:
            base = tiny("generate", TALKER, "--prompt", "hello there", *text)
            wanted = run_json(*base)
            for way in WAYS:
                got = run_json(*base, "--cache", "window", *way)
                for key in ("tokens", "text", "logprobs", "finish_reason"):
                    self.assertEqual(got[key], wanted[key], (key, text, way))
                self.assertEqual(got["cache"]["kind"], "window")
                for key in ("length", "capacity"):
                    self.assertEqual(got["cache"][key], wanted["cache"][key], (text, way))

    def test_the_other_commands(self):
        for command in ("score", "chat", "bench"):
            _, out, _ = run(command, "--help", check=0)
            self.assertIn("--graph", out.decode())
        ids = ",".join(str(i) for i in range(1, 30))
        base = tiny("score", TALKER, "--tokens", ids)
        self.assertEqual(
            run_json(*base, "--cache", "window")["logprobs"], run_json(*base)["logprobs"])
        got = run_json(*tiny("bench", TALKER, "--lengths", "8", "--decode", "8"),
                       "--cache", "window", "--steps-per-replay", "4")
        self.assertEqual(got["cache"], "window")

    def test_options_that_make_no_sense(self):
        base = tiny("generate", TALKER, "--prompt", "a")
        for words, text in (
            (("--graph", "eager"), "add --cache window"),
            (("--steps-per-replay", "4"), "add --cache window"),
            (("--cache", "window", "--graph", "cuda"), "the model is on the CPU"),
            (("--cache", "window", "--graph", "yes"), "must be auto, cuda, eager or off"),
            (("--cache", "window", "--steps-per-replay", "0"), "must be at least 1 but got 0"),
            (("--cache", "window", "--steps-per-replay", "300"), "must be at most 256"),
            (("--cache", "paged"), "must be preallocated, state, window, concat or none"),
        ):
            self.assert_error(2, *base, *words, text=text)


if __name__ == "__main__":
    unittest.main()
