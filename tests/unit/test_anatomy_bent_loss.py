"""A model's own loss that is no mean over labels that are not -100 is not counted as one."""

import pytest
from torch import nn
from torch.nn import functional as F

from phalanx.anatomy import own_loss


class Plain(nn.Module):
    def forward(self, x, labels):
        return {"loss": F.cross_entropy(x, labels)}


class OtherIgnored(nn.Module):
    def forward(self, x, labels):
        return {"loss": F.cross_entropy(x, labels, ignore_index=0)}


class Summed(nn.Module):
    def forward(self, x, labels):
        return {"loss": F.cross_entropy(x, labels, reduction="sum")}


class HoldsSum(nn.Module):
    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(reduction="sum")

    def forward(self, x, labels):
        return {"loss": self.criterion(x, labels)}


def test_a_plain_mean_is_counted_over_its_labels():
    assert own_loss(Plain()).rule == "labels"


@pytest.mark.parametrize("model", [OtherIgnored, Summed, HoldsSum])
def test_another_loss_is_not_known(model):
    assert own_loss(model()).rule == "unknown"
