"""The callbacks that evaluate the model: validation, samples, benchmarks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchtitan.config.sections.evals import Eval, Sampling
from torchtitan.inference import generator
from torchtitan.inference.generator import Continuation, continue_prompts
from torchtitan.inference.tasks import Tasks, scores
from torchtitan.telemetry.metrics import MetricsReporter
from torchtitan.train.callbacks import Callback, Run
from torchtitan.train.engine import Engine
from torchtitan.train.logits import Probe
from torchtitan.train.state import StepResult
from torchtitan.train.step import prepare_weights
from torchtitan.utils.activity import note, phase


def is_due(run: Run, freq: int) -> bool:
    """Whether this step is the last, or a multiple of `freq`."""
    step = run.progress.step
    return step % freq == 0 or step == run.config.training.steps


def stops_early(run: Run, result: StepResult) -> bool:
    """Whether the run ends before its last step, because it was asked to stop."""
    return result.stop and run.progress.step < run.config.training.steps


@contextmanager
def _averaged_weights(engine: Engine) -> Iterator[None]:
    """A context in which the model has the average of its weights."""
    assert engine.average is not None
    with engine.average.swap_in():
        prepare_weights(engine)
        yield
    prepare_weights(engine)


class Evaluation(Callback):
    """A callback that runs the model after some steps."""

    def due(self, run: Run, result: StepResult) -> bool:
        """Whether it runs the model after this step."""
        raise NotImplementedError


class Validate(Evaluation):
    """Computes the loss on held-out data: `[validation]`."""

    def __init__(self, engine: Engine, metrics: MetricsReporter):
        self.engine = engine
        self.metrics = metrics

    def due(self, run: Run, result: StepResult) -> bool:
        validates = self.engine.validation is not None and not stops_early(run, result)
        return validates and is_due(run, run.config.validation.freq)

    def after_step(self, run: Run, result: StepResult) -> None:
        validator = self.engine.validation
        if validator is None or not self.due(run, result):
            return
        with phase("validation", "validating"):
            records = [outcome.record() for outcome in validator.run()]
            if run.config.ema.validation:
                with _averaged_weights(self.engine):
                    average_records = [outcome.record() for outcome in validator.run()]
                for record, average_record in zip(records, average_records, strict=True):
                    record["loss_ema"] = average_record["loss"]
                    record["bits_per_byte_ema"] = average_record["bits_per_byte"]
        self.metrics.log_validation(run.progress.step, records)
        self.engine.notify("on_validation", records)

    def on_end(self, run: Run, reason: str) -> None:
        if self.engine.validation is not None:
            self.engine.validation.close()


class WriteSamples(Evaluation):
    """Writes the model's continuations of prompts: `[sampling]`."""

    def __init__(self, engine: Engine, metrics: MetricsReporter):
        self.probe = engine.probe
        self.tokenizer = engine.setup.tokenizer
        self.metrics = metrics

    def due(self, run: Run, result: StepResult) -> bool:
        config = run.config.sampling
        writes = self.probe is not None and bool(config.prompts) and not stops_early(run, result)
        return writes and is_due(run, config.freq)

    def after_step(self, run: Run, result: StepResult) -> None:
        config = run.config.sampling
        if self.probe is None or not self.due(run, result):
            return
        with phase("validation", "writing samples"):
            samples = self._write(self.probe, config, run)
        self.metrics.log_samples(run.progress.step, samples)

    def _write(self, probe: Probe, config: Sampling, run: Run) -> list[dict[str, Any]]:
        tokenizer = self.tokenizer
        prompts = [tokenizer.encode(text, bos=True) or tokenizer.ends for text in config.prompts]
        rows: list[Continuation] = []
        for first in range(0, len(prompts), probe.batch):
            rows += continue_prompts(
                prompts[first : first + probe.batch],
                lambda texts: probe.next_logits(texts, tokenizer.vocab_size),
                generator.SamplingSettings(temperature=config.temperature, seed=config.seed),
                stop=tokenizer.all_ends,
                max_new_tokens=config.max_new_tokens,
                max_seq_len=probe.max_seq_len,
                device=run.device,
            )
        return [
            {"prompt": prompt, "text": row.text(tokenizer), "end": row.end}
            for prompt, row in zip(config.prompts, rows, strict=True)
        ]


class RunTasks(Evaluation):
    """Runs benchmarks of lm-eval: `[eval]`."""

    def __init__(self, engine: Engine, metrics: MetricsReporter, tasks: Tasks | None):
        self.tasks = tasks
        self.probe = engine.probe
        self.tokenizer = engine.setup.tokenizer
        self.metrics = metrics

    def due(self, run: Run, result: StepResult) -> bool:
        runs = self.tasks is not None and self.probe is not None and not stops_early(run, result)
        return runs and is_due(run, run.config.eval.freq)

    def after_step(self, run: Run, result: StepResult) -> None:
        if self.tasks is None or self.probe is None or not self.due(run, result):
            return
        with phase("validation", "running lm-eval"):
            results = self.tasks.run(self.probe, self.tokenizer)
        self.metrics.log_evals(run.progress.step, scores(results))


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
    )
