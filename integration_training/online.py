"""What online learning has around RL's steps: a stream of prompts in place of rows, an average of the policy
that follows each step, and publications of it behind a canary.

before a batch   average ← policy of the step before; a sign of collapse that stops learning does so
a step's row     signs of collapse ─► learning rate, or a stop before the next batch
every eval_every the average answers the held-out prompts ─► published, or refused ─► stop after several
"""

import sys
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio

from integration_training.evaluations import evaluate_weights, is_evaluated
from integration_training.opening import Run, Stage, accuracy_key
from rollouts.checkpoints.follow import Publisher, list_publications, open_publisher
from rollouts.config.online import OnlineConfig
from rollouts.config.rollout import is_address
from rollouts.data.chat import tokenize_prompt
from rollouts.data.datasets import find_asked_prompts, name_sources
from rollouts.data.rows import Row, parse_tools
from rollouts.engines.local import open_local_engine
from rollouts.errors import DataError, InfrastructureError, LearningStopped
from rollouts.inspect.terminal import say
from rollouts.loops.algorithm import LoopState
from rollouts.online.buffer import ExperienceBuffer
from rollouts.online.guardrails import Guardrails
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.processes.process import open_process
from rollouts.protocols import InferenceEngine
from rollouts.reference.moving import MovingReference, UpdateRule, open_moving_reference
from rollouts.trackers.sink_alerts import check_rule
from rollouts.types import Numbers, live
from rollouts.weight_sync.snapshots import export_snapshot

SERVED = "served"  # the folder of the average in a checkpoint, and the name of its evaluations
SLOWED = 0.1  # of the learning rate, while a sign says so
STDIN = "-"


