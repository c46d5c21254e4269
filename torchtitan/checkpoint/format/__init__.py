"""The files of a checkpoint: manifest, index of tensors, layout and checksums."""
