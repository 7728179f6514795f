"""The training loop: what every rank does, from the text to the saved model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from phalanx.booster import Booster
from phalanx.cluster import comm
from phalanx.cluster.launch import launch
from phalanx.data import boost_loader
from phalanx.data.windows import TokenWindows
from phalanx.log import events, set_rank
from phalanx.materialize import materialize
from phalanx.parallel.expert.load import LayerLoad
from phalanx.parallel.expert.routing import Routing
from phalanx.train.evaluate import Score, score
from phalanx.train.folder import Folder
from phalanx.train.memory import StepMemory, TensorCount, predicted_memory
from phalanx.train.meter import Meter
from phalanx.train.model import build_config, build_hollow, build_model, build_optimizer
from phalanx.train.progress import Display
from phalanx.train.recipe import Recipe, recipe_table
from phalanx.train.schedule import warmup_cosine
from phalanx.train.stage_memory import predicted_in_stages
from phalanx.train.text import END, Corpus, encode, export_tokenizer, read_corpus, tokenizer_for

WATCHED_STEP = 2  # of every run: its memory is counted; the optimizer's state exists by then


@dataclass(kw_only=True)
class Job:
    """One rank's part of a training run, ready to step."""

    recipe: Recipe
    folder: Folder
    booster: Booster
    training: Iterable[Any]
    validation: Iterable[Any]
    validation_bytes: int
    token_rows: tuple[torch.Tensor, torch.Tensor]
    tokenizer: Tokenizer
    display: Display
    meter: Meter
    num_parameters: int
    predicted: StepMemory
    measured: StepMemory | None = None
    loads: list[LayerLoad] = field(default_factory=list)


def train(recipe: Recipe, *, resume: bool = False) -> bool:
    """Trains as the recipe says, as one rank of the job; the folder was prepared before. False: SIGTERM came, and it can be resumed.

    Leaves `events.jsonl`, checkpoints, the model in the form of transformers, and `summary.json`.
    """
    world = launch()
    set_rank(world.rank, world.size)
    job = build_job(recipe, visible=world.rank == 0)
    step = begun = restore(job) if resume else 0
    if world.rank == 0:  # the numbers of a step are the same on every rank
        events.open(job.folder.events, recipe.name, world.rank)
    events.emit("run", "resume" if begun else "start", step=step, recipe=recipe_table(recipe), plan=str(job.booster.plan), world=world.size)
    stopped = False
    with job.display, job.booster.noticing_sigterm(), job.booster.saves_finished():
        for step, batch in count_steps(job.training, begun, recipe.steps.total):
            watched = step == min(begun + WATCHED_STEP, recipe.steps.total)
            traced = step == min(begun + WATCHED_STEP + 1, recipe.steps.total)
            run = watched_step if watched else traced_step if traced else plain_step
            result = run(job, batch)
            job.meter.add(step, result)
            if stopped := result.stop_asked:
                break
            after_step(job, step)
        stop(job, step) if stopped else finish(job, step)
    events.emit("run", "stop" if stopped else "end", step=step)
    events.close()
    return not stopped


