"""The model from its configuration."""

import torch
from torch import nn
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from kettle.config import ModelConfig
from kettle.determinism import derive_seed
from kettle.errors import TiedWeightsError


def architecture(config: ModelConfig) -> Qwen2Config:
    """What transformers calls the same model."""
    return Qwen2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        tie_word_embeddings=config.tie_embeddings,
        attention_dropout=config.attention_dropout,
        use_cache=False,
        # Eager attention is plain matrix products; fused kernels choose their order of sums.
        attn_implementation="eager",
        dtype="float32",
    )


def build_model(config: ModelConfig, *, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 with random float32 weights on the CPU, the same on every rank.

    The global random streams are as they were when it returns.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "weights"))
        model = Qwen2ForCausalLM(architecture(config))
    model.train()
    assert_tied(model, expected=config.tie_embeddings)
    return model


def assert_tied(model: nn.Module, *, expected: bool) -> None:
    """Check that embedding and output head are one tensor exactly where they should be.

    Raises:
        TiedWeightsError: they are two tensors and should be one, or the other way round.
    """
    embedding = model.get_parameter("model.embed_tokens.weight")
    head = model.get_parameter("lm_head.weight")
    if (embedding is head) != expected:
        found, wanted = ("two tensors", "one") if expected else ("one tensor", "two")
        raise TiedWeightsError(
            f"model.embed_tokens.weight and lm_head.weight are {found}, but "
            f"experiment.model.tie_embeddings = {str(expected).lower()} asks for {wanted}; "
            "this library version ties differently, so use a version from constraints.txt"
        )


def parameter_count(model: nn.Module) -> int:
    """Number of weights, with a shared one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
