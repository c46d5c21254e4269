"""From text or token files to this rank's rows of every step, in one global order."""