def build_job(recipe: Recipe, *, visible: bool) -> Job:
    """Everything from the text to the boosted model; collective over all ranks."""
    routing = Routing(**{**asdict(recipe.routing), "capacity": recipe.routing.capacity or None})
    booster = Booster(
        recipe.run.plan,
        clip_norm=recipe.optimizer.clip_norm or None,
        routing=routing,
        layer_costs=recipe.run.layer_costs or None,
        seed=recipe.run.seed,
    )
    corpus, folder = read_corpus(recipe), Folder(recipe.folder())
    tokenizer = shared_tokenizer(recipe, corpus, folder, booster)
    token_rows = encode(tokenizer, corpus.training), encode(tokenizer, corpus.validation)
    config = build_config(recipe.model, tokenizer.get_vocab_size(), tokenizer.token_to_id(END))
    model = build_model(config, recipe.run.seed)
    if booster.plan.fsdp:  # PyTorch's engine cuts up what exists
        materialize(model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    predicted = predict_memory(recipe, booster, build_hollow(config))
    training = boost_model(booster, model, recipe, token_rows[0])
    windows = TokenWindows(token_rows[1], recipe.batch.tokens)
    validation = boost_loader(DataLoader(windows, batch_size=recipe.batch.rows), axis=booster.mesh.axis("dp"), world=booster.mesh.world)
    return Job(
        recipe=recipe,
        folder=folder,
        booster=booster,
        training=training,
        validation=validation,
        validation_bytes=corpus.validation_bytes,
        token_rows=token_rows,
        tokenizer=tokenizer,
        display=Display(recipe.steps.total, visible),
        meter=Meter(),
        num_parameters=num_parameters,
        predicted=predicted,
    )


def predict_memory(recipe: Recipe, booster: Booster, hollow: torch.nn.Module) -> StepMemory:
    """What this rank will keep and reach."""
    plan, world = booster.plan, booster.world.size
    if plan.pp > 1:
        return predicted_in_stages(hollow, recipe.batch, plan, world, booster.mesh.index("pp"), booster.layer_costs)
    return predicted_memory(hollow, recipe.batch, plan, world)


def boost_model(booster: Booster, model: torch.nn.Module, recipe: Recipe, tokens: torch.Tensor) -> Iterable[Any]:
    """Hands model, optimizer, schedule and data to the booster; returns the loader of this rank's rows."""
    settings = recipe.optimizer
    optimizer = build_optimizer(model, settings)
    factor = warmup_cosine(recipe.steps.total, settings.warmup_steps, settings.final_fraction)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    loader = DataLoader(TokenWindows(tokens, recipe.batch.tokens), batch_size=recipe.batch.rows, shuffle=True)
    return booster.boost(model, optimizer, None, loader, scheduler)[3]


def shared_tokenizer(recipe: Recipe, corpus: Corpus, folder: Folder, booster: Booster) -> Tokenizer:
    """The tokenizer that rank 0 trained or found, on every rank."""
    world = booster.mesh.world
    text = tokenizer_for(corpus.training, recipe.text.vocabulary, folder.root).to_str() if world.index == 0 else None
    return Tokenizer.from_str(comm.broadcast_object(text, world))


def count_steps(loader: Iterable[Any], first: int, last: int) -> Iterator[tuple[int, Any]]:
    """Yields (step, batch) for the steps after `first` up to `last`, through as many epochs as that takes."""
    step = first
    while step < last:
        for batch in loader:
            step += 1
            yield step, batch
            if step == last:
                return


def plain_step(job: Job, batch: Any) -> Any:
    return job.booster.step(batch)


def traced_step(job: Job, batch: Any) -> Any:
    """A step whose parts in a pipeline are timed."""
    result, record = job.booster.traced_step(batch)
    if record is not None:
        events.emit("pipeline", "trace", **record)
    return result


def watched_step(job: Job, batch: Any) -> Any:
    """A step whose tensors are counted, so without the copy of a checkpoint beside it."""
    job.booster.finish_saving()
    with TensorCount(ignored=job.token_rows) as count:
        result = job.booster.step(batch)
    job.measured = count.measured()
    return result


def after_step(job: Job, step: int) -> None:
    """What is due after a step: events and a line, validation, a checkpoint. The end of the run has its own."""
    every = job.recipe.steps
    last = step == every.total
    if step % every.log_every == 0 or last:
        job.display.step(step, job.meter.report())
        job.loads = report_loads(job, step) or job.loads
    else:
        job.display.step(step)
    if every.evaluate_every and step % every.evaluate_every == 0 and not last:
        evaluate(job, step)
    if every.save_every and step % every.save_every == 0 and not last:
        save(job, step)


def report_loads(job: Job, step: int) -> list[LayerLoad]:
    """Events of what the experts of each layer were chosen for since the last report; none without experts."""
    with job.meter.paused():
        loads = job.booster.expert_loads()
    for load in loads:
        events.emit("experts", load.name, load.entropy, step=step, chosen=load.chosen, dropped=load.dropped)
    return loads


def evaluate(job: Job, step: int) -> Score:
    """Validation over all held-out text; the same on every rank."""

    def loss_of(batch: Any) -> tuple[float, int]:
        result = job.booster.evaluate(batch)
        return result.loss, result.tokens

    with job.meter.paused():
        found = score(loss_of, job.validation, job.validation_bytes)
    events.emit("evaluate", "bits_per_byte", found.bits_per_byte, step=step, loss=found.loss, tokens=found.tokens)
    job.display.say(
        f"validation at step {step}: {found.bits_per_byte:.4f} bits per byte (loss {found.loss:.4f} over {found.tokens} tokens)"
    )
    return found


def save(job: Job, step: int) -> None:
    """A checkpoint of the whole run, written beside the next steps where memory has no budget; older ones go once it is complete."""
    series, steps = job.folder.checkpoints, job.recipe.steps

    def completed() -> None:
        if job.booster.world.rank == 0:
            series.prune(step, keep_last=steps.keep_last, keep_every=steps.keep_every)
        events.emit("run", "save", step=step, path=series.path(step))

    with job.meter.paused():
        job.booster.save(series.path(step), wait=job.booster.plan.gemini, then=completed)


def stop(job: Job, step: int) -> None:
    """What is done where there is little time left: a checkpoint, and no more."""
    save(job, step)
    job.booster.finish_saving()
    job.display.say(f"asked to stop: step {step} is saved")


def restore(job: Job) -> int:
    """Continues from the newest checkpoint that is whole; returns its step, or 0 where none was saved yet."""
    step = job.folder.checkpoints.load_newest(job.booster.load, job.booster.mesh.world)
    if step is None:
        job.display.say("no checkpoint was saved yet: starting anew")
        return 0
    job.display.say(f"continuing from {job.folder.checkpoints.path(step)}")
    return step


def finish(job: Job, step: int) -> None:
    """The last validation, checkpoint and export, and the summary that the rest of the program reads."""
    found = evaluate(job, step)
    save(job, step)
    job.booster.save_model(job.folder.model, format="huggingface")
    job.booster.finish_saving()
    # A run that was complete when it was resumed has no step to measure.
    measured = asdict(job.measured) if job.measured else None
    memory = comm.gather_objects({"predicted": asdict(job.predicted), "measured": measured}, job.booster.mesh.world)
    for rank, found_there in enumerate(memory):
        events.emit("memory", "rank", rank, step=step, **found_there)
    if job.booster.world.rank == 0:
        export_tokenizer(job.tokenizer, job.folder.model)
        summary = {
            "run": job.recipe.name,
            "plan": str(job.booster.plan),
            "world": job.booster.world.size,
            "parameters": job.num_parameters,
            "steps": step,
            "validation": {"loss": found.loss, "bits_per_byte": found.bits_per_byte, "tokens": found.tokens, "bytes": found.text_bytes},
            **job.meter.summary(),
            "memory": memory,
        }
        if job.loads:
            evenness = {load.name: load.entropy for load in job.loads}
            summary["experts"] = {"entropy": evenness, "dropped": sum(load.dropped for load in job.loads)}
        job.folder.summary.write_text(json.dumps(summary, indent=2) + "\n")
