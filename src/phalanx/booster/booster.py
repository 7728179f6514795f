"""`Booster`: one plan, one model of any kind, and the same numbers as one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from phalanx.anatomy import execution_blocks
from phalanx.booster import saving
from phalanx.booster.model_calls import take_over_calls
from phalanx.booster.objective import Objective
from phalanx.booster.optimizer import BoostedOptimizer, BoostedScheduler
from phalanx.booster.passes import PASSES, Context
from phalanx.booster.result import Result
from phalanx.booster.sequences import SplitSequences, num_key_heads
from phalanx.booster.stages import Stages, forward_to_watch
from phalanx.booster.start import StartState
from phalanx.booster.tiers import tier_sizes
from phalanx.booster.training import Training, to_device
from phalanx.checkpoint import Saving
from phalanx.cluster import comm, device, launch, stopping
from phalanx.cluster.mesh import Mesh
from phalanx.cluster.random import Streams
from phalanx.data import boost_loader, first_batch
from phalanx.errors import ConfigError
from phalanx.memory import StateEngine
from phalanx.memory.axes import StateAxes
from phalanx.memory.gemini import Gemini
from phalanx.optim.elementwise import elementwise_state
from phalanx.optim.scale import LossScale
from phalanx.parallel.expert.load import LayerLoad
from phalanx.parallel.expert.routing import Routing
from phalanx.parallel.pipeline.balance import LayerCosts
from phalanx.parallel.pipeline.trace import layer_costs_of, to_record
from phalanx.parallel.sequence import Grid
from phalanx.plan import Plan
from phalanx.plan.fields import Budgets
from phalanx.precision import Precision

START_SCALE = 65536.0
_BOOSTED: WeakSet[nn.Module] = WeakSet()  # by any booster: the first one's engine owns the parameters' memory


class Booster:
    """Takes a single-device program's model, optimizer, criterion, loader and scheduler, and runs them under `plan`.

    `plan` is a Plan, its text ("zero2+bf16"), a table, or a plugin. `clip_norm` limits the global gradient norm of kind `norm_type`.
    `forward(model, batch)`, `count(batch)` and `split(batch, start, stop)` replace the defaults for unusual models and batches.
    `stage_sizes` are the layers of each pipeline stage; without them stages are cut by cost. `layer_costs` (the record of an earlier
    `traced_step`, or the folder of a run that has one) says what layers cost in place of a count of their weights.
    Raises: PlanError listing every conflict before anything is changed.
    """

    def __init__(
        self,
        plan: Plan | str | dict | None = None,
        *,
        plugin: Any = None,
        clip_norm: float | None = None,
        norm_type: float = 2.0,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        count: Callable[[Any], Any] | None = None,
        split: Callable[[Any, int, int], Any] | None = None,
        routing: Routing | None = None,
        stage_sizes: Sequence[int] | None = None,
        layer_costs: LayerCosts | Mapping[str, Any] | str | Path | None = None,
        seed: int = 0,
    ):
        plan, plugin = _plan_and_plugin(plan, plugin)
        self.plan, self.plugin = plan, plugin
        self.clip_norm = clip_norm if clip_norm is not None else getattr(plugin, "clip_norm", None)
        self.norm_type, self.seed, self.routing = norm_type, seed, routing
        self.forward, self.count, self.split, self.stage_sizes = forward, count, split, stage_sizes
        self.layer_costs = None if layer_costs is None else layer_costs_of(layer_costs)
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ConfigError(f"clip_norm is {self.clip_norm}", allowed="a number above 0, or None", remedy="clip_norm=1.0")
        self.world = launch.launch()
        plan.require(None, self.world.size)
        for name, given in (("stage_sizes", stage_sizes), ("layer_costs", layer_costs)):
            if given is not None and plan.pp == 1:
                raise ConfigError(f"{name} with {plan}, which has no stages", allowed="a plan with pp", remedy=f"pp2, or leave {name} out")
        self.mesh = Mesh(*plan.axes(self.world.size))
        self.device = device.get(self.world.device.type)
        self.precision = Precision.of(plan.precision)
        self.streams = Streams(seed, self.device)
        self.trainings: list[Training] = []
        self.loaders: list[Any] = []
        self._under_way: Saving | None = None

    # -- boosting ------------------------------------------------------------------------------------------------------

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, Any, Any, Any, Any]:
        """Returns model, optimizer, criterion, dataloader and lr_scheduler ready for the plan; None comes back as None.

        Batches are global: the returned loader yields this data index's rows of what the given one yields. Gradients from before are
        forgotten.
        """
        _refuse_boosted(model)
        context = Context.of(self.plan, self.mesh, self.precision, self.streams, uses_own_loss=criterion is None, routing=self.routing)
        context.example, context.forward = first_batch(dataloader), self.forward
        is_cut = self.plan.acc * self.plan.num_micro * self.mesh.axis("dp", "cp").size * context.roles.rows.size > 1
        objective = Objective(model, criterion, self.forward, self.count, is_cut=is_cut, share=context.share)
        start = StartState(model, self.mesh.world, self.world.device)
        if self.plan.pp > 1:
            watchable = forward_to_watch(model, context.example, objective)
            context.stages = Stages(
                model, self.plan, self.mesh, self.world.device, context.share, watchable, self.stage_sizes, self.layer_costs
            )
        for run in PASSES:
            model = run(model, context)
        objective.reading = context.reading
        engine = self._make_engine(model, context, start, optimizer)
        training = Training(
            model,
            engine,
            objective,
            runner=context.stages.runner(objective, engine) if context.stages is not None else None,
            runs=context.stages.runs if context.stages is not None else lambda module: True,
            whole=lambda: context.whole(engine),
            world=self.mesh.world,
            counts_loss=context.counts_loss,
            cut=context.roles.rows,
            num_passes=self.plan.acc,
            clip_norm=self.clip_norm,
            norm_type=self.norm_type,
            scale=self._make_scale(),
            split=self.split,
            names=start.names,
            share=context.share,
            mixture=context.mixture,
            sequences=self._split_sequences(model, objective),
        )
        if optimizer is not None:
            training.attach_optimizer(optimizer)
        if lr_scheduler is not None:
            training.scheduler = BoostedScheduler(lr_scheduler)
        if dataloader is not None:
            dataloader = boost_loader(dataloader, axis=self.mesh.axis("dp"), seed=self.seed, world=self.mesh.world)
            self.loaders.append(dataloader)
        self.trainings.append(training)
        self._take_over_calls(training)
        _BOOSTED.update(module for module in model.modules() if module is model or module._parameters)
        return model, training.optimizer, criterion, dataloader, training.scheduler

    def launch(
        self, *, model: nn.Module, optimizer: Any = None, criterion: Any = None, dataloader: Any = None
    ) -> tuple[Any, Any, Any, Any]:
        """`boost` with four values back, for callers used to that form."""
        return self.boost(model, optimizer, criterion, dataloader)[:4]

    def _split_sequences(self, model: nn.Module, objective: Objective) -> SplitSequences | None:
        """The cut of the model's sequences over the ring and Ulysses axes; None without context parallelism."""
        axis = self.mesh.axis("cp")
        if axis.size == 1:
            return None
        ulysses_size, _ = self.plan.context_grid(num_key_heads(model))
        ring, ulysses = self.mesh.split(axis, ulysses_size, names=("ring", "ulysses"))
        place = lambda batch: to_device(batch, self.world.device)  # noqa: E731
        return SplitSequences(
            model,
            Grid(ring, ulysses),
            objective.own,
            place,
            uses_own_loss=objective.criterion is None,
            share=objective.share,
            salt=self.mesh.index("tp"),
        )

    def _make_engine(self, model: nn.Module, context: Context, start: StartState, optimizer: torch.optim.Optimizer | None) -> Any:
        blocks = context.stages.blocks if context.stages is not None else execution_blocks(model)
        data, stage, group = context.roles.data, self.plan.zero, self.plan.zero_group
        if self.plan.fsdp and data.size > 1:  # one rank has nothing to shard, whoever does it
            from phalanx.memory.fsdp import FsdpEngine

            return FsdpEngine(model, blocks, precision=self.precision, axis=data, device=self.world.device)
        if group == 1:  # shards in groups of one are whole: plain replicas
            stage, group = 0, None
        return StateEngine(
            model,
            blocks,
            stage=stage,
            precision=self.precision,
            axes_of=lambda axis: StateAxes.cut(self.mesh, axis or data, group),
            world=self.mesh.world,
            device=self.world.device,
            placements=context.placements,
            fill=start.fill,
            tiers=self._make_tiers(optimizer),
        )

    def _make_tiers(self, optimizer: torch.optim.Optimizer | None) -> Gemini | None:
        if not self.plan.gemini:
            return None
        sizes = tier_sizes(self.plan.budgets or Budgets(), self.device, self.world.local_size)
        moments = elementwise_state(optimizer) if optimizer is not None else []
        return Gemini(sizes, self.world.device, moments)

    def _make_scale(self) -> LossScale:
        options = dict(getattr(self.plugin, "scaler", None) or {})
        if not self.precision.scales_loss:
            return LossScale.constant()
        return LossScale(value=options.pop("initial_scale", START_SCALE), **_scale_options(options))

    def _take_over_calls(self, training: Training) -> None:
        engine = training.engine
        alone = engine.tiers is not None and engine.axes.shards.size == 1  # units come and go as the one rank asks for them
        take_over_calls(training, gathers=not alone and (engine.policy.parameter or self.plan.pp > 1 or self.plan.ep > 1))

    # -- training ------------------------------------------------------------------------------------------------------

    def step(self, batch: Any, model: nn.Module | None = None) -> Result:
        """One optimizer step on one global batch, of which this rank hands in its data index's rows."""
        training = self._training(model)
        training.forward_backward(batch)
        return training.step(advance=True)

    def forward_backward(self, batch: Any, model: nn.Module | None = None) -> Result:
        """The passes of `step` without its update; several calls before one `optimizer.step()` add up. Returns loss and tokens."""
        training = self._training(model)
        before = training.loss_sum.clone(), training.count.clone()
        training.forward_backward(batch)
        training.engine.seal_gradients()
        training.rhythm.visit("the loss of forward_backward")
        return training.total(torch.stack([training.loss_sum - before[0], training.count - before[1]]))

    def backward(self, loss: torch.Tensor, optimizer: BoostedOptimizer, count: Any = None) -> None:
        """Differentiates a loss of a hand-written loop.

        With `count` it is a mean over that many items; without, every call on every rank weighs the same.
        """
        training = self._training_of(optimizer)
        if training.runner is not None:
            raise ConfigError(
                "a loss of a hand-written forward, where the plan cuts the model into stages",
                allowed="booster.step, booster.forward_backward and booster.evaluate, which run the stages",
                remedy="booster.forward_backward(batch)",
            )
        if training.sequences is not None:
            raise ConfigError(
                "a hand-written forward does not see that the plan cuts sequences",
                allowed="booster.step, booster.forward_backward and booster.evaluate, which run the forward themselves",
                remedy="booster.forward_backward(batch)",
            )
        if loss.dim():
            raise ConfigError(f"the loss has shape {tuple(loss.shape)}", allowed="a scalar", remedy="loss.mean()")
        weight = torch.as_tensor(1.0 if count is None else count, dtype=torch.float64, device=training.engine.device)
        wide = loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss
        training.backward(torch.where(weight > 0, wide * weight.to(wide.dtype), torch.zeros_like(wide)), weight, training.synchronise)
        training.engine.seal_gradients()

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Backwards inside do not reduce gradients where the plan keeps whole ones; the result of the step is the same."""
        with ExitStack() as stack:
            for training in [self._training(model)] if model is not None else self.trainings:
                stack.enter_context(training.no_sync())
            yield

    def traced_step(self, batch: Any, model: nn.Module | None = None) -> tuple[Result, dict[str, Any] | None]:
        """A `step` and the times of every part of its pipeline passes, as plain values for an event; None without a pipeline. Collective.

        Of several pipelines side by side every rank gets the times of the first, so that all may cut by them. On an accelerator the step
        waits after every part.
        """
        training = self._training(model)
        if training.runner is None:
            return self.step(batch, model), None
        runner = training.runner
        runner.spans = []
        try:
            result, spans = self.step(batch, model), runner.spans
        finally:
            runner.spans = None
        own = spans[-len(runner.table.computations(runner.rank)) :]  # of the last accumulation pass
        first = own if runner.axis.ranks[0] == 0 else []
        return result, to_record(runner.table, [*itertools.chain(*comm.gather_objects(first, self.mesh.world))], runner.cut)

    def evaluate(self, batch: Any, model: nn.Module | None = None) -> Result:
        """Loss and count of a global batch, without gradients, in evaluation mode."""
        return self._training(model).evaluate(batch)

    def gradients(self, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """The full gradient of every parameter in use by name: normalised, before clipping. Collective; before `optimizer.step()`."""
        return self._training(model).gradients()

    def full_state_dict(self, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """Full weights (in full precision) and buffers by the model's own names, on every rank. Collective."""
        return saving.full_state_dict(self._training(model, trained=False))

    @contextmanager
    def gathered(self, model: nn.Module | None = None) -> Iterator[None]:
        """The whole model's parameters on every rank while inside; changes made there are not kept. Collective.

        Cost: the model's bytes in compute dtype, under a pipeline those of all stages.
        """
        with self._training(model, trained=False).gathered():
            yield

    def expert_loads(self, model: nn.Module | None = None) -> list[LayerLoad]:
        """What the experts of each layer were chosen for in training since the last call, over all ranks. Collective.

        Raises: PlanError for experts in a list where the plan cuts sequences: what fills rows up cannot be told from their tokens.
        """
        mixture = self._training(model).mixture
        return mixture.read() if mixture is not None else []

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, wait: bool = True, then: Callable[[], object] = lambda: None) -> Saving | None:
        """The whole run: weights, moments, settings, schedule, loss scale, random streams, place in the data. Collective.

        With `wait=False` it returns when this rank's part is copied on the host, and a thread writes the copy; what comes back
        tells when it is done. A save that is under way ends first, and its error is raised here. `then` is called on every rank
        once the checkpoint is complete, by whoever wrote it.
        Cost: with `wait=False` one copy of what this rank writes. Raises: ConfigError for `wait=False` under gemini's budgets.
        """
        self.finish_saving()
        if not wait:
            self._under_way = saving.save_run_beside(self, Path(path), then)
            return self._under_way
        saving.save_run(self, Path(path))
        then()
        return None

    def finish_saving(self) -> None:
        """Returns when the save that is under way, if there is one, is complete. Raises: what went wrong with it, once."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.wait()

    @contextmanager
    def saves_finished(self) -> Iterator[None]:
        """However the block ends, a save that is under way ends before; its error does not hide the one that the block raises."""
        try:
            yield
        except BaseException:
            if self._under_way is not None:
                self._under_way.settle()
            raise
        self.finish_saving()

    @contextmanager
    def noticing_sigterm(self) -> Iterator[None]:
        """SIGTERM inside no longer ends the process: the result of the step that it met says `stop_asked`, on all ranks alike."""
        with stopping.noticing():
            yield

    def load(self, path: str | Path) -> None:
        """Takes up a run that `save` wrote; raises CheckpointError where a part is missing. Collective.

        Under the number of ranks that saved, the run goes on bit for bit. Under another, random streams start anew from the seed.
        """
        self.finish_saving()
        saving.load_run(self, Path(path))

    def save_model(self, model: Any, path: str | Path | None = None, *, format: str = "huggingface") -> None:
        """Writes the model in full, by its own names: `save_model(path)` or `save_model(model, path)`. Collective."""
        chosen, target = (None, model) if path is None else (model, path)
        saving.save_model(self._training(chosen, trained=False), Path(target), format, self.mesh.world)

    def load_model(self, model: Any, path: str | Path | None = None) -> None:
        """Loads weights alone, from `save_model` or a `transformers` directory. Collective."""
        chosen, source = (None, model) if path is None else (model, path)
        saving.load_model(self._training(chosen, trained=False), Path(source), self.mesh.world)

    def save_optimizer(self, optimizer: BoostedOptimizer, path: str | Path) -> None:
        """Writes the optimizer's state and settings. Collective."""
        saving.save_optimizer(self._training_of(optimizer), Path(path), self.mesh.world)

    def load_optimizer(self, optimizer: BoostedOptimizer, path: str | Path) -> None:
        saving.load_optimizer(self._training_of(optimizer), Path(path), self.mesh.world)

    def save_lr_scheduler(self, lr_scheduler: BoostedScheduler, path: str | Path) -> None:
        saving.save_state(lr_scheduler.inner.state_dict(), Path(path), self.mesh.world)

    def load_lr_scheduler(self, lr_scheduler: BoostedScheduler, path: str | Path) -> None:
        lr_scheduler.inner.load_state_dict(saving.load_state(Path(path), self.mesh.world))

    # -- finding what is meant -----------------------------------------------------------------------------------------

    def _training(self, model: nn.Module | None, trained: bool = True) -> Training:
        if not self.trainings:
            raise ConfigError("nothing was boosted yet", remedy="model, optimizer, *_ = booster.boost(model, optimizer)")
        if model is not None:
            for training in self.trainings:
                if training.model is model:
                    return training
            raise ConfigError("this model was not boosted by this booster", remedy="the model that booster.boost returned")
        candidates = [training for training in self.trainings if training.optimizer is not None] or self.trainings
        if len(candidates) > 1:
            raise ConfigError(
                f"{len(candidates)} models are trained by this booster", allowed="naming one", remedy="booster.step(batch, model)"
            )
        return candidates[0]

    def _training_of(self, optimizer: Any) -> Training:
        for training in self.trainings:
            if training.optimizer is not None and optimizer in (training.optimizer, training.optimizer.inner):
                return training
        raise ConfigError("this optimizer was not boosted by this booster", remedy="the optimizer that booster.boost returned")


def _refuse_boosted(model: nn.Module) -> None:
    if any(module in _BOOSTED for module in model.modules()):
        which = "this model" if model in _BOOSTED else "a part of this model"
        raise ConfigError(f"{which} was boosted already", allowed="each model once", remedy="what the first booster.boost returned")


def _plan_and_plugin(plan: Any, plugin: Any) -> tuple[Plan, Any]:
    if plan is not None and plugin is not None:
        raise ConfigError("both a plan and a plugin were given", allowed="one of them", remedy='Booster("zero2")')
    if hasattr(plan, "plan"):
        plan, plugin = None, plan
    if plugin is not None:
        return plugin.plan, plugin
    return Plan.of("zero0" if plan is None else plan), None


def _scale_options(options: dict[str, Any]) -> dict[str, Any]:
    """The loss scale's settings from the names that plugins use for them."""
    names = {"growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "growth_interval", "min_scale": "minimum"}
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise ConfigError(f"loss scale setting {unknown[0]!r} has no effect", allowed=", ".join(names))
    return {names[name]: value for name, value in options.items()}
