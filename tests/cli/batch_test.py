"""kvcache batch on tiny models: each request as if alone, and every bad line."""

import json
import os
import unittest
from pathlib import Path

from program import LLAMA, TALKER, ProgramTest, interrupt_when_ready, run, run_json, start, tiny

ANSWER_KEYS = ["id", "tokens", "text", "logprobs", "finish_reason", "reuse", "timings"]
TIMING_KEYS = [
    "queued_ms",
    "prefill_ms",
    "decode_ms",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
]
SAME = ("tokens", "text", "logprobs", "finish_reason")


class BatchCase(ProgramTest):
    def setUp(self):
        self.place = self.folder(LLAMA).parent
        self.requests = self.place / "in.jsonl"
        self.output = self.place / "out.jsonl"

    def write(self, *lines):
        """Each line an object, or bytes as they are."""
        self.requests.write_bytes(
            b"".join(
                line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
                for line in lines
            )
        )

    def args(self, *more, model=TALKER):
        return tiny("batch", model, "--requests", self.requests, "--output", self.output, *more)

    def answers(self, *more, model=TALKER, check=0):
        _, out, err = run(*self.args(*more, model=model), check=check)
        self.assertEqual(out, b"")
        self.assertRegex(err.decode(), r"\A[^\n]+\n\Z")
        # Nothing else is left beside it.
        self.assertEqual(sorted(os.listdir(self.place)), ["in.jsonl", "model", "out.jsonl"])
        text = self.output.read_text()
        self.assertTrue(text == "" or text.endswith("\n"))
        return [json.loads(line) for line in text.splitlines()]

    def errors(self, *lines):
        """The errors of bad lines, between two good ones that are answered."""
        good = {"tokens": [72, 105], "max_new_tokens": 2}
        self.write({**good, "id": "first"}, *lines, {**good, "id": "last"})
        answers = self.answers()
        for answer in (answers[0], answers[-1]):
            self.assertEqual(len(answer["tokens"]), 2)
        for answer in answers[1:-1]:
            self.assertEqual(list(answer), ["id", "error"])
            self.assertNotIn("\n", answer["error"])
        return answers[1:-1]


