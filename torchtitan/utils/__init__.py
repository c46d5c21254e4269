"""What every folder may use: errors, logging, signals, devices, storage, and the clock of
phases.
"""
