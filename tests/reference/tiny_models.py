"""The tiny seeded models: their configurations and their weights.

Every weight comes from integers of numpy's PCG64 and one multiplication, so the
files are the same on every machine. Norm weights and biases are random too: a
forward that forgets one gives other logits.
"""

import math
import zlib
from dataclasses import dataclass, field

import numpy as np
import torch

HIDDEN = 32
VOCAB = 64
BYTE_VOCAB = 272  # 256 bytes, 12 merges, 4 control tokens
CONTEXT = 128
WINDOW = 6

# Standard deviations: attention must neither be uniform nor one-hot, and logits
# must have a spread of about 3.
QUERY_KEY_GAIN = 1.4
LINEAR_GAIN = 1.2
HEAD_GAIN = 2.5
EMBEDDING_STD = 0.45
BIAS_STD = 0.25
NORM_HALF_WIDTH = 0.5  # norm weights lie in [0.5, 1.5]


@dataclass(frozen=True)
class TinyModel:
    name: str
    config: dict
    stored: torch.dtype = torch.float32  # dtype of model.safetensors
    shards: int = 1
    gguf: str | None = None  # type of the matrices in model.gguf
    lengths: tuple = (1, 2, 5, 17, 48)  # of the prompts
    positions: tuple = (0, 7, 30)  # of the longest prompt, beside the last
    beam: bool = False
    byte_tokenizer: bool = False
    root: str = "model."  # of the names in model.safetensors
    beside: dict = field(default_factory=dict)  # tensors that text needs not
    generation: dict = field(default_factory=lambda: {"eos_token_id": 2})

    @property
    def text(self) -> dict:
        """The configuration of the text model."""
        return self.config.get("text_config", self.config)

    @property
    def hybrid(self) -> bool:
        """model.gguf is then made by llama.cpp's converter (hybrid_gguf.py)."""
        return self.config["model_type"].startswith("qwen3_5")


def _llama(**changes) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


def _hybrid(**changes) -> dict:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


# What a file of a model that sees and drafts holds beside its text model: one
# tensor of the tower and one whole layer for drafting.
SEEING_AND_DRAFTING = {
    "model.visual.pos_embed.weight": (4, 8),
    "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
    "mtp.norm.weight": (HIDDEN,),
    "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
    "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
    "mtp.layers.0.input_layernorm.weight": (HIDDEN,),
    "mtp.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "mtp.layers.0.self_attn.q_proj.weight": (64, HIDDEN),
    "mtp.layers.0.self_attn.k_proj.weight": (16, HIDDEN),
    "mtp.layers.0.self_attn.v_proj.weight": (16, HIDDEN),
    "mtp.layers.0.self_attn.o_proj.weight": (HIDDEN, 32),
    "mtp.layers.0.self_attn.q_norm.weight": (16,),
    "mtp.layers.0.self_attn.k_norm.weight": (16,),
    "mtp.layers.0.mlp.gate_proj.weight": (32, HIDDEN),
    "mtp.layers.0.mlp.up_proj.weight": (32, HIDDEN),
    "mtp.layers.0.mlp.down_proj.weight": (HIDDEN, 32),
}

