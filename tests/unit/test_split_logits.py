"""What a step may do with logits in parts: on one process, where the part is everything, each must give what plain logits give."""

import pytest
import torch
from torch.nn import functional as F

from phalanx.cluster.mesh import Axis
from phalanx.errors import PlanError
from phalanx.kernels.cross_entropy import causal_loss
from phalanx.layout import STANDS_FOR
from phalanx.parallel.tensor import SplitLogits, VocabularyLoss

ROWS, LENGTH, SIZE = 3, 5, 7
LABELS = torch.tensor([[1, -100, 6, 0, 3], [2, 2, -100, -100, 5], [4, 0, 1, 6, -100]])
BIAS, SCALE = torch.linspace(-1, 1, SIZE, dtype=torch.float64), torch.tensor(1.7, dtype=torch.float64)


def by_hand(logits, labels):
    return -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels != -100].mean()


# What becomes a loss without whole logits, and what needs them.
SPLIT = {
    "flat": lambda x: F.cross_entropy(x.view(-1, SIZE), LABELS.view(-1)),
    "flattened": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), reduction="sum"),
    "a module": lambda x: torch.nn.CrossEntropyLoss()(x.reshape(-1, SIZE).float().double(), LABELS.reshape(-1)),
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1), LABELS),
    "of each token": lambda x: (F.cross_entropy(x.transpose(1, 2), LABELS, reduction="none") * torch.arange(LENGTH)).sum(),
    "shifted": lambda x: F.cross_entropy(x[:, :-1].contiguous().view(-1, SIZE), LABELS[:, 1:].flatten()),
    "another label is ignored": lambda x: F.cross_entropy(x[..., :, :].view(-1, SIZE), LABELS.clamp(min=0).view(-1), ignore_index=6),
    "capped": lambda x: F.cross_entropy(((x / 3.0).tanh() * 3.0).view(-1, SIZE), LABELS.view(-1)),
    "with a bias": lambda x: F.cross_entropy((x + BIAS).view(-1, SIZE), LABELS.view(-1)),
    "scaled": lambda x: F.cross_entropy((SCALE * x - x).view(-1, SIZE), LABELS.view(-1)),
    "one row": lambda x: F.cross_entropy(x[1], LABELS[1]),
    "of a causal model": lambda x: VocabularyLoss(LOGITS)(x, LABELS, SIZE) if hasattr(x, STANDS_FOR) else causal_loss(x, LABELS, SIZE),
}
WHOLE = {
    "by hand": lambda x: by_hand(x, LABELS),
    "smoothed": lambda x: F.cross_entropy(x.view(-1, SIZE), LABELS.view(-1), label_smoothing=0.1),
    "weighted": lambda x: F.cross_entropy(x.view(-1, SIZE), LABELS.view(-1), weight=BIAS.abs()),
    "a part of the vocabulary": lambda x: F.cross_entropy(x[..., 1:].flatten(0, 1), (LABELS - 1).clamp(min=-1).flatten(), ignore_index=-1),
    "two of them": lambda x: F.cross_entropy(torch.cat([x, 2 * x]).flatten(0, 1), LABELS.repeat(2, 1).flatten()),
    "regularised": lambda x: F.cross_entropy(x.view(-1, SIZE), LABELS.view(-1)) + 0.1 * x.logsumexp(-1).square().mean(),
    "changed in place": lambda x: F.cross_entropy(_without_last(x).view(-1, SIZE), LABELS.clamp(max=5).view(-1)),
}


class Watched(SplitLogits):
    """Notes who asks for whole logits."""

    def whole(self, stand_in, reader):
        ASKED.append(reader)
        return super().whole(stand_in, reader)


LOGITS, ASKED = Watched(Axis("tp", (0,), 0)), []


def _without_last(x):
    x = x * 1.0
    x[..., -1] = -1e3
    return x


def plain_and_split(use):
    """The loss and the gradient of plain logits, then those of split ones."""
    found = []
    ASKED.clear()
    for is_split in (False, True):
        values = torch.randn(ROWS, LENGTH, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
        with LOGITS.reading():
            given = values * 1.0
            loss = use(LOGITS.stand_in(given, SIZE) if is_split else given)
        loss.backward()
        found += [loss.detach(), values.grad]
    return found


@pytest.mark.parametrize("use", [pytest.param(use, id=name) for name, use in SPLIT.items()])
def test_losses_that_need_no_whole_logits(use):
    loss, grad, split_loss, split_grad = plain_and_split(use)
    torch.testing.assert_close(split_loss, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(split_grad, grad, rtol=1e-12, atol=1e-14)
    assert ASKED == []


@pytest.mark.parametrize("use", [pytest.param(use, id=name) for name, use in WHOLE.items()])
def test_whatever_else_reads_them_gets_whole_ones(use):
    loss, grad, split_loss, split_grad = plain_and_split(use)
    torch.testing.assert_close(split_loss, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(split_grad, grad, rtol=1e-12, atol=1e-14)
    assert ASKED


def test_questions_about_shape_read_nothing():
    with LOGITS.reading():
        made = LOGITS.stand_in(torch.ones(ROWS, LENGTH, SIZE), SIZE)
        assert (made.shape, made.size(-1), made.dtype, made.device.type, made.dim()) == (
            (ROWS, LENGTH, SIZE),
            SIZE,
            torch.float32,
            "cpu",
            3,
        )
        assert not hasattr(made, "_phalanx_whole")
        assert float(made.sum()) == ROWS * LENGTH * SIZE
    assert made.sum().isnan()  # whoever keeps one reads no numbers


def test_what_is_looked_at_twice_is_not_changed_in_place():
    with LOGITS.reading():
        made = LOGITS.stand_in(torch.ones(ROWS, LENGTH, SIZE), SIZE)
        rows = made.view(-1, SIZE)
        with pytest.raises(PlanError, match="changed in place"):
            rows[0] = 0
        assert rows.shape == (ROWS * LENGTH, SIZE)


def test_a_mode_that_leaves_earlier_keeps_logits_whole():
    with LOGITS.reading():
        assert LOGITS.can_stand_in(SIZE)
        with torch.device("cpu"):  # a mode of its own
            assert not LOGITS.can_stand_in(SIZE)
        made = LOGITS.stand_in(torch.ones(1, SIZE), SIZE)
        assert LOGITS.can_stand_in(SIZE)
        assert made.shape == (1, SIZE)
    assert not LOGITS.can_stand_in(SIZE)
