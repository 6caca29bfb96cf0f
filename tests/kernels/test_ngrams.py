"""N-grams against a walk over each text, and against transformers."""

import random

import pytest
import torch
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from moebius_kernels.attention_plan import Span
from moebius_kernels.ngrams import hashed_rows, ngrams
from moebius_kernels.state_plan import plan_states

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
END = 3


def plan(lengths, slots):
    return plan_states([Span(0, length, ()) for length in lengths], slots, DEVICE)


def walked(text, index, length):
    gram, ended = [text[index]], False
    for before in range(index - 1, index - length, -1):
        ended = ended or before < 0 or text[before] == END
        gram.append(END if ended else text[before])
    return gram


@pytest.mark.parametrize("length", [2, 3, 5])
def test_texts_in_pieces_of_mixed_batches(length):
    draw = random.Random(length)
    # Few ids, so that ends are frequent; 0 is a token as others are.
    texts = [[draw.randrange(6) for _ in range(count)] for count in (1, 9, 30, 17)]
    slots, done = [5, 0, 3, 2], [0] * 4
    states = torch.zeros(7, length - 1, dtype=torch.int64, device=DEVICE)
    states[[1, 4, 6]] = 99
    while left := [index for index, text in enumerate(texts) if done[index] < len(text)]:
        chosen = draw.sample(left, draw.randint(1, len(left)))
        counts = [min(draw.choice((1, 1, 2, 7)), len(texts[i]) - done[i]) for i in chosen]
        ids = [token for i, n in zip(chosen, counts, strict=True) for token in texts[i][done[i] :][:n]]
        step = plan(counts, [slots[i] for i in chosen])
        got = ngrams(torch.tensor(ids, device=DEVICE), states, step, length=length, end=END)
        expected = [
            walked(texts[i], index, length)
            for i, n in zip(chosen, counts, strict=True)
            for index in range(done[i], done[i] + n)
        ]
        assert got.tolist() == expected
        for i, n in zip(chosen, counts, strict=True):
            done[i] += n
    assert (states[[1, 4, 6]] == 99).all()


def test_rows_equal_transformers():
    config = Qwen4ExpTextConfig(
        vocab_size=250_000,
        ngram_size=4,
        heads_per_ngram=3,
        ngram_vocab_size_base=1000,
        ple_layer_ids=[1],
        ple_embed_dim=18,
        eos_token_id=END,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    theirs = Qwen4ExpTextNGramEmbedding(config, 18, 0, 1)
    with torch.no_grad():
        # Each row of the table says which it is.
        numbers = torch.arange(len(theirs.ngram_embedding.weight), dtype=torch.float32)
        theirs.ngram_embedding.weight.copy_(numbers.unsqueeze(1).expand(-1, 2))
        ids = torch.randint(0, 250_000, (40,), generator=torch.Generator().manual_seed(0))
        ids[[7, 8, 20]] = END
        expected = theirs(ids.unsqueeze(0), None)[0, :, ::2].long()
    states = torch.zeros(1, 3, dtype=torch.int64, device=DEVICE)
    grams = ngrams(ids.to(DEVICE), states, plan([40], [0]), length=4, end=END)
    numbers = (theirs.layer_multipliers, theirs.ngram_heads_vocab_sizes, theirs.ngram_heads_offsets)
    assert torch.equal(hashed_rows(grams, *(part.to(DEVICE) for part in numbers)).cpu(), expected)