class AnswersTest(BatchCase):
    def mixed(self):
        """Requests of many sorts, and what `generate` is asked for the same."""
        pairs = []
        for i in range(12):
            request, args = {"max_new_tokens": 3 + i, "chat": i % 4 == 0}, []
            if i % 4 == 3:
                request = {"max_new_tokens": 3 + i, "tokens": [40 + i, 60, 70 + 2 * i]}
                args += ["--tokens", ",".join(map(str, request["tokens"]))]
            else:
                request["prompt"] = "Grüße, 世界 " * (i + 1)
                args += ["--prompt", request["prompt"]] + ["--chat"] * request["chat"]
            args += ["--max-new-tokens", 3 + i]
            if i % 2:
                request |= {"temperature": 0.9, "seed": i, "top_k": 50, "top_p": 0.95}
                args += ["--temperature", 0.9, "--seed", i, "--top-k", 50, "--top-p", 0.95]
            if i % 3 == 0:
                request |= {"repetition_penalty": 1.2, "ignore_eos": True, "min_p": 0.01}
                args += ["--repetition-penalty", 1.2, "--ignore-eos", "--min-p", 0.01]
            if i % 5 == 0:
                request["stop"] = ["a", "\ufffd\ufffd"]
                args += ["--stop", "a", "--stop", "\ufffd\ufffd"]
            pairs.append((request, args))
        return pairs

    def test_each_request_is_as_if_alone(self):
        pairs = self.mixed()
        self.write(*(request for request, _ in pairs))
        wanted = [run_json(*tiny("generate", TALKER, *args)) for _, args in pairs]
        for more in (
            (),
            ("--slots", "1"),
            ("--slots", "3", "--cache", "concat", "--chunk", "7"),
            ("--slots", "1", "--cache", "none"),
            ("--slots", "100", "--context", "500"),
            ("--slots", "4", "--cache", "window"),
            ("--slots", "3", "--cache", "window", "--graph", "off"),
        ):
            got = self.answers(*more)
            self.assertEqual([answer["id"] for answer in got], list(range(1, 13)))
            for answer, alone in zip(got, wanted):
                for key in SAME:
                    self.assertEqual(answer[key], alone[key], (more, answer["id"]))

    def test_keys(self):
        self.write({"prompt": "Hello", "max_new_tokens": 4})
        (answer,) = self.answers()
        self.assertEqual(list(answer), ANSWER_KEYS)
        self.assertIsNone(answer["reuse"])
        self.assertEqual(list(answer["timings"]), TIMING_KEYS)
        self.assertTrue(all(value >= 0 for value in answer["timings"].values()))
        self.assertEqual(len(answer["tokens"]), len(answer["logprobs"]))

    def test_the_command_line_gives_the_defaults(self):
        self.write(
            {"prompt": "Hello"},
            {"prompt": "Hello", "max_new_tokens": 2, "temperature": 0, "chat": False},
            {"prompt": "Hello", "max_new_tokens": None, "seed": None, "chat": None, "id": None},
            {"tokens": [72, 105]},  # used exactly, whatever the default is
        )
        first, second, third, fourth = self.answers(
            "--max-new-tokens", "5", "--temperature", "1", "--seed", "3", "--ignore-eos", "--chat"
        )
        self.assertEqual(len(first["tokens"]), 5)
        self.assertEqual(first["seed"], 3)
        self.assertEqual(len(second["tokens"]), 2)
        self.assertNotIn("seed", second)
        for key in SAME:
            self.assertEqual(first[key], third[key])
        self.assertEqual(third["id"], 3)
        plain = run_json(
            *tiny("generate", TALKER, "--tokens", "72,105", "--max-new-tokens", "5"),
            "--temperature", "1", "--seed", "3", "--ignore-eos",
        )
        self.assertEqual(fourth["tokens"], plain["tokens"])

    def test_ids_are_echoed_in_the_order_of_the_file(self):
        base = {"max_new_tokens": 1, "tokens": [72]}
        ids = ["z", 7, "7", -3, 18446744073709551615, "", "é\n\x00", 1]
        self.write(*({**base, "id": i, "max_new_tokens": 9 - n} for n, i in enumerate(ids)))
        answers = self.answers("--slots", "2")
        self.assertEqual([answer["id"] for answer in answers], ids)
        self.assertTrue(all("tokens" in answer for answer in answers))

    def test_line_ends_and_blank_lines(self):
        line = b'{"tokens": [72], "max_new_tokens": 1}'
        self.write(line + b"\r\n", b"\n", b" \t\r\n", line + b"\n\n", line)
        self.assertEqual([answer["id"] for answer in self.answers()], [1, 4, 6])
        self.write(b"\xef\xbb\xbf" + line)  # a byte order mark
        self.assertEqual(len(self.answers()), 1)

    def test_an_empty_file_is_no_failure(self):
        for text in (b"", b"\n\r\n  \n"):
            self.write(text)
            self.assertEqual(self.answers(), [])

    def test_token_ids_need_no_tokenizer(self):
        self.write({"tokens": [45, 3], "max_new_tokens": 4}, {"prompt": "Hi"}, {"tokens": [64]})
        good, text, beyond = self.answers(model=LLAMA)
        alone = run_json(*tiny("generate", LLAMA, "--tokens", "45,3", "--max-new-tokens", "4"))
        self.assertEqual(good["tokens"], alone["tokens"])
        self.assertEqual(good["text"], "")
        self.assertIn("the model has no tokenizer", text["error"])
        self.assertIn("token ids must be in [0, 64) but id 0 is 64", beyond["error"])


