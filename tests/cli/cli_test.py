"""The kvcache program on tiny models: options, exit status, errors, JSON."""

import json
import signal
import subprocess
import time
import unittest

from program import (
    CACHES,
    HYBRID,
    LLAMA,
    PROGRAM,
    TALKER,
    ProgramTest,
    edit_json,
    interrupt_when_ready,
    run,
    run_json,
    start,
    tiny,
)

COMMANDS = ("generate", "chat", "score", "tokenize", "inspect", "batch", "bench")
GENERATE_KEYS = [
    "prompt_tokens",
    "tokens",
    "text",
    "logprobs",
    "finish_reason",
    "cache",
    "timings",
]
TIMING_KEYS = [
    "load_ms",
    "prefill_ms",
    "decode_ms",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "peak_rss_bytes",
]


class HelpTest(ProgramTest):
    def test_every_command_shows_an_example(self):
        for command in COMMANDS:
            status, out, err = run(command, "--help")
            self.assertEqual((status, err), (0, b""))
            self.assertIn(f"Example: kvcache {command}", out.decode())

    def test_help_and_version(self):
        status, out, _ = run("--help")
        self.assertEqual(status, 0)
        for command in COMMANDS:
            self.assertIn(command, out.decode())
        status, out, _ = run("--version")
        self.assertEqual(status, 0)
        self.assertRegex(out.decode(), r"^kvcache \d+\.\d+\.\d+ on LibTorch \d")


    def test_output_that_cannot_be_written(self):
        for args in (("--help",), ("--version",), tiny("score", LLAMA, "--tokens", "1,2")):
            with open("/dev/full", "wb") as full:
                done = subprocess.run(
                    [PROGRAM, *args], stdout=full, stderr=subprocess.PIPE, check=False
                )
            self.assertEqual(done.returncode, 1)
            self.assertIn(b"standard output cannot be written", done.stderr)


