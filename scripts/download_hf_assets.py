"""Download a model's tokenizer, and with `--weights` its weights, from the Hugging Face hub:

    python scripts/download_hf_assets.py --repo-id meta-llama/Llama-3.1-8B

Gated models need `HF_TOKEN` in the environment. Prints the folder, for `model.hf_assets_path`.
"""

import argparse
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

TOKENIZER = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "original/tokenizer.model",
]
CONFIG = ["config.json", "generation_config.json"]
WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repo-id", required=True, help="for example meta-llama/Llama-3.1-8B")
    parser.add_argument(
        "--weights",
        action="store_true",
        help="also download the weights, to start training from them",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("assets/hf"), help="parent folder (assets/hf)"
    )
    options = parser.parse_args()
    folder = options.output / options.repo_id.rpartition("/")[2]
    patterns = TOKENIZER + CONFIG + (WEIGHTS if options.weights else [])
    try:
        snapshot_download(options.repo_id, local_dir=folder, allow_patterns=patterns)
    except (HfHubHTTPError, OSError) as error:
        print(f"error: can't download {options.repo_id}: {error}", file=sys.stderr)
        print("       Check the name and the network. Gated models need HF_TOKEN.", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
