"""Tiny random checkpoints, made on the fly: true architectures, a real tokenizer, a chat template."""

import json
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "Ein schöner Tag 🙂👩‍👩‍👧 こんにちは世界 你好，世界 Привет, мир",
    "def main():\n    return {'a': 1, 'b': [2, 3]}\n",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 384
EOS_TOKEN_ID = 2


def write_tokenizer(path: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json: byte-level BPE of at most `VOCAB_SIZE` ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def write_checkpoint(path: Path, family: str = "mixtral", *, seed: int = 0, **config: object) -> Path:
    """Writes a random fp32 checkpoint of `family` ("llama", "mixtral") with its tokenizer; returns `path`.

    Every parameter is random, norms included, so that one left out shows in the logits. `config` overrides
    the sizes.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
    }
    if family == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mixtral": (MixtralConfig, MixtralForCausalLM),
    }[family]
    model = model_class(config_class(**(sizes | config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path
