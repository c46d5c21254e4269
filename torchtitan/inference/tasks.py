"""Running tasks of lm-eval and reading their results."""

import inspect
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from torchtitan.data.encode.tokenizer import Tokenizer
from torchtitan.parallel import agree
from torchtitan.utils.errors import UserError, did_you_mean
from torchtitan.utils.torch_compat import replaced

if TYPE_CHECKING:
    from torchtitan.inference.lm_eval_model import Logits

SEED = 1234
"""Chooses the examples of few-shot tasks, as in lm-eval."""


class Tasks:
    """Loaded tasks, to run on a model any number of times. All ranks make the same calls."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        include_path: str | None = None,
        num_fewshot: int | None = None,
        limit: int | None = None,
        chat: bool = False,
    ):
        """
        Args:
            names: names of tasks, groups or tags.
            include_path: folder of further task files.
            num_fewshot: solved examples before each question; None: each task's own number.
            limit: documents of each task.
            chat: ask by the tokenizer's chat template; few-shot examples are earlier turns.

        Raises:
            UserError: an unknown name, or a task that can't be loaded.
        """
        self.names = names
        self.include_path = include_path
        self.num_fewshot = num_fewshot
        self.limit = limit
        self.chat = chat
        for turn in range(2):  # rank 0 alone fills the cache of data sets
            problem = None
            if (dist.get_rank() == 0) == (turn == 0):
                try:
                    with _keep_random_state(), _read_all_columns():
                        self.tasks = self._load()
                except UserError as error:
                    problem = str(error)
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
            for message in agree.problems_from_all(problem):
                if message:
                    raise UserError(f"lm-eval can't load {', '.join(names)}: {message}")

    def _load(self) -> dict[str, Any]:
        # It warns about every default of a task, on every rank.
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        from lm_eval.tasks import TaskManager

        # lm-eval's own tasks are 15,000 files, which need seconds to index.
        manager = None
        if self.include_path:
            manager = TaskManager(include_path=self.include_path, include_defaults=False)
        if manager is None or not all(manager.match_tasks([name]) for name in self.names):
            manager = TaskManager(include_path=self.include_path)
        for name in self.names:
            if not manager.match_tasks([name]):
                raise UserError(f"no task {name!r}{did_you_mean(name, manager.all_tasks) or ''}")
        tasks: dict[str, Any] = manager.load(list(self.names))
        for task in tasks["tasks"].values():
            fewshot = task.get_config("num_fewshot")
            if self.num_fewshot is not None and fewshot != 0:  # a task with 0 insists on it
                task.set_config(key="num_fewshot", value=self.num_fewshot)
            elif fewshot is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEED)
        return tasks

    def run(
        self, logits: "Logits", tokenizer: Tokenizer, *, bootstrap: int = 0, by_file: bool = False
    ) -> dict[str, Any]:
        """Results as lm-eval returns them, the same on every rank.

        Args:
            logits: reads the model.
            by_file: add the special tokens that the tokenizer's files ask for instead of
                training's.
            bootstrap: samples for the errors of metrics that aren't a mean; 0: they have none.
        """
        from lm_eval import evaluator_utils
        from lm_eval.api import task
        from lm_eval.api.metrics import acc_all, acc_all_stderr, mean, mean_stderr
        from lm_eval.evaluator import evaluate

        from torchtitan.inference.lm_eval_model import HarnessModel

        closed_forms = {mean: mean_stderr, acc_all: acc_all_stderr}
        without_bootstrap = {
            "stderr_for_metric": lambda metric, bootstrap_iters: closed_forms.get(metric)
        }
        with (
            _keep_random_state(),
            replaced(task, tqdm=lambda items, **_: items),  # no progress bar for each rank
            replaced(evaluator_utils, **({} if bootstrap else without_bootstrap)),
        ):
            random.seed(0)
            np.random.seed(SEED)
            results = evaluate(
                HarnessModel(logits, tokenizer, by_file=by_file, chat=self.chat),
                self.tasks,
                limit=self.limit,
                apply_chat_template=self.chat,
                fewshot_as_multiturn=self.chat,
                bootstrap_iters=bootstrap or 1,
                log_samples=False,
            )
        assert results is not None
        return results


def scores(results: Mapping[str, Any]) -> dict[str, float]:
    """Task and metric, as `arc_easy/acc`, to its value. Any filter follows:
    `gsm8k/exact_match/strict`.
    """
    values = {}
    for task, metrics in {**results["results"], **results.get("groups", {})}.items():
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            if kind and isinstance(value, int | float):
                ending = "" if kind == "none" else f"/{kind}"
                values[f"{task}/{metric}{ending}"] = float(value)
    return values


@contextmanager
def _read_all_columns() -> Iterator[None]:
    """Make `datasets` read all columns of JSON; training reads only the text."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES, _hash_python_lines
    from datasets.packaged_modules.json import json

    original = _PACKAGED_DATASETS_MODULES["json"]
    _PACKAGED_DATASETS_MODULES["json"] = (
        json.__name__,
        _hash_python_lines(inspect.getsource(json).splitlines()),
    )
    try:
        yield
    finally:
        _PACKAGED_DATASETS_MODULES["json"] = original


@contextmanager
def _keep_random_state() -> Iterator[None]:
    """Restore the random state: tasks draw numbers, and training must not depend on them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
