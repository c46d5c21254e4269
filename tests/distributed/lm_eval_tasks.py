"""Tasks of our own for lm-eval: questions, texts and continuations, in files that a test writes."""

import json
import random
from pathlib import Path

_WORDS = [
    "a",
    "model",
    "reads",
    "rows",
    "of",
    "tokens",
    "every",
    "rank",
    "sees",
    "its",
    "own",
    "part",
    "one",
    "batch",
]


def _text(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(2, most)))


def write_tasks(folder: Path, documents: int = 8) -> list[str]:
    """Write the files of three tasks, and return the tasks' names.

    Some contexts are empty, end in blanks, begin with the first token's spelling, or are longer
    than any row.
    """
    rng = random.Random(1)
    folder.mkdir()
    contexts = ["", "ends in blanks  ", "<|begin_of_text|>its own start", _text(rng, 100) * 5]
    contexts += [_text(rng, 20) for _ in range(documents - len(contexts))]
    questions = [
        {
            "question": context,
            "choices": [" a", " one", " rows of tokens", _text(rng, 9)],
            "answer": i % 4,
        }
        for i, context in enumerate(contexts)
    ]
    texts = [{"text": _text(rng, most)} for most in (3, 9, 150)]
    prompts = [{"question": context or "a", "answer": " a"} for context in contexts[1:5]]
    data = (
        "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {file}\ntest_split: test\n"
    )
    tasks = {
        "own_choice": (
            questions,
            'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: '
            '"{{choices}}"\n'
            'doc_to_target: "{{answer}}"\nnum_fewshot: 0\n'
            "metric_list:\n  - metric: acc\n  - metric: acc_norm\n",
        ),
        "own_shots": (
            questions,
            'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: '
            '"{{choices}}"\n'
            'doc_to_target: "{{answer}}"\nfewshot_split: test\n'
            "metric_list:\n  - metric: acc\n",
        ),
        "own_rolling": (
            texts,
            'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
            "metric_list:\n  - metric: word_perplexity\n  - metric: byte_perplexity\n  - "
            "metric: bits_per_byte\n",
        ),
        "own_texts": (
            prompts,
            'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: '
            '"{{answer}}"\n'
            'generation_kwargs:\n  until: [" row", "\\n"]\n  max_gen_toks: 6\n  do_sample: false\n'
            "metric_list:\n  - metric: exact_match\n",
        ),
    }
    for name, (rows, task) in tasks.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data.format(file=file)}{task}")
    return list(tasks)