class UsageTest(ProgramTest):
    def test_command_line(self):
        for args, text in (
            ((), "a command is needed; `kvcache --help` lists the commands"),
            (("sing",), "there is no command 'sing'"),
            (("generate",), "--model"),
            (("generate", "--model", LLAMA, "--tokens", "1", "--loud"), "--loud"),
            (("generate", "--model"), "--model"),
            (("score", "--model", LLAMA), "--tokens"),
            (("inspect",), "--model"),
            (("tokenize", "--model", TALKER), "exactly one of --text and --text-file"),
        ):
            self.assert_error(2, *args, text=text)

    def test_what_does_not_exist_yet_says_what_does(self):
        for option, value, text in (
            ("--dtype", "float16", "must be auto, packed, float32 or bfloat16 but got float16"),
            ("--device", "tpu", "must be cpu, cuda or cuda:N but got tpu"),
            ("--device", "cuda:x", "cuda:N must have a number up to 127 but got cuda:x"),
            ("--device", "cuda:-1", "number up to 127 but got cuda:-1"),
            ("--device", "cuda:128", "number up to 127 but got cuda:128"),
            ("--cache", "paged", "must be preallocated, state, window, concat or none"),
            ("--kv-format", "int4", "must be auto or int8 but got int4"),
        ):
            for command in ("generate", "score"):
                self.assert_error(
                    2, command, "--model", LLAMA, "--tokens", "1", option, value, text=text
                )

    # A program without its CUDA part was asked wrongly; a machine without that
    # many GPUs has failed.
    def test_a_device_that_is_not_there(self):
        texts = {
            2: "--device cuda:99: this program was built without its CUDA part; "
            "use --device cpu, or build with -DKVCACHE_CUDA=ON",
            1: "there must be a device cuda:99 but this machine has ",
        }
        for command in ("generate", "score"):
            args = (command, "--model", LLAMA, "--tokens", "1", "--device", "cuda:99")
            status = run(*args)[0]
            self.assertIn(status, texts)
            self.assert_error(status, *args, text=texts[status])

    def test_numbers_out_of_range(self):
        for option, value, text in (
            ("--threads", "0", "--threads must be at least 1 but got 0"),
            ("--threads", "1025", "--threads must be at most 1024 but got 1025"),
            ("--threads", "2147483648", "up to 2147483647 but got 2147483648"),
            ("--chunk", "0", "--chunk must be at least 1 but got 0"),
            ("--context", "-5", "--context must be at least 1 but got -5"),
            ("--max-new-tokens", "0", "--max-new-tokens must be at least 1 but got 0"),
            ("--max-new-tokens", "-1", "--max-new-tokens must be at least 1 but got -1"),
            ("--max-new-tokens", "many", "--max-new-tokens"),
            ("--max-new-tokens", "9223372036854775808", "but got 9223372036854775808"),
            ("--max-new-tokens", "010 ", "must be a whole number"),
            ("--top-k", "18446744073709551616", "but got 18446744073709551616"),
            ("--temperature", "-1", "temperature must be a number of at least 0 but got -1"),
            ("--temperature", "nan", "temperature must be a number of at least 0 but got"),
            ("--temperature", "inf", "temperature must be a number of at least 0 but got inf"),
            ("--top-k", "-1", "top_k must be at least 0 but got -1"),
            ("--top-p", "1.5", "top_p must be between 0 and 1 but got 1.5"),
            ("--top-p", "nan", "top_p must be between 0 and 1"),
            ("--min-p", "-0.5", "min_p must be between 0 and 1 but got -0.5"),
            ("--repetition-penalty", "0", "repetition_penalty must be above 0 but got 0"),
            ("--seed", "-1", "--seed: must be at least 0 but got -1"),
            ("--seed", "18446744073709551616", "but got 18446744073709551616"),
            ("--stop", "", "--stop must not be empty"),
            ("--logprobs", "-1", "--logprobs must be at least 0 but got -1"),
            ("--logprobs", "2", "--logprobs are part of the JSON; give --json too"),
        ):
            self.assert_error(
                2, "generate", "--model", LLAMA, "--tokens", "1", option, value, text=text
            )

    def test_prompts(self):
        base = ("generate", "--model", TALKER)
        one = "exactly one of --prompt, --prompt-file and --tokens"
        self.assert_error(2, *base, text=one)
        self.assert_error(2, *base, "--prompt", "a", "--tokens", "1", text=one)
        self.assert_error(2, *base, "--tokens", "1", "--chat", text="leave --chat out")
        self.assert_error(2, *base, "--prompt", "", text="the prompt must not be empty")
        self.assert_error(2, *base, "--prompt", "", "--chat", text="must not be empty")
        self.assert_error(2, *base, "--prompt-file", "-", text="must not be empty")
        for tokens in ("", "1,,2", "1,2,", ",1", "a", "1 2", "1.5", "99999999999999999999"):
            self.assert_error(
                2, *base, "--tokens", tokens, text="--tokens must be numbers as in 1,2,3"
            )