class BadLinesTest(BatchCase):
    def test_what_is_no_request(self):
        cases = (
            (b"{\n", "must be JSON"),
            (b"nonsense\n", "must be JSON"),
            (b'{"tokens": [72]} {"tokens": [72]}\n', "must be JSON"),
            (b'{"tokens": [72],}\n', "must be JSON"),
            (b"[1, 2]\n", "must be a JSON object but is [1,2]"),
            (b"7\n", "must be a JSON object but is 7"),
            (b"null\n", "must be a JSON object but is null"),
            (b'{"prompt": "\xff\xfe"}\n', "must be JSON"),
            (b'{"prompt": "\xc3\x28"}\n', "must be JSON"),
            (b'{"tokens": [72]}\x00{}\n', "byte 16 is zero"),
            (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}\n", "deeper than 16 levels"),
            (b"[" * 100000 + b"\n", "deeper than 16 levels"),
            (b'{"temperature": 1e999, "tokens": [72]}\n', "1e999"),
            (b'{"temperature": NaN, "tokens": [72]}\n', "must be JSON"),
            (b'{"tokens": [72], "tokens": [73]}\n', 'the key "tokens" stands twice'),
        )
        found = self.errors(*(line for line, _ in cases))
        for i, (answer, (line, text)) in enumerate(zip(found, cases)):
            self.assertEqual(answer["id"], i + 2)
            self.assertIn(text, answer["error"], line[:60])

    def test_what_a_request_cannot_say(self):
        base = {"tokens": [72]}
        cases = (
            ({}, "exactly one of prompt and tokens"),
            ({"prompt": "a", **base}, "exactly one of prompt and tokens"),
            ({"prompt": ""}, "prompt must be a text that is not empty"),
            ({"prompt": 5}, "prompt must be a text that is not empty but got 5"),
            ({"tokens": []}, "the prompt must not be empty"),
            ({"tokens": "1,2"}, "tokens must be a list of token ids"),
            ({"tokens": [1.5]}, "tokens must be a whole number of 64 bits but got 1.5"),
            ({"tokens": [[1]]}, "tokens must be a whole number of 64 bits but got [1]"),
            ({"tokens": [2**64]}, "tokens must be a whole number of 64 bits"),
            ({"tokens": [-1]}, "id 0 is -1"),
            ({"tokens": [272]}, "token ids must be in [0, 272) but id 0 is 272"),
            ({"max_new_tokens": 0}, "max_new_tokens must be at least 1 but got 0"),
            ({"max_new_tokens": 2**63}, "max_new_tokens must be a whole number of 64 bits"),
            ({"max_new_tokens": 1.0}, "max_new_tokens must be a whole number"),
            ({"max_new_tokens": True}, "max_new_tokens must be a whole number"),
            ({"max_new_tokens": 512}, "1 tokens and 512 new ones exceed the context of 512"),
            ({"tokens": [72] * 513}, "prompt of 513 tokens is longer than the context of 512"),
            ({"temperature": -1}, "temperature must be a number of at least 0 but got -1"),
            ({"temperature": "1"}, 'temperature must be a number but got "1"'),
            ({"top_k": -1}, "top_k must be at least 0 but got -1"),
            ({"top_p": 1.5}, "top_p must be between 0 and 1 but got 1.5"),
            ({"min_p": -0.5}, "min_p must be between 0 and 1 but got -0.5"),
            ({"repetition_penalty": 0}, "repetition_penalty must be above 0 but got 0"),
            ({"seed": -1}, "seed must be a whole number from 0 on"),
            ({"seed": 2**64}, "seed must be a whole number from 0 on"),
            ({"stop": ""}, "stop must be a text that is not empty"),
            ({"stop": ["a", ""]}, "stop must be a text that is not empty"),
            ({"stop": [["a"]]}, "stop must be a text that is not empty"),
            ({"ignore_eos": 1}, "ignore_eos must be true or false but got 1"),
            ({"chat": "yes"}, 'chat must be true or false but got "yes"'),
            ({"chat": True}, "tokens are used exactly as they are; leave chat out"),
            ({"id": 1.5}, "id must be a string or an integer but got 1.5"),
            ({"id": [1]}, "id must be a string or an integer but got [1]"),
            ({"id": True}, "id must be a string or an integer but got true"),
            ({"max_tokens": 5}, 'the key "max_tokens" is not known; there are id, prompt'),
            ({"": 5}, 'the key "" is not known'),
            ({"route": "a"}, "the adapter must be one of the model's (none) but got a"),
            ({"route": 1}, "route must be the name of an adapter but got 1"),
            ({"adapter_from": -1}, "adapter_from must be at least 0 but got -1"),
            ({"namespace": ""}, "namespace must be a text that is not empty"),
            ({"namespace": 1}, "namespace must be a text that is not empty but got 1"),
        )
        found = self.errors(
            *(case if "prompt" in case or not case else {**base, **case} for case, _ in cases)
        )
        for answer, (case, text) in zip(found, cases):
            self.assertIn(text, answer["error"], case)

    def test_an_id_is_given_once(self):
        base = {"tokens": [72], "max_new_tokens": 1}
        self.write(
            {**base, "id": "first"},
            {**base, "id": "first"},
            {**base, "id": 1},
            {"id": "a", "oops": 1},
            {**base, "id": "a"},
            {**base, "id": 7},
            base,  # line 7
        )
        answers = self.answers()
        for i, text in (
            (1, 'the id "first" is taken by line 1'),
            (3, "oops"),
            (4, 'the id "a" is taken by line 4'),
            (6, "the id 7 is taken by line 6"),
        ):
            self.assertIn(text, answers[i].pop("error"))
            answers[i].pop("id")
            self.assertEqual(answers[i], {})
        for i in (0, 2, 5):
            self.assertEqual(len(answers[i]["tokens"]), 1)

    def test_when_none_succeeds(self):
        self.write({"tokens": []}, b"{\n")
        self.assert_error(1, *self.args(), text=("none of 2 requests succeeded", "out.jsonl"))
        self.assertEqual(len(self.output.read_text().splitlines()), 2)

    def test_contexts(self):
        """K103: around a context of sixteen tokens, with every cache."""
        for more in (("--cache", "concat"), (), ("--cache", "window"),
                     ("--cache", "none", "--slots", "1")):
            self.write(*({"tokens": [72] * n, "ignore_eos": True} for n in (15, 16, 17, 1000)))
            fits, *others = self.answers("--context", "16", *more)
            self.assertEqual(len(fits["tokens"]), 1)
            for n, answer in zip((16, 17, 1000), others):
                self.assertIn(f"prompt of {n} tokens", answer["error"])
                self.assertIn("16 tokens", answer["error"])


