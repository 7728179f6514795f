"""Time of one layer of experts, forward and backward, on one process: this package's against those of `transformers`.

    python bench/experts.py [--tokens 1024] [--hidden 256] [--rounds 15]

Both compute the same module on the same tokens; implementations take turns, and the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from phalanx.parallel.expert.homes import Homes
from phalanx.parallel.expert.load import Load
from phalanx.parallel.expert.stacked import StackedForward


def experts_of(num_experts: int, hidden: int, width: int) -> MixtralExperts:
    config = MixtralConfig(hidden_size=hidden, intermediate_size=width, num_local_experts=num_experts)
    module = MixtralExperts(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
    return module


def runs_of(module: MixtralExperts) -> dict[str, Callable[..., torch.Tensor]]:
    forward = StackedForward(Homes.even(module.num_experts, 1), [], Load("experts", module.num_experts))

    def of_transformers(name: str) -> Callable[..., torch.Tensor]:
        def run(*arguments: torch.Tensor) -> torch.Tensor:
            module.config._experts_implementation = name
            return module(*arguments)

        return run

    runs = {"phalanx": lambda *arguments: forward(module, *arguments), "transformers grouped_mm": of_transformers("grouped_mm")}
    if module.num_experts <= 8:  # with many large experts its backward takes seconds
        runs["transformers eager"] = of_transformers("eager")
    return runs


def seconds(run: Callable[..., torch.Tensor], module: MixtralExperts, inputs: tuple[torch.Tensor, ...]) -> float:
    module.zero_grad()
    start = time.process_time()
    run(*inputs).sum().backward()
    return time.process_time() - start


def medians(num_experts: int, num_choices: int, width: int, options: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    module = experts_of(num_experts, options.hidden, width)
    x = torch.randn(options.tokens, options.hidden, requires_grad=True)
    weights, chosen = torch.rand(options.tokens, num_experts).topk(num_choices)
    inputs = (x, chosen, (weights / weights.sum(1, keepdim=True)).requires_grad_())
    runs = runs_of(module)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.rounds + 2):
        for name, run in runs.items():
            taken = seconds(run, module, inputs)
            if number >= 2:
                times[name].append(taken)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    width = options.width
    cases = [(8, 2, width), (64, 16, width // 8), (64, 2, width)]
    found = [medians(*case, options) for case in cases]
    for (num_experts, num_choices, inner), times in zip(cases, found, strict=True):
        print(f"{num_experts} experts, top-{num_choices}, width {inner}, {options.tokens} tokens")
        for name, value in times.items():
            print(f"  {name:24} {value * 1e3:8.2f} ms; phalanx takes {times['phalanx'] / value:.2f} of it")
        print(f"  against 8 experts, which are as much at work on a token: {times['phalanx'] / found[0]['phalanx']:.2f}")


if __name__ == "__main__":
    main()
