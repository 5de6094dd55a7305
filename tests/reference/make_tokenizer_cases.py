"""Tokenizer files and the ids that Hugging Face tokenizers and sentencepiece give.

    make_tokenizer_cases.py [FOLDER] [--smollm2 MODEL.gguf]

Trains one small vocabulary for each family of pre-tokeniser, with the family's
own pattern, and writes tokenizer files, texts.json and <family>_ids.json to
FOLDER (default tests/model/text/data). With --smollm2 it also writes the ids of
the real SmolLM2 vocabulary. Needs tokenizers and sentencepiece, for --smollm2
gguf.
"""

import argparse
import io
import json
import pathlib
import random

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers
from tokenizers import decoders, pre_tokenizers, processors, trainers

GPT2_LIKE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3, QWEN2 = GPT2_LIKE % "{1,3}", GPT2_LIKE % ""
# Marks belong to words here.
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TRAINING = [
    "The quick brown fox jumps over the lazy dog. It's a dog's life, isn't it?",
    "We'll see what they've done; I'm sure you'd agree. DON'T SHOUT, WE'LL HEAR.",
    "def f(x):\n    return x->y + [1, 2, 3][0]  # -> comment\n\n\nclass A:\n\tpass\n",
    "In 2024 there were 12345 cases, 67.89% of 1,000,000; call 555-0199.",
    "naïve café, Grüße aus München, señor, Ångström, œuvre, ¿qué?, ½ price",
    "Привет, как дела? Это просто текст. 你好，世界。今天天气很好。こんにちは、世界。",
    "안녕하세요 세계. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया। สวัสดีชาวโลก",
    "emoji: 😀😸🎉👩‍👩‍👧 🇩🇪 and → arrows ← ∑∫√ © ® ™ …",
    "    indented\n        more\n\n\n\ttabs\t\ttoo   \n  \n",
    "for (int i = 0; i < n; ++i) { a[i] = b[i] * c[i]; } // x != y && z == w",
    "Once upon a time there was a little village in the mountains, and the "
    "people who lived there were happy with what they had and with each other.",
    "What is the capital of France? The capital of France is Paris.",
]

HARD = [
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", " \n \n ",
    "a", " a", "a ", " a ", "->", "(x):\n", "12345", "it's", "  \n\n  x",
    "don't", "DON'T", "We'Ll", "I'M", "'s", "''s", "' s", "naive cafe",
    "naïve café", "naïve café", "Grüße", "ﬁ ligature", "½", "²³¹", "Ⅷ",
    "١٢٣٤٥", "１２３", "1", "12", "123", "1234", "1234567", "1.5", "1,000,000",
    "a1b2c3", "x86_64", "snake_case_name", "camelCaseName", "__init__",
    "你好，世界", "今天天气很好。", "こんにちは世界", "안녕하세요", "한글",
    "Привет, мир!", "שלום עולם", "مرحبا بالعالم", "नमस्ते", "สวัสดี",
    "😀", "😸😸", "👩‍👩‍👧", "🇩🇪🇫🇷", "👍🏽", "a😀b", "→ ← ∑",
    "<|im_start|>user\nhello<|im_end|>\n", "<|endoftext|>", "<|im_end|",
    "<|im_start|><|im_end|>", "A<|im_end|>\n<|im_start|>system\nB",
    "https://example.com/a?b=c&d=e#f", "user@example.com", "C:\\Windows",
    "for (int i = 0; i < n; ++i) {\n\ta[i] = 0;\n}\n", "def f(x):\n    return x\n",
    "{\"key\": [1, 2.5, null, true]}", "SELECT * FROM t WHERE a != 'b';",
    "x" * 40, "_" * 40, " " * 40, "\n" * 20, "." * 33, "=" * 17, "ab" * 20,
    "a\u00a0b", "a\u2003b", "a\u3000b", "a\u200bb", "a\u180eb", "a\ufeffb",
    "a\u2028b", "a\u0085b", "\u0000", "\u0001\u0002", "a\u0301", "e\u0301\u0302",
    "\u1100\u1161\u11a8", "\uac01", "\u212b", "\ufb01", "\U0001d400",
    "ſ's 'ſ", "K'ſ", "İstanbul", "ǅ", "ß", "ẞ", "σς", "Ωmega",
    "trailing spaces   ", "   leading", "tabs\t\tand  spaces ", "a  b   c    d",
    "line one\nline two\r\nline three\rline four", "  \n  \n  ", "\t\n\t\n",
    "mixed 日本語 and English text", "rtl \u202eabc\u202c", "a\u0627b",
    "Hello, world!", "Hello,world!Hello", "!!!???...", "a.b.c", "(a)(b)", "[[[]]]",
    "--", "---", "- -", "+=", "!=", "&&", "||", "::", "//", "/* c */", "#!", "@x",
    "$100", "100$", "50%", "~", "`code`", "**bold**", "_it_", "# Title\n\nText",
    "I'd've", "y'all're", "rock'n'roll", "'tis", "o'clock", "’s don’t",
    "The capital of France is", " Paris", "village", "villages", "ab cd ef gh",
]