class FailureTest(ProgramTest):
    def test_models_that_are_none(self):
        self.assert_error(
            1, "generate", "--model", "/no/such", "--tokens", "1", text="/no/such: no such file"
        )
        self.assert_error(1, "inspect", "/no/such", text="/no/such")
        self.assert_error(1, "tokenize", "--model", "/no/such", "--text", "a", text="/no/such")
        self.assert_error(
            1, "generate", "--model", LLAMA / "config.json", "--tokens", "1", text="config.json"
        )

    def test_what_a_model_lacks(self):
        self.assert_error(
            1, *tiny("generate", LLAMA, "--prompt", "a"), text="the model has no tokenizer"
        )
        copy = self.folder()
        edit_json(copy / "tokenizer_config.json", chat_template=None)
        self.assert_error(
            1, *tiny("generate", copy, "--prompt", "a", "--chat"), text="has no chat template"
        )

    def test_files_that_cannot_be_read(self):
        self.assert_error(
            1, *tiny("generate", TALKER, "--prompt-file", "/no/such"), text="/no/such"
        )

    def test_ids_out_of_range(self):
        for command in ("generate", "score"):
            for bad in (-1, 64):
                self.assert_error(
                    1, *tiny(command, LLAMA, "--tokens", f"3,{bad}"), text=("[0, 64)", f"is {bad}")
                )

    def test_context_of_sixteen(self):
        """K103: prompts around the context, with every cache."""
        for cache in CACHES:
            base = ("--context", "16", "--cache", cache)

            def with_prompt(count, *more, base=base):
                ids = ",".join(str(3 + i % 50) for i in range(count))
                return tiny("generate", LLAMA, "--tokens", ids, *base, *more)

            result = run_json(*with_prompt(15))
            self.assertEqual(len(result["tokens"]), 1)
            self.assertEqual(result["finish_reason"], "length")
            self.assert_error(
                1,
                *with_prompt(15, "--max-new-tokens", "2"),
                text="15 tokens and 2 new ones exceed the context of 16 tokens",
            )
            self.assert_error(1, *with_prompt(16), text=("16 tokens", "context of 16"))
            self.assert_error(1, *with_prompt(17), text=("17 tokens", "context of 16"))
            self.assert_error(1, *with_prompt(1000), text=("1000 tokens", "context of 16"))

    def test_context_beyond_the_model(self):
        self.assert_error(
            1,
            *tiny("generate", LLAMA, "--tokens", "1", "--context", "129"),
            text=("between 1 and 128", "got 129"),
        )