class UsageTest(BatchCase):
    def setUp(self):
        super().setUp()
        self.write({"tokens": [72], "max_new_tokens": 1})

    def test_command_line(self):
        base = ("batch", "--model", TALKER)
        self.assert_error(2, *base, text="--requests")
        self.assert_error(2, *base, "--requests", self.requests, text="--output")
        for more, text in (
            (("--slots", "0"), "--slots must be at least 1 but got 0"),
            (("--slots", "-1"), "--slots must be at least 1 but got -1"),
            (("--slots", "many"), "--slots"),
            (("--cache", "none"), "--cache none recomputes everything"),
            (("--cache", "none", "--slots", "2"), "give --slots 1"),
            (("--cache", "window", "--steps-per-replay", "4"), "one token a replay"),
            (("--graph", "eager"), "add --cache window"),
            (("--cache", "paged"), "must be preallocated, state, window, concat or none"),
            (("--prefix-cache-mb", "-1"), "--prefix-cache-mb must be between 0 and"),
            (("--prefix-cache-mb", "1.5"), "--prefix-cache-mb"),
            (("--prefix-dir", self.place), "add --prefix-cache-mb"),
            (("--prefix-cache-mb", "1", "--cache", "none", "--slots", "1"), "remembers nothing"),
            (("--temperature", "-1"), "temperature must be"),
            (("--max-new-tokens", "0"), "--max-new-tokens must be at least 1"),
        ):
            self.assert_error(2, *self.args(*more), text=text)
            self.assertFalse(self.output.exists())
        self.answers("--prefix-cache-mb", "0")

    def test_files(self):
        before = self.requests.read_bytes()
        same = self.place / "model" / ".." / "in.jsonl"
        link = self.place / "link"
        link.symlink_to(self.requests)
        base = tiny("batch", TALKER, "--requests", self.requests, "--output")
        for output in (self.requests, same, link):
            self.assert_error(2, *base, output, text="--output must not be the file of the requests")
        link.unlink()
        self.assert_error(1, *base, self.place, text="it is a folder")
        self.assert_error(1, *base, self.place / "no" / "out", text="is no folder")
        self.assert_error(1, *base, f"{self.place}/new/", text="cannot be written")
        self.assert_error(1, *base, "/dev/null", text="it is no regular file")
        self.assert_error(1, *base, "", text="cannot be written")
        for requests, text in (("/no/such", "/no/such"), (self.place, "cannot be read"), ("-", "-:")):
            self.assert_error(
                1, *tiny("batch", TALKER, "--requests", requests, "--output", self.output), text=text
            )
        self.assertEqual(self.requests.read_bytes(), before)
        self.assertEqual(sorted(os.listdir(self.place)), ["in.jsonl", "model"])
        self.assertTrue(Path("/dev/null").is_char_device())

    def test_a_run_that_fails_leaves_the_old_output(self):
        self.output.write_text("old\n")
        self.assert_error(1, *self.args(model="/no/such"), text="/no/such")
        self.assert_error(1, *self.args("--context", "513"), text=("1 and 512", "got 513"))
        self.assertEqual(self.output.read_text(), "old\n")
        self.answers()
        self.assertNotEqual(self.output.read_text(), "old\n")

    def test_a_link_is_followed(self):
        self.output.symlink_to(self.place / "model" / "there")
        (self.place / "model" / "there").write_text("")
        self.answers()
        self.assertTrue(self.output.is_symlink())

    def test_help(self):
        status, out, _ = run("batch", "--help")
        self.assertEqual(status, 0)
        for text in ("--slots", "Ctrl-C", "Example: kvcache batch", "repetition_penalty"):
            self.assertIn(text, out.decode())


class InterruptTest(BatchCase):
    def test_control_c_writes_what_there_is(self):
        self.write(
            *({"tokens": [72], "max_new_tokens": 511, "ignore_eos": True} for _ in range(40)),
            {"tokens": []},
        )
        process = start(*self.args("--slots", "2"))
        interrupt_when_ready(process)
        _, err = process.communicate()
        self.assertEqual(process.returncode, 0, err)
        answers = [json.loads(line) for line in self.output.read_text().splitlines()]
        self.assertEqual(len(answers), 41)
        self.assertEqual(answers[-2]["finish_reason"], "cancelled")
        self.assertIn("error", answers[-1])


if __name__ == "__main__":
    unittest.main()