ALPHABET = [
    *"abcdeghilmnorstuw", *"ETAN", *"0123456789", " ", " ", " ", " ", "  ", "\n",
    "\n\n", "\t", "\r\n", "'", "'s", "'ll", ".", ",", "-", "->", "(", ")", "_",
    "é", "ü", "ñ", "e\u0301", "ß", "ж", "и", "你", "好", "世", "こ", "한", "ש",
    "م", "न", "ส", "😀", "🎉", "→", "½", "²", "\u00a0", "\u3000", "<|", "|>",
]

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_texts() -> list[str]:
    rng = random.Random(20240607)
    texts = list(HARD)
    while len(texts) < 480:
        text = "".join(rng.choices(ALPHABET, k=rng.randint(2, 14)))
        if text not in texts:
            texts.append(text)
    return texts


def family(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(pattern: str):
        return pre_tokenizers.Split(Regex(pattern), "isolated")

    tokenizer.pre_tokenizer = {
        "gpt2": lambda: byte_level,
        "smollm": lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        ),
        "llama3": lambda: pre_tokenizers.Sequence([split(LLAMA3), bytes_only]),
        "qwen2": lambda: pre_tokenizers.Sequence([split(QWEN2), bytes_only]),
        "qwen35": lambda: pre_tokenizers.Sequence([split(QWEN35), bytes_only]),
    }[name]()
    if name in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if name == "smollm":  # like the real one: some bytes have no token
        alphabet = [c for c in alphabet if c not in "ÀÁõö÷øùúûüýþÿĄĆ"]
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=sorted(alphabet),
        special_tokens=SPECIALS, show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    if name == "llama3":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    return tokenizer


def spell(name: str, tokenizer: Tokenizer) -> str:
    """The file, with the merges in one of the two spellings."""
    document = json.loads(tokenizer.to_str())
    merges = [m if isinstance(m, list) else m.split(" ")
              for m in document["model"]["merges"]]
    if name == "llama3":  # as in the real one, some tokens are in no merge
        merges = [m for i, m in enumerate(merges) if i % 50 != 49 or i < 300]
        made = {"".join(m) for m in merges}
        made |= {t for t in document["model"]["vocab"] if len(t) == 1}
        merges = [m for m in merges if m[0] in made and m[1] in made]
    if name in ("gpt2", "llama3"):
        document["model"]["merges"] = [" ".join(m) for m in merges]
    else:
        document["model"]["merges"] = merges
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def flags() -> Tokenizer:
    """Added tokens with every flag."""
    tokenizer = family("gpt2")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([
        AddedToken("[WORD]", single_word=True, normalized=False),
        AddedToken("[L]", lstrip=True, normalized=False),
        AddedToken("[R]", rstrip=True, normalized=False),
        AddedToken("[LR]", lstrip=True, rstrip=True, normalized=False),
        AddedToken("caf\u00e9", normalized=True),
        AddedToken("    ", normalized=False),
        AddedToken("        ", normalized=False),
        AddedToken("one two", normalized=False),
    ])
    tokenizer.add_special_tokens([
        AddedToken("<strip>", special=True, rstrip=True, lstrip=True),
        AddedToken("<|im_start|>long", special=True),
    ])
    return tokenizer