class GenerateTest(ProgramTest):
    def test_a_hybrid_with_every_cache(self):
        """transformers' greedy text; the GGUF says that it has no tokenizer."""
        prompt = json.loads((HYBRID / "expected.json").read_text())["prompts"][3]
        wanted = prompt["greedy"]["tokens"]
        ask = ("--tokens", ",".join(map(str, prompt["tokens"])), "--ignore-eos")
        ask += ("--max-new-tokens", len(wanted))
        runs = [(HYBRID, cache) for cache in CACHES]
        for model, cache in [*runs, (HYBRID / "model.gguf", "preallocated")]:
            found = run_json(*tiny("generate", model, *ask, "--cache", cache))
            self.assertEqual(found["tokens"], wanted, (model, cache))

    def test_json_keys(self):
        result = run_json(*tiny("generate", LLAMA, "--tokens", "45,3", "--max-new-tokens", "5"))
        self.assertEqual(list(result), GENERATE_KEYS)
        self.assertEqual(result["prompt_tokens"], [45, 3])
        self.assertEqual(len(result["tokens"]), len(result["logprobs"]))
        self.assertIsInstance(result["text"], str)
        self.assertEqual(list(result["timings"]), TIMING_KEYS)
        self.assertTrue(all(value >= 0 for value in result["timings"].values()))
        self.assertGreater(result["timings"]["peak_rss_bytes"], 1 << 20)
        cache = result["cache"]
        self.assertEqual(list(cache), ["kind", "length", "capacity", "bytes"])
        self.assertEqual(cache["kind"], "preallocated")
        self.assertEqual(cache["length"], 2 + len(result["tokens"]) - 1)
        self.assertGreaterEqual(cache["capacity"], cache["length"])
        self.assertGreater(cache["bytes"], 0)

    def test_caches_and_chunks_agree_bit_for_bit(self):
        ids = ",".join(str(3 + i * 7 % 60) for i in range(40))
        base = tiny("generate", LLAMA, "--tokens", ids, "--ignore-eos", "--max-new-tokens", "20")
        wanted = run_json(*base, "--cache", "none")
        self.assertIsNone(wanted["cache"])
        for cache in ("concat", "preallocated"):
            for chunk in ("1", "7", "256"):
                got = run_json(*base, "--cache", cache, "--chunk", chunk)
                for key in ("tokens", "logprobs", "finish_reason"):
                    self.assertEqual(got[key], wanted[key], (cache, chunk))
                self.assertEqual(got["cache"]["capacity"] is None, cache == "concat")

    def test_codes_agree_bit_for_bit_among_caches(self):
        ids = ",".join(str(3 + i * 7 % 60) for i in range(40))
        base = tiny("generate", LLAMA, "--tokens", ids, "--ignore-eos", "--max-new-tokens", "20")
        plain = run_json(*base)
        wanted = run_json(*base, "--kv-format", "int8")
        self.assertNotEqual(wanted["logprobs"], plain["logprobs"])
        self.assertLess(wanted["cache"]["bytes"], plain["cache"]["bytes"])
        for cache in ("preallocated", "state", "window"):
            got = run_json(*base, "--kv-format", "int8", "--cache", cache, "--chunk", "7")
            self.assertEqual(got["logprobs"], wanted["logprobs"], cache)
        for cache in ("concat", "none"):
            self.assert_error(
                2, *base, "--kv-format", "int8", "--cache", cache,
                text=("--cache " + cache + " cannot", "preallocated, state or window"),
            )

    def test_thread_counts_agree_bit_for_bit(self):
        base = ("generate", "--model", LLAMA, "--tokens", "45,3,9", "--max-new-tokens", "8")
        one, two = (run_json(*base, "--threads", n) for n in ("1", "2"))
        self.assertEqual(one["logprobs"], two["logprobs"])

    def test_sampling_is_reproducible(self):
        base = tiny("generate", LLAMA, "--tokens", "45", "--temperature", "1", "--ignore-eos")
        one, same, other = (run_json(*base, "--seed", seed) for seed in ("1", "1", "2"))
        self.assertEqual(one["tokens"], same["tokens"])
        self.assertEqual(one["seed"], 1)
        self.assertNotEqual(one["tokens"], other["tokens"])
        drawn = run_json(*base)  # the seed that was drawn makes it again
        self.assertEqual(drawn["tokens"], run_json(*base, "--seed", drawn["seed"])["tokens"])

    def test_special_sampling_values(self):
        """K106: as good as the arg-max, or at least a text."""
        base = tiny("generate", LLAMA, "--tokens", "45", "--ignore-eos", "--max-new-tokens", "6")
        greedy = run_json(*base)["tokens"]
        for more in (
            ("--temperature", "1e-30"),
            ("--temperature", "1", "--top-k", "1"),
            ("--temperature", "1", "--top-p", "0"),
            ("--temperature", "1", "--min-p", "1"),
            ("--repetition-penalty", "1"),
        ):
            self.assertEqual(run_json(*base, *more)["tokens"], greedy, more)
        for more in (("--top-k", "0"), ("--top-k", "100000"), ("--top-p", "1")):
            run_json(*base, "--temperature", "1", *more)

    def test_best_tokens_at_each_place(self):
        result = run_json(
            *tiny("generate", LLAMA, "--tokens", "45", "--max-new-tokens", "3", "--logprobs", "4")
        )
        self.assertEqual(len(result["top_logprobs"]), 3)
        for token, log_prob, best in zip(
            result["tokens"], result["logprobs"], result["top_logprobs"]
        ):
            self.assertEqual(len(best), 4)
            self.assertEqual(best[0], {"token": token, "logprob": log_prob})

    def test_prompt_from_file_and_standard_input(self):
        path = self.folder() / "prompt.txt"
        text = "Grüße, 世界\n".encode()
        path.write_bytes(text)
        wanted = run_json(*tiny("generate", TALKER, "--prompt", text.decode()))
        from_file = run_json(*tiny("generate", TALKER, "--prompt-file", path))
        piped = run_json(*tiny("generate", TALKER, "--prompt-file", "-"), stdin=text)
        self.assertEqual(wanted["tokens"], from_file["tokens"])
        self.assertEqual(wanted["prompt_tokens"], piped["prompt_tokens"])

    def test_text_for_people(self):
        result = run_json(*tiny("generate", TALKER, "--prompt", "Hello"))
        status, out, err = run(*tiny("generate", TALKER, "--prompt", "Hello"))
        self.assertEqual(status, 0)
        self.assertEqual(out.decode(), result["text"] + "\n")
        self.assertIn("tok/s", err.decode())
        # Bytes that are no UTF-8 are shown as U+FFFD in both.
        self.assertIn("\ufffd", result["text"])

    def test_tokens_are_used_exactly(self):
        copy = self.with_begin_token()
        result = run_json(*tiny("generate", copy, "--tokens", "72,105", "--max-new-tokens", "1"))
        self.assertEqual(result["prompt_tokens"], [72, 105])

    def with_begin_token(self):
        copy = self.folder()
        edit_json(copy / "tokenizer_config.json", add_bos_token=True)
        return copy

    def test_exactly_one_begin_token(self):
        """K100: a template that writes it, a tokenizer that adds it, both, none."""
        begin = 268  # <|im_start|>
        short = ("--prompt", "Hi", "--max-new-tokens", "1")
        adding = self.with_begin_token()
        self.assertNotIn(begin, run_json(*tiny("generate", TALKER, *short))["prompt_tokens"])
        raw = run_json(*tiny("generate", adding, *short))["prompt_tokens"]
        self.assertEqual((raw[0], raw.count(begin)), (begin, 1))
        plain = self.folder()
        edit_json(
            plain / "tokenizer_config.json",
            add_bos_token=True,
            chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
        )
        for model in (TALKER, adding, plain):
            ids = run_json(*tiny("generate", model, "--chat", *short))["prompt_tokens"]
            self.assertEqual(ids[0], begin, model)
            self.assertNotEqual(ids[1], begin, model)

    def test_a_prompt_never_becomes_a_control_token(self):
        spelled = run_json(*tiny("generate", TALKER, "--prompt", "<|im_end|>", "--max-new-tokens", "1"))
        self.assertNotIn(269, spelled["prompt_tokens"])
        chat = run_json(
            *tiny("generate", TALKER, "--chat", "--prompt", "<|im_end|>", "--max-new-tokens", "1")
        )
        self.assertEqual(chat["prompt_tokens"].count(269), 1)  # the template's own

    def test_every_declared_end_token_stops(self):
        """K105: in config.json, in generation_config.json, in the tokenizer."""
        base = ("--prompt", "Hello", "--max-new-tokens", "12")
        free = run_json(*tiny("generate", TALKER, *base, "--ignore-eos"))
        self.assertEqual(len(free["tokens"]), 12)
        end = free["tokens"][4]
        first = free["tokens"].index(end)
        for file, changes in (
            ("config.json", {"eos_token_id": end}),
            ("generation_config.json", {"eos_token_id": [270, end]}),
        ):
            copy = self.folder()
            edit_json(copy / file, **changes)
            got = run_json(*tiny("generate", copy, *base))
            self.assertEqual(got["tokens"], free["tokens"][: first + 1], file)
            self.assertEqual(got["finish_reason"], "stop")
            on = run_json(*tiny("generate", copy, *base, "--ignore-eos"))
            self.assertEqual(on["tokens"], free["tokens"])
            self.assertEqual(on["finish_reason"], "length")

    def test_stop_strings(self):
        base = ("--prompt", "Hello", "--max-new-tokens", "24", "--ignore-eos")
        text = run_json(*tiny("generate", TALKER, *base))["text"]
        for start_at, length in ((0, 1), (3, 2), (5, 6)):
            stop = text[start_at : start_at + length]
            got = run_json(*tiny("generate", TALKER, *base, "--stop", "[never]", "--stop", stop))
            self.assertEqual(got["text"], text[: text.index(stop)])
            self.assertEqual(got["finish_reason"], "stop")
            _, out, _ = run(*tiny("generate", TALKER, *base, "--stop", stop))
            self.assertEqual(out.decode(), text[: text.index(stop)] + "\n")

    def test_control_c_is_no_failure(self):
        for json_flag in ((), ("--json",)):
            process = start(
                *tiny("generate", TALKER, "--prompt", "Hello", "--ignore-eos", *json_flag)
            )
            interrupt_when_ready(process)
            out, err = process.communicate()
            self.assertEqual(process.returncode, 0, err)
            if json_flag:
                result = json.loads(out)
                self.assertIn(result["finish_reason"], ("cancelled", "length"))
                self.assertEqual(list(result), GENERATE_KEYS)


