"""The callbacks that evaluate the model: validation, samples, benchmarks."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torchtitan.config.sections.evals import Eval
from torchtitan.config.sections.schema import Config
from torchtitan.data.encode.prompts import encode_prompts
from torchtitan.inference import generator
from torchtitan.inference.generator import Continuation, continue_prompts
from torchtitan.inference.tasks import Tasks, scores
from torchtitan.parallel.collectives import AnyRank
from torchtitan.telemetry.metrics import MetricsReporter
from torchtitan.train.callbacks import Callback, Run
from torchtitan.train.engine import Engine
from torchtitan.train.state import StepResult
from torchtitan.train.step import prepare_weights
from torchtitan.utils.activity import note, phase
from torchtitan.utils.logging import event, logger
from torchtitan.utils.signals import StopRequest


class _StoppedError(Exception):
    """Some rank was asked to stop."""


@dataclass
class StopVote:
    """Ends an evaluation between two batches, on all ranks, once any was asked to stop.

    The last step's isn't ended: no later start would repeat it.
    """

    request: StopRequest
    engine: Engine
    batches: int = 0
    freq = 4
    """Batches between two votes; the host waits for each."""

    def __call__(self) -> None:
        self.batches += 1
        engine = self.engine
        if self.batches % self.freq == 0:
            engine.stops = AnyRank(self.request.requested, engine.device).answer()
        if engine.stops_early:
            raise _StoppedError


@contextmanager
def _averaged_weights(engine: Engine) -> Iterator[None]:
    """A context in which the model has the average of its weights."""
    assert engine.average is not None
    try:
        with engine.average.swap_in():
            prepare_weights(engine)
            yield
    finally:
        prepare_weights(engine)


class Evaluation(Callback):
    """A callback that runs the model after some steps, and gives up if the run is asked to stop."""

    activity = ""
    """Name of the evaluation, after "has been"."""

    def __init__(self, engine: Engine, metrics: MetricsReporter):
        self.engine = engine
        self.metrics = metrics

    def due(self, run: Run) -> bool:
        """Whether it runs the model after this step."""
        step = run.progress.step
        freq = self.freq(run.config)
        return freq > 0 and (step % freq == 0 or step == run.config.training.steps)

    def freq(self, config: Config) -> int:
        """Steps between two evaluations, besides the last step; 0: never."""
        raise NotImplementedError

    def evaluate(self, run: Run) -> Any:
        """Run the model."""
        raise NotImplementedError

    def record(self, run: Run, outcome: Any) -> None:
        """Record what `evaluate` returned."""
        raise NotImplementedError

    def after_step(self, run: Run, result: StepResult) -> None:
        if not self.due(run):
            return
        run.progress.settle()
        if not run.stops_early:
            with suppress(_StoppedError):
                with phase("validation", self.activity):
                    outcome = self.evaluate(run)
                self.record(run, outcome)
                return
        step = run.progress.step
        logger.info(
            f"Asked to stop: step {step} ends without {self.activity}",
            extra=event("unevaluated", step),
        )


class Validate(Evaluation):
    """Computes the loss on held-out data: `[validation]`."""

    activity = "validating"

    def freq(self, config: Config) -> int:
        return config.validation.freq if self.engine.validation is not None else 0

    def evaluate(self, run: Run) -> list[dict[str, Any]]:
        validator = self.engine.validation
        assert validator is not None
        records = [outcome.record() for outcome in validator.run()]
        if run.config.ema.validation:
            with _averaged_weights(self.engine):
                average_records = [outcome.record() for outcome in validator.run()]
            for record, average_record in zip(records, average_records, strict=True):
                for key in ("loss", "bits_per_byte"):
                    record[f"{key}_ema"] = average_record[key]
        return records

    def record(self, run: Run, outcome: list[dict[str, Any]]) -> None:
        self.metrics.log_validation(run.progress.step, outcome)
        run.progress.validation = {each["name"]: each["loss"] for each in outcome}
        self.engine.notify("on_validation", outcome)

    def on_end(self, run: Run, reason: str) -> None:
        if self.engine.validation is not None:
            self.engine.validation.close()


class WriteSamples(Evaluation):
    """Writes the model's continuations of prompts: `[sampling]`."""

    activity = "writing samples"

    def __init__(self, engine: Engine, metrics: MetricsReporter):
        super().__init__(engine, metrics)
        config = engine.config.sampling
        tokenizer = engine.setup.tokenizer
        self.prompts = list(
            encode_prompts(config.prompts, tokenizer, "sampling.chat", chat=config.chat)
        )

    def freq(self, config: Config) -> int:
        return config.sampling.freq if config.sampling.prompts else 0

    def evaluate(self, run: Run) -> list[dict[str, Any]]:
        config = run.config.sampling
        probe = self.engine.probe
        assert probe is not None
        tokenizer = self.engine.setup.tokenizer
        prompt_texts, prompts = zip(*self.prompts, strict=True)
        rows: list[Continuation] = []
        for first in range(0, len(prompts), probe.batch):
            rows += continue_prompts(
                prompts[first : first + probe.batch],
                lambda texts, _: probe.next_logits(texts, tokenizer.vocab_size),
                generator.SamplingSettings(temperature=config.temperature, seed=config.seed),
                stop=tokenizer.all_ends,
                max_new_tokens=config.max_new_tokens,
                max_seq_len=probe.max_seq_len,
                device=run.device,
            )
        return [
            {"prompt": prompt, "text": row.text(tokenizer), "end": row.end}
            for prompt, row in zip(prompt_texts, rows, strict=True)
        ]

    def record(self, run: Run, outcome: list[dict[str, Any]]) -> None:
        self.metrics.log_samples(run.progress.step, outcome)


class RunTasks(Evaluation):
    """Runs benchmarks of lm-eval: `[eval]`."""

    activity = "running lm-eval"

    def __init__(self, engine: Engine, metrics: MetricsReporter, tasks: Tasks | None):
        super().__init__(engine, metrics)
        self.tasks = tasks

    def freq(self, config: Config) -> int:
        return config.eval.freq if self.tasks is not None else 0

    def evaluate(self, run: Run) -> Any:
        assert self.tasks
        assert self.engine.probe
        return self.tasks.run(self.engine.probe, self.engine.setup.tokenizer)

    def record(self, run: Run, outcome: Any) -> None:
        self.metrics.log_evals(run.progress.step, scores(outcome))


def load_tasks(section: Eval) -> Tasks | None:
    """Load the tasks of lm-eval, early because they may not exist; None without `eval.enable`."""
    if not section.enable:
        return None
    note("loading tasks of lm-eval")
    return Tasks(
        section.tasks,
        include_path=section.include_path,
        num_fewshot=section.num_fewshot,
        limit=section.limit,
        chat=section.chat,
    )
