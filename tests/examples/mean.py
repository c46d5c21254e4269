"""The mean of exported models: python mean.py OUTPUT EXPORT EXPORT ..."""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

output, *exports = map(Path, sys.argv[1:])
shutil.copytree(exports[0], output)  # config.json and tokenizer
for file in output.glob("*.safetensors"):
    models = [load_file(export / file.name) for export in exports]
    mean = {}
    for name, tensor in models[0].items():
        stack = torch.stack([model[name].double() for model in models])
        mean[name] = stack.mean(0).to(tensor.dtype)
    save_file(mean, file, {"format": "pt"})