class ScoreTest(ProgramTest):
    def test_agrees_for_every_cache_and_chunk(self):
        ids = ",".join(str(3 + i * 7 % 60) for i in range(60))
        base = tiny("score", LLAMA, "--tokens", ids)
        wanted = run_json(*base, "--cache", "none")
        self.assertEqual(list(wanted), ["logprobs"])
        self.assertEqual(len(wanted["logprobs"]), 59)
        for cache in ("concat", "preallocated"):
            for chunk in ("1", "16", "59", "256"):
                got = run_json(*base, "--cache", cache, "--chunk", chunk)
                self.assertEqual(got, wanted, (cache, chunk))

    def test_one_token_and_a_full_context(self):
        self.assertEqual(run_json(*tiny("score", LLAMA, "--tokens", "7")), {"logprobs": []})
        full = ",".join("7" for _ in range(128))
        self.assertEqual(len(run_json(*tiny("score", LLAMA, "--tokens", full))["logprobs"]), 127)
        self.assert_error(
            1, *tiny("score", LLAMA, "--tokens", full + ",7"), text=("129 tokens", "of 128")
        )

    def test_lines_for_people(self):
        _, out, _ = run(*tiny("score", LLAMA, "--tokens", "7,8,9"), check=0)
        self.assertEqual([line.split("\t")[0] for line in out.decode().splitlines()], ["8", "9"])


