"""Train the demo tokenizer, a small byte-level BPE, on the demo text.

The text is Python's standard library, so the result depends on the version of Python, and on
nothing else.
"""

import argparse
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan.data.text.documents import DemoDocuments
from torchtitan.data.text.pieces import LLAMA3_PATTERN

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("tests/assets/tokenizer"))
    parser.add_argument("--entries", type=int, default=2048)
    options = parser.parse_args()

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.entries,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = DemoDocuments(validation=False)
    tokenizer.train_from_iterator(
        (documents[i] for i in range(len(documents))), trainer, length=len(documents)
    )
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.output / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (options.output / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    print(f"{tokenizer.get_vocab_size()} entries -> {options.output}")


if __name__ == "__main__":
    main()
