"""A complete byte-level BPE tokenizer of 272 tokens for one tiny model."""

import json

# Merges in order; none crosses a word, as the pre-tokeniser splits there.
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ a", "o u", "e r", "r e", "Ġ c"]
MERGES += ["a p", "Ġc ap", "i s"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<|endoftext|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' +"
    " message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = [
    "the capital",
    " the capital is in a tin",
    "Grüße, 你好 🙂\n\n  12345 isn't",
    "<|im_end|> said the user",
    "",
]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def _byte_letters() -> list[str]:
    """The printable stand-in of each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable}
    letters |= {b: chr(256 + i) for i, b in enumerate(rest)}
    return [letters[b] for b in printable + rest]


def make_tokenizer() -> dict:
    tokens = _byte_letters() + [m.replace(" ", "") for m in MERGES] + SPECIAL
    normal, control = 1, 3  # GGUF's token types
    return {
        "tokens": tokens,
        "types": [normal] * (256 + len(MERGES)) + [control] * len(SPECIAL),
        "merges": MERGES,
        "bos": tokens.index("<|im_start|>"),
        "eos": tokens.index("<|im_end|>"),
        "eot": tokens.index("<|endoftext|>"),
        "chat_template": CHAT_TEMPLATE,
    }


def write_tokenizer(folder, tokenizer: dict) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    byte_level["trim_offsets"] = True
    added = [
        {
            "id": tokenizer["tokens"].index(content),
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for content in SPECIAL
    ]
    plain = tokenizer["tokens"][: -len(SPECIAL)]
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": added,
                "normalizer": None,
                "pre_tokenizer": byte_level,
                "post_processor": None,
                "decoder": byte_level,
                "model": {
                    "type": "BPE",
                    "dropout": None,
                    "unk_token": None,
                    "continuing_subword_prefix": None,
                    "end_of_word_suffix": None,
                    "fuse_unk": False,
                    "byte_fallback": False,
                    "ignore_merges": False,
                    "vocab": {token: i for i, token in enumerate(plain)},
                    "merges": [m.split(" ") for m in tokenizer["merges"]],
                },
            },
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|pad|>",
                "add_bos_token": False,
                "model_max_length": 512,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=1,
        )
        + "\n"
    )


def tokenizer_numbers(folder) -> dict:
    """Ids by transformers. `plain` is user text: no control token comes of it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=False
    )
    texts = []
    for text in TEXTS:
        with_control = tokenizer.encode(text, add_special_tokens=False)
        plain = tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        texts.append({"text": text, "plain": plain, "with_control": with_control})
    return {
        "texts": texts,
        "chat": {
            "messages": MESSAGES,
            "text": chat,
            "tokens": tokenizer.encode(chat, add_special_tokens=False),
        },
    }