class TokenizeTest(ProgramTest):
    def test_control_strings_only_when_asked(self):
        base = ("tokenize", "--model", TALKER, "--text", "<|im_end|>")
        self.assertNotIn(269, run_json(*base)["tokens"])
        self.assertEqual(run_json(*base, "--special"), {"tokens": [269]})

    def test_empty_text_files_and_lines(self):
        base = ("tokenize", "--model", TALKER)
        self.assertEqual(run_json(*base, "--text", ""), {"tokens": []})
        piped = run_json(*base, "--text-file", "-", stdin=b"Hi\n")
        self.assertEqual(piped, run_json(*base, "--text", "Hi\n"))
        _, out, _ = run(*base, "--text", "Hi", check=0)
        ids = run_json(*base, "--text", "Hi")["tokens"]
        self.assertEqual(out.decode(), ",".join(map(str, ids)) + "\n")


class InspectTest(ProgramTest):
    def test_json(self):
        found = run_json("inspect", TALKER)
        self.assertEqual(found, run_json("inspect", "--model", TALKER))
        self.assertEqual(
            list(found), ["path", "format", "config", "tensors", "tokenizer", "cache"]
        )
        self.assertEqual(found["format"], "safetensors")
        self.assertEqual(found["config"]["vocab_size"], 272)
        self.assertEqual(found["tokenizer"]["ends"], [269, 271])
        self.assertTrue(found["tokenizer"]["chat_template"])
        config = found["config"]
        values = 2 * config["layers"] * config["kv_heads"] * config["head_dim"]
        self.assertEqual(
            found["cache"]["bytes_per_token"], {"bfloat16": 2 * values, "float32": 4 * values}
        )
        self.assertEqual(config["linear_layers"], 0)
        self.assertEqual(found["cache"]["state_bytes"], {"bfloat16": 0, "float32": 0})
        types = found["tensors"]["types"].values()
        self.assertEqual(sum(t["count"] for t in types), found["tensors"]["count"])
        self.assertEqual(sum(t["bytes"] for t in types), found["tensors"]["bytes"])

    def test_a_hybrid(self):
        for model in (HYBRID, HYBRID / "model.gguf"):
            found = run_json("inspect", model)
            self.assertEqual(found["config"]["layers"], 4)
            self.assertEqual(found["config"]["linear_layers"], 3)
            # One layer of attention with one head of 16; three states of
            # 4 x 8 x 8, and 3 inputs of 64 channels.
            self.assertEqual(
                found["cache"],
                {
                    "bytes_per_token": {"bfloat16": 64, "float32": 128},
                    "state_bytes": {"bfloat16": 4224, "float32": 5376},
                },
            )

    def test_gguf_and_lines(self):
        found = run_json("inspect", LLAMA / "model.gguf")
        self.assertEqual(found["format"], "gguf")
        self.assertIn("error", found["tokenizer"])
        _, out, _ = run("inspect", LLAMA / "model.gguf", check=0)
        self.assertIn("config.context_length: 128\n", out.decode())


