"""The shape of a model: what its config.json says, in our names, and the published shapes that benches use.

    config.json (transformers 4 and 5)                     ModelConfig
    hidden_size, num_hidden_layers, ...                    hidden, layers, heads, kv_heads, head_dim, ffn, vocab
    rope_theta + rope_scaling  |  rope_parameters          rope_theta, rope_scaling (None when positions are plain)
    tie_word_embeddings                                    tied: the head is the embedding

Three families are one architecture with switches:

                 bias on q,k,v   bias on o        norm on q and k   head_dim
    Qwen2, 2.5   always          never            no                hidden / heads
    Qwen3        attention_bias  attention_bias   yes               its own
    Llama        attention_bias  attention_bias   no                its own, or hidden / heads

Source: the configs of transformers' Qwen2, Qwen3 and Llama.
Cost: none. Limits: what those layers do not compute is refused here, before a byte of weights is read: a sliding window, another
activation than silu, a bias in the MLP. Qwen2.5 files carry sliding-window numbers with use_sliding_window false: those
are plain models and pass.

Copy along: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL_TYPES = ("qwen2", "qwen3", "llama")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model; what config.json says, in our names."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int  # rows of the embedding; may exceed the tokenizer's length
    eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 32768

    @classmethod
    def from_hf(cls, hf) -> ModelConfig:
        """From a transformers config or a config.json dict; ValueError for what these layers do not compute."""
        given = hf if isinstance(hf, dict) else hf.to_dict()
        kind = given.get("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(f"model_type={repr(kind)[:80]} is not supported; nanoQeRL runs {', '.join(MODEL_TYPES)}")
        wanted = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        for key in wanted:
            if not isinstance(given.get(key), int) or given[key] < 1:
                raise ValueError(f"config.json: {key}={repr(given.get(key))[:80]} should be a positive integer")
        window = given.get("use_sliding_window") or "sliding_attention" in (given.get("layer_types") or ())
        if window or given.get("hidden_act", "silu") != "silu" or given.get("mlp_bias"):
            raise ValueError("config.json asks for a sliding window, an activation other than silu, or an MLP bias: "
                             "these layers compute none of them; take another checkpoint")  # fmt: skip
        heads = given["num_attention_heads"]
        rope = given.get("rope_parameters") or given.get("rope_scaling") or {}  # transformers 5 and 4
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        scaled = scaling.get("rope_type", scaling.get("type", "default")) != "default"
        attention_bias = bool(given.get("attention_bias"))
        config = cls(
            model_type=kind,
            hidden=given["hidden_size"],
            layers=given["num_hidden_layers"],
            heads=heads,
            kv_heads=given.get("num_key_value_heads") or heads,
            head_dim=given.get("head_dim") or given["hidden_size"] // heads,
            ffn=given["intermediate_size"],
            vocab=given["vocab_size"],
            eps=given.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or given.get("rope_theta") or 10000.0),
            rope_scaling=scaling if scaled else None,
            tied=bool(given.get("tie_word_embeddings")),
            qkv_bias=attention_bias or kind == "qwen2",
            o_bias=attention_bias and kind != "qwen2",
            qk_norm=kind == "qwen3",
            max_positions=given.get("max_position_embeddings", 32768),
        )
        counts = {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
                  "max_position_embeddings": config.max_positions}  # fmt: skip
        for key, value in counts.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"config.json: {key}={repr(value)[:80]} should be a positive integer")
        if not isinstance(config.eps, float | int) or not 0 < config.eps < 1:
            raise ValueError(f"config.json: rms_norm_eps={repr(config.eps)[:80]} should be a small positive number")
        if config.heads % config.kv_heads or config.head_dim % 2 or config.head_dim > 1024:
            raise ValueError(f"config.json: {config.heads} heads over {config.kv_heads} kv heads of {config.head_dim}: "
                             "heads must be a multiple of kv heads, and head_dim even and at most 1024")  # fmt: skip
        return config

    def projections(self) -> dict[str, tuple[int, int]]:
        """(N, K) of every projection by its path: "model.layers.0.self_attn.q_proj" and so on."""
        q, kv, d, f = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.ffn
        attention = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
        mlp = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
        shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {f"mlp.{name}": shape for name, shape in mlp.items()}
        return {f"model.layers.{i}.{name}": shape for i in range(self.layers) for name, shape in shapes.items()}


def _qwen25(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool) -> ModelConfig:
    return ModelConfig("qwen2", hidden, layers, heads, kv_heads, 128 if hidden > 900 else 64, ffn, vocab,
                       rope_theta=1e6, tied=tied, qkv_bias=True)  # fmt: skip


SHAPES = {  # the published config.json of Qwen/Qwen2.5-*
    "Qwen2.5-0.5B": _qwen25(896, 24, 14, 2, 4864, 151936, True),
    "Qwen2.5-1.5B": _qwen25(1536, 28, 12, 2, 8960, 151936, True),
    "Qwen2.5-3B": _qwen25(2048, 36, 16, 2, 11008, 151936, True),
    "Qwen2.5-7B": _qwen25(3584, 28, 28, 4, 18944, 152064, False),
    "Qwen2.5-14B": _qwen25(5120, 48, 40, 8, 13824, 152064, False),
    "Qwen2.5-32B": _qwen25(5120, 64, 40, 8, 27648, 152064, False),
}


def demo() -> None:
    """Parameters of the published shapes, computed from the config alone."""
    print("shape           layers  hidden  heads/kv    ffn   linears     all   (1e9 parameters)")
    for name, c in SHAPES.items():
        linears = sum(rows * columns for rows, columns in c.projections().values())
        small = c.layers * ((c.heads + 2 * c.kv_heads) * c.head_dim + 2 * c.hidden) + c.hidden  # biases and norms
        total = linears + small + c.vocab * c.hidden * (1 if c.tied else 2)
        print(f"{name:14} {c.layers:7d} {c.hidden:7d} {c.heads:6d}/{c.kv_heads:<2d} {c.ffn:6d} {linears / 1e9:9.3f} "
              f"{total / 1e9:7.3f}")


if __name__ == "__main__":
    demo()