# Configurations are written as files on the hub are, in their old and new keys:
# rope_theta + rope_scaling (llama_rope3, mistral, qwen2, qwen3) and
# rope_parameters (llama, llama_bias, qwen3_5); torch_dtype and dtype;
# layer_types (qwen3_5_three) and full_attention_interval (qwen3_5_seeing).
MODELS = [
    TinyModel(
        "gpt2",
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": HIDDEN,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": None,
            "n_positions": CONTEXT,
            "n_ctx": CONTEXT,
            "vocab_size": VOCAB,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "bos_token_id": 2,
            "eos_token_id": 2,
        },
        gguf="F16",
        beam=True,
    ),
    TinyModel(
        "llama",
        _llama(
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            dtype="float32",
        ),
        shards=3,
        gguf="F32",
        beam=True,
    ),
    TinyModel(
        "llama_rope3",
        _llama(
            num_hidden_layers=3,
            vocab_size=BYTE_VOCAB,
            tie_word_embeddings=True,
            bos_token_id=268,
            eos_token_id=[269, 271],
            max_position_embeddings=512,
            rope_theta=500.0,
            # Of the four frequencies two stay, one is interpolated and one is
            # divided by the factor.
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            torch_dtype="bfloat16",
        ),
        stored=torch.bfloat16,
        gguf="BF16",
        byte_tokenizer=True,
        positions=(30,),
        generation={"bos_token_id": 268, "eos_token_id": [269, 271]},
    ),
    TinyModel(
        "llama_bias",
        _llama(
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            dtype="float16",
        ),
        stored=torch.float16,
        gguf="F16",
    ),
    TinyModel(
        "mistral",
        {
            **_llama(
                architectures=["MistralForCausalLM"],
                model_type="mistral",
                num_hidden_layers=3,
                sliding_window=WINDOW,
                rope_theta=1000.0,
                torch_dtype="float32",
            ),
        },
        lengths=(1, 5, 6, 7, 8, 13, 48),
        positions=(0, 4, 5, 6, 7, 30),
    ),
    TinyModel(
        "qwen2",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            # As published files have it: a window that is not in use.
            "sliding_window": 4,
            "max_window_layers": 1,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "vocab_size": VOCAB,
            "torch_dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        gguf="F32",
        generation={"bos_token_id": 1, "eos_token_id": [2, 3]},
    ),
    TinyModel(
        "qwen3",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "sliding_window": None,
            "max_window_layers": 2,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "vocab_size": VOCAB,
            "torch_dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        gguf="F32",
    ),
    TinyModel("qwen3_5", _hybrid(), gguf="F32"),
    # Three value heads for each key head, of another size; other kernel. Not
    # float16: the converter would compute 1 + w and -exp(A_log) in it.
    TinyModel(
        "qwen3_5_three",
        _hybrid(
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_value_heads=6,
            linear_value_head_dim=4,
            linear_conv_kernel_dim=3,
            attention_bias=True,
            dtype="bfloat16",
        ),
        stored=torch.bfloat16,
        gguf="F16",
    ),
    # As the files on the hub are: a model that sees, its text model one level
    # down. As many value heads as key heads.
    TinyModel(
        "qwen3_5_seeing",
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "image_token_id": 60,
            "text_config": {
                **{
                    key: value
                    for key, value in _hybrid().items()
                    if key not in ("architectures", "bos_token_id")
                },
                "attn_output_gate": True,
                "full_attention_interval": 2,
                "linear_num_value_heads": 2,
                "mamba_ssm_dtype": "float32",
                "mtp_num_hidden_layers": 1,
                "num_hidden_layers": 3,
                "rope_parameters": {
                    "mrope_interleaved": True,
                    "mrope_section": [1, 1, 0],
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 100.0,
                    "rope_type": "default",
                },
                "tie_word_embeddings": True,
                "dtype": "bfloat16",
            },
            "tie_word_embeddings": True,
            "vision_config": {
                "depth": 1,
                "hidden_size": 8,
                "intermediate_size": 8,
                "model_type": "qwen3_5_vision",
                "num_heads": 1,
                "num_position_embeddings": 4,
                "out_hidden_size": HIDDEN,
            },
        },
        stored=torch.bfloat16,
        gguf="BF16",
        root="model.language_model.",
        beside=SEEING_AND_DRAFTING,
    ),
]


def _uniform(seed: str, shape, half_width: float) -> torch.Tensor:
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(seed.encode())))
    steps = rng.integers(-(2**15), 2**15 + 1, size=tuple(shape))
    return torch.from_numpy((steps / 2.0**15 * half_width).astype(np.float32))


def _weight(model: TinyModel, name: str, shape) -> torch.Tensor:
    seed = f"{model.name}/{name}"
    if model.hybrid:
        if name.endswith("A_log"):  # decays a token from 0.99 to nearly none
            return _uniform(seed, shape, 2.0) - 1.0
        if name.endswith("dt_bias"):
            return _uniform(seed, shape, 1.0)
        if name.endswith("conv1d.weight"):
            return _uniform(seed, shape, math.sqrt(3.0 / shape[2]) * LINEAR_GAIN)
        if "norm" in name and "linear_attn.norm" not in name:  # of 1 + w
            return _uniform(seed, shape, NORM_HALF_WIDTH)
    if name.endswith("norm.weight") or ".ln_" in name and name.endswith("weight"):
        return 1.0 + _uniform(seed, shape, NORM_HALF_WIDTH)
    if name.endswith("bias"):
        return _uniform(seed, shape, math.sqrt(3) * BIAS_STD)
    if "embed_tokens" in name or "wte" in name or "wpe" in name:
        return _uniform(seed, shape, math.sqrt(3) * EMBEDDING_STD)
    is_gpt2 = model.config["model_type"] == "gpt2"
    inputs = shape[0] if is_gpt2 else shape[1]  # gpt2 stores [in, out]
    gain = LINEAR_GAIN
    if any(part in name for part in ("q_proj", "k_proj", "c_attn")):
        gain = QUERY_KEY_GAIN
    if "lm_head" in name:
        gain = HEAD_GAIN
    return _uniform(seed, shape, math.sqrt(3.0 / inputs) * gain)


def make_weights(model: TinyModel, shapes: dict) -> dict:
    """Weights by name, float32, rounded to what the files can hold."""
    rounded = {"F16": torch.float16, "BF16": torch.bfloat16}.get(model.gguf)
    weights = {}
    for name in sorted(shapes):
        weight = _weight(model, name, shapes[name])
        for dtype in (model.stored, rounded if weight.dim() > 1 else None):
            if dtype is not None:
                weight = weight.to(dtype).float()
        weights[name] = weight
    return weights
