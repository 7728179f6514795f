"""Rows of pipelines: PyTorch's `torch.distributed.pipelining` on a model written as stages, and Phalanx on the untouched one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from bench.workload import SHAPE, adamw, build_model

if TYPE_CHECKING:
    from bench.engines import Setting, Step

NUM_MICRO = 4


class Stage(nn.Module):
    """Some layers of the model, as PyTorch's engine wants them: a module that takes and gives one tensor."""

    def __init__(self, model: nn.Module, start: int, stop: int):
        super().__init__()
        self.embed = model.model.embed_tokens if start == 0 else None
        self.layers, self.angles = nn.ModuleList(model.model.layers[start:stop]), model.model.rotary_emb
        is_last = stop == len(model.model.layers)
        self.norm, self.head = (model.model.norm, model.lm_head) if is_last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if self.embed is not None else x
        places = torch.arange(x.shape[1])[None]
        angles = self.angles(x, places)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=places, position_embeddings=angles)
        return self.head(self.norm(x)) if self.head is not None else x


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def ids_of(setting: Setting, step: int) -> torch.Tensor:
    """The micro-batches of a step, of one row each, which all ranks of the pipeline see."""
    from bench.workload import input_ids

    return torch.cat([input_ids(setting.workload, step, number)[:1] for number in range(NUM_MICRO)])


def torch_pipeline(chunks: int) -> Callable[[Setting], Step]:
    """1F1B, or interleaved 1F1B over two chunks, with the same number of layers in every stage."""

    def build(setting: Setting) -> Step:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        dist.init_process_group("gloo")
        model, number = build_model(torch.bfloat16 if setting.half else torch.float32), setting.world * chunks
        per_stage = SHAPE["num_hidden_layers"] // number
        mine = range(setting.rank, number, setting.world)
        parts = [Stage(model, per_stage * stage, per_stage * (stage + 1)) for stage in mine]
        del model
        stages = [PipelineStage(part, stage, number, torch.device("cpu")) for part, stage in zip(parts, mine)]
        if chunks > 1:
            schedule = ScheduleInterleaved1F1B(stages, NUM_MICRO, loss_fn=next_token_loss)
        else:
            schedule = Schedule1F1B(stages[0], NUM_MICRO, loss_fn=next_token_loss)
        optimizer = adamw([parameter for part in parts for parameter in part.parameters()], fused=True)
        is_first, is_last = setting.rank == 0, setting.rank == setting.world - 1

        def step(index: int) -> float:
            ids, losses = ids_of(setting, index), []
            schedule.step(*([ids] if is_first else []), **({"target": ids, "losses": losses} if is_last else {}))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return float(sum(losses) / len(losses)) if losses else 0.0

        return step

    return build


def phalanx_pipeline(terms: str, stage_sizes: tuple[int, ...] | None = None) -> Callable[[Setting], Step]:
    def build(setting: Setting) -> Step:
        import phalanx as px

        px.launch()
        booster = px.Booster(f"pp{setting.world}+{terms}micro{NUM_MICRO}" + ("+bf16" if setting.half else ""), stage_sizes=stage_sizes)
        model = build_model()
        model, *_ = booster.boost(model, adamw(model.parameters(), fused=True))

        def step(index: int) -> float:
            ids = ids_of(setting, index)
            return float(booster.step({"input_ids": ids, "labels": ids}).loss)

        return step

    return build