FLAG_TEXTS = [
    "a[WORD]b [WORD] [WORD]. x[WORD]", "[WORD]", "é[WORD]", "_[WORD]_", "1[WORD]",
    "a  [L]  b", "a  [R]  b", "a  [LR]  b", "[L][L] [L]", "a \n\t[LR]\n b[R]",
    "a\u00a0[L]\u3000[R]\u2003b", "[R]   [L]", "[R]", "[L]", " [LR] ",
    "cafe\u0301 caf\u00e9 cafés", "caf\u00e9", "    x", "          y", "   z",
    "                 ", "one two three", "one  two", "one twoone two",
    "a <strip> b", "<strip>", "<|im_start|>longer", "<|im_start|>lon",
    "<|im_start|> <|im_end|>", "plain text", "<|endoftext|><strip>  x",
]


def train_sentencepiece(kind: str) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING), model_writer=model, model_type=kind,
        vocab_size=480 if kind == "bpe" else 400, byte_fallback=kind == "bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=kind == "unigram",
        user_defined_symbols=["[TOOL]"], control_symbols=["<|turn|>"],
        character_coverage=0.98, hard_vocab_limit=False, minloglevel=2,
    )
    return model.getvalue()


def gguf_type(processor, i: int) -> int:
    """GGUF's number of a token type."""
    checks = (processor.is_unknown, processor.is_control)
    for number, check in zip((2, 3), checks):
        if check(i):
            return number
    if processor.is_byte(i):
        return 6
    return 4 if processor.id_to_piece(i) == "[TOOL]" else 1


def write(path: pathlib.Path, value) -> None:
    path.write_text(
        json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
    )


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> dict:
    """Ids with control tokens left as text, and recognised."""
    result = {}
    for key, plain in (("plain", True), ("special", False)):
        tokenizer.encode_special_tokens = plain
        result[key] = [
            tokenizer.encode(t, add_special_tokens=False).ids for t in texts
        ]
    return result


def smollm2(path: str) -> Tokenizer:
    import gguf

    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    tokenizer = Tokenizer(models.BPE(
        vocab={t: i for i, t in enumerate(tokens)},
        merges=[tuple(m.split(" ")) for m in merges],
    ))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([
        AddedToken(t, special=True) for t, k in zip(tokens, types) if k == 3
    ])
    return tokenizer


def main() -> None:
    here = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=pathlib.Path,
                        default=here / "model/text/data")
    parser.add_argument("--smollm2", help="GGUF file with the real vocabulary")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)

    texts = make_texts()
    write(folder / "texts.json", texts)
    for name in ("gpt2", "smollm", "llama3", "qwen2", "qwen35"):
        text = spell(name, family(name))
        (folder / f"{name}_tokenizer.json").write_text(text + "\n")
        write(folder / f"{name}_ids.json",
              ids_of(Tokenizer.from_str(text), texts))
    text = spell("flags", flags())
    (folder / "flags_tokenizer.json").write_text(text + "\n")
    flag_ids = ids_of(Tokenizer.from_str(text), FLAG_TEXTS)
    write(folder / "flags_ids.json", {"texts": FLAG_TEXTS, **flag_ids})

    for kind in ("bpe", "unigram"):
        model = train_sentencepiece(kind)
        (folder / f"sentencepiece_{kind}.model").write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        write(folder / f"sentencepiece_{kind}_ids.json", {
            "plain": [processor.encode(t) for t in texts],
            "decoded": [processor.decode(processor.encode(t)) for t in texts],
        })
        if kind == "bpe":
            write(folder / "sentencepiece_bpe_pieces.json", [
                [processor.id_to_piece(i), processor.get_score(i),
                 gguf_type(processor, i)]
                for i in range(processor.get_piece_size())
            ])

    if arguments.smollm2:
        write(folder / "smollm2_ids.json",
              ids_of(smollm2(arguments.smollm2), texts))


if __name__ == "__main__":
    main()
