"""What transformers computes with SmolLM2-135M-Instruct from its GGUF weights,
dequantised to float32.

usage: make_smollm2.py MODEL.gguf [FILE]     (default: data/smollm2.json)
"""

import hashlib
import os
import sys
from pathlib import Path

import gguf
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import expected
from make_models import DATA, prepare

NEW_TOKENS = 48
CLEAR_MARGIN = 0.1  # greedy tokens must be equal where the margin exceeds it
PROSE_TOKENS = 300
LONG_TOKENS = 700
CONTROL = 3  # GGUF's token type
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CONVERSATION = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And 1024 / 2?"},
]
QUESTIONS = {
    "chat": QUESTION[0]["content"],
    "chat_week": "What are the days of the week?",
    "chat_count": "Count from 1 to 20.",
}
RAW_TEXTS = {
    "raw": "The capital of France is",
    "raw_fox": "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "raw_code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "raw_sequence": "1, 2, 3, 4, 5, 6,",
}
TEXTS = [
    "The capital of France is",
    "In 2024, 1,234,567 people paid $3.50 -- that's 100%!",
    "  leading spaces,\ttabs and\n\n\nnew lines  ",
    "Größe, naïve café, 你好世界, привет, 🙂👍🏽",
    "def f(x):\n    return x ** 2  # it's fine",
    "<|im_start|>user\nhi<|im_end|>",
    "don't DON'T I'll we've ½ ² Ⅷ ٣",
    "",
]


def load(path: str):
    folder, name = os.path.split(os.path.abspath(path))
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """From the file's own vocabulary and merges, with the pre-tokeniser that
    "smollm" names: every digit alone, then GPT-2's. (transformers' GGUF reader
    does not look at tokenizer.ggml.pre.)"""
    fields = gguf.GGUFReader(path).fields

    def of(key):
        return fields[f"tokenizer.{key}"].contents()

    if of("ggml.model") != "gpt2" or of("ggml.pre") != "smollm":
        raise RuntimeError(f"{path}: tokenizer is not smollm")
    tokens, types = of("ggml.tokens"), of("ggml.token_type")
    merges = [tuple(m.split(" ")) for m in of("ggml.merges")]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, types)
            if kind == CONTROL
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=of("chat_template")
    )


def tokenizer_numbers(tokenizer) -> dict:
    texts = []
    for text in TEXTS:
        plain = tokenizer.encode(text, split_special_tokens=True)
        if tokenizer.decode(plain, clean_up_tokenization_spaces=False) != text:
            raise RuntimeError(f"{text!r} does not survive the tokenizer")
        texts.append(
            {"text": text, "plain": plain, "with_control": tokenizer.encode(text)}
        )
    chats = []
    for messages in (QUESTION, CONVERSATION):
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        tokens = tokenizer.encode(text)
        chats.append({"messages": messages, "text": text, "tokens": tokens})
    return {"texts": texts, "chats": chats}


def make_prompts(tokenizer) -> list[dict]:
    def chat(question):
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=False,
        )

    texts = RAW_TEXTS | {name: chat(q) for name, q in QUESTIONS.items()}
    prompts = [{"name": n, "tokens": tokenizer.encode(t)} for n, t in texts.items()]
    for name, file, count in (
        ("prose", "gettysburg.txt", PROSE_TOKENS),
        ("long", "alice.txt", LONG_TOKENS),
    ):
        tokens = tokenizer.encode((DATA / file).read_text())[:count]
        if len(tokens) < count:
            raise RuntimeError(f"{file} has only {len(tokens)} tokens")
        prompts.append({"name": name, "tokens": tokens})
    return prompts


def numbers_of_prompt(model, tokenizer, name: str, tokens) -> dict:
    entry = expected.numbers_of_prompt(model, name, tokens, (), NEW_TOKENS)
    del entry["logits"]  # 49152 numbers
    entry["greedy"]["text"] = tokenizer.decode(entry["greedy"]["tokens"])
    return entry


def numbers(path: str, prompts=None) -> dict:
    model, tokenizer = load(path), load_tokenizer(path)
    prompts = prompts or make_prompts(tokenizer)
    entries = [
        numbers_of_prompt(model, tokenizer, p["name"], p["tokens"]) for p in prompts
    ]
    if not entries[0]["greedy"]["text"].startswith(" Paris"):
        raise RuntimeError(f"the weights are wrong: {entries[0]['greedy']['text']!r}")
    margins = [m for e in entries for m in e["greedy"]["margins"]]
    return {
        "model": os.path.basename(path),
        "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "clear_margin": CLEAR_MARGIN,
        "greedy_steps": len(margins),
        "unclear_steps": sum(m <= CLEAR_MARGIN for m in margins),
        "prompts": entries,
        **tokenizer_numbers(tokenizer),
    }


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    prepare()
    target = Path(sys.argv[2]) if len(sys.argv) == 3 else DATA / "smollm2.json"
    data = numbers(sys.argv[1])
    expected.write_json(target, data)
    print(
        f"{target}: {data['unclear_steps']} of {data['greedy_steps']} greedy steps "
        f"have a margin of at most {CLEAR_MARGIN}"
    )


if __name__ == "__main__":
    main()
