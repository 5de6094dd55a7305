"""Conversations as transformers renders and tokenises them.

    make_chat_cases.py [FOLDER] [--smollm2 MODEL.gguf]

Renders the templates in FOLDER (default tests/model/chat/data) with
transformers and writes cases.json there. Ids are those of apply_chat_template
with the small SmolLM vocabulary of tests/model/text/data and, with --smollm2,
with the real one. Needs transformers and jinja2, for --smollm2 gguf.

The templates come from the models' own repositories: smollm2 (Apache-2.0) out
of its GGUF file, the others as in models/templates of llama.cpp (MIT).
"""

import argparse
import json
import pathlib

from make_tokenizer_cases import smollm2
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city: <b>now</b> & later, \"quoted\".",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Grüße 你好"},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
}]

USER = {"role": "user", "content": "What is the capital of France?"}
CONVERSATIONS = {
    "one_turn": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [
        {"role": "user", "content": "  Hi there \n"},
        {"role": "assistant", "content": "Hello! Grüße, 你好 😀"},
        {"role": "user", "content": "\n\nTell me more,\n  it's 12345.\n"},
    ],
    "thinking": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n2"},
        {"role": "user", "content": "And 2 + 2?"},
    ],
    "tool_call": [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [{
            "id": "call12345", "type": "function",
            "function": {"name": "get_weather",
                         "arguments": {"city": "Paris", "days": 2}},
        }]},
        {"role": "tool", "tool_call_id": "call12345", "name": "get_weather",
         "content": "{\"sky\": \"clear\"}"},
    ],
    "same_role_twice": [USER, USER],
    "empty": [{"role": "user", "content": ""}],
}

# The ids of these, with SmolLM2's template, are compared as well.
CONTENTS = [
    "Hello", " leading space", "trailing space ", "\nnewline first", "\n\n\n",
    "line\n", "", " ", "12345", "it's", "->", "(x):\n", "naïve café 你好 😀",
    "user", "assistant\n", "  \n\n  x", "def f():\n\treturn 1\n", "\t", ".",
]


def render(source: str, **variables) -> dict:
    try:
        return {"text": _compile_jinja_template(source).render(**variables)}
    except Exception as error:  # the template's refusal
        return {"error": str(error)}


def cases_of(path: pathlib.Path) -> list[dict]:
    source = path.read_text()
    cases = []
    for name, messages in CONVERSATIONS.items():
        for prompt in (True, False):
            tools = TOOLS if name == "tool_call" else None
            variables = {"date_string": "26 Jul 2024"}
            if name == "thinking" and prompt:
                variables["enable_thinking"] = False
            case = {
                "template": path.stem, "name": name, "messages": messages,
                "tools": tools, "add_generation_prompt": prompt,
                "variables": variables,
            }
            case |= render(
                source, messages=messages, tools=tools, documents=None,
                add_generation_prompt=prompt, bos_token="<s>",
                eos_token="</s>", **variables,
            )
            cases.append(case)
    return cases


def chat_ids(tokenizer: Tokenizer, source: str) -> list[list[int]]:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=source,
        bos_token="<|im_start|>", eos_token="<|im_end|>",
    )
    return [
        fast.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True, return_dict=False,
        )
        for content in CONTENTS
    ]


def main() -> None:
    tests = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=pathlib.Path,
                        default=tests / "model/chat/data")
    parser.add_argument("--smollm2", help="GGUF file with the real vocabulary")
    arguments = parser.parse_args()
    folder = arguments.folder

    source = (folder / "smollm2.jinja").read_text()
    small = Tokenizer.from_file(
        str(tests / "model/text/data/smollm_tokenizer.json"))
    ids = {"contents": CONTENTS, "small": chat_ids(small, source)}
    if arguments.smollm2:
        ids["smollm2"] = chat_ids(smollm2(arguments.smollm2), source)
    cases = [c for path in sorted(folder.glob("*.jinja")) for c in cases_of(path)]
    for name, value in (("cases", cases), ("ids", ids)):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        (folder / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
