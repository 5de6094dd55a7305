"""Writes a hybrid model of Qwen3.5-0.8B's shape with random bfloat16 weights.

usage: random_hybrid.py FOLDER
Then: compare --model FOLDER --peers kvcache,transformers --dtypes bfloat16 --kinds state
"""

import sys

import torch
import transformers

# 18 gated delta and 6 attention layers; a smaller vocabulary than the real one,
# so that peers fit beside each other.
SHAPE = {
    "vocab_size": 65536,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "pad_token_id": None,
}


def main(folder: str) -> None:
    torch.manual_seed(7)
    config = transformers.Qwen3_5TextConfig(**SHAPE)
    model = transformers.Qwen3_5ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


main(sys.argv[1])