@live
class Online:
    """Made by open_online."""

    run: Run
    opened: Stage
    config: OnlineConfig
    loop: LoopState  # of RL
    buffer: ExperienceBuffer
    guardrails: Guardrails
    average: MovingReference  # of the policy
    engine: InferenceEngine  # that generates with it
    publisher: Publisher
    why: str = ""  # learning is to stop

    async def begin_batch(self) -> None:
        """Brings the average up to date. Raises LearningStopped where a sign of collapse has said so."""
        backend = self.opened.backend
        await self.average.update(backend, step=backend.weight_version)
        if self.why:
            await self._stop(backend.weight_version, self.why)

    def note_row(self, stage: str, step: int, metrics: Numbers) -> None:
        """Looks for signs of collapse in the row of a step."""
        row, slows = {"stage": stage, "step": step, **metrics}, False
        for sign in self.config.signs:
            state = self.guardrails.rules.setdefault(f"{sign.metric} {sign.rule}", {"holds": False})
            found = check_rule(sign, row, state)
            began = found and not state["holds"]
            state["holds"] = state["holds"] if found is None else found
            slows |= state["holds"] and sign.action == "slow"
            if began:
                text = f"{sign.metric} is {metrics.get(sign.metric, 'absent')}: {sign.rule}"
                say(f"rl step {step}: {text} ({sign.action})")
                self.why = self.why or (text if sign.action == "stop" else "")
        self.loop.lr_factor = SLOWED if slows else 1.0

    async def publish(self, step: int) -> None:
        """Publishes the average after a step, or refuses to, by its accuracy on the held-out prompts. Raises
        LearningStopped where a sign of collapse has said so, and after max_refused in a row, when the best
        that is kept is published again.
        """
        if self.why:
            await self._stop(step, self.why)
        await self.average.update(self.opened.backend, step=step)
        metrics = await evaluate_weights(self.run, self.opened, self.engine, "rl", step, SERVED)
        accuracy, guardrails = metrics[accuracy_key(self.run.config, SERVED)], self.guardrails
        log = partial(self.run.logger.log_words, "rl", step)
        if guardrails.judge(accuracy):
            write = partial(export_snapshot, self.average, model_dir=self.run.base_model)
            done = await self.publisher.publish(write, step)
            guardrails.note_published(accuracy, step)
            await log(f"publication {done.publication}: the average of {step} steps, accuracy {accuracy:.3f}")
            return
        text = f"accuracy {accuracy:.3f} is more than {self.config.max_fall:g} below {guardrails.best:.3f}"
        await log(f"refused: the average of {step} steps; {text}")
        say(f"rl step {step}: not published, {text}")
        if guardrails.stops:
            kept = await trio.to_thread.run_sync(list_publications, self.publisher.folder)
            known = [one for one in kept if str(one.weight_version) in guardrails.accuracies]
            best = max(known, key=lambda one: guardrails.accuracies[str(one.weight_version)], default=None)
            if best and best.weight_version != kept[0].weight_version:
                done = await self.publisher.publish_again(best.publication)
                await log(f"publication {done.publication}: rollback to {done.snapshot}, the best")
            await self._stop(step, f"{guardrails.refused} candidates in a row were refused")

    async def _stop(self, step: int, why: str) -> None:
        await self.run.logger.log_words("rl", step, f"learning stops: {why}")
        raise LearningStopped(
            f"{why}; the last complete step is saved, and what was published stays. Look at the samples; go"
            " on with --resume, or begin again from an earlier checkpoint"
        )

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Inside, prompts arrive; where that is due, the average is published first. A run that stopped for
        what was refused, and is resumed, goes on: somebody has looked.
        """
        completed = self.opened.completed
        if not completed % self.opened.section.eval_every:
            is_judged = is_evaluated(self.run, "rl", completed, SERVED)
            try:
                await self.publish(completed)
            except LearningStopped:
                if not is_judged:
                    raise
                self.guardrails.refused = 0
        async with open_plain_nursery() as nursery:
            for one in self.opened.section.data:
                if one.path == STDIN:
                    nursery.start_soon(self._copy_stdin)
                elif is_address(one.path):
                    nursery.start_soon(self._serve, one.path)
            await nursery.start(self.buffer.follow)
            yield
            nursery.cancel_scope.cancel()

    async def _copy_stdin(self) -> None:
        """Standard input as a file of the run, where a resumed run reads on."""
        folder = self.run.run_dir.stdin
        await trio.to_thread.run_sync(partial(folder.mkdir, exist_ok=True))
        with (folder / f"{self.run.logger.attempt:06d}.jsonl").open("ab", buffering=0) as file:
            read = sys.stdin.buffer.readline
            while line := await trio.to_thread.run_sync(read, abandon_on_cancel=True):
                file.write(line if line.endswith(b"\n") else line + b"\n")
        self.buffer.is_closed = all(one.path == str(folder) for one in self.buffer.streams.values())

    async def _serve(self, address: str) -> None:
        """Answers there with what is published, in a process of its own, which keeps what it is asked."""
        run_dir, url = self.run.run_dir, urllib.parse.urlsplit(address)
        where = ["--host", str(url.hostname), "--port", str(url.port)]
        log, words = run_dir.engine_logs / "serve.log", ["-m", "rollouts", "serve", str(run_dir.root), *where]
        await trio.to_thread.run_sync(partial(log.parent.mkdir, exist_ok=True))
        async with open_process([sys.executable, *words], log=log, grace_s=10.0) as process:
            await process.wait_ended()
        raise InfrastructureError(f"what answered at {address} has ended; see {log}, and go on with --resume")

    def end(self) -> None:
        """Nothing is left to learn from."""
        say("every prompt was drawn, and no more come")
        self.run.stop.request()


def check_prompt(run: Run, engine: InferenceEngine, row: Row) -> None:
    """Raises DataError or ModelError for a prompt that the chat template refuses, or that does not fit."""
    params, new = run.config.model.template_params, run.config.rollout.max_new_tokens
    tools, context = parse_tools(row.get("tools")), engine.features.context_length
    count = len(tokenize_prompt(row["prompt"], run.tokenizer, params=params, tools=tools))
    if count + new > context:
        raise DataError(f"{count} tokens, with max_new_tokens={new} more than the context of {context}")


@asynccontextmanager
async def open_online(run: Run, opened: Stage, loop: LoopState) -> AsyncIterator[Online | None]:
    """What [online] asks for; None without. Buffer and guardrails are to be loaded where it goes on."""
    config, section, backend = run.config.online, opened.section, opened.backend
    if not config:
        yield None
        return
    named = dict(zip(name_sources(section.data), section.data, strict=True))
    streams = {name: one for name, one in named.items() if one.kind == "stream"}
    for name, one in streams.items():
        own = {STDIN: run.run_dir.stdin}.get(one.path) or (is_address(one.path) and run.run_dir.asked)
        if own:
            streams[name] = one.model_copy(update={"path": str(own)})
    buffer = ExperienceBuffer(
        config=config,
        streams=streams,
        rows={one.name: one.good for one in run.rows.training["rl"].sources},
        log=run.run_dir.stream_log,
        step=lambda: backend.weight_version + 1,
        seed=run.config.seed,
        say=say,
        held_out=frozenset(next(find_asked_prompts(row)) for row in run.rows.held_out),
        check=partial(check_prompt, run, opened.engine),
    )
    saved = opened.newest and opened.newest / SERVED
    async with (
        open_moving_reference(
            saved if saved and saved.is_dir() else opened.start,
            rule=UpdateRule(1 - config.decay),
            **opened.scoring,
        ) as average,
        open_local_engine(
            average.trained,
            device_thread=backend.device_thread,
            mode="shared",
            trainer_version=lambda: backend.weight_version,
            max_rows=run.config.engine.max_rows,
            deterministic=run.config.deterministic,
            seed=run.config.seed,
            autocast_dtype=backend.autocast_dtype,
            tokenizer=run.tokenizer,
        ) as engine,
    ):
        publisher = await open_publisher(run.run_dir.published, keep=config.keep)
        online = Online(run, opened, config, loop, buffer, Guardrails(config), average, engine, publisher)
        buffer.end, buffer.is_closed = online.end, not streams
        yield online
