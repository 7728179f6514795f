"""Models for tensor parallelism that no library has: written by hand, and with head counts that do not divide."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH, ROWS = 37, 13, 6


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[torch.rand(ROWS, LENGTH, generator=generator) < 0.3] = -100
    return tokens, labels


def mean_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def small(model):
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.1)
    return model


class FusedAttention(nn.Module):
    """One projection in the order value, query, key, seven heads, and its norm inside."""

    def __init__(self, width=28, heads=7):
        super().__init__()
        self.width, self.heads = width, heads
        self.norm = nn.LayerNorm(width)
        self.vqk = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        rows, length, _ = x.shape
        v, q, k = self.vqk(self.norm(x)).view(rows, length, 3, self.heads, self.width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, self.width))


class FusedBlock(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        self.attention = FusedAttention(width)
        self.norm = nn.LayerNorm(width)
        self.gate_and_up = nn.Linear(width, 2 * 51, bias=False)
        self.down = nn.Linear(51, width)

    def forward(self, x):
        x = x + self.attention(x)
        gate, up = self.gate_and_up(self.norm(x)).unflatten(-1, (-1, 2)).unbind(-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, block, width=28):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.empty(LENGTH, width))
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fused():
    """A fused projection made by hand, gate and up interleaved, no norm before the head."""
    return small(Decoder(FusedBlock)), mean_loss, batch


class CountedAttention(nn.Module):
    """Its head count is an attribute of its own, and it uses grouped keys and values."""

    def __init__(self, width=24, num_heads=6, num_kv_heads=3, size=5):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.size = num_heads, num_kv_heads, size
        self.to_q, self.to_k = nn.Linear(width, num_heads * size, bias=False), nn.Linear(width, num_kv_heads * size)
        self.to_v, self.to_out = nn.Linear(width, num_kv_heads * size), nn.Linear(num_heads * size, width, bias=False)
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x):
        rows, length = x.shape[:2]
        q = self.to_q(x).view(rows, length, self.num_heads, self.size).transpose(1, 2)
        k = self.to_k(x).view(rows, length, self.num_kv_heads, self.size).transpose(1, 2) * self.scale
        v = self.to_v(x).view(rows, length, self.num_kv_heads, self.size).transpose(1, 2)
        repeats = self.num_heads // self.num_kv_heads
        scores = q @ k.repeat_interleave(repeats, 1).transpose(-1, -2) * self.temperature
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1), -torch.inf)
        mixed = scores.softmax(-1) @ v.repeat_interleave(repeats, 1)
        return self.to_out(mixed.transpose(1, 2).reshape(rows, length, self.num_heads * self.size))


class CountedBlock(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CountedAttention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 50), nn.ReLU(), nn.Linear(50, width))

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def counted():
    """An attention that takes its head count from an attribute, with a temperature for each head and a scale for all."""
    return small(Decoder(lambda: CountedBlock(24), 24)), mean_loss, batch


class SummedBlock(CountedBlock):
    """Between its two projections an MLP mixes features, so that neither can be split."""

    def __init__(self, width=24):
        super().__init__(width)
        # The gradient of a key's bias is 0; what is left of it by rounding is too near the bound in a model that adds up so much.
        self.attention.to_k = nn.Linear(width, self.attention.num_kv_heads * self.attention.size, bias=False)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp[2](self.mlp[0](self.mlp_norm(x)).sigmoid().cumsum(-1))


def summed():
    """Projections that stay whole among others that are split."""
    return small(Decoder(lambda: SummedBlock(24), 24)), mean_loss, batch


class RelativeAttention(nn.Module):
    """Bidirectional, with a learned bias for each head and distance."""

    def __init__(self, width=20, heads=5):
        super().__init__()
        self.h = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.bias = nn.Embedding(2 * LENGTH - 1, heads)

    def forward(self, x):
        length = x.shape[1]
        q, k, v = (layer(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        place = torch.arange(length, device=x.device)
        distance = self.bias(place[:, None] - place[None, :] + LENGTH - 1).permute(2, 0, 1)
        return self.o(((q @ k.transpose(-1, -2) + distance).softmax(-1) @ v).transpose(1, 2).flatten(2))


class RelativeBlock(nn.Module):
    """Norms after the sums, as the first encoders had them."""

    def __init__(self, width=20):
        super().__init__()
        self.attention, self.norm1, self.norm2 = RelativeAttention(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 31), nn.Linear(31, width)

    def forward(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(RelativeBlock(width), RelativeBlock(width))
        self.classes = nn.Linear(width, VOCABULARY)
        self.classes.weight = self.tokens.weight

    def forward(self, tokens):
        return self.classes(self.blocks(self.tokens(tokens)))


def relative():
    """An encoder with relative positions and a head tied to its embedding."""
    return small(Encoder()), mean_loss, batch


def _llama(heads, kv_heads):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=41, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=4, attention_bias=True, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    return small(LlamaForCausalLM(config))


def heads_6_2():
    return _llama(6, 2)


def heads_6_3():
    return _llama(6, 3)


def heads_12_3():
    return _llama(12, 3)


def heads_4_1():
    return _llama(4, 1)


def fused_4_1():
    """A fused projection of which every head needs the one key and value."""
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, multi_query=True, parallel_attn=True,
        new_decoder_architecture=False, alibi=False, bias=True, max_position_embeddings=32, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return small(FalconForCausalLM(config))


class Adapted(nn.Module):
    """A projection with a trained low-rank addition, as adapters wrap one; the projection itself is frozen."""

    def __init__(self, inner, rank=3):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x):
        return self.inner(x) + 1.5 * self.up(self.down(x))


def adapted():
    """Adapters on columns and rows of an attention and an MLP."""
    model = Decoder(lambda: CountedBlock(24), 24)
    for block in model.blocks:
        block.attention.to_q, block.attention.to_out = Adapted(block.attention.to_q), Adapted(block.attention.to_out)
        block.mlp[0], block.mlp[2] = Adapted(block.mlp[0]), Adapted(block.mlp[2])
    return small(model), mean_loss, batch


def adapters_of_peft():
    """A library's adapters on a transformers model."""
    from peft import LoraConfig, get_peft_model

    return small(get_peft_model(_llama(6, 2), LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])))
