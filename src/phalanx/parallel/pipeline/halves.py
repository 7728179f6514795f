"""A backward in two halves on any autograd graph: first the gradients of a stage's inputs, later those of its weights.

On the way from the outputs to the inputs lie the nodes that the first half runs. A weight hangs on one of them by a side branch
(a linear layer's weight on its product). The first half keeps the gradient that arrives at such a node, and the second starts
there again, with that weight alone as its end: neither half does what the other one did. A weight that hangs on several nodes
(used twice in the stage) is taken along in the first half.

Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2; learned from PyTorch's `pipelining/_backward.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class Branch:
    """One node on the way with the weights that hang on it alone, and the gradient that arrived there."""

    node: Node
    weights: list[torch.Tensor]
    arrived: tuple[torch.Tensor | None, ...] = ()

    def keep(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self.arrived = gradients


class Halves:
    """The backward from `roots` with `gradients`, in two halves; inputs and weights get theirs in `.grad`."""

    def __init__(self, roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]):
        self.roots, self.gradients, self.inputs = list(roots), list(gradients), list(inputs)
        self.branches: list[Branch] = []
        self.is_whole = not self.inputs  # without inputs there is nothing that others wait for: all is left to the second half

    def run_input(self) -> None:
        """The first half."""
        if self.is_whole or not self.roots:
            return
        graph = _Graph([edge.node for edge in self.roots], self.inputs)
        self.branches, shared = graph.branches()
        handles = [branch.node.register_prehook(branch.keep) for branch in self.branches if graph.is_on_way(branch.node)]
        for branch in self.branches:
            if not graph.is_on_way(branch.node):  # a root whose value does not depend on the inputs
                branch.arrived = self._arrives_at(branch.node)
        try:
            torch.autograd.backward(self.roots, self.gradients, inputs=[*self.inputs, *shared], retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()

    def run_weight(self) -> None:
        """The second half; the graph is gone afterwards."""
        if self.is_whole and self.roots:
            torch.autograd.backward(self.roots, self.gradients)
        for branch in self.branches:
            given = [(GradientEdge(branch.node, place), value) for place, value in enumerate(branch.arrived) if value is not None]
            if given:
                edges, values = zip(*given)
                torch.autograd.backward(edges, values, inputs=branch.weights, retain_graph=True)
        self.branches, self.roots, self.gradients = [], [], []

    def _arrives_at(self, node: Node) -> tuple[torch.Tensor | None, ...]:
        given = {edge.output_nr: value for edge, value in zip(self.roots, self.gradients) if edge.node == node}
        return tuple(given.get(place) for place in range(max(given) + 1))


class _Graph:
    """The part of the autograd graph below some roots, by what each node leads to."""

    def __init__(self, roots: Sequence[Node], inputs: Sequence[torch.Tensor]):
        self.roots = list(dict.fromkeys(roots))
        self.ends = {get_gradient_edge(tensor).node for tensor in inputs}
        self.order: list[Node] = []  # every node after all that it leads to
        self.leads: dict[Node, bool] = {}  # whether a node leads to an input
        self._sort()
        for node in self.order:
            self.leads[node] = node in self.ends or any(self.leads[child] for child in _children(node))

    def _sort(self) -> None:
        seen: set[Node] = set()
        waiting: list[tuple[Node, bool]] = [(root, False) for root in self.roots]
        while waiting:
            node, is_done = waiting.pop()
            if is_done:
                self.order.append(node)
            elif node not in seen:
                seen.add(node)
                waiting.append((node, True))
                waiting += [(child, False) for child in _children(node) if child not in seen]

    def is_on_way(self, node: Node) -> bool:
        return self.leads[node]

    def branches(self) -> tuple[list[Branch], list[torch.Tensor]]:
        """The nodes with the weights that hang on them alone, and the weights that hang on several."""
        weights = self._weights_below()
        hanging: dict[Node, dict[int, torch.Tensor]] = {}
        for node in self.order:
            if self.leads[node] and node not in self.ends:
                for child in _children(node):
                    if not self.leads[child]:
                        hanging.setdefault(node, {}).update(weights[child])
        for root in self.roots:
            if not self.leads[root]:
                hanging.setdefault(root, {}).update(weights[root])
        count: dict[int, int] = {}
        for found in hanging.values():
            for key in found:
                count[key] = count.get(key, 0) + 1
        shared = {key: weight for found in hanging.values() for key, weight in found.items() if count[key] > 1}
        alone = [Branch(node, [weight for key, weight in found.items() if count[key] == 1]) for node, found in hanging.items()]
        return [branch for branch in reversed(alone) if branch.weights], list(shared.values())

    def _weights_below(self) -> dict[Node, dict[int, torch.Tensor]]:
        """For each node off the way, the weights that it leads to."""
        weights: dict[Node, dict[int, torch.Tensor]] = {}
        for node in self.order:
            if not self.leads[node]:
                variable: Any = getattr(node, "variable", None)
                weights[node] = {} if variable is None else {id(variable): variable}
                for child in _children(node):
                    weights[node].update(weights[child])
        return weights


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]