class ChatTest(ProgramTest):
    def test_a_pipe_of_lines(self):
        base = tiny("chat", TALKER, "--max-new-tokens", "8")
        _, out, _ = run(*base, "--json", stdin=b"Hello\n\nMore?\r\nBye", check=0)
        answers = [json.loads(line) for line in out.decode().splitlines()]
        self.assertEqual(len(answers), 3)  # the empty line is no turn
        self.assertEqual(answers[0]["reused_tokens"], 0)
        for before, after in zip(answers, answers[1:]):
            # At least the old prompt is in the cache already.
            self.assertGreaterEqual(after["reused_tokens"], len(before["prompt_tokens"]))
            self.assertLess(after["reused_tokens"], len(after["prompt_tokens"]))
        _, text, _ = run(*base, stdin=b"Hello\n\nMore?\r\nBye", check=0)
        self.assertEqual(text.decode(), "".join(a["text"] + "\n" for a in answers))

    def test_reuse_changes_nothing(self):
        answers = {}
        for cache in CACHES:
            _, out, _ = run(
                *tiny("chat", TALKER, "--max-new-tokens", "8", "--cache", cache, "--json"),
                stdin=b"Hello\nMore?\n",
                check=0,
            )
            answers[cache] = [
                {k: json.loads(line)[k] for k in ("tokens", "logprobs")}
                for line in out.decode().splitlines()
            ]
        self.assertEqual(answers["none"], answers["concat"])
        self.assertEqual(answers["none"], answers["preallocated"])

    def test_no_input_and_a_full_context(self):
        self.assertEqual(run(*tiny("chat", TALKER), stdin=b"")[:2], (0, b""))
        status, _, err = run(*tiny("chat", TALKER, "--context", "40"), stdin=b"x" * 100)
        self.assertEqual(status, 1)
        self.assertRegex(err.decode(), r"\Akvcache: error: .*context of 40 tokens.*\n\Z")

    def test_control_c_while_waiting_ends_it(self):
        process = start(*tiny("chat", TALKER, "--max-new-tokens", "4", "--json"))
        process.stdin.write(b"Hello\n")
        process.stdin.flush()
        self.assertEqual(len(json.loads(process.stdout.readline())["tokens"]), 4)
        while process.poll() is None:  # the answer may not have been quite over
            process.send_signal(signal.SIGINT)
            time.sleep(1)
        process.communicate()
        self.assertEqual(process.returncode, 0)


class BenchTest(ProgramTest):
    def test_a_line_for_each_length(self):
        _, out, _ = run(
            *tiny("bench", LLAMA, "--lengths", "8,32", "--decode", "4", "--repeat", "1", "--json"),
            check=0,
        )
        lines = [json.loads(line) for line in out.decode().splitlines()]
        self.assertEqual([line["context"] for line in lines], [8, 32])
        for line in lines:
            self.assertGreater(line["decode_tokens_per_second"], 0)
            self.assertGreater(line["prefill_tokens_per_second"], 0)
            self.assertEqual((line["dtype"], line["cache"]), ("float32", "preallocated"))

    def test_usage(self):
        self.assert_error(2, *tiny("bench", LLAMA, "--lengths", "0"), text="--lengths")
        self.assert_error(2, *tiny("bench", LLAMA, "--repeat", "0"), text="--repeat")
        for lengths, decode in (("9999999999999", "1"), ("2", "9223372036854775807"), ("120", "8")):
            self.assert_error(
                1,
                *tiny("bench", LLAMA, "--lengths", lengths, "--decode", decode),
                text=(f"a prompt of {lengths} tokens and {decode} decoded ones", "context of 128"),
            )


if __name__ == "__main__":
    unittest.main()
