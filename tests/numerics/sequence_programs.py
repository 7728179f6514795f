"""Programs whose sequences are cut: a person's own transformers, and batches that are packed, padded and masked."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from phalanx.verify.tiny import build_tiny

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS = 37, 24, 4, 13, 3
DOCUMENTS = (1, 7, 3, 2)


class Attention(nn.Module):
    """Attention as people write it; `kind` is what it does besides, or instead."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, shown=None):
        rows, tokens, _ = x.shape
        q, k, v = (part.view(rows, tokens, HEADS, -1).transpose(1, 2) for part in self.inward(x).chunk(3, -1))
        if self.kind == "softmax":
            scores = (q @ k.mT / k.shape[-1] ** 0.5).masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -torch.inf)
            out = torch.softmax(scores, -1) @ v
        elif self.kind == "mask":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(tokens, tokens, dtype=torch.bool).tril())
        elif self.kind == "encoder":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=shown[:, None, None, :])
        else:  # many models take one token for a step of generation
            out = F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1)
        return self.outward(out.transpose(1, 2).reshape(rows, tokens, -1))


class Block(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(kind)
        self.second, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if kind == "convolution" else None

    def forward(self, x, shown=None):
        x = x + self.attention(self.norm(x), shown)
        if self.convolution is not None:
            x = x + self.convolution(x.mT).mT
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Transformer(nn.Module):
    """A language model that numbers its tokens itself and returns logits, or a loss of its own where targets are given."""

    def __init__(self, kind: str = "plain"):
        super().__init__()
        self.kind = kind
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([Block(kind), Block(kind)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True) if kind == "recurrent" else None
        self.learned = nn.Parameter(torch.randn(1, 32, WIDTH) * 0.1) if kind == "sliced" else None
        self.gate = nn.Parameter(torch.zeros(WIDTH)) if kind == "gated" else None

    def forward(self, ids, targets=None):
        x = self.tokens(ids)
        if self.learned is not None:
            x = x + self.learned[:, : ids.shape[1]]
        else:
            x = x + self.positions(torch.arange(0, ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, ids != 0)
        if self.recurrent is not None:
            x = x + self.recurrent(x)[0]
        if self.kind == "pooled":
            x = x + torch.tanh(x.mean(1, keepdim=True))
        if self.gate is not None:
            x = x + self.gate * x.mean(1, keepdim=True)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def draw(step: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(100 + step))


def own_batch(step):
    """(ids, labels) of a criterion that shifts nothing: labels are the next tokens already, and ragged."""
    ids = draw(step, ROWS, LENGTH + 1)
    ends = torch.tensor([[LENGTH], [LENGTH // 2], [2]])
    return ids[:, :-1], ids[:, 1:].masked_fill(torch.arange(LENGTH)[None] >= ends, -100)


def padded_own_batch(step):
    """Ids that are 0 at the end of a row, where the model's own mask hides them."""
    ids, labels = own_batch(step)
    return ids.masked_fill(torch.arange(LENGTH)[None] > torch.tensor([[LENGTH], [LENGTH // 2], [2]]), 0), labels


def sum_and_count(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def shifting_criterion(output, batch):
    """The criterion of many recipes: it shifts logits and labels itself."""
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    return sum_and_count(logits, labels)


def with_criterion(kind: str):
    return Transformer(kind), sum_and_count, own_batch


def own_plain():
    return with_criterion("plain")


def own_loss():
    """The model's own loss: a mean over targets that its forward takes as its second argument."""
    return Transformer(), own_batch


def own_encoder():
    return Transformer("encoder"), sum_and_count, padded_own_batch


def own_softmax():
    return with_criterion("softmax")


def own_mask():
    return with_criterion("mask")


def own_convolution():
    return with_criterion("convolution")


def own_recurrent():
    return with_criterion("recurrent")


def own_pooled():
    return with_criterion("pooled")


def own_gated():
    """A way that is shut at first: a trial on the first weights alone would not see what goes through it."""
    return with_criterion("gated")


def shortened(length: int):
    return Transformer(), sum_and_count, lambda step: tuple(part[:, :length] for part in own_batch(step))


def own_one():
    return shortened(1)


def own_three():
    """Fewer tokens than ranks: none may be left with a single one, which this model does not take for causal."""
    return shortened(3)


def own_sliced():
    return with_criterion("sliced")


def positions_of(documents) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in documents])


def packed_batch(step):
    """Rows of documents of 1, 7, 3 and 2 tokens, in one row in another order; a cache would hide the borders from transformers."""
    ids, orders = draw(step, ROWS, LENGTH), (DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS)
    positions = torch.stack([positions_of(order) for order in orders])
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100), "use_cache": False}


def padded_batch(step, side="left"):
    ids, lengths, places = draw(step, ROWS, LENGTH), torch.tensor([[LENGTH], [6], [2]]), torch.arange(LENGTH)[None]
    real = places < lengths if side == "right" else places >= LENGTH - lengths
    first = real & (real.cumsum(1) == 1)
    return {"input_ids": ids * real, "attention_mask": real.long(), "labels": ids.masked_fill(~real | first, -100)}


def masked_batch(step):
    """A mask of one's own for whole rows: any key at random, and oneself."""
    ids = draw(step, ROWS, LENGTH)
    mask = torch.rand(ROWS, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(step)) < 0.5
    return {"input_ids": ids, "attention_mask": mask | torch.eye(LENGTH, dtype=torch.bool), "labels": ids}


def biased_batch(step):
    """A bias that falls with distance, other for every head, on top of causality."""
    ids, places = draw(step, ROWS, LENGTH), torch.arange(LENGTH)
    distance = (places[None] - places[:, None]).double()
    bias = distance * torch.linspace(0.1, 1.0, 8, dtype=torch.float64)[:, None, None]
    return {"input_ids": ids, "attention_mask": bias.masked_fill(distance > 0, -torch.inf).expand(ROWS, -1, -1, -1), "labels": ids}


def short_batch(step):
    ids = draw(step, ROWS, 3)
    return {"input_ids": ids, "labels": ids}


def llama():
    return build_tiny("tiny-llama")[0]


def qwen3():
    return build_tiny("tiny-qwen3")[0]


def gemma2():
    return build_tiny("tiny-gemma2")[0]


def opt():
    return build_tiny("tiny-opt")[0]


def llama_packed():
    return llama(), packed_batch


def qwen3_packed():
    return qwen3(), packed_batch


def gemma2_packed():
    return gemma2(), packed_batch


def llama_heads():
    """As many heads as tokens, and a mask for each."""

    def batch(step):
        ids, mask = draw(step, ROWS, 8), torch.rand(ROWS, 8, 8, 8, generator=torch.Generator().manual_seed(step)) < 0.5
        return {"input_ids": ids, "attention_mask": mask | torch.eye(8, dtype=torch.bool), "labels": ids}

    return llama(), batch


def gemma2_masks():
    """Masks of one's own for each kind of layer."""
    whole = torch.zeros(ROWS, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(torch.ones(LENGTH, LENGTH).triu(1) > 0, -1e30)
    masks = {"full_attention": whole, "sliding_attention": whole.masked_fill(torch.ones(LENGTH, LENGTH).tril(-4) > 0, -1e30)}
    return gemma2(), lambda step: {"input_ids": draw(step, ROWS, LENGTH), "labels": draw(step, ROWS, LENGTH), "attention_mask": masks}


class Values(nn.Module):
    """A body of transformers under a head of one's own, which gives every name another."""

    def __init__(self):
        super().__init__()
        self.body = llama().model
        self.head = nn.Linear(self.body.config.hidden_size, 1)

    def forward(self, ids, shown=None, places=None, **rest):
        given = {"input_ids": ids, "attention_mask": shown, "position_ids": places, "use_cache": False}
        return self.head(self.body(**given).last_hidden_state)[..., 0]


def squares(values, batch):
    counted = batch["counted"]
    return ((values - 1.0) ** 2 * counted).sum(), counted.sum()


def values_masked():
    def batch(step):
        given = padded_batch(step)
        return {"ids": given["input_ids"], "shown": given["attention_mask"], "counted": given["attention_mask"].double()}

    return Values(), squares, batch


def values_packed():
    """Documents begin in rows that no trial on the first ones sees."""
    counted, places = torch.ones(ROWS, LENGTH, dtype=torch.float64), torch.arange(LENGTH).repeat(ROWS, 1)
    places[2] = positions_of(DOCUMENTS)
    return Values(), squares, lambda step: {"ids": draw(step, ROWS, LENGTH), "places": places, "counted": counted}


def encoder_decoder():
    from transformers import BartConfig, BartForConditionalGeneration

    of_each = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in of_each.items()}
    return BartForConditionalGeneration(BartConfig(vocab_size=VOCABULARY, d_model=16, max_position_embeddings=64, dropout=0.0, **sizes))


def two_texts(step):
    ids = draw(step, ROWS, LENGTH)
    return {"input_ids": ids, "decoder_input_ids": ids.flip(1), "labels": draw(step + 1, ROWS, LENGTH)}


def bart():
    return encoder_decoder(), two_texts


def bart_masked():
    """Only the encoder's padding is hidden: one mask of the batch does not speak of both."""
    return encoder_decoder(), lambda step: {**two_texts(step), "attention_mask": padded_batch(step, "right")["attention_mask"]}


def llama_overlong():
    return llama(), lambda step: {**short_batch(step), "attention_mask": torch.ones(ROWS, 5, dtype=torch.long)}


def llama_left():
    return llama(), padded_batch


def gemma2_left():
    return gemma2(), padded_batch


def opt_left():
    return opt(), padded_batch


def llama_right():
    return llama(), lambda step: padded_batch(step, "right")


def llama_masked():
    return llama(), masked_batch


def llama_biased():
    return llama(), biased_batch


def llama_short():
    return llama(), short_batch


def llama_criterion():
    return llama(), shifting_criterion, lambda step: padded_batch(step, "right")


def bert_classes():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    return BertForSequenceClassification(config), lambda step: {"input_ids": draw(step, ROWS, LENGTH), "labels": torch.tensor([0, 1, 2])}


def llama_classes():
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification(llama().config)
    return model, lambda step: {"input_ids": draw(step, ROWS, LENGTH), "labels": torch.tensor([0, 1, 2])}


def mixture():
    """A mixture with its own balance loss, which counts tokens: those that rows are padded with inside must not count."""
    model = build_tiny("tiny-mixtral")[0]
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.1
    return model, lambda step: {"input_ids": draw(step, ROWS, LENGTH), "labels": draw(step, ROWS, LENGTH), "output_router_logits": True}
